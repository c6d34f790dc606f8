"""Nothing lives longer than with plain handles, and nothing leaks: actors, handles, memory, descriptors, threads; and
the interpreter ends whatever state it is left in. What could hang or kill the process runs in a process of its own."""

from __future__ import annotations

import gc
import pathlib
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from helpers import Restartable, Worker, get, wait_for_state, wait_until
from subprocesses import run_script, wait_for_end

import actorsub
from actorsub import ActorState, _core, _ray_compat, supply


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Reference counting alone has to do it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def worker_class(ray_local: None, tmp_path: pathlib.Path) -> Any:
    """A wrapped actor class whose constructor takes no arguments."""
    directory = str(tmp_path)

    class Here(Worker):
        def __init__(self) -> None:
            super().__init__(directory, 0)

        def stream(self, count: int = 3) -> Iterator[int]:
            # Not `yield from range(...)`: Ray 2.60 sends into generators, and a range takes nothing.
            for i in range(count):  # noqa: UP028
                yield i

    return actorsub.remote(num_cpus=0)(Here)


# ---------------------------------------------------------------------------------------------------------------------
# The actor ends when its last handle does.


def test_ends_when_dropped_after_calls(no_gc: None, worker_class: Any) -> None:
    handle = worker_class.remote()
    pid = get(handle.pid.remote())
    assert get(handle.echo.remote(1)) == 1
    del handle
    wait_for_end(pid)


def test_ends_when_dropped_after_calls_with_options(no_gc: None, worker_class: Any) -> None:
    """Before 2.60 Ray's own `.options()` makes a cycle that keeps the actor until the next garbage collection."""
    handle = worker_class.remote()
    pid = get(handle.pid.options(name="n", timeout_s=5).remote())
    get(handle.pair.options(num_returns=2).options(on_unavailable="raise").remote())
    del handle
    wait_for_end(pid)


def test_ends_when_dropped_after_everything_else(no_gc: None, worker_class: Any) -> None:
    handle = worker_class.options(on_unavailable="raise").remote()
    pid = get(handle.pid.remote())
    repr(handle), dir(handle), hash(handle), actorsub.state(handle), actorsub.stats(handle), actorsub.policy(handle)
    repr(handle.echo)
    with pytest.raises(AttributeError):
        handle.no_such_method  # noqa: B018
    with pytest.raises(TypeError):
        handle.pid.remote(1, 2)
    with pytest.raises(TypeError):
        handle.pid.options(no_such=1)
    for ref in handle.stream.remote(2):
        get(ref)
    again = actorsub.wrap(handle, timeout_s=1)
    assert get(again.pid.remote()) == pid
    del handle, again, ref
    wait_for_end(pid)


def test_ends_when_never_called(no_gc: None, ray_local: None, tmp_path: pathlib.Path) -> None:
    handle = actorsub.remote(num_cpus=0)(Worker).remote(str(tmp_path))
    starts = tmp_path / "starts"
    wait_until(lambda: starts.exists() and starts.read_text())
    pid = int(starts.read_text())
    del handle
    wait_for_end(pid)


def test_each_of_several_wrappers_counts_together(no_gc: None, worker_class: Any) -> None:
    first = worker_class.remote()
    pid = get(first.pid.remote())
    second = actorsub.wrap(first, on_unavailable="raise")
    del first
    assert get(second.pid.remote()) == pid
    third = actorsub.wrap(second._actorsub_inner)
    del second
    assert get(third.pid.remote()) == pid
    del third
    wait_for_end(pid)


def test_method_object_alone_keeps_it_alive(no_gc: None, worker_class: Any) -> None:
    """A plain method object does so too: since Ray 2.4x it holds its handle."""
    handle = worker_class.remote()
    method = handle.pid
    with_options = handle.pid.options(name="n")
    pid = get(method.remote())
    del handle
    assert get(method.remote()) == pid
    del method
    assert get(with_options.remote()) == pid
    del with_options
    wait_for_end(pid)


def test_bound_remote_alone_keeps_it_alive(no_gc: None, worker_class: Any) -> None:
    remote = worker_class.remote().pid.remote
    pid = get(remote())
    assert get(remote()) == pid
    del remote
    wait_for_end(pid)


def test_one_liners(no_gc: None, worker_class: Any) -> None:
    """The handle is a temporary that is gone before the call ends."""
    pids = [get(worker_class.remote().pid.remote()), get(worker_class.remote().pid.options(name="n").remote())]
    pids.append(get(worker_class.options(timeout_s=1).remote().pid.remote()))
    assert get(worker_class.remote().echo.remote(7)) == 7
    for pid in pids:
        wait_for_end(pid)


def test_one_liner_by_name(no_gc: None, ray_local: None, worker_class: Any) -> None:
    name = uuid.uuid4().hex
    handle = worker_class.options(name=name).remote()
    assert get(actorsub.get_actor(name).pid.remote()) == get(handle.pid.remote())
    assert get(actorsub.get_actor(name).echo.options(name="n").remote(2)) == 2
    assert list(map(get, actorsub.get_actor(name).stream.remote(2))) == [0, 1]


def test_looked_up_handle_is_weak(no_gc: None, worker_class: Any) -> None:
    name = uuid.uuid4().hex
    handle = worker_class.options(name=name).remote()
    weak = actorsub.get_actor(name)
    pid = get(weak.pid.remote())
    del handle
    wait_for_end(pid)
    wait_for_state(weak, ActorState.DEAD)
    with pytest.raises(ray.exceptions.ActorDiedError):
        get(weak.pid.remote())


def test_detached_actor_lives_on(no_gc: None, worker_class: Any) -> None:
    name = uuid.uuid4().hex
    other = worker_class.remote()
    handle = worker_class.options(name=name, lifetime="detached").remote()
    pid, other_pid = get([handle.pid.remote(), other.pid.remote()])
    del handle, other
    wait_for_end(other_pid)
    assert get(actorsub.get_actor(name).pid.remote()) == pid
    ray.kill(actorsub.get_actor(name))
    wait_for_end(pid)


def test_handle_is_no_part_of_a_cycle(no_gc: None, worker_class: Any) -> None:
    handle = worker_class.remote()
    get(handle.pid.remote())
    get(handle.pair.options(num_returns=2, timeout_s=1).remote())
    inner = weakref.ref(handle._actorsub_inner)
    method = weakref.ref(handle.pid)
    wrapper = weakref.ref(handle)
    record = weakref.ref(handle._actorsub_actor)
    del handle
    assert (wrapper(), method(), inner()) == (None, None, None)
    wait_until(lambda: record() is None, 5, "the watcher lets the record go")


def test_refused_handle_is_no_part_of_a_cycle(no_gc: None, restartable: Any) -> None:
    """Errors hold the actor's record, for their text, but never the handle."""
    one: Restartable = restartable(on_unavailable="raise")
    handle = actorsub.wrap(one.handle._actorsub_inner, on_unavailable="raise")
    one.kill()
    errors = []
    for method in (handle.pid, handle.pid.options(name="n")):
        try:
            method.remote()
        except actorsub.ActorUnavailableError as error:
            errors.append(error.with_traceback(None))
        del method
    assert len(errors) == 2
    wrapper = weakref.ref(handle)
    del handle
    assert wrapper() is None
    assert "restarting" in str(errors[0])


# ---------------------------------------------------------------------------------------------------------------------
# Leaks.


def resident_kb() -> int:
    return psutil.Process().memory_info().rss // 1024


def descriptors() -> int:
    return psutil.Process().num_fds()


def test_many_wraps_leak_nothing(worker_class: Any) -> None:
    plain = ray.get_actor(get_name(worker_class))
    gc.collect()

    def work() -> None:
        kept = [actorsub.wrap(plain, timeout_s=1 + i % 5) for i in range(10_000)]
        for one in kept:
            one.echo  # noqa: B018
            actorsub.state(one)

    work()
    gc.collect()
    memory, files, objects, slots = resident_kb(), descriptors(), len(gc.get_objects()), _core.slot_count()
    threads = threading.active_count()
    growth_kb = []
    for _ in range(4):
        work()
        gc.collect()
        before, memory = memory, resident_kb()
        growth_kb.append(memory - before)
    assert _core.slot_count() == slots
    assert abs(len(gc.get_objects()) - objects) < 500
    assert descriptors() <= files + 2
    assert threading.active_count() <= threads
    # A leak would be in each of them; whatever else this process does may be in one.
    assert min(growth_kb) < 1_000


_named: list[Any] = []


def get_name(worker_class: Any) -> str:
    """The name of a new actor that lives as long as the test's process."""
    name = uuid.uuid4().hex
    _named.append(worker_class.options(name=name).remote())
    get(_named[-1].pid.remote())
    return name


def test_slots_return(worker_class: Any) -> None:
    gc.collect()
    # Slots are one connection's. Of an earlier one Actors may be left: Ray never lets go of what waits for the outcome
    # of a call that was under way when the connection ended.
    session = _ray_compat.session_token()
    wait_until(lambda: _core.slot_count() == sum(one.session is session for one in _core.live_actors()), 5)
    before = _core.slot_count()
    handles = [worker_class.remote() for _ in range(2)]
    handles += [actorsub.wrap(one, timeout_s=1) for one in handles]
    assert _core.slot_count() == before + 2
    get([one.pid.remote() for one in handles])
    del handles
    gc.collect()
    wait_until(lambda: _core.slot_count() <= before, 10, "slots return")


def test_raised_refusals_leak_nothing(restartable: Any) -> None:
    one: Restartable = restartable(on_unavailable="raise")
    one.kill()
    method = one.handle.echo
    with_options = one.handle.echo.options(name="n", on_unavailable="raise")

    def refuse(count: int) -> None:
        for i in range(count):
            try:
                (method if i % 4 else with_options).remote(i, twice=True)
            except actorsub.ActorUnavailableError as error:
                if i % 1000 == 0:
                    assert str(error)
            else:
                raise AssertionError("not refused")

    refuse(5_000)
    gc.collect()
    memory, files, objects = resident_kb(), descriptors(), len(gc.get_objects())
    record_references = sys.getrefcount(one.handle._actorsub_actor)
    refuse(50_000)
    gc.collect()
    # The background threads hold it for moments.
    wait_until(lambda: sys.getrefcount(one.handle._actorsub_actor) <= record_references, 10, "references return")
    assert abs(len(gc.get_objects()) - objects) < 300
    assert descriptors() <= files + 2
    assert resident_kb() - memory < 4_000
    assert actorsub.stats(one.handle)["refused"]["restarting"] == 55_000


def references_of_this_process() -> int:
    """How many objects this process counts references for."""
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return len(counts)


def test_failed_refs_leak_nothing(restartable: Any) -> None:
    one: Restartable = restartable(on_unavailable="ref")
    references_before = references_of_this_process()
    one.kill()

    def refuse(count: int) -> None:
        for i in range(count):
            ref = one.handle.echo.remote(i)
            if i % 10 == 0:
                with pytest.raises(actorsub.ActorUnavailableError):
                    ray.get(ref)
        del ref
        generator = one.handle.stream.remote()
        with pytest.raises(actorsub.ActorUnavailableError):
            ray.get(next(generator))
        one.handle.pair.options(num_returns=2).remote()
        one.handle.echo.options(num_returns=0).remote()

    refuse(50)
    gc.collect()
    memory, files, references = resident_kb(), descriptors(), references_of_this_process()
    refuse(300)
    gc.collect()
    # A stock of them is kept ready while the actor is away.
    stock = supply.MAX_STOCK
    wait_until(lambda: references_of_this_process() <= references + stock, 10, "the failed refs are gone")
    assert descriptors() <= files + 2
    assert resident_kb() - memory < 10_000
    one.restart()
    wait_until(lambda: references_of_this_process() <= references_before + 2, 10, "the stock is gone")


def test_calls_leak_nothing(worker_class: Any) -> None:
    handle = worker_class.remote()
    get(handle.pid.remote())

    def work(count: int) -> None:
        get([handle.echo.remote(i) for i in range(count)])
        get([handle.echo.options(name="n", timeout_s=9).remote(i) for i in range(count // 4)])

    work(500)
    gc.collect()
    references, objects = references_of_this_process(), len(gc.get_objects())
    gc.disable()
    work(2_000)
    gc.enable()
    wait_until(lambda: references_of_this_process() <= references, 10)
    # Without the collector having run: cycles would show.
    assert len(gc.get_objects()) - objects < 500


def test_background_threads_sleep_without_handles(ray_local: None, tmp_path: pathlib.Path) -> None:
    """No Ray, no handle: not one tick. In a process of its own, where nothing else uses the processor."""
    run_script(
        """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
ray.get(handle.pid.remote())
watcher = actorsub.watcher._watcher
looks = []
look = watcher._look
watcher._look = lambda: looks.append(1) or look()
del handle
def quiet():
    before = len(looks)
    time.sleep(0.3)
    return len(looks) == before
wait_until(quiet, 10)
ray.shutdown()
""",
        str(tmp_path),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Refs that are let go of while Ray ends.


def test_letting_go_while_ray_ends() -> None:
    """Plain Ray ends the process with exit code 1 when a thread makes or lets go of a ref during `ray.shutdown()`.

    Threads of this library let go of the refs of those who call, so with it this must be safe on every thread.
    """
    output = run_script(
        """
class Here:
    def echo(self, value): return value
    def stream(self): yield 0
worker = ray._private.worker.global_worker
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Here).remote()
kept = []
for i in range(1_000):
    kept += [handle.stream.remote(), *(ray.put(j) for j in range(3))]
ray.get(handle.echo.remote(1))
before = len(kept)
def let_go():
    # On several threads, of which one may stand in the call that ends Ray's core.
    while worker._is_connected: time.sleep(0.00005)
    while kept and hasattr(worker, "core_worker"):
        kept.pop()
        ray.ObjectRef(os.urandom(28))
        time.sleep(0.0002)
threads = [threading.Thread(target=let_go) for _ in range(2)]
for thread in threads: thread.start()
ray.shutdown()
for thread in threads: thread.join()
assert before - len(kept) > 10, "nothing was let go of in time"
ray.init(**RAY_ARGS)
again = actorsub.remote(num_cpus=0)(Here).remote()
kept.clear()
print(ray.get(again.echo.remote(5)))
""",
        own_cluster=True,
    )
    assert output.strip() == "5"


@pytest.mark.parametrize(
    "name",
    [
        "add_object_ref_reference",
        "remove_object_ref_reference",
        "remove_actor_handle_reference",
        "async_delete_object_ref_stream",
        "get_current_job_id",
    ],
)
def test_a_core_that_ends_only_leaves_out_counting(name: str) -> None:
    assert hasattr(ray._raylet.CoreWorker, name)
    asked = []
    core = types.SimpleNamespace(**{name: lambda *arguments: asked.append(arguments)})
    getattr(_ray_compat._EndingCore(core), name)("argument")
    assert asked == ([("argument",)] if name == "get_current_job_id" else [])


# ---------------------------------------------------------------------------------------------------------------------
# Interpreter exit.

EXITS = {
    # Handles alive as globals; no shutdown of any kind.
    "handles alive": """
ray.init(**RAY_ARGS)
directories = [tempfile.mkdtemp(dir=sys.argv[1]) for _ in range(2)]
handles = [actorsub.remote(num_cpus=0, on_unavailable="raise")(Worker).remote(one) for one in directories]
method = handles[0].echo
options = handles[0].echo.options(timeout_s=1)
assert ray.get(method.remote(1)) == 1
""",
    "calls in flight": """
ray.init(**RAY_ARGS)
class Slow:
    def nap(self): time.sleep(100)
handle = actorsub.remote(num_cpus=0)(Slow).remote()
ray.get(handle.__ray_ready__.remote())
refs = [handle.nap.remote() for _ in range(10)]
""",
    "never called": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
""",
    "right after a kill": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, max_restarts=-1, on_unavailable="raise")(Worker).remote(sys.argv[1])
os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
try:
    handle.pid.remote()
except actorsub.ActorUnavailableError:
    pass
""",
    "while it restarts, with errors kept": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, max_restarts=-1)(Worker).remote(sys.argv[1])
os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
refs = [handle.pid.remote() for _ in range(20)]
try:
    handle.pid.options(on_unavailable="raise").remote()
except actorsub.ActorUnavailableError as error:
    kept = error
""",
    "a daemon thread blocked in a wait": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, max_restarts=-1, on_unavailable="wait")(Worker).remote(sys.argv[1])
os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
def wait():
    try:
        handle.pid.remote()
    except actorsub.ActorUnavailableError:
        # Right, if it still gets to run after the connection has ended.
        pass
threads = [threading.Thread(target=wait, daemon=True) for _ in range(5)]
for thread in threads:
    thread.start()
wait_until(lambda: handle._actorsub_actor.waiters and len(handle._actorsub_actor.waiters) == 5)
""",
    "a daemon thread that waits while it comes back": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, max_restarts=-1, on_unavailable="wait")(Worker).remote(sys.argv[1])
os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
def wait():
    try:
        handle.pid.remote()
    except actorsub.ActorUnavailableError:
        # Right when the connection ended first.
        pass
thread = threading.Thread(target=wait, daemon=True)
thread.start()
wait_until(lambda: handle._actorsub_actor.waiters)
open(os.path.join(sys.argv[1], "gate"), "w").close()
""",
    "daemon threads that are refused all the time": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, max_restarts=-1, on_unavailable="raise")(Worker).remote(sys.argv[1])
os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
def refused():
    while True:
        try:
            handle.pid.remote()
        except actorsub.ActorUnavailableError:
            pass
for _ in range(2):
    threading.Thread(target=refused, daemon=True).start()
time.sleep(0.05)
""",
    "daemon threads that call all the time": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
ray.get(handle.pid.remote())
def call():
    while True:
        try:
            ray.get(handle.pid.remote())
        except BaseException:
            return
threading.Thread(target=call, daemon=True).start()
time.sleep(0.05)
""",
    "ray.shutdown first": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
ray.get(handle.pid.remote())
ray.shutdown()
""",
    "actorsub.shutdown and ray.shutdown first": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
ray.get(handle.pid.remote())
actorsub.shutdown()
ray.shutdown()
actorsub.shutdown()
""",
    "imported only": "",
    "handle in a cycle": """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
ray.get(handle.pid.remote())
cycle = {"handle": handle, "method": handle.pid}
cycle["self"] = cycle
class Late:
    def __init__(self): self.me, self.handle = self, handle
    def __del__(self): self.handle, repr(actorsub.state(self.handle))
late = Late()
""",
    # What outlives the modules' contents, which are taken away one module after the other: what ends then finds None in
    # place of every global that it names.
    "held everywhere": """
import builtins, contextvars, types
ray.init(**RAY_ARGS)
class Here:
    def echo(self, value): return value
def make(): return actorsub.remote(num_cpus=0)(Here).remote()
first = make()
assert first.echo.call(1).result() == 1
class Cycle:
    def __init__(self):
        self.me, self.handle, self.group = self, make(), actorsub.ReplicaGroup([first])
        self.cancel = actorsub.on_state_change(self.handle, lambda *change: None)
    def __del__(self, state=actorsub.state, stats=actorsub.stats):
        state(self.handle), stats(self.handle), stats(self.group)
cycle = Cycle()
class Holder:
    handle, group = make(), actorsub.ReplicaGroup([first])
local, variable = threading.local(), contextvars.ContextVar("variable")
local.handle = make()
variable.set((make(), actorsub.ReplicaGroup([first])))
stash = sys.modules["stash"] = types.ModuleType("stash")
for module in (stash, builtins, sys, os, threading, ray, actorsub, actorsub.group):
    module.held = (module, make(), actorsub.ReplicaGroup([first]), first.echo.options(timeout_s=1), Cycle())
ready = threading.Event()
def hold():
    handle, local.handle = make(), make()
    group = actorsub.ReplicaGroup([handle])
    ray.get(group.echo.remote(1))
    ready.set()
    time.sleep(1000)
threading.Thread(target=hold, daemon=True).start()
ready.wait()
kept = [first.echo.remote(1), first.echo.call(1), first.echo.remote(1).future()]
gc.freeze()
""",
    "sys.exit in a callback of atexit": """
import atexit
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0)(Worker).remote(sys.argv[1])
ray.get(handle.pid.remote())
@atexit.register
def last():
    assert ray.get(handle.echo.remote(5), timeout=30) == 5
    assert actorsub.state(handle) is ActorState.ALIVE
""",
}
# Those whose outcome depends on what the background threads do at that moment.
OFTEN = ("right after a kill", "a daemon thread blocked in a wait", "a daemon thread that waits while it comes back")


@pytest.mark.parametrize("situation", EXITS)
def test_interpreter_exit(ray_local: None, situation: str, tmp_path: pathlib.Path) -> None:
    for i in range(2 if situation in OFTEN else 1):
        directory = tmp_path / str(i)
        directory.mkdir()
        run_script(EXITS[situation], str(directory))


def test_waiting_after_the_end_of_our_threads(ray_local: None, tmp_path: pathlib.Path) -> None:
    """In a callback of atexit that was registered before actorsub's: nobody is left who could see the actor return."""
    output = run_script(
        """
import atexit
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, max_restarts=-1, on_unavailable="wait")(Worker).remote(sys.argv[1])
group = actorsub.ReplicaGroup([handle], on_unavailable="wait")
os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
wait_for_state(handle, ActorState.RESTARTING)
def late():
    second = actorsub.ReplicaGroup([handle], on_unavailable="wait")
    for submit in (
        handle.pid.remote, handle.pid.call, group.pid.remote, group.pid.call, second.pid.remote, second.pid.call
    ):
        try:
            result = submit()
            result.result(5)
        except actorsub.ActorUnavailableError as error:
            assert error.sent is False and "interpreter ends" in str(error), error
        else:
            raise AssertionError("answered")
    os.write(1, b"all six were refused")
atexit.unregister(actorsub.lifecycle._at_exit)
atexit.register(late)
atexit.register(actorsub.lifecycle._at_exit)
""",
        str(tmp_path),
    )
    assert "all six were refused" in output  # Beside it Ray says that the worker died.


def test_interpreter_exit_that_also_ends_the_cluster(tmp_path: pathlib.Path) -> None:
    """Then everything that a background thread could ask is gone too."""
    run_script(EXITS["right after a kill"], str(tmp_path), own_cluster=True)


def test_interpreter_exit_starts_no_new_ray() -> None:
    """A daemon thread that calls on while the interpreter ends: plain Ray starts a new cluster for it."""
    run_script(
        """
ray.init(**RAY_ARGS)
handle = actorsub.remote(num_cpus=0, on_unavailable="raise")(Worker).remote(tempfile.mkdtemp())
ray.get(handle.pid.remote())
ray.init = lambda *args, **kwargs: os.write(2, b"Traceback: a new Ray")
def call():
    while True:
        try:
            handle.pid.remote()
        except actorsub.ActorUnavailableError:
            pass
        # Thousands of calls under way when it ends are more than Ray's core bears.
        time.sleep(0.001)
for _ in range(2):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.05)
""",
        own_cluster=True,
        auto_connect=True,
    )
