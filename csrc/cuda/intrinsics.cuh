// What kernels need of the device, and the only place with PTX or device-only intrinsics.
//
// Kernels are written against these names alone, so that one source compiles twice: by nvcc for GPUs, and by a C++
// compiler behind tests/cuda_on_cpu/emulator.h, which stands for the device and checks what the device would not:
// bounds, alignment, participation in barriers and warp operations. For that pointers of kernels are Global<T> and
// Shared<T>, plain pointers here; shared memory is taken from SharedMemory; launches go through launch().
#pragma once

#ifdef BERTFAST_CUDA_ON_CPU
#include "emulator.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "device_limits.h"

namespace bertfast {

template <class T>
using Global = T*;
template <class T>
using Shared = T*;

// The same address seen as other elements.
template <class U, class T>
__host__ __device__ __forceinline__ U* reinterpret(T* pointer) {
  return reinterpret_cast<U*>(pointer);
}

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x) % kWarpSize;
}
__device__ __forceinline__ int warp() {
  return static_cast<int>(threadIdx.x) / kWarpSize;
}

// ---- global memory, 16 bytes at a time; the address must be a multiple of 16

// For what is read once, or once by each multiprocessor: it takes no place in L1. Volatile, because the compiler takes
// loads of a loop that do not change, such as those of weights, in front of it, and there may be more than registers.
__device__ __forceinline__ uint4 load_16(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ __forceinline__ void store_16(uint4* address, uint4 value) {
  *address = value;
}

// ---- shared memory

// The block's dynamic shared memory, handed out piece by piece, each from a multiple of 16 bytes on. Every thread takes
// the same pieces in the same order; `launch` is told the sum of their `shared_bytes`.
class SharedMemory {
 public:
  template <class T>
  __device__ __forceinline__ T* take(int count) {
    extern __shared__ __align__(128) unsigned char memory[];
    T* piece = reinterpret_cast<T*>(memory + used_);
    used_ += (count * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
    return piece;
  }

 private:
  int used_ = 0;
};

// ---- threads of a block and a warp

__device__ __forceinline__ void sync_threads() {
  __syncthreads();
}
__device__ __forceinline__ void sync_warp(uint32_t mask = kFullWarp) {
  __syncwarp(mask);
}

// Barrier `id` (1 to 15; 0 is that of sync_threads) of `threads` threads, a multiple of the warp size: those that wait
// for it and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <class T>
__device__ __forceinline__ T shuffle(T value, int source, uint32_t mask = kFullWarp) {
  return __shfl_sync(mask, value, source);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask, uint32_t mask = kFullWarp) {
  return __shfl_xor_sync(mask, value, lane_mask);
}
template <class T>
__device__ __forceinline__ T shuffle_down(T value, int delta, uint32_t mask = kFullWarp) {
  return __shfl_down_sync(mask, value, delta);
}
// `value`, the same in all lanes, as one that the compiler knows to be: what is decided by it needs no code for the
// case that lanes part.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(kFullWarp, value, 0);
}
__device__ __forceinline__ uint32_t ballot(bool predicate, uint32_t mask = kFullWarp) {
  return __ballot_sync(mask, predicate);
}

// ---- arithmetic

// 1 / x to one unit in the last place, for x whose reciprocal is no subnormal number: a division proper has a way for
// those, which costs a call.
__device__ __forceinline__ float reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// 2^x to two units in the last place; 0 where that is below 2^-126, for which exp2f would scale before and after.
__device__ __forceinline__ float exp2_approximate(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// `value`, of which the compiler knows nothing: addresses made from the counter of a loop would else all be kept, and
// advanced, in registers of their own.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The number of the lowest bit that is set, of one or more.
__device__ __forceinline__ int lowest_bit(uint32_t bits) {
  return __ffs(static_cast<int>(bits)) - 1;
}

// The upper half of the 64-bit product.
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) {
  return __umulhi(a, b);
}

// ---- asynchronous copies from global to shared memory

// 16 bytes, or 16 zeros where not `valid`; visible to this thread after copy_async_wait, to others after a barrier
// more.
template <class T>
__device__ __forceinline__ void copy_async_16(T* shared, const T* global, bool valid = true) {
  const auto destination = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(global), "r"(bytes) : "memory");
}
// The same of 4 bytes.
template <class T>
__device__ __forceinline__ void copy_async_4(T* shared, const T* global, bool valid = true) {
  const auto destination = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(global), "r"(bytes) : "memory");
}
// Closes a group of the copies since the last one.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the `Pending` youngest groups are under way.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- matrix products of a warp: fragments as the PTX ISA lays them out

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
template <class T>
__device__ __forceinline__ void load_matrix_x4(uint32_t (&fragment)[4], const T* row) {
  static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
// The same, each matrix transposed.
template <class T>
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&fragment)[4], const T* row) {
  static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// c += a b for a (16, 16) by rows and b (16, 8) by columns, T half or bf16, sums in fp32.
template <class T>
__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "half precision");
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// ---- launches

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else torch's next check of a launch reports this error as its own
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// kernel(arguments...) on (grid_x, grid_y) blocks of `threads`, with `shared` bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t grid_x, int64_t grid_y, int threads, int shared,
            cudaStream_t stream, const Arguments&... arguments) {
  check_grid(name, grid_x, grid_y);
  constexpr int kStaticLimit = 48 * 1024;
  if (shared > kStaticLimit) {
    // Always the same: it is the kernel's, and another thread of the host may launch it with less at the same time.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared), name);
  }
  std::tuple<Parameters...> values(arguments...);
  const cudaError_t status = std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        const dim3 grid(static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y));
        return cudaLaunchKernel(kernel, grid, dim3(threads), pointers, shared, stream);
      },
      values);
  check(status, name);
}

}  // namespace bertfast

#endif
