// The one thread of this process that looks after actors: it watches their processes and their RPC ports, changes their
// slots the moment something is known, and keeps the deadlines.
//
// Thread safety: every method, from any thread, without the GIL. None of them waits for I/O; `Stop` waits for the
// thread to end, `WaitForEvents` for what its name says. The thread itself calls into the kernel, changes slots
// (`Apply`, `DeclareLoss`), which is lock-free, and drops references to slots, which takes the registry's mutex. It
// holds none of its own then, and whoever holds the registry's holds it for one operation of a map and takes no other
// lock, so the thread cannot take part in a deadlock.
//
// Invariants
//  1. A slot is changed first and its event queued second: whoever sees the event also sees the new word, and a submit
//     is refused although nobody has looked at an event yet.
//  2. At most one watch per actor. After `Watch` or `Unwatch` returned, the earlier watch queues nothing any more.
//  3. A watch speaks about its own incarnation only. It ends with the end of its process, or with a refused dial once
//     the slot says that the incarnation is over (kExited, exactly once), and never comes back by itself: whoever
//     answers on that port later is somebody else until `Watch` says otherwise. Before that a refused dial puts the
//     incarnation in doubt (actor_state.h, rule 10), and it is dialed again, after 10 ms and at least every 0.5 s (less
//     often where more than 250 are refused). Who then answers is noted in the slot, and Ray is asked (kAnswer): the
//     table is the witness that it is not somebody else.
//  4. Silence counts from the oldest unanswered question (a dial or a heartbeat), never from the last byte, and only
//     while this thread runs on time: before it blames a peer it reads that peer's socket once more. The answer is the
//     acknowledgement of our SETTINGS and no other frame, GOAWAY included; under TLS it is the accepted dial. A peer
//     that had answered everything and then stops is asked at most 450 ms later; so a limit of silence is noticed never
//     before it has passed and less than half a second after that. An answer may lie unread until the next heartbeat,
//     except after one that was late: then it is read at once.
//  5. Bounded: one undrained event per actor and kind, one per timer, one wish per actor for the thread; the newest
//     wins.
//  6. While it runs, and until the thread has seen the `Unwatch`, it holds a reference to the slot. After `Stop`
//     returned it holds none.
//  7. A process whose threads are ended by a signal is over for us as soon as one of the threads that are watched has
//     ended, on kernels that tell so (Linux 6.15 and newer): its last thread frees its memory, and devices, before the
//     process is gone for anybody else. The end of a thread by any other way says nothing and is not told.
//  8. A peer that sends without end, whatever it sends, costs at most 100 reads and replies a second: past that its
//     connection is dropped, Ray is asked (kFlood), and it is dialed again after a second, or a fourth of `silence_ns`.
//  9. Descriptors are close-on-exec. Pidfds and sockets are opened and closed by this thread only; the two descriptors
//     that wake somebody live until the destructor, so that nobody can write to, or block on, a number used anew.
// 10. A fourth of RLIMIT_NOFILE (at least 16, at most 1,024) is not ours. A watch takes none of it, and once a second,
//     where the application has used half of it, watches are given back until it is whole again: threads, then
//     processes, then connections. Processes and connections are tried again. Three descriptors are ours at any rate.
//
// Not promised
//  - A frozen process behind TLS is not seen: its kernel goes on accepting connections. Only hosts and processes that
//    are gone, or that drop packets, are.
//  - Nothing is known about an actor for which neither a process id nor an address is given.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "mutex.h"
#include "registry.h"
#include "slot.h"

namespace actorsub {

// Where one incarnation of an actor runs, and how long it may be silent.
struct WatchTarget {
  std::uint32_t incarnation = 0;
  // The actor's own RPC server. The address is a literal, v4 or v6: names would have to be looked up.
  bool connect = true;  // False: watch the process only.
  bool http2 = true;    // False under TLS: the connection only, no heartbeats.
  std::uint16_t port = 0;
  std::string ip;
  // On this host only, in our pid namespace; 0: elsewhere or unknown.
  std::int32_t pid = 0;
  // Field 22 of /proc/PID/stat when `pid` was proven to be the actor. It is compared once the process was opened, so
  // that no other one of this number is taken for it; where it cannot be read the process is not watched. 0: not
  // checked.
  std::uint64_t pid_start_ticks = 0;
  std::int64_t silence_ns = 3 * kNsPerSecond;             // Then new calls are refused. At least 50 ms is used.
  std::int64_t in_flight_silence_ns = 10 * kNsPerSecond;  // Then running calls are given up; kNeverNs: never.
};

enum class WatchResult : std::uint8_t {
  kWatching = 0,
  kUnchanged = 1,       // Watched already, same incarnation and place: only the limits were taken over.
  kNothingToWatch = 2,  // Neither a process nor an address.
  kBadAddress = 3,      // Not a literal address, or port 0.
  kNotRunning = 4,      // Not started, stopped, broken, or a forked child.
};

enum class SentinelEventKind : std::uint8_t {
  kExited = 0,       // The incarnation is over, and with it the watch: fail what runs there. Includes earlier ones.
  kUnreachable = 1,  // Silent for `silence_ns`, or refused: the slot refuses new calls.
  kReachable = 2,    // It answered after all; not where it was in doubt, see kAnswer.
  kInFlightSilence =
      3,        // Silent for `in_flight_silence_ns`: the slot counts a loss, fail what runs there. Once per silence.
  kAskRay = 4,  // Local evidence does not decide (see `cause`): compare with the actor table.
  kTimer = 5,   // `timer_id` is due.
};
inline constexpr int kActorEventKindCount = 5;  // Those that are about an actor.

enum class SentinelCause : std::uint8_t {
  kNone = 0,
  kProcessExit = 1,      // The process ended, or a signal is ending it.
  kProcessGone = 2,      // There was no such process when the watch began,
  kProcessReplaced = 3,  // or another one with its number.
  kRefused = 4,          // Nobody listens on its port, or somebody says so in its name.
  kClosed = 5,           // The peer closed the connection, and accepted the next one.
  kReset = 6,            // The same after RST or another error; errno in `error_code`.
  kGoaway = 7,           // The same after GOAWAY; its HTTP/2 code in `error_code`.
  kNotHttp2 = 8,         // Whoever accepts there does not speak HTTP/2; Http2Violation in `error_code`.
  kDescriptors = 9,      // We cannot look: no descriptor, port or permission; errno in `error_code`.
  kNoAnswer = 10,        // Nothing came back.
  kAnswer = 11,          // It answered. As kAskRay: while it was in doubt.
  kFlood = 12,           // It sent more than any healthy peer does.
};
// Lower-case names without the k, in snake_case. Never null.
const char* SentinelEventKindName(SentinelEventKind kind);
const char* SentinelCauseName(SentinelCause cause);

struct SentinelEvent {
  SentinelEventKind kind = SentinelEventKind::kTimer;
  SentinelCause cause = SentinelCause::kNone;
  std::int32_t error_code = 0;
  std::uint32_t incarnation = 0;
  ActorId actor_id{};
  // What `Slot::Apply` did; not `changed` for kInFlightSilence, kAskRay and kTimer, and for a kExited that Ray was
  // first to tell. When events of one kind were merged, `before` is that of the first that changed something, and
  // `after` that of the last.
  Change change;
  std::int64_t seen_ns = 0;  // On the sentinel's clock.
  std::uint64_t timer_id = 0;
};

// A snapshot; everything but the first four only grows.
struct SentinelCounters {
  std::uint64_t watches = 0;          // Now.
  std::uint64_t process_watches = 0;  // Now.
  std::uint64_t thread_watches = 0;   // Now: threads of those processes.
  std::uint64_t sockets = 0;          // Now, dialing ones included.
  std::uint64_t dials = 0;
  std::uint64_t refused = 0;
  std::uint64_t heartbeats_sent = 0;
  std::uint64_t heartbeats_acked = 0;  // Those whose answer has been read.
  std::uint64_t silences = 0;          // Slots made unreachable by silence.
  std::uint64_t doubts = 0;            // Slots made unreachable by a refused dial.
  std::uint64_t false_alarms = 0;      // Slots that were alive again in the same incarnation after either.
  std::uint64_t in_flight_silences = 0;
  std::uint64_t fd_exhausted = 0;  // Times that a descriptor was refused, by the kernel or by `max_descriptors`.
  std::uint64_t connect_timeouts = 0;
  std::uint64_t connections_lost = 0;  // By FIN, RST, error or GOAWAY.
  std::uint64_t goaways = 0;
  std::uint64_t protocol_errors = 0;
  std::uint64_t floods = 0;  // Connections dropped because of what came over them.
  std::uint64_t exits_by_process = 0;
  std::uint64_t exits_by_thread = 0;  // Those of them that a thread told, before the process was gone.
  std::uint64_t ask_ray = 0;
  std::uint64_t late_wakeups = 0;  // Times that this thread ran late enough to grant everybody grace,
  std::uint64_t late_ns = 0;       // and by how much in all.
  std::uint64_t turns = 0;         // Of the loop: how often the thread woke up.
  std::uint64_t timers_fired = 0;
};

class Sentinel {
 public:
  struct Options {
    const Clock* clock = &Clock::Monotonic();  // Outlives the sentinel.
    // Of pidfds and sockets together; one more is treated like EMFILE. See invariant 10, too.
    std::uint32_t max_descriptors = 16'384;
    std::uint32_t max_timers = 1'000'000;  // Armed, or due and not drained.
  };

  Sentinel();
  explicit Sentinel(const Options& options);
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;
  // Stops, or abandons when this is a forked child.
  ~Sentinel();

  // 0, or the errno of what could not be had; then nothing runs and it may be tried again. Idempotent.
  int Start();
  // Ends the thread and forgets watches, timers and events. Wakes whoever blocks in `WaitForEvents`. Idempotent; may be
  // followed by `Start`.
  void Stop();
  // For the child of a fork, before it makes a second thread: closes the child's copies of our descriptors and forgets
  // everything, locks and slot references included, since the parent's threads may have held or been changing any of
  // them (so the child leaks that memory, on purpose). The parent does not notice. `Start` works again afterwards.
  // Without this call every method does nothing in the child, but descriptors stay open.
  void AbandonAfterFork();
  // Started, and the thread is well. False for good after it ran out of memory: then no evidence comes any more, and
  // callers fall back to what Ray says. (The event descriptor is signalled once when that happens.)
  bool running() const;

  // Replaces an earlier watch of the same actor, unless nothing but the limits differs.
  WatchResult Watch(SlotRef slot, const WatchTarget& target);
  // False: was not watched. Drops its undrained events. The slot's word stays as it is.
  bool Unwatch(const ActorId& id);
  // True while something is looked at: the process is open, or the connection is, or is dialed again by and by. False
  // also where there is no descriptor for it, and before the thread has begun.
  bool Looks(const ActorId& id) const;
  // False: is not watched. A shorter limit counts from the same question, so it may have passed already.
  bool UpdateLimits(const ActorId& id, std::int64_t silence_ns, std::int64_t in_flight_silence_ns);

  // A kTimer event at `deadline_ns` on the sentinel's clock, at once if that has passed. An id in use is moved. False:
  // not running, or `max_timers` reached.
  bool AddTimer(std::uint64_t id, std::int64_t deadline_ns);
  // True: no event of this timer will be drained any more. False: drained already, or never set.
  bool CancelTimer(std::uint64_t id);

  // Readable while there may be undrained events; for poll(2), not for reading. -1 before the first `Start`.
  int event_fd() const;
  // Blocks until `event_fd` is readable or the time is over; < 0: no limit. True: readable. Wakes up early for nothing
  // when `WakeWaiter` or `Stop` was called, or events were dropped.
  bool WaitForEvents(std::int64_t timeout_ns);
  // Makes `event_fd` readable once although there is no event.
  void WakeWaiter();
  // Appends all queued events in the order in which they were seen, timers last, and makes `event_fd` unreadable.
  // Returns how many. For one consumer at a time; an event is handed out once.
  std::size_t DrainEvents(std::vector<SentinelEvent>* events);

  SentinelCounters counters() const;
  // Makes the thread look at the clock again: for tests that move it by hand.
  void Poke();

 private:
  class Core;

  // Written by the constructors and `AbandonAfterFork` (single-threaded child), else constant.
  Core* core_;
  const Options options_;
};

}  // namespace actorsub
