// The problems on which indexer::topk_paged is tested and timed.
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
  // One for each sequence, or, of_queries, for each query of it.
  std::vector<std::int32_t> context_lens{};
  std::int64_t s_q = 1, h = 4, d = 128, topk = 64;
  std::int64_t table = 8, num_pages = 40;
  DType weights_dtype = DType::f32;
  Ties ties = Ties::smaller;
  bool positions = false;
  bool absent = false;  // every third entry of a table names no page
  bool equal = false;   // all keys are the same
  bool nan = false;     // every fifth key is NaN
  // Three quarters of the scores are 0, without a tolerance, among scores of either sign.
  bool plateau = false;
  Layout layout = Layout::dense;
  bool of_queries = false;
};

// The case table. Names are unique.
std::vector<PagedCase> paged_cases();

std::string describe(const PagedCase& shape);

// The tensors of a step. Rows behind the contexts, and pages that no table names, are NaN.
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
  // Without outputs.
  TopkPagedArgs args() const;
  // The page of a position of sequence i; -1: absent.
  std::int64_t page(std::int64_t i, std::int64_t position) const;
  // Rows that query j of sequence i may see, absent ones included.
  std::int64_t visible(std::int64_t i, std::int64_t j) const;
  // The rows that query j of sequence i sees and that are present, ascending, with the scores that
  // the oracle has of them. On the host.
  struct Wanted {
    std::vector<std::int64_t> rows;
    std::vector<oracle::Score> scores;
  };
  Wanted wanted(std::int64_t i, std::int64_t j) const;

  PagedCase shape;
  StridedTensor q, pages, weights, block_tables, context_lens;
};

// A benchmark of a step whose sequences have `rows` rows each: the products on the CPU; on a GPU
// the bytes of the keys and their scales, which is what takes the time of a step there, and with
// four queries of each sequence the products again: 60 % of a copy would be 1.26 PFLOP/s on an
// H200. `prepare` and the target are left to the operation.
std::pair<PagedCase, testing::Benchmark> make_paged_benchmark(std::int64_t b, std::int64_t s_q,
                                                              std::int32_t rows, std::int64_t h,
                                                              DeviceType device);

}  // namespace winnow::indexer
