# The sentinel: one native thread that watches processes and connections. Never destroyed, like the registry.

cdef Sentinel* sentinel = new Sentinel()


def start_sentinel():
    """0, or the errno of what could not be had. Idempotent."""
    return sentinel.Start()


def stop_sentinel():
    with nogil:
        sentinel.Stop()
    # Their timers are forgotten.
    later.clear()


def sentinel_runs():
    return sentinel.running()


def watch(
    Actor actor not None, unsigned int incarnation, str ip not None, int port, int pid, uint64_t start, bint http2
):
    """Watches one incarnation with the limits of `actor`, in place of an earlier one. True when the sentinel took it.

    `pid` and `start`: as `processes.proven_start` has them, or 0 for no process. `port` 0: no connection.
    """
    cdef WatchTarget target
    if actor.is_inherited:
        return False
    target.incarnation = incarnation
    target.connect = port != 0
    target.http2 = http2
    target.port = <unsigned short>port
    target.ip = ip.encode()
    target.pid = actor.process_id = pid
    target.pid_start_ticks = start
    target.silence_ns = _nanoseconds(actor.silence_s)
    target.in_flight_silence_ns = _nanoseconds(actor.silence_in_flight_s)
    cdef WatchResult result = sentinel.Watch(actor.reference[0], target)
    actor.armed = result == WatchResult.kWatching or result == WatchResult.kUnchanged
    return actor.armed


def unwatch(Actor actor not None):
    if not actor.is_inherited:
        forget_watch(actor.key)
        actor.armed = False


cdef bint looks(bytes key) except -1:
    cdef ActorId id
    memcpy(id.data(), <const char*>key, 16)
    return sentinel.Looks(id)


# Not a `def`: what the module's dict names is None in the weak references that the interpreter's end calls.
cdef void forget_watch(bytes key) noexcept:
    cdef ActorId id
    memcpy(id.data(), <const char*>key, 16)
    sentinel.Unwatch(id)


def update_limits(Actor actor not None):
    """Takes the limits of `actor` over into its watch."""
    cdef ActorId id
    memcpy(id.data(), <const char*>actor.key, 16)
    sentinel.UpdateLimits(id, _nanoseconds(actor.silence_s), _nanoseconds(actor.silence_in_flight_s))


cdef int64_t _nanoseconds(seconds) except? -1:
    if seconds is None or seconds > 9e9:
        return 0x7FFFFFFFFFFFFFFF
    return <int64_t>(seconds * 1e9)


def now_s():
    """The sentinel's clock, in seconds."""
    return Clock.Monotonic().NowNs() / 1e9


def wait_for_events(timeout_s):
    """Blocks without the GIL until there are events, `wake_watcher` was called, or the time is over (None: never)."""
    cdef int64_t timeout_ns = -1 if timeout_s is None else _nanoseconds(timeout_s)
    cdef bint readable
    with nogil:
        readable = sentinel.WaitForEvents(timeout_ns)
    return readable


def wake_watcher():
    sentinel.WakeWaiter()


def drain_events():
    """The events since the last call, in order: (Actor or None, kind, cause, seen_s, timer)."""
    cdef vector[SentinelEvent] events
    cdef SentinelEvent event
    cdef list drained = []
    sentinel.DrainEvents(&events)
    for event in events:
        reference = actors.get((<char*>event.actor_id.data())[:16])
        actor = None if reference is None else reference()
        if actor is not None:
            note_change(<Actor>actor, event.change)
        drained.append((
            actor,
            SentinelEventKindName(event.kind).decode(),
            SentinelCauseName(event.cause).decode(),
            event.seen_ns / 1e9,
            event.timer_id,
        ))
    return drained


def sentinel_counters():
    cdef SentinelCounters counters = sentinel.counters()
    return counters
