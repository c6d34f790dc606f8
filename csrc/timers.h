// Timers by number: set, cancelled, fired, taken. The sentinel's, which sleeps until the next one.
//
// Passive: no thread, no clock, no lock. Not thread-safe; whoever owns it guards it.
//
// The way of a timer:  Add --(its time is over)--> Fire --> Take. Cancel, or an Add with the same id, ends an earlier
// one wherever it is, so that it is never taken.
//
// Invariants
//  1. Each Add is taken at most once, after a Fire whose `now_ns` was at or past its deadline, and not after its end.
//  2. Fire comes to timers in the order of their deadlines; Take gives them in the order in which they fired.
//  3. Deletion is lazy, but what is dead never outgrows what is alive by more than twice and 64 entries.
//  4. `NextNs` is never later than the earliest deadline; it may be earlier, by that of a dead timer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace actorsub {

class Timers {
 public:
  struct Fired {
    std::uint64_t id = 0;
    std::int64_t seen_ns = 0;  // `now_ns` of the Fire.
  };

  explicit Timers(std::size_t most) : most_(most) {}

  // In place of an earlier one with this id. False: there are as many as may be.
  bool Add(std::uint64_t id, std::int64_t deadline_ns);
  // False: there is none that was not taken.
  bool Cancel(std::uint64_t id) { return timers_.erase(id) != 0; }

  std::int64_t NextNs() const;
  // Looks at `most` entries at most, so that a lock is not held for long. Returns how many fired; `more`: call again.
  std::size_t Fire(std::int64_t now_ns, std::size_t most, bool* more);

  // An upper bound of what Take will give.
  std::size_t fired() const { return fired_.size(); }
  void Take(std::vector<Fired>* taken);

  std::size_t size() const { return timers_.size(); }
  std::size_t entries() const { return heap_.size() + fired_.size(); }
  void Clear();

 private:
  struct Timer {
    std::uint64_t serial = 0;
    bool fired = false;
  };
  struct Entry {
    std::int64_t at_ns = 0;  // Its deadline; in `fired_`: when it was seen.
    std::uint64_t id = 0;
    std::uint64_t serial = 0;
    // For std::push_heap, whose top is the greatest.
    friend bool operator<(const Entry& a, const Entry& b) { return a.at_ns > b.at_ns; }
  };

  bool IsCurrent(const Entry& entry, bool fired) const;
  void Sweep(std::vector<Entry>* entries, bool fired) const;

  std::size_t most_;
  std::uint64_t next_serial_ = 1;
  std::unordered_map<std::uint64_t, Timer> timers_;
  // An entry counts only while `timers_` names its serial.
  std::vector<Entry> heap_;
  std::vector<Entry> fired_;
};

}  // namespace actorsub
