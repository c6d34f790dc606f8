from actorsub._cpp.actor_state cimport ActorState

cdef extern from "gate.h" namespace "actorsub" nogil:
    cdef enum class AwayRule(unsigned char):
        kRefuse
        kHold
        kPass

    cdef enum class PendingRule(unsigned char):
        kPass
        kRefuse
        kHold

    cdef enum class Gate(unsigned char):
        kPass
        kHold
        kRefuse

    Gate GateFor(ActorState state, AwayRule away, PendingRule pending) noexcept
