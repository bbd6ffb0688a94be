// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), the dropout stream that the Triton,
// CUDA and C++ kernels share. Element (row, column) of stream s takes word column % 4 of
//     philox(counter = (column / 4, row mod 2^32, row >> 32, s), key = (low, high) of the int64 seed)
// and is dropped when word < floor(p * 2^32). Counter and key 0 give 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
#pragma once

#include <cstdint>

namespace bertfast {

constexpr uint32_t kStreamAddLayerNorm = 1;

struct Dropout {
  uint32_t key[2];
  uint32_t stream;
  uint64_t threshold;  // 64 bits: p = 1 gives 2^32
  float scale;

  Dropout(int64_t seed, uint32_t stream, double p)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
        stream(stream),
        threshold(static_cast<uint64_t>(p * 4294967296.0)),
        scale(static_cast<float>(1.0 / (1.0 - p))) {}
};

// The four words of one counter, word w to words[w * stride].
[[gnu::always_inline]] inline void philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
                                          uint32_t words[4]) {
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
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// values = dropout(values) for one row of `width` values. Dropped values become 0 whatever they were, NaN included.
[[gnu::always_inline]] inline void dropout_row(const Dropout& dropout, int64_t row, int64_t width, float* values) {
  const auto row_low = static_cast<uint32_t>(row);
  const auto row_high = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
  for (int64_t column = 0; column < width; column += 4) {
    uint32_t words[4];
    philox(static_cast<uint32_t>(column / 4), row_low, row_high, dropout.stream, dropout.key[0], dropout.key[1], words);
    for (int64_t i = column; i < width && i < column + 4; ++i) {
      values[i] = words[i - column] < dropout.threshold ? 0.0f : values[i] * dropout.scale;
    }
  }
}

}  // namespace bertfast
