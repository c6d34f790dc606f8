from libc.stdint cimport int64_t

cdef extern from "clock.h" namespace "actorsub" nogil:
    cdef cppclass Clock:
        int64_t NowNs() noexcept

        @staticmethod
        const Clock& Monotonic()
