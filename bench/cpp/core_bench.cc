// What a call pays in the core: reading a slot's word, a report that changes nothing, and (per handle, not per call)
// the registry.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "registry.h"
#include "slot.h"

namespace actorsub {
namespace {

Observation Report(Evidence evidence, ActorState verdict, std::int64_t incarnation) {
  Observation observation;
  observation.evidence = evidence;
  observation.verdict = verdict;
  observation.incarnation = incarnation;
  return observation;
}

ActorId IdOf(std::uint64_t number) {
  ActorId id{};
  for (std::size_t i = 0; i < 8; ++i) id[i] = static_cast<std::uint8_t>(number * 0x9E3779B97F4A7C15U >> (8 * i));
  return id;
}

void BM_ReadState(benchmark::State& state) {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(slot.state());
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_ReadState);

void BM_ReadBelief(benchmark::State& state) {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(slot.belief());
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_ReadBelief);

void BM_ApplyRayUnchanged(benchmark::State& state) {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kRay, ActorState::kAlive, Observation::kNoIncarnation));
  const Observation observation = Report(Evidence::kRay, ActorState::kAlive, Observation::kNoIncarnation);
  for (auto _ : state) benchmark::DoNotOptimize(slot.Apply(observation).changed);
}
BENCHMARK(BM_ApplyRayUnchanged);

void BM_ApplyTableUnchanged(benchmark::State& state) {
  Slot slot(ActorId{});
  const Observation observation = Report(Evidence::kTable, ActorState::kAlive, 3);
  slot.Apply(observation);
  for (auto _ : state) benchmark::DoNotOptimize(slot.Apply(observation).changed);
}
BENCHMARK(BM_ApplyTableUnchanged);

void BM_ApplyChange(benchmark::State& state) {
  Slot slot(ActorId{});
  slot.Apply(Report(Evidence::kTable, ActorState::kAlive, 0));
  const Observation silence = Report(Evidence::kSilence, ActorState::kUnreachable, 0);
  const Observation answer = Report(Evidence::kSilence, ActorState::kAlive, 0);
  for (auto _ : state) {
    benchmark::DoNotOptimize(slot.Apply(silence).changed);
    benchmark::DoNotOptimize(slot.Apply(answer).changed);
  }
  state.SetItemsProcessed(2 * state.iterations());
}
BENCHMARK(BM_ApplyChange);

void BM_CountSubmitted(benchmark::State& state) {
  Slot slot(ActorId{});
  for (auto _ : state) slot.CountSubmitted();
}
BENCHMARK(BM_CountSubmitted);

// Argument: how many actors are known. Each iteration makes and destroys one slot more.
void BM_RegistryMakeAndDrop(benchmark::State& state) {
  Registry registry;
  std::vector<SlotRef> known;
  const auto count = static_cast<std::uint64_t>(state.range(0));
  for (std::uint64_t i = 0; i < count; ++i) known.push_back(registry.Acquire(IdOf(i)));
  const ActorId id = IdOf(count);
  for (auto _ : state) {
    const SlotRef ref = registry.Acquire(id);
    benchmark::DoNotOptimize(ref.get());
  }
}
BENCHMARK(BM_RegistryMakeAndDrop)->Arg(0)->Arg(10000);

void BM_RegistryShareAndDrop(benchmark::State& state) {
  Registry registry;
  std::vector<SlotRef> known;
  const auto count = static_cast<std::uint64_t>(state.range(0));
  for (std::uint64_t i = 0; i < count; ++i) known.push_back(registry.Acquire(IdOf(i)));
  std::uint64_t next = 0;
  for (auto _ : state) {
    const SlotRef ref = registry.Acquire(known[next]->id());
    benchmark::DoNotOptimize(ref.get());
    next = (next + 1) % count;
  }
}
BENCHMARK(BM_RegistryShareAndDrop)->Arg(1)->Arg(10000);

}  // namespace
}  // namespace actorsub

BENCHMARK_MAIN();
