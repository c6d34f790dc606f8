"""What a request costs: `.call()` against `await handle.method.remote()` of a plain handle, and waiting in line.

Part of _variant.py: measured in a process of its own, what is compared in turns. All times are in nanoseconds.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import ray
from _detection import Worker, begin_ray

import actorsub

now_ns = time.perf_counter_ns


def ends() -> dict[str, Callable[[], Awaitable[Any]]]:
    """The same method of one actor, asked for in the ways that are compared."""
    plain = ray.remote(max_restarts=-1, num_cpus=0)(Worker).remote()
    wrapped = actorsub.wrap(plain)
    ray.get([plain.ping.remote() for _ in range(200)])
    window = wrapped.ping.options(timeout_s=60, max_in_flight=1000)
    # Of one member, so that what is measured is the group.
    group = actorsub.ReplicaGroup([wrapped])
    return {
        "plain": plain.ping.remote,
        "call": wrapped.ping.call,
        "call, deadline and window": window.call,
        "group": group.ping.call,
    }


def round_trips(turns: int, calls: int) -> dict[str, Any]:
    """One call after the other; a sample is the median of a turn."""
    begin_ray()
    makers = ends()
    found: dict[str, list[float]] = {name: [] for name in makers}

    async def turn() -> dict[str, float]:
        taken: dict[str, list[int]] = {name: [] for name in makers}
        for i in range(calls):
            for name in [*makers] if i % 2 else [*makers][::-1]:
                begin = now_ns()
                await makers[name]()
                taken[name].append(now_ns() - begin)
        return {name: statistics.median(values) for name, values in taken.items()}

    async def run() -> None:
        for number in range(turns + 5):
            for name, value in (await turn()).items():
                if number >= 5:
                    found[name].append(value)

    asyncio.run(run())
    ray.shutdown()
    return {"samples": found}


def throughput(turns: int, calls: int) -> dict[str, Any]:
    """`n` coroutines that call again as soon as they have a result; a sample is the time for one call of a turn."""
    begin_ray()
    makers = ends()
    found: dict[str, dict[str, list[float]]] = {str(n): {name: [] for name in makers} for n in (1, 64, 512)}

    async def caller(make: Callable[[], Awaitable[Any]], count: int) -> None:
        for _ in range(count):
            await make()

    async def turn(n: int, make: Callable[[], Awaitable[Any]]) -> float:
        each = max(1, calls // n)
        begin = now_ns()
        await asyncio.gather(*(caller(make, each) for _ in range(n)))
        return (now_ns() - begin) / (each * n)

    async def run() -> None:
        for number in range(turns + 2):
            for n, samples in found.items():
                for name in [*makers] if number % 2 else [*makers][::-1]:
                    value = await turn(int(n), makers[name])
                    if number >= 2:
                        samples[name].append(value)

    asyncio.run(run())
    ray.shutdown()
    return {"samples": found}


def waiting(line: int, probes: int, kept: int) -> dict[str, Any]:
    """How late deadlines are with `line` calls waiting, and what one of `kept` waiting calls adds to the memory."""
    begin_ray()
    # It cannot be placed, so that everything waits.
    options = {"on_pending": "wait", "max_queued": 10**7, "timeout_s": 3600}
    handle = actorsub.remote(num_cpus=0, resources={"none": 1}, **options)(Worker).remote()
    gc.collect()
    before = psutil.Process().memory_info().rss
    begin = now_ns()
    calls = [handle.ping.call() for _ in range(kept)]
    made_ns = (now_ns() - begin) / kept
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    for call in calls[line:]:
        call.cancel()
    del calls[line:]
    late: list[float] = []
    timeout_s = 0.05
    method = handle.ping.options(timeout_s=timeout_s)

    def probe() -> None:
        due_ns = now_ns() + timeout_s * 1e9
        method.call().add_done_callback(lambda _: late.append(now_ns() - due_ns))

    for _ in range(probes):
        probe()
        time.sleep(0.005)
    give_up_ns = now_ns() + 30 * 10**9
    while len(late) < probes and now_ns() < give_up_ns:
        time.sleep(0.01)
    if len(late) < probes or actorsub.stats(handle)["calls"]["waiting"] != line:
        raise RuntimeError(f"{len(late)} of {probes} deadlines passed, {actorsub.stats(handle)['calls']}")
    ray.shutdown()
    return {"late": late, "bytes": grown / kept, "made_ns": made_ns}
