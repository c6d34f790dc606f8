"""Errors of the method, of the constructor and of the actor's end, and the limit of pending calls."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
import ray
import ray.exceptions
from helpers import GET_S, get, wait_until

import actorsub
from equivalence.actors import Methods, NeverMade
from equivalence.world import World, answer_or_error, awaited, case, error_of, fields, table

table(
    "application error",
    {
        "raised": lambda w: get(w.methods.fail.remote()),
        "with options": lambda w: get(w.methods.fail.options(name="n").remote(KeyError, "key")),
        "awaited": lambda w: asyncio.run(awaited(w.methods.fail.remote(TypeError, "a TypeError of the method"))),
        "by future": lambda w: w.methods.fail.remote().future().result(GET_S),
        "async actor": lambda w: get(w.asynchronous.fail.remote()),
        "failed reference as an argument": lambda w: get(w.methods.echo.remote(w.methods.fail.remote())),
        "that looks like ours": lambda w: get(w.methods.fail.remote(actorsub.ActorUnavailableError, "inside")),
        "that looks like Ray's": lambda w: get(w.methods.fail.remote(ray.exceptions.RayActorError, "inside")),
    },
    raises=ray.exceptions.RayTaskError,
)
case("application error: is also its own class", raises=ValueError)(lambda w: get(w.methods.fail.remote()))
table(
    "constructor",
    {
        "raises": lambda w: get(w.create(NeverMade).echo.remote(1)),
        "raises; the second call": lambda w: second_call(w.create(NeverMade)),
    },
    raises=ray.exceptions.ActorDiedError,
)


case(
    "constructor: raises; awaited",
    raises=ray.exceptions.ActorDiedError,
    text_differs="an await may fail by our own error, which has Ray's text after its own line",
)(lambda w: asyncio.run(awaited(w.create(NeverMade).echo.remote(1))))


def second_call(actor: Any) -> Any:
    with pytest.raises(ray.exceptions.ActorDiedError):
        get(actor.echo.remote(1))
    return get(actor.echo.remote(2))


@case("ray.kill: a call afterwards", raises=ray.exceptions.ActorDiedError)
def _(w: World) -> Any:
    actor = w.create(Methods)
    get(actor.nothing.remote())
    ray.kill(actor)
    end = time.monotonic() + GET_S
    while time.monotonic() < end:
        get(actor.nothing.remote())


@case("ray.kill: no_restart=False restarts")
def _(w: World) -> Any:
    actor = w.create(Methods, max_restarts=1, max_task_retries=-1)
    get(actor.append.remote(1))
    ray.kill(actor, no_restart=False)

    # Not one of them fails: they are sent again.
    return wait_until(lambda: get(actor.get_log.remote()) == [], GET_S)


@case("ray.kill: of something else", raises=ValueError, text_differs="Ray names the class of what it was given")
def _(w: World) -> Any:
    ray.kill(w.methods.echo)


@case("__ray_terminate__", raises=ray.exceptions.ActorDiedError)
def _(w: World) -> Any:
    actor = w.create(Methods)
    get(actor.nothing.remote())
    return get(actor.__ray_terminate__.remote())


@case("error of an actor: its fields, killed")
def _(w: World) -> Any:
    actor = w.create(Methods)
    held = actor.hold.remote(str(w.path()))
    ray.kill(actor)
    first, later = error_of(held), error_of(actor.echo.remote(1))
    return [fields(first, actor), fields(later, actor), [isinstance(later, ray.exceptions.ActorDiedError)]]


@case("error of an actor: its fields, never made")
def _(w: World) -> Any:
    actor = w.create(NeverMade)
    return fields(error_of(actor.echo.remote(1)), actor)


def final(w: World, how: str) -> Any:
    """The last of an actor that Ray would restart for ever, had it not left by itself."""
    actor = w.create(Methods, max_restarts=-1)
    left = error_of(actor.leave.remote(how))
    assert isinstance(left, ray.exceptions.ActorDiedError)
    return get(actor.echo.remote(1))


table(
    "final, whatever max_restarts says",
    {
        "exit_actor()": lambda w: final(w, "exit_actor"),
        "sys.exit(0)": lambda w: final(w, "sys.exit"),
        "the constructor raises": lambda w: get(w.create(NeverMade, max_restarts=-1).echo.remote(1)),
    },
    raises=ray.exceptions.ActorDiedError,
)


def died_in_it(w: World, die: int, **options: Any) -> Any:
    """A method in which the process dies; what its ref gave, and how often it was begun."""
    path = w.path()
    actor = w.create(Methods, **options)
    ref = actor.note.remote(str(path), die)
    try:
        return ["returned", get(ref)]
    except ray.exceptions.RayActorError as error:
        kept = error_of(ref)
        if options:
            # It is up again, and what has failed stays failed.
            wait_until(lambda: not isinstance(answer_or_error(actor), Exception))
        begun = len(path.read_text().split())
        return [
            [base.__name__ for base in type(error).__mro__ if base.__module__.startswith("ray")],
            type(kept) is type(error) is type(error_of(ref)),
            # On a busy machine Ray spends a retry on the process that has ended, where nothing begins.
            1 <= begun <= die if "max_task_retries" in options else begun,
        ]


def carried_over(w: World, method: str = "echo", *, actors: int = 0, **options: Any) -> Any:
    """Calls that are made while the actor's process ends and the next one starts."""
    actor = w.create(Methods, max_restarts=-1, max_task_retries=actors)
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    called = getattr(actor, method)
    called = called.options(**options) if options else called
    return [get(called.remote(number)) for number in range(5)]


table(
    "the process dies, and calls are carried over by the retries",
    {
        "of the actor": lambda w: carried_over(w, actors=-1),
        "of the actor, as many as it takes": lambda w: carried_over(w, actors=100),
        "of the method": lambda w: carried_over(w, "echo_kept"),
        "of the call": lambda w: carried_over(w, max_task_retries=-1),
        "of the call, with exceptions": lambda w: carried_over(w, max_task_retries=-1, retry_exceptions=True),
    },
)


table(
    "the process dies in a call",
    {
        "and stays dead": lambda w: died_in_it(w, 1),
        "and comes back; the call was sent once": lambda w: died_in_it(w, 1, max_restarts=1),
        # More than it takes, for the same reason.
        "and the call is sent again": lambda w: died_in_it(w, 1, max_restarts=1, max_task_retries=5),
        "and the call is sent again twice": lambda w: died_in_it(w, 2, max_restarts=-1, max_task_retries=-1),
        "once more than there are retries": lambda w: died_in_it(w, 2, max_restarts=-1, max_task_retries=1),
    },
)


@case("max_pending_calls: raises at submit", raises=ray.exceptions.PendingCallsLimitExceeded)
def _(w: World) -> Any:
    actor = w.create(Methods, max_pending_calls=3)
    get(actor.nothing.remote())
    gate = w.path()
    refs = []
    try:
        for _ in range(4):
            refs.append(actor.hold.remote(str(gate)))
    finally:
        gate.touch()
        get(refs)


@case("max_pending_calls: slots come back")
def _(w: World) -> Any:
    actor = w.create(Methods, max_pending_calls=1)

    def submitted(i: int) -> Any:
        try:
            return actor.echo.remote(i)
        except ray.exceptions.PendingCallsLimitExceeded:
            # Ray returns the slot a moment after the result.
            return None

    return [get(wait_until(lambda i=i: submitted(i))) for i in range(5)]


@case("max_pending_calls: slots come back after a death")
def _(w: World) -> Any:
    actor = w.create(Methods, max_pending_calls=2, max_restarts=1)
    pid = get(actor.pid.remote())
    # Ray returns the slot of the call before a moment after its result.
    refs = [wait_until(lambda: submitted_or_none(actor, w)) for _ in range(2)]
    os.kill(pid, signal.SIGKILL)
    failed = [isinstance(error_of(ref), ray.exceptions.RayActorError) for ref in refs]
    wait_until(lambda: not isinstance(answer_or_error(actor), Exception))
    return [failed, [get(wait_until(lambda i=i: submitted_or_none(actor, w, i))) for i in range(3)]]


def submitted_or_none(actor: Any, w: World, value: Any = None) -> Any:
    try:
        return actor.hold.remote(str(w.path())) if value is None else actor.two.remote(value, value)
    except ray.exceptions.PendingCallsLimitExceeded:
        return None
