"""Measures in a process of its own and writes the samples as JSON: `python bench/_variant.py OUTPUT WHAT ...`.

A process of its own because Ray reads its switches once, when it starts in a process: "tuned Ray" is the caller's
environment. Whatever is compared with each other here is measured in turns in one process, wherever that is possible;
the parent (conftest.py) hands the samples to pytest-benchmark. All times are in nanoseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import _calls
import _detection
import plain_rival
import psutil
import ray

import actorsub
from actorsub import _core, _ray_compat

now_ns = time.perf_counter_ns

RayUnavailable = ray.exceptions.ActorUnavailableError


# ---------------------------------------------------------------------------------------------------------------------
# The actor.


class Worker:
    """Its first start is quick. A restart takes `restart_s`, or, with None, never ends."""

    def __init__(self, directory: str, restart_s: float | None) -> None:
        pid_file = os.path.join(directory, "pid")
        if os.path.exists(pid_file):
            time.sleep(3600 if restart_s is None else restart_s)
        # Replaced whole, and last: whoever reads it finds an actor that is up.
        with open(pid_file + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.replace(pid_file + ".new", pid_file)

    def ping(self) -> int:
        return 1

    def echo(self, x: Any = None, y: Any = None) -> Any:
        return None

    def pair(self) -> tuple[int, int]:
        return 1, 2

    def stream(self) -> Iterator[int]:
        yield 1
        yield 2

    def take_all(self, *args: Any, **kwargs: Any) -> None:
        pass


def start(directory: str, restart_s: float | None = None) -> ray.actor.ActorHandle:
    """A local Ray and the plain handle of a Worker that is up."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    options = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0}
    plain = ray.remote(**options)(Worker).remote(directory, restart_s)
    ray.get([plain.ping.remote() for _ in range(200)])
    return plain


def pid_of(directory: str) -> int:
    return int((pathlib.Path(directory) / "pid").read_text())


def kill_and_wait(plain: ray.actor.ActorHandle, wrapped: actorsub.ActorHandle, directory: str) -> None:
    """SIGKILL, and wait until both Ray and actorsub say that the actor restarts."""
    os.kill(pid_of(directory), signal.SIGKILL)
    give_up_ns = now_ns() + 30 * 10**9
    while (
        plain._get_local_state() != plain_rival.RESTARTING
        or actorsub.state(wrapped) is not actorsub.ActorState.RESTARTING
    ):
        if now_ns() > give_up_ns:
            raise RuntimeError("the actor's death was not noticed within 30 s")
        time.sleep(0.001)


# ---------------------------------------------------------------------------------------------------------------------
# Refusal. The loops look alike on purpose: the whole expression that a user writes, attribute access included.


def loop_alone(count: int) -> float:
    """What the loops below cost by themselves: the same without the call."""
    begin = now_ns()
    for _ in itertools.repeat(None, count):
        try:  # noqa: SIM105 - the frame of the loops below
            pass
        except RayUnavailable:
            pass
    return (now_ns() - begin) / count


def refusals(handle: Any, count: int) -> float:
    """Nanoseconds for one `handle.ping.remote()` that raises, and the `except` that takes it."""
    refused = 0
    begin = now_ns()
    for _ in itertools.repeat(None, count):
        try:
            handle.ping.remote()
        except RayUnavailable:
            refused += 1
    took = now_ns() - begin
    if refused != count:
        raise RuntimeError(f"{count - refused} of {count} calls were not refused")
    return took / count


def raises(function: Callable[[], Any], error: type[BaseException], count: int) -> float:
    """The same with a function that was looked up beforehand."""
    raised = 0
    begin = now_ns()
    for _ in itertools.repeat(None, count):
        try:
            function()
        except error:
            raised += 1
    took = now_ns() - begin
    if raised != count:
        raise RuntimeError(f"{count - raised} of {count} calls did not raise")
    return took / count


def failing_calls(handle: Any, count: int) -> tuple[list[int], list[int]]:
    """Calls whose ref fails, one after the other: (until `.remote()` returned, until `get` raised)."""
    submits, outcomes = [], []
    for _ in range(count):
        begin = now_ns()
        ref = handle.ping.remote()
        submitted = now_ns()
        try:
            ray.get(ref)
        except RayUnavailable:
            outcomes.append(now_ns() - begin)
        else:
            raise RuntimeError("a call to an actor that restarts was answered")
        submits.append(submitted - begin)
    return submits, outcomes


def failing_burst(handle: Any, count: int) -> tuple[list[int], list[int]]:
    """As `failing_calls`, but all are submitted before the first outcome: for outcomes that take seconds."""
    begins, submits, outcomes, refs = [], [], [], []
    for _ in range(count):
        begins.append(now_ns())
        refs.append(handle.ping.remote())
        submits.append(now_ns() - begins[-1])
    for begin, ref in zip(begins, refs, strict=True):
        try:
            ray.get(ref)
        except RayUnavailable:
            outcomes.append(now_ns() - begin)
        else:
            raise RuntimeError("a call to an actor that restarts was answered")
    return submits, outcomes


def refusal(tuned: bool) -> dict[str, Any]:
    """Every way to be refused, in turns against one actor whose restart does not end."""
    # Ray's default takes 2 s a turn; the tuned one has time for many.
    turns, batches, batch = (40, 3, 500) if tuned else (8, 15, 500)
    source = random.Random(1)
    found: dict[str, list[float]] = {}

    def add(name: str, values: list[Any]) -> None:
        found.setdefault(name, []).extend(values)

    with tempfile.TemporaryDirectory() as directory:
        plain = start(directory)
        raising = actorsub.wrap(plain, on_unavailable="raise")
        returning = actorsub.wrap(plain, on_unavailable="ref")
        rival = plain_rival.Wrapper(plain)
        ray.get([raising.ping.remote(), returning.ping.remote(), rival.ping.remote()])
        kill_and_wait(plain, raising, directory)
        fast: list[tuple[str, Callable[[], float]]] = [
            ("loop", lambda: loop_alone(batch)),
            # A C function of the interpreter that raises at once: how cheap it can be at all.
            ("[].pop() raising", lambda: raises([].pop, IndexError, batch)),
            ("actorsub raise", lambda: refusals(raising, batch)),
            ("actorsub raise, method kept", lambda: raises(raising.ping.remote, RayUnavailable, batch)),
            ("plain-Python rival", lambda: refusals(rival, batch)),
            ("plain-Python rival, method kept", lambda: raises(rival.ping.remote, RayUnavailable, batch)),
        ]
        for _, measure in fast:
            measure()
        failing_calls(returning, 50)
        for _ in range(turns):
            if tuned:
                submits, outcomes = failing_calls(plain, 25)
            else:
                # Ray ends such calls on ticks 1 s apart: without this, every burst would start right after a tick.
                time.sleep(source.random())
                submits, outcomes = failing_burst(plain, 10)
            add("Ray submit", submits)
            add("Ray outcome", outcomes)
            # Ray's own threads work on for a moment after a failure.
            time.sleep(0.02)
            for _ in range(batches):
                for name, measure in source.sample(fast, len(fast)):
                    add(name, [measure()])
            submits, outcomes = failing_calls(returning, 30)
            add("actorsub ref submit", submits)
            add("actorsub ref outcome", outcomes)
        ray.shutdown()
    return {"samples": found, "batch": batch}


# ---------------------------------------------------------------------------------------------------------------------
# Live actor.


def calls_of(function: Callable[[Any], Any], argument: Any, count: int) -> float:
    begin = now_ns()
    for _ in itertools.repeat(None, count):
        function(argument)
    return (now_ns() - begin) / count


def calls_without_argument(function: Callable[[], Any], count: int) -> float:
    begin = now_ns()
    for _ in itertools.repeat(None, count):
        function()
    return (now_ns() - begin) / count


def accesses(handle: Any, count: int) -> float:
    begin = now_ns()
    for _ in itertools.repeat(None, count):
        handle.ping  # noqa: B018 - the access is what is measured
    return (now_ns() - begin) / count


def state() -> dict[str, Any]:
    """`actorsub.state(h)` and Ray's `h._get_local_state()` in turns."""
    found: dict[str, list[float]] = {"actorsub.state(h)": [], "h._get_local_state()": []}
    with tempfile.TemporaryDirectory() as directory:
        plain = start(directory)
        wrapped = actorsub.wrap(plain)
        for turn in range(400):
            pair = [
                ("actorsub.state(h)", lambda: calls_of(actorsub.state, wrapped, 2000)),
                ("h._get_local_state()", lambda: calls_without_argument(plain._get_local_state, 2000)),
            ]
            for name, measure in pair if turn % 2 else pair[::-1]:
                found[name].append(measure())
        ray.shutdown()
    return {"samples": found}


KILOBYTE = "x" * 1000
# What a call looks like -> function of the handle that makes it. One expression each, as a user writes it.
CALLS: dict[str, Callable[[Any], Any]] = {
    "no arguments": lambda handle: handle.ping.remote(),
    "one positional": lambda handle: handle.echo.remote(1),
    "two, one by keyword": lambda handle: handle.echo.remote(1, y=2),
    "a string of 1 kB": lambda handle: handle.echo.remote(KILOBYTE),
}
# The same for `core_alone`: method, args, kwargs.
PARTS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "no arguments": ("ping", (), {}),
    "one positional": ("echo", (1,), {}),
    "two, one by keyword": ("echo", (1,), {"y": 2}),
    "a string of 1 kB": ("echo", (KILOBYTE,), {}),
}
# Others, which must not cost more than they do through the plain handle. A ref as argument is added by `submit`.
OTHER_CALLS: dict[str, Callable[[Any], Any]] = {
    "1 MB of bytes": lambda handle: handle.echo.remote(MEGABYTE),
    "a list of 100 floats": lambda handle: handle.echo.remote(FLOATS),
    "the handle itself": lambda handle: handle.echo.remote(handle),
    "an empty set": lambda handle: handle.echo.remote(set()),
    "*args, **kwargs": lambda handle: handle.take_all.remote(1, 2, a=3, b=4),
    ".options(name=)": lambda handle: handle.ping.options(name="ping").remote(),
    "two return values": lambda handle: handle.pair.options(num_returns=2).remote(),
    "no return value": lambda handle: handle.ping.options(num_returns=0).remote(),
    "a generator": lambda handle: handle.stream.remote(),
}
MEGABYTE = b"x" * 1_000_000
FLOATS = [float(number) for number in range(100)]


def core_alone(wrapped: Any, shape: str) -> Callable[[], Any]:
    """Gives the call to Ray's core with arguments made beforehand: what any way to submit it costs at least. Returns a
    list of refs."""
    name, args, kwargs = PARTS[shape]
    arguments, place, num_returns, parameters = _ray_compat.submission_of(getattr(wrapped, name)._actorsub_inner, None)
    flat = _core.Submission(arguments, place, num_returns, parameters).flatten(args, kwargs)
    submit = getattr(ray._private.worker.global_worker.core_worker, _ray_compat.direct_binding()[1])
    return functools.partial(submit, *arguments[:place], flat, *arguments[place + 1 :])


def submissions(
    ends: list[tuple[str, Callable[[], Any]]], behind: Any, count: int, alone: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Nanoseconds for one submission through each of the ends, call by call in turns, and, where they are `alone`, for
    letting go of what it returned: medians over `count` calls each.

    Medians of single calls, since a thread that is descheduled in the middle of one call would spoil the mean of a
    whole batch. The answers are waited for outside of the measurement: `alone` each before the next call, else all at
    the end. What gives no ref has ended when a later call of `behind`, a handle of the same actor, is answered.
    """
    refs = []
    taken: dict[str, list[int]] = {name: [] for name, _ in ends}
    let_go: dict[str, list[int]] = {name: [] for name, _ in ends} if alone else {}
    for i in range(count):
        # Each end comes at each place equally often.
        first = i % len(ends)
        for name, call in ends[first:] + ends[:first]:
            begin = now_ns()
            ref = call()
            taken[name].append(now_ns() - begin)
            if not alone:
                refs += ref if isinstance(ref, list) else [ref]
            elif isinstance(ref, ray.ObjectRefGenerator):
                ray.get(list(ref))
            else:
                ray.get(behind.ping.remote() if ref is None else ref)
            if alone:
                # Not in the time of the next call, which would pay for another end's ref.
                begin = now_ns()
                ref = None
                let_go[name].append(now_ns() - begin)
    ray.get(refs)
    return medians(taken), medians(let_go)


def medians(lists: dict[str, list[int]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in lists.items()}


def submit() -> dict[str, Any]:
    """`.remote()` on a live actor: the plain handle, the wrapped one and, where it can be told, Ray's core alone, in
    turns, for each way and shape of call."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {"alone": {}, "burst": {}, "other": {}}

    def add(way: str, shape: str, name: str, value: float) -> None:
        found[way].setdefault(shape, {}).setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as directory:
        plain = start(directory)
        wrapped = actorsub.wrap(plain)
        handles = [("plain", plain), ("wrapped", wrapped)]

        def ends_of(call: Callable[[Any], Any]) -> list[tuple[str, Callable[[], Any]]]:
            return [(name, functools.partial(call, handle)) for name, handle in handles]

        shapes = {shape: ends_of(call) for shape, call in CALLS.items()}
        ray.get(wrapped.ping.remote())
        shapes["no arguments, method kept"] = [(name, handle.ping.remote) for name, handle in handles]
        ref = ray.put(1)
        others = {shape: ends_of(call) for shape, call in OTHER_CALLS.items()}
        others["a ref"] = ends_of(lambda handle: handle.echo.remote(ref))
        for ends in shapes.values():
            submissions(ends, plain, 200, alone=False)
        for turn in range(100):
            for shape, ends in shapes.items():
                floor = [("core", core_alone(wrapped, shape))] if shape in PARTS else []
                taken, let_go = submissions(ends + floor, plain, 30, alone=True)
                for name, value in taken.items():
                    add("alone", shape, name, value)
                if shape == "no arguments":
                    for name, value in let_go.items():
                        add("alone", "letting go of the ref", name, value)
                for name, value in submissions(ends, plain, 30, alone=False)[0].items():
                    add("burst", shape, name, value)
            for shape, ends in others.items():
                for name, value in submissions(ends, plain, 10, alone=True)[0].items():
                    add("other", shape, name, value)
            for name, handle in handles if turn % 2 else handles[::-1]:
                add("alone", "attribute h.ping", name, accesses(handle, 1000))
        ray.shutdown()
    return {"samples": found}


# ---------------------------------------------------------------------------------------------------------------------
# Kills and restarts under an open-loop load.

FIRST_KILL_S = 1.0
KILL_PERIOD_S = 3.2
KILL_JITTER_S = 0.2
DRAIN_S = 10.0


def plan_kills(seed: int, seconds: float) -> list[float]:
    source = random.Random(seed)
    count = int((seconds - FIRST_KILL_S) // KILL_PERIOD_S) + 1
    return [FIRST_KILL_S + i * KILL_PERIOD_S + source.uniform(0, KILL_JITTER_S) for i in range(count)]


class Load:
    """Calls at fixed times, whatever became of the earlier ones; call i belongs to thread i % threads.

    Every list is indexed by the call, and each entry is written once, by one thread.
    """

    def __init__(self, handle: Any, rate: float, seconds: float, threads: int) -> None:
        count = int(rate * seconds)
        self.due_ns = [int(i * 1e9 / rate) for i in range(count)]
        self.late_ns = [0] * count
        self.submit_ns = [0] * count
        self.outcome_ns = [0] * count
        self.ends = ["open"] * count
        self._handle = handle
        self._began_ns = 0
        self._threads = [threading.Thread(target=self._run, args=(i, threads)) for i in range(threads)]
        self._futures: list[Any] = [None] * count

    def start(self) -> int:
        """Starts the threads; returns the time from which all times count."""
        self._began_ns = now_ns() + 50_000_000
        for thread in self._threads:
            thread.start()
        return self._began_ns

    def finish(self) -> None:
        """Waits for the threads and, up to DRAIN_S, for the outcomes. What is still open then counts as lasting until
        now, which is too little."""
        for thread in self._threads:
            thread.join()
        give_up_ns = now_ns() + int(DRAIN_S * 1e9)
        while "open" in self.ends and now_ns() < give_up_ns:
            time.sleep(0.02)
        for i, end in enumerate(self.ends):
            if end == "open":
                self.outcome_ns[i] = now_ns() - self._began_ns - self.due_ns[i]

    def _run(self, first: int, step: int) -> None:
        for i in range(first, len(self.due_ns), step):
            due_ns = self._began_ns + self.due_ns[i]
            if (wait_ns := due_ns - now_ns()) > 0:
                time.sleep(wait_ns / 1e9)
            self._call(i, due_ns)

    def _call(self, i: int, due_ns: int) -> None:
        begin = now_ns()
        try:
            ref = self._handle.ping.remote()
        except RayUnavailable:
            self.submit_ns[i] = self.outcome_ns[i] = now_ns() - begin
            self.ends[i] = "refused"
        else:
            self.submit_ns[i] = now_ns() - begin
            # Nobody blocks on the outcome: a submitter that waited would submit least when calls are slowest.
            self._futures[i] = ref.future()
            self._futures[i].add_done_callback(functools.partial(self._done, i, begin))
        self.late_ns[i] = begin - due_ns

    def _done(self, i: int, begin: int, future: Any) -> None:
        self.outcome_ns[i] = now_ns() - begin
        error = future.exception()
        if error is None:
            self.ends[i] = "answered"
        else:
            self.ends[i] = "failed" if isinstance(error, ray.exceptions.RayActorError) else type(error).__name__


def restarts(handle_kind: str, threads: int, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """One handle, `threads` threads that call it, and a killer; see Load."""
    kills, missed = [], 0
    with tempfile.TemporaryDirectory() as directory:
        plain = start(directory, restart_s=1.0)
        handle = {
            "plain": lambda: plain,
            "rival": lambda: plain_rival.Wrapper(plain),
            "actorsub": lambda: actorsub.wrap(plain, on_unavailable="raise"),
        }[handle_kind]()
        ray.get([handle.ping.remote() for _ in range(100)])
        gc.collect()
        load = Load(handle, rate, seconds, threads)
        began_ns = load.start()
        killed = 0
        for at_s in plan_kills(seed, seconds):
            time.sleep(max(0.0, (began_ns - now_ns()) / 1e9 + at_s))
            pid = pid_of(directory)
            if pid == killed:
                # Not back yet from the last kill. The schedule goes on, so that all runs have the same one.
                missed += 1
                continue
            os.kill(pid, signal.SIGKILL)
            killed = pid
            kills.append((now_ns() - began_ns) / 1e9)
        load.finish()
        ray.shutdown()
    return {
        "submit": load.submit_ns,
        "outcome": load.outcome_ns,
        "late": load.late_ns,
        "ends": load.ends,
        "kills_s": kills,
        "kills_missed": missed,
    }


# ---------------------------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------------------------------
# What handles and refs cost beside the time to submit.


def cost() -> dict[str, Any]:
    """Time to wrap a handle, and memory of a handle with one method used and of a ref, wrapped and plain."""
    with tempfile.TemporaryDirectory() as directory:
        plain = start(directory)
        handles = 10_000
        wraps = []
        kept: list[Any] = []
        for _ in range(handles // 500):
            begin = now_ns()
            kept += [actorsub.wrap(plain, silence_timeout_s=3.0) for _ in range(500)]
            wraps.append((now_ns() - begin) / 500)
        del kept
        bytes_of = {
            "handle": grown_bytes(lambda: actorsub.wrap(plain, silence_timeout_s=3.0), handles),
            "handle, one method used": grown_bytes(lambda: used(actorsub.wrap(plain, silence_timeout_s=3.0)), handles),
        }
        wrapped = actorsub.wrap(plain)
        # In turns, and the first of each only warms up.
        for _ in range(2):
            for name, one in (("ref, plain", plain), ("ref, wrapped", wrapped)):
                bytes_of[name] = grown_bytes(one.ping.remote, 5_000)
    return {"wrap_ns": wraps, "bytes": bytes_of}


def used(handle: Any) -> Any:
    _ = handle.ping
    return handle


def grown_bytes(make: Callable[[], Any], count: int) -> float:
    """What one of `count` that are kept adds to the memory of this process."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    kept = [make() for _ in range(count)]
    if isinstance(kept[0], ray.ObjectRef):
        ray.wait(kept, num_returns=count)
    grown = psutil.Process().memory_info().rss - before
    del kept
    gc.collect()
    return grown / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=pathlib.Path)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("refusal")
    one.add_argument("--tuned", action="store_true")
    commands.add_parser("state")
    commands.add_parser("submit")
    commands.add_parser("cost")
    one = commands.add_parser("restarts")
    one.add_argument("--handle", dest="handle_kind", choices=("plain", "rival", "actorsub"), required=True)
    one.add_argument("--threads", type=int, required=True)
    one.add_argument("--seconds", type=float, required=True)
    one.add_argument("--rate", type=float, required=True)
    one.add_argument("--seed", type=int, required=True)
    one = commands.add_parser("in-flight")
    one.add_argument("--rounds", type=int, required=True)
    commands.add_parser("node-killed").add_argument("--rounds", type=int, required=True)
    one = commands.add_parser("big-process")
    one.add_argument("--rounds", type=int, required=True)
    one.add_argument("--megabytes", type=int, required=True)
    one = commands.add_parser("frozen")
    one.add_argument("--silence-s", type=float, required=True)
    one.add_argument("--in-flight-s", type=float, required=True)
    one.add_argument("--rounds", type=int, required=True)
    one = commands.add_parser("live")
    one.add_argument("--turns", type=int, required=True)
    one.add_argument("--calls", type=int, required=True)
    for what in ("call-round-trips", "call-throughput"):
        one = commands.add_parser(what)
        one.add_argument("--turns", type=int, required=True)
        one.add_argument("--calls", type=int, required=True)
    one = commands.add_parser("call-waiting")
    one.add_argument("--line", type=int, required=True)
    one.add_argument("--probes", type=int, required=True)
    one.add_argument("--kept", type=int, required=True)
    one = commands.add_parser("idle")
    one.add_argument("--actors", type=int, required=True)
    one.add_argument("--handles", type=int, required=True)
    one.add_argument("--seconds", type=float, required=True)
    arguments = vars(parser.parse_args())
    what, output = arguments.pop("what"), arguments.pop("output")
    measures: dict[str, Callable[..., dict[str, Any]]] = {
        "refusal": refusal,
        "state": state,
        "submit": submit,
        "cost": cost,
        "restarts": restarts,
        "in-flight": _detection.in_flight,
        "big-process": _detection.big_process,
        "node-killed": _detection.node_killed,
        "frozen": _detection.frozen,
        "live": _detection.live,
        "idle": _detection.idle,
        "call-round-trips": _calls.round_trips,
        "call-throughput": _calls.throughput,
        "call-waiting": _calls.waiting,
    }
    result = measures[what](**arguments)
    output.write_text(json.dumps(result))
    # Ray's processes are this one's children: it is over when they are.
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
