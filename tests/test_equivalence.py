"""A wrapped handle does what a plain one does: one table of cases, each run on plain and on wrapped handles.

A case is a function of a `World`, which makes actors the plain or the wrapped way and is otherwise the same. What a
case returns or raises in the plain world is the specification: value, type of the result, class and text of the error
must be the same in the wrapped worlds. `raises=` says what the plain world is known to raise, so that a case that
breaks for a reason of its own does not pass as "equally broken". The ids are the list that the documentation quotes.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import functools
import gc
import importlib
import inspect
import os
import pathlib
import pickle
import re
import signal
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import ray
import ray.actor
import ray.cloudpickle
import ray.exceptions
from helpers import RAY_ARGS, wait_until
from ray.util.actor_pool import ActorPool
from ray.util.queue import Empty, Full, Queue

import actorsub
from actorsub import _ray_compat
from actorsub.handle import MAX_VARIANTS

GET_S = 60


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=GET_S)


# ---------------------------------------------------------------------------------------------------------------------
# Actors.


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


# ---------------------------------------------------------------------------------------------------------------------
# The two worlds.


class World:
    """Makes actors; `kind` is "plain" (Ray's own), "created" (actorsub.remote) or "wrapped" (actorsub.wrap)."""

    def __init__(self, kind: str, directory: pathlib.Path) -> None:
        self.kind = kind
        self.directory = directory / kind
        self.directory.mkdir()
        self._shared: dict[Any, Any] = {}

    def actor_class(self, cls: type[Any], **options: Any) -> Any:
        remote = actorsub.remote if self.kind == "created" else ray.remote
        return remote(num_cpus=0, **options)(cls)

    def wrap(self, handle: Any) -> Any:
        return handle if self.kind == "plain" else actorsub.wrap(handle)

    def create(self, cls: type[Any], *args: Any, **options: Any) -> Any:
        return self.wrap(self.actor_class(cls, **options).remote(*args))

    def shared(self, cls: type[Any], *args: Any, **options: Any) -> Any:
        """An actor that several cases use: a process costs half a second."""
        key = cls, repr(options)
        if key not in self._shared:
            self._shared[key] = self.create(cls, *args, **options)
            assert isinstance(self._shared[key], actorsub.ActorHandle) == (self.kind != "plain")
        return self._shared[key]

    @property
    def methods(self) -> Any:
        return self.shared(Methods)

    @property
    def retrying(self) -> Any:
        return self.shared(Methods, max_restarts=-1, max_task_retries=2)

    @property
    def asynchronous(self) -> Any:
        return self.shared(Async)

    def shared_group(self, count: int) -> list[Any]:
        """The same actors each time, as a list of handles."""
        if Member not in self._shared:
            # Each may be asked by others, and by itself around the ring, while it waits for the next.
            self._shared[Member] = [self.create(Member, max_concurrency=2 * count) for _ in range(count)]
        return list(self._shared[Member])

    def path(self) -> pathlib.Path:
        return self.directory / uuid.uuid4().hex


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    if not ray.is_initialized():
        ray.init(**RAY_ARGS)
    directory = tmp_path_factory.mktemp("worlds")
    made = {kind: World(kind, directory) for kind in ("plain", "created", "wrapped")}
    yield made
    for world in made.values():
        world._shared.clear()


class Case:
    def __init__(self, run: Callable[[World], Any], raises: Any, kinds: tuple[str, ...], text_differs: str) -> None:
        self.run = run
        self.raises = raises
        self.kinds = kinds
        self.text_differs = text_differs


CASES: dict[str, Case] = {}

BOTH = ("created", "wrapped")


def case(
    identifier: str, *, raises: Any = None, kinds: tuple[str, ...] = BOTH, text_differs: str = ""
) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    """Adds a case.

    Args:
        identifier: what it shows; quoted in the documentation.
        raises: the class that the plain world raises.
        kinds: the worlds it is compared in; what makes actor classes by itself has no "wrapped" form.
        text_differs: why the text of the error is not the same, where it is not.
    """

    def add(run: Callable[[World], Any]) -> Callable[[World], Any]:
        assert identifier not in CASES
        CASES[identifier] = Case(run, raises, kinds, text_differs)
        return run

    return add


def skip_before(version: tuple[int, int], why: str) -> None:
    if tuple(map(int, ray.__version__.split(".")[:2])) < version:
        pytest.skip(f"{why} before {version[0]}.{version[1]}")


def table(prefix: str, rows: dict[str, Callable[[World], Any]], **about: Any) -> None:
    for name, run in rows.items():
        case(f"{prefix}: {name}", **about)(run)


def normal(text: str) -> str:
    """Without what differs between two actors of one class, and without the frames of a traceback, in which the
    standard library's way through a future depends on who was faster."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"^ .*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b[0-9a-f]{16,}\b", "<id>", text)
    text = re.sub(r"0x[0-9a-f]+", "<address>", text)
    text = re.sub(r"pid=\d+|PID \d+|pid:? ?\d+", "<pid>", text)
    text = re.sub(r"/\S*/worlds\S*", "<path>", text)
    return re.sub(r"\d+\.\d+\.\d+\.\d+(:\d+)?", "<address>", text)


def shape(value: Any) -> Any:
    """What can be compared of a result: its type, and the value where it is one."""
    if isinstance(value, ray.actor.ActorHandle):
        return "ActorHandle", normal(repr(value))
    if isinstance(value, (ray.ObjectRef, ray.ObjectRefGenerator)):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shape(one) for one in value]
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return type(value).__name__, normal(repr(value))


def outcome(one: Case, world: World) -> Any:
    try:
        return "returns", shape(one.run(world))
    except Exception as error:
        if one.raises is None or not isinstance(error, one.raises):
            raise
        # An error of ours stands for the class of Ray that it derives from.
        bases = [base.__name__ for base in type(error).__mro__ if not base.__module__.startswith("actorsub")]
        return "raises", bases, "(differs)" if one.text_differs else normal(str(error))


@pytest.mark.parametrize("identifier", CASES)  # Filled below; pytest reads it after the import.
def test_same_as_plain(identifier: str, worlds: dict[str, World]) -> None:
    one = CASES[identifier]
    # All at the same time: most cases wait for processes or for Ray's pause between two tries.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {kind: pool.submit(outcome, one, worlds[kind]) for kind in ("plain", *one.kinds)}
    plain = futures["plain"].result()
    if one.raises is not None:
        assert plain[0] == "raises", f"Ray itself did not raise: {plain}"
    for kind in one.kinds:
        assert futures[kind].result() == plain, kind


# ---------------------------------------------------------------------------------------------------------------------
# Calling.

table(
    "method",
    {
        "no arguments, None": lambda w: get(w.methods.nothing.remote()),
        "default argument": lambda w: get(w.methods.echo.remote()),
        "positional": lambda w: get(w.methods.every_kind.remote(1)),
        "*args and **kwargs": lambda w: get(w.methods.every_kind.remote(1, 5, 6, 7, c=8, d=9, e=10)),
        "keyword only": lambda w: get(w.methods.keyword_only.remote(key="k")),
        "positional only": lambda w: get(w.methods.positional_only.remote(4, b=5)),
        "arguments by name": lambda w: get(w.methods.two.remote(b=1, a=2)),
        "static": lambda w: get(w.methods.static.remote(4)),
        "class": lambda w: get(w.methods.of_class.remote(4)),
        "inherited": lambda w: get(w.methods.inherited.remote(4)),
        "overridden": lambda w: get(w.methods.overridden.remote()),
        "underscore": lambda w: get(w.methods._underscore.remote(4)),
        "mangled name": lambda w: get(w.methods._Methods__mangled.remote()),
        "dunder __len__": lambda w: get(w.methods.__len__.remote()),
        "dunder __call__": lambda w: get(w.methods.__call__.remote(4)),
        "parameters named as our options": lambda w: get(
            w.methods.our_names.remote(1, on_unavailable="a", on_pending="b", policy="c")
        ),
        "keywords named as our options": lambda w: get(
            w.methods.keywords.remote(timeout_s=1, on_unavailable=2, on_pending=3, handle=4, actor=5, error=6)
        ),
        "parameters named as Ray's options": lambda w: get(
            w.methods.rays_names.remote(name="n", num_returns=9, args=[1], kwargs={"a": 1})
        ),
        "keywords named as internals": lambda w: get(w.methods.keywords.remote(method=1, cls=2, state=3, options=4)),
        "method object kept and used again": lambda w: [get(m.remote(i)) for m in [w.methods.echo] for i in range(3)],
        "._remote(args, kwargs)": lambda w: get(w.methods.two._remote([1], {"b": 2})),
        "._remote with options": lambda w: get(w.methods.task_name._remote(name="by _remote")),
        "invocation decorator": lambda w: get(w.methods.decorated.remote(4)),
        "call result type": lambda w: w.methods.echo.remote(1),
    },
)

for _name in [name for name, one in vars(OddNames).items() if inspect.isfunction(one) and not name.startswith("_")]:
    table(
        "method named",
        {_name: lambda w, name=_name: get(getattr(w.shared(OddNames), name).remote())},
    )

table(
    "handle attribute beats a method",
    {
        "_actor_id": lambda w: type(w.shared(OddNames)._actor_id).__name__,
        "_get_local_state": lambda w: [get(w.shared(OddNames).call.remote()), w.shared(OddNames)._get_local_state()],
    },
)

table(
    "wrong arguments",
    {
        "missing": lambda w: w.methods.two.remote(1),
        "missing keyword only": lambda w: w.methods.keyword_only.remote(),
        "too many": lambda w: w.methods.two.remote(1, 2, 3),
        "unexpected keyword": lambda w: w.methods.two.remote(1, 2, c=3),
        "given twice": lambda w: w.methods.two.remote(1, a=2),
        "positional only by name": lambda w: w.methods.positional_only.remote(a=1),
        "a keyword named self": lambda w: w.methods.keywords.remote(self=1),
        "with options": lambda w: w.methods.two.options(name="n").remote(1),
        "of a static method": lambda w: w.methods.static.remote(),
        "unpicklable": lambda w: w.methods.echo.remote(threading.Lock()),
    },
    raises=TypeError,
)

case(
    "wrong arguments: a keyword named self, with options",
    raises=TypeError,
    text_differs="Python names the function that noticed",
)(lambda w: w.methods.keywords.options(name="n").remote(self=1))

table(
    "unknown attribute",
    {
        "method": lambda w: w.methods.no_such_method.remote(),
        "underscore": lambda w: w.methods._no_such_method,
        "dunder": lambda w: w.methods.__no_such_method__,
        "property is not a method": lambda w: w.methods.a_property,
        "class attribute is not a method": lambda w: w.methods.answer,
        "of a method": lambda w: w.methods.echo.no_such_attribute,
        "dunder of a method": lambda w: w.methods.echo.__no_such_attribute__,
    },
    raises=AttributeError,
)

table(
    "call without .remote",
    {
        "method": lambda w: w.methods.echo(1),
        "handle": lambda w: w.methods(1),
        "static": lambda w: w.methods.static(1),
        "len of the handle": lambda w: len(w.methods),
        "iterate over the handle": lambda w: list(w.methods),
        "await the handle": lambda w: asyncio.run(asyncio.wait_for(w.methods, 1)),
    },
    raises=TypeError,
)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of results.


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


# ---------------------------------------------------------------------------------------------------------------------
# Ways to wait for the result.


async def awaited(ref: Any) -> Any:
    return await ref


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


# ---------------------------------------------------------------------------------------------------------------------
# Options of a call.

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


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of actors.


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


# ---------------------------------------------------------------------------------------------------------------------
# Errors.

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


def error_of(ref: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        get(ref)
    return caught.value


def about(error: Any, actor: Any) -> Any:
    """What Ray's error says of an actor besides its text."""
    return [error.preempted, error.actor_id == actor._actor_id.hex(), error.actor_init_failed]


@case("error of an actor: its fields, killed")
def _(w: World) -> Any:
    actor = w.create(Methods)
    held = actor.hold.remote(str(w.path()))
    ray.kill(actor)
    first, later = error_of(held), error_of(actor.echo.remote(1))
    return [about(first, actor), about(later, actor), [isinstance(later, ray.exceptions.ActorDiedError)]]


@case("error of an actor: its fields, never made")
def _(w: World) -> Any:
    actor = w.create(NeverMade)
    return about(error_of(actor.echo.remote(1)), actor)


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
            wait_until(lambda: not isinstance(_answer(actor), Exception))
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


def _answer(actor: Any, method: str = "nothing") -> Any:
    try:
        return get(getattr(actor, method).remote())
    except ray.exceptions.RayActorError as error:
        return error


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


table(
    "magic method",
    {
        "__ray_ready__": lambda w: get(w.methods.__ray_ready__.remote()),
        "__ray_call__": lambda w: get(w.methods.__ray_call__.remote(lambda self, x, y=0: (self.answer, x, y), 1, y=2)),
        "__ray_call__ with options": lambda w: [
            get(ref) for ref in w.methods.__ray_call__.options(num_returns=2, name="called").remote(lambda self: (1, 2))
        ],
        "__ray_call__ of an async actor": lambda w: get(
            w.asynchronous.__ray_call__.remote(lambda self: type(self).__name__)
        ),
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
    wait_until(lambda: not isinstance(_answer(actor), Exception))
    return [failed, [get(wait_until(lambda i=i: submitted_or_none(actor, w, i))) for i in range(3)]]


def submitted_or_none(actor: Any, w: World, value: Any = None) -> Any:
    try:
        return actor.hold.remote(str(w.path())) if value is None else actor.two.remote(value, value)
    except ray.exceptions.PendingCallsLimitExceeded:
        return None


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


# ---------------------------------------------------------------------------------------------------------------------
# What Ray keeps of a call: its row in the state API, the count of its references, who owns its result.


def task_rows(ids: list[str]) -> dict[str, list[Any]]:
    """For each task, its attempts as the control store has them, which is what the state API reads; [] of none."""
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import TaskEvents

    state.profile_events()  # Connects.
    accessor = getattr(state, "_global_state_accessor", None) or state.global_state_accessor
    rows: dict[str, list[Any]] = {one: [] for one in ids}
    for raw in accessor.get_task_events():
        event = TaskEvents.FromString(raw)
        if event.task_id.hex() in rows and event.HasField("task_info"):
            rows[event.task_id.hex()].append(event)
    return rows


@case("state API: rows of calls")
def _(w: World) -> Any:
    actor = w.retrying
    calls = {
        "plain": actor.echo.remote(1),
        "named": actor.echo.options(name="my task").remote(1),
        "without a row": actor.echo.options(enable_task_events=False).remote(1),
        "without a row by @ray.method": actor.silent.remote(),
        "with a row after all": actor.silent.options(enable_task_events=True).remote(),
        "several returns": actor.three.remote()[0],
        "a stream": actor.items.remote(2)._generator_ref,
        "a named stream": actor.items.options(name="my stream").remote(2)._generator_ref,
        "magic": actor.__ray_call__.remote(lambda self: 1),
        "retried": actor.fail_first.options(retry_exceptions=True).remote(uuid.uuid4().hex, 1),
        "retried by @ray.method": actor.flaky.remote(uuid.uuid4().hex, 1),
        "failed": actor.fail.remote(),
        "static": actor.static.remote(1),
    }
    ids = {name: ref.task_id().hex() for name, ref in calls.items()}
    parent = ray.get_runtime_context().get_task_id()
    expected = {name: 2 if "retried" in name else 0 if "without" in name else 1 for name in calls}

    def complete() -> Any:
        rows = task_rows(list(ids.values()))
        return rows if all(sum(map(ended, rows[ids[name]])) == expected[name] for name in ids) else None

    rows = wait_until(complete, GET_S)
    return {
        name: [
            (
                one.attempt_number,
                one.task_info.name,
                one.task_info.func_or_class_name,
                one.task_info.type,
                one.task_info.actor_id == actor._actor_id.binary(),
                one.task_info.parent_task_id.hex() == parent,
                dict(one.task_info.required_resources),
                one.state_updates.error_info.error_type,
            )
            for one in sorted(rows[ids[name]], key=lambda one: one.attempt_number)
        ]
        for name in calls
    }


def ended(event: Any) -> bool:
    from ray.core.generated.common_pb2 import TaskStatus

    return bool({TaskStatus.Value("FINISHED"), TaskStatus.Value("FAILED")} & set(event.state_updates.state_ts_ns))


def counts(*refs: Any) -> Any:
    everything = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return [everything.get(ref if isinstance(ref, str) else ref.hex()) for ref in refs]


@case("reference count: of a result, as it is kept, passed on and dropped")
def _(w: World) -> Any:
    actor = w.methods
    gate = w.path()
    held = actor.hold.remote(str(gate))
    ref = actor.echo.remote(1)
    seen = [counts(held, ref)]
    first, second = actor.echo.remote(ref), actor.echo.remote([ref])
    seen.append(counts(held, ref, first, second))
    again = copy.copy(ref)
    seen.append(counts(ref))
    del again
    gate.touch()
    get([held, first, second])
    names = [one.hex() for one in (held, ref, first, second)]
    seen.append(wait_until(lambda: settled(names)))
    del held, ref, first, second
    seen.append(wait_until(lambda: counts(*names) == [None] * 4))
    return seen


def settled(names: list[str]) -> Any:
    """Ray takes back what a call counted a moment after its result."""
    now = counts(*names)
    return None if any(one and one["submitted"] for one in now) else now


@case("reference count: of an actor, as its handle is copied, passed on and dropped")
def _(w: World) -> Any:
    actor = w.create(Methods)
    name = actor._serialization_helper()[1].hex()
    get(actor.nothing.remote())
    seen = [wait_until(lambda: counts(name))]
    others = [copy.copy(actor), pickle.loads(pickle.dumps(actor)), w.wrap(actor)]
    get([one.nothing.remote() for one in others])
    del others
    gate = w.path()
    held = actor.hold.remote(str(gate))
    later = actor.nothing.options(name="n").remote()
    seen.append(counts(name))
    gate.touch()
    get([held, later])
    get(w.asynchronous.echo.remote([actor]))
    del actor
    return [*seen, wait_until(lambda: counts(name) == [None])]


@case("ownership: results belong to the caller")
def _(w: World) -> Any:
    own = ray.put(1).owner_address()
    refs = [w.methods.echo.remote(1), w.methods.echo.options(name="n").remote(1), *w.methods.three.remote()]
    refs += list(w.methods.items.remote(2))
    return [ref.owner_address() == own for ref in refs]


class Owner:
    """A process of its own that has something, and may be killed for it."""

    def call(self, actor: Any, key: str) -> Any:
        # Not at its end: a small result would be with whoever was given the reference before the owner dies.
        self.ref = actor.forever.remote(key)
        return os.getpid(), [self.ref]

    def create(self, cls: Any, wrapped: bool) -> Any:
        actor = cls.remote()
        self.actor = actorsub.wrap(actor) if wrapped else actor
        ray.get(self.actor.nothing.remote())
        return os.getpid(), self.actor


@case("ownership: the caller's death takes its results along", raises=ray.exceptions.OwnerDiedError)
def _(w: World) -> Any:
    owner = ray.remote(num_cpus=0)(Owner).remote()
    pid, (ref,) = get(owner.call.remote(w.asynchronous, uuid.uuid4().hex))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: isinstance(_answer(owner, "__ray_ready__"), ray.exceptions.ActorDiedError))
    return get(ref)


@case("ownership: the creator's death takes its actor along")
def _(w: World) -> Any:
    owner = ray.remote(num_cpus=0)(Owner).remote()
    pid, actor = get(owner.create.remote(w.actor_class(Methods), w.kind == "wrapped"))
    get(actor.nothing.remote())
    os.kill(pid, signal.SIGKILL)
    error = wait_until(lambda: (found := _answer(actor)) and isinstance(found, ray.exceptions.ActorDiedError) and found)
    return [about(error, actor), "owner" in str(error)]


# ---------------------------------------------------------------------------------------------------------------------
# Libraries.


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
    wait_until(lambda: isinstance(_answer(handles[2], "__ray_ready__"), ray.exceptions.ActorDiedError))
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


# ---------------------------------------------------------------------------------------------------------------------
# The handle as an object.


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


def test_mixed_with_plain(worlds: dict[str, World]) -> None:
    """A plain and a wrapped handle of one actor are one key, both ways round."""
    plain = worlds["plain"].methods
    wrapped = actorsub.wrap(plain)
    other = worlds["created"].methods
    assert plain == wrapped
    assert wrapped == plain
    assert not plain != wrapped  # noqa: SIM202
    assert hash(plain) == hash(wrapped)
    assert len({plain, wrapped, other}) == 2
    assert {plain: "value"}[wrapped] == {wrapped: "value"}[plain] == "value"
    assert wrapped in [plain]
    assert [other, wrapped].index(plain) == 1
    assert actorsub.wrap(plain, on_unavailable="raise") == wrapped
    assert plain != other


def test_two_handles_of_one_actor_keep_their_own_policy(worlds: dict[str, World]) -> None:
    plain = worlds["plain"].methods
    first, second = actorsub.wrap(plain, on_unavailable="raise"), actorsub.wrap(plain, timeout_s=3)
    assert actorsub.policy(first) == actorsub.Policy(on_unavailable="raise")
    assert actorsub.policy(second) == actorsub.Policy(timeout_s=3)
    assert get([first.echo.remote(1), second.echo.remote(2), plain.echo.remote(3)]) == [1, 2, 3]


def test_plain_and_wrapped_handles_share_the_pending_calls(ray_local: None, tmp_path: pathlib.Path) -> None:
    """The limit is of the actor in this process, whoever of its handles submits."""
    plain = ray.remote(num_cpus=0, max_pending_calls=2)(Methods).remote()
    wrapped = actorsub.wrap(plain)
    get(plain.nothing.remote())
    gate = tmp_path / "gate"
    refs = [wait_until(lambda handle=handle: held_or_none(handle, gate)) for handle in (plain, wrapped)]
    for handle in (plain, wrapped):
        with pytest.raises(ray.exceptions.PendingCallsLimitExceeded):
            handle.echo.remote(1)
    gate.touch()
    assert get(refs) == ["held", "held"]


def held_or_none(handle: Any, gate: pathlib.Path) -> Any:
    try:
        return handle.hold.remote(str(gate))
    except ray.exceptions.PendingCallsLimitExceeded:
        return None


def test_a_warning_of_rays_names_the_line_of_the_caller(worlds: dict[str, World]) -> None:
    """Python shows a deprecation where the line that is to blame is the user's own, and hides it elsewhere."""

    def warned(world: World) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.methods.items.options(num_returns="dynamic")
        return [(one.category, str(one.message), one.filename, one.lineno) for one in caught]

    plain = warned(worlds["plain"])
    assert warned(worlds["created"]) == warned(worlds["wrapped"]) == plain


def test_a_half_built_handle_answers_getattr() -> None:
    """As copy, pickle and debuggers make them: no recursion, AttributeError only."""
    for kind in (actorsub.ActorHandle, type(actorsub.ActorHandle.__new__(actorsub.ActorHandle))):
        with pytest.raises(AttributeError):
            kind.__new__(kind).anything  # noqa: B018


def test_generic_annotation_of_the_handle_class() -> None:
    """`ActorHandle[Worker]` is how Ray's own class is written in annotations, where Ray's is generic."""
    if not hasattr(ray.actor.ActorHandle, "__class_getitem__"):
        pytest.skip("Ray's handle class is not generic in this version")
    assert ray.actor.ActorHandle[Methods]
    assert actorsub.ActorHandle[Methods]


# ---------------------------------------------------------------------------------------------------------------------
# Actor classes.


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


# ---------------------------------------------------------------------------------------------------------------------
# Our options beside Ray's: there is no plain form to compare with.


def test_ours_and_rays_options_together(ray_local: None) -> None:
    """Nearest wins, option by option: decorator, then options(), then wrap, then the call."""

    @actorsub.remote(num_cpus=0, max_restarts=2, on_unavailable="raise", timeout_s=5)
    class Worker:
        def echo(self, x: int) -> int:
            return x

    assert Worker.__ray_metadata__.max_restarts == 2
    plain_options = Worker.remote()
    assert actorsub.policy(plain_options) == actorsub.Policy(on_unavailable="raise", timeout_s=5)
    name = uuid.uuid4().hex
    mixed = Worker.options(name=name, max_task_retries=1, on_pending="wait").remote()
    assert actorsub.policy(mixed) == actorsub.Policy(on_unavailable="raise", timeout_s=5, on_pending="wait")
    assert mixed._ray_max_task_retries == 1
    assert ray.get_actor(name) == mixed
    ours_only = Worker.options(on_unavailable="auto", timeout_s=None).remote()
    assert actorsub.policy(ours_only) == actorsub.Policy()
    again = actorsub.wrap(mixed, on_unavailable="wait")
    assert actorsub.policy(again) == actorsub.Policy(on_unavailable="wait", timeout_s=5, on_pending="wait")
    assert actorsub.wrap(again) is again
    assert get([h.echo.remote(i) for i, h in enumerate([plain_options, mixed, ours_only, again])]) == [0, 1, 2, 3]
    call = again.echo.options(timeout_s=7, name="n").options(on_unavailable="raise")
    assert call._actorsub_policy == actorsub.Policy(on_unavailable="raise", timeout_s=7, on_pending="wait")
    assert get(call.remote(4)) == 4
    found = actorsub.get_actor(name, on_unavailable="raise")
    assert found == mixed
    assert actorsub.policy(found) == actorsub.Policy(on_unavailable="raise")


def test_ours_through_remote_of_the_class(ray_local: None) -> None:
    """`_remote` is what libraries call, with any option; get_if_exists comes back through it."""
    cls = actorsub.remote(num_cpus=0)(OddNames)
    name = uuid.uuid4().hex
    first = cls._remote(name=name, get_if_exists=True, on_unavailable="raise")
    get(first.call.remote())
    again = cls._remote(name=name, get_if_exists=True, timeout_s=2)
    assert first == again
    assert actorsub.policy(first) == actorsub.Policy(on_unavailable="raise")
    assert actorsub.policy(again) == actorsub.Policy(timeout_s=2)


def test_concurrency_groups_survive_our_options(ray_local: None) -> None:
    """Ray drops the groups from the options of a class when `.options()` is called; ours alone must not hide them."""
    cls = actorsub.remote(num_cpus=0, concurrency_groups={"io": 1})(Groups)
    plain = ray.remote(num_cpus=0, concurrency_groups={"io": 1})(Groups)
    expected = get(plain.options(max_restarts=1).remote().in_io.remote())
    assert get(cls.options(on_unavailable="raise").remote().in_io.remote()) == expected
    assert get(cls.options(max_restarts=1, on_unavailable="raise").remote().in_io.remote()) == expected


def test_a_method_keeps_what_its_options_made(worlds: dict[str, World]) -> None:
    method = worlds["created"].methods.echo
    kept = method.options(timeout_s=1, name="same")
    assert method.options(timeout_s=1, name="same") is kept
    assert kept is not method.options(timeout_s=2, name="same")
    assert kept.options(timeout_s=2) is not method.options(timeout_s=2)
    # Equal, but not the same thing.
    assert method.options(max_queued=1) is not None
    with pytest.raises(TypeError, match="max_queued"):
        method.options(max_queued=True)
    with pytest.raises(TypeError, match="max_queued"):
        method.options(max_queued=1.0)
    # A value that may change is read when it is given.
    labels = {"kind": "one"}
    if "_labels" in (_ray_compat.method_option_names() or ()):
        assert method.options(_labels=labels) is not method.options(_labels=labels)
    for number in range(3 * MAX_VARIANTS):
        method.options(timeout_s=number + 1.5)
    assert len(method._actorsub_variants) <= MAX_VARIANTS
    assert method.options(timeout_s=30).call(7).result(60) == 7


def test_kept_options_keep_no_actor_alive(ray_local: None) -> None:
    handle = actorsub.remote(num_cpus=0)(Methods).remote()
    assert handle.echo.options(timeout_s=60, name="kept").call(1).result(60) == 1
    variant = weakref.ref(handle.echo.options(timeout_s=60, name="kept"))
    gc.collect()
    gc.disable()
    try:
        del handle
        assert variant() is None, "only the garbage collector would end it"
    finally:
        gc.enable()


def test_options_over_options_of_a_method(worlds: dict[str, World]) -> None:
    """Ray's own result of `.options()` has no `.options()`; ours has, and adds up."""
    method = worlds["created"].methods.triple
    refs = method.options(num_returns=3).options(name="n").options(timeout_s=1).remote()
    assert get(refs) == [1, 2, 3]
    with pytest.raises(TypeError, match="unexpected keyword"):
        method.options(name="n").options(timeout_s=1).remote(no_such=1)


WRONG_VALUES = [
    ("on_unavailable", "Raise", ValueError),
    ("on_unavailable", True, TypeError),
    ("on_unavailable", None, TypeError),
    ("on_pending", "never", ValueError),
    ("on_pending", 1, TypeError),
    ("timeout_s", 0, ValueError),
    ("timeout_s", -1, ValueError),
    ("timeout_s", float("nan"), ValueError),
    ("timeout_s", float("inf"), ValueError),
    ("timeout_s", "1", TypeError),
    ("timeout_s", True, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), WRONG_VALUES, ids=[f"{n}={v!r}" for n, v, _ in WRONG_VALUES])
def test_wrong_value_of_our_option_is_named_where_it_is_written(
    worlds: dict[str, World], name: str, value: Any, error: type[Exception]
) -> None:
    handle = worlds["created"].methods
    cls = worlds["created"].actor_class(Methods)
    places = [
        actorsub.remote,
        cls.options,
        lambda **options: cls.options(max_restarts=1, **options),
        cls._remote,
        lambda **options: actorsub.wrap(handle, **options),
        lambda **options: actorsub.wrap(worlds["plain"].methods, **options),
        lambda **options: actorsub.get_actor("nobody", **options),
        handle.echo.options,
        lambda **options: handle.echo._remote([1], {}, **options),
        actorsub.Policy,
    ]
    for place in places:
        with pytest.raises(error, match=name):
            place(**{name: value})


def test_unknown_option_is_named_where_it_is_written(worlds: dict[str, World]) -> None:
    handle = worlds["created"].methods
    for place in (actorsub.wrap, functools.partial(actorsub.get_actor, "nobody"), None):
        with pytest.raises(TypeError, match="no_such_option"):
            if place is actorsub.wrap:
                actorsub.wrap(handle, no_such_option=1)
            elif place is None:
                handle.echo.options(no_such_option=1)
            else:
                place(no_such_option=1)


NO_HANDLES = {
    "number": 1,
    "None": None,
    "name": "name",
    "object": object(),
    "plain class": Methods,
    "function": lambda: None,
}


@pytest.mark.parametrize("thing", NO_HANDLES.values(), ids=NO_HANDLES)
def test_what_wrap_and_remote_do_not_take(ray_local: None, thing: Any) -> None:
    with pytest.raises(TypeError, match="handle"):
        actorsub.wrap(thing)
    if not inspect.isclass(thing):
        with pytest.raises(TypeError, match="class"):
            actorsub.remote(thing)
    for function in (actorsub.state, actorsub.stats, actorsub.policy):
        with pytest.raises(TypeError, match="handle"):
            function(thing)


def test_remote_over_ray_remote_says_what_to_do(ray_local: None) -> None:
    with pytest.raises(TypeError, match="actorsub"):
        actorsub.remote(ray.remote(Methods))
    with pytest.raises(TypeError, match="actorsub"):
        actorsub.remote()
    with pytest.raises(TypeError, match="actorsub"):
        actorsub.remote(Methods, on_unavailable="raise")
