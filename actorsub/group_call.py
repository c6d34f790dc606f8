"""Calls of a group: a `GroupCall` owns its way from member to member, its attempts and its end.

A call of a group is a Call whose attempts are Calls of members. One that nobody can take waits in the group's line, a
`CallQueue` whose slot says whether any member is up.

Threads: the first attempt is made on the caller's thread. Attempts after a failed one are made on the sender's, because
they give arguments to Ray. No lock is held while a function of the user runs (balancer, is_failure, callbacks).
"""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import ray

from actorsub import _core, _ray_compat, calls, errors, frozen, watcher
from actorsub.errors import Attempt, DeadlineExceededError, NoReplicaError, QueueFullError
from actorsub.fence import as_exception, fenced, take
from actorsub.group_options import GroupOptions
from actorsub.members import HELD, Members
from actorsub.retry_budget import RetryBudget

#: Before its k-th resend (k > 1) a call waits up to RETRY_PAUSE_S * 2^(k - 2), at most MAX_RETRY_PAUSE_S.
RETRY_PAUSE_S = 0.025
MAX_RETRY_PAUSE_S = 1.0

#: How many methods with different options a member keeps ready.
MAX_METHODS = 1000

_APPLICATION = _core.OUTCOMES["application_error"]
_FAILURE = _core.OUTCOMES["failure"]
_LOST = _core.OUTCOMES["lost"]
SUCCESS = _core.OUTCOMES["success"]
UNSENT = _core.OUTCOMES["unsent"]

ENDED = "The connection to Ray ended."
ENDED_WHILE_WAITING = "The connection to Ray ended while the call waited."
EXITING = "The interpreter ends, and nobody looks at the members any more."
WAITED = "It waited for a member."
WHY_NOBODY = {
    "no_member": "The group has no members.",
    "all_down": "Every member is away.",
    "all_excluded": "Every member that is up was tried.",
}


def line_full(max_queued: int) -> QueueFullError:
    return QueueFullError(f"As many wait for a member as may (max_queued={max_queued}).")


class MemberMethod:
    """A method of the group: its name, the options of its calls, and the method object that this makes at each
    member."""

    __slots__ = ("_key", "_made", "_made_for", "name", "options", "ray_options")

    def __init__(self, name: str, options: GroupOptions, ray_options: dict[str, Any]) -> None:
        self.name = name
        self.options = options
        self.ray_options = ray_options
        # A member's own method depends on this, and on Ray's options.
        self._key = (name, options.policy.max_in_flight, options.policy.max_queued)
        # If there are options of Ray: member -> its own method, for one set of members.
        self._made: dict[_core.GroupMember, Any] = {}
        self._made_for: Any = None

    def of(self, member: _core.GroupMember, picker: _core.GroupPicker) -> Any:
        """The method of one member."""
        if not self.ray_options:
            method = member.methods.get(self._key)
            if method is None:
                if len(member.methods) >= MAX_METHODS:
                    member.methods.clear()
                method = member.methods[self._key] = self._make(member)
            return method
        if self._made_for is not picker:
            self._made, self._made_for = {}, picker
        method = self._made.get(member)
        if method is None:
            method = self._made[member] = self._make(member)
        return method

    def of_any(self, picker: _core.GroupPicker) -> Any:
        """The method of some member, for what is the same at all of them; None if there are no members."""
        return self.of(picker.members[0], picker) if picker.members else None

    def _make(self, member: _core.GroupMember) -> Any:
        policy = self.options.policy
        return getattr(member.handle, self.name).options(
            on_unavailable="raise",
            timeout_s=None,
            max_in_flight=policy.max_in_flight,
            max_queued=policy.max_queued,
            **self.ray_options,
        )


class Judge:
    """Decides what the end of an attempt says about its member, and whether its call goes on. Counts both.

    Several threads change `counts` and `failures` without a lock. They are for people, and a count that two threads
    change at one moment may come out one short.
    """

    def __init__(self, is_failure: Callable[[BaseException], bool] | None) -> None:
        self._is_failure = is_failure
        self.budget = RetryBudget()
        self.counts = {"calls": 0, "moved": 0, "resent": 0, "budget_exhausted": 0}
        #: Calls that failed, by class of the error.
        self.failures: dict[str, int] = {}

    def count_failure(self, error: BaseException) -> None:
        name = "RayTaskError" if isinstance(error, ray.exceptions.RayTaskError) else type(error).__name__
        self.failures[name] = self.failures.get(name, 0) + 1

    def outcome(self, error: Any) -> int:
        """What the end of an attempt says about its member: one of _core.OUTCOMES."""
        if isinstance(error, ray.exceptions.RayTaskError):
            # The method's own error, also if its cause is the death of another actor.
            return _FAILURE if self._speaks_against(error) else _APPLICATION
        if isinstance(error, DeadlineExceededError):
            # Also if it waited in the member's line, since the calls before it did not end.
            return _FAILURE
        if isinstance(error, ray.exceptions.PendingCallsLimitExceeded):
            return UNSENT
        if errors.kind_of(error) is errors.Kind.OWN:
            return _APPLICATION
        return _LOST if errors.may_have_run(error) else UNSENT

    def _speaks_against(self, error: ray.exceptions.RayTaskError) -> bool:
        ask = self._is_failure
        if ask is None:
            return False
        # If it raises, the error counts as the method's own. All is in the fence: the class of the method's error runs
        # when an error of that class is made, and a result's `__bool__` may raise, too.
        return bool(fenced("is_failure of a group", lambda: bool(ask(errors.as_raised(error))), failed=False))

    def lets_go_on(self, options: GroupOptions, error: BaseException, outcome: int, sent: int) -> bool:
        """Whether a call may go to another member after this error, having been `sent` so many times already."""
        if isinstance(error, DeadlineExceededError) or outcome == _APPLICATION:
            return False
        if not errors.may_have_run(error):
            return options.retry != "never"
        if options.retry != "always" or sent >= options.max_attempts:
            return False
        if not self.budget.take():
            self.counts["budget_exhausted"] += 1
            return False
        return True

    def follow(self, ref: Any, member: _core.GroupMember, started_ns: int, probe: int) -> None:
        """Has the outcome of `ref`, a plain one, judged when Ray has it."""
        # The callback holds the ref: Ray does not report the outcome of a ref that was dropped.
        ended = functools.partial(_judge_outcome, weakref.ref(self), member, started_ns, probe, ref)
        _ray_compat.on_completed(ref, ended)


def _judge_outcome(
    judge: weakref.ref[Judge], member: _core.GroupMember, started_ns: int, probe: int, ref: Any, value: Any
) -> None:
    if not _ray_compat.is_failure(ref, value):
        member.end(SUCCESS, started_ns, probe)
        return
    watcher.learn(member.actor, value, _core.call_of(ref)[1])
    alive = judge()
    member.end(UNSENT if alive is None else alive.outcome(value), started_ns, probe)


class GroupCall(calls.Call):
    """A Call whose attempts are Calls of members.

    At any moment one party may act on it: the thread that routes it; or, while an attempt is under way or the call is
    in the group's line, the thread that ends that; or, between two attempts (`_between`), the thread that comes first.
    """

    # All three are None once it has ended.
    _members: Members | None
    _judge: Judge | None
    _method: MemberMethod | None
    _deadline_ns: int
    _current: calls.Call | None
    # Members not to be tried again for now. Those in `_sent_to` may be when no other member is up.
    _tried: set[_core.GroupMember]
    _sent_to: set[_core.GroupMember]
    _attempts: list[Attempt]
    _sent_attempts: int
    # What the last attempt ended with.
    _error: Any
    # Tokens: the thread that takes the one in `_end` ends the call, the one in `_between` ends the pause.
    _end: list[bool]
    _between: list[bool]
    # Its user has asked to take it back: no further attempt.
    _is_unwanted: bool
    #: The number of its last pause between two attempts.
    _pause: int

    @classmethod
    def make(
        cls, members: Members, judge: Judge, method: MemberMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GroupCall:
        call: GroupCall = calls.new_call(cls, None, args, kwargs)
        call._members, call._judge, call._method = members, judge, method
        call._current = None
        call._tried = set()
        call._sent_to = set()
        call._attempts = []
        call._sent_attempts = 0
        call._error = None
        call._pause = 0
        call._end, call._between, call._is_unwanted = [True], [], False
        call._deadline_ns = method.options.deadline_ns()
        return call

    def begin(self) -> None:
        """The first attempt. Raises what `.call()` of a group does."""
        members, judge, method = self._parts()
        judge.counts["calls"] += 1
        judge.budget.deposit()
        error = self._no_replica(ENDED) if members.is_cut_off() else self._route(on_sender=False)
        if error is None:
            return
        if method.options.policy.on_unavailable == "raise" or isinstance(error, QueueFullError):
            self._complete(error)
            judge.count_failure(error)
            raise error
        self._finish(error, raised=True)

    # -- For users.

    @property
    def _actorsub_refs(self) -> Any:
        current = self._current
        return () if current is None else current._actorsub_refs or ()

    @property
    def object_ref(self) -> Any:
        """Ray's ObjectRef of the present attempt; None until one was sent."""
        current = self._current
        return None if current is None else current.object_ref

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(self._attempts)

    def running(self) -> bool:
        current = self._current
        return not self.done() and current is not None and current.running()

    def cancel(self) -> bool:
        members = self._members
        if members is None or self.done():
            return self.cancelled()
        self._refuse_in_child()
        self._is_unwanted = True
        # Read after the flag is set: an attempt that ends meanwhile finds that the call is unwanted.
        current = self._current
        if take(self._between):
            self._finish_unwanted()
        elif current is not None:
            current.cancel()
        elif members.line.cancel(self._actorsub_ticket)[0]:
            self._finish_unwanted()
        return self.cancelled()

    def __repr__(self) -> str:
        method = self._method
        stage = "done" if self.done() else "waiting" if self.object_ref is None else "sent"
        return f"<Call {'' if method is None else f'{method.name} of {self._members!r}, '}{stage}>"

    # -- What Call asks of its kinds.

    def _take_here(self) -> None:
        current = self._current
        if current is not None:
            current._take_here()

    def _refuse_in_child(self) -> None:
        if self._members is not None:
            self._members.refuse_in_child()

    # -- Its way.

    def _parts(self) -> tuple[Members, Judge, MemberMethod]:
        """What it needs for as long as it has not ended."""
        assert self._members is not None and self._judge is not None and self._method is not None
        return self._members, self._judge, self._method

    def _route(self, *, on_sender: bool) -> Any:
        """Makes the next attempt. None: under way, or waiting; else the error that ends the call.

        Raises what Ray raises for arguments that it does not take, and what a balancer raises.
        """
        members, judge, method = self._parts()
        options = method.options
        turns = 0
        while True:
            picker = members.picker
            member, probe = members.pick(picker, options.key, self._tried)
            if member is None:
                turns += 1
                error = self._wait_or_fail(members, method, probe, turns)
                if error is _TRY_AGAIN:
                    continue
                return error
            started_ns = member.start()
            try:
                plan = calls.plan_of(method.of(member, picker))
                attempt: calls.Call = calls.new_call(calls.Call, plan, self._actorsub_args, self._actorsub_kwargs)
                # A call that Ray has may also move: it cannot have run if its member turns out never to have been up.
                again = options.retry == "always" and options.max_attempts > 1
                again = again or (options.retry == "unsent" and not member.actor.was_up)
                if again:
                    # Copied for the next attempt: it must not see what the caller does to its objects after this.
                    frozen.freeze(self)
                admit = _admit_on_sender if on_sender else calls.admit
                refusal = admit(attempt, self._deadline_ns)
            except QueueFullError as full:
                # The actor's own `max_pending_calls`.
                refusal = full.with_traceback(None)
            except BaseException:
                member.end(UNSENT, started_ns, probe)
                raise
            if refusal is None:
                if not again:
                    # The attempt keeps them until it is sent.
                    self._actorsub_args = self._actorsub_kwargs = None
                self._current = attempt
                attempt.add_done_callback(functools.partial(self._attempt_ended, judge, member, started_ns, probe))
                if self._is_unwanted and not self.done():
                    attempt.cancel()
                return None
            member.end(UNSENT, started_ns, probe)
            if not self._moves(judge, options, member, refusal, UNSENT):
                return refusal
            judge.counts["moved"] += 1

    def _wait_or_fail(self, members: Members, method: MemberMethod, reason: str, turns: int) -> Any:
        """No member could be picked. Returns None, an error or _TRY_AGAIN, as `_route` goes on."""
        policy = method.options.policy
        if self._sent_to and reason == "all_excluded":
            self._tried -= self._sent_to
            self._sent_to.clear()
            return _TRY_AGAIN
        if not self._attempts:
            self._check_arguments(members, method)
        if isinstance(self._error, QueueFullError) and not isinstance(self._error, ray.exceptions.RayTaskError):
            return QueueFullError(f"So has every other member of the group (max_queued={policy.max_queued}).")
        if policy.on_unavailable != "wait" or turns > 3:
            if isinstance(self._error, ray.exceptions.RayTaskError):
                # No other member can give a better answer.
                return self._error
            return self._no_replica(WHY_NOBODY[reason])
        if watcher.is_exiting():
            return self._no_replica(EXITING)
        self._tried.clear()
        self._current = None
        frozen.freeze(self)
        members.set_open()
        line = members.line
        verdict, release = line.admit(self, self._deadline_ns, 0, policy.max_queued, *HELD)
        if verdict == calls.SEND:
            # A member is up after all.
            line.complete(self._actorsub_ticket)
            return _TRY_AGAIN
        if verdict == calls.WAIT:
            watcher.ensure()
            if release:
                calls.call_sender(line)
            if self._is_unwanted:
                self.cancel()
            return None
        if verdict == calls.FULL:
            return line_full(policy.max_queued)
        if verdict == calls.EXPIRED:
            return self._deadline_error()
        return self._no_replica(ENDED)

    def _check_arguments(self, members: Members, method: MemberMethod) -> None:
        """Raises for wrong arguments, which are the caller's mistake whatever the members do. Frozen ones were
        checked."""
        if isinstance(self._actorsub_args, tuple):
            any_of_them = method.of_any(members.picker)
            if any_of_them is not None:
                inner = calls.plan_of(any_of_them).method
                _ray_compat.check_arguments(inner, self._actorsub_args, self._actorsub_kwargs)

    # -- The end of an attempt.

    def _attempt_ended(
        self, judge: Judge, member: _core.GroupMember, started_ns: int, probe: int, attempt: Any
    ) -> None:
        """On the thread that ended it: one of Ray's, the watcher's, or the caller's."""
        if attempt.cancelled():
            member.end(UNSENT, started_ns, probe)
            self._finish_unwanted()
            return
        error = attempt._exception
        if error is None:
            if isinstance(attempt._result, ray.ObjectRefGenerator):
                # The stream goes on at the member.
                judge.follow(attempt._result.completed(), member, started_ns, probe)
            else:
                member.end(SUCCESS, started_ns, probe)
            self._finish(attempt._result)
            return
        outcome = judge.outcome(error)
        member.end(outcome, started_ns, probe)
        method = self._method
        if method is None or not self._moves(judge, method.options, member, error, outcome):
            self._finish(error, raised=True)
            return
        if errors.may_have_run(error):
            judge.counts["resent"] += 1
            again = self._sent_attempts - 1
            pause_s = 0.0 if again == 0 else random.uniform(0, min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (again - 1)))
            self._send_again(int(pause_s * 1e9))
            return
        if attempt._actorsub_args is not None:
            # The attempt waited in the member's line, and has them frozen as they were when the call was made.
            self._actorsub_args, self._actorsub_kwargs = attempt._actorsub_args, attempt._actorsub_kwargs
        if calls.takes_back() or self._actorsub_args is None:
            # shutdown() ends it; or its arguments were dropped when Ray had them.
            self._finish(error, raised=True)
            return
        judge.counts["moved"] += 1
        self._send_again()

    def _moves(
        self, judge: Judge, options: GroupOptions, member: _core.GroupMember, error: BaseException, outcome: int
    ) -> bool:
        """Whether the call goes on with another member after this error. Notes the attempt."""
        sent = errors.may_have_run(error)
        evidence = getattr(error, "evidence", None)
        self._attempts.append(Attempt(member.actor.key.hex(), type(error).__name__, evidence, sent))
        self._tried.add(member)
        self._error = error
        if sent:
            self._sent_attempts += 1
            self._sent_to.add(member)
        if not self._end or self._is_unwanted:
            return False
        return judge.lets_go_on(options, error, outcome, self._sent_attempts)

    def _send_again(self, pause_ns: int = 0) -> None:
        """Has the sender route it, after a pause that ends no later than its deadline."""
        self._between.append(True)
        if self._is_unwanted:
            # If `take` fails, the thread that cancels has seen `_between`, and finishes the call.
            if take(self._between):
                self._finish_unwanted()
            return
        pause_ns = min(pause_ns, self._deadline_ns - _core.now_ns())
        if pause_ns <= 0:
            _run_on_sender(self._route_between)
            return
        self._pause = next(_pauses)
        _paused[self._pause] = self
        # By number, so that a call which ends before its pause is not kept until then.
        _core.call_later(pause_ns, functools.partial(_resume, self._pause))

    def _route_between(self) -> None:
        """The next attempt of a call that has had one, unless its user was first. On the sender's thread."""
        if take(self._between):
            self._route_again()

    def _route_again(self) -> None:
        """The next attempt of a call that has had one, or has waited. On the sender's thread."""
        if not self._end:
            return
        if self._is_unwanted:
            self._finish_unwanted()
            return
        try:
            error = self._route(on_sender=True)
        except BaseException as raised:
            error = as_exception("the balancer, or pickling the arguments,", raised)
        if error is not None:
            self._finish(error, raised=True)

    # -- In the group's line.

    def _leave_line(self, queue: _core.CallQueue, ticket: int) -> None:
        queue.end_send(ticket)
        if queue.complete(ticket)[0] is not None:
            self._route_again()

    def _end_as(self, why: str, sent: bool) -> None:
        if why == "deadline":
            self._finish(self._deadline_error(), raised=True)
        elif why == "closed":
            self._finish(self._no_replica(ENDED_WHILE_WAITING), raised=True)
        else:
            self._finish(self._no_replica(WHY_NOBODY["all_down"]), raised=True)

    def taken_back(self) -> None:
        """`actorsub.shutdown()` has taken it out of the line."""
        self._finish(self._no_replica("actorsub.shutdown() was called while it waited."), raised=True)

    # -- The end.

    def _no_replica(self, detail: str) -> NoReplicaError:
        return NoReplicaError(detail, sent=self._sent_attempts > 0)

    def _deadline_error(self) -> DeadlineExceededError:
        return DeadlineExceededError(WAITED, sent=self._sent_attempts > 0)

    def _take_end(self) -> bool:
        """True for the one who may end the call."""
        return take(self._end) is not None

    def _finish(self, value: Any, *, raised: bool = False) -> None:
        """Ends it with a value, or with an error that an attempt or the group has `raised`."""
        judge = self._judge
        if not self._take_end() or judge is None:
            return
        if raised:
            value = self._complete(value)
            judge.count_failure(value)
        self._forget()
        calls.deliver(self, value, failed=raised)

    def _complete(self, error: BaseException) -> BaseException:
        """The error with what was tried. `sent` is about the whole call, of which the error may be the last part."""
        if isinstance(error, ray.exceptions.RayTaskError) or not self._attempts:
            return error
        if self._sent_attempts and getattr(error, "sent", None) is False:
            errors.resign(error, sent=True)
        error.attempts = tuple(self._attempts)  # type: ignore[attr-defined]
        return error

    def _finish_unwanted(self) -> None:
        """Its user has taken it back, and nothing of it is at a member now."""
        if self._sent_attempts:
            # It may have run, so it does not count as cancelled.
            self._finish(self._error, raised=True)
        elif self._take_end():
            self._forget()
            self._cancel_future()

    def _forget(self) -> None:
        # The call keeps its outcome, but neither the arguments nor the members.
        self._actorsub_args = self._actorsub_kwargs = None
        self._members = self._judge = self._method = self._error = None
        _paused.pop(self._pause, None)
        self._tried = self._sent_to = set()


def _admit_on_sender(attempt: calls.Call, deadline_ns: int) -> Any:
    """calls.admit on the sender's thread."""
    after: list[Callable[[], None]] = []
    plan: calls.Plan = attempt._actorsub_plan
    # Keeps `ray.shutdown()` out meanwhile: Ray's core would end the process.
    with _ray_compat.core_in_use(plan.actor.session) as usable:
        refusal = calls.admit(attempt, deadline_ns, after) if usable else NoReplicaError(ENDED, sent=False)
    for function in after:
        function()
    return refusal


_TRY_AGAIN: Any = object()

# Calls between two attempts whose pause is not over, by its number.
_paused: dict[int, GroupCall] = {}
_pauses = itertools.count(1)


def _resume(pause: int) -> None:
    call = _paused.pop(pause, None)
    if call is not None:
        _run_on_sender(call._route_between)


def _run_on_sender(function: Callable[[], None]) -> None:
    while not watcher.is_exiting() and not watcher.ensure().send(function):
        pass


def take_back_paused() -> None:
    """Ends the calls between two attempts: `shutdown()` has stopped the threads that would go on with them."""
    for pause, call in list(_paused.items()):
        if _paused.pop(pause, None) is not None:
            call._finish(call._error, raised=True)
