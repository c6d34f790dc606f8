#include "registry.h"

#include <cassert>
#include <cstring>
#include <memory>

namespace actorsub {

SlotRef::SlotRef(const SlotRef& other) : registry_(other.registry_), slot_(other.slot_) {
  if (slot_ != nullptr) {
    registry_->AddReference(slot_);
  }
}

void SlotRef::Reset() {
  Registry* const registry = std::exchange(registry_, nullptr);
  Slot* const slot = std::exchange(slot_, nullptr);
  if (slot != nullptr) {
    registry->DropReference(slot);
  }
}

Registry::~Registry() { assert(size() == 0); }

SlotRef Registry::Acquire(const ActorId& id) {
  MutexLock lock(mutex_);
  auto found = slots_.find(id);
  if (found == slots_.end()) {
    found = slots_.emplace(id, std::make_unique<Slot>(id)).first;
  }
  ++found->second->references_;
  return SlotRef(this, found->second.get());
}

std::size_t Registry::size() const {
  MutexLock lock(mutex_);
  return slots_.size();
}

std::size_t Registry::IdHash::operator()(const ActorId& id) const {
  // The id ends in the job id, the same for all of a job's actors; what comes before is random.
  std::uint64_t words[2];
  static_assert(sizeof(words) == kActorIdSize);
  std::memcpy(words, id.data(), sizeof(words));
  return static_cast<std::size_t>(words[0] ^ (words[1] * 0x9E3779B97F4A7C15U));
}

void Registry::AddReference(Slot* slot) {
  MutexLock lock(mutex_);
  ++slot->references_;
}

void Registry::DropReference(Slot* slot) {
  MutexLock lock(mutex_);
  assert(slot->references_ > 0);
  if (--slot->references_ == 0) {
    slots_.erase(slot->id());
  }
}

}  // namespace actorsub
