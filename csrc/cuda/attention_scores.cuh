// What becomes of attention's scores, which are a warp's products (products.cuh): which pairs of query and key take no
// part, and which probabilities are dropped. Rows of scores are queries and columns keys; kTransposed, the other way
// round.
#pragma once

#include <cstdint>

#include "attention_inputs.cuh"
#include "intrinsics.cuh"
#include "packed.cuh"
#include "philox.cuh"
#include "products.cuh"

namespace bertfast {

// A warp's part of shared memory for a mask that is not by key, of one row of kN products. Threads have numbers of
// scattered pairs: as many addresses in global memory would not fit in their registers.
template <bool kTransposed, int kN>
class StagedMask {
 public:
  static constexpr int kQueries = kTransposed ? kN * 8 : 16, kKeys = kTransposed ? 16 : kN * 8;

  // Of all warps of a block, where they need it.
  static constexpr int bytes(int warps) { return shared_bytes<float>(kQueries * kStride * warps); }

  __device__ __forceinline__ StagedMask(SharedMemory& shared, const Mask& mask, int warps) {
    if (mask.is_by_pair()) values_ = shared.take<float>(kQueries * kStride * warps) + warp() * kQueries * kStride;
  }

  // For pairs from `query` and `key` on. Of bools come 0 and -inf, and -inf beyond the sequence.
  __device__ __forceinline__ void load(const Mask& mask, const Place& place, int query, int key) const {
    sync_warp();
    if (mask.kind == MaskKind::kBool) {
      const Global<const uint8_t> data = mask.at<uint8_t>(place);
      store(mask, place, query, key, [&](int64_t i) { return data[i] != 0 ? 0 : -kInfinity; });
    } else {
      with_type(mask.dtype, [&](auto type) {
        const auto data = mask.at<decltype(type)>(place);
        store(mask, place, query, key, [&](int64_t i) { return to_float(data[i]); });
      });
    }
    sync_warp();
  }

  // Of two neighbouring columns.
  __device__ __forceinline__ float2 pair(int row, int column) const {
    if constexpr (kTransposed) {
      return {values_[column * kStride + row], values_[(column + 1) * kStride + row]};
    } else {
      return *reinterpret<const float2>(values_ + row * kStride + column);
    }
  }

 private:
  // So that lanes which read at once have different banks: transposed, 8 keys each of 4 queries; else half a warp, 4
  // pairs of keys each of 4 queries.
  static constexpr int kStride = kKeys + (kTransposed ? 4 : 8);

  template <class Read>
  __device__ __forceinline__ void store(const Mask& mask, const Place& place, int query, int key,
                                        const Read& read) const {
#pragma unroll 4
    for (int i = 0; i < kQueries * kKeys; i += kWarpSize) {
      // Neighbours in memory, and in other banks when they are stored: of 16 keys two queries 4 apart.
      const int q = kTransposed ? i / 128 * 8 + i / 32 % 4 + lane() / 16 * 4 : i / kKeys;
      const int k = kTransposed ? lane() % 16 : i % kKeys + lane();
      const bool is_inside = query + q < place.length_q && key + k < place.length_k;
      values_[q * kStride + k] =
          is_inside ? read((query + q) * mask.stride_query + (key + k) * mask.stride_key) : -kInfinity;
    }
  }

  Shared<float> values_ = nullptr;
};

// A mask by key, of kN * 8 keys. Each lane reads that of a key in 32, before the scores are made, and a ballot gives it
// to the others. Where scores are transposed, keys are rows, whose gradients become 0 in the end.
template <int kN>
class KeyMask {
 public:
  static_assert(kN % 4 == 0, "a ballot is 32 keys");

  __device__ __forceinline__ KeyMask(const Mask& mask, const Place& place, int first_key)
      : is_there_(mask.kind == MaskKind::kBoolByKey) {
    if (!is_there_) return;
    const Global<const uint8_t> data = mask.at<uint8_t>(place);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int key = first_key + i * 32 + lane();
      own_[i] = key < place.length_k ? data[key * mask.stride_key] : 0;
    }
  }

  // Gives `hidden` to the scores of masked keys.
  template <int kM>
  __device__ __forceinline__ void hide(float (&scores)[kM][kN][4], float hidden) const {
    if (!is_there_) return;
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      const uint32_t seen = ballot(own_[n / 4] != 0) >> lane() % 4 * 2;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if ((seen >> (i / 4 * 8 + i % 2) & 1) == 0) scores[m][n + i / 4][i % 4] = hidden;
        }
      }
    }
  }

 private:
  bool is_there_;
  uint32_t own_[kN / 4];
};

// Scores of 16 * kM rows from `first_query` and `first_key` on.
template <bool kTransposed, int kM, int kN>
struct Scores {
  float (&values)[kM][kN][4];
  const Place& place;
  const Mask& mask;
  int first_query, first_key;

  // Multiplies by the scale and adds a mask that is not by key, whose -inf become `hidden`.
  __device__ __forceinline__ void scale_and_mask(const StagedMask<kTransposed, kN>& staged, float scale,
                                                 float hidden) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      staged.load(mask, place, first_query + (kTransposed ? 0 : m * 16), first_key + (kTransposed ? m * 16 : 0));
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 bias = staged.pair(half * 8 + lane() / 4, n * 8 + lane() % 4 * 2);
          float &first = values[m][n][2 * half], &second = values[m][n][2 * half + 1];
          first = bias.x == -kInfinity ? hidden : first * scale + bias.x;
          second = bias.y == -kInfinity ? hidden : second * scale + bias.y;
        }
      }
    }
  }

  // Gives `hidden` to what takes no part beside that: with kBounded what lies beyond the sequence, and future keys
  // under causality.
  template <bool kBounded>
  __device__ __forceinline__ void hide(bool is_causal, float hidden) const {
    if constexpr (kBounded) {
      for_each_pair([&](float& score, int query, int key) {
        if (kTransposed ? query >= place.length_q : key >= place.length_k) score = hidden;
      });
    }
    constexpr int kAllKeys = kTransposed ? kM * 16 : kN * 8;
    if (is_causal && first_key + kAllKeys - 1 > first_query + place.causal_offset) {
      for_each_pair([&](float& score, int query, int key) {
        if (key > query + place.causal_offset) score = hidden;
      });
    }
  }

 private:
  // body(score, query, key)
  template <class Body>
  __device__ __forceinline__ void for_each_pair(const Body& body) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      for_each(values[m], [&](float& score, int row, int column) {
        row += m * 16;
        body(score, first_query + (kTransposed ? column : row), first_key + (kTransposed ? row : column));
      });
    }
  }
};

// The words of Philox for the numbers of one 16 x 8 product. A draw gives those of four keys of a query; threads that
// hold parts of the same draws make one each and exchange words. `head` counts those of all batch entries, or
// sequences.
template <bool kTransposed>
__device__ __forceinline__ void dropout_words(const Dropout<kStreamAttention>& dropout,
                                              const Dropout<kStreamAttention>::Key& key, int head, int first_query,
                                              int first_key, uint32_t (&words)[4]) {
  if constexpr (!kTransposed) {
    // Two neighbours have the same four keys of the same two queries: each draws for one of them.
    const bool is_odd = lane() % 2 != 0;
    uint32_t drawn[4];
    dropout.draw(key, static_cast<uint32_t>(first_key / 4 + lane() % 4 / 2),
                 static_cast<uint32_t>(first_query + lane() / 4 + (is_odd ? 8 : 0)), static_cast<uint32_t>(head),
                 drawn);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t received = shuffle_xor(is_odd ? drawn[i] : drawn[2 + i], 1);
      words[i] = is_odd ? received : drawn[i];
      words[2 + i] = is_odd ? drawn[2 + i] : received;
    }
  } else {
    // Four lanes, each 4 after the last, have the same two queries, and one each of four keys in both halves of the
    // rows. These are four draws: the i-th lane makes draw i, and a transposition of the 4 x 4 words gives it number i
    // of each draw.
    const int own = lane() / 4 % 4;
    dropout.draw(key, static_cast<uint32_t>(first_key / 4 + own / 2 * 2 + lane() / 16),
                 static_cast<uint32_t>(first_query + lane() % 4 * 2 + own % 2), static_cast<uint32_t>(head), words);
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool is_upper = (own & bit) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const uint32_t received = shuffle_xor(is_upper ? words[i] : words[i + bit], bit * 4);
        (is_upper ? words[i] : words[i + bit]) = received;
      }
    }
  }
}

// body(m, n, i, whether it is kept) for all probabilities of a warp, [m][n][i] of its products.
template <bool kTransposed, int kM, int kN, class T, class Body>
__device__ __forceinline__ void for_each_kept(const AttentionInputs<T>& in, const Dropout<kStreamAttention>::Key& key,
                                              const Place& place, int first_query, int first_key, const Body& body) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint32_t words[4];
      dropout_words<kTransposed>(in.dropout, key, place.batch * in.heads + place.head,
                                 first_query + (kTransposed ? n * 8 : m * 16),
                                 first_key + (kTransposed ? m * 16 : n * 8), words);
#pragma unroll
      for (int i = 0; i < 4; ++i) body(m, n, i, words[i] > in.dropout.last_dropped);
    }
  }
}

// Makes of gradients of dropped probabilities those of the probabilities.
template <int kN, class T>
__device__ __forceinline__ void drop_gradients(float (&gradients)[1][kN][4], const AttentionInputs<T>& in,
                                               const Dropout<kStreamAttention>::Key& key, const Place& place,
                                               int first_query, int first_key) {
  for_each_kept<false, 1, kN>(in, key, place, first_query, first_key, [&](int m, int n, int i, bool is_kept) {
    gradients[m][n][i] = is_kept ? gradients[m][n][i] * in.dropout.scale : 0;
  });
}

}  // namespace bertfast
