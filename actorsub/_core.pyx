# cython: language_level=3, binding=False, embedsignature=True, auto_pickle=False, autotestdict=False
"""The compiled core: an actor's state, and the gate that every `.remote()` of a wrapped handle passes.

Nothing here knows Ray. The Python layer hands in, once, where Ray's local actor state is read (`bind_ray`) and which
Python classes to return and raise (`bind_types`).

Threads: everything here runs with the GIL. It is released in two places, because only they can block:
`wait_for_events` and `stop_sentinel`.
"""

from cpython.exc cimport PyErr_Clear, PyErr_SetObject
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from actorsub._cpp.actor_state cimport (
    ActorState,
    ActorStateName,
    Belief,
    DecodeBelief,
    Evidence,
    EvidenceName,
    Observation,
    StateOf,
)
from actorsub._cpp.clock cimport Clock
from actorsub._cpp.registry cimport Registry, SlotRef
from actorsub._cpp.sentinel cimport (
    Sentinel,
    SentinelCauseName,
    SentinelCounters,
    SentinelEvent,
    SentinelEventKindName,
    WatchResult,
    WatchTarget,
)
from actorsub._cpp.slot cimport ActorId, Change, Refusal, RefusalName, Slot

import os
import weakref


cdef extern from *:
    """
    // `remote` enters the method table by hand: the wrapper that Cython generates adds a traceback entry, hence a code
    // and a frame object, to every exception that leaves it, and that costs more than the rest of a refusal.
    typedef PyObject* (*actorsub_fastcall)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

    static PyMethodDef actorsub_remote_method = {
        "remote", NULL, METH_FASTCALL | METH_KEYWORDS,
        "remote($self, /, *args, **kwargs)\\n--\\n\\n"
        "Calls the method as Ray's own `.remote()` does, after one look at whether the actor can take the call.\\n\\n"
        "Returns what Ray returns: one ObjectRef, a list of them, None or a generator, by `num_returns`.\\n"
        "Raises ActorUnavailableError, ActorDiedError or DeadlineExceededError here only where the policy asks for\\n"
        "it (`on_unavailable`, `on_pending`), and TypeError for arguments that do not fit the method."};

    static int actorsub_add_remote(PyTypeObject* type, actorsub_fastcall function) {
        actorsub_remote_method.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function));
        PyObject* descriptor = PyDescr_NewMethod(type, &actorsub_remote_method);
        if (descriptor == NULL) return -1;
        int result = PyDict_SetItemString(type->tp_dict, "remote", descriptor);
        Py_DECREF(descriptor);
        PyType_Modified(type);
        return result;
    }

    static PyObject* actorsub_new_exception(PyObject* type, PyObject* empty_tuple) {
        // Not a call of the type: that would run Ray's Python-level __init__, which formats a message.
        return reinterpret_cast<PyTypeObject*>(type)->tp_new(reinterpret_cast<PyTypeObject*>(type), empty_tuple, NULL);
    }
    """
    ctypedef PyObject* (*actorsub_fastcall)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) noexcept
    int actorsub_add_remote(PyTypeObject* type, actorsub_fastcall function) except -1
    PyObject* actorsub_new_exception(PyObject* type, PyObject* empty_tuple) noexcept

cdef extern from "Python.h":
    PyObject* PyObject_Vectorcall(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* kwnames) noexcept
    object PyObject_CallMethodOneArg(object owner, object name, object argument)


# ---------------------------------------------------------------------------------------------------------------------
# What the Python layer handed in. Written under the GIL at import; read on every call.

cdef object ray_worker = None           # The object whose attributes the next three names are; None: no local state.
cdef object connected_attribute = None
cdef object core_worker_attribute = None
cdef object local_state_method = None
cdef int ray_number_to_state[16]        # Ray's number -> ActorState; -1 where Ray's number means nothing to us.

cdef tuple state_members = ()           # ActorState (Python) by number.
cdef object unavailable_error = None    # The class that the fast refusal raises.
cdef object submit_slowly = None        # (method, args, kwargs) -> what .remote() returns.
cdef tuple empty_tuple = ()
cdef object plain_ref = None            # Ray's ObjectRef; None where the installed Ray's cannot be made anew.
cdef object early_ref = None            # The subclass that fails early (refs.ObjectRef).
cdef object early_result = None         # The same for lists and generators: (actor, mark, result) -> result.

# Rises by one in every forked child, so that handles of the parent know that they are not in their process any more.
cdef unsigned long fork_generation = 0

# Never destroyed: slots may outlive this module's teardown at interpreter exit.
cdef Registry* registry = new Registry()
cdef object registry_session = None     # The session that `registry` is for.
cdef dict actors = {}                   # id (bytes) -> weak reference to its Actor.

STATE_NAMES = tuple([ActorStateName(<ActorState><int>i).decode() for i in range(6)])
EVIDENCE_NAMES = tuple([EvidenceName(<Evidence><int>i).decode() for i in range(7)])
REFUSAL_NAMES = tuple([RefusalName(<Refusal><int>i).decode() for i in range(6)])

# Codes of Policy.on_unavailable and on_pending, as `make_method` takes them.
ON_UNAVAILABLE = {"ref": 0, "raise": 1, "wait": 2}
cdef int kOnUnavailableRaise = 1


def bind_ray(worker, str connected, str core_worker, str getter, dict names_by_number):
    """Says where Ray's local actor state is: `worker.<core_worker>.<getter>(actor_id)`, valid while
    `worker.<connected>` is True. `names_by_number` maps the numbers it returns to Ray's names of states."""
    global ray_worker, connected_attribute, core_worker_attribute, local_state_method
    cdef int number
    for number in range(16):
        ray_number_to_state[number] = -1
    ours = {
        "PENDING_CREATION": <int>ActorState.kPending,
        "ALIVE": <int>ActorState.kAlive,
        "RESTARTING": <int>ActorState.kRestarting,
        "DEAD": <int>ActorState.kDead,
    }
    for number, name in names_by_number.items():
        if name in ours and 0 <= number < 16:
            ray_number_to_state[number] = ours[name]
    ray_worker = worker
    connected_attribute = connected
    core_worker_attribute = core_worker
    local_state_method = getter


def bind_refs(plain, early, other):
    """Hands in Ray's ObjectRef, the subclass that is to take its place, and a function for results of other shapes."""
    global plain_ref, early_ref, early_result
    plain_ref = plain
    early_ref = early
    early_result = other


def bind_types(tuple states, unavailable, slow):
    """Hands in the Python classes: the members of ActorState in order, the class that a refusal raises, and the
    function that `.remote()` calls whenever its fast path does not apply."""
    global state_members, unavailable_error, submit_slowly
    if not issubclass(unavailable, CertifiedError):
        raise TypeError(f"{unavailable!r} must derive from CertifiedError")
    if len(states) != len(STATE_NAMES):
        raise ValueError(f"expected {len(STATE_NAMES)} states, got {len(states)}")
    state_members = states
    unavailable_error = unavailable
    submit_slowly = slow


def after_fork_in_child():
    """Forgets everything of the parent. Its slots are leaked on purpose: their memory is shared copy-on-write, and a
    lock in there may have been held by a thread that does not exist here."""
    global fork_generation, registry, sentinel
    fork_generation += 1
    registry = new Registry()
    actors.clear()
    # Its thread is not in this process; it closes its descriptors here and is leaked with its memory.
    sentinel.AbandonAfterFork()


# ---------------------------------------------------------------------------------------------------------------------


cdef class Actor:
    """One actor in this process, shared by all its handles; made by `actor_of`.

    Holds the native slot, and on behalf of the Python layer what belongs to the actor rather than to one handle.
    """

    cdef SlotRef* reference
    cdef Slot* slot
    cdef unsigned long generation
    cdef readonly object ray_id
    cdef readonly bytes key
    # The session (see _ray_compat.session_token) that the actor belongs to.
    cdef public object session
    # True once a call of this process went to Ray, which then subscribes to the actor's state.
    cdef public bint used
    # Ray's own ActorDiedError with the cause, once it is known.
    cdef public object death
    # Failed refs made ahead (supply.Supply).
    cdef public object supply
    # threading.Event objects of callers that wait for a change.
    cdef public list waiters
    # Who waits for the outcome of a call: refs.Outcome objects, by their own identity.
    cdef public dict outcomes
    # The watcher's notes: losses() when outcomes were last failed, and when the next ones are to be; 0: none pending.
    cdef public unsigned int handled_losses
    cdef public double fail_at_s
    # (state before, incarnation before) of the last loss that was seen.
    cdef public object lost_incarnation
    # Functions of on_state_change, and the changes that they have not been told: (version, old, new, evidence).
    cdef public list listeners
    cdef public list changes
    # What the listeners were told last: a version and a state; None: nothing yet.
    cdef public unsigned short told_version
    cdef public object told_state
    # The shortest limits that any handle asked for, in seconds; in_flight None: never. `detects`: open sockets.
    cdef public double silence_s
    cdef public object silence_in_flight_s
    cdef public bint detects
    # True while the sentinel watches the incarnation that is up.
    cdef public bint watched
    # Ray's row of the actor once said that it will not be restarted again.
    cdef public bint last_incarnation
    # Outcomes that arrived after the call had been given up.
    cdef public unsigned long long late_replies
    cdef public unsigned long long failed_early
    # The watcher's notes: time of the next look at the actor table, and how long it waits between two.
    cdef public double next_read_s
    cdef public double read_interval_s
    cdef public bint reading
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
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

    def belief(self):
        """(state name, evidence name, incarnation or None) at this moment."""
        cdef Belief belief = self.slot.belief()
        return (
            STATE_NAMES[<int>belief.state],
            EVIDENCE_NAMES[<int>belief.evidence],
            belief.incarnation if belief.incarnation_known else None,
        )

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
    actor = Actor.__new__(Actor)
    actor.reference = new SlotRef(registry.Acquire(id))
    actor.slot = actor.reference.get()
    actor.generation = fork_generation
    actor.ray_id = ray_id
    actor.key = key
    actor.session = session
    actor.waiters = []
    actor.outcomes = {}
    actor.listeners = []
    actor.changes = []
    actor.silence_s = float("inf")
    actors[key] = weakref.ref(actor, _ForgetActor(key))
    return actor


cdef class _ForgetActor:
    cdef bytes key

    def __init__(self, key):
        self.key = key

    def __call__(self, reference):
        # A new Actor of the same id may have taken the place already.
        if actors.get(self.key) is reference:
            del actors[self.key]
            # Nobody is left whom the sentinel could tell.
            _unwatch(self.key)


def live_actors():
    """The Actors that some handle holds, as a list."""
    return [actor for actor in [reference() for reference in list(actors.values())] if actor is not None]


def slot_count():
    return registry.size()


cdef int ray_local_state(Actor actor) except -2:
    """The state that Ray's local state names, as ActorState's number; -1: Ray has no opinion."""
    if ray_worker is None or getattr(ray_worker, connected_attribute) is not True:
        return -1
    number = PyObject_CallMethodOneArg(getattr(ray_worker, core_worker_attribute), local_state_method, actor.ray_id)
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
        actor.watched = False
    return True


cdef bint observe_ray(Actor actor) except -1:
    cdef Observation observation
    cdef int state = ray_local_state(actor)
    if state < 0:
        return False
    observation.evidence = Evidence.kRay
    observation.verdict = <ActorState>state
    return note_change(actor, actor.slot.Apply(observation))


# ---------------------------------------------------------------------------------------------------------------------


cdef class CertifiedError(Exception):
    """What is known about one failed call, beside its message: the certificate.

    A base of the public error classes, which are also Ray's. Made in C on the refusal path, without any Python-level
    constructor; everything readable is worked out when it is asked for.
    """

    cdef Actor _from_actor
    cdef object _hex_id
    cdef int _state_number
    cdef int _evidence_number
    cdef int64_t _incarnation
    cdef bint _sent
    cdef object _detail

    def __cinit__(self, *args, **kwargs):
        self._incarnation = -1
        self._sent = True

    def _certify(self, *, actor_id=None, sent=True, state="unknown", evidence="none", incarnation=None, detail=None):
        self._hex_id = actor_id
        self._sent = sent
        self._state_number = STATE_NAMES.index(state)
        self._evidence_number = EVIDENCE_NAMES.index(evidence)
        self._incarnation = -1 if incarnation is None else incarnation
        self._detail = detail

    def _certify_refusal(self, Actor actor, detail=None):
        self._from_actor = actor
        self._detail = detail
        _take_belief(self, actor.slot.word())

    def _certify_loss(self, Actor actor, detail=None):
        """The same for a call that was in flight: sent, and about the incarnation that had it."""
        self._certify_refusal(actor, detail)
        self._sent = True
        self._incarnation = -1 if actor.lost_incarnation is None else actor.lost_incarnation

    def _certificate(self):
        """The arguments of `_certify` that would make this error again."""
        return {
            "actor_id": self.actor_id,
            "sent": self._sent,
            "state": STATE_NAMES[self._state_number],
            "evidence": EVIDENCE_NAMES[self._evidence_number],
            "incarnation": self.incarnation,
            "detail": self._detail,
        }

    @property
    def sent(self):
        """False: the call never left this process and cannot have run. True: it may or may not have run."""
        return self._sent

    @property
    def state(self):
        """The ActorState at that moment."""
        return state_members[self._state_number]

    @property
    def evidence(self):
        """Which source said so: "ray", "table", "process", "connection", "silence", "call"; None when no source did."""
        return EVIDENCE_NAMES[self._evidence_number] if self._evidence_number else None

    @property
    def incarnation(self):
        """Ray's restart count at that moment (while restarting: of the one to come); None when unknown."""
        return None if self._incarnation < 0 else self._incarnation

    @property
    def actor_id(self):
        """The actor's id in hex, as Ray prints it; None when unknown."""
        if self._from_actor is not None:
            return self._from_actor.key.hex()
        return self._hex_id

    @property
    def detail(self):
        return self._detail


cdef inline void _take_belief(CertifiedError error, uint64_t word) noexcept:
    cdef Belief belief = DecodeBelief(word)
    error._state_number = <int>belief.state
    error._evidence_number = <int>belief.evidence
    error._incarnation = <int64_t>belief.incarnation if belief.incarnation_known else -1
    error._sent = False


cdef PyObject* refuse(Actor actor, uint64_t word, Refusal reason) noexcept:
    """Sets the refusal as the current exception. Always NULL, as a method returns it."""
    cdef PyObject* error = actorsub_new_exception(<PyObject*>unavailable_error, <PyObject*>empty_tuple)
    if error == NULL:
        return NULL
    (<CertifiedError>error)._from_actor = actor
    _take_belief(<CertifiedError>error, word)
    actor.slot.CountRefused(reason)
    PyErr_SetObject(unavailable_error, <object>error)
    Py_DECREF(<object>error)
    return NULL


# ---------------------------------------------------------------------------------------------------------------------


cdef class HandleBase:
    """The native part of a wrapped handle. Ray's own handle is inside and owns the actor's reference count."""

    cdef Actor actor
    cdef readonly object _actorsub_inner
    cdef readonly object _actorsub_policy

    @property
    def _actorsub_actor(self):
        return self.actor


cdef class MethodBase:
    """The native part of a method of a wrapped handle: `remote`, and what it needs.

    Holds Ray's own handle (through Ray's own method object), never the wrapper: the wrapper keeps its methods, and a
    cycle would keep a dropped actor alive until the garbage collector runs.
    """

    cdef Actor actor
    cdef int on_unavailable
    cdef readonly object _actorsub_inner      # Ray's ActorMethod.
    cdef object call                          # What `remote` calls: its own, with the options applied.
    cdef readonly object _actorsub_policy
    cdef readonly object _actorsub_handle     # Ray's own handle.
    cdef readonly str _actorsub_name
    cdef readonly object _actorsub_options    # Ray's options that were set by .options(), as a dict.
    cdef bint early                           # Its outcomes may be failed early: Ray will not resend the call.

    @property
    def _actorsub_actor(self):
        return self.actor

    def _actorsub_submit(self, unsigned int mark, args, kwargs):
        """Straight to Ray, counted. `mark`: losses() from before the look that let the call through."""
        result = self.call(*args, **kwargs)
        self.actor.slot.CountSubmitted()
        return make_early(self.actor, mark, result) if self.early else result


def fill_handle(HandleBase handle, Actor actor, inner, policy):
    handle.actor = actor
    handle._actorsub_inner = inner
    handle._actorsub_policy = policy
    return handle


cdef object make_early(Actor actor, unsigned int mark, result):
    if type(result) is plain_ref:
        ref = early_ref(result.binary(), result.owner_address(), result.call_site())
        ref._actorsub_actor = actor
        ref._actorsub_mark = mark
        return ref
    return early_result(actor, mark, result)


cdef PyObject* make_early_or_null(Actor actor, unsigned int mark, PyObject* result) except NULL:
    """Takes over the reference to `result` and returns a new one."""
    plain = <object>result
    Py_DECREF(plain)
    made = make_early(actor, mark, plain)
    Py_INCREF(made)
    return <PyObject*>made


ctypedef PyObject* (*early_or_null)(Actor, unsigned int, PyObject*) noexcept


def fill_method(
    MethodBase method, Actor actor, handle, str name, inner, call, options, policy, str on_unavailable, bint early
):
    method.actor = actor
    method._actorsub_handle = handle
    method._actorsub_name = name
    method._actorsub_inner = inner
    method._actorsub_options = options
    method.call = call
    method._actorsub_policy = policy
    method.on_unavailable = ON_UNAVAILABLE[on_unavailable]
    method.early = early and plain_ref is not None
    return method


cdef PyObject* remote_slowly(
    PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames
) except NULL:
    cdef Py_ssize_t i
    cdef list positional = []
    cdef dict keywords = {}
    for i in range(nargs):
        positional.append(<object>args[i])
    if kwnames != NULL:
        names = <tuple>kwnames
        for i in range(len(names)):
            keywords[names[i]] = <object>args[nargs + i]
    result = submit_slowly(<object>self, tuple(positional), keywords)
    Py_INCREF(result)
    return <PyObject*>result


cdef PyObject* remote(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) noexcept:
    """The gate. Two cases are decided here in C: the actor is up and Ray agrees; it is away and the policy is to raise.
    Everything else is for Python."""
    cdef MethodBase method = <MethodBase>self
    cdef Actor actor = method.actor
    cdef uint64_t word
    cdef ActorState state
    cdef int ray_state
    cdef unsigned int mark
    cdef PyObject* result
    if actor is None or actor.generation != fork_generation:
        return (<actorsub_fastcall>remote_slowly)(self, args, nargs, kwnames)
    mark = actor.slot.losses()
    word = actor.slot.word()
    state = StateOf(word)
    # The second look at the losses makes mark and word belong together (slot.h, invariant 4).
    if state == ActorState.kAlive and actor.slot.losses() == mark:
        ray_state = (<int (*)(Actor) noexcept>ray_local_state)(actor)
        if ray_state == <int>ActorState.kAlive:
            result = PyObject_Vectorcall(<PyObject*>method.call, args, nargs, kwnames)
            if result == NULL:
                return NULL
            actor.slot.CountSubmitted()
            if not method.early:
                return result
            return (<early_or_null>make_early_or_null)(actor, mark, result)
        if ray_state == -2:
            # The slow path asks again and lets the error out with a traceback.
            PyErr_Clear()
    elif method.on_unavailable == kOnUnavailableRaise:
        if state == ActorState.kRestarting:
            return refuse(actor, word, Refusal.kRestarting)
        if state == ActorState.kUnreachable:
            return refuse(actor, word, Refusal.kUnreachable)
    return (<actorsub_fastcall>remote_slowly)(self, args, nargs, kwnames)


actorsub_add_remote(<PyTypeObject*>MethodBase, <actorsub_fastcall>remote)


def state(handle):
    """state(handle)

    The ActorState of a wrapped handle's actor: one load from memory, no RPC, any thread.

    Raises TypeError for anything but a wrapped handle (`actorsub.wrap` makes one of a plain Ray handle).
    """
    cdef Actor actor
    if isinstance(handle, HandleBase):
        actor = (<HandleBase>handle).actor
        if actor is not None:
            return state_members[<int>StateOf(actor.slot.word())]
    raise TypeError(f"expected a handle made by actorsub (actorsub.wrap makes one of any Ray handle), got {handle!r}")


# ---------------------------------------------------------------------------------------------------------------------
# The sentinel: one native thread that watches processes and connections. Never destroyed, like the registry.

cdef Sentinel* sentinel = new Sentinel()


def start_sentinel():
    """0, or the errno of what could not be had. Idempotent."""
    return sentinel.Start()


def stop_sentinel():
    with nogil:
        sentinel.Stop()


def sentinel_runs():
    return sentinel.running()


def watch(Actor actor, unsigned int incarnation, str ip, int port, int pid, bint http2):
    """Watches one incarnation with the limits of `actor`, in place of an earlier one. True when something is watched.

    `pid` 0: not on this host. `port` 0: no connection.
    """
    cdef WatchTarget target
    if actor.is_inherited:
        return False
    target.incarnation = incarnation
    target.connect = port != 0
    target.http2 = http2
    target.port = <unsigned short>port
    target.ip = ip.encode()
    target.pid = pid
    target.pid_start_ticks = 0
    target.silence_ns = _nanoseconds(actor.silence_s)
    target.in_flight_silence_ns = _nanoseconds(actor.silence_in_flight_s)
    cdef WatchResult result = sentinel.Watch(actor.reference[0], target)
    actor.watched = result == WatchResult.kWatching or result == WatchResult.kUnchanged
    return actor.watched


def unwatch(Actor actor):
    if not actor.is_inherited:
        _unwatch(actor.key)
        actor.watched = False


def _unwatch(bytes key):
    cdef ActorId id
    memcpy(id.data(), <const char*>key, 16)
    sentinel.Unwatch(id)


def update_limits(Actor actor):
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
    """The events since the last call, in order: (Actor or None, kind, cause, seen_s)."""
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
        ))
    return drained


def sentinel_counters():
    cdef SentinelCounters counters = sentinel.counters()
    return counters


os.register_at_fork(after_in_child=after_fork_in_child)
