// Decode of few heads over rows in f8, for GPUs of compute capability 8.0 and newer: the kernel. A
// block computes 16 heads over one segment of a query's tiles (decode_cuda.cuh). Its teams of four
// warps process the tiles alternately; a turn is one tile of a team.
//
// Each warp owns 128 columns. It converts its values to f16 once, uses them as operand b of Q K^T,
// transposes them in registers (movmatrix), and uses them again for P V. Shared memory has the rows
// as they are in the cache, partial logits, and P:
//
//   all warps    values in registers, Q K^T of the warp's columns     to shared memory
//   each warp    8 rows of the tile: logits, softmax                  P to shared memory
//   all warps    P V of the warp's columns
//
// A barrier of the team follows each of the first two steps. During P V the rows for the turn
// kSlots later are copied to the slot of this one, whose rows nobody reads any more; where they are
// is found before P is there, since a warp waits then anyway.
//
// Values are multiplied without the power of two of their scale, which is applied to logits and to
// P. The rest of a scale, in [1, 2), multiplies the values first, rounded to bf16 as decode says;
// nearly all scales are powers of two. The largest power of two of a row, its level, is part of P,
// and references include it, so that P fits in f16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/sparse_mla/decode/decode_cuda.cuh"

namespace winnow::sparse_mla::decode_cuda_detail {

inline constexpr int kFewHeads = 16, kTeamWarps = 4, kTeamThreads = 32 * kTeamWarps;
static_assert(kTeamWarps * 8 == kRows);  // a warp has the softmax of eight rows

// The shared memory of a team.
template <CacheFormat kFormat, int kSlots>
struct TeamMemory {
  alignas(16) std::byte rows[kSlots][RawRows<kFormat>::kBytes];
  alignas(16) float partials[kTeamWarps][kTeamWarps][32][4];  // of logits: to a warp, from a warp
  // P of 16 rows each, as operands a, in f16; for columns in bf16 once more in bf16.
  alignas(16) std::uint32_t weights[kFormat == CacheFormat::fp8_584 ? 2 : 1][2][32][4];
  // Factors of P for the columns of each scale, of two turns. A word holds two rows as f16; the
  // four words of a quad's lane are the four blocks of 8 rows.
  alignas(16) std::uint32_t ratios[2][8][4][4];
  float tops[kTeamWarps][kFewHeads];     // of what each warp has of the heads
  std::int32_t entries[kTeamWarps][32];  // of a warp, for four turns
  float references[kFewHeads], sums[kFewHeads];
};
template <CacheFormat kFormat, int kSlots>
struct Team : Shared<TeamMemory<kFormat, kSlots>> {
  using Memory = TeamMemory<kFormat, kSlots>;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(partials)
  WINNOW_PLACE(weights)
  WINNOW_PLACE(ratios)
  WINNOW_PLACE(tops)
  WINNOW_PLACE(entries)
  WINNOW_PLACE(references)
  WINNOW_PLACE(sums)
  __device__ explicit Team(std::uint32_t base) : Shared<Memory>{base} {}
};

template <CacheFormat kFormat, int kTeams, int kSlots>
struct FewMemory {
  TeamMemory<kFormat, kSlots> teams[kTeams];
  alignas(16) std::uint32_t queries[kTeamWarps][8][32][4];  // of a warp, step and lane: operand a
  alignas(16) std::uint32_t rope_queries[4][32][4];
  float scales[kFewHeads];  // of logits in base 2
  std::int32_t bounds[8];
};

// One team has two slots and up to 70 KiB; two teams have three slots each, and up to the 163 KiB
// that a block may have on GPUs of compute capability 8.0.
template <CacheFormat kFormat_, int kDim_, int kTeams_>
struct FewPlan : Shared<FewMemory<kFormat_, kTeams_, kTeams_ == 1 ? 2 : 3>> {
  static constexpr int kSlots = kTeams_ == 1 ? 2 : 3;
  using Memory = FewMemory<kFormat_, kTeams_, kSlots>;
  WINNOW_PLACE(teams)
  WINNOW_PLACE(queries)
  WINNOW_PLACE(rope_queries)
  WINNOW_PLACE(scales)
  WINNOW_PLACE(bounds)

  __device__ explicit FewPlan(std::uint32_t base) : Shared<Memory>{base} {}
  __device__ auto team(int number) const { return Team<kFormat, kSlots>(teams()[number].address); }

  static constexpr CacheFormat kFormat = kFormat_;
  static constexpr bool k656 = kFormat == CacheFormat::fp8_656;
  static constexpr int kDim = kDim_, kHeads = kFewHeads, kTeams = kTeams_;
  static constexpr int kThreads = kTeams * kTeamThreads;
  static constexpr int kSteps = kDim == 576 ? 9 : 8;  // of 16 columns, of a warp
  // The queries of a warp stay in its registers if these suffice; otherwise they are read from
  // shared memory for each tile.
  static constexpr bool kQueriesStay = k656 && kTeams == 2;
  static constexpr int kBytes = sizeof(Memory);
  static_assert(kBytes <= (kTeams == 1 ? 70 : 163) * 1024);
  // Scales of a row, and of a warp's columns; those in bf16 have none.
  static constexpr int kScales = k656 ? 4 : 7, kWarpScales = k656 ? 1 : 2;
  using Rows = RawRows<kFormat>;
};

// A warp reads its 128 columns as two groups of 64. This is the unit of 16 columns that a lane
// reads of a group; those of two rows lie in different banks.
template <class D>
__device__ __forceinline__ int few_unit(int group, int lane) {
  return D::k656 ? lane % 4 * 2 + group : group * 4 + lane % 4;
}

// Whether the columns of a group are in bf16.
template <class D>
__device__ __forceinline__ bool in_bf16(int warp, int group) {
  return !D::k656 && group == 1 && warp == 3;
}

__device__ __forceinline__ void load_words(std::uint32_t address, std::uint32_t (&words)[4]) {
  const uint4 four = ld_shared_words(address);
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}
__device__ __forceinline__ void store_floats(std::uint32_t address, const float (&x)[4]) {
  st_shared(address, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                __float_as_uint(x[3])));
}

// A scale without its sign and mantissa. What is left of a normal one is in [1, 2).
__device__ __forceinline__ float power_of(float scale) {
  return __uint_as_float(__float_as_uint(scale) & 0x7f800000u);
}
__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float(static_cast<std::uint32_t>(
      max(0x7f000000 - static_cast<std::int32_t>(__float_as_uint(power)), 0)));
}
__device__ __forceinline__ bool is_power(std::uint32_t scale) { return (scale & 0x807fffffu) == 0; }

// --- queries ------------------------------------------------------------------------------------

// A lane's part of the queries, as operands a.
template <class D>
using FewQueries = std::uint32_t[D::kSteps][4];

// A product may take its columns in any order if both operands agree. Step s of a group takes
// columns 4 s to 4 s + 3 of each lane's 16.
template <class D>
__device__ __forceinline__ void load_few_queries(const char* heads, std::int64_t stride, int count,
                                                 int warp, int lane, FewQueries<D>& q) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r;
    const char* const from = heads + (head < count ? head : 0) * stride;
#pragma unroll
    for (int s = 0; s < D::kSteps; ++s) {
      const int column = s < 8 ? 128 * warp + few_unit<D>(s / 4, lane) * 16 + s % 4 * 4
                               : kValueColumns + 16 * warp + lane % 4 * 4;
      const uint2 four = head < count ? __ldg(reinterpret_cast<const uint2*>(from + column * 2))
                                      : make_uint2(0, 0);
      q[s][r] = four.x;
      q[s][r + 2] = four.y;
    }
  }
}

// Stores the queries to shared memory, each head's divided by a power of two: as f16, or as bf16
// for columns that the cache has in bf16. Only the first team calls this.
template <class D>
__device__ __forceinline__ void bring_queries(D shared, float scale, int warp, int lane,
                                              FewQueries<D>& q) {
  const auto tops = shared.team(0).tops();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = 0;
#pragma unroll
    for (int s = 0; s < D::kSteps; ++s) {
      const float2 x = unpack_pair<DType::bf16>(q[s][r]), y = unpack_pair<DType::bf16>(q[s][r + 2]);
      top = fmaxf(top, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(y.x), fabsf(y.y))));
    }
    top = quad_max(top);
    if (lane % 4 == 0) tops[warp][lane / 4 + 8 * r].store(top);
  }
  bar_sync<kTeamThreads>(1);  // the largest of each warp are there
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r;
    float top = 0;
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) top = fmaxf(top, tops[w][head].load());
    const float power = power_of(top), factor = inverse_of_power(power);
    if (warp == 0 && lane % 4 == 0) shared.scales()[head].store(scale * power);
#pragma unroll
    for (int s = 0; s < D::kSteps; ++s) {
      const bool bf16 = s == 8 || in_bf16<D>(warp, s / 4);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float2 x = unpack_pair<DType::bf16>(q[s][r + 2 * c]);
        const float low = x.x * factor, high = x.y * factor;
        q[s][r + 2 * c] = bf16 ? pack_bf16(low, high) : pack_f16(low, high);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < D::kSteps; ++s) {
    const auto to = s < 8 ? shared.queries()[warp][s % 8][lane] : shared.rope_queries()[warp][lane];
    st_shared(to.address, make_uint4(q[s][0], q[s][1], q[s][2], q[s][3]));
  }
}

// --- values and logits --------------------------------------------------------------------------

// A lane's values of a tile as operands b: of each 8 rows, of each group.
using FewValues = std::uint32_t[4][2][8];
// Sums of logits of 8 rows each; without scales, so that those of other scales are apart.
template <class D>
using FewParts = float[4][D::kWarpScales][4];

// Values times what is left of a scale, rounded to bf16.
__device__ __forceinline__ void multiply_values_by(float factor, std::uint32_t (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 pair = unpack_f16(values[i]);
    const float2 rounded = unpack_pair<DType::bf16>(pack_bf16(pair.x * factor, pair.y * factor));
    values[i] = pack_f16(rounded.x, rounded.y);
  }
}

// `raw`: of the tile's rows.
template <class D>
__device__ __forceinline__ void read_values(std::uint32_t raw, int warp, int lane,
                                            FewValues& values) {
  using Rows = typename D::Rows;
  const std::uint32_t from = raw + lane / 4 * Rows::kPitch;
  bool odd = false;  // some scale is no power of two
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const std::uint32_t row = from + 8 * n * Rows::kPitch;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      std::uint32_t words[4];
      load_words(row + 128 * warp + few_unit<D>(group, lane) * kUnitBytes, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 four = widen_f8(words[i]);
        values[n][group][2 * i] = four.x;
        values[n][group][2 * i + 1] = four.y;
      }
    }
    if constexpr (D::k656) {
      const auto scale = ld_shared<std::uint32_t>(row + Rows::kScaleOffset + 4 * warp);
      odd = odd || !is_power(scale);
    }
  }
  if constexpr (D::k656) {
    if (!odd) return;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float scale =
          ld_shared<float>(from + 8 * n * Rows::kPitch + Rows::kScaleOffset + 4 * warp);
      const float factor = scale * inverse_of_power(power_of(scale));
      multiply_values_by(factor, values[n][0]);
      multiply_values_by(factor, values[n][1]);
    }
  } else {
    if (!in_bf16<D>(warp, 1)) return;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        std::uint32_t words[4];
        load_words(
            from + 8 * n * Rows::kPitch + Rows::kRopeOffset + (lane % 4 * 2 + unit) * kUnitBytes,
            words);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[n][1][4 * unit + i] = words[i];
      }
    }
  }
}

// The queries of all steps, if they stay; otherwise those of a step and of the next one.
template <class D>
struct StepQueries {
  std::uint32_t words[D::kQueriesStay ? 8 : 2][4];

  __device__ __forceinline__ auto& of(int step) { return words[D::kQueriesStay ? step : step % 2]; }
  __device__ __forceinline__ void load(D shared, int warp, int lane, int step) {
    load_words(shared.queries()[warp][step][lane].address, of(step));
  }
};

// Q K^T of the warp's columns, but for those beyond 512.
template <class D>
__device__ __forceinline__ void multiply_queries(D shared, int warp, int lane,
                                                 const FewValues& values, StepQueries<D>& q,
                                                 FewParts<D>& parts) {
  if (!D::kQueriesStay) q.load(shared, warp, lane, 0);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const int group = step / 4, i = step % 4;
    if (!D::kQueriesStay && step < 7) q.load(shared, warp, lane, step + 1);
    const auto multiply_rows = [&]<DType kType>() {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const auto& v = values[n][group];
        mma_m16n8k16<kType>(parts[n][D::k656 ? 0 : group], q.of(step), v[2 * i], v[2 * i + 1]);
      }
    };
    if (in_bf16<D>(warp, group)) {
      multiply_rows.template operator()<DType::bf16>();
    } else {
      multiply_rows.template operator()<DType::f16>();
    }
  }
}

// Those of the columns beyond 512, of the warp's own eight rows.
template <class D>
__device__ __forceinline__ void multiply_rope(D shared, std::uint32_t raw, int warp, int lane,
                                              float (&logits)[4]) {
  using Rows = typename D::Rows;
  const std::uint32_t row = raw + (8 * warp + lane / 4) * Rows::kPitch + Rows::kRopeOffset;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t q[4];
    load_words(shared.rope_queries()[i][lane].address, q);
    const auto four = ld_shared<std::uint64_t>(row + i * 32 + lane % 4 * 8);
    mma_m16n8k16<DType::bf16>(logits, q, static_cast<std::uint32_t>(four),
                              static_cast<std::uint32_t>(four >> 32));
  }
}

// Gives each warp the parts of the logits of its rows. Of one scale they go without it.
template <class D, class T>
__device__ __forceinline__ void give_parts(T team, std::uint32_t raw, int warp, int lane,
                                           const FewParts<D>& parts) {
  using Rows = typename D::Rows;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float part[4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float powers[2] = {1, 1};
      if constexpr (!D::k656) {
        const int row = 8 * n + lane % 4 * 2 + e;
        const auto four =
            ld_shared<std::uint32_t>(raw + Rows::kScales + row * Rows::kScaleBytes + warp / 2 * 4);
        powers[0] = ue8m0_to_f32(static_cast<std::uint8_t>(four >> warp % 2 * 16));
        if (!in_bf16<D>(warp, 1)) {
          powers[1] = ue8m0_to_f32(static_cast<std::uint8_t>(four >> (warp % 2 * 16 + 8)));
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x = parts[n][0][2 * r + e];
        part[2 * r + e] =
            D::k656 ? x : fmaf(x, powers[0], parts[n][D::kWarpScales - 1][2 * r + e] * powers[1]);
      }
    }
    store_floats(team.partials()[n][warp][lane].address, part);
  }
}

// What a lane needs of a row's scales: their powers of two, and these relative to the largest.
template <class D>
struct RowScales {
  float powers[D::k656 ? D::kScales : 1];
  float ratios[D::kScales];
  float level, inverse;  // log2 of the largest, and what it divides by

  __device__ __forceinline__ RowScales(std::uint32_t raw, int row) {
    using Rows = typename D::Rows;
    if constexpr (D::k656) {
      std::uint32_t words[4];
      load_words(raw + row * Rows::kPitch + Rows::kScaleOffset, words);
#pragma unroll
      for (int g = 0; g < 4; ++g) powers[g] = ratios[g] = power_of(__uint_as_float(words[g]));
    } else {
      const auto all = ld_shared<std::uint64_t>(raw + Rows::kScales + row * Rows::kScaleBytes);
#pragma unroll
      for (int g = 0; g < 7; ++g) ratios[g] = ue8m0_to_f32(static_cast<std::uint8_t>(all >> 8 * g));
    }
    float largest = ratios[0];
#pragma unroll
    for (int g = 1; g < D::kScales; ++g) largest = fmaxf(largest, ratios[g]);
    // Rows that nothing was written to have scales of 0; sums hold levels' inverses.
    largest = fminf(fmaxf(largest, 0x1p-60f), 0x1p126f);
    inverse = inverse_of_power(largest);
    level = static_cast<float>(static_cast<std::int32_t>(__float_as_uint(largest) >> 23) - 127);
#pragma unroll
    for (int g = 0; g < D::kScales; ++g) ratios[g] *= inverse;
  }
};

// --- P V ----------------------------------------------------------------------------------------

// o[group][n][2 r + e]: head lane / 4 + 8 r, column 16 unit + 2 n + e.
using FewOutput = float[2][8][4];

__device__ __forceinline__ void multiply_output(FewOutput& o, int r, float factor) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    o[n / 8][n % 8][2 * r] *= factor;
    o[n / 8][n % 8][2 * r + 1] *= factor;
  }
}

// P as operands a, times what it takes for the scales of the warp's columns.
template <class D>
using FewWeights = std::uint32_t[D::kWarpScales][2][4];
template <class D, class T>
__device__ __forceinline__ void take_weights(T team, int turn, int warp, int lane,
                                             FewWeights<D>& a) {
#pragma unroll
  for (int g = 0; g < D::kWarpScales; ++g) {
    const bool bf16 = in_bf16<D>(warp, g);
    std::uint32_t ratios[4];
    load_words(team.ratios()[turn % 2][D::kWarpScales * warp + g][lane % 4].address, ratios);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_words(team.weights()[D::k656 ? 0 : bf16][half][lane].address, a[g][half]);
      if (bf16) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[g][half][i] = multiply_f16x2(a[g][half][i], ratios[2 * half + i / 2]);
      }
    }
  }
}

__device__ __forceinline__ void transpose(std::uint32_t& values) {
  values = movmatrix_trans(values);
}

// o += P V. The values of the first 16 rows are transposed already, the others are among the
// products. There `copies` bring rows, too.
template <class D>
__device__ __forceinline__ void multiply_values(const FewWeights<D>& a, FewValues& values, int warp,
                                                const RawRowCopy<D::kFormat> (&copies)[2],
                                                FewOutput& o) {
  static_assert(RawRowCopy<D::kFormat>::kChunks <= 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const auto multiply = [&]<DType kType>() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          mma_m16n8k16<kType>(o[group][i], a[D::k656 ? 0 : group][half], values[2 * half][group][i],
                              values[2 * half + 1][group][i]);
          if (half == 0) {
            transpose(values[2][group][i]);
            transpose(values[3][group][i]);
          }
          if (i % 2 == 1) copies[half](4 * group + i / 2);
        }
      };
      if (in_bf16<D>(warp, group)) {
        multiply.template operator()<DType::bf16>();
      } else {
        multiply.template operator()<DType::f16>();
      }
    }
  }
}

// --- what a block leaves ------------------------------------------------------------------------

// Of both teams: the references, the sums, and in o[0] the columns of the team's own group.
template <class D>
__device__ __forceinline__ void merge_teams(D shared, int own, int warp, int lane,
                                            float (&references)[2], float (&sums)[2],
                                            FewOutput& o) {
  const auto team = shared.team(own), other = shared.team(1 - own);
  __syncthreads();  // the sums of both are there, and no rows are read any more
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r;
    const float of_other = other.references()[head].load();
    const float reference = fmaxf(references[r], of_other);
    const float factor = ex2(references[r] - reference);
    sums[r] = fmaf(other.sums()[head].load(), ex2(of_other - reference), sums[r] * factor);
    references[r] = reference;
    multiply_output(o, r, factor);
  }
  // The first team keeps group 0 of the columns, the second one the other, in place of the rows.
  const int place = (32 * warp + lane) * 16;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float given[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) given[e] = own == 0 ? o[1][n][e] : o[0][n][e];
    store_floats(other.rows().address + place + n * kTeamThreads * 16, given);
  }
  __syncthreads();  // what each gives the other is there
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    std::uint32_t taken[4];
    load_words(team.rows().address + place + n * kTeamThreads * 16, taken);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float kept = own == 0 ? o[0][n][e] : o[1][n][e];
      o[0][n][e] = kept + __uint_as_float(taken[e]);
    }
  }
}

// Writes what the team has of the output; `tiles`: of the segment.
template <class D>
__device__ __forceinline__ void store_few(const KernelParams& params, const Item& item, int tiles,
                                          int team_number, int warp, int lane,
                                          const float (&references)[2], const float (&sums)[2],
                                          const FewOutput& o) {
  const std::int64_t partial = std::int64_t{blockIdx.x} * kFewHeads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r, head = item.first + row;
    if (row >= item.heads) continue;
    const bool tells = warp == 0 && team_number == 0 && lane % 4 == 0;
    float factor = 1;
    if (params.segments > 1) {
      if (tells) params.partial_sums[partial + row] = {references[r], sums[r]};
      if (tiles == 0) continue;
    } else {
      factor = output_factor(sums[r], references[r], sink_of(params, head));
      if (tells) store_lse(params, item.i, item.s, head, references[r], sums[r]);
    }
#pragma unroll
    for (int g = 0; g < 2 / D::kTeams; ++g) {
      const int group = D::kTeams == 2 ? team_number : g;
      const int column = 128 * warp + few_unit<D>(group, lane) * 16;
      const auto& of = o[g];
      if (params.segments > 1) {
        float* const to = params.partial_out + (partial + row) * kValueColumns + column;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          reinterpret_cast<float4*>(to)[n / 2] =
              make_float4(of[n][2 * r], of[n][2 * r + 1], of[n + 1][2 * r], of[n + 1][2 * r + 1]);
        }
      } else {
        std::uint32_t w[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          w[n] = pack_bf16(of[n][2 * r] * factor, of[n][2 * r + 1] * factor);
        }
        char* const to = params.out.at(item.i, item.s, head) + column * 2;
        store_streaming(to, w[0], w[1], w[2], w[3]);
        store_streaming(to + kUnitBytes, w[4], w[5], w[6], w[7]);
      }
    }
  }
}

// --- the kernel ---------------------------------------------------------------------------------

template <class D>
__global__ void __launch_bounds__(D::kThreads, 1)
    few_kernel(const __grid_constant__ KernelParams params) {
  constexpr int kTeams = D::kTeams, kSlots = D::kSlots;
  using Copy = RawRowCopy<D::kFormat>;
  using Rows = typename D::Rows;
  const D shared{shared_address(dynamic_shared<128>())};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = thread / 32 % kTeamWarps, team_number = thread / kTeamThreads;
  const auto team = shared.team(team_number);
  const Item item = item_of<D>(params, blockIdx.x);
  if (thread == 0) find_bounds(params, item.i, item.s, item.segment, shared.bounds());
  __syncthreads();  // the bounds are there
  const SegmentTiles tiles(params, shared.bounds());
  // Of the team; turn u is its tile kTeams u + team_number.
  const int count = tiles.count(), turns = (count - team_number + kTeams - 1) / kTeams;
  const auto tile_of = [&](int turn) { return kTeams * turn + team_number; };

  // A warp copies its own eight rows of a tile. Those of four turns, a round, are found together, a
  // row by each lane, which first brings its entry:
  const auto turn_of = [&](int round) { return 4 * round + lane / 8; };
  const int own_entry = 8 * warp + lane % 8;
  const auto bring = [&](int round) {
    tiles.bring(tile_of(turn_of(round)), own_entry, team.entries()[warp][lane]);
  };
  // Where the lane's row is, or null; which rows are visible, of the last two rounds.
  const char* found = nullptr;
  const char* found_scales = nullptr;
  std::uint32_t seen[2] = {};
  const auto find = [&](int round) {
    const int tile = tile_of(turn_of(round));
    const std::int32_t brought = team.entries()[warp][lane].load();
    const bool exists = tile < count;
    const ChosenView& chosen = tiles.chosen(tile);
    const std::int32_t entry = tiles.entry(tile, own_entry, brought);
    const bool visible = exists && tiles.holds(tile, entry);
    seen[0] = seen[1];
    seen[1] = __ballot_sync(kFullWarp, visible);
    const auto place = chosen.of_block.divide(visible ? static_cast<std::uint32_t>(entry) : 0);
    const auto* const row =
        reinterpret_cast<const char*>(chosen.cache.row(place.quotient, place.remainder));
    found = visible ? row : nullptr;
    if constexpr (!D::k656) {
      found_scales =
          reinterpret_cast<const char*>(chosen.cache.scales_584(place.quotient, place.remainder));
    }
    if (4 * (round + 1) < turns) bring(round + 1);
  };
  // What copies the rows that were found to `slot`, chunk by chunk: half of them for each of two.
  const auto copy_of = [&](int turn, int half, std::uint32_t slot) {
    const int row_of_warp = lane / 8 + 4 * half, from = turn % 4 * 8 + row_of_warp;
    const auto taken = [&](const char* of) {
      return reinterpret_cast<const char*>(
          __shfl_sync(kFullWarp, reinterpret_cast<std::uint64_t>(of), from));
    };
    const char* const row = taken(found);
    const char* const scales = D::k656 ? row : taken(found_scales);
    const bool visible = row != nullptr;
    return Copy(slot, 8 * warp + row_of_warp, visible ? row : params.q.data,
                visible ? scales : params.q.data, visible, lane);
  };
  bring(0);
  cp_async_commit();
  FewQueries<D> queries;
  if (team_number == 0) {
    load_few_queries<D>(params.q.at(item.i, item.s, item.first), params.q.stride_h, item.heads,
                        warp, lane, queries);
  }
  cp_async_wait<0>();  // the lane's first entry is there
  find(0);
  for (int turn = 0; turn < kSlots; ++turn) {
    copy_all(copy_of(turn, 0, team.rows()[turn].address));
    copy_all(copy_of(turn, 1, team.rows()[turn].address));
    cp_async_commit();
  }
  if (team_number == 0) bring_queries(shared, params.scale, warp, lane, queries);
  cp_async_wait<kSlots - 1>();
  __syncthreads();  // the queries and the first tiles are there

  FewOutput o = {};
  // P counts relative to a reference of logits and levels; the sum is that of P without levels.
  float references[2] = {kNoReference, kNoReference}, sums[2] = {};
  const std::uint32_t barrier = 1 + team_number;
  StepQueries<D> step_queries;
  if (D::kQueriesStay) {
#pragma unroll
    for (int step = 0; step < 8; ++step) step_queries.load(shared, warp, lane, step);
  }
  const float head_scales[2] = {shared.scales()[lane / 4].load(),
                                shared.scales()[lane / 4 + 8].load()};

  std::uint32_t raw = team.rows()[0].address;  // the slot of the turn
  for (int turn = 0; turn < turns; ++turn) {
    const int next = turn + kSlots;
    if (next % 4 == 0) find(next / 4);
    FewValues values;
    read_values<D>(raw, warp, lane, values);
    FewParts<D> parts = {};
    multiply_queries(shared, warp, lane, values, step_queries, parts);
    const int own_row = 8 * warp + lane % 4 * 2;
    const RowScales<D> scales[2] = {{raw, own_row}, {raw, own_row + 1}};
    float x[4] = {}, p[4];  // logits and P of the warp's own rows
    if constexpr (D::k656) multiply_rope(shared, raw, warp, lane, x);
    give_parts<D>(team, raw, warp, lane, parts);
#pragma unroll
    for (int g = 0; g < D::kScales; ++g) {
      const auto to = team.ratios()[turn % 2][g][lane % 4][warp];
      const std::uint32_t ratios = pack_f16(scales[0].ratios[g], scales[1].ratios[g]);
      if (lane < 4) to.store(ratios);  // all rows of lanes have the same
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
#pragma unroll
        for (int i = 0; i < 8; ++i) transpose(values[n][group][i]);
      }
    }
    // The parts of logits are there, and P of the tile before is done with.
    bar_sync<kTeamThreads>(barrier);

    // Behind the last tile zeros are copied: no branch is among the products.
    const Copy copies[2] = {copy_of(next, 0, raw), copy_of(next, 1, raw)};
#pragma unroll
    for (int part = 0; part < kTeamWarps; ++part) {
      std::uint32_t words[4];
      load_words(team.partials()[warp][part][lane].address, words);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of = __uint_as_float(words[e]);
        x[e] = D::k656 ? fmaf(of, scales[e % 2].powers[D::k656 ? part : 0], x[e]) : x[e] + of;
      }
    }
    const std::uint32_t own =
        (next / 4 == turn / 4 ? seen[1] : seen[0]) >> (turn % 4 * 8 + lane % 4 * 2);
    float tops[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = head_scales[r];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& logit = x[2 * r + e];
        logit = fmaf(logit, scale, scales[e].level);
        if (own >> e & 1) tops[r] = fmaxf(tops[r], logit);
      }
    }
    const auto weigh = [&] {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[e] = own >> e % 2 & 1 ? ex2(x[e] - references[e / 2]) : 0.0f;
      const auto store = [&](int which, std::uint32_t first, std::uint32_t second) {
        st_shared(team.weights()[which][warp / 2][lane][warp % 2 * 2].address,
                  std::uint64_t{second} << 32 | first);
      };
      store(0, pack_f16(p[0], p[1]), pack_f16(p[2], p[3]));
      if constexpr (!D::k656) {
        const float a = scales[0].inverse, b = scales[1].inverse;
        store(1, pack_bf16(p[0] * a, p[1] * b), pack_bf16(p[2] * a, p[3] * b));
      }
    };
    weigh();
    const bool raised = tops[0] > references[0] + kLazy || tops[1] > references[1] + kLazy;
    cp_async_wait<kSlots - 2>();  // what the thread copied of the next tile is there
    // P is there, and all of the next tile, and whether a reference is exceeded.
    if (!barrier_red_and<kTeamThreads>(barrier, !raised)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tops[r] = quad_max(tops[r]);
        if (lane % 4 == 0) team.tops()[warp][lane / 4 + 8 * r].store(tops[r]);
      }
      bar_sync<kTeamThreads>(barrier);  // the maxima are there
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = lane / 4 + 8 * r;
        float top = negative_infinity();
#pragma unroll
        for (int w = 0; w < kTeamWarps; ++w) top = fmaxf(top, team.tops()[w][head].load());
        float factor = 1;
        if (top > references[r] + kLazy) {
          factor = ex2(references[r] - top);
          references[r] = top;
        }
        sums[r] *= factor;
        multiply_output(o, r, factor);
      }
      weigh();
      bar_sync<kTeamThreads>(barrier);  // P relative to the new references is there
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e / 2] = fmaf(p[e], scales[e % 2].inverse, sums[e / 2]);

    FewWeights<D> a;
    take_weights<D>(team, turn, warp, lane, a);
    multiply_values<D>(a, values, warp, copies, o);
    cp_async_commit();
    raw = raw == team.rows()[kSlots - 1].address ? team.rows()[0].address : raw + Rows::kBytes;
  }

  cp_async_wait<0>();  // the zeros behind the last tile

  // The sums of all warps, in their order, and of all teams.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[r] = quad_sum(sums[r]);
    if (lane % 4 == 0) team.tops()[warp][lane / 4 + 8 * r].store(sums[r]);
  }
  bar_sync<kTeamThreads>(barrier);  // the sums of the warps are there
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r;
    sums[r] = 0;
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) sums[r] += team.tops()[w][head].load();
    if (warp == 0 && lane % 4 == 0) {
      team.references()[head].store(references[r]);
      team.sums()[head].store(sums[r]);
    }
  }
  if constexpr (kTeams == 2) {
    merge_teams(shared, team_number, warp, lane, references, sums, o);
  }
  store_few<D>(params, item, count, team_number, warp, lane, references, sums, o);
}

}  // namespace winnow::sparse_mla::decode_cuda_detail
