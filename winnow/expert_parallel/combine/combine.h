// AllToAll::combine(), below the door. Internal.
#pragma once

#include "winnow/expert_parallel/layer.h"

namespace winnow::expert_parallel {

Tensor combine(Layer& layer, const CombineArgs& args, const Descriptor& descriptor);

}  // namespace winnow::expert_parallel
