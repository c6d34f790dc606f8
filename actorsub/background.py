"""A background thread for work that may block, or that must not hold up the thread which asks for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from actorsub.fence import log_failure, take

logger = logging.getLogger("actorsub")


class Background:
    """Does things on a thread of its own, one after the other, and calls `done` after each.

    The thread is started by the first request, and again by the next one should it ever end. No lock: see fence.py.
    """

    def __init__(self, name: str, done: Callable[[], object]) -> None:
        self._name = name
        self._done = done
        # Once True, new requests are not done.
        self._is_stopped = False
        # Each request is a list of one. The thread that takes it out of the list deals with it.
        self._requests: queue.SimpleQueue[list[tuple[Callable[..., None], Any]] | None] = queue.SimpleQueue()
        # "thread" -> the thread that runs. The caller that puts it in starts it.
        self._running: dict[str, threading.Thread] = {}

    def run(self, function: Callable[..., None], arguments: Any) -> bool:
        """False: it was stopped before. Raises RuntimeError where no thread can be started; then it is not done."""
        if self._is_stopped:
            return False
        request = [(function, arguments)]
        self._requests.put(request)
        if "thread" not in self._running:
            try:
                self._start()
            except RuntimeError:
                if take(request) is not None:
                    raise
        # If it was put after the request to stop, the thread never comes to it.
        return not self._is_stopped or take(request) is None

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        if self._running.setdefault("thread", thread) is thread:
            try:
                thread.start()
            except BaseException:
                # An exception of a signal handler, as of Ctrl-C, may come when the thread runs already.
                if thread.ident is None:
                    self._running.pop("thread", None)
                raise

    def stop(self, timeout_s: float) -> None:
        self._is_stopped = True
        self._requests.put(None)
        thread = self._running.get("thread")
        # A thread that its maker has not started yet ends by itself.
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def owns_current_thread(self) -> bool:
        return self._running.get("thread") is threading.current_thread()

    def _run(self) -> None:
        if not self.owns_current_thread():
            # Given up while it was being started; the next request starts another.
            return
        try:
            self._do_requests()
        finally:
            # Whatever ended it; the next request starts another.
            del self._running["thread"]
            if not self._is_stopped:
                logger.warning("the thread %s has ended unexpectedly; the next use starts it again", self._name)

    def _do_requests(self) -> None:
        while True:
            request = self._requests.get()
            if request is None:
                return
            wanted = take(request)
            if wanted is None:
                continue
            function, arguments = wanted
            try:
                function(*arguments)
            except Exception:
                # Ray raises all kinds of errors while its control store or raylet is away. The caller asks again.
                logger.debug("%s failed", function.__name__, exc_info=True)
            except BaseException:
                log_failure("%s, on the thread %s,", function.__name__, threading.current_thread().name)
            # No reference to an actor while this thread waits.
            del request, wanted, function, arguments
            self._done()
