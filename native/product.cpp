// Matrix products of an MLP layer, divided into tiles that stay in registers; contract in hotrow/kernels.h. Compiled
// with contraction, like the interaction: dense ops agree within docs/numerics.md.
//
// A tile of C is kTileRows x kPanelColumns sums: 24 vectors of 16 floats, which with 3 of B and one broadcast element
// of A fit AVX-512's registers. Narrower sets take the tile in pieces. A panel of B is read in full for every tile of
// rows, so it must fit the second-level cache: the caller limits the depth.
//
// What comes next, and the machine cannot predict, is prefetched a little at a time between stretches of the depth: the
// values of C to which sums will be added, the rows of A below, and, if B is stored as rows, a part of its next panel.
// Prefetched all at once, it would fill the queue of misses, and the products would wait behind it for what they read
// now.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

#include <type_traits>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int kRows = kLanes == 16 ? 8 : 4;  // of one piece: with kMaxParts vectors of columns it fills the registers
constexpr int kMaxParts = 3;
constexpr int64_t kAheadRows = 16;  // of G while it is packed
constexpr int64_t kPiece = kMaxParts * kLanes;
static_assert(kTileRows % kRows == 0 && kPanelColumns % kPiece == 0);

inline int64_t at_most(int64_t n, int64_t limit) { return n < limit ? n : limit; }

// Rows of A as they are in memory, and as pack_tiles lays them out.
struct RowMajor {
  const float* at;
  int64_t stride;
  float operator()(int64_t r, int64_t k) const { return at[r * stride + k]; }
  RowMajor from(int64_t r) const { return {at + r * stride, stride}; }
  RowMajor past(int64_t k) const { return {at + k, stride}; }
};
struct Tile {
  const float* at;
  float operator()(int64_t r, int64_t k) const { return at[k * kTileRows + r]; }
  Tile from(int64_t r) const { return {at + r}; }
  Tile past(int64_t k) const { return {at + k * kTileRows}; }
};

// Columns of B from some column of a panel on, `stride` floats from row to row.
struct Panel {
  const float* at;
  int64_t stride;
  Panel from(int64_t column) const { return {at + column, stride}; }
  Panel past(int64_t k) const { return {at + k * stride, stride}; }
};

// sum[r][:] += a(r, k) * panel[k][:] for k < depth.
template <int kTall, int kParts, class Left>
[[gnu::always_inline]] inline void add_products(const Left a, const Panel panel, int64_t depth,
                                                Vec<kLanes> (&sum)[kTall][kParts]) {
  for (int64_t k = 0; k < depth; ++k) {
    const float* at = panel.at + k * panel.stride;
    Vec<kLanes> row[kParts];
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) row[p] = load<kLanes>(at + p * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTall; ++r) {
      const float element = a(r, k);
#pragma GCC unroll 3
      for (int p = 0; p < kParts; ++p) sum[r][p] += element * row[p];
    }
  }
}

// Turns sums into C: what is done to a vector of values, in the order of the contract.
template <class Load, class Store>
[[gnu::always_inline]] inline void finish(const Product& product, Vec<kLanes> sum, int64_t row, int64_t column,
                                          const Load& read, const Store& write) {
  float* c = product.c + row * product.columns + column;
  if (product.add) sum = read(c) + sum;
  if (product.bias) sum = sum + read(product.bias + column);
  if (product.relu) sum = sum < 0.0f ? Vec<kLanes>{} : sum;
  if (product.gate)
    sum = read(product.gate + row * product.columns + column) <= 0.0f ? Vec<kLanes>{} : sum * product.scale;
  write(c, sum);
}

// The same for the first `width` lanes.
inline void finish_some(const Product& product, Vec<kLanes> sum, int64_t row, int64_t column, int64_t width) {
  const auto bytes = static_cast<size_t>(width) * sizeof(float);
  const auto read = [&](const float* from) {
    Vec<kLanes> values{};
    __builtin_memcpy(&values, from, bytes);
    return values;
  };
  const auto write = [&](float* to, Vec<kLanes> values) { __builtin_memcpy(to, &values, bytes); };
  finish(product, sum, row, column, read, write);
}

// What will be read next: `rows` rows of `floats` floats, `stride` from row to row.
struct Ahead {
  const float* at;
  int64_t stride, rows, floats;

  // Prefetches the n-th of kRows parts of it into the second-level cache; the first-level one is full of current data.
  void fetch(int64_t n) const {
    for (int64_t row = rows * n / kRows; row < rows * (n + 1) / kRows; ++row) {
      for (int64_t j = 0; j < floats; j += kFloatsPerLine) __builtin_prefetch(at + row * stride + j, 0, 2);
      __builtin_prefetch(at + row * stride + floats - 1, 0, 2);
    }
  }
};

// The sums of one piece.
template <int kTall, int kParts, class Left>
[[gnu::always_inline]] inline void form_sums(const Product& product, const Left whole, const Panel panels,
                                             const Ahead& ahead, int64_t row, int64_t column,
                                             Vec<kLanes> (&sum)[kTall][kParts]) {
  const Left a = whole.past(product.first);
  const Panel panel = panels.past(product.first);
  const int64_t depth = (product.last ? product.last : product.depth) - product.first;
  const int64_t stretch = depth / (kTall + 1);
  for (int64_t r = 0; r < kTall; ++r) {
    const int64_t at = (row + r) * product.columns + column;
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) {
      __builtin_prefetch(product.c + at + p * kLanes, 1, 3);
      if (product.gate) __builtin_prefetch(product.gate + at + p * kLanes, 0, 3);
    }
    ahead.fetch(r);
    add_products(a.past(r * stretch), panel.past(r * stretch), stretch, sum);
  }
  add_products(a.past(kTall * stretch), panel.past(kTall * stretch), depth - kTall * stretch, sum);
}

// C's rows [row, row + kTall) by kParts vectors of columns; beyond `num_rows` rows or C's columns nothing is stored.
template <int kTall, int kParts, class Left>
void multiply_piece(const Product& product, const Left a, const Panel panel, const Ahead& ahead, int64_t row,
                    int64_t num_rows, int64_t column) {
  Vec<kLanes> sum[kTall][kParts] = {};
  if (product.start) {
#pragma GCC unroll 8
    for (int r = 0; r < kTall; ++r) {
#pragma GCC unroll 3
      for (int p = 0; p < kParts; ++p) sum[r][p] = load<kLanes>(product.start + column + p * kLanes);
    }
  }
  form_sums(product, a, panel, ahead, row, column, sum);
  if (num_rows >= kTall && column + kParts * kLanes <= product.columns) {
#pragma GCC unroll 8
    for (int r = 0; r < kTall; ++r) {
#pragma GCC unroll 3
      for (int p = 0; p < kParts; ++p)
        finish(product, sum[r][p], row + r, column + p * kLanes, load<kLanes>, store<kLanes>);
    }
    return;
  }
  Vec<kLanes> edge[kTall][kParts];  // indexed at run time; the sums themselves stay in registers
#pragma GCC unroll 8
  for (int r = 0; r < kTall; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) edge[r][p] = sum[r][p];
  }
  for (int r = 0; r < at_most(num_rows, kTall); ++r) {
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = column + p * kLanes;
      finish_some(product, edge[r][p], row + r, at, at_most(kLanes, product.columns - at));
    }
  }
}

// The same for up to kMaxParts vectors of columns.
template <int kTall, class Left>
void multiply_columns(const Product& product, const Left a, const Panel panel, const Ahead& ahead, int64_t row,
                      int64_t num_rows, int64_t column, int64_t width) {
  switch ((width + kLanes - 1) / kLanes) {
    case 1:
      return multiply_piece<kTall, 1>(product, a, panel, ahead, row, num_rows, column);
    case 2:
      return multiply_piece<kTall, 2>(product, a, panel, ahead, row, num_rows, column);
    default:
      return multiply_piece<kTall, kMaxParts>(product, a, panel, ahead, row, num_rows, column);
  }
}

// The same for a tile of rows and a panel of columns. Packed tiles are whole; of a row-major A only `num_rows` are
// read.
template <class Left>
void multiply_tile(const Product& product, const Left a, const Panel whole, Ahead ahead, int64_t row, int64_t num_rows,
                   int64_t column) {
  constexpr bool kWhole = std::is_same_v<Left, Tile>;
  const int64_t end = at_most(column + kPanelColumns, product.columns);
  for (int64_t at = column; at < end; at += kPiece) {
    const Panel panel = whole.from(at - column);
    for (int64_t r = 0; r < at_most(num_rows, kTileRows); ahead.rows = 0) {
      const int64_t left = num_rows - r;
      const auto take = [&]<int kTall>() {
        multiply_columns<kTall>(product, a.from(r), panel, kTall == kRows ? ahead : Ahead{}, row + r, left, at,
                                at_most(kPiece, end - at));
        r += kTall;
      };
      if (kWhole || left >= kRows) {
        take.template operator()<kRows>();
      } else if (left >= 4) {
        take.template operator()<4>();
      } else if (left >= 2) {
        take.template operator()<2>();
      } else {
        take.template operator()<1>();
      }
    }
  }
}

// to[k][r] = from[r * stride + k] for r < rows, 0 for r from there to kWide.
template <int kWide>
inline void transpose(const float* from, int64_t stride, int64_t rows, int64_t depth, float* to) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, from += 4 * stride) {
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      float* put = to + k * kWide + r;
      store_transposed(load<4>(from + k), load<4>(from + stride + k), load<4>(from + 2 * stride + k),
                       load<4>(from + 3 * stride + k), put, put + kWide, put + 2 * kWide, put + 3 * kWide);
    }
    for (; k < depth; ++k) {
      for (int64_t q = 0; q < 4; ++q) to[k * kWide + r + q] = from[q * stride + k];
    }
  }
  for (; r < kWide; ++r, from += stride) {
    for (int64_t k = 0; k < depth; ++k) to[k * kWide + r] = r < rows ? from[k] : 0.0f;
  }
}

// Up to kTileRows rows by B as it lies in a layer's weight: rows in lanes, each with its sums in the order of all
// others.
void multiply_lanes(const Product& product, int64_t row, int64_t num_rows) {
  constexpr int kColumns = kLanes == 16 ? 16 : 8, kWide = kTileRows;
  float a[kMostDepth * kWide];
  transpose<kWide>(product.a + row * product.a_stride, product.a_stride, num_rows, product.depth, a);
  for (int64_t column = 0; column < product.columns; column += kColumns) {
    const int64_t width = at_most(kColumns, product.columns - column);
    const float* at[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) at[c] = product.b + (column + at_most(c, width - 1)) * product.b_stride;
    Vec<kWide> sum[kColumns] = {};
    for (int64_t k = 0; k < product.depth; ++k) {
      const Vec<kWide> elements = load<kWide>(a + k * kWide);
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) sum[c] += at[c][k] * elements;
    }
    float sums[kColumns * kWide], rows[kWide * kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) store<kWide>(sums + c * kWide, sum[c]);
    transpose<kColumns>(sums, kWide, kColumns, kWide, rows);
    for (int64_t r = 0; r < num_rows; ++r) {
      const float* from = rows + r * kColumns;
      for (int64_t c = 0; c < width; c += kLanes) {
        if (c + kLanes <= width) {
          finish(product, load<kLanes>(from + c), row + r, column + c, load<kLanes>, store<kLanes>);
        } else {
          finish_some(product, load<kLanes>(from + c), row + r, column + c, width - c);
        }
      }
    }
  }
}

// One panel of B whose columns lie one after another in memory: [depth][columns] out of rows `stride` apart.
inline void copy_panel(const float* from, int64_t stride, int64_t depth, int64_t columns, float* to) {
  for (int64_t k = 0; k < depth; ++k, from += stride, to += kPanelColumns) {
    if (columns == kPanelColumns) {  // a constant length, so that it becomes whole vectors
      for (int64_t j = 0; j < kPanelColumns; ++j) to[j] = from[j];
    } else {
      for (int64_t j = 0; j < kPanelColumns; ++j) to[j] = j < columns ? from[j] : 0.0f;
    }
  }
}

// The part of the next panel of B, if B is stored as rows, that tile `tile` of `num_tiles` has to prefetch.
inline Ahead next_panel(const Product& product, int64_t column, int64_t tile, int64_t num_tiles) {
  const int64_t next = column + kPanelColumns;
  if (product.b_stride == 0 || next >= product.columns) return {};
  const int64_t k = product.depth * tile / num_tiles, end = product.depth * (tile + 1) / num_tiles;
  return {product.b + k * product.b_stride + next, product.b_stride, end - k,
          at_most(kPanelColumns, product.columns - next)};
}

// Whether a panel of B is copied first. Narrow vectors read it so often that its rows must not begin within cache
// lines, nor lie so far apart that the caches have only few places for them: rows of 1024 floats took 1.35 times as
// long on AVX2, with wide vectors no longer.
inline bool copies(int64_t b_stride) { return kLanes < 16 && (b_stride % kFloatsPerLine || b_stride >= 1024); }

}  // namespace

void pack_panels(const float* from, int64_t depth_stride, int64_t column_stride, int64_t depth, int64_t columns,
                 float* to) {
  for (int64_t j = 0; j < columns; j += kPanelColumns, to += depth * kPanelColumns) {
    const int64_t width = at_most(kPanelColumns, columns - j);
    if (column_stride == 1) {
      copy_panel(from + j, depth_stride, depth, width, to);
    } else {
      transpose<kPanelColumns>(from + j * column_stride, column_stride, width, depth, to);
    }
  }
}

// Two tiles at a time while there are two: their columns share a cache line of a row, which is then read once.
void pack_tiles(const float* from, int64_t stride, int64_t depth, int64_t rows, float* to, float* sums) {
  int64_t m = 0;
  for (; m + 2 * kTileRows <= rows; m += 2 * kTileRows) {
    float *low = to + m * depth, *high = low + depth * kTileRows;
    Vec<8> sum[2] = {};
    for (int64_t k = 0; k < depth; ++k) {
      const float* at = from + k * stride + m;
      __builtin_prefetch(at + kAheadRows * stride, 0, 3);  // rows are too far apart for the machine to predict
      const Vec<8> first = load<8>(at), second = load<8>(at + kTileRows);
      store<8>(low + k * kTileRows, first);
      store<8>(high + k * kTileRows, second);
      sum[0] += first;
      sum[1] += second;
    }
    for (int64_t r = 0; r < 2 * kTileRows; ++r) sums[m + r] += sum[r / kTileRows][r % kTileRows];
  }
  for (; m < rows; m += kTileRows) {
    const int64_t width = at_most(kTileRows, rows - m);
    float* tile = to + m * depth;
    Vec<8> sum{};
    for (int64_t k = 0; k < depth; ++k) {
      Vec<8> column{};
      for (int64_t r = 0; r < width; ++r) column[r] = from[k * stride + m + r];
      store<8>(tile + k * kTileRows, column);
      sum += column;
    }
    for (int64_t r = 0; r < width; ++r) sums[m + r] += sum[r];
  }
}

void multiply(const Product& product, int64_t first, int64_t last) {
  if (product.transposed) return multiply_lanes(product, first, last - first);
  float last_panel[kMostDepth * kPanelColumns];
  const int64_t num_tiles = (last - first + kTileRows - 1) / kTileRows;
  for (int64_t column = 0; column < product.columns; column += kPanelColumns) {
    const int64_t width = at_most(kPanelColumns, product.columns - column);
    const bool packed = product.b_stride == 0;
    Panel panel{product.b + (packed ? column * product.depth : column), packed ? kPanelColumns : product.b_stride};
    if (!packed && (width % kLanes || copies(product.b_stride))) {  // a vector may not reach beyond the last row of B
      copy_panel(panel.at, panel.stride, product.depth, width, last_panel);
      panel = {last_panel, kPanelColumns};
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = first + tile * kTileRows, num_rows = last - row;
      Ahead ahead = next_panel(product, column, tile, num_tiles);
      if (product.a_stride == 0) {
        const Tile tile_of_a{product.a + tile * kTileRows * product.depth};
        multiply_tile(product, tile_of_a, panel, ahead, row, num_rows, column);
        continue;
      }
      const RowMajor rows{product.a + row * product.a_stride, product.a_stride};
      if (column == 0 && num_rows >= 2 * kTileRows)
        ahead = {rows.from(kTileRows).at, product.a_stride, kTileRows, product.depth};
      multiply_tile(product, rows, panel, ahead, row, num_rows, column);
    }
  }
}

}  // namespace hotrow::HOTROW_ISA
