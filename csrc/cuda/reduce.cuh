// Sums over the threads of a warp or a block, the same bits in every thread and in every run.
#pragma once

#include "intrinsics.cuh"

namespace bertfast {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// kThreads threads of a block that work together: a warp, several, or all. A block has kTeams of them.
template <int kThreads, int kTeams>
class Team {
 public:
  static constexpr int kWarps = kThreads / kWarpSize;
  // Of shared memory, for all teams of a block.
  static constexpr int kSharedBytes = kWarps > 1 ? shared_bytes<float>(2 * kWarps * kTeams) : 0;

  __device__ __forceinline__ explicit Team(SharedMemory& shared) {
    if constexpr (kWarps > 1) partial_ = shared.take<float>(2 * kWarps * kTeams) + index() * 2 * kWarps;
  }

  __device__ __forceinline__ static int index() { return static_cast<int>(threadIdx.x) / kThreads; }
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }

  // To each thread; all of the team must call.
  __device__ __forceinline__ float sum(float value) {
    value = warp_sum(value);
    if constexpr (kWarps > 1) {
      // Two sets in turn: who writes one again has passed the other's barrier, where all had read this one.
      Shared<float> partial = partial_ + (calls_++ % 2) * kWarps;
      if (lane() == 0) partial[warp() % kWarps] = value;
      sync();
      value = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) value += partial[i];
    }
    return value;
  }

 private:
  __device__ __forceinline__ static void sync() {
    static_assert(kTeams < 16, "a team needs a named barrier of its own");
    if constexpr (kTeams == 1) {
      sync_threads();
    } else {
      named_barrier_sync(1 + index(), kThreads);
    }
  }

  Shared<float> partial_ = nullptr;
  int calls_ = 0;
};

}  // namespace bertfast
