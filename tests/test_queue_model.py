"""The submit queue as Python sees it, against a slow model: any order of admitting, sending, ending and closing.

The contract is csrc/submit_queue.h. The C++ tests hold the queue itself to a model of theirs; this one, written from
the contract alone, drives `CallQueue`: the tickets and their calls, who keeps a call and for how long, and what the
binding corrects in the counters. Held after every step:

- verdicts, the order of leaving and the counters are the model's;
- every admitted call has exactly one end, and `calls` has exactly those without one; nobody else keeps a call alive;
- what ended with `sent` false was never begun and never will be; what begins finds its window not yet full;
- the sender is always told of a head that may leave: it here sleeps until a result says `release`;
- the timer is never set later than the earliest deadline.

No Ray: an `Actor` takes observations from anybody, so its state is moved by the evidence that the watcher would have.
The clock is the real one. So that every step has one outcome, deadlines are an hour away or more, or pass within the
step that admits their call.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import actorsub
from actorsub import _core, _ray_compat

HOUR_NS = 3_600_000_000_000
# Until a deadline that is to pass within its step: far more than an admission takes, and waited for.
SOON_NS = 100_000
NEVER_NS = _core.NEVER_NS
VERDICTS = {number: name for name, number in _core.VERDICTS.items()}


class Thing(_core.CallBase):
    """A call: the queue asks no more of one than this."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Rules(NamedTuple):
    deadline_ns: int
    window: int
    max_queued: int
    wait_while_away: bool
    on_pending: str


@dataclasses.dataclass(eq=False)
class Entry:
    """A call that the queue knows: one in the line, or one that holds a place of the window."""

    number: int
    ticket: int
    rules: Rules
    where: str = "waiting"  # Then "out" (releasing), "begun".
    mark: int = 0
    # Its deadline passed in flight; what is left is its place.
    ended: bool = False
    # `calls` has it. Else the deadline passed, or a stream was handed out as its outcome.
    noted: bool = True

    @property
    def has_passed(self) -> bool:
        return self.rules.deadline_ns <= _core.now_ns()


End = tuple[int, str, bool]


class Model:
    """What submit_queue.h says, and what `CallQueue` makes of it, on one list in the order of admission."""

    def __init__(self) -> None:
        self.state = "unknown"
        self.losses = 0
        self.entries: list[Entry] = []
        # Ticket -> number of calls that the queue has given up although their outcome is on its way.
        self.kept: dict[int, int] = {}
        self.sending = 0
        self.closed = False
        self.counts: Counter[str] = Counter()

    # -- Questions.

    def line(self) -> list[Entry]:
        return [one for one in self.entries if one.where != "begun"]

    def begun(self) -> list[Entry]:
        return [one for one in self.entries if one.where == "begun"]

    def in_flight(self) -> int:
        return sum(one.where != "waiting" for one in self.entries)

    def find(self, ticket: int) -> Entry | None:
        return next((one for one in self.entries if one.ticket == ticket), None)

    def gate(self, rules: Rules) -> str:
        if self.state in ("unknown", "alive"):
            return "open"
        if self.state == "pending":
            return {"submit": "open", "fail": "pending", "wait": "held"}[rules.on_pending]
        if self.state in ("restarting", "unreachable"):
            return "held" if rules.wait_while_away else "away"
        return "dead"

    def may_leave(self, rules: Rules) -> bool:
        return self.gate(rules) == "open" and (rules.window == 0 or self.in_flight() < rules.window)

    def is_at_work(self) -> bool:
        return self.sending != 0 or any(one.where == "out" for one in self.entries)

    def is_due(self) -> bool:
        line = self.line()
        return bool(line) and not self.is_at_work() and self.may_leave(line[0].rules)

    def has_lost(self) -> bool:
        return any(one.mark != self.losses for one in self.begun())

    def earliest_ns(self) -> int:
        return min((one.rules.deadline_ns for one in self.entries if not one.ended), default=NEVER_NS)

    def counters(self) -> dict[str, int]:
        names = ("sent", "completed", "late", "stray", "aborted", "expired_here", "expired_there", "cancelled_here")
        names += ("abandoned", "refused_full", "refused_state", "lost", "closed", "recalled")
        counts = {name: self.counts[name] for name in names}
        return {"waiting": len(self.line()), "in_flight": self.in_flight(), **counts}

    # -- Steps.

    def verdict(self, rules: Rules, *, is_late: bool) -> str:
        gate = self.gate(rules)
        if self.closed:
            return "closed"
        if gate in ("away", "dead", "pending"):
            return gate
        if is_late:
            return "expired"
        if not self.line() and not self.is_at_work() and self.may_leave(rules):
            return "send"
        return "full" if len(self.line()) >= rules.max_queued else "wait"

    def refuse(self, verdict: str) -> None:
        names = {"expired": "expired_here", "full": "refused_full", "closed": None}
        self.counts[names.get(verdict, "refused_state")] += 1

    def admit(self, number: int, ticket: int, rules: Rules, *, sends: bool) -> Entry:
        entry = Entry(number, ticket, rules)
        self.entries.append(entry)
        if sends:
            self.begin(entry)
        return entry

    def begin(self, entry: Entry) -> None:
        entry.where = "begun"
        entry.mark = self.losses
        self.counts["sent"] += 1
        # Those that are out behind it have been let by their own windows, and have not begun.
        assert not entry.rules.window or len(self.begun()) <= entry.rules.window

    def recall(self) -> None:
        for one in self.line():
            self.counts["recalled"] += one.where == "out"
            one.where = "waiting"

    def release(self, most: int) -> tuple[list[int], list[End]]:
        self.sending = 0
        self.recall()
        tickets: list[int] = []
        ended: list[End] = []
        for head in self.line():
            if len(tickets) == most:
                break
            if head.has_passed:
                ended.append(self.expire_one(head))
            elif self.may_leave(head.rules):
                head.where = "out"
                tickets.append(head.ticket)
            else:
                break
        return tickets, ended

    def begin_send(self, ticket: int) -> str:
        self.sending = 0
        entry = self.find(ticket)
        if entry is None or entry.where == "begun":
            return "gone"
        if entry.where == "waiting" or entry is not self.line()[0] or self.gate(entry.rules) != "open":
            self.recall()
            return "back"
        self.begin(entry)
        self.sending = ticket
        return "go"

    def end_send(self, ticket: int) -> None:
        if self.sending == ticket:
            self.sending = 0

    def complete(self, ticket: int) -> bool:
        """True: the call is there, to be ended."""
        entry = self.find(ticket)
        if entry is None:
            self.counts["stray"] += 1
            return self.kept.pop(ticket, None) is not None
        self.entries.remove(entry)
        self.counts["completed"] += not entry.ended
        return entry.noted

    def abort(self, ticket: int) -> bool:
        self.end_send(ticket)
        entry = self.find(ticket)
        if entry is None:
            return False
        self.entries.remove(entry)
        if not entry.ended:
            self.counts["aborted"] += 1
            # What Ray never got was not sent.
            self.counts["sent"] -= 1
        return entry.noted

    def cancel(self, ticket: int, *, is_withdrawn: bool) -> bool | None:
        entry = self.find(ticket)
        if entry is None or entry.ended:
            return None
        if entry.where == "begun":
            return False
        self.entries.remove(entry)
        self.counts["cancelled_here"] += not is_withdrawn
        return True

    def expire_one(self, entry: Entry) -> End:
        sent = entry.where == "begun"
        if sent:
            entry.ended = True
            # A stream that was handed out is over its time in no sense that its user could see.
            self.counts["expired_there" if entry.noted else "completed"] += 1
        else:
            self.entries.remove(entry)
            self.counts["expired_here"] += 1
        return entry.number, "deadline", sent

    def expire(self) -> list[End]:
        ended = []
        for one in list(self.entries):
            if not one.ended and one.has_passed:
                end = self.expire_one(one)
                if one.noted:
                    ended.append(end)
                    one.noted = False
        return ended

    def review(self) -> list[End]:
        ended = []
        for one in self.line():
            gate = self.gate(one.rules)
            if gate in ("away", "dead", "pending"):
                self.entries.remove(one)
                self.counts["refused_state"] += 1
                ended.append((one.number, gate, False))
        return ended

    def fail_lost(self, keep: set[int]) -> list[End]:
        ended = []
        for one in self.begun():
            if one.mark == self.losses:
                continue
            self.entries.remove(one)
            if one.noted and one.number in keep:
                self.kept[one.ticket] = one.number
                self.counts["completed"] += 1
                continue
            self.counts["lost"] += not one.ended
            if one.noted:
                ended.append((one.number, "lost", True))
        return ended

    def close(self) -> list[End]:
        ended = [(one.number, "closed", one.where == "begun") for one in self.entries if one.noted]
        self.counts["closed"] += sum(not one.ended for one in self.entries)
        self.entries.clear()
        self.sending = 0
        self.closed = True
        return ended


picks = st.integers(0, 15)
on_pending = st.sampled_from(["submit", "wait", "fail"])


class Machine(RuleBasedStateMachine):
    """The queue and its model take the same steps. What the subclasses add is how the state moves."""

    def make_queue(self) -> Any:
        raise NotImplementedError

    def lose(self) -> None:
        """What is up ends, and with it what is in flight."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.queue = self.make_queue()
        # Every admitted call by number; only the queue holds it.
        self.things: list[weakref.ref[Thing]] = []
        self.tickets: list[int] = []
        self.ends: dict[int, tuple[str, bool]] = {}
        self.begun: set[int] = set()
        self.last_begun = -1
        # Calls whose arguments are still being copied, by number.
        self.unready: dict[int, Thing] = {}
        # What the sender took out of the line and has not asked for yet.
        self.batch: list[int] = []
        # The sender was told to look, and Release has not given it nothing since.
        self.is_awake = False
        # The state moved, and the review that has to follow has not come yet.
        self.owes_review = False

    # -- What every step shares.

    def told(self, release: bool, *, unless_nothing: bool = False) -> None:
        """`release` of a result. Where there was nothing to do, it may also stay silent."""
        assert type(release) is bool
        if unless_nothing:
            assert not release or self.model.is_due()
        else:
            assert release == self.model.is_due()
        self.is_awake = self.is_awake or release

    def noted_end(self, thing: Any, why: str, sent: bool) -> None:
        number = thing.number
        assert self.things[number]() is thing
        assert number not in self.ends, f"call {number} ended as {self.ends[number]}, and as {(why, sent)}"
        assert sent or number not in self.begun
        self.ends[number] = why, sent

    def take(self, got: list[tuple[Any, str, bool]], expected: list[End], *, in_order: bool = False) -> None:
        for thing, why, sent in got:
            self.noted_end(thing, why, sent)
        ended = [(thing.number, why, sent) for thing, why, sent in got]
        if in_order:
            assert ended == expected
        else:
            assert sorted(ended) == sorted(expected)

    def began(self, number: int) -> None:
        assert number not in self.ends
        assert number not in self.begun
        self.begun.add(number)
        # Everything here is made on one thread.
        assert number > self.last_begun, "overtaken"
        self.last_begun = number

    def ticket_of(self, entries: list[Entry], pick: int) -> int:
        return entries[pick % len(entries)].ticket

    def past_ticket(self, pick: int) -> int:
        """One that has had its end, or never was."""
        past = [one for one in self.tickets if self.model.find(one) is None and one not in self.model.kept]
        # Calls of late are more likely to share their entry with one that lives.
        return past[-1 - pick % len(past)] if past else 1 + pick

    # -- Calls.

    @initialize(calls=st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 0]), st.booleans(), on_pending), max_size=6))
    def have_a_line(self, calls: list[tuple[int, bool, str]]) -> None:
        """Some calls to begin with. Chance alone seldom makes a line that is long enough to get out of order."""
        for window, wait_while_away, pending in calls:
            self.admit("never", window, 1000, wait_while_away, pending)

    @rule(
        when=st.sampled_from(["never", "never", "an hour", "two hours", "soon", "past"]),
        window=st.sampled_from([0, 1, 2, 3, 5]),
        max_queued=st.sampled_from([1000, 1000, 1000, 0, 1, 3]),
        wait_while_away=st.sampled_from([True, True, False]),
        on_pending=on_pending,
        is_ready=st.sampled_from([True, True, True, False]),
    )
    def admit(
        self, when: str, window: int, max_queued: int, wait_while_away: bool, on_pending: str, is_ready: bool = True
    ) -> None:
        thing = Thing(len(self.things))
        thing._actorsub_unready = not is_ready
        while True:
            now_ns = _core.now_ns()
            deadline_ns = {
                "never": NEVER_NS,
                "an hour": now_ns + HOUR_NS,
                "two hours": now_ns + 2 * HOUR_NS,
                "soon": now_ns + SOON_NS,
                "past": now_ns - HOUR_NS,
            }[when]
            rules = Rules(deadline_ns, window, max_queued, wait_while_away, on_pending)
            expected = self.model.verdict(rules, is_late=when == "past")
            number, release = self.queue.admit(
                thing, deadline_ns, window, max_queued, wait_while_away, _core.PENDING_RULES[on_pending]
            )
            verdict = VERDICTS[number]
            if when != "soon" or verdict == expected:
                break
            # This thread was kept from running for so long.
            assert verdict == "expired"
            assert _core.now_ns() >= deadline_ns
            self.model.refuse("expired")
        while when == "soon" and _core.now_ns() < deadline_ns:
            pass
        assert verdict == expected
        if verdict not in ("send", "wait"):
            self.model.refuse(verdict)
            assert not release
            assert thing._actorsub_ticket == 0
            return
        ticket = thing._actorsub_ticket
        assert ticket != 0
        assert ticket not in self.tickets
        self.things.append(weakref.ref(thing))
        self.tickets.append(ticket)
        entry = self.model.admit(thing.number, ticket, rules, sends=verdict == "send")
        assert thing._actorsub_mark == entry.mark
        if verdict == "send":
            thing._actorsub_unready = False
            self.began(thing.number)
            assert not release
        else:
            self.told(release)
            if not is_ready:
                self.unready[thing.number] = thing

    @precondition(lambda self: self.model.verdict(Rules(NEVER_NS, 3, 0, False, "submit"), is_late=False) == "send")
    @rule(count=st.integers(1, 3), is_told=st.booleans())
    def be_overdue_in_flight(self, count: int, is_told: bool) -> None:
        """Their users have their end, and their places are still taken: of that state most that follows is about."""
        for _ in range(count):
            self.admit("soon", 3, 0, False, "submit")
        if is_told:
            self.expire()

    @precondition(lambda self: self.unready)
    @rule(pick=picks)
    def make_ready(self, pick: int) -> None:
        """Also of a call that has had its end meanwhile."""
        thing = self.unready.pop(list(self.unready)[pick % len(self.unready)])
        thing._actorsub_unready = False
        if self.queue.is_stalled:
            self.queue.is_stalled = False
            self.is_awake = True

    @rule(pick=picks, is_withdrawn=st.booleans())
    def cancel(self, pick: int, is_withdrawn: bool) -> None:
        ticket = self.tickets[-1 - pick % len(self.tickets)] if self.tickets else 1 + pick
        expected = self.model.cancel(ticket, is_withdrawn=is_withdrawn)
        thing = self.queue.calls.get(ticket)
        taken_back, release = self.queue.cancel(ticket)
        assert taken_back is expected
        self.told(release, unless_nothing=not taken_back)
        if taken_back:
            # As calls.py does, where it was not the user.
            self.queue.withdrawn += is_withdrawn
            self.noted_end(thing, "cancelled", False)

    # -- The sender.

    @rule(most=st.sampled_from([1, 2, 3, 64]))
    def release(self, most: int) -> None:
        expected_tickets, expected_ended = self.model.release(most)
        tickets, ended = self.queue.release(most)
        assert tickets == expected_tickets
        self.take(ended, expected_ended, in_order=True)
        self.batch = tickets
        self.is_awake = bool(tickets)
        if not tickets:
            assert not self.model.is_due()

    def ask_to_begin(self, ticket: int) -> None:
        was_stalled = self.queue.is_stalled
        thing = self.queue.calls.get(ticket)
        got = self.queue.begin_send(ticket)
        if thing is not None and thing.number in self.unready:
            assert got is False
            assert self.queue.is_stalled
            # Its turn ends here; whoever makes the call ready has it begin anew.
            self.is_awake = False
            return
        assert self.queue.is_stalled == was_stalled
        verdict = self.model.begin_send(ticket)
        if verdict == "go":
            assert got is thing
            entry = self.model.find(ticket)
            assert entry is not None
            assert got.number == entry.number
            assert got._actorsub_mark == entry.mark
            self.began(got.number)
        else:
            assert got is (False if verdict == "back" else None)

    @precondition(lambda self: self.batch)
    @rule(ends=st.booleans())
    def begin_next(self, ends: bool) -> None:
        ticket = self.batch.pop(0)
        self.ask_to_begin(ticket)
        if ends:
            self.end_send(ticket)

    @precondition(lambda self: not self.model.is_at_work() and self.model.state in ("unknown", "alive"))
    @rule(begun=st.integers(0, 3))
    def be_stopped_in_a_turn(self, begun: int) -> None:
        """The steps to come find some calls taken out of the line, and the last that began still on its way to Ray."""
        if not self.model.line():
            # One that goes; the next waits for its place, and others wait behind that one.
            self.admit("never", 0, 1000, True, "submit")
            window = self.model.in_flight()
            for one in (window, 0, 0):
                self.admit("never", one, 1000, True, "submit")
            if self.model.entries:
                self.have_completed(self.model.begun()[-1].ticket)
        self.release(64)
        for _ in range(min(begun, len(self.batch))):
            self.begin_next(ends=False)

    @precondition(lambda self: len(self.batch) > 1)
    @rule()
    def begin_out_of_turn(self) -> None:
        self.ask_to_begin(self.batch.pop())

    @precondition(lambda self: self.model.sending)
    @rule(step=st.sampled_from(["end_send", "ask_to_begin"]), pick=picks)
    def ask_of_another(self, step: str, pick: int) -> None:
        """To end another send ends nothing: who comes now does not overtake the call that is being given to Ray. To
        begin another says that this one has been given, whatever the answer."""
        getattr(self, step)(self.past_ticket(pick))
        self.admit("never", 0, 1000, True, "submit")

    @precondition(lambda self: self.model.sending)
    @rule()
    def release_amid_a_send(self) -> None:
        """Which ends the send: the sender is elsewhere by now."""
        self.release(64)

    @precondition(lambda self: self.model.entries)
    @rule(pick=picks)
    def begin_any(self, pick: int) -> None:
        self.ask_to_begin(self.ticket_of(self.model.entries, pick))

    def end_send(self, ticket: int) -> None:
        self.model.end_send(ticket)
        self.queue.end_send(ticket)

    @precondition(lambda self: self.model.sending)
    @rule()
    def end_this_send(self) -> None:
        self.end_send(self.model.sending)

    # -- Outcomes.

    def have_completed(self, ticket: int) -> None:
        is_known = self.model.find(ticket) is not None
        was_noted = self.model.complete(ticket)
        thing, release = self.queue.complete(ticket)
        self.told(release, unless_nothing=not is_known)
        assert (thing is not None) == was_noted
        if thing is not None:
            assert thing._actorsub_ticket == ticket
            self.noted_end(thing, "completed", True)
        else:
            # As calls.py does.
            self.queue.late += 1
            self.model.counts["late"] += 1

    @precondition(lambda self: self.model.begun())
    @rule(pick=picks)
    def complete(self, pick: int) -> None:
        self.have_completed(self.ticket_of(self.model.begun(), pick))

    @precondition(lambda self: self.model.kept)
    @rule(pick=picks)
    def complete_kept(self, pick: int) -> None:
        self.have_completed(list(self.model.kept)[pick % len(self.model.kept)])

    @precondition(lambda self: any(one.noted for one in self.model.begun()))
    @rule(pick=picks)
    def hand_out(self, pick: int) -> None:
        """A stream is its call's outcome as soon as it was sent; its place is taken until its task has ended."""
        entries = [one for one in self.model.begun() if one.noted]
        entry = entries[pick % len(entries)]
        entry.noted = False
        self.noted_end(self.queue.calls.pop(entry.ticket), "handed out", True)

    def have_aborted(self, ticket: int) -> None:
        was_noted = self.model.abort(ticket)
        thing, release = self.queue.abort(ticket)
        self.told(release)
        assert (thing is not None) == was_noted
        if thing is not None:
            assert thing._actorsub_ticket == ticket
            self.noted_end(thing, "aborted", True)

    @precondition(lambda self: self.model.begun())
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.have_aborted(self.ticket_of(self.model.begun(), pick))

    @precondition(lambda self: self.model.sending)
    @rule()
    def abort_this_send(self) -> None:
        """Also where the call has been completed meanwhile, or its deadline has passed."""
        ticket = self.model.sending
        if ticket not in self.model.kept:
            self.have_aborted(ticket)

    @rule(step=st.sampled_from(["ask_to_begin", "end_send", "have_completed", "have_aborted"]), pick=picks)
    def come_late(self, step: str, pick: int) -> None:
        getattr(self, step)(self.past_ticket(pick))

    # -- The watcher.

    @rule()
    def expire(self) -> None:
        expected = self.model.expire()
        ended, release = self.queue.expire()
        self.take(ended, expected)
        self.told(release)
        assert self.queue.unset_timer_ns == self.model.earliest_ns()
        # As where the sentinel was started anew.
        self.queue.unset_timer_ns = NEVER_NS
        self.queue.arm()
        assert self.queue.unset_timer_ns == self.model.earliest_ns()

    @rule()
    def review(self) -> None:
        expected = self.model.review()
        ended, release = self.queue.review()
        self.take(ended, expected)
        self.owes_review = False
        self.told(release)

    @rule(keeps=st.integers(0, 15))
    def fail_lost(self, keeps: int) -> None:
        calls = [
            thing
            for i, thing in enumerate(self.queue.calls.values())
            if thing.number in self.begun and keeps >> i % 4 & 1
        ]
        expected = self.model.fail_lost({thing.number for thing in calls})
        ended, release = self.queue.fail_lost(set(calls))
        self.take(ended, expected)
        self.told(release)

    @precondition(lambda self: self.model.state == "alive" and any(one.ended for one in self.model.begun()))
    @rule(keeps=st.integers(0, 15))
    def lose_what_is_overdue(self, keeps: int) -> None:
        self.lose()
        self.fail_lost(keeps)

    # Not earlier: nothing much happens afterwards.
    @precondition(lambda self: len(self.tickets) > 8)
    @rule()
    def close(self) -> None:
        expected = self.model.close()
        self.take(self.queue.close(), expected)

    # -- What holds after each of them.

    @invariant()
    def is_as_the_model(self) -> None:
        model, queue = self.model, self.queue
        assert queue.counters() == model.counters()
        assert queue.has_waiting() == bool(model.line())
        assert queue.has_lost() == model.has_lost()
        noted = {one.ticket: one.number for one in model.entries if one.noted}
        assert {ticket: thing.number for ticket, thing in queue.calls.items()} == noted | model.kept
        assert queue.unset_timer_ns <= model.earliest_ns()

    @invariant()
    def calls_live_until_their_end(self) -> None:
        for number, reference in enumerate(self.things):
            if number not in self.unready:
                assert (reference() is None) == (number in self.ends), f"call {number}"

    @invariant()
    def the_sender_is_told(self) -> None:
        will_be = self.owes_review or self.queue.is_stalled
        assert self.is_awake or will_be or not self.model.is_due(), "the head could leave, and nobody was told"

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            # A step has failed: that is what there is to tell, and its traceback keeps calls alive.
            return
        self.close()
        for ticket in list(self.model.kept):
            self.have_completed(ticket)
        self.is_as_the_model()
        assert len(self.queue.calls) == 0
        assert self.ends.keys() == set(range(len(self.things)))
        counts = self.queue.counters()
        assert counts["waiting"] == counts["in_flight"] == 0
        self.unready.clear()
        self.calls_live_until_their_end()
        number = self.queue.number
        assert _core.queue_of_timer(number) is self.queue
        del self.queue
        assert _core.queue_of_timer(number) is None


class LineMachine(Machine):
    """A queue without an actor, as a group's is."""

    def make_queue(self) -> Any:
        return _core.CallQueue()

    def lose(self) -> None:
        self.set_open(False)

    @rule(is_open=st.booleans())
    def set_open(self, is_open: bool) -> None:
        state = "alive" if is_open else "restarting"
        self.model.losses += self.model.state == "alive" != state
        self.model.state = state
        self.queue.set_open(is_open)
        self.owes_review = True


class ActorId:
    def __init__(self) -> None:
        self.key = os.urandom(16)

    def binary(self) -> bytes:
        return self.key


class ActorMachine(Machine):
    """A queue of an actor that goes through all its states."""

    def make_queue(self) -> Any:
        # The session of now, whatever ran before: another one would have every later actor get a registry of its own.
        self.actor = _core.actor_of(ActorId(), _ray_compat.session_token())
        return _core.CallQueue(self.actor)

    def lose(self) -> None:
        self.move("restarting")

    @rule(to=st.sampled_from(["alive", "alive", "unreachable", "restarting", "pending", "dead"]))
    def move(self, to: str) -> None:
        """By evidence that is believed at once; not at all where there is no way."""
        state = self.model.state
        incarnation = self.actor.belief()[2] or 0
        if to == "alive" and state == "unreachable":
            self.actor.apply("silence", "alive", incarnation)
        elif to == "alive":
            self.actor.apply("table", "alive", incarnation + (state == "dead"))
        elif to == "unreachable" and state == "alive":
            self.actor.apply("silence", "unreachable", incarnation)
        elif to == "restarting" and state != "dead":
            self.actor.apply("process", "restarting", incarnation)
        elif to == "pending" and state == "unknown":
            self.actor.apply("table", "pending", incarnation)
        elif to == "dead":
            self.actor.apply("call", "dead")
        else:
            return
        self.model.losses += state in ("alive", "unreachable") and to in ("restarting", "dead")
        self.model.state = to
        self.owes_review = True

    @precondition(lambda self: self.model.state == "unknown")
    @rule(refused=st.integers(1, 3))
    def be_pending_after_all(self, refused: int) -> None:
        """The one state that refuses some in the line and lets others leave; chance seldom has both wait for it."""
        for _ in range(1 + refused):
            self.admit("never", 1, 1000, True, "fail")
        self.admit("never", 0, 1000, True, "submit")
        self.move("pending")
        self.review()

    @invariant()
    def state_is_as_meant(self) -> None:
        assert self.actor.state_name == self.model.state
        assert self.actor.losses() == self.model.losses


@pytest.fixture(autouse=True)
def _nobody_else_acts() -> Iterator[None]:
    """The watcher would expire calls as soon as it is time; without the sentinel the queue keeps its own timer."""
    actorsub.shutdown()
    yield
    assert not _core.sentinel_runs()


# Making a failure small may take minutes.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("machine", [LineMachine, ActorMachine])
def test_as_the_model(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
    )


def take_one_out(machine: Machine, *, wait_while_away: bool) -> int:
    """Has one call in flight, and one taken out of the line."""
    machine.admit("never", 0, 1000, True, "submit")
    machine.admit("never", 1, 1000, wait_while_away, "submit")
    machine.have_completed(machine.tickets[0])
    machine.release(1)
    (ticket,) = machine.batch
    return ticket


def test_what_is_out_is_refused_as_what_waits() -> None:
    """Two walks that chance may miss: here, and below."""
    machine = LineMachine()
    ticket = take_one_out(machine, wait_while_away=False)
    machine.set_open(False)
    machine.review()
    assert machine.ends[1] == ("away", False)
    machine.ask_to_begin(ticket)
    machine.is_as_the_model()
    machine.teardown()


def test_only_its_own_end_ends_a_send() -> None:
    machine = LineMachine()
    ticket = take_one_out(machine, wait_while_away=True)
    machine.ask_to_begin(ticket)
    machine.end_send(machine.tickets[0])
    machine.admit("never", 0, 1000, True, "submit")
    machine.is_as_the_model()
    assert machine.queue.has_waiting()
    machine.end_send(ticket)
    machine.release(1)
    machine.begin_next(ends=True)
    machine.teardown()


def test_a_flood_leaves_nothing_behind() -> None:
    """More calls than the queue keeps entries for, and many times the deadlines that it lets lie dead: taken back in
    any order, then the same queue once more, whose tickets are new ones in used places."""
    count = 4000
    chance = random.Random(20261130)
    queue = _core.CallQueue()
    queue.set_open(False)
    past: list[int] = []
    for _ in range(2):
        things = [Thing(number) for number in range(count)]
        earliest_ns = _core.now_ns() + HOUR_NS
        deadlines = [earliest_ns + chance.randrange(HOUR_NS) for _ in things]
        for thing, deadline_ns in zip(things, deadlines, strict=True):
            verdict, release = queue.admit(thing, deadline_ns, 0, count, True, _core.PENDING_RULES["submit"])
            assert (VERDICTS[verdict], release) == ("wait", False)
        tickets = [thing._actorsub_ticket for thing in things]
        assert len({*tickets, *past}) == len(tickets) + len(past)
        assert VERDICTS[queue.admit(Thing(-1), NEVER_NS, 0, count, True, 0)[0]] == "full"
        order = list(range(count))
        chance.shuffle(order)
        for number in order[:-10]:
            assert queue.cancel(tickets[number]) == (True, False)
        assert queue.expire() == ([], False)
        assert queue.unset_timer_ns == min(deadlines[number] for number in order[-10:])
        for ticket in chance.sample(past, min(len(past), 100)):
            assert queue.cancel(ticket) == (None, False)
            assert queue.begin_send(ticket) is None
        # The others leave in the order in which they came.
        queue.set_open(True)
        assert queue.review() == ([], True)
        released, ended = queue.release(count)
        assert ended == []
        assert released == [tickets[number] for number in sorted(order[-10:])]
        for ticket in released:
            assert queue.begin_send(ticket)._actorsub_ticket == ticket
            queue.end_send(ticket)
            assert queue.complete(ticket)[0]._actorsub_ticket == ticket
        assert queue.calls == {}
        queue.set_open(False)
        past += tickets
    assert queue.counters()["waiting"] == queue.counters()["in_flight"] == 0


def test_calls_go_with_their_queue() -> None:
    queue = _core.CallQueue()
    sent, waits = Thing(0), Thing(1)
    for thing in (sent, waits):
        queue.admit(thing, NEVER_NS, 1, 1, True, _core.PENDING_RULES["submit"])
    assert list(queue.calls.values()) == [sent, waits]
    references = [weakref.ref(sent), weakref.ref(waits)]
    del sent, waits, thing
    assert all(reference() is not None for reference in references)
    del queue
    assert all(reference() is None for reference in references)
