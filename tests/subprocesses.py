"""Python code in a process of its own: a script, a command, or a function of a test module; and how a process ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import psutil
import ray
from helpers import wait_until

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


def with_our_path() -> dict[str, str]:
    """The environment of a process that is to import what the tests do."""
    inherited = [one for one in sys.path if one and os.path.isdir(one) and "site-packages" not in one]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *inherited])}


def run_python(*arguments: str, timeout_s: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs this Python with these arguments in a process of its own, and takes its output. `how`: of subprocess.run."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, **how
    )


def report(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Its standard output; it has to have ended by itself with code 0."""
    assert done.returncode == 0, report(done)
    return done.stdout


def run_script(
    code: str, *arguments: str, timeout_s: float = 60.0, own_cluster: bool = False, auto_connect: bool = False
) -> str:
    """Runs Python code in a process of its own: it has to end by itself with code 0. Returns its standard output.

    Its `ray.init(**RAY_ARGS)` connects to the Ray of this process, which takes a tenth of the time that starting one
    does, unless `own_cluster`. With `auto_connect` a call of Ray's without a session starts a Ray, as Ray does.
    """
    environment = with_our_path()
    if not auto_connect:
        environment["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if not own_cluster:
        environment["TEST_CLUSTER"] = ray.get_runtime_context().gcs_address
    command = ["-X", "faulthandler", "-c", PROLOGUE + textwrap.dedent(code), *arguments]
    done = run_python(*command, timeout_s=timeout_s, env=environment)
    output = output_of(done)
    for word in BAD_WORDS:
        assert word not in done.stderr, report(done)
    return output


def run_function(function: Callable[..., None], *arguments: str, log: pathlib.Path, timeout_s: float) -> int:
    """Runs a function of a test module in a process of its own, with strings as its arguments. Returns the exit code.

    What it started is ended with it where it does not end in time. Its output goes to the file `log`: a pipe stays open
    for as long as any process of a Ray that it started has it.
    """
    code = f"import sys, {function.__module__} as module; module.{function.__name__}(*sys.argv[1:])"
    with log.open("wb") as output:
        child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=output, stderr=output)
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(child.pid)
        finally:
            child.kill()
            child.wait()
    return child.returncode


def kill_tree(pid: int) -> None:
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int, timeout_s: float = 20.0) -> None:
    wait_until(lambda: not is_running(pid), timeout_s, f"the actor's process {pid} ends")
