"""What becomes of calls that were sent when their actor goes down: real processes, real signals, every way to wait.

Bounds are wide, because the machine may be busy; what is asserted is that nobody waits for Ray, which takes 1.5 to 2 s.
The figures are in bench/test_detection.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import pathlib
import pickle
import platform
import queue
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers import RAY_ARGS, Basics, Subject, make_subjects, touch, wait_for_file, wait_for_state, wait_until
from ray._private.state import actors

import actorsub
from actorsub import ActorState, _ray_compat

#: Ray tells the caller of a lost call after 1.5 to 2.0 s. Whoever knows before this did not wait for that.
EARLY_S = 1.2
PATIENCE_S = 60.0
EVIDENCE = {"process", "connection", "ray", "table", "call"}


def die(how: str) -> None:
    if how == "null pointer":
        ctypes.string_at(0)
    elif how == "SIGSEGV":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "os._exit":
        os._exit(3)
    elif how == "sys.exit":
        raise SystemExit(0)


class Victim(Basics):
    """An actor that comes back at once."""

    def grow(self, megabytes: int) -> None:
        self.memory.append(b"x" * (megabytes << 20))

    def hold(self, started: str, gate: str, how: str = "return") -> str:
        """Runs until the gate is there, and then ends, or its process does."""
        done = super().hold(started, gate)
        die(how)
        return done

    def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def keep_gil(self, seconds: float) -> None:
        # PyDLL does not let go of the GIL during the call.
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))

    def stream(self, count: int, stop_at: int, started: str, ledger: str) -> Iterator[int]:
        with open(ledger, "a") as file:
            file.write("run\n")
        for number in range(count):
            if number == stop_at:
                touch(started)
                threading.Event().wait()
            yield number

    def count_attempts(self, path: str) -> int:
        """Ends its process in its first run."""
        with open(path, "a") as file:
            file.write("x")
        attempts = os.path.getsize(path)
        if attempts == 1:
            os._exit(1)
        return attempts

    # Many, because Ray also spends one on each second of a restart.
    @ray.method(max_task_retries=20)
    def count_attempts_retried(self, path: str) -> int:
        return self.count_attempts(path)

    def ask(self, handles: list[Any]) -> Any:
        return ray.get(handles[0].echo.remote(), timeout=60)


class AsyncVictim:
    async def pid(self) -> int:
        return os.getpid()

    async def echo(self, value: Any = None) -> Any:
        return value

    async def never(self, started: str | None = None) -> None:
        if started is not None:
            touch(started)
        await asyncio.Event().wait()


class RefSubject(Subject):
    """What is held is a ref; and it is restarted."""

    def __init__(self, directory: pathlib.Path, cls: type = Victim, **options: Any) -> None:
        super().__init__(directory, cls, **{"max_restarts": -1, **options})
        self.look_up()

    def look_up(self) -> None:
        """After a start: its process, and that the sentinel has it."""
        self.pid = ray.get(self.handle.pid.remote(), timeout=PATIENCE_S)
        if actorsub.policy(self.handle).detect == "auto":
            self.watch()

    @property
    def waiting(self) -> int:
        """How many wait for an outcome, in this process."""
        return len(self.handle._actorsub_actor.parties)

    def hold(self, how: str = "return") -> Any:
        """A call that runs; `release` lets it go on."""
        return self.hold_by(lambda started, gate: self.handle.hold.remote(started, gate, how), timeout_s=30.0)

    def comes_back(self) -> None:
        wait_for_state(self.handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
        waiting = actorsub.wrap(self.handle, on_unavailable="wait", timeout_s=PATIENCE_S)

        def answers() -> bool:
            with contextlib.suppress(actorsub.ActorUnavailableError):
                self.pid = actorsub.get(waiting.pid.remote(), timeout=PATIENCE_S)
                return True
            return False

        wait_until(answers, PATIENCE_S)


@pytest.fixture
def subject(ray_local: None, tmp_path: pathlib.Path) -> Iterator[Callable[..., RefSubject]]:
    yield from make_subjects(tmp_path, RefSubject)


Maker = Callable[..., RefSubject]


class ExitTime:
    """Notes when a process has ended, whatever ended it."""

    def __init__(self, pid: int) -> None:
        self.at_s: float | None = None
        self._fd = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(PATIENCE_S * 1000):
            self.at_s = time.monotonic()
        os.close(self._fd)

    def get(self) -> float:
        self._thread.join()
        assert self.at_s is not None, "the process did not end"
        return self.at_s


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """(the result or the exception, when)."""
    try:
        result = function(*arguments)
    except BaseException as error:
        result = error
    return result, time.monotonic()


# ---------------------------------------------------------------------------------------------------------------------
# Every way to wait.


def by_await(ref: Any) -> Any:
    async def wait() -> Any:
        return await ref

    return asyncio.run(wait())


def by_gather(ref: Any) -> Any:
    async def wait() -> Any:
        return await asyncio.gather(ref, asyncio.sleep(0), ref)

    return asyncio.run(wait())


def by_wait_for(ref: Any) -> Any:
    async def wait() -> Any:
        return await asyncio.wait_for(ref, PATIENCE_S)

    return asyncio.run(wait())


def by_asyncio_wait(ref: Any) -> Any:
    async def wait() -> Any:
        done, pending = await asyncio.wait([asyncio.ensure_future(ref)], timeout=PATIENCE_S)
        assert not pending
        return done.pop().result()

    return asyncio.run(wait())


def by_future(ref: Any) -> Any:
    return ref.future().result(PATIENCE_S)


def by_futures_wait(ref: Any) -> Any:
    done, pending = concurrent.futures.wait([ref.future(), ref.future()], timeout=PATIENCE_S)
    assert not pending
    return done.pop().result()


def by_callback(ref: Any) -> Any:
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ref.future().add_done_callback(seen.put)
    return seen.get(timeout=PATIENCE_S).result()


def by_get(ref: Any) -> Any:
    return actorsub.get(ref, timeout=PATIENCE_S)


def by_get_without_timeout(ref: Any) -> Any:
    return actorsub.get(ref)


def by_get_of_a_list(ref: Any) -> Any:
    return actorsub.get([ref], timeout=PATIENCE_S)


def by_get_of_a_mixture(ref: Any) -> Any:
    return actorsub.get([ray.put(1), ref, ray.put(2), ref], timeout=PATIENCE_S)


def by_wait_and_get(ref: Any) -> Any:
    ready, pending = actorsub.wait([ref], timeout=PATIENCE_S)
    assert (ready, pending) == ([ref], [])
    return actorsub.get(ready[0], timeout=PATIENCE_S)


def by_wait_of_a_mixture(ref: Any) -> Any:
    there = ray.put(1)
    ready, pending = actorsub.wait([there, ref], num_returns=2, timeout=PATIENCE_S)
    assert (ready, pending) == ([there, ref], [])
    return actorsub.get(ready, timeout=PATIENCE_S)


WAYS = [
    by_await,
    by_gather,
    by_wait_for,
    by_asyncio_wait,
    by_future,
    by_futures_wait,
    by_callback,
    by_get,
    by_get_without_timeout,
    by_get_of_a_list,
    by_get_of_a_mixture,
    by_wait_and_get,
    by_wait_of_a_mixture,
]
DEATHS = ["SIGKILL", "SIGSEGV", "null pointer", "os._exit", "sys.exit", "ray.kill", "ray.kill, restart"]


def end_actor(one: RefSubject, how: str) -> None:
    if how == "SIGKILL":
        one.kill()
    elif how == "ray.kill":
        ray.kill(one.handle)
    elif how == "ray.kill, restart":
        ray.kill(one.handle, no_restart=False)
    else:
        one.release()


def check_certificate(error: Any, one: RefSubject, incarnation: int = 0) -> None:
    assert isinstance(error, (actorsub.ActorUnavailableError, actorsub.ActorDiedError)), repr(error)
    assert isinstance(error, ray.exceptions.RayActorError)
    assert error.sent is True
    assert error.evidence in EVIDENCE
    assert error.actor_id == one.handle._actor_id.hex()
    # Ray's own outcome, where that came first, names no incarnation.
    assert error.incarnation == incarnation or (error.evidence == "call" and error.incarnation is None)
    assert "may or may not have run" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.sent, copy.evidence, copy.incarnation) == (error.sent, error.evidence, error.incarnation)


@pytest.mark.parametrize("max_restarts", [-1, 0], ids=["restarts", "ends"])
@pytest.mark.parametrize("how", DEATHS)
def test_every_way_to_wait_fails_at_every_death(subject: Maker, how: str, max_restarts: int) -> None:
    one = subject(max_restarts=max_restarts)
    running = one.hold(how)
    behind = one.handle.echo.remote("behind")
    ended = ExitTime(one.pid)
    with concurrent.futures.ThreadPoolExecutor(len(WAYS) + 1) as pool:
        waits = [pool.submit(timed, way, running) for way in WAYS]
        waits.append(pool.submit(timed, by_await, behind))
        wait_until(lambda: one.waiting >= len(WAYS) + 1, what="all wait")
        end_actor(one, how)
        outcomes = [wait.result(PATIENCE_S) for wait in waits]
    ended_s = ended.get()
    for way, (error, at_s) in zip([*WAYS, by_await], outcomes, strict=True):
        check_certificate(error, one)
        assert at_s - ended_s < EARLY_S, f"{way.__name__}: {at_s - ended_s:.3f} s after the process ended"
    dies = max_restarts == 0 or how in ("sys.exit", "ray.kill")
    if max_restarts == 0:
        for error, _ in outcomes:
            assert isinstance(error, actorsub.ActorDiedError), repr(error)
            assert isinstance(error, ray.exceptions.ActorDiedError)
            assert error.state is ActorState.DEAD
    if not dies:
        for error, _ in outcomes:
            assert isinstance(error, actorsub.ActorUnavailableError), repr(error)
            assert isinstance(error, ray.exceptions.ActorUnavailableError)
        one.comes_back()
        assert one.stats["entered"]["restarting"] == 1
        wait_until(lambda: one.stats["incarnation"] == 1)
        assert actorsub.get(one.handle.echo.remote(5), timeout=PATIENCE_S) == 5
    else:
        wait_for_state(one.handle, ActorState.DEAD, timeout_s=PATIENCE_S)
        with pytest.raises(actorsub.ActorDiedError) as caught:
            one.handle.echo.options(on_unavailable="raise").remote()
        assert caught.value.sent is False
        assert len(str(caught.value).splitlines()) > 1, "Ray's cause is missing"
    # And whoever asks for the old call again is told again, at once.
    begin_s = time.monotonic()
    for way in (by_await, by_future, by_get, by_wait_and_get):
        check_certificate(timed(way, running)[0], one)
    assert time.monotonic() - begin_s < EARLY_S


def test_a_killed_process_is_told_before_it_is_gone(subject: Maker) -> None:
    kernel = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if kernel < (6, 15):
        pytest.skip(f"Linux {platform.release()} does not say how a thread ended; 6.15 and newer do")
    one = subject()
    before = 0
    # The kernel takes tens of milliseconds to free that much. Three times, because the thread that does so may be one
    # of the two that are watched, and because this process may have to wait for a core that long.
    for incarnation in range(3):
        actorsub.get(one.handle.grow.remote(512), timeout=PATIENCE_S)
        running = one.hold()
        ended = ExitTime(one.pid)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(timed, by_await, running)
            wait_until(lambda: one.waiting >= 1, what="it waits")
            one.kill()
            error, at_s = waiting.result(PATIENCE_S)
        check_certificate(error, one, incarnation)
        before += at_s < ended.get()
        one.comes_back()
        wait_until(lambda expected=incarnation + 1: one.stats["incarnation"] == expected)
        one.watch()
    assert before > 0
    assert one.stats["sentinel"]["exits_by_thread"] > 0


@pytest.mark.parametrize(
    ("how", "megabytes", "cause"), [("ray.kill", 0, "ray.kill"), ("SIGKILL", 1536, "worker process")]
)
def test_deaths_have_rays_cause(subject: Maker, how: str, megabytes: int, cause: str) -> None:
    # Ray hears of a large process's death only when its memory has been freed.
    one = subject(max_restarts=0)
    actorsub.get(one.handle.grow.remote(megabytes), timeout=PATIENCE_S)
    ref = one.hold()
    end_actor(one, how)
    with pytest.raises(actorsub.ActorDiedError):
        actorsub.get(ref, timeout=PATIENCE_S)
    wait_until(lambda: one.handle._actorsub_actor.death is not None)
    # Ray's own outcome comes up to 2 s later, and is the same death.
    with pytest.raises(ray.exceptions.ActorDiedError, match=cause):
        ray.get(ref, timeout=PATIENCE_S)
    with pytest.raises(actorsub.ActorDiedError, match=cause) as caught:
        actorsub.get(ref, timeout=PATIENCE_S)
    assert caught.value.sent is True


def test_a_wait_that_begins_after_the_death_ends_at_once(subject: Maker) -> None:
    one = subject()
    refs = [one.hold(), *[one.handle.echo.remote(i) for i in range(3)]]
    one.kill()
    wait_until(lambda: actorsub.state(one.handle) is not ActorState.ALIVE)
    begin_s = time.monotonic()
    for ref, way in zip(refs, (by_await, by_get, by_future, by_wait_and_get), strict=True):
        error, _ = timed(way, ref)
        check_certificate(error, one)
    assert time.monotonic() - begin_s < EARLY_S


def test_calls_of_the_next_incarnation_are_not_failed(subject: Maker) -> None:
    one = subject()
    old = one.hold()
    one.kill()
    assert isinstance(timed(by_get, old)[0], actorsub.ActorUnavailableError)
    one.comes_back()
    one.look_up()
    new = one.hold()
    # Somebody asks for the old one again while the new one runs.
    assert isinstance(timed(by_await, old)[0], actorsub.ActorUnavailableError)
    future = new.future()
    one.release()
    assert future.result(PATIENCE_S) == "done"


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["small", "large"])
def test_a_value_that_came_before_the_death_is_delivered(subject: Maker, size: int) -> None:
    one = subject()
    value = b"x" * size
    refs = [one.handle.echo.remote(value) for _ in WAYS]
    assert len(ray.wait(refs, num_returns=len(refs), timeout=PATIENCE_S)[0]) == len(refs)
    open_call = one.hold()
    one.kill()
    assert isinstance(timed(by_get, open_call)[0], actorsub.ActorUnavailableError)
    for way, ref in zip(WAYS, refs, strict=True):
        got = way(ref)
        if isinstance(got, list):
            got = next(item for item in got if isinstance(item, bytes))
        assert got == value, way.__name__
    assert actorsub.get([refs[0], refs[1], refs[0]], timeout=PATIENCE_S) == [value] * 3
    # One that came and one that did not.
    with pytest.raises(actorsub.ActorUnavailableError):
        actorsub.get([refs[0], open_call], timeout=PATIENCE_S)
    assert actorsub.wait([open_call, refs[0]], num_returns=2, timeout=PATIENCE_S) == ([open_call, refs[0]], [])


def test_get_raises_the_error_of_the_actor_that_failed(subject: Maker) -> None:
    """Not of another one in the same list, and with a certificate also where Ray's outcome is there already."""
    one, other = subject(), subject()
    fine = other.handle.echo.remote(1)
    lost = one.hold()
    one.kill()
    ray.wait([lost, fine], num_returns=2, timeout=PATIENCE_S)
    for refs in ([fine, lost], [lost, fine], [ray.put(1), lost, fine]):
        with pytest.raises(actorsub.ActorUnavailableError) as caught:
            actorsub.get(refs, timeout=PATIENCE_S)
        assert caught.value.actor_id == one.handle._actor_id.hex()
        assert caught.value.sent is True

    plain = ray.remote(max_restarts=0, num_cpus=0)(Victim).remote()
    lost_plain = plain.hold.remote(one.path("plain"), one.path("gate"))
    wait_until(lambda: os.path.exists(one.path("plain")))
    ray.kill(plain)
    ray.wait([lost_plain], timeout=PATIENCE_S)
    with pytest.raises(ray.exceptions.ActorDiedError) as died:
        actorsub.get([lost_plain, fine], timeout=PATIENCE_S)
    assert getattr(died.value, "actor_id", None) != other.handle._actor_id.hex()
    assert not isinstance(died.value, actorsub.ActorDiedError)


# ---------------------------------------------------------------------------------------------------------------------
# `get` and `wait`.


def test_get_and_wait_keep_rays_contract(subject: Maker) -> None:
    one = subject()
    held = one.hold()
    refs = [one.handle.echo.remote(i) for i in range(3)]
    with pytest.raises(ray.exceptions.GetTimeoutError):
        actorsub.get(held, timeout=0.05)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        actorsub.get([ray.put(0), held], timeout=0.05)
    assert actorsub.wait([held], timeout=0.05) == ([], [held])
    assert actorsub.wait([held, ray.put(0)], timeout=0)[1] == [held]
    for call in (actorsub.wait, ray.wait):
        with pytest.raises(ValueError, match="unique"):
            call([held, held])
        with pytest.raises(ValueError, match="num_returns"):
            call([held], num_returns=2)
        with pytest.raises(TypeError):
            call(held)
    for get in (actorsub.get, ray.get):
        with pytest.raises(ValueError, match="list"):
            get((held,))
        with pytest.raises(TypeError, match="which is not an"):
            get([held, 1])
    assert actorsub.get([]) == []
    one.release()
    assert actorsub.get([held, *refs, held], timeout=PATIENCE_S) == ["done", 0, 1, 2, "done"]
    ready, pending = actorsub.wait(refs, num_returns=2, timeout=PATIENCE_S)
    # Which two of three that are ready is Ray's choice.
    assert (len(ready), len(pending)) == (2, 1)
    assert set(ready + pending) == set(refs)
    assert one.stats["failed_early"] == 0


def test_polling_a_live_call_costs_nothing_and_counts_nothing(subject: Maker) -> None:
    one = subject()
    held = one.hold()
    for _ in range(20):
        assert actorsub.wait([held], timeout=0.002) == ([], [held])
        with pytest.raises(ray.exceptions.GetTimeoutError):
            actorsub.get(held, timeout=0.002)
    assert one.waiting == 0
    one.release()
    assert actorsub.get(held, timeout=PATIENCE_S) == "done"
    assert actorsub.get(one.handle.echo.remote(1), timeout=PATIENCE_S) == 1
    # Nothing was failed here, so nothing was late.
    assert (one.stats["failed_early"], one.stats["late_replies"]) == (0, 0)


def test_wait_takes_refused_generators(subject: Maker) -> None:
    one = subject()
    held = subject().hold()
    os.kill(one.pid, signal.SIGSTOP)
    actor = one.handle._actorsub_actor
    actor.apply("silence", "unreachable", actor.belief()[2])
    stream = one.handle.stream.remote(1, 1, "", "")
    for wait in (ray.wait, actorsub.wait):
        assert wait([held, stream], timeout=PATIENCE_S) == ([stream], [held])
    assert isinstance(timed(by_get, next(stream))[0], actorsub.ActorUnavailableError)


def test_wait_takes_generators(subject: Maker) -> None:
    """As `ray.wait` does; ready when an item is there, or when its actor is lost."""
    one, other = subject(), subject()
    held = other.hold()
    started, ledger = one.path("streaming"), one.path("ledger")
    stream = one.handle.stream.remote(3, 1, started, ledger)
    ready, pending = actorsub.wait([held, stream], timeout=PATIENCE_S)
    assert ready == [stream]
    assert pending == [held]
    assert actorsub.get(next(stream), timeout=PATIENCE_S) == 0
    wait_until(lambda: os.path.exists(started))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(timed, lambda: actorsub.wait([held, stream], timeout=PATIENCE_S))
        wait_until(lambda: one.waiting and other.waiting)
        ended = ExitTime(one.pid)
        one.kill()
        (ready, pending), at_s = waiting.result(PATIENCE_S)
    assert (ready, pending) == ([stream], [held])
    assert at_s - ended.get() < EARLY_S
    assert isinstance(timed(by_get, next(stream))[0], actorsub.ActorUnavailableError)


# ---------------------------------------------------------------------------------------------------------------------
# From workers.


def get_and_tell(handle: Any, started: str, gate: str, waits: str) -> tuple[str, bool, str, float]:
    ref = handle.hold.remote(started, gate)
    wait_for_file(started)
    touch(waits)
    try:
        actorsub.get(ref, timeout=60)
    except ray.exceptions.RayActorError as error:
        return type(error).__name__, error.sent, error.evidence, time.monotonic()
    return "no error", True, "", time.monotonic()


def test_a_task_that_blocks_in_get_lends_its_cpus(subject: Maker) -> None:
    one = subject()
    everything = RAY_ARGS["num_cpus"]
    outer = ray.remote(num_cpus=everything)(get_and_tell)

    @ray.remote(num_cpus=everything)
    def other() -> str:
        return "ran"

    waits = one.path("waits")
    result = outer.remote(one.handle, one.path("started"), one.path("gate"), waits)
    wait_until(lambda: os.path.exists(waits), PATIENCE_S)
    assert ray.get(other.remote(), timeout=30) == "ran"
    assert ray.get(other.remote(), timeout=30) == "ran"
    assert ray.wait([result], timeout=0)[0] == []
    ended = ExitTime(one.pid)
    one.kill()
    name, sent, evidence, at_s = ray.get(result, timeout=PATIENCE_S)
    assert (name, sent) == ("ActorUnavailableError", True)
    assert evidence in EVIDENCE
    assert at_s - ended.get() < EARLY_S


class SyncProxy:
    def ask(self, handle: Any, started: str, gate: str, waits: str) -> tuple[str, bool, str, float]:
        return get_and_tell(handle, started, gate, waits)


class AsyncProxy:
    async def ask(self, handle: Any, started: str, gate: str, waits: str) -> tuple[str, bool, str, float]:
        ref = handle.hold.remote(started, gate)
        while not os.path.exists(started):
            await asyncio.sleep(0.002)
        touch(waits)
        try:
            await ref
        except ray.exceptions.RayActorError as error:
            return type(error).__name__, error.sent, error.evidence, time.monotonic()
        return "no error", True, "", time.monotonic()


@pytest.mark.parametrize("proxy", [SyncProxy, AsyncProxy])
def test_from_inside_an_actor(subject: Maker, proxy: type) -> None:
    one = subject()
    asking = ray.remote(num_cpus=0)(proxy).remote()
    waits = one.path("waits")
    result = asking.ask.remote(one.handle, one.path("started"), one.path("gate"), waits)
    wait_until(lambda: os.path.exists(waits), PATIENCE_S)
    ended = ExitTime(one.pid)
    one.kill()
    name, sent, evidence, at_s = ray.get(result, timeout=PATIENCE_S)
    assert (name, sent) == ("ActorUnavailableError", True)
    assert evidence in EVIDENCE
    assert at_s - ended.get() < EARLY_S
    ray.kill(asking)


def test_an_async_actor_dies_with_many_calls_running(subject: Maker) -> None:
    one = subject(AsyncVictim, max_concurrency=50)
    refs = [one.handle.never.remote(one.path(f"running-{i}")) for i in range(50)]
    wait_until(lambda: all(os.path.exists(one.path(f"running-{i}")) for i in range(50)))

    async def wait_for_all() -> list[Any]:
        return await asyncio.gather(*refs, return_exceptions=True)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(timed, asyncio.run, wait_for_all())
        wait_until(lambda: one.waiting == 50)
        ended = ExitTime(one.pid)
        one.kill()
        found, at_s = waiting.result(PATIENCE_S)
    assert at_s - ended.get() < EARLY_S
    assert len(found) == 50
    for error in found:
        check_certificate(error, one)
    assert one.stats["failed_early"] == 50


# ---------------------------------------------------------------------------------------------------------------------
# They are still Ray's refs.


@ray.remote(num_cpus=0)
def identity(value: Any) -> Any:
    return value


@ray.remote(num_cpus=0)
def get_first(refs: list[Any]) -> Any:
    return ray.get(refs[0])


@ray.remote(num_cpus=0)
def make_call(handle: Any) -> Any:
    """Returns the ref of a call of its own."""
    return [handle.echo.remote("made elsewhere")]


def test_refs_are_rays(subject: Maker) -> None:
    one = subject()
    ref = one.handle.echo.remote("value")
    assert isinstance(ref, ray.ObjectRef)
    assert ray.get(ref, timeout=PATIENCE_S) == "value"
    assert ray.get([ref, ref], timeout=PATIENCE_S) == ["value", "value"]
    assert ray.wait([ref], timeout=PATIENCE_S) == ([ref], [])
    assert ray.get(identity.remote(ref), timeout=PATIENCE_S) == "value"
    assert ray.get(one.handle.echo.remote(ref), timeout=PATIENCE_S) == "value"
    assert ray.get(get_first.remote([ref]), timeout=PATIENCE_S) == "value"
    (made,) = ray.get(make_call.remote(one.handle), timeout=PATIENCE_S)
    assert ray.get(made, timeout=PATIENCE_S) == "made elsewhere"
    assert actorsub.get(made, timeout=PATIENCE_S) == "made elsewhere"

    # A plain one for the same object.
    (plain,) = ray.get(identity.remote([ref]), timeout=PATIENCE_S)
    assert type(plain) is ray.ObjectRef
    assert plain == ref
    assert ref == plain
    assert (plain != ref, ref != plain) == (False, False)
    assert ref != one.handle.echo.remote("value")
    assert ref != ray.put("value")
    assert ref != "value"
    assert hash(plain) == hash(ref)
    assert len({plain, ref}) == 1
    assert {plain: 1}[ref] == 1
    assert {ref: 1}[plain] == 1
    assert [plain].index(ref) == 0
    assert actorsub.get([plain, ref], timeout=PATIENCE_S) == ["value", "value"]
    assert (ref.hex(), ref.binary(), ref.task_id()) == (plain.hex(), plain.binary(), plain.task_id())
    assert repr(ref).startswith("ObjectRef(")

    for dumped in (pickle.dumps(ref), ray.cloudpickle.dumps(ref)):
        assert pickle.loads(dumped) == ref
    put = ray.put({"nested": ref})
    assert ray.get(ray.get(put)["nested"]) == "value"


def test_a_passed_ref_keeps_the_object(subject: Maker) -> None:
    """Reference counting goes on: the wrapped ref is dropped, what it was put into keeps the object alive."""
    one = subject()
    ref = one.handle.echo.remote(b"x" * 1_000_000)
    inside = identity.remote([ref])
    ray.wait([inside], timeout=PATIENCE_S)
    del ref
    assert len(ray.get(ray.get(inside, timeout=PATIENCE_S)[0], timeout=PATIENCE_S)) == 1_000_000


def test_a_ref_whose_actor_died_fails_wherever_it_is_passed(subject: Maker) -> None:
    one = subject()
    ref = one.hold()
    inside, argument = get_first.remote([ref]), identity.remote(ref)
    one.kill()
    for outer in (inside, argument):
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(outer, timeout=PATIENCE_S)
        assert isinstance(caught.value, ray.exceptions.ActorUnavailableError)
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        ray.get(ref, timeout=PATIENCE_S)


def test_cancel(subject: Maker) -> None:
    one = subject(AsyncVictim)
    started = one.path("started")
    ref = one.handle.never.remote(started)
    wait_until(lambda: os.path.exists(started))
    future = ref.future()
    ray.cancel(ref)
    for outcome in (lambda: future.result(PATIENCE_S), lambda: by_await(ref), lambda: by_get(ref)):
        with pytest.raises(ray.exceptions.TaskCancelledError):
            outcome()
    assert one.stats["failed_early"] == 0


def test_futures_that_are_given_up(subject: Maker) -> None:
    one = subject()
    ref = one.hold()
    future = ref.future()
    assert future.cancel()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ref, 0.02)
        task = asyncio.ensure_future(ref)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    one.kill()
    check_certificate(timed(by_get, ref)[0], one)
    assert future.cancelled()
    one.comes_back()
    assert by_await(one.handle.echo.remote(3)) == 3


def test_several_returns(subject: Maker) -> None:
    one = subject()
    refs = one.handle.echo.options(num_returns=2).remote((1, 2))
    assert actorsub.get(refs, timeout=PATIENCE_S) == [1, 2]
    assert one.handle.echo.options(num_returns=0).remote() is None
    held = one.hold()
    refs = one.handle.echo.options(num_returns=2).remote((1, 2))
    one.kill()
    for ref in [held, *refs]:
        check_certificate(timed(by_await, ref)[0], one)


# ---------------------------------------------------------------------------------------------------------------------
# Retries are Ray's.


def test_calls_that_ray_would_resend_are_not_failed_early(subject: Maker) -> None:
    of_actor, of_method, of_call = subject(max_task_retries=20), subject(), subject()
    calls = {
        of_actor: of_actor.handle.count_attempts.remote(of_actor.path("attempts")),
        of_method: of_method.handle.count_attempts_retried.remote(of_method.path("attempts")),
        of_call: of_call.handle.count_attempts.options(max_task_retries=20).remote(of_call.path("attempts")),
    }
    futures = [ref.future() for ref in calls.values()]
    assert actorsub.get(list(calls.values()), timeout=PATIENCE_S) == [2, 2, 2]
    assert [future.result(PATIENCE_S) for future in futures] == [2, 2, 2]
    for one in calls:
        assert one.stats["failed_early"] == 0
        # A later call of the same actor that has no retries.
        one.comes_back()
        one.look_up()
        started = one.path("no-retries")
        ref = one.handle.hold.options(max_task_retries=0).remote(started, one.path("gate"))
        wait_until(lambda path=started: os.path.exists(path))
        one.kill()
    for one in calls:
        wait_until(lambda one=one: actorsub.state(one.handle) is not ActorState.ALIVE or one.stats["incarnation"] == 2)
    check_certificate(timed(by_get, ref)[0], of_call, incarnation=1)


# ---------------------------------------------------------------------------------------------------------------------
# Streams.


def start_stream(one: RefSubject) -> Any:
    return one.handle.stream.remote(10, 4, one.path("streaming"), one.path("ledger"))


def check_stream_over(one: RefSubject) -> None:
    assert pathlib.Path(one.path("ledger")).read_text() == "run\n"


def test_a_stream_yields_its_items_then_one_error(subject: Maker) -> None:
    """F1 of Ray issue 44357."""
    one = subject()
    stream = start_stream(one)
    assert isinstance(stream, ray.ObjectRefGenerator)
    assert [actorsub.get(next(stream), timeout=PATIENCE_S) for _ in range(4)] == [0, 1, 2, 3]
    wait_until(lambda: os.path.exists(one.path("streaming")))
    assert not stream.is_finished()
    assert not stream.next_ready()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(timed, lambda: list(stream))
        wait_until(lambda: one.waiting)
        ended = ExitTime(one.pid)
        one.kill()
        rest, at_s = waiting.result(PATIENCE_S)
    assert at_s - ended.get() < EARLY_S
    assert len(rest) == 1
    check_certificate(timed(by_get, rest[0])[0], one)
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        ray.get(rest[0], timeout=PATIENCE_S)
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.is_finished()
    check_certificate(timed(by_get, stream.completed())[0], one)
    one.comes_back()
    check_stream_over(one)


def test_an_async_stream_yields_its_items_then_one_error(subject: Maker) -> None:
    one = subject()
    ended: list[ExitTime] = []

    async def read() -> tuple[list[int], list[BaseException], float]:
        items, errors, at_s = [], [], 0.0
        async for ref in start_stream(one):
            try:
                items.append(await ref)
            except ray.exceptions.RayActorError as error:
                errors.append(error)
                at_s = time.monotonic()
            if len(items) == 4 and not ended:
                while not os.path.exists(one.path("streaming")):
                    await asyncio.sleep(0.002)
                ended.append(ExitTime(one.pid))
                asyncio.get_running_loop().call_later(0.05, one.kill)
        return items, errors, at_s

    items, errors, at_s = asyncio.run(asyncio.wait_for(read(), PATIENCE_S))
    assert items == [0, 1, 2, 3]
    assert len(errors) == 1
    check_certificate(errors[0], one)
    assert at_s - ended[0].get() < EARLY_S
    one.comes_back()
    check_stream_over(one)


def test_items_that_came_before_the_death_are_delivered(subject: Maker) -> None:
    one = subject()
    stream = start_stream(one)
    wait_until(lambda: os.path.exists(one.path("streaming")))
    # The producer is at item 4; what it yielded is on its way or here.
    wait_until(stream.next_ready)
    held = one.handle.echo.remote("behind")
    ray.wait([held], timeout=0.1)
    one.kill()
    check_certificate(timed(by_get, held)[0], one)
    begin_s = time.monotonic()
    refs = list(stream)
    assert time.monotonic() - begin_s < EARLY_S
    assert [actorsub.get(ref, timeout=PATIENCE_S) for ref in refs[:-1]] == [0, 1, 2, 3]
    check_certificate(timed(by_get, refs[-1])[0], one)
    one.comes_back()
    check_stream_over(one)


def test_a_stream_that_ends_well(subject: Maker) -> None:
    one = subject()
    arguments = (5, -1, one.path("streaming"), one.path("ledger"))
    assert [ray.get(ref) for ref in one.handle.stream.remote(*arguments)] == list(range(5))

    async def read() -> list[int]:
        return [await ref async for ref in one.handle.stream.remote(*arguments)]

    assert asyncio.run(read()) == list(range(5))
    assert one.stats["failed_early"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Errors that are none of ours.


def test_errors_of_the_application_pass_untouched(subject: Maker) -> None:
    one = subject()
    for way in WAYS:
        error, _ = timed(way, one.handle.fail.remote())
        assert isinstance(error, ValueError), way.__name__
        assert isinstance(error, ray.exceptions.RayTaskError)
    assert actorsub.state(one.handle) is ActorState.ALIVE


def test_somebody_elses_death_is_an_error_of_the_application(subject: Maker) -> None:
    """C4 of Ray issue 61594: the healthy actor raises because another one died."""
    one = subject()
    for victim in (subject(max_restarts=0).handle, ray.remote(num_cpus=0)(Victim).remote()):
        ray.get(victim.pid.remote(), timeout=PATIENCE_S)
        ray.kill(victim)
        # Until the process is gone a call may still be answered.
        wait_until(lambda victim=victim: isinstance(timed(ray.get, victim.echo.remote())[0], Exception))
        for way in (by_await, by_future, by_get, by_wait_and_get):
            error, _ = timed(way, one.handle.ask.remote([victim]))
            assert isinstance(error, ray.exceptions.RayTaskError), f"{way.__name__}: {error!r}"
            assert isinstance(error, ray.exceptions.ActorDiedError)
    assert actorsub.state(one.handle) is ActorState.ALIVE
    assert one.stats["failed_early"] == 0
    assert actorsub.get(one.handle.echo.remote(1), timeout=PATIENCE_S) == 1


# ---------------------------------------------------------------------------------------------------------------------
# on_state_change.


def test_on_state_change(subject: Maker) -> None:
    one = subject()
    told: list[tuple[Any, ...]] = []
    late: list[tuple[Any, ...]] = []
    actor_id = one.handle._actor_id.hex()

    def raises(*_: Any) -> None:
        raise RuntimeError("in a callback")

    actorsub.on_state_change(one.handle, raises)
    unregister = actorsub.on_state_change(one.handle, lambda *change: told.append(change))
    wait_until(lambda: told)
    assert told == [(actor_id, ActorState.UNKNOWN, ActorState.ALIVE, told[0][3])]
    submitted = one.stats["submitted"]
    # No call is outstanding, and nobody looks.
    one.kill()
    wait_until(lambda: any(change[2] is ActorState.RESTARTING for change in told))
    wait_until(lambda: told[-1][2] is ActorState.ALIVE, PATIENCE_S)
    assert one.stats["submitted"] == submitted
    # The kernel closes the process's connections before it tells of the end, and may be held up in between.
    lost = next(change for change in told[1:] if change[2] is not ActorState.UNREACHABLE)
    assert told[1][:2] == (actor_id, ActorState.ALIVE)
    assert (lost[0], lost[2]) == (actor_id, ActorState.RESTARTING)
    assert told[1][3] in EVIDENCE and lost[3] in EVIDENCE
    for before, after in itertools.pairwise(told):
        assert before[2] is after[1], told
    actorsub.on_state_change(one.handle, lambda *change: late.append(change))
    wait_until(lambda: late)
    assert late[0][1:3] == (ActorState.UNKNOWN, ActorState.ALIVE)
    unregister()
    unregister()
    count = len(told)
    ray.kill(one.handle)
    wait_until(lambda: late[-1][2] is ActorState.DEAD)
    assert len(told) == count
    with pytest.raises(TypeError):
        actorsub.on_state_change(one.handle, None)  # type: ignore[arg-type]


def test_a_callback_may_use_the_library(subject: Maker) -> None:
    one = subject()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def on_change(actor_id: str, old: Any, new: Any, evidence: Any) -> None:
        if new is ActorState.RESTARTING:
            done.put((actorsub.state(one.handle), timed(one.handle.echo.options(on_unavailable="raise").remote)[0]))
            cancel()

    cancel = actorsub.on_state_change(one.handle, on_change)
    one.kill()
    state, error = done.get(timeout=PATIENCE_S)
    assert state in (ActorState.RESTARTING, ActorState.ALIVE)
    assert isinstance(error, (actorsub.ActorUnavailableError, ray.ObjectRef))
    one.comes_back()


# ---------------------------------------------------------------------------------------------------------------------
# Busy, frozen, cut off.


@pytest.mark.parametrize("what", ["compute", "keep_gil"])
def test_a_busy_actor_is_not_called_down(subject: Maker, what: str) -> None:
    """B10 of Ray issue 24554."""
    one = subject(silence_timeout_s=1.0, silence_in_flight_s=1.5)
    running = getattr(one.handle, what).remote(4.0)
    behind = one.handle.echo.remote("behind")
    assert actorsub.get(behind, timeout=PATIENCE_S) == "behind"
    assert actorsub.get(running, timeout=PATIENCE_S) is None
    assert one.stats["entered"]["unreachable"] == 0
    assert one.stats["failed_early"] == 0
    assert one.stats["evidence"] != "silence"


def test_a_frozen_actor(subject: Maker) -> None:
    """B8: SIGSTOP with 10 calls in flight, 10 more after it, SIGCONT later."""
    one = subject(silence_timeout_s=0.5, silence_in_flight_s=1.0, on_unavailable="raise")
    actorsub.get(one.handle.remember.remote("before"), timeout=PATIENCE_S)
    refs = [one.hold(), *[one.handle.echo.remote(i) for i in range(9)]]
    outcomes = [ref.future() for ref in refs]
    times: list[float] = []
    for outcome in outcomes:
        outcome.add_done_callback(lambda _: times.append(time.monotonic()))
    heartbeats = one.stats["sentinel"]["heartbeats_acked"]
    wait_until(lambda: one.stats["sentinel"]["heartbeats_acked"] > heartbeats)
    begin_s = time.monotonic()
    one.signal(signal.SIGSTOP)
    wait_for_state(one.handle, ActorState.UNREACHABLE)
    refused_s = time.monotonic() - begin_s
    assert not times, "calls that run are not failed with the first refusal"
    for _ in range(10):
        before_s = time.monotonic()
        with pytest.raises(actorsub.ActorUnavailableError) as caught:
            one.handle.echo.remote("after")
        assert time.monotonic() - before_s < EARLY_S
        assert (caught.value.sent, caught.value.evidence) == (False, "silence")
        assert caught.value.state is ActorState.UNREACHABLE
        assert caught.value.incarnation == 0
    for outcome in outcomes:
        error = outcome.exception(PATIENCE_S)
        assert isinstance(error, actorsub.ActorUnavailableError)
        assert (error.sent, error.evidence, error.incarnation) == (True, "silence", 0)
        assert error.state is ActorState.UNREACHABLE
    failed_s = max(times) - begin_s
    print(f"frozen: refused after {refused_s:.3f} s, running calls failed after {failed_s:.3f} s")
    assert 0.4 < refused_s < 0.5 + EARLY_S
    assert 0.9 < failed_s < 1.0 + EARLY_S
    assert one.stats["failed_early"] == 10
    assert one.stats["late_replies"] == 0

    one.signal(signal.SIGCONT)
    one.release()
    wait_for_state(one.handle, ActorState.ALIVE)
    assert actorsub.get(one.handle.remember.remote("after"), timeout=PATIENCE_S) == ["before", "after"]
    wait_until(lambda: one.stats["late_replies"] == 10, what="late replies are counted")
    assert one.stats["entered"]["restarting"] == 0
    assert one.stats["incarnation"] == 0
    assert one.stats["sentinel"]["false_alarms"] >= 1


def test_a_short_silence_harms_no_running_call(subject: Maker) -> None:
    one = subject(silence_timeout_s=0.5, silence_in_flight_s=30.0, on_unavailable="raise")
    outcomes = [one.hold().future(), one.handle.echo.remote(1).future()]
    one.signal(signal.SIGSTOP)
    wait_for_state(one.handle, ActorState.UNREACHABLE)
    with pytest.raises(actorsub.ActorUnavailableError):
        one.handle.echo.remote()
    one.signal(signal.SIGCONT)
    one.release()
    assert [outcome.result(PATIENCE_S) for outcome in outcomes] == ["done", 1]
    wait_for_state(one.handle, ActorState.ALIVE)
    assert one.stats["failed_early"] == 0


def test_silence_in_flight_none_never_fails_a_running_call(subject: Maker) -> None:
    one = subject(silence_timeout_s=0.5, silence_in_flight_s=None)
    outcome = one.hold().future()
    one.signal(signal.SIGSTOP)
    wait_for_state(one.handle, ActorState.UNREACHABLE)
    with pytest.raises(concurrent.futures.TimeoutError):
        outcome.result(1.5)
    one.signal(signal.SIGCONT)
    one.release()
    assert outcome.result(PATIENCE_S) == "done"


def test_a_frozen_actor_that_is_killed(subject: Maker) -> None:
    """Hard evidence ends what silence would not have ended for long."""
    one = subject(silence_timeout_s=0.5, silence_in_flight_s=600.0)
    ref = one.hold()
    one.signal(signal.SIGSTOP)
    wait_for_state(one.handle, ActorState.UNREACHABLE)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(timed, by_await, ref)
        wait_until(lambda: one.waiting)
        ended = ExitTime(one.pid)
        one.kill()
        error, at_s = waiting.result(PATIENCE_S)
    check_certificate(error, one)
    assert at_s - ended.get() < EARLY_S
    one.comes_back()


def ours_to(port: int) -> list[socket.socket]:
    """This process's own connections to a port of this machine, the sentinel's and Ray's, as copies."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                copy = socket.socket(fileno=os.dup(int(name)))
                try:
                    peer = copy.getpeername()
                except OSError:
                    peer = None
                if isinstance(peer, tuple) and peer[1] == port:
                    found.append(copy)
                else:
                    copy.close()
    return found


def reset_by_kernel(ports: tuple[int, int]) -> bool:
    """Resets one connection with `ss -K`, which needs root and a kernel that can."""
    here, there = ports
    result = subprocess.run(
        ["ss", "-K", "-H", "-t", "-n", f"sport = :{here} and dport = :{there}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode == 0 and bool(result.stdout.strip())


@pytest.mark.parametrize("cut", ["closed", "reset"])
def test_a_cut_connection_is_no_death(subject: Maker, cut: str) -> None:
    """B1 of Ray issue 29656: every connection of the caller to the actor is cut, over and over for 2 s."""
    one = subject(on_unavailable="raise")
    actorsub.get(one.handle.remember.remote("before"), timeout=PATIENCE_S)
    told: list[Any] = []
    actorsub.on_state_change(one.handle, lambda *change: told.append(change[2]))
    port = actors(one.handle._actor_id.hex())["Address"]["Port"]
    outcome = one.hold().future()
    assert ours_to(port), "the connections of this process are not seen"
    ends: list[Any] = []
    cuts = 0
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        for connection in ours_to(port):
            with connection:
                if cut == "closed":
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                    cuts += 1
                else:
                    if not reset_by_kernel((connection.getsockname()[1], port)) and not cuts:
                        with contextlib.suppress(OSError):
                            connection.getpeername()
                            pytest.skip("this kernel or user cannot reset connections with `ss -K`")
                    cuts += 1
        ends.append(timed(one.handle.echo.remote, 1)[0])
        time.sleep(0.02)
    assert cuts >= 2
    one.release()
    # "Unavailable" at most, never "died".
    for end in ends:
        error = end if isinstance(end, Exception) else timed(by_get, end)[0]
        assert error == 1 or isinstance(error, actorsub.ActorUnavailableError), repr(error)
    error = outcome.exception(PATIENCE_S)
    assert error is None or isinstance(error, actorsub.ActorUnavailableError), repr(error)
    wait_for_state(one.handle, ActorState.ALIVE)

    def remembers() -> Any:
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            return actorsub.get(one.handle.remember.remote("after"), timeout=PATIENCE_S)

    memory = wait_until(remembers)
    assert memory[0] == "before"
    assert one.stats["incarnation"] == 0
    assert one.stats["entered"]["restarting"] == 0
    assert one.stats["entered"]["dead"] == 0
    assert ActorState.DEAD not in told
    assert ray.get(one.handle.pid.remote(), timeout=PATIENCE_S) == one.pid


# The environment variable is for a process of its own.
@ray.remote(num_cpus=0, max_calls=1, runtime_env={"env_vars": {"ACTORSUB_TEST_OF_ITS_OWN": "1"}})
def use_rays_word_only(handle: Any, started: str, gate: str, waits: str) -> dict[str, Any]:
    """In a process that has no other handle."""
    ref = handle.hold.remote(started, gate)
    wait_for_file(started)
    touch(waits)
    try:
        actorsub.get(ref, timeout=60)
        error = None
    except ray.exceptions.RayActorError as raised:
        error = raised
    at_s = time.monotonic()
    wait_for_state(handle, ActorState.ALIVE)
    answer = ray.get(actorsub.wrap(handle, on_unavailable="wait").echo.remote("again"), timeout=60)
    return {"error": error, "at_s": at_s, "answer": answer, "stats": actorsub.stats(handle)}


def test_detect_ray_opens_no_sockets_and_is_right(subject: Maker) -> None:
    one = subject(detect="ray")
    waits = one.path("waits")
    result = use_rays_word_only.remote(one.handle, one.path("started"), one.path("gate"), waits)
    wait_until(lambda: os.path.exists(waits), PATIENCE_S)
    ended = ExitTime(one.pid)
    one.kill()
    found = ray.get(result, timeout=PATIENCE_S)
    error = found["error"]
    assert isinstance(error, actorsub.ActorUnavailableError)
    # Ray's word either way: whichever of its two ways to say so was faster.
    assert error.sent and error.evidence in ("ray", "table")
    assert found["at_s"] - ended.get() < EARLY_S
    assert found["answer"] == "again"
    sentinel = found["stats"]["sentinel"]
    assert found["stats"]["watched"] is False
    assert {sentinel[name] for name in ("sockets", "dials", "process_watches", "watches")} == {0}


# ---------------------------------------------------------------------------------------------------------------------
# Many.


def test_actors_share_nothing(subject: Maker) -> None:
    one, other = subject(), subject()
    mine, theirs = one.hold(), other.hold()
    outcome = theirs.future()
    told: list[Any] = []
    actorsub.on_state_change(other.handle, lambda *change: told.append(change[2]))
    one.kill()
    check_certificate(timed(by_get, mine)[0], one)
    assert actorsub.state(other.handle) is ActorState.ALIVE
    assert not outcome.done()
    other.release()
    assert outcome.result(PATIENCE_S) == "done"
    assert other.stats["failed_early"] == 0
    assert set(told) <= {ActorState.ALIVE}


def test_a_loop_that_was_closed_while_somebody_waited(subject: Maker) -> None:
    one = subject()
    ref = one.hold()
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        ref.__await__()

    loop.run_until_complete(begin())
    loop.close()
    other = ref.future()
    assert one.waiting == 2
    one.kill()
    check_certificate(other.exception(PATIENCE_S), one)
    wait_until(lambda: one.waiting == 0)
    # The same with a value.
    one.comes_back()
    loop = asyncio.new_event_loop()
    value = one.handle.echo.remote(1)

    async def begin_again() -> None:
        value.__await__()

    loop.run_until_complete(begin_again())
    loop.close()
    assert actorsub.get(value, timeout=PATIENCE_S) == 1
    assert by_await(one.handle.echo.remote(2)) == 2


def test_ten_thousand_awaits_fail_at_once(subject: Maker) -> None:
    one = subject()
    held = one.hold()
    count = 10_000
    refs = [held, *[one.handle.echo.remote() for _ in range(count - 1)]]
    ended: list[ExitTime] = []

    async def wait_for_all() -> tuple[list[Any], float]:
        async def one_of_them(ref: Any) -> Any:
            try:
                return await ref
            except actorsub.ActorUnavailableError as error:
                return error

        tasks = [asyncio.ensure_future(one_of_them(ref)) for ref in refs]
        await asyncio.sleep(0)
        while one.waiting < count:
            await asyncio.sleep(0.01)
        ended.append(ExitTime(one.pid))
        one.kill()
        return await asyncio.gather(*tasks), time.monotonic()

    found, at_s = asyncio.run(wait_for_all())
    took_s = at_s - ended[0].get()
    print(f"{count} awaits failed {took_s * 1000:.0f} ms after the process ended")
    assert all(isinstance(error, actorsub.ActorUnavailableError) and error.sent for error in found)
    assert one.waiting == 0
    assert took_s < 5
    assert one.stats["failed_early"] <= count


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_and_restarts_under_load(subject: Maker) -> None:
    """Threads that call without pause while the actor is killed again and again: every call ends, and in time.

    ACTORSUB_KILL_ROUNDS sets how often; 100 take a few minutes.
    """
    rounds = int(os.environ.get("ACTORSUB_KILL_ROUNDS", "8"))
    one = subject(on_unavailable="raise")
    stop = threading.Event()
    answered, refused, lost = [0] * 8, [0] * 8, [0] * 8
    slowest_lost_s = [0.0] * 8
    busy_since_s = [0.0] * 8
    other: list[BaseException] = []

    def run(number: int) -> None:
        while not stop.is_set():
            busy_since_s[number] = time.monotonic()
            try:
                ref = one.handle.echo.remote(number)
                way = (by_get, by_future, by_await, by_wait_and_get)[number % 4]
                answered[number] += way(ref) == number
            except actorsub.ActorUnavailableError as error:
                if error.sent:
                    lost[number] += 1
                    slowest_lost_s[number] = max(slowest_lost_s[number], time.monotonic() - busy_since_s[number])
                else:
                    refused[number] += 1
                    stop.wait(0.001)
            except BaseException as error:
                other.append(error)
                return

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for incarnation in range(1, rounds + 1):
        before = list(answered)
        wait_until(lambda b=before: all(now > then for now, then in zip(answered, b, strict=True)) or other)
        assert other == []
        one.kill()
        # The watchdog: nobody may be stuck, and the actor comes back.
        wait_until(lambda n=incarnation: ((one.stats["incarnation"] or 0) >= n and one.stats["watched"]) or other)
        one.pid = wait_until(lambda: new_pid(one))
        stuck = [number for number, since_s in enumerate(busy_since_s) if time.monotonic() - since_s > PATIENCE_S]
        assert stuck == []
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert other == []
    stats = one.stats
    print(f"{rounds} kills: {sum(answered)} answered, {sum(refused)} refused, {sum(lost)} lost in flight")
    print(f"slowest loss {max(slowest_lost_s) * 1000:.0f} ms; stale reports {stats['stale_reports']}")
    assert sum(lost) >= 1
    assert sum(refused) >= rounds
    assert stats["incarnation"] == rounds
    assert stats["entered"]["dead"] == 0
    assert one.waiting == 0


def new_pid(one: RefSubject) -> int:
    try:
        pid = actorsub.get(one.handle.pid.remote(), timeout=PATIENCE_S)
    except actorsub.ActorUnavailableError:
        return 0
    return 0 if pid == one.pid else pid


def test_a_restart_during_a_slow_read_of_the_table_is_watched(subject: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    one = subject()
    read = _ray_compat.read_actor_table
    begun, go_on = threading.Event(), threading.Event()

    def read_slowly(actor_id: Any) -> Any:
        row = read(actor_id)
        if not begun.is_set() and row is not None and row.state != "alive":
            # What it found is old by the time it is heard.
            begun.set()
            go_on.wait(PATIENCE_S)
        return row

    monkeypatch.setattr(_ray_compat, "read_actor_table", read_slowly)
    one.kill()
    assert begun.wait(PATIENCE_S)
    one.comes_back()
    assert not one.stats["watched"]
    go_on.set()
    wait_until(lambda: one.stats["watched"], PATIENCE_S, "the new incarnation is watched")
