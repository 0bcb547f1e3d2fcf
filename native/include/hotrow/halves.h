// Passes over float32 weights of dense layers. For Split-SGD these are in two halves: the upper 16 bits stay where the
// weight was, with zeros below them, and the lower 16 lie in an array of their own.
#pragma once

#include <cstdint>

namespace hotrow {

// Whether the lower 16 bits of all n weights are 0.
bool are_upper_halves(const float* weights, int64_t n, int num_threads);

// low[i] = lower half of weights[i], and zeros in its place
void split_halves(float* weights, uint16_t* low, int64_t n, int num_threads);

// w = (weights[i], low[i]) joined;  w = w - rate * (grad[i] + decay * w), every operation rounded;  split as above.
// Without decay nothing is added to a gradient, not even 0 * w.
void split_sgd(float* weights, uint16_t* low, const float* grad, int64_t n, float rate, float decay, int num_threads);

// weights[i] = a zero with its sign if it is denormal
void flush_denormals(float* weights, int64_t n, int num_threads);

}  // namespace hotrow
