// The problems on which the indexer's operations are tested, verified and timed, with the table of
// tolerances.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/indexer/indexer_oracle.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/sample.h"
#include "winnow/testing/strided.h"
#include "winnow/testing/table.h"

namespace winnow::indexer {

using testing::Layout;
using testing::StridedTensor;

// How the scores of a query's rows are ordered.
enum class Order {
  random,
  ascending,  // every row is better than those before it
  descending,
  equal,       // all rows are the same
  zero,        // every score is 0: plateaus as ReLU makes them
  plateau,     // three quarters are 0, among scores of either sign
  last_head,   // as a plateau, but the last head alone has positive products where those have 0
  one_huge,    // one row far above the rest
  duplicates,  // each row stands there many times, also at the k-th place
  nan,         // a third of the rows have the score NaN
  infinite,    // weights of -inf and inf
  huge,        // weights of about 1e30 in every second query
};
enum class Ranges {
  absent,
  ragged,        // a range for each query
  empty,         // start behind end, for every other query
  out_of_range,  // far outside of the keys
};

struct CaseShape {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t s_q = 5, h = 4, s_k = 300, d = 128, topk = 64;
  Order order = Order::random;
  Ranges ranges = Ranges::absent;
  Ties ties = Ties::smaller;
  DType weights_dtype = DType::f32;
  Layout layout = Layout::dense;
  std::optional<std::int64_t> q_start{};
  std::int64_t k_stride = 1;
  bool poison = true;  // rows that no query sees are NaN and infinity
};

// The case table. Names are unique.
const std::vector<CaseShape>& case_shapes();

// "s_q 5, h 4, s_k 300, d 128, topk 64".
std::string describe(const CaseShape& shape);

// The same for the same shape on every platform.
struct CaseInputs {
  StridedTensor q, k, weights, k_scale, key_start, key_end;  // the last three may be absent
  std::optional<std::int64_t> q_start;
  std::int64_t k_stride = 1;

  oracle::Inputs for_oracle() const;
  CaseInputs on(Device device) const;  // a copy there
  template <class Args>
  void pass_to(Args& args) const {
    args.q = q.view;
    args.k = k.view;
    args.weights = weights.view;
    args.k_scale = k_scale.view;
    args.key_start = key_start.view;
    args.key_end = key_end.view;
    args.q_start = q_start;
    args.k_stride = k_stride;
  }
};
CaseInputs make_inputs(const CaseShape& shape);

// Whether rows whose products are all 0 or below must have the score 0, without a tolerance: their
// products are far from 0, or exactly 0.
inline bool zeros_are_exact(const CaseShape& shape) {
  return shape.order == Order::zero || shape.order == Order::plateau ||
         shape.order == Order::last_head;
}

// The queries that are looked at: all, or some of many.
std::vector<std::int64_t> checked_queries(const CaseShape& shape);

// The tolerance table: of scores, relative to the sum of the magnitudes that go into them.
double score_tolerance(DType dtype);
// Of gradients: `narrowest` is the narrowest dtype of what goes in and comes out.
testing::Tolerance gradient_tolerance(DType narrowest);

// Whether GPU kernels take the case; those of sm90 have no f16.
inline bool on_gpu(const CaseShape& shape) { return shape.dtype != DType::f32; }

// A benchmark of an operation on rows that topk() may have chosen.
struct ChosenBench {
  CaseShape shape;
  DeviceType device = DeviceType::cuda;
  std::optional<double> target_ms{};  // where the bf16 product 8192^3 runs at 770 TFLOP/s
};
// `targets_ms`: of 64 heads at 8,192, 32,768 and 131,072 rows.
std::vector<ChosenBench> chosen_benches(std::initializer_list<double> targets_ms);
// Name, shape, FLOPs of so many products, ceiling and target; `prepare` is left to the operation.
testing::Benchmark make_chosen_benchmark(const ChosenBench& bench, int products);
// [s_q, topk], i32: rows that each query sees, ascending, no two of them the same.
Tensor chosen_rows(const CaseShape& shape);

}  // namespace winnow::indexer
