// Dropout by Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), the stream that the Triton
// and C++ kernels share. Element (row, column) of stream s takes word column % 4 of
//     philox(counter = (column / 4, row mod 2^32, row >> 32, s), key = (low, high) of the int64 seed)
// and is dropped when word < floor(p * 2^32). Counter and key 0 give 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
#pragma once

#include <cmath>
#include <cstdint>

#include "arrays.h"
#include "intrinsics.cuh"

namespace bertfast {

// Values of bertfast.dropout.STREAMS.
constexpr uint32_t kStreamAttention = 0;
constexpr uint32_t kStreamAddLayerNorm = 1;
constexpr uint32_t kStreamFeedForward = 2;
constexpr uint32_t kStreamEmbedLayerNorm = 3;

__device__ __forceinline__ void philox(uint32_t (&counter)[4], uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = multiply_high(0xD2511F53u, counter[0]);
    const uint32_t low0 = 0xD2511F53u * counter[0];
    const uint32_t high1 = multiply_high(0xCD9E8D57u, counter[2]);
    const uint32_t low1 = 0xCD9E8D57u * counter[2];
    counter[0] = high1 ^ counter[1] ^ k0;
    counter[1] = low1;
    counter[2] = high0 ^ counter[3] ^ k1;
    counter[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

template <uint32_t kStream>
struct Dropout {
  Global<const int64_t> seed;  // null where nothing is dropped
  uint32_t last_dropped;       // the largest word that drops: p = 1 has no threshold of 32 bits
  float scale;

  // Where nothing is dropped, `apply` would drop everything: who forgets to ask is noticed.
  __host__ explicit Dropout(const DropoutArgs& args) : seed(nullptr), last_dropped(UINT32_MAX), scale(1) {
    const double count = std::floor(args.p * 0x1.0p+32);
    if (args.seed == nullptr || count == 0) return;
    seed = args.seed;
    last_dropped = static_cast<uint32_t>(count - 1);
    scale = args.p < 1 ? static_cast<float>(1 / (1 - args.p)) : 0.0f;
  }

  __host__ __device__ __forceinline__ explicit operator bool() const { return seed != nullptr; }

  struct Key {
    uint32_t low, high;
  };

  // To be read once: stores in between, which might change the seed for all the compiler knows, would have it read
  // again.
  __device__ __forceinline__ Key key() const {
    if (seed == nullptr) return {};
    const auto value = static_cast<uint64_t>(seed[0]);
    return {static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)};
  }

  // The words of elements 4 `quad` to 4 `quad` + 3 of a row.
  __device__ __forceinline__ void draw(const Key& key, uint32_t quad, uint32_t row_low, uint32_t row_high,
                                       uint32_t (&words)[4]) const {
    words[0] = quad;
    words[1] = row_low;
    words[2] = row_high;
    words[3] = kStream;
    philox(words, key.low, key.high);
  }

  // Drops of a row's values those of columns `column` to column + N - 1, column a multiple of 4. What is dropped
  // becomes 0 whatever it was, NaN included.
  template <int N>
  __device__ __forceinline__ void apply(const Key& key, int64_t row, int column, float (&values)[N]) const {
    static_assert(N % 4 == 0, "a counter gives four words");
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      uint32_t words[4];
      draw(key, static_cast<uint32_t>((column + i) / 4), static_cast<uint32_t>(row),
           static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), words);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[i + k] = words[k] > last_dropped ? values[i + k] * scale : 0.0f;
    }
  }
};

}  // namespace bertfast
