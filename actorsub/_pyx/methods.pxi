# Method objects, and the way of `.remote()`.


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
