#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "timers.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "clock.h"
#include "test_random.h"

namespace actorsub {
namespace {

using testing::Random;
using testing::Seed;

constexpr std::size_t kMany = 1000;

std::vector<std::uint64_t> Taken(Timers* timers) {
  std::vector<Timers::Fired> fired;
  timers->Take(&fired);
  std::vector<std::uint64_t> ids;
  for (const Timers::Fired& one : fired) ids.push_back(one.id);
  return ids;
}

std::size_t FireAll(Timers* timers, std::int64_t now_ns) {
  std::size_t count = 0;
  for (bool more = true; more;) count += timers->Fire(now_ns, 3, &more);
  return count;
}

using Ids = std::vector<std::uint64_t>;

TEST_CASE("a timer fires once its time is over, and is taken once") {
  Timers timers(kMany);
  CHECK(timers.NextNs() == kNeverNs);
  REQUIRE(timers.Add(7, 100));
  CHECK(timers.NextNs() == 100);
  CHECK(FireAll(&timers, 99) == 0);
  CHECK(Taken(&timers).empty());
  CHECK(FireAll(&timers, 100) == 1);
  CHECK(FireAll(&timers, 200) == 0);
  std::vector<Timers::Fired> fired;
  timers.Take(&fired);
  REQUIRE(fired.size() == 1);
  CHECK(fired[0].id == 7);
  CHECK(fired[0].seen_ns == 100);
  CHECK(Taken(&timers).empty());
  CHECK(timers.size() == 0);
  CHECK_FALSE(timers.Cancel(7));
}

TEST_CASE("a timer that was cancelled or set anew is not taken, wherever it was") {
  Timers timers(kMany);
  timers.Add(1, 10);
  timers.Add(2, 20);
  timers.Add(3, 30);
  CHECK(timers.Cancel(1));
  CHECK(FireAll(&timers, 20) == 1);
  CHECK(timers.Cancel(2));
  CHECK(Taken(&timers).empty());
  timers.Add(3, 50);
  CHECK(FireAll(&timers, 40) == 0);
  CHECK(FireAll(&timers, 50) == 1);
  // Fired, and set anew before it was taken: the first is forgotten.
  timers.Add(3, 70);
  CHECK(Taken(&timers).empty());
  CHECK(FireAll(&timers, 70) == 1);
  CHECK(Taken(&timers) == Ids{3});
}

TEST_CASE("there are no more than may be; one that is there may be set anew") {
  Timers timers(2);
  CHECK(timers.Add(1, 10));
  CHECK(timers.Add(2, 20));
  CHECK_FALSE(timers.Add(3, 30));
  CHECK(timers.Add(2, 5));
  CHECK(timers.Cancel(1));
  CHECK(timers.Add(3, 30));
  CHECK(FireAll(&timers, 30) == 2);
  // Fired ones count until they are taken.
  CHECK_FALSE(timers.Add(4, 40));
  CHECK(Taken(&timers) == Ids{2, 3});
  CHECK(timers.Add(4, 40));
}

TEST_CASE("deadlines at the ends of the scale") {
  Timers timers(kMany);
  timers.Add(1, kNeverNs);
  timers.Add(2, std::numeric_limits<std::int64_t>::min());
  CHECK(FireAll(&timers, std::numeric_limits<std::int64_t>::min()) == 1);
  CHECK(FireAll(&timers, kNeverNs - 1) == 0);
  CHECK(FireAll(&timers, kNeverNs) == 1);
  CHECK(Taken(&timers) == Ids{2, 1});
}

TEST_CASE("a Fire looks at no more than it may, dead ones included") {
  Timers timers(kMany);
  for (std::uint64_t id = 0; id < 10; ++id) timers.Add(id, 10);
  for (std::uint64_t id = 0; id < 10; id += 2) timers.Cancel(id);
  bool more = false;
  std::size_t fired = 0;
  for (int round = 0; round < 3; ++round) {
    fired += timers.Fire(10, 3, &more);
    CHECK(more);
  }
  fired += timers.Fire(10, 3, &more);
  CHECK_FALSE(more);
  CHECK(fired == 5);
}

TEST_CASE("what is dead does not outgrow what is alive") {
  Timers timers(kMany);
  for (int round = 0; round < 100'000; ++round) {
    timers.Add(1, 1'000'000 + round);
    CHECK(timers.entries() <= 2 * timers.size() + 70);
    if (round % 3 == 0) timers.Cancel(1);
  }
  timers.Clear();
  CHECK(timers.entries() == 0);
  CHECK(timers.size() == 0);
  CHECK(timers.NextNs() == kNeverNs);
}

// The same by a sorted list that is searched.
class Reference {
 public:
  bool Add(std::uint64_t id, std::int64_t at, std::size_t most) {
    if (alive_.size() >= most && alive_.count(id) == 0) return false;
    alive_[id] = {at, false, 0};
    return true;
  }
  bool Cancel(std::uint64_t id) { return alive_.erase(id) != 0; }
  std::size_t Fire(std::int64_t now) {
    std::vector<std::pair<std::int64_t, std::uint64_t>> due;
    for (const auto& [id, timer] : alive_) {
      if (!timer.fired && timer.at <= now) due.emplace_back(timer.at, id);
    }
    for (const auto& [at, id] : due) alive_[id] = {at, true, now};
    return due.size();
  }
  // (when it was seen, its deadline, id): two of one deadline may come in any order.
  std::vector<std::pair<std::int64_t, std::int64_t>> Take(std::map<std::uint64_t, std::int64_t>* deadlines) {
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (auto at = alive_.begin(); at != alive_.end();) {
      if (at->second.fired) {
        taken.emplace_back(at->second.seen, at->second.at);
        (*deadlines)[at->first] = at->second.at;
        at = alive_.erase(at);
      } else {
        ++at;
      }
    }
    std::sort(taken.begin(), taken.end());
    return taken;
  }
  std::int64_t NextNs() const {
    std::int64_t next = kNeverNs;
    for (const auto& [id, timer] : alive_) {
      if (!timer.fired) next = std::min(next, timer.at);
    }
    return next;
  }
  std::size_t size() const { return alive_.size(); }

 private:
  struct Timer {
    std::int64_t at;
    bool fired;
    std::int64_t seen;
  };
  std::map<std::uint64_t, Timer> alive_;
};

TEST_CASE("as a slow reference, whatever is done") {
  const std::uint64_t seed = Seed();
  CAPTURE(seed);
  Random random(seed);
  for (int world = 0; world < 40; ++world) {
    constexpr std::size_t kMost = 40;
    Timers timers(kMost);
    Reference reference;
    std::int64_t now = 0;
    for (int step = 0; step < 3000; ++step) {
      const auto id = static_cast<std::uint64_t>(random.Below(60));
      switch (random.Below(8)) {
        case 0:
        case 1:
        case 2:
        case 3: {
          const std::int64_t at = now + random.Below(40) - 5;
          REQUIRE(timers.Add(id, at) == reference.Add(id, at, kMost));
          break;
        }
        case 4:
          REQUIRE(timers.Cancel(id) == reference.Cancel(id));
          break;
        case 5:
        case 6:
          now += 1 + random.Below(10);
          REQUIRE(FireAll(&timers, now) == reference.Fire(now));
          break;
        default: {
          std::vector<Timers::Fired> fired;
          timers.Take(&fired);
          std::map<std::uint64_t, std::int64_t> deadlines;
          const auto expected = reference.Take(&deadlines);
          REQUIRE(fired.size() == expected.size());
          for (std::size_t i = 0; i < fired.size(); ++i) {
            REQUIRE(deadlines.count(fired[i].id) == 1);
            REQUIRE(fired[i].seen_ns == expected[i].first);
            REQUIRE(deadlines[fired[i].id] == expected[i].second);
          }
        }
      }
      REQUIRE(timers.size() == reference.size());
      REQUIRE(timers.NextNs() <= reference.NextNs());
    }
  }
}

}  // namespace
}  // namespace actorsub
