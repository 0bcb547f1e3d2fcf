// What the products of pairs.h have in common: parts of vectors, what is done to a sum, and the left side of a product
// over samples. Only for their files: all names are in the namespace of the instruction set.
#pragma once

#include <hotrow/pairs.h>
#include <hotrow/vec.h>
#include <immintrin.h>

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int64_t kAheadRows = 16;  // of rows too far apart for the machine to predict
static_assert(kLanes == 16 && kTilesTogether * kTileRows == 2 * kLanes);

// The first n lanes of a vector, n from below 0 to beyond kLanes.
inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>(n >= kLanes ? 0xFFFF : n <= 0 ? 0 : (1 << n) - 1);
}

// 16 bfloat16 of one row and of the next as pairs.
inline __m512i interleave(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}
inline __m512 widen_even(__m512i both) { return _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)); }
inline __m512 widen_odd(__m512i both) {
  return _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// Turns 16 sums into C: what is done to them, in the order of the contract. `lanes` are within C's columns.
inline void finish(const PairProduct& product, __m512 sum, int64_t row, int64_t column, __mmask16 lanes) {
  float* c = product.rounded ? nullptr : product.c + row * product.c_stride + column;
  const int64_t stride = 2 * pairs(product.columns);  // of bfloat16
  if (product.add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, c), sum);
  if (product.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, product.bias + column));
  const __m512 zero = _mm512_setzero_ps();
  if (product.relu) sum = _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(sum, zero, _CMP_LT_OQ), zero);
  if (product.gate) {
    const auto* gate = reinterpret_cast<const uint16_t*>(product.gate) + row * stride + column;
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, gate));
    sum = _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(widen_even(bits), zero, _CMP_LE_OQ), zero);
  }
  if (product.rounded) {
    auto* rounded = reinterpret_cast<uint16_t*>(product.rounded) + row * stride + column;
    const auto values = (__m256i)_mm512_cvtneps_pbh(sum);
    if (lanes == 0xFFFF) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), values);
    } else {  // an odd last column has its 0 beside it: B's panel is 0 there, and so are bias and gate
      _mm256_mask_storeu_epi16(rounded, first_lanes(stride - column), values);
    }
  } else if (lanes == 0xFFFF) {
    _mm512_storeu_ps(c, sum);
  } else {
    _mm512_mask_storeu_ps(c, lanes, sum);
  }
}

// Rows of `from` as pack_pair_tiles takes them, two at a time: put(m, k, both) is given the pairs of rows 2 k and 2 k +
// 1 in columns m .. m + 15, for all m below `rows` rounded up to 32; beyond `rows`, and beyond the depth, they are 0.
template <class Put>
inline void join_rows(const Pair* from, int64_t stride, int64_t depth, int64_t rows, float* sums, const Put& put) {
  for (int64_t m = 0; m < rows; m += 2 * kLanes) {
    const auto* at = reinterpret_cast<const uint16_t*>(from) + m;
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t k = 0; k < depth; k += 2, at += 4 * stride) {
      __builtin_prefetch(at + kAheadRows * 2 * stride, 0, 3);
      __builtin_prefetch(at + (kAheadRows + 1) * 2 * stride, 0, 3);
      for (int64_t h = 0; h < 2; ++h) {
        const __mmask16 lanes = first_lanes(rows - m - h * kLanes);
        const __m256i even = _mm256_maskz_loadu_epi16(lanes, at + h * kLanes);
        const __m256i odd =
            k + 1 < depth ? _mm256_maskz_loadu_epi16(lanes, at + 2 * stride + h * kLanes) : _mm256_setzero_si256();
        const __m512i both = interleave(even, odd);
        sum[h] = _mm512_add_ps(_mm512_add_ps(sum[h], widen_even(both)), widen_odd(both));
        put(m + h * kLanes, k / 2, both);
      }
    }
    for (int64_t h = 0; h < 2; ++h) {
      const __mmask16 lanes = first_lanes(rows - m - h * kLanes);
      float* total = sums + m + h * kLanes;
      _mm512_mask_storeu_ps(total, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, total), sum[h]));
    }
  }
}

}  // namespace
}  // namespace hotrow::HOTROW_ISA
