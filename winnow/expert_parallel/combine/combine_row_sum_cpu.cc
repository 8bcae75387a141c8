// The sums of combine on the CPU. Compiled without contraction: a product is rounded before it is
// added, whatever instructions there are, so that every machine finds the same bits.
#include <algorithm>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "winnow/expert_parallel/combine/combine_row_sum.h"

namespace winnow::expert_parallel {
namespace {

// One register of floats; compilers split wider vectors badly.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Lanes __attribute__((vector_size(kLanes * 4))) = float;
using Words __attribute__((vector_size(kLanes * 4))) = std::uint32_t;
using HalfWords __attribute__((vector_size(kLanes * 2))) = std::uint16_t;

// The columns whose sums stay in registers while the rows pass by.
constexpr int kVectors = 4;
constexpr std::int64_t kColumns = kVectors * kLanes;

void load(Lanes& to, const float* from) { std::memcpy(&to, from, sizeof(to)); }

void load(Lanes& to, const BFloat16* from) {
  HalfWords bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Words wide = __builtin_convertvector(bits, Words) << 16;
  std::memcpy(&to, &wide, sizeof(to));
}

void load(Lanes& to, const Half* from) {
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)  // the module's instruction set has F16C then too
  const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(from[i]);
#endif
  std::memcpy(&to, &wide, sizeof(to));
}

template <class T>
void store(T* to, const Lanes& from) {
  float wide[kLanes];
  std::memcpy(wide, &from, sizeof(wide));
  for (int i = 0; i < kLanes; ++i) to[i] = T(wide[i]);
}

// `columns` columns from `row`, zeros behind them.
template <class T, bool kWhole>
void load_columns(Lanes (&to)[kVectors], const T* row, std::int64_t columns) {
  T padded[kColumns];
  if constexpr (!kWhole) {
    std::fill_n(padded, kColumns, T(0.0f));
    std::memcpy(padded, row, static_cast<std::size_t>(columns) * sizeof(T));
    row = padded;
  }
  for (int v = 0; v < kVectors; ++v) load(to[v], row + v * kLanes);
}

template <class T>
void round_to(Lanes& lanes) {
  T narrow[kLanes];
  store(narrow, lanes);
  load(lanes, narrow);
}

void add_and_clear(Lanes (&to)[kVectors], Lanes (&sum)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) {
    to[v] += sum[v];
    sum[v] = Lanes{};
  }
}

template <class T, bool kWeighted, bool kWhole>
void sum_columns(const RowSumParams& params, std::int64_t begin, std::int64_t columns) {
  Lanes total[kVectors] = {}, node[kVectors] = {}, rank[kVectors] = {}, row[kVectors];
  for (const Addend* addend = params.addends; addend != params.addends + params.count; ++addend) {
    load_columns<T, kWhole>(row, static_cast<const T*>(addend->row) + begin, columns);
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kWeighted) row[v] *= addend->weight;
      rank[v] += row[v];
    }
    if (!addend->ends_rank) continue;
    if (addend->round_rank) {
      for (Lanes& lanes : rank) round_to<T>(lanes);
    }
    add_and_clear(node, rank);
    if (addend->ends_node) add_and_clear(total, node);
  }
  for (const void* bias : {params.bias, params.second_bias}) {
    if (bias == nullptr) continue;
    load_columns<T, kWhole>(row, static_cast<const T*>(bias) + begin, columns);
    for (int v = 0; v < kVectors; ++v) total[v] += row[v];
  }
  T result[kColumns];
  T* to = static_cast<T*>(params.to) + begin;
  for (int v = 0; v < kVectors; ++v) store((kWhole ? to : result) + v * kLanes, total[v]);
  if (!kWhole) std::memcpy(to, result, static_cast<std::size_t>(columns) * sizeof(T));
}

template <class T, bool kWeighted>
void sum_rows(const RowSumParams& params) {
  const std::int64_t whole = params.hidden / kColumns * kColumns;
  for (std::int64_t c = 0; c < whole; c += kColumns) {
    sum_columns<T, kWeighted, true>(params, c, kColumns);
  }
  if (whole < params.hidden) {
    sum_columns<T, kWeighted, false>(params, whole, params.hidden - whole);
  }
}

template <class T>
void sum_rows(const RowSumParams& params) {
  params.weighted ? sum_rows<T, true>(params) : sum_rows<T, false>(params);
}

}  // namespace

void sum_rows_cpu(const RowSumParams& params) {
  switch (params.dtype) {
    case DType::f32:
      return sum_rows<float>(params);
    case DType::f16:
      return sum_rows<Half>(params);
    case DType::bf16:
      return sum_rows<BFloat16>(params);
    default:
      return;  // the checks let no other dtype in
  }
}

}  // namespace winnow::expert_parallel
