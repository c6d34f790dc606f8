"""Object refs whose outcome fails when their actor does, and `get` and `wait` that know it.

A call that was sent ends in one of two ways, whichever comes first: Ray delivers its outcome, or the watcher finds
that the incarnation which had the call is gone. A `Party` waits for the outcome of one ref; taking it
out of `actor.parties` decides who ends it, and only one can.

Calls that Ray itself would resend (`max_task_retries`) are never failed early: their refs are Ray's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import ray

from actorsub import _core, _ray_compat, errors, submit, watcher
from actorsub.fence import Wakeup, fenced

#: In a task, which gives its CPU back only inside Ray's own blocking calls: how long one of them may last before the
#: next look at whether the actor is lost.
TASK_SLICE_S = 0.020


class _Hub:
    """The one callback that Ray has for a ref, and everybody who waits for it here.

    Ray keeps a callback until the outcome is there, so a loop that asks again and again must not leave one each time.
    """

    __slots__ = ("is_asked", "is_over", "parties", "ref")

    def __init__(self, ref: ray.ObjectRef) -> None:
        # Keeps the ref alive until its outcome is there, as Ray's futures do.
        self.ref = ref
        # The thread that takes a party out of here tells it, or knows that it need not be told.
        self.parties: dict[Party, None] = {}
        # Ray has the callback. A party that comes while Ray is being asked, in a signal handler say, asks once more.
        self.is_asked = False
        # Its parties are being told, or were told. A party that comes now may be passed over.
        self.is_over = False

    def arrived(self, value: Any) -> None:
        """On a thread of Ray's."""
        failed = _ray_compat.is_failure(self.ref, value)
        actor, mark = _core.call_of(self.ref)
        if failed and actor is not None:
            # Also where nobody waits any more.
            watcher.learn(actor, value, mark)
        self.is_over = True
        _hubs.pop(self.ref.binary(), None)
        for party in self.take_parties():
            fenced("taking in an outcome", party.arrived, value, failed)

    def take_parties(self) -> Iterator[Party]:
        while self.parties:
            try:
                yield self.parties.popitem()[0]
            except KeyError:
                return


# By the ref's binary id. Without a lock, see fence.py.
_hubs: dict[bytes, _Hub] = {}


_TOLD = object()


class Party:
    """One party that waits for the outcome of one call."""

    __slots__ = ("actor", "lost", "mark", "ref")

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.ref = ref
        # None and 0 for a plain ref, which nothing here can end.
        self.actor, self.mark = _core.call_of(ref)
        # True once the call was given up here; what arrives after that is a late reply.
        self.lost = False

    def start(self) -> None:
        actor = self.actor
        if actor is not None:
            actor.parties[self] = None
        self._ask()
        if actor is None:
            return
        if actor.unhurried:
            watcher.hurry(actor)
        if actor.losses() > self.mark:
            # Lost before anybody waited; the watcher first looks whether the value came in time.
            watcher.nudge_if_possible()

    def _ask(self) -> None:
        """Has Ray call `arrived`."""
        key = self.ref.binary()
        while True:
            hub = _hubs.get(key)
            if hub is None:
                hub = _hubs.setdefault(key, _Hub(self.ref))
            hub.parties[self] = None
            if not hub.is_over or hub.parties.pop(self, _TOLD) is _TOLD:
                break
            # It was passed over; the next hub is told at once.
            if _hubs.get(key) is hub:
                _hubs.pop(key, None)
        if not hub.is_asked:
            _ray_compat.on_completed(self.ref, hub.arrived)
            hub.is_asked = True

    def stop(self) -> None:
        """Ends the wait. An outcome that arrives later is dropped."""
        actor = self.actor
        if actor is not None:
            actor.parties.pop(self, None)
        self._leave()

    def _leave(self) -> None:
        """Leaves the hub, so that Ray's callback does not come here."""
        hub = _hubs.get(self.ref.binary())
        if hub is not None:
            hub.parties.pop(self, None)

    def stop_if_cancelled(self, future: Any) -> None:
        # `asyncio.wait_for` in a loop must not leave one party for each try.
        if future.cancelled():
            self.stop()

    def arrived(self, value: Any, failed: bool) -> None:
        """Ray has the outcome. On a thread of Ray's."""
        actor = self.actor
        if actor is None:
            self.deliver(value)
            return
        if actor.parties.pop(self, self) is self:
            # `pop` gave the default: failed early, or nobody waits any more.
            if self.lost:
                actor.late_replies += 1
            return
        if failed:
            watcher.certify(actor, value, self.mark, self.deliver)
        else:
            self.deliver(errors.as_value_of_a_call(value))

    def deliver(self, value: Any) -> None:
        """Ends the wait with a value, or with an error if `value` is a RayError. As with Ray, that includes an error
        which the method returned. On any thread."""
        raise NotImplementedError


class _LoopParty(Party):
    """`await`: ends an asyncio future on its loop's thread."""

    __slots__ = ("_future", "_loop")

    def __init__(self, ref: ray.ObjectRef, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
        super().__init__(ref)
        self._loop = loop
        self._future = future

    def deliver(self, value: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(end_future, self._future, value)
        except RuntimeError:
            # The loop was closed meanwhile, and with it everybody who could have asked.
            if not self._loop.is_closed():
                raise


class _Future(concurrent.futures.Future):  # type: ignore[type-arg]
    """What `.future()` returns."""

    _done_callbacks: list[Callable[[Any], object]]

    def _invoke_callbacks(self) -> None:
        for callback in self._done_callbacks:
            fenced("a callback of a future", callback, self)


class _FutureParty(Party):
    """`.future()`: ends a concurrent.futures.Future."""

    __slots__ = ("_future",)

    def __init__(self, ref: ray.ObjectRef, future: concurrent.futures.Future[Any]) -> None:
        super().__init__(ref)
        self._future = future

    def deliver(self, value: Any) -> None:
        if self._future.set_running_or_notify_cancel():
            end_future(self._future, value)


class _CountedParty(Party):
    """One of several refs that a blocked thread waits for.

    If this Ray can, it says only that the value is there, and the thread that waits unpickles it. Ray's own thread
    would unpickle it under a lock of Ray's, which the waiting thread may hold: in a signal handler that has interrupted
    `ray.get`.
    """

    __slots__ = ("_gathering", "_index", "_take_back")

    def __init__(self, ref: ray.ObjectRef, gathering: _Gathering, index: int) -> None:
        super().__init__(ref)
        self._gathering = gathering
        self._index = index
        self._take_back: Callable[[], object] | None = None

    def _ask(self) -> None:
        if not _ray_compat.can_tell_ready():
            super()._ask()
            return
        _told_ready[self] = _ray_compat.session_token()
        self._take_back = _ray_compat.on_ready(self.ref, self._is_there)

    def _is_there(self, _: Any) -> None:
        """On a thread of Ray's, or this one."""
        if _told_ready.pop(self, None) is not None:
            self.arrived(_THERE, False)

    def _leave(self) -> None:
        if not _ray_compat.can_tell_ready():
            super()._leave()
            return
        session = _told_ready.pop(self, None)
        if session is not None and session is _ray_compat.session_token() and self._take_back is not None:
            self._take_back()

    def deliver(self, value: Any) -> None:
        self._gathering.arrived(self._index, value)


# Parties that Ray tells when the value is there -> the connection to Ray.
_told_ready: dict[_CountedParty, Any] = {}
# Stands for a value that Ray has and nobody has unpickled yet.
_THERE: Any = object()


def end_future(future: Any, value: Any) -> None:
    """Ends a future of asyncio or concurrent.futures with `value`, as Party.deliver says. No other thread may end the
    future."""
    if isinstance(value, ray.exceptions.RayError):
        fail_future(future, value)
    elif not future.done():
        future.set_result(value)


def fail_future(future: Any, value: BaseException) -> None:
    """The same with an error, of whatever class."""
    if future.done():
        return
    if isinstance(value, ray.exceptions.RayTaskError):
        # Makes a subclass of the exception's class, which may run code of that class.
        error = fenced("the class of a method's exception", errors.as_raised, value, failed=value)
        # The interpreter reads a StopIteration that leaves an `await` as one of its own making, and crashes on Ray's.
        future.set_exception(value if isinstance(error, StopIteration) else error)
    else:
        future.set_exception(value)


class ObjectRef(ray.ObjectRef):
    """Ray's ObjectRef of a call through a wrapped handle. It does all that a plain one does, is equal to it and has the
    same hash.

    `await`, `.future()`, `actorsub.get` and `actorsub.wait` end within milliseconds when the actor is lost. In another
    process it arrives as a plain one.
    """

    # Nothing of its own inside: Ray's own object takes this class (_core.early_of).
    __slots__ = ()

    def __await__(self) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        party = _LoopParty(self, loop, future)
        future.add_done_callback(party.stop_if_cancelled)
        party.start()
        return future.__await__()

    def future(self) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = _Future()
        # As with Ray's: who keeps the future keeps the object.
        future.object_ref = self  # type: ignore[attr-defined]
        party = _FutureParty(self, future)
        future.add_done_callback(party.stop_if_cancelled)
        party.start()
        return future

    def as_future(self, _internal: bool = False) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.future())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ray.ObjectRef) and self.binary() == other.binary()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = ray.ObjectRef.__hash__

    def __reduce__(self) -> Any:
        return _ray_compat.plain_ref(self).__reduce__()


class ObjectRefGenerator(ray.ObjectRefGenerator):
    """Ray's generator of a streaming call, which ends early: when the actor is lost, it yields one failed ref and ends.

    Items that arrived before are delivered first. `early_result` makes it from Ray's own.
    """

    _actorsub_actor: _core.Actor
    _actorsub_mark: int
    _actorsub_over: bool

    def _early(self, ref: ray.ObjectRef) -> ObjectRef:
        early: ObjectRef = _core.early_of(ref, self._actorsub_actor, self._actorsub_mark)
        return early

    def completed(self) -> ray.ObjectRef:
        return self._early(super().completed())

    def _lost_ref(self, value: Any) -> ray.ObjectRef | None:
        if not isinstance(value, _core.CertifiedError) or value._actor is not self._actorsub_actor:
            # Else an item of the stream.
            return None
        # Ray ends the stream later by itself; whoever reads it must not wait for that.
        self._actorsub_over = True
        return _ray_compat.failed_ref(value)

    def is_finished(self) -> bool:
        return self._actorsub_over or super().is_finished()

    def next_ready(self) -> bool:
        return not self._actorsub_over and super().next_ready()

    def __next__(self) -> ray.ObjectRef:
        return self._next_sync()

    async def __anext__(self) -> ray.ObjectRef:
        return await self._next_async()

    def _next_sync(self, timeout_s: float | None = None) -> ray.ObjectRef:
        if self._actorsub_over:
            raise StopIteration
        ref, ready = _ray_compat.peek_stream(self)
        if not ready:
            gathering = _Gathering([self._early(ref)], fetch=True)
            limit_s = None if timeout_s is None or timeout_s < 0 else timeout_s
            if not gathering.block(1, limit_s, stop_at_error=True):
                return ray.ObjectRef.nil()
            failed = self._lost_ref(gathering.values.get(0))
            if failed is not None:
                return failed
        return super()._next_sync(timeout_s)

    async def _next_async(self, timeout_s: float | None = None) -> ray.ObjectRef:
        if self._actorsub_over:
            raise StopAsyncIteration
        ref, ready = _ray_compat.peek_stream(self)
        if not ready:
            limit_s = None if timeout_s is None or timeout_s < 0 else timeout_s
            try:
                await asyncio.wait_for(self._early(ref), limit_s)
            except asyncio.TimeoutError:
                return ray.ObjectRef.nil()
            except Exception as error:
                # Anything else is in the item itself, which is handed out below.
                failed = self._lost_ref(error)
                if failed is not None:
                    return failed
        return await super()._next_async(timeout_s)


def early_result(actor: _core.Actor, mark: int, result: Any) -> Any:
    """The result of `.remote()` in any shape but a single ref, with refs that fail early."""
    if isinstance(result, list):
        return [_core.early_of(ref, actor, mark) for ref in result]
    if type(result) is ray.ObjectRefGenerator:
        result.__class__ = ObjectRefGenerator
        result._actorsub_actor = actor
        result._actorsub_mark = mark
        result._actorsub_over = False
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Blocking.


def block_in_task(event: Wakeup, pending: Callable[[], list[ray.ObjectRef]], timeout_s: float | None) -> bool:
    """`event.wait(timeout_s)` for a thread that runs a task, while Ray lends out the CPU that the task holds."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while not event.is_set():
        left_s = TASK_SLICE_S if end_s is None else min(TASK_SLICE_S, end_s - time.monotonic())
        if left_s <= 0:
            return False
        waited_for = list(dict.fromkeys(pending()))
        # Ray takes the CPU back from a task that blocks in here, and only in here.
        _, waiting = ray.wait(waited_for, num_returns=len(waited_for), timeout=left_s) if waited_for else ([], [])
        if not waiting:
            return event.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
    return True


#: For how long a thread waits for a Call while it is inside Ray's deserialization; see `block_by_looking`.
LOOKING_LIMIT_S = 5.0


def block_by_looking(
    event: Wakeup, pending: Callable[[], list[ray.ObjectRef]], timeout_s: float | None, take: Callable[[], None]
) -> bool:
    """`event.wait(timeout_s)` for a thread that is inside Ray's deserialization, whose lock Ray's callbacks wait for.

    Once every pending ref has its outcome, which is looked at from time to time, calls `take()`, which is to make
    `event` happen. Raises RuntimeError after LOOKING_LIMIT_S, see `_refuse_to_wait`.
    """
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    limit_s = time.monotonic() + LOOKING_LIMIT_S
    while not event.is_set():
        left_s = TASK_SLICE_S if end_s is None else min(TASK_SLICE_S, end_s - time.monotonic())
        if left_s <= 0:
            return False
        if time.monotonic() > limit_s:
            _refuse_to_wait()
        waited_for = list(dict.fromkeys(pending()))
        if not waited_for:
            event.wait(left_s)
        elif not ray.wait(waited_for, num_returns=len(waited_for), timeout=left_s)[1]:
            take()
    return True


def _refuse_to_wait() -> NoReturn:
    """A callback of Ray's for another call may wait for the lock that this thread holds. Then it blocks the thread that
    would have to receive what is waited for here."""
    raise RuntimeError(
        "this cannot be waited for any longer in a signal handler (or __del__, or __setstate__) that has interrupted "
        "Ray while it unpickled a value: as long as other calls are awaited, Ray may deliver nothing before that is "
        "over. Let the handler set a flag, and wait elsewhere"
    )


class _Gathering:
    """A thread that waits for several outcomes.

    Args:
        refs: whose outcomes.
        fetch: True: `values` are the values. False: it matters only which of them have arrived; they may be _THERE.
    """

    def __init__(self, refs: Sequence[ray.ObjectRef], *, fetch: bool) -> None:
        self.refs = refs
        # By index in `refs`. Written by the thread that waits.
        self.values: dict[int, Any] = {}
        self._fetch = fetch
        self._arrivals: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._end_s: float | None = None

    def arrived(self, index: int, value: Any) -> None:
        """On any thread."""
        self._arrivals.put((index, value))

    def block(self, wanted: int, timeout_s: float | None, *, stop_at_error: bool) -> bool:
        """Waits for `wanted` outcomes, or (with stop_at_error) for one that is an error. False: time is over."""
        if watcher.is_own_thread():
            raise RuntimeError(
                "actorsub.get, actorsub.wait and streams cannot block in a callback of actorsub: it runs on the thread "
                "that ends such waits. Block on another thread"
            )
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        parties = [_CountedParty(ref, self, index) for index, ref in enumerate(self.refs)]
        try:
            for party in parties:
                party.start()
            in_task = _ray_compat.is_task_thread()
            held_up = _ray_compat.holds_up_outcomes() and _has_callbacks()
            while len(self.values) < wanted:
                left_s = self._left_s()
                if held_up and (left_s is None or left_s > LOOKING_LIMIT_S):
                    arrival = self._next(LOOKING_LIMIT_S)
                    if arrival is None:
                        _refuse_to_wait()
                else:
                    arrival = self._next_in_task() if in_task else self._next(left_s)
                if arrival is None:
                    return False
                index, value = arrival
                if value is _THERE and self._fetch:
                    value = outcome_of(self.refs[index], self._left_s())
                    if value is _LATE:
                        return False
                self.values[index] = value
                if stop_at_error and isinstance(value, ray.exceptions.RayError):
                    return True
            return True
        finally:
            for party in parties:
                party.stop()

    def _left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def _next(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """The next arrival; None when the time is over first."""
        try:
            return self._arrivals.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _next_in_task(self) -> tuple[int, Any] | None:
        """The same for a thread that runs a task, while Ray lends out the CPU that the task holds."""
        while True:
            arrival = self._next(0)
            left_s = self._left_s()
            if arrival is not None or left_s == 0:
                return arrival
            waited_for = list(dict.fromkeys(ref for i, ref in enumerate(self.refs) if i not in self.values))
            # Ray takes the CPU back from a task that blocks in here, and only in here.
            slice_s = TASK_SLICE_S if left_s is None else min(TASK_SLICE_S, left_s)
            if ray.wait(waited_for, num_returns=1, timeout=slice_s)[0]:
                return self._next(left_s)

    def first_error(self) -> Any:
        for index in sorted(self.values):
            if isinstance(self.values[index], ray.exceptions.RayError):
                return self.values[index]
        return None


def _has_callbacks() -> bool:
    """Whether Ray may be about to unpickle an outcome for any wait of this process."""
    return bool(_hubs) or watcher.above.calls.has_in_flight()


# The value is at another node and did not arrive in time.
_LATE: Any = object()


def outcome_of(ref: ray.ObjectRef, timeout_s: float | None = None) -> Any:
    """The value of a ref whose outcome is there, or its error, certified if it is about the call's own actor. _LATE
    when the value is at another node and cannot be fetched in time."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        if type(error) is ray.exceptions.GetTimeoutError:
            return _LATE
        if not _ray_compat.is_failure(ref, error):
            # Also of a call that Ray resends, whose ref is Ray's own.
            return errors.as_value_of_a_call(error)
        actor, mark = _core.call_of(ref)
        if actor is None:
            return error
        watcher.learn(actor, error, mark)
        if watcher.is_read_first(actor, error):
            submit.read_table_once(actor)
        return errors.certified(error, actor, mark)


def _raise(error: Any) -> None:
    raise errors.as_raised(error)


def get(object_refs: Any, *, timeout: float | None = None) -> Any:
    """`ray.get` that ends early when an actor is lost.

        >>> actorsub.get(worker.infer.remote(x), timeout=5.0)
        >>> actorsub.get([one.infer.remote(x) for one in workers])

    Args:
        object_refs: an ObjectRef or a list of them, of wrapped handles and others in any mixture. Anything else that
            `ray.get` takes is handed to it.
        timeout: in seconds; None: no limit.

    Returns:
        The value, or the list of values.

    Raises:
        The first failure, as `ray.get` does. If the actor of a call was lost meanwhile, that is ActorUnavailableError
        or ActorDiedError with `sent=True`.
        ray.exceptions.GetTimeoutError: the time is over.
        TypeError: a Call is among them. Use `call.result()` or `await call` for it.
        RuntimeError: it would block in a callback of this library.
    """
    single = isinstance(object_refs, ray.ObjectRef)
    refs = [object_refs] if single else object_refs
    if not isinstance(refs, list) or not any(isinstance(ref, ObjectRef) for ref in refs):
        _refuse_calls(object_refs)
        try:
            return ray.get(object_refs, timeout=timeout)
        except ray.exceptions.RayError as raised:
            for ref in refs if isinstance(refs, list) and not errors.may_have_run(raised) else []:
                # A method may have returned it as its value. Then what it certifies is about another call.
                if ray.wait([ref], timeout=0)[0] and isinstance(value := outcome_of(ref), ray.exceptions.RayError):
                    _raise(value)
            raise
    if not all(isinstance(ref, ray.ObjectRef) for ref in refs):
        _refuse_calls(object_refs)
        # Ray's own complaint.
        return ray.get(object_refs, timeout=timeout)
    unique = list(dict.fromkeys(refs))
    _, waiting = ray.wait(unique, num_returns=len(unique), timeout=0)
    if waiting:
        gathering = _Gathering(unique, fetch=True)
        in_time = gathering.block(len(unique), timeout, stop_at_error=True)
        error = gathering.first_error()
        if error is not None:
            _raise(error)
        if not in_time:
            raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")
        values = dict(zip(unique, (gathering.values[index] for index in range(len(unique))), strict=True))
        return values[refs[0]] if single else [values[ref] for ref in refs]
    return _get_ready(object_refs)


def _refuse_calls(waitables: Any) -> None:
    for one in waitables if isinstance(waitables, (list, tuple)) else [waitables]:
        if isinstance(one, _core.CallBase):
            raise TypeError(
                "actorsub.get and actorsub.wait take ObjectRefs, and this is a Call, which is a future: use "
                "call.result(timeout) or `await call`, and for several concurrent.futures.wait(calls) or as_completed"
            )


def _get_ready(object_refs: Any) -> Any:
    try:
        return ray.get(object_refs)
    except ray.exceptions.RayError:
        # Finds out which of them failed, and so which actor the error is about.
        for ref in [object_refs] if isinstance(object_refs, ray.ObjectRef) else object_refs:
            value = outcome_of(ref)
            if isinstance(value, ray.exceptions.RayError):
                _raise(value)
        raise


def _arrival(waitable: Any) -> ray.ObjectRef:
    """The ref whose arrival makes a waitable ready: of a generator, that of its next item."""
    if isinstance(waitable, ObjectRefGenerator):
        return waitable._early(_ray_compat.peek_stream(waitable)[0])
    if isinstance(waitable, _ray_compat.FailedGenerator):
        return waitable.completed()
    if isinstance(waitable, ray.ObjectRefGenerator):
        return _ray_compat.peek_stream(waitable)[0]
    return waitable


def wait(
    ray_waitables: list[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """`ray.wait` that counts a call as ready when its actor is lost. `actorsub.get` of such a ref raises at once.

        >>> ready, others = actorsub.wait(refs, num_returns=1, timeout=1.0)

    Args:
        ray_waitables: a list of ObjectRefs, and of generators of streaming calls.
        num_returns: how many to wait for.
        timeout: in seconds; None: no limit.
        fetch_local: as in `ray.wait`.

    Returns:
        Two lists: those that are ready, at most `num_returns`, and the others.

    Raises:
        The errors of `ray.wait`, and RuntimeError where it would block in a callback of this library.
    """
    try:
        # Checks the arguments, and is the answer already where enough is ready.
        ready, waiting = ray.wait(ray_waitables, num_returns=num_returns, timeout=0, fetch_local=fetch_local)
    except TypeError:
        _refuse_calls(ray_waitables)
        raise
    ours = (ObjectRef, ObjectRefGenerator)
    if len(ready) >= num_returns or not any(isinstance(one, ours) for one in ray_waitables):
        if len(ready) >= num_returns or timeout == 0:
            return ready, waiting
        return ray.wait(ray_waitables, num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)
    gathering = _Gathering([_arrival(one) for one in ray_waitables], fetch=False)
    gathering.block(num_returns, timeout, stop_at_error=False)
    # Copied at one stroke: what is arriving just now still adds to it.
    done = {ray_waitables[index] for index in list(gathering.values)}
    done.update(ray.wait(ray_waitables, num_returns=len(ray_waitables), timeout=0, fetch_local=fetch_local)[0])
    ready = [one for one in ray_waitables if one in done][:num_returns]
    chosen = set(ready)
    return ready, [one for one in ray_waitables if one not in chosen]


def has_lost(actor: _core.Actor) -> bool:
    """True when somebody waits for a call that was lost."""
    losses = actor.losses()
    return any(party.mark < losses for party in list(actor.parties))


def fail_lost(actor: _core.Actor) -> None:
    """Ends every wait for a call that was lost, unless its outcome has arrived after all. On the watcher's thread."""
    losses = actor.losses()
    lost = [party for party in list(actor.parties) if party.mark < losses]
    if not lost:
        return
    refs = list(dict.fromkeys(party.ref for party in lost))
    # What Ray has already it is about to deliver.
    arrived = _ray_compat.arrived(actor.session, refs)
    if arrived is None:
        return
    for party in lost:
        if party.ref in arrived:
            continue
        # Set before `pop`: whoever finds the party taken has to know why.
        party.lost = True
        if actor.parties.pop(party, party) is not party:
            actor.failed_early += 1
            party.deliver(errors.loss(actor))


def is_bound() -> bool:
    """True where refs fail early; False on a Ray whose refs cannot be made anew."""
    return _ray_compat.can_make_refs()


def end_all() -> None:
    """Ends every wait of a connection that has ended: Ray calls no callback any more."""
    while _hubs:
        try:
            hub = _hubs.popitem()[1]
        except KeyError:
            break
        hub.is_over = True
        for party in hub.take_parties():
            fenced("ending a wait", _end_unheard, party)
    while _told_ready:
        try:
            party = _told_ready.popitem()[0]
        except KeyError:
            return
        fenced("ending a wait", _end_unheard, party)


def _end_unheard(party: Party) -> None:
    actor = party.actor
    if actor is None or actor.parties.pop(party, party) is not party:
        actor_id = None if actor is None else actor.key.hex()
        party.deliver(errors.ActorUnavailableError("The connection to Ray ended.", actor_id=actor_id))
