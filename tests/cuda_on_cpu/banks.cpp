#include "banks.h"

#include <algorithm>

namespace bertfast::emulator {

BankCounters bank_counters;

void count_request(const uint32_t (&offsets)[32], const uint32_t (&bytes)[32]) {
  const uint32_t widest = *std::max_element(bytes, bytes + 32);
  const int group = widest > 8 ? 8 : widest > 4 ? 16 : 32;
  ++bank_counters.requests;
  for (int first = 0; first < 32; first += group) {
    // A group touches 32 words at most: 8 lanes 4 each, 16 lanes 2, 32 lanes 1, or 2 where an access is not aligned to
    // its size, which the bounds check rules out.
    uint32_t words[64];
    int touched = 0;
    for (int lane = first; lane < first + group; ++lane) {
      if (bytes[lane] == 0) continue;
      const uint32_t last = (offsets[lane] + bytes[lane] - 1) / 4;
      for (uint32_t word = offsets[lane] / 4; word <= last; ++word) words[touched++] = word;
    }
    std::sort(words, words + touched);
    const int distinct = static_cast<int>(std::unique(words, words + touched) - words);
    int in_bank[32] = {}, wavefronts = 0;
    for (int i = 0; i < distinct; ++i) wavefronts = std::max(wavefronts, ++in_bank[words[i] % 32]);
    bank_counters.conflicts += std::max(0, wavefronts - 1);
  }
}

void BankLog::flush(uint32_t mask) {
  size_t most = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) most = std::max(most, lanes_[lane].size());
  }
  for (size_t k = 0; k < most; ++k) {
    uint32_t offsets[32] = {}, bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) == 0 || k >= lanes_[lane].size()) continue;
      offsets[lane] = lanes_[lane][k].offset;
      bytes[lane] = lanes_[lane][k].bytes;
    }
    count_request(offsets, bytes);
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) lanes_[lane].clear();
  }
}

void BankLog::clear() {
  for (auto& lane : lanes_) lane.clear();
}

}  // namespace bertfast::emulator
