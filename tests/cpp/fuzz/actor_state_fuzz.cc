// Any bytes are a trace of observations; after each the belief must equal the reference model's, and survive encoding.
// Five bytes make one observation: source and verdict, how the incarnation and the read version relate to the belief.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "actor_state.h"
#include "reference_model.h"

namespace {

using actorsub::Belief;
using actorsub::Observation;

Observation Make(const std::uint8_t* bytes, const Belief& belief) {
  Observation observation;
  observation.evidence = static_cast<actorsub::Evidence>(bytes[0] % actorsub::kEvidenceCount);
  observation.verdict = static_cast<actorsub::ActorState>(bytes[1] % actorsub::kActorStateCount);
  switch (bytes[2] % 4) {
    case 0:
      observation.incarnation = Observation::kNoIncarnation;
      break;
    case 1:
      observation.incarnation = (std::int64_t{1} << 32) - 4 + bytes[3] % 8;
      break;
    default:
      observation.incarnation = static_cast<std::int64_t>(belief.incarnation) + bytes[3] % 8 - 4;
      break;
  }
  switch (bytes[4] % 4) {
    case 0:
      observation.read_version = -1;
      break;
    case 1:
      observation.read_version = static_cast<std::uint16_t>(belief.version - 1);
      break;
    default:
      observation.read_version = belief.version;
      break;
  }
  return observation;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kBytesPerObservation = 5;
  Belief belief;
  actorsub::testing::ReferenceModel model;
  for (std::size_t at = 0; at + kBytesPerObservation <= size; at += kBytesPerObservation) {
    const Observation observation = Make(data + at, belief);
    const Belief after = Decide(belief, observation);
    model.Observe(observation);
    if (!(after == model.ToBelief())) std::abort();
    if (!(actorsub::DecodeBelief(actorsub::EncodeBelief(after)) == after)) std::abort();
    if (!actorsub::IsLegalTransition(belief.state, after.state)) std::abort();
    belief = after;
  }
  return 0;
}
