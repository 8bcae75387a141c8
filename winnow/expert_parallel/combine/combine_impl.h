// AllToAll::combine(), behind the entry point. Internal.
#pragma once

#include <string_view>

#include "winnow/core/check.h"
#include "winnow/expert_parallel/combine/combine.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/layer.h"

namespace winnow::expert_parallel {

inline constexpr std::string_view kCombine = "expert_parallel::combine";

class CudaLayer;
struct CudaOperation;

// What AllToAll::combine_buffer() gives.
TensorView buffer_of(const Config& config, const Descriptor::State& state);

// Throws Error (invalid_argument) unless the descriptor is of a dispatch of the layer whose
// identity is `layer`.
void check_descriptor(const Check& check, const std::shared_ptr<const char>& layer,
                      const Descriptor::State& state);

// Throws Error (invalid_argument) naming the argument, for this rank alone. `layer` is the identity
// of the layer, `config` its sizes and device.
void check_combine(const Config& config, const std::shared_ptr<const char>& layer,
                   const CombineArgs& args, const Descriptor::State& state);

// What all ranks' calls have alike.
Options combine_options(const CombineArgs& args, const Descriptor::State& state);

Tensor combine(Layer& layer, const CombineArgs& args, const Descriptor& descriptor);

// On a GPU: combine_cuda.cc. Only in builds with CUDA.
Tensor combine(CudaLayer& layer, const CombineArgs& args, const Descriptor& descriptor);
CudaOperation cuda_combine();

}  // namespace winnow::expert_parallel
