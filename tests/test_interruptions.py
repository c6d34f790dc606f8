"""Signal handlers and `__del__` use the library in the middle of anything; threads that ended, or cannot be started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from helpers import Basics, our_threads, wait_until
from subprocesses import run_script

import actorsub
from actorsub import watcher

PATIENCE_S = 30.0


@pytest.fixture
def handle(ray_local: None) -> Any:
    made = actorsub.remote(num_cpus=0, max_restarts=-1)(Basics).remote()
    actorsub.get(made.pid.remote())
    yield made
    ray.kill(made)


# That is what the test is about.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_is_started_again(handle: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = watcher.ensure()
    assert handle.sleep.options(timeout_s=0.2).call(1).exception(PATIENCE_S) is not None

    def die(*_: Any) -> Any:
        raise SystemExit

    # What runs there is fenced; so it has to be the loop itself that raises.
    one._take_in_events = die  # type: ignore[method-assign]
    one.nudge()
    wait_until(lambda: not one._thread.is_alive())
    assert "actorsub-watcher has ended unexpectedly" in caplog.text
    error = handle.sleep.options(timeout_s=0.3).call(1).exception(PATIENCE_S)
    assert isinstance(error, actorsub.DeadlineExceededError)
    assert watcher.ensure() is not one

    again = watcher.ensure()
    again._sender.run(bool, ())
    wait_until(lambda: again._sender._running)
    thread = again._sender._running["thread"]
    real, again._sender._done = again._sender._done, die
    again._sender.run(bool, ())
    wait_until(lambda: not thread.is_alive())
    again._sender._done = real
    assert "actorsub-sender has ended unexpectedly" in caplog.text
    held = handle.sleep.options(max_in_flight=1).call(0.2)
    assert handle.echo.options(max_in_flight=1).call(5).result(PATIENCE_S) == 5
    held.result(PATIENCE_S)


def test_a_thread_that_cannot_be_started_leaves_nothing(
    handle: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`.remote()` goes on through Ray, `.call()` says why it cannot; the next use tries again."""
    actorsub.shutdown()
    wait_until(lambda: not our_threads())
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("actorsub"):
            raise RuntimeError("can't start new thread")
        start(self)

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(watcher, "_warned_of_threads", False)
        for i in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                handle.echo.call(i)
            other = actorsub.wrap(actorsub.remote(num_cpus=0)(Basics).remote())
            assert ray.get(other.echo.remote(i)) == i
            ray.kill(other)
        assert [record.getMessage().count("watches no actor") for record in caplog.records].count(1) == 1
        assert not our_threads()
        assert actorsub.stats(handle)["calls"]["in_flight"] == 0
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert handle.echo.call(7).result(PATIENCE_S) == 7


def test_where_the_sender_cannot_be_started_the_call_that_made_room_ends(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others go once it can be."""
    actorsub.shutdown()
    wait_until(lambda: not our_threads())
    start = threading.Thread.start
    refused = threading.Event()

    def refuse(self: threading.Thread) -> None:
        if self.name == "actorsub-sender":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr("actorsub.calls.SENDER_RETRY_NS", 50_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = handle.sleep.options(max_in_flight=1).call(0.3)
        second = handle.echo.options(max_in_flight=1).call(2)
        assert first.result(PATIENCE_S) == 0.3
        assert refused.wait(PATIENCE_S)
        assert not second.done()
    assert second.result(PATIENCE_S) == 2


@pytest.mark.parametrize("name", ["actorsub-watcher", "actorsub-sender", "actorsub-table"])
def test_a_ctrl_c_while_a_thread_is_being_started_leaves_none(
    handle: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    actorsub.shutdown()
    wait_until(lambda: not our_threads())
    start = threading.Thread.start
    interrupted: list[threading.Thread] = []

    def start_and_interrupt(self: threading.Thread) -> None:
        start(self)
        if self.name == name and not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_interrupt)
        try:
            use_all_threads(handle)
        except KeyboardInterrupt:
            assert interrupted
        wait_until(lambda: interrupted)
    use_all_threads(handle)
    # One of each, and no other: the one that was interrupted goes on, or has ended.
    wait_until(
        lambda: len({thread.name for thread in our_threads()}) == len(our_threads()), what="one thread of each name"
    )
    assert {thread.name for thread in our_threads()} >= {"actorsub-watcher", "actorsub-sender"}


def use_all_threads(handle: Any) -> None:
    calls = [handle.echo.options(max_in_flight=1).call(i) for i in range(3)]
    assert [call.result(PATIENCE_S) for call in calls] == [0, 1, 2]


WAITS = """
    import itertools, signal, sys, threading, time, faulthandler
    from actorsub import refs
    ray.init(**RAY_ARGS)
    class Worker:
        def echo(self, value): return value
    handle = actorsub.remote(num_cpus=0, max_concurrency=4)(Worker).remote()
    group = actorsub.ReplicaGroup([handle], retry="always")
    ways = {
        "get": lambda i: actorsub.get(handle.echo.remote(i), timeout=20),
        "get of many": lambda i: actorsub.get([handle.echo.remote(i)] * 2, timeout=20)[1],
        "wait": lambda i: actorsub.get(actorsub.wait([handle.echo.remote(i)], timeout=20)[0][0]),
        "call": lambda i: handle.echo.call(i).result(20),
        # A window with room for the call that is being made below: that one is not sent before this one returns.
        "call in a window": lambda i: handle.echo.options(max_in_flight=8).call(i).result(20),
        "deadline": lambda i: handle.echo.options(timeout_s=20).call(i).result(20),
        "future": lambda i: handle.echo.remote(i).future().result(20),
        "group": lambda i: group.echo.call(i).result(20),
        "cancel": lambda i: (handle.echo.options(max_in_flight=1).call(i).cancel(), i)[1],
    }
    # A future's own lock, of the standard library, is what Ray's thread waits for: as with plain Ray's.
    in_handler = [way for way in ways if way != "future"]
    for way in ways.values(): assert way(1) == 1
"""


def test_waits_in_a_signal_handler(ray_local: None) -> None:
    """In the main thread and in a handler that interrupts it anywhere, for 12 s."""
    out = run_script(
        WAITS
        + """
    faulthandler.dump_traceback_later(60, exit=True)
    count = {"main": 0, "handler": 0}
    # It may have interrupted Ray's own unpickling, for whose end Ray's callbacks of other calls wait.
    refs.LOOKING_LIMIT_S = 0.2
    refused = []
    def alarm(*_):
        name = in_handler[count["handler"] % len(in_handler)]
        try:
            assert ways[name](count["handler"]) == count["handler"], name
        except RuntimeError as error:
            assert "has interrupted Ray while it unpickled" in str(error), error
            refused.append(name)
        count["handler"] += 1
        if not over: signal.setitimer(signal.ITIMER_REAL, 0.0005 + count["handler"] % 17 * 0.0001)
    over = False
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.004)
    end_s = time.monotonic() + 12
    names = itertools.cycle(in_handler)
    while time.monotonic() < end_s:
        name = next(names)
        assert ways[name](count["main"]) == count["main"], name
        count["main"] += 1
    over = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert min(count.values()) > 100, count
    assert len(refused) < 0.05 * count["handler"], (len(refused), count)
    print("made", count, len(refused))
    """,
    )
    assert "made" in out


def test_waits_in_finalizers(ray_local: None) -> None:
    """Whatever the collector meets in a cycle uses the library on the thread that happens to allocate, ours too."""
    out = run_script(
        WAITS
        + """
    import gc
    faulthandler.dump_traceback_later(60, exit=True)
    refs.LOOKING_LIMIT_S = 0.2
    gc.set_threshold(20, 1, 1)
    ended, refused = [], []
    class Waits:
        def __init__(self, number): self.number, self.me = number, self
        def __del__(self):
            # On Ray's own thread, which has to deliver what is waited for, plain `ray.get` waits for ever, too.
            if isinstance(threading.current_thread(), threading._DummyThread): return
            name = in_handler[self.number % len(in_handler)]
            try:
                ways[name](self.number)
                ended.append(name)
            except RuntimeError as error:
                # On a thread that has to deliver outcomes.
                assert "would" in str(error) or "cannot" in str(error), error
                refused.append(name)
    end_s = time.monotonic() + 8
    number = 0
    while time.monotonic() < end_s:
        Waits(number)
        number += 1
        name = in_handler[number % len(in_handler)]
        assert ways[name](number) == number, name
        # So that the collector runs on this thread, too.
        [[] for _ in range(50)]
    gc.set_threshold(0)
    del Waits.__del__
    assert len(ended) > 50, (len(ended), len(refused), number)
    print("made", len(ended), len(refused), number)
    """,
    )
    assert "made" in out


def test_waits_while_ray_deserializes(handle: Any) -> None:
    """Ray's callbacks wait for the lock that this thread holds meanwhile."""

    class Asks:
        def __init__(self, how: str) -> None:
            self.how = how

        def __reduce__(self) -> Any:
            return _ask, (self.how,)

    _ASKING["handle"] = handle
    for how in ("get", "call", "wait"):
        assert ray.get(ray.put(Asks(how)), timeout=PATIENCE_S) == 11


_ASKING: dict[str, Any] = {}


def _ask(how: str) -> Any:
    handle = _ASKING["handle"]
    ways: dict[str, Callable[[], Any]] = {
        "get": lambda: actorsub.get(handle.echo.remote(11), timeout=PATIENCE_S),
        "call": lambda: handle.echo.options(max_in_flight=1).call(11).result(PATIENCE_S),
        "wait": lambda: actorsub.get(actorsub.wait([handle.echo.remote(11)], timeout=PATIENCE_S)[0][0]),
    }
    return ways[how]()
