"""One mode in a process of its own: a local Ray, the workers, the proxy and the killer. See the package."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, TextIO

from actorsub._demo import service
from actorsub._demo.records import ModeRun
from actorsub._demo.schedule import plan_arrivals, plan_kills
from actorsub._demo.service import GroupProxy, Killer, Model, Proxy, sleep_until
from actorsub._demo.settings import DRAIN_S, INFER_S, MODEL_LOAD_S, START_ATTEMPTS, TUNING_VARIABLE, Mode


@dataclass(frozen=True)
class ChildTask:
    """What the parent asks of a child, as JSON on its command line."""

    mode: str
    seconds: float
    rate: float
    workers: int
    seed: int
    report_fd: int


def child_environment(mode: Mode) -> dict[str, str]:
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


def main(argument: str) -> int:
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

    start_ray()
    ray.cloudpickle.register_pickle_by_value(service)
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
        await sleep_until(began + at_s)
        request = asyncio.create_task(proxy.handle(number, at_s))
        open_requests.add(request)
        request.add_done_callback(open_requests.discard)
    await sleep_until(began + task.seconds)
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


def start_ray() -> None:
    """Starts a local Ray. On a machine that is very busy Ray may miss its own limit of 30 s; then once more."""
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
