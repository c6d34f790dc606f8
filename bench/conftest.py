"""What the benchmarks share: measuring in a subprocess, and handing the samples to pytest-benchmark.

The samples are measured by _variant.py, in turns and in processes of their own, which pytest-benchmark cannot do. They
enter its statistics and its JSON unchanged, by replay: the benchmarked function takes the next sample, and the timer
tells it. What pytest-benchmark cannot express (ratios within one turn, percentiles) is in `extra_info`.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import pytest

HERE = pathlib.Path(__file__).parent
TUNING = "RAY_timeout_ms_task_wait_for_death_info"


class _Replay:
    """A timer that shows the samples it was given, one for each call of the benchmarked function."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def timer(self) -> float:
        return self._now_s

    def run(self, samples_ns: Sequence[float], benchmark: Any) -> None:
        left = iter(samples_ns)

        def take_one_sample() -> None:
            # From 0 each time, so that the difference of two readings is the sample to the last digit.
            self._now_s += next(left) / 1e9

        def start_from_zero() -> None:
            self._now_s = 0.0

        benchmark.pedantic(take_one_sample, setup=start_from_zero, rounds=len(samples_ns))


_replay = _Replay()


def pytest_configure(config: pytest.Config) -> None:
    (HERE / "out").mkdir(exist_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.benchmark(timer=_replay.timer))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    machine_info["cores"] = os.cpu_count()
    machine_info["memory_gb"] = round(psutil.virtual_memory().total / 1e9)
    machine_info["kernel"] = platform.release()
    machine_info["load_average"] = _load_before
    machine_info["ray"] = importlib.metadata.version("ray")
    # The host name says nothing about the measurement.
    machine_info.pop("node", None)


# Before anything runs here: what others ask of the machine.
_load_before = [round(load, 2) for load in os.getloadavg()]


@pytest.fixture(scope="session")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs _variant.py and returns what it measured. `tuned` sets Ray's wait for a death cause to 0."""

    def run(what: str, *arguments: str, tuned: bool = False, timeout_s: float = 120.0) -> dict[str, Any]:
        output = tmp_path_factory.mktemp("variant") / "samples.json"
        environment = {name: value for name, value in os.environ.items() if name != TUNING}
        if tuned:
            environment[TUNING] = "0"
        # The package that this process would import, be it installed or built in place.
        package = pathlib.Path(importlib.util.find_spec("actorsub").origin).parent
        paths = [str(package.parent), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, str(HERE / "_variant.py"), str(output), what, *arguments]
        # A session of its own: Ctrl-C reaches this process only, which then ends the child and all that is below it.
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as child:
            try:
                log, _ = child.communicate(timeout=timeout_s)
            except BaseException:
                _end_with_children(child.pid)
                raise
        if child.returncode != 0:
            raise RuntimeError(f"{what} {' '.join(arguments)} failed:\n{log.decode(errors='replace')}")
        return json.loads(output.read_text())

    return run


def _end_with_children(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        # Listed before anything ends: an orphan is nobody's child.
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def record(benchmark: Any) -> Callable[..., None]:
    """Hands one contender's samples (ns) to pytest-benchmark, under `group`, with `extra` beside them."""

    def hand_over(group: str, name: str, samples_ns: Sequence[float], **extra: Any) -> None:
        benchmark.group = group
        benchmark.name = name
        benchmark.extra_info.update(extra, contender=name)
        _replay.run(samples_ns, benchmark)

    return hand_over


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """The median of the ratios within one turn, and the interval that holds the true median with 95% confidence.

    Of two contenders that were measured in turns: whatever slows the machine for a while is in both.
    """
    ordered = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    # By order statistics (binomial, normal approximation): it assumes nothing about how the ratios are spread.
    half_width = int(0.98 * len(ordered) ** 0.5) + 1
    middle = len(ordered) // 2
    return {
        "ratio": statistics.median(ordered),
        "ratio_low": ordered[max(0, middle - half_width)],
        "ratio_high": ordered[min(len(ordered) - 1, middle + half_width)],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not exceeded by at least `percent` of them (nearest rank)."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(0, int(rank) - 1)]
