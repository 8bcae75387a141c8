// AllToAll::dispatch(), below the door. Internal.
#pragma once

#include "winnow/expert_parallel/layer.h"

namespace winnow::expert_parallel {

Dispatched dispatch(Layer& layer, const DispatchArgs& args);

}  // namespace winnow::expert_parallel
