"""What defines a case, what makes its actors the plain or the wrapped way, and what runs and compares it."""

from __future__ import annotations

import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import ray
import ray.actor
import ray.exceptions
from helpers import get

import actorsub
from equivalence.actors import Async, Member, Methods


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


async def awaited(ref: Any) -> Any:
    return await ref


def error_of(ref: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        get(ref)
    return caught.value


def fields(error: Any, actor: Any) -> Any:
    """What Ray's error says of an actor besides its text."""
    return [error.preempted, error.actor_id == actor._actor_id.hex(), error.actor_init_failed]


def answer_or_error(actor: Any, method: str = "nothing") -> Any:
    """What a call gives, or why the actor did not answer it; for waiting until one or the other changes."""
    try:
        return get(getattr(actor, method).remote())
    except ray.exceptions.RayActorError as error:
        return error
