"""The actor classes of the cases."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import importlib
import os
import pathlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import ray
import ray.actor
from helpers import GET_S

import actorsub


class Base:
    def inherited(self, x: int) -> tuple[str, int]:
        return "base", x

    def overridden(self) -> str:
        return "base"


def doubled_at_the_caller(invocation: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's hook that changes the invocation on the caller's side."""

    def call(args: Any, kwargs: Any) -> Any:
        return invocation([2 * one for one in args], kwargs)

    return call


class Methods(Base):
    """One synchronous actor with a method of every shape."""

    answer = 42

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.log: list[Any] = []
        self.attempts: collections.Counter[str] = collections.Counter()

    def overridden(self) -> str:
        return "derived"

    def nothing(self) -> None:
        pass

    def echo(self, x: Any = None) -> Any:
        return x

    def every_kind(self, a: Any, b: Any = 2, *args: Any, c: Any = 3, **kwargs: Any) -> Any:
        return a, b, args, c, sorted(kwargs.items())

    def keyword_only(self, *, key: Any) -> Any:
        return key

    def positional_only(self, a: Any, /, b: Any = 1) -> Any:
        return a, b

    def two(self, a: Any, b: Any) -> Any:
        return a, b

    def keywords(self, **kwargs: Any) -> Any:
        return sorted(kwargs.items())

    def our_names(self, timeout_s: Any, on_unavailable: Any = None, on_pending: Any = None, policy: Any = 0) -> Any:
        return timeout_s, on_unavailable, on_pending, policy

    def rays_names(self, name: Any, num_returns: Any = None, args: Any = None, kwargs: Any = None) -> Any:
        return name, num_returns, args, kwargs

    @staticmethod
    def static(x: int) -> int:
        return 2 * x

    @classmethod
    def of_class(cls, x: int) -> tuple[int, int]:
        return cls.answer, x

    @property
    def a_property(self) -> int:
        return 5

    def _underscore(self, x: int) -> int:
        return -x

    def __mangled(self) -> str:
        return "mangled"

    def __len__(self) -> int:
        return 3

    def __call__(self, x: int) -> int:
        return x + 1

    def triple(self) -> tuple[int, int, int]:
        return 1, 2, 3

    @ray.method(num_returns=3)
    def three(self) -> tuple[int, int, int]:
        return 1, 2, 3

    @ray.method(num_returns=0)
    def zero(self) -> None:
        self.value += 1

    def get_value(self) -> int:
        return self.value

    def items(self, count: int, fail_at: int | None = None) -> Iterator[int]:
        for i in range(count):
            if i == fail_at:
                raise ValueError(f"item {i}")
            yield i

    @ray.method(num_returns="dynamic")
    def dynamic(self, count: int) -> Iterator[int]:
        yield from range(count)

    @ray.method(num_returns="streaming", _generator_backpressure_num_objects=1)
    def held_back(self, count: int) -> Iterator[int]:
        # Not `yield from range(...)`: Ray sends into a generator that is held back, and a range takes nothing.
        for i in range(count):  # noqa: UP028
            yield i

    def fail(self, kind: type[BaseException] = ValueError, text: str = "on purpose") -> None:
        raise kind(text)

    def append(self, x: Any) -> None:
        self.log.append(x)

    def get_log(self) -> list[Any]:
        return self.log

    def produce(self, path: str, count: int) -> Iterator[int]:
        """Items, each noted in a file before it is given out."""
        for i in range(count):
            with open(path, "a") as file:
                file.write(f"{i}\n")
            yield i

    def note(self, path: str, die: int = 0) -> int:
        """How often it was begun; the first `die` times the process ends in it."""
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
        begun = len(pathlib.Path(path).read_text().split())
        if begun <= die:
            os._exit(1)
        return begun

    def wait_for_cancellation(self, path: str) -> str:
        pathlib.Path(path).touch()
        end = time.monotonic() + GET_S
        while not ray.get_runtime_context().is_canceled() and time.monotonic() < end:
            time.sleep(0.002)
        return "left early"

    def leave(self, how: str) -> None:
        if how == "exit_actor":
            ray.actor.exit_actor()
        raise SystemExit(0)

    def pid(self) -> int:
        return os.getpid()

    @ray.method(max_task_retries=-1)
    def echo_kept(self, x: Any) -> Any:
        return x

    @ray.method(max_task_retries=1, retry_exceptions=[ValueError])
    def flaky(self, key: str, failures: int, kind: type[Exception] = ValueError) -> int:
        return self.fail_first(key, failures, kind)

    def fail_first(self, key: str, failures: int, kind: type[Exception] = ValueError) -> int:
        self.attempts[key] += 1
        if self.attempts[key] <= failures:
            raise kind(f"attempt {self.attempts[key]}")
        return self.attempts[key]

    @ray.method(enable_task_events=False)
    def silent(self) -> str:
        return "silent"

    def task_name(self) -> str:
        return str(ray.get_runtime_context().get_task_name())

    def myself(self) -> Any:
        handle = ray.get_runtime_context().current_actor
        return [type(handle).__name__, handle.__hash__() == hash(handle), handle]

    def length(self, data: bytes) -> int:
        return len(data)

    def hold(self, path: str) -> str:
        end = time.monotonic() + GET_S
        while not pathlib.Path(path).exists() and time.monotonic() < end:
            time.sleep(0.002)
        return "held"

    def decorated(self, x: int) -> int:
        return x

    decorated.__ray_invocation_decorator__ = doubled_at_the_caller  # type: ignore[attr-defined]


class OddNames:
    """Methods that are called as things of this package, of handles and of method objects are."""

    def options(self) -> str:
        return "options"

    def bind(self) -> str:
        return "bind"

    def call(self) -> str:
        return "call"

    def state(self) -> str:
        return "state"

    def stats(self) -> str:
        return "stats"

    def policy(self) -> str:
        return "policy"

    def wrap(self) -> str:
        return "wrap"

    def shutdown(self) -> str:
        return "shutdown"

    def actor(self) -> str:
        return "actor"

    def inner(self) -> str:
        return "inner"

    def get_actor(self) -> str:
        return "get_actor"

    def _actor_id(self) -> str:
        return "never reached: a handle has a property of this name"

    def _get_local_state(self) -> str:
        return "never reached: a handle has a method of this name"


class Async:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.started: set[str] = set()
        self.ended: set[str] = set()

    async def echo(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return x

    async def items(self, count: int) -> AsyncIterator[int]:
        for i in range(count):
            await asyncio.sleep(0)
            yield i

    async def fail(self) -> None:
        raise KeyError("async")

    async def wait_for_event(self) -> str:
        await self.event.wait()
        return "set"

    async def set_event(self) -> None:
        self.event.set()

    async def forever(self, key: str) -> None:
        self.started.add(key)
        try:
            await asyncio.sleep(10 * GET_S)
        finally:
            self.ended.add(key)

    async def has_started(self, key: str) -> bool:
        return key in self.started

    async def has_ended(self, key: str) -> bool:
        return key in self.ended

    async def stream_forever(self, key: str) -> AsyncIterator[int]:
        yield 1
        await self.forever(key)

    async def sleeper(self) -> Any:
        return type(ray.get_runtime_context().current_actor).__name__


class Groups:
    @ray.method(concurrency_group="io")
    def in_io(self) -> str:
        return threading.current_thread().name.split("_")[0]

    def anywhere(self) -> int:
        return threading.get_ident()

    @ray.method(concurrency_group="io")
    def io_ident(self) -> int:
        return threading.get_ident()

    @ray.method(concurrency_group="io")
    def hold_io(self, path: str) -> str:
        end = time.monotonic() + GET_S
        while not pathlib.Path(path).exists() and time.monotonic() < end:
            time.sleep(0.002)
        return "held"


class Meeting:
    """Answers only when as many threads as it has are inside."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)

    def meet(self) -> bool:
        self.barrier.wait(GET_S)
        return True


class NeverMade:
    def __init__(self, text: str = "no such model") -> None:
        raise RuntimeError(text)

    def echo(self, x: Any) -> Any:
        return x


class Caller:
    """Calls others, from where they are called in an actor."""

    def ask(self, actor: Any) -> Any:
        return ray.get([actor.echo.remote(i) for i in range(3)])

    def ask_by_threads(self, actor: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda i: ray.get(actor.echo.remote(i)), range(5)))

    def ask_for_an_error(self, actor: Any) -> Any:
        return ray.get(actor.fail.remote())

    def read(self, actor: Any) -> Any:
        return [ray.get(ref) for ref in actor.items.remote(3)]


class AsyncCaller:
    async def ask(self, actor: Any) -> Any:
        return await asyncio.gather(*[actor.echo.remote(i) for i in range(3)])

    async def ask_by_a_thread(self, actor: Any) -> Any:
        return await asyncio.to_thread(lambda: ray.get(actor.echo.remote("thread")))

    async def ask_for_ever(self, actor: Any, key: str) -> None:
        await actor.forever.remote(key)

    async def ask_for_an_error(self, actor: Any) -> Any:
        return await actor.fail.remote()

    async def read(self, actor: Any) -> Any:
        return [await ref async for ref in actor.items.remote(3)]


class Member:
    """Of a group whose members know one another by the handles that each was given."""

    def __init__(self) -> None:
        self.rank, self.peers = -1, [None]

    def hand_out(self, wrapped: bool) -> Any:
        handle = ray.get_runtime_context().current_actor
        return actorsub.wrap(handle) if wrapped else handle

    def join(self, peers: list[Any]) -> int:
        # By equality: what Ray gives an actor of itself is a plain handle, what was handed out may be a wrapped one.
        self.rank, self.peers = peers.index(ray.get_runtime_context().current_actor), peers
        return self.rank

    def around(self, hops: int) -> list[int]:
        """The ranks of this one and of the next `hops` of the ring."""
        following = self.peers[(self.rank + 1) % len(self.peers)]
        return [self.rank, *(ray.get(following.around.remote(hops - 1)) if hops else [])]

    def reduce(self, backend: type[Any], name: str, value: float) -> Any:
        """By ray.util.collective, which finds the group by this actor's id."""
        from ray.util import collective

        register(backend)
        tensor = importlib.import_module("numpy").full(2, value)
        collective.allreduce(tensor, group_name=name)
        return collective.get_rank(name), collective.get_collective_group_size(name), tensor.tolist()


class Sum:
    """Where the members of a group meet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: list[float] = []
        self.complete = asyncio.Event()

    async def add(self, value: float) -> float:
        self.values.append(value)
        if len(self.values) == self.count:
            self.complete.set()
        await self.complete.wait()
        return sum(self.values)


def register(backend: type[Any]) -> None:
    from ray.util.collective.backend_registry import _global_registry, register_collective_backend

    if not _global_registry.is_registered(backend.backend()):
        register_collective_backend(backend.backend(), backend)


def collective_backend(kind: str) -> type[Any]:
    """A backend of ray.util.collective that adds up in an actor: Ray's own need PyTorch, or a GPU."""
    pytest.importorskip("numpy", reason="ray.util.collective needs numpy")
    pytest.importorskip("ray.util.collective.backend_registry", reason="this Ray takes no backends of others")
    from ray.util.collective.collective_group.base_collective_group import BaseGroup

    class Backend(BaseGroup):
        @classmethod
        def backend(cls) -> str:
            return f"SUM_{kind.upper()}"

        @classmethod
        def check_backend_availability(cls) -> bool:
            return True

        def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
            tensor[0][:] = ray.get(ray.get_actor(f"sum of {self.group_name}").add.remote(float(tensor[0][0])))

        def _not_here(self, *_: Any) -> None:
            raise NotImplementedError

        barrier = reduce = allgather = broadcast = reducescatter = send = recv = _not_here

    return Backend
