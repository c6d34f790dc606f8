from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from actorsub._cpp.actor_state cimport ActorState, Belief, Observation

cdef extern from "slot.h" namespace "actorsub" nogil:
    cdef cppclass ActorId:
        uint8_t* data()

    cdef enum class Refusal(unsigned char):
        kRestarting
        kUnreachable
        kDead
        kPending
        kDeadline
        kEventLoop

    const char* RefusalName(Refusal refusal) noexcept

    cdef cppclass Change:
        bint changed
        Belief before
        Belief after

    cdef cppclass Slot:
        uint64_t word() noexcept
        Belief belief() noexcept
        Change Apply(const Observation& observation) noexcept
        void SetLast(int64_t incarnation) noexcept
        uint32_t losses() noexcept
        void CountSubmitted() noexcept
        void CountRefused(Refusal refusal) noexcept
        void CountWaited() noexcept
        uint64_t submitted() noexcept
        uint64_t waited() noexcept
        uint64_t refused(Refusal refusal) noexcept
        uint64_t entered(ActorState state) noexcept
        uint64_t stale() noexcept
