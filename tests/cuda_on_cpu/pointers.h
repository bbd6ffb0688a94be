// Pointers of kernels. They know the tensor, or the piece of shared memory, that they point into, and every access is
// held to it and to its natural alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device_limits.h"
#include "global.h"
#include "runtime.h"

namespace bertfast {
namespace emulator {

// The tensor of a call that `address` lies in: the one that starts there, else the smallest around it.
Extent tensor_at(const void* address);
Extent take_shared(int offset, int64_t bytes, int rounded);

[[noreturn]] void fail_access(const char* space, uintptr_t address, size_t bytes, size_t alignment, Extent extent,
                              Access access);

inline bool is_inside(uintptr_t address, size_t bytes, size_t alignment, Extent extent) {
  return address >= extent.begin && address + bytes <= extent.end && address % alignment == 0;
}

struct GlobalSpace {
  static constexpr bool kFromHost = true;
  static constexpr const char* kName = "tensor";

  static void check(uintptr_t address, size_t bytes, size_t alignment, Extent extent, Access access) {
    if (current == nullptr || !is_inside(address, bytes, alignment, extent)) {
      fail_access(kName, address, bytes, alignment, extent, access);
    }
    global_log.count(bytes);
    // What may write does.
    if (access != Access::kRead) global_log.note_written(extent);
  }
};

struct SharedSpace {
  static constexpr bool kFromHost = false;
  static constexpr const char* kName = "piece of shared memory";

  static void check(uintptr_t address, size_t bytes, size_t alignment, Extent extent, Access access) {
    if (current == nullptr || !is_inside(address, bytes, alignment, extent)) {
      fail_access(kName, address, bytes, alignment, extent, access);
    }
    settle_access();
    block.warps[current->index / kWarpSize].banks.add(
        current->index % kWarpSize, static_cast<uint32_t>(address - reinterpret_cast<uintptr_t>(block.shared)),
        static_cast<uint32_t>(bytes));
    if (--accesses_until_yield <= 0) yield_by_chance();
    note_access(address, bytes, access);
  }
};

template <class T, class Space>
class Pointer {
 public:
  Pointer() = default;
  Pointer(std::nullptr_t) {}
  template <class U, std::enable_if_t<Space::kFromHost && std::is_convertible_v<U*, T*>, int> = 0>
  Pointer(U* pointer) : address_(reinterpret_cast<uintptr_t>(pointer)), extent_(tensor_at(pointer)) {}
  template <class U, std::enable_if_t<std::is_convertible_v<U*, T*>, int> = 0>
  Pointer(const Pointer<U, Space>& other) : address_(other.address()), extent_(other.extent()) {}
  Pointer(uintptr_t address, Extent extent) : address_(address), extent_(extent) {}

  uintptr_t address() const { return address_; }
  Extent extent() const { return extent_; }

  // The address, if all of `bytes` from it on can be accessed.
  uintptr_t checked(size_t bytes, size_t alignment, Access access) const {
    Space::check(address_, bytes, alignment, extent_, access);
    return address_;
  }
  // For accesses that are no request of their own.
  uintptr_t checked_quietly(size_t bytes, size_t alignment) const {
    if (!is_inside(address_, bytes, alignment, extent_)) {
      fail_access(Space::kName, address_, bytes, alignment, extent_, Access::kRead);
    }
    return address_;
  }

  template <class U = T>
  U& operator[](int64_t index) const {
    static_assert(sizeof(U) <= 16, "no access is wider");
    const uintptr_t address = address_ + static_cast<uintptr_t>(index) * sizeof(U);
    Space::check(address, sizeof(U), alignof(U), extent_, std::is_const_v<U> ? Access::kRead : Access::kAny);
    return *reinterpret_cast<U*>(address);
  }
  template <class U = T>
  U& operator*() const {
    return (*this)[0];
  }

  template <class U = T>
  Pointer& operator+=(int64_t count) {
    address_ += static_cast<uintptr_t>(count) * sizeof(U);
    return *this;
  }
  Pointer& operator-=(int64_t count) { return *this += -count; }
  Pointer& operator++() { return *this += 1; }
  friend Pointer operator+(Pointer pointer, int64_t count) { return pointer += count; }
  friend Pointer operator-(Pointer pointer, int64_t count) { return pointer -= count; }
  friend int64_t operator-(Pointer a, Pointer b) {
    return static_cast<int64_t>(a.address_ - b.address_) / static_cast<int64_t>(sizeof(T));
  }

  explicit operator bool() const { return address_ != 0; }
  friend bool operator==(Pointer a, Pointer b) { return a.address_ == b.address_; }
  friend bool operator!=(Pointer a, Pointer b) { return a.address_ != b.address_; }
  friend bool operator==(Pointer a, std::nullptr_t) { return a.address_ == 0; }
  friend bool operator!=(Pointer a, std::nullptr_t) { return a.address_ != 0; }

 private:
  uintptr_t address_ = 0;
  Extent extent_;
};

}  // namespace emulator

template <class T>
using Global = emulator::Pointer<T, emulator::GlobalSpace>;
template <class T>
using Shared = emulator::Pointer<T, emulator::SharedSpace>;

template <class U, class T, class Space>
emulator::Pointer<U, Space> reinterpret(const emulator::Pointer<T, Space>& pointer) {
  static_assert(std::is_const_v<U> || !std::is_const_v<T>, "drops const");
  return {pointer.address(), pointer.extent()};
}
template <class U, class T>
U* reinterpret(T* pointer) {
  return reinterpret_cast<U*>(pointer);
}

class SharedMemory {
 public:
  template <class T>
  Shared<T> take(int count) {
    const int64_t bytes = static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T));
    const emulator::Extent piece = emulator::take_shared(used_, bytes, shared_bytes<T>(count));
    used_ += shared_bytes<T>(count);
    return {piece.begin, piece};
  }

 private:
  int used_ = 0;
};

}  // namespace bertfast
