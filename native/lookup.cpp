// Pooled lookup of one feature and the gradient of its per-sample weights; contracts in hotrow/kernels.h.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

// Rows to fetch ahead of their use, across bag borders: each is one or more random DRAM reads. At dim 64 anything from
// 4 to 32 is within 5 %; rows of one cache line keep too few reads in flight at 16.
inline int64_t rows_ahead(int64_t dim) { return dim <= 16 ? 32 : 16; }

// The ids of a range of bags as one stream with look-ahead.
template <class Id>
struct IdStream {
  const Rows& table;
  const Id* ids;
  int64_t end;
  int64_t ahead;

  IdStream(const Rows& t, const Bags& bags, int64_t first, int64_t last)
      : table(t), ids(static_cast<const Id*>(bags.ids)), end(bags.begin(last)), ahead(rows_ahead(t.dim)) {
    if (end > bags.num_ids) end = bags.num_ids;
    const int64_t begin = bags.begin(first);
    for (int64_t i = begin; i >= 0 && i < begin + ahead && i < end; ++i) fetch(i);
  }
  [[gnu::always_inline]] void fetch(int64_t i) const {
    prefetch_row<false>(table.data, static_cast<uint64_t>(ids[i]), table.dim);
  }

  // The row of position i, or null when its id is out of range.
  const float* row(int64_t i) const {
    if (i + ahead < end) fetch(i + ahead);
    const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
    return id < static_cast<uint64_t>(table.num_rows) ? table.data + id * static_cast<uint64_t>(table.dim) : nullptr;
  }
};

inline bool bag_in_range(const Bags& bags, int64_t begin, int64_t end) {
  return 0 <= begin && begin <= end && end <= bags.num_ids;
}

template <class Acc, class Id>
inline bool pool(Acc& acc, const IdStream<Id>& stream, const Bags& bags, int64_t begin, int64_t end) {
  acc.clear();
  for (int64_t i = begin; i < end; ++i) {
    const float* row = stream.row(i);
    if (!row) return false;
    if (bags.weights) {
      acc.add_scaled(bags.weights[i], row);
    } else {
      acc.add(row);
    }
  }
  if (bags.pooling == Pooling::mean && end > begin) acc.divide(static_cast<float>(end - begin));
  return true;
}

// kDim 0: any dim, summed in the output row.
template <int kDim, class Id>
bool lookup_bags(const Rows& any_table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride) {
  const Rows table{any_table.data, any_table.num_rows, kDim ? kDim : any_table.dim};
  const IdStream<Id> stream(table, bags, first, last);
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = bags.begin(b), end = bags.begin(b + 1);
    if (!bag_in_range(bags, begin, end)) return false;
    float* out_row = out + b * stride;
    if constexpr (kDim) {
      Row<kDim> acc;
      if (!pool(acc, stream, bags, begin, end)) return false;
      acc.write(out_row);
    } else {
      AnyRow acc{out_row, table.dim};
      if (!pool(acc, stream, bags, begin, end)) return false;
    }
  }
  return true;
}

template <class Id>
bool lookup_ids(const Rows& table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride) {
  switch (table.dim) {
    case 4:
      return lookup_bags<4, Id>(table, bags, first, last, out, stride);
    case 8:
      return lookup_bags<8, Id>(table, bags, first, last, out, stride);
    case 16:
      return lookup_bags<16, Id>(table, bags, first, last, out, stride);
    case 32:
      return lookup_bags<32, Id>(table, bags, first, last, out, stride);
    case 64:
      return lookup_bags<64, Id>(table, bags, first, last, out, stride);
    case 128:
      return lookup_bags<128, Id>(table, bags, first, last, out, stride);
    default:
      return lookup_bags<0, Id>(table, bags, first, last, out, stride);
  }
}

template <class Id>
bool weight_gradient_ids(const Rows& table, const Bags& bags, int64_t first, int64_t last, const float* grad,
                         int64_t stride, float* out) {
  const IdStream<Id> stream(table, bags, first, last);
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = bags.begin(b), end = bags.begin(b + 1);
    if (!bag_in_range(bags, begin, end)) return false;
    const float divisor = bags.pooling == Pooling::mean ? static_cast<float>(end - begin) : 1.0f;
    for (int64_t i = begin; i < end; ++i) {
      const float* row = stream.row(i);
      if (!row) return false;
      out[i] = fold16(grad + b * stride, row, table.dim) / divisor;
    }
  }
  return true;
}

}  // namespace

bool lookup(const Rows& table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride) {
  return bags.wide ? lookup_ids<int64_t>(table, bags, first, last, out, stride)
                   : lookup_ids<int32_t>(table, bags, first, last, out, stride);
}

bool weight_gradient(const Rows& table, const Bags& bags, int64_t first, int64_t last, const float* grad,
                     int64_t stride, float* out) {
  return bags.wide ? weight_gradient_ids<int64_t>(table, bags, first, last, grad, stride, out)
                   : weight_gradient_ids<int32_t>(table, bags, first, last, grad, stride, out);
}

}  // namespace hotrow::HOTROW_ISA
