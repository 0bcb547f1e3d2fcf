// Products of bfloat16, for processors with avx512_bf16: two sets of leaf kernels, one on AMX, beside those of
// kernels.h and by their rules. A product takes two elements of its depth at a time, so they lie in pairs.
//
// bf16(x): x rounded to nearest, ties to even; below 2^-126 a zero with the sign of x; a NaN to a quiet NaN.
//
// Sums are float32. That of avx512_bf16 (by vdpbf16ps) adds the products of a pair in turn, the odd one first:
//     add_pair(s, a, b):  s = fma(a.odd, b.odd, s);  s = fma(a.even, b.even, s)
// That of amx_bf16 (by tdpbf16ps) adds 16 pairs; zeros fill the depth up to a multiple of 16:
//     add_pairs(s, a[16], b[16]):  e = o = +0;  for i = 0..15:  e = fma(a[i].even, b[i].even, e)
//                                                               o = fma(a[i].odd, b[i].odd, o)
//                                  s = s + (e + o)
//   Each fma or sum rounds once, to nearest even, as if exponents had no lower end; a result that is then below 2^-126
//   becomes a zero with its sign. No control register changes this.
#pragma once

#include <hotrow/types.h>

namespace hotrow {

// Two bfloat16: of an even index in the lower half, of the next odd one in the upper; 0 beyond the last.
using Pair = uint32_t;

// Always inlined: an out-of-line copy shared by all instruction sets could contain instructions of the wrong one.
[[gnu::always_inline]] constexpr int64_t pairs(int64_t n) { return (n + 1) / 2; }

inline constexpr int64_t kMostPairs = 512;    // of a product over samples: tiles and a panel then fit any L2
inline constexpr int64_t kTilesTogether = 4;  // pack_pair_tiles writes whole groups of so many tiles

// Some rows of a product C = A B, and what a layer does to them while they are in registers.
struct PairProduct {
  // [rows, depth]; rows up to the next multiple of kTileRows can be read. Stride 0: tiles made by pack_pair_tiles.
  const Pair* a = nullptr;
  int64_t a_stride = 0;
  const Pair* b = nullptr;         // panels of [depth, columns], made by pack_pair_panels or pack_pair_rows
  int64_t depth = 0, columns = 0;  // depth in pairs
  float* c = nullptr;              // [rows, columns], for C unless `rounded` is given
  int64_t c_stride = 0;
  Pair* rounded = nullptr;      // [rows, pairs(columns)], for bf16(C); or null
  bool add = false;             // to what c holds
  const float* bias = nullptr;  // [columns], added; or null
  bool relu = false;            // C = C < 0 ? 0 : C, so that NaN stays
  const Pair* gate = nullptr;   // [rows, pairs(columns)] or null: C = gate <= 0 ? 0 : C
};

// round_pairs: rows [first, last) of from [rows, columns]:  to[row][j] = (bf16(from[row][2 j]), bf16(from[row][2 j +
// 1]))
//
// pack_pair_panels: B(k, n) = bf16(from[k * depth_stride + n * column_stride]) for all k < depth, n < columns, one of
//     the strides 1:  to[n / kPanelColumns][k / 2][n mod kPanelColumns] = (B(k, n), B(k + 1, n)) for even k
// pack_pair_rows: the same for B(k, n) = the n-th bfloat16 of row k, rows `stride` pairs apart; columns at most
//     kPanelColumns
// pack_pair_tiles: A(m, k) = the m-th bfloat16 of row k, for all m < rows, k < depth, and A's rows summed:
//     avx512_bf16:  to[m / kTileRows][k / 2][m mod kTileRows] = (A(m, k), A(m, k + 1)) for even k
//     amx_bf16:     to[m / 16][k / 32][m mod 16][k / 2 mod 16], 0 up to whole tiles of 16 rows by 16 pairs
//     sums[m] = sums[m] + (+0 + A(m, 0) + A(m, 1) + ...)
//
// multiply_pairs: rows [first, last) of C = A B as `product` says; if A is tiles, the first tile starts at row `first`.
//   Each sum starts at +0 and takes the pairs of the depth upward by add_pair, or add_pairs from multiples of 16; then
//   C, bias, relu, gate, rounding.
#define HOTROW_PAIR_KERNEL_LIST(KERNEL)                                                                              \
  KERNEL(void, round_pairs, (const float* from, int64_t columns, int64_t first, int64_t last, Pair* to))             \
  KERNEL(void, pack_pair_panels,                                                                                     \
         (const float* from, int64_t depth_stride, int64_t column_stride, int64_t depth, int64_t columns, Pair* to)) \
  KERNEL(void, pack_pair_rows, (const Pair* from, int64_t stride, int64_t depth, int64_t columns, Pair* to))         \
  KERNEL(void, pack_pair_tiles,                                                                                      \
         (const Pair* from, int64_t stride, int64_t depth, int64_t rows, Pair* to, float* sums))                     \
  KERNEL(void, multiply_pairs, (const PairProduct& product, int64_t first, int64_t last))

#define HOTROW_FIELD(result, name, parameters) result(*name) parameters;
struct PairKernels {
  const char* name;
  HOTROW_PAIR_KERNEL_LIST(HOTROW_FIELD)
};
#undef HOTROW_FIELD

// Null if the build or the processor does not have them, or if the set in use (kernels.h) is not avx512. Those of AMX
// if tiles_refused() is 0, unless use_amx(false).
const PairKernels* pair_kernels();
// 0 if the system grants AMX's tiles; as errno why it refuses them; -1 if the build or the processor has none.
int tiles_refused();
bool use_amx(bool use);  // returns what was said before

}  // namespace hotrow

#define HOTROW_PAIR_PROTOTYPE(result, name, parameters) result name parameters;
#define HOTROW_DECLARE_PAIR_KERNELS(isa)         \
  namespace hotrow::isa {                        \
  HOTROW_PAIR_KERNEL_LIST(HOTROW_PAIR_PROTOTYPE) \
  }
