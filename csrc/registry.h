// From a 16-byte actor id to its one slot in this process.
//
// Thread safety: every method, from any thread, without the GIL. One mutex, held for a map operation and never while
// calling out, so it cannot take part in a deadlock.
//
// Invariants
//  1. At any time there is at most one live slot per id; two holders of one id share it, counters included.
//  2. A slot lives exactly as long as some `SlotRef` to it.
//  3. Only wrapping, unpickling and dropping a handle come here; submitting a call does not.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>

#include "mutex.h"
#include "slot.h"

namespace actorsub {

class Registry;

// Shared ownership of a slot. Movable and copyable; empty after a move. A SlotRef itself is not thread-safe.
class SlotRef {
 public:
  SlotRef() = default;
  SlotRef(const SlotRef& other);
  SlotRef(SlotRef&& other) noexcept
      : registry_(std::exchange(other.registry_, nullptr)), slot_(std::exchange(other.slot_, nullptr)) {}
  SlotRef& operator=(SlotRef other) noexcept {
    std::swap(registry_, other.registry_);
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~SlotRef() { Reset(); }

  void Reset();
  Slot* get() const { return slot_; }
  Slot* operator->() const { return slot_; }
  explicit operator bool() const { return slot_ != nullptr; }

 private:
  friend class Registry;
  SlotRef(Registry* registry, Slot* slot) : registry_(registry), slot_(slot) {}  // Takes over one counted reference.

  Registry* registry_ = nullptr;
  Slot* slot_ = nullptr;
};

class Registry {
 public:
  Registry() = default;
  // Requires: no SlotRef of this registry is left.
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // The slot of `id`, made when there is none.
  SlotRef Acquire(const ActorId& id) ACTORSUB_EXCLUDES(mutex_);
  std::size_t size() const ACTORSUB_EXCLUDES(mutex_);

 private:
  friend class SlotRef;
  struct IdHash {
    std::size_t operator()(const ActorId& id) const;
  };

  void AddReference(Slot* slot) ACTORSUB_EXCLUDES(mutex_);
  // Destroys the slot with its last reference.
  void DropReference(Slot* slot) ACTORSUB_EXCLUDES(mutex_);

  mutable Mutex mutex_;
  std::unordered_map<ActorId, std::unique_ptr<Slot>, IdHash> slots_ ACTORSUB_GUARDED_BY(mutex_);
};

}  // namespace actorsub
