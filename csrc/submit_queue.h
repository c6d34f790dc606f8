// Admission, window, waiting line, in-flight ledger and deadlines of the calls that this process makes to one actor (or
// one concurrency group of it), in terms of 64-bit tickets. It never sees a Python object and never calls out.
//
// Thread safety: every method, from any thread, without the GIL. `Release`, `BeginSend` and `EndSend` belong to the
// *sender*, one thread at a time. One mutex, held for a few stores, but: `Expire`, `FailLost` and `CloseAll` hold it
// for as many entries as they end, `Review` for as many as wait, `Release` for its batch, and once in as many ends as
// there are deadlines the dead ones are swept out.
// Ownership: the slot outlives the queue. Everything else is the queue's own.
//
// The way of a ticket
//
//     Admit --kSend------------------------------------------------> in flight --Complete--> gone
//           --kWait--> waiting --Release--> releasing --BeginSend--> in flight --Complete--> gone
//                         ^--------BeginSend----'
//
// From `kSend`, or from BeginSend's `kGo` on, it is *begun*: the caller is giving it to Ray, it may run.
//
// Invariants
//  1. Every ticket that Admit gave out has exactly one end: `kDelivered` of Complete, `kCancelledHere` of Cancel, a
//     true Abandon, a taken-back Abort, or one `Ended`. Whoever is told of it is the only one who is.
//  2. `Ended::sent` false, and `kCancelledHere`, are promises: the ticket was never begun, and never will be. Only
//     Abort takes a begun ticket back, on the word of the caller that Ray never got it.
//  3. Nothing begins while the slot does not let it: Admit and BeginSend read the slot themselves, under the mutex.
//     Whoever changes the slot calls `Review` afterwards (and FailLost after a loss). A decision then either saw the
//     change, or is in the queue when Review comes: no edge is missed, and a Review too many does no harm.
//  4. Tickets leave the line in the order in which they joined it. Admit gives out `kSend` only when nobody waits, is
//     releasing, or is between BeginSend and EndSend; so calls of one thread reach Ray in the order of its Admits, as
//     long as that thread gives its own `kSend`s to Ray before its next Admit.
//  5. The head of the line blocks those behind it, whatever their rules: order goes before use of the window.
//  6. When a ticket begins, the begun ones, itself included, are at most its rules' window. Admit and Release count the
//     releasing ones as well, so that a batch cannot overdraw it. A call that ended for its user while it may still run
//     at the actor (deadline, Abandon) keeps its place until Complete or a loss frees it.
//  7. A begun ticket's mark is `slot->losses()` as it belongs to the word that let it (slot.h, invariant 4).
//  8. An allocation that fails leaves the queue, and what the vectors passed in hold, as they were (Release will have
//     started over, see below). What cannot allocate is noexcept.
//
// The sender's turn. BeginSend reads the slot again, because it may have changed since Release:
//
//     do {
//       tickets.clear();
//       queue.Release(now_ns, kBatch, &tickets, &ended);
//       for (Ticket ticket : tickets) {
//         const Begin begin = queue.BeginSend(ticket);
//         if (begin.verdict == BeginVerdict::kGone) continue;  // Has its end: cancelled, expired, refused meanwhile.
//         if (begin.verdict == BeginVerdict::kBack) break;     // The actor went away; the batch is in the line again.
//         ... give it to Ray, or Abort(ticket) ...
//         queue.EndSend(ticket);
//       }
//     } while (!tickets.empty());  // Until Release gives nothing: see `release`.
//
// When BeginSend finds the actor away, *all* tickets of the batch go back to the head of the line, in their order: were
// it only the one, and the actor back a moment later, the next of the batch would overtake it. A ticket that Release
// gave out and that is asked for out of turn is answered the same way. Release itself starts over: what an earlier
// batch left unbegun is in the line again first. Cancel, Expire and Review end releasing tickets as they end waiting
// ones; none of the batch is kept waiting for that.
//
// A ticket may leave the line, or end, on another thread before the thread that called Admit has noted what it stands
// for: note it under the lock under which the others look it up (the GIL will do).
//
// `release` in a result: the head of the line could leave now, and the sender is not at work (between a Release that
// gave something and the next): have it run a turn. Level-triggered: it is said again until somebody does.
//
// Costs: 40 bytes for a call that waits or is in flight, and 16 for its deadline, if it has one (up to twice that while
// dead deadlines await their sweep, and what the vector has in reserve). Entries are reused; when the queue runs empty
// all but 64 KiB of them go back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "actor_state.h"
#include "clock.h"
#include "gate.h"
#include "mutex.h"
#include "slot.h"

namespace actorsub {

// Low 32 bits: where its entry is; high 32 bits: a serial number, so that a ticket of the past is recognised. Never 0.
// Serial numbers return after 2^32 admissions.
using Ticket = std::uint64_t;
inline constexpr Ticket kNoTicket = 0;

struct CallRules {
  std::int64_t deadline_ns = kNeverNs;  // On the clock of the caller's `now_ns`; passed once `now_ns >= deadline_ns`.
  std::uint32_t window = 0;             // Most calls in flight, with this one, when it is sent; 0: no limit.
  std::uint32_t max_queued = 1000;      // Most calls in the line (waiting or releasing), with this one.
  AwayRule away = AwayRule::kRefuse;    // See gate.h. What is held waits in the line.
  PendingRule on_pending = PendingRule::kPass;
};

enum class Verdict : std::uint8_t {
  kSend = 0,  // In flight from now on: give it to Ray, or Abort it.
  kWait = 1,  // In the line.
  // The others leave nothing behind. State goes first, then the deadline, then the bound.
  kRefusedAway = 2,
  kRefusedDead = 3,
  kRefusedPending = 4,
  kFull = 5,
  kExpired = 6,
  kClosed = 7,  // After CloseAll.
};

struct Admission {
  Verdict verdict = Verdict::kClosed;
  bool release = false;            // kWait only; see above.
  std::uint32_t mark = 0;          // kSend only: invariant 7.
  Ticket ticket = kNoTicket;       // kSend and kWait only.
  std::uint64_t word = 0;          // The slot's word that decided.
  std::int64_t arm_ns = kNeverNs;  // Not kNeverNs: now the earliest deadline; see `Expire`.
};

enum class BeginVerdict : std::uint8_t {
  kGo = 0,    // Begun: give it to Ray, then EndSend.
  kBack = 1,  // In the line again, with all of its batch.
  kGone = 2,  // Has its end, or was begun before.
};

struct Begin {
  BeginVerdict verdict = BeginVerdict::kGone;
  std::uint32_t mark = 0;  // kGo only.
  std::uint64_t word = 0;  // kGo and kBack: the slot's word that decided.
};

enum class CompleteVerdict : std::uint8_t {
  kDelivered = 0,  // The first end of this call: its outcome may be handed out.
  kLate = 1,       // Its user was told another end before (deadline, Abandon); counted. Its place is free now.
  kUnknown = 2,    // Not in flight: completed, lost or closed before, or never begun; counted as stray.
};

struct Completion {
  CompleteVerdict verdict = CompleteVerdict::kUnknown;
  bool release = false;
};

enum class CancelVerdict : std::uint8_t {
  kCancelledHere = 0,  // Ended, never begun.
  kSent = 1,           // In flight, nothing done: cancel it by Ray's means, then Complete or Abandon.
  kUnknown = 2,        // Has its end.
};

struct Cancellation {
  CancelVerdict verdict = CancelVerdict::kUnknown;
  bool release = false;
};

struct Aborted {
  bool taken_back = false;  // Ended by this, as never sent. False: had its end before, or was not begun.
  bool release = false;
};

enum class End : std::uint8_t {
  kDeadline = 0,
  kAway = 1,     // Refused by Review.
  kDead = 2,     // Refused by Review.
  kPending = 3,  // Refused by Review.
  kLost = 4,     // Was at an incarnation that is gone.
  kClosed = 5,
};
const char* EndName(End end) noexcept;

struct Ended {
  Ticket ticket = kNoTicket;
  End end = End::kClosed;
  bool sent = true;  // Invariant 2.
};

struct Expiry {
  std::int64_t next_ns = kNeverNs;  // The earliest deadline that is left: when to call again.
  bool release = false;
};

// What happened so far; only `waiting` and `in_flight` go down again. Taken under the mutex, so they fit each other:
// the tickets that Admit gave out are those that wait, and those in `sent`, `cancelled_here`, `expired_here` (but for
// Admit's own), `refused_state` (the same) and `closed` (those not sent).
struct QueueCounters {
  std::uint64_t waiting = 0;        // In the line, releasing ones included.
  std::uint64_t in_flight = 0;      // Places of the window that are taken, releasing ones included.
  std::uint64_t sent = 0;           // Begun.
  std::uint64_t completed = 0;      // kDelivered.
  std::uint64_t late = 0;           // kLate.
  std::uint64_t stray = 0;          // Complete of a ticket that is not in flight.
  std::uint64_t aborted = 0;        // Taken back; they are in `sent`, too.
  std::uint64_t expired_here = 0;   // Ended by deadline unsent; kExpired of Admit included.
  std::uint64_t expired_there = 0;  // Ended by deadline in flight.
  std::uint64_t cancelled_here = 0;
  std::uint64_t abandoned = 0;
  std::uint64_t refused_full = 0;   // kFull.
  std::uint64_t refused_state = 0;  // kRefused... of Admit, and tickets that Review ended.
  std::uint64_t lost = 0;           // Ended by FailLost.
  std::uint64_t closed = 0;         // Ended by CloseAll.
  std::uint64_t recalled = 0;       // Went from releasing back to waiting.
};

class SubmitQueue {
 public:
  explicit SubmitQueue(const Slot* slot) noexcept : slot_(slot) {}
  // Requires: nobody uses it any more. Tickets that have no end yet get none.
  ~SubmitQueue() = default;
  SubmitQueue(const SubmitQueue&) = delete;
  SubmitQueue& operator=(const SubmitQueue&) = delete;

  // One call asks to go. May throw std::bad_alloc.
  Admission Admit(const CallRules& rules, std::int64_t now_ns) ACTORSUB_EXCLUDES(mutex_);

  // The sender's. Takes up to `max` tickets off the head of the line that may leave now, and appends them to
  // `tickets`. A head whose deadline has passed is not sent but ended, into `ended`. May throw std::bad_alloc.
  void Release(std::int64_t now_ns, std::size_t max, std::vector<Ticket>* tickets, std::vector<Ended>* ended)
      ACTORSUB_EXCLUDES(mutex_);
  // The sender's, right before it gives the ticket to Ray, in the order of Release.
  Begin BeginSend(Ticket ticket) noexcept ACTORSUB_EXCLUDES(mutex_);
  // The sender's, once Ray has it. Whatever became of the ticket meanwhile; Abort, the next BeginSend and Release imply
  // it.
  void EndSend(Ticket ticket) noexcept ACTORSUB_EXCLUDES(mutex_);

  // Ray's outcome for a begun ticket is there, good or bad. Also before EndSend.
  Completion Complete(Ticket ticket) noexcept ACTORSUB_EXCLUDES(mutex_);
  // Ray never got this begun ticket. Frees its place in any case.
  Aborted Abort(Ticket ticket) noexcept ACTORSUB_EXCLUDES(mutex_);
  // The user does not want it any more.
  Cancellation Cancel(Ticket ticket) noexcept ACTORSUB_EXCLUDES(mutex_);
  // Ends a begun ticket for its user while it may still run. True: ended by this. False, and nothing done: it has its
  // end, or was not begun (then Cancel). Only the first of several callers gets true.
  bool Abandon(Ticket ticket) noexcept ACTORSUB_EXCLUDES(mutex_);

  // Ends what has passed its deadline: in the line for good, in flight for the user only (invariant 6). The owner keeps
  // one timer for the queue: sets it to `Admission::arm_ns` and `Expiry::next_ns` where those are not kNeverNs, never
  // replacing an earlier time by a later one, and calls Expire when it fires. Most Admits arm nothing, because the
  // timer is set already; it may fire for nothing. May throw std::bad_alloc.
  Expiry Expire(std::int64_t now_ns, std::vector<Ended>* ended) ACTORSUB_EXCLUDES(mutex_);
  // The earliest deadline of all tickets without an end; kNeverNs: none.
  std::int64_t next_deadline_ns() noexcept ACTORSUB_EXCLUDES(mutex_);
  // The owner's timer is gone, whether it had fired or not. Returns when to set it again; kNeverNs: not at all.
  std::int64_t Rearm() noexcept ACTORSUB_EXCLUDES(mutex_);

  // After a change of the slot (invariant 3): ends the tickets in the line that the present state refuses by their
  // rules, leaves the others. Returns `release`. May throw std::bad_alloc.
  bool Review(std::vector<Ended>* ended) ACTORSUB_EXCLUDES(mutex_);
  // True when FailLost would find something. Cheap.
  bool has_lost() const noexcept ACTORSUB_EXCLUDES(mutex_);
  // Ends the tickets in flight whose mark is older than slot->losses(), frees their places, and those of the calls
  // among them that have their end already. Replies that are on their way should be let in first. Returns `release`.
  // May throw std::bad_alloc.
  bool FailLost(std::vector<Ended>* ended) ACTORSUB_EXCLUDES(mutex_);
  // The connection to Ray has ended: so does everything that has no end yet, and nothing is admitted any more. May
  // throw std::bad_alloc.
  void CloseAll(std::vector<Ended>* ended) ACTORSUB_EXCLUDES(mutex_);

  QueueCounters counters() const noexcept ACTORSUB_EXCLUDES(mutex_);

 private:
  using Index = std::uint32_t;
  static constexpr Index kNone = ~Index{0};

  enum class Stage : std::uint8_t { kFree, kWaiting, kReleasing, kBegun };

  // Waiting and releasing entries are linked in the line, begun ones in the ledger, free ones by `next` alone.
  struct Entry {
    std::int64_t deadline_ns = kNeverNs;
    std::uint32_t serial = 0;
    Index next = kNone;
    Index previous = kNone;
    std::uint32_t window = 0;
    std::uint32_t mark = 0;  // kBegun only.
    Stage stage = Stage::kFree;
    AwayRule away = AwayRule::kRefuse;
    PendingRule on_pending = PendingRule::kPass;
    bool ended = false;  // kBegun only: its user has been told an end; it keeps its place (invariant 6).
  };
  static_assert(sizeof(Entry) <= 40, "the costs at the top say 40 bytes");

  struct List {
    Index head = kNone;
    Index tail = kNone;
  };

  struct Deadline {
    std::int64_t at_ns;
    Ticket ticket;
  };

  // The word, and the mark that belongs to it (slot.h, invariant 4).
  struct Look {
    std::uint64_t word;
    std::uint32_t mark;
  };

  static constexpr Index kChunkBits = 8;
  static constexpr Index kChunkSize = Index{1} << kChunkBits;
  static constexpr std::size_t kKeptChunks = std::size_t{64} * 1024 / (kChunkSize * sizeof(Entry));
  static constexpr std::size_t kMaxChunks = (std::size_t{1} << 32 >> kChunkBits) - 1;  // kNone is no index.
  // Dead entries that the heap may hold beyond the live ones before it is swept.
  static constexpr std::size_t kHeapSlack = 64;
  using Chunk = std::array<Entry, kChunkSize>;

  static Gate GateOf(std::uint64_t word, const Entry& entry) noexcept {
    return GateFor(StateOf(word), entry.away, entry.on_pending);
  }
  Look LookAtSlot() const noexcept;

  Entry& At(Index index) noexcept ACTORSUB_REQUIRES(mutex_) {
    return (*chunks_[index >> kChunkBits])[index & (kChunkSize - 1)];
  }
  const Entry& At(Index index) const noexcept ACTORSUB_REQUIRES(mutex_) {
    return (*chunks_[index >> kChunkBits])[index & (kChunkSize - 1)];
  }
  static Index IndexOf(Ticket ticket) noexcept { return static_cast<Index>(ticket); }
  Ticket TicketOf(Index index) const noexcept ACTORSUB_REQUIRES(mutex_) {
    return Ticket{At(index).serial} << 32 | index;
  }
  // Null for a ticket of the past, or of nowhere.
  Entry* Find(Ticket ticket) noexcept ACTORSUB_REQUIRES(mutex_);
  const Entry* Find(Ticket ticket) const noexcept ACTORSUB_REQUIRES(mutex_);

  // Makes room for one entry and, where `deadline`, one heap item: all that Admit may have to allocate.
  void ReserveEntry(bool deadline) ACTORSUB_REQUIRES(mutex_);
  Index NewEntry(const CallRules& rules) noexcept ACTORSUB_REQUIRES(mutex_);
  void FreeEntry(Index index) noexcept ACTORSUB_REQUIRES(mutex_);
  void Append(List* list, Index index) noexcept ACTORSUB_REQUIRES(mutex_);
  void Unlink(List* list, Index index) noexcept ACTORSUB_REQUIRES(mutex_);

  // Takes an entry out of the line, wherever it is there.
  void LeaveLine(Index index) noexcept ACTORSUB_REQUIRES(mutex_);
  void RecallReleasing() noexcept ACTORSUB_REQUIRES(mutex_);
  void EnterLedger(Index index, std::uint32_t mark) noexcept ACTORSUB_REQUIRES(mutex_);
  void LeaveLedger(Index index) noexcept ACTORSUB_REQUIRES(mutex_);
  bool SenderAtWork() const noexcept ACTORSUB_REQUIRES(mutex_) { return releasing_ != 0 || sending_ != kNoTicket; }
  bool HasRoom(std::uint32_t window) const noexcept ACTORSUB_REQUIRES(mutex_) {
    return window == 0 || in_flight_ < window;
  }
  // `release` of the results.
  bool ReleaseIsDue() const noexcept ACTORSUB_REQUIRES(mutex_);

  bool IsLive(const Deadline& item) const noexcept ACTORSUB_REQUIRES(mutex_);
  // How many live deadlines have passed, in the part of the heap under its item `at`.
  std::size_t CountPassed(std::int64_t now_ns, std::size_t at) const noexcept ACTORSUB_REQUIRES(mutex_);
  void PushDeadline(Index index) noexcept ACTORSUB_REQUIRES(mutex_);
  // One deadline is dead from now on. Sweeps the heap when the dead outnumber the live.
  void DropDeadline() noexcept ACTORSUB_REQUIRES(mutex_);
  void PopDeadline() noexcept ACTORSUB_REQUIRES(mutex_);
  // The earliest live deadline; takes dead ones off the top.
  std::int64_t EarliestDeadline() noexcept ACTORSUB_REQUIRES(mutex_);

  const Slot* const slot_;
  mutable Mutex mutex_;

  std::vector<std::unique_ptr<Chunk>> chunks_ ACTORSUB_GUARDED_BY(mutex_);
  Index free_ ACTORSUB_GUARDED_BY(mutex_) = kNone;  // Used before, by `next`.
  Index fresh_ ACTORSUB_GUARDED_BY(mutex_) = 0;     // From here on never used.
  std::size_t used_ ACTORSUB_GUARDED_BY(mutex_) = 0;
  std::uint32_t last_serial_ ACTORSUB_GUARDED_BY(mutex_) = 0;

  // Releasing entries first, then the waiting ones, from `first_waiting_` on.
  List line_ ACTORSUB_GUARDED_BY(mutex_);
  Index first_waiting_ ACTORSUB_GUARDED_BY(mutex_) = kNone;
  std::size_t waiting_ ACTORSUB_GUARDED_BY(mutex_) = 0;  // Without the releasing ones.
  std::size_t releasing_ ACTORSUB_GUARDED_BY(mutex_) = 0;
  Ticket sending_ ACTORSUB_GUARDED_BY(mutex_) = kNoTicket;  // Between BeginSend and EndSend.

  // Begun entries in the order in which they began, which is the order of their marks, too: the lost ones come first.
  List ledger_ ACTORSUB_GUARDED_BY(mutex_);
  std::size_t in_flight_ ACTORSUB_GUARDED_BY(mutex_) = 0;  // The ledger, and the releasing ones.

  // A heap, earliest first. An item whose ticket has its end is dead and stays until it comes to the top, or until the
  // dead outnumber the live.
  std::vector<Deadline> heap_ ACTORSUB_GUARDED_BY(mutex_);
  std::size_t live_deadlines_ ACTORSUB_GUARDED_BY(mutex_) = 0;
  std::int64_t armed_ns_ ACTORSUB_GUARDED_BY(mutex_) = kNeverNs;  // What the owner was told last.

  bool closed_ ACTORSUB_GUARDED_BY(mutex_) = false;
  QueueCounters counters_ ACTORSUB_GUARDED_BY(mutex_);  // `waiting` and `in_flight` are filled in by counters().
};

}  // namespace actorsub
