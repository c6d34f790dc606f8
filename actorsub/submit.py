"""What `.remote()` does when the fast path in the core does not apply: look, wait, refuse, or hand the call to Ray."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from actorsub import _core, _ray_compat, errors, supply, watcher
from actorsub.fence import Wakeup

_EVENT_LOOP = (
    "It cannot be waited for on this thread, which runs an event loop that would stop meanwhile. Use .call(), which "
    "waits without blocking, or on_unavailable='raise', or another thread."
)
_CALLBACK = (
    "It cannot be waited for in a callback of actorsub, which runs on the thread that would have to notice its return. "
    "Use on_unavailable='raise' here, or call from another thread."
)
PARENT = (
    "this handle or connection belongs to the parent process: Ray connections do not survive a fork. Start child "
    "processes with the 'spawn' method, or fork before ray.init()"
)


def submit_slowly(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole of `method.remote(*args, **kwargs)`, in Python. Called by the core."""
    actor = method._actorsub_actor
    if actor is None:
        raise RuntimeError("this method object was not made by a handle")
    if actor.is_inherited:
        raise RuntimeError(PARENT)
    if _ray_compat.is_ending():
        raise errors.refusal(actor, "The connection to Ray is ending.")
    if watcher.is_exiting() and _ray_compat.session_token() is None:
        # Not left to Ray: called from a thread that lives on, it would start a new cluster in an interpreter that ends.
        raise errors.refusal(actor, "The connection to Ray has ended, and the interpreter ends.")
    error, mark = pass_gate(actor, method._actorsub_policy, method._actorsub_wish)
    if error is None:
        result = method._actorsub_submit(mark, args, kwargs)
        actor.used = True
        return result
    return refused(method, error, args, kwargs)


def pass_gate(actor: _core.Actor, policy: Any, wish: str) -> tuple[Any, int]:
    """(None, mark) when the call may go to Ray now; (error, mark) when the refusal is to be a failed ref.

    `mark` is `losses()` from before the deciding look: the call is lost when losses() is higher later.

    `wish`: the policy's `on_unavailable`, or for "auto" what that means here; "ray" is a call that Ray resends.

    Raises what the policy says should be raised; blocks only where the policy says "wait".
    """
    if wish == "ray" and policy.on_pending == "submit":
        # As through a plain handle, which looks at nothing either.
        watcher.hurry(actor)
        return None, actor.losses()
    deadline_s: float | None = None
    waited = False
    while True:
        mark = actor.losses()
        state = look(actor)
        if waited and state == "unknown":
            # Not left to Ray: its own call would start a new local cluster from a thread that only waited.
            actor.count_refused("deadline")
            raise errors.refusal(actor, "The connection to Ray ended while the call waited.")
        decision = _core.gate(state, wish, policy.on_pending)
        if state == "dead" and wish == "ref" and ray_knows(actor):
            # Once Ray knows of the death, it refuses a call at once, with its own cause. And it knows whether lineage
            # can bring the actor back. So the call is left to Ray.
            decision = "pass"
        if decision == "pass":
            break
        if decision == "refuse":
            actor.count_refused(state)
            if wish in ("ref", "ray"):
                return errors.death(actor) if state == "dead" else errors.refusal(actor), mark
            if state == "dead":
                learn_cause(actor)
                raise errors.death(actor)
            raise errors.refusal(actor)
        why = why_not_block()
        if why is not None:
            actor.count_refused("event_loop")
            raise errors.refusal(actor, why)
        if policy.timeout_s is not None and deadline_s is None:
            deadline_s = time.monotonic() + policy.timeout_s
        waited = True
        if not wait_for_change(actor, state, deadline_s):
            raise errors.deadline(actor, f"It was waited for {policy.timeout_s:g} s.", sent=False)
    if waited:
        actor.count_waited()
    return None, mark


def why_not_block() -> str | None:
    """Why this thread must not wait for an actor; None where it may."""
    if watcher.is_own_thread():
        return _CALLBACK
    return _EVENT_LOOP if asyncio._get_running_loop() is not None else None


def look(actor: _core.Actor) -> str:
    """The actor's state by all that can be known right now, without an RPC except on the very first call.

    Returns a state's name. "unknown" means that no source knows it. The call is left to Ray then, as without actorsub.
    """
    if actor.session is not _ray_compat.session_token():
        # Another session, or none: Ray's own error for such a handle is the right one.
        return "unknown"
    if actor.unhurried:
        watcher.hurry(actor)
    if actor.observe_ray():
        watcher.wake(actor)
        watcher.nudge_if_possible()
    if not actor.is_subscribed and not actor.used:
        # Ray subscribes at the first call; until then its local state says nothing, whatever the actor does.
        read_table_once(actor)
    return actor.state_name


def read_table_once(actor: _core.Actor) -> None:
    """Waits for one read of the actor table (0.5 ms), at most FIRST_READ_LIMIT_S."""
    running = watcher.ensure_if_possible()
    if running is None:
        return
    waiter = _Waiter(actor)
    try:
        running.request_read(actor)
        end_s = time.monotonic() + watcher.FIRST_READ_LIMIT_S
        while actor.reading and (left_s := end_s - time.monotonic()) > 0:
            waiter.wait(left_s)
    finally:
        waiter.close()


def ray_knows(actor: _core.Actor) -> bool:
    """Whether Ray has heard of the death of a dead actor, or will as soon as it asks."""
    return actor.rays_word == "dead" or actor.belief()[1] == "table"


def learn_cause(actor: _core.Actor) -> None:
    """Reads why the actor died, unless that is known, or the table cannot know yet."""
    if actor.death is None and ray_knows(actor):
        read_table_once(actor)


def wait_for_change(actor: _core.Actor, state: str, deadline_s: float | None) -> bool:
    """Blocks until the actor's state is another one. False when the deadline passed first.

    Raises ActorUnavailableError where the interpreter ends meanwhile.
    """
    waiter = _Waiter(actor)
    try:
        while actor.state_name == state:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            if actor.session is not _ray_compat.session_token():
                return True
            # `ensure` each time: shutdown() may have stopped the threads meanwhile.
            try:
                watcher.ensure().nudge()
            except RuntimeError as error:
                if not watcher.is_exiting():
                    raise
                raise errors.refusal(actor, "The interpreter ends, and nobody looks at the actor any more.") from error
            waiter.wait(left_s)
        return True
    finally:
        waiter.close()


class _Waiter:
    """One thread that waits for a change of one actor."""

    def __init__(self, actor: _core.Actor) -> None:
        self._wakeup = Wakeup()
        self._actor = actor
        actor.waiters.append(self._wakeup)

    def wait(self, timeout_s: float | None) -> None:
        self._wakeup.wait(timeout_s)
        self._wakeup.clear()

    def close(self) -> None:
        self._actor.waiters.remove(self._wakeup)


def refused(
    method: Any,
    error: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make_ref: Callable[[], Any] | None = None,
) -> Any:
    """The refusal in the shape that the call would have had. `make_ref` makes the failed refs; None: from the stock."""
    # Wrong arguments are the caller's mistake whatever the actor does, and Ray reports them at submit.
    _ray_compat.check_arguments(method._actorsub_inner, args, kwargs)
    actor = method._actorsub_actor
    num_returns = (method._actorsub_options or {}).get("num_returns")
    if num_returns is None:
        num_returns = _ray_compat.default_num_returns(method._actorsub_inner)
    make = make_ref or functools.partial(supply.take, actor, error)
    if num_returns == "streaming":
        return _ray_compat.FailedGenerator(make())
    if num_returns == "dynamic" or num_returns == 1:
        return make()
    if num_returns == 0:
        return None
    return [make() for _ in range(num_returns)]
