"""An HTTP service on Ray that goes on answering while its workers crash.

    client --HTTP--> Proxy --calls--> group of Models

The Proxy is a Ray actor that serves HTTP with Starlette on uvicorn; the Models are the actors that do the work.
`actorsub.ReplicaGroup` picks a Model for each request and moves to another when one is lost. `python http_proxy.py`
prints a curl line; Ctrl-C answers what is under way, then stops.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import socket
import threading
import time
from typing import Any

import ray
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import actorsub

#: What a client is told, by the first class that fits. `RayTaskError`, the method's own exception, is of the class of
#: its cause as well, so it comes first.
STATUS_OF_ERROR = (
    (ray.exceptions.RayTaskError, 500),
    (actorsub.DeadlineExceededError, 504),
    (actorsub.QueueFullError, 503),
    (actorsub.NoReplicaError, 503),
    (ray.exceptions.RayActorError, 502),  # its worker was lost, and nobody allowed us to run it twice
)


class Model:
    """Stands for a model: takes a while to load, answers one request at a time, and may crash. Knows nothing of HTTP
    or of actorsub."""

    def __init__(self, load_s: float, predict_s: float) -> None:
        time.sleep(load_s)
        self.predict_s = predict_s

    def predict(self, inputs: list[float]) -> dict[str, Any]:
        time.sleep(self.predict_s)
        return {"outputs": [2 * number for number in inputs], "worker_pid": os.getpid()}


# Should the proxy itself crash, Ray starts it anew and calls `serve` again.
@ray.remote(num_cpus=0, max_restarts=-1)
class Proxy:
    def __init__(self, host: str, port: int, drain_s: float) -> None:
        self.socket = socket.create_server((host, port), backlog=1024)
        # Answers leave in two writes, head and body; without this the second may wait 40 ms for the client's TCP.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        app = Starlette(routes=[Route("/predict", self.predict, methods=["POST"]), Route("/health", self.health)])
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=max(1, round(drain_s)))
        self.server = uvicorn.Server(config)

    def address(self) -> tuple[str, int]:
        return self.socket.getsockname()[:2]

    @ray.method(max_task_retries=-1)
    async def serve(self, group: actorsub.ReplicaGroup) -> None:
        """Answers requests until `stop`, and then those that are under way."""
        self.group = group
        await self.server.serve(sockets=[self.socket])

    async def stop(self) -> None:
        """Takes no more requests; `serve` returns when the last one is answered, or `drain_s` is over."""
        self.server.should_exit = True

    async def predict(self, request: Request) -> JSONResponse:
        try:
            inputs = (await request.json())["inputs"]
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": 'the body has to look like {"inputs": [1, 2]}'}, status_code=400)
        try:
            # All there is to routing, failover, deadline and waiting.
            return JSONResponse(await self.group.predict.call(inputs))
        except ray.exceptions.RayError as error:
            status = next((status for kind, status in STATUS_OF_ERROR if isinstance(error, kind)), 500)
            # What a client has to know before it sends the request again: whether it may have run already.
            sent = isinstance(error, ray.exceptions.RayTaskError) or getattr(error, "sent", True)
            cause = getattr(error, "cause", None) or error
            answer = {"error": type(cause).__name__, "detail": str(cause), "may_have_run": sent}
            return JSONResponse(answer, status_code=status)

    async def health(self, request: Request) -> JSONResponse:
        """For load balancers: 200 while any worker is up, else 503; for people: every worker's state."""
        workers = [
            {"actor": one.handle._actor_id.hex(), "state": one.state.value, "health": one.health, "busy": one.in_flight}
            for one in self.group
        ]
        up = any(one.state is actorsub.ActorState.ALIVE for one in self.group)
        return JSONResponse({"up": up, "workers": workers}, status_code=200 if up else 503)


def start(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """Starts the workers and the proxy on the Ray that this process is connected to.

    Returns the proxy's handle, the ref of its `serve`, and the service's URL.
    """
    worker = ray.remote(num_cpus=0, max_restarts=-1)(Model)
    workers = [worker.remote(options.load_s, options.predict_s) for _ in range(options.workers)]
    # The group travels to the proxy with its handles and options. "wait": while no worker is up, a request waits for
    # one, up to its deadline; "raise" answers 503 at once.
    group = actorsub.ReplicaGroup(workers, retry=options.retry, timeout_s=options.timeout_s, on_unavailable="wait")
    proxy = Proxy.remote(options.host, options.port, drain_s=options.timeout_s)
    serving = proxy.serve.remote(group)
    host, port = ray.get(proxy.address.remote())
    return proxy, serving, f"http://{host}:{port}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="default: %(default)s")
    text = "crashes move requests to another worker: 'always' all (predict() may run twice), 'unsent' those never sent"
    parser.add_argument("--retry", choices=("always", "unsent", "never"), default="always", help=text)
    parser.add_argument("--timeout-s", type=float, default=10.0, help="for one request, in all (default: %(default)s)")
    parser.add_argument("--load-s", type=float, default=1.0, help="time to load the model (default: %(default)s)")
    parser.add_argument("--predict-s", type=float, default=0.01, help="time of one request (default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    # Ray puts the folder of its driver on the path of the workers; that of a clone has the bare sources of actorsub.
    os.chdir(pathlib.Path(__file__).parent)
    ray.init(address="local", include_dashboard=False, logging_level="ERROR")
    proxy, serving, url = start(parse())
    done = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: done.set())
    serving.future().add_done_callback(lambda _: done.set())
    print("Try it, also while you kill -9 the worker_pid that it shows:\n")
    print(f"  curl {url}/predict -d '{{\"inputs\": [1, 2]}}'\n  curl {url}/health\n", flush=True)
    done.wait()
    ray.get(proxy.stop.remote())
    ray.get(serving)


if __name__ == "__main__":
    main()
