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

namespace {

// True when calls may be in flight that are not counted as lost.
bool MayHaveCalls(const Belief& belief) {
  return (belief.state == ActorState::kAlive || belief.state == ActorState::kUnreachable) && !InDoubt(belief);
}
bool HasLostThem(const Belief& belief) {
  return belief.state == ActorState::kRestarting || belief.state == ActorState::kDead || InDoubt(belief);
}

}  // namespace

Change Slot::Apply(const Observation& reported) {
  Observation observation = reported;
  if (observation.evidence == Evidence::kProcess && observation.incarnation != Observation::kNoIncarnation &&
      observation.incarnation == last_.load(std::memory_order_relaxed)) {
    observation.verdict = ActorState::kDead;
  }
  Change change;
  std::uint64_t seen = word();
  change.before = DecodeBelief(seen);
  change.after = Decide(change.before, observation);
  // The usual case, a repeated report, must not take the cache line from the readers.
  if (EncodeBelief(change.after) != seen) {
    const MutexLock lock(change_mutex_);
    seen = word();
    change.before = DecodeBelief(seen);
    change.after = Decide(change.before, observation);
    // Release: invariant 3.
    word_.store(EncodeBelief(change.after), std::memory_order_release);
    if (MayHaveCalls(change.before) && HasLostThem(change.after)) {
      losses_.fetch_add(1, std::memory_order_release);
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

bool Slot::DeclareLoss() {
  const MutexLock lock(change_mutex_);
  const Belief belief = this->belief();
  if (belief.state != ActorState::kUnreachable || InDoubt(belief)) return false;
  losses_.fetch_add(1, std::memory_order_release);
  return true;
}

}  // namespace actorsub
