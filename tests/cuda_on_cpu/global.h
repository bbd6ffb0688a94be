// Accesses to global memory: how many there are, and that nothing is written which load_16 reads. That takes the
// read-only path, so that on the device either value may come of it. Whole tensors are held to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bertfast::emulator {

struct Extent {
  uintptr_t begin = 0, end = 0;
};

// Of one launch.
class GlobalLog {
 public:
  int64_t wide = 0;   // accesses of 16 bytes
  int64_t other = 0;  // of less

  void count(size_t bytes) { ++(bytes == 16 ? wide : other); }
  void note_written(Extent tensor) {
    if (tensor.begin != last_written_) add_written(tensor);
  }
  void note_read_only(Extent tensor) {
    if (tensor.begin != last_read_only_) add_read_only(tensor);
  }

 private:
  void add_written(Extent tensor);
  void add_read_only(Extent tensor);

  // Almost every access is to the tensor of the one before, or there are few.
  uintptr_t last_written_ = 0, last_read_only_ = 0;
  std::vector<Extent> written_, read_only_;
};

extern GlobalLog global_log;

}  // namespace bertfast::emulator
