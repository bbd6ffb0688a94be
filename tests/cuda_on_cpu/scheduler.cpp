#include "scheduler.h"

#include <utility>

namespace bertfast::emulator {
namespace {

constexpr int kMeanAccessesUntilYield = 24;

uint64_t random_state = 1;

// Block by block, either all warps that can run have the same chance, or warps have ranks, so that one gets as far
// ahead of the others as barriers let it: some mistakes show one way and some the other. Ranks change now and then, or
// a warp that waits for a value in shared memory would wait forever.
bool ranked = false;
int rank_of[kMaxWarps];
int at_rank[kMaxWarps];
uint32_t runnable_ranks = 0;

void shuffle_ranks() {
  const int warps = static_cast<int>(block.warps.size());
  for (int w = 0; w < warps; ++w) at_rank[w] = w;
  for (int w = warps - 1; w > 0; --w) std::swap(at_rank[w], at_rank[random_bits() % (w + 1)]);
  runnable_ranks = 0;
  for (int rank = 0; rank < warps; ++rank) {
    rank_of[at_rank[rank]] = rank;
    if (block.warps[at_rank[rank]].runnable) runnable_ranks |= 1u << rank;
  }
}

int some_bit(uint32_t bits, uint32_t random) {
  const uint32_t by = random % 32;
  const uint32_t rotated = by == 0 ? bits : (bits >> by | bits << (32 - by));
  return static_cast<int>((__builtin_ctz(rotated) + by) % 32);
}

}  // namespace

// xorshift64*
uint64_t random_bits() {
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545f4914f6cdd1dull;
}

void seed_scheduler(uint64_t seed) {
  random_state = (2 * seed + 1) * 0x9e3779b97f4a7c15ull;
  accesses_until_yield = 0;
}

void schedule_block() {
  ranked = random_bits() >> 63;
  shuffle_ranks();
}

Thread* pick() {
  if (runnable_ranks == 0) return nullptr;
  const uint64_t random = random_bits();
  if (ranked && random >> 58 == 0) shuffle_ranks();
  const int rank = ranked ? __builtin_ctz(runnable_ranks) : some_bit(runnable_ranks, random >> 32 & 0xff);
  const int warp = at_rank[rank];
  const int lane = some_bit(block.warps[warp].runnable, random >> 40 & 0xff);
  block.warps[warp].runnable &= ~(1u << lane);
  if (block.warps[warp].runnable == 0) runnable_ranks &= ~(1u << rank);
  return &thread(warp * kWarpSize + lane);
}

void make_runnable(int warp, uint32_t lanes) {
  block.warps[warp].runnable |= lanes;
  runnable_ranks |= 1u << rank_of[warp];
}

void make_runnable(Thread& thread) {
  make_runnable(thread.index / kWarpSize, 1u << thread.index % kWarpSize);
}

void yield() {
  make_runnable(*current);
  run_next();
}

void yield_by_chance() {
  accesses_until_yield = 1 + static_cast<int>(random_bits() % (2 * kMeanAccessesUntilYield));
  yield();
}

}  // namespace bertfast::emulator
