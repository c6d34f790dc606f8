from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from actorsub._cpp.gate cimport AwayRule, PendingRule
from actorsub._cpp.slot cimport Slot

cdef extern from "submit_queue.h" namespace "actorsub" nogil:
    ctypedef uint64_t Ticket
    const Ticket kNoTicket

    cdef cppclass CallRules:
        CallRules()
        int64_t deadline_ns
        uint32_t window
        uint32_t max_queued
        AwayRule away
        PendingRule on_pending

    cdef enum class Verdict(unsigned char):
        kSend
        kWait
        kRefusedAway
        kRefusedDead
        kRefusedPending
        kFull
        kExpired
        kClosed

    cdef cppclass Admission:
        Verdict verdict
        cbool release
        uint32_t mark
        Ticket ticket
        uint64_t word
        int64_t arm_ns

    cdef enum class BeginVerdict(unsigned char):
        kGo
        kBack
        kGone

    cdef cppclass Begin:
        BeginVerdict verdict
        uint32_t mark
        uint64_t word

    cdef enum class CompleteVerdict(unsigned char):
        kDelivered
        kLate
        kUnknown

    cdef cppclass Completion:
        CompleteVerdict verdict
        cbool release

    cdef enum class CancelVerdict(unsigned char):
        kCancelledHere
        kSent
        kUnknown

    cdef cppclass Cancellation:
        CancelVerdict verdict
        cbool release

    cdef cppclass Aborted:
        cbool taken_back
        cbool release

    cdef enum class End(unsigned char):
        kDeadline
        kAway
        kDead
        kPending
        kLost
        kClosed

    const char* EndName(End end) noexcept

    cdef cppclass Ended:
        Ticket ticket
        End end
        cbool sent

    cdef cppclass Expiry:
        int64_t next_ns
        cbool release

    cdef struct QueueCounters:
        uint64_t waiting
        uint64_t in_flight
        uint64_t sent
        uint64_t completed
        uint64_t late
        uint64_t stray
        uint64_t aborted
        uint64_t expired_here
        uint64_t expired_there
        uint64_t cancelled_here
        uint64_t abandoned
        uint64_t refused_full
        uint64_t refused_state
        uint64_t lost
        uint64_t closed
        uint64_t recalled

    cdef cppclass SubmitQueue:
        SubmitQueue(const Slot* slot) except +
        Admission Admit(const CallRules& rules, int64_t now_ns) except +
        void Release(int64_t now_ns, size_t max, vector[Ticket]* tickets, vector[Ended]* ended) except +
        Begin BeginSend(Ticket ticket) noexcept
        void EndSend(Ticket ticket) noexcept
        Completion Complete(Ticket ticket) noexcept
        Aborted Abort(Ticket ticket) noexcept
        Cancellation Cancel(Ticket ticket) noexcept
        cbool Abandon(Ticket ticket) noexcept
        Expiry Expire(int64_t now_ns, vector[Ended]* ended) except +
        int64_t Rearm() noexcept
        cbool Review(vector[Ended]* ended) except +
        cbool has_lost() noexcept
        cbool FailLost(vector[Ended]* ended) except +
        void CloseAll(vector[Ended]* ended) except +
        QueueCounters counters() noexcept
