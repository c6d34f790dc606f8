"""When requests arrive and who is killed when: pure functions of the seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from actorsub._demo.settings import MODEL_LOAD_S

# Kills come this far apart. A killed worker serves again after its process has started and its model is
# loaded; it is killed again only when the killer knows its new process, which stock Ray may tell 2 s later.
KILL_PERIOD_S = 3.5
KILL_JITTER_S = 0.4
FIRST_KILL_S = 1.3
SERVES_AGAIN_S = 5.0
KILLABLE_AGAIN_S = 7.0


@dataclass(frozen=True)
class Kill:
    """Worker number `worker` loses its process `at_s` seconds after the load began."""

    at_s: float
    worker: int


def plan_arrivals(seed: int, seconds: float, rate: float) -> list[float]:
    """Arrival times in seconds, ascending: a Poisson stream, so they also come in clumps as real ones do."""
    source = random.Random(f"arrivals {seed}")
    arrivals = []
    now = source.expovariate(rate)
    while now < seconds:
        arrivals.append(now)
        now += source.expovariate(rate)
    return arrivals


def plan_kills(seed: int, seconds: float, workers: int) -> list[Kill]:
    """Who is killed when. By plan one worker at least is up at any time, so no request has to fail."""
    source = random.Random(f"kills {seed}")
    last_killed = [-math.inf] * workers
    kills: list[Kill] = []
    at = FIRST_KILL_S + source.uniform(-KILL_JITTER_S, KILL_JITTER_S)
    # The last seconds are left alone, or the load would end before what the kill does has shown.
    while not kills or at <= seconds - MODEL_LOAD_S:
        away_s = [at - moment for moment in last_killed]
        killable = [worker for worker in range(workers) if away_s[worker] >= KILLABLE_AGAIN_S]
        if killable and sum(away >= SERVES_AGAIN_S for away in away_s) >= 2:
            worker = source.choice(killable)
            last_killed[worker] = at
            kills.append(Kill(at, worker))
        at += KILL_PERIOD_S + source.uniform(-KILL_JITTER_S, KILL_JITTER_S)
    return kills
