// Accesses to memory, right ones and wrong ones.
#include "cases.h"

namespace bertfast {
namespace {

__device__ int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Reads n elements and writes as many, whatever the arrays have.
__global__ void double_values(Global<const float> in, Global<float> out, int64_t n) {
  const int64_t i = global_thread();
  if (i < n) out[i] = 2 * in[i];
}

__global__ void copy_by_16(Global<const float> in, Global<float> out, int64_t first) {
  const int64_t i = first + 4 * global_thread();
  store_16(reinterpret<uint4>(out + i), load_16(reinterpret<const uint4>(in + i)));
}

// In place, with the read-only path last.
__global__ void write_then_load_16(Global<float> values) {
  const int64_t i = 4 * global_thread();
  values[i] = 1;
  load_16(reinterpret<const uint4>(values + i));
}

// Through untyped pointers in a struct, as kernels get optional arrays.
struct Untyped {
  Global<const void> in;
  Global<void> out;
};
__global__ void copy_untyped(Untyped arrays) {
  const int64_t i = global_thread();
  if (arrays.in != nullptr && arrays.out) reinterpret<float>(arrays.out)[i] = reinterpret<const float>(arrays.in)[i];
}

// Element n of a piece of as many elements as the block has threads; another piece follows.
__global__ void touch_shared(Global<float> out, int64_t n) {
  SharedMemory shared;
  Shared<float> piece = shared.take<float>(static_cast<int>(blockDim.x));
  Shared<float> other = shared.take<float>(static_cast<int>(blockDim.x));
  piece[threadIdx.x] = static_cast<float>(threadIdx.x);
  other[threadIdx.x] = 0;
  sync_threads();
  out[threadIdx.x] = piece[n];
}

// Each thread reads what it has not written.
template <class T>
__global__ void read_unwritten(Global<T> out) {
  SharedMemory shared;
  out[threadIdx.x] = shared.take<T>(static_cast<int>(blockDim.x))[threadIdx.x];
}

__global__ void take_different_sizes(Global<float> out) {
  SharedMemory shared;
  Shared<float> piece = shared.take<float>(threadIdx.x == 7 ? 8 : 16);
  out[threadIdx.x] = piece[0];
}

// The first element of row n, in 32 bits and in 64.
template <class Offset>
__global__ void read_row(Global<const __half> in, Global<__half> out, int width) {
  const auto row = static_cast<Offset>(blockIdx.x);
  out[threadIdx.x] = in[row * static_cast<Offset>(width) + static_cast<Offset>(threadIdx.x)];
}

// Which thread came when.
__global__ void record_order(Global<int> count, Global<float> out) {
  out[count[0]++] = static_cast<float>(global_thread());
}

__global__ void use_local(Global<float> out, int64_t n) {
  float values[4];
  for (int64_t i = 0; i < n; ++i) values[i] = 1;
  out[threadIdx.x] = values[threadIdx.x % 4];
}

// Element n of an array in registers.
__global__ void index_local(Global<float> out, int64_t n) {
  float values[4] = {0, 1, 2, 3};
  values[n] = 7;
  out[threadIdx.x] = values[threadIdx.x % 4];
}

}  // namespace
}  // namespace bertfast

using namespace bertfast;

BERTFAST_CASE(double_values, double_values, c.array<float>(0), c.array<float>(1), c.n)
BERTFAST_CASE(copy_by_16, copy_by_16, c.array<float>(0), c.array<float>(1), c.n)
BERTFAST_CASE(write_then_load_16, write_then_load_16, c.array<float>(0))
BERTFAST_CASE(copy_untyped, copy_untyped, Untyped{c.arrays[0], c.arrays[1]})
BERTFAST_CASE(touch_shared, touch_shared, c.array<float>(0), c.n)
BERTFAST_CASE(read_unwritten_float, read_unwritten<float>, c.array<float>(0))
BERTFAST_CASE(read_unwritten_half, read_unwritten<__half>, c.array<__half>(0))
BERTFAST_CASE(read_unwritten_bfloat16, read_unwritten<__nv_bfloat16>, c.array<__nv_bfloat16>(0))
BERTFAST_CASE(take_different_sizes, take_different_sizes, c.array<float>(0))
BERTFAST_CASE(read_row_int, read_row<int>, c.array<__half>(0), c.array<__half>(1), static_cast<int>(c.n))
BERTFAST_CASE(read_row_int64, read_row<int64_t>, c.array<__half>(0), c.array<__half>(1), static_cast<int>(c.n))
BERTFAST_CASE(record_order, record_order, c.array<int>(0), c.array<float>(1))
BERTFAST_CASE(use_local, use_local, c.array<float>(0), c.n)
BERTFAST_CASE(index_local, index_local, c.array<float>(0), c.n)
