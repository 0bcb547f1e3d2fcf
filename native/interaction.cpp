// Dot interaction of a sample's vectors and its gradient; contract in hotrow/kernels.h. The one kernel file compiled
// with contraction: it is a dense op, bound by multiply-adds, and agrees within docs/numerics.md.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

// A dot product is summed in kWidth lanes. Wider ones would take longer to add up than they save.
#if defined(__AVX__) && defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define HOTROW_EIGHT_LANES
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kDots = 8;  // dot products of one tile: enough that a sum need not wait for the one before
constexpr int64_t kColumns = 2 * kLanes;  // of a gradient that are formed at once

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline void copy(const float* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t j = 0; j < count; ++j) to[j] = from[j];
}

inline void clear(float* p, int64_t count) {
  for (int64_t j = 0; j < count; ++j) p[j] = 0.0f;
}

// Lane i of the result is the sum over all lanes of sum[i]: halves of two sums are interleaved and added, so that each
// addition halves the lanes of both.
inline void add_lanes(const Vec<kWidth> (&sum)[kDots], float* dots) {
#ifdef HOTROW_EIGHT_LANES
  Vec<8> pair[4], four[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec<8> a = sum[2 * i], b = sum[2 * i + 1];
    pair[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
              __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec<8> a = pair[2 * i], b = pair[2 * i + 1];
    four[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
              __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  store<8>(dots, __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
                     __builtin_shufflevector(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15));
#else
  float lane[4][4];
  for (int i = 0; i < kDots; i += 4) {
    store_transposed(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], lane[0], lane[1], lane[2], lane[3]);
    store<4>(dots + i, (load<4>(lane[0]) + load<4>(lane[1])) + (load<4>(lane[2]) + load<4>(lane[3])));
  }
#endif
}

// The vectors of a sample, each of `depth` floats, a multiple of kWidth.
struct Vectors {
  const float *dense, *pooled;
  int64_t num, depth;

  const float* operator[](int64_t i) const { return i == 0 ? dense : pooled + (i - 1) * depth; }
  // Vectors [first, first + 4), in place of those beyond the last one the last one.
  void four(int64_t first, const float* (&rows)[4]) const {
    for (int64_t r = 0; r < 4; ++r) rows[r] = (*this)[first + r < num ? first + r : num - 1];
  }
};

// dots[2 * r] = rows[r] . left and dots[2 * r + 1] = rows[r] . right.
inline void dot_rectangle(const float* const (&rows)[4], const float* left, const float* right, int64_t depth,
                          float* dots) {
  Vec<kWidth> sum[kDots] = {};
  for (int64_t k = 0; k < depth; k += kWidth) {
    const Vec<kWidth> first = load<kWidth>(left + k), second = load<kWidth>(right + k);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Vec<kWidth> row = load<kWidth>(rows[r] + k);
      sum[2 * r] += row * first;
      sum[2 * r + 1] += row * second;
    }
  }
  add_lanes(sum, dots);
}

// dots[r (r - 1) / 2 + c] = rows[r] . rows[c] for c < r < 4.
inline void dot_corner(const float* const (&rows)[4], int64_t depth, float* dots) {
  Vec<kWidth> sum[kDots] = {};
  for (int64_t k = 0; k < depth; k += kWidth) {
    Vec<kWidth> row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) row[r] = load<kWidth>(rows[r] + k);
#pragma GCC unroll 4
    for (int r = 1; r < 4; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < r; ++c) sum[r * (r - 1) / 2 + c] += row[r] * row[c];
    }
  }
  add_lanes(sum, dots);
}

// The strict lower triangle of T T^t, packed by rows.
inline void dot_triangle(const Vectors& vectors, float* triangle) {
  float dots[kDots];
  const float* rows[4];
  float* put[4];
  for (int64_t top = 0; top < vectors.num; top += 4) {
    const int64_t num_rows = vectors.num - top < 4 ? vectors.num - top : 4;
    vectors.four(top, rows);
    for (int64_t r = 0; r < num_rows; ++r) put[r] = triangle + (top + r) * (top + r - 1) / 2;
    for (int64_t j = 0; j < top; j += 2) {
      dot_rectangle(rows, vectors[j], vectors[j + 1], vectors.depth, dots);
      for (int64_t r = 0; r < num_rows; ++r) __builtin_memcpy(put[r] + j, dots + 2 * r, 2 * sizeof(float));
    }
    dot_corner(rows, vectors.depth, dots);
    for (int64_t r = 1; r < num_rows; ++r) copy(dots + r * (r - 1) / 2, r, put[r] + top);
  }
}

// Rows [top, top + kRows) of Z T, and their part of the rows before them, in kParts vectors of columns. Each pair's
// gradient is read once and serves both of its rows: out_i += z_ij T_j, out_j += z_ij T_i. `triangle` holds z by rows.
template <int kRows, int kParts>
inline void add_pairs(const float* triangle, const float* vectors, int64_t top, int64_t stride, float* out) {
  Vec<kLanes> own[kRows][kParts], sum[kRows][kParts] = {};
  const float* z[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    z[r] = triangle + (top + r) * (top + r - 1) / 2;
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) own[r][p] = load<kLanes>(vectors + (top + r) * stride + p * kLanes);
  }
  for (int64_t j = 0; j < top; ++j) {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = j * stride + p * kLanes;
      const Vec<kLanes> other = load<kLanes>(vectors + at);
      Vec<kLanes> before = load<kLanes>(out + at);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r][p] += z[r][j] * other;
        before += z[r][j] * own[r][p];
      }
      store<kLanes>(out + at, before);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < r; ++q) {
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        sum[r][p] += z[r][top + q] * own[q][p];
        sum[q][p] += z[r][top + q] * own[r][p];
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) store<kLanes>(out + (top + r) * stride + p * kLanes, sum[r][p]);
  }
}

// out = Z T for n rows of `vectors`, stride a multiple of kLanes; all of out is written.
template <int kParts>
inline void multiply_symmetric(const float* triangle, const float* vectors, int64_t n, int64_t stride, float* out) {
  int64_t top = 0;
  for (; top + 4 <= n; top += 4) add_pairs<4, kParts>(triangle, vectors, top, stride, out);
  for (; top < n; ++top) add_pairs<1, kParts>(triangle, vectors, top, stride, out);
}

inline void copy_streamed(const float* from, int64_t count, float* to) {
  for (int64_t j = 0; j < count; j += kLanes) stream(to + j, load<kLanes>(from + j));
}

// Of `count` floats that are read next, the share that the line at column j has of `columns`. Read at once, they would
// fill the queue of misses while nothing is computed.
[[gnu::always_inline]] inline void fetch_part(const float* at, int64_t count, int64_t j, int64_t columns) {
  const int64_t end = count * (j + kFloatsPerLine) / columns;
  for (int64_t k = count * j / columns; k < end; k += kFloatsPerLine) __builtin_prefetch(at + k, 0, 2);
}

}  // namespace

void interact(const float* dense, const float* pooled, int64_t num_features, int64_t dim, int64_t first, int64_t last,
              float* out, float* scratch) {
  const int64_t n = num_features + 1, pairs = num_features * n / 2, depth = round_up(dim, kWidth);
  clear(scratch, n * depth);
  for (int64_t b = first; b < last; ++b) {
    Vectors vectors{dense + b * dim, pooled + b * num_features * dim, n, dim};
    copy(vectors.dense, dim, out + b * (dim + pairs));
    if (dim != depth) {
      for (int64_t i = 0; i < n; ++i) copy(vectors[i], dim, scratch + i * depth);
      vectors = {scratch, scratch + depth, n, depth};
    }
    dot_triangle(vectors, out + b * (dim + pairs) + dim);
  }
}

void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_features, int64_t dim,
                       int64_t first, int64_t last, float* grad_dense, float* grad_pooled, float* scratch,
                       bool streamed) {
  const int64_t n = num_features + 1, pairs = num_features * n / 2, stride = round_up(dim, kLanes);
  const bool in_lines = streamed && dim % kFloatsPerLine == 0;
  float* vectors = scratch;
  float* product = vectors + n * stride;
  clear(vectors, n * stride);
  for (int64_t b = first; b < last; ++b) {
    const float* grad_row = grad + b * (dim + pairs);
    float* put = grad_pooled + b * num_features * dim;
    copy(dense + b * dim, dim, vectors);
    for (int64_t i = 1; i < n; ++i) copy(pooled + (b * num_features + i - 1) * dim, dim, vectors + i * stride);
    int64_t width = 0;
    for (int64_t j = 0; j < stride; j += width) {
      // What bypasses the caches is taken a line of every vector at a time, so that memory and computing take turns.
      width = in_lines ? kFloatsPerLine : stride - j < kColumns ? stride - j : kColumns;
      if (in_lines && b + 1 < last) {
        fetch_part(pooled + (b + 1) * num_features * dim, num_features * dim, j, stride);
        fetch_part(grad_row + dim + pairs, dim + pairs, j, stride);
      }
      int64_t k = j;
      for (; k + 2 * kLanes <= j + width; k += 2 * kLanes)
        multiply_symmetric<2>(grad_row + dim, vectors + k, n, stride, product + k);
      for (; k < j + width; k += kLanes) multiply_symmetric<1>(grad_row + dim, vectors + k, n, stride, product + k);
      if (!in_lines) continue;
      for (int64_t i = 1; i < n; ++i) copy_streamed(product + i * stride + j, width, put + (i - 1) * dim + j);
    }
    for (int64_t d = 0; d < dim; ++d) grad_dense[b * dim + d] = product[d] + grad_row[d];
    if (in_lines) continue;
    for (int64_t i = 1; i < n; ++i) copy(product + i * stride, dim, put + (i - 1) * dim);
  }
  if (streamed) finish_streams();
}

}  // namespace hotrow::HOTROW_ISA
