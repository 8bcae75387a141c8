// Scores of the indexer, sm90: the launches.
#include <algorithm>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/score_launch_sm90.h"
#include "winnow/indexer/scores/scores_at_sm90.cuh"
#include "winnow/indexer/scores/scores_impl.h"
#include "winnow/indexer/scores/scores_sm90.cuh"

namespace winnow::indexer {
namespace {

constexpr device::Runtime kRuntime{"indexer::scores", "sm90"};

template <class Shape>
void scores_at(const ScoresParams& params, cudaStream_t stream) {
  using namespace scores_at_sm90;
  Params kernel{};
  kernel.view = chosen_sm90::view_of(params.problem, params.indices, params.topk);
  kernel.scores = params.scores.data;
  kernel.scores_stride = params.scores.stride0;
  // Few queries are cut, so that every block has some tiles; items are counted in 31 bits.
  const std::int64_t blocks = 2 * kRuntime.multiprocessors();
  const std::int64_t tiles = (params.topk + kTileEntries - 1) / kTileEntries;
  const std::int64_t splits =
      std::clamp<std::int64_t>(blocks / params.problem.s_q, 1, std::max<std::int64_t>(tiles, 1));
  kernel.splits = static_cast<int>(splits);
  const std::int64_t grid = std::min(blocks, params.problem.s_q * splits);
  kRuntime.allow_all_shared_memory(scores_at_kernel<Shape>, Plan<Shape>::kBytes);
  kRuntime.launch(scores_at_kernel<Shape>, static_cast<unsigned>(grid), scores_at_sm90::kThreads,
                  Plan<Shape>::kBytes, stream, kernel);
}

// Chooses the kernel by dtype, heads and columns.
void scores_at(const ScoresParams& params, cudaStream_t stream) {
  using scores_at_sm90::Shape;
  const Problem& problem = params.problem;
  if (problem.dtype == DType::f8_e4m3) {
    if (problem.h == 128) return scores_at<Shape<true, 128, false, 1>>(params, stream);
    return scores_at<Shape<true, 128, true, 1>>(params, stream);
  }
  if (problem.d == 64) {
    if (problem.h == 64) return scores_at<Shape<false, 64, false, 1>>(params, stream);
    if (problem.h < 64) return scores_at<Shape<false, 64, true, 1>>(params, stream);
    return scores_at<Shape<false, 128, true, 1>>(params, stream);
  }
  if (problem.h == 64) return scores_at<Shape<false, 64, false, 2>>(params, stream);
  if (problem.h < 64) return scores_at<Shape<false, 64, true, 2>>(params, stream);
  return scores_at<Shape<false, 128, true, 2>>(params, stream);
}

}  // namespace

void dense_scores_sm90(const Problem& problem, Rows<float*> scores, DenseRows rows, void* stream) {
  using namespace sm90_detail;
  with_shape(problem, [&](auto shape) {
    using Shape = decltype(shape);
    ScoreParams params = score_params<Shape>(kRuntime, problem);
    // Few queries are cut by rows, so that every multiprocessor has some.
    const int multiprocessors = kRuntime.multiprocessors();
    const int tiles = (params.s_k + kTileRows - 1) / kTileRows;
    params.splits = std::clamp(multiprocessors / params.groups, 1, std::max(tiles, 1));
    const DenseKernelParams dense{
        scores.data, scores.stride0,
        reinterpret_cast<std::uintptr_t>(scores.data) % 16 == 0 && scores.stride0 % 4 == 0,
        rows == DenseRows::all};
    constexpr int kBytes = sizeof(Layout<Shape, DenseSink>);
    kRuntime.allow_shared_memory(dense_kernel<Shape>, kBytes);
    const int blocks = std::min(params.groups * params.splits, multiprocessors);
    kRuntime.launch(dense_kernel<Shape>, static_cast<unsigned>(blocks), kThreads, kBytes,
                    static_cast<cudaStream_t>(stream), params, dense);
  });
}

void scores_sm90(const ScoresParams& params, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (!params.indices.present()) {
    dense_scores_sm90(params.problem, params.scores,
                      params.clean ? DenseRows::all : DenseRows::seen, stream);
  } else {
    scores_at(params, queue);
  }
}

}  // namespace winnow::indexer
