# Requests: the binding of the submit queue. See submit_queue.h for what the words mean.

VERDICTS = {
    "send": <int>Verdict.kSend,
    "wait": <int>Verdict.kWait,
    "away": <int>Verdict.kRefusedAway,
    "dead": <int>Verdict.kRefusedDead,
    "pending": <int>Verdict.kRefusedPending,
    "full": <int>Verdict.kFull,
    "expired": <int>Verdict.kExpired,
    "closed": <int>Verdict.kClosed,
}
# A deadline that never comes.
NEVER_NS = 0x7FFFFFFFFFFFFFFF

# Number -> weak reference to its CallQueue, for the timers.
cdef dict queues_by_number = {}
cdef uint64_t last_queue_number = 0


def now_ns():
    """The sentinel's clock, which deadlines are on."""
    return Clock.Monotonic().NowNs()


def give(Submission submission, remote_call, Actor actor not None, tuple args not None, dict kwargs not None):
    """Gives a call to Ray, which returns what `.remote()` returns; Ray's own refs, counted."""
    cdef PyObject* flat = NULL
    cdef PyObject* result
    core_worker = ray_core_worker() if may_submit_directly(submission) else None
    if core_worker is not None:
        flat = flatten_both(submission, args, kwargs)
    if flat == NULL:
        given = remote_call(*args, **kwargs)
    else:
        result = submit_directly_or_raise(submission, <PyObject*>core_worker, flat)
        given = <object>result
        Py_DECREF(given)
    actor.slot.CountSubmitted()
    return given


cdef PyObject* submit_directly_or_raise(Submission submission, PyObject* core_worker, PyObject* flat) except NULL:
    return submit_directly(submission, core_worker, flat)


cdef class CallBase:
    """The native part of a Call: its fields. Those without a leading `_actorsub` are concurrent.futures' own."""

    cdef object _lock
    cdef public object _state
    cdef public object _result
    cdef public object _exception
    cdef public object _waiters
    cdef public object _done_callbacks
    cdef public object _actorsub_plan         # calls.Plan
    cdef public object _actorsub_args
    cdef public object _actorsub_kwargs
    cdef public object _actorsub_refs         # None until it was sent; then Ray's own refs, as a list.
    cdef public object _actorsub_left         # Outcomes that are still to come, where there are several.
    cdef readonly uint64_t _actorsub_ticket
    cdef readonly unsigned int _actorsub_mark
    # True while the thread that made the call still copies its arguments: the sender leaves it alone.
    cdef public bint _actorsub_unready
    # True where that thread was told to give it to Ray itself.
    cdef readonly bint _actorsub_begun

    def _checked_state(self):
        if self._state is None:
            raise RuntimeError("calls are made by methods of handles: handle.method.call(...)")
        return self._state

    @property
    def _condition(self):
        self._checked_state()
        # Of each its own, as with every Future: `concurrent.futures.wait` takes those of all its futures, in an order
        # that one lock for all Calls would break. Made when somebody asks, since most that wait in line need none.
        if self._lock is None:
            made = call_condition()
            # Looked at again: making it may have let another thread run.
            if self._lock is None:
                self._lock = made
        return self._lock

    def _lock_if_made(self):
        return self._lock


cdef object call_condition = None


def bind_calls(condition):
    """Hands in what makes the `_condition` of a Call."""
    global call_condition
    call_condition = condition


cdef class CallQueue:
    """The calls of this process to one actor, or to one concurrency group of it, which have no end yet.

    Everything happens under the GIL, so a ticket and the call that it stands for are noted in one step. Holds no
    reference to the Actor: that one has its queues.
    """

    cdef SlotRef* reference
    cdef SubmitQueue* queue
    cdef readonly uint64_t number
    # Ticket -> Call. Whoever takes a call out of here ends it.
    cdef readonly dict calls
    # The deadline of which no timer could be set: the watcher has to look at the clock. NEVER_NS: none.
    cdef public int64_t unset_timer_ns
    # True while the sender has it on its list.
    cdef public bint is_due
    # True when the sender met an unready call; whoever made that one calls it again.
    cdef public bint is_stalled
    # Corrections of the native counters: outcomes that nobody waited for any more; calls that FailLost ended although
    # their outcome was there; calls taken back by Cancel that no user cancelled; streams past their deadline.
    cdef public uint64_t late
    cdef readonly uint64_t kept
    cdef public uint64_t withdrawn
    cdef readonly uint64_t overdue_streams
    cdef object __weakref__

    def __cinit__(self, Actor actor=None):
        global last_queue_number
        cdef ActorId id
        cdef bytes key
        if actor is not None:
            self.reference = new SlotRef(actor.reference[0])
        else:
            # The line of a group: its slot is nobody else's.
            key = os.urandom(16)
            memcpy(id.data(), <const char*>key, 16)
            self.reference = new SlotRef(registry.Acquire(id))
        self.queue = new SubmitQueue(self.reference.get())
        self.calls = {}
        self.unset_timer_ns = NEVER_NS
        last_queue_number += 1
        self.number = last_queue_number
        self.generation = fork_generation
        queues_by_number[self.number] = weakref.ref(self)

    def __dealloc__(self):
        # In a forked child they are the parent's, whose locks may have been held.
        if self.generation == fork_generation:
            queues_by_number.pop(self.number, None)
            sentinel.CancelTimer(self.number)
            del self.queue
            del self.reference

    cdef unsigned long generation

    def admit(
        self, CallBase call not None, int64_t deadline_ns, unsigned int window, unsigned int max_queued,
        int away, int on_pending
    ):
        """(verdict, release) of Admit; notes the call where it got a ticket."""
        cdef CallRules rules
        cdef Admission admission
        rules.deadline_ns = deadline_ns
        rules.window = window
        rules.max_queued = max_queued
        rules.away = <AwayRule>away
        rules.on_pending = <PendingRule>on_pending
        admission = self.queue.Admit(rules, Clock.Monotonic().NowNs())
        if admission.ticket:
            call._actorsub_ticket = admission.ticket
            call._actorsub_mark = admission.mark
            call._actorsub_begun = admission.verdict == Verdict.kSend
            self.calls[admission.ticket] = call
            if admission.arm_ns != <int64_t>NEVER_NS:
                self.set_timer(admission.arm_ns)
        return <int>admission.verdict, admission.release

    cdef set_timer(self, int64_t at_ns):
        if not sentinel.AddTimer(self.number, at_ns):
            self.unset_timer_ns = min(self.unset_timer_ns, at_ns)

    def arm(self):
        """Sets the timer anew, after the sentinel was stopped and started."""
        cdef int64_t next_ns = self.queue.Rearm()
        if next_ns != <int64_t>NEVER_NS:
            self.set_timer(next_ns)

    def release(self, size_t most):
        """(tickets, ended) of Release."""
        cdef vector[Ticket] tickets
        cdef vector[Ended] ended
        self.queue.Release(Clock.Monotonic().NowNs(), most, &tickets, &ended)
        return tickets, self.take(ended, ())

    def begin_send(self, uint64_t ticket):
        """The Call to send now; None where BeginSend says that it is gone; False where it is in the line again, or is
        not ready (then `is_stalled`)."""
        cdef Begin begin
        waiting = self.calls.get(ticket)
        if waiting is not None and (<CallBase>waiting)._actorsub_unready:
            self.is_stalled = True
            return False
        begin = self.queue.BeginSend(ticket)
        if begin.verdict == BeginVerdict.kBack:
            return False
        if begin.verdict == BeginVerdict.kGone:
            return None
        call = <CallBase>self.calls[ticket]
        (<CallBase>call)._actorsub_mark = begin.mark
        return call

    def end_send(self, uint64_t ticket):
        self.queue.EndSend(ticket)

    def complete(self, uint64_t ticket):
        """(the Call, or None where it has had its end; release)."""
        cdef Completion completion = self.queue.Complete(ticket)
        return self.calls.pop(ticket, None), completion.release

    def abort(self, uint64_t ticket):
        """As complete(), for a call that Ray did not take."""
        cdef bint release = self.queue.Abort(ticket).release
        return self.calls.pop(ticket, None), release

    def cancel(self, uint64_t ticket):
        """(True: ended, never sent; False: it is with Ray; None: it has its end already, release)."""
        cdef Cancellation cancellation = self.queue.Cancel(ticket)
        if cancellation.verdict == CancelVerdict.kCancelledHere:
            self.calls.pop(ticket, None)
            return True, cancellation.release
        return (False if cancellation.verdict == CancelVerdict.kSent else None), cancellation.release

    def expire(self):
        """(ended, release) of Expire."""
        cdef vector[Ended] ended
        cdef Expiry expiry
        self.unset_timer_ns = NEVER_NS
        expiry = self.queue.Expire(Clock.Monotonic().NowNs(), &ended)
        if expiry.next_ns != <int64_t>NEVER_NS:
            self.set_timer(expiry.next_ns)
        return self.take(ended, ()), expiry.release

    def review(self):
        """(ended, release) of Review."""
        cdef vector[Ended] ended
        cdef bint release = self.queue.Review(&ended)
        return self.take(ended, ()), release

    def set_open(self, bint is_open):
        """For a queue without an actor: whether calls may leave the line."""
        cdef Observation observation
        observation.evidence = Evidence.kRay
        observation.verdict = ActorState.kAlive if is_open else ActorState.kRestarting
        self.reference.get().Apply(observation)

    def has_lost(self):
        return self.queue.has_lost()

    def has_waiting(self):
        return self.queue.counters().waiting > 0

    def fail_lost(self, keep):
        """(ended, release) of FailLost. Calls in `keep` stay noted: their outcome is on its way."""
        cdef vector[Ended] ended
        cdef bint release = self.queue.FailLost(&ended)
        return self.take(ended, keep), release

    def close(self):
        """Ended of CloseAll."""
        cdef vector[Ended] ended
        self.queue.CloseAll(&ended)
        return self.take(ended, ())

    cdef list take(self, const vector[Ended]& ended, keep):
        """[(Call, end, sent)]: the calls are no longer noted."""
        cdef list taken = []
        cdef size_t i
        for i in range(ended.size()):
            call = self.calls.get(ended[i].ticket)
            if call is None:
                # A stream that was handed out has only its place left here.
                if ended[i].end == End.kDeadline:
                    self.overdue_streams += 1
            elif call in keep:
                self.kept += 1
            else:
                del self.calls[ended[i].ticket]
                taken.append((call, EndName(ended[i].end).decode(), ended[i].sent))
        return taken

    def counters(self):
        """The native counters, corrected."""
        cdef QueueCounters counters = self.queue.counters()
        counters.late = self.late
        counters.sent -= counters.aborted
        # A stream that was handed out has been its call's outcome, also when its time is over before its task is.
        counters.completed += self.kept + self.overdue_streams
        counters.lost -= self.kept
        counters.cancelled_here -= self.withdrawn
        counters.expired_there -= self.overdue_streams
        return counters


# Number -> function that call_later() was given.
cdef dict later = {}


def call_later(int64_t delay_ns, function):
    """Has the watcher call `function()` after that time; where no timer can be set, calls it now."""
    global last_queue_number
    last_queue_number += 1
    cdef uint64_t number = last_queue_number
    later[number] = function
    if not sentinel.AddTimer(number, Clock.Monotonic().NowNs() + delay_ns):
        del later[number]
        function()


def take_later(uint64_t number):
    """The function of that timer, once; None when it is none of call_later()."""
    return later.pop(number, None)


def queue_of_timer(uint64_t number):
    """The CallQueue that has this timer; None when it is gone."""
    reference = queues_by_number.get(number)
    return None if reference is None else reference()
