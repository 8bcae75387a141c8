#include "winnow/expert_parallel/layer/rail_weights.h"

#include <cstring>

#include "winnow/cpu/convert.h"

namespace winnow::expert_parallel {

void append_rows(std::vector<std::byte>& to, const ConstTensorView& view) {
  const std::int64_t row_bytes = view.size(1) * size_of(view.dtype());
  const auto* from = static_cast<const std::byte*>(view.data());
  for (std::int64_t row = 0; row < view.size(0);
       ++row, from += view.stride(0) * size_of(view.dtype())) {
    to.insert(to.end(), from, from + row_bytes);
  }
}

std::vector<std::byte> rail_weights(const Layer& layer, const Routing& routing,
                                    const RailSources& sources, const std::byte* own,
                                    const std::function<std::size_t(std::int64_t tokens)>& skip) {
  const auto size = static_cast<std::size_t>(size_of(layer.config.weight_dtype));
  std::vector<std::byte> weights(routing.table_offset(layer.nodes()) * size);
  for (int node = 0; node < layer.nodes(); ++node) {
    const std::int64_t tokens = sources.tokens(node);
    if (tokens == 0) continue;
    std::byte* const to = weights.data() + routing.table_offset(node) * size;
    const std::size_t bytes = static_cast<std::size_t>(tokens * routing.topk) * size;
    if (node == layer.node()) {
      std::memcpy(to, own + skip(tokens), bytes);
    } else {
      layer.exchange.copy_table(node, skip(tokens), to, bytes);
    }
  }
  return weights;
}

std::vector<float> to_floats(DType dtype, const std::vector<std::byte>& values) {
  const auto count = static_cast<std::int64_t>(values.size()) / size_of(dtype);
  std::vector<float> floats(static_cast<std::size_t>(count));
  if (count > 0) load_f32(dtype, values.data(), 0, count, floats.data());
  return floats;
}

}  // namespace winnow::expert_parallel
