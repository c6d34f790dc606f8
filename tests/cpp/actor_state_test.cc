// The rules of actor_state.h: one by one as scripted traces, then as properties of random ones.
//
// A script is a line of words. `ray:A` is Ray's local state, `tbl:A3` a table read that is fresh (`tbl:A3-` one that
// began before the last change, `tbl:A3?` one of unknown age), `proc:3` an exit of incarnation 3 (`last:3` of one that
// Ray will not restart), `conn:3` a refusal of its port, `sil:3` and `ans:3` silence and answer, `call` an outcome that
// says dead. `>R4` demands a belief: a letter of reference_model.h and the incarnation, with p for provisional, d for
// in doubt, a for that with an answer, and ? for an incarnation that is not known. `!` demands that the last
// observation moved `version`, `=` that it did not.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "actor_state.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "reference_model.h"
#include "test_random.h"

namespace actorsub {
namespace {

using testing::Letter;
using testing::Random;
using testing::ReferenceModel;
using testing::Seed;
using testing::StateOfLetter;

constexpr ActorState kStates[] = {ActorState::kUnknown,    ActorState::kPending,     ActorState::kAlive,
                                  ActorState::kRestarting, ActorState::kUnreachable, ActorState::kDead};

std::string Show(const Belief& belief) {
  return std::string(1, Letter(belief.state)) + std::to_string(belief.incarnation) + (belief.provisional ? "p" : "") +
         (InDoubt(belief) ? belief.answered ? "a" : "d" : "") + (belief.incarnation_known ? "" : "?");
}

std::string Show(const Observation& observation) {
  std::ostringstream out;
  out << EvidenceName(observation.evidence) << ":" << Letter(observation.verdict) << observation.incarnation << "@"
      << observation.read_version;
  return out.str();
}

bool IsUp(ActorState state) { return state == ActorState::kAlive || state == ActorState::kUnreachable; }

// What holds after every observation, whatever it was.
void CheckStep(const Belief& before, const Observation& observation, const Belief& after) {
  const bool moved = before.state != after.state || before.incarnation != after.incarnation;
  const bool confirmed = before.provisional && !after.provisional;
  const bool noted = before.answered != after.answered || InDoubt(before) != InDoubt(after);
  CHECK(IsLegalTransition(before.state, after.state));
  CHECK(static_cast<std::uint16_t>(after.version - before.version) == (moved || confirmed || noted ? 1 : 0));
  if (after.provisional) {
    CHECK(after.state == ActorState::kRestarting);
    CHECK(after.incarnation > 0);
  }
  CHECK((after.incarnation_known || !before.incarnation_known));
  if (!moved && !noted) CHECK(after.evidence == before.evidence);
  // Rule 10.
  if (after.answered) CHECK(InDoubt(after));
  if (!InDoubt(before) && InDoubt(after)) CHECK(observation.evidence == Evidence::kConnection);
  if (observation.evidence == Evidence::kConnection) {
    CHECK((after == before || (IsUp(before.state) && InDoubt(after) && !after.answered)));
  }
  if (InDoubt(before) && after.state == ActorState::kAlive && after.incarnation <= before.incarnation) {
    CHECK(observation.evidence == Evidence::kTable);
    CHECK(observation.read_version == before.version);
    CHECK(before.answered);
  }
  // Only two things take a number back: rule 4's correction, and the end of a provisional word's previous incarnation.
  if (after.incarnation < before.incarnation) {
    const bool correction =
        observation.evidence == Evidence::kTable && observation.read_version == before.version && !before.provisional;
    const bool died =
        before.provisional && after.state == ActorState::kDead && after.incarnation + 1 == before.incarnation;
    CHECK((correction || died));
  }
  // Rule 8.
  if (after.ray_last == ActorState::kRestarting || after.ray_last == ActorState::kDead) {
    CHECK((after.state == ActorState::kRestarting || after.state == ActorState::kDead));
  }
  // The same report a second time is never news.
  if (observation.evidence != Evidence::kTable) CHECK(Decide(after, observation) == after);
  // A number that cannot grow any more tells incarnations apart no longer; what follows needs that.
  if (before.incarnation == 0xFFFFFFFFU) return;
  // Rule 2.
  if (observation.evidence == Evidence::kProcess && observation.verdict == ActorState::kRestarting &&
      observation.incarnation == before.incarnation) {
    CHECK(!IsUp(after.state));
  }
  // Within one incarnation nothing goes back, but for a fresh read that withdraws a call's word.
  if (before.incarnation == after.incarnation && before.state == ActorState::kDead) {
    CHECK((after.state == ActorState::kDead || before.evidence == Evidence::kCall));
  }
  if (before.incarnation == after.incarnation && IsUp(before.state)) {
    CHECK((IsUp(after.state) || after.state == ActorState::kDead));
  }
}

Observation Parse(const std::string& word, const Belief& belief) {
  const std::size_t colon = word.find(':');
  const std::string source = word.substr(0, colon);
  std::string rest = colon == std::string::npos ? "" : word.substr(colon + 1);
  Observation observation;
  if (source == "call") {
    observation.evidence = Evidence::kCall;
    observation.verdict = ActorState::kDead;
    return observation;
  }
  if (source == "ray") {
    observation.evidence = Evidence::kRay;
    observation.verdict = StateOfLetter(rest.at(0));
    return observation;
  }
  if (source == "tbl") {
    observation.evidence = Evidence::kTable;
    observation.verdict = StateOfLetter(rest.at(0));
    observation.read_version = rest.back() == '?'   ? -1
                               : rest.back() == '-' ? static_cast<std::uint16_t>(belief.version - 1)
                                                    : belief.version;
    rest.erase(0, 1);
  } else if (source == "proc") {
    observation.evidence = Evidence::kProcess;
    observation.verdict = ActorState::kRestarting;
  } else if (source == "last") {
    observation.evidence = Evidence::kProcess;
    observation.verdict = ActorState::kDead;
  } else if (source == "conn") {
    observation.evidence = Evidence::kConnection;
    observation.verdict = ActorState::kUnreachable;
  } else if (source == "sil" || source == "ans") {
    observation.evidence = Evidence::kSilence;
    observation.verdict = source == "sil" ? ActorState::kUnreachable : ActorState::kAlive;
  } else {
    FAIL("unknown word in a script: ", word);
  }
  observation.incarnation = std::stoll(rest);
  return observation;
}

void RunScript(const std::string& script) {
  Belief belief;
  bool moved = false;
  std::istringstream words(script);
  std::string done;
  for (std::string word; words >> word;) {
    done += word + " ";
    CAPTURE(done);
    if (word[0] == '>') {
      CHECK(Show(belief) == word.substr(1));
    } else if (word == "!") {
      CHECK(moved);
    } else if (word == "=") {
      CHECK(!moved);
    } else {
      const Observation observation = Parse(word, belief);
      const Belief after = Decide(belief, observation);
      CheckStep(belief, observation, after);
      moved = belief.version != after.version;
      belief = after;
    }
  }
}

struct Script {
  const char* about;
  const char* text;
};

void RunScripts(const std::vector<Script>& scripts) {
  for (const Script& script : scripts) {
    CAPTURE(script.about);
    CAPTURE(script.text);
    RunScript(script.text);
  }
}

TEST_CASE("rule 1: an older incarnation changes nothing") {
  RunScripts({
      {"exit", "tbl:A3 proc:2 = >A3 conn:0 = >A3"},
      {"table", "tbl:A3 tbl:D2? = >A3 tbl:R2- = >A3"},
      {"silence", "tbl:A3 sil:2 = >A3"},
      {"answer", "tbl:A3 sil:3 ans:2 = >X3"},
      {"exit of the one before, reported again by another source", "tbl:A3 proc:3 ! >R4p conn:3 = >R4p"},
  });
}

TEST_CASE("rule 2: hard evidence") {
  RunScripts({
      {"process", "tbl:A0 proc:0 ! >R1p"},
      {"of an unreachable actor", "tbl:A0 sil:0 >X0 proc:0 ! >R1p"},
      {"of an incarnation that only the table calls up so far", "ray:R tbl:A3 >R3 proc:3 ! >R4p"},
      {"of an incarnation that nobody else named yet", "tbl:A0 proc:2 ! >R3p"},
      {"of a dead one", "tbl:D2 proc:2 = >D2 proc:1 = >D2"},
      {"must name its incarnation", "tbl:A0 proc:-1 = >A0"},
      {"no room for the successor", "tbl:A4294967294 >A4294967294 proc:4294967294 >R4294967295p proc:4294967295 ="},
      {"Ray's and the table's stale word do not lift it",
       "ray:A tbl:A0 proc:0 >R1p ray:A = tbl:A0 = tbl:A0- = tbl:A0? = ans:0 = sil:0 = >R1p"},
      {"nor does Ray's first word, which may be older",
       "tbl:A0 proc:0 ray:A = >R1p tbl:A0 = >R1p tbl:A1 ! >R1 tbl:A1 ! >A1"},
      {"nor a first ALIVE after PENDING", "ray:P tbl:A0 >A0 proc:0 >R1p ray:A = >R1p ray:R ! >R1 ray:A ! >A1"},
      {"of the last one",
       "ray:A tbl:A1 last:1 ! >D1 last:1 = proc:1 = ray:A = tbl:A1 = tbl:A1- = >D1 ray:D = tbl:D1 = >D1"},
      {"of the last one, silent", "tbl:A1 sil:1 last:1 ! >D1 ans:1 = >D1"},
      {"of the last one before", "tbl:A1 last:0 = >A1 proc:1 >R2p last:1 = >R2p"},
      {"which has a next one all the same", "ray:A tbl:A1 last:1 >D1 ray:R = >D1 tbl:R2 ! >R2 ray:A ! >A2"},
      {"the table confirms", "tbl:A0 proc:0 tbl:R1 ! >R1 tbl:R1 = >R1"},
  });
}

TEST_CASE("rule 3: Ray's local state is a level") {
  RunScripts({
      {"first words", "ray:P >P0? ray:P = ray:A ! >A0? ray:A = >A0?"},
      {"restart", "ray:A ray:R ! >R1? ray:R = >R1? ray:A ! >A1?"},
      {"restart of a restart is seen by the table only", "ray:A ray:R >R1? ray:R = tbl:R2 ! >R2 ray:A >A2"},
      {"nothing to say, and words that Ray's local state does not have", "ray:A ray:U = ray:X = >A0?"},
      {"an unchanged RESTARTING confirms nothing", "ray:R tbl:A3 proc:3 >R4p ray:R = >R4p"},
      {"an unchanged DEAD ends nothing", "ray:D tbl:R3 >R3 ray:D = >R3"},
      {"pending after a death is not a step", "ray:A ray:D ray:P >D0? ray:R ! >R1?"},
      {"pending does not come back", "ray:A ray:P = >A0? ray:R ray:P = >R1?"},
      {"a late subscription does not lift what the table knows", "tbl:R3 ray:P = ray:A = >R3 ray:R = >R3 ray:A ! >A3"},
  });
}

TEST_CASE("rule 4: the table") {
  RunScripts({
      {"newer", "tbl:A0 tbl:A2? ! >A2 tbl:R3? ! >R3 tbl:D5? ! >D5"},
      {"later state of the same", "tbl:P0 >P0 tbl:A0 ! >A0 tbl:D0 ! >D0"},
      {"earlier state of the same", "tbl:R2 tbl:A2 >A2 tbl:R2 = >A2 tbl:D2 tbl:A2 = tbl:R2 = >D2"},
      {"ALIVE is held back while Ray's local state is not there",
       "ray:R tbl:R4 >R4 tbl:A4 = >R4 tbl:A5 ! >R5 ray:A ! >A5"},
      {"and while it still says DEAD", "ray:A tbl:A0 ray:D >D0 tbl:A1 ! >R1 ray:R = >R1 ray:A ! >A1"},
      {"correction", "ray:A ray:R ray:A ray:R ray:A >A2? tbl:A1? = >A2? tbl:A1- = tbl:A1 ! >A1"},
      {"correction of a count that lags",
       "tbl:A3 ray:A tbl:A4 >R4 tbl:A4 >A4 ray:R >R5 tbl:A4- = tbl:A4 ! >R4 ray:A >A4"},
      {"a provisional word is not corrected", "tbl:A3 proc:3 >R4p tbl:A3 = tbl:R3 = >R4p"},
      {"a read from before Ray's confirmation is not fresh", "ray:A tbl:A3 proc:3 ray:R ! >R4 tbl:A3- = >R4"},
      {"correction leaves silence to the answer", "ray:A ray:R ray:A >A1? sil:1 >X1? tbl:A0 ! >X0 ans:0 >A0"},
      {"an unknown incarnation is learned", "ray:A >A0? tbl:A0 = >A0 tbl:R0 = >A0"},
      {"with its number", "ray:A ray:R >R1? tbl:R7 ! >R7"},
      {"but not from a read that is older than what Ray said", "ray:R ray:A >A1? tbl:R3- = >A1? tbl:A3 ! >A3"},
      {"no such claims", "tbl:U0 = tbl:X0 = tbl:A-1 = >U0? tbl:A4294967295 = >U0?"},
      {"nothing goes back to pending", "tbl:A0 tbl:P1 = >A0"},
  });
}

TEST_CASE("rule 5: death") {
  RunScripts({
      {"by Ray", "ray:A tbl:A2 ray:D ! >D2 ray:D = tbl:D2 = >D2"},
      {"by the table", "ray:A tbl:A2 tbl:D2 ! >D2 ray:D = >D2"},
      {"of a provisional word, by Ray", "ray:A tbl:A2 proc:2 >R3p ray:D ! >D2"},
      {"of a provisional word, by the table", "ray:A tbl:A2 proc:2 >R3p tbl:D2? ! >D2"},
      {"of a provisional word, by a call", "ray:A tbl:A2 proc:2 >R3p call ! >D2"},
      {"of the restarting one", "ray:A tbl:A2 ray:R >R3 ray:D ! >D3"},
      {"of the restarting one that was provisional", "ray:A tbl:A2 proc:2 ray:R >R3 tbl:D3 ! >D3"},
      {"lineage, by Ray", "ray:A tbl:A2 ray:D ray:R ! >R3 ray:A ! >A3"},
      {"lineage, too fast for the local state", "ray:A tbl:A2 ray:D ray:A ! >A3"},
      {"lineage, by the table", "tbl:D2 tbl:R3 ! >R3 tbl:A3 ! >A3"},
      {"Ray on its way to a death that the table named", "ray:A tbl:D4 >D4 ray:R = >D4 ray:D = >D4 ray:R ! >R5"},
      {"a call", "ray:A tbl:A2 call ! >D2 call = >D2"},
      {"a call that was wrong", "ray:A tbl:A2 call >D2 tbl:A2- = >D2 tbl:A2 ! >A2"},
  });
}

TEST_CASE("rule 6: silence") {
  RunScripts({
      {"and answer", "tbl:A1 sil:1 ! >X1 sil:1 = ans:1 ! >A1 ans:1 = >A1"},
      {"touches no other state",
       "sil:0 = tbl:P0 sil:0 = ans:0 = >P0 tbl:R1 sil:1 = ans:1 = >R1 tbl:D1 sil:1 = ans:1 ="},
      {"Ray's ALIVE does not lift it", "tbl:A1 sil:1 ray:A = tbl:A1 = tbl:A1? = >X1 ans:1 >A1"},
      {"a newer incarnation does", "tbl:A1 sil:1 tbl:A2 ! >A2"},
      {"Ray's RESTARTING ends it", "ray:A tbl:A1 sil:1 ray:R ! >R2 ans:1 = >R2 ray:A ! >A2"},
      {"death ends it", "ray:A tbl:A1 sil:1 ray:D ! >D1"},
  });
}

TEST_CASE("rule 10: a refusal") {
  RunScripts({
      {"and an answer and the table", "tbl:A7 conn:7 ! >X7d ans:7 ! >X7a ans:7 = tbl:A7 ! >A7 tbl:A7 = >A7"},
      {"the table alone", "tbl:A7 conn:7 >X7d tbl:A7 = tbl:A7 = tbl:A7? = tbl:A7- = >X7d"},
      {"an answer alone", "tbl:A7 conn:7 ans:7 >X7a ans:7 = >X7a"},
      {"a read from before the answer", "tbl:A7 conn:7 tbl:A7 = ans:7 >X7a tbl:A7- = tbl:A7? = >X7a tbl:A7 ! >A7"},
      {"again", "tbl:A7 conn:7 conn:7 = >X7d ans:7 conn:7 ! >X7d tbl:A7 = >X7d ans:7 ! tbl:A7 ! >A7 conn:7 ! >X7d"},
      {"silence takes the answer back", "tbl:A7 conn:7 ans:7 sil:7 ! >X7d sil:7 = tbl:A7 = >X7d ans:7 tbl:A7 >A7"},
      {"in a silence", "tbl:A7 sil:7 >X7 conn:7 ! >X7d ans:7 ! >X7a tbl:A7 ! >A7"},
      {"Ray's ALIVE lifts nothing", "ray:A tbl:A0 conn:0 ray:A = ans:0 ray:A = >X0a"},
      {"nor its first ALIVE", "tbl:A0 conn:0 ray:P = ray:A = >X0d ans:0 tbl:A0 ! >A0"},
      {"Ray's RESTARTING ends the incarnation",
       "ray:A tbl:A0 conn:0 ray:R ! >R1 ans:0 = conn:0 = tbl:A0- = >R1 ray:A ! >A1"},
      {"also after an answer", "ray:A tbl:A0 conn:0 ans:0 ray:R ! >R1"},
      {"Ray's DEAD does", "ray:A tbl:A0 conn:0 ray:D ! >D0 ans:0 = tbl:A0 = >D0"},
      {"the table's DEAD does", "ray:A tbl:A0 conn:0 tbl:D0? ! >D0"},
      {"the table's next incarnation does", "ray:A tbl:A0 conn:0 tbl:R1? ! >R1"},
      {"the table's RESTARTING of this one is old", "tbl:R1 tbl:A1 conn:1 tbl:R1 = >X1d"},
      {"the next incarnation is up", "tbl:A0 conn:0 ans:0 tbl:A1? ! >A1"},
      {"the next incarnation is up, Ray's local state lags", "ray:A tbl:A0 conn:0 tbl:A1? ! >R1 tbl:A1 ! >A1"},
      {"the process ends", "ray:A tbl:A0 conn:0 proc:0 ! >R1p ans:0 = conn:0 = tbl:A0 = >R1p ray:R ! >R1"},
      {"the last process ends", "ray:A tbl:A0 conn:0 ans:0 last:0 ! >D0 conn:0 = ans:0 = >D0"},
      {"the process ended before", "ray:A tbl:A0 proc:0 conn:0 = >R1p"},
      {"of an older incarnation", "tbl:A3 conn:2 = >A3"},
      {"of a later one", "tbl:A3 conn:5 ! >X5d ans:5 tbl:A5 ! >A5"},
      {"of a later one, while this one is in doubt", "tbl:A3 conn:3 ans:3 conn:5 ! >X5d"},
      {"of one that is coming", "tbl:R3 conn:3 = >R3 tbl:A3 conn:3 ! >X3d"},
      {"of one that nobody called up", "conn:0 = >U0? tbl:P0 conn:0 = >P0"},
      {"of a dead one", "tbl:D2 conn:2 = conn:3 = >D2"},
      {"names the incarnation", "ray:A >A0? conn:0 ! >X0d"},
      {"of a number that was counted wrongly", "ray:A ray:R ray:A ray:R ray:A >A2? conn:1 = tbl:A1 >A1 conn:1 ! >X1d"},
      {"must name its incarnation", "tbl:A0 conn:-1 = >A0"},
      {"no restarts left: nobody said restarting", "ray:A tbl:A0 conn:0 >X0d tbl:A0 = ray:D ! >D0"},
  });
}

TEST_CASE("rule 7: version and evidence") {
  Belief belief;
  belief.version = 0xFFFF;
  const Belief after = Decide(belief, Parse("ray:A", belief));
  CHECK(after.version == 0);
  CHECK(after.evidence == Evidence::kRay);
  // Who said so first keeps the credit.
  Belief down = Decide(Decide(after, Parse("tbl:A0", after)), Parse("proc:0", after));
  CHECK(down.evidence == Evidence::kProcess);
  down = Decide(down, Parse("ray:R", down));
  CHECK(down.evidence == Evidence::kProcess);
  CHECK(!down.provisional);
}

TEST_CASE("traces as they happen") {
  RunScripts({
      {"crash on this host",
       "ray:P ray:A tbl:A0 proc:0 >R1p ray:A ray:A >R1p ray:R >R1 ray:R tbl:R1 >R1 ray:A ! >A1 tbl:A1 ="},
      {"with a stale read in between", "ray:A tbl:A0 proc:0 tbl:A0 tbl:A0- >R1p tbl:R1 >R1 tbl:A1 ! >A1 ray:A = >A1"},
      {"with a stale read, Ray first", "ray:A tbl:A0 proc:0 tbl:A0 ray:R tbl:R1 >R1 tbl:A1 = >R1 ray:A ! >A1"},
      {"restart too fast for the local state", "ray:A tbl:A0 ray:A tbl:A1 ! >R1 ray:A = >R1 tbl:A1 ! >A1"},
      {"the same after a local exit", "ray:A tbl:A0 proc:0 ray:A tbl:A0 ray:A >R1p tbl:A1 ! >R1 tbl:A1 ! >A1"},
      {"table ahead of Ray after a local exit: one restart, not two",
       "ray:A tbl:A0 proc:0 >R1p tbl:A1 ! >R1 ray:R = >R1 ray:A ! >A1 proc:1 ! >R2p"},
      {"table ahead of Ray, nothing seen here", "ray:A tbl:A0 tbl:A1 ! >R1 ray:R = >R1 ray:A ! >A1"},
      {"no restarts left", "ray:A tbl:A0 proc:0 >R1p tbl:A0 >R1p tbl:D0 ! >D0 ray:D = >D0"},
      {"no restarts left, Ray first", "ray:A tbl:A0 proc:0 >R1p ray:D ! >D0 tbl:D0 = >D0"},
      {"crash on another host", "ray:A tbl:A0 conn:0 ! >X0d tbl:A0 = conn:0 = ray:R ! >R1 tbl:R1 ray:A tbl:A1 >A1"},
      {"half a second of RST by a firewall",
       "ray:A tbl:A0 conn:0 tbl:A0 conn:0 tbl:A0 >X0d ans:0 tbl:A0- tbl:A0 ! >A0"},
      {"crash, and another process has the port",
       "ray:A tbl:A0 conn:0 ans:0 >X0a tbl:R1 ! >R1 ans:0 = ray:R ray:A >A1"},
      {"silence, then exit", "ray:A tbl:A0 sil:0 >X0 proc:0 >R1p ans:0 >R1p ray:R ray:A >A1"},
      {"fresh handle to a restarting actor", "tbl:R3 >R3 tbl:A3 ! >A3 proc:3 ! >R4p tbl:A3 >R4p tbl:R4 >R4 tbl:A4 >A4"},
      {"fresh handle, then a subscription", "tbl:R3 >R3 ray:P ray:R = >R3 tbl:A3 >R3 ray:A ! >A3"},
      {"local state behind the table", "ray:A tbl:A0 ray:R tbl:R1 tbl:A1 = >R1 ray:A ! >A1"},
      {"table ahead of an unchanged ALIVE", "ray:A tbl:A0 tbl:R1 ! >R1 ray:A = >R1 ray:R = >R1 ray:A ! >A1"},
      {"two crashes, one seen", "ray:A tbl:A0 proc:0 >R1p tbl:R2 ! >R2 ray:R = >R2 ray:A ! >A2"},
      {"dies again while Ray's local state lags",
       "ray:A tbl:A0 proc:0 ray:R tbl:A1 >R1 proc:1 ! >R2p ray:A = >R2p ray:R ! >R2 ray:A >A2"},
  });
}

TEST_CASE("encode and decode are inverse") {
  CAPTURE(Seed());
  Random random(Seed());
  for (int i = 0; i < 10000; ++i) {
    Belief belief;
    belief.state = kStates[random.Below(kActorStateCount)];
    belief.evidence = static_cast<Evidence>(random.Below(kEvidenceCount));
    belief.ray_last = kStates[random.Below(kActorStateCount)];
    belief.incarnation_known = random.OneIn(2);
    belief.provisional = random.OneIn(2);
    belief.answered = random.OneIn(2);
    belief.version = static_cast<std::uint16_t>(random.Word());
    belief.incarnation = static_cast<std::uint32_t>(random.Word());
    const std::uint64_t word = EncodeBelief(belief);
    CHECK(DecodeBelief(word) == belief);
    CHECK(StateOf(word) == belief.state);
    CHECK(RayLastOf(word) == belief.ray_last);
  }
  CHECK(EncodeBelief(Belief()) == 0);  // A slot starts with a zero word.
}

TEST_CASE("legal transitions") {
  // Rows: from; columns: to.
  const char* const table[] = {
      /*        U P A R X D */
      /* U */ "1 1 1 1 0 1",
      /* P */ "0 1 1 1 0 1",
      /* A */ "0 0 1 1 1 1",
      /* R */ "0 0 1 1 0 1",
      /* X */ "0 0 1 1 1 1",
      /* D */ "0 0 1 1 0 1",
  };
  for (int from = 0; from < kActorStateCount; ++from) {
    for (int to = 0; to < kActorStateCount; ++to) {
      CAPTURE(ActorStateName(kStates[from]));
      CAPTURE(ActorStateName(kStates[to]));
      CHECK(IsLegalTransition(kStates[from], kStates[to]) ==
            (std::string(table[from]).at(static_cast<std::size_t>(to) * 2) == '1'));
    }
  }
}

TEST_CASE("names") {
  CHECK(std::string(ActorStateName(ActorState::kUnreachable)) == "unreachable");
  CHECK(std::string(ActorStateName(static_cast<ActorState>(15))) == "invalid");
  CHECK(std::string(EvidenceName(Evidence::kConnection)) == "connection");
  CHECK(std::string(EvidenceName(static_cast<Evidence>(15))) == "invalid");
}

Observation RandomObservation(Random& random, const Belief& belief) {
  Observation observation;
  observation.evidence = static_cast<Evidence>(random.Below(kEvidenceCount));
  observation.verdict = kStates[random.Below(kActorStateCount)];
  if (observation.evidence == Evidence::kProcess && !random.OneIn(10)) {
    observation.verdict = random.OneIn(5) ? ActorState::kDead : ActorState::kRestarting;
  }
  if (observation.evidence == Evidence::kConnection && !random.OneIn(10)) {
    observation.verdict = ActorState::kUnreachable;
  }
  observation.incarnation = static_cast<std::int64_t>(belief.incarnation) + (random.OneIn(2) ? 0 : random.Below(5) - 2);
  if (random.OneIn(50)) observation.incarnation = 0xFFFFFFFDLL + random.Below(4);
  if (observation.evidence == Evidence::kCall && random.OneIn(2)) observation.incarnation = -1;
  if (!random.OneIn(4)) observation.read_version = belief.version;
  if (random.OneIn(4)) observation.read_version = static_cast<std::uint16_t>(belief.version - 1);
  return observation;
}

TEST_CASE("random traces agree with the reference model") {
  CAPTURE(Seed());
  Random random(Seed());
  for (int trace = 0; trace < 5000; ++trace) {
    Belief belief;
    ReferenceModel model;
    std::string done;
    for (int step = 0; step < 40; ++step) {
      const Observation observation = RandomObservation(random, belief);
      const Belief after = Decide(belief, observation);
      model.Observe(observation);
      done += Show(observation) + " >" + Show(after) + " ";
      CAPTURE(done);
      CheckStep(belief, observation, after);
      REQUIRE(after == model.ToBelief());
      belief = after;
    }
  }
}

// What may be heard about an actor whose truth is now (`state`, `incarnation`), however late, often and out of order:
// the table and the end of a process say what was once true, everything else may say anything.
Observation RandomRumour(Random& random, const Belief& belief, ActorState state, int incarnation) {
  Observation rumour;
  rumour.read_version = random.OneIn(2) ? belief.version : random.Below(3) - 1;
  rumour.incarnation = random.Below(incarnation + 1);
  const bool present = rumour.incarnation == incarnation;
  switch (random.Below(6)) {
    case 0:
    case 1:
      rumour.evidence = Evidence::kRay;
      rumour.verdict = kStates[random.Below(kActorStateCount)];
      break;
    case 2: {
      rumour.evidence = Evidence::kTable;
      const ActorState ever[] = {rumour.incarnation == 0 ? ActorState::kPending : ActorState::kRestarting,
                                 ActorState::kAlive, ActorState::kDead};
      const int last = !present ? 2 : state == ActorState::kDead ? 2 : state == ActorState::kAlive ? 1 : 0;
      rumour.verdict = ever[random.Below(last + 1)];
      break;
    }
    case 3:
      if (random.OneIn(2)) {
        rumour.evidence = Evidence::kConnection;
        rumour.verdict = ActorState::kUnreachable;
      } else {
        rumour.evidence = Evidence::kProcess;
        rumour.verdict = present && state != ActorState::kDead ? ActorState::kUnknown : ActorState::kRestarting;
      }
      break;
    case 4:
      rumour.evidence = Evidence::kSilence;
      rumour.verdict = random.OneIn(2) ? ActorState::kUnreachable : ActorState::kAlive;
      rumour.incarnation = belief.incarnation;
      break;
    default:
      rumour.evidence = Evidence::kCall;
      rumour.verdict = ActorState::kDead;
      rumour.incarnation = Observation::kNoIncarnation;
      break;
  }
  return rumour;
}

Observation Make(Evidence evidence, ActorState verdict, std::int64_t incarnation, std::int32_t read_version) {
  Observation observation;
  observation.evidence = evidence;
  observation.verdict = verdict;
  observation.incarnation = incarnation;
  observation.read_version = read_version;
  return observation;
}

// The sources have come to the truth and say so a few times, as the watcher makes them do while an actor is not up.
Belief Converge(Belief belief, ActorState state, int incarnation) {
  for (int round = 0; round < 3; ++round) {
    const auto apply = [&belief](const Observation& observation) {
      const Belief after = Decide(belief, observation);
      CheckStep(belief, observation, after);
      belief = after;
    };
    apply(Make(Evidence::kRay, state, Observation::kNoIncarnation, -1));
    apply(Make(Evidence::kTable, state, incarnation, belief.version));
    if (state == ActorState::kAlive) apply(Make(Evidence::kSilence, ActorState::kAlive, incarnation, -1));
  }
  return belief;
}

void CheckTrue(const Belief& belief, ActorState state, int incarnation) {
  CHECK(belief.state == state);
  CHECK(belief.incarnation == static_cast<std::uint32_t>(incarnation));
  CHECK(belief.incarnation_known);
  CHECK(!belief.provisional);
}

TEST_CASE("liveness: whatever was heard before, the belief comes to the truth") {
  CAPTURE(Seed());
  Random random(Seed());
  for (int trace = 0; trace < 20000; ++trace) {
    const ActorState state = random.OneIn(3)   ? ActorState::kDead
                             : random.OneIn(2) ? ActorState::kRestarting
                                               : ActorState::kAlive;
    const int incarnation = random.Below(5) + (state == ActorState::kRestarting ? 1 : 0);
    Belief belief;
    std::string done;
    for (int left = random.Below(20); left > 0; --left) {
      const Observation rumour = RandomRumour(random, belief, state, incarnation);
      const Belief after = Decide(belief, rumour);
      done += Show(rumour) + " >" + Show(after) + " ";
      CAPTURE(done);
      CheckStep(belief, rumour, after);
      belief = after;
    }
    CAPTURE(done);
    CheckTrue(Converge(belief, state, incarnation), state, incarnation);
  }
}

// An actor as the control store keeps it, with sources that lag in their own ways: the process may exit before the
// store knows, the local state follows the store and may skip, table reads take a while, calls bring old news.
class World {
 public:
  explicit World(Random& random) : random_(random) {
    if (random_.OneIn(2)) {
      history_.push_back({ActorState::kPending, 0});
    } else {
      history_.push_back({ActorState::kAlive, random_.Below(3)});
    }
  }

  struct Truth {
    ActorState state;
    int incarnation;
  };
  const Truth& now() const { return history_.back(); }
  const std::string& done() const { return done_; }
  const Belief& belief() const { return belief_; }

  void Step() {
    switch (random_.Below(9)) {
      case 0:
        if (random_.OneIn(2)) Advance();
        break;
      case 1:
        if (now().state == ActorState::kAlive && random_.OneIn(3)) exited_ = now().incarnation;
        break;
      case 2:
      case 3:  // The local state: none before the subscription, then forward only.
        if (subscribed_ || random_.OneIn(3)) {
          subscribed_ = true;
          local_ += static_cast<std::size_t>(random_.Below(static_cast<int>(history_.size() - local_)));
          local_dead_ = local_dead_ || history_[local_].state == ActorState::kDead;
          Tell(Make(Evidence::kRay, history_[local_].state, Observation::kNoIncarnation, -1));
        }
        break;
      case 4:
        reads_.push_back({belief_.version, -1});
        break;
      case 5:
        for (Read& read : reads_) {
          if (read.served < 0 && random_.OneIn(2)) read.served = static_cast<int>(history_.size()) - 1;
        }
        break;
      case 6:
        if (!reads_.empty()) {
          const auto which = reads_.begin() + random_.Below(static_cast<int>(reads_.size()));
          if (which->served >= 0) {
            const Truth truth = history_[static_cast<std::size_t>(which->served)];
            Tell(Make(Evidence::kTable, truth.state, truth.incarnation, which->version));
            named_ = std::max(named_, truth.incarnation);
            reads_.erase(which);
          }
        }
        break;
      case 7:  // Whoever watches a process has its number from the table, and watches up to its end. A port refuses
               // after it, and whenever somebody says so in its name.
        if (random_.OneIn(2)) {
          if (named_ >= 0) Tell(Make(Evidence::kConnection, ActorState::kUnreachable, named_, -1));
        } else if (exited_ >= 0 && named_ >= exited_) {
          Tell(Make(Evidence::kProcess, ActorState::kRestarting, exited_, -1));
        }
        break;
      default:
        if (named_ >= 0 && random_.OneIn(2)) {
          Tell(Make(Evidence::kSilence, random_.OneIn(2) ? ActorState::kUnreachable : ActorState::kAlive, named_, -1));
        } else if (local_dead_ && random_.OneIn(4)) {
          Tell(Make(Evidence::kCall, ActorState::kDead, Observation::kNoIncarnation, -1));
        }
        break;
    }
  }

 private:
  struct Read {
    std::uint16_t version;
    int served;
  };

  void Advance() {
    const Truth last = now();
    const bool dies = random_.OneIn(4);
    switch (last.state) {
      case ActorState::kAlive:
        exited_ = last.incarnation;
        history_.push_back(dies ? Truth{ActorState::kDead, last.incarnation}
                                : Truth{ActorState::kRestarting, last.incarnation + 1});
        break;
      case ActorState::kDead:
        history_.push_back({ActorState::kRestarting, last.incarnation + 1});
        break;
      default:
        history_.push_back(dies               ? Truth{ActorState::kDead, last.incarnation}
                           : random_.OneIn(4) ? Truth{ActorState::kRestarting, last.incarnation + 1}
                                              : Truth{ActorState::kAlive, last.incarnation});
        break;
    }
  }

  void Tell(const Observation& observation) {
    const Belief after = Decide(belief_, observation);
    done_ += Show(observation) + " >" + Show(after) + " ";
    CAPTURE(done_);
    CheckStep(belief_, observation, after);
    belief_ = after;
  }

  Random& random_;
  std::vector<Truth> history_;
  std::vector<Read> reads_;
  Belief belief_;
  std::string done_;
  std::size_t local_ = 0;
  bool subscribed_ = false;
  bool local_dead_ = false;
  int exited_ = -1;
  int named_ = -1;
};

TEST_CASE("liveness: with sources that lag as real ones do") {
  CAPTURE(Seed());
  Random random(Seed() + 1);
  for (int trace = 0; trace < 20000; ++trace) {
    World world(random);
    for (int left = 10 + random.Below(80); left > 0; --left) world.Step();
    CAPTURE(world.done());
    // The end of a process that the store has not heard of is not the store's to contradict: let it say so first.
    const World::Truth truth = world.now();
    const Belief& belief = world.belief();
    if (belief.provisional && truth.state == ActorState::kAlive &&
        belief.incarnation == static_cast<std::uint32_t>(truth.incarnation + 1)) {
      const Belief held = Converge(belief, truth.state, truth.incarnation);
      CHECK(held.state == ActorState::kRestarting);
      CHECK(held.provisional);
      CheckTrue(Converge(held, ActorState::kRestarting, truth.incarnation + 1), ActorState::kRestarting,
                truth.incarnation + 1);
      CheckTrue(Converge(held, ActorState::kAlive, truth.incarnation + 1), ActorState::kAlive, truth.incarnation + 1);
      CheckTrue(Converge(held, ActorState::kDead, truth.incarnation), ActorState::kDead, truth.incarnation);
    } else {
      CheckTrue(Converge(belief, truth.state, truth.incarnation), truth.state, truth.incarnation);
    }
  }
}

}  // namespace
}  // namespace actorsub
