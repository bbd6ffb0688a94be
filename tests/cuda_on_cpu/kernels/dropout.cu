// The words that dropout draws, and what it drops of rows from any on.
#include "cases.h"
#include "philox.cuh"

namespace bertfast {
namespace {

// Four words for each counter of four, by the key's two.
__global__ void philox_words(Global<const uint32_t> counters, Global<const uint32_t> key, Global<uint32_t> out) {
  const int first = 4 * static_cast<int>(threadIdx.x);
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = counters[first + i];
  philox(words, key[0], key[1]);
  for (int i = 0; i < 4; ++i) out[first + i] = words[i];
}

// Ones, four to a thread and row n at the first block.
__global__ void drop_ones(Dropout<kStreamFeedForward> dropout, Global<float> out, int64_t n) {
  const int column = 4 * static_cast<int>(threadIdx.x);
  float values[4] = {1, 1, 1, 1};
  dropout.apply(dropout.key(), n + blockIdx.x, column, values);
  for (int i = 0; i < 4; ++i) out[4 * static_cast<int>(blockIdx.x * blockDim.x) + column + i] = values[i];
}

}  // namespace
}  // namespace bertfast

using namespace bertfast;

BERTFAST_CASE(philox_words, philox_words, c.array<uint32_t>(0), c.array<uint32_t>(1), c.array<uint32_t>(2))
BERTFAST_CASE(drop_half_of_ones, drop_ones, Dropout<kStreamFeedForward>({c.array<int64_t>(0), 0.5}), c.array<float>(1),
              c.n)
