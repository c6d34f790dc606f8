// A slow, obvious reading of the same frames, for the unit test and the fuzzer to compare with: it keeps all bytes and
// starts over for each one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "http2_frames.h"

namespace actorsub {

inline bool operator==(const Http2Event& a, const Http2Event& b) {
  return a.kind == b.kind && a.violation == b.violation && a.error_code == b.error_code && a.ping == b.ping;
}

class Http2Reference {
 public:
  // The events of `bytes`, up to and including a protocol error.
  static std::vector<Http2Event> Events(const std::vector<std::uint8_t>& bytes) {
    std::vector<Http2Event> events;
    std::size_t at = 0;
    for (bool first = true;; first = false) {
      if (const auto violation = Violation(bytes, at, first)) {
        Http2Event event;
        event.kind = Http2EventKind::kProtocolError;
        event.violation = *violation;
        events.push_back(event);
        return events;
      }
      if (bytes.size() - at < 9) return events;
      const std::size_t size = Size(bytes, at);
      if (bytes.size() - at - 9 < size) return events;
      const std::uint8_t type = bytes[at + 3];
      const bool ack = (bytes[at + 4] & 1) != 0;
      Http2Event event;
      if (type == 4) event.kind = ack ? Http2EventKind::kSettingsAck : Http2EventKind::kSettings;
      if (type == 6) {
        event.kind = ack ? Http2EventKind::kPingAck : Http2EventKind::kPing;
        for (std::size_t i = 0; i < 8; ++i) event.ping[i] = bytes[at + 9 + i];
      }
      if (type == 7) {
        event.kind = Http2EventKind::kGoaway;
        for (std::size_t i = 0; i < 4; ++i) event.error_code = event.error_code << 8 | bytes[at + 13 + i];
      }
      if (event.kind != Http2EventKind::kNone) events.push_back(event);
      at += 9 + size;
    }
  }

 private:
  static std::size_t Size(const std::vector<std::uint8_t>& bytes, std::size_t at) {
    return std::size_t{bytes[at]} * 65536 + std::size_t{bytes[at + 1]} * 256 + bytes[at + 2];
  }

  // The first thing wrong with the header at `at`, as far as its bytes are there.
  static std::optional<Http2Violation> Violation(const std::vector<std::uint8_t>& bytes, std::size_t at, bool first) {
    const std::size_t have = bytes.size() - at;
    if (have >= 3 && Size(bytes, at) > 16384) return Http2Violation::kFrameTooLong;
    if (have >= 4 && first && bytes[at + 3] != 4) return Http2Violation::kFirstNotSettings;
    if (have >= 5) {
      const std::size_t size = Size(bytes, at);
      const std::uint8_t type = bytes[at + 3];
      const bool ack = (bytes[at + 4] & 1) != 0;
      if (type == 4 && ack && size != 0) return Http2Violation::kBadSize;
      if (type == 4 && !ack && size % 6 != 0) return Http2Violation::kBadSize;
      if (type == 4 && ack && first) return Http2Violation::kFirstNotSettings;
      if (type == 6 && size != 8) return Http2Violation::kBadSize;
      if (type == 7 && size < 8) return Http2Violation::kBadSize;
    }
    if (have >= 9) {
      const std::uint8_t type = bytes[at + 3];
      const bool on_stream = bytes[at + 5] % 128 != 0 || bytes[at + 6] != 0 || bytes[at + 7] != 0 || bytes[at + 8] != 0;
      if ((type == 4 || type == 6 || type == 7) && on_stream) return Http2Violation::kBadStream;
    }
    return std::nullopt;
  }
};

}  // namespace actorsub
