// Which thread of the block runs next: chance decides, by the seed.
#pragma once

#include <cstdint>

#include "runtime.h"

namespace bertfast::emulator {

void seed_scheduler(uint64_t seed);
// All threads of a new block can run.
void schedule_block();
// Takes one of the threads that can run, or null.
Thread* pick();

uint64_t random_bits();

}  // namespace bertfast::emulator
