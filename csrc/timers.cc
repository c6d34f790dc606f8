#include "timers.h"

#include <algorithm>

#include "clock.h"

namespace actorsub {

bool Timers::IsCurrent(const Entry& entry, bool fired) const {
  const auto at = timers_.find(entry.id);
  return at != timers_.end() && at->second.serial == entry.serial && at->second.fired == fired;
}

void Timers::Sweep(std::vector<Entry>* entries, bool fired) const {
  const auto is_dead = [&](const Entry& entry) { return !IsCurrent(entry, fired); };
  entries->erase(std::remove_if(entries->begin(), entries->end(), is_dead), entries->end());
}

bool Timers::Add(std::uint64_t id, std::int64_t deadline_ns) {
  if (timers_.size() >= most_ && timers_.count(id) == 0) return false;
  const std::size_t limit = 2 * timers_.size() + 64;
  if (heap_.size() > limit) {
    Sweep(&heap_, false);
    std::make_heap(heap_.begin(), heap_.end());
  }
  if (fired_.size() > limit) Sweep(&fired_, true);
  const std::uint64_t serial = next_serial_++;
  heap_.push_back(Entry{deadline_ns, id, serial});
  std::push_heap(heap_.begin(), heap_.end());
  timers_[id] = Timer{serial, false};
  return true;
}

std::int64_t Timers::NextNs() const { return heap_.empty() ? kNeverNs : heap_.front().at_ns; }

std::size_t Timers::Fire(std::int64_t now_ns, std::size_t most, bool* more) {
  std::size_t count = 0;
  std::size_t looked_at = 0;
  while (!heap_.empty() && heap_.front().at_ns <= now_ns && looked_at < most) {
    ++looked_at;
    Entry entry = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end());
    heap_.pop_back();
    const auto at = timers_.find(entry.id);
    if (at == timers_.end() || at->second.serial != entry.serial) continue;
    at->second.fired = true;
    entry.at_ns = now_ns;
    fired_.push_back(entry);
    ++count;
  }
  *more = looked_at == most;
  return count;
}

void Timers::Take(std::vector<Fired>* taken) {
  for (const Entry& entry : fired_) {
    if (!IsCurrent(entry, true)) continue;
    timers_.erase(entry.id);
    taken->push_back(Fired{entry.id, entry.at_ns});
  }
  fired_.clear();
}

void Timers::Clear() {
  timers_.clear();
  heap_.clear();
  fired_.clear();
}

}  // namespace actorsub
