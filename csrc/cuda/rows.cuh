// Rows shared out among teams of threads, and their normalisation.
//
// A thread holds its share of a row in registers, so that statistics take two passes and memory one: 32 values going
// forward and 16 going backward, where gradients of parameters are added up beside them. Thread t of a team has the
// packets t, t + kTeam, ... of a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "packed.cuh"
#include "reduce.cuh"

namespace bertfast {

// kMinBlocks on a multiprocessor are what registers shall leave room for.
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

// The sum of term(packet, k) over the values of a row. Behind its end terms may be anything and do not enter.
template <class R, class Term>
__device__ __forceinline__ float row_sum(const R& row, typename R::Team& team, const Term& term) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) sum += row.has(p, k) ? term(p, k) : 0.0f;
  }
  return team.sum(sum);
}

// A thread's share of a row.
template <class R>
using RowValues = float[R::kPackets][R::N];

// Replaces z by (z - mean) * rstd.
template <class R>
__device__ __forceinline__ void normalise(const R& row, typename R::Team& team, RowValues<R>& z, float eps, float& mean,
                                          float& rstd) {
  mean = row_sum(row, team, [&](int p, int k) { return z[p][k]; }) / row.width;
  // The sum of equal numbers is rounded, and rstd, up to 1e6, would make a deviation of it.
  mean += row_sum(row, team, [&](int p, int k) { return z[p][k] - mean; }) / row.width;
  const float variance =
      row_sum(row, team, [&](int p, int k) { return (z[p][k] - mean) * (z[p][k] - mean); }) / row.width;
  rstd = 1.0f / sqrtf(variance + eps);
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) z[p][k] = (z[p][k] - mean) * rstd;
  }
}

template <class R>
__device__ __forceinline__ void scale_and_shift(const R& row, const Source<AnyType>& weight,
                                                const Source<AnyType>& bias, RowValues<R>& xhat) {
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    const auto w = row.load(weight, 0, p);
    const auto b = row.load(bias, 0, p);
#pragma unroll
    for (int k = 0; k < R::N; ++k) xhat[p][k] = xhat[p][k] * w[k] + b[k];
  }
}

// Sums over the rows that a block walks over, one for each column: in registers, or where a block has one team, whose
// threads are too many for that, in shared memory.
template <class R>
class ColumnSum {
 public:
  static constexpr bool kInRegisters = R::kTeams > 1;

  // Of floats.
  __host__ __device__ static constexpr int shared_count(int width) {
    return kInRegisters ? R::kTeams * width : R::kMaxWidth;
  }

  __device__ __forceinline__ ColumnSum(SharedMemory& shared, int width)
      : shared_(shared.take<float>(shared_count(width))) {
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) {
        if constexpr (kInRegisters) {
          values_[p][k] = 0;
        } else {
          own(p, k) = 0;
        }
      }
    }
  }

  __device__ __forceinline__ void add(int packet, int k, float value) {
    if constexpr (kInRegisters) {
      values_[packet][k] += value;
    } else {
      own(packet, k) += value;
    }
  }

  // Writes a row of sums; all threads of the block must call.
  __device__ __forceinline__ void store(const R& row, Global<float> target) const {
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) {
        if (!row.has(p, k)) continue;
        if constexpr (kInRegisters) {
          shared_[R::Team::index() * row.width + R::column(p) + k] = values_[p][k];
        } else {
          target[R::column(p) + k] = own(p, k);
        }
      }
    }
    if constexpr (kInRegisters) {
      sync_threads();
#pragma unroll 1
      for (int column = static_cast<int>(threadIdx.x); column < row.width; column += R::kBlock) {
        float sum = 0;
#pragma unroll
        for (int team = 0; team < R::kTeams; ++team) sum += shared_[team * row.width + column];
        target[column] = sum;
      }
    }
  }

 private:
  // Neighbouring threads in neighbouring banks.
  __device__ __forceinline__ float& own(int packet, int k) const {
    return shared_[(packet * R::N + k) * R::kBlock + static_cast<int>(threadIdx.x)];
  }

  Shared<float> shared_;
  float values_[kInRegisters ? R::kPackets : 1][kInRegisters ? R::N : 1];
};

// In place of a ColumnSum that is not wanted.
template <class R>
class NoColumnSum {
 public:
  __device__ __forceinline__ NoColumnSum(SharedMemory&, int) {}
  __device__ __forceinline__ void add(int, int, float) {}
  __device__ __forceinline__ void store(const R&, Global<float>) const {}
};

// A row of the LayerNorm's backward pass: dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dout * weight, and
// what the row adds to the gradients of weight and bias. `dout(p)` and `z(p)` are packets, read once each.
template <class R, class Dout, class Z>
__device__ __forceinline__ void normalise_bwd(const R& row, typename R::Team& team, const Dout& dout, const Z& z,
                                              float mean, float rstd, const Source<AnyType>& weight, RowValues<R>& dz,
                                              ColumnSum<R>& dweight, ColumnSum<R>& dbias) {
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    const auto w = row.load(weight, 0, p);
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      dweight.add(p, k, dout[p][k] * ((z[p][k] - mean) * rstd));
      dbias.add(p, k, dout[p][k]);
      dz[p][k] = dout[p][k] * w[k];
    }
  }
  const float mean_g = row_sum(row, team, [&](int p, int k) { return dz[p][k]; }) / row.width;
  const float mean_g_xhat =
      row_sum(row, team, [&](int p, int k) { return dz[p][k] * ((z[p][k] - mean) * rstd); }) / row.width;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      dz[p][k] = rstd * (dz[p][k] - mean_g - (z[p][k] - mean) * rstd * mean_g_xhat);
    }
  }
}

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

template <int kTeam, class Body>
void with_row_type(bool same, const std::initializer_list<RowsArray>& rows,
                   const std::initializer_list<ConstArray>& vectors, int width, const Body& body) {
  const auto run = [&](auto type) {
    constexpr int n = kPacket<decltype(type)>;
    bool vector = width % n == 0;
    for (const RowsArray& r : rows) vector = vector && is_vector(r.array, r.stride, n);
    for (const ConstArray& v : vectors) vector = vector && is_vector(v, 0, n);
    if (vector) {
      body(type, std::integral_constant<int, kTeam>(), std::true_type());
    } else {
      body(type, std::integral_constant<int, kTeam>(), std::false_type());
    }
  };
  if (same) {
    with_dtype(rows.begin()->array.dtype, run);
  } else {
    run(AnyType());
  }
}

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
