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

// As dot_triangle, to the bit, for vectors of kDepth floats: 16 columns of T^t stay in registers, and the eight sums of
// each product are added in add_lanes' order, which needs no lane of another vector.
template <int kDepth>
inline void dot_columns(const Vectors& vectors, float* columns, float* triangle) {
  const int64_t wide = round_up(vectors.num, kLanes), end = vectors.num * (vectors.num - 1) / 2;
  const float* rows[4];
  for (int64_t i = 0; i < vectors.num; i += 4) {
    vectors.four(i, rows);
    for (int64_t k = 0; k < kDepth; k += 4) {
      float* put = columns + k * wide + i;
      store_transposed(load<4>(rows[0] + k), load<4>(rows[1] + k), load<4>(rows[2] + k), load<4>(rows[3] + k), put,
                       put + wide, put + 2 * wide, put + 3 * wide);
    }
  }
  for (int64_t j = wide - kLanes; j >= 0; j -= kLanes) {  // downward: what is stored beyond a row is its neighbour's
    Vec<kLanes> column[kDepth];
#pragma GCC unroll 16
    for (int k = 0; k < kDepth; ++k) column[k] = load<kLanes>(columns + k * wide + j);
    for (int64_t i = j + 1; i < vectors.num; ++i) {
      const float* row = vectors[i];
      Vec<kLanes> sum[8] = {};
#pragma GCC unroll 16
      for (int k = 0; k < kDepth; ++k) sum[k % 8] += row[k] * column[k];
      const Vec<kLanes> total = ((sum[0] + sum[2]) + (sum[1] + sum[3])) + ((sum[4] + sum[6]) + (sum[5] + sum[7]));
      const int64_t at = i * (i - 1) / 2 + j;
      if (at + kLanes <= end) {
        store<kLanes>(triangle + at, total);
      } else {
        float own[kLanes];
        store<kLanes>(own, total);
        copy(own, i - j < kLanes ? i - j : kLanes, triangle + at);
      }
    }
  }
}

// Rows [top, top + kRows) of Z T, and their part of the rows before them, in kParts vectors of kLong columns. Each
// pair's gradient is read once and serves both of its rows: out_i += z_ij T_j, out_j += z_ij T_i. `triangle` holds z by
// rows.
template <int kRows, int kParts, int kLong>
inline void add_pairs(const float* triangle, const float* vectors, int64_t top, int64_t stride, float* out) {
  Vec<kLong> own[kRows][kParts], sum[kRows][kParts] = {};
  const float* z[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    z[r] = triangle + (top + r) * (top + r - 1) / 2;
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) own[r][p] = load<kLong>(vectors + (top + r) * stride + p * kLong);
  }
  for (int64_t j = 0; j < top; ++j) {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = j * stride + p * kLong;
      const Vec<kLong> other = load<kLong>(vectors + at);
      Vec<kLong> before = load<kLong>(out + at);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r][p] += z[r][j] * other;
        before += z[r][j] * own[r][p];
      }
      store<kLong>(out + at, before);
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
    for (int p = 0; p < kParts; ++p) store<kLong>(out + (top + r) * stride + p * kLong, sum[r][p]);
  }
}

// out = Z T for n rows of `vectors`, stride a multiple of kLong; all of out is written.
template <int kParts, int kLong = kLanes>
inline void multiply_symmetric(const float* triangle, const float* vectors, int64_t n, int64_t stride, float* out) {
  int64_t top = 0;
  for (; top + 4 <= n; top += 4) add_pairs<4, kParts, kLong>(triangle, vectors, top, stride, out);
  for (; top < n; ++top) add_pairs<1, kParts, kLong>(triangle, vectors, top, stride, out);
}

inline void copy_streamed(const float* from, int64_t count, float* to) {
  for (int64_t j = 0; j < count; j += kLanes) stream(to + j, load<kLanes>(from + j));
}

// Adds to `width` columns of a product's rows what else their gradient is made of: its pooled columns in grad, and to
// the first one `first`, if they are not null; both are added up before.
inline void add_beside(float* product, int64_t stride, const float* beside, int64_t dim, int64_t width,
                       const float* first, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows; ++i) {
    float *row = product + i * stride, before = row[0];
    if (beside)
      for_pieces(width, [&](auto lanes, int64_t d) {
        constexpr int N = lanes.count;
        store<N>(row + d, load<N>(row + d) + load<N>(beside + i * dim + d));
      });
    if (first) row[0] = before + (beside ? first[i] + beside[i * dim] : first[i]);
  }
}

// Of `count` floats that are read next, the share that the line at column j has of `columns`. Read at once, they would
// fill the queue of misses while nothing is computed.
[[gnu::always_inline]] inline void fetch_part(const float* at, int64_t count, int64_t j, int64_t columns) {
  const int64_t end = count * (j + kFloatsPerLine) / columns;
  for (int64_t k = count * j / columns; k < end; k += kFloatsPerLine) __builtin_prefetch(at + k, 0, 2);
}

}  // namespace

void interact(const float* dense, const float* pooled, int64_t num_features, int64_t dim, int64_t first, int64_t last,
              float* out, int64_t out_stride, float* scratch) {
  const int64_t n = num_features + 1, pairs = num_features * n / 2, depth = round_up(dim, kWidth);
  float* columns = scratch + n * depth;
  clear(scratch, n * depth);
  for (int64_t b = first; b < last; ++b) {
    float* put = out + b * out_stride;
    Vectors vectors{dense + b * dim, pooled + b * num_features * dim, n, dim};
    copy(vectors.dense, dim, put);
    if (out_stride > dim + pairs) copy(vectors.pooled, num_features * dim, put + dim + pairs);
    if (dim != depth) {
      for (int64_t i = 0; i < n; ++i) copy(vectors[i], dim, scratch + i * depth);
      vectors = {scratch, scratch + depth, n, depth};
    }
    if (kLanes == 16 && depth == 8) {
      dot_columns<8>(vectors, columns, put + dim);
    } else if (kLanes == 16 && depth == 16) {
      dot_columns<16>(vectors, columns, put + dim);
    } else {
      dot_triangle(vectors, put + dim);
    }
  }
}

void interact_backward(const float* grad, int64_t grad_stride, const float* grad_first, const float* dense,
                       const float* pooled, int64_t num_features, int64_t dim, int64_t first, int64_t last,
                       float* grad_dense, float* grad_pooled, float* scratch, bool streamed) {
  constexpr int kShort = kLanes == 16 ? 8 : kLanes;  // two short vectors take as long as a long one
  const int64_t n = num_features + 1, pairs = num_features * n / 2,
                stride = round_up(dim, dim <= kShort ? kShort : kLanes);
  const bool in_lines = streamed && dim % kFloatsPerLine == 0;
  float* vectors = scratch;
  float* product = vectors + n * stride;
  clear(vectors, n * stride);
  for (int64_t b = first; b < last; ++b) {
    const float* grad_row = grad + b * grad_stride;
    const float* beside = grad_stride > dim + pairs ? grad_row + dim + pairs : nullptr;
    const float* first_row = grad_first ? grad_first + b * num_features : nullptr;
    float* put = grad_pooled + b * num_features * dim;
    copy(dense + b * dim, dim, vectors);
    for (int64_t i = 1; i < n; ++i) copy(pooled + (b * num_features + i - 1) * dim, dim, vectors + i * stride);
    int64_t width = 0;
    for (int64_t j = 0; j < stride; j += width) {
      // What bypasses the caches is taken a line of every vector at a time, so that memory and computing take turns.
      width = in_lines ? kFloatsPerLine : stride - j < kColumns ? stride - j : kColumns;
      if (in_lines && b + 1 < last) {
        fetch_part(pooled + (b + 1) * num_features * dim, num_features * dim, j, stride);
        fetch_part(grad_row + grad_stride, dim + pairs, j, stride);
      }
      int64_t k = j;
      for (; k + 2 * kLanes <= j + width; k += 2 * kLanes)
        multiply_symmetric<2>(grad_row + dim, vectors + k, n, stride, product + k);
      for (; k + kLanes <= j + width; k += kLanes)
        multiply_symmetric<1>(grad_row + dim, vectors + k, n, stride, product + k);
      for (; k < j + width; k += kShort)
        multiply_symmetric<1, kShort>(grad_row + dim, vectors + k, n, stride, product + k);
      if (!in_lines) continue;
      add_beside(product + stride + j, stride, beside ? beside + j : nullptr, dim, width, j == 0 ? first_row : nullptr,
                 num_features);
      for (int64_t i = 1; i < n; ++i) copy_streamed(product + i * stride + j, width, put + (i - 1) * dim + j);
    }
    for (int64_t d = 0; d < dim; ++d) grad_dense[b * dim + d] = product[d] + grad_row[d];
    if (in_lines) continue;
    add_beside(product + stride, stride, beside, dim, dim, first_row, num_features);
    if (stride == dim) {
      copy(product + stride, num_features * dim, put);
    } else {
      for (int64_t i = 1; i < n; ++i) copy(product + i * stride, dim, put + (i - 1) * dim);
    }
  }
  if (streamed) finish_streams();
}

}  // namespace hotrow::HOTROW_ISA
