from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from actorsub._cpp.slot cimport ActorId, Slot

cdef extern from "balancer.h" namespace "actorsub" nogil:
    cdef enum class BalancerKind(unsigned char):
        kRoundRobin
        kLeastLoaded
        kConsistentHash
        kRandom

    cdef enum class Outcome(unsigned char):
        kSuccess
        kApplicationError
        kFailure
        kUnsent
        kLost

    cdef cppclass HealthOptions:
        HealthOptions()
        cbool eject
        uint32_t consecutive_failures
        int64_t base_ejection_ns
        int64_t max_ejection_ns
        int64_t ejection_decay_ns
        double max_ejected_share
        int64_t probe_timeout_ns
        int64_t failure_latency_ns

    cdef cppclass PickerOptions:
        PickerOptions()
        BalancerKind kind
        cbool use_pending
        double panic_share
        double bounded_load
        uint32_t virtual_nodes
        int64_t census_period_ns
        uint64_t seed

    cdef cppclass GroupHealth:
        GroupHealth(const HealthOptions& options) except +
        uint32_t members() noexcept
        uint32_t ejected() noexcept
        uint32_t EjectionLimit() noexcept
        int64_t in_flight() noexcept
        uint64_t ejections() noexcept
        uint64_t ejections_refused() noexcept
        uint64_t probes() noexcept

    cdef enum class MemberHealth(unsigned char):
        kHealthy
        kEjected
        kProbing

    cdef cppclass Member:
        Member(GroupHealth* group, const Slot* slot) except +
        const ActorId& id() noexcept
        void OnStart(int64_t now_ns) noexcept
        void OnEnd(Outcome outcome, int64_t latency_ns, int64_t now_ns, uint32_t probe) noexcept
        void Retire() noexcept
        int64_t in_flight() noexcept
        MemberHealth health() noexcept
        int64_t until_ns() noexcept
        uint32_t failures_in_a_row() noexcept
        uint32_t ejections_in_a_row() noexcept
        uint64_t started() noexcept

    cdef enum class NoPick(unsigned char):
        kPicked
        kNoMember
        kAllDown
        kAllExcluded

    const char* NoPickName(NoPick reason) noexcept

    cdef cppclass PickRequest:
        PickRequest()
        uint64_t key
        const int32_t* excluded
        size_t excluded_count
        int64_t now_ns

    cdef cppclass PickResult:
        PickResult()
        int32_t index
        NoPick reason
        uint32_t probe

    cdef cppclass Census:
        Census()
        uint32_t members
        uint32_t up
        uint32_t pending
        uint32_t ejected_up
        cbool panic

    cdef cppclass Picker:
        Picker(const PickerOptions& options, vector[Member*] members) except +
        PickResult Pick(const PickRequest& request) noexcept
        size_t size() noexcept
        Member& member(int32_t index) noexcept
        int32_t IndexOf(const Member* member) noexcept
        Census Count() noexcept
