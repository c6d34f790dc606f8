// What csrc/submit_queue.h must do, written as slowly and obviously as possible: one list of calls in the order of
// their admission, scanned anew for every question. And a pair of the two that takes steps chosen by anybody (a random
// generator, a fuzzer), lets both do them, and throws where they differ.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "slot.h"
#include "submit_queue.h"

namespace actorsub::testing {

class QueueReference {
 public:
  explicit QueueReference(const Slot* slot) : slot_(slot) {}

  // Tickets are the queue's to choose: `ticket` is what it gave.
  Admission Admit(const CallRules& rules, std::int64_t now_ns, Ticket ticket) {
    Admission admission;
    admission.word = slot_->word();
    if (closed_) return admission;
    if (Dead()) {
      admission.verdict = Verdict::kRefusedDead;
    } else if (Away() && rules.away == AwayRule::kRefuse) {
      admission.verdict = Verdict::kRefusedAway;
    } else if (Pending() && rules.on_pending == PendingRule::kRefuse) {
      admission.verdict = Verdict::kRefusedPending;
    } else if (now_ns >= rules.deadline_ns) {
      admission.verdict = Verdict::kExpired;
    } else if (Line().empty() && sending_ == kNoTicket && MaySend(rules)) {
      admission.verdict = Verdict::kSend;
    } else if (Line().size() >= rules.max_queued) {
      admission.verdict = Verdict::kFull;
    } else {
      admission.verdict = Verdict::kWait;
    }
    if (admission.verdict != Verdict::kSend && admission.verdict != Verdict::kWait) return admission;
    Call call;
    call.ticket = admission.ticket = ticket;
    call.rules = rules;
    calls_.push_back(call);
    if (admission.verdict == Verdict::kSend) {
      StartSending(calls_.back());
      admission.mark = slot_->losses();
    }
    if (rules.deadline_ns < told_ns_) admission.arm_ns = told_ns_ = rules.deadline_ns;
    admission.release = admission.verdict == Verdict::kWait && ReleaseIsDue();
    return admission;
  }

  void Release(std::int64_t now_ns, std::size_t max, std::vector<Ticket>* tickets, std::vector<Ended>* ended) {
    sending_ = kNoTicket;
    Recall();
    for (const Ticket ticket : Line()) {
      if (max == 0) break;
      Call& head = Get(ticket);
      if (now_ns >= head.rules.deadline_ns) {
        ended->push_back(Ended{ticket, End::kDeadline, false});
        Remove(ticket);
      } else if (MaySend(head.rules)) {
        tickets->push_back(ticket);
        head.where = Where::kOut;
        --max;
      } else {
        break;
      }
    }
  }

  Begin BeginSend(Ticket ticket) {
    Begin begin;
    sending_ = kNoTicket;
    if (!Has(ticket) || Get(ticket).where == Where::kBegun) return begin;
    begin.word = slot_->word();
    Call& call = Get(ticket);
    if (call.where == Where::kOut && Line().front() == ticket && StateLets(call.rules)) {
      StartSending(call);
      begin.verdict = BeginVerdict::kGo;
      begin.mark = slot_->losses();
      sending_ = ticket;
    } else {
      Recall();
      begin.verdict = BeginVerdict::kBack;
    }
    return begin;
  }

  void EndSend(Ticket ticket) {
    if (sending_ == ticket) sending_ = kNoTicket;
  }

  Completion Complete(Ticket ticket) {
    Completion completion;
    if (!Has(ticket) || Get(ticket).where != Where::kBegun) return completion;
    completion.verdict = Get(ticket).ended ? CompleteVerdict::kLate : CompleteVerdict::kDelivered;
    Remove(ticket);
    completion.release = ReleaseIsDue();
    return completion;
  }

  Aborted Abort(Ticket ticket) {
    Aborted aborted;
    EndSend(ticket);
    if (Has(ticket) && Get(ticket).where == Where::kBegun) {
      aborted.taken_back = !Get(ticket).ended;
      Remove(ticket);
    }
    aborted.release = ReleaseIsDue();
    return aborted;
  }

  Cancellation Cancel(Ticket ticket) {
    Cancellation cancellation;
    if (!Has(ticket) || Get(ticket).ended) return cancellation;
    if (Get(ticket).where == Where::kBegun) {
      cancellation.verdict = CancelVerdict::kSent;
      return cancellation;
    }
    Remove(ticket);
    cancellation.verdict = CancelVerdict::kCancelledHere;
    cancellation.release = ReleaseIsDue();
    return cancellation;
  }

  bool Abandon(Ticket ticket) {
    if (!Has(ticket) || Get(ticket).where != Where::kBegun || Get(ticket).ended) return false;
    Get(ticket).ended = true;
    return true;
  }

  Expiry Expire(std::int64_t now_ns, std::vector<Ended>* ended) {
    for (const Call& copy : std::vector<Call>(calls_)) {
      if (copy.ended || now_ns < copy.rules.deadline_ns) continue;
      const bool sent = copy.where == Where::kBegun;
      ended->push_back(Ended{copy.ticket, End::kDeadline, sent});
      if (sent) {
        Get(copy.ticket).ended = true;
      } else {
        Remove(copy.ticket);
      }
    }
    told_ns_ = EarliestDeadline();
    return Expiry{told_ns_, ReleaseIsDue()};
  }

  bool Review(std::vector<Ended>* ended) {
    for (const Ticket ticket : Line()) {
      const CallRules& rules = Get(ticket).rules;
      if (Dead()) {
        ended->push_back(Ended{ticket, End::kDead, false});
      } else if (Away() && rules.away == AwayRule::kRefuse) {
        ended->push_back(Ended{ticket, End::kAway, false});
      } else if (Pending() && rules.on_pending == PendingRule::kRefuse) {
        ended->push_back(Ended{ticket, End::kPending, false});
      } else {
        continue;
      }
      Remove(ticket);
    }
    return ReleaseIsDue();
  }

  bool FailLost(std::vector<Ended>* ended) {
    for (const Call& call : Begun()) {
      if (call.mark == slot_->losses()) continue;
      if (!call.ended) ended->push_back(Ended{call.ticket, End::kLost, true});
      Remove(call.ticket);
    }
    return ReleaseIsDue();
  }

  bool has_lost() const {
    return std::any_of(calls_.begin(), calls_.end(), [this](const Call& call) {
      return call.where == Where::kBegun && call.mark != slot_->losses();
    });
  }

  void CloseAll(std::vector<Ended>* ended) {
    for (const Call& call : Begun()) {
      if (!call.ended) ended->push_back(Ended{call.ticket, End::kClosed, true});
    }
    for (const Ticket ticket : Line()) ended->push_back(Ended{ticket, End::kClosed, false});
    calls_.clear();
    sending_ = kNoTicket;
    closed_ = true;
  }

  std::int64_t EarliestDeadline() const {
    std::int64_t earliest = kNeverNs;
    for (const Call& call : calls_) {
      if (!call.ended) earliest = std::min(earliest, call.rules.deadline_ns);
    }
    return earliest;
  }

  std::size_t waiting() const { return Line().size(); }
  std::size_t in_flight() const {
    return static_cast<std::size_t>(
        std::count_if(calls_.begin(), calls_.end(), [](const Call& call) { return call.where != Where::kWaiting; }));
  }
  std::size_t size() const { return calls_.size(); }
  Ticket ticket(std::size_t at) const { return calls_[at].ticket; }

 private:
  enum class Where { kWaiting, kOut, kBegun };
  struct Call {
    Ticket ticket = kNoTicket;
    CallRules rules;
    Where where = Where::kWaiting;
    bool ended = false;
    std::uint32_t mark = 0;
    std::uint64_t begun_as = 0;
  };

  bool Dead() const { return slot_->state() == ActorState::kDead; }
  bool Away() const { return slot_->state() == ActorState::kRestarting || slot_->state() == ActorState::kUnreachable; }
  bool Pending() const { return slot_->state() == ActorState::kPending; }
  bool StateLets(const CallRules& rules) const {
    return !Dead() && !Away() && (!Pending() || rules.on_pending == PendingRule::kPass);
  }
  bool MaySend(const CallRules& rules) const {
    return StateLets(rules) && (rules.window == 0 || in_flight() < rules.window);
  }

  bool Has(Ticket ticket) const {
    return std::any_of(calls_.begin(), calls_.end(), [&](const Call& call) { return call.ticket == ticket; });
  }
  Call& Get(Ticket ticket) {
    return *std::find_if(calls_.begin(), calls_.end(), [&](const Call& call) { return call.ticket == ticket; });
  }
  void Remove(Ticket ticket) {
    calls_.erase(std::find_if(calls_.begin(), calls_.end(), [&](const Call& call) { return call.ticket == ticket; }));
  }
  void StartSending(Call& call) {
    call.where = Where::kBegun;
    call.mark = slot_->losses();
    call.begun_as = ++begun_;
  }
  void Recall() {
    for (Call& call : calls_) {
      if (call.where == Where::kOut) call.where = Where::kWaiting;
    }
  }
  // Waiting or out, in the order of admission.
  std::vector<Ticket> Line() const {
    std::vector<Ticket> line;
    for (const Call& call : calls_) {
      if (call.where != Where::kBegun) line.push_back(call.ticket);
    }
    return line;
  }
  // In the order in which they began.
  std::vector<Call> Begun() const {
    std::vector<Call> begun;
    for (const Call& call : calls_) {
      if (call.where == Where::kBegun) begun.push_back(call);
    }
    std::sort(begun.begin(), begun.end(), [](const Call& a, const Call& b) { return a.begun_as < b.begun_as; });
    return begun;
  }
  bool ReleaseIsDue() {
    const std::vector<Ticket> line = Line();
    return !line.empty() && sending_ == kNoTicket && Get(line.front()).where == Where::kWaiting &&
           MaySend(Get(line.front()).rules);
  }

  const Slot* const slot_;
  std::vector<Call> calls_;
  std::uint64_t begun_ = 0;
  Ticket sending_ = kNoTicket;
  std::int64_t told_ns_ = kNeverNs;  // The earliest deadline that the owner was told.
  bool closed_ = false;
};

// The queue and its reference, side by side over one slot.
class QueuePair {
 public:
  // Gives a number in [0, bound).
  using Choose = std::function<unsigned(unsigned bound)>;

  explicit QueuePair(Choose choose) : choose_(std::move(choose)) {}

  // One step; throws std::logic_error where the two differ.
  void Step() {
    switch (choose_(24)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
        Admit();
        break;
      case 7:
      case 8:
        Release();
        break;
      case 9:
      case 10:
      case 11:
      case 12:
        BeginAndEnd();
        break;
      case 13:
      case 14:
      case 15:
        Complete(AnyTicket());
        break;
      case 16:
        Abort(AnyTicket());
        break;
      case 17:
        Cancel(AnyTicket());
        break;
      case 18:
        Abandon(AnyTicket());
        break;
      case 19:
        ChangeSlot();
        break;
      case 20:
        now_ns_ += choose_(12);
        if (now_ns_ >= timer_ns_ || choose_(4) == 0) Expire();
        break;
      case 21:
        Review();
        break;
      case 22:
        FailLost();
        break;
      default:
        // Rare, because nothing much happens afterwards.
        if (choose_(64) == 0 && choose_(8) == 0) CloseAll();
        break;
    }
    Compare();
  }

  // Ends whatever is left, and checks that every ticket that was given out got one end.
  void Finish() {
    CloseAll();
    Compare();
    Require(queue_.counters().waiting == 0 && queue_.counters().in_flight == 0, "all gone");
    Require(ends_ == admitted_, "one end for each ticket");
    const QueueCounters counters = queue_.counters();
    Require(counters.completed + counters.aborted + counters.expired_here + counters.expired_there +
                    counters.cancelled_here + counters.abandoned + counters.refused_state + counters.lost +
                    counters.closed ==
                ends_ + refused_at_once_,
            "the counters are the ends");
    Require(counters.sent == begun_, "counted what began");
  }

 private:
  static void Require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
  }
  static bool Same(const Ended& a, const Ended& b) {
    return a.ticket == b.ticket && a.end == b.end && a.sent == b.sent;
  }
  void Take(std::vector<Ended> got, std::vector<Ended> expected, bool any_order) {
    if (any_order) {
      const auto by_ticket = [](const Ended& a, const Ended& b) { return a.ticket < b.ticket; };
      std::sort(got.begin(), got.end(), by_ticket);
      std::sort(expected.begin(), expected.end(), by_ticket);
    }
    Require(got.size() == expected.size() && std::equal(got.begin(), got.end(), expected.begin(), Same), "same ends");
    ends_ += got.size();
  }

  void Admit() {
    CallRules rules;
    if (choose_(2) == 0) rules.deadline_ns = now_ns_ + choose_(40) - 2;
    if (choose_(3) != 0) rules.window = choose_(5);
    rules.max_queued = choose_(4) == 0 ? choose_(6) : 40;
    rules.away = choose_(3) != 0 ? AwayRule::kHold : AwayRule::kRefuse;
    rules.on_pending = static_cast<PendingRule>(choose_(3));
    const Admission got = queue_.Admit(rules, now_ns_);
    const Admission expected = reference_.Admit(rules, now_ns_, got.ticket);
    Require(got.verdict == expected.verdict, "same verdict of Admit");
    Require(got.word == expected.word && got.mark == expected.mark, "same word and mark of Admit");
    Require(got.arm_ns == expected.arm_ns, "same time to arm");
    Require(got.release == expected.release, "same release of Admit");
    const bool admitted = got.verdict == Verdict::kSend || got.verdict == Verdict::kWait;
    Require((got.ticket != kNoTicket) == admitted, "a ticket exactly when admitted");
    timer_ns_ = std::min(timer_ns_, got.arm_ns);
    if (admitted) ++admitted_;
    if (got.verdict == Verdict::kSend) ++begun_;
    if (got.verdict == Verdict::kExpired || got.verdict == Verdict::kRefusedAway ||
        got.verdict == Verdict::kRefusedDead || got.verdict == Verdict::kRefusedPending) {
      ++refused_at_once_;
    }
    Remember(got.ticket);
  }

  void Release() {
    const std::size_t max = choose_(5);
    std::vector<Ticket> tickets;
    std::vector<Ticket> expected_tickets;
    std::vector<Ended> ended;
    std::vector<Ended> expected_ended;
    queue_.Release(now_ns_, max, &tickets, &ended);
    reference_.Release(now_ns_, max, &expected_tickets, &expected_ended);
    Require(tickets == expected_tickets, "same tickets released");
    Take(ended, expected_ended, /*any_order=*/false);
    batch_ = std::move(tickets);
  }

  // Mostly in turn, sometimes not.
  void BeginAndEnd() {
    Ticket ticket = AnyTicket();
    if (!batch_.empty() && choose_(8) != 0) {
      ticket = batch_.front();
      batch_.erase(batch_.begin());
    }
    const Begin got = queue_.BeginSend(ticket);
    const Begin expected = reference_.BeginSend(ticket);
    Require(got.verdict == expected.verdict, "same verdict of BeginSend");
    Require(got.mark == expected.mark && got.word == expected.word, "same word and mark of BeginSend");
    if (got.verdict == BeginVerdict::kGo) {
      ++begun_;
      sending_ = ticket;
    }
    if (choose_(4) == 0) return;  // Still sending during the steps to come.
    if (choose_(8) == 0) ticket = AnyTicket();
    queue_.EndSend(ticket);
    reference_.EndSend(ticket);
  }

  void Complete(Ticket ticket) {
    const Completion got = queue_.Complete(ticket);
    const Completion expected = reference_.Complete(ticket);
    Require(got.verdict == expected.verdict && got.release == expected.release, "same answer of Complete");
    if (got.verdict == CompleteVerdict::kDelivered) ++ends_;
  }

  void Abort(Ticket ticket) {
    const Aborted got = queue_.Abort(ticket);
    const Aborted expected = reference_.Abort(ticket);
    Require(got.taken_back == expected.taken_back && got.release == expected.release, "same answer of Abort");
    if (got.taken_back) ++ends_;
  }

  void Cancel(Ticket ticket) {
    const Cancellation got = queue_.Cancel(ticket);
    const Cancellation expected = reference_.Cancel(ticket);
    Require(got.verdict == expected.verdict && got.release == expected.release, "same answer of Cancel");
    if (got.verdict == CancelVerdict::kCancelledHere) ++ends_;
  }

  void Abandon(Ticket ticket) {
    const bool got = queue_.Abandon(ticket);
    Require(got == reference_.Abandon(ticket), "same answer of Abandon");
    if (got) ++ends_;
  }

  void Expire() {
    std::vector<Ended> ended;
    std::vector<Ended> expected_ended;
    const Expiry got = queue_.Expire(now_ns_, &ended);
    const Expiry expected = reference_.Expire(now_ns_, &expected_ended);
    Take(ended, expected_ended, /*any_order=*/true);
    Require(got.next_ns == expected.next_ns && got.release == expected.release, "same answer of Expire");
    timer_ns_ = got.next_ns;
  }

  void Review() {
    std::vector<Ended> ended;
    std::vector<Ended> expected_ended;
    const bool got = queue_.Review(&ended);
    Require(got == reference_.Review(&expected_ended), "same answer of Review");
    Take(ended, expected_ended, /*any_order=*/false);
  }

  void FailLost() {
    std::vector<Ended> ended;
    std::vector<Ended> expected_ended;
    const bool got = queue_.FailLost(&ended);
    Require(got == reference_.FailLost(&expected_ended), "same answer of FailLost");
    Take(ended, expected_ended, /*any_order=*/false);
  }

  void CloseAll() {
    std::vector<Ended> ended;
    std::vector<Ended> expected_ended;
    queue_.CloseAll(&ended);
    reference_.CloseAll(&expected_ended);
    Take(ended, expected_ended, /*any_order=*/false);
  }

  // Up more often than not.
  void ChangeSlot() {
    const Belief belief = slot_.belief();
    Observation observation;
    observation.incarnation = belief.incarnation;
    observation.evidence = Evidence::kTable;
    observation.verdict = ActorState::kAlive;
    observation.read_version = belief.version;
    switch (choose_(14)) {
      case 0:
        observation.evidence = Evidence::kProcess;
        observation.verdict = ActorState::kRestarting;
        break;
      case 1:
      case 2:
        observation.evidence = Evidence::kSilence;
        observation.verdict = ActorState::kUnreachable;
        break;
      case 3:
        observation.evidence = Evidence::kSilence;
        break;
      case 4:
        observation.evidence = Evidence::kCall;
        observation.verdict = ActorState::kDead;
        break;
      case 5:
        observation.verdict = ActorState::kPending;
        break;
      case 6:
        slot_.DeclareLoss();
        return;
      case 7:
      case 8:
        ++observation.incarnation;
        break;
      case 9:
        observation.evidence = Evidence::kConnection;
        observation.verdict = ActorState::kUnreachable;
        break;
      default:
        break;
    }
    slot_.Apply(observation);
  }

  void Compare() {
    const QueueCounters counters = queue_.counters();
    Require(counters.waiting == reference_.waiting(), "same number in the line");
    Require(counters.in_flight == reference_.in_flight(), "same number in flight");
    Require(queue_.has_lost() == reference_.has_lost(), "same losses");
    Require(queue_.next_deadline_ns() == reference_.EarliestDeadline(), "same earliest deadline");
    Require(timer_ns_ <= reference_.EarliestDeadline(), "the timer is never late");
  }

  // One that lives, one of the past, or one that never was.
  Ticket AnyTicket() {
    const unsigned kind = choose_(8);
    if (kind == 0) return past_.empty() ? kNoTicket : past_[choose_(static_cast<unsigned>(past_.size()))];
    if (kind == 1 && choose_(4) == 0) return Ticket{choose_(256)} << 32 | choose_(256);
    if (kind == 2) return sending_;
    if (reference_.size() == 0) return kNoTicket;
    return reference_.ticket(choose_(static_cast<unsigned>(reference_.size())));
  }
  void Remember(Ticket ticket) {
    constexpr std::size_t kKept = 64;
    if (past_.size() < kKept) {
      past_.push_back(ticket);
    } else {
      past_[admitted_ % kKept] = ticket;
    }
  }

  const Choose choose_;
  Slot slot_{ActorId{}};
  SubmitQueue queue_{&slot_};
  QueueReference reference_{&slot_};
  std::int64_t now_ns_ = 100;
  std::int64_t timer_ns_ = kNeverNs;
  std::vector<Ticket> batch_;
  Ticket sending_ = kNoTicket;  // The last that began by BeginSend.
  std::vector<Ticket> past_;
  std::uint64_t admitted_ = 0;
  std::uint64_t begun_ = 0;
  std::uint64_t ends_ = 0;
  std::uint64_t refused_at_once_ = 0;
};

}  // namespace actorsub::testing
