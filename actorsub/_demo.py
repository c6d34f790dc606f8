"""The demo: what a service pays while its worker actors are killed and restarted.

Three runs of the same service with the same requests and the same kills: on stock Ray, on Ray with its wait
for a death cause switched off ("tuned"), and on actorsub. The proxy is the same in all three but for one
method: on plain handles it is a loop over the workers, on actorsub one call of a group of them. Each run has
an interpreter and a local Ray of its own, because Ray reads its switches once per process.

Parent: settings -> one child per mode -> table, picture, JSON. It needs no Ray itself.
Child:  local Ray -> workers -> proxy and killer on one asyncio loop -> JSON lines on a pipe to the parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import math
import os
import platform
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

DESCRIPTION = (
    "Starts a local Ray, kills worker actors on a schedule while a proxy sends them requests, and shows what "
    "the requests pay: on stock Ray, on tuned Ray, and on actorsub. Takes a little over a minute."
)

# The sleeps stand for a model: the time it takes to load into a fresh process, and the time of one inference.
MODEL_LOAD_S = 3.0
# How often a local Ray may be started until it is up.
START_ATTEMPTS = 3
INFER_S = 0.004

# Each request may try every worker this often, with a pause in between because all of them were away.
ROUNDS = 2
PAUSE_BETWEEN_ROUNDS_S = 0.1

# Kills come this far apart. A killed worker serves again after its process has started and its model is
# loaded; it is killed again only when the killer knows its new process, which stock Ray may tell 2 s later.
KILL_PERIOD_S = 3.5
KILL_JITTER_S = 0.4
FIRST_KILL_S = 1.3
SERVES_AGAIN_S = 5.0
KILLABLE_AGAIN_S = 7.0

# Requests still open this long after the last arrival are cut off and count as failed.
DRAIN_S = 15.0
# A mode that needs longer than its load plus this is stuck.
START_AND_STOP_S = 120.0

LIMITS = {"seconds": (3.0, 3600.0), "rate": (0.0, 1000.0), "workers": (2, 32)}
PICTURE_SUFFIXES = (".png", ".svg")
DEFAULT_PICTURE = Path("demo-latency.png")

TUNING_VARIABLE = "RAY_timeout_ms_task_wait_for_death_info"


@dataclass(frozen=True)
class Mode:
    """One of the three runs; `color` is from the Okabe-Ito palette, made for colour-blind readers too."""

    name: str
    label: str
    color: str
    note: str


MODES = (
    Mode("stock", "stock Ray", "#D55E00", "plain handles, Ray's defaults"),
    Mode("tuned", "tuned Ray", "#0072B2", f"plain handles, {TUNING_VARIABLE}=0"),
    Mode("actorsub", "actorsub", "#009E73", 'actorsub.ReplicaGroup(workers, retry="always")'),
)


# --- Settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What one run of the demo was asked to do."""

    seconds: float
    rate: float
    workers: int
    seed: int
    modes: tuple[Mode, ...]
    picture: Path
    json_file: Path | None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Settings:
        return cls(
            seconds=arguments.seconds,
            rate=arguments.rate,
            workers=arguments.workers,
            seed=arguments.seed,
            modes=tuple(mode for mode in MODES if arguments.mode in ("all", mode.name)),
            picture=arguments.picture,
            json_file=arguments.json,
        )


def _number(text: str, name: str, accepted: str, *, above: bool = False) -> float:
    low, high = LIMITS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Written so that NaN fails too.
    if not (low < value <= high if above else low <= value <= high):
        raise argparse.ArgumentTypeError(f"takes {accepted}, got {text!r}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "seconds", "a number of seconds from 3 to 3600")


def _rate(text: str) -> float:
    return _number(text, "rate", "requests per second: a number above 0, at most 1000", above=True)


def _workers(text: str) -> int:
    accepted = "a whole number of worker actors from 2 to 32"
    value = _number(text, "workers", accepted)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"takes {accepted}, got {text!r}")
    return int(value)


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number, got {text!r}") from None


def _output_file(text: str) -> Path:
    # Found out now and not after a minute and a half of measuring.
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"takes a file to write, but {text!r} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"takes a file to write, but {str(path.parent)!r} is no directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"takes a file to write, but {text!r} cannot be written")
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"takes a file name ending in .png or .svg, got {text!r}")
    return _output_file(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`; their values go to `Settings.from_arguments`."""
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=16.0,
        help="length of the load in each mode (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", type=_rate, default=100.0, help="requests per second, on average (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=_workers, default=3, help="worker actors behind the proxy (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_seed, default=1, help="decides the times of requests and kills (default: %(default)s)"
    )
    parser.add_argument(
        "--mode",
        choices=["all", *(mode.name for mode in MODES)],
        default="all",
        help="what to measure (default: %(default)s)",
    )
    parser.add_argument("--json", type=_output_file, metavar="FILE", help="write every figure to this file")
    parser.add_argument(
        "--picture",
        type=_picture,
        default=DEFAULT_PICTURE,
        metavar="FILE.png|.svg",
        help="where to save the picture of latency over time (default: %(default)s)",
    )


# --- Schedule: pure, from the seed ----------------------------------------------------------------


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


# --- Proxy and killer -----------------------------------------------------------------------------


class Model:
    """The worker. Self-contained: it is pickled by value, so that its process imports nothing but Ray."""

    def __init__(self, load_s: float, infer_s: float) -> None:
        import ray

        self._infer_s = infer_s
        # Only a restart pays for loading: the first start would only make the demo longer.
        if ray.get_runtime_context().was_current_actor_reconstructed:
            time.sleep(load_s)

    def infer(self, x: int) -> int:
        time.sleep(self._infer_s)
        return x + 1

    def pid(self) -> int:
        return os.getpid()


@dataclass
class Attempt:
    """One call that met a worker that was away."""

    at_s: float
    waited_s: float
    refused: bool  # raised by `.remote()` itself; otherwise Ray told it through the awaited reference


@dataclass
class Request:
    """One request, counted from its scheduled arrival, so that a late start counts as latency."""

    at_s: float
    latency_s: float = math.nan
    answered: bool = False
    lost: list[Attempt] = field(default_factory=list)


class Proxy:
    """Round robin over the workers; a call that meets an unavailable one goes to the next.

    Used from one event loop only. `unavailable` is the error class that stands for "this worker is away".
    """

    def __init__(self, workers: Sequence[Any], unavailable: type[Exception], began: float) -> None:
        self.requests: list[Request] = []
        self.errors: dict[str, int] = {}
        self._workers = workers
        self._unavailable = unavailable
        self._began = began
        self._turn = 0

    async def handle(self, number: int, at_s: float) -> None:
        """Serve one request to its end, whatever that is."""
        request = Request(at_s)
        self.requests.append(request)
        try:
            request.answered = await self._try_workers(number, request.lost) == number + 1
        except Exception as error:
            # Not ours to judge, and not to be hidden either: it is counted by name and shown.
            name = type(error).__name__
            self.errors[name] = self.errors.get(name, 0) + 1
        finally:
            request.latency_s = time.perf_counter() - self._began - at_s

    async def _try_workers(self, x: int, lost: list[Attempt]) -> int | None:
        count = len(self._workers)
        first = self._turn
        self._turn = (first + 1) % count
        for attempt in range(ROUNDS * count):
            if attempt and attempt % count == 0:
                await asyncio.sleep(PAUSE_BETWEEN_ROUNDS_S)
            worker = self._workers[(first + attempt) % count]
            ref = None
            started = time.perf_counter()
            try:
                ref = worker.infer.remote(x)
                answer: int = await ref
                return answer
            except self._unavailable:
                waited_s = time.perf_counter() - started
                lost.append(Attempt(started - self._began, waited_s, refused=ref is None))
        return None


class GroupProxy(Proxy):
    """The same with a group of the workers, which picks one that is up, and another when that is lost."""

    def __init__(self, workers: Sequence[Any], unavailable: type[Exception], began: float) -> None:
        import actorsub

        super().__init__(workers, unavailable, began)
        self._group = actorsub.ReplicaGroup(workers, retry="always", timeout_s=DRAIN_S, on_unavailable="wait")

    async def _try_workers(self, x: int, lost: list[Attempt]) -> int | None:
        started = time.perf_counter()
        call = self._group.infer.call(x)
        try:
            answer: int = await call
            return answer
        except self._unavailable:
            return None
        finally:
            if call.attempts:
                # What was lost is not known to the call, so its whole time counts, which is more than that.
                refused = not any(attempt.sent for attempt in call.attempts)
                lost.append(Attempt(started - self._began, time.perf_counter() - started, refused))


class Killer:
    """SIGKILLs workers on schedule, and only processes whose id came from the worker itself."""

    def __init__(self, workers: Sequence[Any], pids: Sequence[int], unavailable: type[Exception]) -> None:
        self.killed: list[Kill] = []
        self._workers = workers
        self._pids: list[int | None] = list(pids)
        self._unavailable = unavailable
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self, kills: Sequence[Kill], began: float) -> None:
        for kill in kills:
            await _sleep_until(began + kill.at_s)
            pid = self._pids[kill.worker]
            if pid is None:
                continue  # not back yet on this machine: the kill is left out, and the report says so
            self._pids[kill.worker] = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(Kill(time.perf_counter() - began, kill.worker))
            task = asyncio.create_task(self._learn_pid(kill.worker, pid))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def stop(self) -> None:
        for task in self._asking:
            task.cancel()

    async def _learn_pid(self, worker: int, old_pid: int) -> None:
        while self._pids[worker] is None:
            await asyncio.sleep(0.25)
            with contextlib.suppress(self._unavailable):
                pid = await self._workers[worker].pid.remote()
                # An answer that was under way when its process was killed.
                if pid != old_pid:
                    self._pids[worker] = pid


async def _sleep_until(moment: float) -> None:
    delay = moment - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)


# --- Child: one mode ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChildTask:
    """What the parent asks of a child, as JSON on its command line."""

    mode: str
    seconds: float
    rate: float
    workers: int
    seed: int
    report_fd: int


@dataclass
class ModeRun:
    """What a child measured, as it crosses the pipe."""

    mode: str
    requests: list[Request]
    planned_kills: list[Kill]
    killed: list[Kill]
    errors: dict[str, int]
    versions: dict[str, str]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModeRun:
        requests = [Request(**{**item, "lost": [Attempt(**a) for a in item["lost"]]}) for item in data["requests"]]
        planned = [Kill(**item) for item in data["planned_kills"]]
        killed = [Kill(**item) for item in data["killed"]]
        return cls(data["mode"], requests, planned, killed, data["errors"], data["versions"])


def _child_environment(mode: Mode) -> dict[str, str]:
    environment = dict(os.environ)
    # Whatever the user has set for their own cluster must not decide what is measured.
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK", TUNING_VARIABLE):
        environment.pop(name, None)
    if mode.name == "tuned":
        environment[TUNING_VARIABLE] = "0"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_DEDUP_LOGS"] = "1"
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # hides a FutureWarning of Ray
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # under `uv run` Ray would pack the working directory
    return environment


def _child_main(argument: str) -> int:
    """Run one mode in this process. Ends early on SIGTERM, on SIGINT and when the parent is gone."""
    task = ChildTask(**json.loads(argument))
    # Neither Ray's processes nor the workers may keep the parent's pipe open.
    os.set_inheritable(task.report_fd, False)

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    import ray

    signal.signal(signal.SIGTERM, stop)  # importing Ray replaced ours
    with os.fdopen(task.report_fd, "w", buffering=1) as report:
        try:
            return asyncio.run(_run_mode(task, report))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_IGN)
            ray.shutdown()


async def _run_mode(task: ChildTask, report: TextIO) -> int:
    import ray

    def tell(kind: str, **facts: Any) -> None:
        print(json.dumps({"kind": kind, **facts}), file=report)

    _start_ray()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    loop = asyncio.get_running_loop()
    this_task = asyncio.current_task()
    assert this_task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, this_task.cancel)
    stdin = sys.stdin.fileno()

    def parent_is_gone() -> None:
        loop.remove_reader(stdin)
        this_task.cancel()

    # The parent never writes here, so readable means closed.
    loop.add_reader(stdin, parent_is_gone)

    worker_class, versions = _worker_class(task.mode)
    workers = [worker_class.remote(MODEL_LOAD_S, INFER_S) for _ in range(task.workers)]
    unavailable: type[Exception] = ray.exceptions.RayActorError
    pids = [await worker.pid.remote() for worker in workers]
    for worker in workers:  # connections and code paths are warm before anything is measured
        for _ in range(5):
            await worker.infer.remote(0)

    arrivals = plan_arrivals(task.seed, task.seconds, task.rate)
    kills = plan_kills(task.seed, task.seconds, task.workers)
    began = time.perf_counter()
    proxy = (GroupProxy if task.mode == "actorsub" else Proxy)(workers, unavailable, began)
    killer = Killer(workers, pids, unavailable)
    killing = asyncio.create_task(killer.run(kills, began))
    open_requests: set[asyncio.Task[None]] = set()

    async def keep_telling() -> None:
        while True:
            sent = len(proxy.requests)
            elapsed_s = time.perf_counter() - began
            tell("load", sent=sent, open=len(open_requests), killed=len(killer.killed), elapsed_s=elapsed_s)
            await asyncio.sleep(0.2)

    telling = asyncio.create_task(keep_telling())
    for number, at_s in enumerate(arrivals):
        await _sleep_until(began + at_s)
        request = asyncio.create_task(proxy.handle(number, at_s))
        open_requests.add(request)
        request.add_done_callback(open_requests.discard)
    await _sleep_until(began + task.seconds)
    if open_requests:
        _, late = await asyncio.wait(open_requests, timeout=DRAIN_S)
        for request in late:
            request.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    await killing
    killer.stop()
    telling.cancel()

    run = ModeRun(task.mode, proxy.requests, kills, killer.killed, proxy.errors, versions)
    tell("result", run=asdict(run))
    return 0


def _worker_class(mode: str) -> tuple[Any, dict[str, str]]:
    """The only thing that differs between the modes."""
    import ray

    versions = {"ray": str(ray.__version__)}
    if mode != "actorsub":
        return ray.remote(max_restarts=-1, num_cpus=0)(Model), versions
    import actorsub

    versions["actorsub"] = actorsub.__version__
    return actorsub.remote(max_restarts=-1, num_cpus=0, on_unavailable="raise")(Model), versions


# --- Parent: processes ----------------------------------------------------------------------------


class _Interrupted(BaseException):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class ModeFailedError(Exception):
    """A child ended without a result; the text is for the user."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `_Interrupted` once; later ones cannot disturb the cleanup."""
    raised = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise _Interrupted(signum)

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signals.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, interrupt) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Descendants:
    """All processes that came from this one since the object was made, also those whose parent has ended.

    Ray's processes outlive the driver for a moment and would be adopted by init; as their "subreaper" this
    process adopts them, so what it has to end is exactly what hangs below it in the process tree.
    """

    _PR_SET_CHILD_SUBREAPER = 36

    def __init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(self._PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._not_ours: set[int] = set()
        self._not_ours = set(self.pids())

    def pids(self) -> list[int]:
        """Process ids now, parents before their children."""
        children = self._children_by_parent()
        found: list[int] = []
        level = [os.getpid()]
        while level:
            level = [pid for parent in level for pid in children.get(parent, ()) if pid not in self._not_ours]
            found += level
        return found

    def wait(self, seconds: float, child: subprocess.Popen[bytes] | None = None) -> bool:
        """True when all are gone within `seconds`. Reaps them, `child` through its own object."""
        deadline = time.monotonic() + seconds
        while True:
            pids = self.pids()
            for pid in pids:
                if child is not None and pid == child.pid:
                    child.poll()
                else:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            if not pids:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def end(self, child: subprocess.Popen[bytes] | None, *, ask: bool) -> None:
        """Wait for all to go, after asking our children to if `ask`; then kill what is left."""
        if ask:
            children = self._children_by_parent().get(os.getpid(), [])
            self._signal([pid for pid in children if pid not in self._not_ours], signal.SIGTERM)
        if child is not None:
            # Generous, because it has a cluster to shut down.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10.0)
        # Short: some of Ray's agents wait for init to adopt them, and would wait here for good.
        if self.wait(2.0, child):
            return
        for _ in range(20):  # a process may have started another between the look and the kill
            self._signal(self.pids(), signal.SIGKILL)
            if self.wait(0.5, child):
                return

    @staticmethod
    def _signal(pids: Sequence[int], signum: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    @staticmethod
    def _children_by_parent() -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    # The name in parentheses may hold anything, so count from its end: state, parent.
                    stat = Path("/proc", entry, "stat").read_text(errors="replace")
                    children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
        return children


def _run_child(
    mode: Mode, settings: Settings, descendants: Descendants, on_report: Callable[[dict[str, Any]], None]
) -> ModeRun:
    """Run one mode in a child. Whatever happens, no process of it is left when this returns or raises."""
    read_fd, write_fd = os.pipe()
    task = ChildTask(mode.name, settings.seconds, settings.rate, settings.workers, settings.seed, write_fd)
    # The child finds modules exactly where this process does, wherever it was started from.
    code = (
        "import json, sys\n"
        "sys.path[:] = json.loads(sys.argv[1])\n"
        "from actorsub import _demo\n"
        "sys.exit(_demo._child_main(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), json.dumps(asdict(task))]
    child: subprocess.Popen[bytes] | None = None
    clean = False
    try:
        with os.fdopen(read_fd, "rb", buffering=0) as reports, tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    command,
                    env=_child_environment(mode),
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


class Progress:
    """One bar over all modes on a terminal, one line per step elsewhere."""

    # Share of a mode that is over when its load begins, and when it ends.
    _LOAD_BEGINS, _LOAD_ENDS = 0.2, 0.92

    def __init__(self, stream: TextIO, settings: Settings) -> None:
        self._stream = stream
        self._settings = settings
        self._tty = stream.isatty()
        self._index = 0
        self._step = ""

    def start(self, index: int) -> None:
        self._index = index
        self._show("starting", "starting a local Ray and its workers", 0.0)

    def report(self, report: dict[str, Any]) -> None:
        seconds = self._settings.seconds
        if report["kind"] == "result":
            self._show("stopping", "stopping", self._LOAD_ENDS)
        elif report["elapsed_s"] < seconds:
            share = self._LOAD_BEGINS + (self._LOAD_ENDS - self._LOAD_BEGINS) * report["elapsed_s"] / seconds
            text = f"requests sent {report['sent']}, open {report['open']}; workers killed {report['killed']}"
            plain = f"sending requests for {seconds:g} s"
            self._show("load", text if self._tty else plain, share)
        else:
            self._show("drain", f"waiting for {_count(report['open'], 'open request')}", self._LOAD_ENDS)

    def close(self) -> None:
        if self._tty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self, step: str, text: str, share: float) -> None:
        modes = self._settings.modes
        label = modes[self._index].label
        if not self._tty:
            if step != self._step:
                print(f"[{self._index + 1}/{len(modes)}] {label}: {text}", file=self._stream, flush=True)
        else:
            done = (self._index + share) / len(modes)
            width = 24
            bar = ("#" * round(done * width)).ljust(width, ".")
            line = f"[{bar}] {done:4.0%}  {label}: {text}"
            columns = shutil.get_terminal_size().columns
            self._stream.write("\r\x1b[K" + line[: columns - 1])
            self._stream.flush()
        self._step = step


# --- Figures: pure --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """One row of the table. Percentiles are over answered requests; None where there is nothing to count."""

    mode: str
    requests: int
    answered: int
    failed: int
    p50_s: float | None
    p99_s: float | None
    p999_s: float | None
    worst_s: float | None
    lost_s: float  # sum over attempts that ended in an actor error
    refused: int  # attempts that `.remote()` itself refused
    refused_p50_s: float | None
    refused_worst_s: float | None
    told: int  # attempts that Ray accepted and failed later
    told_p50_s: float | None
    told_worst_s: float | None
    over_1_s: int  # answered requests that took longer than a second
    kills: int
    planned_kills: int


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value with at least `share` of all at or below it, so one that occurred."""
    if not ascending:
        return None
    # Rounded first: 0.999 * 1000 is a hair above 999 in binary.
    rank = math.ceil(round(share * len(ascending), 6))
    return ascending[max(rank, 1) - 1]


def summarize(run: ModeRun) -> Summary:
    latencies = sorted(request.latency_s for request in run.requests if request.answered)
    lost = [attempt for request in run.requests for attempt in request.lost]
    refused = sorted(attempt.waited_s for attempt in lost if attempt.refused)
    told = sorted(attempt.waited_s for attempt in lost if not attempt.refused)
    return Summary(
        mode=run.mode,
        requests=len(run.requests),
        answered=len(latencies),
        failed=len(run.requests) - len(latencies),
        p50_s=percentile(latencies, 0.5),
        p99_s=percentile(latencies, 0.99),
        p999_s=percentile(latencies, 0.999),
        worst_s=percentile(latencies, 1.0),
        lost_s=math.fsum(attempt.waited_s for attempt in lost),
        refused=len(refused),
        refused_p50_s=percentile(refused, 0.5),
        refused_worst_s=percentile(refused, 1.0),
        told=len(told),
        told_p50_s=percentile(told, 0.5),
        told_worst_s=percentile(told, 1.0),
        over_1_s=sum(latency > 1.0 for latency in latencies),
        kills=len(run.killed),
        planned_kills=len(run.planned_kills),
    )


def format_duration(seconds: float | None) -> str:
    """Three digits and a unit: 850 ns, 12.3 us, 4.60 ms, 281 s."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        # Compared after rounding, or 999.6 us would read 1000 us.
        if float(f"{seconds / size:.3g}") < 1000:
            return f"{_three_digits(seconds / size) if unit != 'ns' else round(seconds / size)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def format_table(summaries: Sequence[Summary]) -> str:
    header = ["", "requests", "answered", "p50", "p99", "p99.9", "worst", "failed", "time lost waiting"]
    labels = {mode.name: mode.label for mode in MODES}
    rows = [
        [
            labels[s.mode],
            str(s.requests),
            str(s.answered),
            *(format_duration(value) for value in (s.p50_s, s.p99_s, s.p999_s, s.worst_s)),
            str(s.failed),
            format_duration(s.lost_s),
        ]
        for s in summaries
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def format_refusals(summaries: Sequence[Summary]) -> str:
    """How each mode told a caller that a worker was away."""
    labels = {mode.name: mode.label for mode in MODES}
    width = max(len(labels[s.mode]) for s in summaries)
    lines = []
    for s in summaries:
        refused, told = f"{s.refused} refused at submit", f"{s.told} told later"
        if s.refused:
            refused += f" (median {format_duration(s.refused_p50_s)}, worst {format_duration(s.refused_worst_s)})"
        if s.told:
            told += f" (median {format_duration(s.told_p50_s)}, worst {format_duration(s.told_worst_s)})"
        lines.append(f"  {labels[s.mode].ljust(width)}  {refused}, {told}")
    return "\n".join(lines)


def explain(summaries: Sequence[Summary]) -> list[str]:
    """What the figures mean: a sentence on plain handles and one on actorsub, made of the figures alone."""
    by_mode = {s.mode: s for s in summaries}
    stock, tuned, ours = (by_mode.get(mode.name) for mode in MODES)
    sentences = []
    plain = [
        f"on {label} {_count(s.refused + s.told, 'call')} to a worker that was away waited "
        f"{format_duration(s.lost_s)} in all to learn it, {_count(s.over_1_s, 'request')} took over a second"
        for s, label in ((stock, "stock Ray"), (tuned, "tuned Ray"))
        if s is not None
    ]
    if plain:
        sentences.append("; ".join(plain) + ".")
    if ours is not None:
        met = _count(ours.refused + ours.told, "call")
        text = f"on actorsub, the group passed over workers that were away, and {met} met one all the same"
        if ours.told:
            text += (
                f": {ours.told} on a worker when it was killed, over after {format_duration(ours.told_p50_s)} (median)"
            )
        text += f"; {format_duration(ours.lost_s)} in all"
        comparisons = [
            _compare(ours.lost_s, other.lost_s, label)
            for other, label in ((stock, "stock Ray"), (tuned, "tuned Ray"))
            if other is not None and other.lost_s > 0 and ours.lost_s > 0
        ]
        if comparisons:
            text += f" ({', '.join(comparisons)})"
        sentences.append(f"{text}, and {_count(ours.over_1_s, 'request')} took over a second.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _compare(ours_s: float, other_s: float, label: str) -> str:
    more = ours_s > other_s
    factor = ours_s / other_s if more else other_s / ours_s
    if factor < 1.05:
        return f"about the same as {label}"
    shown = f"{factor:,.0f}" if factor >= 9.95 else f"{factor:.1f}"
    return f"{shown} times {'more' if more else 'less'} than {label}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- Report ---------------------------------------------------------------------------------------


def _start_ray() -> None:
    """Starts a local Ray. On a machine that is very busy Ray may miss its own limit of 30 s; then once more."""
    import logging

    import ray

    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=2,  # the workers take none; this is how many idle processes Ray keeps ready
                object_store_memory=100 * 2**20,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == START_ATTEMPTS - 1 or "timed out during startup" not in str(error):
                raise


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def _print_report(settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> None:
    print(
        f"{settings.workers} workers, {settings.rate:g} requests/s for {settings.seconds:g} s in each mode, "
        f"seed {settings.seed}, {_count(len(runs[0].planned_kills), 'kill')} planned.\n"
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
    machine = _machine()
    cores = _count(machine["cores"], "core")
    software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    system = f"{machine['system']} {machine['architecture']}"
    print(f"measured with {software}, Python {machine['python']}, {system}, {cores}")


def _write_json(path: Path, settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> None:
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
        "machine": _machine(),
        "modes": {
            run.mode: {"summary": asdict(summary), **{k: v for k, v in asdict(run).items() if k != "mode"}}
            for run, summary in zip(runs, summaries, strict=True)
        },
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _draw(path: Path, settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> None:
    """Latency over time, one panel per mode on common axes. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(10, 1.0 + 2.2 * len(runs)), dpi=150, layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, run, summary in zip(panels, runs, summaries, strict=True):
        mode = next(mode for mode in MODES if mode.name == run.mode)
        for kill in run.killed:
            panel.axvline(kill.at_s, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        for answered, marker, size in ((True, "o", 9), (False, "x", 30)):
            shown = [request for request in run.requests if request.answered is answered]
            panel.scatter(
                [request.at_s for request in shown],
                [request.latency_s for request in shown],
                s=size,
                marker=marker,
                color=mode.color if answered else "black",
                alpha=0.55 if answered else 1.0,
                linewidths=0 if answered else 1.2,
                zorder=2,
            )
        panel.set_title(mode.label, loc="left", color=mode.color, fontweight="bold", fontsize=11)
        facts = f"p99 {format_duration(summary.p99_s)}, p99.9 {format_duration(summary.p999_s)}"
        facts += f", time lost waiting {format_duration(summary.lost_s)}"
        if summary.failed:
            facts += f", {summary.failed} failed (x)"
        panel.set_title(facts, loc="right", fontsize=9, color="#333333")
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].set_xlim(-0.2, settings.seconds + 0.2)
    panels[-1].set_xlabel("scheduled arrival of the request, seconds since the load began")
    figure.supylabel("latency (log scale)", fontsize=10)
    figure.suptitle(
        f"Latency of each request while workers are killed (dashed lines): "
        f"{settings.workers} workers, {settings.rate:g} requests/s",
        fontsize=11,
    )
    figure.savefig(path)


def _tick(seconds: float) -> str:
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def run(settings: Settings) -> int:
    """Run the demo; returns the exit code: 0, 1 when a mode failed, 128 + signal when interrupted."""
    progress = Progress(sys.stderr, settings)
    try:
        with _interruptible():
            descendants = Descendants()
            try:
                runs = []
                for index, mode in enumerate(settings.modes):
                    progress.start(index)
                    runs.append(_run_child(mode, settings, descendants, progress.report))
                progress.close()
                summaries = [summarize(run) for run in runs]
                _print_report(settings, runs, summaries)
                return _save(settings, runs, summaries)
            finally:
                # Finds nobody, unless a signal cut short the cleanup after a mode.
                descendants.end(None, ask=True)
    except _Interrupted as interrupted:
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
            _write_json(settings.json_file, settings, runs, summaries)
            print(f"figures saved in {settings.json_file.resolve()}")
        _draw(settings.picture, settings, runs, summaries)
        print(f"picture saved in {settings.picture.resolve()}")
    except ImportError:
        print("no picture: matplotlib is not installed; get it with: pip install 'actorsub[demo]'")
    except OSError as error:
        print(f"actorsub demo: cannot save: {error}", file=sys.stderr)
        return 1
    return 0
