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

namespace sm90_detail {
namespace {

// `width`: of scores from each query's first row on.
template <class Shape>
void launch_dense(const Problem& problem, Rows<float*> scores, DenseRows rows, int width,
                  void* stream) {
  ScoreParams params = score_params<Shape>(kRuntime, problem);
  params.width = width;
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
}

// Calls function(Shape()) with the shape for scores from each query's first row on. Engines want
// them in f8 alone, so bf16 has three kernels instead of 14: others' heads and columns are padded
// with zeros, which change no bit.
template <class Function>
void with_shape_from_start(const Problem& problem, const Function& function) {
  constexpr auto kBf16 = Element::bf16;
  if (problem.dtype == DType::f8_e4m3) {
    with_heads<Element::f8, 1>(problem.h,
                               [&]<class Shape>(Shape) { function(FromStart<Shape>()); });
  } else if (problem.h > 64) {
    function(FromStart<Shape<kBf16, 128, true, 2>>());
  } else if (problem.h > 16) {
    function(FromStart<Shape<kBf16, 64, true, 2>>());
  } else {
    function(FromStart<Shape<kBf16, 16, true, 2>>());
  }
}

}  // namespace
}  // namespace sm90_detail

void dense_scores_sm90(const Problem& problem, Rows<float*> scores, DenseRows rows, void* stream) {
  sm90_detail::with_shape(problem, [&]<class Shape>(Shape) {
    sm90_detail::launch_dense<Shape>(problem, scores, rows, 0, stream);
  });
}

void scores_sm90(const ScoresParams& params, void* stream) {
  const DenseRows rows = params.clean ? DenseRows::all : DenseRows::seen;
  if (params.indices.present()) {
    scores_at(params, static_cast<cudaStream_t>(stream));
  } else if (params.width.has_value()) {
    const int width = static_cast<int>(*params.width);
    sm90_detail::with_shape_from_start(params.problem, [&]<class Shape>(Shape) {
      sm90_detail::launch_dense<Shape>(params.problem, params.scores, rows, width, stream);
    });
  } else {
    dense_scores_sm90(params.problem, params.scores, rows, stream);
  }
}

}  // namespace winnow::indexer
