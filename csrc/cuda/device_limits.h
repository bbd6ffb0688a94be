// What the device sets, and both halves of intrinsics.cuh share. Not limits.h: `#include <limits.h>` would find it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace bertfast {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;

// Bytes of shared memory that a block can have on 8.6, 8.9 and 12.0, where it is least. Nothing but kernels' own
// assertions and the emulator holds them to it: to ptxas dynamic shared memory has no size.
constexpr int kMostShared = 99 * 1024;

// What `SharedMemory::take<T>(count)` takes.
template <class T>
constexpr int shared_bytes(int count) {
  return (count * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
}

inline void check_grid(const char* kernel, int64_t x, int64_t y) {
  if (x > 0x7fffffff || y > 0xffff) {
    throw std::runtime_error(std::string(kernel) + ": needs a grid of (" + std::to_string(x) + ", " +
                             std::to_string(y) + "), CUDA takes (2147483647, 65535)");
  }
}

}  // namespace bertfast
