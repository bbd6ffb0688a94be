#pragma once

#include <cstdint>
#include <tuple>

#include "device_limits.h"

namespace bertfast {
namespace emulator {

struct Grid {
  int64_t x, y;
  int threads, shared;
};

// Runs body(context) in every thread of the grid, one block after the other.
void run(const char* kernel, const Grid& grid, void (*body)(const void*), const void* context);

}  // namespace emulator

template <class Stream, class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t grid_x, int64_t grid_y, int threads, int shared,
            Stream, const Arguments&... arguments) {
  check_grid(name, grid_x, grid_y);
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } const call{kernel, {Parameters(arguments)...}};
  const auto body = [](const void* context) {
    const Call& call = *static_cast<const Call*>(context);
    std::apply(call.kernel, call.parameters);
  };
  emulator::run(name, {grid_x, grid_y, threads, shared}, body, &call);
}

}  // namespace bertfast
