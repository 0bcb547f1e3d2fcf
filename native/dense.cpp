// Interaction and MLP layers of a whole batch, cut into tasks for the leaf kernels; see hotrow/dense.h. Compiled once,
// for the baseline.
#include <hotrow/cut.h>
#include <hotrow/dense.h>
#include <hotrow/memory.h>
#include <hotrow/parallel.h>

namespace hotrow {
namespace {

// Runs kernel(first, last, scratch of `scratch_floats`) over all samples; every thread has scratch of its own.
template <class Kernel>
void for_all_samples(int64_t num_samples, int64_t scratch_floats, int num_threads, const Kernel& kernel) {
  const int64_t samples_per_task = std::max<int64_t>(16, num_samples / (num_threads * kTasksPerThread));
  std::vector<float> scratch(static_cast<size_t>(scratch_floats * num_threads));
  parallel_for((num_samples + samples_per_task - 1) / samples_per_task, num_threads, [&](int64_t task, int worker) {
    const int64_t first = task * samples_per_task;
    kernel(first, std::min(num_samples, first + samples_per_task), scratch.data() + worker * scratch_floats);
  });
}

}  // namespace

void interact(const float* dense, const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim,
              float* out, int num_threads) {
  const Kernels& set = kernels();
  for_all_samples(num_samples, interact_scratch_floats(num_features, dim), num_threads,
                  [&](int64_t first, int64_t last, float* scratch) {
                    set.interact(dense, pooled, num_features, dim, first, last, out, scratch);
                  });
}

void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_samples,
                       int64_t num_features, int64_t dim, float* grad_dense, float* grad_pooled, int num_threads) {
  const Kernels& set = kernels();
  const int64_t stride = num_features * dim;
  const bool streamed = num_samples * stride > kStreamedFloats && on_whole_lines(grad_pooled, stride);
  for_all_samples(num_samples, interact_scratch_floats(num_features, dim), num_threads,
                  [&](int64_t first, int64_t last, float* scratch) {
                    set.interact_backward(grad, dense, pooled, num_features, dim, first, last, grad_dense, grad_pooled,
                                          scratch, streamed);
                  });
}

namespace {

KeptPages floats(int64_t count) { return KeptPages(static_cast<size_t>(count) * sizeof(float)); }

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// B(k, n) = at[k * depth_stride + n * column_stride], not yet packed.
struct View {
  const float* at;
  int64_t depth, columns;
  int64_t depth_stride, column_stride;

  int64_t packed_columns() const { return round_up(columns, kPanelColumns); }
  int64_t packed_floats() const { return packed_columns() * depth; }
};

// Packs all of B: stretches of kMostDepth of its depth one after another, each as pack_panels lays it out.
void pack(const View& b, float* panels, int num_threads) {
  const Kernels& set = kernels();
  const int64_t panels_per_stretch = b.packed_columns() / kPanelColumns;
  const int64_t num_stretches = (b.depth + kMostDepth - 1) / kMostDepth;
  parallel_for(num_stretches * panels_per_stretch, num_threads, [&](int64_t task, int) {
    const int64_t k = task / panels_per_stretch * kMostDepth, n = task % panels_per_stretch * kPanelColumns;
    const int64_t depth = std::min(kMostDepth, b.depth - k), columns = std::min(kPanelColumns, b.columns - n);
    set.pack_panels(b.at + k * b.depth_stride + n * b.column_stride, b.depth_stride, b.column_stride, depth, columns,
                    panels + k * b.packed_columns() + n * depth);
  });
}

// The stretch of `product`, whose depth is all of it, from k on: what is done to C's values waits for the last.
Product stretch(Product product, int64_t k) {
  const int64_t depth = std::min(kMostDepth, product.depth - k);
  product.add = k > 0;
  if (k + depth < product.depth) {
    product.bias = product.gate = nullptr;
    product.relu = false;
  }
  product.b += k * (product.b_stride ? product.b_stride : round_up(product.columns, kPanelColumns));
  product.depth = depth;
  return product;
}

// C = A B for a row-major A [num_rows, depth].
void multiply_rows(const Product& product, int64_t num_rows, int num_threads) {
  // Large enough that panels are read from L2, small enough that every thread gets some.
  const int64_t most = round_up(std::max<int64_t>(1, num_rows / (2 * num_threads)), kTileRows);
  const int64_t rows_per_task = std::min<int64_t>(128, most);
  parallel_for((num_rows + rows_per_task - 1) / rows_per_task, num_threads, [&](int64_t task, int) {
    const int64_t first = task * rows_per_task, last = std::min(num_rows, first + rows_per_task);
    for (int64_t k = 0; k == 0 || k < product.depth; k += kMostDepth) {
      Product part = stretch(product, k);
      part.a += k;
      kernels().multiply(part, first, last);
    }
  });
}

// C = G^T B for G [depth, num_rows], and the sums of G's columns. Each task packs its own rows of G^T, stretch by
// stretch, in `tiles` of its thread.
void multiply_transposed(const Product& product, const float* g, int64_t num_rows, float* sums, float* tiles,
                         int64_t rows_per_task, int num_threads) {
  parallel_for((num_rows + rows_per_task - 1) / rows_per_task, num_threads, [&](int64_t task, int worker) {
    const int64_t first = task * rows_per_task, last = std::min(num_rows, first + rows_per_task);
    float* own = tiles + worker * rows_per_task * kMostDepth;
    std::fill(sums + first, sums + last, 0.0f);
    for (int64_t k = 0; k == 0 || k < product.depth; k += kMostDepth) {
      Product part = stretch(product, k);
      kernels().pack_tiles(g + k * num_rows + first, num_rows, part.depth, last - first, own, sums + first);
      part.a = own;
      part.a_stride = 0;
      kernels().multiply(part, first, last);
    }
  });
}

constexpr int64_t kSamplesPerTask = 128;  // of a layer of one output, whatever the number of threads

// Calls task(index, first, last) for all samples of a layer of one output.
template <class Task>
void for_output(int64_t num_samples, int num_threads, const Task& task) {
  parallel_for((num_samples + kSamplesPerTask - 1) / kSamplesPerTask, num_threads, [&](int64_t index, int) {
    task(index, index * kSamplesPerTask, std::min(num_samples, (index + 1) * kSamplesPerTask));
  });
}

void linear_output(const Layer& layer, const float* x, float bias, bool relu, float* y, int num_threads) {
  for_output(layer.num_samples, num_threads, [&](int64_t, int64_t first, int64_t last) {
    kernels().output(x, layer.weight, layer.num_inputs, first, last, y);
    for (int64_t b = first; b < last; ++b) {
      y[b] += bias;
      if (relu && y[b] < 0.0f) y[b] = 0.0f;
    }
  });
}

// Every task sums the weight's gradient over its own samples; these sums are added in the order of the samples.
void linear_output_backward(const Layer& layer, const float* x, const float* g, float* grad_weight, float* grad_bias,
                            float* grad_x, bool gated, int num_threads) {
  const int64_t num_samples = layer.num_samples, num_inputs = layer.num_inputs;
  const int64_t num_tasks = (num_samples + kSamplesPerTask - 1) / kSamplesPerTask;
  const int64_t stride = round_up(num_inputs, kFloatsPerLine);
  const KeptPages sums = floats(num_tasks * stride);
  for_output(num_samples, num_threads, [&](int64_t index, int64_t first, int64_t last) {
    float* own = sums.floats() + index * stride;
    std::fill(own, own + num_inputs, 0.0f);
    kernels().output_backward(x, layer.weight, g, num_inputs, gated, first, last, own, grad_x);
  });
  std::fill(grad_weight, grad_weight + num_inputs, 0.0f);
  for (int64_t task = 0; task < num_tasks; ++task) {
    const float* own = sums.floats() + task * stride;
    for (int64_t j = 0; j < num_inputs; ++j) grad_weight[j] += own[j];
  }
  *grad_bias = 0.0f;
  for (int64_t b = 0; b < num_samples; ++b) *grad_bias += g[b];
}

}  // namespace

void linear(const Layer& layer, const float* x, const float* bias, bool relu, float* y, int num_threads) {
  const auto [weight, num_samples, num_inputs, num_outputs] = layer;
  if (num_outputs == 1) return linear_output(layer, x, *bias, relu, y, num_threads);
  const View b{weight, num_inputs, num_outputs, 1, num_inputs};
  const KeptPages panels = floats(b.packed_floats());
  pack(b, panels.floats(), num_threads);
  const Product product{x, num_inputs, panels.floats(), 0, num_inputs, num_outputs, y, false, bias, relu, nullptr};
  multiply_rows(product, num_samples, num_threads);
}

void linear_backward(const Layer& layer, const float* x, const float* g, float* grad_weight, float* grad_bias,
                     float* grad_x, bool gated, int num_threads) {
  const auto [weight, num_samples, num_inputs, num_outputs] = layer;
  if (num_outputs == 1) return linear_output_backward(layer, x, g, grad_weight, grad_bias, grad_x, gated, num_threads);
  const int64_t rows_per_task = round_up(std::max<int64_t>(1, num_outputs / (2 * num_threads)), kTileRows);
  const KeptPages tiles = floats(num_threads * rows_per_task * kMostDepth);
  const Product of_weight{nullptr,     0,     x,       num_inputs, num_samples, num_inputs,
                          grad_weight, false, nullptr, false,      nullptr};
  multiply_transposed(of_weight, g, num_outputs, grad_bias, tiles.floats(), rows_per_task, num_threads);
  if (!grad_x) return;
  const View weights{weight, num_outputs, num_inputs, num_inputs, 1};
  const KeptPages panels = floats(weights.packed_floats());
  pack(weights, panels.floats(), num_threads);
  const Product of_x{g,      num_outputs, panels.floats(), 0,     num_outputs,        num_inputs,
                     grad_x, false,       nullptr,         false, gated ? x : nullptr};
  multiply_rows(of_x, num_samples, num_threads);
}

}  // namespace hotrow
