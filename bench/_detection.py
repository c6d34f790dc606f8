"""How soon a caller knows that an actor is down, and what knowing costs while it is up. Run by _variant.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pathlib
import select
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

import actorsub

now_ns = time.perf_counter_ns
PATIENCE_S = 60.0


class Worker:
    """Comes back at once. `ballast_mb` of memory is resident from the start."""

    def __init__(self, ballast_mb: int = 0) -> None:
        self._ballast = b"x" * (ballast_mb << 20)

    def ping(self) -> int:
        return 1

    def pid(self) -> int:
        return os.getpid()

    def hold(self, started: str) -> None:
        pathlib.Path(started).touch()
        threading.Event().wait()


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    give_up_ns = now_ns() + int(PATIENCE_S * 1e9)
    while not (value := condition()):
        if now_ns() > give_up_ns:
            raise RuntimeError(f"not within {PATIENCE_S} s: {what}")
        time.sleep(0.001)
    return value


class Target:
    """An actor to be killed, behind a plain handle or a wrapped one."""

    def __init__(
        self,
        directory: str,
        name: str,
        wrapped: bool,
        ballast_mb: int = 0,
        place: dict[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        options = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0, **(place or {})}
        plain = ray.remote(**options)(Worker).remote(ballast_mb)
        self.handle = actorsub.wrap(plain, on_unavailable="raise", **policy) if wrapped else plain
        self._plain = plain
        self._wrapped = wrapped
        self._path = os.path.join(directory, name)
        self._calls = 0
        self.pid = 0
        self.ready()

    def ready(self) -> None:
        """Waits until the next incarnation is up, and watched where something watches."""

        def is_another() -> bool:
            try:
                pid = ray.get(self.handle.pid.remote(), timeout=PATIENCE_S)
            except ray.exceptions.ActorUnavailableError:
                return False
            if pid == self.pid:
                return False
            self.pid = pid
            return True

        wait_until(is_another, "the actor is up")
        if self._wrapped:
            wait_until(lambda: actorsub.stats(self.handle)["watched"], "the sentinel watches")

    def hold(self) -> Any:
        """A call that runs now."""
        self._calls += 1
        started = f"{self._path}-{self.pid}-{self._calls}"
        ref = self.handle.hold.remote(started)
        wait_until(lambda: os.path.exists(started), "the call runs")
        return ref

    def end(self) -> None:
        ray.kill(self._plain)


class ExitClock:
    """When a process was gone, by its pidfd: what any other watcher of processes on this host could know."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._exited_ns = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        select.select([self._fd], [], [])
        self._exited_ns = now_ns()

    def read(self) -> int:
        self._thread.join()
        os.close(self._fd)
        return self._exited_ns


async def time_of_failure(ref: Any) -> int:
    try:
        await ref
    except ray.exceptions.RayActorError:
        return now_ns()
    raise RuntimeError("a call to an actor that was killed was answered")


async def await_failure(ref: Any, begin: Callable[[], Any]) -> tuple[int, int]:
    """Nanoseconds from `begin()` until the `await` that had begun before it failed; and when it began."""
    waiting = asyncio.ensure_future(time_of_failure(ref))
    await asyncio.sleep(0.005)
    began = now_ns()
    begin()
    return await waiting - began, began


def begin_ray() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def in_flight(rounds: int) -> dict[str, Any]:
    """SIGKILL of small processes: calls in flight and first refusals, with stock Ray's actor killed in between."""
    ours_ns: list[int] = []
    rays_ns: list[int] = []
    exit_ns: list[int] = []
    refusal_ns: list[int] = []
    evidence: dict[str, int] = {}
    begin_ray()
    with tempfile.TemporaryDirectory() as directory:
        ours, rays = Target(directory, "ours", True), Target(directory, "rays", False)

        async def one_round() -> None:
            # Its outcome comes on ticks 1 s apart; meanwhile the others are killed. By a callback, because this loop
            # is blocked while they come back.
            stock = rays.hold().future()
            failed: list[int] = []
            stock.add_done_callback(lambda _: failed.append(now_ns()))
            began = now_ns()
            os.kill(rays.pid, signal.SIGKILL)
            for _ in range(2):
                held = ours.hold()
                clock = ExitClock(ours.pid)
                took, killed_at = await await_failure(held, lambda: os.kill(ours.pid, signal.SIGKILL))
                ours_ns.append(took)
                exit_ns.append(clock.read() - killed_at)
                ours.ready()
            rays_ns.append(wait_until(lambda: failed, "stock Ray's call failed")[0] - began)

        for _ in range(rounds):
            asyncio.run(one_round())
            rays.ready()
            began = now_ns()
            os.kill(ours.pid, signal.SIGKILL)
            while True:
                try:
                    ours.handle.ping.remote()
                except actorsub.ActorUnavailableError as error:
                    refusal_ns.append(now_ns() - began)
                    evidence[str(error.evidence)] = evidence.get(str(error.evidence), 0) + 1
                    break
                time.sleep(0.0001)
            ours.ready()
        ray.shutdown()
    samples = {"ours": ours_ns, "rays": rays_ns, "exit": exit_ns, "refusal": refusal_ns}
    return {"samples": samples, "evidence": evidence}


def big_process(rounds: int, megabytes: int) -> dict[str, Any]:
    """The kernel frees a process's memory before anybody hears of its end."""
    taken_ns: list[int] = []
    exit_ns: list[int] = []
    begin_ray()
    with tempfile.TemporaryDirectory() as directory:
        target = Target(directory, "big", True, ballast_mb=megabytes)
        for _ in range(rounds):
            ref = target.hold()
            clock = ExitClock(target.pid)
            took, began = asyncio.run(await_failure(ref, lambda: os.kill(target.pid, signal.SIGKILL)))
            taken_ns.append(took)
            exit_ns.append(clock.read() - began)
            target.ready()
        ray.shutdown()
    return {"samples": {"in flight": taken_ns, "process exit": exit_ns}}


def node_killed(rounds: int) -> dict[str, Any]:
    """SIGKILL of all processes of a node, its raylet first; a call in flight of ours and one of stock Ray's."""
    refusal_ns: list[int] = []
    ours_ns: list[int] = []
    rays_ns: list[int] = []
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):
            # A name of its own: Ray goes on placing actors on a node that was killed a moment ago.
            name = f"node-{number}"
            node = cluster.add_node(num_cpus=1, resources={name: 2})
            ours, rays = (
                Target(directory, f"{name}-{wrapped}", wrapped, place={"resources": {name: 1}})
                for wrapped in (True, False)
            )
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            pids = [raylet.pid, *(child.pid for child in raylet.children(recursive=True))]
            stock: list[int] = []
            rays.hold().future().add_done_callback(lambda _, stock=stock: stock.append(now_ns()))
            held = ours.hold()
            refused: list[int] = []

            def watch(handle: Any = ours.handle, refused: list[int] = refused) -> None:
                # A call that is sent would load the machine; the state is what a call is refused by.
                while actorsub.state(handle) is actorsub.ActorState.ALIVE:
                    time.sleep(0.0002)
                try:
                    handle.ping.remote()
                except actorsub.ActorUnavailableError:
                    refused.append(now_ns())

            def kill(pids: list[int] = pids) -> None:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

            thread = threading.Thread(target=watch)
            thread.start()
            took, began = asyncio.run(await_failure(held, kill))
            thread.join()
            ours_ns.append(took)
            refusal_ns.append(refused[0] - began)
            rays_ns.append(wait_until(lambda stock=stock: stock, "stock Ray's call failed")[0] - began)
            ours.end()
            rays.end()
            cluster.remove_node(node, allow_graceful=False)
        ray.shutdown()
        cluster.shutdown()
    return {"samples": {"refusal": refusal_ns, "in flight": ours_ns, "in flight, stock Ray": rays_ns}}


def frozen(silence_s: float, in_flight_s: float, rounds: int) -> dict[str, Any]:
    """SIGSTOP: first refusal, and the running call."""
    refused_ns: list[int] = []
    failed_ns: list[int] = []
    begin_ray()
    with tempfile.TemporaryDirectory() as directory:
        target = Target(directory, "frozen", True, silence_timeout_s=silence_s, silence_in_flight_s=in_flight_s)
        told: list[int] = []
        actorsub.on_state_change(
            target.handle,
            lambda _, old, new, evidence: told.append(now_ns()) if new is actorsub.ActorState.UNREACHABLE else None,
        )
        for _ in range(rounds):
            told.clear()
            took, began = asyncio.run(
                await_failure(target.hold(), lambda: os.kill(target.pid, signal.SIGSTOP)),
            )
            failed_ns.append(took)
            refused_ns.append(wait_until(lambda: told, "it is unreachable")[0] - began)
            os.kill(target.pid, signal.SIGKILL)
            target.ready()
        ray.shutdown()
    return {"samples": {"refusal": refused_ns, "in flight": failed_ns}}


def live(turns: int, calls: int) -> dict[str, Any]:
    """`await handle.ping.remote()`, plain and wrapped call by call in turns, against one actor."""
    found: dict[str, list[float]] = {"plain": [], "wrapped": []}
    begin_ray()
    plain = ray.remote(max_restarts=-1, num_cpus=0)(Worker).remote()
    ends = [("plain", plain), ("wrapped", actorsub.wrap(plain))]

    async def turn() -> dict[str, float]:
        taken: dict[str, list[int]] = {name: [] for name, _ in ends}
        for i in range(calls):
            for name, end in ends if i % 2 else ends[::-1]:
                begin = now_ns()
                await end.ping.remote()
                taken[name].append(now_ns() - begin)
        return {name: statistics.median(values) for name, values in taken.items()}

    async def run() -> None:
        for number in range(turns + 10):
            for name, value in (await turn()).items():
                if number >= 10:
                    found[name].append(value)

    asyncio.run(run())
    ray.shutdown()
    return {"samples": found}


def cpu_of_our_threads() -> float:
    """Seconds of CPU time of the library's threads so far."""
    # Python names its threads to itself only, before 3.14.
    python = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("actorsub")}
    ticks = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("actorsub") or int(task.name) in python:
                ticks += sum(map(int, rest.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def idle(actors: int, handles: int, seconds: float) -> dict[str, Any]:
    """CPU and memory of this process while many wrapped handles are up and nobody calls."""
    begin_ray()
    actor_class = ray.remote(max_restarts=-1, num_cpus=0)(Worker)
    plain = []
    for _ in range(0, actors, 10):
        batch = [actor_class.remote() for _ in range(10)]
        ray.get([one.ping.remote() for one in batch], timeout=120)
        plain += batch
    process = psutil.Process()

    def share_of_a_core() -> float:
        before, began = sum(process.cpu_times()[:2]), now_ns()
        time.sleep(seconds)
        return (sum(process.cpu_times()[:2]) - before) / ((now_ns() - began) / 1e9)

    gc.collect()
    time.sleep(2)
    without = share_of_a_core()
    # One of each first, and the threads: the growth is of handles, not of a library that is loaded.
    first = [actorsub.wrap(one) for one in plain]
    wait_until(lambda: all(actorsub.stats(one)["watched"] for one in first), "all are watched")
    gc.collect()
    rss = process.memory_info().rss
    wrapped = [actorsub.wrap(one) for one in plain for _ in range(handles // actors)]
    gc.collect()
    grown = process.memory_info().rss - rss
    time.sleep(2)
    ours = cpu_of_our_threads()
    counters = actorsub.stats(first[0])["sentinel"]
    with_handles = share_of_a_core()
    ours = cpu_of_our_threads() - ours
    beats = actorsub.stats(first[0])["sentinel"]["heartbeats_sent"] - counters["heartbeats_sent"]
    found = {
        "share_without": without,
        "share_with": with_handles,
        "share_of_our_threads": ours / seconds,
        "grown_bytes": grown,
        "handles": len(wrapped),
        "actors": actors,
        "heartbeats_per_s": beats / seconds,
        "sockets": counters["sockets"],
    }
    ray.shutdown()
    return found
