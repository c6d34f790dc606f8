"""The one decision that every way to an actor shares (csrc/gate.h), and that every way takes it alike."""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers import Restartable, wait_for_state, wait_until, wait_until_watched

import actorsub
from actorsub import ActorState, _core, submit

WISHES = ("ref", "raise", "wait", "ray")
PENDING = ("submit", "fail", "wait")

#: state -> for each wish: what becomes of a call; None: what `on_pending` says.
TABLE: dict[str, tuple[str | None, ...]] = {
    "unknown": ("pass", "pass", "pass", "pass"),
    "alive": ("pass", "pass", "pass", "pass"),
    "pending": (None, None, None, None),
    "restarting": ("refuse", "refuse", "hold", "pass"),
    "unreachable": ("refuse", "refuse", "hold", "pass"),
    "dead": ("refuse", "refuse", "refuse", "pass"),
}
BY_PENDING = {"submit": "pass", "fail": "refuse", "wait": "hold"}


def test_the_table() -> None:
    assert set(TABLE) == {state.value for state in ActorState}
    for (state, row), on_pending in itertools.product(TABLE.items(), PENDING):
        for wish, expected in zip(WISHES, row, strict=True):
            assert _core.gate(state, wish, on_pending) == (expected or BY_PENDING[on_pending]), (
                state,
                wish,
                on_pending,
            )


@pytest.mark.parametrize("arguments", [("up", "ref", "fail"), ("alive", "auto", "fail"), ("alive", "ref", "later")])
def test_what_is_no_state_or_rule_is_refused(arguments: tuple[str, str, str]) -> None:
    with pytest.raises((KeyError, ValueError)):
        _core.gate(*arguments)


class Late:
    """Its constructor waits for a file."""

    def __init__(self, gate: str) -> None:
        wait_until(pathlib.Path(gate).exists, 120)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def in_state(ray_local: None, tmp_path: pathlib.Path) -> Iterator[Callable[[str], actorsub.ActorHandle]]:
    """Makes an actor that is in a state, and stays in it."""
    ends: list[Callable[[], object]] = []
    options: dict[str, Any] = {"max_task_retries": 1, "silence_timeout_s": 0.3, "silence_in_flight_s": 0.3}

    def make(state: str) -> actorsub.ActorHandle:
        if state == "pending":
            gate = tmp_path / "late"
            ends.append(gate.touch)
            late = actorsub.remote(num_cpus=0, **options)(Late).remote(str(gate))
            wait_for_state(late, ActorState.PENDING)
            return late
        one = Restartable(tmp_path, **options)
        ends.append(one.let_restart)
        wait_until_watched(one.handle)
        if state == "restarting":
            one.kill()
        elif state == "unreachable":
            os.kill(one.pid, signal.SIGSTOP)
            ends.append(lambda: os.kill(one.pid, signal.SIGCONT))
        elif state == "dead":
            ray.kill(one.handle)
        wait_for_state(one.handle, ActorState(state))
        return one.handle

    yield make
    for end in ends:
        end()


def way_of_remote(handle: actorsub.ActorHandle, take: Callable[[], Any]) -> str:
    """What became of a call by `take`, from the counters of the gate."""
    before = actorsub.stats(handle)
    try:
        take()
    except actorsub.DeadlineExceededError as error:
        assert not error.sent
        return "hold"
    except (actorsub.ActorUnavailableError, actorsub.ActorDiedError) as error:
        assert not error.sent
    after = actorsub.stats(handle)
    passed = after["submitted"] - before["submitted"]
    refused = sum(after["refused"].values()) - sum(before["refused"].values())
    assert passed + refused == 1, (before, after)
    return "pass" if passed else "refuse"


def way_of_call(method: Any) -> str:
    """What became of a `.call()`."""
    try:
        call = method.call()
    except (actorsub.ActorUnavailableError, actorsub.ActorDiedError) as error:
        assert not error.sent
        return "refuse"
    if call.object_ref is not None:
        return "pass"
    if call.done():
        assert call.exception().sent is False
        return "refuse"
    assert call.cancel()
    return "hold"


@pytest.mark.parametrize("state", [state for state in TABLE if state != "unknown"])
def test_every_way_to_an_actor_decides_alike(state: str, in_state: Callable[[str], actorsub.ActorHandle]) -> None:
    handle = in_state(state)
    decided: dict[Any, str] = {}
    for wish, on_pending in itertools.product(WISHES, PENDING):
        policy = {"on_unavailable": "auto" if wish == "ray" else wish, "on_pending": on_pending}
        method = handle.pid.options(timeout_s=0.1, **policy)
        # Natively, where the fast path decides; and by what it leaves the rest to.
        decided[wish, on_pending, ".remote()"] = way_of_remote(handle, method.remote)
        slowly = way_of_remote(handle, lambda method=method: submit.submit_slowly(method, (), {}))
        decided[wish, on_pending, "slowly"] = slowly
        decided[wish, on_pending, ".call()"] = way_of_call(handle.pid.options(**policy))
        assert actorsub.state(handle) is ActorState(state)
    for (wish, on_pending, way), got in decided.items():
        # A `.call()` is never Ray's to resend.
        expected = _core.gate(state, "ref" if way == ".call()" and wish == "ray" else wish, on_pending)
        if state == "dead" and wish == "ref" and way != ".call()":
            # Ray refuses it as fast, and knows the cause.
            expected = "pass"
        assert got == expected, (wish, on_pending, way)
