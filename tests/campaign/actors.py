"""The actors of the campaign. Each method writes its call's id down before it does anything else."""

from __future__ import annotations

import asyncio
import os
import pathlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import ray

from campaign import book

ANOTHER = "of another actor"


def _certified_error() -> Exception:
    """As a method may come by one that calls another actor: what it says is about that other call."""
    import actorsub

    return actorsub.ActorUnavailableError(ANOTHER, sent=False, state=actorsub.ActorState.RESTARTING)


def is_of_another_call(error: BaseException) -> bool:
    return ANOTHER in str(error)


def _raise(how: str) -> NoReturn:
    if how == "certified":
        raise _certified_error()
    raise {"value": ValueError, "stop": StopIteration}[how](how)


def _made(how: str) -> Any:
    return _certified_error() if how == "certified" else [_certified_error()]


class _Ledger:
    """Of one actor, in a file that all of its incarnations share."""

    def __init__(self, directory: str, name: str, restart_s: float) -> None:
        starts = pathlib.Path(directory) / f"{name}.starts"
        is_first = not starts.exists()
        with starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self._descriptor = os.open(f"{directory}/{name}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if not is_first:
            time.sleep(restart_s)
        if (pathlib.Path(directory) / f"{name}.broken").exists():
            raise ValueError("the constructor fails from now on")

    def begin(self, call_id: str) -> None:
        book.append(self._descriptor, f"{call_id} {os.getpid()} {time.monotonic():.6f}\n".encode())


class Worker(_Ledger):
    """Plain methods; with max_concurrency over 1 on several threads."""

    def work(self, call_id: str, nap_s: float, payload: bytes, more: Any = None) -> Any:
        self.begin(call_id)
        time.sleep(nap_s)
        return [call_id, len(payload), more]

    def fail(self, call_id: str, how: str) -> None:
        self.begin(call_id)
        _raise(how)

    def give_error(self, call_id: str, how: str) -> Any:
        self.begin(call_id)
        return _made(how)

    def stream(self, call_id: str, count: int, nap_s: float) -> Iterator[Any]:
        self.begin(call_id)
        for number in range(count):
            time.sleep(nap_s)
            yield [call_id, number]

    def leave(self, how: str) -> None:
        if how == "exit_actor":
            ray.actor.exit_actor()
        raise SystemExit(0)

    def ping(self) -> int:
        return os.getpid()


class AsyncWorker(_Ledger):
    """The same as coroutines."""

    async def work(self, call_id: str, nap_s: float, payload: bytes, more: Any = None) -> Any:
        self.begin(call_id)
        await asyncio.sleep(nap_s)
        return [call_id, len(payload), more]

    async def fail(self, call_id: str, how: str) -> None:
        self.begin(call_id)
        _raise(how)

    async def give_error(self, call_id: str, how: str) -> Any:
        self.begin(call_id)
        return _made(how)

    async def stream(self, call_id: str, count: int, nap_s: float) -> AsyncIterator[Any]:
        self.begin(call_id)
        for number in range(count):
            await asyncio.sleep(nap_s)
            yield [call_id, number]

    async def ping(self) -> int:
        return os.getpid()


class Helper:
    """Never disturbed: makes arguments that come late or fail, and asks actors by plain handles."""

    async def later(self, after_s: float, value: Any) -> Any:
        await asyncio.sleep(after_s)
        return value

    async def broken(self) -> NoReturn:
        raise ValueError("an argument that failed")

    async def which_answer(self, handles: dict[str, list[Any]], limit_s: float) -> dict[str, float]:
        """When each of them answered, on the clock of time.monotonic(); those that did not within the limit are left
        out. Handles come in lists, so that they come as handles."""

        async def ask(name: str, handle: Any) -> tuple[str, float] | None:
            end_s = time.monotonic() + limit_s
            while True:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return None
                try:
                    await asyncio.wait_for(handle.ping.remote(), left_s)
                    return name, time.monotonic()
                except asyncio.TimeoutError:
                    return None
                except ray.exceptions.ActorDiedError:
                    return None
                except ray.exceptions.RayError:
                    await asyncio.sleep(0.1)

        answers = await asyncio.gather(*[ask(name, handle) for name, (handle,) in handles.items()])
        return dict(answer for answer in answers if answer is not None)
