// Attention on the CPU: what the ops hand to the kernels. A unit is a block of queries of one (sequence, head) in front
// of all of its keys (backward: all queries); units share nothing, so that they run in any order on any thread, and the
// result is the same for any number of threads.
//
// The kernels are compiled once per instruction set (attention_avx512.cpp ...), from attention_fwd.h,
// attention_bwd.h and attention_mask_bwd.h, for all dtypes; those of attention_avx512bf16.cpp are for bf16 alone. These
// files share what stands here, and it calls nothing.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "philox.h"

namespace bertfast {

constexpr int kQueryRows = 48;    // queries at a time: whole tiles of 12 and of 6 rows
constexpr int64_t kKeys = 576;    // keys at a time, whole tiles of rows and of columns: all 512 of BERT, whose
                                  // softmax then needs no rescaling
constexpr int64_t kPadding = 32;  // keys and head dims are filled up to multiples of it: 2 vectors of 16 lanes
constexpr int kAlignment = 64;

// A (B, S, H, D) tensor in elements of the inputs' dtype, D of them side by side.
struct HeadsArray {
  char* data = nullptr;
  int64_t batch = 0, row = 0, head = 0;  // strides
};

// Bool, True takes part, or floating point, added to the scaled scores. Strides are 0 where it is broadcast.
struct AttentionMask {
  const char* data = nullptr;
  torch::headeronly::ScalarType dtype = torch::headeronly::ScalarType::Bool;
  int64_t batch = 0, head = 0, row = 0, key = 0;

  bool is_added() const { return data && dtype != torch::headeronly::ScalarType::Bool; }
};

struct AttentionArgs {
  torch::headeronly::ScalarType dtype;
  int64_t head_dim;
  HeadsArray query, key, value;
  AttentionMask mask;
  bool is_causal = false;
  float scale = 1;
  const Dropout* dropout = nullptr;
  int64_t heads = 0;
};

// Of each row the maximum of its scores, and the sum of exp(score - maximum). With a mask that is added, scores are
// scale query key^T + mask; else scale is left out of the maximum but for its sign: what is multiplied by it last is
// a difference, which is exact where it matters.
struct AttentionFwd {
  AttentionArgs in;
  HeadsArray out;
  float* maxima;
  float* sums;
};

struct AttentionBwd {
  AttentionArgs in;
  HeadsArray out, dout, dquery, dkey, dvalue;
  const float* maxima;
  const float* sums;
  float* delta;  // sum(dout out) of each row, where the gradient of a mask may need it, or null
};

// dmask is contiguous, of 1 or all of batch entries, heads and queries, and of all keys: what they share has none.
struct AttentionMaskBwd {
  AttentionArgs in;
  HeadsArray dout;
  const float *maxima, *sums, *delta;
  char* dmask;
  int64_t batch, queries, keys;  // of the scores
  int64_t mask_batch, mask_heads, mask_queries;
};

struct AttentionUnit {
  int64_t sequence, head;
  int64_t begin_q, begin_k;    // the sequence's first row in packed tensors, 0 in padded ones
  int64_t length_q, length_k;  // of the sequence
  int64_t first, count;        // queries of this unit
  int64_t stats;               // the place of the sequence's first row in `maxima` and `sums`
  int64_t causal_offset;       // query i sees keys up to i + causal_offset
};

// A part of the mask's gradient: of an entry of its batch and a head of its own.
struct AttentionMaskUnit {
  int64_t batch, head, first, count;  // count of the mask's own queries
};

inline int64_t padded(int64_t size) {
  return (size + kPadding - 1) / kPadding * kPadding;
}

// Tiles of 12 rows are read and written whole, so buffers are rounded up.
inline int64_t padded_rows(int64_t size) {
  return (size + kQueryRows - 1) / kQueryRows * kQueryRows;
}

// Size in 4-byte words of the buffers that attention_fwd() lays out, in its order.
inline int64_t fwd_workspace(int64_t head_dim, int64_t length_k) {
  const int64_t d = padded(head_dim);
  return 5 * padded(length_k) / 2 * d + kQueryRows * (2 * d + kKeys) + kKeys;
}

// Keys and values as columns, keys as rows and as pairs, gradients of both; queries and dout, both also as pairs,
// dquery; scores, their gradients, probabilities behind dropout, and one of these as pairs; words of dropout.
inline int64_t bwd_workspace(int64_t head_dim, int64_t length_k) {
  const int64_t d = padded(head_dim);
  return (7 * padded(length_k) / 2 + 2 * padded_rows(length_k)) * d + kQueryRows * (4 * d + 7 * kKeys / 2) + kKeys;
}

// Keys and values as columns, and one of them as rows; queries and dout; scores, their gradients, and probabilities
// behind dropout; words of dropout; the gradient of rows of the mask.
inline int64_t mask_bwd_workspace(int64_t head_dim, int64_t keys, int64_t mask_rows) {
  const int64_t d = padded(head_dim);
  return 3 * padded(keys) * d + kQueryRows * (2 * d + 3 * kKeys) + kKeys + mask_rows * padded(keys);
}

#define BERTFAST_ATTENTION_KERNELS(isa)                                               \
  namespace isa {                                                                     \
  void attention_fwd(const AttentionFwd&, const AttentionUnit&, float*);              \
  void attention_bwd(const AttentionBwd&, const AttentionUnit&, float*);              \
  void attention_mask_bwd(const AttentionMaskBwd&, const AttentionMaskUnit&, float*); \
  }
BERTFAST_ATTENTION_KERNELS(baseline)
#if defined(__x86_64__)
BERTFAST_ATTENTION_KERNELS(avx2)
BERTFAST_ATTENTION_KERNELS(avx512)
BERTFAST_ATTENTION_KERNELS(avx512bf16)
#endif
#undef BERTFAST_ATTENTION_KERNELS

}  // namespace bertfast
