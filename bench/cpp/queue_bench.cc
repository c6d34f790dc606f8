// What a call pays in the submit queue: going straight through (budget 100 ns on one thread), through the line, being
// cancelled out of a long line, running out of time.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "slot.h"
#include "submit_queue.h"

namespace actorsub {
namespace {

void Report(Slot* slot, Evidence evidence, ActorState verdict, std::int64_t incarnation) {
  Observation observation;
  observation.evidence = evidence;
  observation.verdict = verdict;
  observation.incarnation = incarnation;
  slot->Apply(observation);
}

CallRules Waiting() {
  CallRules rules;
  rules.away = AwayRule::kHold;
  rules.max_queued = 1U << 30;
  return rules;
}

// A queue whose actor is up, or away after having been up.
struct Fixture {
  explicit Fixture(bool up = true) {
    Report(&slot, Evidence::kTable, ActorState::kAlive, 0);
    if (!up) Report(&slot, Evidence::kProcess, ActorState::kRestarting, 0);
  }
  Slot slot{ActorId{}};
  SubmitQueue queue{&slot};
};

// Threads share one queue.
void BM_AdmitAndComplete(benchmark::State& state) {
  static Fixture* fixture = nullptr;
  if (state.thread_index() == 0) fixture = new Fixture;
  const CallRules rules;
  for (auto _ : state) {
    const Admission admission = fixture->queue.Admit(rules, 0);
    benchmark::DoNotOptimize(fixture->queue.Complete(admission.ticket).verdict);
  }
  if (state.thread_index() == 0) delete fixture;
}
BENCHMARK(BM_AdmitAndComplete)->ThreadRange(1, 8)->UseRealTime();

// Each call with a deadline 30 s ahead, a window, and 100 others in flight.
void BM_AdmitAndCompleteWithDeadline(benchmark::State& state) {
  Fixture fixture;
  CallRules rules;
  rules.window = 1000;
  std::vector<Ticket> others(100);
  std::int64_t now_ns = 0;
  std::size_t next = 0;
  for (auto _ : state) {
    now_ns += 1000;
    rules.deadline_ns = now_ns + 30 * kNsPerSecond;
    const Admission admission = fixture.queue.Admit(rules, now_ns);
    if (others[next] != kNoTicket) benchmark::DoNotOptimize(fixture.queue.Complete(others[next]).verdict);
    others[next] = admission.ticket;
    next = (next + 1) % others.size();
  }
}
BENCHMARK(BM_AdmitAndCompleteWithDeadline);

void BM_RefuseAway(benchmark::State& state) {
  Fixture fixture(/*up=*/false);
  const CallRules rules;
  for (auto _ : state) benchmark::DoNotOptimize(fixture.queue.Admit(rules, 0).verdict);
}
BENCHMARK(BM_RefuseAway);

// A call behind a full window, its way through the line in batches of 100, and its outcome.
void BM_WaitReleaseSendComplete(benchmark::State& state) {
  constexpr std::int64_t kBatch = 100;
  Fixture fixture;
  CallRules rules = Waiting();
  rules.window = kBatch + 1;
  std::vector<Ticket> tickets;
  std::vector<Ended> ended;
  CallRules first = rules;
  for (auto _ : state) {
    first.window = 1;
    const Ticket blocker = fixture.queue.Admit(first, 0).ticket;  // Begins at once.
    const Ticket head = fixture.queue.Admit(first, 0).ticket;     // Waits for it, and everybody else behind.
    for (std::int64_t i = 1; i < kBatch; ++i) fixture.queue.Admit(rules, 0);
    fixture.queue.Complete(blocker);
    tickets.clear();
    fixture.queue.Release(0, kBatch, &tickets, &ended);
    benchmark::DoNotOptimize(head);
    for (const Ticket ticket : tickets) {
      fixture.queue.BeginSend(ticket);
      fixture.queue.EndSend(ticket);
    }
    for (const Ticket ticket : tickets) benchmark::DoNotOptimize(fixture.queue.Complete(ticket).verdict);
  }
  state.SetItemsProcessed(kBatch * state.iterations());
}
BENCHMARK(BM_WaitReleaseSendComplete);

// Somewhere in the middle of a line of 100,000; another joins at its end.
void BM_CancelInLongLine(benchmark::State& state) {
  constexpr std::size_t kCalls = 100000;
  Fixture fixture(/*up=*/false);
  const CallRules rules = Waiting();
  std::vector<Ticket> tickets(kCalls);
  for (Ticket& ticket : tickets) ticket = fixture.queue.Admit(rules, 0).ticket;
  std::size_t next = kCalls / 2;
  for (auto _ : state) {
    benchmark::DoNotOptimize(fixture.queue.Cancel(tickets[next]).verdict);
    tickets[next] = fixture.queue.Admit(rules, 0).ticket;
    next = (next + 7919) % kCalls;
  }
}
BENCHMARK(BM_CancelInLongLine);

// Nothing has passed: what each firing of the timer costs while 10,000 wait.
void BM_ExpireNothing(benchmark::State& state) {
  Fixture fixture(/*up=*/false);
  CallRules rules = Waiting();
  for (std::int64_t i = 0; i < 10000; ++i) {
    rules.deadline_ns = kNsPerSecond + i;
    fixture.queue.Admit(rules, 0);
  }
  std::vector<Ended> ended;
  for (auto _ : state) benchmark::DoNotOptimize(fixture.queue.Expire(1, &ended).next_ns);
}
BENCHMARK(BM_ExpireNothing);

// One of 10,000 that wait runs out of time, another joins; deadlines in no order.
void BM_ExpireOneOf10000(benchmark::State& state) {
  constexpr std::int64_t kCalls = 10000;
  Fixture fixture(/*up=*/false);
  CallRules rules = Waiting();
  std::int64_t now_ns = 0;
  std::uint32_t random = 1;
  const auto admit = [&] {
    random = random * 1664525U + 1013904223U;
    rules.deadline_ns = now_ns + 1 + (random >> 8) % (2 * kCalls);
    fixture.queue.Admit(rules, now_ns);
  };
  for (std::int64_t i = 0; i < kCalls; ++i) admit();
  std::vector<Ended> ended;
  std::int64_t items = 0;
  for (auto _ : state) {
    ++now_ns;
    ended.clear();
    fixture.queue.Expire(now_ns, &ended);
    for (std::size_t i = 0; i < ended.size(); ++i) admit();
    items += static_cast<std::int64_t>(ended.size());
  }
  state.SetItemsProcessed(items);
}
BENCHMARK(BM_ExpireOneOf10000);

// All 10,000 at once; the argument says whether by deadline or because the actor is dead.
void BM_EndAll10000(benchmark::State& state) {
  const bool by_deadline = state.range(0) != 0;
  std::vector<Ended> ended;
  for (auto _ : state) {
    state.PauseTiming();
    Fixture fixture(/*up=*/false);
    CallRules rules = Waiting();
    for (std::int64_t i = 0; i < 10000; ++i) {
      rules.deadline_ns = 1 + i;
      fixture.queue.Admit(rules, 0);
    }
    if (!by_deadline) Report(&fixture.slot, Evidence::kTable, ActorState::kDead, 1);
    ended.clear();
    state.ResumeTiming();
    if (by_deadline) {
      fixture.queue.Expire(kNsPerSecond, &ended);
    } else {
      fixture.queue.Review(&ended);
    }
    benchmark::DoNotOptimize(ended.data());
  }
}
BENCHMARK(BM_EndAll10000)->Arg(0)->Arg(1)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace actorsub

BENCHMARK_MAIN();
