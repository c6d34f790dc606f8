// Any bytes, split anywhere, give the events that the reference gives, one protocol error at most, and nothing after
// it.
//
// Input: the first byte seeds the splits, the rest is what the server sent.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "http2_frames.h"
#include "http2_reference.h"

namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using actorsub::Http2Event;
  if (size == 0) return 0;
  std::uint32_t random = data[0] * 2654435761U | 1U;
  const std::vector<std::uint8_t> bytes(data + 1, data + size);
  const std::vector<Http2Event> expected = actorsub::Http2Reference::Events(bytes);
  const bool fails = !expected.empty() && expected.back().kind == actorsub::Http2EventKind::kProtocolError;

  actorsub::Http2Parser parser;
  std::vector<Http2Event> events;
  for (std::size_t at = 0; at < bytes.size();) {
    random ^= random << 13;
    random ^= random >> 17;
    random ^= random << 5;
    const std::size_t piece = std::min<std::size_t>(bytes.size() - at, data[0] == 0 ? 1 : 1 + random % 37);
    // A copy of exactly that size, so that the address sanitizer sees a read past the piece.
    const std::vector<std::uint8_t> copy(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                                         bytes.begin() + static_cast<std::ptrdiff_t>(at + piece));
    parser.Feed(copy.data(), copy.size(), [&](const Http2Event& event) { events.push_back(event); });
    at += piece;
  }
  Require(events == expected, "same events as the reference");
  Require(parser.failed() == fails, "failed exactly when the reference did");
  return 0;
}
