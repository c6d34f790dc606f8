"""The two background threads: one looks at Ray's local states and wakes who waits, one reads the actor table.

The watcher sleeps while no handle exists, looks every `IDLE_TICK_S` while all actors are up, and every `BUSY_TICK_S`
while one is not. It holds no strong reference to a handle: an `Actor` record lives as long as its handles, and the
watcher finds it through weak references. The table is read on a thread of its own because such a read blocks for as
long as the control store is down, and local evidence must go on working meanwhile.

Both are daemons that `shutdown()` stops and joins; it runs before Ray's own exit hook, since that one was registered
earlier.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time

from actorsub import _core, _ray_compat

logger = logging.getLogger("actorsub")

#: Between two looks at Ray's local states (0.2 us each) while every actor is up.
IDLE_TICK_S = 0.010
#: The same while some actor is not up: how late a recovery may be seen.
BUSY_TICK_S = 0.002
#: The idle tick is stretched so that looking costs at most this share of one core, however many actors there are.
MAX_IDLE_SHARE = 0.005
#: First and longest distance between two reads of the actor table for one actor that is not up.
MIN_READ_INTERVAL_S = 0.020
MAX_READ_INTERVAL_S = 1.0
#: An actor that is up but that this process never called: Ray tells nothing about it unasked.
UNUSED_READ_INTERVAL_S = 1.0
#: How long a caller waits for the first read of the table before the call goes to Ray unjudged.
FIRST_READ_LIMIT_S = 1.0

_UP = "alive"
_DOWN_FOR_GOOD = "dead"


class _TableReader:
    """Reads the actor table on a thread of its own."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_core.Actor | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="actorsub-table", daemon=True)
        self._thread.start()

    def request(self, actor: _core.Actor) -> None:
        if not actor.reading:
            actor.reading = True
            self._requests.put(actor)

    def stop(self, timeout_s: float) -> None:
        self._requests.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            actor = self._requests.get()
            if actor is None:
                return
            try:
                read_table(actor)
            except Exception:
                # Whatever Ray raises while its control store is away; the watcher asks again.
                logger.debug("reading the actor table failed", exc_info=True)
            finally:
                actor.reading = False
                wake(actor)
                del actor


def read_table(actor: _core.Actor) -> None:
    """Asks the control store about the actor and takes in what it says."""
    if actor.session is None or actor.session is not _ray_compat.session_token():
        return
    version = actor.version
    row = _ray_compat.read_actor_table(actor.ray_id)
    if row is None:
        return
    if row.death is not None:
        actor.death = row.death
    actor.apply("table", row.state, row.incarnation, version)


def wake(actor: _core.Actor) -> None:
    """Lets everyone who waits for a change of this actor look again."""
    for waiter in list(actor.waiters):
        waiter.set()


class Watcher:
    """See the module. One per process; made and ended through `ensure` and `shutdown`."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._stopping = False
        self._reader = _TableReader()
        self._thread = threading.Thread(target=self._run, name="actorsub-watcher", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Looks at everything now."""
        self._wake.set()

    def request_read(self, actor: _core.Actor) -> None:
        self._reader.request(actor)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join(5.0)
        # A read may be stuck in an RPC to a dead control store; it is a daemon, and nobody waits for its answer.
        self._reader.stop(1.0)

    def _run(self) -> None:
        pause_s: float | None = None
        while not self._stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            if not self._stopping:
                pause_s = self._look()

    def _look(self) -> float | None:
        """One look at every actor. Returns the pause until the next; None: until somebody nudges."""
        begin_s = time.monotonic()
        session = _ray_compat.session_token()
        watched = 0
        busy = False
        for actor in _core.live_actors():
            if session is None or actor.session is not session:
                # Its Ray is gone; whoever waits for it must not wait on.
                wake(actor)
                continue
            watched += 1
            busy = self._look_at(actor, begin_s) or busy
        if not watched:
            return None
        if busy:
            return BUSY_TICK_S
        return max(IDLE_TICK_S, (time.monotonic() - begin_s) / MAX_IDLE_SHARE)

    def _look_at(self, actor: _core.Actor, now_s: float) -> bool:
        """Returns True while the actor should be looked at often."""
        if actor.observe_ray():
            # Ray's word comes without an incarnation and without a cause; the table has both.
            actor.next_read_s = now_s
            actor.read_interval_s = MIN_READ_INTERVAL_S
            wake(actor)
        state = actor.state_name
        if state == _UP:
            if actor.next_read_s and now_s >= actor.next_read_s:
                self._reader.request(actor)
                # A used actor is read once after each change; Ray's local state does the rest.
                actor.next_read_s = 0.0 if actor.is_subscribed else now_s + UNUSED_READ_INTERVAL_S
            return bool(actor.waiters)
        if state == _DOWN_FOR_GOOD:
            if actor.death is None and now_s >= actor.next_read_s:
                self._schedule(actor, now_s)
            return bool(actor.waiters)
        if now_s >= actor.next_read_s:
            self._schedule(actor, now_s)
        return True

    def _schedule(self, actor: _core.Actor, now_s: float) -> None:
        self._reader.request(actor)
        interval_s = actor.read_interval_s or MIN_READ_INTERVAL_S
        if actor.waiters:
            interval_s = min(interval_s, 5 * MIN_READ_INTERVAL_S)
        actor.next_read_s = now_s + interval_s
        actor.read_interval_s = min(interval_s * 1.5, MAX_READ_INTERVAL_S)


_watcher: Watcher | None = None
_lock = threading.Lock()


def ensure() -> Watcher:
    """The watcher of this process, started when there is none."""
    global _watcher
    watcher = _watcher
    if watcher is None:
        with _lock:
            watcher = _watcher
            if watcher is None:
                watcher = _watcher = Watcher()
    return watcher


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("actorsub-")]


def shutdown() -> None:
    """Stops the background threads. Idempotent; the next use of a handle starts them again.

    Handles stay valid. Callers that wait for an actor are not interrupted: their own look at the actor starts the
    threads again.
    """
    global _watcher
    with _lock:
        watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.stop()


def _after_fork_in_child() -> None:
    global _watcher, _lock
    # The threads are not in this process, and the lock may have been held by one of them.
    _watcher = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(shutdown)
