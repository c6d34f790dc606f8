"""The border to functions of the user's that run on threads of ours, where everybody's outcomes depend on the thread.

What such a function raises is that function's failure and nothing more, also where it is no Exception: sys.exit(), a
KeyboardInterrupt, asyncio's CancelledError, what pytest and gevent end things with.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("actorsub")


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
