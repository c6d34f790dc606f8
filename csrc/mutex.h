// A mutex that clang can check: -Wthread-safety proves that a guarded field is only touched under its lock. With
// another compiler the annotations are empty.
//
// House rule, which no annotation can express: nothing is called out to while a lock is held, neither Python nor a
// callback nor another part's lock, so that no lock ordering has to be known.
#pragma once

#include <mutex>

#if defined(__clang__)
#define ACTORSUB_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define ACTORSUB_THREAD_ANNOTATION(x)
#endif

// On a class.
#define ACTORSUB_CAPABILITY(x) ACTORSUB_THREAD_ANNOTATION(capability(x))
#define ACTORSUB_SCOPED_CAPABILITY ACTORSUB_THREAD_ANNOTATION(scoped_lockable)
// On a field: the lock that guards it, or what it points to.
#define ACTORSUB_GUARDED_BY(x) ACTORSUB_THREAD_ANNOTATION(guarded_by(x))
#define ACTORSUB_PT_GUARDED_BY(x) ACTORSUB_THREAD_ANNOTATION(pt_guarded_by(x))
// On a function: what its caller must hold, or must not hold.
#define ACTORSUB_REQUIRES(...) ACTORSUB_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define ACTORSUB_EXCLUDES(...) ACTORSUB_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
// On a function that takes, gives back, or vouches for a lock.
#define ACTORSUB_ACQUIRE(...) ACTORSUB_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define ACTORSUB_RELEASE(...) ACTORSUB_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define ACTORSUB_TRY_ACQUIRE(...) ACTORSUB_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define ACTORSUB_ASSERT_CAPABILITY(x) ACTORSUB_THREAD_ANNOTATION(assert_capability(x))
#define ACTORSUB_RETURN_CAPABILITY(x) ACTORSUB_THREAD_ANNOTATION(lock_returned(x))
// The last resort; say why at the place where it is used.
#define ACTORSUB_NO_THREAD_SAFETY_ANALYSIS ACTORSUB_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace actorsub {

// Not recursive.
class ACTORSUB_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ACTORSUB_ACQUIRE() { mutex_.lock(); }
  void Unlock() ACTORSUB_RELEASE() { mutex_.unlock(); }
  bool TryLock() ACTORSUB_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

// Holds the mutex for its own lifetime.
class ACTORSUB_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACTORSUB_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() ACTORSUB_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace actorsub
