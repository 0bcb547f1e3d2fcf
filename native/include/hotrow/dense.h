// The dense ops of a whole batch: dot interaction and the layers of an MLP, cut into tasks for the leaf kernels
// (kernels.h) and run on `num_threads` threads. All matrices are row-major. No result depends on the number of threads.
#pragma once

#include <hotrow/kernels.h>

namespace hotrow {

void interact(const float* dense, const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim,
              float* out, int num_threads);
void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_samples,
                       int64_t num_features, int64_t dim, float* grad_dense, float* grad_pooled, int num_threads);

// One layer of an MLP over a batch: B samples, I inputs, O outputs.
struct Layer {
  const float* weight;  // W [O, I]
  int64_t num_samples, num_inputs, num_outputs;
};

// y = x W^T + bias, then y < 0 ? 0 : y where `relu`.  x [B, I], bias [O] -> y [B, O]. Throws std::bad_alloc.
void linear(const Layer& layer, const float* x, const float* bias, bool relu, float* y, int num_threads);

// For g = dL/dy [B, O] of a layer without ReLU (the caller's g has passed it):
//     grad_weight = g^T x [O, I];  grad_bias = sum over b of g [O]
//     grad_x = g W [B, I], and 0 where x <= 0 if `gated`: the gradient before the ReLU that made x;  null: not wanted
// Throws std::bad_alloc.
void linear_backward(const Layer& layer, const float* x, const float* g, float* grad_weight, float* grad_bias,
                     float* grad_x, bool gated, int num_threads);

}  // namespace hotrow
