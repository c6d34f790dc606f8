"""Kinds of actors, the order in which they run calls, and the places that calls are made from."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import ray
from helpers import GET_S, get

from equivalence.actors import AsyncCaller, Caller, Groups, Meeting, Methods
from equivalence.world import World, case, table


def meets(w: World, **options: Any) -> Any:
    actor = w.create(Meeting, 3, **options)
    return get([actor.meet.remote() for _ in range(3)])


@case("async actor: calls overlap")
def _(w: World) -> Any:
    waits = w.asynchronous.wait_for_event.remote()
    get(w.asynchronous.set_event.remote())
    return get(waits)


@case("concurrency group: per call")
def _(w: World) -> Any:
    """The same pool of one thread serves a group wherever the group was named."""
    actor = w.shared(Groups, concurrency_groups={"io": 1, "compute": 1})
    io = get(actor.io_ident.remote())
    return [get(actor.anywhere.options(concurrency_group="io").remote()) == io, get(actor.anywhere.remote()) == io]


@case("concurrency group: one does not wait for another")
def _(w: World) -> Any:
    actor = w.shared(Groups, concurrency_groups={"io": 1, "compute": 1})
    gate = w.path()
    held, behind = actor.hold_io.remote(str(gate)), actor.in_io.remote()
    try:
        free = get([actor.anywhere.remote(), actor.anywhere.options(concurrency_group="compute").remote()])
        return [len(free), len(ray.wait([held, behind], timeout=0.1)[0])]
    finally:
        gate.touch()
        get([held, behind])


table(
    "kind of actor",
    {
        "async": lambda w: get([w.asynchronous.echo.remote(i) for i in range(10)]),
        "threaded": lambda w: meets(w, max_concurrency=3),
        "concurrency group by @ray.method": lambda w: get(
            w.shared(Groups, concurrency_groups={"io": 1, "compute": 1}).in_io.remote()
        ),
        "name of the handle in an async actor": lambda w: get(w.asynchronous.sleeper.remote()),
        "own handle": lambda w: get(w.methods.myself.remote()),
    },
)


@case("order: one thread")
def _(w: World) -> Any:
    actor = w.create(Methods)
    for i in range(500):
        actor.append.remote(i)
    return get(actor.get_log.remote()) == list(range(500))


@case("order: each of several threads")
def _(w: World) -> Any:
    actor = w.create(Methods)

    def submit(who: int) -> None:
        for i in range(200):
            (actor.append if i % 2 else actor.append.options(name="odd")).remote((who, i))

    threads = [threading.Thread(target=submit, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = get(actor.get_log.remote())
    return [[i for who, i in log if who == one] == list(range(200)) for one in range(4)]


def in_a_task(function: Callable[[Any], Any]) -> Callable[[World], Any]:
    def run(w: World) -> Any:
        return get(ray.remote(num_cpus=0.1)(function).remote(w.methods))

    return run


def in_a_thread(w: World) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(get(w.methods.echo.remote("thread"))))
    thread.start()
    thread.join(GET_S)
    return seen


table(
    "call from",
    {
        "a thread": in_a_thread,
        "a thread of a running loop": lambda w: asyncio.run(asyncio.to_thread(in_a_thread, w)),
        "a task": in_a_task(lambda actor: ray.get([actor.echo.remote(i) for i in range(3)])),
        "a task, a stream": in_a_task(lambda actor: [ray.get(ref) for ref in actor.items.remote(3)]),
        "a thread of a task": in_a_task(
            lambda actor: (
                concurrent.futures.ThreadPoolExecutor(1).submit(lambda: ray.get(actor.echo.remote(1))).result()
            )
        ),
        "an actor": lambda w: get(w.shared(Caller).ask.remote(w.methods)),
        "an actor, a stream": lambda w: get(w.shared(Caller).read.remote(w.methods)),
        "threads of an actor": lambda w: get(w.shared(Caller).ask_by_threads.remote(w.methods)),
        "an async actor": lambda w: get(w.shared(AsyncCaller).ask.remote(w.methods)),
        "an async actor, a stream": lambda w: get(w.shared(AsyncCaller).read.remote(w.methods)),
        "a thread of an async actor": lambda w: get(w.shared(AsyncCaller).ask_by_a_thread.remote(w.methods)),
    },
)
table(
    "call from, and an error",
    {
        "a task": in_a_task(lambda actor: ray.get(actor.fail.remote())),
        "an actor": lambda w: get(w.shared(Caller).ask_for_an_error.remote(w.methods)),
        "an async actor": lambda w: get(w.shared(AsyncCaller).ask_for_an_error.remote(w.methods)),
    },
    raises=ValueError,
)


@case("fire and forget runs")
def _(w: World) -> Any:
    actor = w.create(Methods)
    for i in range(20):
        actor.append.remote(i)
    return len(get(actor.get_log.remote()))
