// AllToAll::dispatch(), behind the entry point. Internal.
#pragma once

#include "winnow/expert_parallel/dispatch/dispatch.h"
#include "winnow/expert_parallel/layer/layer.h"

namespace winnow::expert_parallel {

class CudaLayer;
struct CudaOperation;

Dispatched dispatch(Layer& layer, const DispatchArgs& args);

// On a GPU: dispatch_cuda.cc. Only in builds with CUDA.
Dispatched dispatch(CudaLayer& layer, const DispatchArgs& args);
CudaOperation cuda_dispatch();

}  // namespace winnow::expert_parallel
