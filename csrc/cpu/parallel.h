// Rows shared out among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace bertfast {

constexpr int64_t kGrain = 16384;  // values that pay for waking another thread

// body(begin, end) for parts of the rows that hold kGrain values or more each.
template <class Body>
void parallel_rows(int64_t rows, int64_t width, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
  torch::stable::parallel_for(0, rows, grain, body);
}

}  // namespace bertfast
