"""Keeps functions of the user from harming the threads of this library on which they run.

All outcomes depend on those threads. So whatever such a function raises is its own failure and nothing more, also if it
is no Exception: sys.exit(), a KeyboardInterrupt, asyncio's CancelledError, what pytest and gevent end things with.

**Locks.** A signal handler, a `__del__` that the garbage collector runs and a callback of a weak reference run in the
middle of whatever their thread is doing, and may use this library. So code that they can reach never waits for a lock
that the interrupted code may hold, and no thread that delivers outcomes waits for such a lock: `threading.Lock`,
`Condition` and `Event` have no place there. Shared data is changed by single operations of dicts, lists and deques,
which the GIL makes atomic. The thread that takes a thing out of a container is the one that deals with it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("actorsub")

T = TypeVar("T")


def fenced(what: str, function: Callable[..., Any], *arguments: Any, failed: Any = None) -> Any:
    """Returns `function(*arguments)`. If it raises, that is logged as of `what`, and the result is `failed`."""
    try:
        return function(*arguments)
    except BaseException as error:
        if is_interrupt(error):
            raise
        log_failure(what)
        return failed


def is_interrupt(error: BaseException) -> bool:
    """True for a Ctrl-C, which is for the code on the main thread. None of our threads is the main thread."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def log_failure(what: str, *arguments: Any) -> None:
    """Logs the exception that is being handled, as one of `what % arguments`."""
    # The application's own logging handler may raise, too, and no caller is left to be told.
    with contextlib.suppress(BaseException):
        logger.exception(f"{what} raised", *arguments)


def as_exception(what: str, raised: BaseException) -> Exception:
    """The error that a call ends with when a function of the user has `raised`. What is no Exception is wrapped in a
    RuntimeError: a SystemExit out of an `await` would end the asyncio loop, and a CancelledError would say that the
    call was cancelled."""
    if isinstance(raised, Exception):
        return raised
    error = RuntimeError(f"{what} raised {raised!r}")
    error.__cause__ = raised
    return error


def take(container: list[T]) -> T | None:
    """Takes the last thing out of a list. Of several threads one gets it, and the others None."""
    try:
        return container.pop()
    except IndexError:
        return None


class Wakeup:
    """As threading.Event, for one thread that waits, but `set` never waits for a lock.

    A thread that is interrupted by a signal handler inside `Event.wait` may hold the event's lock. A thread that sets
    the event then waits for the handler to end, and may be the thread that the handler waits for. `SimpleQueue.put`
    never waits.
    """

    __slots__ = ("_queue", "_was_set")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._was_set = False

    def set(self) -> None:
        self._was_set = True
        self._queue.put(None)

    def is_set(self) -> bool:
        return self._was_set

    def wait(self, timeout_s: float | None) -> bool:
        """True once it was set; False when the time is over first. Interrupted by Ctrl-C."""
        if not self._was_set:
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        return self._was_set

    def clear(self) -> None:
        """A `set` from another thread may be lost meanwhile, so look afterwards at what it was about."""
        self._was_set = False
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return
