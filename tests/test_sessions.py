"""Several Ray sessions in one process, forks, and Ray Client. Each test is a process of its own with a time limit: what
goes wrong here hangs or kills."""

from __future__ import annotations

import pathlib

import pytest
from subprocesses import run_script

import actorsub

HELPERS = """
import pickle, pathlib, traceback

directory = pathlib.Path(sys.argv[1])

def fresh(name):
    path = directory / name
    path.mkdir()
    return str(path)

def error_of(function):
    try:
        function()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None

def get(ref):
    return ray.get(ref, timeout=60)

def watcher_threads():
    return [t for t in threading.enumerate() if t.name.startswith("actorsub-")]

def check_refusals(handle, gate_directory):
    "The whole circle on a restartable actor with on_unavailable='raise': up, refused, up."
    os.kill(get(handle.pid.remote()), signal.SIGKILL)
    wait_for_state(handle, ActorState.RESTARTING, timeout_s=10)
    try:
        handle.pid.remote()
    except actorsub.ActorUnavailableError as error:
        assert error.sent is False
    else:
        raise AssertionError("not refused")
    (pathlib.Path(gate_directory) / "gate").touch()
    wait_for_state(handle, ActorState.ALIVE)
    get(handle.pid.remote())

RAISING = actorsub.remote(num_cpus=0, max_restarts=-1, on_unavailable="raise")(Worker)
"""

SESSIONS = {
    "what fails of ours leaves nothing of Ray's end out": """
import logging
logging.getLogger("actorsub").setLevel(logging.CRITICAL + 1)
ray.init(**RAY_ARGS)
handle = RAISING.remote(fresh("a"))
get(handle.pid.remote())
told = []
def fail():
    told.append(ray.is_initialized())
    raise SystemExit("by the test")
from actorsub import lifecycle
step = lifecycle.Step(fail, "it fails")
lifecycle.BEFORE_DISCONNECT = (step, *lifecycle.BEFORE_DISCONNECT)
lifecycle.AFTER_DISCONNECT = (step, *lifecycle.AFTER_DISCONNECT)
threads = len(os.listdir("/proc/self/task"))
ray.shutdown()
assert told == [True, False], told
assert not ray.is_initialized() and not hasattr(ray._private.worker.global_worker, "core_worker")
assert actorsub.state(handle) is ActorState.UNKNOWN
# Its threads have ended, too.
assert len(os.listdir("/proc/self/task")) <= threads - 8
""",
    "a second session starts clean": """
ray.init(**RAY_ARGS)
first = RAISING.remote(fresh("a"))
plain = ray.remote(num_cpus=0)(Worker).remote(fresh("b"))
get([first.pid.remote(), plain.pid.remote()])
threads = watcher_threads()
assert len(threads) == 2, threads
ray.shutdown()
ray.init(**RAY_ARGS)
second_directory = fresh("c")
second = RAISING.remote(second_directory)
check_refusals(second, second_directory)
assert watcher_threads() == threads, "the watcher did not survive"
assert first != second
del first
wait_until(lambda: actorsub._core.slot_count() == len(actorsub._core.live_actors()) == 1, 10)
""",
    "many sessions, handles dropped in the wrong one": """
old = []
for i in range(3):
    ray.init(**RAY_ARGS)
    handle = RAISING.remote(fresh(str(i)))
    assert get(handle.echo.remote(i)) == i
    old.append(handle)
    if i == 2:
        del old[:2]
    ray.shutdown()
del old, handle
ray.init(**RAY_ARGS)
assert get(RAISING.remote(fresh("last")).echo.remote(1)) == 1
""",
    "an old handle gives Ray's own error": """
ray.init(**RAY_ARGS)
wrapped, plain = RAISING.remote(fresh("a")), ray.remote(num_cpus=0)(Worker).remote(fresh("b"))
also = actorsub.wrap(plain, on_unavailable="raise")
unused = actorsub.wrap(ray.remote(num_cpus=0)(Worker).remote(fresh("c")), on_unavailable="wait", timeout_s=5)
get([wrapped.pid.remote(), plain.pid.remote(), also.pid.remote()])
method = also.pid.options(name="n")

def compare(where):
    expected = error_of(plain.pid.remote)
    assert expected is not None, where
    for one in (also.pid.remote, method.remote, also.pid.options(timeout_s=1).remote):
        assert error_of(one) == expected, (where, error_of(one), expected)
    for one in (wrapped.pid.remote, unused.pid.remote):
        assert error_of(one)[0] == expected[0], (where, error_of(one), expected)
    for handle in (wrapped, also, unused):
        assert actorsub.state(handle) is ActorState.UNKNOWN
        actorsub.stats(handle), actorsub.policy(handle), repr(handle), hash(handle), dir(handle)
        assert handle == handle
    return expected

ray.shutdown()
first = compare("no session")
ray.init(**RAY_ARGS)
second = compare("another session")
assert "Traceback" not in second[1]
assert get(RAISING.remote(fresh("d")).echo.remote(1)) == 1
again = error_of(lambda: actorsub.wrap(plain).pid.remote())
assert again == error_of(plain.pid.remote), again
""",
    "an old handle is pickled": """
ray.init(**RAY_ARGS)
old = RAISING.remote(fresh("a"))
get(old.pid.remote())
ray.shutdown()
assert error_of(lambda: pickle.dumps(old)) is not None
ray.init(**RAY_ARGS)
@ray.remote(num_cpus=0.1)
def take(thing):
    return 1
for function in (lambda: pickle.dumps(old), lambda: pickle.dumps(old.pid), lambda: ray.put(old), lambda: ray.put([old]),
                 lambda: take.remote(old)):
    assert error_of(function) is not None
""",
    "a thread that waits when the session ends": """
ray.init(**RAY_ARGS)
handle = actorsub.wrap(RAISING.remote(fresh("a")), on_unavailable="wait")
os.kill(get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
seen = []
thread = threading.Thread(target=lambda: seen.append(error_of(handle.pid.remote)))
thread.start()
wait_until(lambda: handle._actorsub_actor.waiters)
ray.shutdown()
thread.join(20)
assert not thread.is_alive(), "the waiting thread hangs"
assert seen[0] is not None and "Error" in seen[0][0], seen
ray.init(**RAY_ARGS)
assert get(RAISING.remote(fresh("b")).echo.remote(1)) == 1
""",
    "the same actor in the next session, while an old handle is held": """
import uuid
ray.init(**RAY_ARGS, namespace="n")
path, name = fresh("a"), uuid.uuid4().hex
old = RAISING.options(name=name, lifetime="detached").remote(path)
get(old.pid.remote())
ray.shutdown()
ray.init(**RAY_ARGS, namespace="n")
new = actorsub.get_actor(name, on_unavailable="raise")
assert new == old
try:
    assert get(new.echo.remote(1)) == 1
    wait_for_state(new, ActorState.ALIVE)
    check_refusals(new, path)
finally:
    ray.kill(new)
""",
    "actorsub.shutdown is idempotent and nothing is lost": """
actorsub.shutdown()
actorsub.shutdown()
assert watcher_threads() == []
ray.init(**RAY_ARGS)
path = fresh("a")
handle = RAISING.remote(path)
get(handle.pid.remote())
many = [threading.Thread(target=actorsub.shutdown) for _ in range(8)]
for one in many: one.start()
for one in many: one.join()
assert watcher_threads() == []
assert get(handle.echo.remote(1)) == 1
assert actorsub.state(handle) is ActorState.ALIVE
handle = actorsub.wrap(handle, timeout_s=5)
check_refusals(actorsub.wrap(handle._actorsub_inner, on_unavailable="raise"), path)
assert len(watcher_threads()) == 2
""",
    "refusals come back by the first call after actorsub.shutdown": """
ray.init(**RAY_ARGS)
path = fresh("a")
handle = RAISING.remote(path)
pid = get(handle.pid.remote())
actorsub.shutdown()
os.kill(pid, signal.SIGKILL)
# No thread looks; each call does, and starts the threads again once there is something to see.
def refused():
    try:
        handle.echo.remote(1)
    except actorsub.ActorUnavailableError:
        return True
wait_until(refused, 10)
(pathlib.Path(path) / "gate").touch()
wait_for_state(handle, ActorState.ALIVE)
assert len(watcher_threads()) == 2
""",
    "actorsub.shutdown while a thread waits": """
ray.init(**RAY_ARGS)
path = fresh("a")
handle = actorsub.wrap(RAISING.remote(path), on_unavailable="wait", timeout_s=15)
os.kill(get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
seen = []
thread = threading.Thread(target=lambda: seen.append(get(handle.echo.remote(7))))
thread.start()
wait_until(lambda: handle._actorsub_actor.waiters)
actorsub.shutdown()
(pathlib.Path(path) / "gate").touch()
thread.join(20)
assert seen == [7], "still waiting"
""",
    "use from within a worker of the session": """
ray.init(**RAY_ARGS)
class Inside:
    def run(self, path):
        handle = RAISING.remote(path)
        check_refusals(handle, path)
        actorsub.shutdown()
        assert get(handle.echo.remote(2)) == 2
        return sorted(t.name for t in watcher_threads())
@ray.remote(num_cpus=0.1)
def run(path):
    Inside().run(path)
    return True
assert get(run.remote(fresh("a")))
""",
}

FORK = """
import json
ray.init(**RAY_ARGS)
path = fresh("parent")
handle = RAISING.remote(path)
plain = handle._actorsub_inner
get(handle.pid.remote())
method, with_options, bound = handle.pid, handle.pid.options(name="n"), handle.echo.remote
# Its process and its connection: the last descriptors that the parent opens by itself.
sentinel = lambda name: actorsub.stats(handle)["sentinel"][name]
wait_until(lambda: sentinel("heartbeats_acked") and sentinel("process_watches"))
descriptors = sorted(os.listdir("/proc/self/fd"))

def in_child(function, limit_s=10):
    "What `function` returns or raises in a forked child, and after how long; 'hangs' when it does not end."
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            begin = time.monotonic()
            try:
                result = ["returned", repr(function())]
            except BaseException as error:
                result = [type(error).__name__, str(error)]
            os.write(write, json.dumps([*result, time.monotonic() - begin]).encode())
        finally:
            os._exit(0)
    os.close(write)
    end = time.monotonic() + limit_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return ["hangs", "", limit_s]
        time.sleep(0.002)
    found = os.read(read, 65536)
    os.close(read)
    return json.loads(found) if found else ["died", "", 0.0]

def refused(function):
    kind, text, seconds = in_child(function)
    assert kind == "RuntimeError", (kind, text, seconds)
    assert "fork" in text and "spawn" in text, text
    assert seconds < 1, seconds
"""

FORKS = {
    "the child is refused at once": """
for function in (method.remote, with_options.remote, handle.pid.remote, lambda: bound(1),
                 lambda: handle.pid.options(on_unavailable="ref").remote(),
                 lambda: handle.pid._remote([], {}),
                 lambda: actorsub.wrap(handle, on_unavailable="wait").pid.remote()):
    refused(function)
# In the parent meanwhile nothing has changed.
assert sorted(os.listdir("/proc/self/fd")) == descriptors
assert get(handle.echo.remote(3)) == 3
assert len(watcher_threads()) == 2
check_refusals(handle, path)
""",
    "the child of a parent whose actor restarts": """
os.kill(get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
for function in (method.remote, lambda: actorsub.wrap(handle, on_unavailable="wait").pid.remote(),
                 lambda: actorsub.wrap(handle, on_unavailable="ref").pid.remote()):
    refused(function)
pathlib.Path(path, "gate").touch()
wait_for_state(handle, ActorState.ALIVE)
assert get(handle.echo.remote(3)) == 3
""",
    "the child may look at its handles": """
kind, text, seconds = in_child(lambda: [
    actorsub.state(handle).value, actorsub.policy(handle), actorsub.stats(handle)["submitted"],
    repr(handle), hash(handle), dir(handle), handle == plain, repr(method),
])
assert kind == "returned", (kind, text)
assert seconds < 1
def drop():
    global handle, method, with_options, bound
    del handle, method, with_options, bound
    gc.collect()
    actorsub.shutdown()
kind, text, seconds = in_child(drop)
assert kind == "returned", (kind, text)
assert get(handle.echo.remote(3)) == 3
""",
    "the child wraps a plain handle of the parent": """
refused(lambda: actorsub.wrap(plain).pid.remote())
refused(lambda: actorsub.wrap(plain, on_unavailable="raise").pid.remote())
assert get(handle.echo.remote(3)) == 3
""",
    "the child uses the parent's connection otherwise": """
refused(lambda: actorsub.get_actor("nobody"))
refused(lambda: RAISING.remote(fresh("child")))
assert get(handle.echo.remote(3)) == 3
""",
    "a child of multiprocessing": """
import multiprocessing
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
def run(given):
    queue.put(error_of(given.pid.remote))
child = context.Process(target=run, args=(handle,))
child.start()
child.join(20)
assert child.exitcode == 0, child.exitcode
assert queue.get()[0] == "RuntimeError"
assert get(handle.echo.remote(3)) == 3
""",
    "fork in a thread while others call": """
stop = threading.Event()
def call():
    while not stop.is_set():
        get(handle.echo.remote(1))
callers = [threading.Thread(target=call) for _ in range(2)]
for one in callers: one.start()
for _ in range(5):
    refused(handle.pid.remote)
stop.set()
for one in callers: one.join()
assert get(handle.echo.remote(3)) == 3
""",
}

FORK_BEFORE = """
child = os.fork()
name = "child" if child == 0 else "parent"
ray.init(**RAY_ARGS)
path = fresh(name)
handle = RAISING.remote(path)
check_refusals(handle, path)
assert len(watcher_threads()) == 2
ray.shutdown()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""

FORK_AFTER_SHUTDOWN = """
# A child that uses Ray itself is not tried: Ray hangs in it, as what it used before does not survive a fork.
ray.init(**RAY_ARGS)
old = RAISING.remote(fresh("old"))
get(old.pid.remote())
ray.shutdown()
child = os.fork()
if child == 0:
    os._exit(0 if error_of(old.pid.remote)[0] == "RuntimeError" else 1)
assert os.waitpid(child, 0)[1] == 0
ray.init(**RAY_ARGS)
path = fresh("new")
check_refusals(RAISING.remote(path), path)
"""

CLIENT = """
import subprocess, socket
import ray.util.client.server.server as client_server
ray.init(**RAY_ARGS)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = client_server.serve("127.0.0.1", port)
try:
    client = subprocess.run([sys.executable, "-c", sys.argv[2], str(port)], timeout=60, capture_output=True, text=True)
finally:
    server.stop(0)
print(client.stdout, client.stderr)
assert client.returncode == 0, client.stderr
"""

IN_CLIENT = """
import sys
import ray, actorsub
class Worker:
    def echo(self, x): return x
before = actorsub.remote(num_cpus=0, on_unavailable="raise")(Worker)
ray.init(f"ray://127.0.0.1:{sys.argv[1]}", logging_level="ERROR")
def refused(kind, function):
    try:
        function()
    except kind as error:
        assert "ray://" in str(error) and "ray.init(address=" in str(error), error
    else:
        raise AssertionError("not refused")
plain = ray.remote(num_cpus=0)(Worker).options(name="named").remote()
assert ray.get(plain.echo.remote(1)) == 1
print(type(plain))
refused(TypeError, lambda: actorsub.wrap(plain))
refused(TypeError, lambda: actorsub.wrap(plain, on_unavailable="raise"))
refused(RuntimeError, lambda: actorsub.get_actor("named"))
refused(RuntimeError, lambda: before.remote())
refused(RuntimeError, lambda: before.options(name="other").remote())
refused(RuntimeError, lambda: before.options(on_unavailable="raise").remote())
refused(RuntimeError, lambda: actorsub.remote(Worker).remote())
assert ray.get(plain.echo.remote(2)) == 2
ray.shutdown()
"""


@pytest.mark.parametrize("situation", SESSIONS)
def test_sessions(ray_local: None, situation: str, tmp_path: pathlib.Path) -> None:
    run_script(HELPERS + SESSIONS[situation], str(tmp_path))


def test_two_clusters_one_after_the_other(tmp_path: pathlib.Path) -> None:
    run_script(HELPERS + SESSIONS["a second session starts clean"], str(tmp_path), own_cluster=True)


@pytest.mark.parametrize("situation", FORKS)
def test_fork(ray_local: None, situation: str, tmp_path: pathlib.Path) -> None:
    run_script(HELPERS + FORK + FORKS[situation], str(tmp_path), timeout_s=30)


def test_fork_before_ray_init(tmp_path: pathlib.Path) -> None:
    """Then the child has nothing of the parent's, and both use Ray. A cluster each: two processes that fork with one
    state of Ray's random numbers collide in one object store."""
    run_script(HELPERS + FORK_BEFORE, str(tmp_path), own_cluster=True)


def test_fork_after_ray_shutdown(ray_local: None, tmp_path: pathlib.Path) -> None:
    run_script(HELPERS + FORK_AFTER_SHUTDOWN, str(tmp_path))


def test_a_ray_client_handle_is_refused() -> None:
    """The class alone; the test below goes through a real connection where grpcio is installed."""
    pytest.importorskip("grpc", reason="Ray Client needs grpcio")
    from ray.util.client.common import ClientActorHandle

    handle = ClientActorHandle.__new__(ClientActorHandle)
    # Its own __del__ wants what its constructor makes.
    handle.actor_ref = None
    with pytest.raises(TypeError, match="ray://"):
        actorsub.wrap(handle)


def test_ray_client_is_refused_with_the_reason(ray_local: None, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("grpc", reason="Ray Client needs grpcio")
    run_script(CLIENT, str(tmp_path), IN_CLIENT)
