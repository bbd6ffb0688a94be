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
  static constexpr int kMostSums = 2;  // at once
  // Of shared memory, for all teams of a block.
  static constexpr int kSharedBytes = kWarps > 1 ? shared_bytes<float>(2 * kMostSums * kWarps * kTeams) : 0;

  __device__ __forceinline__ explicit Team(SharedMemory& shared) {
    if constexpr (kWarps > 1) {
      partial_ = shared.take<float>(2 * kMostSums * kWarps * kTeams) + index() * 2 * kMostSums * kWarps;
    }
  }

  __device__ __forceinline__ static int index() { return static_cast<int>(threadIdx.x) / kThreads; }
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }

  // Each value's sum to each thread; all of the team must call.
  template <int K>
  __device__ __forceinline__ void sum(float (&values)[K]) {
    static_assert(K <= kMostSums, "there is no shared memory for more");
#pragma unroll
    for (int j = 0; j < K; ++j) values[j] = warp_sum(values[j]);
    if constexpr (kWarps > 1) {
      // Two sets in turn: who writes one again has passed the other's barrier, where all had read this one.
      Shared<float> partial = partial_ + (calls_++ % 2) * kMostSums * kWarps;
      if (lane() == 0) {
#pragma unroll
        for (int j = 0; j < K; ++j) partial[j * kWarps + warp() % kWarps] = values[j];
      }
      sync();
#pragma unroll
      for (int j = 0; j < K; ++j) {
        values[j] = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) values[j] += partial[j * kWarps + i];
      }
    }
  }

  __device__ __forceinline__ float sum(float value) {
    float values[1] = {value};
    sum(values);
    return values[0];
  }

 private:
  __device__ __forceinline__ static void sync() {
    static_assert(kTeams < 16, "a team needs a named barrier of its own");
    if constexpr (kTeams == 1) {
      sync_threads();
    } else {
      // Of a barrier that is only known at run time ptxas takes all sixteen.
#pragma unroll
      for (int i = 0; i < kTeams; ++i) {
        if (index() == i) named_barrier_sync(1 + i, kThreads);
      }
    }
  }

  Shared<float> partial_ = nullptr;
  int calls_ = 0;
};

}  // namespace bertfast
