from actorsub._cpp.slot cimport ActorId, Slot

cdef extern from "registry.h" namespace "actorsub" nogil:
    cdef cppclass SlotRef:
        SlotRef()
        SlotRef(const SlotRef& other)
        Slot* get() noexcept
        void Reset() noexcept

    cdef cppclass Registry:
        Registry() except +
        SlotRef Acquire(const ActorId& id) except +
        size_t size() noexcept
