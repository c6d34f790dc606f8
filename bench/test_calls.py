"""Requests: `.call()` against `await handle.method.remote()` of a plain handle; calls that wait in line.

In turns in one process. Ratios are medians of the ratios within a turn. Takes about a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import percentile, ratios

pytestmark = pytest.mark.timeout(240)

WAYS = ["plain", "call", "call, deadline and window", "group"]


@pytest.fixture(scope="module")
def one_by_one(measure: Callable[..., dict[str, Any]]) -> dict[str, list[float]]:
    return measure("call-round-trips", "--turns=60", "--calls=30")["samples"]


@pytest.mark.parametrize("way", WAYS)
def test_round_trip(one_by_one: dict[str, list[float]], way: str, record: Callable[..., None]) -> None:
    extra = ratios(one_by_one[way], one_by_one["plain"])
    record("calls, round trip", f"round trip: {way}", one_by_one[way], key="call-round-trip", way=way, **extra)


def test_group(one_by_one: dict[str, list[float]], record: Callable[..., None]) -> None:
    of_call = ratios(one_by_one["group"], one_by_one["call"])
    record("calls, group", "round trip: group, of call", one_by_one["group"], key="call-group", **of_call)


@pytest.fixture(scope="module")
def many(measure: Callable[..., dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    return measure("call-throughput", "--turns=12", "--calls=1024", timeout_s=200)["samples"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 64, 512])
def test_throughput(many: dict[str, dict[str, list[float]]], n: int, way: str, record: Callable[..., None]) -> None:
    both = many[str(n)]
    extra = ratios(both["plain"], both[way])
    record(f"calls, {n} in flight", f"{n} in flight: {way}", both[way], key="call-rate", n=n, way=way, **extra)


def test_waiting(measure: Callable[..., dict[str, Any]], record: Callable[..., None]) -> None:
    found = measure("call-waiting", "--line=10000", "--probes=300", "--kept=100000")
    late = found.pop("late")
    extra = {"p50_ns": percentile(late, 50), "p99_ns": percentile(late, 99), "max_ns": max(late), **found}
    record("calls, waiting", "lateness of a deadline, 10,000 calls wait", late, key="call-waiting", **extra)
