"""The demo: schedule, arithmetic, the proxy against made-up workers, and the real thing end to end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from subprocesses import output_of, run_python

from actorsub import __main__, _demo
from actorsub._demo import figures, schedule, service, settings
from actorsub._demo.records import Attempt, ModeRun, Request
from actorsub._demo.schedule import Kill

DEMO = ["-m", "actorsub", "demo"]
COMMAND = [sys.executable, *DEMO]


# --- Schedule -------------------------------------------------------------------------------------


def test_same_seed_same_schedule() -> None:
    assert schedule.plan_arrivals(7, 10, 50) == schedule.plan_arrivals(7, 10, 50)
    assert schedule.plan_kills(7, 60, 3) == schedule.plan_kills(7, 60, 3)


def test_other_seed_other_schedule() -> None:
    assert schedule.plan_arrivals(7, 10, 50) != schedule.plan_arrivals(8, 10, 50)
    assert schedule.plan_kills(7, 60, 3) != schedule.plan_kills(8, 60, 3)


def test_arrivals_are_ascending_inside_the_load_and_keep_the_rate() -> None:
    arrivals = schedule.plan_arrivals(1, 100, 200)
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] < 100
    # 20,000 expected, standard deviation 141.
    assert abs(len(arrivals) - 20_000) < 1_000


@pytest.mark.parametrize("workers", [2, 3, 5, 32])
@pytest.mark.parametrize("seconds", [3, 6, 16, 300])
def test_kills_always_leave_a_worker_up(workers: int, seconds: float) -> None:
    for seed in range(20):
        kills = schedule.plan_kills(seed, seconds, workers)
        assert kills, "a demo without a kill shows nothing"
        last = [-math.inf] * workers
        for kill in kills:
            assert 0 < kill.at_s < seconds
            assert kill.at_s - last[kill.worker] >= schedule.KILLABLE_AGAIN_S
            last[kill.worker] = kill.at_s
            assert any(kill.at_s - moment >= schedule.SERVES_AGAIN_S for moment in last)


# --- Arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.5, 3.0),
        ([3.0], 0.999, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 1.0, 4.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 1001)], 0.999, 999.0),
        ([float(n) for n in range(1, 1002)], 0.999, 1000.0),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], share: float, expected: float | None) -> None:
    assert figures.percentile(values, share) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (85e-9, "85 ns"),
        (850e-9, "850 ns"),
        (999.7e-9, "1.00 us"),
        (12.34e-6, "12.3 us"),
        (999.6e-6, "1.00 ms"),
        (4.6e-3, "4.60 ms"),
        (0.9999, "1.00 s"),
        (2.004, "2.00 s"),
        (9.996, "10.0 s"),
        (281.4, "281 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float | None, text: str) -> None:
    assert figures.format_duration(seconds) == text


def run_of(mode: str, requests: list[Request]) -> ModeRun:
    return ModeRun(mode, requests, [Kill(1.0, 0)], [Kill(1.001, 0)], {}, {"ray": "2"})


STOCK = run_of(
    "stock",
    [
        Request(0.1, 0.005, True),
        Request(0.2, 2.1, True, [Attempt(0.2, 2.0, False)]),
        Request(0.3, 4.0, False, [Attempt(0.3, 1.5, False), Attempt(1.8, 2.5, False)]),
    ],
)
OURS = run_of(
    "actorsub",
    [
        Request(0.1, 0.005, True),
        Request(0.2, 0.006, True, [Attempt(0.2, 5e-7, True)]),
        Request(0.3, 2.0, True, [Attempt(0.3, 1.5, False), Attempt(1.8, 7e-7, True)]),
    ],
)


def test_summary_counts_and_sums() -> None:
    summary = figures.summarize(STOCK)
    assert (summary.requests, summary.answered, summary.failed) == (3, 2, 1)
    assert (summary.p50_s, summary.p99_s, summary.worst_s) == (0.005, 2.1, 2.1)
    assert summary.lost_s == pytest.approx(6.0)
    assert (summary.refused, summary.told, summary.told_p50_s, summary.told_worst_s) == (0, 3, 2.0, 2.5)
    assert summary.over_1_s == 1
    ours = figures.summarize(OURS)
    assert (ours.refused, ours.refused_p50_s, ours.refused_worst_s, ours.told) == (2, 5e-7, 7e-7, 1)


def test_summary_of_a_run_without_requests() -> None:
    summary = figures.summarize(run_of("tuned", []))
    assert summary.p50_s is None
    assert summary.lost_s == 0
    assert "-" in figures.format_table([summary])
    assert figures.explain([summary])


def test_run_survives_the_pipe() -> None:
    assert ModeRun.from_json(json.loads(json.dumps(dataclasses.asdict(OURS)))) == OURS


def test_table_is_aligned_and_complete() -> None:
    lines = figures.format_table([figures.summarize(STOCK), figures.summarize(OURS)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        "requests",
        "answered",
        "p50",
        "p99",
        "p99.9",
        "worst",
        "failed",
        "time lost waiting",
    ]
    assert re.split(r"\s{2,}", lines[2]) == [
        *("stock Ray", "3", "2", "5.00 ms", "2.10 s", "2.10 s", "2.10 s", "1", "6.00 s")
    ]


def test_sentences_follow_the_figures() -> None:
    plain, ours = figures.explain([figures.summarize(STOCK), figures.summarize(OURS)])
    assert "3 calls" in plain
    assert "6.00 s in all" in plain
    assert "3 calls met one all the same" in ours
    assert "1 on a worker when it was killed" in ours
    assert "4.0 times less than stock Ray" in ours


def test_sentences_do_not_flatter() -> None:
    swapped = (
        ModeRun("actorsub", STOCK.requests, [], [], {}, {}),
        ModeRun("stock", OURS.requests, [], [], {}, {}),
    )
    ours = figures.explain([figures.summarize(run) for run in swapped])[1]
    assert "4.0 times more than stock Ray" in ours


# --- Proxy ----------------------------------------------------------------------------------------


class AwayError(Exception):
    pass


class FakeMethod:
    """Stands for a handle's method: `outcome` decides whether the call raises, fails later or answers."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome
        self.calls = 0

    def remote(self, x: int) -> asyncio.Future[int]:
        self.calls += 1
        if self.outcome == "refuse":
            raise AwayError
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.outcome == "answer":
            future.set_result(x + 1)
        elif self.outcome == "fail later":
            future.set_exception(AwayError())
        else:
            future.set_exception(ValueError("the application's own"))
        return future


class FakeWorker:
    def __init__(self, outcome: str) -> None:
        self.infer = FakeMethod(outcome)


def serve(workers: list[FakeWorker], requests: int) -> service.Proxy:
    async def main() -> service.Proxy:
        proxy = service.Proxy(workers, AwayError, time.perf_counter())
        for number in range(requests):
            await proxy.handle(number, 0.0)
        return proxy

    return asyncio.run(main())


def test_proxy_goes_round_robin() -> None:
    workers = [FakeWorker("answer") for _ in range(3)]
    proxy = serve(workers, 7)
    assert [worker.infer.calls for worker in workers] == [3, 2, 2]
    assert all(request.answered for request in proxy.requests)


@pytest.mark.parametrize(("outcome", "refused"), [("refuse", True), ("fail later", False)])
def test_proxy_moves_on_from_a_worker_that_is_away(outcome: str, refused: bool) -> None:
    workers = [FakeWorker(outcome), FakeWorker("answer")]
    proxy = serve(workers, 1)
    (request,) = proxy.requests
    assert request.answered
    assert [attempt.refused for attempt in request.lost] == [refused]
    assert request.latency_s >= request.lost[0].waited_s > 0


def test_proxy_gives_up_after_every_worker_had_its_chances() -> None:
    workers = [FakeWorker("refuse"), FakeWorker("fail later")]
    proxy = serve(workers, 1)
    (request,) = proxy.requests
    assert not request.answered
    assert len(request.lost) == 2 * settings.ROUNDS
    assert request.latency_s >= settings.PAUSE_BETWEEN_ROUNDS_S


def test_other_errors_are_counted_not_retried() -> None:
    workers = [FakeWorker("break"), FakeWorker("answer")]
    proxy = serve(workers, 1)
    assert not proxy.requests[0].answered
    assert proxy.errors == {"ValueError": 1}
    assert workers[1].infer.calls == 0


# --- Command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        (["--seconds", "2"], "from 3 to 3600"),
        (["--seconds", "nan"], "from 3 to 3600"),
        (["--seconds", "soon"], "from 3 to 3600"),
        (["--rate", "0"], "above 0, at most 1000"),
        (["--rate", "-1"], "above 0, at most 1000"),
        (["--rate", "inf"], "above 0, at most 1000"),
        (["--workers", "1"], "whole number of worker actors from 2 to 32"),
        (["--workers", "2.5"], "whole number of worker actors from 2 to 32"),
        (["--seed", "x"], "whole number"),
        (["--picture", "latency.jpg"], ".png or .svg"),
        (["--json", "/no/such/place/file.json"], "is no directory"),
        (["--json", "."], "is a directory"),
        (["--mode", "fast"], "'all', 'stock', 'tuned', 'actorsub'"),
    ],
)
def test_bad_arguments_name_what_is_accepted(
    arguments: list[str], accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main(["demo", *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert arguments[0] in error
    # Python 3.10 to 3.12 quote the choices, later ones do not.
    assert accepted.replace("'", "") in error.replace("'", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"actorsub \d+\.\d+.*\n", capsys.readouterr().out)


# --- The real thing -------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    # The demo runs in another directory here, and the package may be the one in the source tree.
    paths = [str(Path(_demo.__file__).resolve().parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_end_to_end(tmp_path: Path) -> None:
    command = [*DEMO, "--seconds=4", "--rate=30", "--workers=2", "--seed=3"]
    command += ["--json=out.json", "--picture=out.svg"]
    done = run_python(*command, timeout_s=280, cwd=tmp_path, env=environment())
    output = output_of(done)
    assert "Traceback" not in done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines() if "starting" in line] == [
        *("[1/3] stock Ray", "[2/3] tuned Ray", "[3/3] actorsub")
    ]
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["parameters"]["seed"] == 3
    assert list(document["modes"]) == ["stock", "tuned", "actorsub"]
    arrivals = schedule.plan_arrivals(3, 4, 30)
    for name, mode in document["modes"].items():
        summary, requests = mode["summary"], mode["requests"]
        assert [request["at_s"] for request in requests] == arrivals
        assert summary["requests"] == len(arrivals) == summary["answered"] + summary["failed"]
        assert summary["answered"] == sum(request["answered"] for request in requests)
        assert summary["worst_s"] == max(r["latency_s"] for r in requests if r["answered"])
        assert summary["p50_s"] <= summary["p99_s"] <= summary["p999_s"] <= summary["worst_s"]
        assert min(request["latency_s"] for request in requests) >= settings.INFER_S
        lost = [attempt for request in requests for attempt in request["lost"]]
        assert summary["refused"] + summary["told"] == len(lost)
        assert summary["lost_s"] == pytest.approx(sum(attempt["waited_s"] for attempt in lost))
        assert summary["kills"] == summary["planned_kills"] == 1
        assert mode["errors"] == {}
        assert f"{summary['requests']}" in output
        if name == "actorsub":
            # No more than were at the worker when it was killed.
            assert len(lost) <= 3
        else:
            assert summary["refused"] == 0
            assert len(lost) > 0
    assert document["modes"]["actorsub"]["summary"]["lost_s"] < document["modes"]["stock"]["summary"]["lost_s"]
    if (tmp_path / "out.svg").exists():
        assert "picture saved in" in output
    else:
        assert "matplotlib is not installed" in output


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", ["starting", "sending"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process(tmp_path: Path, moment: str, signum: signal.Signals) -> None:
    errors = tmp_path / "stderr"
    with errors.open("w") as stream:
        demo = subprocess.Popen(
            [*COMMAND, "--mode", "stock", "--seconds", "30"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    try:
        assert wait_until(lambda: moment in errors.read_text(), 60), errors.read_text()
        # Into the middle of Ray's own start, or of the load.
        time.sleep(2.0)
        started = psutil.Process(demo.pid).children(recursive=True)
        assert started
        demo.send_signal(signum)
        assert demo.wait(timeout=60) == 128 + signum
        _, alive = psutil.wait_procs(started, timeout=1)
        assert alive == []
        assert "Traceback" not in errors.read_text()
        assert "interrupted" in errors.read_text()
    finally:
        if demo.poll() is None:
            demo.terminate()
            demo.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_demo_takes_its_cluster_along(tmp_path: Path) -> None:
    """SIGKILL leaves the demo no chance to clean up: its child sees the closed pipe and ends the cluster."""
    errors = tmp_path / "stderr"
    with errors.open("w") as stream:
        demo = subprocess.Popen(
            [*COMMAND, "--mode", "stock", "--seconds", "30"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    try:
        assert wait_until(lambda: "sending" in errors.read_text(), 60), errors.read_text()
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.kill()
        demo.wait(timeout=10)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert alive == []
    finally:
        if demo.poll() is None:
            demo.terminate()
            demo.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_failing_mode_is_explained(tmp_path: Path) -> None:
    """A Ray that cannot start ends the demo with its own words and without a traceback of ours."""
    broken = tmp_path / "broken" / "ray"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('this Ray is broken')\n")
    # The parent has imported what it needs by then; its child, on the same path, meets the broken one.
    code = "import sys; from actorsub.__main__ import main; sys.path.insert(0, 'broken'); sys.exit(main())"
    done = run_python("-c", code, "demo", "--mode", "stock", timeout_s=100, cwd=tmp_path, env=environment())
    assert done.returncode == 1
    assert "the run on stock Ray ended with exit code 1" in done.stderr
    assert "this Ray is broken" in done.stderr
