"""A user's code never stops ours: what its functions raise is their own failure, whatever it is, and wherever a signal
handler, a `__del__` or the garbage collector comes in, it may use everything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers import Basics, Restartable, our_threads, wait_for_state, wait_until

import actorsub
from actorsub import ActorState

PATIENCE_S = 30.0

MakeRestartable = Callable[..., Restartable]


class GreenletExit(BaseException):
    """As gevent's."""


EXITS: list[type[BaseException]] = [
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    GeneratorExit,
    pytest.exit.Exception,
    GreenletExit,
]
every_exit = pytest.mark.parametrize("leave", EXITS, ids=lambda one: str(one.__name__))
# Where each takes a while.
some_exits = pytest.mark.parametrize("leave", EXITS[:2], ids=lambda one: str(one.__name__))


class Worker(Basics):
    def give(self, value: Any) -> Any:
        return value()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[actorsub.ActorHandle]]:
    yield []


@pytest.fixture
def pair(ray_local: None, workers: list[actorsub.ActorHandle]) -> list[actorsub.ActorHandle]:
    """Two actors that all tests here share."""
    if not workers or actorsub.state(workers[0]) is not ActorState.ALIVE:
        create = actorsub.remote(num_cpus=0, max_concurrency=4)(Worker).remote
        workers[:] = [create(), create()]
        actorsub.get([one.echo.remote() for one in workers], timeout=PATIENCE_S)
        for one in workers:
            wait_for_state(one, ActorState.ALIVE)
    return workers


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """The threads of ours that are there before are there afterwards."""
    before = our_threads()
    yield
    assert before <= set(threading.enumerate())


def assert_deadlines_hold(handle: actorsub.ActorHandle) -> None:
    call = handle.sleep.options(timeout_s=0.2).call(2.0)
    assert isinstance(call.exception(PATIENCE_S), actorsub.DeadlineExceededError)
    # Not because it ran to its end.
    assert handle.echo.call(7).result(PATIENCE_S) == 7


# ---------------------------------------------------------------------------------------------------------------------
# What a function of the user's raises.


@some_exits
def test_a_listener(restartable: MakeRestartable, leave: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    subject = restartable(restart_s=0.0)
    other = restartable()
    heard = []

    def listen(_: str, old: ActorState, new: ActorState, why: str | None) -> None:
        if new is ActorState.RESTARTING:
            raise leave("of a listener")

    actorsub.on_state_change(subject.handle, listen)
    actorsub.on_state_change(subject.handle, lambda _, old, new, why: heard.append(new))
    with same_threads(), caplog.at_level(logging.ERROR, "actorsub"):
        subject.kill()
        wait_until(lambda: ActorState.ALIVE in heard[1:] and ActorState.RESTARTING in heard)
        held = other.handle.hold.options(timeout_s=0.2).call()
        assert isinstance(held.exception(PATIENCE_S), actorsub.DeadlineExceededError)
    assert "a function given to on_state_change raised" in caplog.text
    assert "Traceback" in caplog.text and leave.__name__ in caplog.text


@every_exit
@pytest.mark.parametrize("kind", ["call", "future", "deadline"])
def test_a_done_callback(
    pair: list[actorsub.ActorHandle], leave: type[BaseException], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that wait in other ways for the same outcome get it, and everybody else theirs."""
    later = threading.Event()

    def callback(_: Any) -> None:
        raise leave("of a callback")

    ref = pair[0].sleep.remote(0.2)
    future: Any
    if kind == "future":
        future = ref.future()
    else:
        future = pair[0].sleep.options(timeout_s=0.1 if kind == "deadline" else None).call(0.2)

    async def wait_for_it() -> Any:
        waiting = asyncio.wrap_future(future)
        return await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), PATIENCE_S)

    with same_threads(), caplog.at_level(logging.ERROR, "actorsub"):
        future.add_done_callback(callback)
        future.add_done_callback(lambda _: later.set())
        [value] = asyncio.run(wait_for_it())
        assert isinstance(value, actorsub.DeadlineExceededError) if kind == "deadline" else value == 0.2
        assert later.wait(PATIENCE_S)
        assert actorsub.get(ref, timeout=PATIENCE_S) == 0.2
        assert_deadlines_hold(pair[1])
    assert "raised" in caplog.text and leave.__name__ in caplog.text


@every_exit
def test_is_failure(
    pair: list[actorsub.ActorHandle], leave: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def is_failure(error: BaseException) -> bool:
        raise leave("of is_failure")

    group = actorsub.ReplicaGroup(pair, is_failure=is_failure, retry="always")
    with same_threads(), caplog.at_level(logging.ERROR, "actorsub"):
        error = group.fail.call().exception(PATIENCE_S)
        assert isinstance(error, ValueError)
        assert_deadlines_hold(pair[0])
    assert group.stats()["in_flight"] == 0
    assert "is_failure of a group" in caplog.text and leave.__name__ in caplog.text


@some_exits
def test_a_balancer(restartable: MakeRestartable, leave: type[BaseException]) -> None:
    subject = restartable()
    leaves = threading.Event()

    def choose(states: list[actorsub.MemberState], key: Any) -> actorsub.MemberState:
        if leaves.is_set():
            raise leave("of a balancer")
        return states[0]

    group = actorsub.ReplicaGroup([subject.handle], balancer=choose, on_unavailable="wait", timeout_s=PATIENCE_S)
    assert group.echo.call(1).result(PATIENCE_S) == 1
    leaves.set()
    # On the caller's own thread it is the caller's.
    with pytest.raises(leave):
        group.echo.call(2)
    subject.kill()
    waiting = group.echo.call(3)
    after = group.echo.call(4)
    with same_threads():
        subject.let_restart()
        for call in (waiting, after):
            error = call.exception(PATIENCE_S)
            # Out of an `await` it would end the event loop.
            assert isinstance(error, Exception) and leave in (type(error), type(error.__cause__))
        leaves.clear()
        assert group.echo.call(5).result(PATIENCE_S) == 5
    assert group.stats()["in_flight"] == 0


@some_exits
def test_a_factory(
    ray_local: None, leave: type[BaseException], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorsub.members.FACTORY_PAUSE_S", 0.05)
    create = actorsub.remote(num_cpus=0)(Worker).remote
    tries = itertools.count()

    def factory() -> Any:
        if next(tries) == 0:
            raise leave("of a factory")
        return create()

    first = create()
    group = actorsub.ReplicaGroup([first], factory=factory)
    assert group.echo.call(1).result(PATIENCE_S) == 1
    with same_threads(), caplog.at_level(logging.ERROR, "actorsub"):
        ray.kill(first)
        wait_until(lambda: group.stats()["replaced"] == 1)
        assert group.echo.options(on_unavailable="wait").call(2).result(PATIENCE_S) == 2
    assert leave.__name__ in caplog.text


class Leaving:
    """Pickles, and unpickles, until it is told not to."""

    where = ""
    leave: type[BaseException] = SystemExit
    #: How often something is pickled before it raises: the copy that a waiting call takes is the first time.
    count = 0

    def __getstate__(self) -> dict[str, Any]:
        cls = type(self)
        cls.count += 1
        if cls.where == "getstate" and cls.count > 1:
            raise cls.leave("of __getstate__")
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if type(self).where == "setstate":
            raise type(self).leave("of __setstate__")


@every_exit
@pytest.mark.parametrize("where", ["getstate", "setstate"])
def test_an_argument_whose_turn_comes_later(
    pair: list[actorsub.ActorHandle], leave: type[BaseException], where: str
) -> None:
    """It waits in line as a copy; that is unpickled, and pickled again by Ray, on the sender's thread."""
    Leaving.where, Leaving.leave, Leaving.count = where, leave, 0
    method = pair[0].echo.options(max_in_flight=1, concurrency_group=None)
    blocker = pair[0].sleep.options(max_in_flight=1).call(0.2)
    failing = method.call(Leaving())
    after = method.call(3)
    with same_threads():
        error = failing.exception(PATIENCE_S)
        assert isinstance(error, Exception) and leave in (type(error), type(error.__cause__))
        assert after.result(PATIENCE_S) == 3
        assert blocker.result(PATIENCE_S) == 0.2
        assert_deadlines_hold(pair[1])
    assert actorsub.stats(pair[0])["calls"]["in_flight"] == 0
