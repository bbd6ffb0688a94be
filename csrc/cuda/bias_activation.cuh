// What follows a linear layer's sums.
#pragma once

#include <cstdint>

#include "activations.cuh"
#include "packed.cuh"
#include "philox.cuh"

namespace bertfast {

// Behind a linear layer's sums: what the activation gets is stored where it is wanted, then dropout(act(...)).
template <class T>
struct Epilogue {
  Target<T> out, pre;  // rows of one width, one behind the other; pre null where it is not wanted
  Dropout<kStreamFeedForward> dropout;
  Formula formula;
  bool is_vector;  // whether 16-byte accesses fit both

  __host__ Epilogue(const Array& out, const Array& pre, const DropoutArgs& dropout, Formula formula, int64_t width)
      : out(out),
        pre(pre),
        dropout(dropout),
        formula(formula),
        is_vector(width % kPacket<T> == 0 && fits_words(out, width) && fits_words(pre, width)) {}

  // `values` of a row from `column` on, at element `at`: the first `count`, all or none where they are words.
  template <int N>
  __device__ __forceinline__ void store(const typename Dropout<kStreamFeedForward>::Key& key, int64_t row, int column,
                                        int64_t at, int count, bool as_words, float (&values)[N]) const {
    if (pre) store_to(pre, at, count, as_words, values);
    with_activation(formula, [&](auto activation) {
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = activation.value(values[k]);
    });
    if (dropout) dropout.apply(key, row, column, values);
    store_to(out, at, count, as_words, values);
  }

 private:
  template <int N>
  __device__ __forceinline__ static void store_to(const Target<T>& target, int64_t at, int count, bool as_words,
                                                  const float (&values)[N]) {
    if (as_words) {
      target.template store<true>(at, count, values);
    } else {
      target.template store<false>(at, count, values);
    }
  }
};

}  // namespace bertfast
