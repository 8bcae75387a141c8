// Dense scores of the indexer, sm90: the launch.
#include <algorithm>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/score_launch_sm90.h"
#include "winnow/indexer/scores/scores_impl.h"
#include "winnow/indexer/scores/scores_sm90.cuh"

namespace winnow::indexer {

void scores_sm90(const ScoresParams& params, void* stream) {
  using namespace sm90_detail;
  constexpr device::Runtime kRuntime{"indexer::scores", "sm90"};
  with_shape(params.problem, [&](auto shape) {
    using Shape = decltype(shape);
    const ScoreParams scores = score_params<Shape>(kRuntime, params.problem);
    const DenseKernelParams dense{params.scores.data, params.scores.stride0};
    constexpr int kBytes = SharedPlan<Shape, DenseSink::kSinkBytes>::kBytes;
    kRuntime.allow_shared_memory(dense_kernel<Shape>, kBytes);
    const int blocks = std::min(scores.groups, kRuntime.multiprocessors());
    kRuntime.launch(dense_kernel<Shape>, static_cast<unsigned>(blocks), kThreads, kBytes,
                    static_cast<cudaStream_t>(stream), scores, dense);
  });
}

}  // namespace winnow::indexer
