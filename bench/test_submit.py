"""What the gate adds to a call that passes it: `.remote()` of a live actor, wrapped against plain.

Call by call in turns in one process. A sample is the median over one turn of 30 calls each (for the attribute, the
mean of 1000); the ratio is the median of the ratios within a turn. A submission hands over to threads of Ray, so single
times scatter by tens of percent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import ratios

pytestmark = pytest.mark.timeout(180)

SHAPES = [
    "no arguments",
    "one positional",
    "two, one by keyword",
    "a string of 1 kB",
    "no arguments, method kept",
    "attribute h.ping",
]


@pytest.fixture(scope="module")
def samples(measure: Callable[..., dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    return measure("submit")["samples"]


@pytest.mark.parametrize("name", ["plain", "wrapped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_submit(samples: dict[str, dict[str, list[float]]], shape: str, name: str, record: Callable[..., None]) -> None:
    both = samples[shape]
    record(
        f"submit, {shape}",
        f"{shape}: {name}",
        both[name],
        shape=shape,
        key=name,
        **ratios(both[name], both["plain"]),
    )
