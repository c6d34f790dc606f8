"""Replicas behind one name: `ReplicaGroup` picks a member for each call and moves to another when one fails.

A call of a group is a Call whose attempts are Calls of members. Which member takes an attempt, and which are left out
for a while, is decided in C++ (csrc/balancer.h). A call that nobody can take waits in the group's own line, a
`CallQueue` whose slot says whether any member is up.

Threads: the first attempt is made on the caller's thread; what comes after a failed one, on the sender's, because it
gives arguments to Ray. Membership changes under a lock of the group, never on the way of a call.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import ray

from actorsub import _core, _ray_compat, calls, errors, handle, submit, watcher
from actorsub.errors import ActorState, Attempt, DeadlineExceededError, NoReplicaError, QueueFullError
from actorsub.policy import DEFAULT_POLICY, OPTION_NAMES, Policy

logger = logging.getLogger("actorsub")

Retry = Literal["unsent", "always", "never"]

#: Resends of calls that may have run: at most this share of the calls, and this many per second come on top.
RETRY_SHARE = 0.2
RETRY_FLOOR_PER_S = 10.0
#: Before the k-th resend of one call (k > 1) it waits up to RETRY_PAUSE_S * 2^(k - 2), at most MAX_RETRY_PAUSE_S.
RETRY_PAUSE_S = 0.025
MAX_RETRY_PAUSE_S = 1.0
#: Pause before the factory is asked again, doubled each time, after it raised or its actor died before it was up.
FACTORY_PAUSE_S = 1.0
MAX_FACTORY_PAUSE_S = 30.0
#: How often in a row that may happen; then the group stays smaller.
MAX_FACTORY_FAILURES = 10

#: When more than this share of the members that are up is left out by soft evidence, that evidence is ignored.
PANIC_SHARE = 0.5

_APPLICATION = _core.OUTCOMES["application_error"]
_FAILURE = _core.OUTCOMES["failure"]
_LOST = _core.OUTCOMES["lost"]
_SUCCESS = _core.OUTCOMES["success"]
_UNSENT = _core.OUTCOMES["unsent"]

# Policy options that mean something for a call of a group; the others belong to the members' handles.
_POLICY_OPTIONS = ("timeout_s", "max_in_flight", "max_queued", "on_unavailable")


@dataclasses.dataclass(frozen=True)
class MemberState:
    """One member of a group, as it was at one moment."""

    handle: handle.ActorHandle
    state: ActorState
    #: "healthy"; "ejected": left out for a time, by soft evidence; "probing": one call decides whether it returns.
    health: str
    #: Calls of this group, in this process, that it has now.
    in_flight: int
    failures_in_a_row: int
    #: Calls that it was given so far.
    started: int


@dataclasses.dataclass(frozen=True)
class _Options:
    """How one call of a group is made: of the group, changed by `.options()` of a method."""

    policy: Policy
    retry: Retry
    max_attempts: int
    key: int | None = None

    def replace(self, group: ReplicaGroup, options: dict[str, Any]) -> tuple[_Options, dict[str, Any]]:
        """(the changed options, those that are Ray's)."""
        ours = {name: options.pop(name) for name in list(options) if name in _POLICY_OPTIONS}
        for name in options:
            if name in OPTION_NAMES:
                raise TypeError(f"option {name!r} belongs to a member's handle: actorsub.wrap(handle, {name}=...)")
        changed: dict[str, Any] = {"policy": self.policy.replace(**ours)}
        if "retry" in options:
            changed["retry"] = _check_retry(options.pop("retry"))
        if "max_attempts" in options:
            changed["max_attempts"] = _check_max_attempts(options.pop("max_attempts"))
        if "key" in options:
            if group._balancer not in ("consistent_hash", None):
                raise ValueError(f"option 'key' is for balancer='consistent_hash', this group has {group._balancer!r}")
            changed["key"] = _key_number(options.pop("key"))
        return dataclasses.replace(self, **changed), options


def _check_retry(value: Any) -> Any:
    if value not in ("unsent", "always", "never"):
        raise ValueError(f"retry must be one of 'unsent', 'always', 'never', got {value!r}")
    return value


def _check_max_attempts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_attempts must be a whole number, got {value!r} of type {type(value).__name__}")
    if not 1 <= value <= 100:
        raise ValueError(f"max_attempts must be from 1 to 100, got {value!r}")
    return value


def _key_number(key: Any) -> int:
    # Not hash(): every process has to come to the same member.
    if isinstance(key, str):
        data = b"s" + key.encode()
    elif isinstance(key, bytes):
        data = b"b" + key
    elif isinstance(key, int) and not isinstance(key, bool):
        data = b"i%d" % key
    else:
        raise TypeError(f"key must be a str, bytes or int, got {key!r} of type {type(key).__name__}")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class _RetryBudget:
    """How many calls that may have run may be sent again: a bucket of tokens, so that an outage is not made worse."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = RETRY_FLOOR_PER_S
        self._filled_s = time.monotonic()

    def deposit(self) -> None:
        self._tokens = min(self._tokens + RETRY_SHARE, 100 * RETRY_FLOOR_PER_S)

    def take(self) -> bool:
        with self._lock:
            now_s = time.monotonic()
            passed_s, self._filled_s = now_s - self._filled_s, now_s
            self._tokens = max(self._tokens, min(RETRY_FLOOR_PER_S, self._tokens + passed_s * RETRY_FLOOR_PER_S))
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class GroupMethod:
    """A method of all members: `.call(...)`, `.remote(...)`, `.options(...)`. Made by `group.method`."""

    def __init__(self, group: ReplicaGroup, name: str, options: _Options, ray_options: dict[str, Any]) -> None:
        self._group = group
        self._name = name
        self._options = options
        self._ray_options = ray_options
        # Member -> its own method; for one membership.
        self._made: dict[_core.GroupMember, Any] = {}
        self._made_for: Any = None

    def options(self, **options: Any) -> GroupMethod:
        """The same method with options for the calls made through it: those of ReplicaGroup that are about calls
        (`retry`, `max_attempts`, `timeout_s`, `max_in_flight`, `max_queued`, `on_unavailable`), `key` for
        "consistent_hash", and Ray's for methods.

        Raises TypeError or ValueError for an option that is unknown or has a value that it does not take.
        """
        ours, rays = self._options.replace(self._group, options)
        made = GroupMethod(self._group, self._name, ours, {**self._ray_options, **rays})
        for member in self._group._picker.members[:1]:
            # Ray's options are checked by Ray, here where they are written.
            made._of(member, self._group._picker)
        return made

    def call(self, *args: Any, **kwargs: Any) -> calls.Call:
        """Calls the method on a member that can take it; see ReplicaGroup and Call.

        Raises:
            TypeError: the arguments do not fit the method, or cannot be pickled.
            QueueFullError: too many calls wait already.
            NoReplicaError: no member can take it, where `on_unavailable` is "raise"; else the Call fails with it.
        """
        return self._group._call(self, args, kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """`.remote()` of a member that can take it: what that returns. Nothing is resent once it was sent."""
        return self._group._remote(self, args, kwargs)

    def _of(self, member: _core.GroupMember, picker: _core.GroupPicker) -> Any:
        """The method of one member."""
        if self._made_for is not picker:
            self._made, self._made_for = {}, picker
        method = self._made.get(member)
        if method is None:
            policy = self._options.policy
            method = self._made[member] = getattr(member.handle, self._name).options(
                on_unavailable="raise",
                timeout_s=None,
                max_in_flight=policy.max_in_flight,
                max_queued=policy.max_queued,
                **self._ray_options,
            )
        return method

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._group!r}>"


class GroupCall(calls.Call):
    """A Call whose attempts are Calls of members."""

    _group: ReplicaGroup
    _method: GroupMethod
    _deadline_ns: int
    _current: calls.Call | None
    _tried: set[_core.GroupMember]
    _attempts: list[Attempt]
    _sent_attempts: int
    _is_over: bool

    @property
    def object_ref(self) -> Any:
        """That of the present attempt; None until one was sent."""
        current = self._current
        return None if current is None else current.object_ref

    def running(self) -> bool:
        current = self._current
        return not self.done() and current is not None and current.running()

    def cancel(self) -> bool:
        current = self._current
        if current is not None:
            return current.cancel() and self.cancelled()
        taken_back, _ = self._group._line.cancel(self._actorsub_ticket)
        if taken_back:
            self._finish_cancelled()
        return self.cancelled()

    def __repr__(self) -> str:
        stage = "done" if self.done() else "waiting" if self.object_ref is None else "sent"
        return f"<Call {self._method._name} of {self._group!r}, {stage}>"

    # -- In the group's line.

    def _leave_line(self, queue: _core.CallQueue, ticket: int) -> None:
        queue.end_send(ticket)
        if queue.complete(ticket)[0] is not None:
            self._group._route_again(self)

    def _end_as(self, why: str, sent: bool) -> None:
        if why == "deadline":
            self._finish(self._group._deadline_error(self))
        elif why == "closed":
            self._finish(self._group._no_replica(self, "The connection to Ray ended while the call waited."))
        else:
            self._finish(self._group._no_replica(self, "Every member is away."))

    # -- The end.

    def _take_end(self) -> bool:
        """True for the one who may end the call."""
        with self._condition:
            first, self._is_over = not self._is_over, True
        return first

    def _finish(self, value: Any) -> None:
        if not self._take_end():
            return
        if isinstance(value, BaseException):
            self._group._count_failure(value)
            if self._attempts and not isinstance(value, ray.exceptions.RayTaskError):
                value.attempts = tuple(self._attempts)  # type: ignore[attr-defined]
        self._actorsub_args = self._actorsub_kwargs = None
        calls.deliver(self, value)

    def _finish_cancelled(self) -> None:
        if self._take_end():
            self._actorsub_args = self._actorsub_kwargs = None
            self._cancel_future()


class ReplicaGroup:
    """Several actors of one kind, called as one: `group.method.call(...)`.

    A call goes to a member that is up, is not left out for its failures, and has little to do; when that member turns
    out to be away, to another. Members can be added and removed at any time. `len(group)` is how many there are,
    iterating gives their MemberState. Travels to other processes with its handles and options; each process counts and
    judges for itself.

    Args:
        handles: actor handles, plain or wrapped. Each one's own policy goes on deciding how it is watched.
        balancer: "least_loaded" (of two chosen at random the one with less of our calls in flight), "round_robin",
            "consistent_hash" (calls with one `key` go to one member: `group.m.options(key=...)`), or a function of a
            list of MemberState (those that can take the call) and the key, which returns one of them.
        retry: "unsent" moves calls that cannot have run to another member, "always" also resends those that may have
            run (for methods that may run twice), "never" does neither. The first member's refusal is then the end.
        max_attempts: how often one call may be sent, all in all, under "always"; from 1 to 100. Moves are not counted.
        timeout_s: deadline of a call, all attempts and waiting together, in seconds; None: none.
        max_in_flight: calls of this process at one member at one time; further ones wait in that member's line.
        max_queued: how many may wait in a member's line, and in the group's; over it QueueFullError.
        on_unavailable: what happens when no member can take a call: "ref" a failed Call, "raise" NoReplicaError at
            once, "wait" the call waits for a member, up to `timeout_s`.
        is_failure: function of the exception that a call ended with: True when it speaks against the member. The
            method's own exceptions do not, else. Under retry="always" such a call goes to another member.
        factory: function without arguments that returns a new handle, called (on a background thread) for each member
            that died for good. Without one the group shrinks.
        consecutive_failures: so many failures in a row (deadlines missed, `is_failure`) leave a member out for a while;
            None: never. See docs/balancers.md for the defaults.
        base_ejection_s, max_ejection_s: for how long, the first time and at most; it doubles in between.
        max_ejected_share: at most this share of the members is left out at one time.

    Raises TypeError or ValueError for an argument that is not as described, naming it.
    """

    def __init__(
        self,
        handles: Iterable[Any] = (),
        *,
        balancer: Any = "least_loaded",
        retry: Retry = "unsent",
        max_attempts: int = 3,
        timeout_s: float | None = None,
        max_in_flight: int | None = None,
        max_queued: int = 1000,
        on_unavailable: Literal["ref", "raise", "wait"] = "ref",
        is_failure: Callable[[BaseException], bool] | None = None,
        factory: Callable[[], Any] | None = None,
        consecutive_failures: int | None = 5,
        base_ejection_s: float = 1.0,
        max_ejection_s: float = 30.0,
        max_ejected_share: float = 0.5,
    ) -> None:
        if not callable(balancer) and balancer not in _core.BALANCERS:
            accepted = ", ".join(map(repr, _core.BALANCERS))
            raise ValueError(f"balancer must be one of {accepted}, or a function, got {balancer!r}")
        for name, function in (("is_failure", is_failure), ("factory", factory)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {function!r}")
        _check_ejection(consecutive_failures, base_ejection_s, max_ejection_s, max_ejected_share)
        policy = DEFAULT_POLICY.replace(
            timeout_s=timeout_s, max_in_flight=max_in_flight, max_queued=max_queued, on_unavailable=on_unavailable
        )
        self._balancer: str | None = None if callable(balancer) else balancer
        self._choose: Callable[[list[MemberState], Any], MemberState] | None = balancer if callable(balancer) else None
        self._options = _Options(policy, _check_retry(retry), _check_max_attempts(max_attempts))
        self._is_failure = is_failure
        self._factory = factory
        self._factory_failures = 0
        self._arguments = {
            "balancer": balancer,
            "retry": retry,
            "max_attempts": max_attempts,
            "timeout_s": timeout_s,
            "max_in_flight": max_in_flight,
            "max_queued": max_queued,
            "on_unavailable": on_unavailable,
            "is_failure": is_failure,
            "factory": factory,
            "consecutive_failures": consecutive_failures,
            "base_ejection_s": base_ejection_s,
            "max_ejection_s": max_ejection_s,
            "max_ejected_share": max_ejected_share,
        }
        self._health = _core.GroupState(
            eject=consecutive_failures is not None,
            consecutive_failures=consecutive_failures or 5,
            base_ejection_s=base_ejection_s,
            max_ejection_s=max_ejection_s,
            max_ejected_share=max_ejected_share,
        )
        # Guards changes of membership; a call reads `_picker` once.
        self._lock = threading.Lock()
        self._picker = self._make_picker([])
        self._line = _core.CallQueue()
        self._session = _ray_compat.session_token()
        self._budget = _RetryBudget()
        self._methods: dict[str, GroupMethod] = {}
        self._counts = {"calls": 0, "moved": 0, "resent": 0, "budget_exhausted": 0, "replaced": 0, "died": 0}
        self._failures: dict[str, int] = {}
        # What ends the members' registrations when the group is gone.
        self._registrations: dict[_core.GroupMember, Callable[[], None]] = {}
        weakref.finalize(self, _cancel_all, self._registrations)
        _groups.add(self)
        for one in handles:
            self.add(one)

    # -- Members.

    def add(self, actor_handle: Any) -> None:
        """Adds a member: an actor handle, plain or wrapped. Raises ValueError when its actor is a member already."""
        wrapped = handle.wrap(actor_handle)
        actor = wrapped._actorsub_actor
        with self._lock:
            if any(member.actor is actor for member in self._picker.members):
                raise ValueError(f"{wrapped!r} is a member of this group already")
            member = _core.GroupMember(self._health, actor, wrapped)
            self._picker = self._make_picker([*self._picker.members, member])
            self._session = actor.session
        group = weakref.ref(self)

        def changed(_: str, old: ActorState, new: ActorState, evidence: str | None) -> None:
            alive = group()
            if alive is not None:
                alive._member_changed(member, new)

        self._registrations[member] = handle.on_state_change(wrapped, changed)
        self._open_or_close()

    def remove(self, actor_handle: Any) -> None:
        """Takes a member out: it gets no further calls; those that it has go on. Raises ValueError when it is none."""
        for member in self._picker.members:
            if member.handle == actor_handle:
                if self._take_out(member):
                    return
                break
        raise ValueError(f"{actor_handle!r} is not a member of this group")

    def __len__(self) -> int:
        return len(self._picker.members)

    def __iter__(self) -> Iterator[MemberState]:
        return iter([_state_of(member) for member in self._picker.members])

    def _make_picker(self, members: list[_core.GroupMember]) -> _core.GroupPicker:
        kind = _core.BALANCERS[self._balancer or "least_loaded"]
        # Where more may be left out than makes a panic, it would be panic all the time.
        panic_share = max(PANIC_SHARE, self._arguments["max_ejected_share"])
        return _core.GroupPicker(members, kind, panic_share, random.getrandbits(64))

    def _take_out(self, member: _core.GroupMember) -> bool:
        with self._lock:
            if member not in self._picker.index_of:
                return False
            self._picker = self._make_picker([one for one in self._picker.members if one is not member])
        member.retire()
        cancel = self._registrations.pop(member, None)
        if cancel is not None:
            cancel()
        self._open_or_close()
        return True

    def _member_changed(self, member: _core.GroupMember, state: ActorState) -> None:
        """On the watcher's thread."""
        if state is ActorState.ALIVE:
            self._factory_failures = 0
        self._open_or_close()
        if state is not ActorState.DEAD or not self._take_out(member):
            return
        self._counts["died"] += 1
        logger.warning(
            "actor %s died for good and left its group, which has %d members now%s",
            member.actor.key.hex(),
            len(self),
            "; its factory is asked for another" if self._factory else "",
        )
        if self._factory is not None:
            self._replace_later()

    def _replace_later(self) -> None:
        self._factory_failures += 1
        if self._factory_failures > MAX_FACTORY_FAILURES:
            logger.error("the factory of a group failed %d times in a row and is asked no more", MAX_FACTORY_FAILURES)
            return
        pause_s = 0.0
        if self._factory_failures > 1:
            pause_s = min(MAX_FACTORY_PAUSE_S, FACTORY_PAUSE_S * 2 ** (self._factory_failures - 2))
        group = weakref.ref(self)

        def begin() -> None:
            watcher.ensure().in_background(_replace, group)

        _core.call_later(int(pause_s * 1e9), begin)

    def _open_or_close(self) -> None:
        """Says to the group's line whether any member is up, and has it looked through."""
        self._line.set_open(self._picker.able() > 0)
        calls.review_queue(self._line)

    # -- Calls.

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def __getitem__(self, name: str) -> GroupMethod:
        """The method of that name, also where the group has an attribute of the same name (`add`, `remove`, `stats`).

        Raises AttributeError when the members have no such method.
        """
        method = self._methods.get(name)
        if method is None:
            for member in self._picker.members[:1]:
                getattr(member.handle, name)
            method = self._methods[name] = GroupMethod(self, name, self._options, {})
        return method

    def _call(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCall:
        options = method._options
        self._check_key(options)
        call: GroupCall = calls.new_call(GroupCall, None, args, kwargs)
        call._group = self
        call._method = method
        call._current = None
        call._tried = set()
        call._attempts = []
        call._sent_attempts = 0
        call._is_over = False
        timeout_s = options.policy.timeout_s
        call._deadline_ns = _core.NEVER_NS if timeout_s is None else _core.now_ns() + int(timeout_s * 1e9)
        self._counts["calls"] += 1
        self._budget.deposit()
        error = self._route(call, None)
        if error is not None:
            if options.policy.on_unavailable == "raise" or isinstance(error, QueueFullError):
                self._count_failure(error)
                raise error
            call._finish(error)
        return call

    def _check_key(self, options: _Options) -> None:
        if self._balancer == "consistent_hash" and options.key is None:
            raise ValueError("balancer='consistent_hash' needs a key: group.method.options(key=...).call(...)")

    def _pick(self, picker: _core.GroupPicker, key: int | None, tried: set[_core.GroupMember]) -> tuple[Any, Any]:
        """(member, probe), or (None, reason)."""
        if self._choose is None:
            return picker.pick(key or 0, tried)
        able = [one for one in picker.members if one not in tried and one.actor.state is ActorState.ALIVE]
        able = [one for one in able if one.health == "healthy"] or able
        if not able:
            # Those that were never up yet, by the core's own rule.
            return picker.pick(key or 0, tried)
        states = [_state_of(one) for one in able]
        chosen = self._choose(states, key)
        for state, member in zip(states, able, strict=True):
            if state is chosen:
                return member, 0
        raise TypeError(f"the balancer must return one of the members that it was given, got {chosen!r}")

    def _route(self, call: GroupCall, after: list[Callable[[], None]] | None) -> BaseException | None:
        """Makes the next attempt. None: under way, or waiting; else the error that ends the call.

        `after`: as in calls.admit. Raises what Ray raises for arguments that it does not take.
        """
        turns = 0
        while True:
            picker = self._picker
            member, probe = self._pick(picker, call._method._options.key, call._tried)
            if member is None:
                turns += 1
                error = self._wait_or_fail(call, probe, turns)
                if error is _TRY_AGAIN:
                    continue
                return error
            line = calls.line_of(call._method._of(member, picker))
            attempt: calls.Call = calls.new_call(calls.Call, line, call._actorsub_args, call._actorsub_kwargs)
            started_ns = member.start()
            try:
                refusal = calls.admit(attempt, call._deadline_ns, after)
            except BaseException:
                member.end(_UNSENT, started_ns, probe)
                raise
            if refusal is None:
                call._current = attempt
                attempt.add_done_callback(functools.partial(self._attempt_ended, call, member, started_ns, probe))
                return None
            member.end(_UNSENT, started_ns, probe)
            if not self._moves(call, member, refusal):
                return refusal
            self._counts["moved"] += 1

    def _wait_or_fail(self, call: GroupCall, reason: str, turns: int) -> Any:
        """Nobody could be picked."""
        policy = call._method._options.policy
        last = call._attempts[-1].error if call._attempts else None
        if last == "QueueFullError":
            return QueueFullError(f"So has every other member of the group (max_queued={policy.max_queued}).")
        if policy.on_unavailable != "wait" or turns > 3:
            return self._no_replica(call, _WHY[reason])
        call._tried.clear()
        call._current = None
        self._line.set_open(self._picker.able() > 0)
        verdict, release = self._line.admit(call, call._deadline_ns, 0, policy.max_queued, True, 0)
        if verdict == calls.SEND:
            # Somebody is up after all.
            self._line.complete(call._actorsub_ticket)
            return _TRY_AGAIN
        if verdict == calls.WAIT:
            watcher.ensure()
            try:
                calls.freeze(call)
            except BaseException:
                self._line.cancel(call._actorsub_ticket)
                raise
            if release:
                calls.call_sender(self._line)
            return None
        if verdict == calls.FULL:
            return QueueFullError(f"As many wait for a member as may (max_queued={policy.max_queued}).")
        if verdict == calls.EXPIRED:
            return self._deadline_error(call)
        return self._no_replica(call, "The connection to Ray ended.")

    def _no_replica(self, call: GroupCall, detail: str) -> NoReplicaError:
        return NoReplicaError(detail, sent=call._sent_attempts > 0)

    def _deadline_error(self, call: GroupCall) -> DeadlineExceededError:
        return DeadlineExceededError("It waited for a member.", sent=call._sent_attempts > 0)

    def _attempt_ended(
        self, call: GroupCall, member: _core.GroupMember, started_ns: int, probe: int, attempt: Any
    ) -> None:
        """On the thread that ended it: one of Ray's, the watcher's, or the caller's."""
        if attempt.cancelled():
            member.end(_UNSENT, started_ns, probe)
            call._finish_cancelled()
            return
        error = attempt._exception
        if error is None:
            if isinstance(attempt._result, ray.ObjectRefGenerator):
                # It goes on at the member.
                stream = attempt._result
                _ray_compat.on_completed(
                    stream.completed(), lambda value: member.end(self._outcome(value), started_ns, probe)
                )
            else:
                member.end(_SUCCESS, started_ns, probe)
            call._finish(attempt._result)
            return
        outcome = self._outcome(error)
        member.end(outcome, started_ns, probe)
        if outcome == _UNSENT and attempt._actorsub_args is not None:
            # As they were when the call was made; they were frozen in the member's line.
            call._actorsub_args, call._actorsub_kwargs = attempt._actorsub_args, attempt._actorsub_kwargs
        if not self._moves(call, member, error):
            call._finish(error)
            return
        if outcome == _UNSENT:
            self._counts["moved"] += 1
            watcher.ensure().send(self._route_again, call)
            return
        self._counts["resent"] += 1
        again = call._sent_attempts - 1
        pause_s = 0.0 if again == 0 else random.uniform(0, min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (again - 1)))
        if pause_s:
            _core.call_later(int(pause_s * 1e9), lambda: watcher.ensure().send(self._route_again, call))
        else:
            watcher.ensure().send(self._route_again, call)

    def _outcome(self, error: Any) -> int:
        """What the end of an attempt says about its member."""
        if not isinstance(error, BaseException):
            return _SUCCESS
        if isinstance(error, ray.exceptions.RayTaskError):
            # The method's own, also where its cause is the death of some other actor.
            return _FAILURE if self._is_failure is not None and self._is_failure(error) else _APPLICATION
        if isinstance(error, DeadlineExceededError):
            return _FAILURE if error.sent else _UNSENT
        if isinstance(error, ray.exceptions.PendingCallsLimitExceeded):
            return _UNSENT
        if isinstance(error, _core.CertifiedError):
            return _LOST if error.sent else _UNSENT
        return _APPLICATION

    def _moves(self, call: GroupCall, member: _core.GroupMember, error: BaseException) -> bool:
        """Whether the call goes on with another member after this error. Notes the attempt."""
        outcome = self._outcome(error)
        sent = outcome != _UNSENT
        call._attempts.append(
            Attempt(member.actor.key.hex(), type(error).__name__, getattr(error, "evidence", None), sent)
        )
        call._tried.add(member)
        if sent:
            call._sent_attempts += 1
        options = call._method._options
        if call._is_over or isinstance(error, DeadlineExceededError) or outcome == _APPLICATION:
            return False
        if not sent:
            return options.retry != "never"
        if options.retry != "always" or call._sent_attempts >= options.max_attempts:
            return False
        if not self._budget.take():
            self._counts["budget_exhausted"] += 1
            return False
        return True

    def _route_again(self, call: GroupCall) -> None:
        """The next attempt of a call that has had one, or has waited. On the sender's thread."""
        if call._is_over:
            return
        after: list[Callable[[], None]] = []
        try:
            # Keeps `ray.shutdown()` out meanwhile: Ray's core would end the process.
            with _ray_compat.core_in_use(self._session) as usable:
                error = self._route(call, after) if usable else self._no_replica(call, "The connection to Ray ended.")
        except Exception as raised:
            error = raised
        if error is not None:
            call._finish(error)
        for function in after:
            function()

    def _remote(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = method._options
        self._check_key(options)
        tried: set[_core.GroupMember] = set()
        attempts: list[Attempt] = []
        self._counts["calls"] += 1
        while True:
            picker = self._picker
            member, probe = self._pick(picker, options.key, tried)
            if member is None:
                error = NoReplicaError(_WHY[probe], sent=False)
                error.attempts = tuple(attempts)
                if options.policy.on_unavailable == "wait" and probe != "all_excluded":
                    self._wait_for_member(method, error)
                    continue
                self._count_failure(error)
                if options.policy.on_unavailable == "raise" or not picker.members:
                    raise error
                make_ref = functools.partial(_ray_compat.failed_ref, error)
                return submit.refused(method._of(picker.members[0], picker), error, args, kwargs, make_ref)
            started_ns = member.start()
            try:
                result = method._of(member, picker).remote(*args, **kwargs)
            except (errors.ActorUnavailableError, errors.ActorDiedError) as refusal:
                member.end(_UNSENT, started_ns, probe)
                attempts.append(Attempt(member.actor.key.hex(), type(refusal).__name__, refusal.evidence, refusal.sent))
                tried.add(member)
                if options.retry == "never":
                    raise
                self._counts["moved"] += 1
                continue
            except BaseException:
                member.end(_UNSENT, started_ns, probe)
                raise
            ref = _first_ref(result)
            if ref is None:
                member.end(_SUCCESS, started_ns, probe)
            else:
                _ray_compat.on_completed(
                    ref, functools.partial(_remote_ended, weakref.ref(self), member, started_ns, probe)
                )
            return result

    def _wait_for_member(self, method: GroupMethod, error: NoReplicaError) -> None:
        """Blocks until a member is up; for `.remote()`."""
        why = submit.why_not_block()
        if why is not None:
            raise NoReplicaError(why, sent=False) from error
        turn: _Turn = calls.new_call(_Turn, None, (), {})
        timeout_s = method._options.policy.timeout_s
        deadline_ns = _core.NEVER_NS if timeout_s is None else _core.now_ns() + int(timeout_s * 1e9)
        self._line.set_open(self._picker.able() > 0)
        watcher.ensure()
        verdict, _ = self._line.admit(turn, deadline_ns, 0, method._options.policy.max_queued, True, 0)
        if verdict == calls.SEND:
            self._line.complete(turn._actorsub_ticket)
        elif verdict == calls.WAIT:
            turn.result()
        elif verdict == calls.FULL:
            raise QueueFullError("As many wait for a member as may.")
        else:
            raise error

    def _count_failure(self, error: BaseException) -> None:
        name = "RayTaskError" if isinstance(error, ray.exceptions.RayTaskError) else type(error).__name__
        self._failures[name] = self._failures.get(name, 0) + 1

    def stats(self) -> dict[str, Any]:
        """What happened to the calls of this group in this process, as a new dict.

        `calls`, `moved` (attempts that were refused and went to another member), `resent` (calls that were sent again),
        `budget_exhausted` (resends that the budget did not allow), `died` (members), `replaced` (by the factory),
        `failed` (calls, by class of the error), `waiting` (in the group's own line, now), `in_flight`, `ejected` and
        `ejection_limit` (members, now), `ejections`, `ejections_refused` (because of the limit), `probes`, and
        `members`: a list of MemberState.
        """
        return {
            **self._counts,
            "failed": dict(self._failures),
            "waiting": self._line.counters()["waiting"],
            **self._health.counters(),
            "members": list(self),
        }

    def __repr__(self) -> str:
        return f"<ReplicaGroup of {len(self)}>"

    def __dir__(self) -> list[str]:
        members = self._picker.members
        names = [name for name in dir(members[0].handle) if not name.startswith("_")] if members else []
        return sorted({*super().__dir__(), *names})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, ([member.handle for member in self._picker.members], self._arguments)


def _rebuild(handles: list[Any], arguments: dict[str, Any]) -> ReplicaGroup:
    return ReplicaGroup(handles, **arguments)


class _Turn(calls.Call):
    """A thread's place in the line of a group."""

    def _leave_line(self, queue: _core.CallQueue, ticket: int) -> None:
        queue.end_send(ticket)
        if queue.complete(ticket)[0] is not None:
            calls.deliver(self, None)

    def _end_as(self, why: str, sent: bool) -> None:
        if why == "deadline":
            calls.deliver(self, DeadlineExceededError("It waited for a member.", sent=False))
        else:
            calls.deliver(self, NoReplicaError("The connection to Ray ended while the call waited.", sent=False))


_TRY_AGAIN: Any = object()

_WHY = {
    "no_member": "The group has no members.",
    "all_down": "Every member is away.",
    "all_excluded": "Every member that is up was tried.",
}

# For what concerns all of them: the end of a connection.
_groups: weakref.WeakSet[ReplicaGroup] = weakref.WeakSet()


def _state_of(member: _core.GroupMember) -> MemberState:
    return MemberState(
        handle=member.handle,
        state=member.actor.state,
        health=member.health,
        in_flight=member.in_flight,
        failures_in_a_row=member.failures_in_a_row,
        started=member.started,
    )


def _check_ejection(consecutive: Any, base_s: Any, max_s: Any, share: Any) -> None:
    if consecutive is not None and (
        isinstance(consecutive, bool) or not isinstance(consecutive, int) or not 1 <= consecutive <= 127
    ):
        raise ValueError(f"consecutive_failures must be a whole number from 1 to 127, or None, got {consecutive!r}")
    for name, value in (("base_ejection_s", base_s), ("max_ejection_s", max_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
            raise ValueError(f"{name} must be over 0 and at most 86400 seconds, got {value!r}")
    if max_s < base_s:
        raise ValueError(f"max_ejection_s must be at least base_ejection_s ({base_s!r}), got {max_s!r}")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"max_ejected_share must be from 0 to 1, got {share!r}")


def _first_ref(result: Any) -> Any:
    """A plain ref of whose outcome the member can be judged; None where there is none."""
    if isinstance(result, ray.ObjectRefGenerator):
        return result.completed()
    if isinstance(result, list):
        result = result[0] if result else None
    return result if isinstance(result, ray.ObjectRef) else None


def _remote_ended(group: Any, member: _core.GroupMember, started_ns: int, probe: int, value: Any) -> None:
    alive = group()
    member.end(_UNSENT if alive is None else alive._outcome(errors.certified(value, member.actor)), started_ns, probe)


def _replace(group: Any) -> None:
    """Asks the factory for a member. On the background thread."""
    alive: ReplicaGroup | None = group()
    if alive is None or alive._factory is None:
        return
    try:
        with _ray_compat.core_in_use(alive._session) as usable:
            if not usable:
                return
            made = alive._factory()
        alive.add(made)
    except Exception:
        logger.exception("the factory of a group failed")
        alive._replace_later()
        return
    alive._counts["replaced"] += 1


def _cancel_all(registrations: dict[Any, Callable[[], None]]) -> None:
    for cancel in list(registrations.values()):
        cancel()


def _close_all() -> None:
    for group in list(_groups):
        if group._session is not _ray_compat.session_token():
            calls.end_all(group._line.close())


_ray_compat.after_disconnect.append(_close_all)
