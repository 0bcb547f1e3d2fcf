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
              float* out, int num_threads) {
  const Kernels& set = kernels();
  for_all_samples(num_samples, num_features, dim, num_threads, [&](int64_t first, int64_t last, float* scratch) {
    set.interact(dense, pooled, num_features, dim, first, last, out, scratch);
  });
}

void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_samples,
                       int64_t num_features, int64_t dim, float* grad_dense, float* grad_pooled, int num_threads) {
  const Kernels& set = kernels();
  const int64_t stride = num_features * dim;
  const bool streamed = num_samples * stride > kStreamedFloats && on_whole_lines(grad_pooled, stride);
  for_all_samples(num_samples, num_features, dim, num_threads, [&](int64_t first, int64_t last, float* scratch) {
    set.interact_backward(grad, dense, pooled, num_features, dim, first, last, grad_dense, grad_pooled, scratch,
                          streamed);
  });
}

}  // namespace hotrow
