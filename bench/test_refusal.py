"""A call to an actor that restarts: what it costs until the caller knows.

Two processes, since tuned Ray is Ray with another environment. In each, Ray itself, actorsub and the plain-Python rival
are measured in turns against the same actor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

RAY = {"default": "stock Ray", "tuned": "tuned Ray"}
CONTENDERS = {
    "raise": ("actorsub raise", None),
    "raise-kept": ("actorsub raise, method kept", None),
    "rival": ("plain-Python rival", None),
    "rival-kept": ("plain-Python rival, method kept", None),
    "ref-submit": ("actorsub ref submit", None),
    "ref-outcome": ("actorsub ref outcome", None),
    "ray-submit": ("Ray submit", "submit"),
    "ray-outcome": ("Ray outcome", "outcome"),
    "interpreter": ("[].pop() raising", None),
    "loop": ("loop", None),
}


@pytest.fixture(scope="module", params=list(RAY))
def refusal(request: pytest.FixtureRequest, measure: Callable[..., dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    tuned = request.param == "tuned"
    return request.param, measure("refusal", *(["--tuned"] if tuned else []), tuned=tuned, timeout_s=150)


@pytest.mark.parametrize("contender", list(CONTENDERS))
def test_refusal(refusal: tuple[str, dict[str, Any]], contender: str, record: Callable[..., None]) -> None:
    environment, measured = refusal
    name, of_ray = CONTENDERS[contender]
    samples = measured["samples"][name]
    record(
        f"refusal, {RAY[environment]}",
        f"{RAY[environment]} {of_ray}" if of_ray else name,
        samples,
        environment=environment,
        key=contender,
        # Raises are too short to be timed one by one.
        calls_per_sample=measured["batch"]
        if contender in ("raise", "raise-kept", "rival", "rival-kept", "interpreter", "loop")
        else 1,
        times_faster_than_ray=statistics.median(measured["samples"]["Ray outcome"]) / statistics.median(samples),
    )
