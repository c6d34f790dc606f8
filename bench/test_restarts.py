"""The title benchmark: calls at a fixed rate to an actor that is killed and restarted, over and over.

Each run has a process and a local Ray of its own. The rate, the times of the calls and the times of the kills are the
same in all runs. Every call counts, to the actor that is up and to the one that is not. Two times are taken of each,
both from the moment before `.remote()`: until it returned or raised (submit), and until the caller could know the
result or the error (outcome). The load is open-loop: nobody waits for an outcome before the next call.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
from conftest import percentile

pytestmark = pytest.mark.timeout(120)

SECONDS, RATE, SEED = 9.0, 200.0, 1
# Name -> (the kind of handle, whether Ray is tuned).
VARIANTS = {
    "stock Ray": ("plain", False),
    "tuned Ray": ("plain", True),
    "plain-Python rival": ("rival", False),
    "actorsub": ("actorsub", False),
}
THREADS = [1, 4, 8]


@pytest.fixture(
    scope="module",
    params=[(variant, threads) for threads in THREADS for variant in VARIANTS],
    ids=lambda param: f"{param[0]}-{param[1]}".replace(" ", "-"),
)
def run(request: pytest.FixtureRequest, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    variant, threads = request.param
    handle, tuned = VARIANTS[variant]
    options = {"handle": handle, "threads": threads, "seconds": SECONDS, "rate": RATE, "seed": SEED}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    measured = measure("restarts", *arguments, tuned=tuned, timeout_s=90)
    return {"variant": variant, "threads": threads, **measured}


@pytest.mark.parametrize("what", ["submit", "outcome"])
def test_restarts(run: dict[str, Any], what: str, record: Callable[..., None]) -> None:
    samples, ends = run[what], run["ends"]
    assert run["kills_s"], "nothing was killed: nothing was measured"
    answered = [time for time, end in zip(samples, ends, strict=True) if end == "answered"]
    lost = [time for time, end in zip(samples, ends, strict=True) if end != "answered"]
    record(
        f"restarts, {what}",
        f"{run['variant']}, {run['threads']} threads, {what}",
        samples,
        variant=run["variant"],
        threads=run["threads"],
        key=what,
        seconds=SECONDS,
        rate=RATE,
        seed=SEED,
        ends=dict(collections.Counter(ends)),
        kills_s=run["kills_s"],
        kills_missed=run["kills_missed"],
        late_p99_ns=percentile(run["late"], 99),
        p50_ns=percentile(samples, 50),
        p99_ns=percentile(samples, 99),
        p99_9_ns=percentile(samples, 99.9),
        answered_p50_ns=percentile(answered, 50) if answered else None,
        # Of the calls that got no answer: refused by `.remote()`, or failed later.
        lost_p50_ns=percentile(lost, 50) if lost else None,
        lost_total_s=sum(lost) / 1e9,
    )
