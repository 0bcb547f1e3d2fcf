// The types of the kernels: plain structs of raw pointers and sizes. No Python, no torch, no ownership.
//
// Legend: B bags (samples), D embedding dim, N rows. All matrices are row-major, and float32 unless stated otherwise;
// sizes and offsets are 64-bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

inline constexpr int64_t kFloatsPerLine = 16;  // of the cache

enum class Pooling : int32_t { sum = 0, mean = 1 };
// How the weights of a table are stored. Lookups and updates always compute in float32; kernels.h has the rules.
enum class Storage : int32_t { float32 = 0, float16 = 1, split = 2 };
enum class Algorithm : int32_t { sgd = 0, adagrad = 1, row_wise_adagrad = 2, adam = 3, ftrl = 4 };

// The rows of one table that are in fast memory. An id is a slot of this array: the kernels do not know whether the
// array is the whole table or a cache in front of a slower tier.
struct Rows {
  void* data;     // [num_rows, dim]: float; binary16; or, if the storage is split, the upper halves of floats
  uint16_t* low;  // [num_rows, dim], the lower halves of split storage; else null
  int64_t num_rows;
  int64_t dim;
  Storage storage;
};

// The bags of one feature in one batch:  ids of bag b = ids[begin(b) .. begin(b + 1)).
struct Bags {
  const void* ids;         // int64 when wide, else int32
  const int64_t* offsets;  // [num_bags + 1], positions in ids; null: bag b holds the one id ids[start + b]
  const float* weights;    // per position of ids; null: all 1
  int64_t num_ids;         // length of ids: no offset may exceed it
  int64_t num_bags;
  int64_t start;
  Pooling pooling;
  bool wide;

  // Always inlined: an out-of-line copy shared by all instruction sets could contain instructions of the wrong one.
  [[gnu::always_inline]] int64_t begin(int64_t b) const { return offsets ? offsets[b] : start + b; }
};

// Positions [first, last) of a batch's ids look rows up in `table`.
struct TableSpan {
  size_t table;
  int64_t first, last;
};

// Where the gradients of one feature come from in an update. The gradient of item `index` is
//   g = scale[index] * grad[bag_of[index], :]          (bag_of null: the index is the bag; scale null: 1)
struct Source {
  const float* grad;  // first column of the feature; row stride in floats
  int64_t stride;
  const int64_t* bag_of;
  const float* scale;
  int32_t leaf = 0;  // its micro-batch, and the node of the tree to which that belongs: see sum_rows in kernels.h
  int32_t node = 0;
};

struct Gradient {
  const float* at;
  float scale;
};

// Occurrences of the rows of one table. key = row << row_shift | source << source_shift | index; occurrences of one row
// keep the order (feature, forward pass, bag, position) of the batch.
struct Occurrences {
  const uint64_t* keys;
  int64_t num_keys;
  const Source* sources;
  int row_shift;
  int source_shift;

  // Always inlined, as Bags::begin is; besides, GCC 12 keeps some of so many copies as calls, which cost 25 % of the
  // time of an update at dim 16.
  [[gnu::always_inline]] uint64_t row(int64_t i) const { return keys[i] >> row_shift; }
  // The part of a key that says which gradient its occurrence takes.
  [[gnu::always_inline]] uint64_t item(int64_t i) const { return keys[i] & ((uint64_t{1} << row_shift) - 1); }
  [[gnu::always_inline]] const Source& source(int64_t i) const { return sources[item(i) >> source_shift]; }
  [[gnu::always_inline]] Gradient gradient(int64_t i) const {
    const Source& from = source(i);
    const int64_t index = static_cast<int64_t>(item(i) & ((uint64_t{1} << source_shift) - 1));
    const int64_t bag = from.bag_of ? from.bag_of[index] : index;
    return {from.grad + bag * from.stride, from.scale ? from.scale[index] : 1.0f};
  }
};

// Rows whose gradients an adaptive rule sums before it applies any of them.
inline constexpr int64_t kRowsTogether = 16;

// Where the next row of a node and its sum are written.
struct RowSums {
  int64_t* rows;
  float* sums;
};
inline constexpr int kMostTreeLevels = 31;  // leaves are numbered by int32

// How a matrix product C = A B is divided: tiles of rows of A and C by panels of columns of B and C.
inline constexpr int64_t kTileRows = 8;
inline constexpr int64_t kPanelColumns = 48;
inline constexpr int64_t kMostDepth = 512;  // of one product: a panel of B then takes 96 KiB, which fits any L2

// Some rows of a product, and what a layer does to them while they are in registers.
struct Product {
  const float* a;  // [rows, depth]; if its row stride is 0, tiles made by pack_tiles
  int64_t a_stride;
  const float*
      b;  // [depth, columns]; if its row stride is 0, panels made by pack_panels; or, `transposed`, [columns, depth]
  int64_t b_stride;
  int64_t depth, columns;  // depth at most kMostDepth
  float* c;                // [rows, columns]
  bool add;                // to what C holds
  const float* bias;       // [columns], added; or null
  bool relu;               // C = C < 0 ? 0 : C, so that NaN stays
  const float*
      gate;  // [rows, columns] or null: C = gate <= 0 ? 0 : scale C, the gradient through a ReLU whose output it is
  const float* start = nullptr;  // [columns, rounded up to kPanelColumns], with which sums begin; or null: with 0
  int64_t first = 0, last = 0;   // of the depth, what is summed; if last is 0, up to its end
  float scale = 1.0f;
  bool transposed = false;  // B(k, n) = b[n * b_stride + k], for at most kTileRows rows; start is null, A row-major
};

// What an optimizer does to a row; kernels.h has the formulas.
struct Rule {
  Algorithm algorithm;
  float lr;
  float eps;                         // the Adagrads and adam
  float beta1, rest1, beta2, rest2;  // adam; rest = 1 - beta, each rounded once
  float beta, l1, l2;                // ftrl alone
};

// Optimizer state of a table: as many arrays as its algorithm keeps, each [num_rows, state_dim].
inline constexpr int kMostStates = 2;
struct States {
  float* data[kMostStates];
};
constexpr int num_states(Algorithm algorithm) {
  return algorithm == Algorithm::sgd ? 0 : algorithm == Algorithm::adam || algorithm == Algorithm::ftrl ? 2 : 1;
}
constexpr int64_t state_dim(Algorithm algorithm, int64_t dim) {
  return algorithm == Algorithm::row_wise_adagrad ? 1 : dim;
}

}  // namespace hotrow
