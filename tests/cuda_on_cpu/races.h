// Races on shared memory: two threads touch the same bytes, one of them writes, and no barrier lies between. Such a
// kernel may well give the right result here, whatever the order of threads.
//
// Threads have Lamport clocks, which barriers set to one more than the largest of all who take part: without an order
// by clocks there is none by barriers. So whatever is reported is a race; not all races are. Shuffles and votes order
// nothing, on the device neither.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bertfast::emulator {

enum class Access { kRead, kWrite, kAny };

struct Clock {
  uint32_t block = 0;  // of barriers
  uint32_t warp = 0;   // of these and of sync_warp; compares threads of one warp only
};

// Of the current thread. What may read or write is one or the other by the time that the thread does something else:
// `settle_access` sees whether the bytes changed.
void note_access(uintptr_t address, size_t bytes, Access access);
void settle_access();

// All threads of a new block begin after all of the last.
void forget_accesses(Clock now);
void check_races(bool enabled);

}  // namespace bertfast::emulator
