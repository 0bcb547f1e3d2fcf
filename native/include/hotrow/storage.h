// Reads and writes what tables may hold instead of floats, as vectors of floats. Only for the kernel files, like vec.h:
// `load` and `store` take a Half*, an Upper* or a Joined as they take a float*. kernels.h says what each storage means.
#pragma once

#include <hotrow/vec.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace hotrow::HOTROW_ISA {

struct Half {
  uint16_t bits;  // IEEE 754 binary16
};
struct Upper {
  uint16_t bits;  // the upper half of a float: a bfloat16
};
struct Joined {
  Upper* high;
  uint16_t* low;  // its lower half, in another array
  Joined operator+(int64_t k) const { return {high + k, low + k}; }
};

template <int N>
using Bits = typename VectorOf<uint32_t, N>::type;
template <int N>
using Halves = typename VectorOf<uint16_t, N>::type;

template <int N>
inline Bits<N> load_halves(const void* p) {
  Halves<N> h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, Bits<N>);
}
template <int N>
inline void store_halves(void* p, Bits<N> bits) {
  const Halves<N> h = __builtin_convertvector(bits, Halves<N>);
  __builtin_memcpy(p, &h, sizeof h);
}

template <int N>
inline Vec<N> load(const Upper* p) {
  return (Vec<N>)(load_halves<N>(p) << 16);
}
template <int N>
inline Vec<N> load(Joined p) {
  return (Vec<N>)(load_halves<N>(p.high) << 16 | load_halves<N>(p.low));
}
template <int N>
inline void store(Joined p, Vec<N> v) {
  store_halves<N>(p.high, (Bits<N>)v >> 16);
  store_halves<N>(p.low, (Bits<N>)v & 0xFFFF);
}

// Per lane: yes if the mask is all ones, no if it is 0.
template <int N, class Mask>
inline Bits<N> choose(Mask mask, Bits<N> yes, Bits<N> no) {
  return ((Bits<N>)mask & yes) | (~(Bits<N>)mask & no);
}

// Converts binary16 and float32 into each other without instructions for it, bit for bit as those instructions (F16C)
// do. Widening is exact; a NaN becomes quiet and keeps its sign and payload.
template <int N>
inline Vec<N> widen(Bits<N> half) {
  const Bits<N> size = (half & 0x7FFF) << 13;
  const Bits<N> normal = size + 0x38000000;  // the exponent counts from 127, not from 15
  // Subnormal: the same digits below a leading one at 2^-14, which is then taken away.
  const Bits<N> small = (Bits<N>)((Vec<N>)(size + 0x38800000) - 0x1p-14f);
  Bits<N> bits = choose<N>(size < 0x00800000, small, normal);
  bits = choose<N>(size >= 0x0F800000, normal + 0x38000000, bits);
  bits |= (Bits<N>)(size > 0x0F800000) & 0x00400000;
  return (Vec<N>)(bits | (half & 0x8000) << 16);
}
// Narrowing rounds to nearest, ties to even, from 65520 up to infinity; a NaN becomes quiet and keeps its sign and the
// leading bits of its payload.
template <int N>
inline Bits<N> narrow(Vec<N> v) {
  const Bits<N> bits = (Bits<N>)v, size = bits & 0x7FFFFFFF;
  // Add half a unit less one, and one more if the last bit kept is odd: cutting off then rounds.
  const Bits<N> normal = (size + 0xC8000FFF + (size >> 13 & 1)) >> 13;
  // Subnormal: the sum with 0.5 has room for multiples of 2^-24 and rounds to them.
  const Bits<N> small = (Bits<N>)((Vec<N>)size + 0.5f) - 0x3F000000;
  Bits<N> half = choose<N>(size < 0x38800000, small, normal);
  half = choose<N>(size >= 0x47800000, Bits<N>{} + 0x7C00, half);
  half = choose<N>(size > 0x7F800000, (size >> 13 & 0x3FF) | 0x7E00, half);
  return half | (bits >> 16 & 0x8000);
}

#if defined(__AVX512F__)
// All lanes: GCC 12 warns that the forms without a mask use uninitialized values. The instruction is the same.
constexpr __mmask16 kAll = 0xFFFF;
#endif
template <int N>
inline Vec<N> load(const Half* p) {
  if constexpr (N > kLanes) {
    const Vec<N / 2> half[2] = {load<N / 2>(p), load<N / 2>(p + N / 2)};
    Vec<N> v;
    __builtin_memcpy(&v, half, sizeof v);
    return v;
#if defined(__AVX512F__)
  } else if constexpr (N == 16) {
    return (Vec<N>)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#endif
#if defined(__F16C__)
  } else if constexpr (N == 8) {
    return (Vec<N>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else if constexpr (N == 4) {
    return (Vec<N>)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#endif
  } else {
    return widen<N>(load_halves<N>(p));
  }
}
template <int N>
inline void store(Half* p, Vec<N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_maskz_cvtps_ph(kAll, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
    return;
  } else if constexpr (N == 4) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph((__m128)v, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
  store_halves<N>(p, narrow<N>(v));
}

// A row as floats in memory: the row itself if it holds floats, else a copy of it in `room`; put_back writes the copy
// back.
inline float* as_floats(float* row, int64_t, float*) { return row; }
template <class P>
inline float* as_floats(P row, int64_t dim, float* room) {
  for_pieces(dim, [&](auto lanes, int64_t j) { store<lanes.count>(room + j, load<lanes.count>(row + j)); });
  return room;
}
inline void put_back(const float*, float*, int64_t) {}
template <class P>
inline void put_back(const float* floats, P row, int64_t dim) {
  for_pieces(dim, [&](auto lanes, int64_t j) { store<lanes.count>(row + j, load<lanes.count>(floats + j)); });
}

}  // namespace hotrow::HOTROW_ISA
