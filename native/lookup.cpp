// Pooled lookup of one feature and the gradient of its per-sample weights; contracts in hotrow/kernels.h.
#include <hotrow/kernels.h>
#include <hotrow/storage.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

// Output rows to prefetch, which are too far apart for the machine to predict: with one id per sample and dim 16 the
// lookup takes 0.7 of the time.
constexpr int64_t kAheadOut = 16;

// The ids of a range of bags as one stream with look-ahead, across bag borders; T is what the table holds.
template <class Id, class T>
struct IdStream {
  const Rows& table;
  const T* data;
  const Id* ids;
  int64_t end;
  int64_t row_bytes;

  IdStream(const Rows& t, const Bags& bags, int64_t first, int64_t last)
      : table(t),
        data(static_cast<const T*>(t.data)),
        ids(static_cast<const Id*>(bags.ids)),
        end(bags.begin(last)),
        row_bytes(t.dim * static_cast<int64_t>(sizeof(T))) {
    if (end > bags.num_ids) end = bags.num_ids;
    const int64_t begin = bags.begin(first);
    for (int64_t i = begin; i >= 0 && i < begin + kRowsAhead && i < end; ++i) fetch(i);
  }
  [[gnu::always_inline]] void fetch(int64_t i) const {
    prefetch_row<Into::l2>(data, static_cast<uint64_t>(ids[i]), row_bytes);
  }

  // The row at position i, or null if its id is out of range.
  const T* row(int64_t i) const {
    if (i + kRowsAhead < end) fetch(i + kRowsAhead);
    const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
    return id < static_cast<uint64_t>(table.num_rows) ? data + id * static_cast<uint64_t>(table.dim) : nullptr;
  }
};

inline bool bag_in_range(const Bags& bags, int64_t begin, int64_t end) {
  return 0 <= begin && begin <= end && end <= bags.num_ids;
}

template <class Acc, class Id, class T>
inline bool pool(Acc& acc, const IdStream<Id, T>& stream, const Bags& bags, int64_t begin, int64_t end) {
  acc.clear();
  for (int64_t i = begin; i < end; ++i) {
    const T* row = stream.row(i);
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

// Bags of one id without a weight, as in most features of click logs: the sum is the row (with +0 in place of -0). The
// loop over bags of any length takes 1.3 (dim 64) to 2 times (dim 16) as long.
template <int kDim, class Id, class T>
bool lookup_single(const Rows& any_table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride,
                   bool streamed) {
  if (bags.start + first < 0 || bags.start + last > bags.num_ids) return false;
  const int64_t start = bags.start;
  const Rows table{any_table.data, any_table.low, any_table.num_rows, kDim, any_table.storage};
  const IdStream<Id, T> stream(table, bags, first, last);
  for (int64_t b = first; b < last; ++b) {
    const T* row = stream.row(start + b);
    if (!row) return false;
    float* out_row = out + b * stride;
    Row<kDim> sum;
    sum.clear();
    sum.add(row);
    if (kDim % kFloatsPerLine == 0 && streamed) {
      sum.write_streamed(out_row);
    } else {
      if (b + kAheadOut < last) prefetch_row<Into::l1_to_write>(out_row + kAheadOut * stride, 0, kDim * 4);
      sum.write(out_row);
    }
  }
  if (streamed) finish_streams();
  return true;
}

// kDim 0: any dim, summed in the output row.
template <int kDim, class Id, class T>
bool lookup_bags(const Rows& any_table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride,
                 bool streamed) {
  if constexpr (kDim) {
    if (!bags.offsets && !bags.weights)
      return lookup_single<kDim, Id, T>(any_table, bags, first, last, out, stride, streamed);
  }
  const int64_t dim = kDim ? kDim : any_table.dim;
  const Rows table{any_table.data, any_table.low, any_table.num_rows, dim, any_table.storage};
  const IdStream<Id, T> stream(table, bags, first, last);
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = bags.begin(b), end = bags.begin(b + 1);
    if (!bag_in_range(bags, begin, end)) return false;
    float* out_row = out + b * stride;
    if (!streamed && b + kAheadOut < last)
      prefetch_row<Into::l1_to_write>(out_row + kAheadOut * stride, 0, table.dim * 4);
    if constexpr (kDim) {
      Row<kDim> acc;
      if (!pool(acc, stream, bags, begin, end)) return false;
      if (kDim % kFloatsPerLine == 0 && streamed) {
        acc.write_streamed(out_row);
      } else {
        acc.write(out_row);
      }
    } else {
      AnyRow acc{out_row, table.dim};
      if (!pool(acc, stream, bags, begin, end)) return false;
    }
  }
  if (streamed) finish_streams();
  return true;
}

template <class Id, class T>
bool lookup_rows(const Rows& table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride,
                 bool streamed) {
  bool good = false;
  UsualDims::choose(table.dim, [&](auto dim) {
    good = lookup_bags<dim.value, Id, T>(table, bags, first, last, out, stride, streamed);
  });
  return good;
}

template <class Id, class T>
bool weight_gradient_rows(const Rows& table, const Bags& bags, int64_t first, int64_t last, const float* grad,
                          int64_t stride, float* out) {
  const IdStream<Id, T> stream(table, bags, first, last);
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = bags.begin(b), end = bags.begin(b + 1);
    if (!bag_in_range(bags, begin, end)) return false;
    const float divisor = bags.pooling == Pooling::mean ? static_cast<float>(end - begin) : 1.0f;
    for (int64_t i = begin; i < end; ++i) {
      const T* row = stream.row(i);
      if (!row) return false;
      out[i] = fold16(grad + b * stride, row, table.dim) / divisor;
    }
  }
  return true;
}

// Calls work(an element of what lookups read in the table).
template <class Work>
inline bool with_element(const Rows& table, const Work& work) {
  switch (table.storage) {
    case Storage::float16:
      return work(Half{});
    case Storage::split:
      return work(Upper{});
    case Storage::float32:
      break;
  }
  return work(float{});
}

template <class Id>
bool lookup_ids(const Rows& table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride,
                bool streamed) {
  return with_element(table, [&](auto element) {
    return lookup_rows<Id, decltype(element)>(table, bags, first, last, out, stride, streamed);
  });
}

template <class Id>
bool weight_gradient_ids(const Rows& table, const Bags& bags, int64_t first, int64_t last, const float* grad,
                         int64_t stride, float* out) {
  return with_element(table, [&](auto element) {
    return weight_gradient_rows<Id, decltype(element)>(table, bags, first, last, grad, stride, out);
  });
}

}  // namespace

bool lookup(const Rows& table, const Bags& bags, int64_t first, int64_t last, float* out, int64_t stride,
            bool streamed) {
  return bags.wide ? lookup_ids<int64_t>(table, bags, first, last, out, stride, streamed)
                   : lookup_ids<int32_t>(table, bags, first, last, out, stride, streamed);
}

bool weight_gradient(const Rows& table, const Bags& bags, int64_t first, int64_t last, const float* grad,
                     int64_t stride, float* out) {
  return bags.wide ? weight_gradient_ids<int64_t>(table, bags, first, last, grad, stride, out)
                   : weight_gradient_ids<int32_t>(table, bags, first, last, grad, stride, out);
}

}  // namespace hotrow::HOTROW_ISA
