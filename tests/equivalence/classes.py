"""Actor classes: how they are made, how they make actors, and what they refuse."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import ray
import ray.actor
from helpers import get

import actorsub
from equivalence.actors import Async, Methods
from equivalence.world import World, case, table


def in_class(run: Callable[[Any], Any]) -> Callable[[World], Any]:
    return lambda w: run(w.actor_class(Methods))


def decorator(w: World) -> Any:
    return actorsub.remote if w.kind == "created" else ray.remote


@case("class: options chaining", kinds=("created",))
def _(w: World) -> Any:
    actor = w.actor_class(Methods, max_restarts=1).options(max_task_retries=2, name=uuid.uuid4().hex).remote(8)
    return [get(actor.get_value.remote()), actor._ray_max_task_retries]


@case("class: bare decorator", kinds=("created",))
def _(w: World) -> Any:
    @decorator(w)
    class Bare:
        def echo(self, x: int) -> int:
            return x

    return [Bare.__ray_metadata__.class_name.split(".")[-1], get(Bare.options(num_cpus=0).remote().echo.remote(1))]


@case("class: decorator with options", kinds=("created",))
def _(w: World) -> Any:
    @decorator(w)(num_cpus=0)
    class Decorated:
        def echo(self, x: int) -> int:
            return x

    return get(Decorated.remote().echo.remote(1))


@case("class: name and namespace", kinds=("created",))
def _(w: World) -> Any:
    name, namespace = uuid.uuid4().hex, "a namespace"
    actor = w.actor_class(Methods).options(name=name, namespace=namespace).remote(9)
    found = (actorsub if w.kind == "created" else ray).get_actor(name, namespace)
    return [found == actor, hash(found) == hash(actor), get(found.get_value.remote()), found]


@case("class: name taken", raises=ValueError, kinds=("created",))
def _(w: World) -> Any:
    cls, name = w.actor_class(Methods), uuid.uuid4().hex
    first = cls.options(name=name).remote()
    try:
        cls.options(name=name).remote()
    finally:
        get(first.nothing.remote())


@case("class: get_if_exists", kinds=("created",))
def _(w: World) -> Any:
    cls = w.actor_class(Methods).options(name=uuid.uuid4().hex, get_if_exists=True)
    first = cls.remote(1)
    get(first.nothing.remote())
    again = cls.remote(2)
    return [first == again, get(again.get_value.remote()), again]


@case("class: detached", kinds=("created",))
def _(w: World) -> Any:
    name = uuid.uuid4().hex
    actor = w.actor_class(Methods).options(name=name, lifetime="detached").remote(3)
    get(actor.nothing.remote())
    del actor
    found = ray.get_actor(name)
    value = get(found.get_value.remote())
    ray.kill(found)
    return value


@case("class: given to a task that creates the actor", kinds=("created",))
def _(w: World) -> Any:
    cls = w.actor_class(Methods)

    @ray.remote(num_cpus=0.1)
    def create(given: Any) -> Any:
        return [ray.get(one.remote(4).get_value.remote()) for one in (cls, given)]

    return get(create.remote(cls))


@case("class: creates several actors", kinds=("created",))
def _(w: World) -> Any:
    cls = w.actor_class(Methods)
    return get([cls.remote(i).get_value.remote() for i in range(2)])


table(
    "class",
    {
        "metadata": in_class(lambda cls: [cls.__ray_metadata__.class_name, cls.__ray_metadata__.max_restarts]),
        "own attribute": in_class(lambda cls: cls.answer),
        "own static method": in_class(lambda cls: cls.static(4)),
        "own class method": in_class(lambda cls: cls.of_class(4)),
        "is an ActorClass": in_class(lambda cls: isinstance(cls, ray.actor.ActorClass)),
        "name of its type": in_class(lambda cls: [type(cls).__name__, type(cls).__module__]),
        "repr": in_class(repr),
        "_remote": in_class(lambda cls: get(cls._remote(args=[5], num_cpus=0).get_value.remote())),
        "_remote with kwargs": in_class(
            lambda cls: get(cls._remote(kwargs={"start": 6}, num_cpus=0).get_value.remote())
        ),
        "handle type": in_class(lambda cls: cls.remote()),
    },
    kinds=("created",),
)
table(
    "class, wrong",
    {
        "called": in_class(lambda cls: cls()),
        "inherited from": in_class(lambda cls: type("Sub", (cls,), {})),
        "inherited by a class statement": lambda w: inherit(w.actor_class(Methods)),
        "constructor arguments": in_class(lambda cls: cls.remote(1, 2, 3)),
        "constructor keyword": in_class(lambda cls: cls.remote(no_such=1)),
        "unknown option": in_class(lambda cls: cls.options(no_such_option=1)),
        "unknown option in the decorator": lambda w: w.actor_class(Methods, no_such_option=1),
        "option value": in_class(lambda cls: cls.options(max_restarts="many")),
        "option value in the decorator": lambda w: w.actor_class(Methods, max_restarts=-5),
        "lifetime": in_class(lambda cls: cls.options(lifetime="forever").remote()),
        "empty name": in_class(lambda cls: cls.options(name="").remote()),
        "name of another type": in_class(lambda cls: cls.options(name=5).remote()),
        "get_actor of nobody": lambda w: (actorsub if w.kind == "created" else ray).get_actor("nobody"),
        "get_actor of an empty name": lambda w: (actorsub if w.kind == "created" else ray).get_actor(""),
        "async actor in order": lambda w: w.create(Async, allow_out_of_order_execution=False),
    },
    raises=(TypeError, ValueError),
    kinds=("created",),
)


def inherit(cls: Any) -> Any:
    class Sub(cls):
        pass

    return Sub
