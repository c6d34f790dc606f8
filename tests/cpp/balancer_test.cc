// Picks and health under virtual time, one case for each rule of balancer.h; then properties (who may be picked at all,
// which keys move) against slow and obvious models; then threads.
//
// The idea of the threaded case. Every thread picks, starts and ends calls, one more turns members up and down. A probe
// is a claim, so each member has a counter of the probes that run there: it must never pass one. In the end nothing
// may be in flight, and the number of members that are ejected must be what the group believes.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "balancer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "test_random.h"

namespace actorsub {
namespace {

using testing::Random;
using testing::Seed;

constexpr std::int64_t kMs = kNsPerMs;
constexpr std::int64_t kSecond = kNsPerSecond;
constexpr std::int64_t kStart = 1000 * kSecond;

Observation Report(Evidence evidence, ActorState verdict) {
  Observation observation;
  observation.evidence = evidence;
  observation.verdict = verdict;
  observation.incarnation = 0;
  return observation;
}

ActorId IdOf(std::uint64_t number) {
  ActorId id{};
  for (std::size_t i = 0; i < 8; ++i) id[i] = static_cast<std::uint8_t>(number >> (8 * i));
  return id;
}

// A group whose members are all up at first.
struct World {
  explicit World(int count, const PickerOptions& picking = {}, const HealthOptions& health = {})
      : options(picking), group(health) {
    for (int i = 0; i < count; ++i) Add(i);
    Rebuild();
  }

  void Add(int number, bool up = true) {
    slots.emplace_back(IdOf(static_cast<std::uint64_t>(number)));
    if (up) slots.back().Apply(Report(Evidence::kTable, ActorState::kAlive));
    members.push_back(std::make_unique<Member>(&group, &slots.back()));
  }
  void Rebuild() {
    std::vector<Member*> list;
    list.reserve(members.size());
    for (const auto& member : members) list.push_back(member.get());
    picker = std::make_unique<Picker>(options, list);
  }
  Member& at(int i) { return *members[static_cast<std::size_t>(i)]; }
  void Down(int i) { slots[static_cast<std::size_t>(i)].Apply(Report(Evidence::kSilence, ActorState::kUnreachable)); }
  void Up(int i) { slots[static_cast<std::size_t>(i)].Apply(Report(Evidence::kSilence, ActorState::kAlive)); }

  PickResult Pick(const std::vector<std::int32_t>& excluded = {}, std::uint64_t key = 0) const {
    PickRequest request;
    request.key = key;
    request.excluded = excluded.data();
    request.excluded_count = excluded.size();
    request.now_ns = now;
    return picker->Pick(request);
  }
  void Call(int i, Outcome outcome, std::int64_t latency_ns = 10 * kMs, std::uint32_t probe = Member::kNoProbe) {
    at(i).OnStart(now);
    at(i).OnEnd(outcome, latency_ns, now, probe);
  }
  void Fail(int i, int times) {
    for (int n = 0; n < times; ++n) Call(i, Outcome::kFailure);
  }
  void Eject(int i) { Fail(i, static_cast<int>(group.options().consecutive_failures)); }
  // How often each member is picked; nothing is started.
  std::vector<int> Tally(int picks, const std::vector<std::int32_t>& excluded = {}) const {
    std::vector<int> tally(members.size(), 0);
    for (int n = 0; n < picks; ++n) {
      const PickResult result = Pick(excluded, static_cast<std::uint64_t>(n));
      if (result.index >= 0) ++tally[static_cast<std::size_t>(result.index)];
    }
    return tally;
  }

  PickerOptions options;
  std::deque<Slot> slots;
  GroupHealth group;
  std::vector<std::unique_ptr<Member>> members;
  std::unique_ptr<Picker> picker;
  std::int64_t now = kStart;
};

PickerOptions Kind(BalancerKind kind, std::uint64_t seed = 1) {
  PickerOptions options;
  options.kind = kind;
  options.seed = seed;
  return options;
}

constexpr BalancerKind kKinds[] = {BalancerKind::kRoundRobin, BalancerKind::kLeastLoaded, BalancerKind::kConsistentHash,
                                   BalancerKind::kRandom};
// One that looks at all members at each pick, and one with a census.
constexpr int kSizes[] = {3, 100};

// ------------------------------------------------------------------------------------------------- who may be picked

TEST_CASE("nobody, and why") {
  for (const BalancerKind kind : kKinds) {
    CAPTURE(static_cast<int>(kind));
    World none(0, Kind(kind));
    CHECK(none.Pick().index == -1);
    CHECK(none.Pick().reason == NoPick::kNoMember);

    for (const int size : kSizes) {
      CAPTURE(size);
      World world(size, Kind(kind));
      std::vector<std::int32_t> all;
      all.reserve(static_cast<std::size_t>(size));
      for (int i = 0; i < size; ++i) all.push_back(i);
      CHECK(world.Pick(all).index == -1);
      CHECK(world.Pick(all).reason == NoPick::kAllExcluded);
      all.pop_back();
      CHECK(world.Pick(all).index == size - 1);
      CHECK(world.Pick(all).reason == NoPick::kPicked);
      for (int i = 0; i < size; ++i) world.Down(i);
      CHECK(world.Pick().index == -1);
      CHECK(world.Pick().reason == NoPick::kAllDown);
      CHECK(world.Pick(all).reason == NoPick::kAllDown);
      world.Up(1);
      CHECK(world.Pick({0}).index == 1);
      CHECK(world.Pick({1}).reason == NoPick::kAllExcluded);
    }
  }
  CHECK(NoPickName(NoPick::kPicked) == std::string("picked"));
  CHECK(NoPickName(NoPick::kNoMember) == std::string("no_member"));
  CHECK(NoPickName(NoPick::kAllDown) == std::string("all_down"));
  CHECK(NoPickName(NoPick::kAllExcluded) == std::string("all_excluded"));
}

TEST_CASE("a member that is down is out in the same moment, also with an old census") {
  for (const BalancerKind kind : kKinds) {
    for (const int size : kSizes) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(size);
      World world(size, Kind(kind));
      world.Tally(10);
      for (int i = 0; i < size; ++i) {
        if (i != 2) world.Down(i);
      }
      const std::vector<int> tally = world.Tally(200);
      CHECK(tally[2] == 200);
    }
  }
}

TEST_CASE("pending is the second choice") {
  for (const BalancerKind kind : kKinds) {
    for (const int size : kSizes) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(size);
      PickerOptions options = Kind(kind);
      World world(size, options);
      world.Add(size, false);
      world.Rebuild();
      CHECK(world.Tally(1000)[static_cast<std::size_t>(size)] == 0);
      for (int i = 0; i < size; ++i) world.Down(i);
      CHECK(world.Pick().index == size);
      world.slots.back().Apply(Report(Evidence::kTable, ActorState::kPending));
      CHECK(world.Pick().index == size);
      CHECK(world.Pick({size}).reason == NoPick::kAllExcluded);
      world.options.use_pending = false;
      world.Rebuild();
      CHECK(world.Pick().reason == NoPick::kAllDown);
      // One that is up and was tried still keeps pending ones out.
      world.options.use_pending = true;
      world.Rebuild();
      world.Up(0);
      CHECK(world.Pick({0}).reason == NoPick::kAllExcluded);
    }
  }
}

TEST_CASE("a census is renewed in time") {
  World world(100, Kind(BalancerKind::kRoundRobin));
  world.Down(7);
  CHECK(world.Tally(1000)[7] == 0);
  world.Up(7);
  world.now += world.options.census_period_ns;
  CHECK(world.Tally(1000)[7] == 10);
}

// Whoever may be picked, from the words of the header and without any cleverness.
std::set<int> Admissible(World& world, const std::vector<std::int32_t>& excluded, NoPick* reason) {
  std::vector<int> able;
  for (const bool pending : {false, true}) {
    if (!able.empty() || (pending && !world.options.use_pending)) continue;
    for (int i = 0; i < static_cast<int>(world.members.size()); ++i) {
      const ActorState state = world.slots[static_cast<std::size_t>(i)].state();
      const bool is_pending = state == ActorState::kUnknown || state == ActorState::kPending;
      if (pending ? is_pending : state == ActorState::kAlive) able.push_back(i);
    }
  }
  *reason = able.empty() ? NoPick::kAllDown : NoPick::kAllExcluded;
  std::set<int> ready;
  std::set<int> rest;
  int out = 0;
  for (const int i : able) {
    const bool ejected = world.at(i).health() != MemberHealth::kHealthy;
    out += ejected ? 1 : 0;
    if (std::find(excluded.begin(), excluded.end(), i) != excluded.end()) continue;
    // Due for its probe: may come at any time.
    const bool due = ejected && excluded.empty() && world.now >= world.at(i).until_ns();
    rest.insert(i);
    if (!ejected || due) ready.insert(i);
  }
  const bool panic = out > world.options.panic_share * static_cast<double>(able.size());
  bool healthy_left = false;
  for (const int i : ready) healthy_left = healthy_left || world.at(i).health() == MemberHealth::kHealthy;
  if (panic || !healthy_left) ready = std::move(rest);
  if (!ready.empty()) *reason = NoPick::kPicked;
  return ready;
}

TEST_CASE("picks only whom the model admits") {
  const std::uint64_t seed = Seed();
  CAPTURE(seed);
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    PickerOptions options = Kind(kKinds[random.Below(4)], random.Word());
    options.census_period_ns = 0;  // The model knows everything at once.
    options.use_pending = !random.OneIn(4);
    HealthOptions health;
    health.max_ejected_share = random.OneIn(2) ? 1.0 : 0.5;
    const int size = random.OneIn(3) ? 17 + random.Below(180) : 1 + random.Below(16);
    World world(size, options, health);
    for (int i = 0; i < 3; ++i) world.Add(size + i, false);
    world.Rebuild();
    const int all = size + 3;
    for (int step = 0; step < 60; ++step) {
      const int i = random.Below(all);
      switch (random.Below(5)) {
        case 0:
          world.Down(i);
          break;
        case 1:
          world.Up(i);
          break;
        case 2:
          world.Eject(i);
          break;
        case 3:
          world.now += random.Below(700) * kMs;
          break;
        default:
          for (int k = 0; random.OneIn(20) && k < all; ++k) world.Down(k);
          break;
      }
      std::vector<std::int32_t> excluded;
      for (int k = random.Below(4); k > 0; --k) excluded.push_back(random.Below(all));
      NoPick reason = NoPick::kPicked;
      const std::set<int> admissible = Admissible(world, excluded, &reason);
      const PickResult result = world.Pick(excluded, random.Word());
      CAPTURE(round);
      CAPTURE(step);
      REQUIRE(result.reason == reason);
      REQUIRE((result.index < 0 ? admissible.empty() : admissible.count(result.index) == 1));
      if (result.probe != Member::kNoProbe) {
        world.Call(result.index, random.OneIn(2) ? Outcome::kSuccess : Outcome::kFailure, kMs, result.probe);
      }
    }
    int out = 0;
    for (const auto& member : world.members) out += member->health() != MemberHealth::kHealthy ? 1 : 0;
    REQUIRE(out == static_cast<int>(world.group.ejected()));
  }
}

// ------------------------------------------------------------------------------------------------------ round robin

TEST_CASE("round robin takes turns, evenly also beside members that are down") {
  for (const int size : kSizes) {
    CAPTURE(size);
    World world(size, Kind(BalancerKind::kRoundRobin));
    for (const int count : world.Tally(size * 10)) CHECK(count == 10);
    world.Down(1);
    const std::vector<int> tally = world.Tally((size - 1) * 10);
    CHECK(tally[1] == 0);
    // Also the one after the gap. With a census the pick that met the gap first has used up a turn.
    CHECK(*std::max_element(tally.begin(), tally.end()) <= (size > 3 ? 11 : 10));
  }
}

TEST_CASE("second attempts in round robin do not beat time with the first ones") {
  World world(3, Kind(BalancerKind::kRoundRobin));
  std::vector<int> tally(3, 0);
  for (int n = 0; n < 3000; ++n) {
    int index = world.Pick().index;
    if (index == 0) index = world.Pick({0}).index;
    ++tally[static_cast<std::size_t>(index)];
  }
  CHECK(tally[0] == 0);
  CHECK(tally[1] > 1400);
  CHECK(tally[2] > 1400);
}

// ----------------------------------------------------------------------------------------------------- least loaded

TEST_CASE("least loaded: ties are decided evenly by chance") {
  for (const int size : {2, 3, 16, 17, 100}) {
    CAPTURE(size);
    World world(size, Kind(BalancerKind::kLeastLoaded, 42));
    const std::vector<int> tally = world.Tally(size * 2000);
    // Six standard deviations around 2000.
    for (const int count : tally) {
      CHECK(count > 2000 - 270);
      CHECK(count < 2000 + 270);
    }
  }
}

TEST_CASE("least loaded: even among the few that are up of many") {
  World world(1000, Kind(BalancerKind::kLeastLoaded, 42));
  for (int i = 0; i < 1000; ++i) {
    if (i % 10 != 3) world.Down(i);
  }
  const std::vector<int> tally = world.Tally(100 * 2000);
  for (int i = 0; i < 1000; ++i) {
    const int count = tally[static_cast<std::size_t>(i)];
    if (i % 10 != 3) {
      REQUIRE(count == 0);
    } else {
      CHECK(count > 2000 - 270);
      CHECK(count < 2000 + 270);
    }
  }
}

TEST_CASE("least loaded: the less loaded of two") {
  World world(2, Kind(BalancerKind::kLeastLoaded));
  world.at(0).OnStart(world.now);
  CHECK(world.Tally(100)[1] == 100);
  world.at(1).OnStart(world.now);
  world.at(1).OnStart(world.now);
  CHECK(world.Tally(100)[0] == 100);

  // With calls that never end, two choices keep 1,000 members within a few of one another; one choice would not.
  World many(1000, Kind(BalancerKind::kLeastLoaded, 7));
  for (int n = 0; n < 100'000; ++n) many.at(many.Pick().index).OnStart(many.now);
  std::int64_t most = 0;
  for (const auto& member : many.members) most = std::max(most, member->in_flight());
  CHECK(most <= 100 + 6);
}

TEST_CASE("least loaded: a new member takes at most two shares") {
  World world(10, Kind(BalancerKind::kLeastLoaded, 3));
  for (int i = 0; i < 9; ++i) {
    for (int n = 0; n < 50; ++n) world.at(i).OnStart(world.now);
  }
  const int taken = world.Tally(10'000)[9];
  CHECK(taken > 1700);
  CHECK(taken < 2300);
}

// -------------------------------------------------------------------------------------------------- consistent hash

TEST_CASE("consistent hash: keys move only from and to the member that changed") {
  constexpr int kKeys = 20'000;
  for (const int size : {3, 10, 100}) {
    CAPTURE(size);
    World world(size, Kind(BalancerKind::kConsistentHash));
    std::vector<ActorId> before;
    before.reserve(kKeys);
    for (std::uint64_t key = 0; key < kKeys; ++key)
      before.push_back(world.picker->member(world.picker->OwnerOf(key)).id());
    world.Add(size);
    // The list in another order: only the ids count.
    std::reverse(world.members.begin(), world.members.end());
    world.Rebuild();
    int moved = 0;
    for (std::uint64_t key = 0; key < kKeys; ++key) {
      const ActorId after = world.picker->member(world.picker->OwnerOf(key)).id();
      if (after == before[key]) continue;
      ++moved;
      REQUIRE(after == IdOf(static_cast<std::uint64_t>(size)));
    }
    // The share of one member differs by its virtual nodes: 1/sqrt(128) is one standard deviation.
    const double share = static_cast<double>(moved) / kKeys * (size + 1);
    CHECK(share > 0.6);
    CHECK(share < 1.4);

    // And away again.
    world.members.erase(world.members.begin());
    world.Rebuild();
    for (std::uint64_t key = 0; key < kKeys; ++key) {
      REQUIRE(world.picker->member(world.picker->OwnerOf(key)).id() == before[key]);
    }
  }
}

TEST_CASE("consistent hash: shares are even") {
  World world(50, Kind(BalancerKind::kConsistentHash));
  const std::vector<int> tally = world.Tally(50 * 1000);
  CHECK(*std::max_element(tally.begin(), tally.end()) < 1400);
  CHECK(*std::min_element(tally.begin(), tally.end()) > 650);
}

TEST_CASE("consistent hash: a member that is down gives its keys to the next ones, and gets them back") {
  for (const int size : kSizes) {
    CAPTURE(size);
    World world(size, Kind(BalancerKind::kConsistentHash));
    std::vector<int> heirs(static_cast<std::size_t>(size), 0);
    world.Down(1);
    for (std::uint64_t key = 0; key < 10'000; ++key) {
      const int owner = world.picker->OwnerOf(key);
      const int taken = world.Pick({}, key).index;
      if (owner != 1) {
        REQUIRE(taken == owner);
      } else {
        ++heirs[static_cast<std::size_t>(taken)];
      }
    }
    CHECK(heirs[1] == 0);
    CHECK(std::count_if(heirs.begin(), heirs.end(), [](int count) { return count > 0; }) > (size > 3 ? 10 : 1));
    world.Up(1);
    world.now += world.options.census_period_ns;
    for (std::uint64_t key = 0; key < 1000; ++key) REQUIRE(world.Pick({}, key).index == world.picker->OwnerOf(key));
  }
}

TEST_CASE("consistent hash: the load of a member is bounded") {
  for (const int size : {3, 16, 100}) {
    CAPTURE(size);
    PickerOptions options = Kind(BalancerKind::kConsistentHash);
    options.bounded_load = 1.25;
    World world(size, options);
    Random random(5);
    for (int n = 0; n < 40 * size; ++n) {
      // Half of all calls have the same key.
      const std::uint64_t key = random.OneIn(2) ? 1 : random.Word();
      const int index = world.Pick({}, key).index;
      world.at(index).OnStart(world.now);
      const auto bound = static_cast<std::int64_t>(std::ceil(1.25 * (n + 1) / size));
      REQUIRE(world.at(index).in_flight() <= bound);
    }
    // The key's own member is as full as allowed.
    CHECK(world.at(world.picker->OwnerOf(1)).in_flight() == 50);
  }
}

TEST_CASE("consistent hash: over the bound everywhere, the first that is able") {
  World world(3, Kind(BalancerKind::kConsistentHash));
  // What failed calls weigh is not in the average, so that all can be over it.
  for (int i = 0; i < 3; ++i) {
    for (int n = 0; n < 4; ++n) world.Call(i, Outcome::kFailure, 0);
  }
  for (std::uint64_t key = 0; key < 100; ++key) CHECK(world.Pick({}, key).index == world.picker->OwnerOf(key));
}

// ------------------------------------------------------------------------------------------------------------ health

TEST_CASE("a row of failures ejects, anything shorter does not") {
  World world(3);
  world.Fail(0, 4);
  CHECK(world.at(0).failures_in_a_row() == 4);
  CHECK(world.at(0).health() == MemberHealth::kHealthy);

  SUBCASE("a success ends the row") { world.Call(0, Outcome::kSuccess); }
  SUBCASE("an answer ends the row") { world.Call(0, Outcome::kApplicationError); }
  SUBCASE("the fifth ejects") {
    world.Fail(0, 1);
    CHECK(world.at(0).health() == MemberHealth::kEjected);
    CHECK(world.at(0).until_ns() == world.now + kSecond);
    CHECK(world.group.ejected() == 1);
    CHECK(world.group.ejections() == 1);
    CHECK(world.Tally(300)[0] == 0);
    const Census census = world.picker->Count();
    CHECK(census.members == 3);
    CHECK(census.up == 3);
    CHECK(census.ejected_up == 1);
    CHECK(!census.panic);
    return;
  }
  world.Fail(0, 4);
  CHECK(world.at(0).health() == MemberHealth::kHealthy);
}

TEST_CASE("neutral outcomes eject nobody and end no row") {
  World world(3);
  for (int n = 0; n < 100; ++n) {
    world.Call(0, Outcome::kApplicationError);
    world.Call(1, Outcome::kUnsent);
    world.Call(2, Outcome::kLost);
  }
  CHECK(world.group.ejected() == 0);
  for (int i = 0; i < 3; ++i) CHECK(world.at(i).Load(world.now) == 0);
  world.Fail(0, 4);
  world.Call(0, Outcome::kUnsent);
  world.Call(0, Outcome::kLost);
  world.Fail(0, 1);
  CHECK(world.at(0).health() == MemberHealth::kEjected);
}

TEST_CASE("ejection can be switched off") {
  HealthOptions health;
  health.eject = false;
  World world(3, {}, health);
  world.Fail(0, 50);
  CHECK(world.at(0).health() == MemberHealth::kHealthy);
}

TEST_CASE("at most a share is ejected, of two or more always one, never the only one") {
  const auto ejected = [](int size, double share) {
    HealthOptions health;
    health.max_ejected_share = share;
    World world(size, {}, health);
    for (int i = 0; i < size; ++i) world.Eject(i);
    CHECK(world.group.ejected() == world.group.EjectionLimit());
    CHECK(world.group.ejections_refused() == static_cast<std::uint64_t>(size) - world.group.ejected());
    return world.group.ejected();
  };
  CHECK(ejected(1, 0.5) == 0);
  CHECK(ejected(2, 0.5) == 1);
  CHECK(ejected(3, 0.5) == 1);
  CHECK(ejected(4, 0.5) == 2);
  CHECK(ejected(5, 0.0) == 1);
  CHECK(ejected(10, 0.9) == 9);

  // Who was refused is ejected by its next failure once there is room.
  World world(3);
  world.Eject(0);
  world.Eject(1);
  CHECK(world.at(1).health() == MemberHealth::kHealthy);
  world.now += kSecond;
  world.Call(0, Outcome::kSuccess, kMs, world.Pick().probe);
  CHECK(world.group.ejected() == 0);
  world.Fail(1, 1);
  CHECK(world.at(1).health() == MemberHealth::kEjected);
}

TEST_CASE("ejections grow, up to a cap, and are forgotten") {
  World world(2);
  std::int64_t expected_ns = kSecond;
  world.Eject(0);
  for (int k = 1; k <= 12; ++k) {
    CAPTURE(k);
    CHECK(world.at(0).ejections_in_a_row() == static_cast<std::uint32_t>(k));
    CHECK(world.at(0).until_ns() - world.now == expected_ns);
    world.now = world.at(0).until_ns();
    const PickResult probe = world.Pick();
    REQUIRE(probe.index == 0);
    REQUIRE(probe.probe != Member::kNoProbe);
    world.Call(0, Outcome::kFailure, kMs, probe.probe);
    expected_ns = std::min(2 * expected_ns, 30 * kSecond);
  }
  CHECK(world.group.ejected() == 1);

  // Back, and quiet for the time of three steps.
  world.now = world.at(0).until_ns();
  world.Call(0, Outcome::kSuccess, kMs, world.Pick().probe);
  CHECK(world.at(0).health() == MemberHealth::kHealthy);
  CHECK(world.at(0).ejections_in_a_row() == 13);
  world.now += 3 * world.group.options().ejection_decay_ns;
  world.Eject(0);
  CHECK(world.at(0).ejections_in_a_row() == 11);
  // Out and unasked for long: that was no failure either.
  world.now = world.at(0).until_ns() + 100 * world.group.options().ejection_decay_ns;
  world.Call(0, Outcome::kFailure, kMs, world.Pick().probe);
  CHECK(world.at(0).ejections_in_a_row() == 1);
}

void OneProbe(int size) {
  World world(size);
  world.Eject(1);
  world.now += kSecond - 1;
  CHECK(world.Tally(500)[1] == 0);
  world.now += 1;
  world.now += size > 3 ? world.options.census_period_ns : 0;
  // A second attempt does not take it.
  CHECK(world.Tally(500, {0})[1] == 0);
  const PickResult pick = world.Pick();
  CHECK(pick.index == 1);
  CHECK(pick.probe != Member::kNoProbe);
  CHECK(world.at(1).health() == MemberHealth::kProbing);
  CHECK(world.group.probes() == 1);
  CHECK(world.Tally(500)[1] == 0);

  SUBCASE("success") {
    world.Call(1, Outcome::kSuccess, kMs, pick.probe);
    CHECK(world.at(1).health() == MemberHealth::kHealthy);
    CHECK(world.at(1).until_ns() == 0);
    CHECK(world.group.ejected() == 0);
    CHECK(world.Tally(500)[1] > 0);
  }
  SUBCASE("failure") {
    world.Call(1, Outcome::kFailure, kMs, pick.probe);
    CHECK(world.at(1).health() == MemberHealth::kEjected);
    CHECK(world.at(1).until_ns() == world.now + 2 * kSecond);
    CHECK(world.group.ejected() == 1);
  }
  SUBCASE("nothing") {
    SUBCASE("application error") { world.Call(1, Outcome::kApplicationError, kMs, pick.probe); }
    SUBCASE("unsent") { world.Call(1, Outcome::kUnsent, kMs, pick.probe); }
    SUBCASE("lost") { world.Call(1, Outcome::kLost, kMs, pick.probe); }
    SUBCASE("abandoned") { world.at(1).AbandonProbe(pick.probe); }
    CHECK(world.at(1).health() == MemberHealth::kEjected);
    CHECK(world.group.ejected() == 1);
    const PickResult next = world.Pick();
    CHECK(next.index == 1);
    CHECK(next.probe != pick.probe);
    CHECK(next.probe != Member::kNoProbe);
  }
  SUBCASE("never ends") {
    world.now += world.group.options().probe_timeout_ns;
    const PickResult next = world.Pick();
    CHECK(next.index == 1);
    CHECK(next.probe != pick.probe);
    // The old one has no say any more.
    SUBCASE("late success") { world.Call(1, Outcome::kSuccess, kMs, pick.probe); }
    SUBCASE("late failure") { world.Call(1, Outcome::kFailure, kMs, pick.probe); }
    SUBCASE("late nothing") { world.at(1).AbandonProbe(pick.probe); }
    CHECK(world.at(1).health() == MemberHealth::kProbing);
    world.Call(1, Outcome::kSuccess, kMs, next.probe);
    CHECK(world.at(1).health() == MemberHealth::kHealthy);
  }
  SUBCASE("others have no say") {
    world.Call(1, Outcome::kSuccess);
    world.Call(1, Outcome::kFailure);
    CHECK(world.at(1).health() == MemberHealth::kProbing);
  }
}

TEST_CASE("one probe, and what comes of it: few members") { OneProbe(3); }
TEST_CASE("one probe, and what comes of it: many members") { OneProbe(100); }

TEST_CASE("consistent hash probes with a key of the member's own") {
  World world(3, Kind(BalancerKind::kConsistentHash));
  world.Eject(1);
  world.now += kSecond;
  for (std::uint64_t key = 0; key < 1000; ++key) {
    const int owner = world.picker->OwnerOf(key);
    const PickResult pick = world.Pick({}, key);
    if (owner != 1) {
      REQUIRE(pick.index == owner);
      continue;
    }
    CHECK(pick.index == 1);
    CHECK(pick.probe != Member::kNoProbe);
    break;
  }
  CHECK(world.group.probes() == 1);
}

TEST_CASE("failures from the time before the return do not count") {
  World world(3);
  world.Eject(0);
  world.now += kSecond;
  world.Call(0, Outcome::kSuccess, kMs, world.Pick().probe);
  world.now += 100 * kMs;
  for (int n = 0; n < 20; ++n) world.Call(0, Outcome::kFailure, 101 * kMs);
  CHECK(world.at(0).health() == MemberHealth::kHealthy);
  CHECK(world.at(0).failures_in_a_row() == 0);
  for (int n = 0; n < 5; ++n) world.Call(0, Outcome::kFailure, 100 * kMs);
  CHECK(world.at(0).health() == MemberHealth::kEjected);
}

TEST_CASE("panic: more than half of those who are up look bad") {
  for (const BalancerKind kind : kKinds) {
    for (const int size : {4, 100}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(size);
      HealthOptions health;
      health.failure_latency_ns = 0;
      World world(size, Kind(kind), health);
      for (int i = 0; i < size / 2; ++i) world.Eject(i);
      REQUIRE(world.group.ejected() == static_cast<std::uint32_t>(size / 2));
      const auto sum_ejected = [&](const std::vector<int>& tally) {
        int sum = 0;
        for (int i = 0; i < size / 2; ++i) sum += tally[static_cast<std::size_t>(i)];
        return sum;
      };
      CHECK(sum_ejected(world.Tally(4000)) == 0);
      world.Down(size - 1);
      world.now += world.options.census_period_ns;
      const std::vector<int> tally = world.Tally(4000);
      CHECK(sum_ejected(tally) > 1500);
      CHECK(tally[static_cast<std::size_t>(size - 1)] == 0);
      CHECK(world.picker->Count().panic);
      // What happens to them then, apart from a probe, changes nothing.
      world.Call(0, Outcome::kSuccess);
      CHECK(world.at(0).health() == MemberHealth::kEjected);
    }
  }
}

TEST_CASE("soft evidence leaves no call without a member") {
  for (const int size : {4, 20}) {
    CAPTURE(size);
    World world(size);
    world.Eject(0);
    std::vector<std::int32_t> others;
    others.reserve(static_cast<std::size_t>(size));
    for (int i = 1; i < size; ++i) others.push_back(i);
    CHECK(world.Pick(others).index == 0);
    CHECK(world.Pick(others).probe == Member::kNoProbe);
    world.now += kSecond;
    CHECK(world.Pick(others).probe != Member::kNoProbe);
  }
}

TEST_CASE("a member that left") {
  World world(4);
  world.Eject(0);
  world.Eject(1);
  CHECK(world.group.ejected() == 2);
  world.at(0).OnStart(world.now);
  world.at(0).Retire();
  world.at(0).Retire();
  CHECK(world.group.ejected() == 1);
  CHECK(world.group.members() == 3);
  world.at(0).OnEnd(Outcome::kFailure, kMs, world.now, Member::kNoProbe);
  world.Eject(0);
  CHECK(world.group.ejected() == 1);
  CHECK(world.group.in_flight() == 0);
  world.members.clear();
  CHECK(world.group.ejected() == 0);
  CHECK(world.group.members() == 0);
}

TEST_CASE("what a fast failure weighs") {
  World world(2);
  const std::int64_t full_ns = world.group.options().failure_latency_ns;
  world.Call(0, Outcome::kFailure, 0);
  CHECK(world.at(0).Load(world.now) == Member::kLoadUnit);
  CHECK(world.Tally(100)[1] == 100);
  // As much in all as a call that lasts so long: the sum over all time is about `full_ns`.
  double calls_ns = 0;
  for (int ms = 0; ms < 20 * full_ns / kMs; ms += 10) {
    calls_ns += static_cast<double>(world.at(0).Load(world.now + ms * kMs)) / Member::kLoadUnit * 10 * kMs;
  }
  // Less the eighth of a call that is taken for none.
  CHECK(calls_ns > 0.85 * static_cast<double>(full_ns));
  CHECK(calls_ns < 1.0 * static_cast<double>(full_ns));
  world.now += 30 * full_ns;
  CHECK(world.at(0).Load(world.now) == 0);

  SUBCASE("half as fast, half as much") {
    world.Call(0, Outcome::kFailure, full_ns / 2);
    CHECK(world.at(0).Load(world.now) == Member::kLoadUnit / 2);
  }
  SUBCASE("slow failures have been in flight already") {
    world.Call(0, Outcome::kFailure, full_ns);
    CHECK(world.at(0).Load(world.now) == 0);
  }
  SUBCASE("they add up, without end, and do not overflow") {
    for (int n = 0; n < 3; ++n) world.Call(0, Outcome::kFailure, 0);
    CHECK(world.at(0).Load(world.now) == 3 * Member::kLoadUnit);
    for (int n = 0; n < 70'000; ++n) world.Call(0, Outcome::kFailure, 0);
    CHECK(world.at(0).Load(world.now) > 65'000 * Member::kLoadUnit);
  }
}

// ----------------------------------------------------------------------------------------------------------- threads

void PickAndEnd(int threads, int members, BalancerKind kind) {
  const std::uint64_t seed = Seed();
  CAPTURE(seed);
  CAPTURE(threads);
  CAPTURE(members);
  constexpr int kSteps = 40'000;  // All threads together.
  HealthOptions health;
  health.base_ejection_ns = kMs;
  health.max_ejection_ns = 4 * kMs;
  health.probe_timeout_ns = kNeverNs;
  PickerOptions options = Kind(kind, seed);
  options.census_period_ns = kMs;
  World world(members, options, health);
  std::vector<std::atomic<int>> probing(static_cast<std::size_t>(members));
  std::atomic<std::int64_t> now{kStart};
  std::atomic<int> wrong{0};
  std::atomic<int> probes{0};
  std::atomic<int> left{threads};

  const auto caller = [&](int thread) {
    Random random(seed + static_cast<std::uint64_t>(thread));
    struct Running {
      PickResult pick;
      bool ends_well;
    };
    std::vector<Running> running;
    const auto end = [&](const Running& call) {
      Member& member = world.picker->member(call.pick.index);
      if (call.pick.probe != Member::kNoProbe) probing[static_cast<std::size_t>(call.pick.index)].fetch_sub(1);
      const Outcome outcome = random.OneIn(10) ? static_cast<Outcome>(random.Below(5))
                              : call.ends_well ? Outcome::kSuccess
                                               : Outcome::kFailure;
      member.OnEnd(outcome, kMs, now.load(), call.pick.probe);
    };
    for (int step = 0; step < kSteps / threads; ++step) {
      // Also where nobody can be picked: else, once all are down, nobody would come up again.
      if (threads == 1 && random.OneIn(20)) {
        random.OneIn(2) ? world.Down(random.Below(members)) : world.Up(random.Below(members));
      }
      PickRequest request;
      request.key = random.Word();
      request.now_ns = now.fetch_add(10 * kNsPerUs);
      const std::int32_t excluded = random.Below(members);
      request.excluded = &excluded;
      request.excluded_count = random.OneIn(4) ? 1 : 0;
      const PickResult pick = world.picker->Pick(request);
      if (pick.index < 0) continue;
      if (request.excluded_count == 1 && pick.index == excluded) wrong.fetch_add(1);
      if (pick.probe != Member::kNoProbe) {
        probes.fetch_add(1);
        if (probing[static_cast<std::size_t>(pick.index)].fetch_add(1) != 0) wrong.fetch_add(1);
      }
      world.picker->member(pick.index).OnStart(request.now_ns);
      // Some members fail for some time.
      running.push_back({pick, (pick.index + step / 500) % 3 != 0});
      while (running.size() > 8 || (!running.empty() && random.OneIn(2))) {
        const auto which = static_cast<std::size_t>(random.Below(static_cast<int>(running.size())));
        std::swap(running[which], running.back());
        end(running.back());
        running.pop_back();
      }
    }
    for (const Running& call : running) end(call);
    left.fetch_sub(1);
  };
  if (threads == 1) {
    caller(0);
  } else {
    std::vector<std::thread> pool;
    pool.reserve(static_cast<std::size_t>(threads) + 1);
    for (int thread = 0; thread < threads; ++thread) pool.emplace_back(caller, thread);
    pool.emplace_back([&] {
      Random random(seed + 99);
      while (left.load() > 0) {
        random.OneIn(2) ? world.Down(random.Below(members)) : world.Up(random.Below(members));
        if (world.group.ejected() > world.group.EjectionLimit()) wrong.fetch_add(1);
      }
    });
    for (std::thread& thread : pool) thread.join();
  }
  CHECK(wrong.load() == 0);
  CHECK(probes.load() > 0);
  CHECK(world.group.probes() == static_cast<std::uint64_t>(probes.load()));
  CHECK(world.group.in_flight() == 0);
  std::uint32_t out = 0;
  for (const auto& member : world.members) {
    CHECK(member->in_flight() == 0);
    if (member->health() != MemberHealth::kHealthy) ++out;
    CHECK(member->health() != MemberHealth::kProbing);  // Every claim has ended.
  }
  CHECK(world.group.ejected() == out);
}

TEST_CASE("calls come and go: one thread") {
  for (const BalancerKind kind : kKinds) PickAndEnd(1, 8, kind);
  PickAndEnd(1, 40, BalancerKind::kLeastLoaded);
}

TEST_CASE("calls come and go: threads") {
  for (const BalancerKind kind : kKinds) PickAndEnd(4, 8, kind);
  PickAndEnd(4, 40, BalancerKind::kLeastLoaded);
  PickAndEnd(4, 40, BalancerKind::kConsistentHash);
}

TEST_CASE("a probe is claimed by one of several threads") {
  for (int round = 0; round < 200; ++round) {
    World world(4, Kind(BalancerKind::kLeastLoaded, static_cast<std::uint64_t>(round)));
    world.Eject(2);
    world.now += kSecond;
    std::atomic<int> claims{0};
    std::atomic<int> ready{0};
    std::vector<std::thread> pool;
    pool.reserve(3);
    for (int thread = 0; thread < 3; ++thread) {
      pool.emplace_back([&] {
        ready.fetch_add(1);
        while (ready.load() < 3) std::this_thread::yield();
        if (world.Pick().probe != Member::kNoProbe) claims.fetch_add(1);
      });
    }
    for (std::thread& thread : pool) thread.join();
    CHECK(claims.load() == 1);
  }
}

}  // namespace
}  // namespace actorsub
