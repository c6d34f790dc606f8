// What this process believes about one actor, and how a piece of evidence changes that belief.
//
// Pure functions over one 64-bit word: no I/O, no clock, no lock, no Python, no Ray. `Slot` (slot.h) keeps such a word
// in an atomic and applies `Decide` in a compare-and-swap loop, so every rule below holds whoever reports.
//
// The incarnation of an actor is Ray's restart count: 0 for the first process, n + 1 for the one that follows the
// death of n. In kRestarting the word carries the incarnation that is *coming*. Within one incarnation the states
// come in this order, and nothing goes back except what rules 4 (fresh reads) and 6 say:
//
//     kPending, kRestarting  <  kAlive  <->  kUnreachable  <  kDead
//
// Evidence is *hard* when it ends an incarnation for good: the proven end of its process (kProcess), Ray's word (kRay,
// kTable) and a newer incarnation. It is *soft* when it only makes it kUnreachable: a port that refuses (kConnection),
// because a firewall, a sidecar or an address conflict can say so in the actor's name, and silence (kSilence). Soft
// evidence is *withdrawn by* something of the same incarnation: silence by an answer, a refusal by an answer and then
// the table (rule 10).
//
// Rules (the numbers are quoted by the tests):
//  1. Evidence about an older incarnation changes nothing.
//  2. Hard local evidence (kProcess: "exited") about incarnation n, be it the present one or a later one, makes it
//     kRestarting(n + 1) at once and marks it `provisional`: Ray has not said so yet and may say kDead(n) instead.
//     That holds too where n is still believed to be coming: the table named n to whoever watched it, only Ray's local
//     state lags. A kDead(n) stays.
//     Where Ray has no restart left for n (slot.h, `SetLast`), the end of its process makes it kDead(n) at once.
//  3. Ray's local state is news only when it differs from the last local state seen (`ray_last`): it is a level that
//     lags behind, so an unchanged ALIVE never overrules hard evidence, and an unchanged RESTARTING never counts a
//     second restart. RESTARTING makes the next incarnation of whatever was believed, except that it confirms a
//     kRestarting and does not lift a kDead that Ray had not come to yet. ALIVE lifts a kRestarting only after
//     Ray's own RESTARTING or DEAD and never a provisional one: a first ALIVE may be about the incarnation before.
//  4. The actor table names its incarnation. A newer one is adopted. For the same one only a later state is adopted;
//     kAlive becomes kRestarting where Ray's local state says RESTARTING or DEAD, because Ray's own submitter would
//     still not send. A read that began after the last change (`read_version == version`) also corrects an
//     incarnation number that was counted wrongly, unless the word is provisional, and a kDead that rests on kCall.
//     Until an incarnation is known, a read that is known to be older than the last change is not believed.
//  5. kDead from Ray or the table ends the incarnation it names, also when it is the provisional word's previous one.
//     A later incarnation may follow it (lineage reconstruction restarts an actor that went out of scope). Where the
//     source names none (kRay, kCall) it is the present one, of a provisional word the previous one.
//  6. Silence makes the incarnation that is up kUnreachable, an answer of the same incarnation makes it kAlive again.
//     Neither touches any other state. Ray's stale ALIVE does not lift kUnreachable; only an answer does. Where the
//     incarnation is in doubt, rule 10 says what the two do.
//  7. A change of state raises `version` by one; so does a change of incarnation, Ray's or the table's confirmation of
//     a provisional word, and the beginning, answer and renewal of a doubt (a table read that began before any of them
//     must not pass for a fresh one).
//  8. While Ray's last word is RESTARTING or DEAD the state is kRestarting or kDead.
//  9. The first table read that names a later incarnation as ALIVE while Ray's local state is still the ALIVE of the
//  one
//     before makes it kRestarting: Ray would send to the dead process, and its own RESTARTING, on its way, must not
//     count as another restart. The next such read makes it kAlive, in case Ray's local state went there and back
//     unseen.
// 10. A refusal (kConnection) about the incarnation that is up, or a later one, puts it *in doubt*: kUnreachable by
//     kConnection, also where it was silent already. What runs there is lost (slot.h, invariant 4). In any other state
//     a refusal changes nothing. In doubt, an answer is only noted (`answered`), because whoever answers there may be
//     somebody else, and a later refusal or silence takes the note back. A table read that began after the answer and
//     says kAlive of the same incarnation ends the doubt: kAlive. Neither witness alone does, nor Ray's local state.
//
// Rule 4 relies on this: the control store changes its table before it publishes, so a read never shows an older
// state than the local state at the time when the read began.
#pragma once

#include <cstdint>

namespace actorsub {

enum class ActorState : std::uint8_t {
  kUnknown = 0,      // Nobody has said anything yet.
  kPending = 1,      // Never up so far: waiting for resources or running its first constructor.
  kAlive = 2,        // Takes calls.
  kRestarting = 3,   // Its process ended; Ray is making the next incarnation.
  kUnreachable = 4,  // Believed to run, but it does not answer or its port refuses. Withdrawn: rules 6 and 10.
  kDead = 5,         // Gone for good, as far as anybody knows.
};
inline constexpr int kActorStateCount = 6;

enum class Evidence : std::uint8_t {
  kNone = 0,
  kRay = 1,         // Ray's local actor state.
  kTable = 2,       // The actor table of Ray's control store.
  kProcess = 3,     // The actor's process on this host exited.
  kConnection = 4,  // The actor's port refuses connections, or somebody says so in its name.
  kSilence = 5,     // No answer for longer than the policy allows, or an answer after that.
  kCall = 6,        // The outcome of one of our own calls.
};
inline constexpr int kEvidenceCount = 7;

// Lower-case names without the k: "alive", "silence". Never null; "invalid" for a value outside the enum.
const char* ActorStateName(ActorState state);
const char* EvidenceName(Evidence evidence);

// True when an actor may go from one state to the other, whatever the evidence. Staying is legal. Nothing goes back to
// kUnknown, and only a new incarnation or rule 4 leaves kDead.
bool IsLegalTransition(ActorState from, ActorState to);

// The decoded word.
struct Belief {
  ActorState state = ActorState::kUnknown;
  // Who said so first: moves with the state and the incarnation, and when doubt begins in a silence.
  Evidence evidence = Evidence::kNone;
  ActorState ray_last = ActorState::kUnknown;  // Last local state that Ray reported; kUnknown: none (not subscribed).
  bool incarnation_known = false;              // False until a source has named an incarnation.
  bool provisional = false;                    // Rule 2.
  bool answered = false;                       // Rule 10.
  std::uint16_t version = 0;                   // Rule 7; wraps around.
  std::uint32_t incarnation = 0;               // While not known: a lower bound, counted from Ray's local state.

  friend bool operator==(const Belief& a, const Belief& b) {
    return a.state == b.state && a.evidence == b.evidence && a.ray_last == b.ray_last &&
           a.incarnation_known == b.incarnation_known && a.provisional == b.provisional && a.answered == b.answered &&
           a.version == b.version && a.incarnation == b.incarnation;
  }
};

// Rule 10.
inline bool InDoubt(const Belief& belief) {
  return belief.state == ActorState::kUnreachable && belief.evidence == Evidence::kConnection;
}

// Layout, from bit 0: state 4, evidence 4, ray_last 4, incarnation_known 1, provisional 1, answered 1, spare 1, version
// 16, incarnation 32. The state sits lowest so that a reader needs one load and one mask.
inline constexpr std::uint64_t kStateMask = 0xF;
inline constexpr unsigned kEvidenceShift = 4;
inline constexpr unsigned kRayLastShift = 8;
inline constexpr unsigned kKnownShift = 12;
inline constexpr unsigned kProvisionalShift = 13;
inline constexpr unsigned kAnsweredShift = 14;
inline constexpr unsigned kVersionShift = 16;
inline constexpr unsigned kIncarnationShift = 32;
std::uint64_t EncodeBelief(const Belief& belief);
inline ActorState StateOf(std::uint64_t word) { return static_cast<ActorState>(word & kStateMask); }
// For the submit path: Ray's local state is no news while it equals this (rule 3), and need not be applied.
inline ActorState RayLastOf(std::uint64_t word) { return static_cast<ActorState>(word >> kRayLastShift & kStateMask); }
// Here because each refusal decodes one.
inline Belief DecodeBelief(std::uint64_t word) {
  Belief belief;
  belief.state = StateOf(word);
  belief.evidence = static_cast<Evidence>(word >> kEvidenceShift & 0xFU);
  belief.ray_last = RayLastOf(word);
  belief.incarnation_known = (word >> kKnownShift & 1U) != 0;
  belief.provisional = (word >> kProvisionalShift & 1U) != 0;
  belief.answered = (word >> kAnsweredShift & 1U) != 0;
  belief.version = static_cast<std::uint16_t>(word >> kVersionShift);
  belief.incarnation = static_cast<std::uint32_t>(word >> kIncarnationShift);
  return belief;
}

// One report about an actor.
struct Observation {
  static constexpr std::int64_t kNoIncarnation = -1;

  Evidence evidence = Evidence::kNone;
  // What the source claims. kRay and kTable: the state Ray names. kProcess: kRestarting ("exited"), or kDead ("exited,
  // and Ray will not restart it"). kConnection: kUnreachable. kSilence: kUnreachable, or kAlive when an answer arrived.
  // kCall: kDead only.
  ActorState verdict = ActorState::kUnknown;
  // Which incarnation it is about. kNoIncarnation is for kRay and kCall, which do not know; every other source must
  // name one, and a report that should but does not changes nothing.
  std::int64_t incarnation = kNoIncarnation;
  // kTable only: `version` when the read began (rule 4); -1: unknown.
  std::int32_t read_version = -1;
};

// The belief after the observation. Equal to `before` when the observation is stale, illegal or no news.
Belief Decide(const Belief& before, const Observation& observation);

}  // namespace actorsub
