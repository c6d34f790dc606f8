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
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from helpers import wait_until, wait_until_watched
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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


# ---------------------------------------------------------------------------------------------------------------------
# How calls end, and what their errors say.


class Teller:
    """Does what the tests below need, and counts what it did."""

    def __init__(self, load_s: float = 0.0, fail: bool = False) -> None:
        time.sleep(load_s)
        if fail:
            raise ValueError("no model file")
        self.ran = 0

    def pid(self) -> int:
        return os.getpid()

    def count(self) -> int:
        return self.ran

    def give(self, make: Any, nested: bool = False) -> Any:
        self.ran += 1
        return [make()] if nested else make()

    def sleep(self, started: str) -> None:
        pathlib.Path(started).touch()
        threading.Event().wait()

    def ask(self, handle: Any) -> Any:
        return actorsub.get(handle.pid.remote(), timeout=PATIENCE_S)


class AsyncTeller:
    async def sleep(self) -> None:
        await asyncio.Event().wait()


RETURNED = {
    "ActorUnavailableError": lambda: actorsub.ActorUnavailableError("inner", sent=False),
    "ActorDiedError": lambda: actorsub.ActorDiedError(sent=False),
    "NoReplicaError": lambda: actorsub.NoReplicaError(sent=False),
    "DeadlineExceededError": lambda: actorsub.DeadlineExceededError(sent=False),
    "QueueFullError": lambda: actorsub.QueueFullError("inner"),
    "Ray's ActorDiedError": ray.exceptions.ActorDiedError,
    "Ray's ActorUnavailableError": lambda: ray.exceptions.ActorUnavailableError("inner", None),
    "Ray's TaskCancelledError": ray.exceptions.TaskCancelledError,
    "Ray's RuntimeEnvSetupError": lambda: ray.exceptions.RuntimeEnvSetupError("inner"),
}


@pytest.fixture
def tellers(ray_local: None) -> Iterator[list[Any]]:
    handles = [actorsub.remote(num_cpus=0, max_restarts=-1)(Teller).remote() for _ in range(3)]
    actorsub.get([one.pid.remote() for one in handles], timeout=PATIENCE_S)
    yield handles
    for one in handles:
        ray.kill(one)


def end_of(call: Any) -> Any:
    return call.exception(PATIENCE_S)


def test_an_error_that_a_method_returns_is_a_value(tellers: list[Any]) -> None:
    targets = [tellers[0], *[actorsub.ReplicaGroup(tellers, retry=retry) for retry in ("never", "unsent", "always")]]
    expected = 0
    for make in RETURNED.values():
        for nested in (False, True):
            for target in targets:
                expected += 1
                value = target.give.call(make, nested).result(PATIENCE_S)
                value = value[0] if nested else value
                assert type(value) is type(make())
                assert getattr(value, "sent", None) == getattr(make(), "sent", None)
    assert sum(actorsub.get([one.count.remote() for one in tellers])) == expected
    assert all(group.stats()["resent"] == group.stats()["moved"] == 0 for group in targets[1:])
    assert all(group.stats()["failed"] == {} for group in targets[1:])
    assert {one.state for one in targets[1]} == {actorsub.ActorState.ALIVE}


def test_a_ref_raises_the_error_that_a_method_returned_as_ray_does_but_not_its_certificate(tellers: list[Any]) -> None:
    handle = tellers[0]

    def by_await(ref: Any) -> Any:
        async def wait() -> Any:
            return await ref

        return asyncio.run(wait())

    def when_ready(ref: Any) -> Any:
        ray.wait([ref], timeout=PATIENCE_S)
        return actorsub.get(ref)

    ways = [by_await, when_ready, actorsub.get, lambda ref: ref.future().result(PATIENCE_S)]
    for make in RETURNED.values():
        for way in ways:
            with pytest.raises(type(make())) as caught:
                way(handle.give.remote(make))
            assert type(caught.value) is type(make())
            assert actorsub.may_have_run(caught.value)
            assert getattr(caught.value, "sent", True) is True
            assert actorsub.get(handle.give.remote(make, True))[0] is not None
    assert actorsub.state(handle) is actorsub.ActorState.ALIVE


def names_cause(error: Any) -> bool:
    return "Teller" in str(error)


def killed(started: pathlib.Path) -> tuple[Any, Any]:
    handle = actorsub.remote(num_cpus=0)(Teller).remote()
    pid = actorsub.get(handle.pid.remote(), timeout=PATIENCE_S)
    call = handle.sleep.call(str(started))
    wait_until(started.exists, PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    return handle, call


def with_a_constructor_that_raises(started: pathlib.Path) -> tuple[Any, Any]:
    handle = actorsub.remote(num_cpus=0)(Teller).remote(0.3, True)
    return handle, handle.pid.call()


@pytest.mark.parametrize("make", [killed, with_a_constructor_that_raises])
def test_every_refusal_after_a_call_that_ended_with_the_cause_names_it(
    make: Any, ray_local: None, tmp_path: pathlib.Path
) -> None:
    handle, call = make(tmp_path / "started")
    error = end_of(call)
    refused = [end_of(handle.pid.call()) for _ in range(20)]
    with pytest.raises(actorsub.ActorDiedError) as raised:
        handle.pid.options(on_unavailable="raise").remote()
    with pytest.raises(ray.exceptions.ActorDiedError) as got:
        actorsub.get(handle.pid.remote(), timeout=PATIENCE_S)
    for one in [error, *refused, raised.value, got.value]:
        assert isinstance(one, actorsub.ActorDiedError)
        assert names_cause(one)
        assert one.incarnation == 0
    assert {one.sent for one in [*refused, raised.value]} == {False}
    # A constructor that raised is an actor that never was.
    assert error.sent is (make is killed)
    assert error.actor_init_failed is (make is not killed)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_last_incarnation_is_never_said_to_restart(
    max_restarts: int, ray_local: None, tmp_path: pathlib.Path
) -> None:
    handle = actorsub.remote(num_cpus=0, max_restarts=max_restarts)(Teller).remote()
    waiting = handle.pid.options(on_unavailable="wait", timeout_s=PATIENCE_S)
    pid = waiting.call().result()
    for _ in range(max_restarts):
        os.kill(pid, signal.SIGKILL)
        while True:
            # It may be in flight at the process that dies.
            call = waiting.call()
            if end_of(call) is None and call.result() != pid:
                pid = call.result()
                break
    wait_until_watched(handle)
    held = handle.sleep.call(str(tmp_path / "started"))
    wait_until((tmp_path / "started").exists, PATIENCE_S)
    states: list[Any] = []
    actorsub.on_state_change(handle, lambda _, old, new, evidence: states.append(new))
    os.kill(pid, signal.SIGKILL)
    told = []
    wait_until(lambda: actorsub.state(handle) is not actorsub.ActorState.ALIVE)
    while not held.done() or not names_cause(told[-1]):
        told.append(end_of(handle.pid.options(on_unavailable="ref").call()))
        with pytest.raises(actorsub.ActorDiedError) as caught:
            handle.pid.options(on_unavailable="raise").remote()
        told.append(caught.value)
        with pytest.raises(ray.exceptions.ActorDiedError) as got:
            actorsub.get(handle.pid.options(on_unavailable="ref").remote(), timeout=PATIENCE_S)
        told.append(got.value)
    assert {type(one) for one in told} == {actorsub.ActorDiedError}
    assert {(one.incarnation, one.state.value) for one in told} == {(max_restarts, "dead")}
    assert isinstance(end_of(held), actorsub.ActorDiedError)
    assert (end_of(held).sent, end_of(held).incarnation) == (True, max_restarts)
    # Also those that were made before anybody here knew.
    assert all(names_cause(one) for one in [end_of(held), *told[:2]])
    wait_until(lambda: states[-1] is actorsub.ActorState.DEAD)
    assert actorsub.ActorState.RESTARTING not in states


NOWHERE = {"working_dir": "file:///nowhere/at-all.zip"}
UNBORN: dict[str, tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = {
    "runtime environment": ({"runtime_env": NOWHERE}, (), ray.exceptions.RuntimeEnvSetupError, "nowhere"),
    "constructor": ({}, (0.2, True), ray.exceptions.ActorDiedError, "no model file"),
    "node": (
        {"scheduling_strategy": NodeAffinitySchedulingStrategy("ab" * 28, soft=False)},
        (),
        ray.exceptions.ActorUnschedulableError,
        "not schedulable",
    ),
}


@pytest.mark.parametrize("why", sorted(UNBORN))
@pytest.mark.parametrize("max_restarts", [0, -1])
def test_calls_of_an_actor_that_never_was_cannot_have_run(why: str, max_restarts: int, ray_local: None) -> None:
    options, arguments, cls, words = UNBORN[why]
    make = actorsub.remote(num_cpus=0, max_restarts=max_restarts, **options)(Teller).remote
    handle = make(*arguments)
    call, ref = handle.pid.call(), handle.pid.remote()
    in_time = [end_of(call)]
    with pytest.raises(cls) as caught:
        actorsub.get(ref, timeout=PATIENCE_S)
    in_time.append(caught.value)
    with pytest.raises(cls) as caught:
        # There already.
        actorsub.get(ref)
    in_time.append(caught.value)
    later = end_of(handle.pid.call())
    for error in [*in_time, later]:
        assert isinstance(error, actorsub.ActorDiedError)
        assert isinstance(error, cls)
        assert (error.sent, error.state.value, error.incarnation) == (False, "dead", 0)
        assert error.actor_id == handle._actor_id.hex()
        assert not actorsub.may_have_run(error)
        assert words in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, cls)
        assert (again.sent, again.incarnation, str(again)) == (False, 0, str(error))
    # The table, where it was as soon as the calls.
    assert {error.evidence for error in in_time} <= {"call", "table"}
    assert actorsub.state(handle) is actorsub.ActorState.DEAD


def test_a_constructor_that_fails_leaves_no_doubt_though_the_table_said_alive(ray_local: None) -> None:
    """As Ray's does for a moment between the end of a constructor and the look at how it ended."""
    handle = actorsub.remote(num_cpus=0)(Teller).remote(0.5, True)
    actor = handle._actorsub_actor
    call = handle.pid.call()
    future = handle.pid.remote().future()
    actor.apply("table", "alive", 0, actor.version)
    assert actor.was_up
    for error in (end_of(call), future.exception(PATIENCE_S)):
        assert isinstance(error, ray.exceptions.ActorDiedError)
        assert (error.sent, error.state.value, error.incarnation) == (False, "dead", 0)  # type: ignore[attr-defined]


def test_a_call_that_ray_cancelled_is_certified(ray_local: None) -> None:
    handle = actorsub.remote(num_cpus=0)(AsyncTeller).remote()
    call = handle.sleep.call()
    ref = handle.sleep.remote()
    future = ref.future()
    actor_id = handle._actor_id.hex()
    for one, ended in ((call.object_ref, call), (ref, future)):
        wait_until(lambda: actorsub.state(handle) is actorsub.ActorState.ALIVE)
        ray.cancel(one)
        error = ended.exception(PATIENCE_S)
        assert isinstance(error, ray.exceptions.TaskCancelledError)
        assert (error.sent, error.actor_id, error.evidence, error.incarnation) == (True, actor_id, "call", 0)
        assert error.state is actorsub.ActorState.ALIVE
        assert actorsub.may_have_run(error)
    with pytest.raises(ray.exceptions.TaskCancelledError) as caught:
        actorsub.get(ref)
    assert caught.value.sent is True
    ray.kill(handle)


def test_a_dependency_that_died_is_the_methods_own_failure(tellers: list[Any]) -> None:
    dead = actorsub.remote(num_cpus=0)(Teller).remote()
    actorsub.get(dead.pid.remote(), timeout=PATIENCE_S)
    ray.kill(dead)
    for target in (tellers[0], actorsub.ReplicaGroup(tellers, retry="always")):
        error = end_of(target.ask.call(dead))
        assert isinstance(error, ray.exceptions.RayTaskError)
        assert isinstance(error, ray.exceptions.RayActorError)
        assert actorsub.may_have_run(error)
