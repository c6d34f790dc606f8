"""Replicas behind one name: `ReplicaGroup` picks a member for each call and moves to another when one fails.

This module is what a user sees. members.py holds the members and picks one for each call. group_call.py takes a call
from member to member; group_remote.py does so for a `.remote()`.

Lifetime: a call that is under way keeps the members, so it goes on when the group itself is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from actorsub import _core, calls, group_remote
from actorsub.group_call import GroupCall, Judge, MemberMethod
from actorsub.group_options import GroupOptions, Retry, check_ejection, check_max_attempts, check_retry
from actorsub.members import Members, MemberState
from actorsub.policy import DEFAULT_POLICY, OnUnavailable, shown

__all__ = ["GroupMethod", "MemberState", "ReplicaGroup"]


class GroupMethod:
    """A method of all members: `.call(...)`, `.remote(...)`, `.options(...)`. `group.method` makes it."""

    __slots__ = ("_group", "_method")

    def __init__(self, group: ReplicaGroup, name: str, options: GroupOptions, ray_options: dict[str, Any]) -> None:
        self._group = group
        self._method = MemberMethod(name, options, ray_options)

    def options(self, **options: Any) -> GroupMethod:
        """The same method with options for the calls made through it.

        It takes the options of ReplicaGroup that are about calls (`retry`, `max_attempts`, `timeout_s`,
        `max_in_flight`, `max_queued`, `on_unavailable`), and Ray's for methods. It takes `key` if the balancer is
        "consistent_hash" (a str, bytes or int) or a function (anything).

        Raises TypeError or ValueError for an option that is unknown or has a value that it does not take.
        """
        method = self._method
        ours, rays = method.options.replace(self._group._members.balancer, options)
        made = GroupMethod(self._group, method.name, ours, {**method.ray_options, **rays})
        if rays:
            # Ray checks their values, here where they are written.
            made._method.of_any(self._group._members.picker)
        return made

    def call(self, *args: Any, **kwargs: Any) -> calls.Call:
        """Calls the method on a member that can take it; see ReplicaGroup and Call.

        Raises:
            TypeError: the arguments do not fit the method, or cannot be pickled.
            ValueError: the balancer is "consistent_hash", and no `key` was given.
            QueueFullError: too many calls wait already.
            NoReplicaError: no member can take it, and `on_unavailable` is "raise". With the other values the Call fails
                with it.
            RuntimeError: this process is a fork of the one that made the group.
        """
        members, judge = self._usable()
        call = GroupCall.make(members, judge, self._method, args, kwargs)
        call.begin()
        return call

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `.remote()` on a member that can take the call, and returns what that returns.

        A refused call moves to another member, unless `retry` is "never". A call that was sent is never resent.
        """
        members, judge = self._usable()
        return group_remote.remote(members, judge, self._method, args, kwargs)

    def _usable(self) -> tuple[Members, Judge]:
        members = self._group._members
        members.refuse_in_child()
        if members.balancer == "consistent_hash" and self._method.options.key is None:
            raise ValueError("balancer='consistent_hash' needs a key: group.method.options(key=...).call(...)")
        return members, self._group._judge

    def __repr__(self) -> str:
        return f"<method {self._method.name} of {self._group!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupMethod, (self._group, self._method.name, self._method.options, self._method.ray_options)


class ReplicaGroup:
    """Several actors of one kind, called as one: `group.method.call(...)`.

        >>> group = actorsub.ReplicaGroup(handles, retry="always", timeout_s=1.0)
        >>> group.infer.call(x).result()

    A call goes to a member that is up, is not left out for its failures, and has little to do. If that member turns out
    to be away, the call goes to another. Members can be added and removed at any time. `len(group)` is their number;
    iterating gives a MemberState for each. A group can be pickled and sent to other processes, with its handles and
    options; each process counts and judges for itself.

    Args:
        handles: actor handles, plain or wrapped. The policy of each handle still decides how its actor is watched.
        balancer: how a member is picked. "least_loaded": of two members chosen at random the one with fewer of our
            calls in flight. "round_robin": each in turn. "consistent_hash": calls with one `key` go to one member
            (`group.m.options(key=...)`). Or a function of a list of MemberState (those that can take the call) and the
            key, which returns one of them.
        retry: "unsent" moves a call that cannot have run to another member. "always" also resends a call that may have
            run, for methods that may run twice. "never" does neither: the refusal of the first member ends the call.
        max_attempts: how often one call may be sent under "always", in all; from 1 to 100. Moves are not counted.
        timeout_s: deadline of a call, all attempts and waiting together, in seconds; None: no deadline.
        max_in_flight: how many calls of this process may be at one member at one time; the others wait in that member's
            line. None: any number.
        max_queued: how many calls may wait in a member's line, and in the group's; one more is refused with
            QueueFullError.
        on_unavailable: what a call does when no member can take it. "ref" and "auto": it returns a failed Call.
            "raise": it raises NoReplicaError at once. "wait": it waits for a member, at most `timeout_s`.
        is_failure: a function of the exception that the method raised (a RayTaskError); True: it counts as a failure of
            the member. Without it the method's exceptions do not count. Under retry="always" such a call goes to
            another member.
        factory: a function without arguments that returns a new handle. It is called, on a background thread, for each
            member that died for good. None: the group shrinks.
        consecutive_failures: after this many failures in a row (deadlines missed, `is_failure`) a member is left out
            for a while; from 1 to 127. None: never. docs/balancers.md explains the defaults.
        base_ejection_s, max_ejection_s: how long a member is left out, in seconds: the first time, and at most. The
            time doubles in between.
        max_ejected_share: at most this share of the members is left out at one time; from 0 to 1.
        bounded_load: for "consistent_hash": how many times the average of our calls in flight a member may have before
            its keys go to the next one; from 1 to 100. See docs/balancers.md.

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
        check_ejection(consecutive_failures, base_ejection_s, max_ejection_s, max_ejected_share)
        if isinstance(bounded_load, bool) or not isinstance(bounded_load, (int, float)) or not 1 <= bounded_load <= 100:
            raise ValueError(f"bounded_load must be from 1 to 100, got {shown(bounded_load)}")
        policy = DEFAULT_POLICY.replace(
            timeout_s=timeout_s, max_in_flight=max_in_flight, max_queued=max_queued, on_unavailable=on_unavailable
        )
        self._options = GroupOptions(policy, check_retry(retry), check_max_attempts(max_attempts))
        health = _core.GroupState(
            eject=consecutive_failures is not None,
            consecutive_failures=consecutive_failures or 5,
            base_ejection_s=base_ejection_s,
            max_ejection_s=max_ejection_s,
            max_ejected_share=max_ejected_share,
        )
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
        self._members = Members(
            balancer, factory, health, max_ejected_share=max_ejected_share, bounded_load=bounded_load
        )
        self._judge = Judge(is_failure)
        # Names that are known to be methods.
        self._names: set[str] = set()
        self._members.add(handles)

    def add(self, actor_handle: Any) -> None:
        """Adds a member: an actor handle, plain or wrapped. Raises ValueError when its actor is a member already.

        After `ray.shutdown()` and `ray.init()` the first new member replaces all those of the old connection.
        """
        self._members.add([actor_handle])

    def remove(self, actor_handle: Any) -> None:
        """Takes a member out: it gets no further calls; those that it has go on. Raises ValueError if it is none."""
        if not self._members.remove(actor_handle):
            raise ValueError(f"{actor_handle!r} is not a member of this group")

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[MemberState]:
        return iter(self._members.states())

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def __getitem__(self, name: str) -> GroupMethod:
        """The method of that name, also if the group has an attribute of the same name (`add`, `remove`, `stats`).

        Raises AttributeError when the members have no such method.
        """
        if name not in self._names:
            for member in self._members.picker.members[:1]:
                getattr(member.handle, name)
                self._names.add(name)
        return GroupMethod(self, name, self._options, {})

    def stats(self) -> dict[str, Any]:
        """Counts what happened to the calls of this group in this process.

        Returns a new dict:
            calls: calls made.
            moved: attempts that were refused and went to another member.
            resent: calls that were sent again.
            budget_exhausted: resends that the retry budget did not allow.
            failed: calls, by class of the error.
            died, replaced: members that died for good; those that the factory replaced.
            waiting, in_flight: calls in the group's own line now; calls at members now.
            ejected, ejection_limit: members that are left out now; how many may be.
            ejections, ejections_refused: members left out so far; those that the limit kept in.
            probes: single calls that decided whether a member returns.
            members: a list of MemberState.
        """
        return {
            **self._judge.counts,
            "replaced": self._members.replaced,
            "died": self._members.died,
            "failed": dict(self._judge.failures),
            "waiting": self._members.line.counters()["waiting"],
            **self._members.counters(),
            "members": list(self),
        }

    def __repr__(self) -> str:
        return repr(self._members)

    def __dir__(self) -> list[str]:
        members = self._members.picker.members
        names = [name for name in dir(members[0].handle) if not name.startswith("_")] if members else []
        return sorted({*super().__dir__(), *names})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, ([member.handle for member in self._members.picker.members], self._arguments)


def _rebuild(handles: list[Any], arguments: dict[str, Any]) -> ReplicaGroup:
    return ReplicaGroup(handles, **arguments)
