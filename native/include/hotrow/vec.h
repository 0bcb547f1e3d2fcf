// Vectors of the width that this file is compiled for, and a row of D floats in them. Only for the kernel files: all
// names are in the namespace of the instruction set. Uses GCC's vector extension, so the same text runs on any machine.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace hotrow::HOTROW_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <int N>
using Vec = typename VectorOf<float, N>::type;

template <int N>
inline Vec<N> load(const float* p) {
  Vec<N> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <int N>
inline void store(float* p, Vec<N> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// A `store` that bypasses the caches, to an address aligned to the vector: a line that is written whole need not be
// read first. finish_streams makes what was written visible to other threads, as plain stores are.
inline void stream(float* p, Vec<kLanes> v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE__)
  _mm_stream_ps(p, (__m128)v);
#else
  store<kLanes>(p, v);
#endif
}
inline void finish_streams() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

// D floats in registers, as vectors of one width: D is a power of two, or whole vectors. A P is a float* or one of
// storage.h's pointers.
template <int D>
struct Row {
  static constexpr int kWidth = D < kLanes ? D : kLanes;
  static constexpr int kParts = D / kWidth;
  Vec<kWidth> part[kParts];

  void clear() {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = Vec<kWidth>{};
  }
  template <class P>
  void read(P p) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = load<kWidth>(p + k * kWidth);
  }
  template <class P>
  void write(P p) const {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) store<kWidth>(p + k * kWidth, part[k]);
  }
  void write_streamed(float* p) const {
    if constexpr (kWidth == kLanes) {
#pragma GCC unroll 32
      for (int k = 0; k < kParts; ++k) stream(p + k * kWidth, part[k]);
    }
  }
  template <class P>
  void add(P p) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = part[k] + load<kWidth>(p + k * kWidth);
  }
  template <class P>
  void add_scaled(float s, P p) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = part[k] + s * load<kWidth>(p + k * kWidth);
  }
  void read_scaled(float s, const float* p) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = s * load<kWidth>(p + k * kWidth);
  }
  void multiply(float s) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = part[k] * s;
  }
  void subtract(const Row& other) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = part[k] - other.part[k];
  }
  void divide(float s) {
#pragma GCC unroll 32
    for (int k = 0; k < kParts; ++k) part[k] = part[k] / s;
  }
};

// Of any other D: as much as fits vectors of one width, and a row of what is left.
template <int D>
constexpr int kHead = D >= kLanes ? D / kLanes * kLanes : std::bit_floor(static_cast<unsigned>(D));

template <int D>
  requires(kHead<D> != D)
struct Row<D> {
  Row<kHead<D>> head;
  Row<D - kHead<D>> tail;

  void clear() { head.clear(), tail.clear(); }
  template <class P>
  void read(P p) {
    head.read(p), tail.read(p + kHead<D>);
  }
  template <class P>
  void write(P p) const {
    head.write(p), tail.write(p + kHead<D>);
  }
  void write_streamed(float*) const {}  // its rows are not whole lines
  template <class P>
  void add(P p) {
    head.add(p), tail.add(p + kHead<D>);
  }
  template <class P>
  void add_scaled(float s, P p) {
    head.add_scaled(s, p), tail.add_scaled(s, p + kHead<D>);
  }
  void read_scaled(float s, const float* p) { head.read_scaled(s, p), tail.read_scaled(s, p + kHead<D>); }
  void multiply(float s) { head.multiply(s), tail.multiply(s); }
  void subtract(const Row& other) { head.subtract(other.head), tail.subtract(other.tail); }
  void divide(float s) { head.divide(s), tail.divide(s); }
};

// The lengths of rows that kernels are compiled for: the usual ones, because each makes the native module larger.
template <int... D>
struct Dims {
  // Calls work(std::integral_constant<int, dim>) if dim is one of them, else work(std::integral_constant<int, 0>).
  template <class Work>
  static void choose(int64_t dim, const Work& work) {
    const bool is_one = ((dim == D && (work(std::integral_constant<int, D>{}), true)) || ...);
    if (!is_one) work(std::integral_constant<int, 0>{});
  }
};
using UsualDims = Dims<1, 2, 4, 8, 10, 12, 16, 20, 32, 40, 64, 128>;

template <int N>
struct Lanes {
  static constexpr int count = N;
};

// Calls work(Lanes<n>, j) for pieces [j, j + n) of [0, dim): whole vectors first, then pieces of 4, then of 1.
template <class Work>
inline void for_pieces(int64_t dim, const Work& work) {
  const int64_t whole = dim / kLanes * kLanes, fours = dim / 4 * 4;
  for (int64_t j = 0; j < whole; j += kLanes) work(Lanes<kLanes>{}, j);
  for (int64_t j = whole; j < fours; j += 4) work(Lanes<4>{}, j);
  for (int64_t j = fours; j < dim; ++j) work(Lanes<1>{}, j);
}

// The same operations on a row of any length that stays in memory (an L1-resident output or scratch row).
struct AnyRow {
  float* __restrict at;
  int64_t dim;

  void clear() {
    for (int64_t j = 0; j < dim; ++j) at[j] = 0.0f;
  }
  template <class P>
  void add(P p) {
    for_pieces(dim, [&](auto lanes, int64_t j) {
      constexpr int N = lanes.count;
      store<N>(at + j, load<N>(at + j) + load<N>(p + j));
    });
  }
  template <class P>
  void add_scaled(float s, P p) {
    for_pieces(dim, [&](auto lanes, int64_t j) {
      constexpr int N = lanes.count;
      store<N>(at + j, load<N>(at + j) + s * load<N>(p + j));
    });
  }
  void read_scaled(float s, const float* __restrict p) {
    for (int64_t j = 0; j < dim; ++j) at[j] = s * p[j];
  }
  void subtract_scaled(float lr, float s, const float* __restrict p) {
    for (int64_t j = 0; j < dim; ++j) at[j] = at[j] - lr * (s * p[j]);
  }
  void divide(float s) {
    for (int64_t j = 0; j < dim; ++j) at[j] = at[j] / s;
  }
};

// put<k> = column k of the 4 x 4 matrix with rows a0 .. a3.
inline void store_transposed(Vec<4> a0, Vec<4> a1, Vec<4> a2, Vec<4> a3, float* put0, float* put1, float* put2,
                             float* put3) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  const Vec<4> low01 = __builtin_shufflevector(a0, a1, 0, 4, 1, 5);
  const Vec<4> low23 = __builtin_shufflevector(a2, a3, 0, 4, 1, 5);
  const Vec<4> high01 = __builtin_shufflevector(a0, a1, 2, 6, 3, 7);
  const Vec<4> high23 = __builtin_shufflevector(a2, a3, 2, 6, 3, 7);
  store<4>(put0, __builtin_shufflevector(low01, low23, 0, 1, 4, 5));
  store<4>(put1, __builtin_shufflevector(low01, low23, 2, 3, 6, 7));
  store<4>(put2, __builtin_shufflevector(high01, high23, 0, 1, 4, 5));
  store<4>(put3, __builtin_shufflevector(high01, high23, 2, 3, 6, 7));
#else
  store<4>(put0, Vec<4>{a0[0], a1[0], a2[0], a3[0]});
  store<4>(put1, Vec<4>{a0[1], a1[1], a2[1], a3[1]});
  store<4>(put2, Vec<4>{a0[2], a1[2], a2[2], a3[2]});
  store<4>(put3, Vec<4>{a0[3], a1[3], a2[3], a3[3]});
#endif
}

// Where a prefetch puts a line. Only few reads into L1 can be under way at a time, more into L2: rows fetched far ahead
// into L2 take 0.6 of the time of rows fetched into L1 (2048 bags of 50, dim 64), and 0.7 to 0.9 in an update.
enum class Into { l1, l1_to_write, l2 };

// Prefetches a row's cache lines. The address may be anywhere: a bad id is found later, when it is used. A row that
// starts inside a line may need one line more; rows of whole lines, as tables have them, do not.
//
// This and every function around it must be always inlined: GCC 12 considers a function that only prefetches to have no
// effect, and drops the calls before it would inline them.
template <Into kInto>
[[gnu::always_inline]] inline void prefetch_row(const void* base, uint64_t row, int64_t bytes) {
  constexpr int kWrite = kInto == Into::l1_to_write, kLocality = kInto == Into::l2 ? 2 : 3;
  const uint64_t address = reinterpret_cast<uint64_t>(base) + row * static_cast<uint64_t>(bytes);
#pragma GCC unroll 8
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<uint64_t>(at)), kWrite, kLocality);
  }
  if (bytes % 64) __builtin_prefetch(reinterpret_cast<const void*>(address + bytes - 1), kWrite, kLocality);
}

// How many rows ahead of their use to prefetch: each row is one or more random reads. 48 take 0.95 to 0.98 of the time
// of 32 (lookup and SGD, 8 tables x 50 ids, dim 64), 16 take 1 to 1.13, 64 and 96 as long.
inline constexpr int64_t kRowsAhead = 48;
// Keys in row order jump between gradients; those of the next row are not needed at once. Prefetched into L2 they take
// 0.92 of the time of adaptive rules.
inline constexpr int64_t kScatteredGradsAhead = 16;

// v[k] + v[k + N / 2] for the first half of the lanes.
template <int N>
inline Vec<N / 2> fold_half(Vec<N> v) {
  Vec<N / 2> half[2];
  __builtin_memcpy(half, &v, sizeof v);
  return half[0] + half[1];
}

// fold16 of kernels.h over the products a[j] * b[j].
template <class P>
inline float fold16(const float* a, P b, int64_t dim) {
  Vec<16> p{};
  int64_t j = 0;
  for (; j + 16 <= dim; j += 16) p = p + load<16>(a + j) * load<16>(b + j);
  // Beyond dim, the remaining partials take +0: a partial is never -0, so that changes no bit.
  if (j < dim) {
    float tail[16] = {};
    for (int k = 0; j + k < dim; ++k) tail[k] = a[j + k] * load<1>(b + j + k)[0];
    p = p + load<16>(tail);
  }
  return fold_half<2>(fold_half<4>(fold_half<8>(fold_half<16>(p))))[0];
}

}  // namespace hotrow::HOTROW_ISA
