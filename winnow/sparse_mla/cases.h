// The problems on which the sparse MLA operations are tested, verified and timed, with the one
// table of tolerances. Shared by forward, distribution and backward.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/sparse_mla/forward/forward_oracle.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/strided.h"
#include "winnow/testing/table.h"

namespace winnow::sparse_mla {

using testing::Layout;
using testing::StridedTensor;

enum class Choice {
  distinct,      // no row twice for one query
  hot_rows,      // the same, and every query chooses rows 0 to 7
  repeated,      // rows drawn independently
  one_row,       // every entry of a query names the same row
  scattered,     // a third of the entries is INT_MIN, -1, s_kv or INT_MAX
  some_nothing,  // as scattered, and nothing valid at all for every other query
  nothing,       // no valid entry
};
// Without indices: the range of rows of each query.
enum class Ranges {
  absent,
  ragged,        // one for each query
  whole,         // every row
  late,          // the last rows, from one that begins no tile
  empty,         // start behind end, for every other query
  out_of_range,  // far outside of the rows
  window,        // the kWindow rows up to the one with the query's number
};
inline constexpr std::int64_t kWindow = 128;
enum class Lengths { absent, zero, one, ragged, out_of_range };
enum class Sink { absent, minus_inf, finite, plus_inf, mixed };

// A second source of rows, as CaseShape has the first.
struct ExtraShape {
  std::int64_t s_kv = 90, topk = 40;
  Choice choice = Choice::distinct;
  Ranges ranges = Ranges::absent;
  Lengths lengths = Lengths::absent;
  std::int64_t k_stride = 1;
};

struct CaseShape {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t s_q = 4, h_q = 3, s_kv = 300, d_qk = 576, topk = 64;
  Choice choice = Choice::distinct;
  Ranges ranges = Ranges::absent;  // other than absent: dense, and topk is s_kv
  Lengths lengths = Lengths::absent;
  Sink sink = Sink::absent;
  Layout layout = Layout::dense;
  std::optional<std::int64_t> q_start{};
  std::int64_t k_stride = 1;
  std::optional<double> scale{};
  double logits = 1;   // standard deviation of the logits
  bool poison = true;  // rows that no query sees are NaN and infinity
  std::optional<ExtraShape> extra{};
  bool flash_mla_lse = false;  // of forward
  // Backward gets an `out` that is not the one of forward. Where every P is 0 or 1, dP - delta
  // would be nothing but rounding errors.
  bool free_out = false;

  // Logits far beyond those that the spec's tolerances are meant for.
  bool large_logits() const { return logits > 10; }
  // Of both sources.
  std::int64_t all_rows() const { return s_kv + (extra ? extra->s_kv : 0); }
};

// The case table. Names are unique.
const std::vector<CaseShape>& case_shapes();
// Those of dense attention, and of two sources of rows.
std::vector<CaseShape> with_dense_shapes(std::vector<CaseShape> shapes);
std::vector<CaseShape> with_extra_shapes(std::vector<CaseShape> shapes);

// "s_q 4, h_q 3, s_kv 300, d_qk 576, topk 64".
std::string describe(const CaseShape& shape);

struct SourceInputs {
  StridedTensor kv, indices, topk_length;  // the last one absent where not asked for
  StridedTensor key_start, key_end;        // of dense cases, in the place of indices
  std::int64_t k_stride = 1;

  SourceInputs on(Device device) const;
};

// The inputs that the operations share. The same for the same shape on every platform.
struct CaseInputs : SourceInputs {
  StridedTensor q, attn_sink;  // the last one absent where not asked for
  std::optional<double> scale;
  std::optional<std::int64_t> q_start;
  SourceInputs extra;  // absent where not asked for

  oracle::Inputs for_oracle() const;
  CaseInputs on(Device device) const;  // a copy there
  // Copies what the argument structs of the three operations have in common.
  template <class Args>
  void pass_to(Args& args) const {
    args.q = q.view;
    args.kv = kv.view;
    args.indices = indices.view;
    args.topk_length = topk_length.view;
    if constexpr (requires { args.attn_sink; }) args.attn_sink = attn_sink.view;
    args.key_start = key_start.view;
    args.key_end = key_end.view;
    args.scale = scale;
    args.q_start = q_start;
    args.k_stride = k_stride;
    args.extra_kv = extra.kv.view;
    args.extra_indices = extra.indices.view;
    args.extra_topk_length = extra.topk_length.view;
    args.extra_key_start = extra.key_start.view;
    args.extra_key_end = extra.key_end.view;
    args.extra_k_stride = extra.k_stride;
  }
};
CaseInputs make_inputs(const CaseShape& shape);

// The numbers 0 to count - 1, or a random choice of `at_most` of them that includes both ends; in
// ascending order. What the oracle checks of large cases.
std::vector<std::int64_t> choose(std::int64_t count, std::int64_t at_most, std::uint64_t seed);
inline constexpr std::int64_t kCheckedQueries = 8;
inline constexpr std::int64_t kCheckedRows = 16;
std::vector<std::int64_t> checked_queries(const CaseShape& shape);
// Rows, those of the extra source numbered on: some that queries chose, some that none did.
std::vector<std::int64_t> checked_rows(const CaseShape& shape, const CaseInputs& inputs);

// The tolerance table.
enum class Quantity { out, dq, max_logits, lse, attn_sum, row_sums, dkv, d_sink };
// `largest_logit` is the largest |x| of the case.
testing::Tolerance tolerance(Quantity quantity, const CaseShape& shape, double largest_logit);

// Whether GPU kernels take the case; those of sm90 have no f16.
inline bool on_gpu(const CaseShape& shape) {
  return shape.dtype == DType::bf16 || shape.dtype == DType::f16;
}

// The problems that are timed on the CPU.
struct BenchShape {
  CaseShape shape;
  bool promised = false;  // has a target
};
std::vector<BenchShape> bench_shapes();
// A benchmark with its ceiling: a matrix product [s_q * h_q, k] * [k, topk] of the same FLOPs.
testing::Benchmark make_benchmark(const BenchShape& bench, std::int64_t k, double target);

// What is timed on a GPU: bf16, s_q 4096, topk 2048, d_qk 576. `reach` is the share to reach of
// the ceiling, a bf16 product of 8192^3 by cuBLAS, on an H200.
struct GpuBenchShape {
  std::int64_t h_q, s_kv;
  std::optional<double> reach;
  Choice choice = Choice::distinct;
};
CaseShape case_shape(const GpuBenchShape& bench);
testing::Benchmark make_benchmark(const GpuBenchShape& bench, std::int64_t k);

// The same of two sources, as layers of DeepSeek-V4 have them over 16,384 tokens, with d_qk 512: a
// window of rows, and of one row for each `compression` tokens `extra_topk` chosen ones, or where
// that is 0 all.
struct LayerBenchShape {
  std::int64_t h_q, compression, extra_topk;
  std::optional<double> reach;
};
CaseShape case_shape(const LayerBenchShape& bench);
testing::Benchmark make_benchmark(const LayerBenchShape& bench, std::int64_t k);

}  // namespace winnow::sparse_mla
