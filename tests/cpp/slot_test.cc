#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slot.h"

#include <doctest/doctest.h>

#include <string>
#include <type_traits>

namespace actorsub {
namespace {

static_assert(sizeof(ActorId) == 16);
static_assert(std::is_trivially_destructible_v<Slot>, "the last reference may be dropped anywhere");
static_assert(!std::is_copy_constructible_v<Slot> && !std::is_copy_assignable_v<Slot>);

Observation Report(Evidence evidence, ActorState verdict, std::int64_t incarnation = Observation::kNoIncarnation) {
  Observation observation;
  observation.evidence = evidence;
  observation.verdict = verdict;
  observation.incarnation = incarnation;
  return observation;
}

TEST_CASE("a new slot knows nothing") {
  const ActorId id{1, 2, 3};
  const Slot slot(id);
  CHECK(slot.id() == id);
  CHECK(slot.word() == 0);
  CHECK(slot.state() == ActorState::kUnknown);
  CHECK(slot.belief() == Belief());
  CHECK(slot.submitted() == 0);
  CHECK(slot.waited() == 0);
  CHECK(slot.stale() == 0);
  for (int i = 0; i < kRefusalCount; ++i) CHECK(slot.refused(static_cast<Refusal>(i)) == 0);
  for (int i = 0; i < kActorStateCount; ++i) CHECK(slot.entered(static_cast<ActorState>(i)) == 0);
}

TEST_CASE("apply") {
  Slot slot(ActorId{});

  Change change = slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 4));
  CHECK(change.changed);
  CHECK(change.before == Belief());
  CHECK(change.after == slot.belief());
  CHECK(slot.state() == ActorState::kAlive);
  CHECK(slot.entered(ActorState::kAlive) == 1);

  SUBCASE("no news") {
    const std::uint64_t word = slot.word();
    change = slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 4));
    CHECK(!change.changed);
    CHECK(change.before == change.after);
    CHECK(slot.word() == word);
    CHECK(slot.stale() == 0);
  }
  SUBCASE("remembered, but no change") {
    change = slot.Apply(Report(Evidence::kRay, ActorState::kAlive));
    CHECK(!change.changed);
    CHECK(change.after.ray_last == ActorState::kAlive);
    CHECK(slot.belief() == change.after);
    CHECK(slot.stale() == 0);
  }
  SUBCASE("stale") {
    change = slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 3));
    CHECK(!change.changed);
    CHECK(slot.stale() == 1);
    CHECK(slot.state() == ActorState::kAlive);
  }
  SUBCASE("a new incarnation in the same state is a change, but the state was not entered again") {
    change = slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 5));
    CHECK(change.changed);
    CHECK(slot.entered(ActorState::kAlive) == 1);
  }
  SUBCASE("down and confirmed") {
    change = slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 4));
    CHECK(change.changed);
    CHECK(change.after.provisional);
    CHECK(slot.entered(ActorState::kRestarting) == 1);
    change = slot.Apply(Report(Evidence::kRay, ActorState::kRestarting));
    CHECK(change.changed);
    CHECK(!change.after.provisional);
    CHECK(change.after.incarnation == 5);
    CHECK(slot.entered(ActorState::kRestarting) == 1);
  }
}

TEST_CASE("an incarnation that was up and ended is one loss, whoever says so and how often") {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kTable, ActorState::kPending, 0));
  slot.Apply(Report(Evidence::kTable, ActorState::kRestarting, 1));
  CHECK(slot.losses() == 0);  // Never up: what waits for it was not sent.
  slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 1));
  slot.Apply(Report(Evidence::kSilence, ActorState::kUnreachable, 1));
  slot.Apply(Report(Evidence::kSilence, ActorState::kAlive, 1));
  CHECK(slot.losses() == 0);  // Silence alone loses nothing.
  slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 1));
  CHECK(slot.losses() == 1);
  slot.Apply(Report(Evidence::kConnection, ActorState::kUnreachable, 1));
  slot.Apply(Report(Evidence::kRay, ActorState::kRestarting));
  slot.Apply(Report(Evidence::kTable, ActorState::kRestarting, 2));
  CHECK(slot.losses() == 1);
  slot.Apply(Report(Evidence::kRay, ActorState::kAlive));
  slot.Apply(Report(Evidence::kRay, ActorState::kDead));
  CHECK(slot.losses() == 2);
  CHECK(!slot.DeclareLoss());
  CHECK(slot.losses() == 2);
}

TEST_CASE("the end of the last incarnation's process is the actor's") {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 1));
  slot.SetLast(1);
  slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 0));
  CHECK(slot.state() == ActorState::kAlive);
  SUBCASE("by its process") {
    CHECK(slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 1)).changed);
    CHECK(slot.state() == ActorState::kDead);
    CHECK(slot.belief().incarnation == 1);
    CHECK(slot.losses() == 1);
    CHECK(slot.entered(ActorState::kDead) == 1);
    CHECK(!slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 1)).changed);
    CHECK(slot.stale() == 1);
  }
  SUBCASE("and not where there is a next one after all") {
    slot.SetLast(Observation::kNoIncarnation);
    slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 1));
    CHECK(slot.state() == ActorState::kRestarting);
  }
}

TEST_CASE("a silence that went on for too long is a loss, one that has ended is none") {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 0));
  CHECK(!slot.DeclareLoss());
  slot.Apply(Report(Evidence::kSilence, ActorState::kUnreachable, 0));
  CHECK(slot.DeclareLoss());
  CHECK(slot.losses() == 1);
  CHECK(slot.state() == ActorState::kUnreachable);
  slot.Apply(Report(Evidence::kSilence, ActorState::kAlive, 0));
  CHECK(!slot.DeclareLoss());
  CHECK(slot.losses() == 1);
}

TEST_CASE("a refusal is a loss at once, and the end that it may have been is no second one") {
  const Observation refusal = Report(Evidence::kConnection, ActorState::kUnreachable, 0);
  for (const bool silent : {false, true}) {
    for (const bool withdrawn : {false, true}) {
      Slot slot(ActorId{});
      slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 0));
      if (silent) slot.Apply(Report(Evidence::kSilence, ActorState::kUnreachable, 0));
      slot.Apply(refusal);
      CHECK(InDoubt(slot.belief()));
      CHECK(slot.losses() == 1);
      slot.Apply(refusal);
      slot.Apply(Report(Evidence::kSilence, ActorState::kUnreachable, 0));
      CHECK(!slot.DeclareLoss());
      slot.Apply(Report(Evidence::kSilence, ActorState::kAlive, 0));
      CHECK(slot.state() == ActorState::kUnreachable);
      CHECK(slot.losses() == 1);
      if (withdrawn) {
        Observation row = Report(Evidence::kTable, ActorState::kAlive, 0);
        row.read_version = slot.belief().version;
        slot.Apply(row);
        CHECK(slot.state() == ActorState::kAlive);
        CHECK(slot.losses() == 1);
        slot.Apply(refusal);
      }
      // Calls since the doubt was withdrawn are lost with the second one.
      const std::uint32_t losses = withdrawn ? 2 : 1;
      CHECK(slot.losses() == losses);
      slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, 0));
      CHECK(slot.state() == ActorState::kRestarting);
      slot.Apply(Report(Evidence::kTable, ActorState::kDead, 0));
      CHECK(slot.losses() == losses);
    }
  }
}

TEST_CASE("counters do not mix") {
  Slot slot(ActorId{});
  for (int i = 0; i < kRefusalCount; ++i) {
    for (int n = 0; n <= i; ++n) slot.CountRefused(static_cast<Refusal>(i));
  }
  slot.CountSubmitted();
  slot.CountSubmitted();
  slot.CountWaited();
  for (int i = 0; i < kRefusalCount; ++i) {
    CHECK(slot.refused(static_cast<Refusal>(i)) == static_cast<std::uint64_t>(i + 1));
  }
  CHECK(slot.submitted() == 2);
  CHECK(slot.waited() == 1);
  CHECK(slot.word() == 0);
}

TEST_CASE("refusal names") {
  const char* const names[] = {"restarting", "unreachable", "dead", "pending", "deadline", "event_loop"};
  for (int i = 0; i < kRefusalCount; ++i) CHECK(std::string(RefusalName(static_cast<Refusal>(i))) == names[i]);
  CHECK(std::string(RefusalName(static_cast<Refusal>(99))) == "invalid");
}

}  // namespace
}  // namespace actorsub
