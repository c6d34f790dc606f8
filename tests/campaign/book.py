"""What callers were told, what ran, and whether the two agree. Plain Python: no Ray, no actorsub.

Actors append a line to a file when a method begins (`<id> <pid> <monotonic s>`); callers append one when a call has
ended (`Told` as JSON). Both are single writes with O_APPEND, so whatever is killed afterwards, what was written stays.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

#: What a call can end with, and the columns of the table.
ENDS = {
    "value": "answered",
    "application": "raised by the method",
    "refused": "refused or full",
    "lost": "lost",
    "deadline": "deadline",
    "cancelled": "cancelled there",
    "taken back": "taken back",
    "callback": "error of a user's function",
}
#: What no call may end with.
WRONG_ENDS = {
    "nothing": "has no end",
    "wrong value": "was answered with something else",
    "surprise": "ended with an error that nothing explains",
}


@dataclasses.dataclass
class Told:
    """One call, as its caller knows it."""

    id: str
    way: str
    actor: str  #: name of the actor or group
    begun_s: float  #: all times on the clock of time.monotonic(), which is one for all processes of the machine
    due_s: float | None = None  #: when it has to have ended; None: by the end of the run
    end: str = "nothing"
    ended_s: float | None = None
    may_have_run: bool = True
    may_repeat: bool = False  #: resending it is allowed
    detail: str = ""

    def to_line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


class Run(NamedTuple):
    """One beginning of a method."""

    actor: str
    pid: int
    at_s: float


class Violation(NamedTuple):
    promise: str
    what: str


def append(descriptor: int, line: bytes) -> None:
    written = os.write(descriptor, line)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")


def read_told(path: pathlib.Path) -> list[Told]:
    return [Told(**json.loads(line)) for line in path.read_text().splitlines()]


def read_ledgers(directory: pathlib.Path) -> tuple[dict[str, list[Run]], list[Violation]]:
    """Every run by its call's id; and lines that cannot be read, since nothing may be overlooked."""
    runs: dict[str, list[Run]] = collections.defaultdict(list)
    unreadable = []
    for path in sorted(directory.glob("*.ledger")):
        for line in path.read_text().splitlines():
            parts = line.split()
            try:
                call_id, pid, at_s = parts
                runs[call_id].append(Run(path.stem, int(pid), float(at_s)))
            except ValueError:
                unreadable.append(Violation("the ledger is whole", f"{path.name}: {line!r}"))
    return dict(runs), unreadable


def check(told: Iterable[Told], runs: dict[str, list[Run]], last_s: float, margin_s: float) -> list[Violation]:
    """Compares the two.

    Args:
        told: every call that was made, ended or not.
        runs: as from `read_ledgers`.
        last_s: when a call without a deadline has to have ended.
        margin_s: how late a deadline may be.
    """
    found = []
    seen: set[str] = set()
    for one in told:
        name = f"{one.id} ({one.way}, {one.actor}, begun at {one.begun_s:.3f}, {one.end}"
        name += f" at {one.ended_s:.3f})" if one.ended_s is not None else ")"
        if one.detail:
            name += f" [{one.detail}]"
        if one.id in seen:
            found.append(Violation("the ledger is whole", f"{name} was told twice"))
        seen.add(one.id)
        ran = runs.get(one.id, [])
        where = ", ".join(f"{run.actor} pid {run.pid} at {run.at_s:.3f}" for run in ran)
        if not one.may_have_run and ran:
            found.append(Violation("no lie", f"{name} cannot have run, it was said, and ran: {where}"))
        if len(ran) > 1 and not one.may_repeat:
            found.append(Violation("nothing runs twice", f"{name} ran {len(ran)} times: {where}"))
        if one.end == "value" and not ran:
            found.append(Violation("no answer without a run", name))
        if one.end in WRONG_ENDS:
            found.append(Violation("every call ends as it should", f"{name} {WRONG_ENDS[one.end]}"))
        elif one.end not in ENDS:
            found.append(Violation("the ledger is whole", f"{name} has an end that is none"))
        limit_s = last_s if one.due_s is None else one.due_s + margin_s
        if one.ended_s is not None and one.ended_s > limit_s:
            found.append(Violation("every call ends in time", f"{name} ended {one.ended_s - limit_s:.3f} s after that"))
    for call_id in runs.keys() - seen:
        found.append(Violation("the ledger is whole", f"{call_id} ran and was never told: {runs[call_id]}"))
    return found


def latest_s(told: Iterable[Told]) -> float:
    """How late a deadline was at most."""
    return max([0.0, *[one.ended_s - one.due_s for one in told if one.ended_s and one.due_s]])


def table(told: Iterable[Told], runs: dict[str, list[Run]]) -> str:
    """By way: how many calls, and what became of them; `x / y`: cannot have run / may have run."""
    rows: dict[str, collections.Counter[tuple[str, bool]]] = {}
    ran: collections.Counter[str] = collections.Counter()
    for one in told:
        rows.setdefault(one.way, collections.Counter())[one.end, one.may_have_run] += 1
        ran[one.way] += bool(runs.get(one.id))
    ends = [*ENDS, *[end for end in WRONG_ENDS if any(row[end, True] + row[end, False] for row in rows.values())]]
    total: collections.Counter[tuple[str, bool]] = sum(rows.values(), collections.Counter())
    ran["all"] = sum(ran.values())
    lines = [["way", "calls", "ran", *[ENDS.get(end, end) for end in ends]]]
    for way, row in [*sorted(rows.items()), ("all", total)]:
        cells = [way, f"{sum(row.values()):,}", f"{ran[way]:,}"]
        for end in ends:
            unsent, sent = row[end, False], row[end, True]
            if end in ("value", "application"):
                cells.append(f"{unsent + sent:,}")
            else:
                cells.append(f"{unsent:,} / {sent:,}" if unsent or sent else "0")
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines]  # fmt: skip
    text.insert(1, "-" * len(text[0]))
    text.insert(-1, text[1])
    return "\n".join(text)
