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
