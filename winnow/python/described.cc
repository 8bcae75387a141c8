#include "winnow/python/described.h"

#include <charconv>
#include <string_view>
#include <vector>

#include "winnow/core/error.h"

namespace winnow::python {
namespace {

using contract::Dimension;

// A number, a name, or "8*name".
std::int64_t usual_size(std::string_view text, Shape& shape) {
  std::int64_t number = 1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return shape.size(text);
  if (end == text.data() + text.size()) return number;
  const std::string_view name = text.substr(static_cast<std::size_t>(end - text.data()) + 1);
  const std::int64_t size = shape.size(name);
  std::int64_t product = 0;
  if (!__builtin_mul_overflow(number, size, &product)) return product;
  throw Error(ErrorCode::invalid_argument, "supports", std::string(name),
              "below 2^63 / " + std::to_string(number), std::to_string(size));
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
    return first >= 0 ? first : shape.size(dim.third.empty() ? dim.second : dim.third);
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
  try {
    return without_memory(dtype, sizes, shape.device);
  } catch (const Error& error) {  // of a view, which does not know its name
    throw Error(error.code(), "supports", std::string(spec.name), error.details().wanted,
                error.details().got);
  }
}

}  // namespace winnow::python
