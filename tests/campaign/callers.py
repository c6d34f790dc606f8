"""Who makes the calls: threads, event loops, the main thread, and a signal handler on it.

Each caller draws all that it decides from a `random.Random` of its own, made from the seed and its name, so that what
is called, how and in which order follows from the seed; only when it happens is the machine's.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

import actorsub
from campaign import actors, book

#: A caller waits for that many calls at most at one time.
MAX_PENDING = 12
MAX_PENDING_IN_LOOP = 24
#: Mean pause between two calls of one caller.
PAUSE_S = 0.03

WAYS = (
    "remote ref", "remote raise", "remote wait", "remote default", "call", "group unsent", "group always",
    "group never", "stream", "async actor", "threaded actor",
)  # fmt: skip

#: Stands for the answer of a method that returns an error object, which each way of waiting hands out differently.
AN_ERROR = "an error as a value"


class InjectedError(Exception):
    pass


class InjectedExit(SystemExit):
    pass


class InjectedInterrupt(KeyboardInterrupt):
    pass


class InjectedCancel(asyncio.CancelledError):
    pass


INJECTED = (InjectedError, InjectedExit, InjectedInterrupt, InjectedCancel)


def raise_one(rng: random.Random) -> None:
    raise rng.choice(INJECTED)("by the campaign")


def is_injected(error: BaseException) -> bool:
    """Where it ends a call, what is no Exception is the cause of one."""
    return isinstance(error, INJECTED) or isinstance(error.__cause__, INJECTED)


@dataclasses.dataclass
class Target:
    """One actor."""

    name: str
    handle: Any  #: wrapped
    plain: Any
    kind: str  #: "sync", "async", "threaded", "retries"
    is_far: bool = False


class World:
    """What all callers share."""

    def __init__(self, directory: pathlib.Path, seed: int, without: frozenset[str]) -> None:
        self.directory = directory
        self.seed = seed
        self.without = without
        self.targets: list[Target] = []
        self.groups: dict[str, actorsub.ReplicaGroup] = {}
        self.helper: Any = None
        self.violations: list[book.Violation] = []
        self._told = os.open(directory / "told.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}:{name}")

    def has(self, disturbance: str) -> bool:
        return disturbance not in self.without

    def violate(self, promise: str, what: str) -> None:
        self.violations.append(book.Violation(promise, what))

    def tell(self, told: book.Told) -> None:
        # No lock and no buffer: a signal handler comes here, too.
        book.append(self._told, told.to_line())

    def of_kind(self, *kinds: str) -> list[Target]:
        return [target for target in self.targets if target.kind in kinds]


def may_have_run(error: BaseException) -> bool:
    """What the error promises: False only where it says so."""
    function = getattr(actorsub, "may_have_run", None)
    if function is not None and not function(error):
        return False
    if isinstance(error, ray.exceptions.RayTaskError):
        return True
    return getattr(error, "sent", True) is not False


class Pending:
    """One call that was made, and how its caller goes on with it."""

    def __init__(self, world: World, told: book.Told, expected: Any, may_fail: bool) -> None:
        self.world = world
        self.told = told
        self.expected = expected
        #: The method raises, or one of its arguments fails.
        self.may_fail = may_fail
        self.given: Any = None
        self.future: Any = None
        self.done_s: float | None = None
        self.was_taken_back = False
        self.cancel_at_s: float | None = None

    # Which of the three it is that the call gave.
    @property
    def call(self) -> actorsub.Call | None:
        return self.given if isinstance(self.given, actorsub.Call) else None

    @property
    def is_stream(self) -> bool:
        return isinstance(self.given, ray.ObjectRefGenerator) or hasattr(self.given, "__anext__")

    def note_done(self, _: Any) -> None:
        self.done_s = time.monotonic()

    def end(self, end: str, error: BaseException | None = None) -> None:
        told = self.told
        if told.end != "nothing":
            return
        told.end = end
        told.ended_s = self.done_s or time.monotonic()
        if error is not None:
            told.may_have_run = may_have_run(error)
            told.detail = f"{type(error).__name__}, evidence {getattr(error, 'evidence', None)}: {error}"[:400]
        if end == "taken back":
            told.may_have_run = False
        if end == "surprise":
            told.detail += f": {error}"[:400]
        if self.was_taken_back and end != "taken back":
            self.world.violate("a call that was taken back ends so", f"{told.id} ({told.way}) ended as {end}")
        self.world.tell(told)
        self.given = self.future = None

    def end_with_value(self, value: Any) -> None:
        if self.expected == AN_ERROR or value == self.expected:
            self.end("value")
        else:
            self.told.detail = f"{value!r} and not {self.expected!r}"[:200]
            self.end("wrong value")

    def end_with_error(self, error: BaseException, *, by_ray: bool = False) -> None:
        """`by_ray`: Ray's own code raised it, which also raises an error object that the method returned, as it is."""
        if by_ray and self.expected == AN_ERROR and actors.is_of_another_call(error):
            self.end("value")
        elif is_injected(error):
            self.end("callback", error)
        elif isinstance(error, (concurrent.futures.CancelledError, asyncio.CancelledError)):
            self.end("taken back", error)
        elif isinstance(getattr(error, "cause", error), ray.exceptions.TaskCancelledError):
            self.end("cancelled", error)
        elif isinstance(error, ray.exceptions.RayTaskError):
            self.end("application" if self.may_fail else "surprise", error)
        elif isinstance(error, actorsub.DeadlineExceededError):
            self.end("deadline", error)
        elif isinstance(error, actorsub.QueueFullError):
            self.end("refused", error)
        elif isinstance(error, ray.exceptions.RayActorError):
            self.end("lost" if may_have_run(error) else "refused", error)
        else:
            self.end("surprise", error)

    def end_with_call(self) -> None:
        """Of a Call that is done."""
        call = self.call
        assert call is not None
        if call.cancelled():
            self.end("taken back")
            return
        error = call.exception()
        if error is not None:
            self.end_with_error(error)
            return
        value = call.result()
        if isinstance(value, ray.ObjectRefGenerator) or hasattr(value, "__anext__"):
            self.done_s = None
            self.given = value
        else:
            self.end_with_value(value)


class Caller:
    """Draws calls and makes them."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = world.random(name)
        self._numbers = itertools.count()
        #: No further calls once this is set; those under way are waited for until `give_up`.
        self.stop = threading.Event()
        self.give_up = threading.Event()
        self.pending: list[Pending] = []
        #: From a signal handler, which may come in the middle of a change of `pending`.
        self.handed: collections.deque[Pending] = collections.deque()
        self.is_over = False

    # -- Drawing.

    def _target(self, *kinds: str) -> Target:
        return self.rng.choice(self.world.of_kind(*kinds))

    def _nap_s(self) -> float:
        draw = self.rng.random()
        return 0.0 if draw < 0.6 else self.rng.uniform(0.001, 0.05) if draw < 0.95 else self.rng.uniform(0.05, 0.4)

    def _payload(self) -> bytes:
        draw = self.rng.random()
        size = 0 if draw < 0.5 else self.rng.randrange(2000) if draw < 0.95 else self.rng.randrange(300_000)
        return bytes(size)

    def _more(self) -> tuple[Any, Any, bool]:
        """(an argument, what arrives of it, whether it fails)."""
        draw, number = self.rng.random(), self.rng.randrange(1000)
        if draw < 0.8:
            return number, number, False
        if draw < 0.88:
            return ray.put(number), number, False
        after_s = self.rng.uniform(0.01, 1.2)
        if not self.world.has("late"):
            return number, number, False
        if draw < 0.98:
            return self.world.helper.later.remote(after_s, number), number, False
        return self.world.helper.broken.remote(), None, True

    def _deadline_s(self, usual: float = 0.5) -> float | None:
        """Of a call: now and then shorter than the call may take."""
        draw = self.rng.random()
        if not self.world.has("deadlines") or draw > usual:
            return None
        return self.rng.uniform(0.005, 0.1) if draw < usual / 3 else self.rng.uniform(0.1, 3.0)

    # -- Making a call.

    def make(self, way: str | None = None) -> Pending:
        """Makes one call. The result has its end already where the call was refused at once."""
        if way is None:
            way = self.rng.choice(WAYS)
        told = book.Told(f"{self.name}-{next(self._numbers)}", way, "", 0.0)
        pending = Pending(self.world, told, None, False)
        made = self._draw(way, pending)
        told.begun_s = time.monotonic()
        try:
            pending.given = made()
        except BaseException as error:
            if isinstance(error, ray.exceptions.RayError) or is_injected(error):
                pending.end_with_error(error)
                return pending
            raise
        self._disturb(pending)
        return pending

    def _draw(self, way: str, pending: Pending) -> Callable[[], Any]:
        rng, told = self.rng, pending.told
        if way.startswith("group "):
            name = way.removeprefix("group ")
            told.actor, told.may_repeat = f"group {name}", name == "always"
            by_call = rng.random() < 0.85
            timeout_s = self._deadline_s(0.8)
            options: dict[str, Any] = {"on_unavailable": rng.choice(["ref", "raise", "wait"]), "timeout_s": timeout_s}
            if not by_call and options["on_unavailable"] == "wait" and timeout_s is None:
                options["timeout_s"] = timeout_s = 1.0
            method, args = self._arguments(pending, self.world.groups[name], options, "work")
            if not by_call:
                told.may_repeat = False
            return self._submission(pending, method, args, by_call, timeout_s)
        kinds = {"async actor": ["async"], "threaded actor": ["threaded"], "stream": ["sync", "async"]}
        target = self._target(*kinds.get(way, ["sync", "sync", "retries"]))
        told.actor = target.name
        handle = target.handle
        if rng.random() < 0.02:
            handle = actorsub.wrap(target.plain, silence_timeout_s=1.0)
        elif rng.random() < 0.02:
            handle = actorsub.get_actor(target.name)
        by_call = way == "call" or (way in kinds and rng.random() < 0.5)
        options = {}
        timeout_s = None
        policy = way.removeprefix("remote ")
        if policy in ("ref", "raise", "wait"):
            options["on_unavailable"] = policy
        if policy == "wait":
            options["timeout_s"] = rng.uniform(0.05, 2.0)
        if by_call:
            options["on_unavailable"] = rng.choice(["ref", "raise", "wait"])
            timeout_s = options["timeout_s"] = self._deadline_s()
            if rng.random() < 0.4:
                options["max_in_flight"] = rng.choice([1, 2, 8])
                options["max_queued"] = rng.choice([2, 1000])
        told.may_repeat = target.kind == "retries" and not by_call
        if way == "stream":
            count, nap_s = rng.randrange(6), self._nap_s() / 4
            pending.expected = [[told.id, number] for number in range(count)]
            if not by_call:
                options.pop("timeout_s", None)
            method = handle.stream.options(num_returns="streaming", **options)
            # The deadline of a stream is about its waiting only.
            return self._submission(pending, method, (told.id, count, nap_s), by_call, None)
        names = ["work"] * 18 + ["fail"] + (["give_error"] if self.world.has("returned") else ["work"])
        method, args = self._arguments(pending, handle, options, rng.choice(names))
        return self._submission(pending, method, args, by_call, timeout_s)

    def _arguments(self, pending: Pending, owner: Any, options: dict[str, Any], name: str) -> tuple[Any, Any]:
        call_id = pending.told.id
        method = getattr(owner, name).options(**options)
        if name == "fail":
            pending.may_fail = True
            return method, (call_id, self.rng.choice(["value", "certified", "stop"]))
        if name == "give_error":
            pending.may_fail = True
            pending.expected = AN_ERROR
            return method, (call_id, self.rng.choice(["certified", "nested"]))
        nap_s, payload = self._nap_s(), self._payload()
        more, arrives, pending.may_fail = self._more()
        pending.expected = [call_id, len(payload), arrives]
        return method, (call_id, nap_s, payload, more)

    def _submission(
        self, pending: Pending, method: Any, args: Any, by_call: bool, timeout_s: float | None
    ) -> Callable[[], Any]:
        def submit() -> Any:
            if not by_call:
                return method.remote(*args)
            if timeout_s is not None:
                pending.told.due_s = time.monotonic() + timeout_s
            return method.call(*args)

        return submit

    def _disturb(self, pending: Pending) -> None:
        """Callbacks that raise, and what is going to be cancelled."""
        call, rng = pending.call, self.rng
        if call is None:
            return
        call.add_done_callback(pending.note_done)
        if rng.random() < 0.1 and self.world.has("callbacks"):
            noted = random.Random(rng.random())
            # It may be done already, and the callback runs here then: as with Python's own futures.
            with contextlib.suppress(*INJECTED):
                call.add_done_callback(lambda _: raise_one(noted))
        if rng.random() < 0.12 and self.world.has("cancels"):
            pending.cancel_at_s = time.monotonic() + (0.0 if rng.random() < 0.4 else rng.uniform(0.0, 0.3))

    def cancel(self, pending: Pending) -> None:
        call = pending.call
        if call is None:
            return
        pending.cancel_at_s = None
        try:
            if call.cancel():
                pending.was_taken_back = True
                if not call.cancelled():
                    self.world.violate("a call that was taken back ends so", f"{pending.told.id} is not cancelled()")
        except INJECTED as error:
            # On the main thread a KeyboardInterrupt is whoever's who is there: it may be a Ctrl-C.
            if not (isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()):
                what = f"{error!r} came out of cancel() of {pending.told.id}"
                self.world.violate("a user's code never stops ours", what)

    # -- Waiting for it, on a thread.

    def poll(self, pending: Pending, wait_s: float) -> None:
        """Waits for a while, in one of the ways there are, and ends the call where it has ended."""
        rng, call = self.rng, pending.call
        if call is not None:
            if not call.done():
                self._wait_for_call(call, wait_s)
            if call.done():
                pending.end_with_call()
            return
        if pending.is_stream:
            try:
                pending.end_with_value(list(self._items(pending.given)))
            except ray.exceptions.RayError as error:
                pending.end_with_error(error)
            return
        ref = pending.given
        style = rng.choice(["get", "get", "wait", "future", "ray"])
        try:
            if pending.future is not None or style == "future":
                if pending.future is None:
                    pending.future = ref.future()
                    if rng.random() < 0.3 and self.world.has("callbacks"):
                        noted = random.Random(rng.random())
                        pending.future.add_done_callback(lambda _: raise_one(noted))
                concurrent.futures.wait([pending.future], wait_s)
                if not pending.future.done():
                    return
                value = pending.future.result()
            elif style == "get":
                value = actorsub.get(ref, timeout=wait_s)
            else:
                module = actorsub if style == "wait" else ray
                ready, _ = module.wait([ref], timeout=wait_s)
                if not ready:
                    return
                value = module.get(ref)
        except INJECTED:
            # Its future was done already.
            return
        except (ray.exceptions.RayError, RuntimeError) as error:
            if type(error) is not ray.exceptions.GetTimeoutError:
                by_ray = style == "ray" or type(ref) is ray.ObjectRef
                pending.end_with_error(_of_ray(error), by_ray=by_ray)
            return
        pending.end_with_value(value)

    def _wait_for_call(self, call: actorsub.Call, wait_s: float) -> None:
        if self.rng.random() < 0.3:
            concurrent.futures.wait([call], wait_s)
            return
        # Its own end is read from the call; here the wait may also just be over.
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            call.result(wait_s)

    def _items(self, stream: Any) -> Iterator[Any]:
        for ref in stream:
            yield actorsub.get(ref)


class ThreadCaller(Caller):
    """Makes calls on one thread and waits for them there, a few at a time and not in order."""

    pause_s = PAUSE_S

    def run(self) -> None:
        while not self.stop.is_set():
            self.turn()
        while self._take_handed() and not self.give_up.is_set():
            self.look_at_one(0.2)
        for pending in self.pending:
            # It says "nothing".
            self.world.tell(pending.told)
        self.pending.clear()
        self.is_over = True

    def _take_handed(self) -> list[Pending]:
        while self.handed:
            self.pending.append(self.handed.popleft())
        return self.pending

    def turn(self) -> None:
        self._take_handed()
        if len(self.pending) < MAX_PENDING:
            pending = self.make()
            if pending.told.end == "nothing":
                self.pending.append(pending)
        time.sleep(self.rng.expovariate(1 / self.pause_s))
        now_s = time.monotonic()
        for pending in self.pending:
            if pending.cancel_at_s is not None and pending.cancel_at_s <= now_s:
                self.cancel(pending)
        if self.pending and (len(self.pending) == MAX_PENDING or self.rng.random() < 0.5):
            self.look_at_one(0.05)
        self._end_done()

    def look_at_one(self, wait_s: float) -> None:
        index = self.rng.randrange(len(self.pending))
        self.poll(self.pending[index], wait_s)
        self._end_done()

    def _end_done(self) -> None:
        for pending in self.pending:
            call = pending.call
            if call is not None and call.done():
                pending.end_with_call()
        self.pending[:] = [pending for pending in self.pending if pending.told.end == "nothing"]


class LoopCaller(Caller):
    """Makes calls on an event loop and awaits them there; some awaits are cancelled, also before their first step."""

    def run(self) -> None:
        asyncio.run(self._run())
        self.is_over = True

    async def _run(self) -> None:
        tasks: dict[asyncio.Task[None], Pending] = {}
        while not self.stop.is_set():
            if len(tasks) < MAX_PENDING_IN_LOOP:
                pending = self.make()
                if pending.told.end == "nothing":
                    tasks[asyncio.ensure_future(self._follow(pending))] = pending
            await asyncio.sleep(self.rng.expovariate(1 / PAUSE_S))
            self._take_done(tasks)
        while tasks and not self.give_up.is_set():
            await asyncio.sleep(0.02)
            self._take_done(tasks)
        for task, pending in tasks.items():
            task.cancel()
            self.world.tell(pending.told)

    def _take_done(self, tasks: dict[asyncio.Task[None], Pending]) -> None:
        for task in [task for task in tasks if task.done()]:
            del tasks[task]
            task.result()

    async def _follow(self, pending: Pending) -> None:
        while pending.told.end == "nothing":
            if pending.call is not None:
                await self._follow_call(pending, pending.call)
            elif pending.is_stream:
                try:
                    pending.end_with_value([await ref async for ref in pending.given])
                except ray.exceptions.RayError as error:
                    pending.end_with_error(error)
            else:
                await self._follow_ref(pending)

    async def _follow_call(self, pending: Pending, call: actorsub.Call) -> None:
        if pending.cancel_at_s is not None:
            limit_s = max(0.0, pending.cancel_at_s - time.monotonic())
            if self.rng.random() < 0.5:
                # The await is cancelled, and so the call.
                try:
                    await asyncio.wait_for(call, limit_s)
                except asyncio.CancelledError:
                    if not call.done():
                        raise
                except Exception:
                    pass
                pending.cancel_at_s = None
            else:
                await asyncio.sleep(limit_s)
                self.cancel(pending)
        while not call.done():
            await asyncio.wait([asyncio.ensure_future(_outcome(call))], timeout=30)
        pending.end_with_call()

    async def _follow_ref(self, pending: Pending) -> None:
        limit_s = self.rng.choice([None, None, 0.0, 0.05, 0.5])
        try:
            value = await asyncio.wait_for(pending.given, limit_s)
        except ray.exceptions.RayError as error:
            pending.end_with_error(error, by_ray=type(pending.given) is ray.ObjectRef)
        except asyncio.TimeoutError:
            await asyncio.sleep(0.01)
        except RuntimeError as error:
            pending.end_with_error(_of_ray(error))
        else:
            pending.end_with_value(value)


def _of_ray(error: Exception) -> BaseException:
    """The error of a call. Python makes a RuntimeError of a method's StopIteration where Ray's own refs are awaited."""
    if isinstance(error, ray.exceptions.RayError):
        return error
    if isinstance(error.__cause__, ray.exceptions.RayTaskError):
        return error.__cause__
    raise error


async def _outcome(call: actorsub.Call) -> None:
    try:
        await call
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
    except Exception:
        pass


class HandlerCaller(Caller):
    """Makes a call within a signal handler, and waits for it there for a while. What it does not see the end of is the
    main thread's."""

    def __init__(self, world: World, name: str, main: ThreadCaller) -> None:
        super().__init__(world, name)
        self._main = main

    def handle(self, *_: object) -> None:
        try:
            pending = self.make(self.rng.choice(["remote ref", "remote raise", "call", "group unsent"]))
        except RuntimeError as error:
            # Refused, with the reason: this handler has interrupted the start of the threads. Nothing was made.
            if "threads are being started" not in str(error):
                raise
            return
        if pending.told.end != "nothing":
            return
        if self.rng.random() < 0.7:
            try:
                self.poll(pending, 0.2)
            except RuntimeError as error:
                # A refusal to wait here, with its reason; the call goes on.
                pending.told.detail = f"not in a handler: {error}"[:100]
        if pending.told.end == "nothing":
            self._main.handed.append(pending)
