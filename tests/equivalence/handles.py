"""The handle as an object: compared, printed, copied, pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import ray
import ray.actor
import ray.cloudpickle
from helpers import get

from equivalence.world import World, case, table


def copied(w: World, how: Callable[[Any], Any]) -> Any:
    other = how(w.methods)
    return [other == w.methods, hash(other) == hash(w.methods), get(other.echo.remote(1))]


table(
    "handle",
    {
        "dir": lambda w: sorted(dir(w.methods)),
        "repr": lambda w: repr(w.methods),
        "str": lambda w: str(w.methods),
        "hash": lambda w: hash(w.methods) == hash(w.methods._actor_id),
        "bool": lambda w: bool(w.methods),
        "isinstance": lambda w: isinstance(w.methods, ray.actor.ActorHandle),
        "equal to itself": lambda w: [w.methods == w.methods, w.methods != w.methods],
        "unequal to others": lambda w: [w.methods == w.asynchronous, w.methods == 1, w.methods == None],  # noqa: E711
        "hasattr": lambda w: [hasattr(w.methods, name) for name in ("echo", "nothing_like_it", "__len__", "_ray_x")],
        "getattr with a default": lambda w: getattr(w.methods, "no_such_method", "default"),
        "attributes _ray_*": lambda w: [
            [w.methods._ray_weak_ref, w.methods._ray_is_cross_language, w.methods._ray_max_task_retries],
            sorted(w.methods._ray_method_signatures),
            w.methods._ray_method_num_returns,
            w.methods._ray_actor_creation_function_descriptor.class_name,
        ],
        "own attribute": lambda w: [
            setattr(w.methods, "_my_note", 5),
            w.methods._my_note,
            delattr(w.methods, "_my_note"),
        ],
        "copy.copy": lambda w: [copy.copy(w.methods) == w.methods, get(copy.copy(w.methods).echo.remote(1))],
        "copy.deepcopy": lambda w: [
            copy.deepcopy(w.methods) == w.methods,
            get(copy.deepcopy(w.methods).echo.remote(1)),
        ],
        "copy.deepcopy of a container": lambda w: copy.deepcopy({"a": [w.methods]})["a"][0] == w.methods,
        "pickle": lambda w: copied(w, lambda handle: pickle.loads(pickle.dumps(handle))),
        "cloudpickle": lambda w: copied(w, lambda handle: ray.cloudpickle.loads(ray.cloudpickle.dumps([handle]))[0]),
        "pattern of class name": lambda w: type(w.methods).__name__,
        "method name of a method": lambda w: w.methods.echo._method_name,
        "num_returns of a method": lambda w: [w.methods.three._num_returns, w.methods.items._num_returns],
        "method is an ActorMethod": lambda w: isinstance(w.methods.echo, ray.actor.ActorMethod),
        "class of the method object": lambda w: type(w.methods.echo).__name__,
    },
)
case("handle: order comparison", raises=TypeError)(lambda w: w.methods < w.methods)


def construct_without_arguments(world: World) -> None:
    cls = type(world.methods)
    handle = cls.__new__(cls)
    # Half built: without this Ray's own __del__ complains of it, in whatever test runs when it is collected.
    handle._ray_weak_ref = True
    handle.__init__()  # type: ignore[misc]


case("handle: no own constructor", raises=TypeError, text_differs="Ray lists parameters that are its own affair")(
    construct_without_arguments
)
