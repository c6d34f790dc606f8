# cython: language_level=3, binding=False, embedsignature=True, auto_pickle=False, autotestdict=False
"""The compiled core: an actor's state, and the gate that every `.remote()` of a wrapped handle passes.

Nothing here imports Ray. The Python layer hands in, once, where Ray's local actor state is read (`bind_ray`), how
Ray's core takes a call (`bind_direct`), which of Ray's refs take another class (`bind_refs`), and which Python classes
to return and raise (`bind_types`). It knows the shape of Ray's call all the same: `give` and `remote` pass the
arguments of Ray's `submit_actor_task` in their order, which `_ray_compat` compares with the installed Ray.

Threads: everything here runs with the GIL. It is released in two places, because only they can block:
`wait_for_events` and `stop_sentinel`.
"""

cimport cython
from cpython.exc cimport PyErr_Clear, PyErr_Occurred, PyErr_SetObject
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from cython.operator cimport dereference
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from actorsub._cpp.actor_state cimport (
    ActorState,
    ActorStateName,
    Belief,
    DecodeBelief,
    Evidence,
    EvidenceName,
    InDoubt,
    Observation,
    StateOf,
)
from actorsub._cpp.balancer cimport (
    BalancerKind,
    Census,
    GroupHealth,
    HealthOptions,
    Member,
    NoPickName,
    Outcome,
    Picker,
    PickerOptions,
    PickRequest,
    PickResult,
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
from actorsub._cpp.gate cimport AwayRule, Gate, GateFor, PendingRule
from actorsub._cpp.slot cimport ActorId, Change, Refusal, RefusalName, Slot
from actorsub._cpp.submit_queue cimport (
    Admission,
    Begin,
    BeginVerdict,
    Cancellation,
    CancelVerdict,
    CallRules,
    Completion,
    End,
    Ended,
    EndName,
    Expiry,
    QueueCounters,
    SubmitQueue,
    Ticket,
    Verdict,
)

import os
import weakref
from inspect import Parameter


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

    // Methods are kept in the handle's dict, so reading one is a plain attribute. A class with a `__getattr__` written
    // in Python, as Ray's and ours are, looks that one up at each access first; from 3.12 on the interpreter's cache of
    // attributes avoids that, and would not serve a class with a slot like this.
    #if PY_VERSION_HEX < 0x030C0000
    static getattrofunc actorsub_full_getattro = NULL;

    static PyObject* actorsub_getattro(PyObject* object, PyObject* name) {
        PyObject* value = PyObject_GenericGetAttr(object, name);
        if (value != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
        PyErr_Clear();
        return actorsub_full_getattro(object, name);
    }

    static void actorsub_hasten_getattr(PyTypeObject* type) {
        if (type->tp_getattro == actorsub_getattro) return;
        actorsub_full_getattro = type->tp_getattro;
        type->tp_getattro = actorsub_getattro;
        PyType_Modified(type);
    }
    #else
    static void actorsub_hasten_getattr(PyTypeObject*) {}
    #endif

    // Makes a new instance of `type` one of its subclass `to`, as assigning `__class__` does for classes written in
    // Python: sound where both have the same layout, which is looked at once (`actorsub_same_layout`).
    static void actorsub_relabel(PyObject* object, PyTypeObject* to) {
        Py_INCREF(to);
        Py_SET_TYPE(object, to);
    }

    static PyObject** actorsub_tuple_items(PyObject* tuple) {
        return reinterpret_cast<PyTupleObject*>(tuple)->ob_item;
    }

    static int actorsub_same_layout(PyTypeObject* type, PyTypeObject* subclass) {
        const unsigned long layout = Py_TPFLAGS_HAVE_GC;
        return subclass->tp_base == type && !(type->tp_flags & Py_TPFLAGS_HEAPTYPE) &&
               subclass->tp_basicsize == type->tp_basicsize && subclass->tp_itemsize == 0 && type->tp_itemsize == 0 &&
               subclass->tp_dictoffset == 0 && subclass->tp_weaklistoffset == 0 &&
               (subclass->tp_flags & layout) == (type->tp_flags & layout) &&
               (type->tp_free == subclass->tp_free);
    }

    static void actorsub_set_dealloc(PyTypeObject* type, destructor dealloc) { type->tp_dealloc = dealloc; }

    // The base frees the object but, being a static type, not its hold on the class.
    static void actorsub_dealloc_as(PyTypeObject* base, PyObject* object) {
        PyTypeObject* type = Py_TYPE(object);
        base->tp_dealloc(object);
        Py_DECREF(type);
    }

    static PyObject* actorsub_new_exception(PyObject* type, PyObject* empty_tuple) {
        // Not a call of the type: that would run Ray's Python-level __init__, which formats a message.
        return reinterpret_cast<PyTypeObject*>(type)->tp_new(reinterpret_cast<PyTypeObject*>(type), empty_tuple, NULL);
    }
    """
    ctypedef PyObject* (*actorsub_fastcall)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) noexcept
    int actorsub_add_remote(PyTypeObject* type, actorsub_fastcall function) except -1
    PyObject* actorsub_new_exception(PyObject* type, PyObject* empty_tuple) noexcept
    void actorsub_hasten_getattr(PyTypeObject* type) noexcept
    ctypedef void (*destructor)(PyObject*) noexcept
    void actorsub_relabel(PyObject* object, PyTypeObject* to) noexcept
    bint actorsub_same_layout(PyTypeObject* type, PyTypeObject* subclass) noexcept
    void actorsub_set_dealloc(PyTypeObject* type, destructor dealloc) noexcept
    void actorsub_dealloc_as(PyTypeObject* base, PyObject* object) noexcept

cdef extern from "Python.h":
    PyObject* PyObject_Vectorcall(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* kwnames) noexcept
    PyObject* PyObject_VectorcallMethod(PyObject* name, PyObject* const* args, size_t nargs, PyObject* kwnames) noexcept
    PyObject* PyDict_GetItem(PyObject* dictionary, PyObject* key) noexcept
    PyObject* PyList_New(Py_ssize_t size) noexcept
    void PyList_SET_ITEM(PyObject* list, Py_ssize_t index, PyObject* item) noexcept
    PyObject* PyList_GET_ITEM(PyObject* list, Py_ssize_t index) noexcept
    PyObject* PyTuple_GET_ITEM(PyObject* tuple, Py_ssize_t index) noexcept
    PyObject** tuple_items "actorsub_tuple_items"(PyObject* tuple) noexcept
    Py_ssize_t PyTuple_GET_SIZE(PyObject* tuple) noexcept
    bint PyObject_TypeCheck(PyObject* thing, PyTypeObject* type) noexcept
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
cdef object handle_rebuilder = None     # (serialized, weak, changes of the policy) -> handle.
cdef tuple empty_tuple = ()
cdef object ref_class = None            # Ray's ObjectRef, always.
cdef object plain_ref = None            # Ray's ObjectRef; None where the installed Ray's cannot be made anew.
cdef object early_ref = None            # The subclass that fails early (refs.ObjectRef).
cdef object early_result = None         # The same for lists and generators: (actor, mark, result) -> result.
cdef bint can_relabel = False           # A plain ref can be made an early one as it is, without a copy.

cdef str submit_method = None           # Name of the core worker's method that takes a call; None: not known.
cdef bytes positional_marker = None
cdef dict tracing_flags = {}
cdef object not_tracing = False
cdef str tracing_flag_name = ""

# Rises by one in every forked child, so that handles of the parent know that they are not in their process any more.
cdef unsigned long fork_generation = 0

# Never destroyed: slots may outlive this module's teardown at interpreter exit.
cdef Registry* registry = new Registry()
cdef object registry_session = None     # The session that `registry` is for.
cdef dict actors = {}                   # id (bytes) -> weak reference to its Actor.

STATE_NAMES = tuple([ActorStateName(<ActorState><int>i).decode() for i in range(6)])
EVIDENCE_NAMES = tuple([EvidenceName(<Evidence><int>i).decode() for i in range(7)])
REFUSAL_NAMES = tuple([RefusalName(<Refusal><int>i).decode() for i in range(6)])

# What `.remote()` may do while the actor is away, as `fill_method` takes it. "ray": Ray resends the call and gets it.
WISHES = {"ref": 0, "raise": 1, "wait": 2, "ray": 3}
cdef int kOnUnavailableRef = 0
cdef int kOnUnavailableRaise = 1

# The same for the gate (csrc/gate.h), which does not care in which form a call is refused.
AWAY_RULES = {
    "ref": <int>AwayRule.kRefuse, "raise": <int>AwayRule.kRefuse,
    "wait": <int>AwayRule.kHold,
    "ray": <int>AwayRule.kPass,
}
# By the policy's `on_pending`.
PENDING_RULES = {
    "submit": <int>PendingRule.kPass, "fail": <int>PendingRule.kRefuse, "wait": <int>PendingRule.kHold
}
cdef tuple GATE_NAMES = ("pass", "hold", "refuse")


def gate(str state not None, str wish not None, str on_pending not None):
    """Whether a call goes on now: "pass", "hold" or "refuse". `state`: the name of an ActorState, in small letters."""
    cdef int number = STATE_NAMES.index(state)
    cdef int away = AWAY_RULES[wish]
    cdef int pending = PENDING_RULES[on_pending]
    return GATE_NAMES[<int>GateFor(<ActorState>number, <AwayRule>away, <PendingRule>pending)]


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
    global plain_ref, early_ref, early_result, can_relabel
    plain_ref = plain
    early_ref = early
    early_result = other
    can_relabel = actorsub_same_layout(<PyTypeObject*>plain, <PyTypeObject*>early)
    actorsub_set_dealloc(<PyTypeObject*>early, forget_ref)


def bind_direct(ref, str name, bytes positional, dict tracing, str tracing_flag):
    """Says how Ray's core takes a call: the method `name` of `worker.<core_worker>`, with `positional` before each
    positional argument. While `tracing[tracing_flag]` is true every call goes through Ray's Python layers."""
    global ref_class, submit_method, positional_marker, tracing_flags, tracing_flag_name
    ref_class = ref
    submit_method = name
    positional_marker = positional
    tracing_flags = tracing
    tracing_flag_name = tracing_flag


def bind_types(tuple states, unavailable, handle, slow, rebuild):
    """Hands in the Python classes: the members of ActorState in order, the class that a refusal raises, the class of
    handles, the function that `.remote()` calls whenever its fast path does not apply, and what `rebuild_handle` calls.
    """
    global state_members, unavailable_error, submit_slowly, handle_rebuilder
    if not issubclass(unavailable, CertifiedError):
        raise TypeError(f"{unavailable!r} must derive from CertifiedError")
    if not issubclass(handle, HandleBase):
        raise TypeError(f"{handle!r} must derive from HandleBase")
    if len(states) != len(STATE_NAMES):
        raise ValueError(f"expected {len(STATE_NAMES)} states, got {len(states)}")
    state_members = states
    unavailable_error = unavailable
    submit_slowly = slow
    handle_rebuilder = rebuild
    actorsub_hasten_getattr(<PyTypeObject*>handle)


def rebuild_handle(serialized, weak_ref, changes):
    """What a pickled handle calls where it arrives. Here because CloudPickler takes a function written in Python apart,
    to see whether its name will find it."""
    return handle_rebuilder(serialized, weak_ref, changes)


cdef class Traveller:
    """Pickles as a call of `rebuild_handle` with these arguments; see _ray_compat, "Travelling"."""

    cdef tuple arguments

    def __cinit__(self, tuple arguments not None):
        self.arguments = arguments

    def __add__(self, weak_flag):
        return self

    def __reduce__(self):
        return rebuild_handle, self.arguments


def after_fork_in_child():
    """Forgets everything of the parent. Its slots are leaked on purpose: their memory is shared copy-on-write, and a
    lock in there may have been held by a thread that does not exist here."""
    global fork_generation, registry, sentinel
    fork_generation += 1
    registry = new Registry()
    actors.clear()
    queues_by_number.clear()
    later.clear()
    # Its thread is not in this process; it closes its descriptors here and is leaked with its memory.
    sentinel.AbandonAfterFork()


# ---------------------------------------------------------------------------------------------------------------------


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

    # Without parameters: taking `*args, **kwargs` would make a dict for each refusal.
    def __cinit__(self):
        self._incarnation = -1
        self._sent = True

    def _certify(
        self, *, actor_id=None, sent=True, state="unknown", evidence="none", incarnation=None, detail=None,
        Actor actor=None
    ):
        if actor is not None:
            self._from_actor = actor
        self._hex_id = actor_id
        self._sent = sent
        self._state_number = STATE_NAMES.index(state)
        self._evidence_number = EVIDENCE_NAMES.index(evidence)
        self._incarnation = -1 if incarnation is None else incarnation
        self._detail = detail

    def _certify_refusal(self, Actor actor not None, detail=None):
        self._from_actor = actor
        self._detail = detail
        _take_belief(self, actor.slot.word())

    def _certify_loss(self, Actor actor not None, detail=None):
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
    def _actor(self):
        """The Actor that the error is about, whose record may learn more; None where it came from elsewhere."""
        return self._from_actor

    @property
    def sent(self):
        """False: the call cannot have run; it never left this process, or its actor was never up. True: it may or may
        not have run."""
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


# The bit of a parameter that always counts as given.
cdef enum:
    kReserved = 63


cdef class Submission:
    """How the calls of one method are given to Ray's core, past Ray's Python layers.

    Args:
        arguments: of the core's submit method, all but the call's own, whose place is `place`.
        num_returns: 0 or 1, or more: then a list is returned.
        parameters: (name, kind, required) of the method's signature, in order; kind as in inspect.Parameter.

    It takes calls of common shapes only; what does not fit the signature, or is unusual, is left to Ray, so that the
    behaviour and the errors are Ray's.
    """

    cdef tuple arguments
    cdef Py_ssize_t place
    cdef int num_returns
    cdef Py_ssize_t named_positional
    cdef bint any_positional
    cdef dict keywords                  # Name -> number of the parameter.
    cdef bint any_keyword
    cdef uint64_t required              # One bit for each parameter.

    def __cinit__(self, tuple arguments not None, Py_ssize_t place, int num_returns, list parameters not None):
        cdef uint64_t bit = 1
        cdef Py_ssize_t number = 0
        if len(parameters) > kReserved or not 0 <= place < len(arguments) < 32:
            raise ValueError(f"at most 63 parameters and 31 arguments, got {len(parameters)} and {len(arguments)}")
        self.arguments = arguments
        self.place = place
        self.num_returns = num_returns
        self.keywords = {}
        for name, kind, required in parameters:
            if kind == Parameter.VAR_POSITIONAL:
                self.any_positional = True
            elif kind == Parameter.VAR_KEYWORD:
                self.any_keyword = True
            else:
                if kind != Parameter.KEYWORD_ONLY:
                    self.named_positional += 1
                # Given by keyword, whether a positional-only one may go to **kwargs depends on Python's version.
                self.keywords[name] = number if kind != Parameter.POSITIONAL_ONLY else kReserved
                if required:
                    self.required |= bit << number
                number += 1
        # Ray's own way has arguments of these names before the method's; what it says about them is for Ray to say.
        self.keywords["self"] = kReserved
        self.keywords["_ray_trace_ctx"] = kReserved

    def flatten(self, tuple args not None, dict kwargs):
        """The arguments as Ray's core takes them, as a list; None where Ray's own code has to look."""
        cdef PyObject* flat = flatten_both(self, args, kwargs)
        if flat == NULL:
            return None
        result = <object>flat
        Py_DECREF(result)
        return result


cdef PyObject* flatten(
    Submission submission, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames
) noexcept:
    """A new list of the arguments as Ray's core takes them. NULL, without an exception: Ray's own code must look."""
    cdef Py_ssize_t count = nargs, given = 0, i, number
    cdef uint64_t present
    cdef PyObject* name
    cdef PyObject* found
    cdef PyObject* item
    cdef PyObject* flat
    if nargs > submission.named_positional and not submission.any_positional:
        return NULL
    if kwnames != NULL:
        given = PyTuple_GET_SIZE(kwnames)
        count += given
    for i in range(count):
        # Ray looks at refs among the arguments: their values may have to travel by other ways.
        if PyObject_TypeCheck(args[i], <PyTypeObject*>ref_class):
            return NULL
    # Positional arguments beyond the named parameters belong to *args.
    present = (<uint64_t>1 << min(nargs, submission.named_positional)) - 1 | <uint64_t>1 << kReserved
    for i in range(given):
        name = PyTuple_GET_ITEM(kwnames, i)
        found = PyDict_GetItem(<PyObject*>submission.keywords, name)
        if found == NULL:
            if not submission.any_keyword:
                return NULL
            continue
        number = <object>found
        if present >> number & 1:
            return NULL
        present |= <uint64_t>1 << number
    if submission.required & ~present:
        return NULL
    flat = PyList_New(2 * count)
    if flat == NULL:
        PyErr_Clear()
        return NULL
    for i in range(count):
        item = <PyObject*>positional_marker if i < nargs else PyTuple_GET_ITEM(kwnames, i - nargs)
        Py_INCREF(<object>item)
        PyList_SET_ITEM(flat, 2 * i, item)
        Py_INCREF(<object>args[i])
        PyList_SET_ITEM(flat, 2 * i + 1, args[i])
    return flat


cdef PyObject* flatten_both(Submission submission, tuple args, dict kwargs) except? NULL:
    """flatten() of a tuple and a dict."""
    cdef PyObject* kwnames = NULL
    cdef tuple values = args
    if kwargs:
        values = args + tuple(kwargs.values())
        names = tuple(kwargs)
        kwnames = <PyObject*>names
    return flatten(submission, tuple_items(<PyObject*>values), len(args), kwnames)


cdef PyObject* submit_directly(
    Submission submission, PyObject* core_worker, PyObject* flat
) noexcept:
    """Gives one call to Ray's core; the result in the shape of `.remote()`, or NULL with an exception of Ray's core.
    Takes over the reference to `flat`."""
    cdef PyObject* stack[32]
    cdef PyObject* arguments = <PyObject*>submission.arguments
    cdef Py_ssize_t count = PyTuple_GET_SIZE(arguments), i
    cdef PyObject* refs
    cdef PyObject* result
    stack[0] = core_worker
    for i in range(count):
        stack[i + 1] = PyTuple_GET_ITEM(arguments, i)
    stack[submission.place + 1] = flat
    refs = PyObject_VectorcallMethod(<PyObject*>submit_method, stack, count + 1, NULL)
    Py_DECREF(<object>flat)
    if refs == NULL or submission.num_returns > 1:
        return refs
    result = PyList_GET_ITEM(refs, 0) if submission.num_returns == 1 else <PyObject*>None
    Py_INCREF(<object>result)
    Py_DECREF(<object>refs)
    return result


cdef bint may_submit_directly(Submission submission) noexcept:
    return submission is not None and PyDict_GetItem(
        <PyObject*>tracing_flags, <PyObject*>tracing_flag_name
    ) == <PyObject*>not_tracing


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
    cdef int on_unavailable                   # One of WISHES.
    cdef AwayRule away                        # What that is to the gate.
    cdef readonly str _actorsub_wish          # Its name.
    cdef readonly object _actorsub_inner      # Ray's ActorMethod.
    cdef object remote_call                   # What `remote` calls: Ray's own, with the options applied.
    cdef readonly object _actorsub_policy
    cdef readonly object _actorsub_handle     # Ray's own handle.
    cdef readonly str _actorsub_name
    cdef readonly object _actorsub_options    # Ray's options that were set by .options(), as a dict.
    cdef bint early                           # Its outcomes may be failed early: Ray will not resend the call.
    cdef Submission submission                # How to do what `remote_call` does without it; None: not possible.
    cdef public object _actorsub_plan         # What `.call()` needs (calls.Plan), made when it is first used.
    cdef readonly dict _actorsub_variants     # What `.options()` made: its options -> the method.
    # What `.call()` needs whatever the policy is, once that is known; one list for all variants with Ray's options as
    # here. Not the line of the method that this is a variant of, because that one has its variants: a cycle.
    cdef readonly list _actorsub_shared

    @property
    def _actorsub_actor(self):
        return self.actor

    def _actorsub_submit(self, unsigned int mark, args, kwargs):
        """Straight to Ray, counted. `mark`: losses() from before the look that let the call through."""
        result = self.remote_call(*args, **kwargs)
        self.actor.slot.CountSubmitted()
        return make_early(self.actor, mark, result) if self.early else result


def fill_handle(HandleBase handle not None, Actor actor not None, inner, policy):
    handle.actor = actor
    handle._actorsub_inner = inner
    handle._actorsub_policy = policy
    return handle


# ---------------------------------------------------------------------------------------------------------------------
# Refs that fail early: which actor a ref is about, and from when. Beside the refs rather than in them, because a ref of
# the subclass is Ray's own object with another class: making a second one would cost two operations on Ray's reference
# counter, which its own threads contend for.

ctypedef PyObject* ObjectAddress

cdef struct RefNote:
    PyObject* actor      # Counted.
    unsigned int mark

# Guarded by the GIL. Never destroyed: refs may outlive this module's teardown.
cdef unordered_map[ObjectAddress, RefNote]* ref_notes = new unordered_map[ObjectAddress, RefNote]()


cdef void forget_ref(PyObject* ref) noexcept:
    """tp_dealloc of the subclass."""
    cdef PyObject* actor = NULL
    cdef unordered_map[ObjectAddress, RefNote].iterator found = ref_notes.find(ref)
    if found != ref_notes.end():
        actor = dereference(found).second.actor
        ref_notes.erase(found)
    actorsub_dealloc_as(<PyTypeObject*>plain_ref, ref)
    if actor != NULL:
        Py_DECREF(<object>actor)


def early_of(plain, Actor actor not None, unsigned int mark):
    """An ObjectRef of the subclass for the same object: `plain` itself, where the installed Ray's layout allows it.

    `plain` must have been made just now: nobody else may hold it.
    """
    cdef RefNote note
    ref = plain
    if type(plain) is plain_ref:
        if can_relabel:
            actorsub_relabel(<PyObject*>plain, <PyTypeObject*>early_ref)
        else:
            try:
                ref = early_ref(plain.binary(), plain.owner_address(), plain.call_site())
            except Exception:
                if ray_core_worker() is not None:
                    raise
                # The connection ended after the call was sent: there is nothing to be failed early any more.
                return plain
    elif not isinstance(ref, early_ref) or ref_notes.count(<PyObject*>ref):
        return ref
    note.actor = <PyObject*>actor
    note.mark = mark
    dereference(ref_notes)[<ObjectAddress>ref] = note
    Py_INCREF(actor)
    return ref


def call_of(ref):
    """(actor, mark) of a ref that fails early; (None, 0) of any other."""
    cdef unordered_map[ObjectAddress, RefNote].iterator found = ref_notes.find(<PyObject*>ref)
    if found == ref_notes.end():
        return None, 0
    return <object>dereference(found).second.actor, dereference(found).second.mark


cdef object make_early(Actor actor, unsigned int mark, result):
    if type(result) is plain_ref:
        return early_of(result, actor, mark)
    return early_result(actor, mark, result)


cdef PyObject* make_early_or_null(Actor actor, unsigned int mark, PyObject* result) except NULL:
    """Takes over the reference to `result` and returns a new one."""
    plain = <object>result
    Py_DECREF(plain)
    made = make_early(actor, mark, plain)
    Py_INCREF(made)
    return <PyObject*>made


# The types under which functions that may raise are called where a raised exception is simply NULL.
ctypedef PyObject* (*early_or_null)(Actor, unsigned int, PyObject*) noexcept
ctypedef PyObject* (*core_or_null)() noexcept
ctypedef int (*state_or_error)(Actor, object) noexcept
ctypedef PyObject* (*failed_ref_or_null)(
    MethodBase, uint64_t, Refusal, PyObject* const*, Py_ssize_t, PyObject*
) noexcept


def fill_method(
    MethodBase method not None, Actor actor not None, handle, str name, inner, call, options, policy, str wish,
    bint early, Submission submission
):
    method.actor = actor
    method._actorsub_handle = handle
    method._actorsub_name = name
    method._actorsub_inner = inner
    method._actorsub_options = options
    method.remote_call = call
    method._actorsub_policy = policy
    method.on_unavailable = WISHES[wish]
    method.away = <AwayRule><int>AWAY_RULES[wish]
    method._actorsub_wish = wish
    method.early = early and plain_ref is not None
    method.submission = submission
    method._actorsub_variants = {}
    method._actorsub_shared = []
    return method


def fill_variant(MethodBase method not None, MethodBase like not None, policy, str wish):
    """As fill_method(), for the same method under another policy."""
    fill_method(
        method, like.actor, like._actorsub_handle, like._actorsub_name, like._actorsub_inner, like.remote_call,
        like._actorsub_options, policy, wish, like.early, like.submission
    )
    method._actorsub_shared = like._actorsub_shared
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
    cdef Refusal reason
    cdef PyObject* core_worker
    cdef PyObject* result
    if actor is None or actor.generation != fork_generation or actor.is_over:
        return (<actorsub_fastcall>remote_slowly)(self, args, nargs, kwnames)
    mark = actor.slot.losses()
    word = actor.slot.word()
    state = StateOf(word)
    # The second look at the losses makes mark and word belong together (slot.h, invariant 4).
    if state == ActorState.kAlive and actor.slot.losses() == mark:
        core_worker = (<core_or_null>ray_core_worker)()
        ray_state = -2
        if core_worker != NULL:
            ray_state = (<state_or_error>ray_local_state)(actor, <object>core_worker)
            if ray_state == <int>ActorState.kAlive:
                return submit(method, mark, core_worker, args, nargs, kwnames)
            Py_DECREF(<object>core_worker)
        if ray_state == -2:
            # The slow path asks again and lets the error out with a traceback.
            PyErr_Clear()
    elif (
        (state == ActorState.kRestarting or state == ActorState.kUnreachable)
        and GateFor(state, method.away, PendingRule.kPass) == Gate.kRefuse
    ):
        reason = Refusal.kRestarting if state == ActorState.kRestarting else Refusal.kUnreachable
        if method.on_unavailable == kOnUnavailableRaise:
            return refuse(actor, word, reason)
        if method.on_unavailable == kOnUnavailableRef and method.submission is not None:
            result = (<failed_ref_or_null>take_failed_ref)(method, word, reason, args, nargs, kwnames)
            if result != NULL or PyErr_Occurred() != NULL:
                return result
    return (<actorsub_fastcall>remote_slowly)(self, args, nargs, kwnames)


cdef PyObject* take_failed_ref(
    MethodBase method, uint64_t word, Refusal reason, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames
) except? NULL:
    """A ref from a stock that needs no filling, for arguments that fit. NULL, without an exception: Python decides."""
    cdef Supply supply = method.actor.supply
    cdef PyObject* flat
    if supply is None or supply.version != DecodeBelief(word).version or method.submission.num_returns != 1:
        return NULL
    if not supply.refs or not (supply.filling or 2 * len(supply.refs) > supply.wanted + 1):
        return NULL
    flat = flatten(method.submission, args, nargs, kwnames)
    if flat == NULL:
        return NULL
    Py_DECREF(<object>flat)
    ref = supply.refs.pop()
    method.actor.slot.CountRefused(reason)
    Py_INCREF(ref)
    return <PyObject*>ref


cdef PyObject* submit(
    MethodBase method, unsigned int mark, PyObject* core_worker, PyObject* const* args, Py_ssize_t nargs,
    PyObject* kwnames
) noexcept:
    """Straight to Ray, counted. Takes over the reference to `core_worker`."""
    cdef PyObject* flat = NULL
    cdef PyObject* result
    if may_submit_directly(method.submission):
        flat = flatten(method.submission, args, nargs, kwnames)
    if flat != NULL:
        result = submit_directly(method.submission, core_worker, flat)
    else:
        result = PyObject_Vectorcall(<PyObject*>method.remote_call, args, nargs, kwnames)
    Py_DECREF(<object>core_worker)
    if result == NULL:
        return NULL
    method.actor.slot.CountSubmitted()
    return (<early_or_null>make_early_or_null)(method.actor, mark, result) if method.early else result


actorsub_add_remote(<PyTypeObject*>MethodBase, <actorsub_fastcall>remote)


cdef object ray_has_news = None


def bind_news(function):
    """Hands in what is called with an Actor of which `state` has learnt something from Ray."""
    global ray_has_news
    ray_has_news = function


@cython.embedsignature(False)
def state(handle):
    """state(handle)\n--\n\n    The ActorState of a wrapped handle's actor: one load from memory, no RPC, any thread.

        >>> actorsub.state(worker)
        <ActorState.ALIVE: 'alive'>

    Where that is not ALIVE, Ray's local state is looked at, too, so that it is ALIVE once a call has been answered. It
    is UNKNOWN once the connection to Ray that the handle belongs to has ended.

    Raises TypeError for anything but a wrapped handle (`actorsub.wrap` makes one of a plain Ray handle).
    """
    cdef Actor actor
    cdef ActorState known
    if isinstance(handle, HandleBase):
        actor = (<HandleBase>handle).actor
        if actor is not None:
            known = ActorState.kUnknown if actor.is_over else StateOf(actor.slot.word())
            if known != ActorState.kAlive and not actor.is_over and actor.generation == fork_generation:
                # Ray had the actor up before it sent the call that was answered; the watcher's next look may be later.
                if ray_core_worker() is actor.session and actor.session is not None and observe_ray(actor):
                    ray_has_news(actor)
                known = StateOf(actor.slot.word())
            return state_members[<int>known]
    raise TypeError(
        "expected a handle made by actorsub (actorsub.wrap makes one of any Ray handle), "
        f"got one of type {type(handle).__name__}"
    )


# ---------------------------------------------------------------------------------------------------------------------
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


# ---------------------------------------------------------------------------------------------------------------------
# Groups: the binding of the balancers. See balancer.h for what the words mean.

BALANCERS = {
    "round_robin": <int>BalancerKind.kRoundRobin,
    "least_loaded": <int>BalancerKind.kLeastLoaded,
    "consistent_hash": <int>BalancerKind.kConsistentHash,
}
OUTCOMES = {
    "success": <int>Outcome.kSuccess,
    "application_error": <int>Outcome.kApplicationError,
    "failure": <int>Outcome.kFailure,
    "unsent": <int>Outcome.kUnsent,
    "lost": <int>Outcome.kLost,
}
MEMBER_HEALTH = ("healthy", "ejected", "probing")


cdef class GroupState:
    """What the members of one group share (GroupHealth). Options as in HealthOptions, times in seconds."""

    cdef GroupHealth* health

    def __cinit__(
        self, *, bint eject, unsigned int consecutive_failures, double base_ejection_s, double max_ejection_s,
        double max_ejected_share
    ):
        cdef HealthOptions options
        options.eject = eject
        options.consecutive_failures = consecutive_failures
        options.base_ejection_ns = _nanoseconds(base_ejection_s)
        options.max_ejection_ns = _nanoseconds(max_ejection_s)
        options.max_ejected_share = max_ejected_share
        self.health = new GroupHealth(options)

    def __dealloc__(self):
        del self.health

    def counters(self):
        return {
            "in_flight": self.health.in_flight(),
            "ejected": self.health.ejected(),
            "ejection_limit": self.health.EjectionLimit(),
            "ejections": self.health.ejections(),
            "ejections_refused": self.health.ejections_refused(),
            "probes": self.health.probes(),
        }


cdef class GroupMember:
    """One replica of one group."""

    cdef Member* member
    cdef readonly GroupState group
    cdef readonly Actor actor
    cdef readonly object handle
    # What group_call.py makes of the handle's methods. Here, so that a member that was removed takes them with it.
    cdef readonly dict methods
    cdef unsigned long generation

    def __cinit__(self, GroupState group not None, Actor actor not None, handle):
        self.group = group
        self.actor = actor
        self.handle = handle
        self.methods = {}
        self.generation = fork_generation
        self.member = new Member(group.health, actor.slot)

    def __dealloc__(self):
        if self.generation == fork_generation:
            del self.member

    def start(self):
        """One attempt begins; returns when, for end()."""
        cdef int64_t now_ns = Clock.Monotonic().NowNs()
        self.member.OnStart(now_ns)
        return now_ns

    def end(self, int outcome, int64_t started_ns, unsigned int probe):
        cdef int64_t now_ns = Clock.Monotonic().NowNs()
        self.member.OnEnd(<Outcome>outcome, now_ns - started_ns, now_ns, probe)

    def retire(self):
        self.member.Retire()

    @property
    def in_flight(self):
        return self.member.in_flight()

    @property
    def health(self):
        return MEMBER_HEALTH[<int>self.member.health()]

    @property
    def failures_in_a_row(self):
        return self.member.failures_in_a_row()

    @property
    def started(self):
        return self.member.started()


cdef class GroupPicker:
    """Chooses among a fixed list of GroupMembers; a change of membership makes a new one."""

    cdef Picker* picker
    cdef readonly list members
    cdef readonly dict index_of
    # The one that took its place, in a list; empty while it is the present one.
    cdef readonly list next
    cdef bint use_pending

    def __cinit__(
        self, list members not None, int kind, *, double panic_share, double bounded_load, bint use_pending,
        uint64_t seed
    ):
        cdef PickerOptions options
        cdef vector[Member*] native
        cdef GroupMember member
        options.kind = <BalancerKind>kind
        options.panic_share = panic_share
        options.bounded_load = bounded_load
        options.use_pending = use_pending
        options.seed = seed
        if kind not in BALANCERS.values():
            raise ValueError(f"no balancer has the number {kind}")
        for member in members:
            if member is None:
                raise TypeError("None is no member")
            native.push_back(member.member)
        self.members = members
        self.index_of = {member: i for i, member in enumerate(members)}
        self.use_pending = use_pending
        self.next = []
        self.picker = new Picker(options, native)

    def __dealloc__(self):
        del self.picker

    def pick(self, uint64_t key, tried):
        """(GroupMember, probe), or (None, reason). `tried`: GroupMembers that are not to be picked."""
        cdef vector[int32_t] excluded
        cdef PickRequest request
        cdef PickResult result
        for member in tried:
            index = self.index_of.get(member)
            if index is not None:
                excluded.push_back(index)
        request.key = key
        request.excluded = excluded.data()
        request.excluded_count = excluded.size()
        request.now_ns = Clock.Monotonic().NowNs()
        result = self.picker.Pick(request)
        if result.index < 0:
            return None, NoPickName(result.reason).decode()
        return self.members[result.index], result.probe

    def follow(self, GroupPicker after):
        """Makes `after` the one that takes its place. False where another one has already."""
        if self.next:
            return False
        self.next.append(after)
        return True

    def able(self):
        """How many members could take a call: those that are up, and, unless they refuse until then, those whose actor
        was never up yet."""
        cdef Census census = self.picker.Count()
        return census.up + (census.pending if self.use_pending else 0)


# ---------------------------------------------------------------------------------------------------------------------
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
