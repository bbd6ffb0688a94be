// What follows a linear layer's product: act, dropout, and both their input and their output stored.
#pragma once

#include <cstdint>

#include "activations.cuh"
#include "packed.cuh"
#include "philox.cuh"

namespace bertfast {

template <class T>
struct Ending {
  Target<T> out, pre;  // contiguous, of one width; pre null where it is not wanted
  Dropout<kStreamFeedForward> dropout;
  Formula formula;

  __host__ Ending(const Array& out, const Array& pre, const DropoutArgs& dropout, Formula formula)
      : out(out), pre(pre), dropout(dropout), formula(formula) {}

  // Of `values` of a row from `column` on, which are stored from element `at` on: the first `count`, all or none where
  // 16-byte accesses fit.
  template <int N>
  __device__ __forceinline__ void store(const typename Dropout<kStreamFeedForward>::Key& key, int64_t row, int column,
                                        int64_t at, int count, bool is_vector, float (&values)[N]) const {
    if (pre) store_to(pre, at, count, is_vector, values);
    with_activation(formula, [&](auto activation) {
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = activation.value(values[k]);
    });
    if (dropout) dropout.apply(key, row, column, values);
    store_to(out, at, count, is_vector, values);
  }

 private:
  template <int N>
  __device__ __forceinline__ static void store_to(const Target<T>& target, int64_t at, int count, bool is_vector,
                                                  const float (&values)[N]) {
    if (is_vector) {
      target.template store<true>(at, count, values);
    } else {
      target.template store<false>(at, count, values);
    }
  }
};

}  // namespace bertfast
