"""The campaign's own judgement: what it has to find in a ledger and what it must not, and that its seed decides."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import random
from collections.abc import Iterable

import pytest
from campaign import book, disturbances
from campaign.__main__ import parse

LAST_S = 100.0
MARGIN_S = 1.0


def told(number: int, **changes: object) -> book.Told:
    one = book.Told(f"t-{number}", "call", "a", begun_s=1.0, due_s=2.0, end="value", ended_s=1.5)
    return dataclasses.replace(one, **changes)


class Books:
    """Both books as files, as the campaign's processes write them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory

    def run(self, call_id: str, actor: str = "a", pid: int = 7, at_s: float = 1.2) -> None:
        self.line(actor, f"{call_id} {pid} {at_s:.6f}\n")

    def line(self, actor: str, text: str) -> None:
        self._append(f"{actor}.ledger", text.encode())

    def check(self, calls: Iterable[book.Told]) -> list[book.Violation]:
        for one in calls:
            self._append("told.jsonl", one.to_line())
        runs, unreadable = book.read_ledgers(self.directory)
        return unreadable + book.check(book.read_told(self.directory / "told.jsonl"), runs, LAST_S, MARGIN_S)

    def _append(self, name: str, line: bytes) -> None:
        descriptor = os.open(self.directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        book.append(descriptor, line)
        os.close(descriptor)


@pytest.fixture
def books(tmp_path: pathlib.Path) -> Books:
    return Books(tmp_path)


def test_nothing_is_found_where_nothing_is_wrong(books: Books) -> None:
    calls = [
        told(0),
        told(1, end="refused", may_have_run=False),
        told(2, end="lost"),
        told(3, end="lost"),
        told(4, end="deadline", ended_s=2.9),
        told(5, end="taken back", may_have_run=False, due_s=None, ended_s=99.0),
        told(6, may_repeat=True),
    ]
    for ran in (0, 3, 4, 6):
        books.run(f"t-{ran}")
    books.run("t-6", actor="b")
    assert books.check(calls) == []


@pytest.mark.parametrize(
    ("promise", "call", "runs"),
    [
        ("no lie", told(0, end="refused", may_have_run=False), 1),
        ("no lie", told(0, end="taken back", may_have_run=False), 1),
        ("nothing runs twice", told(0), 2),
        ("nothing runs twice", told(0, end="lost"), 2),
        ("no answer without a run", told(0), 0),
        ("every call ends in time", told(0, ended_s=3.1), 1),
        ("every call ends in time", told(0, due_s=None, end="lost", ended_s=100.1), 0),
        ("every call ends as it should", told(0, end="nothing", ended_s=None), 0),
        ("every call ends as it should", told(0, end="wrong value"), 1),
        ("every call ends as it should", told(0, end="surprise"), 1),
        ("the ledger is whole", told(0, end="something new"), 1),
    ],
)
def test_each_broken_promise_is_found(books: Books, promise: str, call: book.Told, runs: int) -> None:
    for number in range(1, 50):
        books.run(f"t-{number}")
    for pid in range(runs):
        books.run(call.id, pid=pid)
    found = books.check([*[told(number) for number in range(1, 50)], call])
    assert [one.promise for one in found] == [promise]
    assert call.id in found[0].what


def test_a_call_that_is_missing_in_the_told_ones_is_found(books: Books) -> None:
    books.run("t-0")
    books.run("t-1")
    assert [one.promise for one in books.check([told(0)])] == ["the ledger is whole"]


def test_a_call_that_was_told_twice_is_found(books: Books) -> None:
    books.run("t-0")
    assert [one.promise for one in books.check([told(0), told(0)])] == ["the ledger is whole"]


def test_a_line_that_cannot_be_read_is_found(books: Books) -> None:
    books.run("t-0")
    books.line("a", "t-1 7\n")
    found = books.check([told(0)])
    assert [one.promise for one in found] == ["the ledger is whole"]
    assert "t-1 7" in found[0].what


def test_the_table_counts_what_cannot_have_run_apart(books: Books) -> None:
    calls = [told(0), told(1, end="deadline", may_have_run=False), told(2, end="deadline"), told(3, way="stream")]
    for number in (0, 2, 3):
        books.run(f"t-{number}")
    assert books.check(calls) == []
    runs, _ = book.read_ledgers(books.directory)
    rows = {line.split()[0]: line.split()[1:] for line in book.table(calls, runs).splitlines()}
    assert rows["call"][:3] == ["3", "2", "1"]
    assert "1 / 1" in " ".join(rows["call"])
    assert rows["all"][:3] == ["4", "3", "2"]


def test_the_seed_decides_the_schedule() -> None:
    for seed in (1, 2, random.getrandbits(32)):
        plan = disturbances.schedule(seed, 60, frozenset())
        assert plan == disturbances.schedule(seed, 60, frozenset())
        assert plan != disturbances.schedule(seed + 1, 60, frozenset())
        assert len(plan) > 10
        assert all(one.at_s + one.duration_s < 60 for one in plan)
        # What was left out stays out.
        rest = disturbances.schedule(seed, 60, frozenset({"kill", "stop"}))
        assert {one.kind for one in rest}.isdisjoint({"kill", "stop"})
    assert disturbances.schedule(1, 60, frozenset(disturbances.SHARES)) == []


def test_one_thing_at_a_time_happens_to_the_network() -> None:
    plan = [one for one in disturbances.schedule(1, 3600, frozenset()) if one.kind in disturbances.NETWORK]
    assert len(plan) > 50
    for before, after in itertools.pairwise(plan):
        assert after.at_s >= before.at_s + before.duration_s + disturbances.NETWORK_PAUSE_S


def test_an_unknown_disturbance_cannot_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--without", "kill,rst"]).without == "kill,rst"
    with pytest.raises(SystemExit):
        parse(["--without", "kil"])
    assert "not kil" in capsys.readouterr().err
