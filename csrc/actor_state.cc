#include "actor_state.h"

#include <cassert>
#include <limits>

namespace actorsub {
namespace {

constexpr std::uint32_t kMaxIncarnation = std::numeric_limits<std::uint32_t>::max();

// Saturates: at one restart per millisecond that takes seven weeks, and a stuck number beats one that wraps to zero.
std::uint32_t Next(std::uint32_t incarnation) { return incarnation == kMaxIncarnation ? incarnation : incarnation + 1; }

// The one whose end a provisional word waits to hear about from Ray; else the present one.
std::uint32_t LastUp(const Belief& belief) {
  return belief.provisional && belief.incarnation > 0 ? belief.incarnation - 1 : belief.incarnation;
}

// Leaves room for the successor that an exit makes.
bool NamesIncarnation(const Observation& observation) {
  return observation.incarnation >= 0 && observation.incarnation < static_cast<std::int64_t>(kMaxIncarnation);
}

// The order of states within one incarnation.
int Rank(ActorState state) {
  switch (state) {
    case ActorState::kUnknown:
      return 0;
    case ActorState::kPending:
    case ActorState::kRestarting:
      return 1;
    case ActorState::kAlive:
    case ActorState::kUnreachable:
      return 2;
    case ActorState::kDead:
      return 3;
  }
  return 0;
}

// True while Ray's own submitter would not send, whatever the table says already.
bool RayHoldsBack(const Belief& belief) {
  return belief.ray_last == ActorState::kRestarting || belief.ray_last == ActorState::kDead;
}

// The only place where a state or an incarnation moves, and the version with them (rule 7).
Belief Become(Belief belief, Evidence evidence, ActorState state, std::uint32_t incarnation, bool provisional = false) {
  assert(IsLegalTransition(belief.state, state));
  const bool moved = belief.state != state || belief.incarnation != incarnation;
  if (moved || belief.provisional != provisional) {
    belief.version = static_cast<std::uint16_t>(belief.version + 1);
  }
  if (moved) {
    belief.evidence = evidence;
  }
  belief.state = state;
  belief.incarnation = incarnation;
  belief.provisional = provisional;
  belief.answered = false;
  return belief;
}

// A step within a doubt (rule 10).
Belief Note(Belief belief, bool answered) {
  if (belief.answered != answered) {
    belief.version = static_cast<std::uint16_t>(belief.version + 1);
  }
  belief.answered = answered;
  return belief;
}

Belief OnRayRestarting(const Belief& after, ActorState ray_before) {
  switch (after.state) {
    case ActorState::kRestarting:
      return Become(after, Evidence::kRay, ActorState::kRestarting, after.incarnation);
    case ActorState::kDead:
      if (ray_before != ActorState::kDead) {
        return after;  // Ray is still on its way to the death we know of.
      }
      break;
    default:
      break;
  }
  return Become(after, Evidence::kRay, ActorState::kRestarting, Next(after.incarnation));
}

Belief OnRayAlive(const Belief& after, ActorState ray_before) {
  const bool ray_was_down = ray_before == ActorState::kRestarting || ray_before == ActorState::kDead;
  switch (after.state) {
    case ActorState::kUnknown:
    case ActorState::kPending:
      return Become(after, Evidence::kRay, ActorState::kAlive, after.incarnation);
    case ActorState::kRestarting:
      if (ray_was_down && !after.provisional) {
        return Become(after, Evidence::kRay, ActorState::kAlive, after.incarnation);
      }
      return after;
    case ActorState::kDead:
      // The RESTARTING in between was too short to be seen.
      if (ray_before == ActorState::kDead) {
        return Become(after, Evidence::kRay, ActorState::kAlive, Next(after.incarnation));
      }
      return after;
    case ActorState::kAlive:
    case ActorState::kUnreachable:
      return after;
  }
  return after;
}

Belief OnRay(const Belief& before, ActorState verdict) {
  if (verdict == before.ray_last) {
    return before;
  }
  Belief after = before;
  after.ray_last = verdict;
  switch (verdict) {
    case ActorState::kPending:
      // What Ray says until its subscription is answered; after any other word it is not a state Ray can be in.
      if (before.ray_last != ActorState::kUnknown) {
        return before;
      }
      return before.state == ActorState::kUnknown
                 ? Become(after, Evidence::kRay, ActorState::kPending, before.incarnation)
                 : after;
    case ActorState::kAlive:
      return OnRayAlive(after, before.ray_last);
    case ActorState::kRestarting:
      return OnRayRestarting(after, before.ray_last);
    case ActorState::kDead:
      return before.state == ActorState::kDead ? after
                                               : Become(after, Evidence::kRay, ActorState::kDead, LastUp(before));
    default:
      return before;
  }
}

// True when the table's claim about incarnation `named` is later than the belief, or may correct it.
bool TableOverrules(const Belief& belief, ActorState verdict, std::uint32_t named, bool fresh) {
  if (named > belief.incarnation) {
    return true;
  }
  if (named < belief.incarnation) {
    if (belief.provisional) {
      return verdict == ActorState::kDead && named == LastUp(belief);
    }
    return fresh;
  }
  if (Rank(verdict) > Rank(belief.state)) {
    return true;
  }
  if (belief.provisional && verdict == ActorState::kRestarting) {
    return true;
  }
  if (InDoubt(belief) && belief.answered && verdict == ActorState::kAlive) {
    return fresh;
  }
  return fresh && belief.state == ActorState::kDead && belief.evidence == Evidence::kCall;
}

Belief OnTable(const Belief& before, const Observation& observation) {
  const ActorState verdict = observation.verdict;
  if (!NamesIncarnation(observation) || (verdict != ActorState::kPending && verdict != ActorState::kAlive &&
                                         verdict != ActorState::kRestarting && verdict != ActorState::kDead)) {
    return before;
  }
  const auto named = static_cast<std::uint32_t>(observation.incarnation);
  const bool fresh = observation.read_version == static_cast<std::int32_t>(before.version);
  const bool outdated = observation.read_version >= 0 && !fresh;
  const bool was_up = before.state != ActorState::kUnknown && before.state != ActorState::kPending;
  if (outdated && was_up && !before.incarnation_known) {
    return before;
  }

  Belief after = before;
  after.incarnation_known = true;
  if (!TableOverrules(before, verdict, named, fresh)) {
    return named < before.incarnation ? before : after;
  }
  ActorState state = verdict;
  if (verdict == ActorState::kAlive) {
    if (RayHoldsBack(before)) {
      state = ActorState::kRestarting;
    } else if (before.ray_last == ActorState::kAlive && ((named > before.incarnation && before.incarnation_known) ||
                                                         (named == before.incarnation && before.provisional))) {
      // Rule 9.
      state = ActorState::kRestarting;
    } else if (before.state == ActorState::kUnreachable && named < before.incarnation) {
      // The answer is still to come.
      state = ActorState::kUnreachable;
    }
  }
  return IsLegalTransition(before.state, state) ? Become(after, Evidence::kTable, state, named) : before;
}

Belief OnExit(const Belief& before, const Observation& observation) {
  const bool is_last = observation.verdict == ActorState::kDead;
  if ((!is_last && observation.verdict != ActorState::kRestarting) || !NamesIncarnation(observation)) {
    return before;
  }
  const auto named = static_cast<std::uint32_t>(observation.incarnation);
  if (named < before.incarnation || (named == before.incarnation && before.state == ActorState::kDead)) {
    return before;
  }
  Belief after = before;
  after.incarnation_known = true;
  if (is_last) return Become(after, observation.evidence, ActorState::kDead, named);
  return Become(after, observation.evidence, ActorState::kRestarting, Next(named), /*provisional=*/true);
}

Belief OnRefused(const Belief& before, const Observation& observation) {
  const bool is_up = before.state == ActorState::kAlive || before.state == ActorState::kUnreachable;
  if (observation.verdict != ActorState::kUnreachable || !is_up || !NamesIncarnation(observation) ||
      observation.incarnation < static_cast<std::int64_t>(before.incarnation)) {
    return before;
  }
  const auto named = static_cast<std::uint32_t>(observation.incarnation);
  if (InDoubt(before) && named == before.incarnation) {
    return Note(before, /*answered=*/false);
  }
  Belief after = before;
  after.incarnation_known = true;
  if (before.state == ActorState::kUnreachable && named == before.incarnation) {
    after.evidence = Evidence::kConnection;
    after.version = static_cast<std::uint16_t>(after.version + 1);
    return after;
  }
  return Become(after, Evidence::kConnection, ActorState::kUnreachable, named);
}

Belief OnSilence(const Belief& before, const Observation& observation) {
  if (!NamesIncarnation(observation) || observation.incarnation != static_cast<std::int64_t>(before.incarnation)) {
    return before;
  }
  if (InDoubt(before)) {
    const bool tells = observation.verdict == ActorState::kAlive || observation.verdict == ActorState::kUnreachable;
    return tells ? Note(before, observation.verdict == ActorState::kAlive) : before;
  }
  const bool silenced = before.state == ActorState::kAlive && observation.verdict == ActorState::kUnreachable;
  const bool answered = before.state == ActorState::kUnreachable && observation.verdict == ActorState::kAlive;
  return silenced || answered ? Become(before, Evidence::kSilence, observation.verdict, before.incarnation) : before;
}

Belief OnCall(const Belief& before, const Observation& observation) {
  if (observation.verdict != ActorState::kDead) {
    return before;
  }
  Belief after = before;
  std::uint32_t named = LastUp(before);
  if (observation.incarnation != Observation::kNoIncarnation) {
    if (!NamesIncarnation(observation) || observation.incarnation < static_cast<std::int64_t>(named)) {
      return before;
    }
    named = static_cast<std::uint32_t>(observation.incarnation);
    after.incarnation_known = true;
  }
  if (before.state == ActorState::kDead && named == before.incarnation) {
    return before;
  }
  return Become(after, Evidence::kCall, ActorState::kDead, named);
}

}  // namespace

const char* ActorStateName(ActorState state) {
  switch (state) {
    case ActorState::kUnknown:
      return "unknown";
    case ActorState::kPending:
      return "pending";
    case ActorState::kAlive:
      return "alive";
    case ActorState::kRestarting:
      return "restarting";
    case ActorState::kUnreachable:
      return "unreachable";
    case ActorState::kDead:
      return "dead";
  }
  return "invalid";
}

const char* EvidenceName(Evidence evidence) {
  switch (evidence) {
    case Evidence::kNone:
      return "none";
    case Evidence::kRay:
      return "ray";
    case Evidence::kTable:
      return "table";
    case Evidence::kProcess:
      return "process";
    case Evidence::kConnection:
      return "connection";
    case Evidence::kSilence:
      return "silence";
    case Evidence::kCall:
      return "call";
  }
  return "invalid";
}

bool IsLegalTransition(ActorState from, ActorState to) {
  if (from == to) {
    return true;
  }
  switch (to) {
    case ActorState::kUnknown:
      return false;
    case ActorState::kPending:
      return from == ActorState::kUnknown;
    case ActorState::kUnreachable:
      return from == ActorState::kAlive;
    case ActorState::kAlive:
    case ActorState::kRestarting:
    case ActorState::kDead:
      return true;
  }
  return false;
}

std::uint64_t EncodeBelief(const Belief& belief) {
  return static_cast<std::uint64_t>(belief.state) | static_cast<std::uint64_t>(belief.evidence) << kEvidenceShift |
         static_cast<std::uint64_t>(belief.ray_last) << kRayLastShift |
         static_cast<std::uint64_t>(belief.incarnation_known) << kKnownShift |
         static_cast<std::uint64_t>(belief.provisional) << kProvisionalShift |
         static_cast<std::uint64_t>(belief.answered) << kAnsweredShift |
         static_cast<std::uint64_t>(belief.version) << kVersionShift |
         static_cast<std::uint64_t>(belief.incarnation) << kIncarnationShift;
}

Belief Decide(const Belief& before, const Observation& observation) {
  switch (observation.evidence) {
    case Evidence::kRay:
      return OnRay(before, observation.verdict);
    case Evidence::kTable:
      return OnTable(before, observation);
    case Evidence::kProcess:
      return OnExit(before, observation);
    case Evidence::kConnection:
      return OnRefused(before, observation);
    case Evidence::kSilence:
      return OnSilence(before, observation);
    case Evidence::kCall:
      return OnCall(before, observation);
    case Evidence::kNone:
      return before;
  }
  return before;
}

}  // namespace actorsub
