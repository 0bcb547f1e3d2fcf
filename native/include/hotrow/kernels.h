// The leaf kernels, compiled once per instruction set; dispatch.cpp picks one set at run time.
//
// Rules for all kernels: fp32 accumulators, no contraction (a*b+c rounds twice on every instruction set) except in
// `interact*`, `multiply` and `output*`, no reassociation: the order of every sum is written below, so each set returns
// the same bits. Kernels neither allocate nor throw, start no thread, and touch nothing outside the ranges named.
// Outputs do not alias inputs unless stated. "fold16(x)" is the only way in which a vector is summed to a scalar:
//   p[k] = +0 + x[k] + x[k + 16] + x[k + 32] + ...  for k = 0..15, in this order
//   for h = 8, 4, 2, 1:  p[k] = p[k] + p[k + h]  for k = 0..h-1;      fold16 = p[0]
//
// row(r) and w are float32 for every storage of the table:
//   float32  as stored.
//   float16  widened when read; rounded to nearest even when written, once per update, a NaN to a quiet NaN.
//   split    lookups and weight_gradient read the upper half, a bfloat16 by truncation, as float32 whose lower 16 bits
//            are 0; updates join both halves, exactly the float32 that was split, and split the result.
#pragma once

#include <hotrow/types.h>

// lookup: for b in [first, last):
//     acc = +0;  for i in bag b, in order:  acc = acc + (weights ? weights[i] * row(ids[i]) : row(ids[i]))
//     if mean and the bag is not empty:  acc = acc / float(length)
//     out[b * stride .. + dim) = acc
//   False if an id is outside [0, num_rows) or an offset outside [begin, num_ids]; the rows written are then
//   meaningless. streamed: rows of whole cache lines bypass the caches when written; `out` and stride are then
//   multiples of a line.
//
// weight_gradient: for every position i of bags [first, last):
//     d = fold16(grad[b, :] * row(ids[i]));  out[i] = mean ? d / float(length of bag b) : d
//   `out` is indexed by position, as `weights` is. False as above.
//
// update: for each row r of the occurrences, g_1 .. g_n its gradients in order (see Source):
//     sgd:               w = w - lr * g_i   for i = 1..n
//     adagrad:           g = g_1 + g_2 + ... in order;  h = h + g * g;  w = w - lr * (g / (sqrt(h) + eps))
//     row_wise_adagrad:  g as above;  h = h + fold16(g * g) / float(dim);  w = w - (lr / (sqrt(h) + eps)) * g
//     adam:              g as above;  m = beta1 * m + rest1 * g;  v = beta2 * v + rest2 * (g * g)
//                        w = w - lr * (m / (sqrt(v) + eps))          (lr holds the bias correction)
//     ftrl:              g as above;  n' = n + g * g;  z = z + (g - ((sqrt(n') - sqrt(n)) / lr) * w);  n = n'
//                        w = |z| <= l1 ? 0 : -((z - copysign(l1, z)) / ((beta + sqrt(n)) / lr + l2))
//   states: h [num_rows, dim] or, row-wise, [num_rows];  m, v or z, n [num_rows, dim];  none for sgd. Rows are in range
//   and no other thread has keys of the same row. Keys of one row are in order; they must also be adjacent, except for
//   sgd with a storage that loses nothing (not float16). scratch: (1 + kRowsTogether) * dim floats.
//
// descend: update by sgd, ids of one feature in their order, all in range; not float16. scratch: dim floats
//
// sum_rows: for each row r of the occurrences, and each node in which it occurs, in rising order:
//     leaf l:        g = g_1 + g_2 + ...  of r's occurrences from sources of that leaf, in order, starting from g_1
//     any subtree:   left + right of its halves; a half without an occurrence of r is skipped
//   Writes r and the sum of the subtree that the node is to nodes[node], and advances both pointers there. Keys are in
//   the order of (row, leaf, as in update); a node's leaves are all leaves of an aligned subtree [n 2^k, (n + 1) 2^k)
//   that occur. scratch: kMostTreeLevels * dim floats.
//
// fill_uniform: columns [column, column + dim) of rows first + k * step of a table, k < count, written to
//     out[count, dim], with 4 a divisor of column; x = the Philox4x32-10 block of counter
//     (row mod 2^32, row / 2^32, column / 4, 0) and the key;  out = ((x[column mod 4] >> 8) * 2^-23 - 1) * bound
//   Rows below zero_rows are +0.0, and so are all with a bound of 0.
//
// store_row: writes one row of floats to a table's storage, as update does; the floats become what was stored (rounded,
// for float16). low: the lower halves of split storage, else null.
//
// interact: samples [first, last); T = [dense; pooled] is [F + 1, D]
//     out[b] = dense[b], then T_i . T_j for i = 1..F, j = 0..i-1   (D + (F + 1) F / 2 floats), then pooled[b] if rows
//     of out, `stride` floats apart, have room for it
//   Each sum over D runs upward in as many lanes as the set likes, which are then added; contracted if it has fma.
// interact_backward: Z the triangle of grad, symmetric with a zero diagonal:
//     (grad_dense[b], grad_pooled[b]) = Z T, plus grad[b, :D] on the dense row and, if they are there, the gradient
//     of out's pooled[b] and grad_first[b] [F], of the first element of each row (both added up before, null or not)
//   scratch: interact_scratch_floats(F, D), with no meaning before or after. streamed: grad_pooled bypasses the caches
//   when written; it and F * D are then multiples of a cache line.
//
// pack_panels: B(k, n) = from[k * depth_stride + n * column_stride] for all k < depth, n < columns, rearranged:
//     to[n / kPanelColumns][k][n mod kPanelColumns] = B(k, n), 0 beyond the last column
// pack_tiles: A(m, k) = from[k * stride + m] for all m < rows, k < depth, rearranged, and its rows summed:
//     to[m / kTileRows][k][m mod kTileRows] = A(m, k), 0 beyond the last row
//     sums[m] = sums[m] + (A(m, 0) + A(m, 1) + ...)
// multiply: rows [first, last) of C = A B as `product` says; if A is tiles, the first tile starts at row `first`.
//   The sum over k runs upward from +0 or `start`, contracted if the set has fma; then C, bias, relu, gate in this
//   order. So sums over the first k, as `start` of those over the others, have the bits of one sum over all.
//
// output: samples [first, last) of a layer of one output:  out[b] = x[b, :] . w
//   Summed in as many lanes as the set has, contracted if it has fma.
// output_backward: for the same samples, g [B]:
//     grad_weight = grad_weight + g[first] * x[first, :] + ...  in rising order;
//     grad_x[b, :] = g[b] * w, or if `scale` is not 0: x <= 0 ? 0 : scale g[b] * w;  may be null
#define HOTROW_KERNEL_LIST(KERNEL)                                                                                    \
  KERNEL(                                                                                                             \
      bool, lookup,                                                                                                   \
      (const Rows& table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride, bool streamed))  \
  KERNEL(bool, weight_gradient,                                                                                       \
         (const Rows& table, const Bags& bags, int64_t first, int64_t last, const float* grad, int64_t stride,        \
          float* out))                                                                                                \
  KERNEL(void, update,                                                                                                \
         (const Rule& rule, const Rows& table, const States& states, const Occurrences& occurrences, float* scratch)) \
  KERNEL(void, descend,                                                                                               \
         (const Rule& rule, const Rows& table, const Bags& bags, const float* grad, int64_t stride, float* scratch))  \
  KERNEL(void, sum_rows, (const Occurrences& occurrences, int64_t dim, RowSums* nodes, float* scratch))               \
  KERNEL(void, fill_uniform,                                                                                          \
         (uint64_t key, int64_t first, int64_t step, int64_t count, int64_t column, int64_t dim, float bound,         \
          int64_t zero_rows, float* out))                                                                             \
  KERNEL(void, store_row, (float* row, int64_t dim, Storage storage, void* to, uint16_t* low))                        \
  KERNEL(void, interact,                                                                                              \
         (const float* dense, const float* pooled, int64_t num_features, int64_t dim, int64_t first, int64_t last,    \
          float* out, int64_t stride, float* scratch))                                                                \
  KERNEL(void, interact_backward,                                                                                     \
         (const float* grad, int64_t stride, const float* grad_first, const float* dense, const float* pooled,        \
          int64_t num_features, int64_t dim, int64_t first, int64_t last, float* grad_dense, float* grad_pooled,      \
          float* scratch, bool streamed))                                                                             \
  KERNEL(void, pack_panels,                                                                                           \
         (const float* from, int64_t depth_stride, int64_t column_stride, int64_t depth, int64_t columns, float* to)) \
  KERNEL(void, pack_tiles, (const float* from, int64_t stride, int64_t depth, int64_t rows, float* to, float* sums))  \
  KERNEL(void, multiply, (const Product& product, int64_t first, int64_t last))                                       \
  KERNEL(void, output, (const float* x, const float* w, int64_t num_inputs, int64_t first, int64_t last, float* out)) \
  KERNEL(void, output_backward,                                                                                       \
         (const float* x, const float* w, const float* g, int64_t num_inputs, float scale, int64_t first,             \
          int64_t last, float* grad_weight, float* grad_x))

namespace hotrow {

#define HOTROW_FIELD(result, name, parameters) result(*name) parameters;
struct Kernels {
  const char* isa;
  HOTROW_KERNEL_LIST(HOTROW_FIELD)
};
#undef HOTROW_FIELD

// 16 lanes of slack in every number of rows and columns cover the widest vectors.
inline int64_t interact_scratch_floats(int64_t num_features, int64_t dim) {
  return 3 * (num_features + 17) * (num_features + 17 + dim + 16);
}

// An output with more floats than this leaves the caches before it is read again; if writes bypass the caches, its
// lines need not be read first. 26 tables x 2048 samples x dim 64 (14 MB): lookup takes 0.7 of the time, with the
// interaction after it 0.8 to 1. Up to half as many bytes, the reader loses what the writer gains.
inline constexpr int64_t kStreamedFloats = 1 << 21;

inline bool on_whole_lines(const float* rows, int64_t stride) {
  return reinterpret_cast<uintptr_t>(rows) % (kFloatsPerLine * sizeof(float)) == 0 && stride % kFloatsPerLine == 0;
}

// The set in use, and how to choose one. `num_kernels` sets run on this machine; set 0 is the baseline, the last one
// the widest.
const Kernels& kernels();
int num_kernels();
const Kernels& kernels_at(int index);
void use_kernels(int index);

}  // namespace hotrow

#define HOTROW_PROTOTYPE(result, name, parameters) result name parameters;
#define HOTROW_DECLARE_KERNELS(isa)    \
  namespace hotrow::isa {              \
  HOTROW_KERNEL_LIST(HOTROW_PROTOTYPE) \
  }
