// The least that a lookup of one id per bag and its exact SGD update take: rows are copied to the output, and the
// gradients subtracted from them, with no check, key, sort, graph or Python between. A table's ids go in order on one
// thread, so that repeated rows are exact. For benchmarks/step_profile.py; shares no code with the kernels.
#include <omp.h>
#if defined(__SSE__)
#include <immintrin.h>
#endif

#include <chrono>
#include <cstdint>

namespace {

struct Step {
  float* const* tables;
  const int64_t* ids;  // [num_tables, batch_size]
  int64_t num_tables, batch_size, dim;
  float* out;         // [batch_size, num_tables * dim]
  const float* grad;  // alike
  float lr;
  int64_t distance;  // in rows

  float* row(int64_t t, int64_t b) const { return tables[t] + ids[t * batch_size + b] * dim; }
  int64_t place(int64_t t, int64_t b) const { return (b * num_tables + t) * dim; }
};

constexpr int64_t kGradientsAhead = 6;

// Past the caches where the machine can: a line that is written whole need not be read first.
void put(float* out, const float* row, int64_t dim) {
  int64_t d = 0;
#if defined(__SSE__)
  for (; reinterpret_cast<uintptr_t>(out) % 16 == 0 && d + 4 <= dim; d += 4)
    _mm_stream_ps(out + d, _mm_loadu_ps(row + d));
#endif
  for (; d < dim; ++d) out[d] = row[d];
}

// kDim: of a row; 0: any. kWrites: whether the row is written.
template <int kDim, bool kWrites>
void walk(const Step& s, int64_t t) {
  const int64_t dim = kDim ? kDim : s.dim;
  for (int64_t b = 0; b < s.batch_size; ++b) {
    if (b + s.distance < s.batch_size) {
      const float* ahead = s.row(t, b + s.distance);
      for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(ahead + d, 0, 2);
    }
    float* __restrict row = s.row(t, b);
    if (!kWrites) {
      put(s.out + s.place(t, b), row, dim);
      continue;
    }
    if (b + kGradientsAhead < s.batch_size) {
      const float* ahead = s.grad + s.place(t, b + kGradientsAhead);
      for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(ahead + d, 0, 3);
    }
    const float* __restrict grad = s.grad + s.place(t, b);
    for (int64_t d = 0; d < dim; ++d) row[d] -= s.lr * grad[d];
  }
#if defined(__SSE__)
  _mm_sfence();
#endif
}

template <bool kWrites>
void pass(const Step& s, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t t = 0; t < s.num_tables; ++t) s.dim == 64 ? walk<64, kWrites>(s, t) : walk<0, kWrites>(s, t);
}

}  // namespace

// Seconds of both passes.
extern "C" double bare_step(float* const* tables, const int64_t* ids, int64_t num_tables, int64_t batch_size,
                            int64_t dim, float* out, const float* grad, float lr, int64_t distance, int threads) {
  const Step step{tables, ids, num_tables, batch_size, dim, out, grad, lr, distance};
  const auto start = std::chrono::steady_clock::now();
  pass<false>(step, threads);
  pass<true>(step, threads);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
