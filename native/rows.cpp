// Initial rows as a function of (key, row, column); contract in hotrow/kernels.h.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). The multipliers and
// key increments are the paper's.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int kBlocks = 16;  // Philox blocks computed side by side, so that the compiler can use vectors

struct Counters {
  uint32_t word[4][kBlocks];
};

inline void philox(Counters& c, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t left = uint64_t{0xD2511F53} * c.word[0][i];
      const uint64_t right = uint64_t{0xCD9E8D57} * c.word[2][i];
      c.word[0][i] = static_cast<uint32_t>(right >> 32) ^ c.word[1][i] ^ key0;
      c.word[1][i] = static_cast<uint32_t>(right);
      c.word[2][i] = static_cast<uint32_t>(left >> 32) ^ c.word[3][i] ^ key1;
      c.word[3][i] = static_cast<uint32_t>(left);
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

// The 24 leading bits as an exact float in [-1, 1), times the bound.
inline float uniform(uint32_t x, float bound) {
  return (static_cast<float>(static_cast<int32_t>(x >> 8)) * 0x1p-23f - 1.0f) * bound;
}

}  // namespace

void fill_uniform(uint64_t key, int64_t first, int64_t count, int64_t dim, float bound, int64_t zero_rows, float* out) {
  const int64_t quads = (dim + 3) / 4;
  for (int64_t start = 0; start < count * quads; start += kBlocks) {
    Counters c;
    int64_t row = first + start / quads, quad = start % quads;
    float* place[kBlocks];
    int width[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      const bool wanted = start + i < count * quads;
      place[i] = wanted ? out + (row - first) * dim + quad * 4 : out;
      width[i] = !wanted ? 0 : dim - quad * 4 < 4 ? static_cast<int>(dim - quad * 4) : 4;
      c.word[0][i] = static_cast<uint32_t>(row);
      c.word[1][i] = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
      c.word[2][i] = static_cast<uint32_t>(quad);
      c.word[3][i] = 0;
      if (++quad == quads) quad = 0, ++row;
    }
    philox(c, key);
    float value[4][kBlocks];
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < kBlocks; ++i) value[k][i] = uniform(c.word[k][i], bound);
    }
    for (int i = 0; i < kBlocks; ++i) {
      for (int k = 0; k < width[i]; ++k) place[i][k] = value[k][i];
    }
  }
  const int64_t zeros = zero_rows - first < count ? zero_rows - first : count;
  for (int64_t j = 0; j < zeros * dim; ++j) out[j] = 0.0f;
}

}  // namespace hotrow::HOTROW_ISA
