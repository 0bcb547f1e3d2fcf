// Sums the gradients of rows by micro-batch, in a tree; contract in hotrow/kernels.h.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

struct Cursor {
  const Occurrences all;
  const int64_t dim;

  [[gnu::always_inline]] void fetch_ahead(int64_t i) const {
    const int64_t ahead = i + kScatteredGradsAhead;
    if (ahead < all.num_keys) prefetch_row<Into::l2>(all.gradient(ahead).at, 0, dim * 4);
  }
  // Whether occurrence i is of this row, and in this leaf or node: `number` is the source's own.
  bool goes_on(int64_t i, uint64_t of_row, int32_t Source::* number, int32_t same) const {
    return i < all.num_keys && all.row(i) == of_row && all.source(i).*number == same;
  }
};

// Sums the occurrences from i on that share i's row and leaf; returns the first that does not.
template <class Acc>
[[gnu::always_inline]] inline int64_t sum_leaf(Acc& sum, const Cursor& cursor, int64_t i) {
  const uint64_t row = cursor.all.row(i);
  const int32_t leaf = cursor.all.source(i).leaf;
  cursor.fetch_ahead(i);
  const Gradient first = cursor.all.gradient(i);
  sum.read_scaled(first.scale, first.at);
  while (cursor.goes_on(++i, row, &Source::leaf, leaf)) {
    cursor.fetch_ahead(i);
    const Gradient g = cursor.all.gradient(i);
    sum.add_scaled(g.scale, g.at);
  }
  return i;
}

template <int kDim>
[[gnu::always_inline]] inline int64_t sum_leaf_into(float* out, const Cursor& cursor, int64_t i) {
  if constexpr (kDim) {
    Row<kDim> sum;
    i = sum_leaf(sum, cursor, i);
    sum.write(out);
  } else {
    AnyRow sum{out, cursor.dim};
    i = sum_leaf(sum, cursor, i);
  }
  return i;
}

inline void add_to(float* __restrict left, const float* __restrict right, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) left[j] = left[j] + right[j];
}

// The subtrees of a row that are not complete: subtree 0 is `out`, any other
// the right half of one whose left half is the subtree before it.
class Stack {
 public:
  Stack(float* out, float* room, int64_t dim) : out_(out), room_(room), dim_(dim) {}

  float* top() const { return depth_ ? room_ + (depth_ - 1) * dim_ : out_; }
  void push(int at_level) { level_[depth_++] = at_level; }
  void complete_below(int at_level) {
    while (depth_ && level_[depth_ - 1] < at_level) {
      const float* right = top();
      --depth_;
      add_to(top(), right, dim_);
    }
  }

 private:
  float* out_;
  float* room_;
  int64_t dim_;
  int depth_ = 0;
  int level_[kMostTreeLevels];
};

template <int kDim>
void sum_rows_of(const Cursor cursor, RowSums* nodes, float* room) {
  const int64_t dim = kDim ? kDim : cursor.dim;
  for (int64_t i = 0; i < cursor.all.num_keys;) {
    const uint64_t row = cursor.all.row(i);
    const int32_t node = cursor.all.source(i).node;
    int32_t leaf = cursor.all.source(i).leaf;
    RowSums& to = nodes[node];
    *to.rows++ = static_cast<int64_t>(row);
    i = sum_leaf_into<kDim>(to.sums, cursor, i);
    if (cursor.goes_on(i, row, &Source::node, node)) {
      Stack stack(to.sums, room, dim);
      do {
        const int32_t next = cursor.all.source(i).leaf;
        const int level = 31 - __builtin_clz(static_cast<uint32_t>(leaf ^ next));  // they part at this bit
        stack.complete_below(level);
        stack.push(level);
        i = sum_leaf_into<kDim>(stack.top(), cursor, i);
        leaf = next;
      } while (cursor.goes_on(i, row, &Source::node, node));
      stack.complete_below(kMostTreeLevels);
    }
    to.sums += dim;
  }
}

}  // namespace

void sum_rows(const Occurrences& all, int64_t dim, RowSums* nodes, float* scratch) {
  const Cursor cursor{all, dim};
  UsualDims::choose(dim, [&](auto known) { sum_rows_of<known.value>(cursor, nodes, scratch); });
}

}  // namespace hotrow::HOTROW_ISA
