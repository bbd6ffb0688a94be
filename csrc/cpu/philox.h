// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), the dropout stream that the Triton,
// CUDA and C++ kernels share. Element (row, column) of stream s takes word column % 4 of
//     philox(counter = (column / 4, row mod 2^32, row >> 32, s), key = (low, high) of the int64 seed)
// and is dropped when word < floor(p * 2^32). Counter and key 0 give 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
#pragma once

#include <cstdint>

#include "simd.h"

namespace bertfast {

constexpr uint32_t kStreamAttention = 0;
constexpr uint32_t kStreamAddLayerNorm = 1;
constexpr uint32_t kStreamFeedForward = 2;
constexpr uint32_t kStreamEmbedLayerNorm = 3;

struct Dropout {
  uint32_t key[2];
  uint32_t stream;
  uint32_t threshold;
  bool drops_all;  // p = 1, whose threshold 2^32 has no 32 bits
  float scale;

  Dropout(int64_t seed, uint32_t stream, double p)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
        stream(stream),
        threshold(p < 1 ? static_cast<uint32_t>(p * 0x1.0p+32) : 0),
        drops_all(p == 1),
        scale(static_cast<float>(1.0 / (1.0 - p))) {}
};

// The words of a row's counters from `first` on, (4 * groups,).
BERTFAST_INLINE void philox_row(const Dropout& dropout, int64_t row, int64_t first, int64_t groups, uint32_t* words) {
  const auto row_low = static_cast<uint32_t>(row);
  const auto row_high = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
#pragma omp simd
  for (int64_t group = 0; group < groups; ++group) {
    uint32_t c0 = static_cast<uint32_t>(first + group), c1 = row_low, c2 = row_high, c3 = dropout.stream;
    uint32_t k0 = dropout.key[0], k1 = dropout.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
      c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(product1);
      c3 = static_cast<uint32_t>(product0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[4 * group] = c0;
    words[4 * group + 1] = c1;
    words[4 * group + 2] = c2;
    words[4 * group + 3] = c3;
  }
}

// values = dropout(values), by a word each. Dropped values become 0 whatever they were, NaN included.
BERTFAST_INLINE void drop(const Dropout& dropout, int64_t width, const uint32_t* words, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float kept = values[i] * dropout.scale;
    values[i] = (words[i] < dropout.threshold) | dropout.drops_all ? 0.0f : kept;
  }
}

// The same for columns of a row from `first`, a multiple of 4, on. `words` holds width rounded up to 4.
BERTFAST_INLINE void dropout_row(const Dropout& dropout, int64_t row, int64_t width, float* values, uint32_t* words,
                                 int64_t first = 0) {
  philox_row(dropout, row, first / 4, (width + 3) / 4, words);
  drop(dropout, width, words, values);
}

}  // namespace bertfast
