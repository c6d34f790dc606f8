"""The table in words and as JSON."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actorsub._demo.figures import Summary, count, explain, format_refusals, format_table
from actorsub._demo.records import ModeRun
from actorsub._demo.settings import INFER_S, MODEL_LOAD_S, MODES, PAUSE_BETWEEN_ROUNDS_S, ROUNDS, Settings


def machine_facts() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def print_report(settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> None:
    print(
        f"{settings.workers} workers, {settings.rate:g} requests/s for {settings.seconds:g} s in each mode, "
        f"seed {settings.seed}, {count(len(runs[0].planned_kills), 'kill')} planned.\n"
        f"A restarted worker loads its model for {MODEL_LOAD_S:g} s, a request computes for "
        f"{INFER_S * 1e3:g} ms; sleeping stands for both.\n"
        "Latency counts from the scheduled arrival; percentiles are over answered requests.\n"
    )
    print(format_table(summaries))
    print("\nCalls that met a worker that was away:")
    print(format_refusals(summaries))
    print()
    for sentence in explain(summaries):
        print(textwrap.fill(sentence, 100))
    for run, s in zip(runs, summaries, strict=True):
        label = next(mode.label for mode in MODES if mode.name == run.mode)
        if s.kills != s.planned_kills:
            print(
                f"Note: on {label} {s.kills} of {s.planned_kills} kills took place; "
                "the other workers were not back in time."
            )
        if run.errors:
            errors = ", ".join(f"{count} {name}" for name, count in sorted(run.errors.items()))
            print(f"Note: on {label} requests ended with other errors: {errors}.")
    if settings.rate > 0.8 * (settings.workers - 1) / INFER_S:
        print("Note: the rate is near or above what the workers can serve while one is away; expect queues.")
    print()
    for mode in settings.modes:
        print(f"{mode.label}: {mode.note}")
    versions = {name: version for run in runs for name, version in run.versions.items()}
    machine = machine_facts()
    cores = count(machine["cores"], "core")
    software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    system = f"{machine['system']} {machine['architecture']}"
    print(f"measured with {software}, Python {machine['python']}, {system}, {cores}")


def write_json(path: Path, settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> None:
    document = {
        "parameters": {
            "seconds": settings.seconds,
            "rate": settings.rate,
            "workers": settings.workers,
            "seed": settings.seed,
            "model_load_s": MODEL_LOAD_S,
            "infer_s": INFER_S,
            "rounds": ROUNDS,
            "pause_between_rounds_s": PAUSE_BETWEEN_ROUNDS_S,
        },
        "machine": machine_facts(),
        "modes": {
            run.mode: {"summary": asdict(summary), **{k: v for k, v in asdict(run).items() if k != "mode"}}
            for run, summary in zip(runs, summaries, strict=True)
        },
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
