// The sentinel against real processes, real sockets and real signals.
//
// The peer is a child process with a server that speaks just enough HTTP/2; a pipe tells it to misbehave. Each test
// waits on the event descriptor for what must happen, with a generous limit; what must *not* happen is shown by waiting
// for something later that must (more acknowledged heartbeats, say). Latencies are printed, not asserted, except
// against limits that only a defect exceeds.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "sentinel.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <doctest/doctest.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#define ACTORSUB_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ACTORSUB_TSAN 1
#endif
#endif

namespace actorsub {
namespace {

constexpr std::int64_t kLongNs = 20 * kNsPerSecond;  // Only a defect waits that long.

std::int64_t NowNs() { return Clock::Monotonic().NowNs(); }
double Ms(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

// ------------------------------------------------------------------------------------------------ the peer

// What the server is told; one letter each, through a socket pair, answered with the same letter when done.
enum : char {
  kReset = 'r',   // RST all connections.
  kFinish = 'f',  // FIN all connections.
  kGoaway = 'g',  // GOAWAY, then FIN, on all connections.
  kPing = 'p',    // PING on all connections.
  kDrop = 'd',    // From now on, close every new connection at once.
  kMute = 'm',    // From now on, read but do not answer, nor greet unless it floods.
  kHttp1 = 'h',   // From now on, answer every new connection in HTTP/1.
  kExit0 = '0',   // _exit(0).
  kBye = 'b',     // From now on, say SETTINGS, GOAWAY and FIN on every new connection, and acknowledge nothing.
  // From now on, send one thing without end on all connections: SETTINGS, PINGs, frames of an unknown type, frames as
  // long as they may be, or single bytes of those.
  kFloodSettings = 'S',
  kFloodPings = 'Q',
  kFloodUnknown = 'U',
  kFloodLong = 'L',
  kFloodBytes = 'B',
  kPinged = 'P',  // Answered with the number of PING acknowledgements so far, as a letter from 'A'.
  // Answered with the number of acknowledged SETTINGS so far, modulo 64; with kNotYet while one is on its way.
  kAnswered = 'a',
  kNotYet = 'n',
};

// Runs in a forked child: system calls and stack memory only, since other threads may have held any lock at the fork.
class Server {
 public:
  [[noreturn]] static void Run(int control, std::uint16_t port, bool reuse_port, bool tls_like, bool v6) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The sentinel's descriptors are close-on-exec, but this child does not exec.
    if (control > 3) syscall(SYS_close_range, 3, control - 1, 0);
    syscall(SYS_close_range, control + 1, ~0U, 0);
    Server server;
    server.control_ = control;
    server.silent_ = tls_like;
    server.Listen(port, reuse_port, v6);
    for (;;) server.Turn();
  }

 private:
  struct Connection {
    int fd = -1;
    std::size_t size = 0;
    std::size_t preface = 24;
    std::size_t flooded = 0;
    int owed = 0;
    unsigned char bytes[512];
  };

  void Listen(std::uint16_t port, bool reuse_port, bool v6) {
    listener_ = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    const int one = 1;
    setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (reuse_port) setsockopt(listener_, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
    sockaddr_in v4_address{};
    v4_address.sin_family = AF_INET;
    v4_address.sin_port = htons(port);
    v4_address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockaddr_in6 v6_address{};
    v6_address.sin6_family = AF_INET6;
    v6_address.sin6_port = htons(port);
    v6_address.sin6_addr = in6addr_loopback;
    const auto* address = v6 ? reinterpret_cast<sockaddr*>(&v6_address) : reinterpret_cast<sockaddr*>(&v4_address);
    const socklen_t size = v6 ? sizeof v6_address : sizeof v4_address;
    std::uint16_t bound = 0;
    if (bind(listener_, address, size) == 0 && listen(listener_, 512) == 0) {
      sockaddr_in6 name{};
      socklen_t name_size = sizeof name;
      getsockname(listener_, reinterpret_cast<sockaddr*>(&name), &name_size);
      bound = ntohs(name.sin6_port);  // At the same place in both families.
    }
    (void)!write(control_, &bound, sizeof bound);
    if (bound == 0) _exit(1);
  }

  void Turn() {
    pollfd waiting[kMost + 2];
    nfds_t count = 0;
    waiting[count++] = {control_, POLLIN, 0};
    waiting[count++] = {listener_, POLLIN, 0};
    const auto wanted = static_cast<short>(flood_ != 0 ? POLLIN | POLLOUT : POLLIN);
    for (Connection& connection : connections_) {
      if (connection.fd >= 0) waiting[count++] = {connection.fd, wanted, 0};
    }
    if (poll(waiting, count, -1) < 0) return;
    for (Connection& connection : connections_) {
      for (nfds_t i = 2; i < count; ++i) {
        if (connection.fd < 0 || waiting[i].fd != connection.fd) continue;
        if ((waiting[i].revents & ~POLLOUT) != 0) Receive(&connection);
        if (connection.fd >= 0 && (waiting[i].revents & POLLOUT) != 0) Flood(&connection);
      }
    }
    if (waiting[1].revents != 0) Accept();
    if (waiting[0].revents != 0) Obey();
  }

  void Accept() {
    const int fd = accept(listener_, nullptr, nullptr);
    if (fd < 0) return;
    if (drop_) {
      close(fd);
      return;
    }
    if (http1_) {
      static const char kAnswer[] = "HTTP/1.1 400 Bad Request\r\n\r\n";
      (void)!send(fd, kAnswer, sizeof kAnswer - 1, MSG_NOSIGNAL);
    } else if (!silent_ || flood_ != 0) {
      // Settings with two values, a WINDOW_UPDATE.
      static const unsigned char kHello[] = {0, 0,  12, 4, 0, 0, 0, 0, 0, 0, 4, 0, 64, 0, 0,  0, 5,
                                             0, 64, 0,  0, 0, 0, 4, 8, 0, 0, 0, 0, 0,  0, 63, 0, 1};
      (void)!send(fd, kHello, sizeof kHello, MSG_NOSIGNAL);
    }
    if (bye_) {
      static const unsigned char kBoth[] = {0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 7,
                                            0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0};
      (void)!send(fd, kBoth, sizeof kBoth, MSG_NOSIGNAL);
      shutdown(fd, SHUT_WR);
    }
    for (Connection& connection : connections_) {
      if (connection.fd >= 0) continue;
      connection = Connection();
      connection.fd = fd;
      return;
    }
    close(fd);
  }

  void Flood(Connection* connection) {
    if (connection->flooded % flood_frame_ == 0) {
      while (connection->owed > 0 && Acknowledge(connection)) --connection->owed;
    }
    const std::size_t size = flood_ == kFloodBytes ? 1 : sizeof flood_bytes_ - connection->flooded;
    const ssize_t sent = send(connection->fd, flood_bytes_ + connection->flooded, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) connection->flooded = (connection->flooded + static_cast<std::size_t>(sent)) % sizeof flood_bytes_;
    // Each byte a packet of its own.
    if (flood_ == kFloodBytes) usleep(100);
  }

  // As many frames as fit whole: what follows the last one is its payload.
  void BeginFlood(char order) {
    const unsigned char type = order == kFloodSettings ? 4 : order == kFloodPings ? 6 : 0xFA;
    const std::size_t payload = order == kFloodPings ? 8 : order == kFloodLong ? sizeof flood_bytes_ - 9 : 0;
    for (std::size_t at = 0; at < sizeof flood_bytes_; at += 9 + payload) {
      flood_bytes_[at + 1] = static_cast<unsigned char>(payload >> 8);
      flood_bytes_[at + 2] = static_cast<unsigned char>(payload & 0xFF);
      flood_bytes_[at + 3] = type;
    }
    flood_frame_ = 9 + payload;
    flood_ = order;
  }

  static bool Acknowledge(const Connection* connection) {
    static const unsigned char kAck[] = {0, 0, 0, 4, 1, 0, 0, 0, 0};
    return send(connection->fd, kAck, sizeof kAck, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof kAck;
  }

  void Receive(Connection* connection) {
    const ssize_t got = recv(connection->fd, connection->bytes + connection->size,
                             sizeof connection->bytes - connection->size, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      close(connection->fd);
      connection->fd = -1;
      return;
    }
    if (silent_ || http1_) return;
    connection->size += static_cast<std::size_t>(got);
    std::size_t at = 0;
    const std::size_t skipped = std::min(connection->preface, connection->size);
    connection->preface -= skipped;
    at += skipped;
    while (connection->size - at >= 9) {
      const unsigned char* frame = connection->bytes + at;
      const std::size_t size = std::size_t{frame[0]} << 16 | std::size_t{frame[1]} << 8 | frame[2];
      if (connection->size - at < 9 + size) break;
      if (frame[3] == 4 && (frame[4] & 1) == 0) {
        // Not in the middle of a frame.
        if (connection->flooded % flood_frame_ != 0 || !Acknowledge(connection)) ++connection->owed;
        ++answered_;
      }
      if (frame[3] == 6 && (frame[4] & 1) == 1 && std::memcmp(frame + 9, "pingpong", 8) == 0) ++pinged_;
      at += 9 + size;
    }
    std::memmove(connection->bytes, connection->bytes + at, connection->size - at);
    connection->size -= at;
  }

  void Obey() {
    char order = 0;
    if (read(control_, &order, 1) != 1) _exit(0);
    const linger hard = {1, 0};
    static const unsigned char kGoawayFrame[] = {0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 11};
    static const unsigned char kPingFrame[] = {0, 0, 8, 6, 0, 0, 0, 0, 0, 'p', 'i', 'n', 'g', 'p', 'o', 'n', 'g'};
    if (order == kDrop) drop_ = true;
    if (order == kMute) silent_ = true;
    if (order == kHttp1) http1_ = true;
    if (order == kExit0) _exit(0);
    if (order == kBye) bye_ = silent_ = true;
    if (order == kFloodSettings || order == kFloodPings || order == kFloodUnknown || order == kFloodLong ||
        order == kFloodBytes) {
      BeginFlood(order);
    }
    if (order == kPinged) order = static_cast<char>('A' + pinged_);
    if (order == kAnswered) order = Answered();
    for (Connection& connection : connections_) {
      if (connection.fd < 0) continue;
      if (order == kPing) (void)!send(connection.fd, kPingFrame, sizeof kPingFrame, MSG_NOSIGNAL);
      if (order == kGoaway) (void)!send(connection.fd, kGoawayFrame, sizeof kGoawayFrame, MSG_NOSIGNAL);
      if (order == kReset) setsockopt(connection.fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
      if (order == kReset || order == kFinish || order == kGoaway) {
        close(connection.fd);
        connection.fd = -1;
      }
    }
    (void)!write(control_, &order, 1);
  }

  // What the other side's kernel has not acknowledged may not be in its socket yet.
  char Answered() const {
    for (const Connection& connection : connections_) {
      int unsent = 0;
      if (connection.fd >= 0 && (ioctl(connection.fd, SIOCOUTQ, &unsent) != 0 || unsent != 0)) return kNotYet;
    }
    return static_cast<char>(answered_ % 64);
  }

  static constexpr std::size_t kMost = 256;
  int control_ = -1;
  int listener_ = -1;
  bool drop_ = false;
  bool http1_ = false;
  bool silent_ = false;
  bool bye_ = false;
  char flood_ = 0;
  std::size_t flood_frame_ = 9;
  int pinged_ = 0;
  int answered_ = 0;
  Connection connections_[kMost];
  unsigned char flood_bytes_[9 * 17 * 64] = {};  // Holds both 9 and 17 bytes a whole number of times.
};

class Peer {
 public:
  struct Options {
    std::uint16_t port = 0;
    bool reuse_port = false;
    bool tls_like = false;  // Accepts and reads, says nothing.
    bool v6 = false;
  };

  Peer() : Peer(Options()) {}
  explicit Peer(const Options& options) {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) Server::Run(pair[1], options.port, options.reuse_port, options.tls_like, options.v6);
    close(pair[1]);
    control_ = pair[0];
    REQUIRE(read(control_, &port_, sizeof port_) == sizeof port_);
  }
  ~Peer() {
    Kill();
    close(control_);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  // Returns when it is done.
  char Tell(char order) const {
    char answer = 0;
    REQUIRE(write(control_, &order, 1) == 1);
    REQUIRE(read(control_, &answer, 1) == (order == kExit0 ? 0 : 1));
    return answer;
  }
  void Signal(int signal) const { REQUIRE(kill(pid_, signal) == 0); }
  // Returns when it has stopped.
  void Freeze() const {
    Signal(SIGSTOP);
    REQUIRE(waitpid(pid_, nullptr, WUNTRACED) == pid_);
  }
  // Returns at once; the child stays a zombie until `Reap`.
  void KillOnly() const { Signal(SIGKILL); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    Reap();
  }
  void Reap() {
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }
  std::uint16_t port() const { return port_; }

 private:
  pid_t pid_ = 0;
  int control_ = -1;
  std::uint16_t port_ = 0;
};

// A process with threads, which a fork alone cannot have: this program anew, running one test case.
class ThreadedPeer {
 public:
  static constexpr const char* kTestCase = "the process of ThreadedPeer";
  static constexpr const char* kVariable = "ACTORSUB_THREADED_PEER";
  static constexpr int kThreads = 4;

  ThreadedPeer() {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    const std::string only = std::string("--test-case=") + kTestCase;
    const std::string variable = std::string(kVariable) + "=3";
    std::vector<char*> environment;
    for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
    environment.push_back(const_cast<char*>(variable.c_str()));
    environment.push_back(nullptr);
    const char* arguments[] = {"sentinel_test", only.c_str(), "--no-skip", "--minimal", nullptr};
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Also where it is 3 already: a copy is not close-on-exec.
      const int copy = dup(pair[1]);
      dup2(copy, 3);
      if (copy != 3) close(copy);
      execve("/proc/self/exe", const_cast<char**>(arguments), environment.data());
      _exit(127);
    }
    close(pair[1]);
    control_ = pair[0];
    char ready = 0;
    REQUIRE(read(control_, &ready, 1) == 1);
  }
  ~ThreadedPeer() {
    if (pid_ > 0) Kill();
    close(control_);
  }
  ThreadedPeer(const ThreadedPeer&) = delete;
  ThreadedPeer& operator=(const ThreadedPeer&) = delete;

  static void Serve() {
    std::vector<std::thread> threads;
    std::vector<std::array<int, 2>> pipes(kThreads);
    for (auto& ends : pipes) {
      REQUIRE(pipe(ends.data()) == 0);
      threads.emplace_back([end = ends[0]] {
        char order = 0;
        (void)!read(end, &order, 1);
      });
    }
    const char ready = 1;
    REQUIRE(write(3, &ready, 1) == 1);
    char number = 0;
    while (read(3, &number, 1) == 1) {
      const auto index = static_cast<std::size_t>(number);
      REQUIRE(write(pipes[index][1], &number, 1) == 1);
      threads[index].join();
      REQUIRE(write(3, &number, 1) == 1);
    }
    _exit(0);
  }

  // Returns when that thread is gone; 0 is the oldest.
  void EndThread(int number) const {
    char order = static_cast<char>(number);
    REQUIRE(write(control_, &order, 1) == 1);
    REQUIRE(read(control_, &order, 1) == 1);
  }
  std::vector<pid_t> threads() const {
    std::vector<pid_t> ids;
    DIR* directory = opendir(("/proc/" + std::to_string(pid_) + "/task").c_str());
    REQUIRE(directory != nullptr);
    while (const dirent* entry = readdir(directory)) {
      if (entry->d_name[0] != '.') ids.push_back(static_cast<pid_t>(strtol(entry->d_name, nullptr, 10)));
    }
    closedir(directory);
    std::sort(ids.begin(), ids.end());
    return ids;
  }
  void KillOnly() const { REQUIRE(kill(pid_, SIGKILL) == 0); }
  void Kill() {
    KillOnly();
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  int control_ = -1;
};

// The first kernel that says how a thread ended, also after it is gone.
bool ThreadsTell() {
  utsname name{};
  REQUIRE(uname(&name) == 0);
  int major = 0;
  int minor = 0;
  REQUIRE(sscanf(name.release, "%d.%d", &major, &minor) == 2);
  if (major > 6 || (major == 6 && minor >= 15)) return true;
  MESSAGE("skipped: this kernel, " << std::string(name.release) << ", does not say how a thread ended (6.15 does)");
  return false;
}

std::uint64_t StartTicks(pid_t pid) {
  FILE* file = fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r");
  REQUIRE(file != nullptr);
  char text[1024] = {};
  REQUIRE(fgets(text, sizeof text, file) != nullptr);
  fclose(file);
  // The name of this test has neither blanks nor parentheses.
  const char* at = text;
  for (int field = 1; field < 22; ++field) at = strchr(at, ' ') + 1;
  return strtoull(at, nullptr, 10);
}

// ------------------------------------------------------------------------------------------------ our side

ActorId MakeId(std::uint32_t number) {
  ActorId id{};
  std::memcpy(id.data(), &number, sizeof number);
  id[15] = 1;
  return id;
}

void MakeAlive(const SlotRef& slot, std::uint32_t incarnation) {
  Observation observation;
  observation.evidence = Evidence::kTable;
  observation.verdict = ActorState::kAlive;
  observation.incarnation = incarnation;
  slot->Apply(observation);
  REQUIRE(slot->state() == ActorState::kAlive);
}

// What a read of the table says that began when the slot was at `version`; -1: now.
void TableSays(const SlotRef& slot, ActorState state, std::uint32_t incarnation, std::int32_t version = -1) {
  Observation observation;
  observation.evidence = Evidence::kTable;
  observation.verdict = state;
  observation.incarnation = incarnation;
  observation.read_version = version >= 0 ? version : slot->belief().version;
  slot->Apply(observation);
}

WatchTarget TargetOf(const Peer& peer, std::int64_t silence_ms = 1000) {
  WatchTarget target;
  target.ip = "127.0.0.1";
  target.port = peer.port();
  target.silence_ns = silence_ms * kNsPerMs;
  target.in_flight_silence_ns = kNeverNs;
  return target;
}

std::string Name(const SentinelEvent& event) {
  return std::string(SentinelEventKindName(event.kind)) + ":" + SentinelCauseName(event.cause) + ":" +
         std::to_string(event.error_code);
}

// A literal address to which a dial does not lead anywhere, or nothing where this network answers for everybody.
const char* Nowhere() {
  for (const char* ip : {"192.0.2.1", "198.51.100.1", "203.0.113.1", "240.0.0.1"}) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(9);
    REQUIRE(inet_pton(AF_INET, ip, &address.sin_addr) == 1);
    pollfd waiting = {fd, POLLOUT, 0};
    const bool pending = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 &&
                         errno == EINPROGRESS && poll(&waiting, 1, 200) == 0;
    const int error = errno;
    close(fd);
    if (pending || error == ENETUNREACH || error == EHOSTUNREACH) return ip;
  }
  return nullptr;
}

struct Setup {
  explicit Setup(const Sentinel::Options& options = Sentinel::Options()) : sentinel(options) {
    REQUIRE(sentinel.Start() == 0);
  }

  SlotRef AliveSlot(std::uint32_t number = 1, std::uint32_t incarnation = 0) {
    SlotRef slot = registry.Acquire(MakeId(number));
    MakeAlive(slot, incarnation);
    return slot;
  }

  void Drain() {
    std::vector<SentinelEvent> events;
    sentinel.DrainEvents(&events);
    seen.insert(seen.end(), events.begin(), events.end());
  }

  // The first event of that kind that has not been asked for before.
  SentinelEvent Expect(SentinelEventKind kind, std::int64_t limit_ns = kLongNs) {
    const std::int64_t until_ns = NowNs() + limit_ns;
    for (;;) {
      Drain();
      for (std::size_t i = 0; i < seen.size(); ++i) {
        if (seen[i].kind != kind) continue;
        const SentinelEvent event = seen[i];
        seen.erase(seen.begin() + static_cast<std::ptrdiff_t>(i));
        return event;
      }
      const std::int64_t left_ns = until_ns - NowNs();
      if (left_ns <= 0) break;
      sentinel.WaitForEvents(left_ns);
    }
    std::string others;
    for (const SentinelEvent& event : seen) others += " " + Name(event);
    FAIL("no event " << std::string(SentinelEventKindName(kind)) << "; there were:" << others);
    return SentinelEvent();
  }

  // Nothing else may have been seen up to now.
  void ExpectNoMore() {
    Drain();
    for (const SentinelEvent& event : seen) {
      FAIL_CHECK("unexpected event " << Name(event));
    }
  }

  // For what has no event of its own.
  void Until(const std::function<bool()>& condition, const char* what) {
    const std::int64_t until_ns = NowNs() + kLongNs;
    while (!condition()) {
      if (NowNs() > until_ns) FAIL("waited in vain for " << std::string(what));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  // The process only. Returns when two of its threads are watched.
  void WatchProcess(const SlotRef& slot, const ThreadedPeer& peer, std::uint32_t incarnation = 0) {
    WatchTarget target;
    target.incarnation = incarnation;
    target.connect = false;
    target.pid = peer.pid();
    REQUIRE(sentinel.Watch(slot, target) == WatchResult::kWatching);
    Until([&] { return sentinel.counters().thread_watches == 2; }, "the threads are watched");
  }
  void UntilBeats(std::uint64_t more) {
    const std::uint64_t target = sentinel.counters().heartbeats_acked + more;
    Until([&] { return sentinel.counters().heartbeats_acked >= target; }, "heartbeats");
  }

  // Returns when every heartbeat so far has its answer in our socket, read or not.
  void UntilAnswered(const Peer& peer) {
    Until([&] { return peer.Tell(kAnswered) == static_cast<char>(sentinel.counters().heartbeats_sent % 64); },
          "the answers");
  }
  // Returns when a turn of the loop that began after the call has ended.
  void WholeTurn() {
    // The first to be counted may have begun before; the third begins when the second has ended.
    for (int i = 0; i < 3; ++i) {
      const std::uint64_t turns = sentinel.counters().turns;
      const std::int64_t until_ns = NowNs() + kLongNs;
      while (sentinel.counters().turns == turns) {
        // Again and again: a turn that was counted takes in one more poke before it ends.
        sentinel.Poke();
        if (NowNs() > until_ns) FAIL("waited in vain for a turn of the loop");
        std::this_thread::yield();
      }
    }
  }

  Registry registry;
  Sentinel sentinel;
  std::vector<SentinelEvent> seen;
};

void PrintLatencies(const char* what, std::vector<std::int64_t> latencies_ns) {
  std::sort(latencies_ns.begin(), latencies_ns.end());
  std::printf("[latency] %-52s p50 %7.2f ms, max %7.2f ms (n = %zu)\n", what, Ms(latencies_ns[latencies_ns.size() / 2]),
              Ms(latencies_ns.back()), latencies_ns.size());
}

// ------------------------------------------------------------------------------------------------ timers

TEST_CASE("timers come due in order, can be moved and cancelled") {
  Setup setup;
  const std::int64_t begin_ns = NowNs();
  CHECK(setup.sentinel.AddTimer(1, begin_ns + 60 * kNsPerMs));
  CHECK(setup.sentinel.AddTimer(2, begin_ns + 20 * kNsPerMs));
  CHECK(setup.sentinel.AddTimer(3, begin_ns + 40 * kNsPerMs));
  CHECK(setup.sentinel.AddTimer(4, begin_ns + 10 * kNsPerMs));
  CHECK(setup.sentinel.AddTimer(5, begin_ns - 1));
  CHECK(setup.sentinel.AddTimer(6, kNeverNs));
  CHECK(setup.sentinel.CancelTimer(4));
  CHECK_FALSE(setup.sentinel.CancelTimer(4));
  CHECK(setup.sentinel.AddTimer(2, begin_ns + 80 * kNsPerMs));
  std::vector<std::int64_t> late_ns;
  for (const auto& [id, after_ms] : std::vector<std::pair<std::uint64_t, int>>{{5, 0}, {3, 40}, {1, 60}, {2, 80}}) {
    const SentinelEvent event = setup.Expect(SentinelEventKind::kTimer);
    CHECK(event.timer_id == id);
    CHECK(event.seen_ns >= begin_ns + after_ms * kNsPerMs);
    if (after_ms > 0) late_ns.push_back(event.seen_ns - begin_ns - after_ms * kNsPerMs);
    CHECK_FALSE(setup.sentinel.CancelTimer(id));
  }
  setup.ExpectNoMore();
  PrintLatencies("timer: deadline to fired", late_ns);
}

TEST_CASE("a timer that fired but was not drained can still be cancelled") {
  Setup setup;
  setup.sentinel.AddTimer(1, 0);
  setup.sentinel.AddTimer(2, 0);
  setup.sentinel.AddTimer(3, 0);
  setup.Until([&] { return setup.sentinel.counters().timers_fired == 3; }, "timers");
  CHECK(setup.sentinel.CancelTimer(1));
  setup.sentinel.AddTimer(2, kNeverNs);  // Moved away.
  CHECK(setup.Expect(SentinelEventKind::kTimer).timer_id == 3);
  setup.ExpectNoMore();
}

TEST_CASE("100,000 timers, half of them cancelled, each of the others exactly once") {
  Setup setup;
  constexpr std::uint64_t kCount = 100'000;
  const std::int64_t begin_ns = NowNs();
  for (std::uint64_t id = 0; id < kCount; ++id) {
    REQUIRE(setup.sentinel.AddTimer(id, begin_ns + static_cast<std::int64_t>((id * 7919) % 300) * kNsPerMs));
  }
  const std::int64_t added_ns = NowNs();
  std::uint64_t cancelled = 0;
  for (std::uint64_t id = 1; id < kCount; id += 2) cancelled += setup.sentinel.CancelTimer(id) ? 1 : 0;
  std::vector<int> times(kCount, 0);
  std::uint64_t fired = 0;
  const std::int64_t until_ns = NowNs() + kLongNs;
  std::vector<SentinelEvent> events;
  while (fired < kCount - cancelled && NowNs() < until_ns) {
    setup.sentinel.WaitForEvents(kLongNs);
    events.clear();
    setup.sentinel.DrainEvents(&events);
    for (const SentinelEvent& event : events) {
      ++times[event.timer_id];
      ++fired;
    }
  }
  CHECK(fired == kCount - cancelled);
  CHECK(*std::max_element(times.begin(), times.end()) == 1);
  std::printf("[cost] AddTimer of %llu: %.0f ns each\n", static_cast<unsigned long long>(kCount),
              static_cast<double>(added_ns - begin_ns) / kCount);
}

TEST_CASE("the number of timers is bounded") {
  Sentinel::Options options;
  options.max_timers = 2;
  Setup setup(options);
  CHECK(setup.sentinel.AddTimer(1, kNeverNs));
  CHECK(setup.sentinel.AddTimer(2, kNeverNs));
  CHECK_FALSE(setup.sentinel.AddTimer(3, kNeverNs));
  CHECK(setup.sentinel.AddTimer(1, kNeverNs - 1));
  CHECK(setup.sentinel.CancelTimer(1));
  CHECK(setup.sentinel.AddTimer(3, kNeverNs));
}

// ------------------------------------------------------------------------------------------------ alive

TEST_CASE("a healthy peer: heartbeats are acknowledged and nothing is said") {
  for (const bool v6 : {false, true}) {
    Peer::Options options;
    options.v6 = v6;
    Peer peer(options);
    if (peer.port() == 0) {
      MESSAGE("skipped: no IPv6 loopback");
      continue;
    }
    Setup setup;
    const SlotRef slot = setup.AliveSlot();
    WatchTarget target = TargetOf(peer, 400);
    target.ip = v6 ? "::1" : "127.0.0.1";
    target.pid = peer.pid();
    target.pid_start_ticks = StartTicks(peer.pid());
    CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kWatching);
    setup.UntilBeats(20);
    CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kUnchanged);
    peer.Tell(kPing);
    setup.UntilBeats(3);
    CHECK(peer.Tell(kPinged) == 'B');
    setup.ExpectNoMore();
    CHECK(slot->state() == ActorState::kAlive);
    const SentinelCounters counters = setup.sentinel.counters();
    CHECK(counters.watches == 1);
    CHECK(counters.process_watches == 1);
    CHECK(counters.sockets == 1);
    CHECK(counters.dials == 1);
    CHECK(counters.silences == 0);
    CHECK(setup.sentinel.Unwatch(slot->id()));
    CHECK_FALSE(setup.sentinel.Unwatch(slot->id()));
    setup.Until([&] { return setup.sentinel.counters().watches == 0; }, "the end of the watch");
    CHECK(setup.sentinel.counters().sockets == 0);
    CHECK(setup.sentinel.counters().process_watches == 0);
  }
}

TEST_CASE("what cannot be watched is refused at the call") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer);
  target.ip = "localhost";
  CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kBadAddress);
  target = TargetOf(peer);
  target.port = 0;
  CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kBadAddress);
  target.connect = false;
  CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kNothingToWatch);
  CHECK(setup.sentinel.Watch(SlotRef(), TargetOf(peer)) == WatchResult::kNothingToWatch);
  Sentinel idle;
  CHECK(idle.Watch(slot, TargetOf(peer)) == WatchResult::kNotRunning);
  CHECK_FALSE(idle.AddTimer(1, 0));
  CHECK_FALSE(idle.WaitForEvents(-1));
}

// ------------------------------------------------------------------------------------------------ exits

// Kills `rounds` peers and collects how long it took until the slot refused.
std::vector<std::int64_t> KillRounds(int rounds, bool with_process, bool with_connection, bool http2) {
  std::vector<std::int64_t> latencies_ns;
  for (int round = 0; round < rounds; ++round) {
    Peer::Options options;
    options.tls_like = !http2;
    Peer peer(options);
    Setup setup;
    const SlotRef slot = setup.AliveSlot(1, 4);
    WatchTarget target = TargetOf(peer);
    target.incarnation = 4;
    target.http2 = http2;
    target.connect = with_connection;
    if (with_process) target.pid = peer.pid();
    REQUIRE(setup.sentinel.Watch(slot, target) == WatchResult::kWatching);
    if (with_connection && http2) setup.UntilBeats(1);
    setup.Until(
        [&] {
          const SentinelCounters counters = setup.sentinel.counters();
          return counters.process_watches == (with_process ? 1 : 0) && counters.sockets == (with_connection ? 1 : 0);
        },
        "the watch");
    const std::int64_t killed_ns = NowNs();
    peer.KillOnly();
    SentinelEvent event;
    if (with_process) {
      event = setup.Expect(SentinelEventKind::kExited);
      CHECK(slot->state() == ActorState::kRestarting);
      CHECK(slot->belief().incarnation == 5);
      CHECK(event.change.after.state == ActorState::kRestarting);
      CHECK(event.cause == SentinelCause::kProcessExit);
      // The connection may have been first; then the end of the process is the last word all the same.
      const bool doubted = setup.sentinel.counters().doubts == 1;
      CHECK(event.change.before.state == (doubted ? ActorState::kUnreachable : ActorState::kAlive));
      if (doubted) event.seen_ns = setup.Expect(SentinelEventKind::kUnreachable).seen_ns;
    } else {
      event = setup.Expect(SentinelEventKind::kUnreachable);
      // Invariant 1: the word was changed before the event was queued.
      CHECK(InDoubt(slot->belief()));
      CHECK(slot->belief().incarnation == 4);
      CHECK(event.change.before.state == ActorState::kAlive);
      CHECK(event.change.after == slot->belief());
      CHECK(event.cause == SentinelCause::kRefused);
      CHECK(slot->losses() == 1);
      // It goes on being dialed until Ray says that it is over.
      setup.Until([&] { return setup.sentinel.counters().refused >= 4; }, "more refusals");
      CHECK(setup.sentinel.counters().watches == 1);
      TableSays(slot, ActorState::kRestarting, 5);
      const SentinelEvent end = setup.Expect(SentinelEventKind::kExited);
      CHECK(end.cause == SentinelCause::kRefused);
      CHECK_FALSE(end.change.changed);
      CHECK(setup.sentinel.counters().false_alarms == 0);
    }
    CHECK(event.change.changed);
    CHECK(event.incarnation == 4);
    CHECK(event.actor_id == slot->id());
    CHECK(slot->losses() == 1);
    latencies_ns.push_back(event.seen_ns - killed_ns);
    setup.Until([&] { return setup.sentinel.counters().watches == 0; }, "the end of the watch");
    CHECK(setup.sentinel.counters().sockets == 0);
    CHECK(setup.sentinel.counters().exits_by_process == (with_process ? 1 : 0));
  }
  return latencies_ns;
}

TEST_CASE("SIGKILL") {
  PrintLatencies("SIGKILL to refusing, process and connection", KillRounds(20, true, true, true));
  PrintLatencies("SIGKILL to refusing, process only", KillRounds(20, true, false, true));
  PrintLatencies("SIGKILL to refusing, connection only", KillRounds(20, false, true, true));
  PrintLatencies("SIGKILL to refusing, connection only, as under TLS", KillRounds(20, false, true, false));
}

TEST_CASE(ThreadedPeer::kTestCase* doctest::skip()) {
  if (getenv(ThreadedPeer::kVariable) != nullptr) ThreadedPeer::Serve();
}

TEST_CASE("a fatal signal is told before the process is gone") {
  if (!ThreadsTell()) return;
  std::vector<std::int64_t> latencies_ns;
  for (int round = 0; round < 20; ++round) {
    ThreadedPeer peer;
    Setup setup;
    const SlotRef slot = setup.AliveSlot(1, 4);
    setup.WatchProcess(slot, peer, 4);
    // A thread that has a tracer is not gone before its tracer says so, and so neither is the process: what stands for
    // the time that the last thread takes to free memory and devices.
    const pid_t held = peer.threads().back();
    if (ptrace(PTRACE_SEIZE, held, nullptr, nullptr) != 0) {
      MESSAGE("skipped: tracing is not permitted here, errno " << errno);
      return;
    }
    pollfd process = {static_cast<int>(syscall(SYS_pidfd_open, peer.pid(), 0)), POLLIN, 0};
    REQUIRE(process.fd >= 0);
    const std::int64_t killed_ns = NowNs();
    peer.KillOnly();
    const SentinelEvent event = setup.Expect(SentinelEventKind::kExited);
    CHECK(poll(&process, 1, 0) == 0);
    CHECK(event.cause == SentinelCause::kProcessExit);
    CHECK(event.incarnation == 4);
    CHECK(slot->state() == ActorState::kRestarting);
    CHECK(slot->belief().evidence == Evidence::kProcess);
    latencies_ns.push_back(event.seen_ns - killed_ns);
    setup.Until([&] { return setup.sentinel.counters().watches == 0; }, "the end of the watch");
    const SentinelCounters counters = setup.sentinel.counters();
    CHECK(counters.exits_by_process == 1);
    CHECK(counters.exits_by_thread == 1);
    CHECK(counters.process_watches == 0);
    CHECK(counters.thread_watches == 0);
    REQUIRE(waitpid(held, nullptr, __WALL) == held);
    close(process.fd);
    setup.ExpectNoMore();
  }
  PrintLatencies("SIGKILL to refusing, by a thread", latencies_ns);
}

TEST_CASE("a thread that ends by itself is no exit, and another one is watched instead") {
  if (!ThreadsTell()) return;
  ThreadedPeer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.WatchProcess(slot, peer);
  for (int ended = 1; ended <= ThreadedPeer::kThreads; ++ended) {
    peer.EndThread(ended - 1);
    setup.WholeTurn();
    // A sanitizer may have threads of its own.
    const std::size_t left = peer.threads().size() - 1;
    CHECK(setup.sentinel.counters().thread_watches == std::min<std::size_t>(2, left));
  }
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
  peer.Kill();
  CHECK(setup.Expect(SentinelEventKind::kExited).cause == SentinelCause::kProcessExit);
  CHECK(slot->state() == ActorState::kRestarting);
}

TEST_CASE("a thread with a tracer that ended is asked a few times how, and then let go") {
  if (!ThreadsTell()) return;
  ThreadedPeer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.WatchProcess(slot, peer);
  std::vector<pid_t> held = peer.threads();
  // Only those that are watched; the rest end as they like.
  held = {held[1], held[2]};
  for (const pid_t id : held) {
    if (ptrace(PTRACE_SEIZE, id, nullptr, nullptr) != 0) {
      MESSAGE("skipped: tracing is not permitted here, errno " << errno);
      return;
    }
  }
  peer.KillOnly();
  setup.Until([&] { return setup.sentinel.counters().thread_watches == 0; }, "both are let go");
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
  for (const pid_t id : held) REQUIRE(waitpid(id, nullptr, __WALL) == id);
  CHECK(setup.Expect(SentinelEventKind::kExited).cause == SentinelCause::kProcessExit);
  CHECK(setup.sentinel.counters().exits_by_thread == 0);
}

TEST_CASE("an orderly exit looks the same") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer));
  setup.UntilBeats(1);
  peer.Tell(kExit0);
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kRefused);
  CHECK(InDoubt(slot->belief()));
}

TEST_CASE("gone before the watch began: no process, another process, nobody listening") {
  Peer peer;
  Peer other;
  Setup setup;
  WatchTarget target = TargetOf(peer);
  target.connect = false;
  target.pid = peer.pid();
  target.pid_start_ticks = StartTicks(peer.pid()) - 1;
  const SlotRef replaced = setup.AliveSlot(1);
  setup.sentinel.Watch(replaced, target);
  CHECK(setup.Expect(SentinelEventKind::kExited).cause == SentinelCause::kProcessReplaced);
  CHECK(replaced->state() == ActorState::kRestarting);

  target = TargetOf(other);
  const pid_t pid = peer.pid();
  const std::uint16_t port = peer.port();
  peer.Kill();
  target.pid = pid;
  const SlotRef gone = setup.AliveSlot(2);
  setup.sentinel.Watch(gone, target);
  CHECK(setup.Expect(SentinelEventKind::kExited).cause == SentinelCause::kProcessGone);

  target.pid = 0;
  target.port = port;
  const SlotRef refused = setup.AliveSlot(3);
  setup.sentinel.Watch(refused, target);
  const SentinelEvent event = setup.Expect(SentinelEventKind::kUnreachable);
  CHECK(event.cause == SentinelCause::kRefused);
  CHECK(event.error_code == ECONNREFUSED);
  CHECK(InDoubt(refused->belief()));
  CHECK(setup.sentinel.counters().doubts == 1);
}

// ------------------------------------------------------------------------------------------------ doubt

// The port is refused while nobody listens, and a second process stands for the first one after a firewall, or whatever
// refused in its name, has let it go again: the sentinel cannot tell the two cases apart, and need not.
TEST_CASE("refused for a while: in doubt until an answer, and then the table, again and again") {
  auto peer = std::make_unique<Peer>();
  Peer::Options again;
  again.port = peer->port();
  Setup setup;
  const SlotRef slot = setup.AliveSlot(1, 2);
  WatchTarget target = TargetOf(*peer);
  target.incarnation = 2;
  setup.sentinel.Watch(slot, target);
  setup.UntilBeats(2);
  std::vector<std::int64_t> answered_ns;
  for (std::uint32_t round = 1; round <= 3; ++round) {
    const std::uint32_t version = slot->belief().version;
    peer->Kill();
    const SentinelEvent event = setup.Expect(SentinelEventKind::kUnreachable);
    CHECK(event.cause == SentinelCause::kRefused);
    CHECK(InDoubt(slot->belief()));
    CHECK(slot->losses() == round);
    // The table does not know better yet. It is no witness before there was an answer.
    TableSays(slot, ActorState::kAlive, 2);
    CHECK(InDoubt(slot->belief()));
    setup.seen.clear();
    peer = std::make_unique<Peer>(again);
    REQUIRE(peer->port() == again.port);
    const std::int64_t back_ns = NowNs();
    const SentinelEvent answer = setup.Expect(SentinelEventKind::kAskRay);
    CHECK(answer.cause == SentinelCause::kAnswer);
    answered_ns.push_back(answer.seen_ns - back_ns);
    CHECK(slot->belief().answered);
    CHECK(slot->state() == ActorState::kUnreachable);
    // Nor is a read from before.
    TableSays(slot, ActorState::kAlive, 2, static_cast<std::int32_t>(version));
    CHECK(slot->state() == ActorState::kUnreachable);
    setup.UntilBeats(2);
    CHECK(slot->state() == ActorState::kUnreachable);
    TableSays(slot, ActorState::kAlive, 2);
    CHECK(slot->state() == ActorState::kAlive);
    CHECK(slot->belief().incarnation == 2);
    setup.UntilBeats(2);
    setup.ExpectNoMore();
    CHECK(setup.sentinel.counters().doubts == round);
    CHECK(setup.sentinel.counters().false_alarms == round);
    CHECK(slot->losses() == round);
  }
  CHECK(setup.sentinel.counters().silences == 0);
  CHECK(slot->entered(ActorState::kRestarting) == 0);
  PrintLatencies("listening again to answered", answered_ns);
}

TEST_CASE("under TLS the accepted dial is the answer") {
  Peer::Options options;
  options.tls_like = true;
  auto peer = std::make_unique<Peer>(options);
  options.port = peer->port();
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(*peer);
  target.http2 = false;
  setup.sentinel.Watch(slot, target);
  setup.Until([&] { return setup.sentinel.counters().sockets == 1; }, "the connection");
  peer->Kill();
  setup.Expect(SentinelEventKind::kUnreachable);
  CHECK(InDoubt(slot->belief()));
  peer = std::make_unique<Peer>(options);
  setup.Until([&] { return slot->belief().answered; }, "the answer");
  TableSays(slot, ActorState::kAlive, 0);
  CHECK(slot->state() == ActorState::kAlive);
}

TEST_CASE("an answer in doubt is taken back by silence and by the next refusal") {
  auto peer = std::make_unique<Peer>();
  Peer::Options again;
  again.port = peer->port();
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(*peer, 300);
  target.in_flight_silence_ns = 600 * kNsPerMs;
  setup.sentinel.Watch(slot, target);
  setup.UntilBeats(1);
  peer->Kill();
  setup.Expect(SentinelEventKind::kUnreachable);
  peer = std::make_unique<Peer>(again);
  setup.Until([&] { return slot->belief().answered; }, "an answer");
  peer->Freeze();
  setup.Until([&] { return !slot->belief().answered; }, "its end by silence");
  setup.Expect(SentinelEventKind::kInFlightSilence);
  TableSays(slot, ActorState::kAlive, 0);
  CHECK(InDoubt(slot->belief()));
  peer->Signal(SIGCONT);
  setup.Until([&] { return slot->belief().answered; }, "an answer");
  peer->Kill();
  setup.Until([&] { return !slot->belief().answered; }, "its end by a refusal");
  TableSays(slot, ActorState::kAlive, 0);
  CHECK(InDoubt(slot->belief()));
  // One doubt, one loss.
  CHECK(slot->losses() == 1);
  CHECK(setup.sentinel.counters().doubts == 1);
  CHECK(setup.sentinel.counters().silences == 0);
}

TEST_CASE("what is refused is dialed at least every half second, and not much more often") {
  ManualClock clock;
  Sentinel::Options options;
  options.clock = &clock;
  Setup setup(options);
  Peer peer;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 1000);
  target.in_flight_silence_ns = 2 * kNsPerSecond;
  setup.sentinel.Watch(slot, target);
  setup.Until([&] { return setup.sentinel.counters().heartbeats_acked == 1; }, "a heartbeat");
  peer.Kill();
  setup.Expect(SentinelEventKind::kUnreachable);
  setup.seen.clear();
  setup.WholeTurn();
  std::int64_t longest_ns = 0;
  std::int64_t last_ns = clock.NowNs();
  const std::uint64_t first = setup.sentinel.counters().refused;
  std::uint64_t refused = first;
  for (int steps = 0; steps < 1000; ++steps) {
    clock.Advance(10 * kNsPerMs);
    setup.WholeTurn();
    const std::uint64_t now = setup.sentinel.counters().refused;
    if (now == refused) continue;
    refused = now;
    longest_ns = std::max(longest_ns, clock.NowNs() - last_ns);
    last_ns = clock.NowNs();
  }
  CHECK(longest_ns <= 510 * kNsPerMs);
  // 10 s: 10, 20, 40, 80, 160, 320 ms apart, then 500.
  CHECK(refused - first <= 26);
  CHECK(refused - first >= 20);
  // It is no silence, and one loss.
  setup.ExpectNoMore();
  CHECK(InDoubt(slot->belief()));
  CHECK(slot->losses() == 1);
  CHECK(setup.sentinel.counters().silences == 0);
}

TEST_CASE("many that are refused are dialed 500 times a second in all") {
  std::uint16_t port = 0;
  {
    Peer gone;
    port = gone.port();
  }
  Setup setup;
  std::vector<SlotRef> slots;
  for (std::uint32_t i = 0; i < 1000; ++i) {
    slots.push_back(setup.AliveSlot(i));
    WatchTarget target;
    target.ip = "127.0.0.1";
    target.port = port;
    setup.sentinel.Watch(slots.back(), target);
  }
  setup.Until([&] { return setup.sentinel.counters().doubts == 1000; }, "all in doubt");
  for (const SlotRef& slot : slots) CHECK(InDoubt(slot->belief()));
  // Those that were refused while there were few come again sooner.
  setup.Until([&] { return setup.sentinel.counters().refused >= 2000; }, "each of them again");
  const std::uint64_t before = setup.sentinel.counters().refused;
  const std::int64_t begin_ns = NowNs();
  setup.sentinel.AddTimer(1, begin_ns + 2 * kNsPerSecond);
  setup.Expect(SentinelEventKind::kTimer);
  const std::uint64_t more = setup.sentinel.counters().refused - before;
  const std::int64_t took_ns = NowNs() - begin_ns;
  // Each is dialed at most every 2 s, and may be due at both ends of the time.
  CHECK(more <= 1000 * (2 + static_cast<std::uint64_t>(took_ns / (2 * kNsPerSecond))));
  CHECK(more > 0);
}

TEST_CASE("a thread's number is no process: the connection is all that is watched") {
  Peer peer;
  const ThreadedPeer threaded;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 200);
  for (const pid_t thread : threaded.threads()) {
    if (thread != threaded.pid()) target.pid = thread;
  }
  target.pid_start_ticks = StartTicks(target.pid);
  setup.sentinel.Watch(slot, target);
  setup.UntilBeats(2);
  CHECK(setup.sentinel.counters().process_watches == 0);
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
}

TEST_CASE("the next incarnation: a new watch, and the old one says nothing any more") {
  Setup setup;
  auto first = std::make_unique<Peer>();
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(*first));
  setup.UntilBeats(1);
  first->Kill();
  setup.Expect(SentinelEventKind::kUnreachable);
  // A listener that is closed after its connections may have accepted one more dial.
  setup.seen.clear();
  Peer second;
  MakeAlive(slot, 1);
  WatchTarget target = TargetOf(second);
  target.incarnation = 1;
  CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kWatching);
  setup.UntilBeats(3);
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
  CHECK(slot->belief().incarnation == 1);
  // Ray may be first to know: then the old watch's evidence changes nothing.
  MakeAlive(slot, 2);
  second.Kill();
  const SentinelEvent event = setup.Expect(SentinelEventKind::kExited);
  CHECK(event.incarnation == 1);
  CHECK_FALSE(event.change.changed);
  CHECK(slot->state() == ActorState::kAlive);
  // The same place and incarnation again, after its end: a new watch, and the same answer.
  CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kWatching);
  CHECK(setup.Expect(SentinelEventKind::kExited).cause == SentinelCause::kRefused);
}

// ------------------------------------------------------------------------------------------------ silence

TEST_CASE("SIGSTOP and SIGCONT: refused after one limit, given up after the other, back when it answers") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot(1, 2);
  WatchTarget target = TargetOf(peer, 300);
  target.incarnation = 2;
  target.in_flight_silence_ns = 700 * kNsPerMs;
  target.pid = peer.pid();
  setup.sentinel.Watch(slot, target);
  std::vector<std::int64_t> refused_ns;
  std::vector<std::int64_t> given_up_ns;
  std::vector<std::int64_t> back_ns;
  for (std::uint64_t round = 1; round <= 3; ++round) {
    setup.UntilBeats(2);
    const std::int64_t stopped_ns = NowNs();
    peer.Signal(SIGSTOP);
    const SentinelEvent unreachable = setup.Expect(SentinelEventKind::kUnreachable);
    CHECK(slot->state() == ActorState::kUnreachable);
    CHECK(unreachable.change.before.state == ActorState::kAlive);
    CHECK(unreachable.incarnation == 2);
    refused_ns.push_back(unreachable.seen_ns - stopped_ns);
    // A beat that was open at the stop is one round trip old, which is long only where the machine is overloaded.
    CHECK(refused_ns.back() > 200 * kNsPerMs);
    const SentinelEvent given_up = setup.Expect(SentinelEventKind::kInFlightSilence);
    given_up_ns.push_back(given_up.seen_ns - stopped_ns);
    // Less than the 400 ms by how late the first of the two was; a clock that moves by hand is stricter, below.
    CHECK(given_up.seen_ns - unreachable.seen_ns >= 300 * kNsPerMs);
    const std::int64_t continued_ns = NowNs();
    peer.Signal(SIGCONT);
    const SentinelEvent reachable = setup.Expect(SentinelEventKind::kReachable);
    back_ns.push_back(reachable.seen_ns - continued_ns);
    CHECK(slot->state() == ActorState::kAlive);
    CHECK(slot->belief().incarnation == 2);
    CHECK(setup.sentinel.counters().silences == round);
    CHECK(setup.sentinel.counters().in_flight_silences == round);
    CHECK(setup.sentinel.counters().false_alarms == round);
  }
  setup.ExpectNoMore();
  CHECK(setup.sentinel.counters().dials == 1);
  PrintLatencies("SIGSTOP to refusing, limit 300 ms", refused_ns);
  PrintLatencies("SIGSTOP to giving up running calls, limit 700 ms", given_up_ns);
  PrintLatencies("SIGCONT to accepting", back_ns);
  // Killed while it is frozen.
  peer.Signal(SIGSTOP);
  setup.Expect(SentinelEventKind::kUnreachable);
  peer.KillOnly();
  setup.Expect(SentinelEventKind::kExited);
  CHECK(slot->state() == ActorState::kRestarting);
}

TEST_CASE("a silence shorter than the limit is no silence, and limits can be changed while it lasts") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 60'000));
  setup.UntilBeats(1);
  peer.Signal(SIGSTOP);
  const std::uint64_t sent = setup.sentinel.counters().heartbeats_sent;
  setup.Until([&] { return setup.sentinel.counters().heartbeats_sent > sent; }, "a heartbeat");
  setup.ExpectNoMore();
  CHECK(setup.sentinel.UpdateLimits(slot->id(), 200 * kNsPerMs, 400 * kNsPerMs));
  setup.Expect(SentinelEventKind::kUnreachable);
  setup.Expect(SentinelEventKind::kInFlightSilence);
  peer.Signal(SIGCONT);
  setup.Expect(SentinelEventKind::kReachable);
  CHECK_FALSE(setup.sentinel.UpdateLimits(MakeId(99), 1, 1));
}

// The idea: the clock moves by hand, so the limits can be held to the step, at every point between two heartbeats.
TEST_CASE("frozen at any moment: never before a limit, never half a second after it") {
  constexpr std::int64_t kStepNs = 10 * kNsPerMs;
  ManualClock clock;
  Sentinel::Options options;
  options.clock = &clock;
  Setup setup(options);
  Peer peer;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 3000);
  target.in_flight_silence_ns = 4 * kNsPerSecond;
  setup.sentinel.Watch(slot, target);
  // The answer to the first one; a second is not sent before the clock moves.
  setup.Until([&] { return setup.sentinel.counters().heartbeats_acked == 1; }, "a heartbeat");
  const auto step = [&] {
    clock.Advance(kStepNs);
    setup.WholeTurn();
  };
  const auto until_a_beat = [&] {
    const std::uint64_t sent = setup.sentinel.counters().heartbeats_sent;
    for (int steps = 0; setup.sentinel.counters().heartbeats_sent == sent; ++steps) {
      REQUIRE(steps < 100);
      step();
    }
    setup.UntilAnswered(peer);
  };
  std::int64_t least_ns = kNeverNs;
  std::int64_t most_ns = 0;
  for (int steps_after_a_beat = 0; steps_after_a_beat < 45; steps_after_a_beat += 4) {
    until_a_beat();
    for (int i = 0; i < steps_after_a_beat; ++i) step();
    setup.UntilAnswered(peer);
    setup.ExpectNoMore();
    peer.Freeze();
    const std::int64_t frozen_ns = clock.NowNs();
    const std::uint32_t losses = slot->losses();
    while (slot->state() == ActorState::kAlive && clock.NowNs() < frozen_ns + kLongNs) step();
    const std::int64_t refused_ns = clock.NowNs() - frozen_ns;
    CHECK(slot->state() == ActorState::kUnreachable);
    while (slot->losses() == losses && clock.NowNs() < frozen_ns + kLongNs) step();
    const std::int64_t given_up_ns = clock.NowNs() - frozen_ns;
    for (const std::int64_t over_ns : {refused_ns - 3 * kNsPerSecond, given_up_ns - 4 * kNsPerSecond}) {
      CHECK(over_ns >= 0);
      CHECK(over_ns <= 450 * kNsPerMs + kStepNs);
      least_ns = std::min(least_ns, over_ns);
      most_ns = std::max(most_ns, over_ns);
    }
    // The clock stands still, so nothing but the answer itself can bring it back.
    peer.Signal(SIGCONT);
    setup.Expect(SentinelEventKind::kReachable);
    setup.Expect(SentinelEventKind::kUnreachable);
    setup.Expect(SentinelEventKind::kInFlightSilence);
  }
  setup.ExpectNoMore();
  CHECK(setup.sentinel.counters().dials == 1);
  CHECK(setup.sentinel.counters().late_wakeups == 0);
  std::printf("[latency] over a limit of silence: %.0f to %.0f ms\n", Ms(least_ns), Ms(most_ns));
}

TEST_CASE("an answer that nobody has read yet is an answer") {
  ManualClock clock;
  Sentinel::Options options;
  options.clock = &clock;
  Setup setup(options);
  Peer peer;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 3000));
  // The answer to the first one; a second is not sent before the clock moves.
  setup.Until([&] { return setup.sentinel.counters().heartbeats_acked == 1; }, "a heartbeat");
  const std::uint64_t sent = setup.sentinel.counters().heartbeats_sent;
  for (int steps = 0; setup.sentinel.counters().heartbeats_sent == sent; ++steps) {
    REQUIRE(steps < 100);
    clock.Advance(20 * kNsPerMs);
    setup.WholeTurn();
  }
  setup.UntilAnswered(peer);
  for (int steps = 0; steps < 10; ++steps) {
    clock.Advance(20 * kNsPerMs);
    setup.WholeTurn();
  }
  // What was asked 200 ms ago is now beyond the limit; the answer lies in the socket.
  CHECK(setup.sentinel.UpdateLimits(slot->id(), 100 * kNsPerMs, 150 * kNsPerMs));
  setup.WholeTurn();
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
  CHECK(slot->losses() == 0);
  CHECK(setup.sentinel.counters().late_wakeups == 0);
}

TEST_CASE("half open: dials are accepted, nothing is ever said") {
  Peer::Options options;
  options.tls_like = true;
  Peer peer(options);
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  const std::int64_t begin_ns = NowNs();
  setup.sentinel.Watch(slot, TargetOf(peer, 300));
  const SentinelEvent event = setup.Expect(SentinelEventKind::kUnreachable);
  CHECK(event.seen_ns - begin_ns >= 300 * kNsPerMs);
  PrintLatencies("half open: watch to refusing, limit 300 ms", {event.seen_ns - begin_ns});
}

TEST_CASE("reads but stops answering") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 300));
  setup.UntilBeats(2);
  peer.Tell(kMute);
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kNoAnswer);
  CHECK(slot->losses() == 0);
  peer.Kill();
  // Refused while it is silent: that is more.
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kRefused);
  CHECK(InDoubt(slot->belief()));
  CHECK(slot->losses() == 1);
}

TEST_CASE("talk is no answer: whatever comes, only the acknowledgement counts") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 300));
  setup.UntilBeats(2);
  peer.Tell(kMute);
  const std::int64_t until_ns = NowNs() + kLongNs;
  while (slot->state() == ActorState::kAlive && NowNs() < until_ns) {
    peer.Tell(kPing);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kNoAnswer);
  CHECK(setup.sentinel.counters().dials == 1);
}

TEST_CASE("GOAWAY is no answer either") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 500));
  setup.UntilBeats(2);
  peer.Tell(kBye);
  const std::int64_t begin_ns = NowNs();
  peer.Tell(kGoaway);
  const SentinelEvent event = setup.Expect(SentinelEventKind::kUnreachable);
  CHECK(event.cause == SentinelCause::kNoAnswer);
  CHECK(event.seen_ns - begin_ns >= 400 * kNsPerMs);
  CHECK(setup.sentinel.counters().goaways >= 2);
  CHECK(setup.sentinel.counters().false_alarms == 0);
  // Dialed calmly: 0, 0, 1, 10, 20, ... ms apart.
  CHECK(setup.sentinel.counters().dials <= 14);
}

// What the process costs, the sentinel's thread nearly alone, while a peer sends without end.
TEST_CASE("a flood costs little, whatever it is, and is not taken for death") {
  struct Case {
    char order;
    const char* what;
  };
  for (const Case& each :
       {Case{kFloodSettings, "SETTINGS"}, Case{kFloodPings, "PINGs"}, Case{kFloodUnknown, "unknown frames"},
        Case{kFloodLong, "long frames"}, Case{kFloodBytes, "single bytes"}}) {
    CAPTURE(each.what);
    for (const bool mute : {false, true}) {
      CAPTURE(mute);
      Peer peer;
      Setup setup;
      const SlotRef slot = setup.AliveSlot();
      setup.sentinel.Watch(slot, TargetOf(peer, mute ? 400 : 2000));
      setup.UntilBeats(2);
      if (mute) peer.Tell(kMute);
      peer.Tell(each.order);
      rusage before{};
      rusage after{};
      getrusage(RUSAGE_SELF, &before);
      const std::uint64_t turns = setup.sentinel.counters().turns;
      const std::int64_t begin_ns = NowNs();
      // Asleep between events: this thread is not what is measured.
      // Few bytes are read with the next answer, as long as it comes in time, and are no flood.
      const bool is_flood = mute || each.order != kFloodBytes;
      setup.sentinel.AddTimer(1, begin_ns + 3 * kNsPerSecond);
      setup.Expect(SentinelEventKind::kTimer);
      while (is_flood && setup.sentinel.counters().floods < 2 && NowNs() < begin_ns + kLongNs) {
        setup.sentinel.WaitForEvents(kLongNs);
        setup.Drain();
      }
      CHECK((setup.sentinel.counters().floods >= 2) == is_flood);
      getrusage(RUSAGE_SELF, &after);
      const std::int64_t wall_ns = NowNs() - begin_ns;
      const auto ns = [](const timeval& time) {
        return std::int64_t{time.tv_sec} * kNsPerSecond + time.tv_usec * kNsPerUs;
      };
      const std::int64_t cpu_ns = ns(after.ru_utime) + ns(after.ru_stime) - ns(before.ru_utime) - ns(before.ru_stime);
      std::printf("[cost] a flood of %s%s: %.2f%% of a core\n", each.what, mute ? ", no answers" : "",
                  100.0 * static_cast<double>(cpu_ns) / static_cast<double>(wall_ns));
      // The bound of the header: 100 at once, 100 a second, and what the thread does of itself.
      const double seconds = static_cast<double>(wall_ns) / 1e9;
      CHECK(static_cast<double>(setup.sentinel.counters().turns - turns) < 150 + 150 * seconds);
      if (is_flood) CHECK(setup.Expect(SentinelEventKind::kAskRay).cause == SentinelCause::kFlood);
      if (mute) {
        CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kNoAnswer);
        CHECK(slot->state() == ActorState::kUnreachable);
      } else {
        // Its answers are found, if not each before the limit: one may be behind more than is read.
        setup.UntilBeats(1);
        setup.Until([&] { return slot->state() == ActorState::kAlive; }, "an answer");
      }
      CHECK(slot->entered(ActorState::kRestarting) == 0);
      CHECK(setup.sentinel.counters().doubts == 0);
      CHECK(slot->losses() == 0);
    }
  }
}

TEST_CASE("a dial that nobody answers: full backlog, no route") {
  // A listener whose backlog is full drops SYNs, as a host that is gone does.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(listen(listener, 0) == 0);
  REQUIRE(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  std::vector<int> fillers;
  for (int i = 0; i < 3; ++i) {
    fillers.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    (void)connect(fillers.back(), reinterpret_cast<sockaddr*>(&address), size);
  }
  Setup setup;
  const SlotRef full = setup.AliveSlot(1);
  WatchTarget target;
  target.ip = "127.0.0.1";
  target.port = ntohs(address.sin_port);
  target.silence_ns = 300 * kNsPerMs;
  const std::int64_t begin_ns = NowNs();
  setup.sentinel.Watch(full, target);
  const SentinelEvent event = setup.Expect(SentinelEventKind::kUnreachable);
  PrintLatencies("unanswered dial: watch to refusing, limit 300 ms", {event.seen_ns - begin_ns});
  setup.Until([&] { return setup.sentinel.counters().connect_timeouts >= 1; }, "a connect timeout");
  setup.sentinel.Unwatch(full->id());

  if (const char* ip = Nowhere()) {
    const SlotRef nowhere = setup.AliveSlot(2);
    target.ip = ip;
    target.port = 9;
    setup.sentinel.Watch(nowhere, target);
    setup.Expect(SentinelEventKind::kUnreachable);
    CHECK(nowhere->state() == ActorState::kUnreachable);
  } else {
    std::printf("[skipped] no route: this network answers for every address\n");
  }
  for (int fd : fillers) close(fd);
  close(listener);
}

TEST_CASE("a new watch of the same incarnation withdraws the silence of the old one") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 200);
  peer.Signal(SIGSTOP);
  setup.sentinel.Watch(slot, target);
  setup.Expect(SentinelEventKind::kUnreachable);
  target.pid = peer.pid();
  CHECK(setup.sentinel.Watch(slot, target) == WatchResult::kWatching);
  peer.Signal(SIGCONT);
  setup.Expect(SentinelEventKind::kReachable);
  CHECK(slot->state() == ActorState::kAlive);
}

TEST_CASE("silence is told also when the slot becomes alive only during it") {
  Peer peer;
  Setup setup;
  SlotRef slot = setup.registry.Acquire(MakeId(1));
  peer.Signal(SIGSTOP);
  WatchTarget target = TargetOf(peer, 100);
  target.in_flight_silence_ns = 200 * kNsPerMs;
  setup.sentinel.Watch(slot, target);
  setup.Expect(SentinelEventKind::kInFlightSilence);
  setup.ExpectNoMore();
  MakeAlive(slot, 0);
  setup.Expect(SentinelEventKind::kUnreachable);
}

// ------------------------------------------------------------------------------------------------ connections that end

TEST_CASE("FIN, RST and GOAWAY are no deaths: Ray is asked, heartbeats go on") {
  struct Case {
    char order;
    SentinelCause cause;
  };
  for (const Case& each : {Case{kFinish, SentinelCause::kClosed}, Case{kReset, SentinelCause::kReset},
                           Case{kGoaway, SentinelCause::kGoaway}}) {
    Peer peer;
    Setup setup;
    const SlotRef slot = setup.AliveSlot();
    WatchTarget target = TargetOf(peer, 500);
    target.pid = peer.pid();
    setup.sentinel.Watch(slot, target);
    setup.UntilBeats(2);
    const std::int64_t cut_ns = NowNs();
    peer.Tell(each.order);
    const SentinelEvent event = setup.Expect(SentinelEventKind::kAskRay);
    CHECK(event.cause == each.cause);
    if (each.order == kGoaway) CHECK(event.error_code == 11);
    setup.UntilBeats(10);
    setup.ExpectNoMore();
    CHECK(slot->state() == ActorState::kAlive);
    CHECK(slot->entered(ActorState::kRestarting) == 0);
    CHECK(slot->entered(ActorState::kUnreachable) == 0);
    CHECK(setup.sentinel.counters().dials == 2);
    CHECK(setup.sentinel.counters().goaways == (each.order == kGoaway ? 1 : 0));
    PrintLatencies("connection cut to asking Ray", {event.seen_ns - cut_ns});
  }
}

TEST_CASE("a server that closes every connection is dialed calmly and becomes unreachable") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 700));
  setup.UntilBeats(1);
  peer.Tell(kDrop);
  peer.Tell(kFinish);
  setup.Expect(SentinelEventKind::kAskRay);
  const SentinelEvent event = setup.Expect(SentinelEventKind::kUnreachable);
  CHECK(event.incarnation == 0);
  // 0, 0, 1, 10, 20, 40, ... ms apart.
  CHECK(setup.sentinel.counters().dials <= 12);
  CHECK(setup.sentinel.counters().ask_ray >= 1);
}

TEST_CASE("two redials at once, the third only when time has passed") {
  ManualClock clock;
  Sentinel::Options options;
  options.clock = &clock;
  Setup setup(options);
  Peer peer;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 3000));
  // The answer to the first one; a second is not sent before the clock moves.
  setup.Until([&] { return setup.sentinel.counters().heartbeats_acked == 1; }, "a heartbeat");
  peer.Tell(kDrop);
  peer.Tell(kFinish);
  setup.Until([&] { return setup.sentinel.counters().connections_lost == 3; }, "the loss of the third connection");
  setup.WholeTurn();
  CHECK(setup.sentinel.counters().dials == 3);
  clock.Advance(kNsPerMs);
  setup.WholeTurn();
  setup.Until([&] { return setup.sentinel.counters().connections_lost == 4; }, "the loss of the fourth connection");
  setup.WholeTurn();
  CHECK(setup.sentinel.counters().dials == 4);
}

TEST_CASE("port reuse: another process that answers does not make a dead actor live") {
  Peer::Options options;
  options.reuse_port = true;
  auto actor = std::make_unique<Peer>(options);
  Setup setup;
  const SlotRef by_process = setup.AliveSlot(1);
  const SlotRef by_connection = setup.AliveSlot(2);
  WatchTarget target = TargetOf(*actor);
  setup.sentinel.Watch(by_connection, target);
  target.pid = actor->pid();
  setup.sentinel.Watch(by_process, target);
  setup.UntilBeats(4);
  options.port = actor->port();
  Peer heir(options);
  REQUIRE(heir.port() == actor->port());
  actor->Kill();
  // Without the process id only Ray can tell the two apart.
  setup.Until(
      [&] {
        setup.Drain();
        return std::any_of(setup.seen.begin(), setup.seen.end(), [&](const SentinelEvent& event) {
          return event.kind == SentinelEventKind::kAskRay && event.actor_id == by_connection->id();
        });
      },
      "asking Ray");
  CHECK(by_connection->state() == ActorState::kAlive);
  const SentinelEvent event = setup.Expect(SentinelEventKind::kExited);
  CHECK(event.actor_id == by_process->id());
  CHECK(event.cause == SentinelCause::kProcessExit);
  setup.UntilBeats(6);
  CHECK(by_process->state() == ActorState::kRestarting);
  CHECK(by_process->entered(ActorState::kAlive) == 1);
}

TEST_CASE("the port now answers in another protocol") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 400));
  setup.UntilBeats(1);
  peer.Tell(kHttp1);
  peer.Tell(kReset);
  SentinelEvent event = setup.Expect(SentinelEventKind::kAskRay);
  while (event.cause != SentinelCause::kNotHttp2) event = setup.Expect(SentinelEventKind::kAskRay);
  // It spoke HTTP/2 before, so this is not an answer of the actor.
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kNoAnswer);
  CHECK(setup.sentinel.counters().protocol_errors >= 1);
  peer.Kill();
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kRefused);
}

TEST_CASE("it never spoke HTTP/2: as under TLS, the connection must do") {
  Peer peer;
  peer.Tell(kHttp1);
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 200));
  CHECK(setup.Expect(SentinelEventKind::kAskRay).cause == SentinelCause::kNotHttp2);
  setup.Until([&] { return setup.sentinel.counters().dials == 2; }, "the second dial");
  // Longer than the limit without any heartbeat.
  setup.sentinel.AddTimer(1, NowNs() + 500 * kNsPerMs);
  setup.Expect(SentinelEventKind::kTimer);
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
  CHECK(setup.sentinel.counters().protocol_errors == 1);
  peer.Kill();
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kRefused);
}

TEST_CASE("under TLS: an idle close is followed by a dial, which is an answer") {
  Peer::Options options;
  options.tls_like = true;
  Peer peer(options);
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 200);
  target.http2 = false;
  setup.sentinel.Watch(slot, target);
  setup.Until([&] { return setup.sentinel.counters().sockets == 1; }, "the connection");
  setup.sentinel.AddTimer(1, NowNs() + 500 * kNsPerMs);
  setup.Expect(SentinelEventKind::kTimer);
  setup.ExpectNoMore();
  peer.Tell(kFinish);
  CHECK(setup.Expect(SentinelEventKind::kAskRay).cause == SentinelCause::kClosed);
  CHECK(slot->state() == ActorState::kAlive);
  CHECK(setup.sentinel.counters().heartbeats_sent == 0);
  CHECK(setup.sentinel.counters().dials == 2);
  peer.Kill();
  CHECK(setup.Expect(SentinelEventKind::kUnreachable).cause == SentinelCause::kRefused);
}

TEST_CASE("undrained events of one actor are merged") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  setup.sentinel.Watch(slot, TargetOf(peer, 100));
  for (std::uint64_t round = 1; round <= 4; ++round) {
    setup.UntilBeats(1);
    peer.Signal(SIGSTOP);
    setup.Until([&] { return setup.sentinel.counters().silences == round; }, "silence");
    peer.Signal(SIGCONT);
    setup.Until([&] { return setup.sentinel.counters().false_alarms == round; }, "an answer");
  }
  setup.Drain();
  REQUIRE(setup.seen.size() == 2);
  CHECK(setup.seen[0].kind == SentinelEventKind::kUnreachable);
  CHECK(setup.seen[1].kind == SentinelEventKind::kReachable);
  CHECK(setup.seen[1].change.after == slot->belief());
  // Unwatch drops what nobody has drained.
  setup.seen.clear();
  peer.Kill();
  setup.Until([&] { return setup.sentinel.counters().doubts == 1; }, "the doubt");
  setup.sentinel.Unwatch(slot->id());
  setup.ExpectNoMore();
}

// ------------------------------------------------------------------------------------------------ our own troubles

TEST_CASE("time in which we did not run is not held against the peer") {
  ManualClock clock;
  Sentinel::Options options;
  options.clock = &clock;
  Setup setup(options);
  Peer peer;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 3000);
  target.in_flight_silence_ns = 10 * kNsPerSecond;
  setup.sentinel.Watch(slot, target);
  const auto step = [&](std::int64_t by_ns) {
    const std::uint64_t turns = setup.sentinel.counters().turns;
    clock.Advance(by_ns);
    setup.sentinel.Poke();
    setup.Until([&] { return setup.sentinel.counters().turns > turns; }, "a turn of the loop");
  };
  // The answer to the first one; a second is not sent before the clock moves.
  setup.Until([&] { return setup.sentinel.counters().heartbeats_acked == 1; }, "a heartbeat");
  peer.Signal(SIGSTOP);
  const std::uint64_t sent = setup.sentinel.counters().heartbeats_sent;
  while (setup.sentinel.counters().heartbeats_sent == sent) step(20 * kNsPerMs);
  // One jump past every limit, as after a suspension: the peer was suspended with us.
  const std::uint64_t late = setup.sentinel.counters().late_wakeups;
  step(60 * kNsPerSecond);
  setup.Until([&] { return setup.sentinel.counters().late_wakeups > late; }, "noticing it");
  step(20 * kNsPerMs);
  setup.ExpectNoMore();
  CHECK(slot->state() == ActorState::kAlive);
  // Run on time, and the limit applies: not before it,
  std::int64_t silent_ns = 0;
  while (slot->state() == ActorState::kAlive && silent_ns < 10 * kNsPerSecond) {
    step(20 * kNsPerMs);
    silent_ns += 20 * kNsPerMs;
  }
  CHECK(slot->state() == ActorState::kUnreachable);
  CHECK(silent_ns >= 2800 * kNsPerMs);
  CHECK(silent_ns <= 6000 * kNsPerMs);
  peer.Signal(SIGCONT);
  setup.Expect(SentinelEventKind::kReachable);
}

TEST_CASE("out of descriptors: survived, counted, said once, and tried again") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int next_fd = dup(0);
  REQUIRE(next_fd >= 0);
  close(next_fd);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(next_fd);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
  WatchTarget target = TargetOf(peer, 200);
  target.pid = peer.pid();
  setup.sentinel.Watch(slot, target);
  setup.Until([&] { return setup.sentinel.counters().fd_exhausted >= 6; }, "several attempts");
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  const SentinelEvent event = setup.Expect(SentinelEventKind::kAskRay);
  CHECK(event.cause == SentinelCause::kDescriptors);
  CHECK(event.error_code == EMFILE);
  CHECK(setup.sentinel.counters().ask_ray == 2);  // Process and connection, merged into one event.
  CHECK(slot->state() == ActorState::kAlive);     // Our blindness is not its silence.
  setup.UntilBeats(2);
  setup.Until([&] { return setup.sentinel.counters().process_watches == 1; }, "the process watch");
  setup.ExpectNoMore();
  peer.KillOnly();
  setup.Expect(SentinelEventKind::kExited);
}

TEST_CASE("a limit of our own leaves descriptors to the application") {
  Peer peer;
  Sentinel::Options options;
  options.max_descriptors = 2;
  Setup setup(options);
  std::vector<SlotRef> slots;
  for (std::uint32_t i = 0; i < 3; ++i) {
    slots.push_back(setup.AliveSlot(i));
    setup.sentinel.Watch(slots.back(), TargetOf(peer, 200));
  }
  CHECK(setup.Expect(SentinelEventKind::kAskRay).cause == SentinelCause::kDescriptors);
  setup.UntilBeats(4);
  CHECK(setup.sentinel.counters().sockets == 2);
  for (const SlotRef& slot : slots) setup.sentinel.Unwatch(slot->id());
  setup.Until([&] { return setup.sentinel.counters().watches == 0; }, "the end of the watches");
  setup.sentinel.Watch(slots[2], TargetOf(peer, 200));
  setup.UntilBeats(2);
}

namespace {

std::int64_t OpenDescriptors() {
  std::int64_t count = -1;  // That of the directory.
  DIR* directory = opendir("/proc/self/fd");
  REQUIRE(directory != nullptr);
  while (const dirent* entry = readdir(directory)) count += entry->d_name[0] != '.' ? 1 : 0;
  closedir(directory);
  return count;
}

}  // namespace

TEST_CASE("a share of RLIMIT_NOFILE is the application's: none of it is taken, and it is given back") {
  Peer peer;
  Setup setup;
  constexpr std::int64_t kSpare = 90;
  constexpr std::uint32_t kWatches = 60;
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(OpenDescriptors() + kSpare);
  const auto reserve = std::max<std::int64_t>(16, static_cast<std::int64_t>(low.rlim_cur) / 4);
  REQUIRE(reserve < kSpare);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
  const auto spare = [&] { return static_cast<std::int64_t>(low.rlim_cur) - OpenDescriptors(); };
  std::vector<SlotRef> slots;
  for (std::uint32_t i = 0; i < kWatches; ++i) {
    slots.push_back(setup.AliveSlot(i));
    WatchTarget target = TargetOf(peer, 5000);
    target.pid = peer.pid();
    setup.sentinel.Watch(slots.back(), target);
  }
  const auto looks = [&] {
    std::uint64_t count = 0;
    for (const SlotRef& slot : slots) count += setup.sentinel.Looks(slot->id()) ? 1 : 0;
    return count;
  };
  setup.Until([&] { return setup.sentinel.counters().watches == kWatches; }, "all are taken");
  setup.Until([&] { return spare() == reserve; }, "all that is free has been taken");
  SentinelCounters counters = setup.sentinel.counters();
  CHECK(counters.process_watches + counters.thread_watches + counters.sockets ==
        static_cast<std::uint64_t>(kSpare - reserve));
  CHECK(looks() <= counters.process_watches + counters.sockets);
  CHECK(setup.Expect(SentinelEventKind::kAskRay).cause == SentinelCause::kDescriptors);

  // The application comes near the limit.
  std::vector<int> files;
  while (spare() > reserve / 4) files.push_back(dup(0));
  setup.Until([&] { return spare() >= reserve; }, "it has been given back");
  counters = setup.sentinel.counters();
  CHECK((counters.thread_watches == 0 || counters.process_watches + counters.sockets == 2 * kWatches));
  CHECK(looks() <= counters.process_watches + counters.sockets);

  // And takes what is given back, too; but for a few, without which a sanitizer cannot look at memory.
  const auto take = [&] {
    while (spare() > 4) files.push_back(dup(0));
    return setup.sentinel.counters().sockets == 0;
  };
  setup.Until(take, "everything has been given back");
  CHECK(looks() == 0);
  for (const SlotRef& slot : slots) CHECK(slot->state() == ActorState::kAlive);

  for (const int fd : files) close(fd);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  setup.Until([&] { return setup.sentinel.counters().sockets == kWatches && looks() == kWatches; }, "all are back");
  setup.Until([&] { return setup.sentinel.counters().process_watches == kWatches; }, "the processes, too");
  peer.KillOnly();
  setup.Until([&] { return setup.sentinel.counters().watches == 0; }, "all ended");
  CHECK(looks() == 0);
}

// ------------------------------------------------------------------------------------------------ life cycle

TEST_CASE("start, stop, start; stop with watches and timers; references are given back") {
  Peer peer;
  Registry registry;
  std::vector<SentinelEvent> events;
  {
    Sentinel sentinel;
    sentinel.Stop();
    for (int round = 0; round < 3; ++round) {
      REQUIRE(sentinel.Start() == 0);
      CHECK(sentinel.Start() == 0);
      for (std::uint32_t i = 0; i < 20; ++i) sentinel.Watch(registry.Acquire(MakeId(i)), TargetOf(peer));
      sentinel.AddTimer(1, 0);
      sentinel.AddTimer(2, kNeverNs);
      CHECK(registry.size() == 20);
      sentinel.Stop();
      sentinel.Stop();
      CHECK_FALSE(sentinel.running());
      CHECK(registry.size() == 0);
      CHECK(sentinel.counters().watches == 0);
      CHECK(sentinel.counters().sockets == 0);
      CHECK(sentinel.DrainEvents(&events) == 0);
      CHECK(sentinel.Watch(registry.Acquire(MakeId(1)), TargetOf(peer)) == WatchResult::kNotRunning);
    }
    REQUIRE(sentinel.Start() == 0);
    sentinel.Watch(registry.Acquire(MakeId(1)), TargetOf(peer));
  }
  CHECK(registry.size() == 0);
}

TEST_CASE("Stop wakes whoever waits for events") {
  Setup setup;
  std::thread waiter([&] {
    while (setup.sentinel.running()) {
      setup.sentinel.WaitForEvents(-1);
      setup.Drain();
    }
  });
  setup.sentinel.WakeWaiter();
  setup.sentinel.Stop();
  waiter.join();
}

// What a thread asks of the scheduler in one go, in nanoseconds; 0 where this kernel does not say.
std::uint64_t SliceNs(pid_t thread) {
  std::uint64_t attributes[6] = {};  // struct sched_attr of sched_setattr(2), of its first version: 48 bytes.
  if (syscall(SYS_sched_getattr, thread, attributes, sizeof attributes, 0) != 0) return 0;
  return attributes[3];
}

TEST_CASE("the thread takes no signals, has a name and wants little at a time") {
  Setup setup;
  setup.sentinel.AddTimer(1, 0);
  setup.Expect(SentinelEventKind::kTimer);
  bool found = false;
  DIR* tasks = opendir("/proc/self/task");
  REQUIRE(tasks != nullptr);
  while (const dirent* task = readdir(tasks)) {
    const std::string base = std::string("/proc/self/task/") + task->d_name + "/";
    FILE* file = fopen((base + "comm").c_str(), "r");
    if (file == nullptr) continue;
    char name[32] = {};
    if (fgets(name, sizeof name, file) == nullptr) name[0] = '\0';
    fclose(file);
    if (std::string(name) != "actorsub-sentin\n") continue;
    found = true;
    file = fopen((base + "status").c_str(), "r");
    REQUIRE(file != nullptr);
    char line[256];
    unsigned long long blocked = 0;
    while (fgets(line, sizeof line, file) != nullptr) {
      if (strncmp(line, "SigBlk:", 7) == 0) blocked = strtoull(line + 7, nullptr, 16);
    }
    fclose(file);
    // All but SIGKILL, SIGSTOP and what the C library keeps to itself.
    CHECK((blocked & (1ULL << (SIGTERM - 1))) != 0);
    CHECK((blocked & (1ULL << (SIGINT - 1))) != 0);
    CHECK((blocked & (1ULL << (SIGCHLD - 1))) != 0);
    const std::uint64_t usual_ns = SliceNs(0);
    if (usual_ns > 100'000) CHECK(SliceNs(static_cast<pid_t>(std::stol(task->d_name))) == 100'000);
  }
  closedir(tasks);
  CHECK(found);
}

TEST_CASE("fork: the child forgets, the parent does not notice") {
  Peer peer;
  Setup setup;
  const SlotRef slot = setup.AliveSlot();
  WatchTarget target = TargetOf(peer, 300);
  target.pid = peer.pid();
  setup.sentinel.Watch(slot, target);
  setup.UntilBeats(2);
  const int event_fd = setup.sentinel.event_fd();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // No doctest in here: the exit code is the number of the first thing that was wrong.
    if (setup.sentinel.running()) _exit(1);
    if (setup.sentinel.AddTimer(1, 0)) _exit(2);
    if (setup.sentinel.Unwatch(MakeId(1))) _exit(3);
    setup.sentinel.Stop();
    setup.sentinel.AbandonAfterFork();
    if (fcntl(event_fd, F_GETFD) != -1) _exit(4);
    if (setup.sentinel.event_fd() != -1) _exit(5);
    for (int fd = 3; fd < 256; ++fd) {
      sockaddr_in name{};
      socklen_t size = sizeof name;
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&name), &size) == 0 && name.sin_family == AF_INET) _exit(6);
    }
#ifndef ACTORSUB_TSAN
    if (setup.sentinel.Start() != 0) _exit(7);
    if (!setup.sentinel.AddTimer(1, 0)) _exit(8);
    std::vector<SentinelEvent> events;
    while (events.empty()) {
      if (!setup.sentinel.WaitForEvents(kLongNs)) _exit(9);
      setup.sentinel.DrainEvents(&events);
    }
    setup.sentinel.Stop();
#endif
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  setup.UntilBeats(5);
  setup.ExpectNoMore();
  // A child that does not even know about us holds copies of everything; the parent's watches must still end.
  const pid_t holder = fork();
  REQUIRE(holder >= 0);
  if (holder == 0) {
    pause();
    _exit(0);
  }
  setup.sentinel.Unwatch(slot->id());
  setup.Until([&] { return setup.sentinel.counters().sockets == 0; }, "the end of the watch");
  const std::uint64_t turns = setup.sentinel.counters().turns;
  peer.Kill();
  setup.sentinel.AddTimer(7, NowNs() + 50 * kNsPerMs);
  setup.Expect(SentinelEventKind::kTimer);
  CHECK(setup.sentinel.counters().turns - turns < 10);  // No descriptor of a past watch keeps waking the thread.
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
}

// ------------------------------------------------------------------------------------------------ load

// The idea: every operation from several threads on few actors, so that they meet, while peers die and the sentinel
// is stopped and started under them. Nothing is asserted on the way but that it ends, and that the sanitizers are
// content; at the end the counters must balance.
TEST_CASE("stress") {
  Peer healthy;
  auto mortal = std::make_unique<Peer>();
  const pid_t mortal_pid = mortal->pid();
  const std::uint16_t mortal_port = mortal->port();
  Registry registry;
  {
    Sentinel sentinel;
    REQUIRE(sentinel.Start() == 0);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    threads.reserve(5);
    for (std::uint32_t number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        std::uint32_t random = number * 7919 + 1;
        while (!stop.load(std::memory_order_relaxed)) {
          random ^= random << 13;
          random ^= random >> 17;
          random ^= random << 5;
          const ActorId id = MakeId(random % 16);
          switch (random >> 8 & 7) {
            case 0:
            case 1: {
              WatchTarget target = TargetOf(healthy, 200);
              target.incarnation = random >> 16 & 3;
              if ((random >> 20 & 3) == 0) {
                target.pid = mortal_pid;
                target.port = mortal_port;
              }
              sentinel.Watch(registry.Acquire(id), target);
              break;
            }
            case 2:
              sentinel.Unwatch(id);
              break;
            case 3:
              sentinel.UpdateLimits(id, (random >> 12 & 255) * kNsPerMs, kNeverNs);
              break;
            case 4:
            case 5:
              sentinel.AddTimer(random >> 4 & 1023, NowNs() + (random >> 16 & 31) * kNsPerMs);
              break;
            case 6:
              sentinel.CancelTimer(random >> 4 & 1023);
              break;
            default:
              (void)sentinel.counters();
              break;
          }
        }
      });
    }
    threads.emplace_back([&] {
      std::vector<SentinelEvent> events;
      while (!stop.load(std::memory_order_relaxed)) {
        sentinel.WaitForEvents(5 * kNsPerMs);
        sentinel.DrainEvents(&events);
        events.clear();
      }
    });
    const auto pass = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    pass(400);
    mortal->Kill();
    pass(400);
    for (int round = 0; round < 5; ++round) {
      sentinel.Stop();
      REQUIRE(sentinel.Start() == 0);
      pass(100);
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    // Everything still works.
    const SlotRef slot = registry.Acquire(MakeId(1000));
    MakeAlive(slot, 0);
    REQUIRE(sentinel.Watch(slot, TargetOf(healthy, 200)) == WatchResult::kWatching);
    const std::int64_t until_ns = NowNs() + kLongNs;
    const std::uint64_t acked = sentinel.counters().heartbeats_acked;
    while (sentinel.counters().heartbeats_acked < acked + 20 && NowNs() < until_ns) pass(5);
    CHECK(sentinel.counters().heartbeats_acked >= acked + 20);
    CHECK(slot->state() == ActorState::kAlive);
    sentinel.Stop();
    const SentinelCounters counters = sentinel.counters();
    CHECK(counters.watches == 0);
    CHECK(counters.process_watches == 0);
    CHECK(counters.sockets == 0);
  }
  CHECK(registry.size() == 0);
}

TEST_CASE("100 idle actors cost well under 1% of a core") {
  Peer peer;
  Setup setup;
  std::vector<SlotRef> slots;
  for (std::uint32_t i = 0; i < 100; ++i) {
    slots.push_back(setup.AliveSlot(i));
    WatchTarget target = TargetOf(peer, 3000);
    target.pid = peer.pid();
    target.in_flight_silence_ns = 10 * kNsPerSecond;
    setup.sentinel.Watch(slots.back(), target);
  }
  setup.UntilBeats(300);
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_SELF, &before);
  const SentinelCounters counters = setup.sentinel.counters();
  const std::int64_t begin_ns = NowNs();
  setup.sentinel.AddTimer(1, begin_ns + 2 * kNsPerSecond);
  setup.Expect(SentinelEventKind::kTimer);
  const std::int64_t wall_ns = NowNs() - begin_ns;
  getrusage(RUSAGE_SELF, &after);
  const auto ns = [](const timeval& time) {
    return std::int64_t{time.tv_sec} * kNsPerSecond + time.tv_usec * kNsPerUs;
  };
  const std::int64_t cpu_ns = ns(after.ru_utime) + ns(after.ru_stime) - ns(before.ru_utime) - ns(before.ru_stime);
  const SentinelCounters now = setup.sentinel.counters();
  std::printf(
      "[cost] 100 idle actors: %.2f%% of a core, %.0f heartbeats and %.0f wake-ups a second\n",
      100.0 * static_cast<double>(cpu_ns) / static_cast<double>(wall_ns),
      1e9 * static_cast<double>(now.heartbeats_acked - counters.heartbeats_acked) / static_cast<double>(wall_ns),
      1e9 * static_cast<double>(now.turns - counters.turns) / static_cast<double>(wall_ns));
  setup.ExpectNoMore();
  CHECK(now.silences == 0);
  // Heartbeats share wake-ups, and answers need none.
  CHECK(3 * (now.turns - counters.turns) < now.heartbeats_acked - counters.heartbeats_acked);
  // All at once: how long until the last of 100 slots refuses.
  const std::int64_t killed_ns = NowNs();
  peer.KillOnly();
  std::vector<std::int64_t> latencies_ns;
  latencies_ns.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    latencies_ns.push_back(setup.Expect(SentinelEventKind::kExited).seen_ns - killed_ns);
  }
  PrintLatencies("SIGKILL to refusing, 100 actors at once", latencies_ns);
}

}  // namespace
}  // namespace actorsub
