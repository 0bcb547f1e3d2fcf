// How many float32 multiply-adds this machine can do at all: as many independent chains as its widest registers hold,
// no memory touched. For benchmarks/step_profile.py; shares no code with the kernels.
#include <omp.h>

#include <chrono>
#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kChains = 12;  // latency 4 at two a cycle, and some to spare
constexpr int64_t kRounds = 1 << 20;

typedef float Vector __attribute__((vector_size(4 * kLanes)));

float run(float start) {
  Vector chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = Vector{} + start + static_cast<float>(c);
  const Vector by = Vector{} + 0.999f, more = Vector{} + 0.001f;
  for (int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] * by + more;
  }
  float sum = 0;
  for (int c = 0; c < kChains; ++c) sum += chains[c][0];
  return sum;
}

}  // namespace

// Floating-point operations a second on so many threads, a multiply-add being two.
extern "C" double operations_per_s(int threads) {
  float sum = 0;
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : sum)
  for (int t = 0; t < threads; ++t) sum += run(static_cast<float>(t));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // The sum keeps the loops from being left out; it is finite.
  return sum > 1e30f ? 0 : 2.0 * kLanes * kChains * static_cast<double>(kRounds) * threads / seconds;
}
