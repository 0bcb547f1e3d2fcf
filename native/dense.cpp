// The dot interaction of a whole batch, divided into tasks for the leaf kernels; see hotrow/dense.h. Compiled once, for
// the baseline.
#include <hotrow/cut.h>
#include <hotrow/dense.h>
#include <hotrow/parallel.h>

namespace hotrow {
namespace {

// Runs kernel(first, last, scratch of `scratch_floats`) over all samples; every thread has its own scratch.
template <class Kernel>
void for_all_samples(int64_t num_samples, int64_t num_features, int64_t dim, int num_threads, const Kernel& kernel) {
  const int64_t scratch_floats = interact_scratch_floats(num_features, dim);
  num_threads = team(work_of_products(num_samples * num_features * num_features * dim), num_threads);
  const int64_t samples_per_task = std::max<int64_t>(16, num_samples / (num_threads * kTasksPerThread));
  std::vector<float> scratch(static_cast<size_t>(scratch_floats * num_threads));
  parallel_for<Denormals::flushed>(
      (num_samples + samples_per_task - 1) / samples_per_task, num_threads, [&](int64_t task, int worker) {
        const int64_t first = task * samples_per_task;
        kernel(first, std::min(num_samples, first + samples_per_task), scratch.data() + worker * scratch_floats);
      });
}

}  // namespace

void interact(const float* dense, const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim,
              float* out, int64_t stride, int num_threads) {
  const Kernels& set = kernels();
  for_all_samples(num_samples, num_features, dim, num_threads, [&](int64_t first, int64_t last, float* scratch) {
    set.interact(dense, pooled, num_features, dim, first, last, out, stride, scratch);
  });
}

void interact_backward(const float* grad, int64_t stride, const float* grad_first, const float* dense,
                       const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim, float* grad_dense,
                       float* grad_pooled, int num_threads) {
  const Kernels& set = kernels();
  const int64_t width = num_features * dim;
  const bool streamed = num_samples * width > kStreamedFloats && on_whole_lines(grad_pooled, width);
  for_all_samples(num_samples, num_features, dim, num_threads, [&](int64_t first, int64_t last, float* scratch) {
    set.interact_backward(grad, stride, grad_first, dense, pooled, num_features, dim, first, last, grad_dense,
                          grad_pooled, scratch, streamed);
  });
}

void move_member_rows(const MemberRows& shape, const std::vector<Drop>& drops, float* apart, float* together,
                      bool to_apart, int num_threads) {
  const auto [members, samples, features, dim] = shape;
  constexpr int64_t kSamples = 16;
  num_threads = team(members * samples * features * dim * static_cast<int64_t>(2 * sizeof(float)), num_threads);
  parallel_for((samples + kSamples - 1) / kSamples, num_threads, [&](int64_t task, int) {
    const int64_t first = task * kSamples, last = std::min(samples, first + kSamples);
    std::vector<float> factors(static_cast<size_t>((last - first) * features));
    for (int64_t m = 0; m < members; ++m) {
      std::fill(factors.begin(), factors.end(), 1.0f);
      if (!drops.empty()) drop(drops[static_cast<size_t>(m)], features, first, last, factors.data() - first * features);
      for (int64_t row = first * features; row < last * features; ++row) {
        float *own = apart + (m * samples * features + row) * dim, *other = together + (row * members + m) * dim;
        if (to_apart) std::swap(own, other);
        const float factor = factors[static_cast<size_t>(row - first * features)];
        int64_t d = 0;
        for (; d + 4 <= dim; d += 4)
          for (int64_t e = d; e < d + 4; ++e) other[e] = own[e] * factor;
        for (; d < dim; ++d) other[d] = own[d] * factor;
      }
    }
  });
}

}  // namespace hotrow
