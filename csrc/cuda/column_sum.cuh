// The first stage of sums over rows; `column_sum.cu` is the second.
#pragma once

#include "intrinsics.cuh"
#include "rows.cuh"

namespace bertfast {

// Sums over the rows that a block walks over, one for each column: in registers, or where a block has one team, whose
// threads are too many for that, in shared memory.
template <class R>
class ColumnSum {
 public:
  static constexpr bool kInRegisters = R::kTeams > 1;

  // Of floats.
  __host__ __device__ static constexpr int shared_count(int width) {
    return kInRegisters ? R::kTeams * width : R::kWidest;
  }

  __device__ __forceinline__ ColumnSum(SharedMemory& shared, int width)
      : shared_(shared.take<float>(shared_count(width))) {
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) {
        if constexpr (kInRegisters) {
          values_[p][k] = 0;
        } else {
          own(p, k) = 0;
        }
      }
    }
  }

  __device__ __forceinline__ void add(int packet, int k, float value) {
    if constexpr (kInRegisters) {
      values_[packet][k] += value;
    } else {
      own(packet, k) += value;
    }
  }

  // Writes a row of sums; all threads of the block must call. Neighbours write N banks apart: once a block, a conflict
  // costs less than another layout would on the way out.
  __device__ __forceinline__ void store(const R& row, Global<float> target) const {
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) {
        if (!row.has(p, k)) continue;
        if constexpr (kInRegisters) {
          shared_[R::Team::index() * row.width + R::column(p) + k] = values_[p][k];
        } else {
          target[R::column(p) + k] = own(p, k);
        }
      }
    }
    if constexpr (kInRegisters) {
      sync_threads();
#pragma unroll 1
      for (int column = static_cast<int>(threadIdx.x); column < row.width; column += R::kBlock) {
        float sum = 0;
#pragma unroll
        for (int team = 0; team < R::kTeams; ++team) sum += shared_[team * row.width + column];
        target[column] = sum;
      }
    }
  }

 private:
  // Neighbouring threads in neighbouring banks.
  __device__ __forceinline__ float& own(int packet, int k) const {
    return shared_[(packet * R::N + k) * R::kBlock + static_cast<int>(threadIdx.x)];
  }

  Shared<float> shared_;
  float values_[kInRegisters ? R::kPackets : 1][kInRegisters ? R::N : 1];
};

// In place of a ColumnSum that is not wanted.
template <class R>
class NoColumnSum {
 public:
  __device__ __forceinline__ NoColumnSum(SharedMemory&, int) {}
  __device__ __forceinline__ void add(int, int, float) {}
  __device__ __forceinline__ void store(const R&, Global<float>) const {}
};

}  // namespace bertfast
