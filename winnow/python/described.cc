#include "winnow/python/described.h"

#include <charconv>
#include <string_view>
#include <vector>

namespace winnow::python {
namespace {

using contract::Dimension;

// A number, a name, or "8*name".
std::int64_t usual_size(std::string_view text, Shape& shape) {
  std::int64_t number = 1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return shape.size(text);
  if (end == text.data() + text.size()) return number;
  return number * shape.size(text.substr(static_cast<std::size_t>(end - text.data()) + 1));
}

std::int64_t named_size(std::string_view name, Shape& shape) {
  return name == "x" ? 16 / size_of(shape.dtype) : shape.size(name);
}

}  // namespace

std::int64_t described_size(const Dimension& dim, Shape& shape) {
  if (dim.number >= 0) return dim.number;
  if (dim.quotient) return named_size(dim.name, shape) / named_size(dim.second, shape);
  if (!dim.second.empty()) {  // one or the other
    const std::int64_t first = shape.known(dim.name, -1);
    return first >= 0 ? first : shape.size(dim.second);
  }
  if (dim.name == "x") return named_size(dim.name, shape);
  return shape.size(dim.name, usual_size(dim.usual, shape));
}

TensorView described(const contract::Spec& spec, std::span<const contract::Spec> specs,
                     Shape& shape) {
  const contract::Extents& extents = spec.asked.rank >= 0 ? spec.asked : spec.extents;
  std::vector<std::int64_t> sizes;
  for (const Dimension& dim : extents.view()) sizes.push_back(described_size(dim, shape));
  const auto of = [&](const contract::Dtypes& dtypes) {
    return dtypes.is_asked ? shape.dtype : dtypes.list[0];
  };
  const DType dtype =
      spec.follows < 0
          ? of(spec.dtypes)
          : spec.dtypes.follows[0](of(specs[static_cast<std::size_t>(spec.follows)].dtypes));
  return without_memory(dtype, sizes, shape.device);
}

}  // namespace winnow::python
