// Operations of a warp; `n` is a mask.
#include "cases.h"

namespace bertfast {
namespace {

// What every operation gives.
__global__ void each_operation(Global<const float> in, Global<float> out) {
  const float value = in[threadIdx.x];
  const int count = static_cast<int>(blockDim.x), i = static_cast<int>(threadIdx.x);
  out[i] = shuffle(value, i * 7 + 3);
  out[count + i] = shuffle_xor(value, 5);
  out[2 * count + i] = shuffle_down(value, 9);
  out[3 * count + i] = static_cast<float>(ballot(value > 0) >> 8);
  out[4 * count + i] = __half2float(shuffle_xor(__float2half(value), 16));
}

// Lanes of the mask alone take part.
__global__ void some_lanes(Global<const float> in, Global<float> out, uint32_t mask) {
  if (mask >> lane() & 1) out[lane()] = shuffle_xor(in[lane()], 1, mask);
}

__global__ void everybody(Global<const float> in, Global<float> out, uint32_t mask) {
  out[lane()] = shuffle_xor(in[lane()], 1, mask);
}

__global__ void first_lane_exits(Global<const float> in, Global<float> out, uint32_t mask) {
  if (lane() == 0) return;
  out[lane()] = shuffle(in[lane()], 1, mask);
}

__global__ void masks_differ(Global<const float> in, Global<float> out, uint32_t mask) {
  out[lane()] = shuffle(in[lane()], 5, lane() < 16 ? mask : kFullWarp);
}

__global__ void uniform_of(Global<const float> in, Global<float> out) {
  out[threadIdx.x] = static_cast<float>(uniform(static_cast<int>(in[threadIdx.x])));
}

__global__ void operations_differ(Global<float> out) {
  if (lane() < 16) {
    out[lane()] = static_cast<float>(shuffle(lane(), 5));
  } else {
    sync_warp();
  }
}

__global__ void warps_wait_crosswise(Global<float> out) {
  if (lane() == 0) sync_threads();
  sync_warp();
  out[threadIdx.x] = 0;
}

}  // namespace
}  // namespace bertfast

using namespace bertfast;

#define MASKED(name) BERTFAST_CASE(name, name, c.array<float>(0), c.array<float>(1), static_cast<uint32_t>(c.n))
BERTFAST_CASE(each_operation, each_operation, c.array<float>(0), c.array<float>(1))
MASKED(some_lanes)
MASKED(everybody)
MASKED(first_lane_exits)
MASKED(masks_differ)
BERTFAST_CASE(uniform_of, uniform_of, c.array<float>(0), c.array<float>(1))
BERTFAST_CASE(operations_differ, operations_differ, c.array<float>(0))
BERTFAST_CASE(warps_wait_crosswise, warps_wait_crosswise, c.array<float>(0))
