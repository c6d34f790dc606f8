// The rules of actor_state.h as one decision table: slow, obvious, and sharing no code with actor_state.cc.
//
// States are letters: U unknown, P pending, A alive, R restarting, X unreachable, D dead. A row applies when each of
// its columns lists the present case; an empty column lists every case. The first row that applies decides. Both sides
// were written from the header, so a difference means that one of the three is wrong.
#pragma once

#include <cstdint>
#include <cstring>

#include "actor_state.h"

namespace actorsub::testing {

inline char Letter(ActorState state) { return "UPARXD"[static_cast<int>(state)]; }

inline ActorState StateOfLetter(char letter) {
  return static_cast<ActorState>(std::strchr("UPARXD", letter) - "UPARXD");
}

struct ReferenceModel {
  char state = 'U';
  Evidence evidence = Evidence::kNone;
  char ray_last = 'U';
  bool known = false;
  bool provisional = false;
  bool answered = false;
  int version = 0;
  std::int64_t incarnation = 0;

  void Observe(const Observation& observation);

  Belief ToBelief() const {
    Belief belief;
    belief.state = StateOfLetter(state);
    belief.evidence = evidence;
    belief.ray_last = StateOfLetter(ray_last);
    belief.incarnation_known = known;
    belief.provisional = provisional;
    belief.answered = answered;
    belief.version = static_cast<std::uint16_t>(version);
    belief.incarnation = static_cast<std::uint32_t>(incarnation);
    return belief;
  }
};

namespace reference {

enum Number { kSame, kNext, kNamed, kAfterNamed, kLastUp };

struct Row {
  char source;  // R ray, T table, E exit, L exit of the last, N a refused connection, S silence, C call.
  const char* verdict;
  const char* ray_last;  // Ray's word before this observation.
  const char* state;
  const char* provisional;  // y, n.
  // The named incarnation against the present one: '<' older by two or more, '-' the previous one, '=', '>' newer.
  const char* relation;
  const char* read;  // f fresh, o outdated, ? unknown.
  // k the incarnation is known, u not; c the state rests on kCall; d it is in doubt, a with an answer.
  const char* basis;
  char to;  // '.': nothing changes. ',': only that the incarnation is known now. '+', '-': answered, not answered.
  Number number;
};

inline constexpr Row kRows[] = {
    // Rule 3: Ray's local state.
    {'R', "P", "", "U", "", "", "", "", 'P', kSame},
    {'R', "A", "", "UP", "", "", "", "", 'A', kSame},
    {'R', "A", "RD", "R", "n", "", "", "", 'A', kSame},
    {'R', "A", "D", "D", "", "", "", "", 'A', kNext},
    {'R', "R", "", "UPAX", "", "", "", "", 'R', kNext},
    {'R', "R", "", "R", "", "", "", "", 'R', kSame},
    {'R', "R", "D", "D", "", "", "", "", 'R', kNext},
    {'R', "D", "", "UPARX", "", "", "", "", 'D', kLastUp},
    // Rules 1, 4 and 5: the table. What is not believed at all:
    {'T', "UX", "", "", "", "", "", "", '.', kSame},
    {'T', "", "", "ARXD", "", "", "o", "u", '.', kSame},
    {'T', "D", "", "", "y", "-", "", "", 'D', kNamed},
    {'T', "", "", "", "y", "<-", "", "", '.', kSame},
    {'T', "", "", "", "", "<-", "o?", "", '.', kSame},
    // Rule 9: up, but Ray's local state still speaks of the one before.
    {'T', "A", "A", "", "y", "=", "", "", 'R', kNamed},
    {'T', "A", "A", "", "", ">", "", "k", 'R', kNamed},
    // Rule 10: the second witness.
    {'T', "A", "", "", "", "=", "f", "a", 'A', kNamed},
    // ... the present incarnation,
    {'T', "P", "", "U", "", "=", "", "", 'P', kNamed},
    {'T', "R", "", "UR", "", "=", "", "", 'R', kNamed},
    {'T', "A", "RD", "UPR", "", "=", "", "", 'R', kNamed},
    {'T', "A", "", "UPR", "", "=", "", "", 'A', kNamed},
    {'T', "D", "", "UPARX", "", "=", "", "", 'D', kNamed},
    {'T', "A", "RD", "D", "", "=", "f", "c", 'R', kNamed},
    {'T', "A", "", "D", "", "=", "f", "c", 'A', kNamed},
    {'T', "R", "", "D", "", "=", "f", "c", 'R', kNamed},
    {'T', "P", "", "D", "", "=", "f", "c", '.', kSame},
    {'T', "", "", "", "", "=", "", "", ',', kSame},
    // ... a newer one, or a correction.
    {'T', "A", "RD", "", "", "<->", "", "", 'R', kNamed},
    {'T', "A", "", "X", "", "<-", "", "", 'X', kNamed},
    {'T', "A", "", "", "", "<->", "", "", 'A', kNamed},
    {'T', "R", "", "", "", "<->", "", "", 'R', kNamed},
    {'T', "D", "", "", "", "<->", "", "", 'D', kNamed},
    {'T', "P", "", "UP", "", "<->", "", "", 'P', kNamed},
    // Rule 2: an exit.
    {'E', "R", "", "D", "", "=", "", "", '.', kSame},
    {'E', "R", "", "", "", "=>", "", "", 'R', kAfterNamed},
    {'L', "D", "", "D", "", "=", "", "", '.', kSame},
    {'L', "D", "", "", "", "=>", "", "", 'D', kNamed},
    // Rule 10: a refusal, and what silence and answer are in doubt.
    {'N', "X", "", "X", "", "=", "", "d", '-', kSame},
    {'N', "X", "", "AX", "", "=>", "", "", 'X', kNamed},
    {'S', "X", "", "X", "", "=", "", "d", '-', kSame},
    {'S', "A", "", "X", "", "=", "", "d", '+', kSame},
    // Rule 6: silence and answer.
    {'S', "X", "", "A", "", "=", "", "", 'X', kSame},
    {'S', "A", "", "X", "", "=", "", "", 'A', kSame},
    // Rule 5: a call that found the actor dead.
    {'C', "D", "", "", "y", "-", "", "", 'D', kNamed},
    {'C', "D", "", "D", "", "=", "", "", '.', kSame},
    {'C', "D", "", "", "", "=>", "", "", 'D', kNamed},
};

inline bool Lists(const char* column, char value) { return *column == '\0' || std::strchr(column, value) != nullptr; }

}  // namespace reference

inline void ReferenceModel::Observe(const Observation& observation) {
  using namespace reference;
  constexpr std::int64_t kMaxNamed = 0xFFFFFFFELL;
  const char verdict = Letter(observation.verdict);
  const std::int64_t last_up = provisional ? incarnation - 1 : incarnation;
  std::int64_t named = observation.incarnation;
  char source = '?';
  switch (observation.evidence) {
    case Evidence::kNone:
      return;
    case Evidence::kRay:
      source = 'R';
      break;
    case Evidence::kTable:
      source = 'T';
      break;
    case Evidence::kProcess:
      source = verdict == 'D' ? 'L' : 'E';
      break;
    case Evidence::kConnection:
      source = 'N';
      break;
    case Evidence::kSilence:
      source = 'S';
      break;
    case Evidence::kCall:
      source = 'C';
      break;
  }

  const char ray_before = ray_last;
  bool names = false;
  if (source == 'R') {
    if (verdict == 'U' || verdict == 'X' || verdict == ray_last || (verdict == 'P' && ray_last != 'U')) return;
    ray_last = verdict;
  } else if (source == 'C' && named == Observation::kNoIncarnation) {
    named = last_up;
  } else {
    if (named < 0 || named > kMaxNamed) return;
    names = true;
  }

  const char relation = named > incarnation ? '>' : named == incarnation ? '=' : named == incarnation - 1 ? '-' : '<';
  const bool in_doubt = state == 'X' && evidence == Evidence::kConnection;
  const char read = observation.read_version == version ? 'f' : observation.read_version >= 0 ? 'o' : '?';
  for (const Row& row : kRows) {
    const bool basis = *row.basis == '\0' || (*row.basis == 'c' && evidence == Evidence::kCall) ||
                       (*row.basis == 'k' && known) || (*row.basis == 'u' && !known) ||
                       (*row.basis == 'd' && in_doubt) || (*row.basis == 'a' && in_doubt && answered);
    if (row.source != source || !basis || !Lists(row.verdict, verdict) || !Lists(row.ray_last, ray_before) ||
        !Lists(row.state, state) || !Lists(row.provisional, provisional ? 'y' : 'n') ||
        (source != 'R' && !Lists(row.relation, relation)) || !Lists(row.read, read)) {
      continue;
    }
    if (row.to == '.') return;
    if (names && source != 'S') known = true;
    if (row.to == ',') return;
    if (row.to == '+' || row.to == '-') {
      if (answered != (row.to == '+')) version = (version + 1) % 65536;
      answered = row.to == '+';
      return;
    }
    const std::int64_t number = row.number == kSame    ? incarnation
                                : row.number == kNext  ? (incarnation < kMaxNamed + 1 ? incarnation + 1 : incarnation)
                                : row.number == kNamed ? named
                                : row.number == kAfterNamed ? named + 1
                                                            : last_up;
    const bool now_provisional = source == 'E';
    const bool moved = row.to != state || number != incarnation || source == 'N';
    if (moved) evidence = observation.evidence;
    if (moved || now_provisional != provisional) version = (version + 1) % 65536;
    state = row.to;
    incarnation = number;
    provisional = now_provisional;
    answered = false;
    return;
  }
}

}  // namespace actorsub::testing
