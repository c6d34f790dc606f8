"""`handle.method.call(...)` on a real Ray: shapes, the Call as a future, windows, deadlines, refusals, losses, ends.

What says that a call never ran is not the error but a file that the actor writes to.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from helpers import Restartable, Subject, make_subjects, touch, wait_for_file, wait_for_state, wait_until
from subprocesses import run_script

import actorsub
from actorsub import ActorState, Call, _core, watcher

PATIENCE_S = 60.0
# Ray tells the caller of a lost call after 1.5 to 2.0 s; whoever knows before this did not wait for that.
EARLY_S = 1.2

MakeRestartable = Callable[..., Restartable]


def note(path: str, entry: Any) -> None:
    """One line, whole or not at all, whoever else writes."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{entry}\n".encode())
    os.close(file)


def notes(path: Any) -> list[str]:
    return pathlib.Path(path).read_text().split() if os.path.exists(path) else []


class Doer:
    """One thread."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any = None, *more: Any, key: Any = None) -> Any:
        return (value, *more, key) if more or key is not None else value

    def note(self, path: str, entry: Any) -> Any:
        note(path, entry)
        return entry

    def hold(self, started: str, gate: str) -> str:
        touch(started)
        wait_for_file(gate)
        return "held"

    def pair(self) -> tuple[int, int]:
        return 1, 2

    def stream(self, gate: str, count: int = 3) -> Iterator[int]:
        for number in range(count):
            if number == 2:
                wait_for_file(gate)
            yield number

    def fail(self, error: Exception) -> None:
        raise error

    def fail_in_pair(self) -> tuple[int, int]:
        raise ValueError("both")

    def give_back(self, error: Exception) -> Exception:
        return error

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def zeros(self, count: int) -> np.ndarray:
        return np.zeros(count)

    def leave(self) -> None:
        ray.actor.exit_actor()

    def die_once(self, path: str) -> int:
        note(path, "run")
        if len(notes(path)) == 1:
            os._exit(1)
        return len(notes(path))


class AsyncDoer:
    """Many at one time; counts how many."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    async def pid(self) -> int:
        return os.getpid()

    async def echo(self, value: Any = None) -> Any:
        return value

    async def enter(self, turns: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(turns):
            await asyncio.sleep(0)
        self.now -= 1
        return self.most

    async def never(self, started: str, ended: str) -> None:
        touch(started)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            touch(ended)
            raise

    async def hold(self, started: str, gate: str) -> str:
        touch(started)
        while not os.path.exists(gate):
            await asyncio.sleep(0.005)
        return "held"

    async def ask(self, handles: list[Any], value: Any) -> Any:
        return await handles[0].echo.options(max_in_flight=1).call(value)


class Grouped:
    @ray.method(concurrency_group="io")
    def read(self, value: Any) -> Any:
        return value

    @ray.method(concurrency_group="compute")
    def hold(self, started: str, gate: str) -> str:
        touch(started)
        wait_for_file(gate)
        return "held"


class CallSubject(Subject):
    """What is held is a Call."""

    def __init__(self, directory: pathlib.Path, cls: type = Doer, **options: Any) -> None:
        super().__init__(directory, cls, **options)
        if hasattr(cls, "pid"):
            self.pid = self.handle.pid.call().result(PATIENCE_S)

    def hold(self, **options: Any) -> Call:
        """A call that runs until `release`."""
        return self.hold_by(self.handle.hold.options(**options).call)

    @property
    def counters(self) -> dict[str, Any]:
        return self.stats["calls"]

    def end(self) -> None:
        self.release()
        super().end()


@pytest.fixture
def subject(ray_local: None, tmp_path: pathlib.Path) -> Iterator[Callable[..., CallSubject]]:
    yield from make_subjects(tmp_path, CallSubject)


Maker = Callable[..., CallSubject]


def idle(counters: dict[str, Any]) -> bool:
    return counters["waiting"] == 0 and counters["in_flight"] == 0


def error_of(call: Call) -> Any:
    error = call.exception(PATIENCE_S)
    assert error is not None
    return error


# ---------------------------------------------------------------------------------------------------------------------
# Shapes.


def test_shapes(subject: Maker) -> None:
    one = subject()
    handle = one.handle
    assert handle.echo.call().result(PATIENCE_S) is None
    assert handle.echo.call(1, 2, key=3).result(PATIENCE_S) == (1, 2, 3)
    assert handle.echo.call(value="by name").result(PATIENCE_S) == "by name"
    assert handle.pair.call().result(PATIENCE_S) == (1, 2)
    assert handle.pair.options(num_returns=2).call().result(PATIENCE_S) == [1, 2]
    assert handle.echo.options(name="named").call(4).result(PATIENCE_S) == 4
    path = one.path("ledger")
    nothing = handle.note.options(num_returns=0).call(path, "x")
    assert nothing.result(PATIENCE_S) is None
    assert nothing.object_ref is None
    # The next call runs after it.
    assert handle.echo.call(5).result(PATIENCE_S) == 5
    assert notes(path) == ["x"]
    wait_until(lambda: idle(one.counters))


def test_object_refs(subject: Maker) -> None:
    one = subject()
    call = one.handle.echo.call(7)
    assert ray.get(call.object_ref, timeout=PATIENCE_S) == 7
    assert ray.get(one.handle.echo.remote(call.object_ref), timeout=PATIENCE_S) == 7
    two = one.handle.pair.options(num_returns=2).call()
    assert ray.get(two.object_ref, timeout=PATIENCE_S) == [1, 2]
    held = one.hold()
    waiting = one.handle.echo.options(max_in_flight=1).call(8)
    assert waiting.object_ref is None
    one.release()
    assert waiting.result(PATIENCE_S) == ray.get(waiting.object_ref, timeout=PATIENCE_S) == 8
    assert held.result(PATIENCE_S) == "held"


def test_an_error_in_one_of_several_results(subject: Maker) -> None:
    one = subject()
    error = error_of(one.handle.fail_in_pair.options(num_returns=2).call())
    assert isinstance(error, ValueError)
    assert isinstance(error, ray.exceptions.RayTaskError)
    wait_until(lambda: idle(one.counters))
    assert one.counters["late_replies"] == 0


def test_the_applications_own_errors(subject: Maker) -> None:
    one = subject()
    for raised in (ValueError("mine"), StopIteration("mine"), TimeoutError("mine"), actorsub.ActorDiedError()):
        error = error_of(one.handle.fail.call(raised))
        assert isinstance(error, ray.exceptions.RayTaskError), raised
    assert one.counters["failed"] == {"RayTaskError": 4}
    # An exception that is returned is a value, and no failure.
    assert repr(one.handle.give_back.call(ValueError("a value")).result(PATIENCE_S)) == repr(ValueError("a value"))
    assert one.counters["failed"] == {"RayTaskError": 4}
    assert actorsub.state(one.handle) is ActorState.ALIVE


def test_a_stream(subject: Maker) -> None:
    one = subject()
    method = one.handle.stream.options(num_returns="streaming", max_in_flight=1, timeout_s=PATIENCE_S)
    call = method.call(one.path("gate"))
    stream = call.result(PATIENCE_S)
    assert [ray.get(next(stream), timeout=PATIENCE_S) for _ in range(2)] == [0, 1]
    # It keeps its place until it ends.
    assert one.counters["in_flight"] == 1
    behind = one.handle.echo.options(max_in_flight=1).call("behind")
    assert behind.object_ref is None
    one.release()
    assert [ray.get(ref, timeout=PATIENCE_S) for ref in stream] == [2]
    assert behind.result(PATIENCE_S) == "behind"
    wait_until(lambda: idle(one.counters))


def test_a_stream_that_outlives_its_deadline_is_no_failure(subject: Maker) -> None:
    one = subject()
    call = one.handle.stream.options(num_returns="streaming", timeout_s=0.2).call(one.path("gate"))
    stream = call.result(PATIENCE_S)
    late = one.handle.echo.options(timeout_s=0.3).call()
    assert isinstance(error_of(late), actorsub.DeadlineExceededError)
    one.release()
    assert len([ray.get(ref, timeout=PATIENCE_S) for ref in stream]) == 3
    wait_until(lambda: idle(one.counters))
    counted = one.counters
    assert (counted["expired_there"], counted["late_replies"]) == (1, 1)
    assert counted["sent"] == counted["completed"] + counted["expired_there"]


def test_groups_do_not_wait_for_one_another(subject: Maker) -> None:
    one = subject(Grouped, concurrency_groups={"io": 2, "compute": 1})
    one.hold(max_in_flight=1)
    behind = one.handle.hold.options(max_in_flight=1).call(one.path("x"), one.path("gate"))
    assert one.handle.read.options(max_in_flight=1).call("other group").result(PATIENCE_S) == "other group"
    by_option = one.handle.read.options(max_in_flight=1, concurrency_group="compute").call("same group")
    assert not behind.running()
    assert not by_option.running()
    one.release()
    assert by_option.result(PATIENCE_S) == "same group"


def test_refs_as_arguments(subject: Maker, tmp_path: pathlib.Path) -> None:
    one = subject()
    echo = one.handle.echo
    assert echo.call(ray.put(1)).result(PATIENCE_S) == 1
    assert ray.get(echo.call([ray.put(2)]).result(PATIENCE_S)[0], timeout=PATIENCE_S) == 2

    @ray.remote(num_cpus=0)
    def later(gate: str) -> int:
        wait_for_file(gate)
        return 3

    @ray.remote(num_cpus=0)
    def broken() -> None:
        raise KeyError("the argument's")

    other = one.path("other")
    pending = echo.call(later.remote(other))
    # A call with a ready argument does not wait for it.
    assert not pending.done()
    failed = echo.call(broken.remote())
    touch(other)
    assert pending.result(PATIENCE_S) == 3
    error = error_of(failed)
    assert isinstance(error, ray.exceptions.RayTaskError)
    assert isinstance(error, KeyError)
    assert actorsub.state(one.handle) is ActorState.ALIVE
    # The same from the line, where the arguments are kept as a copy.
    one.hold(max_in_flight=1)
    ref = ray.put([4])
    waiting = [echo.options(max_in_flight=1).call(*args) for args in ([ref], [[ref], {"x": 5}], [broken.remote()])]
    key = echo.options(max_in_flight=1).call(1, key=[6])
    id_of_ref = ref.hex()
    # The line keeps what it names alive.
    del ref
    gc.collect()
    one.release()
    assert waiting[0].result(PATIENCE_S) == [4]
    nested, more, _ = waiting[1].result(PATIENCE_S)
    assert (nested[0].hex(), ray.get(nested[0], timeout=PATIENCE_S), more) == (id_of_ref, [4], {"x": 5})
    assert isinstance(error_of(waiting[2]), KeyError)
    assert key.result(PATIENCE_S) == (1, [6])
    wait_until(lambda: idle(one.counters))


def test_handles_as_arguments(subject: Maker) -> None:
    one, other = subject(AsyncDoer), subject()
    assert one.handle.ask.call([other.handle], 1).result(PATIENCE_S) == 1
    one.hold(max_in_flight=1)
    waiting = one.handle.ask.options(max_in_flight=1).call([other.handle], 2)
    one.release()
    assert waiting.result(PATIENCE_S) == 2


def test_large_arguments_and_results(subject: Maker) -> None:
    one = subject()
    array = np.ones(4_000_000)
    assert one.handle.total.call(array).result(PATIENCE_S) == array.size
    assert one.handle.zeros.call(array.size).result(PATIENCE_S).nbytes == array.nbytes
    one.hold(max_in_flight=1)
    waiting = one.handle.total.options(max_in_flight=1).call(array)
    array[:] = 0
    one.release()
    assert waiting.result(PATIENCE_S) == array.size


class Unpicklable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


# What Ray does with each is kept: it says more about a TypeError, and leaves others as they are.
UNPICKLABLE = [TypeError("no type"), RuntimeError("not me")]

WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), ((1, 2, 3), {}), ((1, 2), {"no_such": 3})]


def check_wrong_arguments(method: Any) -> None:
    for args, kwargs in WRONG:
        with pytest.raises(TypeError):
            method.call(*args, **kwargs)


def test_wrong_arguments_while_it_is_up(subject: Maker) -> None:
    one = subject()
    check_wrong_arguments(one.handle.note)
    for value in UNPICKLABLE:
        with pytest.raises(type(value), match=str(value)):
            one.handle.echo.call(Unpicklable(value))
    assert idle(one.counters)
    assert one.counters["sent"] == 1
    assert one.handle.echo.call("goes on").result(PATIENCE_S) == "goes on"


def test_wrong_arguments_while_others_wait(subject: Maker) -> None:
    one = subject()
    one.hold(max_in_flight=1)
    window = {"max_in_flight": 1, "max_queued": 1}
    check_wrong_arguments(one.handle.note.options(**window))
    for value in UNPICKLABLE:
        with pytest.raises(type(value), match=str(value)):
            one.handle.echo.options(**window).call(Unpicklable(value))
    assert (one.counters["waiting"], one.counters["cancelled"]) == (0, 0)
    # The place in the line is free again.
    waiting = one.handle.echo.options(**window).call("goes on")
    check_wrong_arguments(one.handle.note.options(**window))
    assert one.counters["waiting"] == 1
    one.release()
    assert waiting.result(PATIENCE_S) == "goes on"
    wait_until(lambda: idle(one.counters))


@pytest.mark.parametrize("on_unavailable", ["ref", "raise", "wait"])
def test_wrong_arguments_while_it_is_away(restartable: MakeRestartable, on_unavailable: str) -> None:
    one = restartable(on_unavailable=on_unavailable)
    one.kill()
    for args, kwargs in WRONG[:1] + WRONG[2:]:
        with pytest.raises(TypeError):
            one.handle.record.call(*args, **kwargs)
    if on_unavailable == "wait":
        with pytest.raises(TypeError, match="no type"):
            one.handle.echo.call(Unpicklable(TypeError("no type")))
    assert idle(actorsub.stats(one.handle)["calls"])


def test_wrong_arguments_of_a_dead_actor(subject: Maker) -> None:
    one = subject()
    ray.kill(one.handle)
    wait_for_state(one.handle, ActorState.DEAD)
    check_wrong_arguments(one.handle.note)


# ---------------------------------------------------------------------------------------------------------------------
# A future.


def test_the_stages_of_a_call(subject: Maker) -> None:
    one = subject()
    held = one.hold()
    assert isinstance(held, concurrent.futures.Future)
    assert (held.done(), held.running(), held.cancelled()) == (False, True, False)
    assert "hold" in repr(held)
    assert "sent" in repr(held)
    waiting = one.handle.echo.options(max_in_flight=1).call(1)
    assert (waiting.done(), waiting.running(), waiting.cancelled()) == (False, False, False)
    assert "waiting" in repr(waiting)
    with pytest.raises(concurrent.futures.TimeoutError):
        held.result(0.01)
    with pytest.raises(concurrent.futures.TimeoutError):
        held.exception(0)
    # The wait was over, not the call.
    assert held.running()
    seen: list[Any] = []
    for call in (held, waiting):
        call.add_done_callback(seen.append)
    one.release()
    assert held.result(PATIENCE_S) == "held"
    assert held.exception() is None
    assert waiting.result(PATIENCE_S) == 1
    assert (held.done(), held.running(), held.cancelled()) == (True, False, False)
    wait_until(lambda: len(seen) == 2)
    assert seen == [held, waiting]
    held.add_done_callback(seen.append)
    assert seen[-1] is held
    assert "done" in repr(held)
    assert held.cancel() is False


def test_a_call_is_made_by_methods_only_and_stays_here(subject: Maker) -> None:
    one = subject()
    with pytest.raises(TypeError):
        Call()
    call = one.handle.echo.call(1)
    with pytest.raises(TypeError, match="result"):
        pickle.dumps(call)
    with pytest.raises(TypeError, match="result"):
        one.handle.echo.remote(call)
    assert call.result(PATIENCE_S) == 1


def test_waiting_for_many(subject: Maker) -> None:
    one = subject()
    held = one.hold()
    plain: concurrent.futures.Future[Any] = concurrent.futures.Future()
    waiting = one.handle.echo.options(max_in_flight=1).call(1)
    done, pending = concurrent.futures.wait([held, plain, waiting], timeout=0.01)
    assert (done, pending) == (set(), {held, plain, waiting})
    plain.set_result(None)
    done, _ = concurrent.futures.wait([held, plain, waiting], return_when="FIRST_COMPLETED", timeout=PATIENCE_S)
    assert done == {plain}
    cancelled = one.handle.echo.options(max_in_flight=1).call(2)
    threading.Thread(target=cancelled.cancel).start()
    assert concurrent.futures.wait([cancelled], timeout=PATIENCE_S).done == {cancelled}
    one.release()
    every = [held, plain, waiting, one.handle.fail.call(KeyError("x")), cancelled]
    assert set(concurrent.futures.as_completed(every, timeout=PATIENCE_S)) == set(every)
    done, _ = concurrent.futures.wait(
        [one.handle.fail.call(KeyError("x"))], return_when="FIRST_EXCEPTION", timeout=PATIENCE_S
    )
    assert len(done) == 1


def test_waiting_for_calls_and_others_in_every_order(subject: Maker) -> None:
    """`concurrent.futures.wait` takes the locks of all its futures in the order of their ids. One lock for all Calls
    would be taken before a plain future by one thread and after it by another."""
    one = subject()
    waits = 3000
    # A plain future with a Call before it and one after it; these have their end at once.
    method = one.handle.echo.options(timeout_s=1e-9)
    made: list[Any] = []
    for _ in range(2000):
        made += [method.call(), concurrent.futures.Future()]
    made.sort(key=id)
    first = next(i for i, future in enumerate(made) if isinstance(future, Call))
    last = max(i for i, future in enumerate(made) if isinstance(future, Call))
    plain = next(future for future in made[first:last] if not isinstance(future, Call))
    pairs = [[made[first], plain], [plain, made[last]]]
    stuck = []

    def poll(mine: list[Any]) -> None:
        for _ in range(waits):
            concurrent.futures.wait(mine, timeout=0, return_when="FIRST_COMPLETED")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=poll, args=(pair,), daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            stuck += [thread] if thread.is_alive() else []
    finally:
        sys.setswitchinterval(interval)
    assert not stuck


def test_await_in_every_way(subject: Maker) -> None:
    one = subject()
    echo = one.handle.echo

    async def main() -> None:
        call = echo.call(1)
        assert await call == 1
        assert await call == 1
        assert await asyncio.gather(echo.call(2), asyncio.sleep(0, 3), echo.call(4)) == [2, 3, 4]
        assert await asyncio.wait_for(echo.call(5), PATIENCE_S) == 5
        assert await asyncio.wrap_future(echo.call(6)) == 6
        with pytest.raises(ValueError, match="mine"):
            await one.handle.fail.call(ValueError("mine"))
        done, _ = await asyncio.wait([asyncio.ensure_future(echo.call(7))], timeout=PATIENCE_S)
        assert done.pop().result() == 7

    asyncio.run(main())


def test_the_timeout_of_an_await_takes_the_call_back(subject: Maker) -> None:
    one = subject()
    one.hold(max_in_flight=1)
    path = one.path("ledger")

    async def main() -> None:
        for make in (asyncio.ensure_future, asyncio.wrap_future):
            call = one.handle.note.options(max_in_flight=1).call(path, "never")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(make(call), 0.01)
            assert call.cancelled()
            # As with a future of asyncio, also for who comes later.
            with pytest.raises(asyncio.CancelledError):
                await call
        call = one.handle.note.options(max_in_flight=1).call(path, "never")
        waiter = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert waiter.cancelled()

    asyncio.run(main())
    assert (one.counters["waiting"], one.counters["cancelled"]) == (0, 3)
    one.release()
    assert one.handle.note.call(path, "last").result(PATIENCE_S) == "last"
    assert notes(path) == ["last"]


def test_the_timeout_of_an_await_asks_ray_to_cancel(subject: Maker) -> None:
    one = subject(AsyncDoer)
    started, ended = one.path("started"), one.path("ended")

    async def main() -> Call:
        call = one.handle.never.call(started, ended)
        await asyncio.to_thread(wait_for_file, started)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.01)
        return call

    call = asyncio.run(main())
    wait_for_file(ended)
    assert isinstance(error_of(call), ray.exceptions.TaskCancelledError)


def test_many_loops_await_one_call(subject: Maker) -> None:
    one = subject()
    held = one.hold()
    waiting = one.handle.echo.options(max_in_flight=1).call("waited")
    count = 4
    begun = threading.Barrier(count + 1)

    def run() -> list[Any]:
        async def main() -> list[Any]:
            both = [asyncio.ensure_future(call) for call in (held, waiting)]
            await asyncio.sleep(0)
            begun.wait(PATIENCE_S)
            return await asyncio.gather(*both)

        return asyncio.run(main())

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        results = [pool.submit(run) for _ in range(count)]
        begun.wait(PATIENCE_S)
        one.release()
        assert [result.result(PATIENCE_S) for result in results] == [["held", "waited"]] * count


def test_a_loop_that_was_closed_meanwhile(subject: Maker, caplog: pytest.LogCaptureFixture) -> None:
    one = subject()
    held = one.hold()
    loop = asyncio.new_event_loop()

    async def wait() -> Any:
        return await held

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    seen = []
    # After the one of the loop.
    held.add_done_callback(seen.append)
    one.release()
    assert held.result(PATIENCE_S) == "held"
    wait_until(lambda: seen)
    assert not caplog.records
    task._log_destroy_pending = False


def test_await_in_a_task_and_in_an_actor(subject: Maker) -> None:
    one, other = subject(), subject(AsyncDoer)

    @ray.remote(num_cpus=0)
    def in_task(handles: list[Any]) -> Any:
        method = handles[0].echo.options(max_in_flight=1)
        made = [method.call(i) for i in range(20)]

        async def main() -> Any:
            return await asyncio.gather(*(method.call(i) for i in range(20)))

        return [call.result(PATIENCE_S) for call in made] + asyncio.run(main())

    assert ray.get(in_task.remote([one.handle]), timeout=PATIENCE_S) == [*range(20), *range(20)]
    assert ray.get([other.handle.ask.remote([one.handle], i) for i in range(20)], timeout=PATIENCE_S) == [*range(20)]


def test_a_task_that_waits_lends_its_cpu(subject: Maker) -> None:
    one = subject()
    handles = [one.handle]

    @ray.remote(num_cpus=4)
    def outer(handles: list[Any], started: str, gate: str) -> Any:
        return handles[0].hold.call(started, gate).result(PATIENCE_S)

    @ray.remote(num_cpus=4)
    def inner(gate: str) -> None:
        touch(gate)

    # All CPUs there are: `inner` runs only when `outer` lends them.
    ref = outer.remote(handles, one.path("started"), one.path("gate"))
    wait_for_file(one.path("started"))
    inner.remote(one.path("gate"))
    assert ray.get(ref, timeout=PATIENCE_S) == "held"


def test_waiting_where_it_would_never_end(subject: Maker) -> None:
    one = subject()
    one.hold()
    waiting = one.handle.echo.options(max_in_flight=1).call(1)

    async def on_a_loop() -> None:
        for ask in (waiting.result, waiting.exception):
            with pytest.raises(RuntimeError, match="await"):
                ask(1)
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0)

    asyncio.run(on_a_loop())
    errors: list[Any] = []

    def in_callback(_: Any) -> None:
        try:
            waiting.result(1)
        except BaseException as error:
            errors.append(error)

    # On Ray's thread, and on the watcher's.
    one.handle.fail.options(timeout_s=0.05).call(ValueError()).add_done_callback(in_callback)
    wait_until(lambda: len(errors) == 1)
    ray_done = subject().handle.echo.call()
    ray_done.add_done_callback(in_callback)
    wait_until(lambda: len(errors) == 2 or ray_done.done())
    if len(errors) == 1:
        # It was done before it could be asked; the callback ran on this thread, and its wait ended.
        errors.append(RuntimeError("callback"))
    assert all(isinstance(error, (RuntimeError, concurrent.futures.TimeoutError)) for error in errors)
    assert isinstance(errors[0], RuntimeError)
    one.release()
    assert waiting.result(PATIENCE_S) == 1


def test_calls_from_callbacks(subject: Maker) -> None:
    """On Ray's thread, on the watcher's (deadline), and on the sender's (num_returns=0 from the line)."""
    one, other = subject(), subject()
    made: list[Call] = []

    def call_on(call: Call) -> None:
        made.append(other.handle.echo.options(max_in_flight=1).call(threading.current_thread().name))

    held = one.hold(max_in_flight=1)
    held.add_done_callback(call_on)
    one.handle.echo.options(max_in_flight=1, timeout_s=0.05).call().add_done_callback(call_on)
    one.handle.echo.options(max_in_flight=1, num_returns=0).call().add_done_callback(call_on)
    wait_until(lambda: len(made) == 1)
    one.release()
    wait_until(lambda: len(made) == 3)
    threads = {call.result(PATIENCE_S) for call in made}
    assert {"actorsub-watcher", "actorsub-sender"} < threads


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_callbacks_that_raise(subject: Maker, error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    one = subject()
    seen: list[Any] = []

    def disturb(_: Any) -> None:
        seen.append(threading.current_thread().name)
        raise error

    held = one.hold(max_in_flight=1)
    held.add_done_callback(disturb)
    one.handle.echo.options(max_in_flight=1, timeout_s=0.05).call().add_done_callback(disturb)
    one.handle.echo.options(max_in_flight=1, num_returns=0).call().add_done_callback(disturb)
    last = one.handle.echo.options(max_in_flight=1).call("last")
    wait_until(lambda: len(seen) == 1)
    one.release()
    assert last.result(PATIENCE_S) == "last"
    wait_until(lambda: len(seen) == 3)
    # Watcher, Ray, and sender go on.
    one.handle.echo.options(timeout_s=30).call().result(PATIENCE_S)
    assert {"actorsub-watcher", "actorsub-sender"} <= {thread.name for thread in threading.enumerate()}
    # None of ours takes part in this warning.
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 3


def test_what_nobody_keeps_is_collected(subject: Maker) -> None:
    """Without the garbage collector: results may be large."""
    one = subject()
    gc.collect()
    gc.disable()
    try:
        calls_made: list[Any] = []

        async def main() -> None:
            call = one.handle.zeros.call(10)
            await call
            await call
            waiting = one.handle.echo.options(max_in_flight=1).call()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(waiting, PATIENCE_S)
            calls_made.extend([weakref.ref(call), weakref.ref(waiting)])

        asyncio.run(main())
        call = one.handle.echo.call(1)
        call.result(PATIENCE_S)
        concurrent.futures.wait([call], timeout=PATIENCE_S)
        calls_made.append(weakref.ref(call))
        del call
        held = one.hold(max_in_flight=1)
        cancelled = one.handle.echo.options(max_in_flight=1).call()
        cancelled.add_done_callback(lambda _, it=cancelled: it)
        cancelled.cancel()
        expired = one.handle.echo.options(max_in_flight=1, timeout_s=0.02).call()
        expired.exception(PATIENCE_S)
        calls_made.extend([weakref.ref(cancelled), weakref.ref(expired), weakref.ref(held)])
        del cancelled, expired
        one.release()
        held.result(PATIENCE_S)
        del held
        wait_until(lambda: not [ref for ref in calls_made if ref() is not None], what="all are gone")
    finally:
        gc.enable()


def test_calls_run_when_nobody_keeps_them(subject: Maker) -> None:
    one = subject()
    path = one.path("ledger")
    one.hold(max_in_flight=1)
    for entry in range(10):
        one.handle.note.options(max_in_flight=1).call(path, entry)
    gc.collect()
    one.release()
    wait_until(lambda: len(notes(path)) == 10)
    assert notes(path) == [str(entry) for entry in range(10)]


def test_calls_run_when_the_handle_is_dropped(ray_local: None, tmp_path: pathlib.Path) -> None:
    path, started, gate = (str(tmp_path / name) for name in ("ledger", "started", "gate"))
    handle = actorsub.remote(num_cpus=0)(Doer).remote()
    pid = handle.pid.call().result(PATIENCE_S)
    handle.hold.options(max_in_flight=1).call(started, gate)
    wait_for_file(started)
    handle.note.options(max_in_flight=1).call(path, "waited")
    last = handle.note.options(max_in_flight=1).call(path, "kept")
    del handle
    touch(gate)
    assert last.result(PATIENCE_S) == "kept"
    assert notes(path) == ["waited", "kept"]
    # And then nothing keeps the actor, not even a Call that is done.
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), PATIENCE_S, "the actor ends")
    assert last.result() == "kept"


def test_a_handle_in_an_expression(ray_local: None) -> None:
    assert actorsub.remote(num_cpus=0)(Doer).remote().echo.call(1).result(PATIENCE_S) == 1
    call = actorsub.remote(num_cpus=0)(Doer).remote().echo.call(2)
    assert call.result(PATIENCE_S) == 2


# ---------------------------------------------------------------------------------------------------------------------
# The window and the line.


@pytest.mark.parametrize("window", [1, 3])
def test_the_window_is_never_exceeded(subject: Maker, window: int) -> None:
    one = subject(AsyncDoer)
    method = one.handle.enter.options(max_in_flight=window)
    made: list[Call] = []

    def submit() -> None:
        made.extend([method.call(5) for _ in range(100)])

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    most = max(call.result(PATIENCE_S) for call in made)
    assert most <= window
    # It was used, too; of one call the reply may be under way still.
    assert most >= min(window, 2)
    wait_until(lambda: idle(one.counters))
    assert one.counters["completed"] == 401


def test_the_order_is_kept(restartable: MakeRestartable) -> None:
    """Through the window, the line, and a restart; of each of several threads."""
    one = restartable(on_unavailable="wait", max_in_flight=2)
    each, threads = 60, 3
    begun = threading.Barrier(threads + 1)

    def submit(name: int) -> None:
        for number in range(each // 2):
            one.handle.record.call(f"{name}-{number}")
        begun.wait(PATIENCE_S)
        begun.wait(PATIENCE_S)
        for number in range(each // 2, each):
            one.handle.record.call(f"{name}-{number}")
        begun.wait(PATIENCE_S)

    running = [threading.Thread(target=submit, args=(name,)) for name in range(threads)]
    for thread in running:
        thread.start()
    begun.wait(PATIENCE_S)
    wait_until(lambda: len(one.ledger) == threads * each // 2)
    wait_until(lambda: idle(actorsub.stats(one.handle)["calls"]))
    one.kill()
    begun.wait(PATIENCE_S)
    begun.wait(PATIENCE_S)
    assert actorsub.stats(one.handle)["calls"]["waiting"] == threads * each // 2
    one.let_restart()
    wait_until(lambda: len(one.ledger) == threads * each)
    for name in range(threads):
        mine = [entry for entry in one.ledger if entry.startswith(f"{name}-")]
        assert mine == [f"{name}-{number}" for number in range(each)]


def test_the_line_is_bounded(subject: Maker) -> None:
    one = subject()
    path = one.path("ledger")
    one.hold(max_in_flight=1)
    method = one.handle.note.options(max_in_flight=1, max_queued=3)
    waiting = [method.call(path, i) for i in range(3)]
    for _ in range(100):
        with pytest.raises(actorsub.QueueFullError) as caught:
            method.call(path, "full")
        assert caught.value.sent is False
        assert isinstance(caught.value, ray.exceptions.PendingCallsLimitExceeded)
        assert "max_queued=3" in str(caught.value)
    # Each call has its own bound.
    for on_unavailable in ("ref", "raise", "wait"):
        with pytest.raises(actorsub.QueueFullError):
            method.options(max_queued=0, on_unavailable=on_unavailable).call(path, "full")
    assert pickle.loads(pickle.dumps(caught.value)).sent is False
    assert one.counters["refused_full"] == 103
    # A place that is given back can be taken.
    assert waiting[1].cancel()
    again = method.call(path, "again")
    with pytest.raises(actorsub.QueueFullError):
        method.call(path, "full")
    one.release()
    assert again.result(PATIENCE_S) == "again"
    assert notes(path) == ["0", "2", "again"]


def test_no_line_at_all(subject: Maker) -> None:
    one = subject()
    method = one.handle.echo.options(max_in_flight=1, max_queued=0)
    assert method.call(1).result(PATIENCE_S) == 1
    wait_until(lambda: idle(one.counters))
    held = one.hold(max_in_flight=1, max_queued=0)
    with pytest.raises(actorsub.QueueFullError):
        method.call(2)
    one.release()
    held.result(PATIENCE_S)
    wait_until(lambda: idle(one.counters))
    assert method.call(3).result(PATIENCE_S) == 3


def test_a_thousand_waiting_calls_against_a_bound(restartable: MakeRestartable) -> None:
    one = restartable(on_unavailable="wait", max_queued=3)
    one.kill()
    ends = []
    for number in range(1000):
        try:
            ends.append(one.handle.record.call(str(number)))
        except actorsub.QueueFullError as error:
            ends.append(error)
    assert [type(end) for end in ends] == [Call] * 3 + [actorsub.QueueFullError] * 997
    one.restart()
    assert [call.result(PATIENCE_S) for call in ends[:3]] == ["0", "1", "2"]
    assert one.handle.record.call("back").result(PATIENCE_S) == "back"
    assert one.ledger == ["0", "1", "2", "back"]


def test_rays_own_bound(subject: Maker) -> None:
    one = subject(max_pending_calls=1)
    wait_until(lambda: idle(one.counters))
    held = one.hold()
    with pytest.raises(actorsub.QueueFullError) as caught:
        one.handle.echo.call(1)
    assert caught.value.sent is False
    # From the line it is the Call that fails.
    one.handle.hold.options(max_in_flight=1).call(one.path("x"), one.path("gate"))
    assert one.counters["waiting"] == 1
    assert one.counters["in_flight"] == 1
    one.release()
    assert held.result(PATIENCE_S) == "held"
    wait_until(lambda: idle(one.counters))


def test_an_error_of_rays_when_the_turn_of_a_call_comes(subject: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    one = subject()
    one.hold(max_in_flight=1)
    waiting = [one.handle.echo.options(max_in_flight=1).call([i]) for i in range(2)]
    real, failed = _core.give, threading.Event()

    def give(*args: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError("not this time")
        return real(*args)

    monkeypatch.setattr(_core, "give", give)
    one.release()
    # An error, and not a result that is an exception.
    with pytest.raises(OSError, match="not this time"):
        waiting[0].result(PATIENCE_S)
    assert waiting[1].result(PATIENCE_S) == [1]
    wait_until(lambda: idle(one.counters))


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines.


def test_calls_behind_a_busy_actor(subject: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that waited here never run; those that waited there do, since cancelling may harm an actor that works in
    order."""
    one = subject()
    asked: list[Any] = []
    monkeypatch.setattr(ray, "cancel", asked.append)
    path = one.path("ledger")
    one.hold()
    begin = time.monotonic()
    method = one.handle.note.options(timeout_s=0.5)
    sent = [method.call(path, "there") for _ in range(50)]
    here = [method.options(max_in_flight=1).call(path, "here") for _ in range(50)]
    for call in (*here, *sent):
        error = error_of(call)
        assert isinstance(error, actorsub.DeadlineExceededError)
        assert isinstance(error, TimeoutError)
        assert isinstance(error, ray.exceptions.GetTimeoutError)
        assert error.sent is (call in sent)
        assert error.actor_id == one.handle._actor_id.hex()
        assert pickle.loads(pickle.dumps(error)).sent is error.sent
    assert time.monotonic() - begin >= 0.5
    assert (one.counters["expired_here"], one.counters["expired_there"]) == (50, 50)
    one.release()
    # The late replies come, and are counted.
    wait_until(lambda: idle(one.counters), PATIENCE_S)
    assert one.counters["late_replies"] == 50
    assert one.handle.note.call(path, "last").result(PATIENCE_S) == "last"
    assert notes(path) == ["there"] * 50 + ["last"]
    assert asked == []


@ray.remote(num_cpus=0)
def value_behind(gate: str) -> str:
    while not os.path.exists(gate):
        time.sleep(0.01)
    return "value"


@pytest.mark.parametrize("kind", [Doer, AsyncDoer])
@pytest.mark.parametrize("how", ["deadline", "cancel", "await"])
def test_a_call_is_given_up_before_its_argument_is_ready(subject: Maker, kind: Any, how: str) -> None:
    """Ray has not sent it yet. Asked to cancel it, it would leave a gap in the sequence of an actor that works in
    order, which then takes no call at all."""
    one = subject(kind)
    gate = one.path("argument")
    late = value_behind.remote(gate)
    call = one.handle.echo.options(timeout_s=0.2 if how == "deadline" else None).call(late)
    if how == "deadline":
        assert error_of(call).sent is True
    elif how == "cancel":
        assert call.cancel() is False
    else:

        async def leave() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0)

        asyncio.run(leave())
    touch(gate)
    assert ray.get(late) == "value"
    for i in range(20):
        assert one.handle.echo.options(timeout_s=PATIENCE_S).call(i).result() == i
    wait_until(lambda: idle(one.counters))


@pytest.mark.parametrize("as_group", [False, True])
@pytest.mark.parametrize("leave", ["wait_for", "cancelled task", "gather"])
def test_an_await_that_is_cancelled_before_its_first_step(subject: Maker, leave: str, as_group: bool) -> None:
    """It never begins to await, and takes the call back all the same."""
    one = subject()
    held = one.hold(max_in_flight=1)
    target = actorsub.ReplicaGroup([one.handle], max_in_flight=1) if as_group else one.handle
    method = target.note if as_group else target.note.options(max_in_flight=1)
    path = one.path("ledger")

    async def main() -> None:
        calls = [method.call(path, "given up") for _ in range(5)]
        for call in calls:
            if leave == "wait_for":
                with pytest.raises((asyncio.TimeoutError, asyncio.CancelledError)):
                    await asyncio.wait_for(call, 0)
                continue
            task = asyncio.ensure_future(call) if leave == "cancelled task" else asyncio.gather(call)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert all(call.cancelled() for call in calls)

    asyncio.run(main())
    one.release()
    assert held.result(PATIENCE_S) == "held"
    assert one.handle.note.call(path, "last").result(PATIENCE_S) == "last"
    assert notes(path) == ["last"]


def test_a_task_of_a_call_is_like_any_other(subject: Maker) -> None:
    one = subject()

    async def main() -> None:
        call = one.handle.echo.call(1)
        # One call, several tasks, each with steps of its own.
        assert await asyncio.gather(call, call, asyncio.ensure_future(call)) == [1, 1, 1]
        failing = one.handle.fail.call(ValueError("of the method"))
        with pytest.raises(ValueError):
            await asyncio.ensure_future(failing)
        late = one.handle.echo.call(2)
        shielded = asyncio.shield(late)
        shielded.cancel()
        # Nobody cancels what is shielded.
        assert await asyncio.wait_for(late, PATIENCE_S) == 2

    asyncio.run(main())


def test_a_deadline_cancels_what_runs(subject: Maker) -> None:
    one = subject(AsyncDoer)
    started, ended = one.path("started"), one.path("ended")
    call = one.handle.never.options(timeout_s=2).call(started, ended)
    wait_for_file(started)
    assert error_of(call).sent is True
    wait_for_file(ended)
    wait_until(lambda: one.counters["late_replies"] == 1)
    assert idle(one.counters)


def test_a_deadline_passes_while_the_actor_is_away(restartable: MakeRestartable) -> None:
    one = restartable(on_unavailable="wait")
    one.kill()
    short = one.handle.record.options(timeout_s=0.1).call("short")
    long = one.handle.record.options(timeout_s=PATIENCE_S).call("long")
    error = error_of(short)
    assert isinstance(error, actorsub.DeadlineExceededError)
    assert (error.sent, error.state) == (False, ActorState.RESTARTING)
    one.let_restart()
    assert long.result(PATIENCE_S) == "long"
    assert one.ledger == ["long"]


def test_deadlines_without_timers(subject: Maker) -> None:
    """Where the native thread could not be had, the watcher looks at the clock itself."""
    one = subject()
    one.hold()
    one.handle.echo.options(timeout_s=0.01).call().exception(PATIENCE_S)
    _core.stop_sentinel()
    try:
        # Wakes the watcher, which from here on waits in another way.
        watcher.ensure().nudge()
        calls_made = [one.handle.echo.options(timeout_s=s, max_in_flight=n).call() for s in (0.3, 0.1) for n in (1, 9)]
        for call in calls_made:
            assert isinstance(error_of(call), actorsub.DeadlineExceededError)
    finally:
        actorsub.shutdown()


def test_deadlines_are_kept_after_a_shutdown(subject: Maker) -> None:
    one = subject()
    one.hold()
    sent = one.handle.echo.options(timeout_s=1.0).call()
    waiting = one.handle.echo.options(max_in_flight=1).call()
    actorsub.shutdown()
    error = error_of(waiting)
    assert isinstance(error, actorsub.ActorUnavailableError)
    assert error.sent is False
    assert "shutdown" in str(error)
    assert one.counters["cancelled"] == 0
    # Starts the threads again, which know of the deadline of before.
    assert isinstance(error_of(one.handle.echo.options(timeout_s=0.05).call()), actorsub.DeadlineExceededError)
    assert isinstance(error_of(sent), actorsub.DeadlineExceededError)
    again = one.handle.echo.options(max_in_flight=4).call(1)
    one.release()
    assert again.result(PATIENCE_S) == 1


def test_deadlines_are_kept_after_a_shutdown_that_found_none(subject: Maker) -> None:
    """Its timer was set, for a call that was over by then."""
    one = subject()
    assert one.handle.echo.options(timeout_s=2.0).call(1).result(PATIENCE_S) == 1
    actorsub.shutdown()
    # Due after the one that was lost with its timer.
    assert isinstance(error_of(one.hold(timeout_s=3.0)), actorsub.DeadlineExceededError)
    one.release()


def test_shutdown_while_others_call(subject: Maker) -> None:
    one = subject(AsyncDoer)
    method = one.handle.echo.options(max_in_flight=2)
    stop = threading.Event()
    made: list[Call] = []

    def submit() -> None:
        mine: list[Call] = []
        while not stop.is_set():
            mine.append(method.call(len(mine)))
            if len(mine) % 50 == 0:
                concurrent.futures.wait(mine[-50:], timeout=PATIENCE_S)
        made.extend(mine)

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        before = one.counters["completed"]
        actorsub.shutdown()
        wait_until(lambda before=before: one.counters["completed"] > before, what="calls go on")
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not concurrent.futures.wait(made, timeout=PATIENCE_S).not_done
    errors = [call.exception() for call in made]
    assert all(error is None or (not error.sent and "shutdown" in str(error)) for error in errors)
    wait_until(lambda: idle(one.counters))
    # The next use starts the threads again, where the last shutdown() came after everybody's last use; they are whole.
    assert method.call("after").result(PATIENCE_S) == "after"
    assert _core.sentinel_runs()
    one.watch()


# ---------------------------------------------------------------------------------------------------------------------
# Away, dead, not there yet.


def test_each_call_decides_for_itself(restartable: MakeRestartable) -> None:
    one = restartable(max_task_retries=2)
    one.kill()
    record = one.handle.record
    waiting = record.options(on_unavailable="wait").call("waited")
    for method in (record, record.options(max_task_retries=5)):
        failed = method.options(on_unavailable="ref").call("ref")
        assert failed.done()
        error = error_of(failed)
        assert isinstance(error, actorsub.ActorUnavailableError)
        assert (error.sent, error.state) == (False, ActorState.RESTARTING)
        with pytest.raises(actorsub.ActorUnavailableError) as caught:
            method.options(on_unavailable="raise").call("raise")
        assert caught.value.sent is False
    assert failed.object_ref is None
    assert waiting.running() is False
    one.let_restart()
    assert waiting.result(PATIENCE_S) == "waited"
    assert one.ledger == ["waited"]
    counted = actorsub.stats(one.handle)["calls"]
    assert counted["failed"] == {"ActorUnavailableError": 2}


def test_an_actor_that_will_not_come_back(restartable: MakeRestartable) -> None:
    """`ray.kill` while calls wait for it."""
    one = restartable(on_unavailable="wait")
    one.kill()
    waiting = [one.handle.record.call("never") for _ in range(20)]
    ray.kill(one.handle)
    for call in waiting:
        error = error_of(call)
        assert isinstance(error, actorsub.ActorDiedError)
        assert error.sent is False
    assert idle(actorsub.stats(one.handle)["calls"])
    assert one.ledger == []


@pytest.mark.parametrize("how", ["exit_actor", "SIGKILL", "ray.kill"])
def test_a_dead_actor(subject: Maker, how: str) -> None:
    one = subject()
    one.watch()
    if how == "exit_actor":
        assert isinstance(error_of(one.handle.leave.call()), actorsub.ActorDiedError)
    elif how == "SIGKILL":
        held = one.hold()
        one.kill()
        error = error_of(held)
        assert isinstance(error, actorsub.ActorDiedError)
        assert error.sent is True
    else:
        ray.kill(one.handle)
    wait_for_state(one.handle, ActorState.DEAD)
    for on_unavailable in ("ref", "wait"):
        error = error_of(one.handle.echo.options(on_unavailable=on_unavailable).call())
        assert isinstance(error, actorsub.ActorDiedError)
        assert error.sent is False
    with pytest.raises(actorsub.ActorDiedError):
        one.handle.echo.options(on_unavailable="raise").call()


def test_an_actor_that_cannot_be_placed(ray_local: None) -> None:
    handle = actorsub.remote(num_cpus=0, resources={"no such": 1})(Doer).remote()
    wait_for_state(handle, ActorState.PENDING)
    submitted = handle.echo.options(timeout_s=0.2).call()
    assert submitted.running()
    error = error_of(submitted)
    assert isinstance(error, actorsub.DeadlineExceededError)
    assert (error.sent, error.state) == (True, ActorState.PENDING)
    failed = handle.echo.options(on_pending="fail").call()
    assert isinstance(error_of(failed), actorsub.ActorUnavailableError)
    assert failed.exception().sent is False
    assert "never up" in str(failed.exception())
    with pytest.raises(actorsub.ActorUnavailableError):
        handle.echo.options(on_pending="fail", on_unavailable="raise").call()
    waiting = handle.echo.options(on_pending="wait", timeout_s=0.2).call()
    assert not waiting.running()
    error = error_of(waiting)
    assert isinstance(error, actorsub.DeadlineExceededError)
    assert error.sent is False
    again = handle.echo.options(on_pending="wait").call()
    assert again.cancel()
    ray.kill(handle)


def test_calls_wait_for_the_first_start(ray_local: None, tmp_path: pathlib.Path) -> None:
    class Slow:
        def __init__(self, gate: str) -> None:
            wait_for_file(gate)

        def note(self, path: str, entry: Any) -> None:
            note(path, entry)

    gate, path = str(tmp_path / "gate"), str(tmp_path / "ledger")
    handle = actorsub.remote(num_cpus=0, on_pending="wait")(Slow).remote(gate)
    waiting = [handle.note.call(path, i) for i in range(100)]
    assert actorsub.stats(handle)["calls"]["waiting"] == 100
    touch(gate)
    concurrent.futures.wait(waiting, timeout=PATIENCE_S)
    assert notes(path) == [str(i) for i in range(100)]
    ray.kill(handle)


def test_a_frozen_actor(subject: Maker) -> None:
    one = subject(max_restarts=-1, silence_timeout_s=0.2, silence_in_flight_s=None)
    one.watch()
    path = one.path("ledger")
    os.kill(one.pid, signal.SIGSTOP)
    in_flight = one.handle.note.call(path, "before")
    wait_for_state(one.handle, ActorState.UNREACHABLE)
    waiting = [one.handle.note.options(on_unavailable="wait").call(path, i) for i in range(5)]
    refused = error_of(one.handle.note.call(path, "refused"))
    assert (refused.sent, refused.state) == (False, ActorState.UNREACHABLE)
    assert not any(call.running() for call in waiting)
    os.kill(one.pid, signal.SIGCONT)
    assert [call.result(PATIENCE_S) for call in waiting] == [*range(5)]
    assert in_flight.result(PATIENCE_S) == "before"
    assert notes(path) == ["before", *map(str, range(5))]


def test_what_a_frozen_actor_answers_too_late(subject: Maker) -> None:
    one = subject(max_restarts=-1, silence_timeout_s=0.2, silence_in_flight_s=0.3)
    one.watch()
    os.kill(one.pid, signal.SIGSTOP)
    lost = error_of(one.handle.echo.call("late"))
    assert isinstance(lost, actorsub.ActorUnavailableError)
    assert lost.sent is True
    os.kill(one.pid, signal.SIGCONT)
    wait_until(lambda: one.counters["late_replies"] == 1)
    wait_for_state(one.handle, ActorState.ALIVE)
    assert one.handle.echo.call("again").result(PATIENCE_S) == "again"


def test_lost_in_flight(subject: Maker) -> None:
    one = subject(max_restarts=-1)
    one.watch()
    held = one.hold()
    sent = [one.handle.echo.call(i) for i in range(10)]
    waiting = one.handle.echo.options(max_in_flight=1, on_unavailable="wait").call("waited")
    refused = one.handle.echo.options(max_in_flight=1).call("not waited")
    begin = time.monotonic()
    one.kill()
    for call in (held, *sent):
        error = error_of(call)
        assert isinstance(error, actorsub.ActorUnavailableError)
        assert error.sent is True
        assert error.evidence in ("process", "connection", "ray", "table", "call")
    assert time.monotonic() - begin < EARLY_S
    assert one.counters["lost"] == 11
    error = error_of(refused)
    assert isinstance(error, actorsub.ActorUnavailableError)
    assert error.sent is False
    assert waiting.result(PATIENCE_S) == "waited"
    wait_until(lambda: idle(one.counters))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments, cancelling, retries.


def test_arguments_are_those_of_the_moment_of_the_call(subject: Maker) -> None:
    one = subject()
    one.hold(max_in_flight=1)
    value = {"list": [1]}
    waiting = [
        one.handle.echo.options(max_in_flight=1).call(value),
        one.handle.echo.options(max_in_flight=1).call(1, key=value),
    ]
    value["list"].append(2)
    one.release()
    assert waiting[0].result(PATIENCE_S) == {"list": [1]}
    assert waiting[1].result(PATIENCE_S) == (1, {"list": [1]})


class Slow:
    """Its pickling waits, and counts."""

    def __init__(self, begun: threading.Event, go_on: threading.Event, fail: bool = False) -> None:
        self.events = begun, go_on
        self.fail = fail

    def __reduce__(self) -> Any:
        begun, go_on = self.events
        begun.set()
        assert go_on.wait(PATIENCE_S)
        if self.fail:
            raise RuntimeError("not me")
        return str, ("slow",)


@pytest.mark.parametrize("fail", [False, True])
def test_the_turn_comes_while_arguments_are_copied(subject: Maker, fail: bool) -> None:
    """The sender must not take what is only half there, nor let others pass."""
    one = subject()
    path = one.path("ledger")
    one.hold(max_in_flight=1)
    begun, go_on = threading.Event(), threading.Event()
    value = [1]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            lambda: one.handle.echo.options(max_in_flight=1).call(value, Slow(begun, go_on, fail), key=value)
        )
        assert begun.wait(PATIENCE_S)
        behind = [one.handle.note.options(max_in_flight=2).call(path, i) for i in range(3)]
        one.release()
        # Its turn has come, as soon as the one before is done.
        wait_until(lambda: one.counters["completed"] == 2)
        wait_until(lambda: one.handle._actorsub_actor.queues[""].is_stalled, what="the sender met it")
        assert not any(call.running() for call in behind)
        go_on.set()
        if fail:
            with pytest.raises(RuntimeError, match="not me"):
                slow.result(PATIENCE_S)
        else:
            call = slow.result(PATIENCE_S)
            # After the call was made.
            value.append(2)
            assert call.result(PATIENCE_S) == ([1], "slow", [1])
    assert [call.result(PATIENCE_S) for call in behind] == [0, 1, 2]
    wait_until(lambda: idle(one.counters))
    assert one.counters["cancelled"] == 0


def test_cancel(subject: Maker) -> None:
    one = subject()
    path = one.path("ledger")
    held = one.hold()
    waiting = one.handle.note.options(max_in_flight=1).call(path, "never")
    seen: list[Any] = []
    waiting.add_done_callback(seen.append)
    assert waiting.cancel()
    assert seen == [waiting]
    assert waiting.cancel()
    assert (waiting.cancelled(), waiting.done(), waiting.running()) == (True, True, False)
    for ask in (waiting.result, waiting.exception):
        with pytest.raises(concurrent.futures.CancelledError):
            ask()
    # Queued at the actor: Ray takes it out there.
    queued = one.handle.note.call(path, "queued")
    assert queued.cancel() is False
    assert not queued.cancelled()
    one.release()
    # Where Ray was too slow, it ran.
    assert isinstance(queued.exception(PATIENCE_S), (ray.exceptions.TaskCancelledError, type(None)))
    assert held.result(PATIENCE_S) == "held"
    assert held.cancel() is False
    assert one.handle.note.call(path, "last").result(PATIENCE_S) == "last"
    assert "never" not in notes(path)
    assert one.counters["cancelled"] == 1


def test_cancelling_the_head_lets_the_next_go(subject: Maker) -> None:
    one = subject(AsyncDoer)
    one.hold(max_in_flight=1)
    head = one.handle.echo.options(max_in_flight=1).call("head")
    # It could run, were it not for the order.
    behind = one.handle.echo.call("behind")
    assert not behind.running()
    assert head.cancel()
    assert behind.result(PATIENCE_S) == "behind"
    with pytest.raises(RuntimeError):
        # The same when the head is taken back because it cannot be sent.
        one.handle.echo.options(max_in_flight=1).call(Unpicklable(RuntimeError()))
    assert one.handle.echo.call("next").result(PATIENCE_S) == "next"


def test_cancel_what_runs(subject: Maker) -> None:
    one = subject(AsyncDoer)
    for number, cancel in enumerate([Call.cancel, lambda call: ray.cancel(call.object_ref)]):
        started, ended = one.path(f"started-{number}"), one.path(f"ended-{number}")
        call = one.handle.never.call(started, ended)
        wait_for_file(started)
        assert not cancel(call)
        error = error_of(call)
        assert isinstance(error, ray.exceptions.TaskCancelledError)
        assert not call.cancelled()
        wait_for_file(ended)
    wait_until(lambda: idle(one.counters))


@pytest.mark.parametrize("where", ["actor", "method"])
def test_ray_does_not_resend(subject: Maker, caplog: pytest.LogCaptureFixture, where: str) -> None:
    options = {"max_task_retries": 3} if where == "actor" else {}
    with caplog.at_level(logging.WARNING, "actorsub"):
        one = subject(max_restarts=-1, **options)
        one.watch()
        path = one.path("ledger")
        method = one.handle.die_once
        if where == "method":
            method = method.options(max_task_retries=3, retry_exceptions=True)
        error = error_of(method.call(path))
        assert isinstance(error, actorsub.ActorUnavailableError)
        assert error.sent is True
        one.handle.echo.options(on_unavailable="wait").call().result(PATIENCE_S)
        one.handle.echo.options(on_unavailable="wait", timeout_s=60).call().result(PATIENCE_S)
    assert notes(path) == ["run"]
    warned = [record for record in caplog.records if "max_task_retries" in record.getMessage()]
    assert len(warned) == (1 if where == "actor" else 0)


# ---------------------------------------------------------------------------------------------------------------------
# The ends of things.


def test_ray_is_shut_down_and_started_anew(ray_local: None) -> None:
    run_script(
        """
        ray.init(**RAY_ARGS)
        def hold(started, gate):
            pathlib.Path(started).touch()
            wait_until(lambda: os.path.exists(gate))
        class Doer:
            def echo(self, value): return value
            def hold(self, started, gate):
                pathlib.Path(started).touch()
                wait_until(lambda: os.path.exists(gate))
        directory = tempfile.mkdtemp()
        handle = actorsub.remote(num_cpus=0)(Doer).remote()
        echo = handle.echo.options(max_in_flight=1)
        held = handle.hold.call(directory + "/started", directory + "/gate")
        wait_until(lambda: os.path.exists(directory + "/started"))
        waiting = [echo.call(i) for i in range(10)]
        waiters = [threading.Thread(target=call.exception) for call in (held, waiting[-1])]
        for thread in waiters: thread.start()
        ray.shutdown()
        for thread in waiters: thread.join(30); assert not thread.is_alive()
        error = held.exception(30)
        assert isinstance(error, actorsub.ActorUnavailableError) and error.sent, error
        for call in waiting:
            error = call.exception(30)
            assert isinstance(error, actorsub.ActorUnavailableError) and not error.sent, error
        def refused():
            error = echo.call(1).exception(30)
            assert isinstance(error, actorsub.ActorUnavailableError) and not error.sent, error
            assert "connection" in str(error)
        refused()
        echo = handle.echo.options(max_in_flight=1, concurrency_group="another queue")
        refused()
        # Ray's own .remote() would have started one.
        assert not ray.is_initialized()
        ray.init(**RAY_ARGS)
        refused()
        again = actorsub.remote(num_cpus=0)(Doer).remote()
        method = again.echo.options(max_in_flight=1, timeout_s=60)
        assert [call.result(60) for call in [method.call(i) for i in range(10)]] == [*range(10)]
        assert not held.cancel() and not waiting[0].cancel()
        """,
        auto_connect=True,
    )


def test_a_forked_child_refuses(ray_local: None) -> None:
    out = run_script(
        """
        ray.init(**RAY_ARGS)
        class Doer:
            async def echo(self, value): return value
            async def never(self):
                import asyncio
                await asyncio.Event().wait()
        handle = actorsub.remote(num_cpus=0)(Doer).remote()
        done = handle.echo.call(1)
        assert done.result(60) == 1
        sent = handle.never.options(max_in_flight=2).call()
        waiting = [handle.echo.options(max_in_flight=1).call(i) for i in range(3)]
        async def wait(call): return await call
        child = os.fork()
        if child == 0:
            try:
                assert done.result(10) == 1
                for ask in (
                    lambda: handle.echo.call(2), lambda: sent.result(10), lambda: waiting[0].exception(10),
                    waiting[0].cancel, sent.cancel, lambda: asyncio.run(wait(sent)),
                ):
                    try:
                        ask()
                    except RuntimeError as error:
                        assert "fork" in str(error), error
                    else:
                        raise AssertionError(ask)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert waiting[0].cancel()
        sent.cancel()
        assert [call.result(60) for call in waiting[1:]] == [1, 2]
        print("unharmed")
        """
    )
    assert "unharmed" in out


@pytest.mark.parametrize("how", ["end", "sys.exit", "thread waits"])
def test_the_interpreter_exits_with_calls_under_way(ray_local: None, how: str) -> None:
    out = run_script(
        f"""
        ray.init(**RAY_ARGS)
        class Doer:
            async def echo(self, value=None): return value
            async def never(self):
                import asyncio
                await asyncio.Event().wait()
        handle = actorsub.remote(num_cpus=0)(Doer).remote()
        handle.echo.call().result(60)
        calls = [handle.never.options(timeout_s=0.05 + i / 1000).call() for i in range(100)]
        calls += [handle.never.options(max_in_flight=1, timeout_s=60).call() for i in range(100)]
        other = actorsub.remote(num_cpus=0)(Doer).remote()
        window = other.echo.options(max_in_flight=1)
        calls += [window.call(i) for i in range(300)]
        def count(call): pass
        for call in calls: call.add_done_callback(count)
        how = {how!r}
        if how == "thread waits":
            threading.Thread(target=calls[150].exception, daemon=True).start()
        print("begins to exit", flush=True)
        if how == "sys.exit":
            sys.exit(0)
        """
    )
    assert "begins to exit" in out


def test_bad_options(subject: Maker) -> None:
    one = subject()
    nan, inf = float("nan"), float("inf")
    bad: dict[str, list[Any]] = {
        "timeout_s": [0, -1, nan, inf, 1e12, True, "1", [1]],
        "max_in_flight": [0, -1, 2**31, nan, 1.5, True, "1"],
        "max_queued": [-1, 2**31, nan, 1.5, True, "1", None],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=name):
                one.handle.echo.options(**{name: value})
            with pytest.raises((TypeError, ValueError), match=name):
                actorsub.wrap(one.handle, **{name: value})
            with pytest.raises((TypeError, ValueError), match=name):
                actorsub.remote(**{name: value})
    with pytest.raises(TypeError, match="max_in_flight"):
        one.handle.echo.options(max_inflight=1)
    huge = one.handle.echo.options(timeout_s=366 * 86400, max_in_flight=2**31 - 1, max_queued=2**31 - 1)
    assert huge.call(1).result(PATIENCE_S) == 1
    assert one.handle.echo.options(timeout_s=1e-9).call().exception(PATIENCE_S) is not None


def test_the_counters_add_up(subject: Maker) -> None:
    one = subject(max_restarts=-1)
    one.watch()
    window = one.handle.echo.options(max_in_flight=1, on_unavailable="wait", max_queued=5)
    one.hold()
    waiting = [window.call(i) for i in range(5)]
    with pytest.raises(actorsub.QueueFullError):
        window.call(5)
    waiting[0].cancel()
    expired = [method.options(timeout_s=0.05, max_queued=9).call() for method in (one.handle.echo, window)]
    for call in expired:
        error_of(call)
    one.kill()
    for call in waiting[1:]:
        call.result(PATIENCE_S)
    wait_until(lambda: idle(one.counters))
    counted = one.counters
    assert counted["cancelled"] == 1
    assert counted["refused_full"] == 1
    assert counted["expired_here"] + counted["expired_there"] == 2
    assert counted["sent"] == counted["completed"] + counted["expired_there"] + counted["lost"]
    assert sum(counted["failed"].values()) == counted["expired_here"] + counted["expired_there"] + counted["lost"]


def test_no_change_of_state_passes_the_line_by(restartable: MakeRestartable) -> None:
    """Calls wait through many restarts, with listeners that take their time: each change is followed by a look."""
    one = restartable(restart_s=0.0, on_unavailable="wait")
    stop = actorsub.on_state_change(one.handle, lambda *_: time.sleep(0.02))
    try:
        for number in range(8):
            pid = one.handle.pid.call().result(PATIENCE_S)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: actorsub.state(one.handle) is not ActorState.ALIVE, what="noticed")
            assert one.handle.record.call(str(number)).result(PATIENCE_S) == str(number)
    finally:
        stop()


def test_a_change_that_comes_while_listeners_are_told(subject: Maker) -> None:
    """It is taken off the list with those that are told just then, and has to be followed by a look all the same."""
    one = subject(max_restarts=-1)
    one.watch()
    actor = one.handle._actorsub_actor
    told, go_on = threading.Event(), threading.Event()

    def listen(_: Any, old: Any, new: Any, __: Any) -> None:
        if new is ActorState.RESTARTING:
            told.set()
            go_on.wait(PATIENCE_S)

    stop = actorsub.on_state_change(one.handle, listen)
    try:
        one.kill()
        assert told.wait(PATIENCE_S)
        waiting = one.handle.echo.options(on_unavailable="wait").call("waited")
        # The watcher is held up; somebody else sees it come back, and notes the change.
        wait_until(lambda: actor.observe_ray() or actor.state is ActorState.ALIVE, PATIENCE_S)
        go_on.set()
        assert waiting.result(PATIENCE_S) == "waited"
    finally:
        go_on.set()
        stop()
