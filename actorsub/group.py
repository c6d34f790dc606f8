"""Replicas behind one name: `ReplicaGroup` picks a member for each call and moves to another when one fails.

A call of a group is a Call whose attempts are Calls of members. Which member takes an attempt, and which are left out
for a while, is decided in C++ (csrc/balancer.h). A call that nobody can take waits in the group's own line, a
`CallQueue` whose slot says whether any member is up.

Threads: the first attempt is made on the caller's thread; what comes after a failed one, on the sender's, because it
gives arguments to Ray. Membership changes under a lock of the group, never on the way of a call. No lock is held while
a function of the user runs (balancer, is_failure, factory, callbacks).

Lifetime: a group refers to its members, and nothing that lives on refers to it but its calls that are under way. So it
goes with its last reference, and its members' actors with it.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import hashlib
import itertools
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
from actorsub.fence import as_exception, fenced, log_failure
from actorsub.policy import DEFAULT_POLICY, OPTION_NAMES, OnUnavailable, Policy, shown

logger = logging.getLogger("actorsub")

Retry = Literal["unsent", "always", "never"]

#: Resends of calls that may have run: one for so many calls, and on top at least so many per second.
RETRY_EVERY = 5
RETRY_FLOOR = 10
#: Before the k-th resend of one call (k > 1) it waits up to RETRY_PAUSE_S * 2^(k - 2), at most MAX_RETRY_PAUSE_S.
RETRY_PAUSE_S = 0.025
MAX_RETRY_PAUSE_S = 1.0
#: Pause before the factory is asked again, doubled each time, after it raised or its actor died before it was up.
FACTORY_PAUSE_S = 1.0
MAX_FACTORY_PAUSE_S = 30.0
#: How often in a row that may happen to the replacement of one member; then the group stays smaller.
MAX_FACTORY_FAILURES = 10
#: For how long an actor of the factory has to be up before its death is one like any other's.
FACTORY_TRIAL_S = 2.0
#: How long a disconnect waits for factories that are at work: inside Ray, which must not be taken down meanwhile.
FACTORY_EXIT_S = 5.0

#: When more than this share of the members that are up is left out by soft evidence, that evidence is ignored.
PANIC_SHARE = 0.5

_APPLICATION = _core.OUTCOMES["application_error"]
_FAILURE = _core.OUTCOMES["failure"]
_LOST = _core.OUTCOMES["lost"]
_SUCCESS = _core.OUTCOMES["success"]
_UNSENT = _core.OUTCOMES["unsent"]

# Policy options that mean something for a call of a group; the others belong to the members' handles.
_POLICY_OPTIONS = ("timeout_s", "max_in_flight", "max_queued", "on_unavailable")
_CALL_OPTIONS = ("retry", "max_attempts", "key", *_POLICY_OPTIONS)


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
    #: For "consistent_hash" a number of 64 bits, see _key_number; for a function what the user gave.
    key: Any = None

    def deadline_ns(self) -> int:
        """Of a call that is made now."""
        timeout_s = self.policy.timeout_s
        return _core.NEVER_NS if timeout_s is None else _core.now_ns() + int(timeout_s * 1e9)

    def replace(self, group: ReplicaGroup, options: dict[str, Any]) -> tuple[_Options, dict[str, Any]]:
        """(the changed options, those that are Ray's)."""
        ours = {name: options.pop(name) for name in list(options) if name in _POLICY_OPTIONS}
        for name in options:
            if name in OPTION_NAMES:
                raise TypeError(f"option {name!r} belongs to a member's handle: actorsub.wrap(handle, {name}=...)")
            if name not in _CALL_OPTIONS:
                _check_ray_option(name)
        changed: dict[str, Any] = {"policy": self.policy.replace(**ours)}
        if "retry" in options:
            changed["retry"] = _check_retry(options.pop("retry"))
        if "max_attempts" in options:
            changed["max_attempts"] = _check_max_attempts(options.pop("max_attempts"))
        if "key" in options:
            if group._balancer not in ("consistent_hash", None):
                raise ValueError(f"option 'key' is for balancer='consistent_hash', this group has {group._balancer!r}")
            key = options.pop("key")
            changed["key"] = key if group._balancer is None else _key_number(key)
        return dataclasses.replace(self, **changed), options


def _check_ray_option(name: str) -> None:
    known = _ray_compat.method_option_names()
    if known is None or name in known:
        return
    near = difflib.get_close_matches(name, _CALL_OPTIONS, 1, 0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise TypeError(
        f"unknown option {name!r}{hint} A group takes {', '.join(_CALL_OPTIONS)}; Ray takes {', '.join(sorted(known))}"
    )


def _check_retry(value: Any) -> Any:
    if not isinstance(value, str) or value not in ("unsent", "always", "never"):
        raise ValueError(f"retry must be one of 'unsent', 'always', 'never', got {shown(value)}")
    return value


def _check_max_attempts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_attempts must be a whole number, got {shown(value)} of type {type(value).__name__}")
    if not 1 <= value <= 100:
        raise ValueError(f"max_attempts must be from 1 to 100, got {shown(value)}")
    return value


def _key_number(key: Any) -> int:
    # Not hash(): every process has to come to the same member.
    if isinstance(key, str):
        # Names of files may have surrogates.
        data = b"s" + key.encode(errors="surrogatepass")
    elif isinstance(key, bytes):
        data = b"b" + key
    elif isinstance(key, int) and not isinstance(key, bool):
        data = b"i%x" % key
    else:
        # Its type alone: keys are often about people.
        raise TypeError(f"key must be a str, bytes or int, got one of type {type(key).__name__}")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class _RetryBudget:
    """How many calls that may have run may be sent again: a bucket of tokens, so that an outage is not made worse.

    Without a lock, see fence.py.
    """

    def __init__(self) -> None:
        self._tokens = collections.deque([None] * RETRY_FLOOR, maxlen=100 * RETRY_FLOOR)
        self._calls = itertools.count(1)
        # When the floor was filled last. Who takes the time out of here fills it, and puts the new time in.
        self._filled_s = [time.monotonic()]

    def deposit(self) -> None:
        """One call was made."""
        if next(self._calls) % RETRY_EVERY == 0:
            self._tokens.append(None)

    def take(self) -> bool:
        self._fill()
        try:
            self._tokens.pop()
        except IndexError:
            return False
        return True

    def _fill(self) -> None:
        try:
            filled_s = self._filled_s.pop()
        except IndexError:
            return
        # Whole tokens only; the rest of the time counts for the next one.
        tokens = max(0, int((time.monotonic() - filled_s) * RETRY_FLOOR))
        for _ in range(min(tokens, RETRY_FLOOR - len(self._tokens))):
            self._tokens.append(None)
        self._filled_s.append(filled_s + tokens / RETRY_FLOOR)


class GroupMethod:
    """A method of all members: `.call(...)`, `.remote(...)`, `.options(...)`. Made by `group.method`."""

    __slots__ = ("_group", "_key", "_made", "_made_for", "_name", "_options", "_ray_options")

    def __init__(self, group: ReplicaGroup, name: str, options: _Options, ray_options: dict[str, Any]) -> None:
        self._group = group
        self._name = name
        self._options = options
        self._ray_options = ray_options
        # What a member's own method depends on, beside Ray's options.
        self._key = (name, options.policy.max_in_flight, options.policy.max_queued)
        # With options of Ray: member -> its own method, for one membership.
        self._made: dict[_core.GroupMember, Any] = {}
        self._made_for: Any = None

    def options(self, **options: Any) -> GroupMethod:
        """The same method with options for the calls made through it: those of ReplicaGroup that are about calls
        (`retry`, `max_attempts`, `timeout_s`, `max_in_flight`, `max_queued`, `on_unavailable`), `key` for
        "consistent_hash" or a function as balancer, and Ray's for methods.

        Raises TypeError or ValueError for an option that is unknown or has a value that it does not take.
        """
        ours, rays = self._options.replace(self._group, options)
        made = GroupMethod(self._group, self._name, ours, {**self._ray_options, **rays} if rays else self._ray_options)
        if rays:
            for member in self._group._picker.members[:1]:
                # The values of Ray's options are checked by Ray, here where they are written.
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
        if not self._ray_options:
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

    def _make(self, member: _core.GroupMember) -> Any:
        policy = self._options.policy
        return getattr(member.handle, self._name).options(
            on_unavailable="raise",
            timeout_s=None,
            max_in_flight=policy.max_in_flight,
            max_queued=policy.max_queued,
            **self._ray_options,
        )

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._group!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupMethod, (self._group, self._name, self._options, self._ray_options)


class GroupCall(calls.Call):
    """A Call whose attempts are Calls of members.

    Who may do something with it, at any moment: the thread that routes it; or, while an attempt is under way or it is
    in the group's line, whoever ends that; or, between two attempts (`_is_between`), whoever comes first.
    """

    _group: ReplicaGroup | None
    _method: GroupMethod | None
    _deadline_ns: int
    _current: calls.Call | None
    # Not to be tried again for now; and those of them that it was sent to, which are better than nobody.
    _tried: set[_core.GroupMember]
    _sent_to: set[_core.GroupMember]
    _attempts: list[Attempt]
    _sent_attempts: int
    # What the last attempt ended with.
    _error: Any
    # Who takes what is in there: the end of the call; the pause between two attempts.
    _end: list[bool]
    _between: list[bool]
    # Its user has asked to take it back: no further attempt.
    _is_unwanted: bool
    #: Of its last pause between two attempts.
    _pause: int

    @property
    def _actorsub_refs(self) -> Any:
        current = self._current
        return () if current is None else current._actorsub_refs or ()

    @property
    def object_ref(self) -> Any:
        """That of the present attempt; None until one was sent."""
        current = self._current
        return None if current is None else current.object_ref

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(self._attempts)

    def running(self) -> bool:
        current = self._current
        return not self.done() and current is not None and current.running()

    def _take_here(self) -> None:
        current = self._current
        if current is not None:
            current._take_here()

    def cancel(self) -> bool:
        group = self._group
        if group is None or self.done():
            return self.cancelled()
        self._refuse_in_child()
        self._is_unwanted = True
        # Read before: an attempt that ends meanwhile finds that the call is unwanted.
        current = self._current
        if _take(self._between):
            self._finish_unwanted()
        elif current is not None:
            current.cancel()
        elif group._line.cancel(self._actorsub_ticket)[0]:
            self._finish_unwanted()
        return self.cancelled()

    def __repr__(self) -> str:
        method = self._method
        stage = "done" if self.done() else "waiting" if self.object_ref is None else "sent"
        return f"<Call {'' if method is None else f'{method._name} of {method._group!r}, '}{stage}>"

    def _refuse_in_child(self) -> None:
        if self._group is not None:
            self._group._refuse_in_child()

    # -- In the group's line.

    def _leave_line(self, queue: _core.CallQueue, ticket: int) -> None:
        queue.end_send(ticket)
        if queue.complete(ticket)[0] is not None and self._group is not None:
            self._group._route_again(self)

    def _end_as(self, why: str, sent: bool) -> None:
        if why == "deadline":
            self._finish(_deadline_error(self), raised=True)
        elif why == "closed":
            self._finish(_no_replica(self, "The connection to Ray ended while the call waited."), raised=True)
        else:
            self._finish(_no_replica(self, "Every member is away."), raised=True)

    # -- The end.

    def _take_end(self) -> bool:
        """True for the one who may end the call."""
        return _take(self._end)

    def _finish(self, value: Any, *, raised: bool = False) -> None:
        """Ends it with a value, or with an error that an attempt or the group has `raised`."""
        group = self._group
        if not self._take_end() or group is None:
            return
        if raised:
            value = self._complete(value)
            group._count_failure(value)
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
        # Who keeps the call keeps its outcome, but neither the arguments nor the members.
        self._actorsub_args = self._actorsub_kwargs = None
        self._group = self._method = self._error = None
        _paused.pop(self._pause, None)
        self._tried = self._sent_to = set()


class ReplicaGroup:
    """Several actors of one kind, called as one: `group.method.call(...)`.

        >>> group = actorsub.ReplicaGroup(handles, retry="always", timeout_s=1.0)
        >>> group.infer.call(x).result()

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
        on_unavailable: what happens when no member can take a call: "ref" and "auto" a failed Call, "raise"
            NoReplicaError at once, "wait" the call waits for a member, up to `timeout_s`.
        is_failure: function of the exception that a call ended with: True when it speaks against the member. The
            method's own exceptions do not, else. Under retry="always" such a call goes to another member.
        factory: function without arguments that returns a new handle, called (on a background thread) for each member
            that died for good. Without one the group shrinks.
        consecutive_failures: so many failures in a row (deadlines missed, `is_failure`) leave a member out for a while;
            None: never. See docs/balancers.md for the defaults.
        base_ejection_s, max_ejection_s: for how long, the first time and at most; it doubles in between.
        max_ejected_share: at most this share of the members is left out at one time.
        bounded_load: "consistent_hash": how many times the average of our calls in flight a member may have before its
            keys go to the next one; from 1 to 100. See docs/balancers.md.

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
        on_unavailable: OnUnavailable = "auto",
        is_failure: Callable[[BaseException], bool] | None = None,
        factory: Callable[[], Any] | None = None,
        consecutive_failures: int | None = 5,
        base_ejection_s: float = 1.0,
        max_ejection_s: float = 30.0,
        max_ejected_share: float = 0.5,
        bounded_load: float = 2.0,
    ) -> None:
        if not callable(balancer) and not (isinstance(balancer, str) and balancer in _core.BALANCERS):
            accepted = ", ".join(map(repr, _core.BALANCERS))
            raise ValueError(f"balancer must be one of {accepted}, or a function, got {shown(balancer)}")
        for name, function in (("is_failure", is_failure), ("factory", factory)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {shown(function)}")
        _check_ejection(consecutive_failures, base_ejection_s, max_ejection_s, max_ejected_share)
        if isinstance(bounded_load, bool) or not isinstance(bounded_load, (int, float)) or not 1 <= bounded_load <= 100:
            raise ValueError(f"bounded_load must be from 1 to 100, got {shown(bounded_load)}")
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
            "bounded_load": bounded_load,
        }
        self._health = _core.GroupState(
            eject=consecutive_failures is not None,
            consecutive_failures=consecutive_failures or 5,
            base_ejection_s=base_ejection_s,
            max_ejection_s=max_ejection_s,
            max_ejected_share=max_ejected_share,
        )
        self._bounded_load = bounded_load
        # Where more may be left out than makes a panic, it would be panic all the time.
        self._panic_share = max(PANIC_SHARE, max_ejected_share)
        # A change of membership makes the next picker; see `_picker` and `_change`.
        self._known_picker = self._make_picker([])
        self._session: Any = _ray_compat.session_token()
        self._forks = _forks
        self._open_line()
        self._budget = _RetryBudget()
        # Names that are known to be methods.
        self._names: set[str] = set()
        self._counts = {"calls": 0, "moved": 0, "resent": 0, "budget_exhausted": 0, "replaced": 0, "died": 0}
        self._failures: dict[str, int] = {}
        self._tenures: dict[_core.GroupMember, _Tenure] = {}
        # What ends the members' registrations when the group is gone.
        weakref.finalize(self, _end_tenures, self._tenures)
        _groups[id(self)] = weakref.ref(self, functools.partial(_forget_group, id(self)))
        self._add(handles)

    # -- Members.

    def add(self, actor_handle: Any) -> None:
        """Adds a member: an actor handle, plain or wrapped. Raises ValueError when its actor is a member already.

        After `ray.shutdown()` and `ray.init()` the first new member takes the place of all those of before.
        """
        self._add([actor_handle])

    def _add(self, handles: Iterable[Any], factory_failures: int | None = None) -> None:
        """`factory_failures`: of a member that the factory made."""
        self._refuse_in_child()
        wrapped = [handle.wrap(one) for one in handles]
        if not wrapped:
            return
        session = wrapped[0]._actorsub_actor.session
        if any(one._actorsub_actor.session is not _ray_compat.session_token() for one in wrapped):
            raise ValueError("a member's handle belongs to a connection to Ray that has ended")
        if session is not self._session:
            for member in self._picker.members:
                if member.actor.session is not session:
                    self._take_out(member)
            self._session = session
            self._open_line()
        made = [_core.GroupMember(self._health, one._actorsub_actor, one) for one in wrapped]
        for member in made:
            # Before it is a member: whoever takes it out again takes that along.
            self._tenures[member] = _Tenure(factory_failures)

        def with_made(members: list[_core.GroupMember]) -> list[_core.GroupMember]:
            present = {member.actor.key for member in members}
            for member in made:
                if member.actor.key in present:
                    raise ValueError(f"{member.handle!r} is a member of this group already")
                present.add(member.actor.key)
            return [*members, *made]

        try:
            self._change(with_made)
        except BaseException:
            for member in made:
                del self._tenures[member]
                member.retire()
            raise
        group = weakref.ref(self)
        for member in made:
            cancel = handle.on_state_change(member.handle, functools.partial(_tell_group, group, member))
            tenure = self._tenures.get(member)
            if tenure is None:
                # Taken out again meanwhile.
                cancel()
            else:
                tenure.cancel = cancel
                if member not in self._picker.index_of:
                    cancel()
        _look_up(made)
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

    @property
    def _picker(self) -> _core.GroupPicker:
        """That of the present members. Each knows the one that took its place."""
        picker = self._known_picker
        while picker.next:
            picker = picker.next[0]
        return picker

    def _change(self, change: Callable[[list[_core.GroupMember]], list[_core.GroupMember]]) -> None:
        """Makes `change` of the members; again, where another thread, or a signal handler, was first."""
        while True:
            before = self._picker
            after = self._make_picker(change(before.members))
            if before.follow(after):
                self._known_picker = after
                return

    def _make_picker(self, members: list[_core.GroupMember]) -> _core.GroupPicker:
        kind = _core.BALANCERS[self._balancer or "least_loaded"]
        return _core.GroupPicker(
            members,
            kind,
            panic_share=self._panic_share,
            bounded_load=self._bounded_load,
            # One that refuses until it is up is one that is away.
            use_pending=all(member.handle._actorsub_policy.on_pending != "fail" for member in members),
            seed=random.getrandbits(64),
        )

    def _take_out(self, member: _core.GroupMember) -> _Tenure | None:
        """What it was in the group; None when it is no member."""
        tenure = self._tenures.pop(member, None)
        if tenure is None:
            return None
        self._change(lambda members: [one for one in members if one is not member])
        member.retire()
        tenure.cancel()
        self._open_or_close()
        return tenure

    def _member_changed(self, member: _core.GroupMember, state: ActorState) -> None:
        """On the watcher's thread."""
        tenure = self._tenures.get(member)
        if tenure is not None and state is ActorState.ALIVE and tenure.up_s is None:
            tenure.up_s = time.monotonic()
        self._open_or_close()
        if state is not ActorState.DEAD or (tenure := self._take_out(member)) is None:
            return
        self._counts["died"] += 1
        logger.warning(
            "actor %s died for good and left its group, which has %d members now%s",
            member.actor.key.hex(),
            len(self),
            "; its factory is asked for another" if self._factory else "",
        )
        if self._factory is not None:
            self._replace(tenure.failures_of_next())

    def _replace(self, failures: int) -> None:
        """Has the factory asked for a member, after so many failures in a row."""
        if failures > MAX_FACTORY_FAILURES:
            logger.error(
                "the factory %r of a group failed %d times in a row and is asked no more",
                self._factory,
                MAX_FACTORY_FAILURES,
            )
            return
        # A thread of its own: the factory may take its time, and wait for what the other threads do.
        thread = threading.Thread(
            target=_ask_factory, args=(weakref.ref(self), failures), name="actorsub-factory", daemon=True
        )
        thread.start()

    def _open_line(self) -> None:
        self._line = _core.CallQueue()
        calls.add_line(self._line)

    def _open_or_close(self) -> None:
        """Says to the group's line whether any member is up, and has it looked through."""
        self._set_open()
        calls.review_queue(self._line)

    def _set_open(self) -> None:
        while True:
            is_open = self._picker.able() > 0
            self._line.set_open(is_open)
            # Another thread may have seen a member come, and said so, in between; nobody would say it again.
            if is_open == (self._picker.able() > 0):
                return

    def _is_cut_off(self) -> bool:
        """True once the connection of the members has ended. Ray would begin a new one for a call."""
        return self._session is not None and self._session is not _ray_compat.session_token()

    def _refuse_in_child(self) -> None:
        if self._forks != _forks:
            raise RuntimeError(submit.PARENT)

    # -- Calls.

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def __getitem__(self, name: str) -> GroupMethod:
        """The method of that name, also where the group has an attribute of the same name (`add`, `remove`, `stats`).

        Raises AttributeError when the members have no such method.
        """
        if name not in self._names:
            for member in self._picker.members[:1]:
                getattr(member.handle, name)
                self._names.add(name)
        return GroupMethod(self, name, self._options, _NO_OPTIONS)

    def _call(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCall:
        options = method._options
        self._refuse_in_child()
        self._check_key(options)
        call: GroupCall = calls.new_call(GroupCall, None, args, kwargs)
        call._group = self
        call._method = method
        call._current = None
        call._tried = set()
        call._sent_to = set()
        call._attempts = []
        call._sent_attempts = 0
        call._error = None
        call._pause = 0
        call._end, call._between, call._is_unwanted = [True], [], False
        call._deadline_ns = options.deadline_ns()
        self._counts["calls"] += 1
        self._budget.deposit()
        error = _no_replica(call, _ENDED) if self._is_cut_off() else self._route(call, options, on_sender=False)
        if error is not None:
            if options.policy.on_unavailable == "raise" or isinstance(error, QueueFullError):
                call._complete(error)
                self._count_failure(error)
                raise error
            call._finish(error, raised=True)
        return call

    def _check_key(self, options: _Options) -> None:
        if self._balancer == "consistent_hash" and options.key is None:
            raise ValueError("balancer='consistent_hash' needs a key: group.method.options(key=...).call(...)")

    def _pick(self, picker: _core.GroupPicker, key: Any, tried: set[_core.GroupMember]) -> tuple[Any, Any]:
        """(member, probe), or (None, reason)."""
        if self._choose is None:
            return picker.pick(key or 0, tried)
        member, probe = picker.pick(0, tried)
        if member is None or probe or member.actor.state is not ActorState.ALIVE:
            # Nobody; a member that is to be tried again, which is not a matter of choice; or nobody was up yet.
            return member, probe
        up = [one for one in picker.members if one.actor.state is ActorState.ALIVE]
        healthy = [one for one in up if one.health == "healthy"]
        # As in csrc/balancer.h: when most look bad, that is ignored.
        panic = len(up) - len(healthy) > self._panic_share * len(up)
        able = [one for one in (up if panic else healthy) if one not in tried]
        able = able or [one for one in up if one not in tried] or [member]
        states = [_state_of(one) for one in able]
        assert self._choose is not None
        chosen = self._choose(states, key)
        for state, one in zip(states, able, strict=True):
            if state is chosen:
                return one, 0
        raise TypeError(f"the balancer must return one of the members that it was given, got {shown(chosen)}")

    def _route(self, call: GroupCall, options: _Options, *, on_sender: bool) -> Any:
        """Makes the next attempt. None: under way, or waiting; else the error that ends the call.

        Raises what Ray raises for arguments that it does not take, and what a balancer raises.
        """
        turns = 0
        method = call._method
        assert method is not None
        while True:
            picker = self._picker
            member, probe = self._pick(picker, options.key, call._tried)
            if member is None:
                turns += 1
                error = self._wait_or_fail(call, method, probe, turns)
                if error is _TRY_AGAIN:
                    continue
                return error
            started_ns = member.start()
            try:
                line = calls.plan_of(method._of(member, picker))
                attempt: calls.Call = calls.new_call(calls.Call, line, call._actorsub_args, call._actorsub_kwargs)
                # Also of one that Ray has: it cannot have run where the member turns out never to have been up.
                again = options.retry == "always" and options.max_attempts > 1
                again = again or (options.retry == "unsent" and not member.actor.was_up)
                if again:
                    # For the next attempt: what the caller does with its objects after this is not what it asked for.
                    calls.freeze(call)
                admit = self._admit if on_sender else calls.admit
                refusal = admit(attempt, call._deadline_ns)
            except QueueFullError as full:
                # The actor's own `max_pending_calls`.
                refusal = full.with_traceback(None)
            except BaseException:
                member.end(_UNSENT, started_ns, probe)
                raise
            if refusal is None:
                if not again:
                    # The attempt has them for as long as it has not been sent.
                    call._actorsub_args = call._actorsub_kwargs = None
                call._current = attempt
                attempt.add_done_callback(functools.partial(self._attempt_ended, call, member, started_ns, probe))
                if call._is_unwanted and not call.done():
                    attempt.cancel()
                return None
            member.end(_UNSENT, started_ns, probe)
            if not self._moves(call, options, member, refusal, _UNSENT):
                return refusal
            self._counts["moved"] += 1

    def _admit(self, attempt: calls.Call, deadline_ns: int) -> Any:
        """calls.admit on the sender's thread."""
        after: list[Callable[[], None]] = []
        line: calls.Plan = attempt._actorsub_plan
        # Keeps `ray.shutdown()` out meanwhile: Ray's core would end the process.
        with _ray_compat.core_in_use(line.actor.session) as usable:
            refusal = calls.admit(attempt, deadline_ns, after) if usable else NoReplicaError(_ENDED, sent=False)
        for function in after:
            function()
        return refusal

    def _wait_or_fail(self, call: GroupCall, method: GroupMethod, reason: str, turns: int) -> Any:
        """Nobody could be picked."""
        policy = method._options.policy
        if call._sent_to and reason == "all_excluded":
            call._tried -= call._sent_to
            call._sent_to.clear()
            return _TRY_AGAIN
        if not call._attempts:
            self._check_arguments(call, method)
        if isinstance(call._error, QueueFullError) and not isinstance(call._error, ray.exceptions.RayTaskError):
            return QueueFullError(f"So has every other member of the group (max_queued={policy.max_queued}).")
        if policy.on_unavailable != "wait" or turns > 3:
            if isinstance(call._error, ray.exceptions.RayTaskError):
                # There is nobody to ask for a better answer.
                return call._error
            return _no_replica(call, _WHY[reason])
        if watcher.is_exiting():
            return _no_replica(call, _EXITING)
        call._tried.clear()
        call._current = None
        calls.freeze(call)
        self._set_open()
        verdict, release = self._line.admit(call, call._deadline_ns, 0, policy.max_queued, True, 0)
        if verdict == calls.SEND:
            # Somebody is up after all.
            self._line.complete(call._actorsub_ticket)
            return _TRY_AGAIN
        if verdict == calls.WAIT:
            watcher.ensure()
            if release:
                calls.call_sender(self._line)
            if call._is_unwanted:
                call.cancel()
            return None
        if verdict == calls.FULL:
            return QueueFullError(f"As many wait for a member as may (max_queued={policy.max_queued}).")
        if verdict == calls.EXPIRED:
            return _deadline_error(call)
        return _no_replica(call, _ENDED)

    def _check_arguments(self, call: GroupCall, method: GroupMethod) -> None:
        """Wrong ones are the caller's mistake whatever the members do. Those that wait already were looked at."""
        picker = self._picker
        if isinstance(call._actorsub_args, tuple):
            for member in picker.members[:1]:
                inner = calls.plan_of(method._of(member, picker)).method
                _ray_compat.check_arguments(inner, call._actorsub_args, call._actorsub_kwargs)

    def _attempt_ended(
        self, call: GroupCall, member: _core.GroupMember, started_ns: int, probe: int, attempt: Any
    ) -> None:
        """On the thread that ended it: one of Ray's, the watcher's, or the caller's."""
        if attempt.cancelled():
            member.end(_UNSENT, started_ns, probe)
            call._finish_unwanted()
            return
        error = attempt._exception
        if error is None:
            if isinstance(attempt._result, ray.ObjectRefGenerator):
                # It goes on at the member.
                stream_ref = attempt._result.completed()
                ended = functools.partial(_remote_ended, weakref.ref(self), member, started_ns, probe, stream_ref)
                _ray_compat.on_completed(stream_ref, ended)
            else:
                member.end(_SUCCESS, started_ns, probe)
            call._finish(attempt._result)
            return
        outcome = self._outcome(error)
        member.end(outcome, started_ns, probe)
        options = None if call._method is None else call._method._options
        if options is None or not self._moves(call, options, member, error, outcome):
            call._finish(error, raised=True)
            return
        if not errors.may_have_run(error):
            if calls.takes_back():
                call._finish(error, raised=True)
                return
            if attempt._actorsub_args is not None:
                # As they were when the call was made; they were frozen in the member's line.
                call._actorsub_args, call._actorsub_kwargs = attempt._actorsub_args, attempt._actorsub_kwargs
            if call._actorsub_args is None:
                # Let go of when Ray had them.
                call._finish(error, raised=True)
                return
            self._counts["moved"] += 1
            self._send_again(call)
            return
        self._counts["resent"] += 1
        again = call._sent_attempts - 1
        pause_s = 0.0 if again == 0 else random.uniform(0, min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (again - 1)))
        self._send_again(call, int(pause_s * 1e9))

    def _send_again(self, call: GroupCall, pause_ns: int = 0) -> None:
        """Has the sender route it, after a pause that ends no later than its deadline."""
        call._between.append(True)
        if call._is_unwanted:
            # Else its user has seen that it is between two attempts, and finishes it.
            if _take(call._between):
                call._finish_unwanted()
            return
        pause_ns = min(pause_ns, call._deadline_ns - _core.now_ns())
        if pause_ns <= 0:
            _run_on_sender(self._route_between, call)
            return
        call._pause = next(_pauses)
        _paused[call._pause] = call
        # By number, so that a call which ends before its pause does keeps nothing until then.
        _core.call_later(pause_ns, functools.partial(_resume, call._pause))

    def _outcome(self, error: Any) -> int:
        """What the end of an attempt says about its member."""
        if isinstance(error, ray.exceptions.RayTaskError):
            # The method's own, also where its cause is the death of some other actor.
            return _FAILURE if self._speaks_against(error) else _APPLICATION
        if isinstance(error, DeadlineExceededError):
            # Also where it waited in the member's line: behind calls that do not end.
            return _FAILURE
        if isinstance(error, ray.exceptions.PendingCallsLimitExceeded):
            return _UNSENT
        if errors.kind_of(error) is errors.Kind.OWN:
            return _APPLICATION
        return _LOST if errors.may_have_run(error) else _UNSENT

    def _speaks_against(self, error: ray.exceptions.RayTaskError) -> bool:
        ask = self._is_failure
        if ask is None:
            return False
        # Where it raises, the error counts as the method's own. What it returns may have a truth of its own.
        return bool(fenced("is_failure of a group", lambda: bool(ask(error)), failed=False))

    def _moves(
        self, call: GroupCall, options: _Options, member: _core.GroupMember, error: BaseException, outcome: int
    ) -> bool:
        """Whether the call goes on with another member after this error. Notes the attempt."""
        sent = errors.may_have_run(error)
        call._attempts.append(
            Attempt(member.actor.key.hex(), type(error).__name__, getattr(error, "evidence", None), sent)
        )
        call._tried.add(member)
        call._error = error
        if sent:
            call._sent_attempts += 1
            call._sent_to.add(member)
        if not call._end or call._is_unwanted or isinstance(error, DeadlineExceededError) or outcome == _APPLICATION:
            return False
        if not sent:
            return options.retry != "never"
        if options.retry != "always" or call._sent_attempts >= options.max_attempts:
            return False
        if not self._budget.take():
            self._counts["budget_exhausted"] += 1
            return False
        return True

    def _route_between(self, call: GroupCall) -> None:
        """The next attempt of a call that has had one, unless its user was first. On the sender's thread."""
        if _take(call._between):
            self._route_again(call)

    def _route_again(self, call: GroupCall) -> None:
        """The next attempt of a call that has had one, or has waited. On the sender's thread."""
        if not call._end:
            return
        if call._is_unwanted:
            call._finish_unwanted()
            return
        assert call._method is not None
        try:
            error = self._route(call, call._method._options, on_sender=True)
        except BaseException as raised:
            error = as_exception("the balancer, or pickling the arguments,", raised)
        if error is not None:
            call._finish(error, raised=True)

    def _remote(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = method._options
        policy = options.policy
        self._refuse_in_child()
        self._check_key(options)
        deadline_ns = options.deadline_ns()
        tried: set[_core.GroupMember] = set()
        attempts: list[Attempt] = []
        self._counts["calls"] += 1
        while True:
            picker = self._picker
            member, probe = self._pick(picker, options.key, tried)
            if self._is_cut_off():
                raise NoReplicaError(_ENDED, sent=False)
            if member is None:
                none = NoReplicaError(_WHY[probe], sent=False)
                none.attempts = tuple(attempts)
                if policy.on_unavailable != "wait":
                    return self._refuse(method, none, args, kwargs)
                tried.clear()
                self._wait_for_member(policy, deadline_ns, none)
                continue
            started_ns = member.start()
            try:
                result = method._of(member, picker).remote(*args, **kwargs)
            except (errors.ActorUnavailableError, errors.ActorDiedError) as refusal:
                member.end(_UNSENT, started_ns, probe)
                attempts.append(Attempt(member.actor.key.hex(), type(refusal).__name__, refusal.evidence, refusal.sent))
                tried.add(member)
                if options.retry == "never":
                    refusal.attempts = tuple(attempts)
                    return self._refuse(method, refusal.with_traceback(None), args, kwargs)
                self._counts["moved"] += 1
                continue
            except BaseException:
                member.end(_UNSENT, started_ns, probe)
                raise
            ref = _first_ref(result)
            if ref is None:
                member.end(_SUCCESS, started_ns, probe)
            else:
                ended = functools.partial(_remote_ended, weakref.ref(self), member, started_ns, probe, ref)
                _ray_compat.on_completed(ref, ended)
            return result

    def _refuse(self, method: GroupMethod, error: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The end of a `.remote()` that nobody took: raised, or in the shape that its result would have had."""
        self._count_failure(error)
        if method._options.policy.on_unavailable not in ("auto", "ref"):
            raise error
        make_ref = functools.partial(_ray_compat.failed_ref, error)
        picker = self._picker
        for member in picker.members[:1]:
            return submit.refused(method._of(member, picker), error, args, kwargs, make_ref)
        # Nobody is left to be asked how many results the method has.
        count = method._ray_options.get("num_returns", 1)
        if count == "streaming":
            return _ray_compat.FailedGenerator(make_ref())
        if count == 0:
            return None
        return [make_ref() for _ in range(count)] if isinstance(count, int) and count > 1 else make_ref()

    def _wait_for_member(self, policy: Policy, deadline_ns: int, error: NoReplicaError) -> None:
        """Blocks until a member is up; for `.remote()`."""
        why = submit.why_not_block()
        if why is None and watcher.is_exiting():
            why = _EXITING
        if why is not None:
            raise NoReplicaError(why, sent=False) from error
        turn: _Turn = calls.new_call(_Turn, None, (), {})
        self._set_open()
        watcher.ensure()
        verdict, release = self._line.admit(turn, deadline_ns, 0, policy.max_queued, True, 0)
        if verdict == calls.SEND:
            self._line.complete(turn._actorsub_ticket)
        elif verdict == calls.WAIT:
            if release:
                calls.call_sender(self._line)
            turn.result()
        elif verdict == calls.FULL:
            raise QueueFullError(f"As many wait for a member as may (max_queued={policy.max_queued}).")
        elif verdict == calls.EXPIRED:
            raise DeadlineExceededError("It waited for a member.", sent=False)
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
        error: Any
        if why == "deadline":
            error = DeadlineExceededError("It waited for a member.", sent=False)
        else:
            error = NoReplicaError("The connection to Ray ended while the call waited.", sent=False)
        calls.deliver(self, error, failed=True)


class _Tenure:
    """The time of one member in its group."""

    def __init__(self, factory_failures: int | None) -> None:
        #: How often in a row the factory had failed before it made this member; None where it did not make it.
        self.factory_failures = factory_failures
        #: When it was first seen up, on the clock of time.monotonic().
        self.up_s: float | None = None
        #: Ends its registration with on_state_change.
        self.cancel: Callable[[], None] = _nothing

    def failures_of_next(self) -> int:
        """After its death: as how many failures of the factory it counts, those before it included."""
        if self.factory_failures is None:
            return 0
        if self.up_s is not None and time.monotonic() - self.up_s >= FACTORY_TRIAL_S:
            return 0
        return self.factory_failures + 1


def _nothing() -> None:
    pass


def _take(tokens: list[bool]) -> bool:
    """True for the one who takes the last thing out of a list."""
    try:
        return tokens.pop()
    except IndexError:
        return False


_TRY_AGAIN: Any = object()

_ENDED = "The connection to Ray ended."
_WHY = {
    "no_member": "The group has no members.",
    "all_down": "Every member is away.",
    "all_excluded": "Every member that is up was tried.",
}

_EXITING = "The interpreter ends, and nobody looks at the members any more."

#: Of methods with different options that a member keeps ready.
MAX_METHODS = 1000

_NO_OPTIONS: dict[str, Any] = {}

# All groups, by id; for what concerns all of them: the end of a connection.
_groups: dict[int, weakref.ref[ReplicaGroup]] = {}

# Calls between two attempts whose pause is not over, by its number.
_paused: dict[int, GroupCall] = {}
_pauses = itertools.count(1)


def _resume(pause: int) -> None:
    call = _paused.pop(pause, None)
    group = None if call is None else call._group
    if group is not None:
        _run_on_sender(group._route_between, call)


# How often this process is a fork of the one that Ray was connected in.
_forks = 0


def _no_replica(call: GroupCall, detail: str) -> NoReplicaError:
    return NoReplicaError(detail, sent=call._sent_attempts > 0)


def _deadline_error(call: GroupCall) -> DeadlineExceededError:
    return DeadlineExceededError("It waited for a member.", sent=call._sent_attempts > 0)


def _run_on_sender(function: Callable[..., None], *arguments: Any) -> None:
    while not watcher.is_exiting() and not watcher.ensure().send(function, *arguments):
        pass


def _look_up(members: list[_core.GroupMember]) -> None:
    """Has the actor table asked about those of which nothing is known, and waits for it, a few milliseconds.

    Else the first calls would all go to the member that happened to be looked up first, whatever the balancer.
    """
    unknown = [one for one in members if one.actor.state is ActorState.UNKNOWN]
    end_s = time.monotonic() + watcher.FIRST_READ_LIMIT_S
    running = None if watcher.is_own_thread() or not unknown else watcher.ensure_if_possible()
    if running is None:
        return
    for one in unknown:
        running.request_read(one.actor)
    for one in unknown:
        if one.actor.state is ActorState.UNKNOWN and time.monotonic() < end_s:
            submit.read_table_once(one.actor)


def _tell_group(
    group: weakref.ref[ReplicaGroup], member: _core.GroupMember, _: str, old: ActorState, new: ActorState, why: Any
) -> None:
    alive = group()
    if alive is not None:
        alive._member_changed(member, new)


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
        raise ValueError(
            f"consecutive_failures must be a whole number from 1 to 127, or None, got {shown(consecutive)}"
        )
    for name, value in (("base_ejection_s", base_s), ("max_ejection_s", max_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
            raise ValueError(f"{name} must be over 0 and at most 86400 seconds, got {shown(value)}")
    if max_s < base_s:
        raise ValueError(f"max_ejection_s must be at least base_ejection_s ({base_s!r}), got {max_s!r}")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"max_ejected_share must be from 0 to 1, got {shown(share)}")


def _first_ref(result: Any) -> Any:
    """A plain ref of whose outcome the member can be judged; None where there is none."""
    if isinstance(result, ray.ObjectRefGenerator):
        return result.completed()
    if isinstance(result, list):
        result = result[0] if result else None
    return result if isinstance(result, ray.ObjectRef) else None


def _remote_ended(
    group: weakref.ref[ReplicaGroup], member: _core.GroupMember, started_ns: int, probe: int, ref: Any, value: Any
) -> None:
    # With the ref among its arguments: Ray tells nothing about one that nobody has.
    if not _ray_compat.is_failure(ref, value):
        member.end(_SUCCESS, started_ns, probe)
        return
    watcher.learn(member.actor, value, _core.call_of(ref)[1])
    alive = group()
    member.end(_UNSENT if alive is None else alive._outcome(value), started_ns, probe)


# Threads that are inside a factory.
_at_factory: set[threading.Thread] = set()


def _ask_factory(group: weakref.ref[ReplicaGroup], failures: int) -> None:
    """Asks the factory for a member, after a pause where it failed before. A thread of its own."""
    if failures:
        # Nothing to wait for: the group is not held meanwhile, and may be gone afterwards.
        time.sleep(min(MAX_FACTORY_PAUSE_S, FACTORY_PAUSE_S * 2 ** (failures - 1)))
    alive: ReplicaGroup | None = group()
    if alive is None or alive._factory is None:
        return
    _at_factory.add(threading.current_thread())
    try:
        if alive._session is None or alive._session is not _ray_compat.session_token():
            return
        alive._add([alive._factory()], failures)
        alive._counts["replaced"] += 1
    except BaseException:
        log_failure("the factory %r of a group", alive._factory)
        alive._replace(failures + 1)
    finally:
        _at_factory.discard(threading.current_thread())


def end_factories() -> None:
    """Before a disconnect."""
    end_s = time.monotonic() + FACTORY_EXIT_S
    for thread in list(_at_factory):
        if thread is not threading.current_thread():
            thread.join(max(0.0, end_s - time.monotonic()))


def _end_tenures(tenures: dict[_core.GroupMember, _Tenure]) -> None:
    for tenure in list(tenures.values()):
        tenure.cancel()


def _forget_group(number: int, _: Any) -> None:
    _groups.pop(number, None)


def close_all() -> None:
    for reference in list(_groups.values()):
        group = reference()
        if group is not None and group._session is not _ray_compat.session_token():
            calls.end_all(group._line.close())


def take_back_waiting() -> None:
    """`actorsub.shutdown()` has stopped the threads that would go on with them."""
    for pause, call in list(_paused.items()):
        if _paused.pop(pause, None) is not None:
            call._finish(call._error, raised=True)
    for reference in list(_groups.values()):
        group = reference()
        if group is None:
            continue
        for ticket, call in list(group._line.calls.items()):
            if group._line.cancel(ticket)[0]:
                if isinstance(call, _Turn):
                    # It asks for another turn, which starts the threads again.
                    calls.deliver(call, None)
                else:
                    call._finish(_no_replica(call, "actorsub.shutdown() was called while it waited."), raised=True)


def after_fork_in_child() -> None:
    global _forks
    _forks += 1
