"""Wrapped handles travel: as arguments, nested, returned, captured and pickled, with their policy; and the actor lives
exactly as long as somebody somewhere holds a handle that counts."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import ray.actor
from helpers import GET_S, get, wait_until, wait_until_watched
from ray import cloudpickle
from subprocesses import is_running, wait_for_end

import actorsub
from actorsub import _ray_compat, watcher

OPTIONS: dict[str, Any] = {"on_unavailable": "raise", "on_pending": "wait", "timeout_s": 60.0}
POLICY = actorsub.Policy(**OPTIONS)


class Target:
    """The actor whose handle travels."""

    def echo(self, x: Any) -> Any:
        return x

    def pid(self) -> int:
        return os.getpid()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def pair(self) -> tuple[int, int]:
        return 1, 2

    def keep(self, thing: Any) -> None:
        self.kept = thing

    def own_handle(self) -> Any:
        return actorsub.wrap(ray.get_runtime_context().current_actor, **OPTIONS)


@dataclasses.dataclass
class Box:
    handle: Any
    label: str = "box"


def handle_in(thing: Any) -> Any:
    """Unpacks whatever a handle was put into."""
    while not isinstance(thing, ray.actor.ActorHandle):
        if isinstance(thing, ray.ObjectRef):
            thing = ray.get(thing)
        elif isinstance(thing, Box):
            thing = thing.handle
        elif isinstance(thing, bytes):
            thing = pickle.loads(thing)
        elif isinstance(thing, dict):
            thing = next(iter(thing.values()))
        elif callable(thing):
            thing = thing()
        else:
            thing = next(iter(thing))
    return thing


def described(thing: Any) -> dict[str, Any]:
    """What a process that was given a handle finds."""
    handle = handle_in(thing)
    answer = ray.get(handle.echo.remote("hello"), timeout=GET_S)
    return {
        "class": type(handle).__module__,
        "policy": actorsub.policy(handle),
        "hash": hash(handle),
        "answer": answer,
        "state": actorsub.state(handle),
        "back": handle,
    }


class Place:
    def describe(self, thing: Any) -> dict[str, Any]:
        return described(thing)

    def keep(self, thing: Any) -> None:
        self.kept = thing

    def call_kept(self) -> Any:
        return ray.get(handle_in(self.kept).pid.remote(), timeout=GET_S)

    def drop(self) -> None:
        self.kept = None

    def look_up(self, name: str) -> dict[str, Any]:
        self.kept = actorsub.get_actor(name, **OPTIONS)
        return described(self.kept)


class AsyncPlace:
    async def describe(self, thing: Any) -> dict[str, Any]:
        handle = thing[0] if isinstance(thing, list) else thing
        answer = await handle.echo.remote("hello")
        return {
            "class": type(handle).__module__,
            "policy": actorsub.policy(handle),
            "hash": hash(handle),
            "answer": answer,
            "state": actorsub.state(handle),
            "back": handle,
        }


@ray.remote(num_cpus=0.1)
def describe_in_task(thing: Any) -> dict[str, Any]:
    return described(thing)


@ray.remote(num_cpus=0.1)
def describe_keyword_in_task(*, thing: Any) -> dict[str, Any]:
    return described(thing)


@ray.remote(num_cpus=0.1)
def give_back(thing: Any) -> Any:
    return thing


@pytest.fixture(scope="module")
def target(ray_of_module: None) -> Iterator[Any]:
    handle = actorsub.remote(num_cpus=0, **OPTIONS)(Target).remote()
    get(handle.pid.remote())
    yield handle
    ray.kill(handle)


@pytest.fixture(scope="module")
def place(ray_of_module: None) -> Iterator[Any]:
    handle = ray.remote(num_cpus=0)(Place).remote()
    yield handle
    ray.kill(handle)


@pytest.fixture(scope="module")
def async_place(ray_of_module: None) -> Iterator[Any]:
    handle = ray.remote(num_cpus=0)(AsyncPlace).remote()
    yield handle
    ray.kill(handle)


def check(found: dict[str, Any], target: Any) -> None:
    assert found["class"] == "actorsub.handle"
    assert found["policy"] == POLICY
    assert found["answer"] == "hello"
    assert found["state"] is actorsub.ActorState.ALIVE
    assert found["hash"] == hash(target)
    back = found["back"]
    assert type(back) is actorsub.ActorHandle
    assert back == target
    assert hash(back) == hash(target)
    assert {back: 1}[target] == 1
    assert actorsub.policy(back) == POLICY
    assert get(back.echo.remote(5)) == 5


PACKINGS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda h: h,
    "list": lambda h: [h],
    "tuple": lambda h: (h,),
    "set": lambda h: {h},
    "dict value": lambda h: {"k": h},
    "dict key in a list": lambda h: [[h, {h: 1}]],
    "dataclass": Box,
    "deep": lambda h: [{"a": Box([(h,)])}],
    "ray.put": ray.put,
    "ray.put in a list": lambda h: [ray.put(h)],
    "ray.put of a list": lambda h: ray.put([h]),
    "ray.put in ray.put": lambda h: ray.put([ray.put(h)]),
    "closure": lambda h: lambda: h,
    "default argument": lambda h: lambda kept=h: kept,
    "pickle": pickle.dumps,
    "pickle protocol 4": lambda h: pickle.dumps([h], protocol=4),
    "cloudpickle": cloudpickle.dumps,
    "copied": copy.deepcopy,
    "result of a task": give_back.remote,
    "result of a task, nested": lambda h: give_back.remote({"k": [h]}),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_to_a_task_and_back(target: Any, packing: str) -> None:
    check(get(describe_in_task.remote(PACKINGS[packing](target))), target)


@pytest.mark.parametrize("packing", PACKINGS)
def test_to_an_actor_and_back(target: Any, place: Any, packing: str) -> None:
    check(get(place.describe.remote(PACKINGS[packing](target))), target)


@pytest.mark.parametrize("packing", ["itself", "list"])
def test_to_an_async_actor_and_back(target: Any, async_place: Any, packing: str) -> None:
    check(get(async_place.describe.remote(PACKINGS[packing](target))), target)


def test_as_a_keyword(target: Any) -> None:
    check(get(describe_keyword_in_task.remote(thing=target)), target)


def test_through_the_actor_itself(target: Any) -> None:
    """The actor that is asked is the one whose handle goes through."""
    for packing in ("itself", "list", "dataclass"):
        back = handle_in(get(target.echo.remote(PACKINGS[packing](target))))
        assert type(back) is actorsub.ActorHandle
        assert back == target
        assert actorsub.policy(back) == POLICY


def test_captured_by_a_remote_function(target: Any) -> None:
    @ray.remote(num_cpus=0.1)
    def captured() -> dict[str, Any]:
        return described(target)

    check(get(captured.remote()), target)


def test_captured_by_an_actor_class(target: Any) -> None:
    class Captures:
        def describe(self) -> dict[str, Any]:
            return described(target)

    check(get(actorsub.remote(num_cpus=0)(Captures).remote().describe.remote()), target)


def test_given_to_a_constructor(target: Any) -> None:
    class Given:
        def __init__(self, handle: Any, box: Any) -> None:
            self.handles = handle, box

        def describe(self) -> list[dict[str, Any]]:
            return [described(one) for one in self.handles]

    for found in get(actorsub.remote(num_cpus=0)(Given).remote(target, Box(target)).describe.remote()):
        check(found, target)


def test_returned_in_several_shapes(target: Any) -> None:
    @ray.remote(num_cpus=0.1, num_returns=2)
    def two(boxed: Any) -> Any:
        return boxed[0], boxed

    @ray.remote(num_cpus=0.1)
    def stream(boxed: Any) -> Any:
        yield boxed[0]
        yield boxed

    for ref in [*two.remote([target]), *stream.remote([target])]:
        back = handle_in(get(ref))
        assert (back, type(back), actorsub.policy(back)) == (target, actorsub.ActorHandle, POLICY)


def test_plain_and_wrapped_in_one_value(target: Any) -> None:
    """Each stays what it was; together they are one key."""
    plain = ray.remote(num_cpus=0)(Target).remote()
    wrapped = actorsub.wrap(plain, **OPTIONS)
    arrived = get(give_back.remote([plain, wrapped, {plain: "p"}, {wrapped: "w"}, target]))
    assert type(arrived[0]) is ray.actor.ActorHandle
    assert type(arrived[1]) is actorsub.ActorHandle
    assert arrived[0] == arrived[1] == plain == wrapped
    assert arrived[2][wrapped] == "p"
    assert arrived[3][plain] == "w"
    assert len(set(arrived[:2]) | {plain, wrapped, target}) == 2


def test_same_object_twice_in_one_value(target: Any) -> None:
    first, second = get(give_back.remote([target, target]))
    assert first is second


def test_pickled_in_one_process(target: Any) -> None:
    for dumps, loads in ((pickle.dumps, pickle.loads), (cloudpickle.dumps, cloudpickle.loads)):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            back = loads(dumps(target, protocol=protocol))
            assert type(back) is actorsub.ActorHandle
            assert back == target
            assert hash(back) == hash(target)
            assert actorsub.policy(back) == POLICY
            assert get(back.echo.remote(1)) == 1


METHODS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda m: m,
    "list": lambda m: [m],
    "ray.put": ray.put,
    "closure": lambda m: lambda: m,
    "pickle": pickle.dumps,
    "cloudpickle": cloudpickle.dumps,
}


@ray.remote(num_cpus=0.1)
def call_method(thing: Any) -> Any:
    if isinstance(thing, bytes):
        thing = pickle.loads(thing)
    elif isinstance(thing, list):
        thing = thing[0]
    elif not hasattr(thing, "remote"):
        thing = thing()
    result = thing.remote()
    if isinstance(result, list):
        result = [ray.get(ref, timeout=GET_S) for ref in result]
    else:
        result = ray.get(result, timeout=GET_S)
    return type(thing).__module__, thing._actorsub_policy, result


@pytest.mark.parametrize("packing", METHODS)
def test_method_objects(target: Any, packing: str) -> None:
    """A method travels with its handle's policy, and after `.options()` with what was set there."""
    found = get(call_method.remote(METHODS[packing](target.pair)))
    assert found == ("actorsub.handle", POLICY, (1, 2))
    method = target.pair.options(num_returns=2, timeout_s=7)
    found = get(call_method.remote(METHODS[packing](method)))
    assert found == ("actorsub.handle", POLICY.replace(timeout_s=7), [1, 2])


def test_get_actor_in_another_process(ray_of_module: None, place: Any) -> None:
    name = uuid.uuid4().hex
    handle = actorsub.remote(num_cpus=0, **OPTIONS)(Target).options(name=name).remote()
    get(handle.pid.remote())
    check(get(place.look_up.remote(name)), handle)


def test_an_actor_that_returns_its_own_handle(ray_of_module: None) -> None:
    """Ray's handle of an actor to itself is weak; it travels as well as any."""
    handle = actorsub.remote(num_cpus=0)(Target).remote()
    back = get(handle.own_handle.remote())
    assert type(back) is actorsub.ActorHandle
    assert back == handle
    assert actorsub.policy(back) == POLICY
    assert get(back.echo.remote(3)) == 3


def test_policy_differs_by_handle_not_by_actor(target: Any) -> None:
    other = actorsub.wrap(target, on_unavailable="ref", timeout_s=1)
    arrived = get(give_back.remote([target, other]))
    assert [actorsub.policy(one) for one in arrived] == [POLICY, POLICY.replace(on_unavailable="ref", timeout_s=1)]


# ---------------------------------------------------------------------------------------------------------------------
# Reference counting.


class Receiver:
    """A process that counts its reads of the actor table."""

    def __init__(self, received_read_s: float) -> None:
        watcher.RECEIVED_READ_S = received_read_s
        self.reads = 0
        self.told: list[Any] = []
        read = _ray_compat.read_actor_table

        def counted(actor_id: Any) -> Any:
            self.reads += 1
            return read(actor_id)

        _ray_compat.read_actor_table = counted

    def look(self, handle: Any) -> Any:
        """What was read so far, and whether this handle was new."""
        return self.reads, actorsub.state(handle).value

    def use(self, handle: Any) -> Any:
        return ray.get(handle.echo.remote("used"), timeout=GET_S)

    def call(self, handle: Any) -> Any:
        return handle.echo.call("called").result(GET_S)

    def wait(self, handle: Any) -> Any:
        # Long enough that the wait begins before the answer is there.
        actorsub.get(handle.pause.remote(0.5), timeout=GET_S)
        return self.keep(handle)

    def listen(self, handle: Any) -> list[Any]:
        actorsub.on_state_change(handle, lambda *change: self.told.append(change[2].value))
        wait_until(lambda: self.told, GET_S)
        return self.told

    def keep(self, handle: Any) -> bool:
        wait_until_watched(handle, GET_S)
        return True


@pytest.mark.parametrize("use", ["use", "call", "listen"])
def test_a_received_handle_costs_no_look_until_it_is_used(target: Any, use: str) -> None:
    receiver = ray.remote(num_cpus=0)(Receiver).remote(1000.0)
    for _ in range(20):
        assert get(receiver.look.remote(target)) == (0, "unknown")
    expected = {"use": "used", "call": "called", "listen": ["alive"]}[use]
    assert get(getattr(receiver, use).remote(target)) == expected
    ray.kill(receiver)


def test_a_received_handle_that_is_waited_on_is_watched(target: Any) -> None:
    """Also where Ray knows the actor from earlier calls, so that the call needs no look."""
    receiver = ray.remote(num_cpus=0)(Receiver).remote(1000.0)
    assert get(receiver.use.remote(target)) == "used"
    for _ in range(3):
        assert get(receiver.wait.remote(target))
    ray.kill(receiver)


def test_a_received_handle_that_is_kept_is_watched(target: Any) -> None:
    """Though nobody uses it, and also when the watcher has a time of its own to wake up at."""
    receiver = ray.remote(num_cpus=0, max_concurrency=4)(Receiver).remote(0.05)
    other = new_target("named")[0]
    assert get([receiver.keep.remote(target), receiver.keep.remote(other)]) == [True, True]
    ray.kill(receiver)
    ray.kill(other)


def used_before() -> tuple[Any, bytes]:
    """A wrapped handle of a new actor that Ray in this process knows as up, and the same pickled."""
    plain = ray.remote(num_cpus=0)(Target).remote()
    get(plain.pid.remote())
    wrapped = actorsub.wrap(plain)
    wait_until_watched(wrapped, GET_S)
    return wrapped, pickle.dumps(wrapped)


def test_a_handle_received_in_the_middle_of_a_look_is_watched(
    ray_of_module: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look has passed over it, and takes in the wake-up that comes with it."""
    first, _ = used_before()
    second, pickled = used_before()
    record = weakref.ref(second._actorsub_actor)
    # The actor lives on.
    keep = second._actorsub_inner
    del second
    wait_until(lambda: record() is None, GET_S)
    received: list[Any] = []
    look_at = watcher.Watcher._look_at

    def look_and_receive(self: Any, actor: Any, now_s: float) -> None:
        if actor is first._actorsub_actor and any(not one.greeted for one in actor.listeners) and not received:
            received.append(pickle.loads(pickled))
        look_at(self, actor, now_s)

    monkeypatch.setattr(watcher.Watcher, "_look_at", look_and_receive)
    actorsub.on_state_change(first, lambda *change: None)
    wait_until(lambda: received and actorsub.stats(received[0])["watched"], GET_S)
    ray.kill(first)
    ray.kill(keep)


def test_a_read_that_fails_is_made_again(ray_of_module: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Ray says by itself that the actor is up, so that nothing else asks for the read."""
    plain = ray.remote(num_cpus=0)(Target).remote()
    get(plain.pid.remote())
    read = _ray_compat.read_actor_table
    failures = iter([RuntimeError("the control store is away"), None])

    def failing_at_first(actor_id: Any) -> Any:
        for failure in failures:
            if failure is not None:
                raise failure
            return None
        return read(actor_id)

    monkeypatch.setattr(_ray_compat, "read_actor_table", failing_at_first)
    wrapped = actorsub.wrap(plain)
    wait_until_watched(wrapped, GET_S)
    assert next(failures, "none left") == "none left"
    ray.kill(plain)


def new_target(kind: str, **options: Any) -> tuple[Any, int]:
    """A plain or a wrapped handle of a new actor, and the actor's process id."""
    if kind == "plain":
        handle = ray.remote(num_cpus=0, **options)(Target).remote()
    elif kind == "created":
        handle = actorsub.remote(num_cpus=0, **OPTIONS, **options)(Target).remote()
    else:
        handle = actorsub.wrap(ray.remote(num_cpus=0, **options)(Target).remote(), **OPTIONS)
    return handle, get(handle.pid.remote())


KINDS = ["created", "wrapped"]
# What a holder is given: a handle as a whole argument and one inside another value go two ways through Ray.
HOLDINGS = ["itself", "list", "dataclass", "closure", "ray.put of a list"]


@pytest.mark.parametrize("holding", HOLDINGS)
def test_lives_as_long_as_a_remote_holder(place: Any, holding: str) -> None:
    handle, pid = new_target("created")
    get(place.keep.remote(PACKINGS[holding](handle)))
    del handle
    assert get(place.call_kept.remote()) == pid
    get(place.drop.remote())
    wait_for_end(pid)


@pytest.mark.parametrize("holding", ["itself", "list", "dataclass", "deep"])
@pytest.mark.parametrize("kind", KINDS)
def test_lives_as_long_as_a_stored_object(ray_of_module: None, kind: str, holding: str) -> None:
    handle, pid = new_target(kind)
    stored = ray.put(PACKINGS[holding](handle))
    del handle
    back = handle_in(get(stored))
    assert get(back.pid.remote()) == pid
    del back
    assert get(handle_in(get(stored)).pid.remote()) == pid
    del stored
    wait_for_end(pid)


def test_lives_as_long_as_a_returned_value(ray_of_module: None) -> None:
    @ray.remote(num_cpus=0.1)
    def make() -> Any:
        return [actorsub.remote(num_cpus=0, **OPTIONS)(Target).remote()]

    @ray.remote(num_cpus=0.1)
    def make_bare() -> Any:
        return actorsub.remote(num_cpus=0, **OPTIONS)(Target).remote()

    for function in (make, make_bare):
        ref = function.remote()
        pid = get(handle_in(get(ref)).pid.remote())
        back = handle_in(get(ref))
        del ref
        assert get(back.pid.remote()) == pid
        del back
        wait_for_end(pid)


def test_lives_as_long_as_a_method_object_elsewhere(place: Any) -> None:
    handle, pid = new_target("created")
    method = handle.pid
    del handle
    get(place.keep.remote([method]))
    del method
    assert is_running(pid)
    get(place.drop.remote())
    wait_for_end(pid)


# Out of band: nothing tells Ray where such a copy goes, so it must not count beyond its own handle object.
OUT_OF_BAND: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda h: pickle.loads(pickle.dumps(h)),
    "pickle, never loaded": pickle.dumps,
    "copy of a method": lambda h: copy.copy(h.pid),
    "deepcopy of a method": lambda h: copy.deepcopy(h.pid),
}


@pytest.mark.parametrize("way", OUT_OF_BAND)
def test_a_copy_in_this_process_pins_nothing(ray_of_module: None, way: str) -> None:
    """Ray is not told where such a copy goes; a plain handle counts only as long as the copies themselves."""
    plain, plain_pid = new_target("plain")
    wrapped, wrapped_pid = new_target("created")
    copies = None
    if "method" not in way:
        copies = [OUT_OF_BAND[way](plain)]
    copies = [copies, OUT_OF_BAND[way](wrapped)]
    del plain, wrapped, copies
    wait_for_end(plain_pid)
    wait_for_end(wrapped_pid, 5.0)


def test_a_looked_up_handle_does_not_keep_it_alive(place: Any) -> None:
    name = uuid.uuid4().hex
    handle, pid = new_target("created", name=name)
    here = actorsub.get_actor(name)
    get(place.look_up.remote(name))
    assert get(here.pid.remote()) == pid
    del handle
    wait_for_end(pid)
    with pytest.raises(ValueError, match=name):
        actorsub.get_actor(name)
    get(place.drop.remote())


@pytest.mark.parametrize("holding", ["list"])
def test_given_to_its_own_actor_it_counts_as_a_plain_one(ray_of_module: None, holding: str) -> None:
    """Up to Ray 2.60 a handle that its own actor was given keeps it alive; not ours to change, nor to make worse."""
    ends = []
    for kind in ("plain", "created"):
        handle, pid = new_target(kind)
        get(handle.keep.remote(PACKINGS[holding](handle)))
        get(handle.keep.remote(None))
        del handle
        wait_for_end(pid)
        handle, pid = new_target(kind)
        get(handle.keep.remote(PACKINGS[holding](handle)))
        del handle
        try:
            wait_for_end(pid, 2.0)
            ends.append(True)
        except AssertionError:
            ends.append(False)
            os.kill(pid, signal.SIGKILL)
    assert ends[0] == ends[1]


def test_a_handle_of_itself_that_it_wrapped_does_not_keep_it_alive(ray_of_module: None) -> None:
    handle, pid = new_target("created")
    back = get(handle.own_handle.remote())
    assert get(back.pid.remote()) == pid
    del handle
    wait_for_end(pid)
