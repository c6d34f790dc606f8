from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector

from actorsub._cpp.registry cimport SlotRef
from actorsub._cpp.slot cimport ActorId, Change

cdef extern from "sentinel.h" namespace "actorsub" nogil:
    cdef cppclass WatchTarget:
        uint32_t incarnation
        cbool connect
        cbool http2
        uint16_t port
        string ip
        int32_t pid
        uint64_t pid_start_ticks
        int64_t silence_ns
        int64_t in_flight_silence_ns

    cdef enum class WatchResult(unsigned char):
        kWatching
        kUnchanged
        kNothingToWatch
        kBadAddress
        kNotRunning

    cdef enum class SentinelEventKind(unsigned char):
        kExited
        kUnreachable
        kReachable
        kInFlightSilence
        kAskRay
        kTimer

    cdef enum class SentinelCause(unsigned char):
        kNone

    const char* SentinelEventKindName(SentinelEventKind kind) noexcept
    const char* SentinelCauseName(SentinelCause cause) noexcept

    cdef cppclass SentinelEvent:
        SentinelEventKind kind
        SentinelCause cause
        int32_t error_code
        uint32_t incarnation
        ActorId actor_id
        Change change
        int64_t seen_ns
        uint64_t timer_id

    cdef struct SentinelCounters:
        uint64_t watches
        uint64_t process_watches
        uint64_t thread_watches
        uint64_t sockets
        uint64_t dials
        uint64_t refused
        uint64_t heartbeats_sent
        uint64_t heartbeats_acked
        uint64_t silences
        uint64_t doubts
        uint64_t false_alarms
        uint64_t in_flight_silences
        uint64_t fd_exhausted
        uint64_t connect_timeouts
        uint64_t connections_lost
        uint64_t goaways
        uint64_t protocol_errors
        uint64_t floods
        uint64_t exits_by_process
        uint64_t exits_by_thread
        uint64_t ask_ray
        uint64_t late_wakeups
        uint64_t late_ns
        uint64_t turns
        uint64_t timers_fired

    cdef cppclass Sentinel:
        Sentinel() except +
        int Start() except +
        void Stop() except +
        void AbandonAfterFork() noexcept
        cbool running() noexcept
        WatchResult Watch(SlotRef slot, const WatchTarget& target) except +
        cbool Unwatch(const ActorId& id) except +
        cbool UpdateLimits(const ActorId& id, int64_t silence_ns, int64_t in_flight_silence_ns) except +
        cbool Looks(const ActorId& id) except +
        cbool AddTimer(uint64_t id, int64_t deadline_ns) except +
        cbool CancelTimer(uint64_t id) noexcept
        cbool WaitForEvents(int64_t timeout_ns) noexcept
        void WakeWaiter() noexcept
        size_t DrainEvents(vector[SentinelEvent]* events) except +
        SentinelCounters counters() noexcept
