// The kernels of dispatch as a layer knows them: how they are loaded, and what their waits wait
// for. Only in builds with CUDA.
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_request.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter_cuda.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"

namespace winnow::expert_parallel {
namespace {

int load() {
  for (const auto load_one : {load_count, load_place, load_move, load_scatter}) {
    if (const int status = load_one(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

constexpr PhaseText kTexts[] = {{kCountsPhase, kDispatch, "the counts"},
                                {kTokensPhase, kDispatch, "the tokens"},
                                {kRowsPhase, kDispatch, "the rows"},
                                {Phase::blocks, kDispatch, "the blocks of its kernel"},
                                {Phase::memory, kDispatch, "memory"}};

}  // namespace

CudaOperation cuda_dispatch() { return {load, kTexts}; }

}  // namespace winnow::expert_parallel
