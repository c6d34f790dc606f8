#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "registry.h"

#include <doctest/doctest.h>

#include <type_traits>
#include <utility>
#include <vector>

namespace actorsub {
namespace {

static_assert(std::is_nothrow_move_constructible_v<SlotRef>);
static_assert(sizeof(SlotRef) == 2 * sizeof(void*));
static_assert(!std::is_copy_constructible_v<Registry>);

TEST_CASE("one id, one slot") {
  Registry registry;
  const SlotRef a = registry.Acquire(ActorId{1});
  const SlotRef b = registry.Acquire(ActorId{1});
  const SlotRef other = registry.Acquire(ActorId{2});
  CHECK(a.get() == b.get());
  CHECK(a.get() != other.get());
  CHECK(a->id() == ActorId{1});
  CHECK(registry.size() == 2);
  a->CountSubmitted();
  CHECK(b->submitted() == 1);
}

TEST_CASE("ids that differ in one byte only are different") {
  Registry registry;
  std::vector<SlotRef> refs;
  for (std::size_t i = 0; i < kActorIdSize; ++i) {
    ActorId id{};
    id[i] = 1;
    refs.push_back(registry.Acquire(id));
  }
  CHECK(registry.size() == kActorIdSize);
}

TEST_CASE("a slot lives as long as its references") {
  Registry registry;
  SlotRef a = registry.Acquire(ActorId{1});
  a->CountSubmitted();
  {
    const SlotRef copy = a;  // NOLINT(performance-unnecessary-copy-initialization): the copy is the subject.
    CHECK(copy.get() == a.get());
  }
  CHECK(registry.size() == 1);

  SlotRef moved = std::move(a);
  CHECK(!a);  // NOLINT(bugprone-use-after-move): registry.h promises that it is empty.
  CHECK(moved->submitted() == 1);
  CHECK(registry.size() == 1);

  SUBCASE("reset, twice") {
    moved.Reset();
    CHECK(!moved);
    CHECK(registry.size() == 0);
    moved.Reset();
    CHECK(registry.size() == 0);
  }
  SUBCASE("assignment drops the old one") {
    moved = registry.Acquire(ActorId{2});
    CHECK(registry.size() == 1);
    CHECK(moved->id() == ActorId{2});
    moved = SlotRef();
    CHECK(registry.size() == 0);
  }
  SUBCASE("assignment to itself keeps it") {
    const SlotRef& same = moved;
    moved = same;
    CHECK(moved->submitted() == 1);
    CHECK(registry.size() == 1);
  }
  SUBCASE("a second life starts with clean counters") {
    moved.Reset();
    const SlotRef again = registry.Acquire(ActorId{1});
    CHECK(again->submitted() == 0);
    CHECK(again->word() == 0);
  }
}

TEST_CASE("an empty reference can be copied and reset") {
  SlotRef empty;
  const SlotRef copy = empty;  // NOLINT(performance-unnecessary-copy-initialization)
  empty.Reset();
  CHECK(!copy);
  CHECK(copy.get() == nullptr);
}

}  // namespace
}  // namespace actorsub
