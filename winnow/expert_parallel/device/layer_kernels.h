// Launches of the layer's own small kernels. Each returns a cudaError_t. Internal.
#pragma once

#include <cstddef>

#include "winnow/expert_parallel/device/view.h"

namespace winnow::expert_parallel {

// Loads them onto the current GPU.
int load_layer_kernels();
// row[i] = pointers.data[i], i < locals, in stream order.
int set_segment(std::byte** row, const NodePointers& pointers, int locals, void* stream);

}  // namespace winnow::expert_parallel
