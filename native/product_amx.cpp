// Matrix products of bfloat16 on the tiles of AMX; contract in hotrow/pairs.h. Compiled once, for processors with
// amx_bf16 and avx512_bf16; the tests run it without them too, on tests/emulated_tiles.h.
//
// Tiles 0 to 5 are the sums of 32 rows by 48 columns of C, tile 6 is 16 rows by 16 pairs of A, and tile 7 is 16 pairs
// by 16 columns of a panel of B. All are whole: rows and pairs that A lacks, and pairs that B lacks, are zeros in a
// copy.
#include <hotrow/pair_lanes.h>
#ifdef HOTROW_EMULATED_TILES
#include "../tests/emulated_tiles.h"
#endif

HOTROW_DECLARE_PAIR_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int64_t kSide = 16;  // of a tile: rows, and pairs or floats of a row
constexpr int64_t kRows = 2 * kSide;
constexpr int64_t kPanelBytes = kPanelColumns * sizeof(Pair);  // of a row; as many as of a row of sums
static_assert(kPanelColumns == 3 * kSide && kMostPairs % kSide == 0);

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) constexpr TileConfig kConfig;

// GCC's _tile_loadd does not say that it reads memory: what it reads may be written neither too late nor, afterwards,
// too early.
inline void settle_memory() { asm volatile("" ::: "memory"); }

inline int64_t whole_tiles(int64_t n) { return (n + kSide - 1) / kSide * kSide; }

// A: row r's pairs from k on, k a multiple of kSide, are at[r * row_step + k * pair_step] and those after it.
struct Left {
  const Pair* at;
  int64_t row_step, pair_step;
  int64_t stride;           // from row to row of a tile
  int64_t num_rows, depth;  // that can be read
};
struct Tile {
  const Pair* at;
  int64_t bytes;  // from row to row
};

// The tile of A at row r and pair k: where it is, or its copy in `room`.
inline Tile tile_of(const Left& a, int64_t r, int64_t k, Pair* room) {
  const Pair* at = a.at + r * a.row_step + k * a.pair_step;
  if (r + kSide <= a.num_rows && k + kSide <= a.depth) return {at, a.stride * static_cast<int64_t>(sizeof(Pair))};
  settle_memory();
  const __mmask16 lanes = first_lanes(a.depth - k);
  for (int64_t i = 0; i < kSide; ++i)
    _mm512_storeu_si512(room + i * kSide, _mm512_maskz_loadu_epi32(r + i < a.num_rows ? lanes : 0, at + i * a.stride));
  settle_memory();
  return {room, kSide * static_cast<int64_t>(sizeof(Pair))};
}

// The intrinsics take numbers of tiles as literals. ADD: to the sums in `tile`, the product of A's tile in 6.
#define HOTROW_ZERO(tile, row, part) _tile_zero(tile);
#define HOTROW_STORE(tile, row, part) _tile_stored(tile, sums[row] + part * kSide, kPanelBytes);
#define HOTROW_ADD(tile, row, part)                \
  if (part * kSide < columns) {                    \
    _tile_loadd(7, b + part * kSide, kPanelBytes); \
    _tile_dpbf16ps(tile, 6, 7);                    \
  }
#define HOTROW_UPPER(DO) DO(0, 0, 0) DO(1, 0, 1) DO(2, 0, 2)
#define HOTROW_LOWER(DO) DO(3, kSide, 0) DO(4, kSide, 1) DO(5, kSide, 2)

// C's rows [row, row + kRows) by the columns of one panel, of which the last pairs, followed by zeros, are at `tail`;
// beyond `num_rows` rows or C's columns nothing is stored.
void multiply_tiles(const PairProduct& product, const Left& a, const Pair* panel, const Pair* tail, int64_t row,
                    int64_t num_rows, int64_t column) {
  alignas(64) float sums[kRows][kPanelColumns];
  alignas(64) Pair room[kSide * kSide];
  const int64_t columns = product.columns - column;
  HOTROW_UPPER(HOTROW_ZERO) HOTROW_LOWER(HOTROW_ZERO) for (int64_t k = 0; k < product.depth; k += kSide) {
    const Pair* b = k + kSide <= product.depth ? panel + k * kPanelColumns : tail;
    const Tile upper = tile_of(a, 0, k, room);
    _tile_loadd(6, upper.at, upper.bytes);
    HOTROW_UPPER(HOTROW_ADD)
    if (num_rows <= kSide) continue;
    const Tile lower = tile_of(a, kSide, k, room);
    _tile_loadd(6, lower.at, lower.bytes);
    HOTROW_LOWER(HOTROW_ADD)
  }
  HOTROW_UPPER(HOTROW_STORE) HOTROW_LOWER(HOTROW_STORE) for (int64_t r = 0; r < kRows && r < num_rows; ++r) {
    for (int64_t j = 0; j < kPanelColumns && j < columns; j += kSide)
      finish(product, _mm512_load_ps(sums[r] + j), row + r, column + j, first_lanes(columns - j));
  }
}

// to[m][k] = rows[k][m]: pairs of rows exchange what lies off the diagonal, in blocks of 1, 2, 4 and 8.
inline void transpose(__m512i (&rows)[kSide], Pair* to) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int step = 1; step < kSide; step *= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(step));
    const __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(kSide - step));
    const __m512i high =
        _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(step)), upper, lane, _mm512_set1_epi32(kSide));
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      if (i & step) continue;
      const __m512i first = rows[i], second = rows[i + step];
      rows[i] = _mm512_permutex2var_epi32(first, low, second);
      rows[i + step] = _mm512_permutex2var_epi32(first, high, second);
    }
  }
  for (int i = 0; i < kSide; ++i) _mm512_storeu_si512(to + i * kSide, rows[i]);
}

}  // namespace

void pack_pair_tiles(const Pair* from, int64_t stride, int64_t depth, int64_t rows, Pair* to, float* sums) {
  const int64_t num_pairs = pairs(depth), padded = whole_tiles(num_pairs);
  __m512i block[2][kSide];
  join_rows(from, stride, depth, rows, sums, [&](int64_t m, int64_t k, __m512i both) {
    __m512i(&columns)[kSide] = block[m / kSide % 2];
    columns[k % kSide] = both;
    if (k % kSide + 1 < kSide && k + 1 < num_pairs) return;
    for (int64_t after = k % kSide + 1; after < kSide; ++after) columns[after] = _mm512_setzero_si512();
    transpose(columns, to + m * padded + k / kSide * kSide * kSide);
  });
}

void multiply_pairs(const PairProduct& product, int64_t first, int64_t last) {
  _tile_loadconfig(&kConfig);
  const int64_t depth = product.depth, rest = depth % kSide, padded = whole_tiles(depth);
  alignas(64) Pair tail[kSide * kPanelColumns] = {};
  for (int64_t column = 0; column < product.columns; column += kPanelColumns) {
    const Pair* panel = product.b + column * depth;
    settle_memory();
    __builtin_memcpy(tail, panel + (depth - rest) * kPanelColumns,
                     static_cast<size_t>(rest * kPanelColumns) * sizeof(Pair));
    settle_memory();
    for (int64_t row = first; row < last; row += kRows) {
      const int64_t num_rows = last - row;
      const Left a =
          product.a_stride == 0
              ? Left{product.a + (row - first) * padded, padded, kSide, kSide, kRows, padded}
              : Left{product.a + row * product.a_stride, product.a_stride, 1, product.a_stride, num_rows, depth};
      multiply_tiles(product, a, panel, tail, row, num_rows, column);
    }
  }
  _tile_release();
}

}  // namespace hotrow::HOTROW_ISA
