// How the launchers' callers, which know torch, hand arrays to launchers, which do not.
#pragma once

#include <cstdint>

namespace bertfast {

// Of rows that kernels normalise.
constexpr int kMaxWidth = 8192;

enum class Dtype : int32_t { kFloat, kHalf, kBFloat16 };

constexpr int64_t item_size(Dtype dtype) {
  return dtype == Dtype::kFloat ? 4 : 2;
}

// Elements from an address on; none where it is null.
struct ConstArray {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
};

struct Array {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat;

  operator ConstArray() const { return {data, dtype}; }
};

// Dropout of an op. Without a seed nothing is dropped.
struct DropoutArgs {
  const int64_t* seed = nullptr;
  double p = 0;
};

}  // namespace bertfast
