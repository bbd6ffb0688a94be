// The passes over memory around a linear layer's activation.
//
// Forward, behind a GEMM:     pre = product + bias,    out = dropout(act(pre))
// Bytes for M rows of width N of e-byte elements: product read, out written, 2 M N e, and M N e more where pre is
// wanted and is not the product: the floor.
//
// Behind a GEMM whose K is split (gemm.cuh):     pre = sum over splits, which have the bias
// Bytes: 4 M N for each split, and M N e written, twice with pre.
//
// Backward, in front of the two GEMMs of dx and dweight:
//     dpre = dropout'(dout) * act'(pre),    dbias = sum_rows(dpre)
//     out  = dropout(act(pre)), for the gradient of the next layer's weight, where nobody kept it
// Bytes: dout and pre read, dpre written, 3 M N e, and M N e for out. dbias is summed as column_sum says, without
// atomics. The dropout mask is regenerated.
//
// A thread has the same 8 columns (4 of fp32) in each row that its block walks over: bias and dbias stay in registers.
#include <algorithm>

#include "bias_activation.cuh"

namespace bertfast {
namespace {

constexpr int kThreads = 128;
// Rows of a forward block: its bias and its start are paid for once.
constexpr int kRows = 4;
// On a multiprocessor, of a backward pass.
constexpr int kBlocks = 8;

// The columns of a block: a stripe of the width.
template <class T>
struct Stripe {
  static constexpr int N = kPacket<T>;
  static constexpr int kWidth = kThreads * N;

  int column, count;
  int64_t block, blocks;  // of this stripe

  __device__ __forceinline__ explicit Stripe(int width) {
    const int stripes = (width - 1) / kWidth + 1;
    column = (static_cast<int>(blockIdx.x % stripes) * kThreads + static_cast<int>(threadIdx.x)) * N;
    count = max(min(width - column, N), 0);
    block = blockIdx.x / stripes;
    blocks = gridDim.x / stripes;
  }
};

template <class T>
int64_t stripes_of(int width) {
  return (width - 1) / Stripe<T>::kWidth + 1;
}

template <class T>
struct Forward {
  Source<T> product;
  Source<T> bias;
  Epilogue<T> epilogue;
  int64_t rows;
  int width;

  __host__ explicit Forward(const BiasActivationFwdArgs& a)
      : product(a.product),
        bias(a.bias),
        epilogue(a.out, a.pre, a.dropout, a.formula, a.width),
        rows(a.rows),
        width(a.width) {}
};

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) bias_activation_fwd_kernel(const Forward<T> args) {
  const Stripe<T> stripe(args.width);
  constexpr int N = stripe.N;
  const auto key = args.epilogue.dropout.key();
  const int64_t first = stripe.block * kRows;
  const int rows = static_cast<int>(min(args.rows - first, static_cast<int64_t>(kRows)));
  typename Source<T>::template Packet<N> product[kRows], bias[1];
  // Of a row beyond the last nothing is read.
  args.product.template load<kVector>(
      product, [&](int r) { return (first + r) * args.width + stripe.column; },
      [&](int r) { return r < rows ? stripe.count : 0; });
  if (args.bias) {
    args.bias.template load<kVector>(bias, [&](int) { return stripe.column; }, [&](int) { return stripe.count; });
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    float values[N];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = args.bias ? product[r][k] + bias[0][k] : product[r][k];
    args.epilogue.store(key, first + r, stripe.column, (first + r) * args.width + stripe.column, stripe.count, kVector,
                        values);
  }
}

template <class T>
struct Splits {
  Global<const float> partial;
  Epilogue<T> epilogue;
  int64_t rows;
  int splits, width;

  __host__ explicit Splits(const BiasActivationSplitsArgs& a)
      : partial(a.partial),
        epilogue(a.out, a.pre, a.dropout, a.formula, a.width),
        rows(a.rows),
        splits(a.splits),
        width(a.width) {}
};

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) bias_activation_fwd_kernel_splits(const Splits<T> args) {
  const Stripe<T> stripe(args.width);
  constexpr int N = stripe.N;
  const auto key = args.epilogue.dropout.key();
  const int64_t at = stripe.block * args.width + stripe.column;
  float values[N] = {};
#pragma unroll 4
  for (int split = 0; split < args.splits; ++split) {
    const Global<const float> own = args.partial + (split * args.rows * args.width + at);
    const Packet<float, N> packet = load_packet<kVector, N, float>(own, stripe.count);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] += packet[k];
  }
  args.epilogue.store(key, stripe.block, stripe.column, at, stripe.count, kVector, values);
}

template <class T>
struct Backward {
  Source<T> dout, pre;
  Target<T> dpre, out;
  Global<float> partial;
  Dropout<kStreamFeedForward> dropout;
  Formula formula;
  int64_t rows, stride_dout, stride_pre;
  int width;

  __host__ explicit Backward(const BiasActivationBwdArgs& a)
      : dout(a.dout),
        pre(a.pre),
        dpre(a.dpre),
        out(a.out),
        partial(a.partial),
        dropout(a.dropout),
        formula(a.formula),
        rows(a.rows),
        stride_dout(a.stride_dout),
        stride_pre(a.stride_pre),
        width(a.width) {}
};

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) bias_activation_bwd_kernel(const Backward<T> args) {
  const Stripe<T> stripe(args.width);
  constexpr int N = stripe.N;
  using Packet = typename Source<T>::template Packet<N>;
  const auto key = args.dropout.key();
  float dbias[N] = {};
  Packet dout[1], pre[1];
  const auto load = [&](int64_t i) {
    const int count = i < args.rows ? stripe.count : 0;
    args.dout.template load<kVector>(
        dout, [&](int) { return i * args.stride_dout + stripe.column; }, [&](int) { return count; });
    args.pre.template load<kVector>(
        pre, [&](int) { return i * args.stride_pre + stripe.column; }, [&](int) { return count; });
  };
  load(stripe.block);
#pragma unroll 1
  for (int64_t i = stripe.block; i < args.rows; i += stripe.blocks) {
    float gradient[N], input[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      gradient[k] = dout[0][k];
      input[k] = pre[0][k];
    }
    // The next row is under way while this one is computed.
    load(i + stripe.blocks);
    const int64_t at = i * args.width + stripe.column;
    if (args.dropout) args.dropout.apply(key, i, stripe.column, gradient);
    with_activation(args.formula, [&](auto activation) {
#pragma unroll
      for (int k = 0; k < N; ++k) gradient[k] *= activation.derivative(input[k]);
    });
    args.dpre.template store<kVector>(at, stripe.count, gradient);
#pragma unroll
    for (int k = 0; k < N; ++k) dbias[k] += gradient[k];
    if (args.out) {
      with_activation(args.formula, [&](auto activation) {
#pragma unroll
        for (int k = 0; k < N; ++k) input[k] = activation.value(input[k]);
      });
      if (args.dropout) args.dropout.apply(key, i, stripe.column, input);
      args.out.template store<kVector>(at, stripe.count, input);
    }
  }
  if (args.partial)
    store_packet<kVector>(args.partial + stripe.block * args.width + stripe.column, stripe.count, dbias);
}

}  // namespace

void launch_bias_activation_fwd(const BiasActivationFwdArgs& a, cudaStream_t stream) {
  with_dtype(a.product.dtype, [&](auto type) {
    using T = decltype(type);
    bool vector = a.width % kPacket<T> == 0;
    for (const ConstArray& array : {a.product, a.bias, ConstArray(a.out), ConstArray(a.pre)}) {
      vector = vector && fits_words(array, a.width);
    }
    launch("bias_activation_fwd", vector ? bias_activation_fwd_kernel<T, true> : bias_activation_fwd_kernel<T, false>,
           ((a.rows - 1) / kRows + 1) * stripes_of<T>(a.width), 1, kThreads, 0, stream, Forward<T>(a));
  });
}

void launch_bias_activation_fwd_splits(const BiasActivationSplitsArgs& a, cudaStream_t stream) {
  const auto launch_of = [&](auto type) {
    using T = decltype(type);
    const Splits<T> args(a);
    launch("bias_activation_fwd_splits",
           args.epilogue.is_vector ? bias_activation_fwd_kernel_splits<T, true>
                                   : bias_activation_fwd_kernel_splits<T, false>,
           a.rows * stripes_of<T>(a.width), 1, kThreads, 0, stream, args);
  };
  a.out.dtype == Dtype::kHalf ? launch_of(__half()) : launch_of(__nv_bfloat16());
}

int64_t bias_activation_bwd_programs(int64_t rows, int width, Dtype dtype, int multiprocessors) {
  const int64_t stripes = dtype == Dtype::kFloat ? stripes_of<float>(width) : stripes_of<__half>(width);
  return std::min(rows, std::max<int64_t>(1, kBlocks * multiprocessors / stripes));
}

void launch_bias_activation_bwd(const BiasActivationBwdArgs& a, cudaStream_t stream) {
  with_dtype(a.pre.dtype, [&](auto type) {
    using T = decltype(type);
    const bool vector = a.width % kPacket<T> == 0 && fits_words(a.dout, a.stride_dout) &&
                        fits_words(a.pre, a.stride_pre) && fits_words(a.dpre, a.width) && fits_words(a.out, a.width);
    launch("bias_activation_bwd", vector ? bias_activation_bwd_kernel<T, true> : bias_activation_bwd_kernel<T, false>,
           a.programs * stripes_of<T>(a.width), 1, kThreads, 0, stream, Backward<T>(a));
  });
}

}  // namespace bertfast
