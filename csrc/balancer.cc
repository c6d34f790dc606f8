#include "balancer.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <utility>

namespace actorsub {

namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15U;

// The finalizer of splitmix64: every bit of the result depends on every bit of the input.
constexpr std::uint64_t Mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return x ^ x >> 31;
}

std::uint64_t HashOf(const ActorId& id) {
  std::uint64_t half[2] = {0, 0};
  for (std::size_t i = 0; i < kActorIdSize; ++i) half[i / 8] |= std::uint64_t{id[i]} << (8 * (i % 8));
  return Mix(half[0] + kGolden * Mix(half[1] + kGolden));
}

// In [0, bound), without a division; `random` must be evenly distributed.
std::uint32_t Below(std::uint64_t random, std::uint32_t bound) {
  return static_cast<std::uint32_t>((random >> 32) * bound >> 32);
}

std::int64_t CeilMs(std::int64_t ns) { return ns <= 0 ? 0 : (ns - 1) / kNsPerMs + 1; }
std::int64_t FloorMs(std::int64_t ns) { return ns <= 0 ? 0 : ns / kNsPerMs; }

enum class Tier : std::uint8_t { kUp, kPending, kDown };

Tier TierOf(ActorState state) {
  switch (state) {
    case ActorState::kAlive:
      return Tier::kUp;
    case ActorState::kUnknown:
    case ActorState::kPending:
      return Tier::kPending;
    case ActorState::kRestarting:
    case ActorState::kUnreachable:
    case ActorState::kDead:
      return Tier::kDown;
  }
  return Tier::kDown;
}

bool Contains(const PickRequest& request, std::int32_t index) {
  for (std::size_t i = 0; i < request.excluded_count; ++i) {
    if (request.excluded[i] == index) return true;
  }
  return false;
}

// Health word, from bit 0: state 2, level 5, failures 7, claim 12, until in ms 38 (eight years of uptime).
constexpr std::uint64_t kMaxLevel = (1U << 5) - 1;
constexpr std::uint64_t kMaxFailures = (1U << 7) - 1;
constexpr std::uint64_t kMaxClaim = (1U << 12) - 1;
constexpr std::uint64_t kMaxUntilMs = (std::uint64_t{1} << 38) - 1;
constexpr std::uint64_t kRetiredState = 3;  // Beyond MemberHealth: nothing changes any more.

struct Health {
  std::uint64_t state;
  std::uint64_t level;     // Ejections in a row.
  std::uint64_t failures;  // In a row.
  std::uint64_t claim;     // The number of the last probe; never 0 in a claim.
  std::uint64_t until_ms;

  bool out() const { return state == 1 || state == 2; }
  bool healthy() const { return state == 0; }
  bool HasClaim(std::uint32_t probe) const { return state == 2 && probe != Member::kNoProbe && claim == probe; }
};

std::uint64_t Encode(const Health& health) {
  return health.state | health.level << 2 | health.failures << 7 | health.claim << 14 | health.until_ms << 26;
}

Health Decode(std::uint64_t word) {
  return {word & 3U, word >> 2 & kMaxLevel, word >> 7 & kMaxFailures, word >> 14 & kMaxClaim, word >> 26};
}

std::uint64_t StateWord(MemberHealth health) { return static_cast<std::uint64_t>(health); }

std::uint64_t UntilMs(std::int64_t now_ns, std::int64_t duration_ns) {
  return std::min(static_cast<std::uint64_t>(CeilMs(AddNs(std::max<std::int64_t>(now_ns, 0), duration_ns))),
                  kMaxUntilMs);
}

bool IsOut(std::uint64_t word) { return Decode(word).out(); }

// Penalty word, from bit 0: time in ms 40, weight 24 (65,535 calls).
constexpr int kPenaltyShift = 40;
constexpr std::uint64_t kPenaltyTimeMask = (std::uint64_t{1} << kPenaltyShift) - 1;
constexpr std::uint64_t kMaxPenalty = (1U << 24) - 1;
constexpr std::uint64_t kLeastPenalty = Member::kLoadUnit / 8;

// Draws before a pick gives up on chance and looks at all members.
constexpr int kTries = 8;

}  // namespace

// ---------------------------------------------------------------------------------------------------- GroupHealth

std::uint32_t GroupHealth::EjectionLimit() const {
  const std::uint32_t count = members();
  if (count < 2) return 0;
  const double share = std::clamp(options_.max_ejected_share, 0.0, 1.0);
  return std::max(1U, static_cast<std::uint32_t>(share * count));
}

bool GroupHealth::TakeEjection() {
  std::uint32_t seen = ejected_.load(std::memory_order_relaxed);
  do {
    if (seen >= EjectionLimit()) {
      ejections_refused_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
  } while (!ejected_.compare_exchange_weak(seen, seen + 1, std::memory_order_relaxed));
  return true;
}

void GroupHealth::GiveEjection() { ejected_.fetch_sub(1, std::memory_order_relaxed); }

// --------------------------------------------------------------------------------------------------------- Member

Member::Member(GroupHealth* group, const Slot* slot)
    : group_(group), slot_(slot), quiet_since_ns_(0), returned_ns_(std::numeric_limits<std::int64_t>::min()) {
  group_->members_.fetch_add(1, std::memory_order_relaxed);
  group_->version_.fetch_add(1, std::memory_order_release);
}

Member::~Member() { Retire(); }

void Member::Retire() {
  std::uint64_t word = health_.load(std::memory_order_acquire);
  Health before = Decode(word);
  do {
    before = Decode(word);
    if (before.state == kRetiredState) return;
  } while (!health_.compare_exchange_weak(word, Encode({kRetiredState, 0, 0, before.claim, 0}),
                                          std::memory_order_acq_rel, std::memory_order_acquire));
  if (before.out()) group_->GiveEjection();
  group_->members_.fetch_sub(1, std::memory_order_relaxed);
  group_->version_.fetch_add(1, std::memory_order_release);
}

void Member::OnStart(std::int64_t /*now_ns*/) {
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  started_.fetch_add(1, std::memory_order_relaxed);
  group_->in_flight_.fetch_add(1, std::memory_order_relaxed);
}

void Member::OnEnd(Outcome outcome, std::int64_t latency_ns, std::int64_t now_ns, std::uint32_t probe) {
  group_->in_flight_.fetch_sub(1, std::memory_order_relaxed);
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  switch (outcome) {
    case Outcome::kSuccess:
      OnAnswer(true, now_ns, probe);
      break;
    case Outcome::kApplicationError:
      OnAnswer(false, now_ns, probe);
      break;
    case Outcome::kFailure:
      Charge(latency_ns, now_ns);
      OnFailure(latency_ns, now_ns, probe);
      break;
    case Outcome::kUnsent:
    case Outcome::kLost:
      AbandonProbe(probe);
      break;
  }
}

void Member::OnAnswer(bool success, std::int64_t now_ns, std::uint32_t probe) {
  std::uint64_t word = health_.load(std::memory_order_acquire);
  for (;;) {
    const Health before = Decode(word);
    Health after = before;
    if (before.HasClaim(probe)) {
      if (!success) {
        AbandonProbe(probe);
        return;
      }
      after = {StateWord(MemberHealth::kHealthy), before.level, 0, before.claim, 0};
      // Before the state: whoever sees the member healthy must not count a failure from the time before.
      returned_ns_.store(now_ns, std::memory_order_release);
      penalty_.store(0, std::memory_order_relaxed);
    } else if (before.healthy() && before.failures != 0) {
      after.failures = 0;
    } else {
      return;
    }
    if (health_.compare_exchange_weak(word, Encode(after), std::memory_order_acq_rel, std::memory_order_acquire)) {
      if (before.out()) {
        group_->GiveEjection();
        group_->version_.fetch_add(1, std::memory_order_release);
      }
      return;
    }
  }
}

void Member::OnFailure(std::int64_t latency_ns, std::int64_t now_ns, std::uint32_t probe) {
  const HealthOptions& options = group_->options();
  std::uint64_t word = health_.load(std::memory_order_acquire);
  if (!options.eject) return;
  const bool stale = now_ns - latency_ns < returned_ns_.load(std::memory_order_acquire);
  if (!Decode(word).HasClaim(probe) && (stale || !Decode(word).healthy())) return;

  // Only one of several threads sees the quiet time, so it is counted once.
  std::uint64_t forgotten = 0;
  if (now_ns > quiet_since_ns_.load(std::memory_order_relaxed)) {
    const std::int64_t quiet_ns = now_ns - quiet_since_ns_.exchange(now_ns, std::memory_order_relaxed);
    if (quiet_ns > 0)
      forgotten = static_cast<std::uint64_t>(quiet_ns / std::max<std::int64_t>(options.ejection_decay_ns, 1));
  }

  bool room = false;  // An ejection was taken from the group and not used yet.
  for (;;) {
    const Health before = Decode(word);
    Health after = before;
    after.level -= std::min(after.level, forgotten);
    const bool failed_probe = before.HasClaim(probe);
    bool eject = failed_probe;
    if (before.healthy()) {
      after.failures = std::min(before.failures + 1, kMaxFailures);
      if (after.failures >= options.consecutive_failures) {
        if (!room) room = group_->TakeEjection();
        eject = room;
      }
    } else if (!failed_probe) {
      break;
    }
    std::int64_t ejection_ns = 0;
    if (eject) {
      after.state = StateWord(MemberHealth::kEjected);
      after.level = std::min(after.level + 1, kMaxLevel);
      after.failures = 0;
      ejection_ns = EjectionNs(static_cast<std::uint32_t>(after.level));
      after.until_ms = UntilMs(now_ns, ejection_ns);
    }
    if (health_.compare_exchange_weak(word, Encode(after), std::memory_order_acq_rel, std::memory_order_acquire)) {
      if (eject) {
        quiet_since_ns_.store(AddNs(now_ns, ejection_ns), std::memory_order_relaxed);
        group_->ejections_.fetch_add(1, std::memory_order_relaxed);
        group_->version_.fetch_add(1, std::memory_order_release);
      }
      if (!failed_probe && eject) room = false;
      break;
    }
  }
  if (room) group_->GiveEjection();
}

void Member::AbandonProbe(std::uint32_t probe) {
  if (probe == kNoProbe) return;
  std::uint64_t word = health_.load(std::memory_order_acquire);
  for (;;) {
    Health health = Decode(word);
    if (!health.HasClaim(probe)) return;
    health.state = StateWord(MemberHealth::kEjected);
    health.until_ms = 0;  // The next pick may have it.
    if (health_.compare_exchange_weak(word, Encode(health), std::memory_order_acq_rel, std::memory_order_acquire)) {
      group_->version_.fetch_add(1, std::memory_order_release);
      return;
    }
  }
}

bool Member::Due(std::int64_t now_ns) const {
  const Health health = Decode(health_.load(std::memory_order_acquire));
  return health.out() && static_cast<std::uint64_t>(FloorMs(now_ns)) >= health.until_ms;
}

std::uint32_t Member::TryClaimProbe(std::int64_t now_ns) {
  std::uint64_t word = health_.load(std::memory_order_acquire);
  Health health = Decode(word);
  if (!health.out() || static_cast<std::uint64_t>(FloorMs(now_ns)) < health.until_ms) return kNoProbe;
  health.state = StateWord(MemberHealth::kProbing);
  health.claim = health.claim == kMaxClaim ? 1 : health.claim + 1;
  health.until_ms = UntilMs(now_ns, group_->options().probe_timeout_ns);
  // Whoever loses this race goes elsewhere: one try.
  if (!health_.compare_exchange_strong(word, Encode(health), std::memory_order_acq_rel, std::memory_order_acquire)) {
    return kNoProbe;
  }
  group_->probes_.fetch_add(1, std::memory_order_relaxed);
  return static_cast<std::uint32_t>(health.claim);
}

std::int64_t Member::EjectionNs(std::uint32_t level) const {
  const HealthOptions& options = group_->options();
  std::int64_t ejection_ns = options.base_ejection_ns;
  for (std::uint32_t i = 1; i < level && ejection_ns < options.max_ejection_ns; ++i) {
    ejection_ns = AddNs(ejection_ns, ejection_ns);
  }
  return std::min(ejection_ns, options.max_ejection_ns);
}

void Member::Charge(std::int64_t latency_ns, std::int64_t now_ns) {
  const std::int64_t full_ns = group_->options().failure_latency_ns;
  if (latency_ns >= full_ns) return;  // It was in flight for that long already.
  const double share = 1.0 - static_cast<double>(std::max<std::int64_t>(latency_ns, 0)) / static_cast<double>(full_ns);
  const auto charge = static_cast<std::uint64_t>(share * static_cast<double>(kLoadUnit));
  std::uint64_t seen = penalty_.load(std::memory_order_relaxed);
  std::uint64_t next = 0;
  do {
    const std::uint64_t weight = std::min(PenaltyAt(now_ns) + charge, kMaxPenalty);
    next = weight << kPenaltyShift | (static_cast<std::uint64_t>(FloorMs(now_ns)) & kPenaltyTimeMask);
  } while (!penalty_.compare_exchange_weak(seen, next, std::memory_order_relaxed));
}

// A weight that halves in ln(2) * failure_latency_ns amounts to failure_latency_ns over all time, as one call does that
// is in flight for so long.
std::uint64_t Member::PenaltyAt(std::int64_t now_ns) const {
  const std::uint64_t word = penalty_.load(std::memory_order_relaxed);
  if (word == 0) return 0;
  const std::int64_t age_ms = FloorMs(now_ns) - static_cast<std::int64_t>(word & kPenaltyTimeMask);
  const std::uint64_t weight = word >> kPenaltyShift;
  if (age_ms <= 0) return weight;
  const std::int64_t half_life_ms =
      std::max<std::int64_t>(1, group_->options().failure_latency_ns / kNsPerMs * 693 / 1000);
  if (age_ms / 24 >= half_life_ms) return 0;
  // Exact at each half life, and a straight line in between.
  const auto periods_1024 = static_cast<std::uint64_t>(age_ms * 1024 / half_life_ms);
  const std::uint64_t halved = weight >> (periods_1024 >> 10);
  const std::uint64_t now = halved - halved * (periods_1024 & 1023U) / 2048;
  // A trace of weight would keep all calls away from the member as long as the others are idle.
  return now < kLeastPenalty ? 0 : now;
}

std::uint64_t Member::Load(std::int64_t now_ns) const {
  const std::int64_t in_flight = in_flight_.load(std::memory_order_relaxed);
  // Two ends may be seen before their starts; a load below nothing would win every comparison.
  return static_cast<std::uint64_t>(std::max<std::int64_t>(in_flight, 0)) * kLoadUnit + PenaltyAt(now_ns);
}

MemberHealth Member::health() const {
  const Health health = Decode(health_.load(std::memory_order_acquire));
  return health.state == kRetiredState ? MemberHealth::kHealthy : static_cast<MemberHealth>(health.state);
}

std::int64_t Member::until_ns() const {
  const Health health = Decode(health_.load(std::memory_order_acquire));
  return health.out() ? static_cast<std::int64_t>(health.until_ms) * kNsPerMs : 0;
}

std::uint32_t Member::failures_in_a_row() const {
  return static_cast<std::uint32_t>(Decode(health_.load(std::memory_order_acquire)).failures);
}

std::uint32_t Member::ejections_in_a_row() const {
  return static_cast<std::uint32_t>(Decode(health_.load(std::memory_order_acquire)).level);
}

// --------------------------------------------------------------------------------------------------------- Picker

const char* NoPickName(NoPick reason) {
  switch (reason) {
    case NoPick::kPicked:
      return "picked";
    case NoPick::kNoMember:
      return "no_member";
    case NoPick::kAllDown:
      return "all_down";
    case NoPick::kAllExcluded:
      return "all_excluded";
  }
  return "invalid";
}

// The virtual nodes of all members, sorted. `first[i]` is where hashes with the upper bits i begin, so that a look-up
// reads about two entries, which lie together, instead of log2(n) that are all over the memory.
struct Picker::Ring {
  struct Node {
    std::uint32_t hash;
    std::int32_t owner;
  };

  Ring(const std::vector<Member*>& members, std::uint32_t virtual_nodes) {
    std::vector<std::uint64_t> member_hashes;
    member_hashes.reserve(members.size());
    nodes.reserve(members.size() * virtual_nodes);
    for (std::size_t i = 0; i < members.size(); ++i) {
      member_hashes.push_back(HashOf(members[i]->id()));
      for (std::uint32_t v = 0; v < virtual_nodes; ++v) {
        nodes.push_back({Upper(Mix(member_hashes[i] + kGolden * (v + 1))), static_cast<std::int32_t>(i)});
      }
    }
    // Ties by identity, not by place in the list.
    std::sort(nodes.begin(), nodes.end(), [&](const Node& a, const Node& b) {
      return a.hash != b.hash
                 ? a.hash < b.hash
                 : member_hashes[static_cast<std::size_t>(a.owner)] < member_hashes[static_cast<std::size_t>(b.owner)];
    });
    int bits = 1;
    while ((std::size_t{2} << bits) < nodes.size() && bits < 24) ++bits;
    shift = 32 - bits;
    const std::size_t buckets = std::size_t{1} << bits;
    first.reserve(buckets);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      while (first.size() <= nodes[i].hash >> shift) first.push_back(static_cast<std::uint32_t>(i));
    }
    first.resize(buckets, static_cast<std::uint32_t>(nodes.size()));
  }

  static std::uint32_t Upper(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }

  // The first node at or after the key, clockwise.
  std::size_t Find(std::uint64_t key) const {
    const std::uint32_t hash = Upper(Mix(key));
    std::size_t at = first[hash >> shift];
    while (at < nodes.size() && nodes[at].hash < hash) ++at;
    return at == nodes.size() ? 0 : at;
  }

  int shift = 31;
  std::vector<Node> nodes;
  std::vector<std::uint32_t> first;
};

// What picks write, and for groups of more than kExactMembers what they know. The census is a hint: whoever takes a
// member from it asks the slot again. Only the holder of `refreshing` writes it, and nobody waits for the holder.
struct Picker::Shared {
  explicit Shared(std::size_t members, std::uint64_t seed)
      : random(seed), cursor(Mix(seed + kGolden)), words((members + 63) / 64), candidates(members) {}

  alignas(64) std::atomic<std::uint64_t> random;
  alignas(64) std::atomic<std::uint64_t> cursor;
  alignas(64) std::vector<std::atomic<std::uint64_t>> words;  // A bit for each candidate.
  // The same as a list, of which the first `count` count. During a change it may name some twice and others not at all,
  // but never anything that is not an index.
  std::vector<std::atomic<std::int32_t>> candidates;
  std::atomic<std::uint32_t> count{0};    // Candidates in all.
  std::atomic<bool> pending{false};       // The candidates are of the second choice.
  std::atomic<std::uint32_t> version{0};  // GroupHealth's, when the look began.
  std::atomic<std::int64_t> looked_ns{std::numeric_limits<std::int64_t>::min()};
  std::atomic<std::int32_t> due{-1};  // A member whose probe may come.
  std::atomic<bool> refreshing{false};
};

// The candidates: one word of our own for a small group, the shared census for others.
struct Picker::Look {
  const Shared* shared = nullptr;
  std::uint64_t word = 0;
  std::uint32_t count = 0;
  std::int32_t due = -1;
  bool pending = false;

  bool Has(std::int32_t index) const {
    const auto i = static_cast<std::size_t>(index);
    const std::uint64_t bits = shared == nullptr ? word : shared->words[i / 64].load(std::memory_order_relaxed);
    return (bits >> (i % 64) & 1U) != 0;
  }

  // The candidate number `rank`.
  std::int32_t At(std::uint32_t rank) const {
    if (shared != nullptr) return shared->candidates[rank].load(std::memory_order_relaxed);
    std::uint64_t bits = word;
    for (; rank > 0; --rank) bits &= bits - 1;
    return __builtin_ctzll(bits);
  }
};

Picker::Picker(const PickerOptions& options, std::vector<Member*> members)
    : options_(options),
      members_(std::move(members)),
      group_(members_.empty() ? nullptr : members_.front()->group_),
      ring_(options.kind == BalancerKind::kConsistentHash
                ? std::make_unique<Ring>(members_, std::max(options.virtual_nodes, 1U))
                : nullptr),
      shared_(std::make_unique<Shared>(members_.size(), options.seed)) {
  for (const Member* member : members_) {
    assert(member->group_ == group_);
    (void)member;
  }
}

Picker::~Picker() = default;

std::uint64_t Picker::Random() { return Mix(shared_->random.fetch_add(kGolden, std::memory_order_relaxed) + kGolden); }

bool Picker::Usable(std::int32_t index, bool pending) const {
  return TierOf(member(index).slot().state()) == (pending ? Tier::kPending : Tier::kUp);
}

PickResult Picker::Pick(const PickRequest& request) {
  if (members_.empty()) return {-1, NoPick::kNoMember, Member::kNoProbe};
  if (members_.size() <= kExactMembers) {
    const PickResult result = PickOnce(request, LookAtAll(request));
    return result.index >= 0 ? result : AsProbe(PickByScan(request), request);
  }
  if (OutOfDate(request.now_ns)) Refresh(request.now_ns);
  PickResult result = PickOnce(request, SharedLook());
  if (result.index >= 0) return result;
  const PickResult last_resort = PickByScan(request);
  if (last_resort.index < 0) return last_resort;
  // Somebody is able and the census does not know: with a new one the pick follows the rule of its kind again.
  Refresh(request.now_ns);
  result = PickOnce(request, SharedLook());
  return result.index >= 0 ? result : AsProbe(last_resort, request);
}

// Nobody else was left: if the member is ejected and its time is up, this call may as well be the probe.
PickResult Picker::AsProbe(PickResult last_resort, const PickRequest& request) const {
  if (last_resort.index >= 0) last_resort.probe = member(last_resort.index).TryClaimProbe(request.now_ns);
  return last_resort;
}

PickResult Picker::PickOnce(const PickRequest& request, const Look& look) {
  if (options_.kind == BalancerKind::kConsistentHash) return PickOnRing(request, look);
  // A member that was ejected comes first once its time is up, or among many it would wait long for its probe. A call
  // that has failed elsewhere already is spared the risk.
  if (look.due >= 0 && request.excluded_count == 0 && Usable(look.due, look.pending)) {
    const std::uint32_t probe = member(look.due).TryClaimProbe(request.now_ns);
    if (probe != Member::kNoProbe) {
      if (look.shared != nullptr) shared_->due.store(-1, std::memory_order_relaxed);
      return {look.due, NoPick::kPicked, probe};
    }
  }
  if (look.count == 0) return {};
  std::int32_t index = -1;
  // Second attempts in round robin go anywhere: in turn, they would beat time with the first ones, and always hit the
  // same members.
  if (options_.kind == BalancerKind::kRoundRobin && request.excluded_count == 0) {
    index = look.At(static_cast<std::uint32_t>(shared_->cursor.fetch_add(1, std::memory_order_relaxed) % look.count));
  } else if (options_.kind == BalancerKind::kLeastLoaded) {
    index = PickLessLoaded(request, look);
  } else {
    index = PickAny(request, look);
  }
  if (index < 0 || !Usable(index, look.pending)) return {};
  return {index, NoPick::kPicked, Member::kNoProbe};
}

// A candidate by chance; -1 when all that were drawn are excluded.
std::int32_t Picker::PickAny(const PickRequest& request, const Look& look) {
  for (int i = 0; i < kTries; ++i) {
    const std::int32_t index = look.At(Below(Random(), look.count));
    if (!Contains(request, index)) return index;
  }
  return -1;
}

std::int32_t Picker::PickLessLoaded(const PickRequest& request, const Look& look) {
  if (look.count < 2) return PickAny(request, look);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t random = Random();
    const std::uint32_t first = Below(random, look.count);
    // Another one for sure: in small groups two that may be the same would make half of the picks random.
    std::uint32_t second = Below(random << 32, look.count - 1);
    second += second >= first ? 1 : 0;
    const std::int32_t a = look.At(first);
    const std::int32_t b = look.At(second);
    // Excluded, or down since the census: then the other one, if that may.
    const bool a_may = !Contains(request, a) && Usable(a, look.pending);
    const bool b_may = !Contains(request, b) && Usable(b, look.pending);
    // `a` was drawn by chance, so a tie is decided by chance.
    if (a_may && b_may) return member(b).Load(request.now_ns) < member(a).Load(request.now_ns) ? b : a;
    if (a_may || b_may) return a_may ? a : b;
  }
  return -1;
}

// At least the share 1 - 1 / bounded_load of the candidates is under the bound, so the walk is short.
PickResult Picker::PickOnRing(const PickRequest& request, const Look& look) {
  const bool probes = group_->ejected() > 0 && request.excluded_count == 0;
  if (look.count == 0 && !probes) return {};
  const double average =
      static_cast<double>(std::max<std::int64_t>(group_->in_flight(), 0) + 1) / std::max(look.count, 1U);
  const auto bound = static_cast<std::uint64_t>(std::ceil(average * std::max(options_.bounded_load, 1.0)));
  std::int32_t first = -1;
  std::int32_t last = -1;
  std::size_t at = ring_->Find(request.key);
  const std::size_t size = ring_->nodes.size();
  for (std::size_t step = 0; step < size; ++step) {
    const std::int32_t index = ring_->nodes[at].owner;
    if (++at == size) at = 0;
    if (index == last) continue;
    last = index;
    if (look.Has(index)) {
      if (Contains(request, index) || !Usable(index, look.pending)) continue;
      if (member(index).Load(request.now_ns) + Member::kLoadUnit <= bound * Member::kLoadUnit) {
        return {index, NoPick::kPicked, Member::kNoProbe};
      }
      if (first < 0) first = index;
    } else if (probes && member(index).Due(request.now_ns) && Usable(index, look.pending)) {
      // On its own keys, so that a probe moves none.
      const std::uint32_t probe = member(index).TryClaimProbe(request.now_ns);
      if (probe != Member::kNoProbe) return {index, NoPick::kPicked, probe};
    }
  }
  if (first < 0) return {};
  return {first, NoPick::kPicked, Member::kNoProbe};
}

Picker::Look Picker::LookAtAll(const PickRequest& request) const {
  std::uint64_t up = 0;
  std::uint64_t pending = 0;
  std::uint64_t out = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Tier tier = TierOf(members_[i]->slot().state());
    const std::uint64_t bit = std::uint64_t{1} << i;
    if (tier == Tier::kUp) up |= bit;
    if (tier == Tier::kPending) pending |= bit;
    if (IsOut(members_[i]->health_.load(std::memory_order_acquire))) out |= bit;
  }
  Look look;
  look.pending = up == 0 && options_.use_pending;
  const std::uint64_t able = up != 0 ? up : options_.use_pending ? pending : 0;
  look.word = able & ~out;
  if (out != 0) {
    const int ejected = __builtin_popcountll(able & out);
    if (ejected > options_.panic_share * __builtin_popcountll(able)) look.word = able;
    for (std::uint64_t rest = able & out; rest != 0; rest &= rest - 1) {
      const int i = __builtin_ctzll(rest);
      if (members_[static_cast<std::size_t>(i)]->Due(request.now_ns)) {
        look.due = i;
        break;
      }
    }
  }
  for (std::size_t i = 0; i < request.excluded_count; ++i) {
    const std::int32_t index = request.excluded[i];
    if (index >= 0 && index < 64) look.word &= ~(std::uint64_t{1} << index);
  }
  look.count = static_cast<std::uint32_t>(__builtin_popcountll(look.word));
  return look;
}

Picker::Look Picker::SharedLook() const {
  Look look;
  look.shared = shared_.get();
  look.count = shared_->count.load(std::memory_order_relaxed);
  look.due = shared_->due.load(std::memory_order_relaxed);
  look.pending = shared_->pending.load(std::memory_order_relaxed);
  return look;
}

bool Picker::OutOfDate(std::int64_t now_ns) const {
  const std::int64_t looked_ns = shared_->looked_ns.load(std::memory_order_relaxed);
  return looked_ns == std::numeric_limits<std::int64_t>::min() || now_ns - looked_ns >= options_.census_period_ns ||
         shared_->version.load(std::memory_order_relaxed) != group_->version_.load(std::memory_order_acquire);
}

void Picker::Refresh(std::int64_t now_ns) {
  Shared& shared = *shared_;
  // Whoever comes second goes on with what there is.
  if (shared.refreshing.exchange(true, std::memory_order_acquire)) return;
  // Before the look: what changes during it must be seen by the next.
  shared.version.store(group_->version_.load(std::memory_order_acquire), std::memory_order_relaxed);
  shared.looked_ns.store(now_ns, std::memory_order_relaxed);

  const auto look = [&](Tier tier, bool ignore_health) {
    std::uint32_t able = 0;
    std::uint32_t out = 0;
    std::uint32_t count = 0;
    std::int32_t due = -1;
    for (std::size_t w = 0; w < shared.words.size(); ++w) {
      std::uint64_t bits = 0;
      const std::size_t end = std::min(members_.size(), 64 * (w + 1));
      for (std::size_t i = 64 * w; i < end; ++i) {
        const Member& member = *members_[i];
        if (TierOf(member.slot().state()) != tier) continue;
        ++able;
        if (IsOut(member.health_.load(std::memory_order_acquire))) {
          ++out;
          if (due < 0 && member.Due(now_ns)) due = static_cast<std::int32_t>(i);
          if (!ignore_health) continue;
        }
        bits |= std::uint64_t{1} << (i % 64);
        shared.candidates[count++].store(static_cast<std::int32_t>(i), std::memory_order_relaxed);
      }
      shared.words[w].store(bits, std::memory_order_relaxed);
    }
    shared.pending.store(tier == Tier::kPending, std::memory_order_relaxed);
    shared.count.store(count, std::memory_order_relaxed);
    shared.due.store(due, std::memory_order_relaxed);
    return std::pair(able, out);
  };
  Tier tier = Tier::kUp;
  std::pair<std::uint32_t, std::uint32_t> seen = look(tier, false);
  if (seen.first == 0 && options_.use_pending) {
    tier = Tier::kPending;
    seen = look(tier, false);
  }
  if (seen.second > options_.panic_share * seen.first) look(tier, true);
  shared.refreshing.store(false, std::memory_order_release);
}

// One pass over all members, without the census: what is left when nobody was found, and the reason.
PickResult Picker::PickByScan(const PickRequest& request) {
  struct Found {
    std::uint32_t all = 0;
    std::uint32_t out = 0;
    std::uint32_t free = 0;  // Not excluded.
    std::uint32_t free_ready = 0;
    std::int32_t any = -1;    // One of the free ones, by chance.
    std::int32_t ready = -1;  // One of those that are not ejected, by chance.
  };
  Found found[2];
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Tier tier = TierOf(members_[i]->slot().state());
    if (tier == Tier::kDown) continue;
    Found& here = found[tier == Tier::kUp ? 0 : 1];
    const bool out = IsOut(members_[i]->health_.load(std::memory_order_acquire));
    ++here.all;
    here.out += out ? 1 : 0;
    const auto index = static_cast<std::int32_t>(i);
    if (Contains(request, index)) continue;
    if (Below(Random(), ++here.free) == 0) here.any = index;
    if (!out && Below(Random(), ++here.free_ready) == 0) here.ready = index;
  }
  const bool second_choice = found[0].all == 0;
  if (second_choice && (!options_.use_pending || found[1].all == 0)) return {-1, NoPick::kAllDown, Member::kNoProbe};
  const Found& from = found[second_choice ? 1 : 0];
  if (from.free == 0) return {-1, NoPick::kAllExcluded, Member::kNoProbe};
  const bool panic = from.out > options_.panic_share * from.all;
  const std::int32_t index = panic || from.ready < 0 ? from.any : from.ready;
  return {index, NoPick::kPicked, Member::kNoProbe};
}

std::int32_t Picker::IndexOf(const Member* member) const {
  const auto found = std::find(members_.begin(), members_.end(), member);
  return found == members_.end() ? -1 : static_cast<std::int32_t>(found - members_.begin());
}

Census Picker::Count() const {
  Census census;
  census.members = static_cast<std::uint32_t>(members_.size());
  for (const Member* member : members_) {
    const Tier tier = TierOf(member->slot().state());
    if (tier == Tier::kPending) ++census.pending;
    if (tier != Tier::kUp) continue;
    ++census.up;
    if (IsOut(member->health_.load(std::memory_order_acquire))) ++census.ejected_up;
  }
  census.panic = census.ejected_up > options_.panic_share * census.up;
  return census;
}

std::int32_t Picker::OwnerOf(std::uint64_t key) const {
  if (ring_ == nullptr || members_.empty()) return -1;
  return ring_->nodes[ring_->Find(key)].owner;
}

}  // namespace actorsub
