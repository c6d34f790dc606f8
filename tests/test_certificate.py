"""The certificate, proved: tens of thousands of calls through kills, cancels, deadlines, full lines and windows.

The actor keeps a ledger, outside its process, of every call that it really ran. That each call ends exactly once is
counted where ends are handed out, too: a future takes its first end and keeps silent about any other.

ACTORSUB_SEED repeats a run, as far as threads and signals can be repeated.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import pathlib
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
import ray
from helpers import wait_until

import actorsub
from actorsub import Call, calls

PATIENCE_S = 90.0
CALLS = 20_000
THREADS = 3
LOOPS = 2
KILLS = 5
# Calls whose number ends like this take long.
SLOW = ("00", "50")
# Kills come while calls are under way: one each time that so many more have ended.
CALLS_PER_KILL = CALLS // (KILLS + 2)


class Ledger:
    """Runs one call at a time and writes down each, in one write to the end of a file: a kill leaves a whole line or
    none. It writes before the call counts as run, and the line names the process."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def run(self, call_id: str) -> str:
        os.write(self.file, f"{call_id} {os.getpid()}\n".encode())
        if call_id.endswith(SLOW):
            # Now and then long enough that a deadline passes for the calls behind it, and that a kill hits a call that
            # is in the ledger and has not answered.
            time.sleep(0.03)
        return call_id

    def pid(self) -> int:
        return os.getpid()


class Record:
    """What became of one call, as its caller saw it."""

    __slots__ = ("cancelled_here", "ends", "error", "handed_out", "id", "result")

    def __init__(self, call_id: str) -> None:
        self.id = call_id
        # How often a done-callback of the Call ran.
        self.ends = 0
        # Each end that the library handed to the Call, wanted or not.
        self.handed_out: list[str] = []
        self.error: Any = None
        self.result: Any = None
        self.cancelled_here = False

    @property
    def cannot_have_run(self) -> bool:
        return self.cancelled_here or (self.error is not None and not getattr(self.error, "sent", True))


class Submitter:
    """One thread that makes calls of all kinds, in an order that its seed decides."""

    def __init__(self, name: str, handle: actorsub.ActorHandle, seed: int, count: int) -> None:
        self.name = name
        self.random = random.Random(f"{seed}-{name}")
        self.count = count
        self.records: list[Record] = []
        # Refused at once, and how.
        self.raised: Counter[str] = Counter()
        self.ended = 0
        run = handle.run
        # The method objects are kept: what is under test is not how they are made.
        self.methods = [
            run.options(on_unavailable="wait", max_in_flight=4, timeout_s=30),
            run.options(on_unavailable="wait", max_in_flight=16, max_queued=50),
            run.options(on_unavailable="wait", max_in_flight=2, max_queued=400, timeout_s=0.05),
            run.options(on_unavailable="raise", max_in_flight=16),
            run.options(on_unavailable="ref"),
            run.options(on_unavailable="ref", timeout_s=0.01),
            run.options(on_unavailable="wait", timeout_s=0.003),
            run.options(on_unavailable="raise", num_returns=0, max_in_flight=64),
        ]

    def make(self, number: int) -> Call | None:
        record = Record(f"{self.name}.{number}")
        self.records.append(record)
        method = self.random.choice(self.methods)
        try:
            call = method.call(record.id)
        except (actorsub.ActorUnavailableError, actorsub.QueueFullError) as error:
            record.error = error
            record.ends = 1
            record.handed_out.append("raised")
            self.raised[type(error).__name__] += 1
            self.ended += 1
            return None

        def done(call: Call) -> None:
            record.ends += 1
            if call.cancelled():
                record.cancelled_here = True
            else:
                record.error = call.exception(0)
                record.result = None if record.error is not None else call.result(0)
            self.ended += 1

        # Before the callback, which may run here and now. An end may have been noted on another thread already.
        record.handed_out = call.__dict__.setdefault("handed_out", record.handed_out)
        call.add_done_callback(done)
        return call

    def run_in_thread(self) -> None:
        pending: list[Call] = []
        for number in range(self.count):
            call = self.make(number)
            if call is None:
                # What a polite caller does; else most calls would be refused.
                time.sleep(0.001)
                continue
            pending.append(call)
            if self.random.random() < 0.05:
                self.random.choice(pending).cancel()
            if len(pending) >= 200:
                concurrent.futures.wait(pending, timeout=PATIENCE_S)
                pending.clear()
        concurrent.futures.wait(pending, timeout=PATIENCE_S)

    def run_in_loop(self) -> None:
        asyncio.run(self._run_in_loop())

    async def _run_in_loop(self) -> None:
        pending: list[Any] = []
        for number in range(self.count):
            call = self.make(number)
            if call is None:
                await asyncio.sleep(0.001)
                continue
            chance = self.random.random()
            if chance < 0.05:
                pending.append(asyncio.wait_for(call, self.random.random() * 0.01))
            elif chance < 0.1:
                call.cancel()
            else:
                pending.append(asyncio.wrap_future(call) if chance < 0.5 else call)
            if len(pending) >= 200:
                await asyncio.gather(*pending, return_exceptions=True)
                pending.clear()
        await asyncio.gather(*pending, return_exceptions=True)


def read_ledger(path: pathlib.Path) -> list[tuple[str, str]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(line[0], line[1]) for line in lines]


def runs_a_slow_one(path: pathlib.Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 40))
        return file.read().decode().split()[-2].endswith(SLOW)


@pytest.fixture
def _ends_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the two places where a Call can end. Its callbacks say nothing of a second end, by which a promise (`sent`)
    may have been broken all the same."""
    deliver, cancel_future = calls.deliver, Call._cancel_future

    def noted_deliver(call: Any, value: Any, **options: Any) -> None:
        call.__dict__.setdefault("handed_out", []).append(f"delivered {value!r:.80}")
        deliver(call, value, **options)

    def noted_cancel(call: Any) -> None:
        call.__dict__.setdefault("handed_out", []).append("cancelled")
        cancel_future(call)

    monkeypatch.setattr(calls, "deliver", noted_deliver)
    monkeypatch.setattr(Call, "_cancel_future", noted_cancel)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_ends_are_noted")
def test_the_certificate(ray_local: None, tmp_path: pathlib.Path) -> None:
    seed = int(os.environ.get("ACTORSUB_SEED", "20261130"))
    print(f"ACTORSUB_SEED={seed}")
    path = tmp_path / "ledger"
    handle = actorsub.remote(num_cpus=0, max_restarts=-1)(Ledger).remote(str(path))
    pid = handle.pid.call().result(PATIENCE_S)
    each = CALLS // (THREADS + LOOPS)
    submitters = [Submitter(f"t{i}", handle, seed, each) for i in range(THREADS)]
    submitters += [Submitter(f"l{i}", handle, seed, each) for i in range(LOOPS)]
    # Daemons: a call that never ends holds its thread for good, which is to fail the test and not to hang the run.
    threads = [
        threading.Thread(
            target=one.run_in_thread if one.name[0] == "t" else one.run_in_loop, name=one.name, daemon=True
        )
        for one in submitters
    ]
    for thread in threads:
        thread.start()

    def ended() -> int:
        return sum(one.ended for one in submitters)

    kills = 0
    for kill in range(1, KILLS + 1):
        wait_until(
            lambda kill=kill: ended() > kill * CALLS_PER_KILL or not any(one.is_alive() for one in threads), PATIENCE_S
        )
        wait_until(lambda: runs_a_slow_one(path) or not any(one.is_alive() for one in threads), PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            kills += 1
        waiting = handle.pid.options(on_unavailable="wait", max_queued=100_000)
        for _ in range(100):
            # It may be in flight at the process that dies.
            error = (call := waiting.call()).exception(PATIENCE_S)
            if error is None and call.result() != pid:
                pid = call.result()
                break
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} is stuck"
    wait_until(lambda: actorsub.stats(handle)["calls"]["in_flight"] == 0, PATIENCE_S, "late replies are in")
    counted = actorsub.stats(handle)["calls"]
    # Of num_returns=0 nobody hears when it ran.
    handle.pid.call().result(PATIENCE_S)
    ledger = read_ledger(path)
    ray.kill(handle)

    records = {record.id: record for one in submitters for record in one.records}
    assert len(records) == CALLS - CALLS % (THREADS + LOOPS)
    assert kills == KILLS

    # Every call ended exactly once.
    assert Counter(record.ends for record in records.values()) == {1: len(records)}
    more = {record.id: record.handed_out for record in records.values() if len(record.handed_out) != 1}
    assert not more, f"{len(more)} calls, such as {dict(list(more.items())[:5])}"

    # None ran twice, and none that was said not to have run.
    ran = Counter(call_id for call_id, _ in ledger)
    assert [call_id for call_id, times in ran.items() if times > 1] == []
    broken = [call_id for call_id in ran if records[call_id].cannot_have_run]
    assert broken == [], [(call_id, records[call_id].error) for call_id in broken[:5]]
    # Whoever got a result got it from the run of that very call; of num_returns=0 the result says nothing.
    assert all(isinstance(record.error, (ray.exceptions.RayError, type(None))) for record in records.values())
    results = [record for record in records.values() if record.result is not None]
    assert [record.id for record in results if record.result != record.id or record.id not in ran] == []

    # The order of each submitting thread, within an incarnation.
    last: dict[tuple[str, str], int] = {}
    for call_id, process in ledger:
        name, number = call_id.split(".")
        key = name, process
        assert last.get(key, -1) < int(number), f"{call_id} ran in {process} after {name}.{last[key]}"
        last[key] = int(number)

    # Kills hit calls that had run: the proof above had something to find.
    assert any(records[call_id].error is not None for call_id in ran)

    # The counters.
    ends = Counter(
        "cancelled" if record.cancelled_here else "ok" if record.error is None else type(record.error).__name__
        for record in records.values()
    )
    print(dict(ends), counted)
    assert counted["waiting"] == 0
    assert counted["sent"] == counted["completed"] + counted["expired_there"] + counted["lost"]
    assert counted["cancelled"] == ends["cancelled"]
    assert counted["refused_full"] == ends["QueueFullError"]
    assert counted["expired_here"] + counted["expired_there"] == ends["DeadlineExceededError"]
    # The run was worth it: every kind of end happened, and most calls ran.
    assert counted["expired_here"] > 0
    assert counted["expired_there"] > 0
    assert counted["lost"] > 0
    for kind in ("ok", "cancelled", "ActorUnavailableError", "DeadlineExceededError", "QueueFullError"):
        assert ends[kind] > 0, kind
    assert any(record.cannot_have_run for record in records.values())
    assert any(record.error is not None and not record.cannot_have_run for record in records.values())
    assert len(ran) > CALLS // 4
