#include "http2_frames.h"

#include <algorithm>

namespace actorsub {
namespace {

constexpr std::uint8_t kTypeSettings = 4;
constexpr std::uint8_t kTypePing = 6;
constexpr std::uint8_t kTypeGoaway = 7;
constexpr std::uint32_t kSettingSize = 6;
constexpr std::uint32_t kGoawayMinSize = 8;  // Last stream id and error code; text may follow.

bool IsConnectionFrame(std::uint8_t type) { return type == kTypeSettings || type == kTypePing || type == kTypeGoaway; }

}  // namespace

// Looks only at the fields that are complete, so that garbage is recognised although no more of it may come.
Http2Violation Http2Parser::CheckHeaderSoFar() const {
  if (header_read_ == 3 && payload_size() > kHttp2MaxPayloadSize) return Http2Violation::kFrameTooLong;
  if (header_read_ == 4 && !spoke_http2_ && type() != kTypeSettings) return Http2Violation::kFirstNotSettings;
  if (header_read_ == 5) {
    const std::uint32_t size = payload_size();
    switch (type()) {
      case kTypeSettings:
        if (ack() ? size != 0 : size % kSettingSize != 0) return Http2Violation::kBadSize;
        if (ack() && !spoke_http2_) return Http2Violation::kFirstNotSettings;
        break;
      case kTypePing:
        if (size != kHttp2PingSize) return Http2Violation::kBadSize;
        break;
      case kTypeGoaway:
        if (size < kGoawayMinSize) return Http2Violation::kBadSize;
        break;
      default:
        break;
    }
  }
  if (header_read_ == kHttp2FrameHeaderSize && IsConnectionFrame(type())) {
    const bool on_stream = (header_[5] & 0x7F) != 0 || header_[6] != 0 || header_[7] != 0 || header_[8] != 0;
    if (on_stream) return Http2Violation::kBadStream;
  }
  return Http2Violation::kNone;
}

// The frame is complete: what it says, kNone if nothing.
Http2Event Http2Parser::Finish() {
  Http2Event event;
  switch (type()) {
    case kTypeSettings:
      event.kind = ack() ? Http2EventKind::kSettingsAck : Http2EventKind::kSettings;
      break;
    case kTypePing:
      event.kind = ack() ? Http2EventKind::kPingAck : Http2EventKind::kPing;
      event.ping = kept_;
      break;
    case kTypeGoaway:
      event.kind = Http2EventKind::kGoaway;
      event.error_code = std::uint32_t{kept_[4]} << 24 | std::uint32_t{kept_[5]} << 16 | std::uint32_t{kept_[6]} << 8 |
                         std::uint32_t{kept_[7]};
      break;
    default:
      break;
  }
  header_read_ = 0;
  payload_read_ = 0;
  return event;
}

Http2Event Http2Parser::Next(const std::uint8_t** data, std::size_t* size) {
  while (!failed_ && *size > 0) {
    if (header_read_ < kHttp2FrameHeaderSize) {
      header_[header_read_++] = **data;
      ++*data;
      --*size;
      const Http2Violation violation = CheckHeaderSoFar();
      if (violation != Http2Violation::kNone) {
        failed_ = true;
        Http2Event event;
        event.kind = Http2EventKind::kProtocolError;
        event.violation = violation;
        return event;
      }
      if (header_read_ < kHttp2FrameHeaderSize) continue;
      spoke_http2_ = true;
    } else {
      const std::size_t taken = std::min<std::size_t>(*size, payload_size() - payload_read_);
      if (payload_read_ < kept_.size()) {
        std::copy_n(*data, std::min(taken, kept_.size() - payload_read_), kept_.begin() + payload_read_);
      }
      payload_read_ += static_cast<std::uint32_t>(taken);
      *data += taken;
      *size -= taken;
    }
    if (payload_read_ < payload_size()) continue;
    const Http2Event event = Finish();
    if (event.kind != Http2EventKind::kNone) return event;
  }
  *data += *size;
  *size = 0;
  return Http2Event();
}

std::array<std::uint8_t, kHttp2FrameHeaderSize + kHttp2PingSize> EncodePingAck(
    const std::array<std::uint8_t, kHttp2PingSize>& ping) {
  std::array<std::uint8_t, kHttp2FrameHeaderSize + kHttp2PingSize> frame = {0, 0, kHttp2PingSize, kTypePing, 1};
  std::copy(ping.begin(), ping.end(), frame.begin() + kHttp2FrameHeaderSize);
  return frame;
}

}  // namespace actorsub
