// The problems of the tests and benchmarks of indexer::topk_paged.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/topk_paged/topk_paged.h"

namespace winnow::indexer {

struct PagedCase {
  std::string name;
  // One for each sequence, or, with of_queries, for each query.
  std::vector<std::int32_t> context_lens{};
  std::int64_t s_q = 1, h = 4, d = 128, topk = 64;
  std::int64_t table = 8, num_pages = 40;
  DType weights_dtype = DType::f32;
  Ties ties = Ties::smaller;
  bool positions = false;
  bool absent = false;  // every third entry of a table is not a page
  bool equal = false;   // all keys are equal
  bool nan = false;     // every fifth key is NaN
  // Three quarters of the scores are exactly 0, the others positive or negative.
  bool plateau = false;
  Layout layout = Layout::dense;
  bool of_queries = false;
};

// The case table. Names are unique.
std::vector<PagedCase> paged_cases();

std::string describe(const PagedCase& shape);

// The tensors of a step. Rows that no query sees, and unused pages, are NaN.
struct PagedStep {
  explicit PagedStep(const PagedCase& shape);
  std::int64_t b() const;
  PagedStep on(Device device) const;
  template <class Args>
  void pass_to(Args& args) const {
    args.q = q.view;
    args.pages = pages.view;
    args.weights = weights.view;
    args.block_tables = block_tables.view;
    args.context_lens = context_lens.view;
  }
  // The arguments without outputs.
  TopkPagedArgs args() const;
  // The page of a position of sequence i; -1: absent.
  std::int64_t page(std::int64_t i, std::int64_t position) const;
  // Rows that query j of sequence i may see, absent ones included.
  std::int64_t visible(std::int64_t i, std::int64_t j) const;
  // The keys of the rows that query j of sequence i may see, on the host; those of absent ones are
  // 0, and not in `rows`.
  struct Keys {
    std::vector<std::int64_t> rows;
    StridedTensor k, k_scale;
  };
  Keys keys(std::int64_t i, std::int64_t j) const;
  // The rows that query j of sequence i sees, in ascending order without absent ones, and the
  // oracle's scores for them. On the host.
  struct Wanted {
    std::vector<std::int64_t> rows;
    std::vector<oracle::Score> scores;
  };
  Wanted wanted(std::int64_t i, std::int64_t j) const;

  PagedCase shape;
  StridedTensor q, pages, weights, block_tables, context_lens;
};

// A benchmark of a step whose sequences have `rows` rows each, without `prepare` and a target. On a
// GPU with up to three queries per sequence it counts the bytes of the keys and their scales, which
// limit such a step. On the CPU, and with more queries, it counts the products: with four, 60 % of
// the bandwidth of a copy would need 1.26 PFLOP/s on an H200.
std::pair<PagedCase, testing::Benchmark> make_paged_benchmark(std::int64_t b, std::int64_t s_q,
                                                              std::int32_t rows, std::int64_t h,
                                                              DeviceType device);

}  // namespace winnow::indexer
