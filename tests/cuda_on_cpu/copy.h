// Copies from global to shared memory that land as late as is allowed: at the wait of the thread that issued them.
// Until then their destination is poisoned.
#pragma once

#include <type_traits>

#include "pointers.h"

namespace bertfast {
namespace emulator {

void issue_copy(uintptr_t to, uintptr_t from, size_t bytes);
void commit_copies();
void wait_for_copies(int pending);

template <class T, class U>
void copy_async(const Shared<T>& shared, const Global<U>& global, bool valid, size_t bytes) {
  static_assert(std::is_same_v<const T, const U>, "copies between elements of one type");
  const uintptr_t to = shared.checked(bytes, bytes, Access::kWrite);
  issue_copy(to, valid ? global.checked(bytes, bytes, Access::kRead) : 0, bytes);
}

}  // namespace emulator

template <class T, class U>
void copy_async_16(const Shared<T>& shared, const Global<U>& global, bool valid = true) {
  emulator::copy_async(shared, global, valid, 16);
}
template <class T, class U>
void copy_async_4(const Shared<T>& shared, const Global<U>& global, bool valid = true) {
  emulator::copy_async(shared, global, valid, 4);
}
inline void copy_async_commit() {
  emulator::commit_copies();
}
template <int Pending>
void copy_async_wait() {
  emulator::wait_for_copies(Pending);
}

}  // namespace bertfast
