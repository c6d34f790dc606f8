#include "slot.h"

namespace actorsub {

const char* RefusalName(Refusal refusal) {
  switch (refusal) {
    case Refusal::kRestarting:
      return "restarting";
    case Refusal::kUnreachable:
      return "unreachable";
    case Refusal::kDead:
      return "dead";
    case Refusal::kPending:
      return "pending";
    case Refusal::kDeadline:
      return "deadline";
    case Refusal::kEventLoop:
      return "event_loop";
  }
  return "invalid";
}

Change Slot::Apply(const Observation& observation) {
  Change change;
  std::uint64_t seen = word_.load(std::memory_order_acquire);
  for (;;) {
    change.before = DecodeBelief(seen);
    change.after = Decide(change.before, observation);
    const std::uint64_t next = EncodeBelief(change.after);
    if (next == seen) {
      break;  // No store for no news: a repeated report must not take the cache line from the readers.
    }
    // Release: invariant 3. Acquire on both ends, because the caller acts on what the word before rested on.
    if (word_.compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_acquire)) {
      break;
    }
  }
  change.changed = change.before.version != change.after.version;
  if (change.before.state != change.after.state) {
    entered_[static_cast<std::size_t>(change.after.state)].fetch_add(1, std::memory_order_relaxed);
  }
  if (!change.changed && observation.verdict != change.before.state) {
    stale_.fetch_add(1, std::memory_order_relaxed);
  }
  return change;
}

}  // namespace actorsub
