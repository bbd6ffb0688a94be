// Copies from global to shared memory that land as late as is allowed: at the wait of the thread that issued them.
// Until then their destination is poisoned.
#pragma once

#include <type_traits>

#include "pointers.h"

namespace bertfast {
namespace emulator {

void issue_copy(uintptr_t to, uintptr_t from);
void commit_copies();
void wait_for_copies(int pending);

}  // namespace emulator

template <class T, class U>
void copy_async_16(const Shared<T>& shared, const Global<U>& global, bool valid = true) {
  static_assert(std::is_same_v<const T, const U>, "copies between elements of one type");
  const uintptr_t to = shared.checked(16, 16, emulator::Access::kWrite);
  emulator::issue_copy(to, valid ? global.checked(16, 16, emulator::Access::kRead) : 0);
}
inline void copy_async_commit() {
  emulator::commit_copies();
}
template <int Pending>
void copy_async_wait() {
  emulator::wait_for_copies(Pending);
}

}  // namespace bertfast
