"""Handles in Ray's libraries: graphs, pools, queues, data, collective groups, and tasks."""

from __future__ import annotations

import asyncio
import functools
import importlib
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import ray
import ray.exceptions
from helpers import GET_S, get, wait_until
from ray.util.actor_pool import ActorPool
from ray.util.queue import Empty, Full, Queue

from equivalence.actors import Member, Methods, Sum, collective_backend, register
from equivalence.world import World, answer_or_error, case, error_of, shape, skip_before, table


@case("dag: bind and execute")
def _(w: World) -> Any:
    from ray.dag import InputNode, MultiOutputNode

    with InputNode() as value:
        once = w.methods.echo.bind(value)
        dag = MultiOutputNode([w.methods.two.bind(once, b=1), w.asynchronous.echo.bind(once)])
    return get(dag.execute(7))


@case("dag: bind with options and num_returns")
def _(w: World) -> Any:
    node = w.methods.task_name.options(name="in a dag").bind()
    return [get(node.execute()), shape(w.methods.three.bind().__class__.__name__)]


@case("dag: several returns, and a handle as an argument")
def _(w: World) -> Any:
    first, _, third = w.methods.three.bind()
    return [get(w.methods.two.bind(first, third).execute()), get(w.methods.echo.bind([w.asynchronous]).execute())]


@case("dag: compiled")
def _(w: World) -> Any:
    pytest.importorskip("numpy", reason="compiled graphs need numpy")
    from ray.dag import InputNode

    actors = [w.methods, w.retrying]
    with InputNode() as value:
        graph = actors[1].two.bind(actors[0].echo.bind(value), 2)
    compiled = graph.experimental_compile()
    try:
        results = [get(compiled.execute(i)) for i in range(3)]
    finally:
        compiled.teardown()
    # The actors are of use again.
    return [results, get([actor.echo.remote(1) for actor in actors])]


@case("dag: wrong arguments", raises=TypeError)
def _(w: World) -> Any:
    return w.methods.two.bind(1)


@case("dag: class nodes", kinds=("created",))
def _(w: World) -> Any:
    node = w.actor_class(Methods).bind(5)
    return get(node.get_value.bind().execute())


@case("dag: class nodes with options", kinds=("created",))
def _(w: World) -> Any:
    return get(w.actor_class(Methods).options(max_restarts=1).bind(6).get_value.bind().execute())


@case("library: ActorPool.map")
def _(w: World) -> Any:
    pool = ActorPool([w.methods, w.asynchronous])
    return list(pool.map(lambda actor, value: actor.echo.remote(value), range(10)))


@case("library: ActorPool, an error and idle actors")
def _(w: World) -> Any:
    pool = ActorPool([w.methods])
    pool.submit(lambda actor, value: actor.fail.remote(), 0)
    with pytest.raises(ValueError, match="on purpose"):
        pool.get_next(timeout=GET_S)
    return [pool.has_free(), pool.pop_idle() == w.methods, pool.has_next()]


@case("library: ActorPool, out of order and with another actor")
def _(w: World) -> Any:
    pool = ActorPool([w.methods])
    pool.push(w.asynchronous)
    for value in range(4):
        pool.submit(lambda actor, value: actor.echo.remote(value), value)
    seen = []
    while pool.has_next():
        seen.append(pool.get_next_unordered(timeout=GET_S))
    return [sorted(seen), sorted(pool.map_unordered(lambda actor, value: actor.echo.remote(value), range(6)))]


@case("library: ray.util.Queue in a task, in batches and awaited")
def _(w: World) -> Any:
    queue = Queue(actor_options={"num_cpus": 0})
    queue.actor = w.wrap(queue.actor)

    @ray.remote(num_cpus=0.1)
    def fill(given: Any) -> Any:
        given.put_nowait_batch([1, 2, 3])
        return type(given.actor).__name__

    async def take() -> Any:
        await queue.put_async(4)
        return [await queue.get_async() for _ in range(2)]

    seen = [get(fill.remote(queue)), queue.get_nowait_batch(2), asyncio.run(take()), queue.empty()]
    queue.shutdown()
    return seen


@case("library: ray.wait in a loop")
def _(w: World) -> Any:
    pending = [w.methods.echo.remote(i) for i in range(8)] + [w.asynchronous.echo.remote(i) for i in range(8, 12)]
    seen, rounds = [], 0
    while pending:
        ready, pending = ray.wait(pending, num_returns=min(3, len(pending)), timeout=GET_S, fetch_local=False)
        seen += get(ready)
        rounds += 1
        if rounds == 2:
            pending.append(w.methods.echo.remote("late"))
    return [sorted(map(str, seen)), rounds]


@case("library: ray.wait that is not satisfied")
def _(w: World) -> Any:
    gate = w.path()
    actor = w.methods
    refs = [actor.echo.remote(1), actor.hold.remote(str(gate)), actor.echo.remote(2)]
    get(refs[0])
    ready, rest = ray.wait(refs, num_returns=3, timeout=0.1)
    gate.touch()
    return [ready == refs[:1], rest == refs[1:], get(rest)]


@case("library: ray.data.map_batches with the handle in a closure")
def _(w: World) -> Any:
    data = ray_data()
    actor = w.methods

    def add(batch: Any) -> Any:
        batch["id"] = batch["id"] + ray.get(actor.of_class.remote(1))[0]
        return batch

    return sorted(row["id"] for row in data.range(12, override_num_blocks=3).map_batches(add, num_cpus=0.1).take_all())


class Adder:
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __call__(self, batch: Any) -> Any:
        batch["id"] = batch["id"] + ray.get(self.actor.of_class.remote(1))[0]
        return batch


@case("library: ray.data.map_batches with the handle given to a class")
def _(w: World) -> Any:
    rows = ray_data().range(12, override_num_blocks=3)
    rows = rows.map_batches(Adder, fn_constructor_args=(w.methods,), concurrency=1, num_cpus=0.1)
    return sorted(row["id"] for row in rows.take_all())


def ray_data() -> Any:
    for needed in ("pandas", "pyarrow"):
        pytest.importorskip(needed, reason=f"ray.data needs {needed}")
    data = importlib.import_module("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    return data


def members(w: World, count: int) -> list[Any]:
    """A group as each member knows it: by the handles that they handed out of themselves."""
    made = w.shared_group(count)
    handles = get([one.hand_out.remote(w.kind != "plain") for one in made])
    assert get([one.join.remote(handles) for one in handles]) == list(range(count))
    return handles


@case("group of handles: members that handed themselves out call one another")
def _(w: World) -> Any:
    handles = members(w, 3)
    return [
        handles == w.shared_group(3),
        handles,
        get([one.__ray_call__.remote(lambda self: (self.rank, len(self.peers))) for one in handles]),
        get([one.around.remote(4) for one in handles]),
    ]


@case("group of handles: a member is gone")
def _(w: World) -> Any:
    made = [w.create(Member, max_concurrency=4) for _ in range(3)]
    handles = get([one.hand_out.remote(w.kind != "plain") for one in made])
    get([one.join.remote(handles) for one in handles])
    ray.kill(handles[2])
    wait_until(lambda: isinstance(answer_or_error(handles[2], "__ray_ready__"), ray.exceptions.ActorDiedError))
    error = error_of(handles[0].around.remote(2))
    return [
        [isinstance(error, one) for one in (ray.exceptions.RayTaskError, ray.exceptions.ActorDiedError)],
        get(handles[0].around.remote(1)),
    ]


@case("ray.util.collective: a group of handles")
def _(w: World) -> Any:
    backend = collective_backend(w.kind)
    from ray.util import collective

    register(backend)
    name = uuid.uuid4().hex
    meeting = ray.remote(num_cpus=0)(Sum).options(name=f"sum of {name}").remote(3)
    handles = w.shared_group(3)
    # Not in the order of the handles: each member finds its rank by its actor's id.
    collective.create_collective_group(handles, 3, [2, 0, 1], backend=backend.backend(), group_name=name)
    results = get([one.reduce.remote(backend, name, 10**i) for i, one in enumerate(handles)])
    get([one.__ray_call__.remote(leave_group, name) for one in handles])
    del meeting
    return results


def leave_group(_self: Any, name: str) -> None:
    from ray.util import collective

    collective.destroy_collective_group(name)


def declared(world_size: int, ranks: list[int], backend: str) -> Callable[[World], Any]:
    def run(w: World) -> Any:
        pytest.importorskip("numpy", reason="ray.util.collective needs numpy")
        skip_before((2, 55), "ray.util.collective needs torch")
        from ray.util import collective

        if backend == "gloo" and collective.gloo_available():
            pytest.skip("the backend is there")
        collective.create_collective_group(
            w.shared_group(3), world_size, ranks, backend=backend, group_name=uuid.uuid4().hex
        )

    return run


table(
    "ray.util.collective, wrong",
    {
        "a rank for each": declared(3, [0, 1], "gloo"),
        "ranks": declared(3, [0, 1, 3], "gloo"),
        "size": declared(0, [0, 1, 2], "gloo"),
        "backend that is not installed": declared(3, [0, 1, 2], "gloo"),
        "no such backend": declared(3, [0, 1, 2], "none of them"),
        "outside of an actor": lambda w: importlib.import_module("ray.util.collective").get_rank("nowhere"),
    },
    raises=Exception,
)


@case("library: ray.util.Queue")
def _(w: World) -> Any:
    queue = Queue(maxsize=2, actor_options={"num_cpus": 0})
    queue.actor = w.wrap(queue.actor)
    queue.put(1)
    queue.put_nowait(2)
    seen: list[Any] = [queue.qsize(), queue.full()]
    with pytest.raises(Full):
        queue.put_nowait(3)
    seen += [queue.get(timeout=GET_S), queue.get_nowait()]
    with pytest.raises(Empty):
        queue.get(timeout=0.05)
    queue.shutdown()
    return seen


@case("library: a task calls the actor")
def _(w: World) -> Any:
    @ray.remote(num_cpus=0.1)
    def call(actor: Any) -> Any:
        return ray.get(actor.two.remote(1, b=2))

    return get(call.remote(w.methods))


@case("library: functools.partial of .remote")
def _(w: World) -> Any:
    return get(functools.partial(w.methods.two.remote, 1)(b=2))


@case("library: map over .remote")
def _(w: World) -> Any:
    return get(list(map(w.methods.echo.remote, range(5))))
