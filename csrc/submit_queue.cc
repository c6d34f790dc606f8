#include "submit_queue.h"

#include <algorithm>
#include <new>

namespace actorsub {

namespace {

// For std::push_heap and its kin, which put the greatest first.
struct Later {
  template <typename Item>
  bool operator()(const Item& a, const Item& b) const {
    return a.at_ns > b.at_ns;
  }
};

}  // namespace

const char* EndName(End end) noexcept {
  switch (end) {
    case End::kDeadline:
      return "deadline";
    case End::kAway:
      return "away";
    case End::kDead:
      return "dead";
    case End::kPending:
      return "pending";
    case End::kLost:
      return "lost";
    case End::kClosed:
      return "closed";
  }
  return "invalid";
}

namespace {

// What a call is told that the state of its actor refuses. Only these states refuse (gate.h).
Verdict RefusalIn(ActorState state) noexcept {
  if (state == ActorState::kPending) return Verdict::kRefusedPending;
  return state == ActorState::kDead ? Verdict::kRefusedDead : Verdict::kRefusedAway;
}

// The same for a call that waited.
End EndIn(ActorState state) noexcept {
  if (state == ActorState::kPending) return End::kPending;
  return state == ActorState::kDead ? End::kDead : End::kAway;
}

}  // namespace

SubmitQueue::Look SubmitQueue::LookAtSlot() const noexcept {
  Look look{};
  // Ends as soon as no incarnation ends between two loads.
  do {
    look.mark = slot_->losses();
    look.word = slot_->word();
  } while (look.mark != slot_->losses());
  return look;
}

// Entries and lists.

const SubmitQueue::Entry* SubmitQueue::Find(Ticket ticket) const noexcept {
  const Index index = IndexOf(ticket);
  // What lies beyond `fresh_` may be left over from before the queue ran empty.
  if (index >= fresh_) return nullptr;
  const Entry& entry = At(index);
  return entry.stage != Stage::kFree && entry.serial == ticket >> 32 ? &entry : nullptr;
}

SubmitQueue::Entry* SubmitQueue::Find(Ticket ticket) noexcept {
  return const_cast<Entry*>(static_cast<const SubmitQueue*>(this)->Find(ticket));
}

void SubmitQueue::ReserveEntry(bool deadline) {
  if (free_ == kNone && fresh_ == chunks_.size() * kChunkSize) {
    if (chunks_.size() == kMaxChunks) throw std::bad_alloc();
    chunks_.push_back(std::make_unique<Chunk>());
  }
  if (deadline && heap_.size() == heap_.capacity()) heap_.reserve(std::max(kHeapSlack, 2 * heap_.size()));
}

SubmitQueue::Index SubmitQueue::NewEntry(const CallRules& rules) noexcept {
  Index index = free_;
  if (index != kNone) {
    free_ = At(index).next;
  } else {
    index = fresh_++;
  }
  ++used_;
  if (++last_serial_ == 0) ++last_serial_;  // A ticket is never 0.
  Entry& entry = At(index);
  entry.deadline_ns = rules.deadline_ns;
  entry.serial = last_serial_;
  entry.window = rules.window;
  entry.on_pending = rules.on_pending;
  entry.away = rules.away;
  entry.ended = false;
  if (rules.deadline_ns != kNeverNs) PushDeadline(index);
  return index;
}

void SubmitQueue::FreeEntry(Index index) noexcept {
  Entry& entry = At(index);
  const bool deadline_lives = entry.deadline_ns != kNeverNs && !entry.ended;
  entry.stage = Stage::kFree;
  entry.next = free_;
  free_ = index;
  if (deadline_lives) DropDeadline();
  if (--used_ != 0) return;
  heap_.clear();
  if (chunks_.size() <= kKeptChunks) return;
  // After a flood. Serial numbers go on, so tickets from before stay unknown although their places begin anew.
  chunks_.resize(kKeptChunks);
  free_ = kNone;
  fresh_ = 0;
  std::vector<Deadline>().swap(heap_);
}

void SubmitQueue::Append(List* list, Index index) noexcept {
  Entry& entry = At(index);
  entry.next = kNone;
  entry.previous = list->tail;
  (list->tail == kNone ? list->head : At(list->tail).next) = index;
  list->tail = index;
}

void SubmitQueue::Unlink(List* list, Index index) noexcept {
  const Entry& entry = At(index);
  (entry.previous == kNone ? list->head : At(entry.previous).next) = entry.next;
  (entry.next == kNone ? list->tail : At(entry.next).previous) = entry.previous;
}

void SubmitQueue::LeaveLine(Index index) noexcept {
  const Entry& entry = At(index);
  if (entry.stage == Stage::kReleasing) {
    --releasing_;
    --in_flight_;
  } else {
    --waiting_;
    if (first_waiting_ == index) first_waiting_ = entry.next;
  }
  Unlink(&line_, index);
}

void SubmitQueue::RecallReleasing() noexcept {
  for (Index index = line_.head; index != first_waiting_; index = At(index).next) At(index).stage = Stage::kWaiting;
  first_waiting_ = line_.head;
  waiting_ += releasing_;
  in_flight_ -= releasing_;
  counters_.recalled += releasing_;
  releasing_ = 0;
}

void SubmitQueue::EnterLedger(Index index, std::uint32_t mark) noexcept {
  Entry& entry = At(index);
  entry.stage = Stage::kBegun;
  entry.mark = mark;
  Append(&ledger_, index);
  ++in_flight_;
  ++counters_.sent;
}

void SubmitQueue::LeaveLedger(Index index) noexcept {
  Unlink(&ledger_, index);
  --in_flight_;
}

bool SubmitQueue::ReleaseIsDue() const noexcept {
  if (waiting_ == 0 || SenderAtWork()) return false;
  const Entry& head = At(first_waiting_);
  return HasRoom(head.window) && GateOf(slot_->word(), head) == Gate::kPass;
}

// Deadlines.

bool SubmitQueue::IsLive(const Deadline& item) const noexcept {
  const Entry* const entry = Find(item.ticket);
  return entry != nullptr && !entry->ended;
}

std::size_t SubmitQueue::CountPassed(std::int64_t now_ns, std::size_t at) const noexcept {
  // No deeper than the heap is high, and only into branches that have passed.
  if (at >= heap_.size() || heap_[at].at_ns > now_ns) return 0;
  return (IsLive(heap_[at]) ? 1U : 0U) + CountPassed(now_ns, 2 * at + 1) + CountPassed(now_ns, 2 * at + 2);
}

void SubmitQueue::PushDeadline(Index index) noexcept {
  heap_.push_back(Deadline{At(index).deadline_ns, TicketOf(index)});  // Reserved before.
  std::push_heap(heap_.begin(), heap_.end(), Later());
  ++live_deadlines_;
}

void SubmitQueue::DropDeadline() noexcept {
  --live_deadlines_;
  if (heap_.size() <= 2 * live_deadlines_ + kHeapSlack) return;
  const auto is_dead = [this](const Deadline& item) ACTORSUB_REQUIRES(mutex_) { return !IsLive(item); };
  heap_.erase(std::remove_if(heap_.begin(), heap_.end(), is_dead), heap_.end());
  std::make_heap(heap_.begin(), heap_.end(), Later());
}

void SubmitQueue::PopDeadline() noexcept {
  std::pop_heap(heap_.begin(), heap_.end(), Later());
  heap_.pop_back();
}

std::int64_t SubmitQueue::EarliestDeadline() noexcept {
  while (!heap_.empty() && !IsLive(heap_.front())) PopDeadline();
  return heap_.empty() ? kNeverNs : heap_.front().at_ns;
}

// The calls' side.

Admission SubmitQueue::Admit(const CallRules& rules, std::int64_t now_ns) {
  Admission admission;
  const MutexLock lock(mutex_);
  const Look look = LookAtSlot();
  admission.word = look.word;
  if (closed_) return admission;
  const ActorState state = StateOf(look.word);
  const Gate gate = GateFor(state, rules.away, rules.on_pending);
  if (gate == Gate::kRefuse) {
    admission.verdict = RefusalIn(state);
    ++counters_.refused_state;
    return admission;
  }
  if (rules.deadline_ns <= now_ns) {
    admission.verdict = Verdict::kExpired;
    ++counters_.expired_here;
    return admission;
  }
  const bool send = gate == Gate::kPass && waiting_ == 0 && !SenderAtWork() && HasRoom(rules.window);
  if (!send && waiting_ + releasing_ >= rules.max_queued) {
    admission.verdict = Verdict::kFull;
    ++counters_.refused_full;
    return admission;
  }

  ReserveEntry(rules.deadline_ns != kNeverNs);
  const Index index = NewEntry(rules);
  admission.ticket = TicketOf(index);
  if (rules.deadline_ns < armed_ns_) {
    armed_ns_ = rules.deadline_ns;
    admission.arm_ns = rules.deadline_ns;
  }
  if (send) {
    EnterLedger(index, look.mark);
    admission.verdict = Verdict::kSend;
    admission.mark = look.mark;
    return admission;
  }
  At(index).stage = Stage::kWaiting;
  Append(&line_, index);
  if (first_waiting_ == kNone) first_waiting_ = index;
  ++waiting_;
  admission.verdict = Verdict::kWait;
  admission.release = ReleaseIsDue();
  return admission;
}

Completion SubmitQueue::Complete(Ticket ticket) noexcept {
  Completion completion;
  const MutexLock lock(mutex_);
  const Entry* const entry = Find(ticket);
  if (entry == nullptr || entry->stage != Stage::kBegun) {
    ++counters_.stray;
    return completion;
  }
  completion.verdict = entry->ended ? CompleteVerdict::kLate : CompleteVerdict::kDelivered;
  ++(entry->ended ? counters_.late : counters_.completed);
  LeaveLedger(IndexOf(ticket));
  FreeEntry(IndexOf(ticket));
  completion.release = ReleaseIsDue();
  return completion;
}

Aborted SubmitQueue::Abort(Ticket ticket) noexcept {
  Aborted aborted;
  const MutexLock lock(mutex_);
  if (sending_ == ticket) sending_ = kNoTicket;
  const Entry* const entry = Find(ticket);
  if (entry != nullptr && entry->stage == Stage::kBegun) {
    aborted.taken_back = !entry->ended;
    if (!entry->ended) ++counters_.aborted;
    LeaveLedger(IndexOf(ticket));
    FreeEntry(IndexOf(ticket));
  }
  aborted.release = ReleaseIsDue();
  return aborted;
}

Cancellation SubmitQueue::Cancel(Ticket ticket) noexcept {
  Cancellation cancellation;
  const MutexLock lock(mutex_);
  const Entry* const entry = Find(ticket);
  if (entry == nullptr || entry->ended) return cancellation;
  if (entry->stage == Stage::kBegun) {
    cancellation.verdict = CancelVerdict::kSent;
    return cancellation;
  }
  LeaveLine(IndexOf(ticket));
  FreeEntry(IndexOf(ticket));
  ++counters_.cancelled_here;
  cancellation.verdict = CancelVerdict::kCancelledHere;
  cancellation.release = ReleaseIsDue();
  return cancellation;
}

bool SubmitQueue::Abandon(Ticket ticket) noexcept {
  const MutexLock lock(mutex_);
  Entry* const entry = Find(ticket);
  if (entry == nullptr || entry->stage != Stage::kBegun || entry->ended) return false;
  entry->ended = true;
  if (entry->deadline_ns != kNeverNs) DropDeadline();
  ++counters_.abandoned;
  return true;
}

// The sender's side.

void SubmitQueue::Release(std::int64_t now_ns, std::size_t max, std::vector<Ticket>* tickets,
                          std::vector<Ended>* ended) {
  const MutexLock lock(mutex_);
  sending_ = kNoTicket;
  RecallReleasing();
  const std::uint64_t word = slot_->word();
  // First only counted, so that what may fail to allocate comes before what changes.
  std::size_t leaving = 0;
  std::size_t passed = 0;
  for (Index index = line_.head; index != kNone && leaving < max; index = At(index).next) {
    const Entry& entry = At(index);
    if (entry.deadline_ns <= now_ns) {
      ++passed;
      continue;
    }
    const bool has_room = entry.window == 0 || in_flight_ + leaving < entry.window;
    if (!has_room || GateOf(word, entry) != Gate::kPass) break;
    ++leaving;
  }
  tickets->reserve(tickets->size() + leaving);
  ended->reserve(ended->size() + passed);

  for (std::size_t left = leaving + passed; left != 0; --left) {
    const Index index = first_waiting_;
    Entry& entry = At(index);
    if (entry.deadline_ns <= now_ns) {
      ended->push_back(Ended{TicketOf(index), End::kDeadline, /*sent=*/false});
      ++counters_.expired_here;
      LeaveLine(index);
      FreeEntry(index);
      continue;
    }
    tickets->push_back(TicketOf(index));
    entry.stage = Stage::kReleasing;
    first_waiting_ = entry.next;
    --waiting_;
    ++releasing_;
    ++in_flight_;
  }
}

Begin SubmitQueue::BeginSend(Ticket ticket) noexcept {
  Begin begin;
  const MutexLock lock(mutex_);
  sending_ = kNoTicket;
  const Entry* const entry = Find(ticket);
  if (entry == nullptr || entry->stage == Stage::kBegun) return begin;
  const Index index = IndexOf(ticket);
  const Look look = LookAtSlot();
  begin.word = look.word;
  if (entry->stage == Stage::kWaiting || index != line_.head || GateOf(look.word, *entry) != Gate::kPass) {
    RecallReleasing();
    begin.verdict = BeginVerdict::kBack;
    return begin;
  }
  LeaveLine(index);
  EnterLedger(index, look.mark);
  sending_ = ticket;
  begin.verdict = BeginVerdict::kGo;
  begin.mark = look.mark;
  return begin;
}

void SubmitQueue::EndSend(Ticket ticket) noexcept {
  const MutexLock lock(mutex_);
  if (sending_ == ticket) sending_ = kNoTicket;
}

// What comes from elsewhere: time, the slot, the end.

Expiry SubmitQueue::Expire(std::int64_t now_ns, std::vector<Ended>* ended) {
  Expiry expiry;
  const MutexLock lock(mutex_);
  ended->reserve(ended->size() + CountPassed(now_ns, 0));
  while (!heap_.empty() && heap_.front().at_ns <= now_ns) {
    const Deadline item = heap_.front();
    PopDeadline();
    if (!IsLive(item)) continue;
    const Index index = IndexOf(item.ticket);
    Entry& entry = At(index);
    const bool sent = entry.stage == Stage::kBegun;
    ended->push_back(Ended{item.ticket, End::kDeadline, sent});
    if (sent) {
      entry.ended = true;
      DropDeadline();
      ++counters_.expired_there;
    } else {
      LeaveLine(index);
      FreeEntry(index);
      ++counters_.expired_here;
    }
  }
  armed_ns_ = EarliestDeadline();
  expiry.next_ns = armed_ns_;
  expiry.release = ReleaseIsDue();
  return expiry;
}

std::int64_t SubmitQueue::next_deadline_ns() noexcept {
  const MutexLock lock(mutex_);
  return EarliestDeadline();
}

std::int64_t SubmitQueue::Rearm() noexcept {
  const MutexLock lock(mutex_);
  armed_ns_ = EarliestDeadline();
  return armed_ns_;
}

bool SubmitQueue::Review(std::vector<Ended>* ended) {
  const MutexLock lock(mutex_);
  const std::uint64_t word = slot_->word();
  const ActorState state = StateOf(word);
  // No rules refuse a state that lets the strictest pass.
  if (GateFor(state, AwayRule::kRefuse, PendingRule::kRefuse) != Gate::kRefuse) return ReleaseIsDue();
  std::size_t refused = 0;
  for (Index index = line_.head; index != kNone; index = At(index).next) {
    if (GateOf(word, At(index)) == Gate::kRefuse) ++refused;
  }
  ended->reserve(ended->size() + refused);
  for (Index index = line_.head; index != kNone;) {
    const Entry& entry = At(index);
    const Index next = entry.next;
    if (GateOf(word, entry) == Gate::kRefuse) {
      ended->push_back(Ended{TicketOf(index), EndIn(state), /*sent=*/false});
      LeaveLine(index);
      FreeEntry(index);
    }
    index = next;
  }
  counters_.refused_state += refused;
  return ReleaseIsDue();
}

bool SubmitQueue::has_lost() const noexcept {
  const MutexLock lock(mutex_);
  return ledger_.head != kNone && At(ledger_.head).mark != slot_->losses();
}

bool SubmitQueue::FailLost(std::vector<Ended>* ended) {
  const MutexLock lock(mutex_);
  // Marks only grow along the ledger, and `losses` is at or past the last: unequal is older, also when it wraps.
  const std::uint32_t losses = slot_->losses();
  std::size_t lost = 0;
  for (Index index = ledger_.head; index != kNone && At(index).mark != losses; index = At(index).next) {
    if (!At(index).ended) ++lost;
  }
  ended->reserve(ended->size() + lost);
  while (ledger_.head != kNone && At(ledger_.head).mark != losses) {
    const Index index = ledger_.head;
    if (!At(index).ended) ended->push_back(Ended{TicketOf(index), End::kLost, /*sent=*/true});
    LeaveLedger(index);
    FreeEntry(index);
  }
  counters_.lost += lost;
  return ReleaseIsDue();
}

void SubmitQueue::CloseAll(std::vector<Ended>* ended) {
  const MutexLock lock(mutex_);
  ended->reserve(ended->size() + used_);
  closed_ = true;
  sending_ = kNoTicket;
  while (ledger_.head != kNone) {
    const Index index = ledger_.head;
    if (!At(index).ended) {
      ended->push_back(Ended{TicketOf(index), End::kClosed, /*sent=*/true});
      ++counters_.closed;
    }
    LeaveLedger(index);
    FreeEntry(index);
  }
  while (line_.head != kNone) {
    const Index index = line_.head;
    ended->push_back(Ended{TicketOf(index), End::kClosed, /*sent=*/false});
    ++counters_.closed;
    LeaveLine(index);
    FreeEntry(index);
  }
}

QueueCounters SubmitQueue::counters() const noexcept {
  const MutexLock lock(mutex_);
  QueueCounters counters = counters_;
  counters.waiting = waiting_ + releasing_;
  counters.in_flight = in_flight_;
  return counters;
}

}  // namespace actorsub
