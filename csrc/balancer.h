// Which member of a group of replicas takes a call: round robin, least loaded, consistent hash; and what this process
// has learned about each member from its own calls (soft ejection).
//
// Pure: no thread, no I/O, no clock. Times come in as `now_ns` on one monotonic scale (clock.h).
//
// Thread safety: every method of every class may be called from any thread at any time, without the GIL, except
// constructors and destructors. Nothing here takes a lock; `Pick` waits for nobody.
// Ownership: the group owns a `GroupHealth`, one `Member` per replica and the present `Picker`. A `Slot` outlives its
// `Member`, the `GroupHealth` its members, the members every `Picker` that lists them. A change of membership makes a
// new `Picker`; the old one stays valid for those who still use it.
//
// One attempt of a call:
//
//     PickResult pick = picker.Pick(request);                  // pick.index < 0: nobody, pick.reason says why
//     Member& member = picker.member(pick.index);
//     member.OnStart(now_ns);
//     ...                                                      // the call
//     member.OnEnd(outcome, latency_ns, now_ns, pick.probe);   // exactly once for each OnStart
//
// A pick that is given up before `OnStart` must be handed back with `AbandonProbe(pick.probe)`; one that is forgotten
// costs `probe_timeout_ns`.
//
// Invariants
//  1. Hard evidence is never ignored: a member is picked only if its slot said so during that very `Pick`: kAlive, or
//     kUnknown or kPending where no member is kAlive and `use_pending` allows it.
//  2. Soft evidence alone never leaves a call without a member: when all members that are up and not excluded are
//     ejected, one of them is picked. It is ignored for every pick (panic) while more than `panic_share` of the members
//     that are up are ejected.
//  3. At most one claim on a probe of a member is valid at one time, and only its holder's outcome returns the member
//     or ejects it again. A claim of which nothing is heard for `probe_timeout_ns` is void; its late end changes
//     nothing but `in_flight`.
//  4. Of the members of a group at most `EjectionLimit` become ejected at one time: never the only one, of two or more
//     always one.
//  5. `in_flight` is the number of `OnStart`s minus the number of `OnEnd`s.
//  6. Where a member's virtual nodes lie on the ring depends on its actor id alone, so a key changes its member only
//     if its member left, or a new one took it over, or by load and health.
//
// What is not promised
//  - A group of more than `kExactMembers` looks at all its members only when somebody was ejected or returned, when
//    nobody could be picked, and else every `census_period_ns`: a member that comes up takes its first call by then.
//  - Between `Pick` and `OnStart` a call is not counted yet: threads that pick at the same moment may pick alike.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "actor_state.h"
#include "clock.h"
#include "slot.h"

namespace actorsub {

enum class BalancerKind : std::uint8_t {
  kRoundRobin = 0,
  kLeastLoaded = 1,     // The less loaded one of two that are chosen at random.
  kConsistentHash = 2,  // By the key of the request, with a bound on the load.
  kRandom = 3,          // A yardstick for the simulator.
};

// How a call ended, as far as it speaks for or against the member that had it.
enum class Outcome : std::uint8_t {
  kSuccess = 0,
  kApplicationError = 1,  // The method raised. An answer: ends a row of failures; ejects and returns nobody.
  kFailure = 2,           // The deadline was missed, or the user's `is_failure` says so.
  kUnsent = 3,            // Never left, or was cancelled: says nothing.
  kLost = 4,              // In flight when the actor was lost: the slot says so itself. Says nothing more.
};

// Defaults: docs/balancers.md says how they follow from the simulations.
struct HealthOptions {
  bool eject = true;
  std::uint32_t consecutive_failures = 5;            // At most 127.
  std::int64_t base_ejection_ns = kNsPerSecond;      // The k-th ejection in a row lasts base * 2^(k - 1), ...
  std::int64_t max_ejection_ns = 30 * kNsPerSecond;  // ... but not longer than this.
  // k falls by one for each such time without a failure.
  std::int64_t ejection_decay_ns = 30 * kNsPerSecond;
  double max_ejected_share = 0.5;  // Above `panic_share` it does harm: the last ejection would end in panic.
  std::int64_t probe_timeout_ns = 10 * kNsPerSecond;
  // A failed call weighs on its member's load as though it had taken this long; 0 for as long as it took. Without it a
  // member that fails fast looks idle and attracts the calls of all.
  std::int64_t failure_latency_ns = kNsPerSecond;
};

struct PickerOptions {
  BalancerKind kind = BalancerKind::kLeastLoaded;
  // Whether a member that is kUnknown or kPending may take calls while no member is kAlive.
  bool use_pending = true;
  double panic_share = 0.5;
  double bounded_load = 2.0;          // kConsistentHash: the load of a member over the average of those that are able.
  std::uint32_t virtual_nodes = 128;  // kConsistentHash: per member.
  std::int64_t census_period_ns = 10 * kNsPerMs;
  std::uint64_t seed = 0;  // Of the random choices. Give each picker of a service another one.
};

// What the members of one group share: the options, how many there are, how many of them are ejected.
class GroupHealth {
 public:
  explicit GroupHealth(const HealthOptions& options) : options_(options) {}
  GroupHealth(const GroupHealth&) = delete;
  GroupHealth& operator=(const GroupHealth&) = delete;

  const HealthOptions& options() const { return options_; }
  std::uint32_t members() const { return members_.load(std::memory_order_relaxed); }
  std::uint32_t ejected() const { return ejected_.load(std::memory_order_relaxed); }
  // Invariant 4; `EjectionLimit() - ejected()` is the room that is left.
  std::uint32_t EjectionLimit() const;
  // Calls in flight at all members, also at those that have retired.
  std::int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  // Statistics; they only grow. `ejections_refused`: the limit was reached.
  std::uint64_t ejections() const { return ejections_.load(std::memory_order_relaxed); }
  std::uint64_t ejections_refused() const { return ejections_refused_.load(std::memory_order_relaxed); }
  std::uint64_t probes() const { return probes_.load(std::memory_order_relaxed); }

 private:
  friend class Member;
  friend class Picker;

  bool TakeEjection();
  void GiveEjection();

  const HealthOptions options_;
  alignas(64) std::atomic<std::int64_t> in_flight_{0};  // Written by every call.
  alignas(64) std::atomic<std::uint32_t> members_{0};   // The rest: read by picks, written seldom.
  std::atomic<std::uint32_t> ejected_{0};
  // Moves with every ejection and return, so that pickers know that their census is out of date.
  std::atomic<std::uint32_t> version_{0};
  std::atomic<std::uint64_t> ejections_{0};
  std::atomic<std::uint64_t> ejections_refused_{0};
  std::atomic<std::uint64_t> probes_{0};
};

enum class MemberHealth : std::uint8_t {
  kHealthy = 0,
  kEjected = 1,  // Takes no calls for a time, then one probe.
  kProbing = 2,  // One call decides.
};

// One replica. Belongs to its group from its construction until `Retire`.
class alignas(64) Member {
 public:
  // No probe; also what `PickResult::probe` says of an ordinary pick.
  static constexpr std::uint32_t kNoProbe = 0;

  Member(GroupHealth* group, const Slot* slot);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  const ActorId& id() const { return slot_->id(); }
  const Slot& slot() const { return *slot_; }

  void OnStart(std::int64_t now_ns);
  // `latency_ns`: since `OnStart`. `probe`: what the pick said.
  void OnEnd(Outcome outcome, std::int64_t latency_ns, std::int64_t now_ns, std::uint32_t probe);
  // For a pick that is not used after all.
  void AbandonProbe(std::uint32_t probe);
  // The member has left its group: it no longer counts there, and is neither ejected nor returned any more. Calls that
  // are in flight end as usual. Idempotent.
  void Retire();

  std::int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  // In flight, plus what failed calls still weigh; in units of 1 / kLoadUnit of a call.
  std::uint64_t Load(std::int64_t now_ns) const;
  static constexpr std::uint64_t kLoadUnit = 256;

  MemberHealth health() const;
  // While ejected: when the probe may come; while probing: when its claim is void. Else 0. Rounded up to full ms.
  std::int64_t until_ns() const;
  std::uint32_t failures_in_a_row() const;
  // The k of `base_ejection_ns * 2^(k - 1)`, not decayed yet.
  std::uint32_t ejections_in_a_row() const;
  // Calls so far.
  std::uint64_t started() const { return started_.load(std::memory_order_relaxed); }

 private:
  friend class Picker;

  bool Due(std::int64_t now_ns) const;
  std::uint32_t TryClaimProbe(std::int64_t now_ns);
  void OnFailure(std::int64_t latency_ns, std::int64_t now_ns, std::uint32_t probe);
  void OnAnswer(bool success, std::int64_t now_ns, std::uint32_t probe);
  void Charge(std::int64_t latency_ns, std::int64_t now_ns);
  std::uint64_t PenaltyAt(std::int64_t now_ns) const;
  std::int64_t EjectionNs(std::uint32_t level) const;

  GroupHealth* const group_;
  const Slot* const slot_;
  std::atomic<std::int64_t> in_flight_{0};
  // All of the health in one word, so that a claim or an ejection is one compare-and-swap; layout in balancer.cc.
  std::atomic<std::uint64_t> health_{0};
  // What failed calls weigh, and since when: kLoadUnit fractions of a call in the upper half, ms in the lower.
  std::atomic<std::uint64_t> penalty_{0};
  // The last failure or the end of the last ejection: `ejection_decay_ns` counts from here. Relaxed, it orders nothing.
  std::atomic<std::int64_t> quiet_since_ns_;
  // Failures of calls that began before this are about the time before the member came back.
  std::atomic<std::int64_t> returned_ns_;
  std::atomic<std::uint64_t> started_{0};
};

// Why nobody was picked. Ordered: the last that applies.
enum class NoPick : std::uint8_t {
  kPicked = 0,
  kNoMember = 1,
  kAllDown = 2,      // No slot says that its actor takes calls.
  kAllExcluded = 3,  // Those who are up have been tried.
};
const char* NoPickName(NoPick reason);

struct PickRequest {
  std::uint64_t key = 0;                   // kConsistentHash; any 64 bits, they are hashed once more.
  const std::int32_t* excluded = nullptr;  // Indices of this picker that were tried already; few.
  std::size_t excluded_count = 0;
  std::int64_t now_ns = 0;
};

struct PickResult {
  std::int32_t index = -1;
  NoPick reason = NoPick::kPicked;
  std::uint32_t probe = Member::kNoProbe;  // To be handed to `OnEnd`.
};

// What a group looks like; counts of members.
struct Census {
  std::uint32_t members = 0;
  std::uint32_t up = 0;          // kAlive.
  std::uint32_t pending = 0;     // kUnknown, kPending.
  std::uint32_t ejected_up = 0;  // Of `up`: ejected or probing.
  bool panic = false;
};

// Chooses among a fixed list of members.
class Picker {
 public:
  // Up to this many members every pick looks at all of them.
  static constexpr std::size_t kExactMembers = 16;

  Picker(const PickerOptions& options, std::vector<Member*> members);
  ~Picker();
  Picker(const Picker&) = delete;
  Picker& operator=(const Picker&) = delete;

  // O(1), for a key O(members / members able); plus one look at all members where "what is not promised" says so.
  PickResult Pick(const PickRequest& request);

  std::size_t size() const { return members_.size(); }
  Member& member(std::int32_t index) const { return *members_[static_cast<std::size_t>(index)]; }
  // -1 when it is not listed. Looks at all members.
  std::int32_t IndexOf(const Member* member) const;
  // Looks at all members.
  Census Count() const;
  // Where a key goes when all members are up and idle; -1 without members or for another kind. For the tests.
  std::int32_t OwnerOf(std::uint64_t key) const;

 private:
  struct Look;
  struct Ring;
  struct Shared;

  PickResult PickOnce(const PickRequest& request, const Look& look);
  PickResult PickByScan(const PickRequest& request);
  PickResult AsProbe(PickResult last_resort, const PickRequest& request) const;
  PickResult PickOnRing(const PickRequest& request, const Look& look);
  std::int32_t PickLessLoaded(const PickRequest& request, const Look& look);
  std::int32_t PickAny(const PickRequest& request, const Look& look);
  bool Usable(std::int32_t index, bool pending) const;
  Look LookAtAll(const PickRequest& request) const;
  Look SharedLook() const;
  bool OutOfDate(std::int64_t now_ns) const;
  void Refresh(std::int64_t now_ns);
  std::uint64_t Random();

  const PickerOptions options_;
  const std::vector<Member*> members_;
  GroupHealth* const group_;  // Null without members.
  const std::unique_ptr<const Ring> ring_;
  const std::unique_ptr<Shared> shared_;
};

}  // namespace actorsub
