"""When the calls of a lost incarnation are failed: after a short grace, in which their outcomes may still arrive."""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable

from actorsub import _core

#: How long replies may still arrive after an incarnation was lost, before its calls are failed.
GRACE_S = 0.001
#: The same if the actor will not come back: Ray's own error, with its cause, is on its way.
DEATH_GRACE_S = 0.100
#: The same if its process was killed and is not gone yet: Ray hears of the death only when its memory has been freed.
EXIT_LIMIT_S = 2.0

_NEVER = math.inf


class LossWatch:
    """The losses of one actor. Made at the first one; read and written on the watcher's thread alone.

    It is in one of three states:

    - *idle*: nobody waits for a lost call. `_due_s` is 0.
    - *grace*: replies that were on their way may arrive until `_due_s`; then the calls are failed.
    - *exiting*: the actor will not come back, its process was killed, and is perhaps not gone yet. Ray's own error,
      with its cause, comes when it is. Grace begins anew until then, at most until `_exit_limit_s`, which is 0 in the
      other states.
    """

    __slots__ = ("_due_s", "_exit_limit_s", "_grace_over_s", "_seen")

    def __init__(self) -> None:
        # How many losses of the actor were seen here.
        self._seen = 0
        self._due_s = 0.0
        # The end of the grace of the last loss, also for those who begin to wait later.
        self._grace_over_s = 0.0
        self._exit_limit_s = 0.0

    def look(
        self, actor: _core.Actor, now_s: float, anybody: bool, has_lost: Callable[[_core.Actor], bool]
    ) -> tuple[bool, float]:
        """(True where the calls are to be failed now, when to look again; on the clock of _core.now_s).

        `anybody`: someone waits for a call of the actor. `has_lost`: says whether one of those calls was lost.
        """
        if actor.losses() != self._seen:
            self._begin(actor, now_s)
        if not anybody:
            self._due_s = 0.0
            return False, _NEVER
        if not self._due_s and has_lost(actor):
            # Somebody began to wait for a call that was lost before.
            self._due_s = max(now_s, self._grace_over_s)
        if not self._due_s:
            return False, _NEVER
        if now_s < self._due_s:
            return False, self._due_s
        if self._exit_limit_s:
            if now_s >= self._exit_limit_s or not _is_running(actor.process_id):
                # One last grace, since it is not known when exactly the process was gone.
                self._exit_limit_s = 0.0
            self._due_s = now_s + DEATH_GRACE_S
            return False, self._due_s
        self._due_s = 0.0
        return True, _NEVER

    def _begin(self, actor: _core.Actor, now_s: float) -> None:
        self._seen = actor.losses()
        is_final = actor.state_name == "dead" or (actor.row is not None and not actor.row.restarts_left)
        self._due_s = self._grace_over_s = now_s + (DEATH_GRACE_S if is_final else GRACE_S)
        self._exit_limit_s = now_s + EXIT_LIMIT_S if is_final and actor.belief()[1] == "process" else 0.0


def _is_running(pid: int) -> bool:
    """Whether a process runs; False also if that cannot be found out."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(fd)
