"""The three Python threads behind the handles. All are daemons; lifecycle.py says when they are stopped.

The *watcher* acts on evidence. It blocks in the core, without the GIL, until the sentinel has evidence or a thread
nudges it. While every actor is up and watched by the sentinel it sleeps. It looks every `BUSY_TICK_S` while an actor is
on its way back, or refuses connections and the table does not say why yet. It looks every `IDLE_TICK_S` at actors that
the sentinel does not watch. It holds no strong reference to a handle: an `Actor` record lives as long as its handles,
and the watcher finds it through weak references.

The *background* thread reads Ray's actor table, because a read blocks for as long as the control store is down, and
local evidence must go on working meanwhile. A row that says ALIVE makes the sentinel watch its incarnation.

The *sender* gives to Ray the calls that waited in line; see calls.py. These two are started when they are first needed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from actorsub import _core, _ray_compat, actor_table, errors, listeners
from actorsub.background import Background
from actorsub.fence import Wakeup, fenced, log_failure
from actorsub.losses import LossWatch

logger = logging.getLogger("actorsub")

#: Between two looks at Ray's local states (0.2 us each) of actors that are up but not watched by the sentinel.
IDLE_TICK_S = 0.010
#: The same while an actor is on its way back: how late a recovery may be seen.
BUSY_TICK_S = 0.002
#: Ticks are stretched so that looking costs at most this share of one core, however many actors there are.
MAX_TICK_SHARE = 0.01
#: First and longest distance between two reads of the actor table for one actor that is not up.
MIN_READ_INTERVAL_S = 0.020
MAX_READ_INTERVAL_S = 1.0
#: How long the table is read again and again after a connection ended and the next dial was accepted. Another process
#: may have accepted it: Ray takes 15 s to find that a node is gone, and its table says ALIVE until then.
SUSPECT_S = 20.0
#: Between two reads for an actor that is up, that this process never called and that the sentinel does not watch. Ray
#: reports no state of such an actor by itself.
UNUSED_READ_INTERVAL_S = 1.0
#: A handle that came from another process is looked up after this, or when it is first used. Many are passed on, or
#: dropped, before that, and a look costs the control store a read, the actor a connection, and this process 0.4 ms.
RECEIVED_READ_S = 0.020
#: How long a caller waits for the first read of the table before the call goes to Ray unjudged.
FIRST_READ_LIMIT_S = 1.0


class Calls(Protocol):
    """What the watcher asks of `calls`."""

    def arm(self) -> None: ...
    def expire(self, number: int) -> None: ...
    def fail_lost(self, actor: _core.Actor) -> None: ...
    def has_in_flight(self) -> bool: ...
    def has_lost(self, actor: _core.Actor) -> bool: ...
    def has_waiting(self, actor: _core.Actor) -> bool: ...
    def look_at_clock(self, actor: _core.Actor | None) -> float: ...
    def review(self, actor: _core.Actor) -> None: ...


class Refs(Protocol):
    """What it asks of `refs`."""

    def fail_lost(self, actor: _core.Actor) -> None: ...
    def has_lost(self, actor: _core.Actor) -> bool: ...


class Supply(Protocol):
    """What it asks of `supply`."""

    def drop_if_over(self, actor: _core.Actor) -> object: ...


class _Above:
    """The modules that are built on this one and that it calls: see lifecycle.py."""

    calls: Calls
    refs: Refs
    supply: Supply


above = _Above()


def bind(calls: Calls, refs: Refs, supply: Supply) -> None:
    above.calls, above.refs, above.supply = calls, refs, supply


def _read(actor: _core.Actor) -> None:
    try:
        actor_table.read_table(actor)
    finally:
        actor.reading = False
        wake(actor)


def learn(actor: _core.Actor, error: Any, mark: int) -> None:
    """Takes in what Ray's own error for a call says about its actor, so that the whole process knows it from now on.

    `mark`: the actor's losses() when the call was sent. On any thread.
    """
    if errors.kind_of(error) is not errors.Kind.DIED or actor.session is not _ray_compat.session_token():
        return
    if getattr(error, "actor_id", None) not in (None, actor.key.hex()):
        # It is about another actor.
        return
    losses = actor.losses()
    incarnation = None if losses == mark else actor.lost_incarnation
    if losses > mark + 1 or (losses > mark and incarnation is None):
        # It is not known any more which incarnation had the call.
        return
    if getattr(error, "preempted", False):
        actor.preempted = actor.belief()[2] if incarnation is None else incarnation
        if actor.row is None or actor.row.may_restart:
            # Ray concludes the death from the loss of the connection, also if it is about to restart the actor.
            return
    if actor.death is None:
        actor_table.note_cause(actor, error)
    if actor.apply("call", "dead", incarnation) and not _exiting:
        wake(actor)
        nudge_if_possible()


def certify(actor: _core.Actor, error: Any, mark: int, then: Callable[[Any], None]) -> None:
    """Gives Ray's own error for a call to `then`, with its certificate. Does not block.

    If only the table can say whether the call may have run, it is read first, and `then` is called on the background
    thread. If that takes longer than FIRST_READ_LIMIT_S, since the control store may be away, `then` is called on the
    watcher's.
    """
    learn(actor, error, mark)
    running = ensure_if_possible() if is_read_first(actor, error) else None
    # The thread that takes it out calls it.
    waiting = [then]

    def end() -> None:
        if waiting:
            with contextlib.suppress(IndexError):
                waiting.pop()(errors.certified(error, actor, mark))

    with contextlib.suppress(RuntimeError):
        # If no thread can be started, the error says that the call may have run.
        if running is not None and running.in_background(_read_before, actor, error, end):
            _core.call_later(int(FIRST_READ_LIMIT_S * 1e9), end)
            return
    end()


def is_read_first(actor: _core.Actor, error: Any) -> bool:
    """True where the table is to be read before `error` is certified."""
    return not _exiting and actor_table.may_know_it_was_never_up(actor, error)


def _read_before(actor: _core.Actor, error: Any, end: Callable[[], None]) -> None:
    try:
        if is_read_first(actor, error):
            actor_table.read_table(actor)
    finally:
        end()


def wake(actor: _core.Actor) -> None:
    """Lets everyone who waits for a change of this actor look again."""
    for waiter in list(actor.waiters):
        waiter.set()


def take_news(actor: _core.Actor) -> None:
    """`state()` was told by Ray's local state before this thread looked. No lock: it may be asked anywhere."""
    actor.next_read_s = _core.now_s()
    actor.read_interval_s = MIN_READ_INTERVAL_S
    running = _watcher
    if running is not None:
        running._nudged = True
        _core.wake_watcher()


_NEVER = math.inf


class Watcher:
    """See the module. One per process; made and ended through `ensure` and `stop`."""

    def __init__(self) -> None:
        self._stopping = False
        self._last_look_cost_s = 0.0
        # When this thread looks again by itself; never while it looks, because what is new may have been passed over.
        self._next_look_s = _NEVER
        # Nudged since the last look began. The wake-up alone would not do: a look takes in events, and may swallow it.
        self._nudged = False
        # Used only where the sentinel could not be started, to block on.
        self._wakeup = Wakeup()
        error = _core.start_sentinel()
        if error:
            logger.warning(
                "actorsub cannot watch processes and connections (%s); it relies on Ray's own state", os.strerror(error)
            )
        self._background = Background("actorsub-table", self.nudge)
        self._sender = Background("actorsub-sender", bool)
        # The earlier timers ended with the sentinel that kept them.
        above.calls.arm()
        self._thread = threading.Thread(target=self._run, name="actorsub-watcher", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError where no thread can be started."""
        self._thread.start()

    def abandon(self) -> None:
        """Gives up this watcher before any other code has it. Its threads, if they were started, end by themselves."""
        self._stopping = True
        self._background.stop(0.0)
        self._sender.stop(0.0)
        if self._thread.ident is None:
            _core.stop_sentinel()
        else:
            # The sentinel runs on, for the next watcher.
            self.nudge()

    def nudge(self) -> None:
        """Looks at everything now."""
        self._nudged = True
        self._wakeup.set()
        _core.wake_watcher()

    def look_by(self, time_s: float) -> None:
        """Looks at everything at that time (`_core.now_s`) at the latest."""
        if self._next_look_s > time_s:
            self.nudge()

    def owns_current_thread(self) -> bool:
        own = threading.current_thread() is self._thread
        return own or self._sender.owns_current_thread() or self._background.owns_current_thread()

    def request_read(self, actor: _core.Actor) -> bool:
        """Asks for a read of the table. False: the watcher was stopped; or a read is under way already, which may show
        a state older than this request."""
        if actor.reading:
            return False
        actor.reading = True
        try:
            asked = self._background.run(_read, (actor,))
        except BaseException:
            actor.reading = False
            raise
        if not asked:
            # Only then: a read that was asked for may have ended already, and another may be under way.
            actor.reading = False
        return asked

    def in_background(self, function: Callable[..., None], *arguments: Any) -> bool:
        """False: it was stopped before."""
        return self._background.run(function, arguments)

    def send(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Has the sender run it: the one thread that gives to Ray what waited in line. False: it was stopped before."""
        return self._sender.run(function, arguments)

    def stop(self) -> None:
        self._stopping = True
        self.nudge()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        # A read may be stuck in an RPC to a dead control store. Its thread is a daemon, and no thread waits for it.
        self._background.stop(1.0)
        self._sender.stop(1.0)

    def _run(self) -> None:
        try:
            pause_s: float | None = 0.0
            while not self._stopping:
                if pause_s is None or pause_s > 0:
                    self._block(pause_s)
                if not self._stopping:
                    self._take_in_events()
                    pause_s = self._look()
        finally:
            if not self._stopping:
                _has_ended(self)

    def _block(self, pause_s: float | None) -> None:
        if _core.sentinel_runs():
            _core.wait_for_events(pause_s)
        else:
            self._wakeup.wait(pause_s)
        # The look that follows covers all that it was set for.
        self._wakeup.clear()

    # A method of its own: a loop variable in `_run` would hold the last actor for as long as this thread sleeps.
    def _take_in_events(self) -> None:
        for actor, kind, cause, _, timer in _core.drain_events():
            if kind == "timer":
                fenced("what a timer was set for", above.calls.expire, timer)
            elif actor is not None:
                self._take_in(actor, kind, cause)

    def _take_in(self, actor: _core.Actor, kind: str, cause: str) -> None:
        """What the sentinel's slot change does not do by itself."""
        # In the middle of a look this actor may have been passed already.
        self._nudged = True
        actor.next_read_s = _core.now_s()
        actor.read_interval_s = MIN_READ_INTERVAL_S
        if kind == "exited":
            actor.armed = False
        if kind == "ask_ray" and cause != "descriptors" and not (cause == "closed" and _ray_compat.uses_tls()):
            # Not under TLS: there a server closes a connection that sends no hello.
            actor.suspected_until_s = actor.next_read_s + SUSPECT_S
        wake(actor)

    def _look(self) -> float | None:
        """One look at every actor. Returns the pause until the next; None: until there is evidence or a nudge."""
        self._next_look_s = _NEVER
        self._nudged = False
        begin_s = _core.now_s()
        begin_cost_s = time.thread_time()
        session = _ray_compat.session_token()
        tick_s = _NEVER
        deadline_s = above.calls.look_at_clock(None)
        for actor in _core.live_actors():
            if session is None or actor.session is not session:
                # Its connection to Ray has ended. Threads that wait for it must not wait on.
                if actor.armed:
                    _core.unwatch(actor)
                wake(actor)
                continue
            try:
                self._look_at(actor, begin_s)
                deadline_s = min(deadline_s, self._fail_lost(actor, begin_s), above.calls.look_at_clock(actor))
                tick_s = min(tick_s, self._next_look(actor, begin_s))
                if actor.unhurried and actor.next_read_s > begin_s:
                    # This look was promised for that time, and comes only once: it is not stretched like a tick.
                    deadline_s = min(deadline_s, actor.next_read_s)
            except BaseException:
                # One actor's trouble must not blind this process to all others.
                log_failure("looking at an actor")
                tick_s = min(tick_s, begin_s + MAX_READ_INTERVAL_S)
        end_s = _core.now_s()
        # Time on the processor: a look that waits for the GIL, or for its turn on a busy machine, costs nothing. The
        # lesser of two, because what a look does once (failing calls, telling listeners) the next need not do.
        cost_s = time.thread_time() - begin_cost_s
        repeated_s = min(cost_s, self._last_look_cost_s)
        self._last_look_cost_s = cost_s
        if tick_s < end_s + IDLE_TICK_S:
            # Looking again is cheap but not free; deadlines of calls in flight are kept all the same.
            tick_s = max(tick_s, end_s + repeated_s / MAX_TICK_SHARE)
        next_s = self._next_look_s = min(tick_s, deadline_s)
        if self._nudged:
            return 0.0
        return None if next_s == _NEVER else max(next_s - end_s, 0.0)

    def _look_at(self, actor: _core.Actor, now_s: float) -> None:
        if actor.observe_ray() and not (actor.unhurried and actor.state_name == "alive"):
            # Ray's word comes without an incarnation and without a cause; the table has both.
            actor.next_read_s = now_s
            actor.read_interval_s = MIN_READ_INTERVAL_S
        if actor.changes:
            wake(actor)
            above.calls.review(actor)
            above.supply.drop_if_over(actor)
        if actor.changes or any(not one.greeted for one in actor.listeners):
            # The sentinel may still hold an earlier change than those in `changes`.
            self._take_in_events()
            listeners.tell(actor)
        # Once more, because `tell` may have taken newer changes off the list. It costs little unless calls wait.
        above.calls.review(actor)

    def _next_look(self, actor: _core.Actor, now_s: float) -> float:
        state = actor.state_name
        if state in actor_table.UP and not actor.in_doubt:
            return self._next_look_at_up(actor, now_s)
        if state == "dead":
            return self._read_again(actor, now_s) if actor.death is None else _NEVER
        read_s = self._read_again(actor, now_s)
        waited_for = _is_waited_for(actor)
        if actor.is_subscribed or waited_for:
            return min(read_s, now_s + (IDLE_TICK_S if state == "pending" and not waited_for else BUSY_TICK_S))
        return read_s

    def _next_look_at_up(self, actor: _core.Actor, now_s: float) -> float:
        if actor.next_read_s and now_s >= actor.next_read_s:
            # One read after each change. After that the sentinel watches, or Ray's local state is looked at. If neither
            # can be, the reads go on. If a read is under way already, its end nudges, and it is asked for again then.
            unheard = not actor.watched and not actor.is_subscribed
            if not self._request_planned(actor, now_s, UNUSED_READ_INTERVAL_S if unheard else None):
                actor.next_read_s = now_s
        if actor.watched:
            if now_s < actor.suspected_until_s:
                return max(actor.next_read_s, now_s + MIN_READ_INTERVAL_S)
            return _NEVER
        if actor.is_subscribed:
            return now_s + IDLE_TICK_S
        return actor.next_read_s or _NEVER

    def _read_again(self, actor: _core.Actor, now_s: float) -> float:
        """Reads the table when it is time. Returns when the next read is due."""
        if now_s >= actor.next_read_s:
            self._request_planned(actor, now_s)
        return actor.next_read_s

    def _request_planned(self, actor: _core.Actor, now_s: float, again_s: float | None = None) -> bool:
        """Asks for a read and plans the next, should this one fail or not be enough. False: one is under way."""
        if again_s is None:
            again_s = actor.read_interval_s or MIN_READ_INTERVAL_S
            if _is_waited_for(actor):
                again_s = min(again_s, 5 * MIN_READ_INTERVAL_S)
            actor.read_interval_s = min(again_s * 1.5, MAX_READ_INTERVAL_S)
        # Planned before it is asked for: `read_table` takes away what was planned when it began.
        actor.next_read_s = now_s + again_s
        return self.request_read(actor)

    def _fail_lost(self, actor: _core.Actor, now_s: float) -> float:
        """Fails calls of a lost incarnation when their grace is over. Returns when to come again."""
        if actor.loss_watch is None:
            if not actor.losses():
                return _NEVER
            actor.loss_watch = LossWatch()
        anybody = bool(actor.parties) or any(queue.calls for queue in actor.queues.values())
        is_due, again_s = actor.loss_watch.look(actor, now_s, anybody, self._has_lost)
        if is_due:
            above.refs.fail_lost(actor)
            above.calls.fail_lost(actor)
        return again_s

    def _has_lost(self, actor: _core.Actor) -> bool:
        return above.refs.has_lost(actor) or above.calls.has_lost(actor)


def _is_waited_for(actor: _core.Actor) -> bool:
    return bool(actor.waiters) or bool(above.calls.has_waiting(actor))


def end_session() -> None:
    """The connection has ended: its actors are watched no longer."""
    session = _ray_compat.session_token()
    for actor in _core.live_actors():
        if actor.session is not session:
            actor.is_over = True
            _core.unwatch(actor)


_watcher: Watcher | None = None
# Held while the threads are started or stopped. Reentrant, so that a signal handler or a `__del__` which comes here on
# the same thread in the middle of a start finds `_is_starting` instead of a deadlock.
_lock = threading.RLock()
_is_starting = False
# Nothing is started any more.
_exiting = False


def is_own_thread() -> bool:
    """True in callbacks: on a thread of ours, on which all waits depend."""
    return _watcher is not None and _watcher.owns_current_thread()


def is_exiting() -> bool:
    """True once the interpreter has begun to exit."""
    return _exiting


def ensure() -> Watcher:
    """The watcher of this process, started when there is none.

    Raises RuntimeError where a thread cannot be started, or is being started by the very code that a signal handler or
    `__del__` which comes here has interrupted. Nothing is left behind then, and the next use tries again.
    """
    global _watcher, _is_starting
    watcher = _watcher
    if watcher is None:
        with _lock:
            watcher = _watcher
            if watcher is None:
                if _exiting:
                    raise RuntimeError("the interpreter ends, and actorsub starts no threads any more")
                if _is_starting:
                    raise RuntimeError(
                        "actorsub's threads are being started on this thread, by what this signal handler (or __del__) "
                        "has interrupted; use it once before"
                    )
                _is_starting = True
                try:
                    watcher = Watcher()
                    try:
                        watcher.start()
                        _watcher = watcher
                    except BaseException:
                        # Also a Ctrl-C, or what another signal handler raised, when the thread was started already.
                        _watcher = None
                        watcher.abandon()
                        raise
                finally:
                    _is_starting = False
    return watcher


_warned_of_threads = False


def ensure_if_possible() -> Watcher | None:
    """The same for `.remote()`, which works without it: None if it cannot be started. A warning says so once."""
    global _warned_of_threads
    try:
        return ensure()
    except RuntimeError as error:
        if not _warned_of_threads and not _exiting:
            _warned_of_threads = True
            logger.warning("actorsub watches no actor (%s); until it can, calls fail when Ray says so", error)
        return None


def nudge_if_possible() -> None:
    """Has the watcher look at everything now."""
    running = ensure_if_possible()
    if running is not None:
        running.nudge()


def _has_ended(watcher: Watcher) -> None:
    """Its thread ends although nobody stopped it."""
    global _watcher
    logger.warning("the thread actorsub-watcher has ended unexpectedly; the next use starts it again")
    if _watcher is watcher:
        _watcher = None
    # They still do what they were asked for before this.
    watcher._background.stop(0.0)
    watcher._sender.stop(0.0)


def hurry(actor: _core.Actor) -> None:
    """A handle that was received is used now, or somebody wants to hear of its actor."""
    if actor.unhurried and not (_exiting or actor.is_over or actor.is_inherited):
        actor.unhurried = False
        actor.next_read_s = _core.now_s()
        nudge_if_possible()


def wake_all() -> None:
    """Lets everyone who waits for any actor look again."""
    for actor in _core.live_actors():
        wake(actor)


def stop() -> bool:
    """Stops the threads. False: there are none. The next use starts them again."""
    global _watcher
    with _lock:
        watcher, _watcher = _watcher, None
    if watcher is None:
        return False
    watcher.stop()
    with _lock:
        newer = _watcher
        if newer is None:
            # Otherwise another thread has started the threads again meanwhile, and the sentinel serves those.
            _core.stop_sentinel()
        for actor in _core.live_actors():
            actor.armed = False
            # So that the next start reads the table and watches anew.
            actor.next_read_s = _core.now_s()
    if newer is not None:
        newer.nudge()
    return True


def after_fork_in_child() -> None:
    global _watcher, _lock, _is_starting
    # The threads are not in this process, and the lock may have been held by one of them.
    _watcher = None
    _lock = threading.RLock()
    _is_starting = False


def stop_for_good() -> None:
    """The same when the interpreter ends: nothing starts them again."""
    global _exiting
    _exiting = True
    stop()
