// Dot interaction of a sample's vectors and its gradient; contract in hotrow/kernels.h. The one kernel file compiled
// with contraction: it is a dense op, bound by multiply-adds, and agrees within docs/numerics.md.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

// Accumulators of one tile: kTileRows x kParts vectors and two operands fit the machine's registers.
constexpr int kTileRows = kLanes == 16 ? 8 : 4;
constexpr int kTileParts = 2;

inline int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline void copy(const float* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t j = 0; j < count; ++j) to[j] = from[j];
}

// c[r, :] = sum over k of rows[r][k] * b[k, :] for kTileRows rows and kParts vectors of columns.
template <int kParts>
inline void multiply_tile(const float* const* rows, const float* b, int64_t depth, int64_t stride, float* c) {
  Vec<kLanes> sum[kTileRows][kParts] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<kLanes> column[kParts];
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) column[p] = load<kLanes>(b + k * stride + p * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) sum[r][p] += rows[r][k] * column[p];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) store<kLanes>(c + r * stride + p * kLanes, sum[r][p]);
  }
}

// The first `width` columns of kTileRows rows of a product; b and c have row stride `stride`, a multiple of kLanes.
inline void multiply_rows(const float* const* rows, const float* b, int64_t depth, int64_t width, int64_t stride,
                          float* c) {
  int64_t j = 0;
  for (; j + kLanes < width; j += kTileParts * kLanes) {
    multiply_tile<kTileParts>(rows, b + j, depth, stride, c + j);
  }
  for (; j < width; j += kLanes) multiply_tile<1>(rows, b + j, depth, stride, c + j);
}

// to[d * stride + i] = from[i * dim + d]
inline void transpose(const float* __restrict from, int64_t rows, int64_t dim, float* __restrict to, int64_t stride) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    const float* at = from + i * dim;
    float* put = to + i;
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4, at += 4, put += 4 * stride) {
      store_transposed(load<4>(at), load<4>(at + dim), load<4>(at + 2 * dim), load<4>(at + 3 * dim), put, put + stride,
                       put + 2 * stride, put + 3 * stride);
    }
    for (; d < dim; ++d, ++at, put += stride) {
      for (int64_t k = 0; k < 4; ++k) put[k] = at[k * dim];
    }
  }
  for (; i < rows; ++i) {
    for (int64_t d = 0; d < dim; ++d) to[d * stride + i] = from[i * dim + d];
  }
}

inline void clear(float* p, int64_t count) {
  for (int64_t j = 0; j < count; ++j) p[j] = 0.0f;
}

// The strict lower triangle of T T^t, packed by rows into `triangle`; may write up to one vector beyond its end.
inline void dot_triangle(const float* pooled, int64_t num_features, int64_t dim, const float* transposed,
                         int64_t stride, float* product, float* triangle) {
  for (int64_t first = 1; first <= num_features; first += kTileRows) {
    const float* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t i = first + r < num_features ? first + r : num_features;
      rows[r] = pooled + (i - 1) * dim;
    }
    const int64_t last = first + kTileRows - 1 < num_features ? first + kTileRows - 1 : num_features;
    multiply_rows(rows, transposed, dim, last, stride, product);
    // In rising order, so that what is written beyond a row is overwritten by the next row.
    for (int64_t i = first; i <= last; ++i) {
      float* put = triangle + i * (i - 1) / 2;
      for (int64_t j = 0; j < i; j += kLanes) store<kLanes>(put + j, load<kLanes>(product + (i - first) * stride + j));
    }
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

}  // namespace

void interact(const float* dense, const float* pooled, int64_t num_features, int64_t dim, int64_t first, int64_t last,
              float* out, float* scratch) {
  const int64_t pairs = num_features * (num_features + 1) / 2, stride = round_up(num_features + 1);
  float* transposed = scratch;
  float* product = transposed + dim * stride;
  float* triangle = product + kTileRows * stride;
  clear(transposed, dim * stride);
  for (int64_t b = first; b < last; ++b) {
    const float* dense_row = dense + b * dim;
    const float* pooled_rows = pooled + b * num_features * dim;
    for (int64_t d = 0; d < dim; ++d) transposed[d * stride] = dense_row[d];
    transpose(pooled_rows, num_features, dim, transposed + 1, stride);
    dot_triangle(pooled_rows, num_features, dim, transposed, stride, product, triangle);
    copy(dense_row, dim, out + b * (dim + pairs));
    copy(triangle, pairs, out + b * (dim + pairs) + dim);
  }
}

void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_features, int64_t dim,
                       int64_t first, int64_t last, float* grad_dense, float* grad_pooled, float* scratch,
                       bool streamed) {
  const int64_t n = num_features + 1, pairs = num_features * n / 2, stride = round_up(dim);
  float* vectors = scratch;
  float* product = vectors + n * stride;
  clear(vectors, n * stride);
  for (int64_t b = first; b < last; ++b) {
    const float* grad_row = grad + b * (dim + pairs);
    copy(dense + b * dim, dim, vectors);
    for (int64_t i = 1; i < n; ++i) copy(pooled + (b * num_features + i - 1) * dim, dim, vectors + i * stride);
    int64_t j = 0;
    for (; j + kLanes < stride; j += 2 * kLanes)
      multiply_symmetric<2>(grad_row + dim, vectors + j, n, stride, product + j);
    for (; j < stride; j += kLanes) multiply_symmetric<1>(grad_row + dim, vectors + j, n, stride, product + j);
    for (int64_t d = 0; d < dim; ++d) grad_dense[b * dim + d] = product[d] + grad_row[d];
    float* put = grad_pooled + b * num_features * dim;
    if (streamed && dim == stride) {
      copy_streamed(product + stride, num_features * dim, put);
    } else {
      for (int64_t i = 1; i < n; ++i) copy(product + i * stride, dim, put + (i - 1) * dim);
    }
  }
  if (streamed) finish_streams();
}

}  // namespace hotrow::HOTROW_ISA
