// Barriers of blocks and warps.
#include "cases.h"

namespace bertfast {
namespace {

enum class Barrier { kNone, kWarp, kBlock };

template <Barrier kBarrier>
__device__ void meet() {
  if constexpr (kBarrier == Barrier::kBlock) sync_threads();
  if constexpr (kBarrier == Barrier::kWarp) sync_warp();
}

// Each thread reads what another one of its block, or of its warp, has written; then, behind `kSecond`, the memory is
// used again.
template <Barrier kFirst, Barrier kSecond>
__global__ void reverse_twice(Global<const float> in, Global<float> out, int64_t count) {
  SharedMemory shared;
  Shared<float> values = shared.take<float>(static_cast<int>(blockDim.x));
  const int i = static_cast<int>(threadIdx.x);
  const int from =
      i / static_cast<int>(count) * static_cast<int>(count) + static_cast<int>(count) - 1 - i % static_cast<int>(count);
  values[i] = in[i];
  meet<kFirst>();
  const float once = values[from];
  meet<kSecond>();
  values[i] = once + 1;
  meet<kFirst>();
  out[i] = values[from];
}

// A shuffle orders nothing.
__global__ void reverse_behind_shuffle(Global<const float> in, Global<float> out) {
  SharedMemory shared;
  Shared<float> values = shared.take<float>(static_cast<int>(blockDim.x));
  values[threadIdx.x] = in[threadIdx.x];
  shuffle(0, 0);
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// Each warp adds to every element in its turn; with a barrier too few two of them do at once.
__global__ void add_in_turns(Global<float> out, int64_t barriers) {
  SharedMemory shared;
  Shared<float> sum = shared.take<float>(kWarpSize);
  if (warp() == 0) sum[lane()] = 0;
  sync_threads();
  for (int turn = 0; turn < static_cast<int>(blockDim.x) / kWarpSize; ++turn) {
    if (turn == warp()) sum[lane()] += static_cast<float>(turn + 1);
    if (turn < barriers) sync_threads();
  }
  if (warp() == 0) out[lane()] = sum[lane()];
}

__global__ void barrier_for_some(int64_t n) {
  if (static_cast<int64_t>(threadIdx.x) < n) sync_threads();
}

__global__ void barriers_apart(int64_t n) {
  if (static_cast<int64_t>(threadIdx.x) < n) {
    sync_threads();
  } else {
    sync_threads();
  }
}

// Warp 0 hands a value to warp 1, which gives the memory back; `n` tells what goes wrong.
constexpr int kFilled = 1, kEmptied = 2;
__global__ void hand_over(Global<const float> in, Global<float> out, int64_t n) {
  SharedMemory shared;
  Shared<float> value = shared.take<float>(kWarpSize);
  const int both = 2 * kWarpSize;
  for (int i = 0; i < 4; ++i) {
    if (warp() == 0) {
      if (i > 0) named_barrier_sync(kEmptied, both);
      value[lane()] = in[i * kWarpSize + lane()];
      if (n == 1 && i == 3) continue;
      named_barrier_arrive(n == 2 ? kFilled + 2 : kFilled, n == 3 ? kWarpSize : both);
      if (n == 4) named_barrier_arrive(kFilled, both);
    } else {
      named_barrier_sync(kFilled, both);
      out[i * kWarpSize + lane()] = value[kWarpSize - 1 - lane()];
      if (i < 3) named_barrier_arrive(kEmptied, both);
    }
  }
}

__global__ void half_a_warp(int64_t n) {
  if (lane() < n) named_barrier_sync(1, 2 * static_cast<int>(n));
}

}  // namespace
}  // namespace bertfast

using namespace bertfast;

#define REVERSE(name, first, second) \
  BERTFAST_CASE(name, (reverse_twice<Barrier::first, Barrier::second>), c.array<float>(0), c.array<float>(1), c.n)
REVERSE(reverse_in_block, kBlock, kBlock)
REVERSE(reverse_in_warp, kWarp, kWarp)
REVERSE(reverse_without_first, kNone, kBlock)
REVERSE(reverse_without_second, kBlock, kNone)
REVERSE(reverse_in_warp_without_second, kWarp, kNone)
BERTFAST_CASE(reverse_behind_shuffle, reverse_behind_shuffle, c.array<float>(0), c.array<float>(1))
BERTFAST_CASE(add_in_turns, add_in_turns, c.array<float>(0), c.n)
BERTFAST_CASE(barrier_for_some, barrier_for_some, c.n)
BERTFAST_CASE(barriers_apart, barriers_apart, c.n)
BERTFAST_CASE(hand_over, hand_over, c.array<float>(0), c.array<float>(1), c.n)
BERTFAST_CASE(half_a_warp, half_a_warp, c.n)
