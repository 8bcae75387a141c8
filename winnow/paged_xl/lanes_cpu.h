// Eight floats or doubles at a time. Internal; compiled once per instruction set.
//
// Compiler vectors keep their accumulators in registers, which plain arrays in such loops do not;
// compilers split them where the machine's registers are narrower. They are passed by reference:
// by value their ABI would differ between instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "winnow/core/dtype.h"

namespace winnow::paged_xl {

inline constexpr std::int64_t kLanes = 8;
using Lanes __attribute__((vector_size(32))) = float;
using DoubleLanes __attribute__((vector_size(64))) = double;

template <class Real>
struct LanesOf {
  using Type = Lanes;
};
template <>
struct LanesOf<double> {
  using Type = DoubleLanes;
};

inline void load(Lanes& to, const float* from) { std::memcpy(&to, from, sizeof(Lanes)); }
inline void store(float* to, const Lanes& from) { std::memcpy(to, &from, sizeof(Lanes)); }
inline void load(DoubleLanes& to, const double* from) { std::memcpy(&to, from, sizeof(to)); }
inline void store(double* to, const DoubleLanes& from) { std::memcpy(to, &from, sizeof(from)); }

// The narrow types are widened by the one instruction for it where there is one: compilers do not
// find it.
inline void load(Lanes& to, const BFloat16* from) {
#ifdef __AVX2__
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(from[i]);
#endif
  std::memcpy(&to, &wide, sizeof(to));
}

inline void load(Lanes& to, const Half* from) {
#ifdef __AVX2__  // the module's instruction set has F16C then too
  const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(from[i]);
#endif
  std::memcpy(&to, &wide, sizeof(to));
}

template <class L, class T>
void multiply_add(L& sum, const L& a, const T* b) {
  L loaded;
  load(loaded, b);
  sum += a * loaded;
}

// to[i] = the sum of all lanes of a[i]. Each level adds neighbours and interleaves two vectors.
inline void sum_eight(const Lanes (&a)[8], float* to) {
  Lanes b[4], c[2];
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 2; ++i) {
    c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  const Lanes d = __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
                  __builtin_shufflevector(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
  store(to, d);
}

// to[2i], to[2i + 1] = the sums of the lower and the upper four lanes of a[i].
inline void sum_eight(const Lanes (&a)[4], float* to) {
  Lanes b[2];
  for (int i = 0; i < 2; ++i) {
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  const Lanes c = __builtin_shufflevector(b[0], b[1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(b[0], b[1], 2, 3, 10, 11, 6, 7, 14, 15);
  store(to, __builtin_shufflevector(c, c, 0, 4, 1, 5, 2, 6, 3, 7));
}

// to[i * 8 / N + k] = the sum of the k-th N lanes of a[i].
template <int N>
void sum_eight(const DoubleLanes (&a)[N], double* to) {
  for (int i = 0; i < N; ++i) {
    for (int first = 0; first < kLanes; first += N) {
      double sum = 0;
      for (int lane = first; lane < first + N; ++lane) sum += a[i][lane];
      *to++ = sum;
    }
  }
}

}  // namespace winnow::paged_xl
