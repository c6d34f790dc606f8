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
