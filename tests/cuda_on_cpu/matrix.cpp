#include "matrix.h"

#include <cstring>
#include <vector>

namespace bertfast::emulator {

int64_t products = 0;

namespace {

struct Load {
  uintptr_t row;
  uint32_t* fragment;
};

template <bool kTransposed>
void complete_load(void* (&lanes)[kWarpSize], uint32_t) {
  const auto base = reinterpret_cast<uintptr_t>(block.shared);
  for (int i = 0; i < 4; ++i) {
    uint16_t matrix[8][8];
    uint32_t offsets[32] = {}, bytes[32] = {};
    for (int row = 0; row < 8; ++row) {
      const uintptr_t address = static_cast<Load*>(lanes[i * 8 + row])->row;
      std::memcpy(matrix[row], reinterpret_cast<const void*>(address), 16);
      offsets[row] = static_cast<uint32_t>(address - base);
      bytes[row] = 16;
    }
    count_request(offsets, bytes);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int major = lane / 4, minor = lane % 4 * 2;
      const uint16_t low = kTransposed ? matrix[minor][major] : matrix[major][minor];
      const uint16_t high = kTransposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
      static_cast<Load*>(lanes[lane])->fragment[i] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

// What the hardware's conversion costs in software is most of a product's time.
const float* halves() {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (int bits = 0; bits < 1 << 16; ++bits) {
      const __half_raw raw{static_cast<unsigned short>(bits)};
      values[bits] = __half2float(__half(raw));
    }
    return values;
  }();
  return table.data();
}

template <bool kHalf>
float widen(uint32_t bits) {
  if constexpr (kHalf) {
    return halves()[bits];
  } else {
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
}

struct Product {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

// Eight products are added to a number at once, as from 8.0 on (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior
// of NVIDIA tensor cores", 2021), but rounded to nearest where tensor cores truncate.
template <bool kHalf>
void complete_product(void* (&lanes)[kWarpSize], uint32_t) {
  ++products;
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const Product& own = *static_cast<Product*>(lanes[lane]);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r)
        a[group + r % 2 * 8][pair + r / 2 * 8 + i] = widen<kHalf>(own.a[r] >> 16 * i & 0xffff);
      for (int r = 0; r < 2; ++r) b[pair + r * 8 + i][group] = widen<kHalf>(own.b[r] >> 16 * i & 0xffff);
      for (int r = 0; r < 2; ++r) c[group + r * 8][pair + i] = own.c[2 * r + i];
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int step = 0; step < 16; step += 8) {
      double sums[8];
      for (int n = 0; n < 8; ++n) sums[n] = c[m][n];
      for (int k = step; k < step + 8; ++k) {
        for (int n = 0; n < 8; ++n) sums[n] += static_cast<double>(a[m][k] * b[k][n]);
      }
      for (int n = 0; n < 8; ++n) c[m][n] = static_cast<float>(sums[n]);
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const Product& own = *static_cast<Product*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) own.c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

}  // namespace

void load_matrices(uint32_t (&fragment)[4], uintptr_t row, bool transposed, Location location) {
  settle_access();
  note_access(row, 16, Access::kRead);
  Load own{row, fragment};
  if (transposed) {
    meet("load_matrix_x4_transposed", kFullWarp, &own, complete_load<true>, location);
  } else {
    meet("load_matrix_x4", kFullWarp, &own, complete_load<false>, location);
  }
}

void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_half, Location location) {
  Product own{c, a, b};
  meet("multiply_16x8x16", kFullWarp, &own, is_half ? complete_product<true> : complete_product<false>, location);
}

}  // namespace bertfast::emulator
