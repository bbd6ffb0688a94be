// What attention's kernels are given, and which queries and keys a block takes of it.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention.h"
#include "intrinsics.cuh"
#include "packed.cuh"
#include "philox.cuh"
#include "shared_tile.cuh"

namespace bertfast {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = INFINITY;

__host__ __device__ constexpr int divide_up(int a, int b) {
  return (a + b - 1) / b;
}

// ---- arguments

// What a block works on.
struct Place {
  int batch, head;       // packed, `batch` is the sequence
  int block;             // its number in the sequence, -1 beyond the last one
  int begin_q, begin_k;  // of the sequence in packed tensors, else 0
  int length_q, length_k;
  int causal_offset;  // by how many keys causality is shifted: packed, the last query sees the last key
};

// T is const for what is read.
template <class T>
struct HeadsAt {
  Global<T> data;
  int64_t stride_batch, stride_head, stride_row;
  bool is_vector;  // whether 16-byte accesses fit

  template <class A>
  __host__ HeadsAt(const HeadsOf<A>& a, int head_dim)
      : data(static_cast<T*>(a.array.data)),
        stride_batch(a.stride_batch),
        stride_head(a.stride_head),
        stride_row(a.stride_row),
        is_vector(head_dim % 8 == 0 && fits_words(a.array, a.stride_batch) && fits_words(a.array, a.stride_head) &&
                  fits_words(a.array, a.stride_row)) {}

  // Row `begin` of a head of a batch entry.
  __device__ __forceinline__ Global<T> at(int64_t batch, int64_t head, int64_t begin) const {
    return data + batch * stride_batch + head * stride_head + begin * stride_row;
  }
};

// Which keys take part: all; those of one row for all queries; those of a row for each query; or a number is added for
// each pair of query and key.
enum class MaskKind : int32_t { kNone, kBoolByKey, kBool, kFloat };

struct Mask {
  Global<const void> data;
  MaskKind kind;
  Dtype dtype;
  int64_t stride_batch, stride_head, stride_query, stride_key;

  __host__ Mask(const MaskArray& a, int queries)
      : data(a.array.data),
        kind(kind_of(a, queries)),
        dtype(a.array.dtype),
        stride_batch(a.stride_batch),
        stride_head(a.stride_head),
        stride_query(a.stride_query),
        stride_key(a.stride_key) {}

  __host__ static MaskKind kind_of(const MaskArray& a, int queries) {
    if (a.array.data == nullptr) return MaskKind::kNone;
    if (!a.is_bool) return MaskKind::kFloat;
    return a.stride_query == 0 || queries == 1 ? MaskKind::kBoolByKey : MaskKind::kBool;
  }

  template <class M>
  __device__ __forceinline__ Global<const M> at(const Place& place) const {
    return reinterpret<const M>(data) + (place.batch * stride_batch + place.head * stride_head);
  }

  // Whether scores are changed pair by pair, in natural units.
  __host__ __device__ bool is_by_pair() const { return kind == MaskKind::kBool || kind == MaskKind::kFloat; }
};

// Where packed sequences end.
struct Ends {
  struct Span {
    int begin, length;
  };

  Global<const void> data;  // null where sequences are padded
  bool is_long;

  __host__ explicit Ends(const EndsArray& a) : data(a.data), is_long(a.is_long) {}

  // A sequence, clipped to the tensor: on a GPU nobody has validated the ends.
  __device__ __forceinline__ Span span(int sequence, int total) const {
    const int begin = clipped(sequence, 0, total);
    return {begin, clipped(sequence + 1, begin, total) - begin};
  }

 private:
  __device__ __forceinline__ int clipped(int i, int least, int most) const {
    const int64_t end = is_long ? reinterpret<const int64_t>(data)[i] : reinterpret<const int32_t>(data)[i];
    return static_cast<int>(end < least ? least : end > most ? most : end);
  }
};

template <class T>
struct AttentionInputs {
  HeadsAt<const T> query, key, value;
  Mask mask;
  Ends ends_q, ends_k;
  Dropout<kStreamAttention> dropout;
  int batch, heads, head_dim, length_q, length_k, sequences;
  bool is_causal;
  float scale;

  __host__ explicit AttentionInputs(const AttentionArgs& a)
      : query(a.query, a.head_dim),
        key(a.key, a.head_dim),
        value(a.value, a.head_dim),
        mask(a.mask, a.length_q),
        ends_q(a.ends_q),
        ends_k(a.ends_k),
        dropout(a.dropout),
        batch(a.batch),
        heads(a.heads),
        head_dim(a.head_dim),
        length_q(a.length_q),
        length_k(a.length_k),
        sequences(a.sequences),
        is_causal(a.is_causal),
        scale(a.scale) {}

  // From the units of scores, which with a mask by pair are natural ones.
  __device__ __forceinline__ float to_base_2() const { return mask.is_by_pair() ? kLog2E : scale * kLog2E; }
};

// Rows of the statistics.
inline int64_t attention_rows(const AttentionArgs& a) {
  return static_cast<int64_t>(a.length_q) * a.heads * a.batch;
}

// Of a sequence, when there are `length` rows in a padded one or in all packed ones.
inline int mean_length(const AttentionArgs& a, int length) {
  return a.ends_q.data == nullptr ? length : length / a.sequences;
}

// body(std::bool_constant<value>())
template <class Body>
void with_constant(bool value, const Body& body) {
  value ? body(std::true_type()) : body(std::false_type());
}

// body(head dim, has dropout), compile-time constants; of the head dims that kernels have, the least that suffices.
template <class T, class Body>
void with_attention_form(const AttentionInputs<T>& in, const Body& body) {
  with_constant(static_cast<bool>(in.dropout), [&](auto has_dropout) {
    if (in.head_dim <= 32) return body(std::integral_constant<int, 32>(), has_dropout);
    if (in.head_dim <= 64) return body(std::integral_constant<int, 64>(), has_dropout);
    if (in.head_dim <= 96) return body(std::integral_constant<int, 96>(), has_dropout);
    body(std::integral_constant<int, kMaxHeadDim>(), has_dropout);
  });
}

// How many blocks of `rows` queries, or keys, there are at most.
inline int64_t attention_blocks(const AttentionArgs& a, int length, int rows) {
  if (a.ends_q.data == nullptr) return static_cast<int64_t>(divide_up(length, rows)) * a.batch * a.heads;
  return (static_cast<int64_t>(length / rows) + a.sequences) * a.heads;
}

// ---- places of blocks

// The sequence that block number `block` of all belongs to, and the block's number in it: -1 beyond the last block.
//
// Sequences longer than twice the mean come first, so that none of them starts when the others are done. Blocks are
// total / rows + sequences at most, whatever the lengths. Each warp counts anew: a map made by another kernel would be
// one launch more for each layer, or have to be held to what it was made from.
__device__ __forceinline__ void find_sequence(const Ends& ends, int sequences, int total, int rows, int& block,
                                              int& sequence) {
  const int run = divide_up(sequences, kWarpSize);  // of sequences, for each lane
  const int first = min(lane() * run, sequences), last = min(first + run, sequences);
  const int mean = total / sequences;
  int long_blocks = 0, other_blocks = 0;
  for (int s = first; s < last; ++s) {
    const int length = ends.span(s, total).length;
    (length - mean > mean ? long_blocks : other_blocks) += divide_up(length, rows);
  }
  int long_end = long_blocks, other_end = other_blocks;
#pragma unroll
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int source = max(lane() - delta, 0);
    const int before_long = shuffle(long_end, source), before_other = shuffle(other_end, source);
    if (lane() >= delta) {
      long_end += before_long;
      other_end += before_other;
    }
  }
  const int all_long = shuffle(long_end, kWarpSize - 1);
  const bool is_long = block < all_long;
  if (!is_long) block -= all_long;
  const int end = is_long ? long_end : other_end;
  int left = block - (end - (is_long ? long_blocks : other_blocks));
  const uint32_t owners = ballot(left >= 0 && block < end);
  sequence = first;
  for (int s = first; s < last; ++s) {
    const int length = ends.span(s, total).length;
    const int blocks = (length - mean > mean) == is_long ? divide_up(length, rows) : 0;
    if (left < blocks) break;
    left -= blocks;
    ++sequence;
  }
  if (owners == 0) {
    sequence = 0;
    block = -1;
    return;
  }
  sequence = shuffle(sequence, lowest_bit(owners));
  block = shuffle(left, lowest_bit(owners));
}

// The place of this block, of `rows` queries, or with kOfKeys keys. Padded, the blocks of one head run next to each
// other and share its keys in L2. Packed, those of all heads that do the same part of a sequence run next to each
// other: otherwise not all long sequences would start first.
template <bool kOfKeys, class T>
__device__ __forceinline__ Place place_of_block(const AttentionInputs<T>& in, int rows) {
  const int total = kOfKeys ? in.length_k : in.length_q;
  if (in.ends_q.data == nullptr) {
    const int blocks = divide_up(total, rows), row = static_cast<int>(blockIdx.x) / blocks;
    const int block = static_cast<int>(blockIdx.x) % blocks;
    return {row / in.heads, row % in.heads, block, 0, 0, in.length_q, in.length_k, 0};
  }
  const int head = static_cast<int>(blockIdx.x) % in.heads;
  int block = static_cast<int>(blockIdx.x) / in.heads, sequence;
  find_sequence(kOfKeys ? in.ends_k : in.ends_q, in.sequences, total, rows, block, sequence);
  const Ends::Span of_q = in.ends_q.span(sequence, in.length_q), of_k = in.ends_k.span(sequence, in.length_k);
  const int length_q = uniform(of_q.length), length_k = uniform(of_k.length);
  return {uniform(sequence),   head,     uniform(block), uniform(of_q.begin),
          uniform(of_k.begin), length_q, length_k,       length_k - length_q};
}

// What of a place is needed now and then, or when a block's work is done: in shared memory, where it takes no register
// of a loop.
class KeptPlace {
 public:
  __device__ __forceinline__ KeptPlace(SharedMemory& shared, const Place& place) : values_(shared.take<int>(kCount)) {
    if (threadIdx.x != 0) return;
    values_[0] = place.batch;
    values_[1] = place.head;
    values_[2] = place.begin_q;
    values_[3] = place.begin_k;
  }

  // Not before the block's first barrier.
  __device__ __forceinline__ Place place() const {
    Place place = {};
    place.batch = values_[0];
    place.head = values_[1];
    place.begin_q = values_[2];
    place.begin_k = values_[3];
    return place;
  }

  static constexpr int kCount = 4;
  static constexpr int kBytes = shared_bytes<int>(kCount);

 private:
  Shared<int> values_;
};

// The row of the statistics of a sequence's first query.
template <class T>
__device__ __forceinline__ int64_t stats_row(const AttentionInputs<T>& in, const Place& place) {
  const int row = in.ends_q.data == nullptr ? place.batch * in.heads + place.head : place.head;
  return static_cast<int64_t>(row) * in.length_q + place.begin_q;
}

// The first key of the last block of `keys` that queries up to `end_q` see, 0 where they see none.
__device__ __forceinline__ int last_key_block(const Place& place, bool is_causal, int end_q, int keys) {
  int end = place.length_k;
  if (is_causal) end = min(end, end_q + place.causal_offset);
  return max(end - 1, 0) / keys * keys;
}

template <class T>
__device__ __forceinline__ GlobalRows<T> rows_of(const HeadsAt<const T>& heads, const Place& place, int64_t begin,
                                                 int length, int head_dim) {
  return {heads.at(place.batch, place.head, begin), heads.stride_row, length, head_dim, heads.is_vector};
}

}  // namespace bertfast
