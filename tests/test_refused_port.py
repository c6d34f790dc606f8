"""An actor whose port refuses connections: somebody in between says so, or its process has ended.

A third network namespace has the address of the far node (test_silent_node.py), and a route decides which of the two is
reached. Nothing listens there, so what is sent to it is answered with RST, as a firewall that rejects, a sidecar that
restarts or another host with the same address does. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from helpers import Basics, up_and_watched, wait_for_state, wait_until
from test_nodes import EARLY_S, PATIENCE_S, hold, when_done
from test_silent_node import FarNode, far_node, sh

import actorsub
from actorsub import ActorState, _ray_compat

__all__ = ["far_node"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: In which the truth has to be known once Ray can be asked again.
TRUTH_S = 3.0
RESETS_S = 0.5


class Impostor:
    """A namespace with the far node's address."""

    def __init__(self, node: FarNode) -> None:
        self._node = node
        self._namespace = f"actorsub-{os.getpid()}-other"
        self._links = f"as{os.getpid()}o", f"as{os.getpid()}p"

    def make(self) -> None:
        ours, its = self._links
        inside = f"ip -n {self._namespace}"
        sh(f"ip netns add {self._namespace}")
        sh(f"ip link add {ours} type veth peer name {its} netns {self._namespace} && ip link set {ours} up")
        sh(f"{inside} link set lo up && {inside} link set {its} up")
        sh(f"{inside} addr add {self._node.far_ip}/32 dev {its}")
        sh(f"{inside} route add {self._node.near_ip}/32 dev {its}")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        route = f"{self._node.far_ip}/32 dev {self._links[0]}"
        sh(f"ip route add {route} src {self._node.near_ip}")
        try:
            yield
        finally:
            sh(f"ip route del {route}")

    def end(self) -> None:
        sh(f"ip link del {self._links[0]}", check=False)
        sh(f"ip netns del {self._namespace}", check=False)


@pytest.fixture(scope="module")
def impostor(far_node: FarNode) -> Iterator[Impostor]:
    other = Impostor(far_node)
    try:
        other.make()
        yield other
    finally:
        other.end()


def refusal(handle: Any) -> actorsub.ActorUnavailableError:
    with pytest.raises(actorsub.ActorUnavailableError) as caught:
        handle.echo.remote()
    return caught.value


def answers(handle: Any) -> int | None:
    """Its process number, from a call; None: it does not take calls, or Ray could not reach it."""
    try:
        pid: int = actorsub.get(handle.pid.remote(), timeout=TRUTH_S)
    except ray.exceptions.RayError:
        return None
    return pid


def worker_on_far(restarts: int) -> Any:
    options = {"max_restarts": restarts, "num_cpus": 0, "resources": {"far": 1}, "on_unavailable": "raise"}
    return actorsub.remote(**options)(Basics).remote()


@pytest.mark.parametrize("restarts", [0, -1])
def test_refused_in_its_life_twice(impostor: Impostor, tmp_path: pathlib.Path, restarts: int) -> None:
    handle = worker_on_far(restarts)
    pid = up_and_watched(handle)
    seen: list[tuple[Any, str | None]] = []
    actorsub.on_state_change(handle, lambda _, old, new, evidence: seen.append((new, evidence)))
    for turn in range(2):
        directory = tmp_path / str(turn)
        directory.mkdir()
        future, times = when_done(hold(handle, directory, "running"))
        begin_s = time.monotonic()
        with impostor.answering():
            error = future.exception(PATIENCE_S)
            assert isinstance(error, actorsub.ActorUnavailableError)
            assert (error.sent, error.evidence, error.incarnation) == (True, "connection", 0)
            assert error.state is ActorState.UNREACHABLE
            # Nobody dials before it is told of the RST, which a heartbeat is.
            assert times[0] - begin_s < EARLY_S
            error = refusal(handle)
            assert (error.sent, error.state, error.evidence) == (False, ActorState.UNREACHABLE, "connection")
            time.sleep(RESETS_S)
            assert actorsub.state(handle) is ActorState.UNREACHABLE
        wait_for_state(handle, ActorState.ALIVE, timeout_s=TRUTH_S)
        (directory / "gate").touch()
        assert wait_until(lambda: answers(handle), TRUTH_S) == pid
    stats = actorsub.stats(handle)
    assert (stats["entered"]["restarting"], stats["incarnation"]) == (0, 0)
    up, down = (ActorState.ALIVE, "table"), (ActorState.UNREACHABLE, "connection")
    wait_until(lambda: len(seen) == 5, what="the listener is told")
    assert seen[1:] == [down, up, down, up]


def test_refused_are_all_members_of_a_group(impostor: Impostor) -> None:
    handles = [worker_on_far(0), worker_on_far(-1), worker_on_far(-1)]
    pids = {up_and_watched(handle) for handle in handles}
    made: list[Any] = []

    def factory() -> Any:
        made.append(worker_on_far(-1))
        return made[-1]

    group = actorsub.ReplicaGroup(handles, factory=factory, retry="always")
    for _ in range(2):
        with impostor.answering():
            for handle in handles:
                wait_for_state(handle, ActorState.UNREACHABLE)
            with pytest.raises(actorsub.NoReplicaError) as caught:
                group.pid.call().result(PATIENCE_S)
            assert caught.value.sent is False
            time.sleep(RESETS_S)
        for handle in handles:
            wait_for_state(handle, ActorState.ALIVE, timeout_s=TRUTH_S)
            assert wait_until(lambda handle=handle: answers(handle), TRUTH_S) in pids
        assert group.pid.call().result(PATIENCE_S) in pids
    assert len(group) == 3
    assert made == []


def check_end(handle: Any, pid: int, restarts: int) -> None:
    """What is so of an actor whose process was killed is known in time."""
    if restarts == 0:
        wait_for_state(handle, ActorState.DEAD, timeout_s=TRUTH_S)
        assert actorsub.stats(handle)["entered"]["restarting"] == 0
        with pytest.raises(actorsub.ActorDiedError):
            handle.echo.remote()
    else:
        wait_until(lambda: actorsub.stats(handle)["incarnation"] == 1, TRUTH_S, "its next incarnation is known")
        wait_for_state(handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
        assert wait_until(lambda: answers(handle), PATIENCE_S) != pid
        assert actorsub.stats(handle)["incarnation"] == 1


@pytest.mark.parametrize("restarts", [0, -1])
def test_refused_while_it_dies(impostor: Impostor, restarts: int) -> None:
    """Somebody refuses in its name, and meanwhile its process ends."""
    handle = worker_on_far(restarts)
    pid = up_and_watched(handle)
    with impostor.answering():
        wait_for_state(handle, ActorState.UNREACHABLE)
        os.kill(pid, signal.SIGKILL)
        time.sleep(RESETS_S)
        assert actorsub.state(handle) is not ActorState.ALIVE
    check_end(handle, pid, restarts)


#: Listens on a port as soon as it is free, and answers heartbeats there as an actor does.
HEIR = """
import socket, sys, threading
def serve(connection):
    connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    got = b""
    while data := connection.recv(4096):
        got += data
        # The only SETTINGS that a watcher sends are empty.
        for _ in range(got.count(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))):
            connection.sendall(bytes((0, 0, 0, 4, 1, 0, 0, 0, 0)))
        got = got[-8:]
while True:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((sys.argv[1], int(sys.argv[2])))
        break
    except OSError:
        listener.close()
listener.listen()
print("listens", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.mark.parametrize("restarts", [0, -1])
def test_another_process_gets_its_port(far_node: FarNode, restarts: int) -> None:
    """Who answers there is not the actor: the table says so."""
    handle = worker_on_far(restarts)
    pid = up_and_watched(handle)
    row = _ray_compat.read_actor_table(handle._actor_id)
    assert row is not None
    arguments = [sys.executable, "-c", HEIR, far_node.far_ip, str(row.address[1])]
    with far_node.run(arguments) as heir:
        with far_node.stopped_raylet():
            os.kill(pid, signal.SIGKILL)
            assert heir.stdout is not None
            assert heir.stdout.readline() == b"listens\n"
            # Up to here the table is a false witness: whatever was believed on its word has to be found out.
            time.sleep(RESETS_S)
        check_end(handle, pid, restarts)


def test_the_node_dies_and_another_has_its_address(far_node: FarNode, impostor: Impostor) -> None:
    """The last test: the node does not come back. Ray says for 14 s that the actor is alive."""
    handle = worker_on_far(-1)
    up_and_watched(handle)
    with impostor.answering():
        far_node.kill()
        wait_for_state(handle, ActorState.UNREACHABLE, timeout_s=TRUTH_S)
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            error = refusal(handle)
            assert (error.sent, error.evidence) == (False, "connection")
            time.sleep(0.01)
    # The address is nobody's again.
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        refusal(handle)
        time.sleep(0.01)
    assert actorsub.stats(handle)["entered"]["alive"] == 1
