// Indices into arrays of a thread: kernels are compiled with -fsanitize=bounds, which calls this where one is wrong.
#include <cstdint>
#include <string>

#include "runtime.h"

namespace {

// As gcc and clang give them to their own library (ubsan/ubsan_value.h of compiler-rt).
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind;
  uint16_t info;  // of an integer: whether it has a sign, and the logarithm of its bits above that
  char name[1];   // in quotes; longer than that
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

std::string number(const TypeDescriptor& type, uint64_t value) {
  const int unused = 64 - (1 << (type.info >> 1));
  if (unused < 0) return "of more than 64 bits";
  value <<= unused;
  return type.info & 1 ? std::to_string(static_cast<int64_t>(value) >> unused) : std::to_string(value >> unused);
}

}  // namespace

extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(const OutOfBounds& access, uintptr_t index) {
  using namespace bertfast::emulator;
  const Location location{access.location.file, static_cast<int>(access.location.line)};
  fail("index " + number(*access.index, index) + " is outside of an array " + access.array->name + " (" +
       to_string(location) + ")");
}
