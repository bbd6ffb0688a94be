// Elements in memory and their values in fp32. A kernel reads and writes packets of N neighbouring elements: in 16-byte
// accesses where addresses, strides and the width allow it (kVector), else one element at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "arrays.h"
#include "intrinsics.cuh"

namespace bertfast {

// The element type of kernels whose arrays have dtypes of their own, each known at run time only: mixed inputs are
// served by one more instantiation, not by one for each mix.
struct AnyType {};

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// Rounded to nearest even.
template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

template <class T, int N>
struct Packet {
  static constexpr int kWord = 16 / static_cast<int>(sizeof(T));
  // Else `is_vector` lets no kernel come to it by kVector.
  static constexpr bool kIsWords = N % kWord == 0;
  T values[N];

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }
};

// The first `count` of N elements: all or none with kVector. The others stay undefined. kIsStream: see
// load_16_streaming.
template <bool kVector, bool kIsStream, int N, class T>
__device__ __forceinline__ Packet<T, N> load_packet(Global<const T> address, int count) {
  using P = Packet<T, N>;
  P packet;
  if constexpr (kVector && P::kIsWords) {
#pragma unroll
    for (int i = 0; i < N; i += P::kWord) {
      if (count == 0) continue;
      const Global<const uint4> source = reinterpret<const uint4>(address + i);
      const uint4 word = kIsStream ? load_16_streaming(source) : load_16(source);
      memcpy(packet.values + i, &word, 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) packet.values[i] = address[i];
    }
  }
  return packet;
}

template <bool kVector, int N, class T>
__device__ __forceinline__ void store_packet(Global<T> address, int count, const float (&values)[N]) {
  using P = Packet<T, N>;
  P packet;
#pragma unroll
  for (int i = 0; i < N; ++i) packet.values[i] = from_float<T>(values[i]);
  if constexpr (kVector && P::kIsWords) {
#pragma unroll
    for (int i = 0; i < N; i += P::kWord) {
      if (count == 0) continue;
      uint4 word;
      memcpy(&word, packet.values + i, 16);
      store_16(reinterpret<uint4>(address + i), word);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) address[i] = packet.values[i];
    }
  }
}

// body(T()) for the type of a dtype; `with_dtype` is the same on the host.
template <class Body>
__device__ __forceinline__ void with_type(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat:
      return body(float());
    case Dtype::kHalf:
      return body(__half());
    case Dtype::kBFloat16:
      return body(__nv_bfloat16());
  }
}

template <class Body>
void with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat:
      return body(float());
    case Dtype::kHalf:
      return body(__half());
    case Dtype::kBFloat16:
      return body(__nv_bfloat16());
  }
}

// An array that is read.
template <class T>
struct Source {
  Global<const T> data;

  __host__ explicit Source(const ConstArray& array) : data(static_cast<const T*>(array.data)) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <bool kVector, int N>
  __device__ __forceinline__ Packet<T, N> load(int64_t i, int count) const {
    return load_packet<kVector, true, N, T>(data + i, count);
  }
};

template <>
struct Source<AnyType> {
  Global<const void> data;
  Dtype dtype;

  __host__ explicit Source(const ConstArray& array) : data(array.data), dtype(array.dtype) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <bool kVector, int N>
  __device__ __forceinline__ Packet<float, N> load(int64_t i, int count) const {
    Packet<float, N> widened;
    with_type(dtype, [&](auto type) {
      using T = decltype(type);
      const Packet<T, N> packet = load_packet<kVector, false, N, T>(reinterpret<const T>(data) + i, count);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k < count) widened.values[k] = packet[k];
      }
    });
    return widened;
  }
};

// An array that is written.
template <class T>
struct Target {
  Global<T> data;

  __host__ explicit Target(const Array& array) : data(static_cast<T*>(array.data)) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  // What a stored value is read back as.
  __device__ __forceinline__ float round(float value) const { return to_float(from_float<T>(value)); }

  template <bool kVector, int N>
  __device__ __forceinline__ void store(int64_t i, int count, const float (&values)[N]) const {
    store_packet<kVector, N, T>(data + i, count, values);
  }
};

template <>
struct Target<AnyType> {
  Global<void> data;
  Dtype dtype;

  __host__ explicit Target(const Array& array) : data(array.data), dtype(array.dtype) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  __device__ __forceinline__ float round(float value) const {
    float rounded = value;
    with_type(dtype, [&](auto type) { rounded = to_float(from_float<decltype(type)>(value)); });
    return rounded;
  }

  template <bool kVector, int N>
  __device__ __forceinline__ void store(int64_t i, int count, const float (&values)[N]) const {
    with_type(dtype, [&](auto type) {
      using T = decltype(type);
      store_packet<kVector, N, T>(reinterpret<T>(data) + i, count, values);
    });
  }
};

// Elements of a packet: what 16 bytes hold of a type, 8 of any.
template <class T>
constexpr int kPacket = 8;
template <>
inline constexpr int kPacket<float> = 4;

// Whether rows of `array`, `stride` elements apart, can be read and written in packets of `n` by 16-byte accesses.
inline bool is_vector(const ConstArray& array, int64_t stride, int n) {
  const int64_t size = item_size(array.dtype);
  return array.data == nullptr ||
         (reinterpret_cast<uintptr_t>(array.data) % 16 == 0 && stride * size % 16 == 0 && n * size % 16 == 0);
}

}  // namespace bertfast
