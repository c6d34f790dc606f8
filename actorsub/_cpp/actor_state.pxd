from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t

cdef extern from "actor_state.h" namespace "actorsub" nogil:
    cdef enum class ActorState(unsigned char):
        kUnknown
        kPending
        kAlive
        kRestarting
        kUnreachable
        kDead

    cdef enum class Evidence(unsigned char):
        kNone
        kRay
        kTable
        kProcess
        kConnection
        kSilence
        kCall

    const char* ActorStateName(ActorState state) noexcept
    const char* EvidenceName(Evidence evidence) noexcept

    cdef cppclass Belief:
        ActorState state
        Evidence evidence
        ActorState ray_last
        bint incarnation_known
        bint provisional
        bint answered
        uint16_t version
        uint32_t incarnation

    Belief DecodeBelief(uint64_t word) noexcept
    bint InDoubt(const Belief& belief) noexcept
    ActorState StateOf(uint64_t word) noexcept

    cdef cppclass Observation:
        Observation()
        Evidence evidence
        ActorState verdict
        int64_t incarnation
        int32_t read_version
