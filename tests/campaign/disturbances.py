"""What happens around the calls: a schedule drawn from the seed, and the hand that carries it out.

Only processes that the campaign's actors wrote down as their own are signalled, and only after a look at what they are.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

import actorsub
from campaign import network
from campaign.callers import Target, World

#: Mean pause between two of them.
PAUSE_S = 1.2
#: Between two that concern the network, from the end of one to the beginning of the next.
NETWORK_PAUSE_S = 4.0

#: How often each kind is drawn, in relation to the others.
SHARES = {
    "kill": 5, "stop": 5, "ray.kill": 2, "exit": 2, "cut": 3, "rst": 2, "silence": 2, "shutdown": 1, "members": 2,
}  # fmt: skip
EXITS = ("exit_actor", "sys.exit", "constructor")
NETWORK = ("rst", "silence")
#: What `--without` takes: these, and what callers do by themselves.
NAMES = (*SHARES, "deadlines", "cancels", "callbacks", "signals", "late", "returned", "retries")


class Disturbance(NamedTuple):
    at_s: float  #: after the beginning
    kind: str
    choice: float  #: of whom: from 0 to 1
    duration_s: float
    how: str  #: of an exit


def schedule(seed: int, seconds: float, without: frozenset[str]) -> list[Disturbance]:
    """The same for the same arguments. Whatever lasts ends before `seconds` are over."""
    rng = random.Random(f"{seed}:schedule")
    kinds = [kind for kind in SHARES if kind not in without]
    made: list[Disturbance] = []
    at_s, network_s = 0.0, 0.0
    while kinds:
        at_s += rng.expovariate(1 / PAUSE_S)
        kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
        limits_s = {"stop": (0.2, 6.0), "rst": (0.2, 1.0), "silence": (0.5, 5.0)}.get(kind, (0.0, 0.0))
        one = Disturbance(at_s, kind, rng.random(), rng.uniform(*limits_s), rng.choice(EXITS))
        if at_s > seconds:
            break
        if kind in NETWORK:
            if at_s < network_s:
                continue
            network_s = at_s + one.duration_s + NETWORK_PAUSE_S
        if at_s + one.duration_s < seconds:
            made.append(one)
    return made


class Process:
    """The process of an actor's present incarnation, held so that its number cannot come to mean another one."""

    def __init__(self, directory: pathlib.Path, name: str) -> None:
        self.pid = int((directory / f"{name}.starts").read_text().split()[-1])
        self._descriptor = os.pidfd_open(self.pid)
        if not pathlib.Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"ray::"):
            self.close()
            raise ProcessLookupError(f"process {self.pid} is no actor")

    def send(self, number: int) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)


class Conductor:
    """Carries out a schedule. All that it began is undone when `run` returns."""

    def __init__(self, world: World, net: network.Network | None) -> None:
        self.world = world
        self.net = net
        self.done: collections.Counter[str] = collections.Counter()
        self.events: list[str] = []
        self._undo: list[tuple[float, int, str, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def run(self, plan: list[Disturbance], seconds: float, over: threading.Event) -> None:
        begin_s = time.monotonic()
        waiting = collections.deque(plan)
        try:
            while not over.is_set():
                now_s = time.monotonic() - begin_s
                if now_s >= seconds:
                    return
                while self._undo and self._undo[0][0] <= time.monotonic():
                    self._undo_one()
                if waiting and waiting[0].at_s <= now_s:
                    self._do(waiting.popleft())
                over.wait(0.02)
        finally:
            while self._undo:
                self._undo_one()

    def _note(self, what: str) -> None:
        self.events.append(f"{time.monotonic():.3f} {what}")

    def _later(self, after_s: float, what: str, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + after_s, next(self._numbers), what, undo))

    def _undo_one(self) -> None:
        _, _, what, undo = heapq.heappop(self._undo)
        undo()
        self._note(what)

    def _do(self, one: Disturbance) -> None:
        if one.kind in NETWORK:
            assert self.net is not None
            begin, end = {
                "rst": (self.net.begin_reset, self.net.end_reset),
                "silence": (self.net.begin_silence, self.net.end_silence),
            }[one.kind]
            begin()
            self._later(one.duration_s, f"end of {one.kind}", end)
            self._count(one, "the far node")
            return
        if one.kind == "shutdown":
            actorsub.shutdown()
            self._count(one, "the library's threads")
            return
        if one.kind in ("exit", "members"):
            self._change_group(one)
            return
        target = self.world.targets[int(one.choice * len(self.world.targets))]
        if one.kind == "ray.kill":
            ray.kill(target.plain, no_restart=False)
            self._count(one, target.name)
            return
        try:
            process = Process(self.world.directory, target.name)
        except (OSError, ValueError):
            # It is between two incarnations.
            return
        self._to_process(one, target, process)

    def _change_group(self, one: Disturbance) -> None:
        names = sorted(self.world.groups)
        group = self.world.groups[names[int(one.choice * len(names))]]
        members = list(group)
        # Not the last that is up: a group without members has nothing to say.
        if len([member for member in members if member.state.value == "alive"]) < 2:
            return
        handle = members[int(one.choice * 1000) % len(members)].handle
        target = next(target for target in list(self.world.targets) if target.plain == handle)
        if one.kind == "members":
            group.remove(handle)
            group.add(handle)
        elif one.how == "constructor":
            (self.world.directory / f"{target.name}.broken").touch()
            ray.kill(target.plain, no_restart=False)
        else:
            handle.leave.options(on_unavailable="ref").remote(one.how)
        self._count(one, f"{target.name} {one.how if one.kind == 'exit' else ''}")

    def _to_process(self, one: Disturbance, target: Target, process: Process) -> None:
        name = f"{target.name} pid {process.pid}"
        try:
            if one.kind == "cut":
                port = network.port_of(process.pid, self.net)
                if port is not None:
                    ip = self.net.far_ip if self.net and target.is_far else self._near_ip()
                    network.cut(ip, port)
                    self._count(one, f"{name} port {port}")
            elif one.kind == "kill":
                process.send(signal.SIGKILL)
                self._count(one, name)
            else:
                process.send(signal.SIGSTOP)
                self._later(one.duration_s, f"continued {name}", lambda: self._continue(process))
                self._count(one, name)
                return
        except ProcessLookupError:
            pass
        process.close()

    def _near_ip(self) -> str:
        return self.net.near_ip if self.net else ray.util.get_node_ip_address()

    def _continue(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGCONT)
        process.close()

    def _count(self, one: Disturbance, whom: str) -> None:
        self.done[one.kind] += 1
        self._note(f"{one.kind} {whom}{f' for {one.duration_s:.2f} s' if one.duration_s else ''}")


def state_of_process(world: World, target: Target) -> Any:
    """Its pid where it is there, else None."""
    try:
        process = Process(world.directory, target.name)
    except (OSError, ValueError):
        return None
    process.close()
    return process.pid
