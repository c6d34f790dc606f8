"""Asking for an actor's state: `actorsub.state(h)` against Ray's `h._get_local_state()`, in turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import ratios

pytestmark = pytest.mark.timeout(180)

OURS, RAYS = "actorsub.state(h)", "h._get_local_state()"


@pytest.fixture(scope="module")
def samples(measure: Callable[..., dict[str, Any]]) -> dict[str, list[float]]:
    return measure("state")["samples"]


@pytest.mark.parametrize("name", [OURS, RAYS])
def test_state(samples: dict[str, list[float]], name: str, record: Callable[..., None]) -> None:
    record("state", name, samples[name], key=name, **ratios(samples[name], samples[RAYS]))
