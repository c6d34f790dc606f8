"""The members of a group: which of them takes a call, and the replacement of those that died.

Which member takes a call, and which are left out for a while, is decided in C++ (csrc/balancer.h). The members are a
fixed list inside a picker; a change of membership makes the next picker. So a call that is on its way reads one list,
and takes no lock.

Threads: members are added and removed on any thread; a signal handler may do so in the middle of another change.
Changes of state come on the watcher's thread. A factory runs on a thread of its own. No lock is held while a function
of the user runs (balancer, factory).

Lifetime: only the group and its calls under way hold a `Members`, which holds the members. So it goes with the last of
these, and the members' actors with it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from actorsub import _core, _ray_compat, calls, handle, submit, watcher
from actorsub.errors import ActorState
from actorsub.fence import log_failure
from actorsub.policy import shown

logger = logging.getLogger("actorsub")

#: Pause before the factory is asked again, after it raised or its actor died too soon. Doubled each time.
FACTORY_PAUSE_S = 1.0
MAX_FACTORY_PAUSE_S = 30.0
#: How often in a row that may happen to the replacement of one member; then the group stays smaller.
MAX_FACTORY_FAILURES = 10
#: How long an actor of the factory has to be up before its death no longer counts as a failure of the factory.
FACTORY_TRIAL_S = 2.0
#: How long a disconnect waits for factories that are at work. They may be inside Ray, which must not end meanwhile.
FACTORY_EXIT_S = 5.0

#: The rules of a call in the group's line: it is held for as long as the line is closed.
HELD = (_core.AWAY_RULES["wait"], _core.PENDING_RULES["submit"])

#: When more than this share of the members that are up is left out by soft evidence, that evidence is ignored.
PANIC_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class MemberState:
    """One member of a group, as it was at one moment.

    Attributes:
        handle: its wrapped handle.
        state: its ActorState.
        health: "healthy"; "ejected": left out for a while, for its failures; "probing": one call decides whether it
            returns.
        in_flight: calls of this group, in this process, that it has now.
        failures_in_a_row: deadlines missed, and failures by `is_failure`, since its last answer.
        started: calls that it was given so far.
    """

    handle: handle.ActorHandle
    state: ActorState
    health: str
    in_flight: int
    failures_in_a_row: int
    started: int


def _state_of(member: _core.GroupMember) -> MemberState:
    return MemberState(
        handle=member.handle,
        state=member.actor.state,
        health=member.health,
        in_flight=member.in_flight,
        failures_in_a_row=member.failures_in_a_row,
        started=member.started,
    )


class Members:
    """The members of one group, and the line in which its calls wait while none of them is up.

    Args:
        balancer: the name of one of _core.BALANCERS, or the user's function of a list of MemberState and a key.
        factory: the user's function that makes a handle for each member that died for good; None: there is none.
        max_ejected_share, bounded_load: as in ReplicaGroup.
        health: when a member is left out.
    """

    def __init__(
        self,
        balancer: str | Callable[[list[MemberState], Any], MemberState],
        factory: Callable[[], Any] | None,
        health: _core.GroupState,
        *,
        max_ejected_share: float,
        bounded_load: float,
    ) -> None:
        #: None where the user's function chooses.
        self.balancer: str | None = balancer if isinstance(balancer, str) else None
        self._choose = None if isinstance(balancer, str) else balancer
        self._factory = factory
        self._health = health
        self._bounded_load = bounded_load
        # If more members may be left out than makes a panic, there would be panic all the time.
        self._panic_share = max(PANIC_SHARE, max_ejected_share)
        # A picker that is, or once was, the present one; see `picker` and `_change`.
        self._known_picker = self._make_picker([])
        # The connection to Ray that the members' handles belong to.
        self._session: Any = _ray_compat.session_token()
        self._forks = _forks
        self.line: _core.CallQueue
        self._open_line()
        # What happened to members, for ReplicaGroup.stats().
        self.died = 0
        self.replaced = 0
        self._tenures: dict[_core.GroupMember, _Tenure] = {}
        # What ends the members' registrations when the group is gone.
        weakref.finalize(self, _end_tenures, self._tenures)
        _all[id(self)] = weakref.ref(self, functools.partial(_forget, id(self)))

    def __len__(self) -> int:
        return len(self.picker.members)

    def __repr__(self) -> str:
        return f"<ReplicaGroup of {len(self)}>"

    def states(self) -> list[MemberState]:
        return [_state_of(member) for member in self.picker.members]

    def counters(self) -> dict[str, int]:
        return self._health.counters()

    # -- Coming and going.

    def add(self, handles: Iterable[Any], factory_failures: int | None = None) -> None:
        """Adds members, all or none; raises as ReplicaGroup.add. `factory_failures`: of one that the factory made."""
        self.refuse_in_child()
        wrapped = [handle.wrap(one) for one in handles]
        if not wrapped:
            return
        session = wrapped[0]._actorsub_actor.session
        if any(one._actorsub_actor.session is not _ray_compat.session_token() for one in wrapped):
            raise ValueError("a member's handle belongs to a connection to Ray that has ended")
        if session is not self._session:
            for member in self.picker.members:
                if member.actor.session is not session:
                    self._take_out(member)
            self._session = session
            self._open_line()
        made = [_core.GroupMember(self._health, one._actorsub_actor, one) for one in wrapped]
        for member in made:
            # Set before it is a member, so that a thread which takes it out again finds its tenure.
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
        this = weakref.ref(self)
        for member in made:
            cancel = handle.on_state_change(member.handle, functools.partial(_tell, this, member))
            tenure = self._tenures.get(member)
            if tenure is None:
                # Taken out again meanwhile.
                cancel()
            else:
                tenure.cancel = cancel
                if member not in self.picker.index_of:
                    cancel()
        _look_up(made)
        self._open_or_close()

    def remove(self, actor_handle: Any) -> bool:
        """False if it is no member."""
        for member in self.picker.members:
            if member.handle == actor_handle:
                return self._take_out(member) is not None
        return False

    @property
    def picker(self) -> _core.GroupPicker:
        """The picker of the present members. Each old picker knows the one that replaced it."""
        picker = self._known_picker
        while picker.next:
            picker = picker.next[0]
        return picker

    def _change(self, change: Callable[[list[_core.GroupMember]], list[_core.GroupMember]]) -> None:
        """Makes `change` of the members; again, where another thread, or a signal handler, was first."""
        while True:
            before = self.picker
            after = self._make_picker(change(before.members))
            if before.follow(after):
                self._known_picker = after
                return

    def _make_picker(self, members: list[_core.GroupMember]) -> _core.GroupPicker:
        kind = _core.BALANCERS[self.balancer or "least_loaded"]
        return _core.GroupPicker(
            members,
            kind,
            panic_share=self._panic_share,
            bounded_load=self._bounded_load,
            # With on_pending="fail" a member that was never up counts as away.
            use_pending=all(member.handle._actorsub_policy.on_pending != "fail" for member in members),
            seed=random.getrandbits(64),
        )

    def _take_out(self, member: _core.GroupMember) -> _Tenure | None:
        """Takes a member out. Returns its tenure; None when it is no member."""
        tenure = self._tenures.pop(member, None)
        if tenure is None:
            return None
        self._change(lambda members: [one for one in members if one is not member])
        member.retire()
        tenure.cancel()
        self._open_or_close()
        return tenure

    def changed(self, member: _core.GroupMember, state: ActorState) -> None:
        """A member's actor has a new state. On the watcher's thread."""
        tenure = self._tenures.get(member)
        if tenure is not None and state is ActorState.ALIVE and tenure.up_s is None:
            tenure.up_s = time.monotonic()
        self._open_or_close()
        if state is not ActorState.DEAD or (tenure := self._take_out(member)) is None:
            return
        self.died += 1
        logger.warning(
            "actor %s died for good and left its group, which has %d members now%s",
            member.actor.key.hex(),
            len(self),
            "; its factory is asked for another" if self._factory else "",
        )
        if self._factory is not None:
            self._replace(tenure.failures_of_next())

    # -- The factory.

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

    def ask_factory(self, failures: int) -> None:
        """Adds what the factory makes. On the factory's thread."""
        if self._factory is None or self._session is None or self._session is not _ray_compat.session_token():
            return
        try:
            self.add([self._factory()], failures)
            self.replaced += 1
        except BaseException:
            log_failure("the factory %r of a group", self._factory)
            self._replace(failures + 1)

    # -- The line of the group's calls.

    def _open_line(self) -> None:
        self.line = _core.CallQueue()
        calls.add_line(self.line)

    def _open_or_close(self) -> None:
        """Tells the group's line whether any member is up, and has its calls reviewed."""
        self.set_open()
        calls.review_queue(self.line)

    def set_open(self) -> None:
        """Tells the group's line whether any member is up."""
        while True:
            is_open = self.picker.able() > 0
            self.line.set_open(is_open)
            # In between another thread may have seen a member come and told the line. That must not be overwritten.
            if is_open == (self.picker.able() > 0):
                return

    # -- Whether they can be used, and which of them.

    def is_cut_off(self) -> bool:
        """True once the connection of the members has ended. Ray would begin a new one for a call."""
        return self._session is not None and self._session is not _ray_compat.session_token()

    def refuse_in_child(self) -> None:
        """Raises RuntimeError in a fork of the process that made the group."""
        if self._forks != _forks:
            raise RuntimeError(submit.PARENT)

    def pick(self, picker: _core.GroupPicker, key: Any, tried: set[_core.GroupMember]) -> tuple[Any, Any]:
        """(member, probe) of those of `picker` that were not `tried`, or (None, reason). See csrc/balancer.h.

        Raises TypeError where the user's function returns something else, and what that function raises.
        """
        if self._choose is None:
            return picker.pick(key or 0, tried)
        member, probe = picker.pick(0, tried)
        if member is None or probe or member.actor.state is not ActorState.ALIVE:
            # There is nobody; or it is a probe, which is no matter of choice; or no member was up yet.
            return member, probe
        up = [one for one in picker.members if one.actor.state is ActorState.ALIVE]
        healthy = [one for one in up if one.health == "healthy"]
        # As in csrc/balancer.h: when most look bad, that is ignored.
        panic = len(up) - len(healthy) > self._panic_share * len(up)
        able = [one for one in (up if panic else healthy) if one not in tried]
        able = able or [one for one in up if one not in tried] or [member]
        states = [_state_of(one) for one in able]
        chosen = self._choose(states, key)
        for state, one in zip(states, able, strict=True):
            if state is chosen:
                return one, 0
        raise TypeError(f"the balancer must return one of the members that it was given, got {shown(chosen)}")


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
        """How many failures in a row the factory has after this member's death, those before it included."""
        if self.factory_failures is None:
            return 0
        if self.up_s is not None and time.monotonic() - self.up_s >= FACTORY_TRIAL_S:
            return 0
        return self.factory_failures + 1


def _nothing() -> None:
    pass


def _end_tenures(tenures: dict[_core.GroupMember, _Tenure]) -> None:
    for tenure in list(tenures.values()):
        tenure.cancel()


def _tell(
    members: weakref.ref[Members], member: _core.GroupMember, _: str, old: ActorState, new: ActorState, why: Any
) -> None:
    alive = members()
    if alive is not None:
        alive.changed(member, new)


def _look_up(members: list[_core.GroupMember]) -> None:
    """Looks up in the actor table the members of which nothing is known, and waits for that, a few milliseconds.

    Otherwise the first calls would all go to the member that happened to be looked up first, whatever the balancer.
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


# Threads that are inside a factory.
_at_factory: set[threading.Thread] = set()


def _ask_factory(members: weakref.ref[Members], failures: int) -> None:
    """Asks the factory for a member, after a pause where it failed before. A thread of its own."""
    if failures:
        # Nothing to wait for: the group is not held meanwhile, and may be gone afterwards.
        time.sleep(min(MAX_FACTORY_PAUSE_S, FACTORY_PAUSE_S * 2 ** (failures - 1)))
    alive: Members | None = members()
    if alive is None:
        return
    _at_factory.add(threading.current_thread())
    try:
        alive.ask_factory(failures)
    finally:
        _at_factory.discard(threading.current_thread())


# ---------------------------------------------------------------------------------------------------------------------
# What concerns all groups, see lifecycle.py.


# Of all groups, by id.
_all: dict[int, weakref.ref[Members]] = {}


def _forget(number: int, _: Any) -> None:
    _all.pop(number, None)


def of_all_groups() -> list[Members]:
    return [members for members in [reference() for reference in list(_all.values())] if members is not None]


# How often this process is a fork of the one that Ray was connected in.
_forks = 0


def end_factories() -> None:
    """Before a disconnect."""
    end_s = time.monotonic() + FACTORY_EXIT_S
    for thread in list(_at_factory):
        if thread is not threading.current_thread():
            thread.join(max(0.0, end_s - time.monotonic()))


def close_all() -> None:
    """The connection to Ray has ended: the calls that wait in the groups' lines end."""
    for members in of_all_groups():
        if members.is_cut_off():
            calls.end_all(members.line.close())


def take_back_waiting() -> None:
    """Ends the calls in the groups' lines: `shutdown()` has stopped the threads that would go on with them."""
    for members in of_all_groups():
        for ticket, call in list(members.line.calls.items()):
            if members.line.cancel(ticket)[0]:
                call.taken_back()


def after_fork_in_child() -> None:
    """Groups of the parent refuse what they are asked."""
    global _forks
    _forks += 1
