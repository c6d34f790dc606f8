"""The service that is measured: a model behind a proxy, and the killer. Used from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from actorsub._demo.records import Attempt, Request
from actorsub._demo.schedule import Kill
from actorsub._demo.settings import DRAIN_S, PAUSE_BETWEEN_ROUNDS_S, ROUNDS


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
            await sleep_until(began + kill.at_s)
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


async def sleep_until(moment: float) -> None:
    delay = moment - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)
