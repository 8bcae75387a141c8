// The problems on which indexer::topk_paged is tested and timed.
#pragma once

#include <cstdint>
#include <string>
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

std::string describe(const PagedCase& shape);

// The tensors of a step. Rows behind the contexts, and pages that no table names, are NaN.
struct PagedStep {
  explicit PagedStep(const PagedCase& shape);
  std::int64_t b() const;
  PagedStep on(Device device) const;
  // Without outputs.
  TopkPagedArgs args() const;
  // The page of a position of sequence i; -1: absent.
  std::int64_t page(std::int64_t i, std::int64_t position) const;
  // Rows that query j of sequence i may see, absent ones included.
  std::int64_t visible(std::int64_t i, std::int64_t j) const;

  PagedCase shape;
  StridedTensor q, pages, weights, block_tables, context_lens;
};

}  // namespace winnow::indexer
