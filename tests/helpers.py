"""Actors that can be killed and that come back when told to, ways to wait for what nothing announces, and Python code
in a process of its own."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

import actorsub

RAY_ARGS: dict[str, Any] = {
    # Never another cluster that happens to run on this machine.
    "address": "local",
    "num_cpus": 4,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
}


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> Any:
    """Polls until `condition()` is true and returns its value; for states that nothing announces."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.002)


def wait_for_state(handle: actorsub.ActorHandle, *states: actorsub.ActorState, timeout_s: float = 30.0) -> None:
    wait_until(
        lambda: actorsub.state(handle) in states,
        timeout_s,
        f"{handle} in {states}, is {actorsub.state(handle)}",
    )


class Worker:
    """An actor that holds back its restarts until the gate file is there (or for `restart_s`), and keeps a ledger of
    what it ran outside its process."""

    def __init__(self, directory: str, restart_s: float | None = None) -> None:
        self.directory = pathlib.Path(directory)
        starts = self.directory / "starts"
        first = not starts.exists()
        with starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if not first:
            if restart_s is not None:
                time.sleep(restart_s)
            else:
                while not (self.directory / "gate").exists():
                    time.sleep(0.005)

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any = None, *, twice: bool = False) -> Any:
        return [value, value] if twice else value

    def record(self, entry: str) -> str:
        with (self.directory / "ledger").open("a") as file:
            file.write(entry + "\n")
        return entry

    def pair(self) -> tuple[int, int]:
        return 1, 2

    def stream(self, count: int = 3) -> Iterator[int]:
        for number in range(count):  # noqa: UP028  a delegated range has no send(), which Ray calls
            yield number

    def hold(self) -> None:
        """Runs until the process ends."""
        (self.directory / "held").touch()
        while True:
            time.sleep(60)

    def leave(self) -> None:
        raise SystemExit(0)


class Restartable:
    """A wrapped Worker with its directory: kill it, let it come back, read what it ran."""

    def __init__(self, directory: pathlib.Path, restart_s: float | None = None, **options: Any) -> None:
        self.directory = directory
        options = {"max_restarts": -1, "num_cpus": 0, **options}
        self.handle = actorsub.remote(**options)(Worker).remote(str(directory), restart_s)
        self.pid = ray.get(self.handle.pid.remote(), timeout=60)

    def kill(self) -> None:
        """SIGKILL, and wait until Ray has noticed."""
        os.kill(self.pid, signal.SIGKILL)
        wait_for_state(self.handle, actorsub.ActorState.RESTARTING, actorsub.ActorState.DEAD)

    def let_restart(self) -> None:
        (self.directory / "gate").touch()

    def restart(self) -> None:
        """Lets it come back, and waits until it is up."""
        self.let_restart()
        wait_for_state(self.handle, actorsub.ActorState.ALIVE)
        self.pid = ray.get(actorsub.wrap(self.handle, on_unavailable="wait", timeout_s=30).pid.remote(), timeout=60)
        (self.directory / "gate").unlink()

    @property
    def ledger(self) -> list[str]:
        path = self.directory / "ledger"
        return path.read_text().split() if path.exists() else []


PROLOGUE = """
import asyncio, gc, os, pathlib, signal, sys, tempfile, threading, time
import ray, actorsub
from helpers import RAY_ARGS, Restartable, Worker, wait_until, wait_for_state
from actorsub import ActorState

if "TEST_CLUSTER" in os.environ:
    RAY_ARGS = {"address": os.environ["TEST_CLUSTER"], "log_to_driver": False, "logging_level": "ERROR"}
else:
    RAY_ARGS["num_cpus"] = 1
"""
# What a C++ abort, a fatal Python error or a lost exception leave on stderr.
BAD_WORDS = ("Fatal Python error", "terminate called", "Aborted", "Segmentation", "SIGSEGV", "SIGABRT", "Check failed",
             "Traceback", "Exception ignored", "core dumped")  # fmt: skip


def run_script(
    code: str, *arguments: str, timeout_s: float = 60.0, own_cluster: bool = False, auto_connect: bool = False
) -> str:
    """Runs Python code in a process of its own: it has to end by itself with code 0. Returns its standard output.

    Its `ray.init(**RAY_ARGS)` connects to the Ray of this process, which takes a tenth of the time that starting one
    does, unless `own_cluster`. With `auto_connect` a call of Ray's without a session starts a Ray, as Ray does.
    """
    environment = dict(os.environ)
    if not auto_connect:
        environment["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if not own_cluster:
        environment["TEST_CLUSTER"] = ray.get_runtime_context().gcs_address
    inherited = [one for one in sys.path if one and os.path.isdir(one) and "site-packages" not in one]
    environment["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), *inherited])
    process = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROLOGUE + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    report = f"exit code {process.returncode}\n--- stdout\n{process.stdout}\n--- stderr\n{process.stderr}"
    assert process.returncode == 0, report
    for word in BAD_WORDS:
        assert word not in process.stderr, report
    return process.stdout
