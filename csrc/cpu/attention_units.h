// Units of attention, shared out among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention.h"
#include "check.h"
#include "tensor.h"

namespace bertfast {

// Queries of a unit: one has to convert all keys and values, which is the work of some 8 queries, and of some 30 in
// bf16, whose products are that much faster.
constexpr int64_t kUnitQueries = 384;
constexpr int64_t kAllQueries = INT64_MAX / 2;
// Where a batch has, for each thread, at least so many times the work of its largest (sequence, head), the threads are
// balanced without cutting queries.
constexpr int64_t kUnitsPerThread = 8;
// Query-key pairs times the head dim that pay for waking another thread.
constexpr int64_t kThreadWork = 1 << 18;

struct Sequence {
  int64_t begin_q, begin_k, length_q, length_k;
};

// Query-key pairs times the head dim, the conversion of keys counted as queries.
inline int64_t work_of(const std::vector<AttentionUnit>& units, int64_t head_dim) {
  int64_t work = 0;
  for (const AttentionUnit& unit : units) work += (unit.count + kQueryRows) * unit.length_k * head_dim;
  return work;
}

// The units of all (sequence, head), the largest first: those at the end fill up what others left unequal.
inline std::vector<AttentionUnit> units_of(const std::vector<Sequence>& sequences, int64_t heads, bool is_packed,
                                           int64_t rows_q, bool bottom_right, int64_t most_queries) {
  std::vector<AttentionUnit> units;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto [begin_q, begin_k, length_q, length_k] = sequences[i];
    // Without queries there are still gradients of keys to be set to 0.
    const int64_t parts = std::max<int64_t>(1, (length_q + most_queries - 1) / most_queries);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = length_q * part / parts;
        const int64_t stats = is_packed ? head * rows_q + begin_q : (static_cast<int64_t>(i) * heads + head) * rows_q;
        units.push_back({static_cast<int64_t>(i), head, begin_q, begin_k, length_q, length_k, first,
                         length_q * (part + 1) / parts - first, stats, bottom_right ? length_k - length_q : 0});
      }
    }
  }
  std::stable_sort(units.begin(), units.end(), [](const AttentionUnit& a, const AttentionUnit& b) {
    return a.count * a.length_k > b.count * b.length_k;
  });
  return units;
}

// kAllQueries where whole sequences balance the threads, else kUnitQueries.
inline int64_t unit_queries(const std::vector<Sequence>& sequences, int64_t heads) {
  int64_t pairs = 0, most = 0;
  for (const Sequence& sequence : sequences) {
    pairs += heads * sequence.length_q * sequence.length_k;
    most = std::max(most, sequence.length_q * sequence.length_k);
  }
  return pairs >= kUnitsPerThread * torch::stable::get_num_threads() * most ? kAllQueries : kUnitQueries;
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

inline std::unique_ptr<float, Free> aligned_floats(int64_t size) {
  const size_t bytes = (size * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<float*>(std::aligned_alloc(kAlignment, bytes));
  STD_TORCH_CHECK(memory, "attention: out of memory, ", bytes, " bytes");
  return std::unique_ptr<float, Free>(memory);
}

// Threads take units one after the other, so that a slow one takes fewer.
template <class Args, class Unit>
void run_units(void (*kernel)(const Args&, const Unit&, float*), const Args& args, const std::vector<Unit>& units,
               int64_t work, int64_t workspace) {
  const int64_t threads = std::clamp<int64_t>(work / kThreadWork, 1, torch::stable::get_num_threads());
  std::atomic<size_t> next{0};
  torch::stable::parallel_for(0, std::min<int64_t>(threads, units.size()), 1, [&](int64_t, int64_t) {
    const auto memory = aligned_floats(workspace);
    for (size_t i = next++; i < units.size(); i = next++) kernel(args, units[i], memory.get());
  });
}

}  // namespace bertfast
