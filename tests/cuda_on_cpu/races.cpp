#include "races.h"

#include <cstring>
#include <string>
#include <vector>

#include "runtime.h"

namespace bertfast::emulator {
namespace {

// Neighbouring elements of 2 bytes belong to different threads. Single bytes are not looked at.
constexpr size_t kGranule = 2;

struct Touch {
  int thread = -1;
  Clock clock;
};

struct Granule {
  Touch writer;
  // Since it was written: the last reader, and the last one of another warp.
  Touch readers[2];
};

bool enabled = true;
std::vector<Granule> granules;

struct {
  uintptr_t address = 0;
  size_t bytes = 0;  // 0: there is none
  unsigned char before[16];
} unsettled;

bool is_unordered(const Touch& touch) {
  if (touch.thread < 0 || touch.thread == current->index) return false;
  if (touch.thread / kWarpSize == current->index / kWarpSize) return touch.clock.warp >= current->clock.warp;
  return touch.clock.block >= current->clock.block;
}

[[noreturn]] void fail_by_race(const char* own, const Touch& other, const char* others, size_t offset) {
  fail(std::string(own) + " offset " + std::to_string(offset) + " of shared memory, which thread " +
       std::to_string(other.thread) + " " + others + " with no barrier between");
}

void note(uintptr_t address, size_t bytes, bool writes) {
  const size_t offset = address - reinterpret_cast<uintptr_t>(block.shared);
  const Touch own{current->index, current->clock};
  if (granules.size() * kGranule < offset + bytes) granules.resize((offset + bytes) / kGranule + 1);
  for (size_t i = offset / kGranule; i < (offset + bytes) / kGranule; ++i) {
    Granule& granule = granules[i];
    if (is_unordered(granule.writer)) {
      fail_by_race(writes ? "writes" : "reads", granule.writer, "wrote", i * kGranule);
    }
    Touch* readers = granule.readers;
    if (!writes) {
      if (readers[0].thread / kWarpSize != own.thread / kWarpSize) readers[1] = readers[0];
      readers[0] = own;
      continue;
    }
    for (int r = 0; r < 2; ++r) {
      if (is_unordered(readers[r])) fail_by_race("writes", readers[r], "read", i * kGranule);
      readers[r] = {};
    }
    granule.writer = own;
  }
}

}  // namespace

void note_access(uintptr_t address, size_t bytes, Access access) {
  if (!enabled || bytes % kGranule != 0) return;
  if (access == Access::kAny) {
    unsettled.address = address;
    unsettled.bytes = bytes;
    std::memcpy(unsettled.before, reinterpret_cast<const void*>(address), bytes);
  } else {
    note(address, bytes, access == Access::kWrite);
  }
}

void settle_access() {
  if (unsettled.bytes == 0) return;
  const size_t bytes = unsettled.bytes;
  unsettled.bytes = 0;
  note(unsettled.address, bytes,
       std::memcmp(reinterpret_cast<const void*>(unsettled.address), unsettled.before, bytes) != 0);
}

void forget_accesses(Clock now) {
  unsettled.bytes = 0;
  for (int i = 0; i < block.threads_count; ++i) thread(i).clock = now;
}

void check_races(bool on) {
  enabled = on;
}

}  // namespace bertfast::emulator
