// Rows shared out among teams of threads.
//
// A thread holds its share of a row in registers, so that statistics take two passes and memory one: 32 values going
// forward and 16 going backward, where gradients of parameters are added up beside them. Thread t of a team has the
// packets t, t + kTeam, ... of a row. A team is
//     forward:   a warp for rows up to 1,024, a block of 256 threads up to 8,192
//     backward:  64 threads up to 1,024, a block of 512 up to 8,192 (256 of 32 values for mixed types)
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
  static constexpr int kMaxWidth = kTeam * kValues;

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
  // A packet of an array of which a row begins at `start`.
  template <class S>
  __device__ __forceinline__ auto load(const S& source, int64_t start, int packet) const {
    return source.template load<kVector, N>(start + column(packet), count(packet));
  }
  template <class S>
  __device__ __forceinline__ void store(const S& target, int64_t start, int packet, const float (&values)[N]) const {
    target.template store<kVector>(start + column(packet), count(packet), values);
  }
};

constexpr int kNarrow = 1024;
// `kMaxWidth` of arguments.h.
constexpr int kMaxWidth = 8192;

// Rows up to kNarrow, and up to kMaxWidth.
template <class T, bool kIsNarrow, bool kVector>
using ForwardRow = std::conditional_t<kIsNarrow, Row<T, kNarrow / 32, 32, kVector ? 4 : 2, kVector>,
                                      Row<T, kMaxWidth / 32, 32, kVector ? 2 : 1, kVector>>;
// Mixed types take registers for three ways to load.
template <class T, bool kIsNarrow, bool kVector, bool kIsMixed = std::is_same_v<T, AnyType>>
using BackwardRow =
    std::conditional_t<kIsNarrow, Row<T, kNarrow / 16, 16, kVector && !kIsMixed ? 3 : 2, kVector>,
                       Row<T, kIsMixed ? kMaxWidth / 32 : kMaxWidth / 16, kIsMixed ? 32 : 16, 1, kVector>>;

// A thread's share of a row.
template <class R>
using RowValues = float[R::kPackets][R::N];

// Blocks that walk over the rows of a backward pass, and leave as many partial sums.
inline int64_t backward_programs(int64_t rows, int width, int multiprocessors) {
  using Narrow = BackwardRow<float, true, true>;
  using Wide = BackwardRow<float, false, true>;
  const bool narrow = width <= kNarrow;
  const int64_t most = (narrow ? Narrow::kMinBlocks : Wide::kMinBlocks) * multiprocessors;
  return std::min(most, (rows - 1) / (narrow ? Narrow::kTeams : Wide::kTeams) + 1);
}

// An array of rows, `stride` elements apart.
struct RowsArray {
  ConstArray array;
  int64_t stride;
};

// body(T(), vector, narrow) with what instantiates a kernel on rows: T is the type of all `rows`, or AnyType; `vector`
// says that 16-byte accesses fit all of them, the `vectors` of a row's length, and the width; `narrow` is about
// kNarrow.
template <class Body>
void with_rows(const std::initializer_list<RowsArray>& rows, const std::initializer_list<ConstArray>& vectors,
               int width, const Body& body) {
  const auto run = [&](auto type) {
    constexpr int n = kPacket<decltype(type)>;
    bool vector = width % n == 0;
    for (const RowsArray& r : rows) vector = vector && is_vector(r.array, r.stride, n);
    for (const ConstArray& v : vectors) vector = vector && is_vector(v, 0, n);
    const auto narrow = [&](auto vector) {
      width <= kNarrow ? body(type, vector, std::true_type()) : body(type, vector, std::false_type());
    };
    vector ? narrow(std::true_type()) : narrow(std::false_type());
  };
  const Dtype dtype = rows.begin()->array.dtype;
  bool same = true;
  for (const RowsArray& r : rows) same = same && (r.array.data == nullptr || r.array.dtype == dtype);
  same ? with_dtype(dtype, run) : run(AnyType());
}

}  // namespace bertfast
