// How the tests call kernels: by name, with up to three arrays, a number and the launch's dimensions.
#pragma once

#include "intrinsics.cuh"

namespace bertfast {

struct Case {
  void* arrays[3];
  int64_t n;
  int64_t grid_x, grid_y;
  int threads, shared;

  template <class T>
  T* array(int i) const {
    return static_cast<T*>(arrays[i]);
  }
};

// The error's text, or null.
template <class Body>
const char* error_of(const Body& body) {
  static std::string text;
  try {
    body();
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
  return nullptr;
}

}  // namespace bertfast

// kernel(arguments...), which may use `c`, as the C function `name`.
#define BERTFAST_CASE(name, kernel, ...)                                                                          \
  extern "C" __attribute__((visibility("default"))) const char* name(const bertfast::Case& c) {                   \
    return bertfast::error_of(                                                                                    \
        [&] { bertfast::launch(#name, kernel, c.grid_x, c.grid_y, c.threads, c.shared, nullptr, __VA_ARGS__); }); \
  }
