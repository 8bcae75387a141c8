// The weights of the rail sources' pairs on the CPU, as a call's exchange has brought them.
// Internal.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/layer/layer.h"
#include "winnow/expert_parallel/routing/rail_sources.h"

namespace winnow::expert_parallel {

// Behind `to`: the rows of a view [n, K], one after the other.
void append_rows(std::vector<std::byte>& to, const ConstTensorView& view);

// [NN, T, K] of the layer's weight_dtype, copied: the mailboxes serve later exchanges. `own` is the
// table that this rank posted; `skip(tokens)` bytes of a table stand before its weights.
std::vector<std::byte> rail_weights(const Layer& layer, const Routing& routing,
                                    const RailSources& sources, const std::byte* own,
                                    const std::function<std::size_t(std::int64_t tokens)>& skip);

std::vector<float> to_floats(DType dtype, const std::vector<std::byte>& values);

}  // namespace winnow::expert_parallel
