"""ray.cancel."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import ray
import ray.exceptions
from helpers import get, wait_until

from equivalence.actors import AsyncCaller, Methods
from equivalence.world import World, case, error_of, skip_before


@case(
    "ray.cancel: pending call",
    raises=ray.exceptions.TaskCancelledError,
    text_differs="Ray words it by where the cancellation met the call, which is a race",
)
def _(w: World) -> Any:
    skip_before((2, 54), "Ray runs some of the calls that were cancelled while they were pending, plain ones too")
    # An actor of its own: a cancelled call can leave a hole in Ray's numbering, at which the next call waits for 30 s.
    actor = w.create(Methods)
    gate = w.path()
    get(actor.nothing.remote())
    running = actor.hold.remote(str(gate))
    pending = actor.echo.remote("never")
    # Where Ray's cancellation overtakes the call itself it is lost in some versions, or comes late: asked again.
    for _ in range(20):
        ray.cancel(pending)
        if ray.wait([pending], timeout=0.1)[0]:
            break
    gate.touch()
    get(running)
    return get(pending)


@case("ray.cancel: running async call", raises=ray.exceptions.TaskCancelledError)
def _(w: World) -> Any:
    key = uuid.uuid4().hex
    ref = w.asynchronous.forever.remote(key)
    wait_until(lambda: get(w.asynchronous.has_started.remote(key)))
    ray.cancel(ref)
    return get(ref)


@case("ray.cancel: finished call keeps its result")
def _(w: World) -> Any:
    ref = w.methods.echo.remote(1)
    get(ref)
    ray.cancel(ref)
    return get(ref)


@case("ray.cancel: running call of a synchronous actor")
def _(w: World) -> Any:
    if not hasattr(ray.get_runtime_context(), "is_canceled"):
        pytest.skip("a running call is not told in this Ray")
    path = w.path()
    ref = w.methods.wait_for_cancellation.remote(str(path))
    wait_until(path.exists)
    ray.cancel(ref)
    # Whether it fails or returns what the method made of it, is Ray's affair.
    try:
        return get(ref)
    except ray.exceptions.TaskCancelledError as error:
        return type(error).__name__


@case("ray.cancel: running stream", raises=ray.exceptions.TaskCancelledError)
def _(w: World) -> Any:
    key = uuid.uuid4().hex
    generator = w.asynchronous.stream_forever.remote(key)
    assert get(next(generator)) == 1
    wait_until(lambda: get(w.asynchronous.has_started.remote(key)))
    ray.cancel(generator)
    return get(next(generator))


@case("ray.cancel: also what the call waits for")
def _(w: World) -> Any:
    key = uuid.uuid4().hex
    ref = w.shared(AsyncCaller).ask_for_ever.remote(w.asynchronous, key)
    wait_until(lambda: get(w.asynchronous.has_started.remote(key)))
    ray.cancel(ref, recursive=True)
    return [type(error_of(ref)).__name__, wait_until(lambda: get(w.asynchronous.has_ended.remote(key)))]


@case("ray.cancel: by a task that was given the reference", raises=ray.exceptions.TaskCancelledError)
def _(w: World) -> Any:
    @ray.remote(num_cpus=0.1)
    def cancel(refs: list[Any]) -> None:
        ray.cancel(refs[0])

    key = uuid.uuid4().hex
    ref = w.asynchronous.forever.remote(key)
    wait_until(lambda: get(w.asynchronous.has_started.remote(key)))
    get(cancel.remote([ref]))
    return get(ref)


@case("ray.cancel: by force", raises=ValueError)
def _(w: World) -> Any:
    gate = w.path()
    ref = w.methods.hold.remote(str(gate))
    try:
        ray.cancel(ref, force=True)
    finally:
        gate.touch()
        get(ref)


case("ray.cancel: of a handle", raises=TypeError, text_differs="Ray names the class of what it was given")(
    lambda w: ray.cancel(w.methods)
)
