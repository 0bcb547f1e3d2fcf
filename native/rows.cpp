// Initial rows as a function of (key, row, column); contract in hotrow/kernels.h.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). The multipliers and
// key increments are the paper's.
#include <hotrow/kernels.h>
#include <hotrow/storage.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int kBlocks = 16;  // computed side by side in vectors

// Word w of the Philox block with the counter of one row and group of four columns, for kBlocks of them.
struct Blocks {
  uint32_t word[4][kBlocks];
};

inline void philox(Blocks& blocks, uint64_t key) {
  auto& c = blocks.word;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    uint32_t next[4][kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t right = uint64_t{0xCD9E8D57} * c[2][i];
      next[0][i] = static_cast<uint32_t>(right >> 32) ^ c[1][i] ^ key0;
      next[1][i] = static_cast<uint32_t>(right);
    }
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t left = uint64_t{0xD2511F53} * c[0][i];
      next[2][i] = static_cast<uint32_t>(left >> 32) ^ c[3][i] ^ key1;
      next[3][i] = static_cast<uint32_t>(left);
    }
    __builtin_memcpy(c, next, sizeof next);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

// value[k][i]: the 24 leading bits of word k of block i as an exact float in [-1, 1), times the bound.
inline void uniform(const Blocks& blocks, float bound, float (&value)[4][kBlocks]) {
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < kBlocks; ++i) {
      value[k][i] = (static_cast<float>(static_cast<int32_t>(blocks.word[k][i] >> 8)) * 0x1p-23f - 1.0f) * bound;
    }
  }
}

// Writes four blocks to their positions; width[i] says how many columns are left from there.
inline void put_four(const float (&value)[4][kBlocks], int first, float* const* place, const int64_t* width) {
  const bool whole = width[first] >= 4 && width[first + 1] >= 4 && width[first + 2] >= 4 && width[first + 3] >= 4;
  if (whole) {
    store_transposed(load<4>(value[0] + first), load<4>(value[1] + first), load<4>(value[2] + first),
                     load<4>(value[3] + first), place[first], place[first + 1], place[first + 2], place[first + 3]);
    return;
  }
  for (int i = first; i < first + 4; ++i) {
    for (int64_t k = 0; k < width[i] && k < 4; ++k) place[i][k] = value[k][i];
  }
}

}  // namespace

void fill_uniform(uint64_t key, int64_t first, int64_t step, int64_t count, int64_t column, int64_t dim, float bound,
                  int64_t zero_rows, float* out) {
  const int64_t quads = (dim + 3) / 4;
  uint64_t number = static_cast<uint64_t>(first);
  int64_t row = 0, quad = 0;
  while (row < count) {
    Blocks blocks;
    float* place[kBlocks];
    int64_t width[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      blocks.word[0][i] = static_cast<uint32_t>(number);
      blocks.word[1][i] = static_cast<uint32_t>(number >> 32);
      blocks.word[2][i] = static_cast<uint32_t>(column / 4 + quad);
      blocks.word[3][i] = 0;
      place[i] = row < count ? out + row * dim + quad * 4 : out;
      width[i] = row < count ? dim - quad * 4 : 0;
      if (++quad == quads) quad = 0, ++row, number += static_cast<uint64_t>(step);
    }
    philox(blocks, key);
    float value[4][kBlocks];
    uniform(blocks, bound, value);
    for (int i = 0; i < kBlocks; i += 4) put_four(value, i, place, width);
  }
  // A random number below zero times a bound of 0 is -0.0, and a table that starts at zero has +0.0.
  const int64_t starting = zero_rows > first ? (zero_rows - first + step - 1) / step : 0;
  const int64_t zeros = bound != 0.0f && starting < count ? starting : count;
  for (int64_t j = 0; j < zeros * dim; ++j) out[j] = 0.0f;
}

void store_row(float* row, int64_t dim, Storage storage, void* to, uint16_t* low) {
  switch (storage) {
    case Storage::float32:
      __builtin_memcpy(to, row, static_cast<size_t>(dim) * sizeof(float));
      break;
    case Storage::float16:
      put_back(row, static_cast<Half*>(to), dim);
      as_floats(static_cast<Half*>(to), dim, row);
      break;
    case Storage::split:
      put_back(row, Joined{static_cast<Upper*>(to), low}, dim);
      break;
  }
}

}  // namespace hotrow::HOTROW_ISA
