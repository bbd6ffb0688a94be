#include "copy.h"

#include <cstring>

namespace bertfast::emulator {

void issue_copy(uintptr_t to, uintptr_t from, size_t bytes) {
  std::memset(reinterpret_cast<void*>(to), 0xff, bytes);
  current->copies.push_back(
      {reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, current->copy_groups});
}

void commit_copies() {
  ++current->copy_groups;
}

void wait_for_copies(int pending) {
  auto& copies = current->copies;
  size_t landed = 0;
  settle_access();
  for (; landed < copies.size() && copies[landed].group < current->copy_groups - pending; ++landed) {
    const AsyncCopy& copy = copies[landed];
    note_access(reinterpret_cast<uintptr_t>(copy.to), copy.bytes, Access::kWrite);
    if (copy.from != nullptr) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

}  // namespace bertfast::emulator
