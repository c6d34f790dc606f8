# Errors with a certificate, made in C on the way of a refusal.


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
