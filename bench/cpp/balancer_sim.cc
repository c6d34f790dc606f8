// Balancers under virtual time: an open-loop stream of calls to members that are slow, fail, flap, join or differ.
// Prints the tables of docs/balancers.md; the seed is fixed, so each run prints the same.
//
// The model. Calls arrive at random (Poisson) at 60% of what the members that work can carry. A member serves one call
// at a time, in order of arrival; a call takes 10 ms on average: half of it fixed, half exponential. After 1 s the
// caller gives up (a deadline miss), the member does not notice. No call is tried twice, so that the error rate shows
// what the picks did. Latency is that of all calls, errors included, but without those that failed fast.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "balancer.h"

namespace actorsub {
namespace {

constexpr std::int64_t kDeadlineNs = kNsPerSecond;
constexpr std::uint64_t kSeed = 20'240'607;
constexpr std::int64_t kServiceNs = 10 * kNsPerMs;

struct Behaviour {
  double slowness = 1;
  double fails_fast = 0;               // Share of the calls that fail after 0.5 ms, without waiting their turn.
  std::int64_t flap_ns = 0;            // Its process dies and is back, each after that time.
  std::int64_t fails_in_turns_ns = 0;  // Fails fast for that time, works for that time.
  std::int64_t joins_ns = 0;
  std::int64_t dies_ns = 0;
};

struct Scenario {
  std::string name;
  int members = 10;
  std::int64_t duration_ns = 60 * kNsPerSecond;
  std::function<Behaviour(int)> behaviour = [](int) { return Behaviour(); };
  double capacity = -1;  // In members of normal speed; -1: all members.
  double noise = 0;      // Share of calls that fail anywhere, after their service.
  double zipf = 0;       // Exponent of the popularity of 10,000 keys; 0: every call has a key of its own.
  double load = 0.6;
  int at_once = 1;  // Calls that a member serves at one time.
  int callers = 1;  // Each knows what it has in flight itself, and nothing of the others.
  bool loss_is_failure = false;
};

struct Policy {
  std::string name;
  PickerOptions picking;
  HealthOptions health;
};

struct Report {
  double p50_ms = 0;
  double p99_ms = 0;
  double p999_ms = 0;
  double error_share = 0;
  double fairness = 0;     // Most calls of a member over the mean.
  double first_share = 0;  // Calls of member 0 over the mean.
  double last_share = 0;   // Of the last member, in the first second after it joined, over the mean of that time.
  double moved_share = 0;  // Calls that did not go to the owner of their key.
  std::uint64_t ejections = 0;
};

class Simulation {
 public:
  Simulation(const Scenario& scenario, const Policy& policy)
      : scenario_(scenario),
        policy_(policy),
        random_(kSeed) {  // NOLINT(bugprone-random-generator-seed): runs must repeat
    for (int i = 0; i < scenario.callers; ++i) callers_.emplace_back(policy.health, scenario.members);
    for (int i = 0; i < scenario.members; ++i) {
      ActorId id{};
      for (std::size_t b = 0; b < 8; ++b) id[b] = static_cast<std::uint8_t>(random_() >> (8 * b));
      slots_.emplace_back(id);
      replicas_.push_back({});
      replicas_.back().behaviour = scenario.behaviour(i);
      replicas_.back().free_ns.assign(At(scenario.at_once), 0);
      if (replicas_.back().behaviour.joins_ns == 0) Join(i);
    }
    Rebuild();
    double total = 0;
    if (scenario.zipf > 0) {
      for (int i = 1; i <= 10'000; ++i) popularity_.push_back(total += std::pow(i, -scenario.zipf));
    }
  }

  Report Run() {
    const double capacity = scenario_.capacity > 0 ? scenario_.capacity : scenario_.members;
    const double per_second = scenario_.load * capacity * scenario_.at_once / (kServiceNs / 1e9);
    std::exponential_distribution<double> gap(per_second / 1e9);
    for (int i = 0; i < scenario_.members; ++i) {
      const Behaviour& b = replicas_[At(i)].behaviour;
      if (b.joins_ns > 0) Push(b.joins_ns, Event::kJoin, i);
      if (b.flap_ns > 0) Push(b.flap_ns, Event::kDown, i);
      if (b.dies_ns > 0) Push(b.dies_ns, Event::kDown, i);
    }
    std::int64_t next_ns = 0;
    while (next_ns < scenario_.duration_ns) {
      next_ns += 1 + static_cast<std::int64_t>(gap(random_));
      while (!events_.empty() && events_.top().at_ns <= next_ns) Handle();
      now_ns_ = next_ns;
      Arrive();
    }
    while (!events_.empty() && (now_ns_ < scenario_.duration_ns + 2 * kDeadlineNs)) Handle();
    return Summary();
  }

 private:
  struct Replica {
    Behaviour behaviour;
    std::vector<std::int64_t> free_ns;  // When each of its servers has served all that it was given.
    std::uint32_t life = 0;             // Moves when its process dies.
    std::uint64_t calls = 0;
    std::uint64_t calls_as_new = 0;
    std::vector<std::uint32_t> running;  // Only of those that can die.
  };
  struct Caller {
    Caller(const HealthOptions& health, int count) : group(health), members(At(count)) {}
    GroupHealth group;
    std::vector<std::unique_ptr<Member>> members;
    std::unique_ptr<Picker> picker;
  };
  struct Call {
    std::int64_t start_ns = 0;
    std::size_t caller = 0;
    int replica = 0;
    std::uint32_t probe = 0;
    Outcome outcome = Outcome::kSuccess;
    bool done = false;
    bool fast = false;
  };
  struct Event {
    enum Kind { kEnd, kJoin, kDown, kUp };
    std::int64_t at_ns;
    std::uint64_t order;
    Kind kind;
    int what;
    bool operator<(const Event& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
    }
  };

  static std::size_t At(int i) { return static_cast<std::size_t>(i); }
  void Push(std::int64_t at_ns, Event::Kind kind, int what) { events_.push({at_ns, ++order_, kind, what}); }
  double Uniform() { return std::uniform_real_distribution<double>()(random_); }

  void Tell(int i, Evidence evidence, ActorState verdict) {
    Observation observation;
    observation.evidence = evidence;
    observation.verdict = verdict;
    observation.incarnation = replicas_[At(i)].life;
    slots_[At(i)].Apply(observation);
  }
  void Join(int i) {
    Tell(i, Evidence::kTable, ActorState::kAlive);
    for (Caller& caller : callers_) caller.members[At(i)] = std::make_unique<Member>(&caller.group, &slots_[At(i)]);
  }
  void Rebuild() {
    PickerOptions options = policy_.picking;
    for (Caller& caller : callers_) {
      std::vector<Member*> list;
      for (const auto& member : caller.members) {
        if (member != nullptr) list.push_back(member.get());
      }
      caller.picker = std::make_unique<Picker>(options, list);
      ++options.seed;
    }
  }

  void Handle() {
    const Event event = events_.top();
    events_.pop();
    now_ns_ = event.at_ns;
    switch (event.kind) {
      case Event::kEnd:
        End(static_cast<std::uint32_t>(event.what));
        break;
      case Event::kJoin:
        Join(event.what);
        Rebuild();
        joined_ns_ = now_ns_;
        break;
      case Event::kDown:
        Down(event.what);
        break;
      case Event::kUp:
        Tell(event.what, Evidence::kTable, ActorState::kAlive);
        replicas_[At(event.what)].free_ns.assign(At(scenario_.at_once), now_ns_);
        Push(now_ns_ + replicas_[At(event.what)].behaviour.flap_ns, Event::kDown, event.what);
        break;
    }
  }

  void Down(int i) {
    Replica& replica = replicas_[At(i)];
    Tell(i, Evidence::kProcess, ActorState::kRestarting);
    ++replica.life;
    for (const std::uint32_t call : replica.running) {
      if (calls_[call].done) continue;
      calls_[call].outcome = scenario_.loss_is_failure ? Outcome::kFailure : Outcome::kLost;
      End(call);
    }
    replica.running.clear();
    if (replica.behaviour.flap_ns > 0) Push(now_ns_ + replica.behaviour.flap_ns, Event::kUp, i);
  }

  void Arrive() {
    PickRequest request;
    request.now_ns = now_ns_;
    if (scenario_.zipf > 0) {
      const auto found = std::lower_bound(popularity_.begin(), popularity_.end(), Uniform() * popularity_.back());
      request.key = static_cast<std::uint64_t>(found - popularity_.begin());
    } else {
      request.key = random_();
    }
    const std::size_t number = callers_.size() == 1 ? 0 : random_() % callers_.size();
    Picker& picker = *callers_[number].picker;
    const PickResult pick = picker.Pick(request);
    ++arrived_;
    if (pick.index < 0) {
      ++errors_;
      return;
    }
    if (policy_.picking.kind == BalancerKind::kConsistentHash && picker.OwnerOf(request.key) != pick.index) ++moved_;
    picker.member(pick.index).OnStart(now_ns_);
    const int i = pick.index;  // Those that have not joined yet are the last ones, so an index is a place.
    Replica& replica = replicas_[At(i)];
    ++replica.calls;
    if (joined_ns_ > 0 && now_ns_ < joined_ns_ + kNsPerSecond) {
      ++as_new_;
      ++replica.calls_as_new;
    }
    Call call;
    call.start_ns = now_ns_;
    call.caller = number;
    call.replica = i;
    call.probe = pick.probe;
    const Behaviour& b = replica.behaviour;
    const bool failing = b.fails_in_turns_ns > 0 && now_ns_ / b.fails_in_turns_ns % 2 == 1;
    std::int64_t end_ns = 0;
    if (failing || (b.fails_fast > 0 && Uniform() < b.fails_fast)) {
      call.outcome = Outcome::kFailure;
      call.fast = true;
      end_ns = now_ns_ + kNsPerMs / 2;
    } else {
      const double service_ns = kServiceNs * b.slowness * (0.5 - 0.5 * std::log(1 - Uniform()));
      std::int64_t& free_ns = *std::min_element(replica.free_ns.begin(), replica.free_ns.end());
      free_ns = std::max(free_ns, now_ns_) + static_cast<std::int64_t>(service_ns);
      end_ns = free_ns;
      if (scenario_.noise > 0 && Uniform() < scenario_.noise) call.outcome = Outcome::kFailure;
      if (end_ns > now_ns_ + kDeadlineNs) {
        end_ns = now_ns_ + kDeadlineNs;
        call.outcome = Outcome::kFailure;
      }
    }
    calls_.push_back(call);
    if (b.flap_ns > 0 || b.dies_ns > 0) replica.running.push_back(static_cast<std::uint32_t>(calls_.size() - 1));
    Push(end_ns, Event::kEnd, static_cast<int>(calls_.size() - 1));
  }

  void End(std::uint32_t number) {
    Call& call = calls_[number];
    if (call.done) return;
    call.done = true;
    const std::int64_t latency_ns = now_ns_ - call.start_ns;
    callers_[call.caller].members[At(call.replica)]->OnEnd(call.outcome, latency_ns, now_ns_, call.probe);
    if (call.outcome != Outcome::kSuccess) ++errors_;
    if (!call.fast) latencies_ms_.push_back(static_cast<double>(latency_ns) / 1e6);
  }

  Report Summary() {
    std::sort(latencies_ms_.begin(), latencies_ms_.end());
    const auto quantile = [&](double q) {
      return latencies_ms_.empty()
                 ? 0.0
                 : latencies_ms_[static_cast<std::size_t>(q * static_cast<double>(latencies_ms_.size() - 1))];
    };
    Report report;
    report.p50_ms = quantile(0.5);
    report.p99_ms = quantile(0.99);
    report.p999_ms = quantile(0.999);
    const auto all = static_cast<double>(arrived_);
    report.error_share = static_cast<double>(errors_) / all;
    const double mean = all / scenario_.members;
    std::uint64_t most = 0;
    for (const Replica& replica : replicas_) most = std::max(most, replica.calls);
    report.fairness = static_cast<double>(most) / mean;
    report.first_share = static_cast<double>(replicas_.front().calls) / mean;
    if (as_new_ > 0) {
      report.last_share =
          static_cast<double>(replicas_.back().calls_as_new) * scenario_.members / static_cast<double>(as_new_);
    }
    report.moved_share = static_cast<double>(moved_) / all;
    for (const Caller& caller : callers_) report.ejections += caller.group.ejections();
    return report;
  }

  const Scenario scenario_;
  const Policy policy_;
  std::deque<Caller> callers_;
  std::mt19937_64 random_;
  std::deque<Slot> slots_;
  std::vector<Replica> replicas_;
  std::vector<double> popularity_;
  std::priority_queue<Event> events_;
  std::vector<Call> calls_;
  std::vector<double> latencies_ms_;
  std::int64_t now_ns_ = 0;
  std::int64_t joined_ns_ = 0;
  std::uint64_t order_ = 0;
  std::uint64_t arrived_ = 0;
  std::uint64_t errors_ = 0;
  std::uint64_t moved_ = 0;
  std::uint64_t as_new_ = 0;
};

Policy Make(const std::string& name, BalancerKind kind, bool eject, bool penalty) {
  Policy policy;
  policy.name = name;
  policy.picking.kind = kind;
  policy.picking.seed = 11;
  policy.health.eject = eject;
  if (!penalty) policy.health.failure_latency_ns = 0;
  return policy;
}

Scenario First(const std::string& name, const Behaviour& behaviour, double capacity) {
  Scenario scenario;
  scenario.name = name;
  scenario.behaviour = [behaviour](int i) { return i == 0 ? behaviour : Behaviour(); };
  scenario.capacity = capacity;
  return scenario;
}

// The first `bad` of `members` fail all calls fast.
Scenario Bad(int members, int bad) {
  Scenario scenario;
  scenario.name = std::to_string(bad) + " of " + std::to_string(members) + " fail fast";
  scenario.members = members;
  scenario.capacity = members - bad;
  scenario.behaviour = [bad](int i) {
    Behaviour b;
    b.fails_fast = i < bad ? 1 : 0;
    return b;
  };
  return scenario;
}

Scenario Equal(int members, double seconds) {
  Scenario scenario;
  scenario.name = std::to_string(members) + " equal";
  scenario.members = members;
  scenario.duration_ns = static_cast<std::int64_t>(seconds * 1e9);
  return scenario;
}

void Head(const char* title, const char* first) {
  std::printf("\n### %s\n\n| %s | p50 ms | p99 ms | p99.9 ms | errors | max/mean | bad/mean | moved | ejections |\n",
              title, first);
  std::printf("|---|---:|---:|---:|---:|---:|---:|---:|---:|\n");
}

void Line(const std::string& name, const Report& r, bool keys) {
  std::printf("| %s | %.1f | %.1f | %.0f | %.3f%% | %.2f | %.3f | ", name.c_str(), r.p50_ms, r.p99_ms, r.p999_ms,
              100 * r.error_share, r.fairness, r.first_share);
  keys ? std::printf("%.2f%% | ", 100 * r.moved_share) : std::printf("- | ");
  std::printf("%llu |\n", static_cast<unsigned long long>(r.ejections));
}

void Line(const std::string& name, const Scenario& scenario, const Policy& policy) {
  Line(name, Simulation(scenario, policy).Run(), policy.picking.kind == BalancerKind::kConsistentHash);
}

void Scenarios() {
  std::vector<Policy> policies;
  for (const auto& [name, kind] :
       {std::pair("random", BalancerKind::kRandom), std::pair("round_robin", BalancerKind::kRoundRobin),
        std::pair("least_loaded", BalancerKind::kLeastLoaded),
        std::pair("consistent_hash", BalancerKind::kConsistentHash)}) {
    policies.push_back(Make(std::string(name) + ", plain", kind, false, false));
    if (kind == BalancerKind::kLeastLoaded) {
      policies.push_back(Make(std::string(name) + ", penalty alone", kind, false, true));
      policies.push_back(Make(std::string(name) + ", ejection alone", kind, true, false));
    }
    policies.push_back(Make(std::string(name) + ", both", kind, true, true));
  }
  std::vector<Scenario> scenarios;
  scenarios.push_back(Equal(10, 60));
  Behaviour b;
  b.slowness = 10;
  scenarios.push_back(First("one of 10 is 10 times slower", b, 9.1));
  b = {};
  b.fails_fast = 1;
  scenarios.push_back(First("one of 10 fails fast", b, 9));
  b.fails_fast = 0.5;
  scenarios.push_back(First("one of 10 fails every second call fast", b, 9.5));
  b = {};
  b.fails_in_turns_ns = 2 * kNsPerSecond;
  scenarios.push_back(First("one of 10 fails fast for 2 s, works for 2 s", b, 9.5));
  b = {};
  b.flap_ns = kNsPerSecond / 2;
  scenarios.push_back(First("one of 10 crashes every second and is away for half of it", b, 9.5));
  Scenario differ;
  differ.name = "heterogeneous: 5 members at speed 1/2, 5 at speed 2";
  differ.behaviour = [](int i) {
    Behaviour each;
    each.slowness = i < 5 ? 2 : 0.5;
    return each;
  };
  differ.capacity = 12.5;
  scenarios.push_back(differ);
  Scenario half;
  half.name = "5 of 10 die after 10 s";
  half.behaviour = [](int i) {
    Behaviour each;
    each.dies_ns = i < 5 ? 10 * kNsPerSecond : 0;
    return each;
  };
  half.capacity = 5;
  scenarios.push_back(half);
  for (const Scenario& scenario : scenarios) {
    Head(scenario.name.c_str(), "policy");
    for (const Policy& policy : policies) Line(policy.name, scenario, policy);
  }
}

void Sizes() {
  for (const int bad : {0, 1}) {
    Head(bad == 0 ? "Groups of other sizes, all equal" : "Groups of other sizes, one member fails fast",
         "members, policy");
    for (const auto& [members, seconds] :
         {std::pair(2, 120.0), std::pair(3, 120.0), std::pair(100, 20.0), std::pair(1000, 4.0)}) {
      Scenario scenario = bad == 0 ? Equal(members, seconds) : Bad(members, 1);
      scenario.duration_ns = static_cast<std::int64_t>(seconds * 1e9);
      for (const auto& [name, kind] :
           {std::pair("random", BalancerKind::kRandom), std::pair("round_robin", BalancerKind::kRoundRobin),
            std::pair("least_loaded", BalancerKind::kLeastLoaded),
            std::pair("consistent_hash", BalancerKind::kConsistentHash)}) {
        Line(std::to_string(members) + ", " + name, scenario, Make(name, kind, true, true));
      }
    }
  }
}

void Callers() {
  for (const bool slow : {false, true}) {
    Head(slow ? "Several callers, one of 10 members is 10 times slower" : "Several callers, 10 equal members",
         "callers, policy");
    for (const int callers : {1, 3, 10, 50}) {
      for (const auto& [name, kind] :
           {std::pair("random", BalancerKind::kRandom), std::pair("round_robin", BalancerKind::kRoundRobin),
            std::pair("least_loaded", BalancerKind::kLeastLoaded),
            std::pair("consistent_hash", BalancerKind::kConsistentHash)}) {
        Behaviour b;
        b.slowness = 10;
        Scenario scenario = slow ? First("", b, 9.1) : Equal(10, 60);
        scenario.callers = callers;
        Line(std::to_string(callers) + ", " + name, scenario, Make(name, kind, true, true));
      }
    }
  }
}

void Joining() {
  std::printf("\n### The last of the members joins after 10 s: its calls in its first second over the mean\n\n");
  std::printf("| policy | 3 members | 10 members | 100 members |\n|---|---:|---:|---:|\n");
  for (const auto& [name, kind] :
       {std::pair("random", BalancerKind::kRandom), std::pair("round_robin", BalancerKind::kRoundRobin),
        std::pair("least_loaded", BalancerKind::kLeastLoaded),
        std::pair("consistent_hash", BalancerKind::kConsistentHash)}) {
    std::printf("| %s |", name);
    for (const int members : {3, 10, 100}) {
      Scenario scenario = Equal(members, 12);
      scenario.load = 0.8;
      scenario.capacity = members - 1;
      scenario.behaviour = [members](int i) {
        Behaviour b;
        b.joins_ns = i == members - 1 ? 10 * kNsPerSecond : 0;
        return b;
      };
      std::printf(" %.2f |", Simulation(scenario, Make(name, kind, true, true)).Run().last_share);
    }
    std::printf("\n");
  }
}

// Of 100,000 keys, those whose owner changes when a member joins (the same ones move back when it leaves).
void KeysMoved() {
  std::printf("\n### A member joins: share of all keys that move, over 1 / members\n\n");
  std::printf("| members before | 16 virtual nodes | 128 | 1024 |\n|---|---:|---:|---:|\n");
  for (const int members : {2, 9, 99, 999}) {
    std::printf("| %d |", members);
    for (const std::uint32_t nodes : {16U, 128U, 1024U}) {
      std::mt19937_64 random(kSeed);  // NOLINT(bugprone-random-generator-seed): runs must repeat
      GroupHealth group{HealthOptions()};
      std::deque<Slot> slots;
      std::vector<std::unique_ptr<Member>> all;
      std::vector<Member*> list;
      PickerOptions options;
      options.kind = BalancerKind::kConsistentHash;
      options.virtual_nodes = nodes;
      std::unique_ptr<Picker> before;
      for (int i = 0; i <= members; ++i) {
        if (i == members) before = std::make_unique<Picker>(options, list);
        ActorId id{};
        for (std::size_t b = 0; b < 8; ++b) id[b] = static_cast<std::uint8_t>(random() >> (8 * b));
        slots.emplace_back(id);
        all.push_back(std::make_unique<Member>(&group, &slots.back()));
        list.push_back(all.back().get());
      }
      const Picker after(options, list);
      int moved = 0;
      for (std::uint64_t key = 0; key < 100'000; ++key) moved += before->OwnerOf(key) != after.OwnerOf(key) ? 1 : 0;
      std::printf(" %.2f |", moved / 100'000.0 * (members + 1));
    }
    std::printf("\n");
  }
}

void Defaults() {
  Head("failure_latency: one of 10 fails fast, least_loaded without ejection", "failure_latency");
  for (const double seconds : {0.0, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0}) {
    Policy policy = Make("", BalancerKind::kLeastLoaded, false, true);
    policy.health.failure_latency_ns = static_cast<std::int64_t>(seconds * 1e9);
    Line(std::to_string(seconds).substr(0, 5) + " s", Bad(10, 1), policy);
  }
  Head("failure_latency: 3% of all calls fail anywhere, least_loaded without ejection", "failure_latency");
  for (const double seconds : {0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0}) {
    Policy policy = Make("", BalancerKind::kLeastLoaded, false, true);
    policy.health.failure_latency_ns = static_cast<std::int64_t>(seconds * 1e9);
    Scenario noisy = Equal(10, 60);
    noisy.noise = 0.03;
    Line(std::to_string(seconds).substr(0, 5) + " s", noisy, policy);
  }
  for (const bool noise : {false, true}) {
    Head(noise ? "consecutive_failures: 20% of all calls fail anywhere, round_robin"
               : "consecutive_failures: one of 10 fails every second call fast, round_robin",
         "failures in a row");
    for (const std::uint32_t row : {2U, 3U, 5U, 7U, 10U}) {
      Policy policy = Make("", BalancerKind::kRoundRobin, true, true);
      policy.health.consecutive_failures = row;
      Behaviour b;
      b.fails_fast = 0.5;
      Scenario scenario = noise ? Equal(10, 60) : First("", b, 9.5);
      scenario.noise = noise ? 0.2 : 0;
      Line(std::to_string(row), scenario, policy);
    }
  }
  Head("Ejection times: one of 10 fails fast, or in turns of 2 s; round_robin", "base, longest");
  for (const bool turns : {false, true}) {
    for (const auto& [base, longest] :
         {std::pair(0.1, 30.0), std::pair(0.3, 30.0), std::pair(1.0, 30.0), std::pair(3.0, 30.0), std::pair(10.0, 30.0),
          std::pair(1.0, 1.0), std::pair(1.0, 5.0), std::pair(1.0, 300.0)}) {
      Policy policy = Make("", BalancerKind::kRoundRobin, true, true);
      policy.health.base_ejection_ns = static_cast<std::int64_t>(base * 1e9);
      policy.health.max_ejection_ns = static_cast<std::int64_t>(longest * 1e9);
      Behaviour b;
      if (turns) {
        b.fails_in_turns_ns = 2 * kNsPerSecond;
      } else {
        b.fails_fast = 1;
      }
      std::array<char, 64> name{};
      std::snprintf(name.data(), name.size(), "%s: %.1f s, %.0f s", turns ? "in turns" : "always", base, longest);
      Line(name.data(), First("", b, 9), policy);
    }
  }
  Head("max_ejected_share: some of 10 fail fast; round_robin", "bad, share");
  for (const int bad : {2, 4, 5, 6, 8}) {
    for (const double share : {0.1, 0.3, 0.5, 0.7, 1.0}) {
      Policy policy = Make("", BalancerKind::kRoundRobin, true, true);
      policy.health.max_ejected_share = share;
      std::array<char, 64> name{};
      std::snprintf(name.data(), name.size(), "%d bad, %.0f%%", bad, 100 * share);
      Line(name.data(), Bad(10, bad), policy);
    }
  }
  Head("max_ejected_share under overload: all are healthy, load 120%, every miss is a failure; round_robin", "share");
  for (const double share : {0.1, 0.3, 0.5, 0.7, 1.0}) {
    for (const double panic : {0.5, 1.0}) {
      Policy policy = Make("", BalancerKind::kRoundRobin, true, true);
      policy.health.max_ejected_share = share;
      policy.picking.panic_share = panic;
      Scenario scenario = Equal(10, 60);
      scenario.load = 1.2;
      std::array<char, 64> name{};
      std::snprintf(name.data(), name.size(), "%.0f%%, panic above %.0f%%", 100 * share, 100 * panic);
      Line(name.data(), scenario, policy);
    }
  }
  for (const int at_once : {1, 16}) {
    const std::string title = "bounded_load: consistent_hash, 10 members that serve " + std::to_string(at_once) +
                              " at once, 10,000 keys, Zipf 0.9";
    Head(title.c_str(), "load, bound");
    for (const double load : {0.2, 0.6}) {
      for (const double bound : {1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 1000.0}) {
        Policy policy = Make("", BalancerKind::kConsistentHash, true, true);
        policy.picking.bounded_load = bound;
        Scenario scenario = Equal(10, at_once > 1 ? 15 : 60);
        scenario.at_once = at_once;
        scenario.zipf = 0.9;
        scenario.load = load;
        std::array<char, 64> name{};
        std::snprintf(name.data(), name.size(), "%.0f%%, %.2f", 100 * load, bound);
        Line(name.data(), scenario, policy);
      }
    }
  }
  Head("virtual_nodes: consistent_hash without a bound, load 40%", "members, nodes");
  for (const int members : {3, 10, 100}) {
    for (const std::uint32_t nodes : {1U, 16U, 64U, 128U, 256U, 1024U}) {
      Policy policy = Make("", BalancerKind::kConsistentHash, true, true);
      policy.picking.virtual_nodes = nodes;
      policy.picking.bounded_load = 1000;
      Scenario scenario = Equal(members, members >= 100 ? 10 : 60);
      scenario.load = 0.4;
      Line(std::to_string(members) + ", " + std::to_string(nodes), scenario, policy);
    }
  }
  Head("Lost calls as failures: one of 10 crashes every second; least_loaded", "lost calls");
  for (const bool failure : {false, true}) {
    Behaviour b;
    b.flap_ns = kNsPerSecond / 2;
    Scenario scenario = First("", b, 9.5);
    scenario.loss_is_failure = failure;
    Line(failure ? "count as failures" : "say nothing", scenario, Make("", BalancerKind::kLeastLoaded, true, true));
  }
}

}  // namespace
}  // namespace actorsub

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  actorsub::Scenarios();
  actorsub::Sizes();
  actorsub::Callers();
  actorsub::Joining();
  actorsub::KeysMoved();
  actorsub::Defaults();
  return 0;
}
