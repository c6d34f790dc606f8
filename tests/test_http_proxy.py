"""The example of an HTTP proxy, by real HTTP requests, while its workers are killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray
from helpers import wait_until

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

http_proxy = pytest.importorskip("http_proxy", reason="the examples need starlette and uvicorn: actorsub[examples]")

# Its classes as they would travel if the example were run as a script: workers cannot import it.
ray.cloudpickle.register_pickle_by_value(http_proxy)


class Service:
    """The example's service, and a client for it."""

    def __init__(self, *arguments: str) -> None:
        options = http_proxy.parse(["--port=0", "--load-s=0", *arguments])
        self.proxy, self.serving, self.url = http_proxy.start(options)
        # A first request may start before some members are up, and says nothing about routing then.
        wait_until(lambda: set(self.states()) == {"alive"}, what="all workers are up")

    def ask(self, path: str, body: Any = None, timeout_s: float = 30.0) -> tuple[int, Any]:
        """(status, JSON of the answer); POSTs where there is a body, which is sent as it is when it is bytes."""
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data)
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.headers.get("content-type") == "application/json"
            return answer.status, json.loads(text) if is_json else text.decode()

    def predict(self, *inputs: Any) -> tuple[int, Any]:
        return self.ask("/predict", {"inputs": list(inputs)})

    def workers(self) -> list[dict[str, Any]]:
        return self.ask("/health")[1]["workers"]

    def states(self) -> list[str]:
        return [worker["state"] for worker in self.workers()]

    def pids(self, count: int) -> set[int]:
        """The process ids of so many workers, from their answers."""
        found: set[int] = set()

        def all_found() -> bool:
            found.add(self.predict(0)[1]["worker_pid"])
            return len(found) >= count

        wait_until(all_found, what=f"answers of {count} workers")
        return found

    def stop(self) -> None:
        ray.get(self.proxy.stop.remote())
        ray.get(self.serving, timeout=60)


@pytest.fixture
def service(ray_local: None) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(*arguments: str) -> Service:
        made.append(Service(*arguments))
        return made[-1]

    yield make
    for one in made:
        ray.kill(one.proxy)


def test_a_request_is_answered_by_a_worker(service: Callable[..., Service]) -> None:
    asked = service()
    status, answer = asked.predict(1, 2.5)
    assert (status, answer["outputs"]) == (200, [2, 5.0])
    assert answer["worker_pid"] != os.getpid()


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"{}", b"\xff", b""])
def test_a_body_that_is_no_request_is_the_clients_mistake(service: Callable[..., Service], body: bytes) -> None:
    status, answer = service("--workers=1").ask("/predict", body)
    assert status == 400
    assert "inputs" in answer["error"]


def test_a_failing_model_is_told_as_such_and_stays_in_the_group(service: Callable[..., Service]) -> None:
    asked = service("--workers=1")
    for _ in range(10):
        status, answer = asked.ask("/predict", {"inputs": 1})
        assert (status, answer["error"], answer["may_have_run"]) == (500, "TypeError", True)
    assert [worker["health"] for worker in asked.workers()] == ["healthy"]
    assert asked.predict(1)[0] == 200


def test_answers_do_not_wait_for_the_clients_tcp(service: Callable[..., Service]) -> None:
    # On one connection, as clients keep it, TCP holds back its acknowledgements for 40 ms after a few exchanges; an
    # answer that waits for one takes that long every time, so one quick answer is enough to say that none does.
    address = urllib.parse.urlsplit(service("--workers=1").url)
    took_s = []
    with contextlib.closing(http.client.HTTPConnection(address.hostname, address.port)) as connection:
        for _ in range(60):
            begin = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            took_s.append(time.perf_counter() - begin)
    assert min(took_s[30:]) < 0.035


def test_the_deadline_of_a_request(service: Callable[..., Service]) -> None:
    status, answer = service("--workers=1", "--predict-s=20", "--timeout-s=0.5").predict(1)
    assert (status, answer["error"], answer["may_have_run"]) == (504, "DeadlineExceededError", True)


def test_health_follows_the_workers(service: Callable[..., Service]) -> None:
    # Long enough to be seen while they are away.
    asked = service("--workers=2", "--load-s=3")
    first, second = asked.pids(2)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: sorted(asked.states()) == ["alive", "restarting"])
    assert asked.ask("/health")[0] == 200
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: "alive" not in asked.states())
    status, answer = asked.ask("/health")
    assert (status, answer["up"], len(answer["workers"])) == (503, False, 2)
    # A request of that time waits for the first that is back.
    assert asked.predict(1)[0] == 200
    wait_until(lambda: asked.states() == ["alive", "alive"])
    assert asked.ask("/health")[0] == 200


def _one_request_on_each_of_two(asked: Service, pool: concurrent.futures.Executor) -> list[Any]:
    futures = [pool.submit(asked.predict, 1) for _ in range(2)]
    wait_until(lambda: [worker["busy"] for worker in asked.workers()] == [1, 1])
    return futures


@pytest.mark.parametrize("retry", ["always", "unsent"])
def test_a_request_on_a_worker_that_is_killed(service: Callable[..., Service], retry: str) -> None:
    asked = service("--workers=2", "--predict-s=1", f"--retry={retry}")
    killed, other = asked.pids(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = _one_request_on_each_of_two(asked, pool)
        os.kill(killed, signal.SIGKILL)
        answers = sorted(future.result() for future in futures)
    assert answers[0] == (200, {"outputs": [2], "worker_pid": other})
    if retry == "always":
        assert answers[1] == answers[0]
    else:
        status, answer = answers[1]
        assert (status, answer["error"], answer["may_have_run"]) == (502, "ActorUnavailableError", True)


@pytest.mark.timeout(180)
def test_no_request_fails_while_workers_are_killed(service: Callable[..., Service]) -> None:
    asked = service("--workers=3", "--predict-s=0.02", "--retry=always")
    pids = asked.pids(3)
    ends: list[tuple[int, Any]] = []

    def pids_that_came_back() -> set[int]:
        return {answer["worker_pid"] for status, answer in list(ends) if status == 200} - pids

    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                ends.append(asked.predict(len(ends)))
            except Exception as error:
                ends.append((0, repr(error)))

    threads = [threading.Thread(target=keep_asking) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for pid in pids:
            # More requests than can be at the other two: the one that is killed has some.
            wait_until(lambda: all(worker["busy"] for worker in asked.workers()))
            back = len(pids_that_came_back())
            os.kill(pid, signal.SIGKILL)
            # By itself it is given requests again.
            wait_until(lambda back=back: len(pids_that_came_back()) > back, 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [end for end in ends if end[0] != 200] == []


def test_a_proxy_that_is_killed_comes_back_by_itself(service: Callable[..., Service]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = service(f"--port={port}")
    pid = ray.get(asked.proxy.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return asked.predict(4)[0] == 200
        return False

    wait_until(answers, 60, "the proxy serves again")
    asked.stop()


def test_stopping_answers_what_is_under_way(service: Callable[..., Service]) -> None:
    asked = service("--workers=2", "--predict-s=1")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = _one_request_on_each_of_two(asked, pool)
        asked.stop()
        # So whatever was not answered before would not be answered at all.
        ray.kill(asked.proxy)
        assert [future.result()[0] for future in futures] == [200, 200]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_script(signum: signal.Signals, tmp_path: pathlib.Path) -> None:
    # Started from the folder above, as the README shows it.
    command = [sys.executable, "examples/http_proxy.py", "--port=0", "--workers=1", "--predict-s=1", "--load-s=0"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=EXAMPLES.parent, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        line = re.compile(r"curl (http://\S+)/predict -d '(.*)'")
        found = wait_until(lambda: line.search(log.read_text()), 100, "the curl line")
        url, body = found.groups()
        client = [shutil.which("curl") or pytest.skip("no curl here"), "-s", f"{url}/predict", "-d", body]
        asking = subprocess.Popen(client, stdout=subprocess.PIPE)
        health = [client[0], "-s", f"{url}/health"]
        wait_until(lambda: '"busy":1' in subprocess.check_output(health, text=True))
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        answer, _ = asking.communicate(timeout=60)
        assert json.loads(answer)["outputs"] == [2, 4]
        assert process.wait(60) == 0, log.read_text()
        _, left = psutil.wait_procs(below, timeout=30)
        assert left == []
    finally:
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            for one in [*below, process]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    one.kill()
            process.wait()


def test_the_example_is_short() -> None:
    assert len((EXAMPLES / "http_proxy.py").read_text().splitlines()) <= 150
