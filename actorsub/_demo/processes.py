"""Processes that came from this one, and signals: nothing of the demo is left when it ends, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType


class Interrupted(BaseException):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted` once; later ones cannot disturb the cleanup."""
    raised = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise Interrupted(signum)

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signals.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, interrupt) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Descendants:
    """All processes that came from this one since the object was made, also those whose parent has ended.

    Ray's processes outlive the driver for a moment and would be adopted by init; as their "subreaper" this
    process adopts them, so what it has to end is exactly what hangs below it in the process tree.
    """

    _PR_SET_CHILD_SUBREAPER = 36

    def __init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(self._PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._not_ours: set[int] = set()
        self._not_ours = set(self.pids())

    def pids(self) -> list[int]:
        """Process ids now, parents before their children."""
        children = self._children_by_parent()
        found: list[int] = []
        level = [os.getpid()]
        while level:
            level = [pid for parent in level for pid in children.get(parent, ()) if pid not in self._not_ours]
            found += level
        return found

    def wait(self, seconds: float, child: subprocess.Popen[bytes] | None = None) -> bool:
        """True when all are gone within `seconds`. Reaps them, `child` through its own object."""
        deadline = time.monotonic() + seconds
        while True:
            pids = self.pids()
            for pid in pids:
                if child is not None and pid == child.pid:
                    child.poll()
                else:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            if not pids:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def end(self, child: subprocess.Popen[bytes] | None, *, ask: bool) -> None:
        """Wait for all to go, after asking our children to if `ask`; then kill what is left."""
        if ask:
            children = self._children_by_parent().get(os.getpid(), [])
            self._signal([pid for pid in children if pid not in self._not_ours], signal.SIGTERM)
        if child is not None:
            # Generous, because it has a cluster to shut down.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10.0)
        # Short: some of Ray's agents wait for init to adopt them, and would wait here for good.
        if self.wait(2.0, child):
            return
        for _ in range(20):  # a process may have started another between the look and the kill
            self._signal(self.pids(), signal.SIGKILL)
            if self.wait(0.5, child):
                return

    @staticmethod
    def _signal(pids: Sequence[int], signum: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    @staticmethod
    def _children_by_parent() -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    # The name in parentheses may hold anything, so count from its end: state, parent.
                    stat = Path("/proc", entry, "stat").read_text(errors="replace")
                    children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
        return children
