"""When the calls of a lost incarnation are failed, by a clock of the test's own. On real actors: test_inflight.py."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest

from actorsub.losses import DEATH_GRACE_S, EXIT_LIMIT_S, GRACE_S, LossWatch


class FakeActor:
    def __init__(self, state_name: str = "restarting", evidence: str = "process", process_id: int = 0) -> None:
        self.state_name = state_name
        self.row = None
        self.process_id = process_id
        self.count = 1
        self.evidence = evidence
        self.lost_calls = True

    def losses(self) -> int:
        return self.count

    def belief(self) -> tuple[str, str, int]:
        return self.state_name, self.evidence, 0


def look(watch: LossWatch, actor: Any, now_s: float, anybody: bool = True) -> tuple[bool, float]:
    return watch.look(actor, now_s, anybody, lambda asked: asked.lost_calls)


def test_calls_are_failed_once_their_grace_is_over() -> None:
    watch, actor = LossWatch(), FakeActor()
    assert look(watch, actor, 10.0) == (False, 10.0 + GRACE_S)
    assert look(watch, actor, 10.0 + GRACE_S / 2) == (False, 10.0 + GRACE_S)
    assert look(watch, actor, 10.0 + GRACE_S) == (True, math.inf)
    actor.lost_calls = False
    assert look(watch, actor, 10.1) == (False, math.inf)
    # The next incarnation.
    actor.count = 2
    assert look(watch, actor, 20.0) == (False, 20.0 + GRACE_S)
    assert look(watch, actor, 21.0) == (True, math.inf)


def test_who_begins_to_wait_later_has_what_is_left_of_the_grace() -> None:
    watch, actor = LossWatch(), FakeActor()
    assert look(watch, actor, 10.0, anybody=False) == (False, math.inf)
    assert look(watch, actor, 10.0 + GRACE_S / 2) == (False, 10.0 + GRACE_S)
    assert look(watch, actor, 11.0, anybody=False) == (False, math.inf)
    # All of it is over.
    assert look(watch, actor, 12.0) == (True, math.inf)


@pytest.mark.parametrize("evidence", ["ray", "table", "call"])
def test_an_actor_that_will_not_come_back_leaves_time_for_the_cause(evidence: str) -> None:
    watch, actor = LossWatch(), FakeActor("dead", evidence)
    assert look(watch, actor, 10.0) == (False, 10.0 + DEATH_GRACE_S)
    assert look(watch, actor, 10.0 + DEATH_GRACE_S) == (True, math.inf)


def test_a_process_that_is_not_gone_yet_is_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch, actor = LossWatch(), FakeActor("dead", "process", process.pid)
        now_s = 10.0
        is_due, again_s = look(watch, actor, now_s)
        for _ in range(5):
            assert not is_due
            assert again_s == pytest.approx(now_s + DEATH_GRACE_S)
            now_s = again_s
            is_due, again_s = look(watch, actor, now_s)
        process.communicate()
    # Once more, for Ray's error; then no longer.
    assert look(watch, actor, again_s) == (False, again_s + DEATH_GRACE_S)
    assert look(watch, actor, again_s + DEATH_GRACE_S) == (True, math.inf)


def test_a_process_that_never_goes_is_waited_for_until_the_limit() -> None:
    watch, actor = LossWatch(), FakeActor("dead", "process", os.getpid())
    now_s, rounds = 10.0, 0
    while True:
        is_due, again_s = look(watch, actor, now_s)
        if is_due:
            break
        now_s, rounds = again_s, rounds + 1
    assert EXIT_LIMIT_S <= now_s - 10.0 <= EXIT_LIMIT_S + 2 * DEATH_GRACE_S + 0.001
    assert rounds > 10
