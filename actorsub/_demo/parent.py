"""One child per mode, one after the other; then the report."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from actorsub._demo.child import ChildTask, child_environment
from actorsub._demo.figures import Summary, summarize
from actorsub._demo.picture import draw
from actorsub._demo.processes import Descendants, Interrupted, interruptible
from actorsub._demo.progress import Progress
from actorsub._demo.records import ModeRun
from actorsub._demo.report import print_report, write_json
from actorsub._demo.settings import DRAIN_S, START_AND_STOP_S, Mode, Settings


class ModeFailedError(Exception):
    """A child ended without a result; the text is for the user."""


def run_child(
    mode: Mode, settings: Settings, descendants: Descendants, on_report: Callable[[dict[str, Any]], None]
) -> ModeRun:
    """Run one mode in a child. Whatever happens, no process of it is left when this returns or raises."""
    read_fd, write_fd = os.pipe()
    task = ChildTask(mode.name, settings.seconds, settings.rate, settings.workers, settings.seed, write_fd)
    # The child finds modules exactly where this process does, wherever it was started from.
    code = (
        "import json, sys\n"
        "sys.path[:] = json.loads(sys.argv[1])\n"
        "from actorsub._demo import child\n"
        "sys.exit(child.main(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), json.dumps(asdict(task))]
    child: subprocess.Popen[bytes] | None = None
    clean = False
    try:
        with os.fdopen(read_fd, "rb", buffering=0) as reports, tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    command,
                    env=child_environment(mode),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_fd,),
                    # Ctrl-C in a terminal goes to the whole group; only this process shall get it and decide.
                    start_new_session=True,
                )
            finally:
                os.close(write_fd)
            run = _follow(reports, settings.seconds + DRAIN_S + START_AND_STOP_S, on_report)
            if run is None:
                descendants.wait(5.0, child)  # for its exit code
                raise ModeFailedError(_failure_text(mode, child, output))
            clean = True
            return run
    finally:
        descendants.end(child, ask=not clean)
        if child is not None and child.stdin is not None:
            child.stdin.close()


def _follow(reports: Any, limit_s: float, on_report: Callable[[dict[str, Any]], None]) -> ModeRun | None:
    """Read JSON lines until the child closes the pipe; None if it never sent a result."""
    run = None
    rest = b""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(timeout=1.0):
                continue
            data = reports.read(1 << 16)
            if not data:
                return run
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                if report["kind"] == "result":
                    run = ModeRun.from_json(report["run"])
                on_report(report)
    return None


def _failure_text(mode: Mode, child: subprocess.Popen[bytes], output: Any) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").rstrip().splitlines()[-15:]
    code = child.returncode
    how = "did not finish in time" if code is None else f"ended with exit code {code}"
    return "\n".join([f"the run on {mode.label} {how} and gave no result; its last words:", *lines])


def run(settings: Settings) -> int:
    """Run the demo; returns the exit code: 0, 1 when a mode failed, 128 + signal when interrupted."""
    progress = Progress(sys.stderr, settings)
    try:
        with interruptible():
            descendants = Descendants()
            try:
                runs = []
                for index, mode in enumerate(settings.modes):
                    progress.start(index)
                    runs.append(run_child(mode, settings, descendants, progress.report))
                progress.close()
                summaries = [summarize(run) for run in runs]
                print_report(settings, runs, summaries)
                return _save(settings, runs, summaries)
            finally:
                # Finds nobody, unless a signal cut short the cleanup after a mode.
                descendants.end(None, ask=True)
    except Interrupted as interrupted:
        progress.close()
        print("interrupted; every process of the demo has ended", file=sys.stderr)
        return 128 + interrupted.signum
    except ModeFailedError as error:
        progress.close()
        print(f"actorsub demo: {error}", file=sys.stderr)
        return 1


def _save(settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> int:
    try:
        if settings.json_file is not None:
            write_json(settings.json_file, settings, runs, summaries)
            print(f"figures saved in {settings.json_file.resolve()}")
        draw(settings.picture, settings, runs, summaries)
        print(f"picture saved in {settings.picture.resolve()}")
    except ImportError:
        print("no picture: matplotlib is not installed; get it with: pip install 'actorsub[demo]'")
    except OSError as error:
        print(f"actorsub demo: cannot save: {error}", file=sys.stderr)
        return 1
    return 0
