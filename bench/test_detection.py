"""How soon a caller knows that an actor went down, and what it costs to watch one that is up.

Signals are real. Each group of rows has a process and a local Ray of its own, in which stock Ray is measured in turns
with the rest. Takes under four minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conftest import percentile, ratios

pytestmark = pytest.mark.timeout(240)

#: Of each: two kills with a call in flight, one for the first refusal, and one of stock Ray's actor.
ROUNDS = 20
# (silence_timeout_s, silence_in_flight_s) -> how often. The first are the defaults.
LIMITS = {(3.0, 10.0): 2, (0.5, 1.0): 6, (0.5, 0.5): 6}


def spread(samples: Sequence[float]) -> dict[str, float]:
    return {"p50_ns": percentile(samples, 50), "p99_ns": percentile(samples, 99), "max_ns": max(samples)}


@pytest.fixture(scope="module")
def killed(measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return measure("in-flight", f"--rounds={ROUNDS}", timeout_s=200)


@pytest.mark.parametrize("variant", ["actorsub", "stock Ray"])
def test_in_flight(killed: dict[str, Any], variant: str, record: Callable[..., None]) -> None:
    samples = killed["samples"]["ours" if variant == "actorsub" else "rays"]
    name = f"in flight at SIGKILL, {variant}"
    record("detection, in flight", name, samples, key="in-flight", variant=variant, **spread(samples))


def test_process_exit(killed: dict[str, Any], record: Callable[..., None]) -> None:
    samples = killed["samples"]["exit"]
    record("detection, in flight", "SIGKILL: process exit", samples, key="exit", **spread(samples))


def test_first_refusal(killed: dict[str, Any], record: Callable[..., None]) -> None:
    samples = killed["samples"]["refusal"]
    name = "first refusal after SIGKILL"
    record("detection, refusal", name, samples, key="first-refusal", by=killed["evidence"], **spread(samples))


@pytest.fixture(scope="module")
def big(measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return measure("big-process", "--rounds=5", "--megabytes=1024")


@pytest.mark.parametrize("what", ["in flight", "process exit"])
def test_big_process(big: dict[str, Any], what: str, record: Callable[..., None]) -> None:
    samples = big["samples"][what]
    record("detection, 1 GB resident", f"1 GB resident, SIGKILL: {what}", samples, key="big", **spread(samples))


@pytest.fixture(scope="module")
def node(measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return measure("node-killed", "--rounds=5")


@pytest.mark.parametrize("what", ["refusal", "in flight", "in flight, stock Ray"])
def test_node(node: dict[str, Any], what: str, record: Callable[..., None]) -> None:
    samples = node["samples"][what]
    key = "node" if "stock" not in what else "node-stock"
    record("detection, node killed", f"node killed: {what}", samples, key=key, **spread(samples))


@pytest.fixture(scope="module", params=list(LIMITS), ids=lambda limits: f"{limits[0]}-{limits[1]}")
def stopped(request: pytest.FixtureRequest, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    silence_s, in_flight_s = request.param
    arguments = [f"--silence-s={silence_s}", f"--in-flight-s={in_flight_s}", f"--rounds={LIMITS[request.param]}"]
    return {"refusal": silence_s, "in flight": in_flight_s, **measure("frozen", *arguments)}


@pytest.mark.parametrize("what", ["refusal", "in flight"])
def test_frozen(stopped: dict[str, Any], what: str, record: Callable[..., None]) -> None:
    samples = stopped["samples"][what]
    name = f"SIGSTOP, limits {stopped['refusal']:g} and {stopped['in flight']:g} s: {what}"
    record("detection, frozen", name, samples, key="frozen", limit_s=stopped[what], **spread(samples))


@pytest.fixture(scope="module")
def alive(measure: Callable[..., dict[str, Any]]) -> dict[str, list[float]]:
    return measure("live", "--turns=200", "--calls=30")["samples"]


@pytest.mark.parametrize("variant", ["plain", "wrapped"])
def test_await_of_a_live_call(alive: dict[str, list[float]], variant: str, record: Callable[..., None]) -> None:
    name = f"await, {variant}"
    record("live await", name, alive[variant], key="live", variant=variant, **ratios(alive[variant], alive["plain"]))


def test_idle_handles(measure: Callable[..., dict[str, Any]], record: Callable[..., None]) -> None:
    found = measure("idle", "--actors=100", "--handles=10000", "--seconds=10", timeout_s=230)
    # One "sample": the CPU time that a second of watching costs.
    added = max(0.0, found["share_of_our_threads"])
    record("idle", "CPU time for a second of idling", [added * 1e9], key="idle", share_added=added, **found)
