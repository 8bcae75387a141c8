// AllToAll::dispatch(), below the door. Internal.
#pragma once

#include "winnow/expert_parallel/layer/layer.h"

namespace winnow::expert_parallel {

class DeviceLayer;

Dispatched dispatch(Layer& layer, const DispatchArgs& args);

// On a GPU: dispatch_cuda.cc. Only in builds with CUDA.
Dispatched dispatch(DeviceLayer& layer, const DispatchArgs& args);
// Loads its kernels onto the current GPU; a cudaError_t.
int load_dispatch_kernels();

}  // namespace winnow::expert_parallel
