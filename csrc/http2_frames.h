// The little of HTTP/2 (RFC 9113) that it takes to ask a gRPC server whether it is alive: what it sends on a connection
// without streams, and the handful of frames that we send.
//
// Thread safety: none; a parser belongs to one connection and one thread.
//
// Invariants
//  1. Memory is fixed: a frame header and the first 8 bytes of a payload. Longer payloads are skipped, not stored.
//  2. The events depend on the bytes alone, never on how they were split.
//  3. Each call ends: it consumes a byte, or it returns kNone or kProtocolError.
//  4. kProtocolError comes once. After it every byte is swallowed in silence; only `Reset` makes the parser usable
//  again.
//  5. An error is reported at the first byte that proves it: an answer in HTTP/1 at its third, a TLS alert too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace actorsub {

inline constexpr std::size_t kHttp2FrameHeaderSize = 9;
inline constexpr std::size_t kHttp2PingSize = 8;
// SETTINGS_MAX_FRAME_SIZE as every connection starts; we never raise it, so no legal server exceeds it.
inline constexpr std::uint32_t kHttp2MaxPayloadSize = 16384;

enum class Http2EventKind : std::uint8_t {
  kNone = 0,         // The bytes given are used up.
  kSettings = 1,     // The server's settings. Wants kHttp2SettingsAck back; the values do not concern us.
  kSettingsAck = 2,  // The answer to one of our SETTINGS, in the order in which they were sent.
  kPing = 3,         // Wants EncodePingAck(ping) back.
  kPingAck = 4,
  kGoaway = 5,         // The server will close; `error_code` says why.
  kProtocolError = 6,  // `violation` says which. Whoever talks here does not talk HTTP/2.
};

enum class Http2Violation : std::uint8_t {
  kNone = 0,
  kFrameTooLong = 1,      // Above kHttp2MaxPayloadSize.
  kFirstNotSettings = 2,  // A server speaks first, and SETTINGS is what it says.
  kBadSize = 3,           // SETTINGS not in units of 6, an ack with a payload, PING not 8, GOAWAY under 8.
  kBadStream = 4,         // SETTINGS, PING and GOAWAY are about the connection; their stream is 0.
};

struct Http2Event {
  Http2EventKind kind = Http2EventKind::kNone;
  Http2Violation violation = Http2Violation::kNone;  // kProtocolError.
  std::uint32_t error_code = 0;                      // kGoaway.
  std::array<std::uint8_t, kHttp2PingSize> ping{};   // kPing, kPingAck.
};

class Http2Parser {
 public:
  // Reads from `*data` up to the end of the next frame that means something, moves `*data` and `*size` past what it
  // read, and returns that frame. kNone: everything was read. Frames without meaning here are skipped.
  Http2Event Next(const std::uint8_t** data, std::size_t* size);

  // Calls `visit(const Http2Event&)` for each event in `data`. False after a protocol error, now or earlier.
  template <typename Visitor>
  bool Feed(const std::uint8_t* data, std::size_t size, Visitor&& visit) {
    for (;;) {
      const Http2Event event = Next(&data, &size);
      if (event.kind == Http2EventKind::kNone) return !failed_;
      visit(event);
    }
  }

  void Reset() { *this = Http2Parser(); }
  bool failed() const { return failed_; }
  // A whole header of a valid frame has been seen: the peer does talk HTTP/2.
  bool spoke_http2() const { return spoke_http2_; }

 private:
  Http2Violation CheckHeaderSoFar() const;
  Http2Event Finish();

  std::uint32_t payload_size() const {
    return std::uint32_t{header_[0]} << 16 | std::uint32_t{header_[1]} << 8 | std::uint32_t{header_[2]};
  }
  std::uint8_t type() const { return header_[3]; }
  bool ack() const { return (header_[4] & 1) != 0; }

  std::array<std::uint8_t, kHttp2FrameHeaderSize> header_{};
  std::array<std::uint8_t, 8> kept_{};  // The first bytes of the payload.
  std::uint32_t payload_read_ = 0;
  std::uint8_t header_read_ = 0;
  bool spoke_http2_ = false;
  bool failed_ = false;
};

// What we send. A SETTINGS frame without settings changes nothing and must be acknowledged: the heartbeat. (PING would
// be the obvious choice, but gRPC servers answer the fifth idle one with GOAWAY "too_many_pings".)
inline constexpr std::array<std::uint8_t, kHttp2FrameHeaderSize> kHttp2Settings = {0, 0, 0, 4, 0, 0, 0, 0, 0};
inline constexpr std::array<std::uint8_t, kHttp2FrameHeaderSize> kHttp2SettingsAck = {0, 0, 0, 4, 1, 0, 0, 0, 0};
// The client's connection preface and the SETTINGS frame that must follow it.
inline constexpr std::array<std::uint8_t, 24 + kHttp2FrameHeaderSize> kHttp2ClientPreface = {
    'P',  'R', 'I', ' ',  '*',  ' ',  'H',  'T', 'T', 'P', '/', '2', '.', '0', '\r', '\n', '\r',
    '\n', 'S', 'M', '\r', '\n', '\r', '\n', 0,   0,   0,   4,   0,   0,   0,   0,    0};

std::array<std::uint8_t, kHttp2FrameHeaderSize + kHttp2PingSize> EncodePingAck(
    const std::array<std::uint8_t, kHttp2PingSize>& ping);

}  // namespace actorsub
