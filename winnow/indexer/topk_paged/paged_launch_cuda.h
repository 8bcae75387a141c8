// How the kernel of topk_paged_cuda.cuh is prepared. Host code of .cu files.
#pragma once

#include <cstdint>

#include "winnow/indexer/score_launch_cuda.h"
#include "winnow/indexer/topk_paged/paged_problem.h"
#include "winnow/indexer/topk_paged/topk_paged_cuda.cuh"

namespace winnow::indexer::cuda_detail {

// All but what is stored and the groups of a launch. `most`: see columns_for().
template <class Stored>
PagedParams<Stored> paged_params(const PagedProblem& problem, std::int64_t most) {
  PagedParams<Stored> p{};
  p.heads.q = static_cast<const char*>(problem.q.data);
  p.heads.query_stride = problem.q.stride1;
  p.heads.head_stride = problem.q_head_stride;
  p.heads.weights = problem.weights.data;
  p.heads.weights_stride = problem.weights.stride1;
  p.heads.heads = static_cast<int>(problem.h);
  p.heads.d = static_cast<int>(problem.d);
  p.heads.weights_are_bf16 = problem.weights_dtype == DType::bf16;
  p.q_stride0 = problem.q.stride0;
  p.weights_stride0 = problem.weights.stride0;
  p.columns = columns_for(problem.h, problem.s_q, most);
  p.pages = problem.pages.data;
  p.page_stride = problem.pages.stride0;
  p.block_tables = problem.block_tables.data;
  p.block_tables_stride = problem.block_tables.stride0;
  p.num_pages = static_cast<int>(problem.num_pages);
  p.line.context_lens = problem.context_lens.data;
  p.line.context_stride = problem.context_lens.stride0;
  p.line.of_queries = problem.lens_of_queries;
  p.line.queries = p.columns.queries;
  p.line.groups_of_a_sequence =
      static_cast<int>(device::ceil_div<std::int64_t>(problem.s_q, p.columns.queries));
  p.line.s_q = problem.s_q;
  p.line.table = static_cast<int>(problem.table);
  return p;
}

// Queues the kernel for groups [first, end), whose tiles are up to `tiles` each.
template <class Stored>
void launch_paged(const device::Runtime& runtime, PagedParams<Stored>& p, std::int64_t first,
                  std::int64_t end, std::int64_t tiles, cudaStream_t stream) {
  p.line.set_groups(first, end);
  p.splits = static_cast<int>(splits_for(end - first, tiles, runtime.multiprocessors()));
  launch_scores(runtime, paged_kernel<Stored>, (end - first) * p.splits, stream, p);
}

}  // namespace winnow::indexer::cuda_detail
