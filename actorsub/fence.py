"""The border to functions of the user's that run on threads of ours, where everybody's outcomes depend on the thread.

What such a function raises is that function's failure and nothing more, also where it is no Exception: sys.exit(), a
KeyboardInterrupt, asyncio's CancelledError, what pytest and gevent end things with.

**Locks.** A signal handler, a `__del__` that the garbage collector runs and a callback of a weak reference run in the
middle of whatever their thread is doing, and may use this library. So nothing that they can come to waits for a lock
that the code below them may hold, and no thread that delivers outcomes waits for a lock that such code may hold:
`threading.Lock`, `Condition` and `Event` have no place there. What is shared is changed by single operations of dicts,
lists and deques, which the GIL makes whole: whoever takes a thing out of a container is the one who deals with it.
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
    """`function(*arguments)`. What it raises is logged as of `what`, and the result is `failed` then."""
    try:
        return function(*arguments)
    except BaseException as error:
        if is_interrupt(error):
            raise
        log_failure(what)
        return failed


def is_interrupt(error: BaseException) -> bool:
    """True for a Ctrl-C, which belongs to whoever runs on the main thread: none of our threads is that."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def log_failure(what: str, *arguments: Any) -> None:
    """Logs the exception that is being handled, as one of `what % arguments`."""
    # The application's own logging handler may raise, too, and there is nobody left to be told.
    with contextlib.suppress(BaseException):
        logger.exception(f"{what} raised", *arguments)


def as_exception(what: str, raised: BaseException) -> Exception:
    """What a call ends with whose user's function has `raised`: an asyncio loop ends by a SystemExit out of an `await`,
    and a CancelledError would say that somebody cancelled it."""
    if isinstance(raised, Exception):
        return raised
    error = RuntimeError(f"{what} raised {raised!r}")
    error.__cause__ = raised
    return error


def take(container: list[T]) -> T | None:
    """The last thing of a list, for whoever is first; None for everybody else."""
    try:
        return container.pop()
    except IndexError:
        return None


class Wakeup:
    """One thread waits until another says so: threading.Event without a lock that the one who says so has to wait for.

    A thread that is interrupted by a signal handler inside `Event.wait` may hold the event's lock; who sets the event
    then waits for the handler to end, and is perhaps the thread that the handler waits for. `SimpleQueue.put` never
    waits.
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
        """What is set meanwhile may be forgotten: look at what it was about afterwards."""
        self._was_set = False
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return
