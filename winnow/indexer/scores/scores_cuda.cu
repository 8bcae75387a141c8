// Scores of the indexer, cuda: the launches.
#include <algorithm>
#include <cstdint>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/score_launch_cuda.h"
#include "winnow/indexer/scores/scores_cuda.cuh"
#include "winnow/indexer/scores/scores_impl.h"

namespace winnow::indexer {
namespace {

using namespace cuda_detail;

constexpr device::Runtime kRuntime{"indexer::scores", "cuda"};

void scores_at(const ScoresParams& params, cudaStream_t stream) {
  AtParams p{};
  p.view = gpu::view_of(params.problem, params.indices, params.topk);
  p.columns = columns_for(params.problem.h, 1, 1);
  p.scores = params.scores.data;
  p.scores_stride = params.scores.stride0;
  const std::int64_t tiles = device::ceil_div<std::int64_t>(params.topk, kTileRows);
  p.splits = static_cast<int>(splits_for(params.problem.s_q, tiles, kRuntime.multiprocessors()));
  with_dtype(params.problem.dtype, [&](auto dtype) {
    launch_scores(kRuntime, scores_at_kernel<dtype>, params.problem.s_q * p.splits, stream, p);
  });
}

// `width`: of scores from each query's first row on.
template <bool kFromStart>
void launch_dense(const Problem& problem, Rows<float*> scores, DenseRows rows, int width,
                  void* stream) {
  DenseParams p{};
  p.seen = gpu::seen_rows(problem);
  p.seen.width = width;
  p.heads = heads_view(problem);
  p.columns = columns_for(problem.h, problem.s_q, problem.s_q);
  p.k = static_cast<const char*>(problem.k.data);
  p.k_row_stride = problem.k.stride0 * size_of(problem.dtype);
  p.k_scale = problem.k_scale.data;
  p.k_scale_stride = problem.k_scale.stride0;
  p.scores = scores.data;
  p.stride = scores.stride0;
  p.aligned = reinterpret_cast<std::uintptr_t>(scores.data) % 16 == 0 && scores.stride0 % 4 == 0;
  p.clean = rows == DenseRows::all;
  const std::int64_t groups = device::ceil_div<std::int64_t>(problem.s_q, p.columns.queries);
  const std::int64_t tiles = device::ceil_div<std::int64_t>(problem.s_k, kTileRows);
  p.groups = static_cast<int>(groups);
  p.splits = static_cast<int>(splits_for(groups, tiles, kRuntime.multiprocessors()));
  with_dtype(problem.dtype, [&](auto dtype) {
    launch_scores(kRuntime, dense_kernel<dtype, kFromStart>, groups * p.splits,
                  static_cast<cudaStream_t>(stream), p);
  });
}

}  // namespace

void dense_scores_cuda(const Problem& problem, Rows<float*> scores, DenseRows rows, void* stream) {
  launch_dense<false>(problem, scores, rows, 0, stream);
}

void scores_cuda(const ScoresParams& params, void* stream) {
  const DenseRows rows = params.clean ? DenseRows::all : DenseRows::seen;
  if (params.indices.present()) {
    scores_at(params, static_cast<cudaStream_t>(stream));
  } else if (params.width.has_value()) {
    launch_dense<true>(params.problem, params.scores, rows, static_cast<int>(*params.width),
                       stream);
  } else {
    dense_scores_cuda(params.problem, params.scores, rows, stream);
  }
}

}  // namespace winnow::indexer
