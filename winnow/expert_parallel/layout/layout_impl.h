// layout behind the entry point. Internal.
#pragma once

#include "winnow/expert_parallel/routing/counts.h"

namespace winnow::expert_parallel {

// count_layout(), queued on `stream` (a cudaStream_t) of the current device, which holds the
// tensors. Allocates nothing and does not wait, so the stream may be in capture.
void layout_cuda(const LayoutParams& params, void* stream);

}  // namespace winnow::expert_parallel
