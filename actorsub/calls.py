"""Requests: `handle.method.call(...)` and the `Call` that it returns.

A call passes the actor's submit queue (csrc/submit_queue.h), which decides whether it goes to Ray now, waits in line
or is refused, and which keeps the ledger of those in flight. Every Call ends exactly once: whoever takes it out of
`CallQueue.calls` ends it.

Threads: `submit` runs on the caller's thread and gives the call to Ray there when it may go at once. Calls that waited
are given to Ray by the sender, one background thread, in the order in which they were made. Outcomes arrive on a thread
of Ray's; deadlines, refusals and losses on the watcher's.
"""

from __future__ import annotations

import asyncio
import collections.abc
import concurrent.futures
import contextlib
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import ray

from actorsub import _core, _ray_compat, errors, frozen, refs, submit, watcher
from actorsub.errors import QueueFullError
from actorsub.fence import Wakeup, as_exception, fenced, is_interrupt, log_failure

logger = logging.getLogger("actorsub")

#: How many calls the sender takes out of the line at one time.
SENDER_BATCH = 64

SEND = _core.VERDICTS["send"]
WAIT = _core.VERDICTS["wait"]
FULL = _core.VERDICTS["full"]
_DEAD = _core.VERDICTS["dead"]
EXPIRED = _core.VERDICTS["expired"]
_CLOSED = _core.VERDICTS["closed"]

_CONNECTION_ENDED = "The connection to Ray that the handle belongs to has ended."

# `ends_calls` is over 0 while a thread runs the callbacks of a Call that it has just ended. The outcomes of all other
# calls may depend on that thread, so it must not wait for one.
_thread = threading.local()


class Plan:
    """What `.call()` needs to know about one method object: its queue, its rules, and how it is given to Ray."""

    __slots__ = (
        "actor",
        "away",
        "cancels",
        "method",
        "on_pending",
        "policy",
        "queue",
        "remote_call",
        "submission",
        "timeout_ns",
        "window",
    )

    def __init__(self, method: Any) -> None:
        policy = method._actorsub_policy
        self.actor: _core.Actor = method._actorsub_actor
        # It holds Ray's own handle. So the actor lives while calls to it wait or run, whatever becomes of the wrapper.
        self.method = method._actorsub_inner
        self.policy = policy
        self.on_pending = _core.PENDING_RULES[policy.on_pending]
        # Calls are sent with Ray's retries off, so "auto" is "ref" here.
        self.away = _core.AWAY_RULES["ref" if policy.on_unavailable == "auto" else policy.on_unavailable]
        self.window = policy.max_in_flight or 0
        # Ray is asked to cancel calls that were sent only where that cannot harm the actor, see `_cancel_sent`.
        self.cancels = _ray_compat.runs_in_any_order(method._actorsub_handle)
        self.timeout_ns = None if policy.timeout_s is None else int(policy.timeout_s * 1e9)
        shared = method._actorsub_shared
        if not shared:
            shared.append(_way_of(method))
        self.queue: _core.CallQueue
        self.queue, self.submission, self.remote_call = shared[0]


def _way_of(method: Any) -> tuple[_core.CallQueue, _core.Submission | None, Callable[..., Any]]:
    """Which queue calls go through, and how they are given to Ray: by Submission, or where there is none by a
    function."""
    actor, inner, options = method._actorsub_actor, method._actorsub_inner, method._actorsub_options or {}
    group = options.get("concurrency_group") or actor.method_groups.get(method._actorsub_name, "")
    queue = actor.queues.get(group)
    if queue is None:
        queue = actor.queues.setdefault(group, _core.CallQueue(actor))
    parts = _ray_compat.submission_of(inner, options, retries=False)
    if _ray_compat.resends(inner, None):
        _warn_of_retries(actor)
    return queue, None if parts is None else _core.Submission(*parts), _ray_compat.call_without_retries(inner, options)


_warned: set[bytes] = set()


def _warn_of_retries(actor: _core.Actor) -> None:
    if actor.key not in _warned:
        _warned.add(actor.key)
        logger.warning(
            "actor %s was created with max_task_retries; .call() sends with Ray's retries off, because a retry is "
            "decided here, where it is known what may have run. Calls by .remote() are retried as before",
            actor.key.hex(),
        )


class Condition(type(threading.RLock())):  # type: ignore[misc]
    """What a Future needs of a threading.Condition, at a tenth of its size: nobody waits on it, see `Call._block`.

    Made only for calls that `concurrent.futures.wait` or `as_completed` look at, which hold it for a moment.
    """

    __slots__ = ()

    def notify_all(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        return False


class Call(_core.CallBase, concurrent.futures.Future):  # type: ignore[type-arg, override]
    """One request to an actor: a future for its result. `handle.method.call(...)` makes it.

        >>> call = worker.infer.options(timeout_s=0.5).call(x)
        >>> call.result()  # or: await call

    It is a `concurrent.futures.Future`, so `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take it.
    It is also awaitable, on any event loop and on several. Methods not documented here are those of the Future.

    It ends in exactly one of these ways: with the method's result; with the method's own exception (a RayTaskError that
    is of its class, too); with ActorUnavailableError or ActorDiedError; with DeadlineExceededError; with another error
    of Ray's; or cancelled. A call of a ReplicaGroup may also end with NoReplicaError. Dropping the Call does not stop
    it.
    """

    def __init__(self) -> None:
        raise TypeError("calls are made by methods of handles: handle.method.call(...)")

    # -- For users.

    @property
    def object_ref(self) -> Any:
        """Ray's ObjectRef of the call; None until the call was sent. With num_returns over 1 a list of them.

        It is Ray's own: `ray.cancel` on it ends the Call as Ray would. It can be passed on like any other ref.
        """
        sent = self._actorsub_refs
        if not sent:
            return None
        return sent[0] if len(sent) == 1 else list(sent)

    @property
    def attempts(self) -> tuple[errors.Attempt, ...]:
        """What a call of a ReplicaGroup has tried without success so far, in order; empty for other calls."""
        return ()

    def running(self) -> bool:
        """True from when the call was sent until it is done."""
        return self._actorsub_refs is not None and not self.done()

    def done(self) -> bool:
        return self._checked_state() in _DONE

    def cancelled(self) -> bool:
        return self._checked_state() in _CANCELLED

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls `fn(call)` once when the call is done: on the thread that ends it, or at once if it is done already.

        An exception of `fn` goes to the caller in the second case, and is logged in the first.
        """
        self._checked_state()
        self._done_callbacks.append(fn)
        # The call may be done by now. Then the thread that takes `fn` out of the list calls it.
        if self.done() and fn in self._done_callbacks:
            try:
                self._done_callbacks.remove(fn)
            except ValueError:
                return
            fn(self)

    def cancel(self) -> bool:
        """Takes the call back.

        True: it had not been sent, and never will be. False: it is done already, or was given to Ray. If Ray has it and
        the actor runs its calls in any order (async or threaded), Ray is asked to cancel it, by the rules of
        `ray.cancel`. On any other actor the call runs on, since asking Ray might make the actor unavailable: see
        docs/design.md, "Requests".
        """
        plan: Plan | None = self._actorsub_plan
        if plan is None or self.done():
            return self.cancelled()
        self._refuse_in_child()
        taken_back, release = plan.queue.cancel(self._actorsub_ticket)
        if release:
            call_sender_in_passing(plan.queue)
        if taken_back is None:
            return self.cancelled()
        if not taken_back:
            _cancel_sent(self)
            return False
        _let_go(self)
        self._cancel_future()
        _forget(self)
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result of the method and returns it.

        Args:
            timeout: how long to wait, in seconds; None: until the call is done. The call itself goes on after that.

        Raises:
            The error that the call ended with. concurrent.futures.TimeoutError: the time is over. CancelledError: the
            call was taken back. RuntimeError: this thread must not wait, because it runs an event loop, or a callback
            of this library that other outcomes depend on.
        """
        self._block(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as `result` does and returns the error that the call ended with, or None.

        Raises only what is about the wait: TimeoutError, CancelledError or RuntimeError, as `result` does.
        """
        self._block(timeout)
        return super().exception(0)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            self._refuse_in_child()
            loop = asyncio.get_running_loop()
            future = loop.create_future()

            def done(_: Any) -> None:
                try:
                    loop.call_soon_threadsafe(_copy, self, future)
                except RuntimeError:
                    # The loop was closed meanwhile, and with it everybody who could have asked.
                    if not loop.is_closed():
                        raise

            self.add_done_callback(done)
            future.add_done_callback(self._cancel_with)
            yield from future.__await__()
        if self.cancelled():
            # As with asyncio's own futures; that of concurrent.futures is another class.
            raise asyncio.CancelledError
        return super().result(0)

    def __repr__(self) -> str:
        plan: Plan | None = self._actorsub_plan
        stage = "done" if self.done() else "waiting" if self._actorsub_refs is None else "sent"
        return f"<Call {'' if plan is None else f'{plan.method._method_name} of {plan.actor.key.hex()}, '}{stage}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Call stays in its process; pass on its result, or its object_ref once it was sent")

    # -- Inside.

    def _cancel_with(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and not self.done():
            self.cancel()

    def _cancel_future(self) -> None:
        self._end_with(_CANCELLED_AND_NOTIFIED)

    # The methods that make a Call a coroutine for asyncio's tasks. `asyncio.wait_for(call, ...)`, `gather` and
    # `ensure_future` make a task of an awaitable. If that task is cancelled before its first step, it never begins to
    # await; into a coroutine it throws the cancellation even then.

    def send(self, value: Any) -> Any:
        return self._step(lambda steps: steps.send(value))

    def throw(self, *error: Any) -> Any:
        task = asyncio.current_task()
        if task not in self.__dict__.get("_steps", ()):
            # Before its first step.
            raised = error[0]() if isinstance(error[0], type) else error[0]
            if isinstance(raised, asyncio.CancelledError) and not self.done():
                self.cancel()
            raise raised
        return self._step(lambda steps: steps.throw(*error))

    def close(self) -> None:
        """No task of asyncio waits for it any more. The call itself goes on."""
        self.__dict__.pop("_steps", None)

    def _step(self, resume: Callable[[Generator[Any, Any, Any]], Any]) -> Any:
        task = asyncio.current_task()
        of_task = self.__dict__.setdefault("_steps", {})
        steps = of_task.get(task)
        if steps is None:
            steps = of_task[task] = self.__await__()
        try:
            return resume(steps)
        except BaseException:
            # These steps are over, by StopIteration or by an error.
            of_task.pop(task, None)
            raise

    def _refuse_in_child(self) -> None:
        plan: Plan | None = self._actorsub_plan
        if plan is not None and plan.actor.is_inherited:
            raise RuntimeError(submit.PARENT)

    def _block(self, timeout: float | None) -> None:
        if self.done():
            return
        self._refuse_in_child()
        if timeout is not None and timeout <= 0:
            return
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("waiting here would stop the event loop of this thread; use `await call`")
        if watcher.is_own_thread() or getattr(_thread, "ends_calls", None):
            raise RuntimeError(
                "waiting here would never end: this is a callback, on a thread that delivers outcomes. Wait on another "
                "thread, or use add_done_callback"
            )
        wakeup = Wakeup()

        def done(_: Any) -> None:
            wakeup.set()

        self.add_done_callback(done)
        try:
            if _ray_compat.holds_up_outcomes():
                refs.block_by_looking(wakeup, lambda: list(self._actorsub_refs or ()), timeout, self._take_here)
            elif self._actorsub_refs and _ray_compat.is_task_thread():
                refs.block_in_task(wakeup, lambda: list(self._actorsub_refs), timeout)
            else:
                wakeup.wait(timeout)
        finally:
            if not wakeup.is_set():
                with contextlib.suppress(ValueError):
                    self._done_callbacks.remove(done)

    # concurrent.futures.Future does this under its lock. Here Ray's thread often ends a call, and all outcomes depend
    # on that thread. So it must not wait for a lock whose holder a signal handler may have interrupted.

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end_with(_FINISHED)

    def set_exception(self, exception: BaseException | None) -> None:
        self._exception = exception
        self._end_with(_FINISHED)

    def _end_with(self, state: str) -> None:
        self._state = state
        # Asked after the state is set: a thread that makes the lock later finds the call done.
        if self._lock_if_made() is not None:
            fenced("telling who waits for several calls", self._tell_waiters)
        self._invoke_callbacks()

    def _tell_waiters(self) -> None:
        """Tells concurrent.futures.wait and as_completed, which have entered `_waiters` under the lock."""
        lock = self._condition
        if not lock.acquire(blocking=False):
            threading.Thread(target=self._tell_waiters_patiently, name="actorsub-waiters", daemon=True).start()
            return
        try:
            for waiter in self._waiters:
                if self._state in _CANCELLED:
                    waiter.add_cancelled(self)
                elif self._exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
        finally:
            lock.release()

    def _tell_waiters_patiently(self) -> None:
        # Waits until the thread that looks at several calls has entered itself at all of them.
        with self._condition:
            self._tell_waiters()

    def _invoke_callbacks(self) -> None:
        while self._done_callbacks:
            try:
                callback = self._done_callbacks.pop(0)
            except IndexError:
                return
            fenced("a callback of a Call", callback, self)

    def _take_here(self) -> None:
        """Takes the outcome from Ray on this thread, since Ray's callbacks wait for this thread."""
        sent = list(self._actorsub_refs or ())
        if len(sent) == 1:
            self._arrived(refs.outcome_of(sent[0]))
        else:
            for index, ref in enumerate(sent):
                self._arrived_one_of(index, refs.outcome_of(ref))

    def _arrived(self, value: Any) -> None:
        """Ray has the outcome of a call with one result. On a thread of Ray's."""
        self._take_outcome(value, _ray_compat.is_failure(self._actorsub_refs[0], value))

    def _take_outcome(self, value: Any, failed: bool) -> None:
        plan: Plan | None = self._actorsub_plan
        if plan is None:
            # Another thread has taken it, see `_take_here`.
            return
        queue = plan.queue
        call, release = queue.complete(self._actorsub_ticket)
        if release:
            call_sender_in_passing(queue)
        if call is None:
            queue.late += 1
            if failed:
                watcher.learn(plan.actor, value, self._actorsub_mark)
        elif failed:
            watcher.certify(plan.actor, value, self._actorsub_mark, self._fail_with)
            return
        else:
            end(self, value)
        if self.done():
            # Otherwise another thread is about to end it, and still needs the plan and the arguments.
            _forget(self)

    def _fail_with(self, error: Any) -> None:
        end(self, error, failed=True)
        _forget(self)

    def _leave_line(self, queue: _core.CallQueue, ticket: int) -> None:
        """Its turn has come. On the sender's thread, between BeginSend and EndSend."""
        _send_waiting(queue, ticket, self)

    def _end_as(self, why: str, sent: bool) -> None:
        """Ends it as its queue says: `why` is one of submit_queue.h's End."""
        actor = self._actorsub_plan.actor
        error: Any
        if why == "deadline":
            error = errors.deadline(actor, sent=sent)
        elif why == "lost":
            error = errors.loss(actor)
        elif why == "closed":
            error = errors.refusal(actor, "The connection to Ray ended.")
            errors.resign(error, sent=sent)
        else:
            error = _refused(actor, is_dead=why == "dead")
        end(self, error, failed=True)
        if not sent:
            # After its end, so that a group can give the arguments to another member.
            _forget(self)

    def _arrived_one_of(self, index: int, value: Any) -> None:
        values = self._actorsub_left
        values[index] = value
        failed = _ray_compat.is_failure(self._actorsub_refs[index], value)
        # The last outcome, or one that failed, ends the call. Only the first of them finds _OPEN.
        if (failed or len(values) > len(self._actorsub_refs)) and values.pop(_OPEN, None) is not None:
            outcome = value if failed else [values[i] for i in range(len(self._actorsub_refs))]
            self._take_outcome(outcome, failed)


# In `_actorsub_left` beside the outcomes, until the call has its end.
_OPEN = "open"

_FINISHED = concurrent.futures._base.FINISHED
_CANCELLED_AND_NOTIFIED = concurrent.futures._base.CANCELLED_AND_NOTIFIED
_CANCELLED = (concurrent.futures._base.CANCELLED, _CANCELLED_AND_NOTIFIED)
_DONE = (_FINISHED, *_CANCELLED)

collections.abc.Coroutine.register(Call)


def new_call(cls: type[Call], plan: Any, args: Any, kwargs: Any) -> Any:
    call = cls.__new__(cls)
    # As in Future.__init__, without the lock.
    call._state = "PENDING"
    call._waiters = []
    call._done_callbacks = []
    call._actorsub_plan = plan
    call._actorsub_args = args
    call._actorsub_kwargs = kwargs
    return call


def plan_of(method: Any) -> Plan:
    plan: Plan | None = method._actorsub_plan
    if plan is None:
        plan = method._actorsub_plan = Plan(method)
    return plan


def submit_call(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The whole of `method.call(*args, **kwargs)`."""
    actor = method._actorsub_actor
    if actor is None:
        raise RuntimeError("this method object was not made by a handle")
    if actor.is_inherited:
        raise RuntimeError(submit.PARENT)
    plan = plan_of(method)
    deadline_ns = _core.NEVER_NS if plan.timeout_ns is None else _core.now_ns() + plan.timeout_ns
    call: Call = new_call(Call, plan, args, kwargs)
    error = admit(call, deadline_ns)
    if error is not None:
        if plan.policy.on_unavailable == "raise" or isinstance(error, QueueFullError):
            raise error
        end(call, error, failed=True)
    return call


def admit(call: Call, deadline_ns: int, later: list[Callable[[], None]] | None = None) -> Any:
    """Has the queue decide about a new call. Returns None if it was sent or waits, else the error that refuses it.

    Some work has to wait until no lock is held. It is added to `later`, or done here where `later` is None.

    Raises what Ray raises for arguments that do not fit, or cannot be pickled; then nothing is left behind.
    """
    plan: Plan = call._actorsub_plan
    actor, policy, queue = plan.actor, plan.policy, plan.queue
    if watcher.is_exiting():
        return errors.refusal(actor, "The interpreter ends.")
    running = watcher.ensure()
    if actor.unhurried:
        watcher.hurry(actor)
    up = actor.takes_calls()
    if not up and actor.session is not _ray_compat.session_token():
        # Ray's own `.remote()` would start a new local cluster here, which nobody who makes a request asks for.
        return errors.refusal(actor, _CONNECTION_ENDED)
    if not up and (actor.is_subscribed or not queue.has_waiting()):
        # Ray's word, or on first use the actor table, before the slot is asked. While calls wait the watcher reads it.
        submit.look(actor)
    call._actorsub_unready = True
    try:
        verdict, release = queue.admit(call, deadline_ns, plan.window, policy.max_queued, plan.away, plan.on_pending)
        if queue.unset_timer_ns != _core.NEVER_NS:
            # No timer could be set: the watcher has to look at the clock.
            running.nudge()
        if verdict == SEND:
            after = _give(call)
        elif verdict == WAIT:
            make_ready(call, queue, release)
            after = None
    except BaseException:
        _withdraw(call, queue)
        raise
    if verdict in (SEND, WAIT):
        if not up:
            # It looks more often at an actor that somebody waits for.
            running.nudge()
        if after is not None and later is not None:
            later.append(after)
        elif after is not None:
            after()
        return None
    if verdict == _CLOSED:
        return errors.refusal(actor, _CONNECTION_ENDED)
    _check_arguments(call)
    _let_go(call)
    if verdict == FULL:
        return errors.queue_full(actor, f"As many calls wait for it as may (max_queued={policy.max_queued}).")
    if verdict == EXPIRED:
        return errors.deadline(actor, sent=False)
    return _refused(actor, is_dead=verdict == _DEAD)


def _withdraw(call: Call, queue: _core.CallQueue) -> None:
    """Removes a call whose making was interrupted after it was admitted: by Ctrl-C, or by what the arguments or Ray
    raised. Nobody will get the Call, so it must leave nothing behind."""
    if not call._actorsub_ticket:
        return
    if call._actorsub_begun:
        # Also where Ray has it: there is no end to wait for any more.
        queue.abort(call._actorsub_ticket)
    else:
        queue.withdrawn += bool(queue.cancel(call._actorsub_ticket)[0])
    call._actorsub_unready = False
    queue.is_stalled = False
    # What the queue said about `release` may be lost. Calling the sender once too often does no harm.
    call_sender(queue)


def _refused(actor: _core.Actor, *, is_dead: bool) -> Any:
    """The error of a call that the actor's state refuses, counted."""
    error: Any = errors.death(actor) if is_dead else errors.refusal(actor)
    actor.count_refused(error.state.value if error.state.value in _core.REFUSAL_NAMES else "restarting")
    return error


def make_ready(call: Call, queue: _core.CallQueue, release: bool) -> None:
    """Copies the arguments of a call that waits, as they are now. The sender leaves the call alone until that is done.

    `release`: what admit() said. Raises if the arguments do not fit, or cannot be pickled.
    """
    _check_arguments(call)
    frozen.freeze(call)
    call._actorsub_unready = False
    if release or queue.is_stalled:
        queue.is_stalled = False
        call_sender(queue)
    if call.done():
        # Its deadline was sooner.
        _let_go(call)


def _check_arguments(call: Call) -> None:
    """Raises for wrong arguments. They are the caller's mistake whatever the actor does, as Ray reports at submit."""
    if not isinstance(call._actorsub_args, frozen.Frozen):
        _ray_compat.check_arguments(call._actorsub_plan.method, call._actorsub_args, call._actorsub_kwargs)


def _let_go(call: Call) -> None:
    call._actorsub_args = call._actorsub_kwargs = None


def _forget(call: Call) -> None:
    """Nothing more can happen to the call. It keeps its outcome, but neither the actor nor the arguments."""
    _let_go(call)
    call._actorsub_plan = None


def _give(call: Call) -> Callable[[], None] | None:
    """Gives a call to Ray, on this thread, and has its outcome delivered.

    Returns what is left to do once no lock is held: if the call has its outcome already, a function that ends it.
    """
    plan: Plan = call._actorsub_plan
    args, kwargs = frozen.thawed(call)
    not_taken: TypeError | None = None
    try:
        given = _core.give(plan.submission, plan.remote_call, plan.actor, args, kwargs)
    except ray.exceptions.PendingCallsLimitExceeded as error:
        # The actor's own `max_pending_calls`. To the caller it is the same, and such a call was not sent either.
        raise errors.queue_full(plan.actor, None, error) from None
    except TypeError as error:
        not_taken = error
    if not_taken is not None:
        # Ray's message about an argument that cannot be pickled shows its contents.
        _check_arguments(call)
        frozen.refuse_unpicklable(args, kwargs)
        raise not_taken
    _let_go(call)
    plan.actor.used = True
    if isinstance(given, ray.ObjectRef):
        call._actorsub_refs = [given]
        _ray_compat.on_completed(given, call._arrived)
    elif isinstance(given, list):
        call._actorsub_refs = given
        call._actorsub_left = {_OPEN: True}
        for index, ref in enumerate(given):
            _ray_compat.on_completed(ref, functools.partial(call._arrived_one_of, index))
    elif isinstance(given, ray.ObjectRefGenerator):
        call._actorsub_refs = []
        return functools.partial(_hand_out_stream, call, given)
    else:
        # num_returns=0: Ray says nothing more about it.
        call._actorsub_refs = []
        return functools.partial(call._take_outcome, None, False)
    return None


def _hand_out_stream(call: Call, stream: Any) -> None:
    """The result of a streaming call is the stream, as soon as it was sent; it keeps its place until its task ends."""
    plan: Plan = call._actorsub_plan
    queue, ticket = plan.queue, call._actorsub_ticket

    def over(_: Any) -> None:
        # It does not count as late, whatever happened meanwhile: the stream was the outcome.
        _, release = queue.complete(ticket)
        if release:
            call_sender_in_passing(queue)

    # Taken out first. From here on the queue keeps only its place in the window.
    taken = queue.calls.pop(ticket, None)
    _ray_compat.on_completed(stream.completed(), over)
    if refs.is_bound():
        stream = refs.early_result(plan.actor, call._actorsub_mark, stream)
    if taken is not None:
        end(call, stream)


def end(call: Call, value: Any, *, failed: bool = False) -> None:
    """Ends a call that was taken out of its queue, with a value, or with an error where it has `failed`."""
    if failed:
        name = type(value).__name__ if not isinstance(value, ray.exceptions.RayTaskError) else "RayTaskError"
        failures = call._actorsub_plan.actor.call_failures
        failures[name] = failures.get(name, 0) + 1
    deliver(call, value, failed=failed)


def deliver(call: Call, value: Any, *, failed: bool = False) -> None:
    """Sets the outcome and runs the callbacks."""
    _thread.ends_calls = getattr(_thread, "ends_calls", 0) + 1
    try:
        if failed:
            refs.fail_future(call, value)
        elif not call.done():
            call.set_result(value)
    except Exception:
        # All other outcomes depend on this thread.
        log_failure("ending a Call")
    finally:
        _thread.ends_calls -= 1


def _copy(call: Call, future: asyncio.Future[Any]) -> None:
    """Wakes one `await`, on its loop's thread. The await reads the outcome from the call."""
    if not future.done():
        future.set_result(None)


def _cancel_sent(call: Call) -> None:
    """Asks Ray to cancel a call that was given to it, if that cannot harm the actor. Does not wait for an answer.

    An actor that runs its calls in order waits for each number in the sequence of a caller's calls. If Ray has not sent
    a call yet, it cancels the call by forgetting it, and the number never comes. The actor, healthy and idle, then
    takes no call of this caller for as long as calls keep coming. This process cannot know whether a call has left: its
    arguments may not be ready, or it waits for its turn to be written. And a call that has arrived at such an actor
    runs, or is behind one that runs, and Ray cannot interrupt it. So calls to such an actor are not cancelled; their
    outcome is dropped.
    """
    plan: Plan | None = call._actorsub_plan
    sent = list(call._actorsub_refs or ())
    if plan is None or not plan.cancels or not sent or watcher.is_exiting():
        return
    running = watcher.ensure_if_possible()
    if running is not None:
        # On the sender's thread, because Ray's core must not be shut down meanwhile, and only our own threads take the
        # lock that prevents it.
        running.send(_ask_to_cancel, plan.actor.session, sent)


def _ask_to_cancel(session: Any, sent: list[ray.ObjectRef]) -> None:
    for ref in sent:
        with _ray_compat.core_in_use(session) as usable:
            if usable:
                try:
                    ray.cancel(ref)
                except BaseException:
                    # The call runs on, and its outcome is dropped.
                    logger.debug("Ray could not cancel a call", exc_info=True)


# ---------------------------------------------------------------------------------------------------------------------
# The sender.


def call_sender(queue: _core.CallQueue) -> None:
    """Has the sender look at a queue whose head may leave now."""
    if not queue.is_due and not watcher.is_exiting():
        try:
            queue.is_due = True
            while not watcher.ensure().send(_take_turn, queue):
                pass
        except BaseException:
            # Otherwise the sender would never be asked again.
            queue.is_due = False
            raise


#: Until the sender is tried again where its thread could not be started.
SENDER_RETRY_NS = 1_000_000_000


def call_sender_in_passing(queue: _core.CallQueue) -> None:
    """The same for a caller that ends a call and has only made room for others. The end comes first, so nothing is
    raised. If the sender cannot be started, that is tried again later."""
    try:
        call_sender(queue)
    except BaseException as error:
        if is_interrupt(error):
            raise
        log_failure("starting the thread that sends what waits in line")
        if _core.sentinel_runs():
            _core.call_later(SENDER_RETRY_NS, functools.partial(call_sender_in_passing, queue))


# Held by the sender during a turn. `shutdown()` waits for the old sender only for a while, so a new one may have begun.
_turn = threading.Lock()


def _take_turn(queue: _core.CallQueue) -> None:
    """Gives to Ray what may leave the line now. On the sender's thread, see submit_queue.h."""
    with _turn:
        _take_turn_alone(queue)


def _take_turn_alone(queue: _core.CallQueue) -> None:
    queue.is_due = False
    while True:
        tickets, ended = queue.release(SENDER_BATCH)
        end_all(ended)
        if not tickets:
            return
        for ticket in tickets:
            call = queue.begin_send(ticket)
            if call is False and queue.is_stalled:
                return
            if call is False:
                # The actor went away. The calls that were taken out are in the line again.
                break
            if call is not None:
                call._leave_line(queue, ticket)


def _send_waiting(queue: _core.CallQueue, ticket: int, call: Call) -> None:
    actor = call._actorsub_plan.actor
    try:
        # Keeps `ray.shutdown()` out meanwhile: Ray's core would end the process.
        with _ray_compat.core_in_use(actor.session) as usable:
            if not usable:
                raise errors.refusal(actor, "The connection to Ray ended while the call waited.")
            after = _give(call)
        actor.count_waited()
    except BaseException as error:
        # Raised by the arguments' own functions, say. It is the failure of this call, not of the thread.
        taken, _ = queue.abort(ticket)
        if taken is not None:
            end(call, as_exception("unpickling the arguments", error), failed=True)
            _forget(call)
    else:
        queue.end_send(ticket)
        if after is not None:
            after()


def end_all(ended: list[tuple[Call, str, bool]]) -> None:
    for call, why, sent in ended:
        call._end_as(why, sent)
    for call, why, sent in ended:
        if sent and why == "deadline":
            # After all calls have their end.
            _cancel_sent(call)


# ---------------------------------------------------------------------------------------------------------------------
# The watcher's part.


def expire(number: int) -> None:
    """A timer fired."""
    function = _core.take_later(number)
    if function is not None:
        function()
        return
    queue = _core.queue_of_timer(number)
    if queue is not None:
        _expire(queue)


def _expire(queue: _core.CallQueue) -> None:
    ended, release = queue.expire()
    if release:
        call_sender_in_passing(queue)
    end_all(ended)


def review(actor: _core.Actor) -> None:
    """The actor's state has changed, or may have."""
    for queue in list(actor.queues.values()):
        review_queue(queue)


def review_queue(queue: _core.CallQueue) -> None:
    ended, release = queue.review()
    if release:
        call_sender_in_passing(queue)
    end_all(ended)


def look_at_clock(actor: _core.Actor | None) -> float:
    """Expires the calls of queues whose timer could not be set. Returns when to look again, on the clock of now_s().

    `actor`: whose queues; None: those that belong to no actor.
    """
    next_ns: int = _core.NEVER_NS
    for queue in _live_lines() if actor is None else list(actor.queues.values()):
        if queue.unset_timer_ns <= _core.now_ns():
            _expire(queue)
        next_ns = min(next_ns, queue.unset_timer_ns)
    return math.inf if next_ns == _core.NEVER_NS else next_ns / 1e9


def has_waiting(actor: _core.Actor) -> bool:
    return any(queue.has_waiting() for queue in list(actor.queues.values()))


def has_in_flight() -> bool:
    return any(queue.calls for actor in _core.live_actors() for queue in list(actor.queues.values()))


def has_lost(actor: _core.Actor) -> bool:
    return any(queue.has_lost() for queue in list(actor.queues.values()))


def fail_lost(actor: _core.Actor) -> None:
    """Ends the calls that were at an incarnation that is gone, unless their outcome has arrived after all."""
    losses = actor.losses()
    for queue in list(actor.queues.values()):
        if not queue.has_lost():
            continue
        calls = [call for call in list(queue.calls.values()) if call._actorsub_refs and call._actorsub_mark < losses]
        arrived = _ray_compat.arrived(actor.session, [ref for call in calls for ref in call._actorsub_refs])
        if arrived is None:
            return
        keep = {call for call in calls if all(ref in arrived for ref in call._actorsub_refs)}
        ended, release = queue.fail_lost(keep)
        if release:
            call_sender_in_passing(queue)
        end_all(ended)


# By number: the queues that belong to no actor, which are the lines of groups. Weak.
_lines: dict[int, weakref.ref[_core.CallQueue]] = {}


def add_line(queue: _core.CallQueue) -> None:
    """Keeps the deadlines of a queue that belongs to no actor, for as long as the queue lives."""
    number = queue.number
    _lines[number] = weakref.ref(queue, lambda _: _lines.pop(number, None))


def _live_lines() -> list[_core.CallQueue]:
    return [queue for queue in [reference() for reference in list(_lines.values())] if queue is not None]


def arm() -> None:
    """Sets the queues' timers anew: the sentinel was started. The watcher finds in its first look what else is due."""
    for actor in _core.live_actors():
        for queue in list(actor.queues.values()):
            queue.arm()
    for queue in _live_lines():
        queue.arm()


def takes_back() -> bool:
    """True while `shutdown()` ends calls on this thread. Nothing may be begun then that needs the threads again."""
    return getattr(_thread, "takes_back", False)


@contextlib.contextmanager
def taking_back() -> Iterator[None]:
    """`takes_back` is true on this thread while the block runs."""
    _thread.takes_back = True
    try:
        yield
    finally:
        _thread.takes_back = False


def take_back_waiting() -> None:
    """Ends the calls that wait: `shutdown()` has stopped the threads that would release, refuse or expire them."""
    for actor in _core.live_actors():
        for queue in list(actor.queues.values()):
            for ticket, call in list(queue.calls.items()):
                taken_back, release = queue.cancel(ticket)
                if release:
                    # Another thread made a call meanwhile.
                    call_sender_in_passing(queue)
                if taken_back:
                    queue.withdrawn += 1
                    error = errors.refusal(actor, "actorsub.shutdown() was called while the call waited.")
                    end(call, error, failed=True)


def close_all() -> None:
    """Ends all calls: the connection to Ray has ended, and Ray calls no callback any more."""
    for actor in _core.live_actors():
        if actor.session is not _ray_compat.session_token():
            for queue in list(actor.queues.values()):
                end_all(queue.close())


def counters(actor: _core.Actor) -> dict[str, Any]:
    """What became of the calls, over all queues of the actor."""
    names = {
        "waiting": "waiting",
        "in_flight": "in_flight",
        "sent": "sent",
        "completed": "completed",
        "expired_here": "expired_here",
        "expired_there": "expired_there",
        "cancelled": "cancelled_here",
        "late_replies": "late",
        "lost": "lost",
        "refused_full": "refused_full",
    }
    total = dict.fromkeys(names, 0)
    for queue in list(actor.queues.values()):
        counted = queue.counters()
        for name, core_name in names.items():
            total[name] += counted[core_name]
    return {**total, "failed": dict(actor.call_failures)}
