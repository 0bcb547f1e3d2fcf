// Applies an optimizer to occurrences, row by row; contract in hotrow/kernels.h.
#include <hotrow/kernels.h>
#include <hotrow/storage.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

// A table's gradient columns are mostly in L2 already, except when samples have one id each. With one line per row,
// more of them must then be in flight: 20 ahead take 0.8 of the time of 6.
inline int64_t grads_ahead(int64_t dim) { return dim <= kFloatsPerLine ? 20 : 6; }

// The weights of a table from element `at` on, as a P for `load` and `store`.
template <class P>
P weights_from(const Rows& table, uint64_t at) {
  return static_cast<P>(table.data) + at;
}
template <>
inline Joined weights_from<Joined>(const Rows& table, uint64_t at) {
  return {static_cast<Upper*>(table.data) + at, table.low + at};
}
template <class P>
constexpr int64_t kWeightBytes = 2;  // in table.data
template <>
constexpr int64_t kWeightBytes<float*> = 4;
template <class P>
constexpr bool kInHalves = false;
template <>
constexpr bool kInHalves<Joined> = true;

template <class P>
struct Cursor {
  // By value, as the cursor itself is passed.
  const Rows table;
  const Occurrences all;
  const States states;
  int num_states;
  int64_t state_dim;

  int64_t row_bytes() const { return table.dim * kWeightBytes<P>; }
  P weights(uint64_t row) const { return weights_from<P>(table, row * static_cast<uint64_t>(table.dim)); }

  // Always inlined, like the loops below, for the reason that Occurrences has.
  [[gnu::always_inline]] void fetch_row(int64_t i) const {
    prefetch_row<Into::l2>(table.data, all.row(i), row_bytes());
    if constexpr (kInHalves<P>) prefetch_row<Into::l2>(table.low, all.row(i), row_bytes());
#pragma GCC unroll 2
    for (int s = 0; s < kMostStates; ++s) {
      if (s < num_states) prefetch_row<Into::l2>(states.data[s], all.row(i), state_dim * 4);
    }
  }
  // Called once per occurrence, in order. scattered: the keys are in row order, not in the batch's order.
  template <bool kScattered>
  [[gnu::always_inline]] void fetch_ahead(int64_t i) const {
    if (i + kRowsAhead < all.num_keys) fetch_row(i + kRowsAhead);
    const int64_t grad = i + (kScattered ? kScatteredGradsAhead : grads_ahead(table.dim));
    if (grad < all.num_keys && (kScattered || all.item(grad) != all.item(grad - 1)))
      prefetch_row<kScattered ? Into::l2 : Into::l1>(all.gradient(grad).at, 0, table.dim * 4);
  }
  [[gnu::always_inline]] void fetch_first() const {
    for (int64_t i = 0; i < kRowsAhead && i < all.num_keys; ++i) fetch_row(i);
  }
};

// What SGD subtracts from a row, lr * (scale * gradient). The ids of a bag that follow each other take the same.
template <int kDim>
struct Step {
  Row<kDim> row = {};
  uint64_t item = ~uint64_t{0};
};

// Applies SGD to the occurrences from i on that share i's row; returns the first that does not.
template <int kDim, class P>
[[gnu::always_inline]] inline int64_t descend(Row<kDim>& weight, Step<kDim>& step, float lr, const Cursor<P>& cursor,
                                              int64_t i) {
  const uint64_t row = cursor.all.row(i);
  do {
    cursor.template fetch_ahead<false>(i);
    if (cursor.all.item(i) != step.item) {
      const Gradient g = cursor.all.gradient(i);
      step.row.read_scaled(g.scale, g.at);
      step.row.multiply(lr);
      step.item = cursor.all.item(i);
    }
    weight.subtract(step.row);
  } while (++i < cursor.all.num_keys && cursor.all.row(i) == row);
  return i;
}

template <class P>
[[gnu::always_inline]] inline int64_t descend(AnyRow& weight, float lr, const Cursor<P>& cursor, int64_t i) {
  const uint64_t row = cursor.all.row(i);
  do {
    cursor.template fetch_ahead<false>(i);
    const Gradient g = cursor.all.gradient(i);
    weight.subtract_scaled(lr, g.scale, g.at);
  } while (++i < cursor.all.num_keys && cursor.all.row(i) == row);
  return i;
}

template <class Acc, class P>
[[gnu::always_inline]] inline int64_t sum_gradients(Acc& sum, const Cursor<P>& cursor, int64_t i) {
  const uint64_t row = cursor.all.row(i);
  const Gradient first = cursor.all.gradient(i);
  cursor.template fetch_ahead<true>(i);
  sum.read_scaled(first.scale, first.at);
  while (++i < cursor.all.num_keys && cursor.all.row(i) == row) {
    cursor.template fetch_ahead<true>(i);
    const Gradient g = cursor.all.gradient(i);
    sum.add_scaled(g.scale, g.at);
  }
  return i;
}

inline void adagrad(const Rule& rule, int64_t dim, const float* __restrict g, float* __restrict h,
                    float* __restrict w) {
  for (int64_t j = 0; j < dim; ++j) {
    h[j] = h[j] + g[j] * g[j];
    w[j] = w[j] - rule.lr * (g[j] / (__builtin_sqrtf(h[j]) + rule.eps));
  }
}

inline void row_wise_adagrad(const Rule& rule, int64_t dim, const float* __restrict g, float* __restrict h,
                             float* __restrict w) {
  *h = *h + fold16(g, g, dim) / static_cast<float>(dim);
  const float step = rule.lr / (__builtin_sqrtf(*h) + rule.eps);
  for (int64_t j = 0; j < dim; ++j) w[j] = w[j] - step * g[j];
}

inline void adam(const Rule& rule, int64_t dim, const float* __restrict g, float* __restrict m, float* __restrict v,
                 float* __restrict w) {
  for (int64_t j = 0; j < dim; ++j) {
    m[j] = rule.beta1 * m[j] + rule.rest1 * g[j];
    v[j] = rule.beta2 * v[j] + rule.rest2 * (g[j] * g[j]);
    w[j] = w[j] - rule.lr * (m[j] / (__builtin_sqrtf(v[j]) + rule.eps));
  }
}

inline void ftrl(const Rule& rule, int64_t dim, const float* __restrict g, float* __restrict z, float* __restrict n,
                 float* __restrict w) {
  for (int64_t j = 0; j < dim; ++j) {
    const float before = __builtin_sqrtf(n[j]);
    n[j] = n[j] + g[j] * g[j];
    const float after = __builtin_sqrtf(n[j]);
    z[j] = z[j] + (g[j] - (after - before) / rule.lr * w[j]);
    // Written so that NaN is not within l1 and reaches the weight.
    const float shrunk = __builtin_fabsf(z[j]) <= rule.l1 ? 0.0f : z[j] - __builtin_copysignf(rule.l1, z[j]);
    w[j] = -(shrunk / ((rule.beta + after) / rule.lr + rule.l2));
  }
}

// Rule and cursor are passed by value, so that they are in registers whether or not these two are inlined: the compiler
// must assume that a store to a row changes what a reference refers to.
template <int kDim, class P>
void sgd_rows(const Rule rule, const Cursor<P> cursor, float* room) {
  [[maybe_unused]] Step<kDim ? kDim : 4> step;
  for (int64_t i = 0; i < cursor.all.num_keys;) {
    const P w = cursor.weights(cursor.all.row(i));
    if constexpr (kDim) {
      Row<kDim> weight;
      weight.read(w);
      i = descend(weight, step, rule.lr, cursor, i);
      weight.write(w);
    } else {
      AnyRow weight{as_floats(w, cursor.table.dim, room), cursor.table.dim};
      i = descend(weight, rule.lr, cursor, i);
      put_back(weight.at, w, cursor.table.dim);
    }
  }
}

// SGD of the bags of one feature, row by row as their ids come.
template <int kDim, class P, class Id>
void descend_bags(const Rule rule, const Rows table, const Bags bags, const float* grad, int64_t stride, float* room) {
  const int64_t dim = kDim ? kDim : table.dim, limit = bags.begin(bags.num_bags);
  const Id* ids = static_cast<const Id*>(bags.ids);
  const int64_t bags_ahead = 1 + grads_ahead(dim) * bags.num_bags / (limit - bags.begin(0) + 1);
  const auto fetch_row = [=](int64_t i) __attribute__((always_inline)) {
    prefetch_row<Into::l2>(table.data, static_cast<uint64_t>(ids[i]), dim * kWeightBytes<P>);
    if constexpr (kInHalves<P>) prefetch_row<Into::l2>(table.low, static_cast<uint64_t>(ids[i]), dim * kWeightBytes<P>);
  };
  for (int64_t i = bags.begin(0); i < bags.begin(0) + kRowsAhead && i < limit; ++i) fetch_row(i);
  [[maybe_unused]] Row<kDim ? kDim : 4> step = {};  // what is subtracted: the same for a bag without weights
  for (int64_t b = 0; b < bags.num_bags; ++b) {
    const int64_t begin = bags.begin(b), end = bags.begin(b + 1);
    const float* g = grad + b * stride;
    if (b + bags_ahead < bags.num_bags) prefetch_row<Into::l1>(g + bags_ahead * stride, 0, dim * 4);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < limit) fetch_row(i + kRowsAhead);
      const float weight_of = bags.weights ? bags.weights[i] : 1.0f;
      const float scale = bags.pooling == Pooling::mean ? weight_of / static_cast<float>(end - begin) : weight_of;
      const P w = weights_from<P>(table, static_cast<uint64_t>(ids[i]) * static_cast<uint64_t>(dim));
      if constexpr (kDim) {
        if (bags.weights || i == begin) {
          step.read_scaled(scale, g);
          step.multiply(rule.lr);
        }
        Row<kDim> weight;
        weight.read(w);
        weight.subtract(step);
        weight.write(w);
      } else {
        AnyRow weight{as_floats(w, dim, room), dim};
        weight.subtract_scaled(rule.lr, scale, g);
        put_back(weight.at, w, dim);
      }
    }
  }
}

template <class P>
void descend_ids(const Rule& rule, const Rows& table, const Bags& bags, const float* grad, int64_t stride,
                 float* room) {
  UsualDims::choose(table.dim, [&](auto dim) {
    if (bags.wide) return descend_bags<dim.value, P, int64_t>(rule, table, bags, grad, stride, room);
    descend_bags<dim.value, P, int32_t>(rule, table, bags, grad, stride, room);
  });
}

// One step of the row with its summed gradient. Inlined, so that the loops of each algorithm see a constant dim.
[[gnu::always_inline]] inline void step(const Rule& rule, int64_t dim, const float* g, const States& states,
                                        uint64_t row, float* w) {
  const uint64_t at = row * static_cast<uint64_t>(state_dim(rule.algorithm, dim));
  float* first = states.data[0] + at;
  switch (rule.algorithm) {
    case Algorithm::adagrad:
      return adagrad(rule, dim, g, first, w);
    case Algorithm::row_wise_adagrad:
      return row_wise_adagrad(rule, dim, g, first, w);
    case Algorithm::adam:
      return adam(rule, dim, g, first, states.data[1] + at, w);
    case Algorithm::ftrl:
      return ftrl(rule, dim, g, first, states.data[1] + at, w);
    case Algorithm::sgd:
      return;
  }
}

// Some rows are summed before they take their steps, whose square roots and divisions then overlap: 0.92 to 0.96 of
// the time of row-wise Adagrad, 8 tables x 50 ids, dim 64.
template <int kDim, class P>
void adaptive_rows(const Rule rule, const Cursor<P> cursor, float* g, float* room) {
  const int64_t dim = kDim ? kDim : cursor.table.dim;
  uint64_t rows[kRowsTogether];
  for (int64_t i = 0; i < cursor.all.num_keys;) {
    int64_t num_rows = 0;
    for (; num_rows < kRowsTogether && i < cursor.all.num_keys; ++num_rows) {
      rows[num_rows] = cursor.all.row(i);
      if constexpr (kDim) {
        Row<kDim> sum;
        i = sum_gradients(sum, cursor, i);
        sum.write(g + num_rows * dim);
      } else {
        AnyRow sum{g + num_rows * dim, dim};
        i = sum_gradients(sum, cursor, i);
      }
    }
    for (int64_t k = 0; k < num_rows; ++k) {
      const P w = cursor.weights(rows[k]);
      float* floats = as_floats(w, dim, room);
      step(rule, dim, g + k * dim, cursor.states, rows[k], floats);
      put_back(floats, w, dim);
    }
  }
}

template <int kDim, class P>
void update_rows(const Rule& rule, const Rows& table, const States& states, const Occurrences& all, float* scratch) {
  const int64_t dim = kDim ? kDim : table.dim;
  const Cursor<P> cursor{{table.data, table.low, table.num_rows, dim, table.storage},
                         all,
                         states,
                         num_states(rule.algorithm),
                         state_dim(rule.algorithm, dim)};
  cursor.fetch_first();
  if (rule.algorithm == Algorithm::sgd) {
    sgd_rows<kDim>(rule, cursor, scratch);
  } else {
    adaptive_rows<kDim>(rule, cursor, scratch + dim, scratch);
  }
}

template <class P>
void update_weights(const Rule& rule, const Rows& table, const States& states, const Occurrences& all, float* scratch) {
  UsualDims::choose(table.dim, [&](auto dim) { update_rows<dim.value, P>(rule, table, states, all, scratch); });
}

}  // namespace

void update(const Rule& rule, const Rows& table, const States& states, const Occurrences& occurrences, float* scratch) {
  switch (table.storage) {
    case Storage::float32:
      return update_weights<float*>(rule, table, states, occurrences, scratch);
    case Storage::float16:
      return update_weights<Half*>(rule, table, states, occurrences, scratch);
    case Storage::split:
      return update_weights<Joined>(rule, table, states, occurrences, scratch);
  }
}

void descend(const Rule& rule, const Rows& table, const Bags& bags, const float* grad, int64_t stride, float* scratch) {
  if (table.storage == Storage::split) return descend_ids<Joined>(rule, table, bags, grad, stride, scratch);
  descend_ids<float*>(rule, table, bags, grad, stride, scratch);
}

}  // namespace hotrow::HOTROW_ISA
