// What dropout keeps, by Philox4x64-10 (Salmon et al., SC'11); `kept` of kernels/reference.py states the same.
#pragma once

#include <cstdint>
#include <cstring>

namespace hotrow {

// One place of a network where a step drops. A number of 16 bits below `limit` drops an element, and what is kept is
// multiplied by `scale`.
struct Drop {
  uint64_t seed, place, step, sample;  // sample: the number of row 0
  uint32_t limit;
  float scale;
};

// Multiplies rows [first, last) of x [B, width] by 0 or by scale. A row begins with a block of 16 numbers of its own.
inline void drop(const Drop& own, int64_t width, int64_t first, int64_t last, float* x) {
  const auto blocks = static_cast<uint64_t>(width + 15) / 16;
  for (int64_t b = first; b < last; ++b) {
    uint64_t counter = (own.sample + static_cast<uint64_t>(b)) * blocks;
    for (int64_t j = 0; j < width; j += 16) {
      uint64_t words[4] = {++counter, 0, own.step, 0}, low = own.seed, high = own.place;
#pragma GCC unroll 10
      for (int round = 0; round < 10; ++round, low += 0x9E3779B97F4A7C15u, high += 0xBB67AE8584CAA73Bu) {
        const auto even = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * words[0];
        const auto odd = static_cast<unsigned __int128>(0xCA5A826395121157u) * words[2];
        words[0] = static_cast<uint64_t>(odd >> 64) ^ words[1] ^ low;
        words[2] = static_cast<uint64_t>(even >> 64) ^ words[3] ^ high;
        words[1] = static_cast<uint64_t>(odd);
        words[3] = static_cast<uint64_t>(even);
      }
      uint16_t numbers[16];
      float factors[16];
      std::memcpy(numbers, words, sizeof numbers);
      for (int k = 0; k < 16; ++k) factors[k] = numbers[k] < own.limit ? 0.0f : own.scale;
      const int64_t count = width - j < 16 ? width - j : 16;
      for (int64_t k = 0; k < count; ++k) x[b * width + j + k] *= factors[k];
    }
  }
}

}  // namespace hotrow
