// Matrix products of bfloat16 with float32 sums, two products of the depth in one instruction; contract in
// hotrow/pairs.h. Compiled once, for processors with AVX-512 and avx512_bf16.
//
// Tiles are those of product.cpp: kTileRows rows by kPanelColumns columns of C are 24 vectors of sums. A panel of B is
// read in full for every tile of rows, from the second-level cache; it takes half the bytes that it takes in float32,
// so the depth of a layer is not divided.
#include <hotrow/pair_lanes.h>

HOTROW_DECLARE_PAIR_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int kMostParts = kPanelColumns / kLanes;
static_assert(kTileRows == 8);

// 32 floats, of which the first n count, as 16 pairs.
inline __m512i round_floats(const float* from, int64_t n) {
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(n), from);
  const __m512 high = _mm512_maskz_loadu_ps(first_lanes(n - kLanes), from + kLanes);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Rows of A as they are in memory, and as pack_pair_tiles lays them out.
struct RowMajor {
  const Pair* at;
  int64_t stride;
  Pair operator()(int64_t r, int64_t k) const { return at[r * stride + k]; }
};
struct Tile {
  const Pair* at;
  Pair operator()(int64_t r, int64_t k) const { return at[k * kTileRows + r]; }
};

// Prefetches what `finish` will read and write of the rows from `row` on, while the sums are formed. Always inlined:
// see prefetch_row in vec.h.
[[gnu::always_inline]] inline void prefetch_tile(const PairProduct& product, int64_t row, int64_t column) {
  for (int64_t r = row; r < row + kTileRows; ++r) {
    const int64_t narrow = r * pairs(product.columns) + column / 2, wide = r * product.c_stride + column;
    for (int64_t j = 0; j < kPanelColumns; j += kFloatsPerLine) {
      if (product.gate) __builtin_prefetch(product.gate + narrow + j / 2, 0, 3);
      if (product.rounded) __builtin_prefetch(product.rounded + narrow + j / 2, 1, 3);
      if (!product.rounded) __builtin_prefetch(product.c + wide + j, 1, 3);
    }
  }
}

// C's rows [row, row + kTileRows) by kParts vectors of columns; beyond `num_rows` rows or C's columns nothing is
// stored.
template <int kParts, class Left>
void multiply_parts(const PairProduct& product, const Left a, const Pair* panel, int64_t row, int64_t num_rows,
                    int64_t column) {
  prefetch_tile(product, row, column);
  __m512 sum[kTileRows][kParts];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) sum[r][p] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < product.depth; ++k, panel += kPanelColumns) {
    __m512i b[kParts];
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) b[p] = _mm512_loadu_si512(panel + p * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
      const __m512i pair = _mm512_set1_epi32(static_cast<int>(a(r, k)));
#pragma GCC unroll 3
      for (int p = 0; p < kParts; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], (__m512bh)pair, (__m512bh)b[p]);
    }
  }
  __m512 found[kTileRows][kParts];  // indexed at run time; the sums themselves stay in registers
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) found[r][p] = sum[r][p];
  }
  for (int r = 0; r < kTileRows && r < num_rows; ++r) {
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = column + p * kLanes;
      finish(product, found[r][p], row + r, at, first_lanes(product.columns - at));
    }
  }
}

template <class Left>
void multiply_tile(const PairProduct& product, const Left a, const Pair* panel, int64_t row, int64_t num_rows,
                   int64_t column) {
  switch (const int64_t left = product.columns - column; (left + kLanes - 1) / kLanes) {
    case 1:
      multiply_parts<1>(product, a, panel, row, num_rows, column);
      break;
    case 2:
      multiply_parts<2>(product, a, panel, row, num_rows, column);
      break;
    default:
      multiply_parts<kMostParts>(product, a, panel, row, num_rows, column);
  }
}

// A panel of a B whose rows are one after another in memory: read(k, j) is 16 of row k's bfloat16 from column j on.
template <class Read>
inline void interleave_panel(int64_t depth, Pair* to, const Read& read) {
  for (int64_t k = 0; k < depth; k += 2, to += kPanelColumns) {
    for (int64_t j = 0; j < kPanelColumns; j += kLanes) {
      const __m256i odd = k + 1 < depth ? read(k + 1, j) : _mm256_setzero_si256();
      _mm512_storeu_si512(to + j, interleave(read(k, j), odd));
    }
  }
}

// A panel of a B each of whose columns is contiguous in memory, `stride` from the next: four columns at a time.
inline void transpose_panel(const float* from, int64_t stride, int64_t depth, int64_t columns, Pair* to) {
  for (int64_t j = 0; j < kPanelColumns; j += 4) {
    for (int64_t k = 0; k < depth; k += 2 * kLanes) {
      __m512 column[4];
      for (int64_t q = 0; q < 4; ++q) {
        const int64_t count = j + q < columns ? depth - k : 0;
        column[q] = _mm512_castsi512_ps(round_floats(from + (j + q < columns ? j + q : 0) * stride + k, count));
      }
      const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(column[0], column[1]));
      const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(column[2], column[3]));
      const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(column[0], column[1]));
      const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(column[2], column[3]));
      alignas(64) Pair rows[4][kLanes];  // rows[q][4 l ..] is row 4 l + q of the four columns
      _mm512_store_pd(rows[0], _mm512_unpacklo_pd(low01, low23));
      _mm512_store_pd(rows[1], _mm512_unpackhi_pd(low01, low23));
      _mm512_store_pd(rows[2], _mm512_unpacklo_pd(high01, high23));
      _mm512_store_pd(rows[3], _mm512_unpackhi_pd(high01, high23));
      Pair* put = to + k / 2 * kPanelColumns + j;
      for (int64_t i = 0; i < kLanes && i < pairs(depth - k); ++i, put += kPanelColumns)
        __builtin_memcpy(put, rows[i % 4] + i / 4 * 4, 4 * sizeof(Pair));
    }
  }
}

}  // namespace

void round_pairs(const float* from, int64_t columns, int64_t first, int64_t last, Pair* to) {
  const int64_t num_pairs = pairs(columns);
  for (int64_t row = first; row < last; ++row) {
    const float* at = from + row * columns;
    Pair* put = to + row * num_pairs;
    int64_t j = 0;
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes, put += kLanes)
      _mm512_storeu_si512(put, round_floats(at + j, 2 * kLanes));
    if (j < columns) _mm512_mask_storeu_epi32(put, first_lanes(num_pairs - j / 2), round_floats(at + j, columns - j));
  }
}

void pack_pair_panels(const float* from, int64_t depth_stride, int64_t column_stride, int64_t depth, int64_t columns,
                      Pair* to) {
  for (int64_t j = 0; j < columns; j += kPanelColumns, to += pairs(depth) * kPanelColumns) {
    const float* panel = from + j * column_stride;
    const int64_t width = columns - j;
    if (column_stride == 1) {
      interleave_panel(depth, to, [&](int64_t k, int64_t at) {
        return (__m256i)_mm512_cvtneps_pbh(
            _mm512_maskz_loadu_ps(first_lanes(width - at), panel + k * depth_stride + at));
      });
    } else {
      transpose_panel(panel, column_stride, depth, width, to);
    }
  }
}

void pack_pair_rows(const Pair* from, int64_t stride, int64_t depth, int64_t columns, Pair* to) {
  const auto* rows = reinterpret_cast<const uint16_t*>(from);
  interleave_panel(depth, to, [&](int64_t k, int64_t at) {
    return _mm256_maskz_loadu_epi16(first_lanes(columns - at), rows + k * 2 * stride + at);
  });
}

void pack_pair_tiles(const Pair* from, int64_t stride, int64_t depth, int64_t rows, Pair* to, float* sums) {
  const int64_t tile = pairs(depth) * kTileRows;  // its pairs
  join_rows(from, stride, depth, rows, sums, [&](int64_t m, int64_t k, __m512i both) {
    Pair* put = to + m * pairs(depth) + k * kTileRows;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(put), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(put + tile), _mm512_extracti64x4_epi64(both, 1));
  });
}

void multiply_pairs(const PairProduct& product, int64_t first, int64_t last) {
  for (int64_t column = 0; column < product.columns; column += kPanelColumns) {
    const Pair* panel = product.b + column * product.depth;
    for (int64_t row = first; row < last; row += kTileRows) {
      if (product.a_stride == 0) {
        multiply_tile(product, Tile{product.a + (row - first) * product.depth}, panel, row, last - row, column);
      } else {
        multiply_tile(product, RowMajor{product.a + row * product.a_stride, product.a_stride}, panel, row, last - row,
                      column);
      }
    }
  }
}

}  // namespace hotrow::HOTROW_ISA
