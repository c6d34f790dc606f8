"""Counts false alarms of the sentinel while the machine has more to do than it can.

    python bench/false_alarms.py [--minutes 10] [--actors 20] [--burners-per-core 2]

Starts a local Ray, actors that are called, computed in and left alone in turn, and processes that burn every core; then
counts how often a living actor was declared unreachable at the default `silence_timeout_s`. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

import actorsub


class Busy:
    """Answers, computes, and holds the GIL for longer than the silence limit."""

    def ping(self) -> int:
        return 1

    def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def hold_gil(self, seconds: int) -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--actors", type=int, default=20)
    parser.add_argument("--burners-per-core", type=int, default=2)
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actor_class = actorsub.remote(num_cpus=0, max_restarts=-1)(Busy)
    actors = [actor_class.remote() for _ in range(arguments.actors)]
    ray.get([actor.ping.remote() for actor in actors])
    alarms: list[str] = []
    for actor in actors:
        actorsub.on_state_change(actor, lambda _id, old, new, why: alarms.append(f"{old.value}->{new.value} ({why})"))
    before = actorsub.stats(actors[0])["sentinel"]
    # Burners that end by themselves, also when this process is killed.
    code = f"import time; end = time.monotonic() + {arguments.minutes * 60 + 5}\nwhile time.monotonic() < end: pass"
    burners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(cores * arguments.burners_per_core)]
    end = time.monotonic() + arguments.minutes * 60
    answered = 0
    try:
        while time.monotonic() < end:
            running = [actors[0].compute.remote(4), actors[1].hold_gil.remote(5)]
            for actor in actors[2:]:
                answered += ray.get(actor.ping.remote())
            ray.get(running)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    after = actorsub.stats(actors[0])["sentinel"]
    print(
        json.dumps(
            {
                "minutes": arguments.minutes,
                "actors": arguments.actors,
                "burners": len(burners),
                "cores": cores,
                "load_average": round(os.getloadavg()[0], 1),
                "answered": answered,
                **{
                    name: after[name] - before[name]
                    for name in ("heartbeats_sent", "silences", "false_alarms", "late_wakeups")
                },
                "changes": [one for one in alarms if not one.startswith("unknown->")],
            }
        )
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
