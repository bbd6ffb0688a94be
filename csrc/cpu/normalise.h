// LayerNorm of rows in fp32, and its backward.
//
// Rows are read and written one after the other, each from its beginning to its end, and only what lies in L1 is walked
// in several places at once: memory does not keep up with more streams than it has tensors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace bertfast {

// Rows of fp32, zeros at first, each on cache lines of its own: vectors that straddle two take twice the time.
class RowBuffers {
 public:
  RowBuffers(int64_t rows, int64_t width) : lines_(width / kLineFloats + 1), memory_(rows * lines_) {}

  float* operator[](int64_t row) { return memory_[row * lines_].floats; }

 private:
  static constexpr int64_t kLineFloats = 16;
  struct alignas(64) Line {
    float floats[kLineFloats];
  };

  int64_t lines_;  // of a row
  std::vector<Line> memory_;
};

// Four independent accumulators: with one, the latency of an addition and not the loads would set the pace. For values
// in L1 only.
template <class Term>
BERTFAST_INLINE float sum_of(int64_t size, const Term& term) {
  const int64_t quarter = size / 4;
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < quarter; ++i) {
    s0 += term(i);
    s1 += term(i + quarter);
    s2 += term(i + 2 * quarter);
    s3 += term(i + 3 * quarter);
  }
  for (int64_t i = 4 * quarter; i < size; ++i) s0 += term(i);
  return (s0 + s1) + (s2 + s3);
}

// z[i] = term(i), in order; returns the sum.
template <class Term>
BERTFAST_INLINE float fill(int64_t size, float* z, const Term& term) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) {
    const float value = term(i);
    z[i] = value;
    total += value;
  }
  return total;
}

struct Normalise {
  const float *weight, *bias;
  float eps;
  float *mean, *rstd;

  // y = (z - mean) * rstd * weight + bias for row i, whose values add up to `total`.
  BERTFAST_INLINE void row(int64_t i, int64_t n, const float* z, float total, float* y) const {
    // The sum of equal numbers is rounded, and rstd, up to 1e6, would make a deviation of it.
    const float rough = total / n;
    const float m = rough + sum_of(n, [&](int64_t j) { return z[j] - rough; }) / n;
    const float variance = sum_of(n, [&](int64_t j) { return (z[j] - m) * (z[j] - m); }) / n;
    const float r = 1.0f / std::sqrt(variance + eps);
    const float *pw = weight, *pb = bias;  // GCC 12 does not vectorise a loop that reads members
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = (z[j] - m) * r * pw[j] + pb[j];
    mean[i] = m;
    rstd[i] = r;
  }
};

// forward.row(i, buffers, words) for all rows.
template <class Forward>
void normalise_rows(int64_t rows, int64_t width, const Forward& forward) {
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    RowBuffers buffers(Forward::kBuffers, width);
    std::vector<uint32_t> words(forward.dropout ? width + 3 : 0);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) forward.row(i, buffers, words.data());
    });
  });
}

struct NormaliseBwd {
  const float *mean, *rstd, *weight;

  // dz of row i, whose terms are added to dweight and dbias.
  BERTFAST_INLINE void row(int64_t i, int64_t n, const float* dout, const float* z, float* dz, float* dweight,
                           float* dbias) const {
    const float* pw = weight;  // as in Normalise
    const float m = mean[i], r = rstd[i];
    float g = 0, g_xhat = 0;
#pragma omp simd reduction(+ : g, g_xhat)
    for (int64_t j = 0; j < n; ++j) {
      g += dout[j] * pw[j];
      g_xhat += dout[j] * pw[j] * ((z[j] - m) * r);
    }
    const float mean_g = g / n, mean_g_xhat = g_xhat / n;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      const float xhat = (z[j] - m) * r;
      dz[j] = r * (dout[j] * pw[j] - mean_g - xhat * mean_g_xhat);
      dweight[j] += dout[j] * xhat;
      dbias[j] += dout[j];
    }
  }
};

BERTFAST_INLINE void add(int64_t n, const float* part, float* total) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) total[j] += part[j];
}

// Sums over rows, which backward.row(i, buffers, words, sums) adds a row to, into `totals`, (N,) each. They are taken
// in chunks of rows that depend on the shape alone, then added up in order: the result is the same for any number of
// threads. Each addition rounds all that came before, so no chain of them has more than 32 terms, or rows / 2048 where
// that is more.
template <class Backward>
void sum_over_rows(int64_t rows, int64_t width, const std::vector<float*>& totals, const Backward& backward) {
  constexpr int64_t kBlockRows = 32, kMaxChunks = 64, kChunksAtOnce = 8;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t chunk_rows = std::max<int64_t>(1, (blocks + kMaxChunks - 1) / kMaxChunks) * kBlockRows;
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  const auto count = static_cast<int64_t>(totals.size());
  RowBuffers partial(chunks * count, width);
  parallel_rows(chunks, width * chunk_rows, [&](int64_t begin, int64_t end) {
    RowBuffers buffers(Backward::kBuffers, width), block(count, width);
    std::vector<uint32_t> words(backward.dropout ? width + 3 : 0);
    std::vector<float*> sums(count);
    for (int64_t k = 0; k < count; ++k) sums[k] = block[k];
    with_best_isa([&]() __attribute__((always_inline)) {
      const int64_t n = width;
      for (int64_t first = begin * chunk_rows; first < std::min(rows, end * chunk_rows); first += kBlockRows) {
        for (float* sum : sums) std::fill(sum, sum + n, 0.0f);
        const int64_t stop = std::min(rows, first + kBlockRows);
        for (int64_t i = first; i < stop; ++i) backward.row(i, buffers, words.data(), sums);
        for (int64_t k = 0; k < count; ++k) add(n, sums[k], partial[first / chunk_rows * count + k]);
      }
    });
  });
  with_best_isa([&]() __attribute__((always_inline)) {
    for (int64_t k = 0; k < count; ++k) {
      std::fill(totals[k], totals[k] + width, 0.0f);
      for (int64_t first = 0; first < chunks; first += kChunksAtOnce) {
        float* some = partial[first * count + k];
        const int64_t stop = std::min(chunks, first + kChunksAtOnce);
        for (int64_t chunk = first + 1; chunk < stop; ++chunk) add(width, partial[chunk * count + k], some);
        add(width, some, totals[k]);
      }
    }
  });
}

}  // namespace bertfast
