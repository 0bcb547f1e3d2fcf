#include "hotrow/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

// Bodies for wider vectors chosen when the module is loaded; elsewhere the compiler's default.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define HOTROW_LIMIT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HOTROW_LIMIT_CLONES
#endif

namespace hotrow::limits {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;
constexpr int64_t kLanes = 16;  // one cache line of floats, and independent partial sums

struct Span {
  int64_t begin, end;
};

Span share_of(int64_t n, int thread, int threads) { return {n * thread / threads, n * (thread + 1) / threads}; }

inline void prefetch_row(const float* row, int64_t row_floats) {
  for (int64_t d = 0; d < row_floats; d += kLanes) __builtin_prefetch(row + d);
}

HOTROW_LIMIT_CLONES
float read_rows(const float* data, const int64_t* index, int64_t n, int64_t row_floats, int64_t distance) {
  float sum[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    if (distance && i + distance < n) prefetch_row(data + index[i + distance] * row_floats, row_floats);
    const float* row = data + index[i] * row_floats;
    int64_t d = 0;
    for (; d + kLanes <= row_floats; d += kLanes)
      for (int64_t k = 0; k < kLanes; ++k) sum[k] += row[d + k];
    for (; d < row_floats; ++d) sum[0] += row[d];
  }
  float total = 0;
  for (float s : sum) total += s;
  return total;
}

HOTROW_LIMIT_CLONES
float write_rows(float* data, const int64_t* index, int64_t n, int64_t row_floats, int64_t distance) {
  for (int64_t i = 0; i < n; ++i) {
    if (distance && i + distance < n) prefetch_row(data + index[i + distance] * row_floats, row_floats);
    float* row = data + index[i] * row_floats;
    for (int64_t d = 0; d < row_floats; ++d) row[d] += 1e-6f;
  }
  return 0;
}

HOTROW_LIMIT_CLONES
float read_run(const float* data, int64_t n) {
  float sum[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) sum[k] += data[i + k];
  float total = 0;
  for (float s : sum) total += s;
  return total;
}

// Runs work(thread) -> float on `threads` threads at once and returns the seconds from the common start to the last
// end.
template <class Work>
double timed(int threads, const Work& work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::atomic<float> sink{0};  // the sums must be used, or the compiler drops the reads
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t)
    team.emplace_back([&, t] {
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
      sink.store(work(t), std::memory_order_relaxed);
    });
  while (ready.load() < threads) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  for (std::thread& member : team) member.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Buffer::Buffer(int64_t num_floats) : num_floats_(num_floats) {
  const int64_t bytes = (num_floats * int64_t{sizeof(float)} + kHugePage - 1) / kHugePage * kHugePage;
  data_ = static_cast<float*>(std::aligned_alloc(kHugePage, static_cast<size_t>(std::max(bytes, kHugePage))));
  if (data_ == nullptr) throw std::bad_alloc();
#ifdef __linux__
  madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: refused, the loop runs on small pages
#endif
  std::memset(data_, 0, static_cast<size_t>(bytes));
}

Buffer::~Buffer() { std::free(data_); }

double touch_rows(Buffer& buffer, const int64_t* index, int64_t n, int64_t row_floats, bool write, int threads,
                  int distance) {
  return timed(threads, [&](int thread) {
    const Span span = share_of(n, thread, threads);
    const auto loop = [&](auto* body) {
      return body(buffer.data(), index + span.begin, span.end - span.begin, row_floats, distance);
    };
    return write ? loop(write_rows) : loop(read_rows);
  });
}

double stream(Buffer& buffer, int64_t num_read, int64_t num_write, int threads) {
  return timed(threads, [&](int thread) {
    const Span in = share_of(num_read, thread, threads);
    const Span out = share_of(num_write, thread, threads);
    const float sum = read_run(buffer.data() + in.begin, in.end - in.begin);
    std::fill(buffer.data() + num_read + out.begin, buffer.data() + num_read + out.end, 1e-6f);
    return sum;
  });
}

}  // namespace hotrow::limits
