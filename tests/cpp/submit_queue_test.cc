// The submit queue: rule by rule, against its slow reference, when memory runs out, and under threads.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "submit_queue.h"

#include <doctest/doctest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "submit_queue_reference.h"
#include "test_random.h"

// The thread sanitizer brings an operator new of its own; tests of memory run without it.
#if defined(__SANITIZE_THREAD__)
#define ACTORSUB_COUNTS_MEMORY 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ACTORSUB_COUNTS_MEMORY 0
#endif
#endif
#ifndef ACTORSUB_COUNTS_MEMORY
#define ACTORSUB_COUNTS_MEMORY 1
#endif

#if ACTORSUB_COUNTS_MEMORY
namespace {

// Of this thread: how many allocations still succeed (-1: all), and the bytes it holds.
thread_local int allocations_left = -1;
thread_local std::int64_t bytes_held = 0;

}  // namespace

void* operator new(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  bytes_held += static_cast<std::int64_t>(malloc_usable_size(memory));
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) bytes_held -= static_cast<std::int64_t>(malloc_usable_size(memory));
  std::free(memory);
}
void operator delete(void* memory, std::size_t /*size*/) noexcept { operator delete(memory); }
#endif

namespace actorsub {
namespace {

using testing::QueuePair;
using testing::Random;
using testing::Seed;

Observation Report(Evidence evidence, ActorState verdict, std::int64_t incarnation) {
  Observation observation;
  observation.evidence = evidence;
  observation.verdict = verdict;
  observation.incarnation = incarnation;
  return observation;
}

// A slot that can be moved, and its queue.
struct Fixture {
  Slot slot{ActorId{}};
  SubmitQueue queue{&slot};
  std::vector<Ended> ended;
  std::vector<Ticket> tickets;

  void Up(int incarnation = 0) { slot.Apply(Report(Evidence::kTable, ActorState::kAlive, incarnation)); }
  void Exit(int incarnation = 0) { slot.Apply(Report(Evidence::kProcess, ActorState::kRestarting, incarnation)); }
  void Silence(int incarnation = 0) { slot.Apply(Report(Evidence::kSilence, ActorState::kUnreachable, incarnation)); }
  void Answer(int incarnation = 0) { slot.Apply(Report(Evidence::kSilence, ActorState::kAlive, incarnation)); }
  void Pending() { slot.Apply(Report(Evidence::kTable, ActorState::kPending, 0)); }
  void Die() { slot.Apply(Report(Evidence::kTable, ActorState::kDead, slot.belief().incarnation)); }

  Ticket Send(const CallRules& rules = {}) {
    const Admission admission = queue.Admit(rules, 0);
    REQUIRE(admission.verdict == Verdict::kSend);
    return admission.ticket;
  }
  Ticket Wait(const CallRules& rules) {
    const Admission admission = queue.Admit(rules, 0);
    REQUIRE(admission.verdict == Verdict::kWait);
    return admission.ticket;
  }
  std::vector<Ticket> Release(std::int64_t now_ns = 0, std::size_t max = 100) {
    tickets.clear();
    queue.Release(now_ns, max, &tickets, &ended);
    return tickets;
  }
  void CheckEnded(const std::vector<Ended>& expected) {
    REQUIRE(ended.size() == expected.size());
    for (std::size_t i = 0; i < ended.size(); ++i) {
      CAPTURE(i);
      CHECK(ended[i].ticket == expected[i].ticket);
      CHECK(ended[i].end == expected[i].end);
      CHECK(ended[i].sent == expected[i].sent);
    }
    ended.clear();
  }
};

CallRules Waiting(std::uint32_t window = 0) {
  CallRules rules;
  rules.away = AwayRule::kHold;
  rules.on_pending = PendingRule::kHold;
  rules.window = window;
  return rules;
}

TEST_CASE("what Admit says in each state") {
  Fixture f;
  CallRules refuse;
  refuse.on_pending = PendingRule::kRefuse;
  CHECK(f.queue.Admit({}, 0).verdict == Verdict::kSend);  // kUnknown
  f.Pending();
  CHECK(f.queue.Admit({}, 0).verdict == Verdict::kSend);
  CHECK(f.queue.Admit(refuse, 0).verdict == Verdict::kRefusedPending);
  CHECK(f.queue.Admit(Waiting(), 0).verdict == Verdict::kWait);
  f.Up();
  f.Release();
  CHECK(f.queue.BeginSend(f.tickets.at(0)).verdict == BeginVerdict::kGo);
  f.queue.EndSend(f.tickets.at(0));
  CHECK(f.queue.Admit(refuse, 0).verdict == Verdict::kSend);
  f.Silence();
  CHECK(f.queue.Admit({}, 0).verdict == Verdict::kRefusedAway);
  CHECK(f.queue.Admit(Waiting(), 0).verdict == Verdict::kWait);
  f.Exit();
  const Admission away = f.queue.Admit({}, 0);
  CHECK(away.verdict == Verdict::kRefusedAway);
  CHECK(away.ticket == kNoTicket);
  CHECK(away.word == f.slot.word());
  CHECK(f.queue.Admit(Waiting(), 0).verdict == Verdict::kWait);
  f.Die();
  CHECK(f.queue.Admit(Waiting(), 0).verdict == Verdict::kRefusedDead);
  CHECK(f.queue.counters().refused_state == 4);
}

TEST_CASE("the state comes before the deadline, the deadline before the bound") {
  Fixture f;
  f.Exit();
  CallRules rules;
  rules.deadline_ns = 5;
  rules.max_queued = 0;
  CHECK(f.queue.Admit(rules, 5).verdict == Verdict::kRefusedAway);
  rules.away = AwayRule::kHold;
  CHECK(f.queue.Admit(rules, 5).verdict == Verdict::kExpired);
  CHECK(f.queue.Admit(rules, 4).verdict == Verdict::kFull);
  f.Up(1);
  CHECK(f.queue.Admit(rules, 5).verdict == Verdict::kExpired);
  CHECK(f.queue.Admit(rules, 4).verdict == Verdict::kSend);  // The bound is the line's.
  CHECK(f.queue.counters().expired_here == 2);
  CHECK(f.queue.counters().refused_full == 1);
}

TEST_CASE("a timer that is gone is set again, also by a call that comes later") {
  Fixture f;
  f.Up();
  CallRules rules;
  rules.deadline_ns = 50;
  const Admission first = f.queue.Admit(rules, 0);
  CHECK(first.arm_ns == 50);
  rules.deadline_ns = 70;
  const Admission second = f.queue.Admit(rules, 0);
  CHECK(second.arm_ns == kNeverNs);
  CHECK(f.queue.Complete(first.ticket).verdict == CompleteVerdict::kDelivered);
  CHECK(f.queue.Rearm() == 70);
  CHECK(f.queue.Complete(second.ticket).verdict == CompleteVerdict::kDelivered);
  CHECK(f.queue.Rearm() == kNeverNs);
  rules.deadline_ns = 90;
  CHECK(f.queue.Admit(rules, 0).arm_ns == 90);
}

TEST_CASE("nobody overtakes the line") {
  Fixture f;
  f.Up();
  const Ticket sent = f.Send(Waiting(1));
  const Ticket first = f.Wait(Waiting(1));
  const Ticket second = f.Wait(Waiting());  // Would have room, but the head has none.
  CHECK(f.Release().empty());
  CHECK(f.queue.Complete(sent).release);
  CHECK(f.Release(0, 1) == std::vector<Ticket>{first});
  const Ticket third = f.Wait(Waiting());  // Behind one that is on its way out.
  CHECK(f.queue.BeginSend(first).verdict == BeginVerdict::kGo);
  CHECK(f.queue.Complete(first).verdict == CompleteVerdict::kDelivered);  // Before EndSend.
  const Ticket fourth = f.Wait(Waiting());
  f.queue.EndSend(first);
  CHECK(f.Release() == std::vector<Ticket>{second, third, fourth});
  CHECK(f.queue.BeginSend(second).verdict == BeginVerdict::kGo);
  f.queue.EndSend(second);
  CHECK(f.queue.Cancel(third).verdict == CancelVerdict::kCancelledHere);
  CHECK(f.queue.BeginSend(third).verdict == BeginVerdict::kGone);
  CHECK(f.queue.BeginSend(fourth).verdict == BeginVerdict::kGo);
  f.Wait(Waiting());
  f.queue.EndSend(fourth);
  CHECK(f.Release().size() == 1);
  CHECK(f.queue.BeginSend(f.tickets[0]).verdict == BeginVerdict::kGo);
  f.queue.EndSend(f.tickets[0]);
  f.Send(Waiting());
}

TEST_CASE("a line that is empty holds nobody while the last is being given to Ray") {
  Fixture f;
  f.Exit();
  const Ticket ticket = f.Wait(Waiting());
  f.Up(1);
  f.Release();
  CHECK(f.queue.BeginSend(ticket).verdict == BeginVerdict::kGo);
  const Admission behind = f.queue.Admit({}, 0);
  CHECK(behind.verdict == Verdict::kWait);
  CHECK_FALSE(behind.release);  // The sender is at work and comes back.
  CHECK(f.queue.Abort(ticket).taken_back);
  CHECK(f.Release() == std::vector<Ticket>{behind.ticket});
}

TEST_CASE("a batch goes back together when the actor goes away") {
  Fixture f;
  f.Exit();
  const Ticket a = f.Wait(Waiting(3));
  const Ticket b = f.Wait(Waiting(3));
  const Ticket c = f.Wait(Waiting(3));
  f.Up(1);
  CHECK(f.queue.Review(&f.ended));
  CHECK(f.Release(0, 2) == std::vector<Ticket>{a, b});
  CHECK(f.queue.counters().in_flight == 2);
  f.Silence(1);
  const Begin begin = f.queue.BeginSend(a);
  CHECK(begin.verdict == BeginVerdict::kBack);
  CHECK(begin.word == f.slot.word());
  CHECK(f.queue.counters().in_flight == 0);
  CHECK(f.queue.counters().recalled == 2);
  f.Answer(1);
  CHECK(f.queue.BeginSend(b).verdict == BeginVerdict::kBack);  // Not before a.
  CHECK(f.queue.Review(&f.ended));
  CHECK(f.Release() == std::vector<Ticket>{a, b, c});
  CHECK(f.queue.BeginSend(b).verdict == BeginVerdict::kBack);  // Out of turn.
  CHECK(f.Release() == std::vector<Ticket>{a, b, c});
  CHECK(f.Release() == std::vector<Ticket>{a, b, c});  // Starts over.
  CHECK(f.queue.BeginSend(a).verdict == BeginVerdict::kGo);
  CHECK(f.queue.BeginSend(a).verdict == BeginVerdict::kGone);
  CHECK(f.queue.counters().sent == 1);
}

TEST_CASE("BeginSend takes the mark of the incarnation that gets the call") {
  Fixture f;
  f.Exit();
  const Ticket ticket = f.Wait(Waiting());
  f.Up(1);
  f.Release();
  f.Exit(1);
  f.Up(2);
  const Begin begin = f.queue.BeginSend(ticket);
  CHECK(begin.verdict == BeginVerdict::kGo);
  CHECK(begin.mark == 1);
  CHECK_FALSE(f.queue.has_lost());
  f.Exit(2);
  CHECK(f.queue.has_lost());
}

TEST_CASE("the window is each call's own, and a batch does not overdraw it") {
  Fixture f;
  f.Up();
  f.Send(Waiting(2));
  f.Send(Waiting(2));
  f.Silence();
  const Ticket third = f.Wait(Waiting(4));
  const Ticket fourth = f.Wait(Waiting(4));
  const Ticket fifth = f.Wait(Waiting(4));
  const Ticket sixth = f.Wait(Waiting(5));
  f.Answer();
  CHECK(f.Release() == std::vector<Ticket>{third, fourth});
  CHECK(f.queue.Cancel(third).verdict == CancelVerdict::kCancelledHere);  // Gives its place to the next.
  CHECK(f.queue.counters().in_flight == 3);
  CHECK(f.queue.BeginSend(fourth).verdict == BeginVerdict::kGo);
  CHECK(f.Release() == std::vector<Ticket>{fifth, sixth});
}

TEST_CASE("a bound on the line counts what is on its way out") {
  Fixture f;
  f.Exit();
  CallRules rules = Waiting();
  rules.max_queued = 2;
  const Ticket a = f.Wait(rules);
  f.Wait(rules);
  CHECK(f.queue.Admit(rules, 0).verdict == Verdict::kFull);
  f.Up(1);
  f.Release();
  CHECK(f.queue.Admit(rules, 0).verdict == Verdict::kFull);
  f.queue.BeginSend(a);
  f.queue.EndSend(a);
  CHECK(f.queue.Admit(rules, 0).verdict == Verdict::kWait);
}

TEST_CASE("the first end counts") {
  Fixture f;
  f.Up();
  const Ticket ticket = f.Send();
  CHECK(f.queue.Cancel(ticket).verdict == CancelVerdict::kSent);
  CHECK(f.queue.Abandon(ticket));
  CHECK_FALSE(f.queue.Abandon(ticket));
  CHECK(f.queue.Cancel(ticket).verdict == CancelVerdict::kUnknown);
  CHECK(f.queue.counters().in_flight == 1);
  CHECK(f.queue.Complete(ticket).verdict == CompleteVerdict::kLate);
  CHECK(f.queue.counters().in_flight == 0);
  CHECK(f.queue.Complete(ticket).verdict == CompleteVerdict::kUnknown);
  const Ticket other = f.Send();
  CHECK(other != ticket);
  CHECK(f.queue.Complete(ticket).verdict == CompleteVerdict::kUnknown);  // Its place is another's now.
  CHECK(f.queue.Complete(other).verdict == CompleteVerdict::kDelivered);
  CHECK_FALSE(f.queue.Abandon(other));
  CHECK(f.queue.counters().late == 1);
  CHECK(f.queue.counters().stray == 2);
  CHECK(f.queue.Complete(kNoTicket).verdict == CompleteVerdict::kUnknown);
  CHECK(f.queue.Complete(~Ticket{0}).verdict == CompleteVerdict::kUnknown);
}

TEST_CASE("what Ray never got is taken back") {
  Fixture f;
  f.Up();
  const Ticket ticket = f.Send(Waiting(1));
  f.Wait(Waiting(1));
  const Aborted aborted = f.queue.Abort(ticket);
  CHECK(aborted.taken_back);
  CHECK(aborted.release);
  CHECK_FALSE(f.queue.Abort(ticket).taken_back);
  f.Release();
  CHECK_FALSE(f.queue.Abort(f.tickets.at(0)).taken_back);  // Not begun: nothing to take back.
  CHECK(f.queue.BeginSend(f.tickets[0]).verdict == BeginVerdict::kGo);
  CHECK(f.queue.Abandon(f.tickets[0]));
  CHECK_FALSE(f.queue.Abort(f.tickets[0]).taken_back);  // Told already; only its place is freed.
  CHECK(f.queue.counters().in_flight == 0);
}

TEST_CASE("deadlines end calls here and there") {
  Fixture f;
  f.Up();
  CallRules rules = Waiting(1);
  rules.deadline_ns = 100;
  const Admission sent = f.queue.Admit(rules, 0);
  CHECK(sent.arm_ns == 100);
  rules.deadline_ns = 50;
  const Admission first = f.queue.Admit(rules, 0);
  CHECK(first.arm_ns == 50);
  rules.deadline_ns = 60;
  const Admission second = f.queue.Admit(rules, 0);
  CHECK(second.arm_ns == kNeverNs);
  CHECK(f.queue.next_deadline_ns() == 50);
  CHECK(f.queue.Expire(49, &f.ended).next_ns == 50);
  CHECK(f.ended.empty());
  CHECK(f.queue.Expire(50, &f.ended).next_ns == 60);
  f.CheckEnded({{first.ticket, End::kDeadline, false}});
  CHECK(f.queue.Expire(200, &f.ended).next_ns == kNeverNs);
  f.CheckEnded({{second.ticket, End::kDeadline, false}, {sent.ticket, End::kDeadline, true}});
  CHECK(f.queue.counters().in_flight == 1);  // It may still run.
  const Ticket third = f.Wait(Waiting(1));
  CHECK_FALSE(f.queue.Expire(300, &f.ended).release);
  const Completion late = f.queue.Complete(sent.ticket);
  CHECK(late.verdict == CompleteVerdict::kLate);
  CHECK(late.release);
  CHECK(f.Release() == std::vector<Ticket>{third});
}

TEST_CASE("an end makes its deadline void") {
  Fixture f;
  f.Up();
  CallRules rules;
  rules.deadline_ns = 10;
  f.queue.Complete(f.Send(rules));
  rules.deadline_ns = 20;
  f.queue.Abandon(f.Send(rules));
  CHECK(f.queue.next_deadline_ns() == kNeverNs);
  rules.deadline_ns = 15;
  CHECK(f.queue.Admit(rules, 0).arm_ns == kNeverNs);  // Armed for 10 still, which will do.
  CHECK(f.queue.Expire(10, &f.ended).next_ns == 15);
  CHECK(f.ended.empty());
}

TEST_CASE("Release sends nothing whose deadline has passed") {
  Fixture f;
  f.Exit();
  CallRules rules = Waiting();
  rules.deadline_ns = 10;
  const Ticket a = f.Wait(rules);
  const Ticket b = f.Wait(Waiting());
  const Ticket c = f.Wait(rules);
  const Ticket d = f.Wait(Waiting());
  f.Up(1);
  CHECK(f.Release(10) == std::vector<Ticket>{b, d});
  f.CheckEnded({{a, End::kDeadline, false}, {c, End::kDeadline, false}});
}

TEST_CASE("what is released is not begun: it can end here") {
  Fixture f;
  f.Exit();
  CallRules rules = Waiting();
  rules.deadline_ns = 10;
  const Ticket a = f.Wait(rules);
  const Ticket b = f.Wait(Waiting());
  f.Up(1);
  f.Release();
  CHECK_FALSE(f.queue.Abandon(b));
  CHECK(f.queue.Complete(b).verdict == CompleteVerdict::kUnknown);
  f.Exit(1);
  CHECK_FALSE(f.queue.has_lost());
  f.queue.FailLost(&f.ended);
  CHECK(f.ended.empty());
  f.queue.Expire(10, &f.ended);
  f.CheckEnded({{a, End::kDeadline, false}});
  f.Die();
  f.queue.Review(&f.ended);
  f.CheckEnded({{b, End::kDead, false}});
  CHECK(f.queue.BeginSend(a).verdict == BeginVerdict::kGone);
  CHECK(f.queue.BeginSend(b).verdict == BeginVerdict::kGone);
  CHECK(f.queue.counters().in_flight == 0);
}

TEST_CASE("Review ends what the state refuses and leaves the rest in its order") {
  Fixture f;
  f.Up();
  const Ticket sent = f.Send(Waiting(1));
  CallRules hasty;
  hasty.window = 1;
  const Ticket a = f.Wait(hasty);
  const Ticket b = f.Wait(Waiting(1));
  const Ticket c = f.Wait(hasty);
  const Ticket d = f.Wait(Waiting(1));
  CHECK_FALSE(f.queue.Review(&f.ended));
  f.Silence();
  CHECK_FALSE(f.queue.Review(&f.ended));
  f.CheckEnded({{a, End::kAway, false}, {c, End::kAway, false}});
  CHECK(f.queue.Complete(sent).verdict == CompleteVerdict::kDelivered);
  f.Answer();
  CHECK(f.queue.Review(&f.ended));
  CHECK(f.Release() == std::vector<Ticket>{b});
  f.Die();
  f.queue.Review(&f.ended);
  f.CheckEnded({{b, End::kDead, false}, {d, End::kDead, false}});
}

TEST_CASE("Review of an actor that turns out to be pending") {
  Fixture f;
  CallRules rules;
  rules.window = 1;
  f.Send(rules);
  const Ticket submit = f.Wait(rules);
  rules.on_pending = PendingRule::kRefuse;
  const Ticket refuse = f.Wait(rules);
  f.Pending();
  f.queue.Review(&f.ended);
  f.CheckEnded({{refuse, End::kPending, false}});
  CHECK(f.queue.Cancel(submit).verdict == CancelVerdict::kCancelledHere);
}

TEST_CASE("a loss ends what the incarnation had, and nothing else") {
  Fixture f;
  f.Up();
  const Ticket a = f.Send();
  const Ticket b = f.Send();
  const Ticket c = f.Send();
  f.queue.Complete(b);
  CHECK(f.queue.Abandon(c));
  f.Exit();
  f.Up(1);
  const Ticket d = f.Send(Waiting(3));
  const Ticket e = f.Wait(Waiting(3));
  CHECK(f.queue.has_lost());
  CHECK(f.queue.FailLost(&f.ended));
  f.CheckEnded({{a, End::kLost, true}});
  CHECK_FALSE(f.queue.has_lost());
  CHECK(f.queue.counters().in_flight == 1);
  CHECK(f.queue.counters().lost == 1);
  CHECK(f.queue.Complete(a).verdict == CompleteVerdict::kUnknown);
  CHECK(f.Release() == std::vector<Ticket>{e});
  f.Silence(1);
  CHECK(f.slot.DeclareLoss());
  f.queue.FailLost(&f.ended);
  f.CheckEnded({{d, End::kLost, true}});
}

TEST_CASE("a call that is lost while it is given to Ray still holds back those behind") {
  Fixture f;
  f.Exit();
  const Ticket a = f.Wait(Waiting());
  f.Up(1);
  f.Release();
  CHECK(f.queue.BeginSend(a).verdict == BeginVerdict::kGo);
  f.Exit(1);
  f.queue.FailLost(&f.ended);
  f.CheckEnded({{a, End::kLost, true}});
  f.Up(2);
  const Ticket b = f.Wait(Waiting());
  CHECK_FALSE(f.queue.Abort(a).taken_back);  // It was told as sent, and stays so.
  CHECK(f.Release() == std::vector<Ticket>{b});
}

TEST_CASE("the end of the connection") {
  Fixture f;
  f.Up();
  const Ticket sent = f.Send(Waiting(2));
  const Ticket abandoned = f.Send(Waiting(2));
  f.queue.Abandon(abandoned);
  CallRules rules = Waiting(3);
  rules.deadline_ns = 5;
  f.Silence();
  const Ticket out = f.Wait(Waiting(3));
  const Ticket waiting = f.Wait(rules);
  f.Answer();
  CHECK(f.Release(0, 1) == std::vector<Ticket>{out});
  f.queue.CloseAll(&f.ended);
  f.CheckEnded({{sent, End::kClosed, true}, {out, End::kClosed, false}, {waiting, End::kClosed, false}});
  CHECK(f.queue.Admit({}, 0).verdict == Verdict::kClosed);
  CHECK(f.queue.BeginSend(out).verdict == BeginVerdict::kGone);
  CHECK(f.queue.next_deadline_ns() == kNeverNs);
  f.queue.CloseAll(&f.ended);
  CHECK(f.ended.empty());
}

TEST_CASE("deadlines in any order, most of them void") {
  CAPTURE(Seed());
  Random random(Seed());
  Fixture f;
  f.Up();
  std::vector<std::pair<std::int64_t, Ticket>> calls;
  CallRules rules;
  for (int i = 0; i < 2000; ++i) {
    rules.deadline_ns = 1 + random.Below(1'000'000);
    calls.emplace_back(rules.deadline_ns, f.Send(rules));
  }
  std::shuffle(calls.begin(), calls.end(), std::mt19937_64(Seed()));
  while (calls.size() > 300) {
    f.queue.Complete(calls.back().second);
    calls.pop_back();
  }
  std::sort(calls.begin(), calls.end());
  std::size_t next = 0;
  for (std::int64_t now_ns = 0; now_ns <= 1'000'000; now_ns += 1000) {
    f.ended.clear();
    const Expiry expiry = f.queue.Expire(now_ns, &f.ended);
    std::size_t passed = 0;
    while (next < calls.size() && calls[next].first <= now_ns) {
      ++next;
      ++passed;
    }
    REQUIRE(f.ended.size() == passed);
    REQUIRE(expiry.next_ns == (next < calls.size() ? calls[next].first : kNeverNs));
  }
  CHECK(next == 300);
}

TEST_CASE("names of ends") {
  CHECK(std::string(EndName(End::kDeadline)) == "deadline");
  CHECK(std::string(EndName(End::kAway)) == "away");
  CHECK(std::string(EndName(End::kDead)) == "dead");
  CHECK(std::string(EndName(End::kPending)) == "pending");
  CHECK(std::string(EndName(End::kLost)) == "lost");
  CHECK(std::string(EndName(End::kClosed)) == "closed");
}

TEST_CASE("random steps do what the reference does") {
  constexpr int kSeeds = 8;
  constexpr int kRunsPerSeed = 10;
  constexpr int kSteps = 1250;
  for (std::uint64_t seed = Seed(); seed < Seed() + kSeeds; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    for (int run = 0; run < kRunsPerSeed; ++run) {
      QueuePair pair([&](unsigned bound) { return static_cast<unsigned>(random.Below(static_cast<int>(bound))); });
      CAPTURE(run);
      int step = 0;
      try {
        for (; step < kSteps; ++step) pair.Step();
        pair.Finish();
      } catch (const std::logic_error& error) {
        FAIL(error.what() << ", step " << step);
      }
    }
  }
}

#if ACTORSUB_COUNTS_MEMORY
TEST_CASE("a call that waits costs what the header says, and a flood leaves little behind") {
  constexpr std::size_t kCalls = 100000;
  Fixture f;
  f.Exit();
  CallRules rules = Waiting();
  rules.max_queued = kCalls;
  const auto fill = [&](std::vector<Ticket>* tickets) {
    for (std::size_t i = 0; i < kCalls; ++i) tickets->push_back(f.Wait(rules));
  };
  std::vector<Ticket> tickets;
  tickets.reserve(kCalls);
  const std::int64_t before = bytes_held;
  fill(&tickets);
  CHECK(bytes_held - before <= static_cast<std::int64_t>(41 * kCalls));
  for (const Ticket ticket : tickets) REQUIRE(f.queue.Cancel(ticket).verdict == CancelVerdict::kCancelledHere);
  CHECK(bytes_held - before <= std::int64_t{80} * 1024);

  // With deadlines, and tickets of before that must stay unknown although their places are given out again.
  std::vector<Ticket> again;
  again.reserve(kCalls);
  rules.deadline_ns = kNsPerSecond;
  const std::int64_t before_again = bytes_held;
  fill(&again);
  CHECK(bytes_held - before_again <= static_cast<std::int64_t>((41 + 2 * 16) * kCalls));
  for (const Ticket ticket : tickets) REQUIRE(f.queue.Cancel(ticket).verdict == CancelVerdict::kUnknown);
  f.ended.reserve(kCalls);
  f.queue.Expire(kNsPerSecond, &f.ended);
  CHECK(f.ended.size() == kCalls);
  CHECK(bytes_held - before <= static_cast<std::int64_t>((16 + 8) * kCalls) + std::int64_t{160} * 1024);
}

TEST_CASE("dead deadlines do not pile up") {
  Fixture f;
  f.Up();
  CallRules rules;
  rules.deadline_ns = kNsPerSecond;
  f.Send(rules);
  const std::int64_t before = bytes_held;
  for (int i = 0; i < 100000; ++i) f.queue.Complete(f.Send(rules));
  CHECK(bytes_held - before <= std::int64_t{16} * 1024);
  CHECK(f.queue.next_deadline_ns() == kNsPerSecond);
}

// Runs `act` with fewer and fewer failures until it succeeds; returns how often it failed.
template <typename Act>
int UntilMemory(const Fixture& f, const Act& act) {
  for (int failures = 0;; ++failures) {
    const QueueCounters before = f.queue.counters();
    allocations_left = failures;
    bool failed = false;
    try {
      act();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    if (!failed) return failures;
    const QueueCounters after = f.queue.counters();
    REQUIRE(after.waiting == before.waiting);
    REQUIRE(after.in_flight == before.in_flight);
    REQUIRE(after.sent == before.sent);
    REQUIRE(f.ended.empty());
    REQUIRE(f.tickets.empty());
  }
}

TEST_CASE("no memory: the queue is as it was") {
  Fixture f;
  f.Up();
  CallRules rules = Waiting(1);
  rules.deadline_ns = 10;
  Admission sent;
  CHECK(UntilMemory(f, [&] { sent = f.queue.Admit(rules, 0); }) == 3);  // The chunk, the list of chunks, the heap.
  CHECK(sent.verdict == Verdict::kSend);
  CHECK(sent.arm_ns == 10);
  const Ticket a = f.Wait(rules);
  const Ticket b = f.Wait(Waiting(5));
  const Ticket c = f.Wait(Waiting(5));
  CHECK(UntilMemory(f, [&] { f.queue.Release(10, 1, &f.tickets, &f.ended); }) == 2);
  CHECK(f.tickets == std::vector<Ticket>{b});
  f.CheckEnded({{a, End::kDeadline, false}});
  f.tickets.clear();
  std::vector<Ended>().swap(f.ended);
  CHECK(UntilMemory(f, [&] { f.queue.Expire(10, &f.ended); }) == 1);
  f.CheckEnded({{sent.ticket, End::kDeadline, true}});
  CHECK(f.queue.BeginSend(b).verdict == BeginVerdict::kGo);
  f.queue.EndSend(b);
  f.Die();
  std::vector<Ended>().swap(f.ended);
  CHECK(UntilMemory(f, [&] { f.queue.Review(&f.ended); }) == 1);
  f.CheckEnded({{c, End::kDead, false}});
  std::vector<Ended>().swap(f.ended);
  CHECK(UntilMemory(f, [&] { f.queue.FailLost(&f.ended); }) == 1);
  f.CheckEnded({{b, End::kLost, true}});
  f.Up(1);
  const Ticket d = f.Send();
  std::vector<Ended>().swap(f.ended);
  CHECK(UntilMemory(f, [&] { f.queue.CloseAll(&f.ended); }) == 1);
  f.CheckEnded({{d, End::kClosed, true}});
}

#endif  // ACTORSUB_COUNTS_MEMORY

// Threads.
//
// The idea. Every part that an owner would have runs in a thread of its own: two submitters, the sender, Ray (gives
// outcomes, in any order), one who cancels, one who moves the slot, one who keeps the timer. Each call has a record:
// how often it was told an end, whether it began, whether its end said "unsent". At the end every record must have
// exactly one end, and none may have both begun and ended unsent. What each submitter's calls were given to Ray as last
// is plain memory: only the queue's order makes it safe to write, so thread sanitizer checks the order, too, and the
// numbers must only grow. The sender sleeps until some `release` wakes it and has no timeout of its own: an edge that
// is missed is a run that never ends, which the watchdog of the last wait turns into a failure. Time is virtual, and
// Expire is called for the armed timer only, so a deadline that was not armed would be missed.
class Stress {
 public:
  static constexpr int kSubmitters = 2;
  static constexpr int kCalls = 10000;  // Each submitter's.
  static constexpr std::uint32_t kWindow = 8;
  static constexpr std::size_t kKeptAtRay = 3;

  explicit Stress(bool losses) : losses_(losses), records_(std::size_t{kSubmitters} * kCalls) { Up(0); }

  void Run() {
    std::vector<std::thread> pool;
    pool.reserve(kSubmitters);
    std::thread sender([this] { Sender(); });
    std::thread ray([this] { Ray(); });
    for (int i = 0; i < kSubmitters; ++i) pool.emplace_back([this, i] { Submitter(i); });
    std::thread canceller([this] { Canceller(); });
    std::thread mover([this] { Mover(); });
    std::thread timer([this] { Timer(); });
    for (std::thread& thread : pool) thread.join();
    submitted_.store(true);
    PokeRay();
    canceller.join();
    mover.join();
    // The actor is up: what waits must go by what the queue itself asks for, and the timer still runs.
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < give_up) {
      const QueueCounters counters = queue_.counters();
      if (counters.waiting == 0 && counters.in_flight == 0) break;
      std::this_thread::yield();
    }
    CHECK(queue_.counters().waiting == 0);
    CHECK(queue_.counters().in_flight == 0);
    done_.store(true);
    Wake();
    PokeRay();
    sender.join();
    ray.join();
    timer.join();
    std::vector<Ended> ended;
    queue_.CloseAll(&ended);
    Take(ended);
    Judge();
  }

 private:
  struct Record {
    std::atomic<bool> admitted{false};
    std::atomic<int> ends{0};
    std::atomic<bool> begun{false};
    std::atomic<bool> ended_unsent{false};
  };

  void Up(std::uint32_t incarnation) { slot_.Apply(Report(Evidence::kTable, ActorState::kAlive, incarnation)); }

  // The lock is held while Admit is called, so that nobody looks for a ticket that is not noted yet.
  Admission Admit(int call, const CallRules& rules) {
    const std::lock_guard<std::mutex> lock(calls_mutex_);
    const Admission admission = queue_.Admit(rules, now_ns_.load());
    if (admission.ticket != kNoTicket) calls_[admission.ticket] = call;
    return admission;
  }
  int CallOf(Ticket ticket) {
    const std::lock_guard<std::mutex> lock(calls_mutex_);
    return calls_.at(ticket);
  }
  Record& RecordOf(Ticket ticket) { return records_[static_cast<std::size_t>(CallOf(ticket))]; }

  void Take(const std::vector<Ended>& ended) {
    for (const Ended& one : ended) {
      Record& record = RecordOf(one.ticket);
      record.ends.fetch_add(1);
      if (!one.sent) record.ended_unsent.store(true);
    }
  }

  void Wake() {
    const std::lock_guard<std::mutex> lock(wake_mutex_);
    woken_ = true;
    wakes_.notify_one();
  }
  void PokeRay() {
    const std::lock_guard<std::mutex> lock(ray_mutex_);
    ray_wakes_.notify_all();
  }
  void WakeIf(bool release) {
    if (release) Wake();
  }

  void Begun(Ticket ticket, std::uint64_t word, std::uint32_t mark) {
    RecordOf(ticket).begun.store(true);
    const Belief belief = DecodeBelief(word);
    if (belief.state != ActorState::kAlive) wrong_.fetch_add(1);
    // Every incarnation was up and ended once; a loss is declared for none.
    if (mark != belief.incarnation) wrong_.fetch_add(1);
    if (!losses_ && at_ray_.fetch_add(1) >= static_cast<int>(kWindow)) wrong_.fetch_add(1);
  }

  void GiveToRay(Ticket ticket) {
    const int call = CallOf(ticket);
    int& last = last_given_[call / kCalls];
    if (call <= last) wrong_.fetch_add(1);
    last = call;
    const std::lock_guard<std::mutex> lock(ray_mutex_);
    at_ray_list_.push_back(ticket);
    ray_wakes_.notify_one();
  }

  void TakeBack(Ticket ticket) {
    if (!losses_) at_ray_.fetch_sub(1);
    const Aborted aborted = queue_.Abort(ticket);
    if (aborted.taken_back) RecordOf(ticket).ends.fetch_add(1);
    WakeIf(aborted.release);
  }

  void Submitter(int number) {
    Random random(Seed() + static_cast<std::uint64_t>(number));
    for (int i = 0; i < kCalls; ++i) {
      const int call = number * kCalls + i;
      CallRules rules;
      rules.window = kWindow;
      rules.max_queued = 100;
      rules.away = random.OneIn(3) ? AwayRule::kRefuse : AwayRule::kHold;
      if (random.OneIn(2)) rules.deadline_ns = now_ns_.load() + random.Below(2000);
      const Admission admission = Admit(call, rules);
      if (admission.arm_ns != kNeverNs) Arm(admission.arm_ns);
      WakeIf(admission.release);
      if (admission.ticket == kNoTicket) {
        std::this_thread::yield();
        continue;
      }
      records_[static_cast<std::size_t>(call)].admitted.store(true);
      if (random.OneIn(4)) newest_.store(admission.ticket);
      if (random.OneIn(4)) std::this_thread::yield();
      if (admission.verdict != Verdict::kSend) continue;
      Begun(admission.ticket, admission.word, admission.mark);
      if (random.OneIn(16)) {
        TakeBack(admission.ticket);
      } else {
        GiveToRay(admission.ticket);
      }
    }
  }

  void Sender() {
    Random random(Seed() + 100);
    std::vector<Ticket> tickets;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(wake_mutex_);
        wakes_.wait(lock, [this] { return woken_; });
        woken_ = false;
      }
      if (done_.load()) return;
      do {
        tickets.clear();
        std::vector<Ended> ended;
        queue_.Release(now_ns_.load(), 1 + static_cast<std::size_t>(random.Below(4)), &tickets, &ended);
        Take(ended);
        for (const Ticket ticket : tickets) {
          if (random.OneIn(4)) std::this_thread::yield();
          const Begin begin = queue_.BeginSend(ticket);
          if (begin.verdict == BeginVerdict::kGone) continue;
          if (begin.verdict == BeginVerdict::kBack) break;
          Begun(ticket, begin.word, begin.mark);
          if (random.OneIn(16)) {
            TakeBack(ticket);
          } else {
            GiveToRay(ticket);
          }
          queue_.EndSend(ticket);
        }
      } while (!tickets.empty());
    }
  }

  void Ray() {
    Random random(Seed() + 200);
    for (;;) {
      Ticket ticket = kNoTicket;
      {
        std::unique_lock<std::mutex> lock(ray_mutex_);
        // Keeps some back while there are more to come, so that other ends can come first.
        ray_wakes_.wait(lock, [this] {
          return at_ray_list_.size() > kKeptAtRay || (submitted_.load() && !at_ray_list_.empty()) || done_.load();
        });
        if (at_ray_list_.empty()) return;
        const auto which = at_ray_list_.begin() + random.Below(static_cast<int>(at_ray_list_.size()));
        ticket = *which;
        at_ray_list_.erase(which);
      }
      if (!losses_) at_ray_.fetch_sub(1);
      const Completion completion = queue_.Complete(ticket);
      if (completion.verdict == CompleteVerdict::kDelivered) RecordOf(ticket).ends.fetch_add(1);
      if (!losses_ && completion.verdict == CompleteVerdict::kUnknown) wrong_.fetch_add(1);
      WakeIf(completion.release);
    }
  }

  void Canceller() {
    Ticket last = kNoTicket;
    while (!submitted_.load()) {
      std::this_thread::yield();
      const Ticket ticket = newest_.load();
      if (ticket == last) continue;
      last = ticket;
      const Cancellation cancellation = queue_.Cancel(ticket);
      if (cancellation.verdict == CancelVerdict::kCancelledHere) {
        RecordOf(ticket).ends.fetch_add(1);
        RecordOf(ticket).ended_unsent.store(true);
      } else if (cancellation.verdict == CancelVerdict::kSent && queue_.Abandon(ticket)) {
        RecordOf(ticket).ends.fetch_add(1);
      }
      WakeIf(cancellation.release);
    }
  }

  void Mover() {
    std::uint32_t incarnation = 0;
    while (!submitted_.load()) {
      slot_.Apply(Report(Evidence::kSilence, ActorState::kUnreachable, incarnation));
      AfterMove();
      slot_.Apply(Report(Evidence::kSilence, ActorState::kAlive, incarnation));
      AfterMove();
      if (!losses_) continue;
      slot_.Apply(Report(Evidence::kConnection, ActorState::kUnreachable, incarnation));
      AfterMove();
      // Its end is the same loss: incarnation n begins with n of them.
      slot_.Apply(Report(Evidence::kProcess, ActorState::kRestarting, incarnation));
      AfterMove();
      ++incarnation;
      Up(incarnation);
      AfterMove();
    }
  }

  void AfterMove() {
    std::vector<Ended> ended;
    WakeIf(queue_.Review(&ended));
    if (queue_.has_lost()) WakeIf(queue_.FailLost(&ended));
    Take(ended);
    if (queue_.counters().in_flight > kWindow) wrong_.fetch_add(1);
    std::this_thread::yield();
  }

  void Arm(std::int64_t at_ns) {
    std::int64_t armed = timer_ns_.load();
    while (at_ns < armed && !timer_ns_.compare_exchange_weak(armed, at_ns)) {
    }
  }

  void Timer() {
    while (!done_.load()) {
      const std::int64_t now_ns = now_ns_.fetch_add(3) + 3;
      std::int64_t armed = timer_ns_.load();
      if (now_ns < armed) {
        std::this_thread::yield();
        continue;
      }
      timer_ns_.store(kNeverNs);
      std::vector<Ended> ended;
      const Expiry expiry = queue_.Expire(now_ns, &ended);
      Arm(expiry.next_ns);
      Take(ended);
      WakeIf(expiry.release);
    }
  }

  void Judge() {
    int admitted = 0;
    int not_once = 0;
    int broken_promises = 0;
    for (const Record& record : records_) {
      const int expected = record.admitted.load() ? 1 : 0;
      admitted += expected;
      if (record.ends.load() != expected) ++not_once;
      if (record.begun.load() && record.ended_unsent.load()) ++broken_promises;
    }
    const QueueCounters counters = queue_.counters();
    MESSAGE(admitted << " admitted, " << counters.sent << " sent, " << counters.recalled << " recalled, "
                     << counters.expired_here << "+" << counters.expired_there << " expired, "
                     << counters.cancelled_here << "+" << counters.abandoned << " cancelled, " << counters.lost
                     << " lost, " << counters.refused_state << " refused");
    CHECK(not_once == 0);
    CHECK(broken_promises == 0);
    CHECK(wrong_.load() == 0);
    CHECK(admitted > 0);
  }

  const bool losses_;
  Slot slot_{ActorId{}};
  SubmitQueue queue_{&slot_};
  std::vector<Record> records_;
  std::atomic<int> wrong_{0};
  std::atomic<std::int64_t> now_ns_{0};
  std::atomic<std::int64_t> timer_ns_{kNeverNs};
  std::atomic<Ticket> newest_{kNoTicket};
  std::atomic<bool> submitted_{false};
  std::atomic<bool> done_{false};
  std::atomic<int> at_ray_{0};
  int last_given_[kSubmitters] = {-1, -1};  // See above: plain on purpose.

  std::mutex calls_mutex_;
  std::unordered_map<Ticket, int> calls_;
  std::mutex wake_mutex_;
  std::condition_variable wakes_;
  bool woken_ = false;
  std::mutex ray_mutex_;
  std::condition_variable ray_wakes_;
  std::deque<Ticket> at_ray_list_;
};

TEST_CASE("a mark belongs to the word that let the call, while incarnations come and go") {
  constexpr std::uint32_t kIncarnations = 50000;
  Fixture f;
  f.Up();
  std::atomic<bool> over{false};
  std::thread mover([&] {
    for (std::uint32_t i = 0; i < kIncarnations; ++i) {
      f.Exit(static_cast<int>(i));
      f.Up(static_cast<int>(i + 1));
    }
    over.store(true);
  });
  int wrong = 0;
  int sent = 0;
  while (!over.load()) {
    const Admission admission = f.queue.Admit({}, 0);
    if (admission.verdict != Verdict::kSend) continue;
    ++sent;
    if (admission.mark != DecodeBelief(admission.word).incarnation) ++wrong;
    f.queue.Complete(admission.ticket);
  }
  mover.join();
  CHECK(wrong == 0);
  CHECK(sent > 0);
}

TEST_CASE("threads, a peer that is silent now and then") {
  CAPTURE(Seed());
  Stress(/*losses=*/false).Run();
}

TEST_CASE("threads, a peer that also dies") {
  CAPTURE(Seed());
  Stress(/*losses=*/true).Run();
}

}  // namespace
}  // namespace actorsub
