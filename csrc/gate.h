// The one decision that every way to an actor shares: given what is believed about the actor, and what the caller's
// policy says, does a call go on now, is it held back, or is it refused? `.remote()` asks here, in C and in Python, and
// so does the submit queue. Pure functions; what a refusal looks like (an exception, a failed ref) is not decided here.
//
//                          kRefuse       kHold         kPass      <- AwayRule
//     unknown, alive        pass          pass          pass
//     pending               what PendingRule says
//     restarting            refuse        hold          pass
//     unreachable           refuse        hold          pass
//     dead                  refuse        refuse        pass
//
// An actor of which nothing is known is Ray's to answer for, as it is without us.
#pragma once

#include <cstdint>

#include "actor_state.h"

namespace actorsub {

// What becomes of a call while its actor is away (kRestarting, kUnreachable), as `on_unavailable` says.
enum class AwayRule : std::uint8_t {
  kRefuse = 0,  // "ref", "raise"
  kHold = 1,    // "wait"
  // "auto" with max_task_retries: Ray resends the call by itself, so it gets it, also when the actor is dead.
  kPass = 2,
};

// What becomes of a call to an actor that was never up yet (kPending), as `on_pending` says.
enum class PendingRule : std::uint8_t {
  kPass = 0,    // "submit": goes to Ray, which queues it.
  kRefuse = 1,  // "fail"
  kHold = 2,    // "wait"
};

enum class Gate : std::uint8_t { kPass = 0, kHold = 1, kRefuse = 2 };

constexpr Gate GateFor(ActorState state, AwayRule away, PendingRule pending) noexcept {
  switch (state) {
    case ActorState::kUnknown:
    case ActorState::kAlive:
      return Gate::kPass;
    case ActorState::kPending:
      return pending == PendingRule::kPass ? Gate::kPass : pending == PendingRule::kHold ? Gate::kHold : Gate::kRefuse;
    case ActorState::kRestarting:
    case ActorState::kUnreachable:
      return away == AwayRule::kPass ? Gate::kPass : away == AwayRule::kHold ? Gate::kHold : Gate::kRefuse;
    case ActorState::kDead:
      break;
  }
  return away == AwayRule::kPass ? Gate::kPass : Gate::kRefuse;
}

}  // namespace actorsub
