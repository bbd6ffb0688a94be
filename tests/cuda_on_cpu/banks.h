// Bank conflicts: shared memory has 32 banks of 4 bytes, and a request of a warp takes as many wavefronts as it touches
// different words of one bank. 16-byte accesses go by quarter-warps, 8-byte ones by half-warps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bertfast::emulator {

// The accesses of a warp's lanes. Which of them are one instruction is not known: the k-th of each lane since the last
// operation of the warp are taken for one.
class BankLog {
 public:
  void add(int lane, uint32_t offset, uint32_t bytes) {
    if (lanes_[lane].size() < kMost) lanes_[lane].push_back({offset, bytes});
  }
  void flush(uint32_t mask);
  void clear();

 private:
  struct Access {
    uint32_t offset, bytes;
  };
  // Enough for what kernels do between two operations of a warp; the rest is not counted.
  static constexpr size_t kMost = 4096;

  std::vector<Access> lanes_[32];
};

// One request: offset and bytes by lane, 0 bytes where a lane takes no part.
void count_request(const uint32_t (&offsets)[32], const uint32_t (&bytes)[32]);

struct BankCounters {
  int64_t requests = 0;
  int64_t conflicts = 0;  // wavefronts beyond those without conflicts
};

extern BankCounters bank_counters;

}  // namespace bertfast::emulator
