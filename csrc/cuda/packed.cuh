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

template <class T, int N>
struct Packet {
  static constexpr int kWord = 16 / static_cast<int>(sizeof(T));
  // Not 4 elements of half precision, as a vector beside fp32 rows has.
  static constexpr bool kIsWords = N % kWord == 0;
  T values[N];

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }
};

// Rounded to nearest even, in pairs: one instruction makes two.
template <class T, int N>
__device__ __forceinline__ Packet<T, N> pack(const float (&values)[N]) {
  Packet<T, N> packet;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
      memcpy(packet.values + i, &pair, 4);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
      memcpy(packet.values + i, &pair, 4);
    } else {
      packet.values[i] = values[i];
      packet.values[i + 1] = values[i + 1];
    }
  }
  return packet;
}

// The first `count` of N elements: all or none with kVector. The others stay undefined.
template <bool kVector, int N, class T>
__device__ __forceinline__ Packet<T, N> load_packet(Global<const T> address, int count) {
  using P = Packet<T, N>;
  P packet;
  if constexpr (kVector && P::kIsWords) {
#pragma unroll
    for (int i = 0; i < N; i += P::kWord) {
      if (count == 0) continue;
      const uint4 word = load_16(reinterpret<const uint4>(address + i));
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
  const P packet = pack<T>(values);
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
  template <int N>
  using Packet = bertfast::Packet<T, N>;

  Global<const T> data;

  __host__ explicit Source(const ConstArray& array) : data(static_cast<const T*>(array.data)) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  // Packet p from `start(p)` on, with `count(p)` elements: all loads are under way before one is waited for.
  template <bool kVector, int P, int N, class Start, class Count>
  __device__ __forceinline__ void load(Packet<N> (&packets)[P], const Start& start, const Count& count) const {
#pragma unroll
    for (int p = 0; p < P; ++p) packets[p] = load_packet<kVector, N, T>(data + start(p), count(p));
  }
};

template <>
struct Source<AnyType> {
  template <int N>
  using Packet = bertfast::Packet<float, N>;

  Global<const void> data;
  Dtype dtype;

  __host__ explicit Source(const ConstArray& array) : data(array.data), dtype(array.dtype) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <bool kVector, int P, int N, class Start, class Count>
  __device__ __forceinline__ void load(Packet<N> (&packets)[P], const Start& start, const Count& count) const {
    with_type(dtype, [&](auto type) {
      using T = decltype(type);
      bertfast::Packet<T, N> loaded[P];
#pragma unroll
      for (int p = 0; p < P; ++p) {
        loaded[p] = load_packet<kVector, N, T>(reinterpret<const T>(data) + start(p), count(p));
      }
#pragma unroll
      for (int p = 0; p < P; ++p) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (k < count(p)) packets[p].values[k] = loaded[p][k];
        }
      }
    });
  }
};

// An array that is written.
template <class T>
struct Target {
  Global<T> data;

  __host__ explicit Target(const Array& array) : data(static_cast<T*>(array.data)) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  // Makes of values what is read back when they have been stored.
  template <int N>
  __device__ __forceinline__ void round(float (&values)[N]) const {
    const auto packet = pack<T>(values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = packet[k];
  }

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

  template <int N>
  __device__ __forceinline__ void round(float (&values)[N]) const {
    with_type(dtype, [&](auto type) {
      const auto packet = pack<decltype(type)>(values);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = packet[k];
    });
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

// Whether 16-byte accesses fit rows of `array`, `stride` elements apart.
inline bool fits_words(const ConstArray& array, int64_t stride) {
  return reinterpret_cast<uintptr_t>(array.data) % 16 == 0 && stride * item_size(array.dtype) % 16 == 0;
}

}  // namespace bertfast
