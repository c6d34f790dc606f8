// One actor as this process sees it: the word of actor_state.h in an atomic, and what happened at this actor's gate.
//
// Thread safety: every method may be called from any thread at any time, without the GIL.
// Ownership: created, shared and destroyed by `Registry` (registry.h) alone; holders keep a `SlotRef`.
//
// Invariants
//  1. `word()` is one load; it never waits for anybody.
//  2. The word only ever changes through `Apply`, hence only as `Decide` allows.
//  3. A thread that reads a word also sees everything that its writer wrote before (release/acquire).
//  4. `losses()` is how often an incarnation that was up ended, or came into doubt (actor_state.h, rule 10), which is
//     counted once: its end adds nothing. Whoever reads L, then a word that is kAlive, then L again, may submit: the
//     call is lost once `losses() > L`. The word changes first and `losses` second, under one lock, so a later word
//     that is kAlive is never seen together with a count from before the loss.
//  5. Counters only grow. They are statistics: relaxed, and they order nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "actor_state.h"
#include "mutex.h"

namespace actorsub {

inline constexpr std::size_t kActorIdSize = 16;  // Ray's ActorID, binary.
using ActorId = std::array<std::uint8_t, kActorIdSize>;

// Why a call did not go to Ray, for the counters.
enum class Refusal : std::uint8_t {
  kRestarting = 0,
  kUnreachable = 1,
  kDead = 2,
  kPending = 3,
  kDeadline = 4,   // Waited for the actor and ran out of time here.
  kEventLoop = 5,  // Asked to block a thread that runs an event loop.
};
inline constexpr int kRefusalCount = 6;
const char* RefusalName(Refusal refusal);

// What `Apply` did.
struct Change {
  bool changed = false;  // `version` moved: another state, another incarnation, or Ray's word on a provisional one.
  Belief before;
  Belief after;  // Equal to `before` where nothing at all was adopted.
};

class Slot {
 public:
  explicit Slot(const ActorId& id) : id_(id) {}
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  const ActorId& id() const { return id_; }

  // The hot path. Acquire: see invariant 3.
  std::uint64_t word() const { return word_.load(std::memory_order_acquire); }
  ActorState state() const { return StateOf(word()); }
  Belief belief() const { return DecodeBelief(word()); }

  // Applies one observation. No news costs one load and no lock; a change takes a lock for a few stores. Exactly one
  // caller gets `changed` for one change.
  Change Apply(const Observation& reported);

  // Ray will not restart `incarnation`, as far as its table says: the end of that process is the actor's, which Apply
  // makes of the report of its exit. kNoIncarnation: every incarnation has a next one.
  void SetLast(std::int64_t incarnation) { last_.store(incarnation, std::memory_order_relaxed); }

  // See invariant 4. Acquire: whoever sees the loss also sees the word that says why.
  std::uint32_t losses() const { return losses_.load(std::memory_order_acquire); }
  // Declares everything in flight lost although the incarnation may live: it was silent for too long. False, and
  // nothing done, when it is not silent any more: then a call may have been let through already that is not lost, or
  // all were counted as lost already.
  bool DeclareLoss();

  void CountSubmitted() { submitted_.fetch_add(1, std::memory_order_relaxed); }
  void CountRefused(Refusal refusal) {
    refused_[static_cast<std::size_t>(refusal)].fetch_add(1, std::memory_order_relaxed);
  }
  // Calls that were held back here and later went to Ray after all.
  void CountWaited() { waited_.fetch_add(1, std::memory_order_relaxed); }

  std::uint64_t submitted() const { return submitted_.load(std::memory_order_relaxed); }
  std::uint64_t waited() const { return waited_.load(std::memory_order_relaxed); }
  std::uint64_t refused(Refusal refusal) const {
    return refused_[static_cast<std::size_t>(refusal)].load(std::memory_order_relaxed);
  }
  // How often the state became `state`; a new incarnation in the same state does not count.
  std::uint64_t entered(ActorState state) const {
    return entered_[static_cast<std::size_t>(state)].load(std::memory_order_relaxed);
  }
  // Observations that named another state than the present one and moved nothing.
  std::uint64_t stale() const { return stale_.load(std::memory_order_relaxed); }

 private:
  friend class Registry;

  // Read by everyone on every call; written on a change of state only.
  std::atomic<std::uint64_t> word_{0};
  std::atomic<std::uint32_t> losses_{0};
  // One number that orders nothing: relaxed. Who reports an exit was told of the watch after this was set.
  std::atomic<std::int64_t> last_{Observation::kNoIncarnation};
  const ActorId id_;
  // Writers of `word_` and `losses_` only, so that the two change in the order of invariant 4.
  Mutex change_mutex_;
  // Guarded by Registry's mutex.
  std::uint64_t references_ = 0;

  // Statistics; any thread.
  std::atomic<std::uint64_t> submitted_{0};
  std::atomic<std::uint64_t> waited_{0};
  std::atomic<std::uint64_t> stale_{0};
  std::array<std::atomic<std::uint64_t>, kRefusalCount> refused_{};
  std::array<std::atomic<std::uint64_t>, kActorStateCount> entered_{};
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "the word must be readable without a lock");
static_assert(sizeof(Slot) <= 256, "an idle slot costs at most 256 bytes");

}  // namespace actorsub
