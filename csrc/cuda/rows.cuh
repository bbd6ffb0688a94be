// Rows shared out among teams of threads.
//
// A thread holds its share of a row in registers, so that statistics take two passes and memory one: 32 values going
// forward and 16 going backward, where gradients of parameters are added up beside them. Thread t of a team has the
// packets t, t + kTeam, ... of a row. A team is
//     forward:   a warp for rows up to 1,024, a block of 256 threads up to 8,192
//     backward:  64 threads up to 1,024, a block up to 8,192: 512, or 256 of 32 values where they are not half
//     precision
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "packed.cuh"
#include "reduce.cuh"

namespace bertfast {

// Registers shall leave room for kMinBlocks blocks on a multiprocessor.
template <class T, int kTeam_, int kValues, int kMinBlocks_, bool kVector_>
struct Row {
  static constexpr int kTeam = kTeam_;
  static constexpr int kBlock = kTeam > 4 * kWarpSize ? kTeam : 4 * kWarpSize;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kVector = kVector_;
  static constexpr int kTeams = kBlock / kTeam;
  static constexpr int N = kPacket<T>;
  static constexpr int kPackets = kValues / N;
  static constexpr int kWidest = kTeam * kValues;

  using Team = bertfast::Team<kTeam, kTeams>;

  int width;

  // This thread's team among those of all blocks, and how many these are.
  __device__ __forceinline__ static int64_t first() {
    return static_cast<int64_t>(blockIdx.x) * kTeams + Team::index();
  }
  __device__ __forceinline__ static int64_t step() { return static_cast<int64_t>(gridDim.x) * kTeams; }

  __device__ __forceinline__ static int column(int packet) { return (packet * kTeam + Team::thread()) * N; }
  // Whether a value of a packet belongs to the row. With kVector a packet does as a whole: a test for each value would
  // take a register for each.
  __device__ __forceinline__ bool has(int packet, int k) const { return column(packet) + (kVector ? 0 : k) < width; }
  // How many do.
  __device__ __forceinline__ int count(int packet) const {
    const int left = width - column(packet);
    return left <= 0 ? 0 : kVector || left > N ? N : left;
  }
  // The packets of a row that begins at `start`.
  template <class S>
  __device__ __forceinline__ void load(const S& source, int64_t start,
                                       typename S::template Packet<N> (&packets)[kPackets]) const {
    source.template load<kVector>(packets, [&](int p) { return start + column(p); }, [&](int p) { return count(p); });
  }
  // One of them.
  template <class S>
  __device__ __forceinline__ auto load(const S& source, int64_t start, int packet) const {
    typename S::template Packet<N> one[1];
    source.template load<kVector>(one, [&](int) { return start + column(packet); }, [&](int) { return count(packet); });
    return one[0];
  }
  template <class S>
  __device__ __forceinline__ void store(const S& target, int64_t start, int packet, const float (&values)[N]) const {
    target.template store<kVector>(start + column(packet), count(packet), values);
  }
};

constexpr int kNarrow = 1024;

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// Rows up to kNarrow, and up to kMaxWidth. In the backward pass all rows have one type.
template <class T, bool kIsNarrow, bool kVector>
using ForwardRow = std::conditional_t<kIsNarrow,
                                      Row<T, kNarrow / 32, 32,
                                          !kVector     ? 2
                                          : is_half<T> ? 4
                                                       : 3,
                                          kVector>,
                                      Row<T, kMaxWidth / 32, 32, kVector && is_half<T> ? 2 : 1, kVector>>;
template <class T, bool kIsNarrow, bool kVector>
using BackwardRow = std::conditional_t<
    kIsNarrow, Row<T, kNarrow / 16, 16, kVector && is_half<T> ? 3 : 2, kVector>,
    std::conditional_t<kVector, Row<T, kMaxWidth / 16, 16, 1, true>, Row<T, kMaxWidth / 32, 32, 1, false>>>;

// A thread's share of a row.
template <class R>
using RowValues = float[R::kPackets][R::N];

// A row, or a vector, as it is loaded.
template <class R, class T>
using RowPackets = typename Source<T>::template Packet<R::N>[R::kPackets];

// An array of rows `stride` elements apart, or a vector.
struct RowsArray {
  ConstArray array;
  int64_t stride = 0;
};

// body(vector, narrow): whether 16-byte accesses fit all arrays and the width in packets of n, and whether the width is
// at most kNarrow, as types. Vectors have stride 0.
template <class Body>
void with_row_form(const std::initializer_list<RowsArray>& arrays, int width, int n, const Body& body) {
  bool fit = width % n == 0;
  for (const RowsArray& a : arrays) fit = fit && fits_words(a.array, a.stride);
  const auto narrow = [&](auto vector) {
    width <= kNarrow ? body(vector, std::true_type()) : body(vector, std::false_type());
  };
  fit ? narrow(std::true_type()) : narrow(std::false_type());
}

// body(T(), vector, narrow) with T the type of all arrays, or AnyType.
template <class Body>
void with_rows(const std::initializer_list<RowsArray>& arrays, int width, const Body& body) {
  const Dtype dtype = arrays.begin()->array.dtype;
  bool same = true;
  for (const RowsArray& a : arrays) same = same && (a.array.data == nullptr || a.array.dtype == dtype);
  const auto run = [&](auto type) {
    with_row_form(arrays, width, kPacket<decltype(type)>,
                  [&](auto vector, auto narrow) { body(type, vector, narrow); });
  };
  same ? with_dtype(dtype, run) : run(AnyType());
}

}  // namespace bertfast
