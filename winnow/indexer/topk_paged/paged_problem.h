// What topk_paged() and scores_paged() share behind the entry point: the plain description of a
// paged cache of keys and its queries, and the rows of their contracts. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/core/dtype.h"
#include "winnow/core/read_once.h"
#include "winnow/core/row_limits.h"
#include "winnow/core/rows.h"
#include "winnow/indexer/problem.h"

namespace winnow::indexer {

struct PagedProblem {
  std::int64_t b = 0, s_q = 0, h = 0, d = 0;
  std::int64_t num_pages = 0, table = 0;  // table: pages of a row of block_tables
  bool lens_of_queries = false;           // context_lens has the rows that each query sees
  Rows<const void*> q;                    // [b, s_q, h, d], f8_e4m3; the strides of b and s_q
  std::int64_t q_head_stride = 0;
  DType weights_dtype = DType::f32;
  Rows<const void*> weights;               // [b, s_q, h]
  Rows<const std::uint8_t*> pages;         // [num_pages, 64 * (d + 4)]
  Rows<const std::int32_t*> block_tables;  // [b, table]
  Rows<const std::int32_t*> context_lens;  // [b], or [b, s_q]

  // The rows that query j of sequence i sees, of those that the table has room for. Reads the
  // length once.
  std::int64_t visible(std::int64_t i, std::int64_t j) const {
    const std::int64_t given =
        read_once(context_lens.data + context_lens.offset(i, lens_of_queries ? j : 0));
    const std::int64_t context = std::clamp<std::int64_t>(given, 0, table * 64);
    return lens_of_queries ? context : rows_of_step(context, s_q, j);
  }
};

// The most pages: whole tiles of two, so that counts of their rows are below 2^31, too.
inline constexpr std::int64_t kMostPages = std::int64_t{2} * ((1 << 24) - 1);

void check_pages(const Check& check, const ConstTensorView& q, const ConstTensorView& pages);
void check_context_lens(const Check& check, const ConstTensorView& q, const ConstTensorView& pages,
                        const ConstTensorView& block_tables, const ConstTensorView& context_lens);
// What the kernels of a GPU backend require beyond the contract.
void check_paged_for_gpu(const Check& check, Backend backend, const ConstTensorView& q,
                         const ConstTensorView& pages);

// The rows of the contracts for the queries and the cache.
template <class Args>
consteval auto paged_problem() {
  using namespace contract;
  using enum DType;
  return std::tuple(
      ranks<&Args::q, &Args::pages, &Args::block_tables>, rule<check_heads, &Args::q>,
      input<&Args::q>("[b, s_q, h=64, d=128]", any_of(f8_e4m3), "h 1 to 128, d 128 or 64"),
      input<&Args::pages>("[num_pages, 64 * (d + 4)]", any_of(u8),
                          "64 rows of d bytes, then their 64 scales as float32")
          .asked("[num_pages, d]")
          .by_rule(),
      rule<check_pages, &Args::q, &Args::pages>,
      input<&Args::weights>("[b, s_q, h]", any_of(f32, bf16),
                            "include d**-0.5, h**-0.5 and the scale of q"),
      input<&Args::block_tables>("[b, n]", any_of(i32), "the pages of each sequence"),
      input<&Args::context_lens>("[b]", any_of(i32),
                                 "cached rows, including those of the step's own queries; or, "
                                 "[b, s_q], the rows that each query sees")
          .or_as("[b, s_q]")
          .by_rule(),
      rule<check_context_lens, &Args::q, &Args::pages, &Args::block_tables, &Args::context_lens>);
}

// The problem of arguments that the contract has checked.
template <class Args>
PagedProblem paged_problem_of(const Args& args) {
  PagedProblem problem;
  problem.b = args.q.size(0);
  problem.s_q = args.q.size(1);
  problem.h = args.q.size(2);
  problem.d = args.q.size(3);
  problem.num_pages = args.pages.size(0);
  problem.table = args.block_tables.size(1);
  problem.lens_of_queries = args.context_lens.rank() > 1;
  problem.q = rows_of<const void*>(args.q, 0, 1);
  problem.q_head_stride = args.q.stride(2);
  problem.weights_dtype = args.weights.dtype();
  problem.weights = rows_of<const void*>(args.weights, 0, 1);
  problem.pages = rows_of<const std::uint8_t*>(args.pages, 0);
  problem.block_tables = rows_of<const std::int32_t*>(args.block_tables, 0);
  problem.context_lens =
      rows_of<const std::int32_t*>(args.context_lens, 0, problem.lens_of_queries ? 1 : -1);
  return problem;
}

}  // namespace winnow::indexer
