"""What the gate adds to a call that passes it: `.remote()` of a live actor, wrapped against plain, and what Ray's core
takes of it.

Call by call in turns in one process. A sample is the median over one turn of 30 calls each (for the attribute, the
mean of 1000); the ratio is the median of the ratios within a turn. A submission hands over to threads of Ray, so single
times scatter by tens of percent.

Two ways of calling: alone, each call after the answer of the one before, which is what a submission costs; and in
bursts, all calls of a turn at once, where whoever submits faster than Ray's own threads send waits for them, for a
core or for a lock, and so pays with waiting what it saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import ratios

pytestmark = pytest.mark.timeout(240)

SHAPES = [
    "no arguments",
    "one positional",
    "two, one by keyword",
    "a string of 1 kB",
    "no arguments, method kept",
]
OTHERS = [
    "1 MB of bytes",
    "a list of 100 floats",
    "the handle itself",
    "an empty set",
    "*args, **kwargs",
    ".options(name=)",
    "two return values",
    "no return value",
    "a generator",
    "a ref",
]
ROWS = [
    *((way, shape) for way in ("alone", "burst") for shape in SHAPES),
    *(("other", shape) for shape in OTHERS),
    ("alone", "attribute h.ping"),
    ("alone", "letting go of the ref"),
]
CASES = [
    *((way, shape, name) for way, shape in ROWS for name in ("plain", "wrapped")),
    *(("alone", shape, "core") for shape in SHAPES[:4]),
]


@pytest.fixture(scope="module")
def samples(measure: Callable[..., dict[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    return measure("submit", timeout_s=200)["samples"]


@pytest.mark.parametrize(("way", "shape", "name"), CASES, ids=lambda part: part)
def test_submit(
    samples: dict[str, dict[str, dict[str, list[float]]]],
    way: str,
    shape: str,
    name: str,
    record: Callable[..., None],
) -> None:
    found = samples[way][shape]
    record(
        f"submit {way}, {shape}",
        f"{shape}, {way}: {name}",
        found[name],
        way=way,
        shape=shape,
        key=name,
        **ratios(found[name], found["plain"]),
    )
