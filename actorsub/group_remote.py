"""`group.method.remote(...)`: calls `.remote()` on a member that can take the call, and returns what that returns.

A call that was sent is never resent: the result is the member's own ref.
"""

from __future__ import annotations

import functools
from typing import Any

import ray

from actorsub import _core, _ray_compat, calls, errors, submit, watcher
from actorsub.errors import Attempt, DeadlineExceededError, NoReplicaError
from actorsub.group_call import (
    ENDED,
    ENDED_WHILE_WAITING,
    EXITING,
    SUCCESS,
    UNSENT,
    WAITED,
    WHY_NOBODY,
    Judge,
    MemberMethod,
    line_full,
)
from actorsub.members import HELD, Members
from actorsub.policy import Policy


def remote(members: Members, judge: Judge, method: MemberMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole of `group.method.remote(*args, **kwargs)`."""
    options = method.options
    policy = options.policy
    deadline_ns = options.deadline_ns()
    tried: set[_core.GroupMember] = set()
    attempts: list[Attempt] = []
    judge.counts["calls"] += 1
    while True:
        picker = members.picker
        member, probe = members.pick(picker, options.key, tried)
        if members.is_cut_off():
            raise NoReplicaError(ENDED, sent=False)
        if member is None:
            none = NoReplicaError(WHY_NOBODY[probe], sent=False)
            none.attempts = tuple(attempts)
            if policy.on_unavailable != "wait":
                return _refuse(members, judge, method, none, args, kwargs)
            tried.clear()
            _wait_for_member(members, policy, deadline_ns, none)
            continue
        started_ns = member.start()
        try:
            result = method.of(member, picker).remote(*args, **kwargs)
        except (errors.ActorUnavailableError, errors.ActorDiedError) as refusal:
            member.end(UNSENT, started_ns, probe)
            attempts.append(Attempt(member.actor.key.hex(), type(refusal).__name__, refusal.evidence, refusal.sent))
            tried.add(member)
            if options.retry == "never":
                refusal.attempts = tuple(attempts)
                return _refuse(members, judge, method, refusal.with_traceback(None), args, kwargs)
            judge.counts["moved"] += 1
            continue
        except BaseException:
            member.end(UNSENT, started_ns, probe)
            raise
        ref = _first_ref(result)
        if ref is None:
            member.end(SUCCESS, started_ns, probe)
        else:
            judge.follow(ref, member, started_ns, probe)
        return result


def _refuse(
    members: Members, judge: Judge, method: MemberMethod, error: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Ends a `.remote()` that no member took: raises, or returns failed refs in the shape of the result."""
    judge.count_failure(error)
    if method.options.policy.on_unavailable not in ("auto", "ref"):
        raise error
    make_ref = functools.partial(_ray_compat.failed_ref, error)
    any_of_them = method.of_any(members.picker)
    if any_of_them is not None:
        return submit.refused(any_of_them, error, args, kwargs, make_ref)
    # There is no member from which to learn how many results the method has.
    count = method.ray_options.get("num_returns", 1)
    if count == "streaming":
        return _ray_compat.FailedGenerator(make_ref())
    if count == 0:
        return None
    return [make_ref() for _ in range(count)] if isinstance(count, int) and count > 1 else make_ref()


def _wait_for_member(members: Members, policy: Policy, deadline_ns: int, error: NoReplicaError) -> None:
    """Blocks until a member is up, or raises."""
    why = submit.why_not_block()
    if why is None and watcher.is_exiting():
        why = EXITING
    if why is not None:
        raise NoReplicaError(why, sent=False) from error
    turn: _Turn = calls.new_call(_Turn, None, (), {})
    members.set_open()
    watcher.ensure()
    line = members.line
    verdict, release = line.admit(turn, deadline_ns, 0, policy.max_queued, *HELD)
    if verdict == calls.SEND:
        line.complete(turn._actorsub_ticket)
    elif verdict == calls.WAIT:
        if release:
            calls.call_sender(line)
        turn.result()
    elif verdict == calls.FULL:
        raise line_full(policy.max_queued)
    elif verdict == calls.EXPIRED:
        raise DeadlineExceededError(WAITED, sent=False)
    else:
        raise error


class _Turn(calls.Call):
    """A thread's place in the line of a group."""

    def _leave_line(self, queue: _core.CallQueue, ticket: int) -> None:
        queue.end_send(ticket)
        if queue.complete(ticket)[0] is not None:
            calls.deliver(self, None)

    def _end_as(self, why: str, sent: bool) -> None:
        error: Any
        if why == "deadline":
            error = DeadlineExceededError(WAITED, sent=False)
        else:
            error = NoReplicaError(ENDED_WHILE_WAITING, sent=False)
        calls.deliver(self, error, failed=True)

    def taken_back(self) -> None:
        # The thread then asks for another turn, which starts the threads again.
        calls.deliver(self, None)


def _first_ref(result: Any) -> Any:
    """A plain ref whose outcome says something about the member; None if there is none."""
    if isinstance(result, ray.ObjectRefGenerator):
        return result.completed()
    if isinstance(result, list):
        result = result[0] if result else None
    return result if isinstance(result, ray.ObjectRef) else None
