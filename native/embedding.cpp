// Lookups and initial rows of a whole batch, divided into tasks for the leaf kernels; see hotrow/embedding.h.
// Compiled once, for the baseline. The update is in batch_update.cpp.
#include <hotrow/cut.h>
#include <hotrow/embedding.h>
#include <hotrow/parallel.h>

namespace hotrow {
namespace {

std::pair<const Bags*, int64_t> view_feature(const FeatureBags& feature) { return {&feature.bags, feature.table.dim}; }

// Runs kernel(feature, first, last) over all bags of all features; false if any call returns false.
template <class Kernel>
bool for_features(const std::vector<FeatureBags>& features, int num_threads, const Kernel& kernel) {
  for (const FeatureBags& feature : features) {
    if (!ends_in_range(feature.bags)) return false;
  }
  return for_all_bags(features, team(bytes_of_all_bags(features, view_feature), num_threads), view_feature, kernel);
}

// Runs piece(begin, end) over rows of `dim` floats, a megabyte at a time.
template <class Piece>
void for_pieces_of_rows(int64_t num_rows, int64_t dim, int num_threads, const Piece& piece) {
  if (dim == 0) return;
  const int64_t step = (1 << 20) / (dim * static_cast<int64_t>(sizeof(float))) + 1;
  parallel_for((num_rows + step - 1) / step, num_threads,
               [&](int64_t task, int) { piece(task * step, std::min(num_rows, (task + 1) * step)); });
}

}  // namespace

bool lookup(const std::vector<FeatureBags>& features, float* out, int64_t stride, int num_threads) {
  const Kernels& set = kernels();
  const bool large = !features.empty() && features[0].bags.num_bags * stride > kStreamedFloats;
  return for_features(features, num_threads, [&](const FeatureBags& feature, int64_t first, int64_t last) {
    float* columns = out + feature.column;
    const bool streamed = large && on_whole_lines(columns, stride);
    return set.lookup(feature.table, feature.bags, first, last, columns, stride, streamed);
  });
}

bool weight_gradient(const std::vector<FeatureBags>& features, const float* grad, int64_t stride, float* out,
                     int num_threads) {
  const Kernels& set = kernels();
  return for_features(features, num_threads, [&](const FeatureBags& feature, int64_t first, int64_t last) {
    return set.weight_gradient(feature.table, feature.bags, first, last, grad + feature.column, stride, out);
  });
}

void fill_uniform(uint64_t key, int64_t first, int64_t step, int64_t count, int64_t column, int64_t dim, float bound,
                  int64_t zero_rows, float* out, int num_threads) {
  const Kernels& set = kernels();
  for_pieces_of_rows(count, dim, num_threads, [&](int64_t begin, int64_t end) {
    set.fill_uniform(key, first + begin * step, step, end - begin, column, dim, bound, zero_rows, out + begin * dim);
  });
}

void fill_uniform_rows(uint64_t key, const int64_t* rows, int64_t count, int64_t dim, float bound, int64_t zero_rows,
                       float* out, int num_threads) {
  const Kernels& set = kernels();
  for_pieces_of_rows(count, dim, num_threads, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // one call for rows with equal steps, such as those of one rank
      int64_t next = begin + 1;
      const int64_t step = next < end ? rows[next] - rows[begin] : 1;
      while (step > 0 && next < end && rows[next] - rows[next - 1] == step) ++next;
      set.fill_uniform(key, rows[begin], std::max<int64_t>(step, 1), next - begin, 0, dim, bound, zero_rows,
                       out + begin * dim);
      begin = next;
    }
  });
}

}  // namespace hotrow
