"""Actors that can be killed and that come back when told to, and ways to wait for what nothing announces.

Python code in a process of its own: subprocesses.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import ray

import actorsub

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

RAY_ARGS: dict[str, Any] = {
    # Never another cluster that happens to run on this machine.
    "address": "local",
    "num_cpus": 4,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
}

#: What is left of them where there is a cluster to connect to.
CONNECT = {name: RAY_ARGS[name] for name in ("log_to_driver", "logging_level")}
#: How long a result may take; only what hangs takes as long.
GET_S = 60


def ensure_ray() -> None:
    if not ray.is_initialized():
        ray.init(**RAY_ARGS)


@contextlib.contextmanager
def connected_cluster(**head: Any) -> Iterator[Cluster]:
    """A cluster that nodes can be added to, and its first node, which this process is connected to meanwhile."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, **CONNECT)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=GET_S)


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


def wait_until_watched(handle: actorsub.ActorHandle, timeout_s: float = 30.0) -> None:
    wait_until(lambda: actorsub.stats(handle)["watched"], timeout_s, "the sentinel watches")


def up_and_watched(handle: Any) -> int:
    """The process id of the actor, once it is up and watched."""
    pid: int = get(handle.pid.remote())
    wait_until_watched(handle)
    return pid


def touch(path: str | pathlib.Path) -> None:
    pathlib.Path(path).touch()


def wait_for_file(path: str | pathlib.Path, timeout_s: float = GET_S) -> None:
    wait_until(lambda: os.path.exists(path), timeout_s, f"{path} is there")


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("actorsub")}


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


class Basics:
    """What many tests want of an actor; those that want more inherit from it."""

    def __init__(self) -> None:
        self.memory: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any = None) -> Any:
        return value

    def remember(self, value: Any) -> list[Any]:
        self.memory.append(value)
        return self.memory

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def hold(self, started: str, gate: str) -> str:
        """Runs until the gate is there."""
        touch(started)
        while not os.path.exists(gate):
            time.sleep(0.002)
        return "done"

    def fail(self) -> None:
        raise ValueError("of the application")


class Subject:
    """A wrapped actor with its process, a directory that both sides know, and calls that are known to run there."""

    def __init__(self, directory: pathlib.Path, cls: type, **options: Any) -> None:
        self.directory = directory
        self.handle = actorsub.remote(**{"num_cpus": 0, **options})(cls).remote()
        #: 0 where nobody has asked for it: not each class tells.
        self.pid = 0
        self._numbers = itertools.count()

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def hold_by(self, call: Callable[[str, str], Any], timeout_s: float = GET_S) -> Any:
        """Makes a call with two files: it makes the first when it runs, and runs until `release` makes the second."""
        started = self.path(f"started-{next(self._numbers)}")
        made = call(started, self.path("gate"))
        wait_for_file(started, timeout_s)
        return made

    def release(self) -> None:
        touch(self.path("gate"))

    def watch(self) -> None:
        wait_until_watched(self.handle)

    @property
    def stats(self) -> dict[str, Any]:
        return actorsub.stats(self.handle)

    def signal(self, number: int) -> None:
        assert self.pid, "a signal to 0 goes to the tests themselves"
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """For good, whatever state it is in."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
        ray.kill(self.handle)


AnySubject = TypeVar("AnySubject", bound=Subject)


def make_subjects(directory: pathlib.Path, kind: type[AnySubject]) -> Iterator[Callable[..., AnySubject]]:
    """For a fixture: makes Subjects, each in a directory of its own, and ends their actors after the test."""
    made: list[AnySubject] = []

    def make(*arguments: Any, **options: Any) -> AnySubject:
        own = directory / f"subject-{len(made)}"
        own.mkdir()
        made.append(kind(own, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


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
