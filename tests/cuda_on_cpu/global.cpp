#include "global.h"

#include <algorithm>

#include "runtime.h"

namespace bertfast::emulator {
namespace {

bool overlaps_any(Extent tensor, const std::vector<Extent>& others) {
  return std::any_of(others.begin(), others.end(),
                     [&](Extent other) { return tensor.begin < other.end && other.begin < tensor.end; });
}

void add(Extent tensor, std::vector<Extent>& known) {
  const auto is_same = [&](Extent other) { return other.begin == tensor.begin && other.end == tensor.end; };
  if (std::none_of(known.begin(), known.end(), is_same)) known.push_back(tensor);
}

}  // namespace

GlobalLog global_log;

void GlobalLog::add_written(Extent tensor) {
  if (overlaps_any(tensor, read_only_)) fail("writes to a tensor that load_16 has read, which takes it for read-only");
  add(tensor, written_);
  last_written_ = tensor.begin;
}

void GlobalLog::add_read_only(Extent tensor) {
  if (overlaps_any(tensor, written_)) fail("load_16 reads a tensor that was written to, and takes it for read-only");
  add(tensor, read_only_);
  last_read_only_ = tensor.begin;
}

}  // namespace bertfast::emulator
