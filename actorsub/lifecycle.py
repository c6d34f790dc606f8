"""The life of this library in a process: what is done when it is imported, stopped, forked and ended, in which order,
and why in that order.

This module is above all others: it imports them, fits them together and calls into them; none of them imports it. A
lower module states what it needs of a higher one as a protocol (`watcher.Calls`, `Refs`, `Supply`), or takes a function
(`bind_...`). `_fit_together` hands in all of these, and there mypy compares the two sides.

The threads are not started at import. `watcher.ensure` starts them at the first use of a handle, and again at the next
one after a `shutdown()`, a fork or an unexpected end.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ray

from actorsub import _core, _ray_compat, calls, group_call, handle, members, refs, submit, supply, watcher
from actorsub.errors import ActorState, ActorUnavailableError
from actorsub.fence import fenced


class Step(NamedTuple):
    do: Callable[[], object]
    why: str  #: what it is there for, and why it stands where it stands


#: `ray.shutdown()`, before the connection ends.
BEFORE_DISCONNECT = (
    Step(members.end_factories, "a factory may be inside Ray, whose core ends the process of who calls it later"),
)

#: The same, once the connection has ended and before Ray's core is taken out of its worker. Ray calls nobody back now,
#: so whoever waits is told here.
AFTER_DISCONNECT = (
    Step(watcher.end_session, "first: whoever is told below finds that the actors are over"),
    Step(refs.end_all, "waits for refs"),
    Step(calls.close_all, "Calls to actors, after the waits that some of them have for their arguments"),
    Step(members.close_all, "Calls to groups, last: attempts that ended above are to find no other member"),
)

#: In the child of a fork, where only the thread that forked is left, and any lock may have been held by another.
AFTER_FORK_IN_CHILD = (
    Step(_core.after_fork_in_child, "first: the actors, calls and descriptors of the parent are forgotten"),
    Step(_ray_compat.after_fork_in_child, "the parent's connection is not to be used"),
    Step(watcher.after_fork_in_child, "there are no threads; the next use starts them"),
    Step(members.after_fork_in_child, "groups of the parent refuse what they are asked"),
)

#: `shutdown()`, once the threads have stopped: calls that only they could go on with.
AFTER_STOP = (
    Step(group_call.take_back_paused, "first: Calls to groups, whose attempts would be made again at other members"),
    Step(members.take_back_waiting, "those that wait for any member"),
    Step(calls.take_back_waiting, "those that wait in an actor's line"),
)


def _take(steps: Sequence[Step], when: str) -> None:
    # One that fails must not leave the others out, nor what Ray does next.
    for step in steps:
        fenced(f"{step.do.__module__}.{step.do.__name__}, {when},", step.do)


def shutdown() -> None:
    """Stops the background threads. Idempotent; the next use of a handle starts them again.

        >>> actorsub.shutdown()

    Handles stay valid. Callers that wait for an actor are woken, start the threads again and go on waiting. `Call`s
    that wait in line end with ActorUnavailableError, and those that wait for any member of a group with NoReplicaError.
    `Call`s in flight end when Ray says so; their deadlines are kept again once the threads run again.
    """
    if watcher.stop():
        with calls.taking_back():
            _take(AFTER_STOP, "at shutdown()")
        watcher.wake_all()


def _at_exit() -> None:
    """The interpreter exits: before Ray's own function of this kind, which was entered earlier and so comes later.

    Not `shutdown`: a caller that is woken now would only start the threads again, in an interpreter that ends."""
    watcher.stop_for_good()


def _fit_together() -> None:
    watcher.bind(calls, refs, supply)
    _core.bind_news(watcher.take_news)
    _core.bind_calls(calls.Condition)
    _core.bind_types(tuple(ActorState), ActorUnavailableError, handle.ActorHandle, submit.submit_slowly, handle.rebuild)
    binding = _ray_compat.local_state_binding()
    if binding is not None:
        _core.bind_ray(*binding)
    direct = _ray_compat.direct_binding()
    if direct is not None:
        _core.bind_direct(*direct)
    if _ray_compat.can_travel():
        _ray_compat.register_reducer(handle.ActorHandle, handle.reduce_in_ray)
    if refs.is_bound():
        _core.bind_refs(ray.ObjectRef, refs.ObjectRef, refs.early_result)
        _ray_compat.register_reducer(refs.ObjectRef, _ray_compat.reduce_ref)
    _ray_compat.bind_disconnect(
        lambda: _take(BEFORE_DISCONNECT, "before Ray disconnects"),
        lambda: _take(AFTER_DISCONNECT, "after Ray disconnected"),
    )
    os.register_at_fork(after_in_child=lambda: _take(AFTER_FORK_IN_CHILD, "after a fork"))
    atexit.register(_at_exit)


_fit_together()
