#include "copy.h"

#include <cstring>

namespace bertfast::emulator {

void issue_copy(uintptr_t to, uintptr_t from) {
  std::memset(reinterpret_cast<void*>(to), 0xff, 16);
  current->copies.push_back({reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), current->copy_groups});
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
    note_access(reinterpret_cast<uintptr_t>(copy.to), 16, Access::kWrite);
    if (copy.from != nullptr) {
      std::memcpy(copy.to, copy.from, 16);
    } else {
      std::memset(copy.to, 0, 16);
    }
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

}  // namespace bertfast::emulator
