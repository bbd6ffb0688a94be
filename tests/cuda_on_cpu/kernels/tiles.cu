// A tile of 32 x 32 numbers transposed by a warp, with as many bank conflicts as its layout has.
#include "cases.h"

namespace bertfast {
namespace {

constexpr int kTile = 32;

struct Plain {
  __device__ static int at(int row, int column) { return row * kTile + column; }
};
struct Padded {
  __device__ static int at(int row, int column) { return row * (kTile + 1) + column; }
};
struct Swizzled {
  __device__ static int at(int row, int column) { return row * kTile + (column ^ row); }
};

template <class Layout, class T>
__global__ void transpose(Global<const T> in, Global<T> out) {
  SharedMemory shared;
  Shared<T> tile = shared.take<T>(kTile * (kTile + 1));
  for (int row = 0; row < kTile; ++row) tile[Layout::at(row, lane())] = in[row * kTile + lane()];
  sync_warp();
  for (int row = 0; row < kTile; ++row) out[row * kTile + lane()] = tile[Layout::at(lane(), row)];
}

// Lane i reads 16 bytes, or 8, `n` bytes from those of lane i - 1.
template <class T>
__global__ void read_apart(Global<T> out, int64_t n) {
  SharedMemory shared;
  Shared<unsigned char> bytes = shared.take<unsigned char>(kWarpSize * static_cast<int>(n) + 16);
  const Shared<const T> own = reinterpret<const T>(bytes + lane() * n);
  out[lane()] = own[0];
}

}  // namespace
}  // namespace bertfast

using namespace bertfast;

BERTFAST_CASE(transpose_plain, (transpose<Plain, float>), c.array<float>(0), c.array<float>(1))
BERTFAST_CASE(transpose_padded, (transpose<Padded, float>), c.array<float>(0), c.array<float>(1))
BERTFAST_CASE(transpose_swizzled, (transpose<Swizzled, float>), c.array<float>(0), c.array<float>(1))
BERTFAST_CASE(read_16_apart, read_apart<uint4>, c.array<uint4>(0), c.n)
BERTFAST_CASE(read_8_apart, read_apart<uint2>, c.array<uint2>(0), c.n)
BERTFAST_CASE(read_4_apart, read_apart<float>, c.array<float>(0), c.n)
