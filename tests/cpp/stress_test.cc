// Slots and the registry under threads.
//
// The idea. A slot's word moves in steps, and each step belongs to the one `Apply` that is told `changed`. So every
// thread keeps a tally: for each version that it was told to have made, it adds one to that version's count. The runs
// are short enough for the version not to wrap, so at the end each version up to the last must have exactly one maker:
// two would mean that a change was reported twice (a call would be failed twice), none that it was lost (a call would
// hang). Readers run along and check that versions never go back and that what a writer wrote before its report is
// there for whoever reads the word (thread sanitizer watches that part). For the registry the tally is simpler: as long
// as a thread holds a reference, everybody else who asks for that id must get the same slot, and in the end nothing is
// left.
//
// Each body runs on one thread first, where a failure is a plain bug, and then on several. The amount of work is given
// by counts, not by time; ACTORSUB_TEST_SEED repeats the choices, if not the interleaving.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "registry.h"
#include "slot.h"
#include "test_random.h"

namespace actorsub {
namespace {

using testing::Random;
using testing::Seed;

constexpr int kThreads = 8;
constexpr int kRounds = 10;
constexpr int kStepsPerRound = 32000;  // All threads together; under 65536, see above.
static_assert(kStepsPerRound % kThreads == 0);

// Runs `body(thread)` on `threads` threads that start together. Doctest's checks are too slow for the inner loops and
// not all of them are thread-safe, so bodies count failures and the caller checks.
void RunThreads(int threads, const std::function<void(int)>& body) {
  if (threads == 1) {
    body(0);
    return;
  }
  std::atomic<int> waiting{threads};
  std::vector<std::thread> pool;
  pool.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    pool.emplace_back([&waiting, &body, i] {
      waiting.fetch_sub(1);
      while (waiting.load() > 0) std::this_thread::yield();
      body(i);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

Observation AnyObservation(Random& random, const Belief& belief) {
  constexpr ActorState kTableStates[] = {ActorState::kAlive, ActorState::kRestarting, ActorState::kDead};
  Observation observation;
  observation.incarnation = static_cast<std::int64_t>(belief.incarnation) + random.Below(3) - 1;
  switch (random.Below(6)) {
    case 0:
      observation.evidence = Evidence::kRay;
      observation.verdict = static_cast<ActorState>(1 + random.Below(kActorStateCount - 1));
      break;
    case 1:
    case 2:
      observation.evidence = Evidence::kTable;
      observation.verdict = kTableStates[random.Below(3)];
      observation.read_version = random.OneIn(2) ? belief.version : -1;
      break;
    case 3:
      observation.evidence = Evidence::kProcess;
      observation.verdict = ActorState::kRestarting;
      break;
    case 4:
      observation.evidence = Evidence::kConnection;
      observation.verdict = ActorState::kUnreachable;
      break;
    default:
      observation.evidence = Evidence::kSilence;
      observation.verdict = random.OneIn(2) ? ActorState::kAlive : ActorState::kUnreachable;
      break;
  }
  return observation;
}

void ApplyFromAll(int threads) {
  CAPTURE(Seed());
  CAPTURE(threads);
  for (int round = 0; round < kRounds; ++round) {
    Slot slot(ActorId{});
    auto makers = std::make_unique<std::array<std::atomic<int>, 65536>>();
    std::array<std::atomic<std::uint64_t>, kActorStateCount> entered{};
    std::atomic<int> went_back{0};
    std::atomic<int> illegal{0};
    std::atomic<std::uint64_t> stale{0};
    std::atomic<std::uint32_t> losses{0};
    RunThreads(threads, [&](int thread) {
      Random random(Seed() + static_cast<std::uint64_t>(round) * 100 + static_cast<std::uint64_t>(thread));
      std::uint16_t last_version = 0;
      for (int step = 0; step < kStepsPerRound / threads; ++step) {
        const Belief seen = slot.belief();
        if (seen.version < last_version) went_back.fetch_add(1);
        last_version = seen.version;
        const Observation observation = AnyObservation(random, seen);
        const Change change = slot.Apply(observation);
        if (change.before.version < seen.version) went_back.fetch_add(1);
        if (!IsLegalTransition(change.before.state, change.after.state)) illegal.fetch_add(1);
        if (change.changed) {
          if (change.after.version != change.before.version + 1) illegal.fetch_add(1);
          (*makers)[change.after.version].fetch_add(1);
        } else if (observation.verdict != change.before.state) {
          stale.fetch_add(1);
        }
        const bool was_up =
            change.before.state == ActorState::kAlive || change.before.state == ActorState::kUnreachable;
        const bool is_down = change.after.state == ActorState::kRestarting || change.after.state == ActorState::kDead;
        if (was_up && !InDoubt(change.before) && (is_down || InDoubt(change.after))) losses.fetch_add(1);
        if (change.after.state != change.before.state)
          entered[static_cast<std::size_t>(change.after.state)].fetch_add(1);
        if (change.changed) last_version = change.after.version;
        slot.CountSubmitted();
        slot.CountRefused(static_cast<Refusal>(step % kRefusalCount));
      }
    });
    CHECK(went_back.load() == 0);
    CHECK(illegal.load() == 0);
    CHECK(slot.losses() == losses.load());
    const std::uint16_t last = slot.belief().version;
    CHECK(last > 0);
    int without_one_maker = 0;
    for (std::size_t version = 1; version < makers->size(); ++version) {
      if ((*makers)[version].load() != (version <= last ? 1 : 0)) ++without_one_maker;
    }
    CHECK(without_one_maker == 0);
    CHECK(slot.stale() == stale.load());
    for (int state = 0; state < kActorStateCount; ++state) {
      CHECK(slot.entered(static_cast<ActorState>(state)) == entered[static_cast<std::size_t>(state)].load());
    }
    const auto steps = static_cast<std::uint64_t>(kStepsPerRound);
    CHECK(slot.submitted() == steps);
    std::uint64_t refused = 0;
    for (int i = 0; i < kRefusalCount; ++i) refused += slot.refused(static_cast<Refusal>(i));
    CHECK(refused == steps);
  }
}

TEST_CASE("each version has one maker: one thread") { ApplyFromAll(1); }
TEST_CASE("each version has one maker: threads") { ApplyFromAll(kThreads); }

// Invariant 4 of slot.h. One thread takes incarnation after incarnation up and down; incarnation n begins with exactly
// n losses. Everybody else does what a submitter does, and must never hold the word of n with another mark.
void MarkAndRead(int threads) {
  constexpr int kIncarnations = 20000;
  Slot slot(ActorId{});
  std::atomic<int> wrong{0};
  const auto submit = [&] {
    const std::uint32_t mark = slot.losses();
    const Belief belief = slot.belief();
    if (belief.state == ActorState::kAlive && slot.losses() == mark && mark != belief.incarnation) wrong.fetch_add(1);
  };
  const auto live_and_die = [&](int incarnation) {
    Observation observation;
    observation.evidence = Evidence::kTable;
    observation.verdict = ActorState::kAlive;
    observation.incarnation = incarnation;
    slot.Apply(observation);
    if (threads == 1) submit();
    if (incarnation % 2 != 0) {
      // In doubt first, which is where the loss is counted.
      observation.evidence = Evidence::kConnection;
      observation.verdict = ActorState::kUnreachable;
      slot.Apply(observation);
      if (threads == 1) submit();
    }
    observation.evidence = Evidence::kProcess;
    observation.verdict = ActorState::kRestarting;
    slot.Apply(observation);
  };
  RunThreads(threads, [&](int thread) {
    for (int i = 0; i < kIncarnations; ++i) {
      if (thread == 0) {
        live_and_die(i);
      } else {
        submit();
      }
    }
  });
  CHECK(wrong.load() == 0);
  CHECK(slot.losses() == kIncarnations);
}

TEST_CASE("a mark belongs to its incarnation: one thread") { MarkAndRead(1); }
TEST_CASE("a mark belongs to its incarnation: threads") { MarkAndRead(kThreads); }

void PublishAndRead(int threads) {
  constexpr int kIncarnations = 20000;
  Slot slot(ActorId{});
  std::vector<int> address(kIncarnations + 1, 0);  // Plain memory: the word alone must order it.
  std::atomic<int> wrong{0};
  const auto read = [&] {
    const std::uint32_t incarnation = slot.belief().incarnation;
    if (address[incarnation] != static_cast<int>(7 * incarnation)) wrong.fetch_add(1);
    return incarnation;
  };
  const auto publish = [&](int incarnation) {
    address[static_cast<std::size_t>(incarnation)] = 7 * incarnation;
    Observation observation;
    observation.evidence = Evidence::kTable;
    observation.verdict = ActorState::kAlive;
    observation.incarnation = incarnation;
    slot.Apply(observation);
  };
  RunThreads(threads, [&](int thread) {
    if (thread == 0) {
      for (int i = 1; i <= kIncarnations; ++i) {
        publish(i);
        if (threads == 1) read();
      }
    } else {
      for (int i = 0; i < kIncarnations; ++i) read();
    }
  });
  CHECK(wrong.load() == 0);
  CHECK(read() == kIncarnations);
}

TEST_CASE("what was written before a report is there for its readers: one thread") { PublishAndRead(1); }
TEST_CASE("what was written before a report is there for its readers: threads") { PublishAndRead(kThreads); }

void AcquireAndDrop(int threads) {
  CAPTURE(Seed());
  CAPTURE(threads);
  constexpr int kIds = 16;
  constexpr int kSteps = 80000;  // All threads together.
  Registry registry;
  std::vector<SlotRef> kept;  // Half of the ids are held throughout, so that their counters live on.
  kept.reserve(kIds / 2);
  for (int i = 0; i < kIds / 2; ++i) kept.push_back(registry.Acquire(ActorId{static_cast<std::uint8_t>(i)}));
  std::atomic<std::uint64_t> counted{0};
  std::atomic<int> wrong{0};
  RunThreads(threads, [&](int thread) {
    Random random(Seed() + static_cast<std::uint64_t>(thread));
    std::vector<SlotRef> held;
    for (int step = 0; step < kSteps / threads; ++step) {
      const int which = random.Below(kIds);
      const ActorId id{static_cast<std::uint8_t>(which)};
      SlotRef ref = registry.Acquire(id);
      if (ref->id() != id) wrong.fetch_add(1);
      ref->CountSubmitted();
      if (which < kIds / 2) counted.fetch_add(1);
      if (registry.Acquire(id).get() != ref.get()) wrong.fetch_add(1);
      switch (random.Below(4)) {
        case 0:
          held.push_back(ref);  // A copy.
          break;
        case 1:
          held.push_back(std::move(ref));
          break;
        case 2:
          if (!held.empty()) held[static_cast<std::size_t>(random.Below(static_cast<int>(held.size())))] = ref;
          break;
        default:
          if (!held.empty()) held.pop_back();
          break;
      }
      if (held.size() > 20) held.clear();
    }
  });
  CHECK(wrong.load() == 0);
  CHECK(registry.size() == kIds / 2);
  std::uint64_t submitted = 0;
  for (const SlotRef& ref : kept) submitted += ref->submitted();
  CHECK(submitted == counted.load());
  kept.clear();
  CHECK(registry.size() == 0);
}

TEST_CASE("references come and go: one thread") { AcquireAndDrop(1); }
TEST_CASE("references come and go: threads") { AcquireAndDrop(kThreads); }

}  // namespace
}  // namespace actorsub
