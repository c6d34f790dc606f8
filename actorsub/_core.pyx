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


cdef extern from "shims.h":
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


# By topic; one module all the same (Cython's `include` is textual), so that calls between them stay direct.

include "_pyx/actors.pxi"
include "_pyx/errors.pxi"
include "_pyx/methods.pxi"
include "_pyx/refs.pxi"
include "_pyx/calls.pxi"
include "_pyx/groups.pxi"
include "_pyx/sentinel.pxi"
