"""Where watching ends: processes that are only numbered like the actor's, and descriptors that run out.

Other pid namespaces need root and util-linux; without them those tests are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray
from helpers import RAY_ARGS, Worker, wait_for_state, wait_until, wait_until_watched
from ray.cluster_utils import Cluster
from subprocesses import output_of, run_python

import actorsub
from actorsub import ActorState, _ray_compat, processes

#: How soon a handle has to say what is true.
TRUTH_S = 3.0
PATIENCE_S = 60.0
#: For how long process numbers are tried, well below what a test may take.
LOOK_FOR_NUMBER_S = 50.0
NEW_PID_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
LAST_PID = pathlib.Path("/proc/sys/kernel/ns_last_pid")
PID_MAX = pathlib.Path("/proc/sys/kernel/pid_max")

# Listens on a free port and tells which; ends with its standard input.
SERVER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 0), family=family, dualstack_ipv6=sys.argv[1] == "::")
print(server.getsockname()[1], flush=True)
input()
"""


def outer_pid(process: subprocess.Popen[str], *, unshared: bool) -> int:
    """What the number of the server is here."""
    return psutil.Process(process.pid).children()[0].pid if unshared else process.pid


@pytest.fixture
def server() -> Iterator[Callable[..., tuple[int, int]]]:
    """Starts a server; (its process number here, its port)."""
    started: list[subprocess.Popen[str]] = []

    def start(ip: str = "127.0.0.1", *, unshared: bool = False) -> tuple[int, int]:
        command = [*(NEW_PID_NAMESPACE if unshared else []), sys.executable, "-c", SERVER, ip]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        return outer_pid(process, unshared=unshared), port

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def pid_namespaces() -> None:
    if subprocess.run([*NEW_PID_NAMESPACE, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("pid namespaces need root and util-linux")


def start_ticks(pid: int) -> int:
    return round((psutil.Process(pid).create_time() - psutil.boot_time()) * os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize("ip", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_who_listens_is_proven(server: Callable[..., tuple[int, int]], ip: str) -> None:
    pid, port = server(ip)
    addresses = {"0.0.0.0": ["127.0.0.1"], "::": ["::1", "127.0.0.1"]}.get(ip, [ip])
    for address in addresses:
        assert abs(processes.proven_start(pid, address, port) - start_ticks(pid)) <= 1


def test_what_is_no_proof(server: Callable[..., tuple[int, int]]) -> None:
    pid, port = server()
    other, other_port = server()
    assert processes.proven_start(other, "127.0.0.1", other_port)
    # Somebody else listens there, nobody does, not at that address, no address at all.
    assert processes.proven_start(pid, "127.0.0.1", other_port) == 0
    assert processes.proven_start(os.getpid(), "127.0.0.1", port) == 0
    assert processes.proven_start(pid, "127.0.0.1", 1) == 0
    assert processes.proven_start(pid, "127.0.0.2", port) == 0
    assert processes.proven_start(pid, "", 0) == 0
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert processes.proven_start(pid, "127.0.0.1", port) == 0


@pytest.mark.usefixtures("pid_namespaces")
def test_a_process_of_another_namespace_is_not_proven_by_any_number(server: Callable[..., tuple[int, int]]) -> None:
    """Not even by the one that it has here: what it says of itself is counted there."""
    pid, port = server(unshared=True)
    assert psutil.Process(pid).is_running()
    assert processes.proven_start(pid, "127.0.0.1", port) == 0


def test_an_actor_of_this_node_is_proven_and_other_workers_are_not(ray_local: None, tmp_path: pathlib.Path) -> None:
    (tmp_path / "gate").touch()
    actors = [ray.remote(num_cpus=0)(Worker).remote(str(tmp_path)) for _ in range(2)]
    pids = ray.get([actor.pid.remote() for actor in actors], timeout=PATIENCE_S)
    row = _ray_compat.read_actor_table(actors[0]._actor_id)
    assert row is not None
    assert row.pid == pids[0]
    assert row.node == _ray_compat.own_node(_ray_compat.session_token()) == ray.get_runtime_context().get_node_id()
    assert processes.proven_start(row.pid, *row.address)
    assert processes.proven_start(pids[1], *row.address) == 0


class Neighbour(Worker):
    def set_last_pid(self, number: int) -> None:
        LAST_PID.write_text(str(number))

    def inode(self) -> int:
        return os.stat("/proc/self/ns/pid").st_ino


class OtherNode:
    """A node at this one's address, whose processes are numbered by themselves."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        command = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--block", "--num-cpus=2"]
        command += [f"--address={ray.get_runtime_context().gcs_address}", '--resources={"other": 1000}']
        command += [f"--node-ip-address={ray.nodes()[0]['NodeManagerAddress']}"]
        self._process = subprocess.Popen(
            NEW_PID_NAMESPACE + command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: "other" in ray.cluster_resources(), PATIENCE_S, "the other node")
        self._helper = self.make()

    def make(self) -> Any:
        return ray.remote(num_cpus=0, max_restarts=-1, resources={"other": 1})(Neighbour).remote(str(self._directory))

    def make_numbered(self, wanted: Callable[[], int]) -> tuple[Any, int]:
        """A plain actor with that process number there; asked again after each failure, since it may have passed."""
        end_s = time.monotonic() + LOOK_FOR_NUMBER_S
        for attempt in range(60):
            if time.monotonic() > end_s:
                break
            number = wanted()
            ray.get(self._helper.set_last_pid.remote(number - 1 - attempt % 6), timeout=PATIENCE_S)
            actor = self.make()
            if ray.get(actor.pid.remote(), timeout=PATIENCE_S) == number:
                return actor, number
            ray.kill(actor)
        pytest.skip("the process numbers never coincided")

    def kill_process_of(self, actor: Any) -> None:
        number, inode = ray.get([actor.pid.remote(), actor.inode.remote()], timeout=PATIENCE_S)
        for process in psutil.process_iter():
            try:
                inside = int(pathlib.Path(f"/proc/{process.pid}/status").read_text().split("NSpid:")[1].split()[1])
                found = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == inode and inside == number
            except (OSError, IndexError, ValueError):
                continue
            if found:
                process.send_signal(signal.SIGKILL)
                return
        raise AssertionError(f"no process {number} in that namespace")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def other_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherNode]:
    ray.shutdown()
    # An idle worker is to be ended by its test, not by Ray a second after its last task.
    ray.init(**RAY_ARGS, _system_config={"idle_worker_killing_time_threshold_ms": 3_600_000})
    directory = tmp_path_factory.mktemp("other")
    (directory / "gate").touch()
    node = OtherNode(directory)
    yield node
    ray.shutdown()
    node.stop()


def is_idle(process: psutil.Process) -> bool:
    try:
        return "ray::IDLE" in process.cmdline()[0]
    except (psutil.Error, IndexError):
        return False


class Namesake:
    """Something of this node that is to have the actor's number."""

    def __init__(self, kind: str, directory: pathlib.Path) -> None:
        self.kind = kind
        self._directory = directory
        self.process: Any = None

    def number(self) -> int:
        """What it is numbered, or will be."""
        if self.process is not None and self.process.is_running():
            return self._number
        if self.kind == "nobody yet":
            # In the middle of the widest gap, where others come last.
            taken = sorted([*psutil.pids(), int(PID_MAX.read_text())])
            below, above = max(itertools.pairwise(taken), key=lambda two: two[1] - two[0])
            self._number = (below + above) // 2
        elif self.kind == "idle worker":
            ray.get([ray.remote(lambda: None).remote() for _ in range(4)], timeout=PATIENCE_S)
            mine = psutil.Process().children(recursive=True)
            self.process = wait_until(lambda: next(filter(is_idle, mine), None), what="an idle worker")
            self._number = self.process.pid
        else:
            self._actor = ray.remote(num_cpus=1)(Worker).remote(str(self._directory))
            pid = ray.get(self._actor.pid.remote(), timeout=PATIENCE_S)
            self.process = psutil.Process(pid)
            threads = [thread.id for thread in self.process.threads() if thread.id != pid]
            self._number = threads[0] if self.kind == "thread" else pid
        return self._number

    def come(self) -> None:
        """Takes the number now, if it has not yet."""
        if self.kind != "nobody yet":
            return
        for _ in range(500):
            LAST_PID.write_text(str(self._number - 1))
            child = subprocess.Popen(["sleep", "600"])
            if child.pid == self._number:
                self.process = child
                return
            child.kill()
            child.wait()
        pytest.skip("that process number was never free")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.usefixtures("pid_namespaces")
@pytest.mark.parametrize("kind", ["worker", "idle worker", "thread", "nobody yet"])
def test_the_end_of_a_namesake_here_is_nothing_to_an_actor_elsewhere(
    other_node: OtherNode, tmp_path: pathlib.Path, kind: str
) -> None:
    namesake = Namesake(kind, tmp_path)
    plain, number = other_node.make_numbered(namesake.number)
    handle = actorsub.wrap(plain, on_unavailable="raise")
    assert actorsub.get(handle.pid.remote(), timeout=PATIENCE_S) == number
    wait_until_watched(handle)
    before = actorsub.stats(handle)
    seen: list[Any] = []
    actorsub.on_state_change(handle, lambda *change: seen.append(change))
    namesake.come()
    namesake.end()
    # A heartbeat later than the end that would have been told.
    beats = actorsub.stats(handle)["sentinel"]["heartbeats_acked"]
    wait_until(lambda: actorsub.stats(handle)["sentinel"]["heartbeats_acked"] >= beats + 3, what="heartbeats")
    assert actorsub.get(handle.pid.remote(), timeout=PATIENCE_S) == number
    after = actorsub.stats(handle)
    assert [after[name] for name in ("state", "incarnation", "entered")] == [
        before[name] for name in ("state", "incarnation", "entered")
    ]
    assert after["watched"]
    assert after["sentinel"]["process_watches"] == before["sentinel"]["process_watches"]
    assert all(change[1] is ActorState.UNKNOWN for change in seen)

    # And its own end is.
    other_node.kill_process_of(plain)
    wait_until(lambda: actorsub.state(handle) is not ActorState.ALIVE, TRUTH_S, "the death is noticed")
    wait_for_state(handle, ActorState.ALIVE, timeout_s=PATIENCE_S)
    assert actorsub.get(handle.pid.remote(), timeout=PATIENCE_S) != number
    ray.kill(plain)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_node_at_the_same_address_is_another_node(tmp_path: pathlib.Path) -> None:
    """Only what this process's own node runs is watched by number, although here all numbers mean the same."""
    ray.shutdown()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "resources": {"head": 1}}
    )
    cluster.add_node(num_cpus=2, resources={"other": 1000})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        (tmp_path / "gate").touch()
        create = actorsub.remote(max_restarts=-1, num_cpus=0)(Worker)
        here, there = [create.options(resources={node: 1}).remote(str(tmp_path)) for node in ("head", "other")]
        pid = ray.get(there.pid.remote(), timeout=PATIENCE_S)
        assert ray.get(here.pid.remote(), timeout=PATIENCE_S) != pid
        for handle in (here, there):
            wait_until_watched(handle)
        wait_until(lambda: actorsub.stats(here)["sentinel"]["sockets"] == 2)
        assert actorsub.stats(here)["sentinel"]["process_watches"] == 1
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: actorsub.state(there) is not ActorState.ALIVE, TRUTH_S, "the death is noticed")
        wait_for_state(there, ActorState.ALIVE, timeout_s=PATIENCE_S)
    finally:
        ray.shutdown()
        cluster.shutdown()


# Prints one line of JSON for each number of descriptors to spare.
NEAR_THE_LIMIT = """
import json, os, resource, sys, time
import ray
import actorsub

def until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)

def openable():
    files = []
    try:
        while len(files) < 1000:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for file in files:
        os.close(file)
    return len(files)

class Worker:
    def work(self):
        return 1

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
plain = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(20)]
assert ray.get([one.work.remote() for one in plain], timeout=60) == [1] * 20
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for wanted in (4, 12, 60):
    actorsub.shutdown()
    # Ray itself opens some and closes them again while it settles.
    limit = len(os.listdir("/proc/self/fd")) + wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    spare = openable()
    handles = [actorsub.wrap(one) for one in plain]
    until(lambda: all(actorsub.state(one) is actorsub.ActorState.ALIVE for one in handles))
    until(lambda: all(actorsub.stats(one)["sentinel"]["watches"] >= 20 for one in handles))
    time.sleep(0.5)  # For what must not happen: that one more is taken.
    said = sum(actorsub.stats(one)["watched"] for one in handles)
    sentinel = actorsub.stats(handles[0])["sentinel"]
    told = {"spare": spare, "left": openable(), "limit": limit, "said": said,
            "watched": sentinel["process_watches"] + sentinel["sockets"],
            "plain": ray.get([one.work.remote() for one in plain], timeout=60) == [1] * 20,
            "wrapped": ray.get([one.work.remote() for one in handles], timeout=60) == [1] * 20,
            "call": handles[0].work.call().result(timeout=60)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: all(actorsub.stats(one)["watched"] for one in handles))
    told["call"] += handles[1].work.call().result(timeout=60)
    print(json.dumps(told), flush=True)
    del handles
ray.shutdown()
"""


def test_descriptors_are_left_to_the_application(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "near_the_limit.py"
    script.write_text(NEAR_THE_LIMIT)
    output = output_of(run_python(str(script), timeout_s=240))
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(told) == 3
    for one in told:
        # Three are the sentinel's own; of the others it takes what is above the reserve.
        assert one["left"] >= min(one["spare"] - 3, max(16, one["limit"] // 4)), one
        assert one["said"] <= one["watched"], one
        assert (one["plain"], one["wrapped"], one["call"]) == (True, True, 2), one
    assert told[0]["said"] == told[1]["said"] == 0
    assert told[2]["said"] > 0
