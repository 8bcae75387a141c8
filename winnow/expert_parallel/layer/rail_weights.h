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

// Appends the rows of a view [n, K] to `to`, one after the other.
void append_rows(std::vector<std::byte>& to, const ConstTensorView& view);

// The weights [NN, T, K], of the layer's weight_dtype; a copy, since later exchanges overwrite the
// mailboxes. `own` is the table that this rank posted. In every table the weights follow
// skip(tokens) bytes.
std::vector<std::byte> rail_weights(const Layer& layer, const Routing& routing,
                                    const RailSources& sources, const std::byte* own,
                                    const std::function<std::size_t(std::int64_t tokens)>& skip);

std::vector<float> to_floats(DType dtype, const std::vector<std::byte>& values);

}  // namespace winnow::expert_parallel
