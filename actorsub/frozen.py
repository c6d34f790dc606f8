"""Copies of the arguments of calls that wait. They are pickled when the call is made, so that the call does not see
what the caller does to its objects after that."""

from __future__ import annotations

import io
import pickle
from typing import Any

import ray
import ray.cloudpickle

from actorsub import _core

# Immutable types that Ray always pickles: no copy is needed.
_PLAIN = (int, float, str, bytes, bool, type(None), ray.ObjectRef)


class Frozen:
    """Pickled arguments. Refs and handles are kept beside the bytes, so that they stay counted."""

    __slots__ = ("_bytes", "_kept")

    def __init__(self, arguments: Any) -> None:
        self._kept: list[Any] = []
        buffer = io.BytesIO()
        _Freezer(buffer, self._kept).dump(arguments)
        self._bytes = buffer.getvalue()

    def thaw(self) -> Any:
        return _Thawer(self._bytes, self._kept).load()


# Methods of classes, and not attributes of their objects, which Python 3.13.0 does not take.


class _Freezer(ray.cloudpickle.CloudPickler):
    def __init__(self, buffer: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(buffer)
        self._kept = kept

    def persistent_id(self, thing: Any) -> int | None:
        if isinstance(thing, (ray.ObjectRef, ray.ObjectRefGenerator, ray.actor.ActorHandle)):
            self._kept.append(thing)
            return len(self._kept) - 1
        return None


class _Thawer(pickle.Unpickler):
    def __init__(self, data: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._kept = kept

    def persistent_load(self, number: Any) -> Any:
        return self._kept[number]


def freeze(call: _core.CallBase) -> None:
    """Puts a Frozen in the place of a call's arguments, where there is anything in them that could change.

    Raises TypeError for an argument that cannot be pickled, and whatever an argument's own functions raise.
    """
    args, kwargs = call._actorsub_args, call._actorsub_kwargs
    if args is None or isinstance(args, Frozen) or all(type(value) in _PLAIN for value in (*args, *kwargs.values())):
        return
    try:
        frozen = Frozen((args, kwargs))
    except TypeError:
        refuse_unpicklable(args, kwargs)
        raise
    call._actorsub_args, call._actorsub_kwargs = frozen, None


def thawed(call: _core.CallBase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, frozen or not."""
    args = call._actorsub_args
    return args.thaw() if isinstance(args, Frozen) else (args, call._actorsub_kwargs)


def refuse_unpicklable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a TypeError for the argument that cannot be pickled. It names its place and type, not its contents, which
    may be private. Errors of other classes are raised as they are, as Ray does."""
    places = [(f"argument {number}", value) for number, value in enumerate(args, 1)]
    places += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for place, value in places:
        try:
            Frozen(value)
        except TypeError as error:
            raise TypeError(
                f"Could not serialize {place} of a call, of type {type(value).__qualname__}: {error}"
            ) from error
