"""A second node of the cluster, behind a pair of virtual network interfaces. Needs root and iproute2.

    here <near address> --- veth --- <far address> namespace "far", the second node (resource "far")
                       +--- veth --- <far address> namespace "other", where nothing listens

A route of one host decides which of the two answers at the far address: the other one answers with RST.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable


class NotPermittedError(Exception):
    """This machine does not permit it; the message says why."""


def run(*commands: str, check: bool = True) -> str:
    output = ""
    for command in commands:
        result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if check and result.returncode:
            raise RuntimeError(f"{command}: {result.stderr.strip()}")
        output += result.stdout
    return output


class Network:
    """Names and addresses, and what can be done to the traffic. The process that calls has one, too: `from_json`."""

    def __init__(self, near_ip: str, far_ip: str, name: str) -> None:
        self.near_ip, self.far_ip, self.name = near_ip, far_ip, name

    def to_json(self) -> str:
        return json.dumps([self.near_ip, self.far_ip, self.name])

    @classmethod
    def from_json(cls, text: str) -> Network:
        return cls(*json.loads(text))

    def begin_silence(self) -> None:
        """What the far node sends back is dropped."""
        run(f"ip netns exec {self.name}f ip route add blackhole {self.near_ip}/32")

    def end_silence(self) -> None:
        run(f"ip netns exec {self.name}f ip route del blackhole {self.near_ip}/32")

    def begin_reset(self) -> None:
        """Something else answers at the far address: RST to whatever is sent there."""
        run(f"ip route add {self.far_ip}/32 dev {self.name}c src {self.near_ip}")

    def end_reset(self) -> None:
        run(f"ip route del {self.far_ip}/32 dev {self.name}c")


class Cluster:
    """The network, and a Ray node on each side. A context manager, which removes what it made."""

    def __init__(self) -> None:
        number = os.getpid() % 250 + 1
        self.network = Network(f"10.97.{number}.1", f"10.97.{number}.2", f"asc{os.getpid()}")
        self._processes: list[subprocess.Popen[bytes]] = []
        # Short: Ray puts sockets below it, whose paths are limited.
        self._directory = tempfile.mkdtemp(prefix="asc-", dir="/tmp")
        self.address = ""

    def __enter__(self) -> Cluster:
        try:
            self._make_network()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        name = self.network.name
        run(f"ip netns del {name}f", f"ip netns del {name}o", f"ip link del {name}a", f"ip link del {name}c",
            check=False)  # fmt: skip
        shutil.rmtree(self._directory, ignore_errors=True)

    def _make_network(self) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            raise NotPermittedError("a network namespace needs root and iproute2")
        near, far, name = self.network.near_ip, self.network.far_ip, self.network.name
        in_far, in_other = f"ip -n {name}f", f"ip -n {name}o"
        try:
            run(f"ip netns add {name}f", f"ip netns add {name}o")
        except RuntimeError as error:
            raise NotPermittedError(str(error)) from None
        run(
            f"ip link add {name}a type veth peer name {name}b netns {name}f",
            f"ip addr add {near}/24 dev {name}a",
            f"ip link set {name}a up",
            f"{in_far} addr add {far}/24 dev {name}b",
            f"{in_far} link set {name}b up",
            f"{in_far} link set lo up",
            f"ip link add {name}c type veth peer name {name}d netns {name}o",
            f"ip link set {name}c up",
            f"{in_other} link set lo up",
            f"{in_other} link set {name}d up",
            f"{in_other} addr add {far}/32 dev {name}d",
            f"{in_other} route add {near}/32 dev {name}d",
        )

    def _start(self) -> None:
        near, far = self.network.near_ip, self.network.far_ip
        with socket.socket() as free:
            free.bind((near, 0))
            port = free.getsockname()[1]
        self.address = f"{near}:{port}"
        command = [str(pathlib.Path(sys.executable).with_name("ray")), "start", "--block"]
        self._begin([*command, "--head", f"--node-ip-address={near}", f"--port={port}", "--num-cpus=2",
                     '--resources={"near": 8}', "--include-dashboard=false",
                     f"--temp-dir={self._directory}"])  # fmt: skip
        _wait_until(lambda: _accepts(near, port), "the head node is up")
        self._begin(["ip", "netns", "exec", f"{self.network.name}f", *command, f"--address={self.address}",
                     f"--node-ip-address={far}", "--num-cpus=2", '--resources={"far": 8}'])  # fmt: skip

    def _begin(self, command: list[str]) -> None:
        self._processes.append(subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ))  # fmt: skip


def _accepts(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def _wait_until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        time.sleep(0.05)


def cut_is_permitted() -> bool:
    """Whether a connection of this machine can be ended from outside."""
    if os.geteuid() or shutil.which("ss") is None:
        return False
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as one:
            with contextlib.suppress(RuntimeError):
                cut("127.0.0.1", listener.getsockname()[1])
            try:
                one.settimeout(1)
                return one.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True


def cut(ip: str, port: int) -> None:
    """Ends the connections from here to that port, in both directions."""
    run(f"ss -K -t -n -H dst {ip} dport = {port}")


def port_of(pid: int, network: Network | None) -> int | None:
    """Where the process listens for calls."""
    for inside in ["", *([f"ip netns exec {network.name}f "] if network else [])]:
        for line in run(f"{inside}ss -ltnpH", check=False).splitlines():
            if f"pid={pid}," in line:
                return int(line.split()[3].rpartition(":")[2])
    return None
