#include "pointers.h"

#include <algorithm>
#include <map>
#include <string>

#include "host.h"

namespace bertfast::emulator {
namespace {

// By thread of the host: each calls ops of its own.
thread_local std::map<uintptr_t, uintptr_t> tensors;

const char* verb(Access access) {
  return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "accesses";
}

}  // namespace

void forget_tensors() {
  tensors.clear();
}

void know_tensor(const void* address, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  uintptr_t& end = tensors[begin];
  end = std::max(end, begin + static_cast<uintptr_t>(bytes));
}

Extent tensor_at(const void* pointer) {
  if (pointer == nullptr) return {};
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto exact = tensors.find(address);
  if (exact != tensors.end()) return {exact->first, exact->second};
  Extent smallest;
  for (const auto& [begin, end] : tensors) {
    if (begin > address || end <= address) continue;
    if (smallest.begin == 0 || end - begin < smallest.end - smallest.begin) smallest = {begin, end};
  }
  if (smallest.begin == 0) fail("a pointer of a kernel points into no tensor that the op has named");
  return smallest;
}

Extent take_shared(int offset, int64_t bytes, int rounded) {
  const size_t n = current->pieces++;
  if (bytes < 0 || offset + rounded > block.shared_bytes) {
    fail("takes " + std::to_string(bytes) + " bytes of shared memory behind " + std::to_string(offset) +
         " that are taken; the launch has " + std::to_string(block.shared_bytes));
  }
  if (n == block.pieces.size()) {
    block.pieces.push_back({offset, static_cast<int>(bytes)});
  } else if (block.pieces[n].offset != offset || block.pieces[n].bytes != bytes) {
    fail("takes " + std::to_string(bytes) + " bytes of shared memory at " + std::to_string(offset) + " as piece " +
         std::to_string(n) + ", another thread takes " + std::to_string(block.pieces[n].bytes) + " at " +
         std::to_string(block.pieces[n].offset));
  }
  const auto begin = reinterpret_cast<uintptr_t>(block.shared) + static_cast<uintptr_t>(offset);
  return {begin, begin + static_cast<uintptr_t>(bytes)};
}

void fail_access(const char* space, uintptr_t address, size_t bytes, size_t alignment, Extent extent, Access access) {
  const std::string what = std::string(verb(access)) + " " + std::to_string(bytes) + " bytes";
  if (current == nullptr) fail("the host " + what + " of a kernel's " + space);
  if (extent.begin == 0) fail(what + " through a null pointer");
  const auto offset = static_cast<int64_t>(address - extent.begin);
  const std::string where = what + " at offset " + std::to_string(offset) + " of a " + space + " of " +
                            std::to_string(extent.end - extent.begin) + " bytes";
  if (offset < 0 || address + bytes > extent.end) fail(where);
  fail(where + ", an address that is no multiple of " + std::to_string(alignment));
}

}  // namespace bertfast::emulator
