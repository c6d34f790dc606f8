// Any bytes are choices for the steps of submit_queue_reference.h; the queue must do what its reference does, and every
// ticket must have had one end when all is closed. When the bytes run out every choice is 0.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "submit_queue_reference.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::size_t at = 0;
  actorsub::testing::QueuePair pair([&](unsigned bound) { return at < size ? data[at++] % bound : 0U; });
  try {
    while (at < size) pair.Step();
    pair.Finish();
  } catch (const std::logic_error& error) {
    std::fprintf(stderr, "violated: %s\n", error.what());
    std::abort();
  }
  return 0;
}
