// Random numbers that a failing run can repeat: the seed comes from ACTORSUB_TEST_SEED, else from the system, and
// every randomized test puts it into its failure message.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>

namespace actorsub::testing {

inline std::uint64_t Seed() {
  static const std::uint64_t seed = [] {
    const char* const text = std::getenv("ACTORSUB_TEST_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : static_cast<std::uint64_t>(std::random_device{}());
  }();
  return seed;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t Word() { return engine_(); }
  // In [0, bound). The slight bias of the remainder does not matter here.
  int Below(int bound) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(bound)); }
  bool OneIn(int n) { return Below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace actorsub::testing
