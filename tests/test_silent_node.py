"""A node that goes silent: in a network namespace of its own, with what it sends back dropped. Needs root and iproute2.

The other node of the cluster sees no process of it, only connections, as between two machines.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from helpers import CONNECT, Basics, ms, up_and_watched, wait_for_state, wait_until
from test_nodes import EARLY_S, PATIENCE_S, hold, when_done

import actorsub
from actorsub import ActorState

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def sh(command: str, *, check: bool = True) -> str:
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if check and result.returncode:
        raise RuntimeError(f"{command}: {result.stderr.strip()}")
    return result.stdout


class FarNode:
    """A head node here, and another one behind a pair of virtual network interfaces."""

    def __init__(self) -> None:
        self._namespace = f"actorsub-{os.getpid()}"
        self._links = f"as{os.getpid()}n", f"as{os.getpid()}f"
        network = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.near_ip, self.far_ip = f"{network}.1", f"{network}.2"
        self._processes: list[subprocess.Popen[bytes]] = []
        # Short: Ray puts sockets below it, whose paths are limited.
        self._directory = tempfile.mkdtemp(prefix="as-", dir="/tmp")
        self.address = ""

    def make_network(self) -> None:
        near, far = self._links
        inside = f"ip netns exec {self._namespace}"
        sh(f"ip netns add {self._namespace}")
        sh(f"ip link add {near} type veth peer name {far} && ip link set {far} netns {self._namespace}")
        sh(f"ip addr add {self.near_ip}/24 dev {near} && ip link set {near} up")
        sh(f"{inside} ip addr add {self.far_ip}/24 dev {far}")
        sh(f"{inside} ip link set {far} up && {inside} ip link set lo up")

    def start(self) -> None:
        with socket.socket() as free:
            free.bind((self.near_ip, 0))
            port = free.getsockname()[1]
        self.address = f"{self.near_ip}:{port}"
        command = [str(pathlib.Path(sys.executable).with_name("ray")), "start", "--block"]
        near = ["--head", f"--node-ip-address={self.near_ip}", f"--port={port}", "--num-cpus=2"]
        self._start([*command, *near, "--include-dashboard=false", f"--temp-dir={self._directory}"])
        wait_until(lambda: self._accepts(port), PATIENCE_S, "the head node is up")
        far = [f"--address={self.address}", f"--node-ip-address={self.far_ip}", "--num-cpus=2"]
        self._start(["ip", "netns", "exec", self._namespace, *command, *far, '--resources={"far": 8}'])
        ray.init(address=self.address, _node_ip_address=self.near_ip, **CONNECT)
        wait_until(lambda: ray.cluster_resources().get("far"), PATIENCE_S, "the far node has joined")

    def _start(self, command: list[str]) -> None:
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    @contextlib.contextmanager
    def stopped_raylet(self) -> Iterator[None]:
        """The control store does not hear of what happens on the far node."""
        (raylet,) = [one for one in psutil.Process(self._processes[1].pid).children(True) if one.name() == "raylet"]
        raylet.suspend()
        try:
            yield
        finally:
            raylet.resume()

    @contextlib.contextmanager
    def run(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A process on the far node, ended with the block."""
        inside = ["ip", "netns", "exec", self._namespace, *command]
        process = subprocess.Popen(inside, stdout=subprocess.PIPE)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def _accepts(self, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.near_ip, port), 1):
            return True
        return False

    def silence(self) -> float:
        sh(f"ip netns exec {self._namespace} ip route add blackhole {self.near_ip}/32")
        return time.monotonic()

    def heal(self) -> None:
        sh(f"ip netns exec {self._namespace} ip route del blackhole {self.near_ip}/32", check=False)

    def kill(self) -> float:
        """SIGKILL to every process of the far node, all at once."""
        parent = psutil.Process(self._processes[1].pid)
        processes = [parent, *parent.children(recursive=True)]
        begin_s = time.monotonic()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return begin_s

    def end(self) -> None:
        for process in reversed(self._processes):
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            for child in [*children, process]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    child.kill()
            process.wait()
        sh(f"ip netns del {self._namespace}", check=False)
        shutil.rmtree(self._directory, ignore_errors=True)


@pytest.fixture(scope="module")
def far_node() -> Iterator[FarNode]:
    if os.geteuid() or shutil.which("ip") is None:
        reason = "a network namespace needs root and iproute2"
        print(reason)
        pytest.skip(reason)
    ray.shutdown()
    node = FarNode()
    try:
        try:
            node.make_network()
        except RuntimeError as error:
            print(error)
            pytest.skip(f"no network namespace: {error}")
        node.start()
        yield node
    finally:
        ray.shutdown()
        node.heal()
        node.end()


def far_worker(**options: Any) -> Any:
    return actorsub.remote(max_restarts=-1, num_cpus=0, resources={"far": 1}, on_unavailable="raise", **options)(
        Basics
    ).remote()


def test_a_silent_node(far_node: FarNode, tmp_path: pathlib.Path) -> None:
    """B5 and B2 of Ray issues 31640 and 44185: every packet is dropped for a while, twice."""
    handle = far_worker(silence_timeout_s=0.5, silence_in_flight_s=1.0)
    up_and_watched(handle)
    ray.get(handle.remember.remote(0), timeout=PATIENCE_S)
    for turn in (1, 2):
        directory = tmp_path / str(turn)
        directory.mkdir()
        refs = [hold(handle, directory, "running"), *[handle.echo.remote(i) for i in range(9)]]
        waits = [when_done(ref) for ref in refs]
        begin_s = far_node.silence()
        try:
            wait_for_state(handle, ActorState.UNREACHABLE)
            first_refusal_s = time.monotonic() - begin_s
            with pytest.raises(actorsub.ActorUnavailableError) as caught:
                handle.echo.remote("after")
            assert (caught.value.sent, caught.value.evidence) == (False, "silence")
            assert caught.value.incarnation == 0
            for future, _ in waits:
                error = future.exception(PATIENCE_S)
                assert isinstance(error, actorsub.ActorUnavailableError)
                assert (error.sent, error.evidence, error.incarnation) == (True, "silence", 0)
            failed_s = max(times[0] for _, times in waits) - begin_s
            # Out for 3 s in all.
            while time.monotonic() < begin_s + 3:
                with pytest.raises(actorsub.ActorUnavailableError):
                    handle.echo.remote()
                time.sleep(0.01)
        finally:
            far_node.heal()
        healed_s = time.monotonic()
        print(f"node silent, limits 0.5 and 1.0 s: first refusal {ms(first_refusal_s)}, in flight {ms(failed_s)}")
        assert 0.4 < first_refusal_s < 0.5 + EARLY_S
        assert 0.9 < failed_s < 1.0 + EARLY_S
        (directory / "gate").touch()
        wait_for_state(handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
        print(f"  taken back {ms(time.monotonic() - healed_s)} after it was healed")
        # Its memory is intact; a call carries traffic again.
        assert ray.get(handle.remember.remote(turn), timeout=PATIENCE_S) == list(range(turn + 1))
        late = turn * 10
        wait_until(lambda count=late: actorsub.stats(handle)["late_replies"] == count, PATIENCE_S)
    assert actorsub.stats(handle)["entered"]["restarting"] == 0
    assert actorsub.stats(handle)["failed_early"] == 20


def test_a_silence_shorter_than_the_limit_harms_no_running_call(far_node: FarNode, tmp_path: pathlib.Path) -> None:
    handle = far_worker(silence_timeout_s=0.5, silence_in_flight_s=30.0)
    up_and_watched(handle)
    future, _ = when_done(hold(handle, tmp_path, "running"))
    far_node.silence()
    try:
        wait_for_state(handle, ActorState.UNREACHABLE)
    finally:
        far_node.heal()
    (tmp_path / "gate").touch()
    assert future.result(PATIENCE_S) == "done"
    wait_for_state(handle, ActorState.ALIVE)
    assert actorsub.stats(handle)["failed_early"] == 0


def test_a_process_that_ends_elsewhere(far_node: FarNode, tmp_path: pathlib.Path) -> None:
    """Seen through the connection alone."""
    handle = far_worker()
    pid = up_and_watched(handle)
    future, times = when_done(hold(handle, tmp_path, "running"))
    begin_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    error = future.exception(PATIENCE_S)
    assert isinstance(error, actorsub.ActorUnavailableError)
    assert (error.sent, error.incarnation) == (True, 0)
    # What was known last: the refused dial, or what Ray and its table say after it. Never the process.
    assert error.evidence in ("connection", "ray", "table")
    assert times[0] - begin_s < EARLY_S
    print(f"process elsewhere killed: in flight {ms(times[0] - begin_s)}, by {error.evidence}")
    wait_for_state(handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
    wait_until(lambda: actorsub.stats(handle)["incarnation"] == 1)
    assert actorsub.stats(handle)["sentinel"]["process_watches"] == 0


def test_a_node_that_is_killed_elsewhere(far_node: FarNode, tmp_path: pathlib.Path) -> None:
    """The last test: the node does not come back."""
    handle = far_worker()
    up_and_watched(handle)
    waits = [when_done(ref) for ref in [hold(handle, tmp_path, "running"), *[handle.echo.remote() for _ in range(9)]]]
    begin_s = far_node.kill()
    while True:
        try:
            handle.echo.remote()
        except actorsub.ActorUnavailableError as error:
            first_refusal_s = time.monotonic() - begin_s
            assert (error.sent, error.evidence) == (False, "connection")
            break
        assert time.monotonic() - begin_s < EARLY_S
    for future, _ in waits:
        error = future.exception(PATIENCE_S)
        assert isinstance(error, actorsub.ActorUnavailableError)
        assert (error.sent, error.incarnation) == (True, 0)
    failed_s = max(times[0] for _, times in waits) - begin_s
    assert failed_s < EARLY_S
    print(f"node elsewhere killed: first refusal {ms(first_refusal_s)}, in flight {ms(failed_s)}")
    # Ray's table and local state still say ALIVE.
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        with pytest.raises(actorsub.ActorUnavailableError):
            handle.echo.remote()
        time.sleep(0.001)
