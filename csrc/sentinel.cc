#include "sentinel.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <climits>
#include <cstring>
#include <list>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "http2_frames.h"
#include "timers.h"

namespace actorsub {
namespace {

// Below this a verdict would be about the scheduler, not about the peer.
constexpr std::int64_t kMinSilenceNs = 50 * kNsPerMs;
// A silence shows at most one heartbeat interval late; this keeps the promise "limit + 0.5 s" with room for scheduling.
constexpr std::int64_t kMinBeatIntervalNs = 50 * kNsPerMs;
constexpr std::int64_t kMaxBeatIntervalNs = 450 * kNsPerMs;
constexpr std::int64_t kBeatsPerSilence = 6;
// Watches with one interval beat at that many points of it: a wake-up costs more than a beat, so they share one.
constexpr std::int64_t kBeatSlots = 8;

constexpr std::int64_t kMinDialTimeoutNs = 1 * kNsPerSecond;
constexpr std::int64_t kMaxDialTimeoutNs = 2 * kNsPerSecond;
// A connection that held this long makes the next loss a first loss again.
constexpr std::int64_t kSettledNs = 1 * kNsPerSecond;
constexpr std::uint8_t kRedialsAtOnce = 2;
constexpr std::uint8_t kCalmRedial = 3;  // From this one on there is nothing to gain by hurry.
constexpr std::int64_t kMaxRedialDelayNs = 1 * kNsPerSecond;
constexpr std::int64_t kMaxRefusedDelayNs = 500 * kNsPerMs;
constexpr std::int64_t kRefusedShareNs = 2 * kNsPerMs;  // All that are refused together: one dial in this time.
// What may come from one peer: one read or reply in this time, and as many at once as fit into the other.
// A healthy one that is asked 20 times a second needs two in five of them.
constexpr std::int64_t kReadShareNs = 10 * kNsPerMs;
constexpr std::int64_t kReadBurstNs = 1 * kNsPerSecond;
constexpr std::int64_t kMaxFloodPauseNs = 1 * kNsPerSecond;
constexpr std::int64_t kMinRetryDelayNs = 100 * kNsPerMs;  // After running out of descriptors.
constexpr std::int64_t kMaxRetryDelayNs = 5 * kNsPerSecond;
// What is left of RLIMIT_NOFILE to the application and to Ray: one descriptor in so many, within these bounds.
constexpr std::uint64_t kReserveShare = 4;
constexpr std::int64_t kMinReserve = 16;
constexpr std::int64_t kMaxReserve = 1024;
constexpr std::int64_t kReserveLookNs = 1 * kNsPerSecond;
constexpr std::int64_t kMinKernelTimeoutNs = 2 * kNsPerSecond;  // Keepalive counts in whole seconds.

// How much later than planned the thread may run before everybody is granted that time.
constexpr std::int64_t kLatenessToleranceNs = 25 * kNsPerMs;
// While a question is open the thread wakes up at least this often, so that it notices when it was not running.
constexpr std::int64_t kMaxSleepWithQuestionsNs = 100 * kNsPerMs;

constexpr std::uint64_t kSliceNs = 100'000;  // The least that Linux takes.

// Two threads, because the first of them to end is the sooner told of, and one of them may be the last of its process.
constexpr std::size_t kThreadsPerProcess = 2;
constexpr std::uint8_t kMaxThreadPicks = 8;  // In all: a process whose threads come and go is not followed for ever.
constexpr std::uint8_t kMaxThreadLooks = 10;
constexpr std::int64_t kThreadLookDelayNs = 1 * kNsPerMs;  // And twice as long after each look.
constexpr std::uint64_t kThreadShare = 8;  // Of the descriptors that this process may have: one in so many.

constexpr std::size_t kWishesPerTurn = 256;
constexpr std::size_t kTimersPerLock = 1024;
constexpr int kReadsPerTurn = 16;  // Of one socket, 4 KiB each: a flood must not starve the others.
constexpr std::int64_t kNoQuestion = INT64_MIN;

struct IdHash {
  std::size_t operator()(const ActorId& id) const {
    // Ids are random where they differ.
    std::uint64_t halves[2];
    std::memcpy(halves, id.data(), sizeof halves);
    return static_cast<std::size_t>(halves[0] * 0x9E3779B97F4A7C15U ^ halves[1]);
  }
};

struct Address {
  sa_family_t family = AF_UNSPEC;
  std::uint16_t port = 0;
  std::array<std::uint8_t, 16> ip{};

  friend bool operator==(const Address& a, const Address& b) {
    return a.family == b.family && a.port == b.port && a.ip == b.ip;
  }
};

bool ParseAddress(const std::string& ip, std::uint16_t port, Address* address) {
  if (port == 0) return false;
  address->port = port;
  if (inet_pton(AF_INET, ip.c_str(), address->ip.data()) == 1) {
    address->family = AF_INET;
    return true;
  }
  address->family = AF_INET6;
  return inet_pton(AF_INET6, ip.c_str(), address->ip.data()) == 1;
}

socklen_t ToSockaddr(const Address& address, sockaddr_storage* storage) {
  *storage = sockaddr_storage{};
  if (address.family == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(address.port);
    std::memcpy(&v4->sin_addr, address.ip.data(), sizeof v4->sin_addr);
    return sizeof *v4;
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(storage);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(address.port);
  std::memcpy(&v6->sin6_addr, address.ip.data(), sizeof v6->sin6_addr);
  return sizeof *v6;
}

// What is watched, without the limits: equal plans need no new watch.
struct Plan {
  std::uint32_t incarnation = 0;
  bool connect = false;
  bool http2 = false;
  Address address;
  std::int32_t pid = 0;
  std::uint64_t pid_start_ticks = 0;

  friend bool operator==(const Plan& a, const Plan& b) {
    return a.incarnation == b.incarnation && a.connect == b.connect && a.http2 == b.http2 && a.address == b.address &&
           a.pid == b.pid && a.pid_start_ticks == b.pid_start_ticks;
  }
};

struct Limits {
  std::int64_t silence_ns = 0;
  std::int64_t in_flight_silence_ns = 0;
};

Limits MakeLimits(std::int64_t silence_ns, std::int64_t in_flight_silence_ns) {
  Limits limits;
  limits.silence_ns = std::max(silence_ns, kMinSilenceNs);
  limits.in_flight_silence_ns = std::max(in_flight_silence_ns, limits.silence_ns);
  return limits;
}

// Field 22 of /proc/PID/stat. False with errno when there is none.
bool ReadStartTicks(std::int32_t pid, std::uint64_t* ticks) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char text[1024];
  const ssize_t size = read(fd, text, sizeof text - 1);
  const int read_errno = errno;
  close(fd);
  if (size <= 0) {
    errno = size < 0 ? read_errno : ESRCH;
    return false;
  }
  text[size] = '\0';
  // The name (field 2) may contain anything, blanks and parentheses too; after its last ')' follows field 3.
  const char* at = strrchr(text, ')');
  for (int field = 2; at != nullptr && field < 22; ++field) at = strchr(at + 1, ' ');
  if (at == nullptr) {
    errno = EINVAL;
    return false;
  }
  *ticks = strtoull(at + 1, nullptr, 10);
  return true;
}

// The uapi headers of the machine that builds may be older than the kernel that this runs on: pidfd_open(2) of a
// thread (6.9), ioctl_pidfd(2) (6.13) and what the latter says of the end of a thread (6.15).
constexpr unsigned int kPidfdThread = O_EXCL;
struct PidfdInfo {
  std::uint64_t mask = 0;  // In: what is asked. Out: what is told.
  std::uint64_t cgroup_id = 0;
  std::uint32_t thread_id = 0;
  std::uint32_t process_id = 0;
  std::uint32_t others[9] = {};
  std::int32_t exit_code = 0;  // As waitpid(2) has it.
};
static_assert(sizeof(PidfdInfo) == 64, "the size is part of the ioctl's number");
constexpr std::uint64_t kPidfdInfoPid = 1U << 0;
constexpr std::uint64_t kPidfdInfoExit = 1U << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

// Appends the ids of the threads of a process that are above `above`, in ascending order; not that of its first
// thread, whose end is told only when all others have ended. None where /proc is closed to us.
void ListThreads(std::int32_t pid, std::int32_t above, std::vector<std::int32_t>* ids) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR* directory = opendir(path);
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const auto id = static_cast<std::int32_t>(strtol(entry->d_name, nullptr, 10));
    if (id > above && id != pid) ids->push_back(id);
  }
  closedir(directory);
  std::sort(ids->begin(), ids->end());
}

// How many descriptors are open in this process; -1: closed to us. Linux 6.2 and newer tell it as a size.
std::int64_t CountDescriptors() {
  constexpr char kPath[] = "/proc/self/fd";
  struct stat about{};
  if (stat(kPath, &about) == 0 && about.st_size > 0) return about.st_size;
  DIR* directory = opendir(kPath);
  // None is left for looking, or /proc is not there.
  if (directory == nullptr) return errno == EMFILE || errno == ENFILE ? INT64_MAX : -1;
  std::int64_t count = -1;  // The one of the directory itself.
  while (const dirent* entry = readdir(directory)) count += entry->d_name[0] != '.' ? 1 : 0;
  closedir(directory);
  return count;
}

// Errors that say something about this process or host and nothing about the peer.
bool IsLocalError(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case EADDRNOTAVAIL:
    case EADDRINUSE:
    case EACCES:
    case EPERM:
    case EAFNOSUPPORT:
    case EPROTONOSUPPORT:
    case EINVAL:
    case ENOSPC:  // epoll_ctl: over max_user_watches.
      return true;
    default:
      return false;
  }
}

// For TCP keepalive and TCP_USER_TIMEOUT.
std::int64_t KernelTimeoutNs(const Limits& limits) { return std::max(limits.silence_ns, kMinKernelTimeoutNs); }
int KernelProbeSeconds(const Limits& limits) {
  return static_cast<int>(std::clamp<std::int64_t>(limits.silence_ns / 10 / kNsPerSecond, 1, 5));
}

// Asks for the shortest slice. This thread runs for microseconds at a time, and where every core is taken, who wants
// less is let in sooner. Best effort: Linux 6.12 and newer (sched_setattr(2)); older ones ignore it for such threads.
void WantShortSlice() {
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime_ns, deadline_ns, period_ns;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime_ns = kSliceNs;
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

void SetOption(int fd, int level, int name, int value) {
  // Best effort: without them everything works, only later.
  (void)setsockopt(fd, level, name, &value, sizeof value);
}

enum class Link : std::uint8_t { kDown, kDialing, kUp };

// One thread of a watched process.
struct WatchedThread {
  int fd = -1;
  std::uint64_t token = 0;  // 0: it has ended, and how is to be asked again at `look_ns`.
  std::int64_t look_ns = kNeverNs;
  std::uint8_t looks = 0;
};

// One watched incarnation. The sentinel thread only.
struct Watched {
  SlotRef slot;
  ActorId id{};
  std::uint64_t generation = 0;
  Plan plan;
  Limits limits;
  std::uint32_t index = 0;
  bool over = false;
  std::uint32_t random = 1;
  std::int64_t armed_ns = kNeverNs;  // The one valid entry of this watch in the heap.

  int pid_fd = -1;
  bool pid_fd_wanted = false;  // To be opened at `pid_retry_ns`.
  std::uint8_t pid_attempt = 0;
  std::uint64_t pid_token = 0;
  std::int64_t pid_retry_ns = 0;
  std::array<WatchedThread, kThreadsPerProcess> threads;
  std::uint8_t thread_picks = 0;
  std::int32_t last_thread = 0;  // The highest id that was tried.

  Link link = Link::kDown;
  bool http2 = false;         // As planned, until somebody answers who does not speak it.
  bool spoke_http2 = false;   // In this incarnation.
  bool beat_pending = false;  // The acknowledgement of our last SETTINGS on this connection has not been read.
  bool eager = false;         // Whatever comes on this connection wakes the thread (Core::Listen).
  bool blind_told = false;
  bool blind = false;        // There was no descriptor, or no permission, for the last dial.
  bool looks = false;        // As the entry has it.
  bool refused = false;      // The last dial was (Core::SetRefused).
  bool doubted = false;      // A doubt began here that has not ended yet.
  std::uint8_t attempt = 0;  // Redials without a settled connection in between.
  int socket = -1;
  int loss_error = 0;
  SentinelCause loss = SentinelCause::kNone;  // Tell when the next dial is accepted.
  std::uint64_t socket_token = 0;
  std::int64_t dial_at_ns = 0;  // kDown.
  std::int64_t dialed_at_ns = 0;
  std::int64_t connected_at_ns = 0;
  std::int64_t next_beat_ns = 0;   // kUp.
  std::int64_t read_until_ns = 0;  // Core::MayRead: up to when what has come would have been in time.
  Http2Parser parser;

  // The oldest unanswered question, in fair time (Core::FairNs); kNoQuestion: all were answered.
  std::int64_t question_fair_ns = kNoQuestion;
  bool silent = false;          // `silence_ns` has passed since.
  bool in_flight_told = false;  // `in_flight_silence_ns` too.
};

}  // namespace

const char* SentinelEventKindName(SentinelEventKind kind) {
  switch (kind) {
    case SentinelEventKind::kExited:
      return "exited";
    case SentinelEventKind::kUnreachable:
      return "unreachable";
    case SentinelEventKind::kReachable:
      return "reachable";
    case SentinelEventKind::kInFlightSilence:
      return "in_flight_silence";
    case SentinelEventKind::kAskRay:
      return "ask_ray";
    case SentinelEventKind::kTimer:
      return "timer";
  }
  return "invalid";
}

const char* SentinelCauseName(SentinelCause cause) {
  switch (cause) {
    case SentinelCause::kNone:
      return "none";
    case SentinelCause::kProcessExit:
      return "process_exit";
    case SentinelCause::kProcessGone:
      return "process_gone";
    case SentinelCause::kProcessReplaced:
      return "process_replaced";
    case SentinelCause::kRefused:
      return "refused";
    case SentinelCause::kClosed:
      return "closed";
    case SentinelCause::kReset:
      return "reset";
    case SentinelCause::kGoaway:
      return "goaway";
    case SentinelCause::kNotHttp2:
      return "not_http2";
    case SentinelCause::kDescriptors:
      return "descriptors";
    case SentinelCause::kNoAnswer:
      return "no_answer";
    case SentinelCause::kAnswer:
      return "answer";
    case SentinelCause::kFlood:
      return "flood";
  }
  return "invalid";
}

class Sentinel::Core {
 public:
  explicit Core(const Options& options)
      : options_(options), clock_(*options.clock), owner_pid_(getpid()), timers_(options.max_timers) {}
  ~Core();

  bool foreign() const { return getpid() != owner_pid_; }
  void CloseInheritedDescriptors();

  int Start() ACTORSUB_EXCLUDES(lifecycle_mutex_, mutex_);
  void Stop() ACTORSUB_EXCLUDES(lifecycle_mutex_, mutex_);
  bool running() const { return running_.load(std::memory_order_acquire); }
  WatchResult Watch(SlotRef slot, const WatchTarget& target) ACTORSUB_EXCLUDES(mutex_);
  bool Unwatch(const ActorId& id) ACTORSUB_EXCLUDES(mutex_);
  bool UpdateLimits(const ActorId& id, const Limits& limits) ACTORSUB_EXCLUDES(mutex_);
  bool Looks(const ActorId& id) const ACTORSUB_EXCLUDES(mutex_);
  bool AddTimer(std::uint64_t id, std::int64_t deadline_ns) ACTORSUB_EXCLUDES(mutex_);
  bool CancelTimer(std::uint64_t id) ACTORSUB_EXCLUDES(mutex_);
  int event_fd() const { return event_fd_.load(std::memory_order_acquire); }
  bool WaitForEvents(std::int64_t timeout_ns) const;
  void SignalEvents() const;
  std::size_t DrainEvents(std::vector<SentinelEvent>* events) ACTORSUB_EXCLUDES(mutex_);
  SentinelCounters counters() const;
  void Poke() ACTORSUB_EXCLUDES(mutex_);

 private:
  using EventList = std::list<SentinelEvent>;
  using Count = std::atomic<std::uint64_t>;

  // What callers want watched, and what is queued about it.
  struct Entry {
    std::uint64_t generation = 0;
    Plan plan;
    Limits limits;
    SlotRef slot;               // For the thread to take; empty once it has.
    bool thread_knows = false;  // The thread may have a watch for this id, this one or an earlier.
    bool ended = false;
    bool looks = false;  // The thread has its process or its connection open, or dials again by and by.
    std::array<EventList::iterator, kActorEventKindCount> queued{};
    std::array<bool, kActorEventKindCount> has_queued{};
  };
  // One change that the thread has to make.
  struct Wish {
    ActorId id{};
    bool gone = false;
    std::uint64_t generation = 0;
    Plan plan;
    Limits limits;
    SlotRef slot;  // Empty: only the limits changed.
  };
  struct DueEntry {
    std::int64_t due_ns = 0;
    std::uint32_t index = 0;
    std::uint64_t generation = 0;
    friend bool operator<(const DueEntry& a, const DueEntry& b) { return a.due_ns > b.due_ns; }
  };

  // Any thread.
  void DropQueued(Entry* entry) ACTORSUB_REQUIRES(mutex_);
  bool WantsWake() ACTORSUB_REQUIRES(mutex_);
  void WriteWake();
  void Forget() ACTORSUB_EXCLUDES(mutex_);
  void Remember(int fd);
  void CloseFd(int* fd);
  static void Add(Count* count, std::uint64_t by = 1) { count->fetch_add(by, std::memory_order_relaxed); }
  static void Subtract(Count* count) { count->fetch_sub(1, std::memory_order_relaxed); }

  // The sentinel thread.
  void Run() noexcept;
  void Loop();
  int Sleep(std::array<epoll_event, 128>* ready);
  bool TakeWishes(std::vector<Wish>* wishes) ACTORSUB_EXCLUDES(mutex_);
  void Fulfil(Wish* wish);
  void HandleReady(const epoll_event& event);
  void RunDue();
  void FireTimers() ACTORSUB_EXCLUDES(mutex_);
  void CloseAll();

  void OpenProcess(Watched* watch);
  void WantProcess(Watched* watch, int error);
  void OpenThreads(Watched* watch);
  bool OpenThread(Watched* watch, WatchedThread* thread, std::int32_t id);
  void OnThreadEnded(Watched* watch, WatchedThread* thread);
  void Dial(Watched* watch);
  void Redial(Watched* watch);
  void OnDialFailed(Watched* watch, int error);
  void OnRefused(Watched* watch, int error);
  void OnConnected(Watched* watch);
  void OnLost(Watched* watch, SentinelCause cause, int error);
  void OnNotHttp2(Watched* watch, Http2Violation violation);
  void OnAnswer(Watched* watch);
  void OnDue(Watched* watch);
  void Listen(Watched* watch, bool eager) const;
  void Read(Watched* watch, bool to_the_end);
  bool Parse(Watched* watch, const std::uint8_t* data, std::size_t size);
  bool MayRead(Watched* watch);
  bool Reply(Watched* watch, const std::uint8_t* data, std::size_t size);
  bool SendFrame(Watched* watch, const std::uint8_t* data, std::size_t size);
  void SendBeat(Watched* watch, const std::uint8_t* data, std::size_t size);
  void Beat(Watched* watch);
  void Judge(Watched* watch);
  void DeclareSilence(Watched* watch);
  void Exit(Watched* watch, SentinelCause cause, int error);
  void GoBlind(Watched* watch, int error);
  void Ask(Watched* watch, SentinelCause cause, int error);
  void Queue(Watched* watch, SentinelEventKind kind, SentinelCause cause, int error, const Change& change)
      ACTORSUB_EXCLUDES(mutex_);
  void End(Watched* watch);
  void CloseSocket(Watched* watch);
  void CloseProcess(Watched* watch);
  void CloseThread(WatchedThread* thread);
  void SetQuestion(Watched* watch, std::int64_t fair_ns);
  void SetRefused(Watched* watch, bool refused);
  void Arm(Watched* watch);
  void TellLooks(Watched* watch) ACTORSUB_EXCLUDES(mutex_);
  void CountFree();
  bool MayOpenDescriptor();
  void KeepReserve();
  void GiveBackThreads(Watched* watch);
  void GiveBackProcess(Watched* watch);
  void GiveBackConnection(Watched* watch);
  int Register(int fd, std::uint32_t events, std::uint32_t index, std::uint64_t* token);
  void Unregister(int fd) const;
  std::int64_t NextBeatNs(Watched* watch, std::int64_t now_ns, bool first) const;
  // Time in which this thread ran when it wanted to. Stands still while we are starved or stopped, so that peers are
  // not charged for it.
  std::int64_t FairNs(std::int64_t now_ns) const { return now_ns - granted_ns_; }

  const Options options_;
  const Clock& clock_;
  const pid_t owner_pid_;

  // Starting and stopping. Taken before `mutex_`, held across the join, never by the sentinel thread.
  Mutex lifecycle_mutex_;
  std::thread thread_ ACTORSUB_GUARDED_BY(lifecycle_mutex_);

  // Release by Start (descriptors are there) and by the end; acquire by everybody.
  std::atomic<bool> running_{false};
  // Written once by the first Start (release), before any reader can have a use for them.
  std::atomic<int> event_fd_{-1};
  std::atomic<int> wake_fd_{-1};

  // Shared by callers and the thread. Held for a few map operations; no system call, no SlotRef copied or dropped.
  mutable Mutex mutex_;
  bool stopping_ ACTORSUB_GUARDED_BY(mutex_) = false;
  bool wake_sent_ ACTORSUB_GUARDED_BY(mutex_) = false;
  // Until when the thread will sleep; kNoQuestion while it is awake and will look at the timers anyway.
  std::int64_t sleeps_until_ns_ ACTORSUB_GUARDED_BY(mutex_) = kNoQuestion;
  std::uint64_t next_generation_ ACTORSUB_GUARDED_BY(mutex_) = 1;
  std::unordered_map<ActorId, Entry, IdHash> entries_ ACTORSUB_GUARDED_BY(mutex_);
  std::unordered_set<ActorId, IdHash> dirty_ ACTORSUB_GUARDED_BY(mutex_);
  EventList events_ ACTORSUB_GUARDED_BY(mutex_);
  Timers timers_ ACTORSUB_GUARDED_BY(mutex_);

  // The sentinel thread only (Start and Stop: while it does not exist).
  int epoll_fd_ = -1;
  std::vector<std::unique_ptr<Watched>> watches_;
  std::vector<std::uint32_t> free_indices_;
  std::unordered_map<ActorId, std::uint32_t, IdHash> index_by_id_;
  std::vector<std::unique_ptr<Watched>> over_;  // Ended in this turn; callers up the stack may still look at them.
  std::vector<DueEntry> due_;                   // Heap, lazy deletion by Watched::armed_ns.
  std::uint64_t next_token_serial_ = 1;
  std::uint64_t open_questions_ = 0;
  std::int64_t refused_ = 0;  // How many watches are.
  std::uint32_t descriptors_ = 0;
  std::uint32_t thread_descriptors_ = 0;  // Those of them that are for threads.
  bool threads_tell_ = true;              // False: this kernel does not say how a thread ended.
  // How many descriptors this process can still open, as of the turn when it was counted last, less those that this
  // thread has opened since; and how many of these are not for us.
  std::int64_t free_ = 0;
  std::int64_t reserve_ = 0;
  bool free_is_known_ = false;  // In this turn.
  std::int64_t next_reserve_look_ns_ = 0;
  std::int64_t turn_ns_ = 0;  // When this turn began.
  // What the points in time for heartbeats count from; its own, so that the processes of a host do not beat in step.
  std::int64_t beat_origin_ns_ = 0;
  std::int64_t granted_ns_ = 0;

  // Our open descriptors by number, for the child of a fork, which can trust nothing that takes more than one store to
  // change. A bit is set after the descriptor was opened and cleared before it is closed: a child that is born in
  // between keeps a harmless copy, and never closes what is not ours. Numbers above the table are not tracked.
  std::array<std::atomic<std::uint64_t>, 16'384> open_fds_{};

  // Statistics: relaxed, they order nothing.
  Count count_watches_{0}, count_process_watches_{0}, count_thread_watches_{0}, count_sockets_{0}, count_dials_{0},
      count_refused_{0}, count_beats_sent_{0}, count_beats_acked_{0}, count_silences_{0}, count_doubts_{0},
      count_false_alarms_{0}, count_in_flight_silences_{0}, count_fd_exhausted_{0}, count_connect_timeouts_{0},
      count_lost_{0}, count_goaways_{0}, count_protocol_errors_{0}, count_floods_{0}, count_exits_by_process_{0},
      count_exits_by_thread_{0}, count_ask_ray_{0}, count_late_wakeups_{0}, count_late_ns_{0}, count_turns_{0},
      count_timers_fired_{0};
};

// ---------------------------------------------------------------------------------------------- descriptors

void Sentinel::Core::Remember(int fd) {
  const std::size_t word = static_cast<std::size_t>(fd) / 64;
  if (word < open_fds_.size()) open_fds_[word].fetch_or(std::uint64_t{1} << (fd % 64), std::memory_order_relaxed);
}

void Sentinel::Core::CloseFd(int* fd) {
  if (*fd < 0) return;
  const std::size_t word = static_cast<std::size_t>(*fd) / 64;
  if (word < open_fds_.size()) {
    open_fds_[word].fetch_and(~(std::uint64_t{1} << (*fd % 64)), std::memory_order_relaxed);
  }
  close(*fd);
  *fd = -1;
}

void Sentinel::Core::CloseInheritedDescriptors() {
  for (std::size_t word = 0; word < open_fds_.size(); ++word) {
    std::uint64_t bits = open_fds_[word].load(std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) close(static_cast<int>(word) * 64 + __builtin_ctzll(bits));
  }
}

void Sentinel::Core::CountFree() {
  free_is_known_ = true;
  rlimit limit{};
  const std::int64_t used = CountDescriptors();
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || used < 0) {
    free_ = kNeverNs;  // Not known: the kernel says when it is over.
    reserve_ = 0;
    return;
  }
  const auto most = static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, INT32_MAX));
  free_ = std::max<std::int64_t>(most - used, 0);
  reserve_ = std::clamp(most / static_cast<std::int64_t>(kReserveShare), kMinReserve, kMaxReserve);
}

// One more, of which the caller makes use. Else false, and EMFILE.
bool Sentinel::Core::MayOpenDescriptor() {
  if (!free_is_known_) CountFree();
  if (descriptors_ < options_.max_descriptors && free_ > reserve_) {
    --free_;
    return true;
  }
  errno = EMFILE;
  return false;
}

// Gives watches back where the application has taken half of what is kept for it, until that much is free again. The
// half in between keeps a watch from being opened and closed in turn. What goes first is missed least: threads tell an
// end sooner, processes prove it, and a connection alone still shows it.
void Sentinel::Core::KeepReserve() {
  if (descriptors_ == 0 || turn_ns_ < next_reserve_look_ns_) return;
  next_reserve_look_ns_ = turn_ns_ + kReserveLookNs;
  CountFree();
  if (free_ >= reserve_ / 2) return;
  for (void (Core::*give_back)(Watched*) :
       {&Core::GiveBackThreads, &Core::GiveBackProcess, &Core::GiveBackConnection}) {
    for (std::size_t i = watches_.size(); i-- > 0 && free_ < reserve_;) {
      Watched* watch = watches_[i].get();
      if (watch == nullptr) continue;
      const std::uint32_t before = descriptors_;
      (this->*give_back)(watch);
      free_ += before - descriptors_;
      Arm(watch);
    }
  }
}

void Sentinel::Core::GiveBackThreads(Watched* watch) {
  for (WatchedThread& thread : watch->threads) CloseThread(&thread);
}

void Sentinel::Core::GiveBackProcess(Watched* watch) {
  if (watch->pid_fd < 0) return;
  CloseProcess(watch);
  WantProcess(watch, EMFILE);
}

void Sentinel::Core::GiveBackConnection(Watched* watch) {
  if (watch->socket < 0) return;
  CloseSocket(watch);
  GoBlind(watch, EMFILE);
}

// 0 or errno. Tokens carry a serial, so an event that was fetched before a descriptor went away meets nobody.
int Sentinel::Core::Register(int fd, std::uint32_t events, std::uint32_t index, std::uint64_t* token) {
  *token = next_token_serial_++ << 24 | index;
  epoll_event event{};
  event.events = events;
  event.data.u64 = *token;
  return epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : errno;
}

// Always before closing: while a forked child holds a copy, closing alone would leave it in our epoll instance.
void Sentinel::Core::Unregister(int fd) const { (void)epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); }

void Sentinel::Core::CloseSocket(Watched* watch) {
  if (watch->socket < 0) return;
  Unregister(watch->socket);
  // So that the peer learns of it although a forked child may hold a copy.
  if (watch->link == Link::kUp) (void)shutdown(watch->socket, SHUT_RDWR);
  CloseFd(&watch->socket);
  watch->socket_token = 0;
  watch->link = Link::kDown;
  watch->beat_pending = false;
  --descriptors_;
  Subtract(&count_sockets_);
}

void Sentinel::Core::CloseThread(WatchedThread* thread) {
  if (thread->fd < 0) return;
  if (thread->token != 0) Unregister(thread->fd);
  CloseFd(&thread->fd);
  *thread = WatchedThread();
  --descriptors_;
  --thread_descriptors_;
  Subtract(&count_thread_watches_);
}

void Sentinel::Core::CloseProcess(Watched* watch) {
  for (WatchedThread& thread : watch->threads) CloseThread(&thread);
  if (watch->pid_fd < 0) return;
  Unregister(watch->pid_fd);
  CloseFd(&watch->pid_fd);
  watch->pid_token = 0;
  --descriptors_;
  Subtract(&count_process_watches_);
}

// ---------------------------------------------------------------------------------------------- life cycle

Sentinel::Core::~Core() {
  Stop();
  int fd = event_fd_.exchange(-1);
  CloseFd(&fd);
  fd = wake_fd_.exchange(-1);
  CloseFd(&fd);
}

int Sentinel::Core::Start() {
  MutexLock lifecycle(lifecycle_mutex_);
  if (thread_.joinable()) return running() ? 0 : ENOMEM;  // Broken: Stop first.
  for (std::atomic<int>* fd : {&event_fd_, &wake_fd_}) {
    if (fd->load(std::memory_order_relaxed) >= 0) continue;
    const int made = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (made < 0) return errno;
    Remember(made);
    fd->store(made, std::memory_order_release);
  }
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd_ < 0) return errno;
  Remember(epoll_fd_);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;  // No token: serials begin at 1.
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_.load(std::memory_order_relaxed), &event) != 0) {
    const int error = errno;
    CloseFd(&epoll_fd_);
    return error;
  }
  {
    MutexLock lock(mutex_);
    stopping_ = false;
  }
  running_.store(true, std::memory_order_release);
  // The new thread inherits the mask: no signal of the application is ever delivered to it.
  sigset_t all;
  sigset_t previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  int error = 0;
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& failure) {
    error = failure.code().value() != 0 ? failure.code().value() : EAGAIN;
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  if (error != 0) {
    running_.store(false, std::memory_order_release);
    CloseFd(&epoll_fd_);
  }
  return error;
}

void Sentinel::Core::Stop() {
  MutexLock lifecycle(lifecycle_mutex_);
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    running_.store(false, std::memory_order_release);  // Under the lock: no Watch or AddTimer slips in afterwards.
  }
  WriteWake();
  thread_.join();
  CloseFd(&epoll_fd_);
  Forget();
  SignalEvents();
}

void Sentinel::Core::Forget() {
  std::unordered_map<ActorId, Entry, IdHash> entries;  // Destroyed after the lock is released: holds slot references.
  MutexLock lock(mutex_);
  entries.swap(entries_);
  dirty_.clear();
  events_.clear();
  timers_.Clear();
  wake_sent_ = false;
  sleeps_until_ns_ = kNoQuestion;
}

// ---------------------------------------------------------------------------------------------- callers' side

// A pending write makes a second one useless.
bool Sentinel::Core::WantsWake() {
  if (wake_sent_) return false;
  wake_sent_ = true;
  return true;
}

void Sentinel::Core::WriteWake() {
  const std::uint64_t one = 1;
  // Cannot block, and fails only when the counter is full, which wakes as well.
  (void)!write(wake_fd_.load(std::memory_order_acquire), &one, sizeof one);
}

void Sentinel::Core::Poke() {
  bool wake = false;
  {
    MutexLock lock(mutex_);
    if (!running()) return;
    wake = WantsWake();
  }
  if (wake) WriteWake();
}

WatchResult Sentinel::Core::Watch(SlotRef slot, const WatchTarget& target) {
  Plan plan;
  plan.incarnation = target.incarnation;
  plan.connect = target.connect;
  plan.http2 = target.http2 && target.connect;
  plan.pid = std::max(target.pid, 0);
  plan.pid_start_ticks = plan.pid != 0 ? target.pid_start_ticks : 0;
  if (!slot || (!plan.connect && plan.pid == 0)) return WatchResult::kNothingToWatch;
  if (plan.connect && !ParseAddress(target.ip, target.port, &plan.address)) return WatchResult::kBadAddress;
  const ActorId id = slot->id();
  bool wake = false;
  WatchResult result = WatchResult::kWatching;
  {
    MutexLock lock(mutex_);
    if (!running()) return WatchResult::kNotRunning;
    const bool was_dirty = !dirty_.insert(id).second;
    const auto [at, made] = entries_.try_emplace(id);
    Entry& entry = at->second;
    // A wish left behind by Unwatch: the thread still has that watch.
    if (made && was_dirty) entry.thread_knows = true;
    entry.limits = MakeLimits(target.silence_ns, target.in_flight_silence_ns);
    if (!made && !entry.ended && entry.plan == plan) {
      result = WatchResult::kUnchanged;
    } else {
      entry.generation = next_generation_++;
      entry.plan = plan;
      entry.ended = false;
      // The previous wish, if the thread has not taken it, leaves in `slot` and is dropped after the lock.
      std::swap(entry.slot, slot);
    }
    wake = WantsWake();
  }
  if (wake) WriteWake();
  return result;
}

void Sentinel::Core::DropQueued(Entry* entry) {
  for (std::size_t kind = 0; kind < entry->queued.size(); ++kind) {
    if (entry->has_queued[kind]) events_.erase(entry->queued[kind]);
    entry->has_queued[kind] = false;
  }
}

bool Sentinel::Core::Unwatch(const ActorId& id) {
  SlotRef dropped;
  bool wake = false;
  {
    MutexLock lock(mutex_);
    const auto at = entries_.find(id);
    if (at == entries_.end()) return false;
    std::swap(dropped, at->second.slot);
    DropQueued(&at->second);
    if (at->second.thread_knows) {
      dirty_.insert(id);
      wake = running() && WantsWake();
    } else {
      dirty_.erase(id);
    }
    entries_.erase(at);
  }
  if (wake) WriteWake();
  return true;
}

bool Sentinel::Core::UpdateLimits(const ActorId& id, const Limits& limits) {
  bool wake = false;
  {
    MutexLock lock(mutex_);
    const auto at = entries_.find(id);
    if (at == entries_.end() || at->second.ended) return false;
    at->second.limits = limits;
    dirty_.insert(id);
    wake = running() && WantsWake();
  }
  if (wake) WriteWake();
  return true;
}

bool Sentinel::Core::Looks(const ActorId& id) const {
  MutexLock lock(mutex_);
  const auto at = entries_.find(id);
  return at != entries_.end() && at->second.looks;
}

bool Sentinel::Core::AddTimer(std::uint64_t id, std::int64_t deadline_ns) {
  bool wake = false;
  {
    MutexLock lock(mutex_);
    if (!running()) return false;
    if (!timers_.Add(id, deadline_ns)) return false;
    if (deadline_ns < sleeps_until_ns_) wake = WantsWake();
  }
  if (wake) WriteWake();
  return true;
}

bool Sentinel::Core::CancelTimer(std::uint64_t id) {
  MutexLock lock(mutex_);
  return timers_.Cancel(id);
}

bool Sentinel::Core::WaitForEvents(std::int64_t timeout_ns) const {
  // Looked at before blocking: Stop signals after it has cleared the flag, so one of the two is noticed.
  if (!running()) return false;
  pollfd waiting{};
  waiting.fd = event_fd();
  waiting.events = POLLIN;
  timespec timeout{};
  if (timeout_ns >= 0) {
    timeout.tv_sec = static_cast<time_t>(timeout_ns / kNsPerSecond);
    timeout.tv_nsec = static_cast<long>(timeout_ns % kNsPerSecond);
  }
  // A signal ends the wait early, so that an interpreter gets to see it.
  return ppoll(&waiting, 1, timeout_ns >= 0 ? &timeout : nullptr, nullptr) == 1;
}

void Sentinel::Core::SignalEvents() const {
  const std::uint64_t one = 1;
  (void)!write(event_fd(), &one, sizeof one);
}

std::size_t Sentinel::Core::DrainEvents(std::vector<SentinelEvent>* events) {
  // Emptied before looking: what is queued after the look signals anew.
  std::uint64_t signals = 0;
  (void)!read(event_fd(), &signals, sizeof signals);
  const std::size_t before = events->size();
  MutexLock lock(mutex_);
  // All that can fail comes first: nothing is lost then.
  std::vector<Timers::Fired> fired;
  fired.reserve(timers_.fired());
  events->reserve(before + events_.size() + timers_.fired());
  for (const SentinelEvent& event : events_) {
    events->push_back(event);
    const auto at = entries_.find(event.actor_id);
    if (at != entries_.end()) at->second.has_queued[static_cast<std::size_t>(event.kind)] = false;
  }
  events_.clear();
  timers_.Take(&fired);
  for (const Timers::Fired& timer : fired) {
    SentinelEvent event;
    event.kind = SentinelEventKind::kTimer;
    event.seen_ns = timer.seen_ns;
    event.timer_id = timer.id;
    events->push_back(event);
  }
  return events->size() - before;
}

SentinelCounters Sentinel::Core::counters() const {
  const auto get = [](const Count& count) { return count.load(std::memory_order_relaxed); };
  SentinelCounters result;
  result.watches = get(count_watches_);
  result.process_watches = get(count_process_watches_);
  result.thread_watches = get(count_thread_watches_);
  result.sockets = get(count_sockets_);
  result.dials = get(count_dials_);
  result.refused = get(count_refused_);
  result.heartbeats_sent = get(count_beats_sent_);
  result.heartbeats_acked = get(count_beats_acked_);
  result.silences = get(count_silences_);
  result.doubts = get(count_doubts_);
  result.false_alarms = get(count_false_alarms_);
  result.in_flight_silences = get(count_in_flight_silences_);
  result.fd_exhausted = get(count_fd_exhausted_);
  result.connect_timeouts = get(count_connect_timeouts_);
  result.connections_lost = get(count_lost_);
  result.goaways = get(count_goaways_);
  result.protocol_errors = get(count_protocol_errors_);
  result.floods = get(count_floods_);
  result.exits_by_process = get(count_exits_by_process_);
  result.exits_by_thread = get(count_exits_by_thread_);
  result.ask_ray = get(count_ask_ray_);
  result.late_wakeups = get(count_late_wakeups_);
  result.late_ns = get(count_late_ns_);
  result.turns = get(count_turns_);
  result.timers_fired = get(count_timers_fired_);
  return result;
}

// ---------------------------------------------------------------------------------------------- the loop

void Sentinel::Core::Run() noexcept {
  // The kernel keeps 15 characters.
  pthread_setname_np(pthread_self(), "actorsub-sentin");
  WantShortSlice();
  bool well = true;
  try {
    Loop();
  } catch (const std::exception&) {
    // Out of memory: there is nothing else in here that throws. Going on with half of a change made would be worse than
    // saying that we no longer look.
    well = false;
  }
  CloseAll();
  if (!well) {
    running_.store(false, std::memory_order_release);
    SignalEvents();
  }
}

void Sentinel::Core::Loop() {
  beat_origin_ns_ = clock_.NowNs();
  std::array<epoll_event, 128> ready;
  std::vector<Wish> wishes;
  for (;;) {
    const int count = Sleep(&ready);
    if (!TakeWishes(&wishes)) return;
    for (Wish& wish : wishes) Fulfil(&wish);
    wishes.clear();
    // Sockets before deadlines: an answer that is here counts, however late we are.
    for (int i = 0; i < count; ++i) HandleReady(ready[static_cast<std::size_t>(i)]);
    RunDue();
    KeepReserve();
    FireTimers();
    over_.clear();
  }
}

// Waits for the next thing to do. Whatever time the thread lost against its plan is granted to everybody.
int Sentinel::Core::Sleep(std::array<epoll_event, 128>* ready) {
  const std::int64_t begin_ns = clock_.NowNs();
  std::int64_t late_ns = 0;
  if (turn_ns_ != 0 && begin_ns - turn_ns_ > kLatenessToleranceNs) late_ns = begin_ns - turn_ns_;
  std::int64_t until_ns = due_.empty() ? kNeverNs : due_.front().due_ns;
  if (open_questions_ > 0) until_ns = std::min(until_ns, begin_ns + kMaxSleepWithQuestionsNs);
  if (descriptors_ > 0) until_ns = std::min(until_ns, std::max(next_reserve_look_ns_, begin_ns));
  {
    MutexLock lock(mutex_);
    until_ns = std::min(until_ns, timers_.NextNs());
    // `wake_sent_`: its write may have been read in the last turn, after the wishes were taken.
    if (!dirty_.empty() || stopping_ || wake_sent_) until_ns = begin_ns;
    sleeps_until_ns_ = until_ns;
  }
  int timeout_ms = -1;
  if (until_ns != kNeverNs) {
    // Rounded up: waking early would only mean going to sleep again.
    const std::int64_t wait_ns = std::max<std::int64_t>(until_ns - begin_ns, 0);
    timeout_ms = static_cast<int>(std::min<std::int64_t>((wait_ns + kNsPerMs - 1) / kNsPerMs, INT_MAX));
  }
  const int count = epoll_wait(epoll_fd_, ready->data(), static_cast<int>(ready->size()), timeout_ms);
  turn_ns_ = clock_.NowNs();
  free_is_known_ = false;
  if (timeout_ms >= 0) {
    const std::int64_t oversleep_ns = turn_ns_ - (begin_ns + timeout_ms * kNsPerMs);
    if (oversleep_ns > kLatenessToleranceNs) late_ns += oversleep_ns;
  }
  if (late_ns > 0) {
    granted_ns_ += late_ns;
    Add(&count_late_wakeups_);
    Add(&count_late_ns_, static_cast<std::uint64_t>(late_ns));
  }
  Add(&count_turns_);
  return std::max(count, 0);  // EINTR cannot happen with all signals blocked, and would be a turn like any other.
}

// False: stop. What does not fit into this turn stays for the next, so that sockets are read in between.
bool Sentinel::Core::TakeWishes(std::vector<Wish>* wishes) {
  MutexLock lock(mutex_);
  if (stopping_) return false;
  sleeps_until_ns_ = kNoQuestion;
  wake_sent_ = false;
  wishes->reserve(std::min(dirty_.size(), kWishesPerTurn));
  while (!dirty_.empty() && wishes->size() < kWishesPerTurn) {
    Wish wish;
    wish.id = *dirty_.begin();
    dirty_.erase(dirty_.begin());
    const auto at = entries_.find(wish.id);
    if (at == entries_.end()) {
      wish.gone = true;
    } else {
      Entry& entry = at->second;
      entry.thread_knows = true;
      wish.generation = entry.generation;
      wish.plan = entry.plan;
      wish.limits = entry.limits;
      wish.slot = std::move(entry.slot);
    }
    wishes->push_back(std::move(wish));
  }
  return true;
}

void Sentinel::Core::Fulfil(Wish* wish) {
  const auto known = index_by_id_.find(wish->id);
  Watched* watch = known != index_by_id_.end() ? watches_[known->second].get() : nullptr;
  if (!wish->gone && !wish->slot) {
    // No watch: it ended meanwhile, and the event that says so is queued.
    if (watch == nullptr) return;
    watch->limits = wish->limits;
    Arm(watch);
    return;
  }
  if (watch != nullptr) End(watch);
  if (wish->gone) return;

  std::uint32_t index = 0;
  if (free_indices_.empty()) {
    index = static_cast<std::uint32_t>(watches_.size());
    assert(index < (1U << 24));  // What a token has room for.
    watches_.emplace_back();
  } else {
    index = free_indices_.back();
    free_indices_.pop_back();
  }
  watches_[index] = std::make_unique<Watched>();
  watch = watches_[index].get();
  watch->slot = std::move(wish->slot);
  watch->id = wish->id;
  watch->generation = wish->generation;
  watch->plan = wish->plan;
  watch->limits = wish->limits;
  watch->index = index;
  watch->http2 = wish->plan.http2;
  // Any seed will do that differs between the actors of one process, and between the processes that watch one actor.
  watch->random = static_cast<std::uint32_t>(IdHash()(wish->id) ^ wish->generation * 2654435761U ^
                                             static_cast<std::uint64_t>(owner_pid_) << 12) |
                  1U;
  index_by_id_[wish->id] = index;
  Add(&count_watches_);
  if (watch->plan.pid != 0) OpenProcess(watch);
  if (!watch->over && watch->plan.connect) Dial(watch);
  Arm(watch);
}

void Sentinel::Core::HandleReady(const epoll_event& event) {
  const std::uint64_t token = event.data.u64;
  if (token == 0) {
    std::uint64_t count = 0;
    (void)!read(wake_fd_.load(std::memory_order_relaxed), &count, sizeof count);
    return;
  }
  const std::size_t index = token & 0xFF'FFFF;
  Watched* watch = index < watches_.size() ? watches_[index].get() : nullptr;
  if (watch == nullptr) return;
  if (token == watch->pid_token) {
    Exit(watch, SentinelCause::kProcessExit, 0);
    return;
  }
  for (WatchedThread& thread : watch->threads) {
    if (token != thread.token) continue;
    OnThreadEnded(watch, &thread);
    Arm(watch);
    return;
  }
  if (token != watch->socket_token) return;
  if (watch->link == Link::kDialing) {
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(watch->socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error == 0) {
      OnConnected(watch);
    } else {
      OnDialFailed(watch, error);
    }
  } else if (watch->link == Link::kUp) {
    Read(watch, (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
  }
  Arm(watch);
}

void Sentinel::Core::RunDue() {
  while (!due_.empty() && due_.front().due_ns <= turn_ns_) {
    const DueEntry entry = due_.front();
    std::pop_heap(due_.begin(), due_.end());
    due_.pop_back();
    Watched* watch = watches_[entry.index].get();
    if (watch == nullptr || watch->generation != entry.generation || watch->armed_ns != entry.due_ns) continue;
    watch->armed_ns = kNeverNs;
    OnDue(watch);
    Arm(watch);
  }
}

void Sentinel::Core::FireTimers() {
  bool any = false;
  for (bool more = true; more;) {
    MutexLock lock(mutex_);
    const std::size_t fired = timers_.Fire(turn_ns_, kTimersPerLock, &more);
    any = any || fired != 0;
    Add(&count_timers_fired_, fired);
  }
  if (any) SignalEvents();
}

void Sentinel::Core::CloseAll() {
  for (std::unique_ptr<Watched>& watch : watches_) {
    if (watch == nullptr) continue;
    CloseSocket(watch.get());
    CloseProcess(watch.get());
    SetQuestion(watch.get(), kNoQuestion);
    SetRefused(watch.get(), false);
    Subtract(&count_watches_);
  }
  watches_.clear();
  free_indices_.clear();
  index_by_id_.clear();
  over_.clear();
  due_.clear();
  turn_ns_ = 0;
}

// ---------------------------------------------------------------------------------------------- one watch: deadlines

void Sentinel::Core::SetQuestion(Watched* watch, std::int64_t fair_ns) {
  const bool was_open = watch->question_fair_ns != kNoQuestion;
  const bool is_open = fair_ns != kNoQuestion;
  if (is_open && !was_open) ++open_questions_;
  if (was_open && !is_open) --open_questions_;
  watch->question_fair_ns = fair_ns;
}

void Sentinel::Core::SetRefused(Watched* watch, bool refused) {
  if (watch->refused != refused) refused_ += refused ? 1 : -1;
  watch->refused = refused;
}

void Sentinel::Core::TellLooks(Watched* watch) {
  const bool looks = watch->pid_fd >= 0 || (watch->plan.connect && !watch->blind);
  if (looks == watch->looks) return;
  watch->looks = looks;
  MutexLock lock(mutex_);
  const auto at = entries_.find(watch->id);
  if (at != entries_.end() && at->second.generation == watch->generation) at->second.looks = looks;
}

// Makes sure that RunDue comes back when this watch next has something to do. An earlier entry is left in the heap; it
// finds nothing to do and arms anew.
void Sentinel::Core::Arm(Watched* watch) {
  if (watch->over) return;
  TellLooks(watch);
  std::int64_t due_ns = watch->pid_fd_wanted ? watch->pid_retry_ns : kNeverNs;
  for (const WatchedThread& thread : watch->threads) due_ns = std::min(due_ns, thread.look_ns);
  if (watch->plan.connect) {
    switch (watch->link) {
      case Link::kDown:
        due_ns = std::min(due_ns, watch->dial_at_ns);
        break;
      case Link::kDialing:
        due_ns = std::min(
            due_ns, watch->dialed_at_ns + std::clamp(watch->limits.silence_ns, kMinDialTimeoutNs, kMaxDialTimeoutNs));
        break;
      case Link::kUp:
        if (watch->http2) due_ns = std::min(due_ns, watch->next_beat_ns);
        break;
    }
  }
  if (watch->question_fair_ns != kNoQuestion) {
    const std::int64_t asked_ns = watch->question_fair_ns + granted_ns_;
    if (!watch->silent) {
      due_ns = std::min(due_ns, AddNs(std::max<std::int64_t>(asked_ns, 0), watch->limits.silence_ns));
    } else if (!watch->in_flight_told) {
      due_ns = std::min(due_ns, AddNs(std::max<std::int64_t>(asked_ns, 0), watch->limits.in_flight_silence_ns));
    }
  }
  if (due_ns >= watch->armed_ns) return;
  watch->armed_ns = due_ns;
  due_.push_back(DueEntry{due_ns, watch->index, watch->generation});
  std::push_heap(due_.begin(), due_.end());
}

void Sentinel::Core::OnDue(Watched* watch) {
  if (watch->pid_fd_wanted && watch->pid_retry_ns <= turn_ns_) {
    OpenProcess(watch);
    if (watch->over) return;
  }
  for (WatchedThread& thread : watch->threads) {
    if (thread.look_ns <= turn_ns_) OnThreadEnded(watch, &thread);
    if (watch->over) return;
  }
  if (watch->plan.connect) {
    if (watch->link == Link::kDialing &&
        turn_ns_ - watch->dialed_at_ns >= std::clamp(watch->limits.silence_ns, kMinDialTimeoutNs, kMaxDialTimeoutNs)) {
      // Begun anew rather than left to the kernel, whose pauses between SYNs grow.
      Add(&count_connect_timeouts_);
      CloseSocket(watch);
      Dial(watch);
    } else if (watch->link == Link::kDown && watch->dial_at_ns <= turn_ns_) {
      Dial(watch);
    } else if (watch->link == Link::kUp && watch->http2 && watch->next_beat_ns <= turn_ns_) {
      watch->next_beat_ns = NextBeatNs(watch, turn_ns_, false);
      Beat(watch);
    }
    if (watch->over) return;
  }
  Judge(watch);
}

std::int64_t Sentinel::Core::NextBeatNs(Watched* watch, std::int64_t now_ns, bool first) const {
  const std::int64_t interval_ns =
      std::clamp(watch->limits.silence_ns / kBeatsPerSilence, kMinBeatIntervalNs, kMaxBeatIntervalNs);
  const std::int64_t slot_ns = interval_ns / kBeatSlots;
  // From the plan and not from the present: else watches that once were late together would stay together.
  std::int64_t before_ns = watch->next_beat_ns;
  if (first) {
    // At any point of the interval, so that what is connected at one time is not asked at one time for ever.
    watch->random ^= watch->random << 13;
    watch->random ^= watch->random >> 17;
    watch->random ^= watch->random << 5;
    before_ns = now_ns - interval_ns * (watch->random & 0xFF) / 256;
  }
  std::int64_t beat_ns = beat_origin_ns_ + (before_ns + interval_ns - beat_origin_ns_) / slot_ns * slot_ns;
  if (beat_ns <= now_ns) beat_ns += ((now_ns - beat_ns) / interval_ns + 1) * interval_ns;
  return beat_ns;
}

void Sentinel::Core::Judge(Watched* watch) {
  if (watch->question_fair_ns == kNoQuestion) return;
  // The beginning of the turn, not the present: time lost within a turn is not known as lost before its end.
  const std::int64_t silent_ns = FairNs(turn_ns_) - watch->question_fair_ns;
  if (silent_ns < watch->limits.silence_ns) return;
  if (!watch->silent && watch->link == Link::kUp) {
    // The last look: its answer may have come since epoll was asked, or not have fitted into what epoll returned.
    Read(watch, false);
    if (watch->over || watch->question_fair_ns == kNoQuestion ||
        FairNs(turn_ns_) - watch->question_fair_ns < watch->limits.silence_ns) {
      return;
    }
  }
  DeclareSilence(watch);
  if (!watch->in_flight_told && silent_ns >= watch->limits.in_flight_silence_ns) {
    watch->in_flight_told = true;
    Add(&count_in_flight_silences_);
    // Here and not by whoever drains the event: until then it may have answered and been given new calls.
    watch->slot->DeclareLoss();
    Queue(watch, SentinelEventKind::kInFlightSilence, SentinelCause::kNoAnswer, 0, Change());
  }
}

// Repeated for as long as the silence lasts: Ray may call the incarnation alive only after we found it silent.
void Sentinel::Core::DeclareSilence(Watched* watch) {
  watch->silent = true;
  Observation observation;
  observation.evidence = Evidence::kSilence;
  observation.verdict = ActorState::kUnreachable;
  observation.incarnation = watch->plan.incarnation;
  const Belief belief = watch->slot->belief();
  if (belief.state != ActorState::kAlive && !belief.answered) return;
  const Change change = watch->slot->Apply(observation);
  // In doubt it only takes back the answer.
  if (!change.changed || InDoubt(change.after)) return;
  Add(&count_silences_);
  Queue(watch, SentinelEventKind::kUnreachable, SentinelCause::kNoAnswer, 0, change);
}

void Sentinel::Core::OnAnswer(Watched* watch) {
  SetQuestion(watch, kNoQuestion);
  watch->silent = false;
  watch->in_flight_told = false;
  watch->blind_told = false;
  const ActorState state = watch->slot->state();
  if (watch->doubted && state != ActorState::kUnreachable) {
    watch->doubted = false;
    if (state == ActorState::kAlive) Add(&count_false_alarms_);
  }
  // Also withdraws what an earlier watch of this incarnation left behind.
  if (state != ActorState::kUnreachable) return;
  Observation observation;
  observation.evidence = Evidence::kSilence;
  observation.verdict = ActorState::kAlive;
  observation.incarnation = watch->plan.incarnation;
  const Change change = watch->slot->Apply(observation);
  if (!change.changed) return;
  if (change.after.state != ActorState::kAlive) {
    // It was in doubt, and the table has yet to say that this is no other process.
    Ask(watch, SentinelCause::kAnswer, 0);
    return;
  }
  Add(&count_false_alarms_);
  Queue(watch, SentinelEventKind::kReachable, SentinelCause::kAnswer, 0, change);
}

// ---------------------------------------------------------------------------------------------- one watch: process

void Sentinel::Core::OpenProcess(Watched* watch) {
  watch->pid_fd_wanted = false;
  int fd = MayOpenDescriptor() ? static_cast<int>(syscall(SYS_pidfd_open, watch->plan.pid, 0)) : -1;
  int error = fd < 0 ? errno : 0;
  if (fd >= 0) {
    Remember(fd);
    // After opening: if this is still the process that was meant, then so is the descriptor.
    std::uint64_t ticks = 0;
    if (watch->plan.pid_start_ticks != 0 && !ReadStartTicks(watch->plan.pid, &ticks)) {
      error = errno;
      pollfd ended = {fd, POLLIN, 0};
      // Whoever has ended by now is the one that was meant, or came after it.
      if (error != EMFILE && error != ENFILE && poll(&ended, 1, 0) == 1) error = 0;
    } else if (watch->plan.pid_start_ticks != 0 && ticks != watch->plan.pid_start_ticks) {
      CloseFd(&fd);
      Exit(watch, SentinelCause::kProcessReplaced, 0);
      return;
    }
    if (error == 0) error = Register(fd, EPOLLIN, watch->index, &watch->pid_token);
    if (error != 0) {
      watch->pid_token = 0;
      CloseFd(&fd);
    }
  }
  if (fd >= 0) {
    watch->pid_fd = fd;
    watch->pid_attempt = 0;
    ++descriptors_;
    Add(&count_process_watches_);
    OpenThreads(watch);
    return;
  }
  if (error == ESRCH) {
    Exit(watch, SentinelCause::kProcessGone, ESRCH);
    return;
  }
  WantProcess(watch, error);
}

// It could not be opened, or had to be given back. Where that was not for want of descriptors (not permitted, an old
// kernel, a thread, or a process that we cannot tell from another) the connection is all there is.
void Sentinel::Core::WantProcess(Watched* watch, int error) {
  const bool exhausted = error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOSPC;
  if ((exhausted && watch->pid_attempt == 0) || !watch->plan.connect) Ask(watch, SentinelCause::kDescriptors, error);
  if (!exhausted) return;
  Add(&count_fd_exhausted_);
  watch->pid_fd_wanted = true;
  watch->pid_retry_ns = turn_ns_ + std::min(kMinRetryDelayNs << watch->pid_attempt, kMaxRetryDelayNs);
  if (watch->pid_attempt < 6) ++watch->pid_attempt;
}

// Fills the empty places, as long as there are threads, kernels that tell and descriptors to spare: without them an
// exit is noticed all the same, only later. The oldest threads come first: a process's pools are made last.
void Sentinel::Core::OpenThreads(Watched* watch) {
  std::vector<std::int32_t> ids;
  std::size_t next = 0;
  for (WatchedThread& thread : watch->threads) {
    if (thread.fd >= 0) continue;
    if (next == 0) ListThreads(watch->plan.pid, watch->last_thread, &ids);
    bool opened = false;
    while (!opened && threads_tell_ && next < ids.size() && watch->thread_picks < kMaxThreadPicks) {
      ++watch->thread_picks;
      watch->last_thread = ids[next];
      opened = OpenThread(watch, &thread, ids[next++]);
    }
    if (!opened) return;
  }
}

bool Sentinel::Core::OpenThread(Watched* watch, WatchedThread* thread, std::int32_t id) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || thread_descriptors_ >= limit.rlim_cur / kThreadShare ||
      descriptors_ >= options_.max_descriptors / 2 || !MayOpenDescriptor()) {
    return false;
  }
  int fd = static_cast<int>(syscall(SYS_pidfd_open, id, kPidfdThread));
  if (fd < 0) {
    // Before 6.9 that flag is unknown.
    if (errno == EINVAL) threads_tell_ = false;
    return false;
  }
  Remember(fd);
  PidfdInfo info;
  info.mask = kPidfdInfoPid;
  bool usable = ioctl(fd, kPidfdGetInfo, &info) == 0;
  if (!usable && errno != ESRCH) threads_tell_ = false;
  // The thread may have ended since it was listed, and another process's been given its number.
  usable = usable && info.process_id == static_cast<std::uint32_t>(watch->plan.pid);
  if (!usable || Register(fd, EPOLLIN, watch->index, &thread->token) != 0) {
    thread->token = 0;
    CloseFd(&fd);
    return false;
  }
  thread->fd = fd;
  ++descriptors_;
  ++thread_descriptors_;
  Add(&count_thread_watches_);
  return true;
}

// Only a signal that is fatal ends a thread by that signal, and then all of its process; but a filter of system calls
// may end one thread by SIGSYS. Any other end is the thread's own affair, or is told by the process before long.
void Sentinel::Core::OnThreadEnded(Watched* watch, WatchedThread* thread) {
  PidfdInfo info;
  info.mask = kPidfdInfoExit;
  if (ioctl(thread->fd, kPidfdGetInfo, &info) != 0) {
    // Before 6.15 nothing is known of a thread that is gone.
    threads_tell_ = false;
    CloseThread(thread);
    return;
  }
  if ((info.mask & kPidfdInfoExit) == 0) {
    // It has ended and is not gone: for microseconds, or for as long as a debugger likes. Epoll would tell it all the
    // while.
    if (thread->token != 0) Unregister(thread->fd);
    thread->token = 0;
    thread->look_ns = turn_ns_ + (kThreadLookDelayNs << thread->looks);
    if (++thread->looks <= kMaxThreadLooks) return;
    CloseThread(thread);
    OpenThreads(watch);
    return;
  }
  const int signal = info.exit_code & 0x7F;
  if (signal != 0 && signal != SIGSYS) {
    Add(&count_exits_by_thread_);
    Exit(watch, SentinelCause::kProcessExit, 0);
    return;
  }
  CloseThread(thread);
  OpenThreads(watch);
}

// ---------------------------------------------------------------------------------------------- one watch: connection

void Sentinel::Core::Dial(Watched* watch) {
  watch->dialed_at_ns = clock_.NowNs();
  int fd = MayOpenDescriptor()
               ? socket(watch->plan.address.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP)
               : -1;
  if (fd < 0) {
    GoBlind(watch, errno);
    return;
  }
  watch->blind = false;
  Remember(fd);
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // What is left under TLS, and what ends a connection whose packets are lost so that a new one is tried. 50 ms less,
  // because the kernel looks only when its next probe is due. With a user timeout it does not count probes.
  const int probe_s = KernelProbeSeconds(watch->limits);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, probe_s);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, probe_s);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT,
            static_cast<int>(std::min<std::int64_t>(KernelTimeoutNs(watch->limits) / kNsPerMs - 50, INT_MAX)));
  sockaddr_storage storage;
  const socklen_t size = ToSockaddr(watch->plan.address, &storage);
  const int error = connect(fd, reinterpret_cast<const sockaddr*>(&storage), size) == 0 ? 0 : errno;
  watch->socket = fd;
  watch->link = Link::kDialing;
  ++descriptors_;
  Add(&count_sockets_);
  Add(&count_dials_);
  if (watch->question_fair_ns == kNoQuestion) SetQuestion(watch, FairNs(watch->dialed_at_ns));
  if (error != 0 && error != EINPROGRESS) {
    OnDialFailed(watch, error);
    return;
  }
  const int register_error = Register(fd, EPOLLOUT, watch->index, &watch->socket_token);
  if (register_error != 0) {
    CloseSocket(watch);
    GoBlind(watch, register_error);
    return;
  }
  if (error == 0) OnConnected(watch);
}

// At once after the first loss, since a refusal is the quickest proof of a death. Once more at once, because a process
// that ends may close its connections before its listening socket, and the second connection ends with the latter. Then
// 1 ms, then 10 ms and doubling.
void Sentinel::Core::Redial(Watched* watch) {
  const std::uint8_t attempt = watch->attempt;
  if (watch->attempt < 32) ++watch->attempt;
  if (attempt < kRedialsAtOnce) {
    Dial(watch);
    return;
  }
  // A server behind TLS may close what does not say hello; no more than one dial per silence limit then.
  std::int64_t most_ns = watch->http2 ? kMaxRedialDelayNs : std::max(kMaxRedialDelayNs, watch->limits.silence_ns);
  if (watch->refused) most_ns = kMaxRefusedDelayNs;
  std::int64_t delay_ns = kNsPerMs;
  if (attempt >= kCalmRedial) delay_ns = std::min((10 * kNsPerMs) << (attempt - kCalmRedial), most_ns);
  if (watch->refused) delay_ns = std::max(delay_ns, refused_ * kRefusedShareNs);
  watch->dial_at_ns = clock_.NowNs() + delay_ns;
}

void Sentinel::Core::OnDialFailed(Watched* watch, int error) {
  CloseSocket(watch);
  if (error == ECONNREFUSED) {
    OnRefused(watch, error);
    return;
  }
  SetRefused(watch, false);
  if (IsLocalError(error)) {
    GoBlind(watch, error);
    return;
  }
  // No route, no answer, reset while connecting: the question stays open.
  if (watch->attempt == 0) watch->attempt = kCalmRedial;
  Redial(watch);
}

// A full backlog drops the SYN; it is refused where nobody listens, and where somebody says so in the host's name. So
// it is believed at once and looked at again.
void Sentinel::Core::OnRefused(Watched* watch, int error) {
  Add(&count_refused_);
  // An answer to the question, if a bad one: this is no silence.
  SetQuestion(watch, kNoQuestion);
  watch->silent = false;
  watch->in_flight_told = false;
  watch->loss = SentinelCause::kNone;
  Observation observation;
  observation.evidence = Evidence::kConnection;
  observation.verdict = ActorState::kUnreachable;
  observation.incarnation = watch->plan.incarnation;
  const Change change = watch->slot->Apply(observation);
  const Belief& belief = change.after;
  if (belief.incarnation > watch->plan.incarnation ||
      (belief.incarnation == watch->plan.incarnation && belief.state == ActorState::kDead)) {
    Queue(watch, SentinelEventKind::kExited, SentinelCause::kRefused, error, change);
    End(watch);
    return;
  }
  if (!InDoubt(change.before) && InDoubt(belief)) {
    Add(&count_doubts_);
    watch->doubted = true;
    Queue(watch, SentinelEventKind::kUnreachable, SentinelCause::kRefused, error, change);
  }
  SetRefused(watch, true);
  watch->attempt = std::max(watch->attempt, kCalmRedial);
  Redial(watch);
}

// We cannot ask, which says nothing about the peer.
void Sentinel::Core::GoBlind(Watched* watch, int error) {
  watch->blind = true;
  if (error == EMFILE || error == ENFILE) Add(&count_fd_exhausted_);
  if (!watch->silent) SetQuestion(watch, kNoQuestion);
  const int attempt = std::min<int>(watch->attempt, 6);
  watch->dial_at_ns = clock_.NowNs() + std::min(kMinRetryDelayNs << attempt, kMaxRetryDelayNs);
  if (watch->attempt < 32) ++watch->attempt;
  if (!watch->blind_told) Ask(watch, SentinelCause::kDescriptors, error);
  watch->blind_told = true;
}

void Sentinel::Core::OnConnected(Watched* watch) {
  sockaddr_storage ours{};
  socklen_t size = sizeof ours;
  sockaddr_storage theirs;
  const socklen_t their_size = ToSockaddr(watch->plan.address, &theirs);
  if (getsockname(watch->socket, reinterpret_cast<sockaddr*>(&ours), &size) == 0 && size == their_size &&
      std::memcmp(&ours, &theirs, size) == 0) {
    // A dial to a free port of this host may be given that very port as its own and so meet itself.
    OnDialFailed(watch, ECONNREFUSED);
    return;
  }
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = watch->socket_token;
  (void)epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, watch->socket, &event);
  watch->eager = true;
  watch->link = Link::kUp;
  SetRefused(watch, false);
  watch->connected_at_ns = clock_.NowNs();
  watch->parser.Reset();
  if (watch->loss != SentinelCause::kNone) {
    Ask(watch, watch->loss, watch->loss_error);
    watch->loss = SentinelCause::kNone;
  }
  if (!watch->http2) {
    OnAnswer(watch);
    return;
  }
  // An accepted dial is no answer: the kernel accepts for a process that is frozen.
  watch->next_beat_ns = NextBeatNs(watch, watch->connected_at_ns, true);
  SendBeat(watch, kHttp2ClientPreface.data(), kHttp2ClientPreface.size());
}

// False: the connection is gone, and what follows from that has been done. A frame that does not fit into the empty
// buffer of a socket is not completed later: whoever lets our few bytes pile up is asked on a new connection.
bool Sentinel::Core::SendFrame(Watched* watch, const std::uint8_t* data, std::size_t size) {
  const ssize_t sent = send(watch->socket, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(size)) return true;
  OnLost(watch, SentinelCause::kReset, sent < 0 ? errno : EAGAIN);
  return false;
}

// Like SendFrame, for what the peer makes us send. A peer that asks for more than half of what it may send gets none:
// its answer to our question may be behind all that, and is what we read for.
bool Sentinel::Core::Reply(Watched* watch, const std::uint8_t* data, std::size_t size) {
  if (watch->read_until_ns - turn_ns_ > kReadBurstNs / 2) return true;
  watch->read_until_ns = std::max(watch->read_until_ns, turn_ns_) + kReadShareNs;
  return SendFrame(watch, data, size);
}

void Sentinel::Core::SendBeat(Watched* watch, const std::uint8_t* data, std::size_t size) {
  if (!SendFrame(watch, data, size)) return;
  watch->beat_pending = true;
  Add(&count_beats_sent_);
  if (watch->question_fair_ns == kNoQuestion) SetQuestion(watch, FairNs(clock_.NowNs()));
}

// A question, unless the one before is still open.
void Sentinel::Core::Beat(Watched* watch) {
  if (watch->beat_pending) Read(watch, false);
  if (watch->over || watch->link != Link::kUp) return;
  if (watch->beat_pending) {
    Listen(watch, true);
  } else {
    SendBeat(watch, kHttp2Settings.data(), kHttp2Settings.size());
  }
}

// Waking up for an answer costs more than asking and reading, so while a peer answers in time only the end of the
// connection wakes the thread, and an answer is read when the next question is due. One that is late then is awaited
// eagerly: it may end a silence.
void Sentinel::Core::Listen(Watched* watch, bool eager) const {
  if (watch->eager == eager) return;
  epoll_event event{};
  event.events = eager ? EPOLLIN | EPOLLRDHUP : EPOLLRDHUP;
  event.data.u64 = watch->socket_token;
  (void)epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, watch->socket, &event);
  watch->eager = eager;
}

// False: more comes from there than this thread has time for, and that connection is no more. Neither an answer nor a
// loss, so an open question stays open.
bool Sentinel::Core::MayRead(Watched* watch) {
  watch->read_until_ns = std::max(watch->read_until_ns, turn_ns_) + kReadShareNs;
  if (watch->read_until_ns - turn_ns_ <= kReadBurstNs) return true;
  Add(&count_floods_);
  CloseSocket(watch);
  // The answer may have been behind all that, so there must be time for another before the limit.
  watch->dial_at_ns = turn_ns_ + std::min(watch->limits.silence_ns / 4, kMaxFloodPauseNs);
  Ask(watch, SentinelCause::kFlood, 0);
  return false;
}

// `to_the_end`: epoll says that the stream has one, so there is more to find after the last byte.
void Sentinel::Core::Read(Watched* watch, bool to_the_end) {
  std::array<std::uint8_t, 4096> buffer;
  for (int reads = 0; reads < kReadsPerTurn; ++reads) {
    if (!MayRead(watch)) return;
    const ssize_t got = recv(watch->socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) OnLost(watch, SentinelCause::kReset, errno);
      return;
    }
    if (got == 0) {
      OnLost(watch, SentinelCause::kClosed, 0);
      return;
    }
    if (watch->http2) {
      if (!Parse(watch, buffer.data(), static_cast<std::size_t>(got))) return;
    } else {
      OnAnswer(watch);
    }
    // A short read has emptied the socket; an end that comes later wakes the thread.
    if (!to_the_end && static_cast<std::size_t>(got) < buffer.size()) return;
  }
}

// False: this connection is no more.
bool Sentinel::Core::Parse(Watched* watch, const std::uint8_t* data, std::size_t size) {
  for (;;) {
    const Http2Event event = watch->parser.Next(&data, &size);
    switch (event.kind) {
      case Http2EventKind::kNone:
        watch->spoke_http2 = watch->spoke_http2 || watch->parser.spoke_http2();
        if (!watch->beat_pending) Listen(watch, false);
        return true;
      case Http2EventKind::kSettings:
        if (!Reply(watch, kHttp2SettingsAck.data(), kHttp2SettingsAck.size())) return false;
        break;
      case Http2EventKind::kSettingsAck:
        if (!watch->beat_pending) break;
        Add(&count_beats_acked_);
        watch->beat_pending = false;
        watch->spoke_http2 = true;
        OnAnswer(watch);
        break;
      case Http2EventKind::kPing: {
        const auto answer = EncodePingAck(event.ping);
        if (!Reply(watch, answer.data(), answer.size())) return false;
        break;
      }
      case Http2EventKind::kPingAck:
        break;
      case Http2EventKind::kGoaway:
        Add(&count_goaways_);
        watch->spoke_http2 = true;
        OnLost(watch, SentinelCause::kGoaway, static_cast<int>(event.error_code));
        return false;
      case Http2EventKind::kProtocolError:
        OnNotHttp2(watch, event.violation);
        return false;
    }
  }
}

// The connection ended. That is no death: ask on a new one.
void Sentinel::Core::OnLost(Watched* watch, SentinelCause cause, int error) {
  Add(&count_lost_);
  const std::int64_t now_ns = clock_.NowNs();
  CloseSocket(watch);
  watch->loss = cause;
  watch->loss_error = error;
  if (watch->question_fair_ns == kNoQuestion) SetQuestion(watch, FairNs(now_ns));
  if (error == ETIMEDOUT && cause == SentinelCause::kReset) {
    // The kernel has been asking for that long. Its first unanswered probe may have been sent one probe interval after
    // the last answer, and must not be taken for older.
    const std::int64_t asked_ns =
        FairNs(now_ns) - KernelTimeoutNs(watch->limits) + KernelProbeSeconds(watch->limits) * kNsPerSecond;
    SetQuestion(watch, std::min(watch->question_fair_ns, asked_ns));
  }
  if (now_ns - watch->connected_at_ns >= kSettledNs) watch->attempt = 0;
  Redial(watch);
}

void Sentinel::Core::OnNotHttp2(Watched* watch, Http2Violation violation) {
  Add(&count_protocol_errors_);
  CloseSocket(watch);
  Ask(watch, SentinelCause::kNotHttp2, static_cast<int>(violation));
  if (watch->spoke_http2) {
    // Somebody else has that port, or the stream is broken. Not an answer of ours: unless one comes, this is silence.
    if (watch->question_fair_ns == kNoQuestion) SetQuestion(watch, FairNs(clock_.NowNs()));
  } else {
    // It never did, so it is likely to be TLS after all: then a connection must do.
    watch->http2 = false;
  }
  if (watch->attempt < kCalmRedial) watch->attempt = kCalmRedial;
  Redial(watch);
}

// ---------------------------------------------------------------------------------------------- one watch: verdicts

void Sentinel::Core::Exit(Watched* watch, SentinelCause cause, int error) {
  Observation observation;
  observation.evidence = Evidence::kProcess;
  observation.verdict = ActorState::kRestarting;
  observation.incarnation = watch->plan.incarnation;
  const Change change = watch->slot->Apply(observation);
  Add(&count_exits_by_process_);
  Queue(watch, SentinelEventKind::kExited, cause, error, change);
  End(watch);
}

void Sentinel::Core::Ask(Watched* watch, SentinelCause cause, int error) {
  Add(&count_ask_ray_);
  Queue(watch, SentinelEventKind::kAskRay, cause, error, Change());
}

void Sentinel::Core::Queue(Watched* watch, SentinelEventKind kind, SentinelCause cause, int error,
                           const Change& change) {
  SentinelEvent event;
  event.kind = kind;
  event.cause = cause;
  event.error_code = error;
  event.incarnation = watch->plan.incarnation;
  event.actor_id = watch->id;
  event.change = change;
  event.seen_ns = clock_.NowNs();
  {
    MutexLock lock(mutex_);
    const auto at = entries_.find(watch->id);
    if (at == entries_.end() || at->second.generation != watch->generation) return;
    Entry& entry = at->second;
    const auto index = static_cast<std::size_t>(kind);
    if (entry.has_queued[index]) {
      const Change& earlier = entry.queued[index]->change;
      if (earlier.changed && event.change.changed) {
        event.change.before = earlier.before;
      } else if (earlier.changed) {
        event.change = earlier;
      }
      events_.erase(entry.queued[index]);
      entry.has_queued[index] = false;
    }
    entry.queued[index] = events_.insert(events_.end(), event);
    entry.has_queued[index] = true;
    if (kind == SentinelEventKind::kExited) {
      entry.ended = true;
      entry.looks = false;
    }
  }
  SignalEvents();
}

void Sentinel::Core::End(Watched* watch) {
  if (watch->over) return;
  watch->over = true;
  CloseSocket(watch);
  CloseProcess(watch);
  SetQuestion(watch, kNoQuestion);
  SetRefused(watch, false);
  index_by_id_.erase(watch->id);
  free_indices_.push_back(watch->index);
  over_.push_back(std::move(watches_[watch->index]));
  Subtract(&count_watches_);
}

// ---------------------------------------------------------------------------------------------- Sentinel

Sentinel::Sentinel() : Sentinel(Options()) {}

Sentinel::Sentinel(const Options& options) : core_(new Core(options)), options_(options) {}

Sentinel::~Sentinel() {
  if (core_->foreign()) {
    core_->CloseInheritedDescriptors();
  } else {
    delete core_;
  }
}

int Sentinel::Start() { return core_->foreign() ? EPERM : core_->Start(); }

void Sentinel::Stop() {
  if (!core_->foreign()) core_->Stop();
}

void Sentinel::AbandonAfterFork() {
  if (!core_->foreign()) return;
  core_->CloseInheritedDescriptors();
  core_ = new Core(options_);
}

bool Sentinel::running() const { return !core_->foreign() && core_->running(); }

WatchResult Sentinel::Watch(SlotRef slot, const WatchTarget& target) {
  return core_->foreign() ? WatchResult::kNotRunning : core_->Watch(std::move(slot), target);
}

bool Sentinel::Unwatch(const ActorId& id) { return !core_->foreign() && core_->Unwatch(id); }

bool Sentinel::UpdateLimits(const ActorId& id, std::int64_t silence_ns, std::int64_t in_flight_silence_ns) {
  return !core_->foreign() && core_->UpdateLimits(id, MakeLimits(silence_ns, in_flight_silence_ns));
}

bool Sentinel::Looks(const ActorId& id) const { return !core_->foreign() && core_->Looks(id); }

bool Sentinel::AddTimer(std::uint64_t id, std::int64_t deadline_ns) {
  return !core_->foreign() && core_->AddTimer(id, deadline_ns);
}

bool Sentinel::CancelTimer(std::uint64_t id) { return !core_->foreign() && core_->CancelTimer(id); }

int Sentinel::event_fd() const { return core_->foreign() ? -1 : core_->event_fd(); }

bool Sentinel::WaitForEvents(std::int64_t timeout_ns) { return !core_->foreign() && core_->WaitForEvents(timeout_ns); }

void Sentinel::WakeWaiter() {
  if (!core_->foreign()) core_->SignalEvents();
}

std::size_t Sentinel::DrainEvents(std::vector<SentinelEvent>* events) {
  return core_->foreign() ? 0 : core_->DrainEvents(events);
}

SentinelCounters Sentinel::counters() const { return core_->counters(); }

void Sentinel::Poke() {
  if (!core_->foreign()) core_->Poke();
}

}  // namespace actorsub
