// The dense ops of a whole batch: dot interaction and the layers of an MLP, cut into tasks for the leaf kernels
// (kernels.h) and run on `num_threads` threads. All matrices are row-major. No result depends on the number of threads.
#pragma once

#include <hotrow/kernels.h>

#include <vector>

namespace hotrow {

void interact(const float* dense, const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim,
              float* out, int num_threads);
void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_samples,
                       int64_t num_features, int64_t dim, float* grad_dense, float* grad_pooled, int num_threads);

// One layer of an MLP: I inputs, O outputs.
struct Layer {
  const float* weight;  // W [O, I]
  int64_t num_inputs, num_outputs;
};

// y = x W^T + bias, then y < 0 ? 0 : y, layer by layer; after the last only if `last_relu`.
//   x [B, I of the first], biases[k] [O] -> outputs[k] [B, O of layer k]. Throws std::bad_alloc.
void mlp(const std::vector<Layer>& layers, const std::vector<const float*>& biases, bool last_relu, const float* x,
         int64_t num_samples, const std::vector<float*>& outputs, int num_threads);

// What is to be made of one layer, for g = dL/dy [B, O] before its ReLU:
struct LayerGradients {
  float* weight;  // g^T x [O, I]
  float* bias;    // sum over b of g [O]
  float* x;       // g W [B, I], and 0 where x <= 0 if a layer made x: g of that layer; null, of the first: not wanted
};

// inputs[k]: what layer k was given, x or the outputs of the layer before. g: of the last layer, which has no ReLU here
// (the caller's g has passed it). Throws std::bad_alloc.
void mlp_backward(const std::vector<Layer>& layers, const std::vector<const float*>& inputs, const float* g,
                  int64_t num_samples, const std::vector<LayerGradients>& gradients, int num_threads);

}  // namespace hotrow
