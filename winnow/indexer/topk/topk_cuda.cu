// The indexer's choice of rows, cuda: scores are stored, and a second kernel chooses from them, in
// turns that share the workspace.
#include <cstdint>

#include "winnow/device/common/scratch.h"
#include "winnow/indexer/scores/scores_impl.h"
#include "winnow/indexer/topk/choose_launch_cuda.h"
#include "winnow/indexer/topk/choose_stored.h"
#include "winnow/indexer/topk/topk_impl.h"

namespace winnow::indexer {
namespace {

constexpr device::Runtime kRuntime{"indexer::topk", "cuda"};

}  // namespace

std::int64_t topk_cuda_workspace_bytes(const TopkParams& params) {
  return gpu::plan_stored(params.problem).bytes;
}

void topk_cuda(const TopkParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, topk_cuda_workspace_bytes(params), queue);
  auto* const stored = static_cast<float*>(scratch.data());
  gpu::for_each_stored_turn(
      params, stored, [&](const Problem& problem, const gpu::ChooseParams& choose) {
        if (problem.s_k > 0) {
          dense_scores_cuda(problem, {.data = stored, .stride0 = choose.stored_stride},
                            DenseRows::seen, stream);
        }
        cuda_detail::launch_choice(kRuntime, choose, problem.s_q, problem.s_k, queue);
      });
}

}  // namespace winnow::indexer
