"""The rival: what a careful engineer writes in plain Python when calls to a restarting actor should fail at once.

It asks Ray's local state before every call. Nothing is left out that would make it faster: method objects are made once
and kept, attributes sit in slots, and the error is built beforehand, because Ray's own constructor formats a message
(900 ns). Such a shared error cannot say anything about one call, and two threads that raise it at the same time share
its traceback; the compiled core makes a new one each time.
"""

from __future__ import annotations

from typing import Any

import ray.actor
import ray.exceptions

# Ray's number for ActorTableData.RESTARTING, as `_get_local_state` returns it.
RESTARTING = 3


class RestartingError(ray.exceptions.ActorUnavailableError):
    """The actor is restarting; the call was not sent."""

    __init__ = Exception.__init__

    def __str__(self) -> str:
        return f"The actor {self.args[0].hex()} is restarting. The call was not sent."


class Method:
    """One method of a wrapped actor."""

    __slots__ = ("_error", "_local_state", "_submit")

    def __init__(self, method: ray.actor.ActorMethod, handle: ray.actor.ActorHandle, error: RestartingError) -> None:
        self._submit = method.remote
        self._local_state = handle._get_local_state
        self._error = error

    def remote(self, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        if self._local_state() == RESTARTING:
            # Without this, each raise would add to the traceback of the last.
            raise self._error.with_traceback(None)
        return self._submit(*args, **kwargs)


class Wrapper:
    """A Ray actor handle whose methods raise RestartingError instead of calling an actor that restarts."""

    def __init__(self, handle: ray.actor.ActorHandle) -> None:
        self._handle = handle
        self._error = RestartingError(handle._actor_id)

    def __getattr__(self, name: str) -> Method:
        method = Method(getattr(self._handle, name), self._handle, self._error)
        # Kept: the next access is a plain attribute.
        self.__dict__[name] = method
        return method
