# Actors: what this process keeps of each, and how it is told and asked.


cdef class Supply:
    """Failed refs made ahead for one actor in one state; see supply.py.

    Args:
        version: of the state that the refs speak of.
        make: makes one more.
        wanted: how many are to be ahead.
    """

    cdef readonly unsigned short version
    cdef readonly object make
    cdef public Py_ssize_t wanted
    cdef readonly list refs
    # True while they are being made in the background.
    cdef public bint filling

    def __cinit__(self, unsigned short version, make, Py_ssize_t wanted):
        self.version = version
        self.make = make
        self.wanted = wanted
        self.refs = []


cdef tuple making_actor = (object(),)


cdef class Actor:
    """One actor in this process, shared by all its handles; made by `actor_of`.

    Holds the native slot, and on behalf of the Python layer what belongs to the actor rather than to one handle.
    """

    # -- Fixed when it is made.

    cdef SlotRef* reference
    cdef Slot* slot
    cdef unsigned long generation
    cdef readonly object ray_id
    cdef readonly bytes key
    # Method name -> concurrency group, where this process created the actor and hence knows.
    cdef public dict method_groups

    # -- Its connection (lifecycle.py, handle.py).

    # The session (see _ray_compat.session_token) that the actor belongs to.
    cdef public object session
    # True once the connection that the actor belongs to has ended; then nothing more is known about it.
    cdef public bint is_over
    # True once a call of this process went to Ray, which then subscribes to the actor's state. By any caller.
    cdef public bint used

    # -- What the table said. Written by actor_table.py, on the background thread; `death` and `preempted` also by
    # watcher.learn, on any thread, from Ray's own error for a call. Each is replaced as a whole.

    # The last row of the actor table that was read (_ray_compat.TableRow); None: none was.
    cdef public object row
    # Ray's own error with the cause of its death, once it is known: an ActorDiedError, or of another class.
    cdef public object death
    # The incarnation whose node is, or was, taken away (a spot instance); None: none that is known.
    cdef public object preempted
    # True while a read is under way: by whoever asks for it, until the background thread has done it.
    cdef public bint reading

    # -- When the table is read next. The watcher's thread plans; who brings news (a handle, an event, Ray's word) asks
    # for a look at once by setting the time, which the watcher only ever moves later after it has asked for a read.

    cdef public double next_read_s
    cdef public double read_interval_s
    # Until when the table is read although the actor seems to be up: somebody else may be answering for it.
    cdef public double suspected_until_s
    # Known from received handles only that nobody has used yet: its first read may wait.
    cdef public bint unhurried

    # -- Who waits. Containers that any thread adds to and takes from, see fence.py.

    # fence.Wakeup objects of callers that wait for a change.
    cdef public list waiters
    # Who waits for the outcome of a call: refs.Party objects, by their own identity.
    cdef public dict parties
    # Name of a concurrency group ("": none was named) -> CallQueue; and how calls failed: name of the class -> count.
    cdef public dict queues
    cdef public dict call_failures
    # Failed refs made ahead (supply.py).
    cdef public Supply supply

    # -- Its listeners (listeners.py).

    # Functions of on_state_change, and the changes that they have not been told: (version, old, new, evidence). Any
    # thread adds; the watcher's takes.
    cdef public list listeners
    cdef public list changes
    # What they were told last: a version and a state; None: nothing yet. The watcher's thread's.
    cdef public unsigned short told_version
    cdef public object told_state

    # -- What is watched.

    # The shortest limits that any handle asked for, in seconds; in_flight None: never. `detects`: open sockets.
    cdef public double silence_s
    cdef public object silence_in_flight_s
    cdef public bint detects
    # The sentinel was given the incarnation that is up to watch. Set by `watch`, taken back by the watcher.
    cdef public bint armed
    # The process that is or was watched last; 0: none. Written by `watch`.
    cdef public int process_id

    # -- Losses.

    # The incarnation that was lost last; None: not known, or none was. Written by whoever applied the evidence.
    cdef public object lost_incarnation
    # When the calls that were lost are failed (losses.LossWatch); None: none was lost yet. The watcher's thread's.
    cdef public object loss_watch
    # Outcomes that arrived after the call had been given up, and waits that were ended early. Counts for people.
    cdef public unsigned long long late_replies
    cdef public unsigned long long failed_early

    cdef object __weakref__

    # There is none without a slot, whoever asks for it.
    def __cinit__(self, *args):
        if args != making_actor:
            raise TypeError("Actor objects are made by actor_of()")

    def __dealloc__(self):
        if self.reference != NULL and self.generation == fork_generation:
            del self.reference

    @property
    def is_inherited(self):
        """True in a forked child for an actor of the parent."""
        return self.generation != fork_generation

    @property
    def state(self):
        return state_members[<int>StateOf(self.slot.word())]

    @property
    def state_name(self):
        return STATE_NAMES[<int>StateOf(self.slot.word())]

    @property
    def version(self):
        return self.slot.belief().version

    @property
    def is_subscribed(self):
        """True once Ray has reported a local state."""
        return self.slot.belief().ray_last != ActorState.kUnknown

    @property
    def watched(self):
        """True while the sentinel looks at its process or its connection; False where it was given it and cannot."""
        return self.armed and looks(self.key)

    def takes_calls(self):
        """True when the actor is up, and Ray agrees. False: somebody has to look closer."""
        return (
            StateOf(self.slot.word()) == ActorState.kAlive
            and ray_local_state(self, ray_core_worker()) == <int>ActorState.kAlive
        )

    def belief(self):
        """(state name, evidence name, incarnation or None) at this moment."""
        cdef Belief belief = self.slot.belief()
        return (
            STATE_NAMES[<int>belief.state],
            EVIDENCE_NAMES[<int>belief.evidence],
            belief.incarnation if belief.incarnation_known else None,
        )

    @property
    def rays_word(self):
        """Name of the local state that Ray reported last; "unknown": none."""
        return STATE_NAMES[<int>self.slot.belief().ray_last]

    @property
    def was_up(self):
        """True once this process has seen it up."""
        return self.slot.entered(ActorState.kAlive) > 0

    def set_last(self, incarnation):
        """Ray will not restart this incarnation; None: it restarts each. See slot.h."""
        self.slot.SetLast(-1 if incarnation is None else <int64_t>incarnation)

    @property
    def in_doubt(self):
        """True while its port was refused and nobody has withdrawn that, or said more; see actor_state.h, rule 10."""
        return InDoubt(self.slot.belief())

    def losses(self):
        """How often everything in flight at this actor was lost; see slot.h, invariant 4."""
        return self.slot.losses()

    def observe_ray(self):
        """Reads Ray's local state and takes it in. True when the belief changed."""
        return observe_ray(self)

    def apply(self, str evidence, str verdict, incarnation=None, int read_version=-1):
        """Takes in one observation. True when the belief changed."""
        cdef Observation observation
        observation.evidence = <Evidence><int>EVIDENCE_NAMES.index(evidence)
        observation.verdict = <ActorState><int>STATE_NAMES.index(verdict)
        observation.incarnation = -1 if incarnation is None else <int64_t>incarnation
        observation.read_version = <int32_t>read_version
        return note_change(self, self.slot.Apply(observation))

    def count_refused(self, str reason):
        self.slot.CountRefused(<Refusal><int>REFUSAL_NAMES.index(reason))

    def count_waited(self):
        self.slot.CountWaited()

    def counters(self):
        """The slot's counters, as a new dict."""
        cdef int i
        return {
            "submitted": self.slot.submitted(),
            "waited": self.slot.waited(),
            "refused": {REFUSAL_NAMES[i]: self.slot.refused(<Refusal>i) for i in range(6)},
            "entered": {STATE_NAMES[i]: self.slot.entered(<ActorState>i) for i in range(1, 6)},
            "stale_reports": self.slot.stale(),
        }


def actor_of(ray_id, session):
    """The Actor of a Ray ActorID: the one that exists, or a new one."""
    global registry, registry_session
    cdef bytes key = ray_id.binary()
    cdef ActorId id
    cdef Actor actor
    existing = actors.get(key)
    if existing is not None:
        found = existing()
        if found is not None and found.session is session:
            return found
    if session is not registry_session:
        # What an earlier connection believed about an actor is not carried over: Ray has not subscribed to it yet in
        # this one. The old registry goes on serving the slots of old handles.
        registry = new Registry()
        registry_session = session
    if len(key) != 16:
        raise ValueError(f"an actor id has 16 bytes, got {len(key)}")
    memcpy(id.data(), <const char*>key, 16)
    actor = Actor.__new__(Actor, making_actor[0])
    actor.reference = new SlotRef(registry.Acquire(id))
    actor.slot = actor.reference.get()
    actor.generation = fork_generation
    actor.ray_id = ray_id
    actor.key = key
    actor.session = session
    actor.waiters = []
    actor.parties = {}
    actor.queues = {}
    actor.call_failures = {}
    actor.method_groups = {}
    actor.listeners = []
    actor.changes = []
    actor.silence_s = float("inf")
    actors[key] = weakref.ref(actor, _ForgetActor(key))
    return actor


cdef class _ForgetActor:
    cdef bytes key

    def __cinit__(self, bytes key not None):
        self.key = key

    def __call__(self, reference):
        # A new Actor of the same id may have taken the place already.
        if actors.get(self.key) is reference:
            del actors[self.key]
            # Nobody is left whom the sentinel could tell.
            forget_watch(self.key)


def live_actors():
    """The Actors that some handle holds, as a list."""
    return [actor for actor in [reference() for reference in list(actors.values())] if actor is not None]


def slot_count():
    return registry.size()


cdef object ray_core_worker():
    """Ray's core worker while there is a connection, else None."""
    if ray_worker is None or getattr(ray_worker, connected_attribute) is not True:
        return None
    return getattr(ray_worker, core_worker_attribute)


cdef int ray_local_state(Actor actor, object core_worker) except -2:
    """The state that Ray's local state names, as ActorState's number; -1: Ray has no opinion."""
    if core_worker is None:
        return -1
    number = PyObject_CallMethodOneArg(core_worker, local_state_method, actor.ray_id)
    if number is None:
        return -1
    cdef long value = number
    return ray_number_to_state[value] if 0 <= value < 16 else -1


cdef bint note_change(Actor actor, Change change) except -1:
    """Keeps what the watcher has to tell and to fail. True when the belief changed."""
    if not change.changed:
        return False
    if change.before.state != change.after.state:
        actor.changes.append((
            change.after.version,
            state_members[<int>change.before.state],
            state_members[<int>change.after.state],
            EVIDENCE_NAMES[<int>change.after.evidence],
        ))
    if change.before.state == ActorState.kAlive or change.before.state == ActorState.kUnreachable:
        actor.lost_incarnation = change.before.incarnation if change.before.incarnation_known else None
    if change.after.state != ActorState.kAlive and change.after.state != ActorState.kUnreachable:
        actor.armed = False
    return True


cdef bint observe_ray(Actor actor) except -1:
    cdef Observation observation
    cdef int state = ray_local_state(actor, ray_core_worker())
    if state < 0:
        return False
    observation.evidence = Evidence.kRay
    observation.verdict = <ActorState>state
    return note_change(actor, actor.slot.Apply(observation))
