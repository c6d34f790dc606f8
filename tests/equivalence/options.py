"""Options of a call."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import ray
import ray.actor
import ray.exceptions
from helpers import get

from equivalence.actors import Methods
from equivalence.world import World, case, skip_before, table

table(
    "option",
    {
        "task name": lambda w: get(w.methods.task_name.options(name="my task").remote()),
        "no task name": lambda w: get(w.methods.task_name.remote()),
        "empty options()": lambda w: get(w.methods.echo.options().remote(1)),
        "enable_task_events=False": lambda w: get(w.methods.echo.options(enable_task_events=False).remote(1)),
        "enable_task_events by @ray.method": lambda w: get(w.methods.silent.remote()),
        "retry by @ray.method": lambda w: get(w.methods.flaky.remote(uuid.uuid4().hex, 1)),
        "retry by options": lambda w: get(
            w.methods.fail_first.options(max_task_retries=1, retry_exceptions=True).remote(uuid.uuid4().hex, 1)
        ),
        "retry of listed classes by options": lambda w: get(
            w.methods.fail_first.options(max_task_retries=2, retry_exceptions=[KeyError]).remote(
                uuid.uuid4().hex, 1, KeyError
            )
        ),
        "call beats method": lambda w: get(
            w.methods.flaky.options(retry_exceptions=[KeyError]).remote(uuid.uuid4().hex, 1, KeyError)
        ),
    },
)
table(
    "option, no retry left",
    {
        "by @ray.method": lambda w: get(w.methods.flaky.remote(uuid.uuid4().hex, 5)),
        "of another class": lambda w: get(w.methods.flaky.remote(uuid.uuid4().hex, 1, KeyError)),
        "switched off by options": lambda w: get(
            w.methods.flaky.options(max_task_retries=0).remote(uuid.uuid4().hex, 1)
        ),
        "never asked for": lambda w: get(w.methods.fail_first.remote(uuid.uuid4().hex, 1)),
    },
    raises=ray.exceptions.RayTaskError,
)


def attempts(failures: int, method: str = "fail_first", **options: Any) -> Callable[[World], Any]:
    """The attempt that returned, of an actor that has two retries by its own options."""
    return lambda w: get(getattr(w.retrying, method).options(**options).remote(uuid.uuid4().hex, failures))


table(
    "option, whose retries count",
    {
        "the actor's": attempts(2, retry_exceptions=True),
        "the call's, not the method's": attempts(3, "flaky", max_task_retries=3),
        "the call's, not the actor's": attempts(3, max_task_retries=3, retry_exceptions=[ValueError]),
    },
)
table(
    "option, whose retries are used up",
    {
        "the actor's": attempts(3, retry_exceptions=True),
        "the method's, not the actor's": attempts(2, "flaky"),
        "the call's, not the actor's": attempts(1, max_task_retries=0, retry_exceptions=True),
    },
    raises=ray.exceptions.RayTaskError,
)


def needs_option(name: str) -> None:
    if name not in inspect.signature(ray.actor.ActorMethod._remote).parameters:
        pytest.skip(f"calls have no option {name} in this Ray")


def with_option(method: str, name: str, value: Any) -> Callable[[World], Any]:
    def run(w: World) -> Any:
        needs_option(name)
        return getattr(w.methods, method).options(**{name: value}).remote(1)

    return run


table(
    "option, wrong value",
    {
        "concurrency_group that there is not": lambda w: get(
            # Ray's answer is to end the process.
            w.create(Methods).echo.options(concurrency_group="nowhere").remote(1)
        ),
        "tensor_transport": with_option("echo", "tensor_transport", "no such way"),
        "_num_objects_per_yield": with_option("items", "_num_objects_per_yield", 0),
    },
    raises=Exception,
)


@case("option, wrong value: tensor_transport of an actor without", raises=Exception)
def _(w: World) -> Any:
    skip_before((2, 54), "Ray lets such a call through, and its actor's process ends where torch is not installed")
    return with_option("echo", "tensor_transport", "nccl")(w)


@case("option: labels")
def _(w: World) -> Any:
    needs_option("_labels")
    return get(w.methods.task_name.options(_labels={"kind": "one"}).remote())


case(
    "option, unknown: TypeError",
    raises=TypeError,
    text_differs="named where it is written, at .options(); Ray notices at .remote()",
)(lambda w: w.methods.echo.options(no_such_option=1).remote(1))
case(
    "option, one that only tasks have: TypeError",
    raises=TypeError,
    text_differs="named where it is written, at .options(); Ray notices at .remote()",
)(lambda w: w.methods.echo.options(num_cpus=1).remote(1))
case("option, wrong value: retry_exceptions", raises=AssertionError)(
    lambda w: w.methods.echo.options(retry_exceptions="yes").remote(1)
)
case("option, wrong value: name", raises=Exception)(lambda w: w.methods.echo.options(name=7).remote(1))
