// What a pick costs, and the accounting of a call.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "balancer.h"

namespace actorsub {
namespace {

struct Group {
  Group(BalancerKind kind, int count, int down_percent) : health(HealthOptions()) {
    std::vector<Member*> list;
    for (int i = 0; i < count; ++i) {
      ActorId id{};
      for (std::size_t b = 0; b < 4; ++b) id[b] = static_cast<std::uint8_t>(i >> (8 * b));
      slots.emplace_back(id);
      Observation observation;
      observation.evidence = Evidence::kTable;
      // Spread evenly, and one always stays up.
      const bool down = i > 0 && i * 37 % 100 < down_percent;
      observation.verdict = down ? ActorState::kRestarting : ActorState::kAlive;
      observation.incarnation = 0;
      slots.back().Apply(observation);
      members.push_back(std::make_unique<Member>(&health, &slots.back()));
      list.push_back(members.back().get());
    }
    PickerOptions options;
    options.kind = kind;
    picker = std::make_unique<Picker>(options, list);
  }

  GroupHealth health;
  std::deque<Slot> slots;
  std::vector<std::unique_ptr<Member>> members;
  std::unique_ptr<Picker> picker;
};

// Arguments: members, percent that are down. Time moves as at a million picks a second, so the census is included.
void Picks(benchmark::State& state, BalancerKind kind) {
  Group group(kind, static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  PickRequest request;
  request.now_ns = kNsPerSecond;
  for (auto _ : state) {
    request.key += 0x9E3779B97F4A7C15U;
    request.now_ns += kNsPerUs;
    benchmark::DoNotOptimize(group.picker->Pick(request));
  }
}
void BM_PickRoundRobin(benchmark::State& state) { Picks(state, BalancerKind::kRoundRobin); }
void BM_PickLeastLoaded(benchmark::State& state) { Picks(state, BalancerKind::kLeastLoaded); }
void BM_PickConsistentHash(benchmark::State& state) { Picks(state, BalancerKind::kConsistentHash); }
BENCHMARK(BM_PickRoundRobin)->ArgsProduct({{3, 100, 1000}, {0, 10, 90}});
BENCHMARK(BM_PickLeastLoaded)->ArgsProduct({{3, 100, 1000}, {0, 10, 90}});
BENCHMARK(BM_PickConsistentHash)->ArgsProduct({{3, 100, 1000}, {0, 10, 90}});

// All down: the answer that there is nobody needs a look at everybody.
void BM_PickNobody(benchmark::State& state) {
  Group group(BalancerKind::kLeastLoaded, static_cast<int>(state.range(0)), 0);
  for (Slot& slot : group.slots) {
    Observation observation;
    observation.evidence = Evidence::kProcess;
    observation.verdict = ActorState::kRestarting;
    observation.incarnation = 0;
    slot.Apply(observation);
  }
  PickRequest request;
  for (auto _ : state) benchmark::DoNotOptimize(group.picker->Pick(request));
}
BENCHMARK(BM_PickNobody)->Arg(3)->Arg(1000);

void BM_StartAndEnd(benchmark::State& state) {
  Group group(BalancerKind::kLeastLoaded, 3, 0);
  Member& member = *group.members.front();
  for (auto _ : state) {
    member.OnStart(kNsPerSecond);
    member.OnEnd(Outcome::kSuccess, kNsPerMs, kNsPerSecond, Member::kNoProbe);
  }
}
BENCHMARK(BM_StartAndEnd);

// A change of membership.
void BM_MakePicker(benchmark::State& state) {
  Group group(BalancerKind::kLeastLoaded, static_cast<int>(state.range(0)), 0);
  PickerOptions options;
  options.kind = BalancerKind::kConsistentHash;
  std::vector<Member*> list;
  list.reserve(group.members.size());
  for (const auto& member : group.members) list.push_back(member.get());
  for (auto _ : state) benchmark::DoNotOptimize(std::make_unique<Picker>(options, list));
}
BENCHMARK(BM_MakePicker)->Arg(3)->Arg(1000)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace actorsub

BENCHMARK_MAIN();
