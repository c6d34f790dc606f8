#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "http2_frames.h"

#include <doctest/doctest.h>

#include <array>
#include <string>
#include <vector>

#include "http2_reference.h"
#include "test_random.h"

namespace actorsub {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes FromHex(const std::string& hex) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

Bytes Frame(std::uint32_t size, std::uint8_t type, std::uint8_t flags = 0, std::uint32_t stream = 0) {
  Bytes bytes = {static_cast<std::uint8_t>(size >> 16),
                 static_cast<std::uint8_t>(size >> 8),
                 static_cast<std::uint8_t>(size),
                 type,
                 flags,
                 static_cast<std::uint8_t>(stream >> 24),
                 static_cast<std::uint8_t>(stream >> 16),
                 static_cast<std::uint8_t>(stream >> 8),
                 static_cast<std::uint8_t>(stream)};
  for (std::uint32_t i = 0; i < size; ++i) bytes.push_back(static_cast<std::uint8_t>(i * 7 + 1));
  return bytes;
}

Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Bytes& ServerSettings() {
  static const Bytes bytes = Frame(0, 4);
  return bytes;
}

// What the worker of an actor (Ray 2.60, gRPC C++) sent: its SETTINGS and WINDOW_UPDATE, acknowledgements, four PING
// acknowledgements, then GOAWAY "too_many_pings" to the fifth.
const Bytes& Recorded() {
  static const Bytes bytes = FromHex(
      "000018040000000000000400400000000500400000000600004000fe030000000100000408000000000000"
      "3f0001000000040100000000000000040100000000000008060100000000616263646566676800000806"
      "010000000061626364656667680000080601000000006162636465666768000008060100000000616263"
      "6465666768000016070000000000000000000000000b746f6f5f6d616e795f70696e6773");
  return bytes;
}

std::vector<Http2Event> Parse(const std::vector<Bytes>& pieces, bool* alive = nullptr) {
  Http2Parser parser;
  std::vector<Http2Event> events;
  bool ok = true;
  for (const Bytes& piece : pieces) {
    ok = parser.Feed(piece.data(), piece.size(), [&](const Http2Event& event) { events.push_back(event); });
  }
  if (alive != nullptr) *alive = ok;
  return events;
}

Http2Violation ViolationOf(const Bytes& bytes) {
  bool alive = true;
  const auto events = Parse({bytes}, &alive);
  if (alive) return Http2Violation::kNone;
  REQUIRE_FALSE(events.empty());
  CHECK(events.back().kind == Http2EventKind::kProtocolError);
  return events.back().violation;
}

TEST_CASE("a recorded server is understood") {
  const auto events = Parse({Recorded()});
  REQUIRE(events.size() == 8);
  CHECK(events[0].kind == Http2EventKind::kSettings);
  CHECK(events[1].kind == Http2EventKind::kSettingsAck);
  CHECK(events[2].kind == Http2EventKind::kSettingsAck);
  for (std::size_t i = 3; i < 7; ++i) {
    CHECK(events[i].kind == Http2EventKind::kPingAck);
    CHECK(std::string(events[i].ping.begin(), events[i].ping.end()) == "abcdefgh");
  }
  CHECK(events[7].kind == Http2EventKind::kGoaway);
  CHECK(events[7].error_code == 11);  // ENHANCE_YOUR_CALM
  CHECK(events == Http2Reference::Events(Recorded()));
}

TEST_CASE("every split in three gives the same events") {
  const Bytes& all = Recorded();
  const auto expected = Parse({all});
  for (std::size_t first = 0; first <= all.size(); ++first) {
    for (std::size_t second = first; second <= all.size(); ++second) {
      const auto begin = all.begin();
      const auto a = static_cast<std::ptrdiff_t>(first);
      const auto b = static_cast<std::ptrdiff_t>(second);
      const auto events = Parse({Bytes(begin, begin + a), Bytes(begin + a, begin + b), Bytes(begin + b, all.end())});
      if (events != expected) FAIL("split at " << first << " and " << second);
    }
  }
}

TEST_CASE("byte by byte, also through frames without meaning and of the greatest size") {
  const Bytes all = ServerSettings() + Frame(16384, 0, 0, 1) + Frame(4, 8) + Frame(0, 99, 0xFF, 5) + Frame(8, 6) +
                    Frame(16384, 7) + Frame(0, 4, 1);
  std::vector<Bytes> pieces;
  for (std::uint8_t byte : all) pieces.push_back({byte});
  const auto events = Parse(pieces);
  CHECK(events == Parse({all}));
  REQUIRE(events.size() == 4);
  CHECK(events[1].kind == Http2EventKind::kPing);
  CHECK(events[1].ping == std::array<std::uint8_t, 8>{1, 8, 15, 22, 29, 36, 43, 50});
  CHECK(events[2].error_code == 0x1D242B32);
  CHECK(events[3].kind == Http2EventKind::kSettingsAck);
}

TEST_CASE("the reserved bit of a stream id is ignored") {
  CHECK(ViolationOf(ServerSettings() + Frame(0, 4, 0, 0x80000000)) == Http2Violation::kNone);
}

TEST_CASE("violations") {
  CHECK(ViolationOf(Frame(16385, 4)) == Http2Violation::kFrameTooLong);
  CHECK(ViolationOf(ServerSettings() + Frame(16385, 0, 0, 1)) == Http2Violation::kFrameTooLong);
  CHECK(ViolationOf(Frame(8, 6)) == Http2Violation::kFirstNotSettings);
  CHECK(ViolationOf(Frame(8, 7)) == Http2Violation::kFirstNotSettings);
  CHECK(ViolationOf(Frame(0, 4, 1)) == Http2Violation::kFirstNotSettings);
  CHECK(ViolationOf(Frame(5, 4)) == Http2Violation::kBadSize);
  CHECK(ViolationOf(ServerSettings() + Frame(6, 4, 1)) == Http2Violation::kBadSize);
  CHECK(ViolationOf(ServerSettings() + Frame(7, 6)) == Http2Violation::kBadSize);
  CHECK(ViolationOf(ServerSettings() + Frame(9, 6)) == Http2Violation::kBadSize);
  CHECK(ViolationOf(ServerSettings() + Frame(7, 7)) == Http2Violation::kBadSize);
  for (const std::uint8_t type : std::array<std::uint8_t, 3>{4, 6, 7}) {
    for (std::uint32_t stream : {1U, 1U << 8, 1U << 16, 1U << 24, 0x7FFFFFFFU}) {
      const std::uint32_t size = type == 4 ? 6 : 8;
      CHECK(ViolationOf(ServerSettings() + Frame(size, type, 0, stream)) == Http2Violation::kBadStream);
    }
  }
}

TEST_CASE("other protocols are recognised within their shortest answer") {
  const std::string http1 = "HTTP/1.1 400 Bad Request\r\n\r\n";
  CHECK(ViolationOf(Bytes(http1.begin(), http1.begin() + 3)) == Http2Violation::kFrameTooLong);
  CHECK(ViolationOf({0x15, 3, 1, 0, 2, 2, 70}) == Http2Violation::kFrameTooLong);  // A TLS alert.
  CHECK(ViolationOf({'S', 'S', 'H', '-'}) == Http2Violation::kFrameTooLong);
  CHECK(ViolationOf({0, 0, 0, 0}) == Http2Violation::kFirstNotSettings);
}

TEST_CASE("an error is reported once and ends the parser until it is reset") {
  Http2Parser parser;
  int calls = 0;
  const auto count = [&](const Http2Event&) { ++calls; };
  const std::string garbage = "HTTP/1.1 200 OK";
  const Bytes bytes(garbage.begin(), garbage.end());
  CHECK_FALSE(parser.Feed(bytes.data(), bytes.size(), count));
  CHECK_FALSE(parser.Feed(bytes.data(), bytes.size(), count));
  CHECK_FALSE(parser.Feed(ServerSettings().data(), ServerSettings().size(), count));
  CHECK(calls == 1);
  CHECK(parser.failed());
  CHECK_FALSE(parser.spoke_http2());
  parser.Reset();
  CHECK(parser.Feed(ServerSettings().data(), ServerSettings().size(), count));
  CHECK(parser.spoke_http2());
  CHECK(calls == 2);
}

TEST_CASE("nothing is stored of what is skipped") { CHECK(sizeof(Http2Parser) <= 32); }

TEST_CASE("garbage, and frames with single bytes changed, agree with the reference") {
  testing::Random words(testing::Seed());
  const auto random = [&] { return static_cast<unsigned>(words.Word()); };
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes = round % 4 == 0 ? Bytes(random() % 64) : Recorded();
    if (round % 4 == 0) {
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random() % (round % 8 == 0 ? 256 : 9));
    } else {
      for (unsigned changes = random() % 4; changes > 0; --changes) {
        bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
      }
    }
    std::vector<Bytes> pieces;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min<std::size_t>(bytes.size() - at, 1 + random() % 20);
      pieces.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                          bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
      at += size;
    }
    if (Parse(pieces) != Http2Reference::Events(bytes)) FAIL("seed " << testing::Seed() << ", round " << round);
  }
}

TEST_CASE("what we send is what the specification says") {
  const std::string preface(kHttp2ClientPreface.begin(), kHttp2ClientPreface.begin() + 24);
  CHECK(preface == "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  CHECK(std::equal(kHttp2Settings.begin(), kHttp2Settings.end(), kHttp2ClientPreface.begin() + 24));
  const auto to_bytes = [](const auto& array) { return Bytes(array.begin(), array.end()); };
  // Our own frames, read back.
  const auto events =
      Parse({to_bytes(kHttp2Settings), to_bytes(kHttp2SettingsAck), to_bytes(EncodePingAck({9, 8, 7, 6, 5, 4, 3, 2}))});
  REQUIRE(events.size() == 3);
  CHECK(events[0].kind == Http2EventKind::kSettings);
  CHECK(events[1].kind == Http2EventKind::kSettingsAck);
  CHECK(events[2].kind == Http2EventKind::kPingAck);
  CHECK(events[2].ping == std::array<std::uint8_t, 8>{9, 8, 7, 6, 5, 4, 3, 2});
}

}  // namespace
}  // namespace actorsub
