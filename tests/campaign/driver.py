"""The process that calls: makes actors and callers, has them disturbed, and looks at what is left afterwards."""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import gc
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

import actorsub
from actorsub import _core
from campaign import disturbances, network
from campaign.actors import AsyncWorker, Helper, Worker
from campaign.callers import HandlerCaller, LoopCaller, Target, ThreadCaller, World, is_injected, raise_one

WARM_UP_S = 4.0
#: Without a deadline, a call has to have ended so long after the disturbances.
LIMIT_S = 20.0
#: A healthy actor has to answer within this time after them, or after its own plain answer.
HEALTHY_S = 3.0
#: How long to wait for what has to come back to where it was.
SETTLE_S = 15.0


class LogWatch(logging.Handler):
    """What the library logs: only exceptions that the campaign threw are expected with a traceback."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self.world = world
        self.counts: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[str(record.msg)[:70]] += 1
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not is_injected(error):
            self.world.violate("nothing unexpected is logged", logging.Formatter().format(record))


class Campaign:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seconds: float = arguments.seconds
        self.directory = pathlib.Path(arguments.directory)
        self.net = network.Network.from_json(arguments.network) if arguments.network else None
        self.world = World(self.directory, arguments.seed, frozenset(filter(None, arguments.without.split(","))))
        self.conductor = disturbances.Conductor(self.world, self.net)
        self.log = LogWatch(self.world)
        self.facts: dict[str, Any] = {}
        self._made = 0
        self._over = threading.Event()
        self._lock = threading.Lock()

    # -- Actors.

    def _make(self, name: str, kind: str, *, is_far: bool = False, **options: Any) -> Target:
        rng = self.world.random(name)
        cls: Any = AsyncWorker if kind == "async" else Worker
        is_far = is_far and self.net is not None
        placed = {"far" if is_far else "near": 0.01}
        options = {"max_restarts": -1, "num_cpus": 0, "resources": placed, "name": name, **options}
        plain = ray.remote(**options)(cls).remote(str(self.directory), name, rng.choice([0.0, 0.2, 1.0]))
        # Short limits here and there, so that a stop of some seconds passes both.
        policy = rng.choice([{}, {"silence_timeout_s": 0.5, "silence_in_flight_s": 2.0}])
        target = Target(name, actorsub.wrap(plain, **policy), plain, kind, is_far)
        listener_rng = self.world.random(f"{name} listener")

        def listen(*_: object) -> None:
            if self.world.has("callbacks") and listener_rng.random() < 0.15:
                raise_one(listener_rng)

        actorsub.on_state_change(target.handle, listen)
        return target

    def make_actors(self) -> None:
        world = self.world
        world.helper = ray.remote(num_cpus=0, resources={"near": 0.01})(Helper).remote()
        world.targets = [
            self._make("sync-1", "sync"),
            self._make("sync-2", "sync"),
            self._make("sync-far", "sync", is_far=True),
            self._make("async-1", "async", max_concurrency=20),
            self._make("async-far", "async", is_far=True),
            self._make("threaded-1", "threaded", max_concurrency=4),
        ]
        if world.has("retries"):
            world.targets.append(self._make("retries-1", "retries", max_task_retries=2))
        for retry in ("unsent", "always", "never"):
            # One that a kill ends for good, and one behind the network.
            members = [
                self._make(f"{retry}-0", "member", max_restarts=0),
                self._make(f"{retry}-1", "member", is_far=True),
            ]
            world.targets.extend(members)
            world.groups[retry] = self._make_group(retry, members)
        actorsub.get([target.handle.ping.remote() for target in world.targets], timeout=120)

    def _make_group(self, retry: str, members: list[Target]) -> actorsub.ReplicaGroup:
        world = self.world
        failure_rng, factory_rng, balancer_rng = (
            world.random(f"{retry} {name}") for name in ("is_failure", "factory", "balancer")
        )

        def is_failure(_: BaseException) -> bool:
            if world.has("callbacks") and failure_rng.random() < 0.1:
                raise_one(failure_rng)
            return False

        def factory() -> Any:
            if world.has("callbacks") and factory_rng.random() < 0.2:
                raise_one(factory_rng)
            with self._lock:
                self._made += 1
                name = f"{retry}-{self._made + 1}"
            target = self._make(name, "member")
            world.targets.append(target)
            return target.handle

        def balancer(members: list[actorsub.group.MemberState], _: Any) -> Any:
            if world.has("callbacks") and balancer_rng.random() < 0.02:
                raise_one(balancer_rng)
            return balancer_rng.choice(members)

        return actorsub.ReplicaGroup(
            [member.handle for member in members],
            retry=retry,  # type: ignore[arg-type]
            balancer=balancer if retry == "never" else "least_loaded",
            is_failure=is_failure,
            factory=factory,
        )

    # -- The course of it. On a thread of its own, since the main thread is one of those who call.

    def run(self) -> None:
        world = self.world
        self.main_callers: list[ThreadCaller] = []
        self._phase("warm-up", self._call_for, WARM_UP_S, "warm")
        before = self._levels()
        end_s = self._phase("disturbed", self._call_for, self.seconds, "")
        self._look_at_levels(before)
        self._look_at_stats()
        self.facts |= {
            "last_s": end_s + LIMIT_S,
            "disturbances": dict(self.conductor.done),
            "events": self.conductor.events,
            "logged": dict(self.log.counts),
            "violations": [list(one) for one in world.violations],
        }
        (self.directory / "report.json").write_text(json.dumps(self.facts))

    def _phase(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        print(f"{name} ...", file=sys.stderr, flush=True)
        return function(*arguments)

    def _call_for(self, seconds: float, prefix: str) -> float:
        """Has everybody call for so long, disturbed unless it is the warm-up; returns when the disturbances ended."""
        world = self.world
        callers: list[ThreadCaller | LoopCaller] = [ThreadCaller(world, f"{prefix}thread{i}") for i in range(4)]
        callers += [LoopCaller(world, f"{prefix}loop{i}") for i in range(2)]
        threads = [threading.Thread(target=self._guarded(one), name=one.name, daemon=True) for one in callers]
        main = ThreadCaller(world, f"{prefix}main")
        # At work more than asleep, so that the signal handler interrupts it everywhere.
        main.pause_s = 0.005
        self.main_callers.append(main)
        callers.append(main)
        for thread in threads:
            thread.start()
        if prefix:
            time.sleep(seconds)
        else:
            plan = disturbances.schedule(world.seed, seconds, world.without)
            self.conductor.run(plan, seconds, self._over)
        end_s = time.monotonic()
        for one in callers:
            one.stop.set()
        if not prefix:
            self._look_at_health(end_s)
        while not all(one.is_over for one in callers) and time.monotonic() < end_s + LIMIT_S:
            time.sleep(0.02)
        for one in callers:
            one.give_up.set()
        end_of_patience_s = time.monotonic() + 5
        while not all(one.is_over for one in callers) and time.monotonic() < end_of_patience_s:
            time.sleep(0.02)
        stuck = [one.name for one in callers if not one.is_over]
        if stuck:
            with (self.directory / "stacks").open("w") as file:
                faulthandler.dump_traceback(file)
            world.violate("nothing hangs", f"{', '.join(stuck)} still wait {LIMIT_S + 5} s after the disturbances")
        return end_s

    def _guarded(self, caller: ThreadCaller | LoopCaller) -> Callable[[], None]:
        def run() -> None:
            try:
                caller.run()
            except BaseException as error:
                logging.getLogger("campaign").exception("%s", caller.name)
                self.world.violate("a user's code never stops ours", f"{caller.name} was ended by {error!r}")
                caller.is_over = True

        return run

    def be_main(self, handler_wanted: bool) -> None:
        """On the main thread, until the campaign is over: calls, interrupted by a signal handler that calls, too."""
        began = 0
        while not self._over.is_set():
            if len(self.main_callers) == began:
                time.sleep(0.01)
                continue
            main = self.main_callers[began]
            began += 1
            if handler_wanted:
                handler = HandlerCaller(self.world, f"{main.name}handler", main)

                def handle(*arguments: object, handler: HandlerCaller = handler, main: ThreadCaller = main) -> None:
                    if not main.stop.is_set():
                        handler.handle(*arguments)
                        # Once more, and never within itself.
                        signal.setitimer(signal.ITIMER_REAL, handler.rng.uniform(0.005, 0.1))

                signal.signal(signal.SIGALRM, handle)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            self._guarded(main)()
            signal.setitimer(signal.ITIMER_REAL, 0)

    # -- What is looked at afterwards.

    def _look_at_health(self, end_s: float) -> None:
        world = self.world
        there = [target for target in list(world.targets) if disturbances.state_of_process(world, target)]
        answers = world.helper.which_answer.remote({one.name: [one.plain] for one in there}, LIMIT_S)
        answered_s: dict[str, dict[str, float]] = {one.name: {} for one in there}
        threads = [
            threading.Thread(target=self._ask, args=(one, way, answered_s[one.name], end_s + LIMIT_S), daemon=True)
            for one in there
            for way in ("remote", "call")
        ]
        for thread in threads:
            thread.start()
        plain_s = ray.get(answers, timeout=LIMIT_S + 30)
        for thread in threads:
            thread.join()
        self.facts["healthy"] = len(plain_s)
        for one in there:
            if one.name not in plain_s:
                continue
            for way in ("remote", "call"):
                came_s = answered_s[one.name].get(way)
                late = f"{came_s - plain_s[one.name]:.1f} s after that" if came_s else f"not within {LIMIT_S} s"
                if came_s is None or came_s > max(end_s, plain_s[one.name]) + HEALTHY_S:
                    world.violate(
                        "a healthy actor is never lost",
                        f"{one.name}: its plain handle was answered {plain_s[one.name] - end_s:.1f} s after the "
                        f"disturbances, .{way}() {late}; {actorsub.state(one.handle)}, {actorsub.stats(one.handle)}",
                    )
            if actorsub.state(one.handle) is not actorsub.ActorState.ALIVE:
                world.violate("a healthy actor is never lost", f"{one.name} is {actorsub.state(one.handle)}")

    def _ask(self, target: Target, way: str, answered_s: dict[str, float], until_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                if way == "remote":
                    actorsub.get(target.handle.ping.remote(), timeout=max(0.1, until_s - time.monotonic()))
                else:
                    target.handle.ping.options(timeout_s=max(0.1, until_s - time.monotonic())).call().result()
                answered_s[way] = time.monotonic()
                return
            except ray.exceptions.ActorDiedError:
                return
            except ray.exceptions.RayError:
                time.sleep(0.05)

    def _levels(self) -> dict[str, Any]:
        gc.collect()
        descriptors: collections.Counter[str] = collections.Counter()
        for path in pathlib.Path("/proc/self/fd").iterdir():
            try:
                what = os.readlink(path)
            except OSError:
                # The one that listed them.
                continue
            kind, found, rest = what.partition(":")
            descriptors["file" if not found else rest if kind == "anon_inode" else kind] += 1
        return {
            # A "Dummy" is a thread of Ray's that has run Python code; it stays as long as Ray wants.
            "threads": sorted(one.name for one in threading.enumerate() if not one.name.startswith("Dummy")),
            "own threads": {thread for thread in threading.enumerate() if thread.name.startswith("actorsub")},
            "descriptors": dict(descriptors),
            "slots": _core.slot_count(),
            "calls": sum(isinstance(one, actorsub.Call) for one in gc.get_objects()),
            "outcomes": sum(len(actor.parties) for actor in _core.live_actors()),
        }

    def _look_at_levels(self, before: dict[str, Any]) -> None:
        expected_slots = before["slots"] + self._made
        end_s = time.monotonic() + SETTLE_S
        while True:
            after = self._levels()
            wrong = []
            if after["threads"] != before["threads"]:
                wrong.append(f"threads {after['threads']}, before {before['threads']}")
            if after["calls"]:
                wrong.append(f"{after['calls']} Calls")
            if after["outcomes"]:
                wrong.append(f"{after['outcomes']} waits for refs")
            if after["slots"] > expected_slots:
                wrong.append(f"{after['slots']} slots for {expected_slots} actors")
            for kind, count in after["descriptors"].items():
                # Ray's own sockets come and go with its workers; of ours an actor has at most one, and three pidfds.
                room = {"socket": 8 + 2 * self._made, "[pidfd]": 3 * self._made}.get(kind, 0)
                if count > before["descriptors"].get(kind, 0) + room:
                    wrong.append(f"{count} descriptors of {kind}, {before['descriptors']} before")
            if not wrong or time.monotonic() > end_s:
                break
            time.sleep(0.2)
        for one in wrong:
            self.world.violate("nothing leaks", one)
        gone = before["own threads"] - after["own threads"]
        if gone and not self.conductor.done["shutdown"]:
            self.world.violate("a user's code never stops ours", f"threads that ended: {[one.name for one in gone]}")
        self.facts["descriptors"] = [before["descriptors"], after["descriptors"]]

    def _look_at_stats(self) -> None:
        end_s = time.monotonic() + SETTLE_S
        for target in self.world.targets:
            while True:
                calls = actorsub.stats(target.handle)["calls"]
                ended = calls["completed"] + calls["expired_there"] + calls["lost"]
                wrong = [
                    *([f"{calls['waiting']} waiting"] if calls["waiting"] else []),
                    *([f"{calls['in_flight']} in flight"] if calls["in_flight"] else []),
                    *([f"{calls['sent']} sent, {ended} ended"] if calls["sent"] != ended else []),
                ]
                if not wrong or time.monotonic() > end_s:
                    break
                time.sleep(0.05)
            if wrong:
                self.world.violate("the counters agree", f"{target.name}: {', '.join(wrong)}: {calls}")
        for retry, group in self.world.groups.items():
            counted = group.stats()
            if counted["waiting"] or counted["in_flight"]:
                self.world.violate("the counters agree", f"group {retry}: {counted}")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--directory", "--network", "--address", "--without"):
        parser.add_argument(name, default="")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    campaign = Campaign(arguments)
    logging.getLogger("actorsub").addHandler(campaign.log)
    logging.getLogger("actorsub").propagate = False
    world = campaign.world
    unexpected = functools.partial(world.violate, "nothing unexpected is logged")
    threading.excepthook = lambda hooked: unexpected(f"{hooked.thread}: {hooked.exc_value!r}")
    sys.unraisablehook = lambda hooked: unexpected(f"{hooked.object!r}: {hooked.exc_value!r}")
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": 2, "resources": {"near": 8}}
    if campaign.net is not None:
        options = {"_node_ip_address": campaign.net.near_ip}
    ray.init(address=arguments.address or "local", log_to_driver=False, logging_level="ERROR", **options)
    end_s = time.monotonic() + 60
    while campaign.net is not None and not ray.cluster_resources().get("far"):
        if time.monotonic() > end_s:
            raise TimeoutError("the far node has not joined")
        time.sleep(0.1)
    campaign._phase("actors", campaign.make_actors)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            campaign.run()
        except BaseException as error:
            failed.append(error)
            logging.getLogger("campaign").exception("the campaign failed")
        finally:
            campaign._over.set()

    conductor = threading.Thread(target=run, name="conductor", daemon=True)
    conductor.start()
    campaign.be_main(world.has("signals"))
    conductor.join()
    if failed:
        sys.exit(3)
    world.groups.clear()
    world.targets.clear()
    ray.shutdown()


if __name__ == "__main__":
    main()
