"""Shapes of results, and ways to wait for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import ray.exceptions
from helpers import GET_S, get, wait_until

from equivalence.world import World, awaited, case, normal, skip_before, table


def with_returns(method: str, num_returns: Any, *args: Any) -> Callable[[World], Any]:
    def run(w: World) -> Any:
        return getattr(w.methods, method).options(num_returns=num_returns).remote(*args)

    return run


def all_of(run: Callable[[World], Any]) -> Callable[[World], Any]:
    return lambda w: [get(ref) for ref in run(w)]


table(
    "num_returns",
    {
        "3 by @ray.method, shape": lambda w: w.methods.three.remote(),
        "3 by @ray.method, values": lambda w: get(w.methods.three.remote()),
        "0 by @ray.method": lambda w: w.methods.zero.remote(),
        "0 by @ray.method runs": lambda w: get([w.methods.zero.remote(), w.methods.get_value.remote()][1]) > 0,
        "dynamic by @ray.method": lambda w: [get(ref) for ref in get(w.methods.dynamic.remote(3))],
        "dynamic by @ray.method, shape": lambda w: w.methods.dynamic.remote(3),
        "0 by options": with_returns("triple", 0),
        "1 by options": lambda w: get(with_returns("triple", 1)(w)),
        "3 by options, shape": with_returns("triple", 3),
        "3 by options, values": all_of(with_returns("triple", 3)),
        "1 by options over 3": lambda w: get(with_returns("three", 1)(w)),
        "dynamic by options": lambda w: [get(ref) for ref in get(with_returns("items", "dynamic", 3)(w))],
        "streaming by options": all_of(with_returns("items", "streaming", 3)),
        "None by options": lambda w: get(with_returns("triple", None)(w)),
    },
)
table(
    "num_returns, wrong",
    {
        "more than returned": lambda w: get(with_returns("triple", 5)(w)),
        "of no sequence": lambda w: get(with_returns("echo", 2, 7)(w)),
        "unknown word": with_returns("echo", "many"),
        "streaming of no generator": lambda w: get(list(with_returns("echo", "streaming", 7)(w))),
    },
    raises=Exception,
)


@case("num_returns, wrong: negative", raises=Exception)
def _(w: World) -> Any:
    skip_before((2, 55), "Ray takes any negative number of return values")
    return with_returns("triple", -1)(w)


async def collect(generator: Any) -> list[Any]:
    return [await ref async for ref in generator]


@case("generator: error in the middle")
def _(w: World) -> Any:
    seen: list[Any] = []
    for ref in w.methods.items.remote(4, fail_at=2):
        try:
            seen.append(get(ref))
        except ValueError as error:
            seen.append(normal(str(error)))
    return seen


table(
    "generator",
    {
        "shape": lambda w: w.methods.items.remote(2),
        "iterate": lambda w: [get(ref) for ref in w.methods.items.remote(3)],
        "empty": lambda w: list(w.methods.items.remote(0)),
        "async for in the caller": lambda w: asyncio.run(collect(w.methods.items.remote(3))),
        "back pressure": lambda w: [get(ref) for ref in w.methods.held_back.remote(5)],
        "back pressure by options": lambda w: [
            get(ref) for ref in w.methods.items.options(_generator_backpressure_num_objects=1).remote(5)
        ],
        "named by options": lambda w: [get(ref) for ref in w.methods.items.options(name="stream").remote(3)],
        "completed()": lambda w: [get(g.completed()) for g in [w.methods.items.remote(3)] if list(g)],
        "async actor": lambda w: [get(ref) for ref in w.asynchronous.items.remote(3)],
        "async actor, async for": lambda w: asyncio.run(collect(w.asynchronous.items.remote(3))),
        "ray.wait on it": lambda w: len(ray.wait([w.methods.items.remote(3)], timeout=GET_S)[0]),
    },
)


def held_back(**options: Any) -> Callable[[World], Any]:
    """How many items the actor made while the first of them alone was taken, and all of them."""

    def run(w: World) -> Any:
        path = w.path()
        generator = w.methods.produce.options(**options).remote(str(path), 10)
        first = get(next(generator))

        def made() -> int:
            return len(path.read_text().split())

        # Where nothing holds it back, it is soon at the end.
        wait_until(lambda: made() == (10 if not options else options["_generator_backpressure_num_objects"] + 1))
        time.sleep(0.2)
        return [first, made(), [get(ref) for ref in generator]]

    return run


table(
    "generator, made ahead",
    {
        "all": held_back(),
        "1 by options": held_back(_generator_backpressure_num_objects=1),
        "3 by options": held_back(_generator_backpressure_num_objects=3),
    },
)


@case("generator: two objects to a yield by @ray.method")
def _(w: World) -> Any:
    try:
        in_pairs = ray.method(_num_objects_per_yield=2)
    except AssertionError:
        pytest.skip("this Ray yields one object at a time")

    class Pairs:
        @in_pairs
        def items(self) -> Iterator[tuple[int, int]]:
            yield 1, 2
            yield 3, 4

    return [get(ref) for ref in w.create(Pairs).items.remote()]


async def gathered(refs: list[Any]) -> Any:
    return await asyncio.gather(*refs)


table(
    "result",
    {
        "await": lambda w: asyncio.run(awaited(w.methods.echo.remote(1))),
        "asyncio.gather": lambda w: asyncio.run(gathered([w.methods.echo.remote(i) for i in range(5)])),
        "asyncio.wait_for": lambda w: asyncio.run(asyncio.wait_for(awaited(w.methods.echo.remote(1)), GET_S)),
        ".future()": lambda w: w.methods.echo.remote(1).future().result(GET_S),
        "futures.wait": lambda w: len(
            concurrent.futures.wait([w.methods.echo.remote(i).future() for i in range(3)], GET_S).done
        ),
        "ray.get of a list": lambda w: get([w.methods.echo.remote(i) for i in range(5)]),
        "ray.wait": lambda w: [
            len(part) for part in ray.wait([w.methods.echo.remote(i) for i in range(4)], num_returns=4, timeout=GET_S)
        ],
        "reference as an argument": lambda w: get(w.methods.echo.remote(w.methods.echo.remote(3))),
        "reference by keyword": lambda w: get(w.methods.keywords.remote(x=w.methods.echo.remote(3))),
        "nested reference stays one": lambda w: get(w.methods.echo.remote([w.methods.echo.remote(3)])),
        "reference of ray.put": lambda w: get(w.methods.echo.remote(ray.put("stored"))),
        "reference to another actor": lambda w: get(w.methods.echo.remote(w.asynchronous.echo.remote(3))),
        "large argument": lambda w: get(w.methods.length.remote(bytes(3_000_000))),
        "large result": lambda w: len(get(w.methods.echo.remote(bytes(3_000_000)))),
    },
)


@case("result: get with a timeout", raises=ray.exceptions.GetTimeoutError)
def _(w: World) -> Any:
    gate = w.path()
    try:
        return ray.get(w.methods.hold.remote(str(gate)), timeout=0.05)
    finally:
        gate.touch()
