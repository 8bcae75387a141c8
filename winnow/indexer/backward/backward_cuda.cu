// Backward of the indexer, cuda: the launches.
#include <cstdint>

#include "winnow/indexer/backward/backward_cuda.cuh"
#include "winnow/indexer/backward/backward_impl.h"
#include "winnow/indexer/backward/backward_launch.h"

namespace winnow::indexer {
namespace {

using namespace backward_cuda_detail;

constexpr device::Runtime kRuntime{"indexer::backward", "cuda"};

template <DType kDType>
void run(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  gpu::run_backward<NumberOf<kDType>, kProductType<kDType>>(
      kRuntime, params, workspace, stream, [&](const Params& p, int) {
        kRuntime.allow_shared_memory(backward_kernel<kDType>, Plan::kBytes);
        kRuntime.launch(backward_kernel<kDType>, p.items, kThreads, Plan::kBytes, stream, p);
      });
}

}  // namespace

std::int64_t backward_gpu_workspace_bytes(const BackwardParams& params) {
  return gpu::Workspace(params).bytes;
}

void backward_cuda(const BackwardParams& params, void* workspace, void* stream) {
  const DType dtype = params.problem.dtype;
  const auto function = dtype == DType::f8_e4m3 ? run<DType::f8_e4m3>
                        : dtype == DType::f16   ? run<DType::f16>
                                                : run<DType::bf16>;
  function(params, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::indexer
