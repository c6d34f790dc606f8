// Where the core gets its time from, so that tests can bring their own.
//
// Thread safety: every method, from any thread.
//
// Invariants
//  1. Times are nanoseconds on one monotonic scale; they are never wall-clock times and never go back.
//  2. Only differences mean anything, and only within one process.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <limits>

namespace actorsub {

inline constexpr std::int64_t kNsPerUs = 1'000;
inline constexpr std::int64_t kNsPerMs = 1'000'000;
inline constexpr std::int64_t kNsPerSecond = 1'000'000'000;
// As a deadline or a limit: never.
inline constexpr std::int64_t kNeverNs = std::numeric_limits<std::int64_t>::max();

// `a_ns + b_ns` for non-negative terms; stays at kNeverNs instead of wrapping.
constexpr std::int64_t AddNs(std::int64_t a_ns, std::int64_t b_ns) {
  return a_ns > kNeverNs - b_ns ? kNeverNs : a_ns + b_ns;
}

class Clock {
 public:
  Clock() = default;
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  virtual ~Clock() = default;

  virtual std::int64_t NowNs() const = 0;

  // CLOCK_MONOTONIC, which is also what Python's time.monotonic_ns() reads: deadlines may cross the border. It stands
  // still while the machine is suspended, so that a sleep is not taken for a silence of everybody else.
  static const Clock& Monotonic();
};

class MonotonicClock final : public Clock {
 public:
  std::int64_t NowNs() const override {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * kNsPerSecond + now.tv_nsec;
  }
};

inline const Clock& Clock::Monotonic() {
  // Never destroyed: threads may still read the time while static objects go away at exit.
  static const MonotonicClock* const clock = new MonotonicClock;
  return *clock;
}

// Time that moves only when told to. It wakes nobody: whoever sleeps on it must be poked after `Advance`.
class ManualClock final : public Clock {
 public:
  explicit ManualClock(std::int64_t start_ns = kNsPerSecond) : now_ns_(start_ns) {}
  std::int64_t NowNs() const override { return now_ns_.load(std::memory_order_acquire); }
  void Advance(std::int64_t by_ns) { now_ns_.fetch_add(by_ns, std::memory_order_acq_rel); }

 private:
  std::atomic<std::int64_t> now_ns_;
};

}  // namespace actorsub
