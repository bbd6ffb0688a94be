// The passes over memory around a linear layer's activation.
//
// Forward, behind a GEMM:     pre = product + bias,    out = dropout(act(pre))
// Bytes moved for rows of width N, fp32: product read and out written, 8 N a row, and 4 N more for pre where there is a
// bias: it takes the place of the product.
//
// Backward, in front of the two GEMMs of dx and dweight:
//     dpre = dropout'(dout) * act'(pre),    dbias = sum_rows(dpre)
//     out  = dropout(act(pre)), for the gradient of the next layer's weight, where nobody kept it
// Bytes moved, fp32: 12 N a row, and 4 N for out. The dropout mask is regenerated.
//
// dbias is summed over 16 rows, these sums over a chunk of rows that depends on the shape alone, and those of the
// chunks in order: the result is the same for any number of threads, and no chain of additions has more than 64 terms,
// or rows / 1024 where that is more.
#include "bias_activation.h"

#include <algorithm>
#include <vector>

#include "activations.h"
#include "parallel.h"

namespace bertfast {
namespace {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kMaxChunks = 64;  // their partial sums, N each, must stay in cache

BERTFAST_INLINE void add(int64_t size, const float* terms, float* sums) {
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) sums[j] += terms[j];
}

// `buffers` is (2, N).
template <class Activation>
BERTFAST_INLINE void forward_row(const BiasActivationFwdArgs& a, int64_t i, float* buffers, uint32_t* words) {
  const int64_t n = a.product.width;
  const float* x = a.product.read(i, buffers);
  if (const float* bias = a.bias) {
    float* sum = a.pre ? a.pre.target(i, buffers) : buffers;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) sum[j] = x[j] + bias[j];
    if (a.pre) a.pre.store(i, sum);
    x = sum;
  }
  float* y = a.out.target(i, buffers + n);
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) y[j] = Activation::value(x[j]);
  if (a.dropout) dropout_row(*a.dropout, i, n, y, words);
  a.out.store(i, y);
}

// `buffers` is (4, N); the row is added to `sums` unless it is null.
template <class Activation>
BERTFAST_INLINE void backward_row(const BiasActivationBwdArgs& a, int64_t i, float* buffers, uint32_t* words,
                                  float* sums) {
  const int64_t n = a.pre.width;
  const float* dy = a.dout.read(i, buffers);
  const float* x = a.pre.read(i, buffers + n);
  float* dx = a.dpre.target(i, buffers + 2 * n);
  if (a.dropout) {
    philox_row(*a.dropout, i, 0, (n + 3) / 4, words);
    if (dy != buffers) std::copy(dy, dy + n, buffers);
    drop(*a.dropout, n, words, buffers);
    dy = buffers;
  }
  if (a.out) {
    float* y = a.out.target(i, buffers + 3 * n);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      dx[j] = dy[j] * Activation::derivative(x[j]);
      y[j] = Activation::value(x[j]);
    }
    if (a.dropout) drop(*a.dropout, n, words, y);
    a.out.store(i, y);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) dx[j] = dy[j] * Activation::derivative(x[j]);
  }
  if (sums) add(n, dx, sums);
  a.dpre.store(i, dx);
}

}  // namespace

void bias_activation_fwd(const BiasActivationFwdArgs& a) {
  const int64_t n = a.product.width;
  with_activation(a.formula, [&](auto activation) {
    parallel_rows(a.rows, n, [&](int64_t begin, int64_t end) {
      std::vector<float> buffers(2 * n);
      std::vector<uint32_t> words(a.dropout ? n + 3 : 0);
      with_best_isa([&]() __attribute__((always_inline)) {
        for (int64_t i = begin; i < end; ++i) forward_row<decltype(activation)>(a, i, buffers.data(), words.data());
      });
    });
  });
}

void bias_activation_bwd(const BiasActivationBwdArgs& a) {
  const int64_t n = a.pre.width;
  const int64_t chunk_rows = std::max(kBlockRows, (a.rows + kMaxChunks - 1) / kMaxChunks);
  const int64_t chunks = (a.rows + chunk_rows - 1) / chunk_rows;
  std::vector<float> partials(a.dbias ? chunks * n : 0);
  with_activation(a.formula, [&](auto activation) {
    parallel_rows(chunks, n * chunk_rows, [&](int64_t begin, int64_t end) {
      std::vector<float> buffers(5 * n);
      std::vector<uint32_t> words(a.dropout ? n + 3 : 0);
      float* sums = a.dbias ? buffers.data() + 4 * n : nullptr;
      with_best_isa([&]() __attribute__((always_inline)) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          const int64_t last = std::min(a.rows, (chunk + 1) * chunk_rows);
          for (int64_t block = chunk * chunk_rows; block < last; block += kBlockRows) {
            if (sums) std::fill(sums, sums + n, 0.0f);
            for (int64_t i = block; i < std::min(last, block + kBlockRows); ++i) {
              backward_row<decltype(activation)>(a, i, buffers.data(), words.data(), sums);
            }
            if (sums) add(n, sums, partials.data() + chunk * n);
          }
        }
      });
    });
  });
  if (!a.dbias) return;
  with_best_isa([&]() __attribute__((always_inline)) {
    std::fill(a.dbias, a.dbias + n, 0.0f);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) add(n, partials.data() + chunk * n, a.dbias);
  });
}

}  // namespace bertfast
