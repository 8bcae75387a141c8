#include "winnow/python/described.h"

#include <array>
#include <charconv>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace winnow::python {
namespace {

// A tensor of a description: "indices: i32[s_q, 1, topk=64]".
struct Entry {
  std::string_view name, dtype, sizes;
};

std::string_view trimmed(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

// Takes what stands before `end` off the text.
std::string_view cut(std::string_view& text, char end) {
  const std::size_t at = text.find(end);
  if (at == text.npos) throw std::logic_error("no '" + std::string(1, end) + "' in a description");
  const std::string_view before = trimmed(text.substr(0, at));
  text.remove_prefix(at + 1);
  return before;
}

// Entry by entry: visit(Entry).
template <class Visitor>
void each_entry(std::string_view text, const Visitor& visit) {
  while (!trimmed(text).empty()) {
    Entry entry;
    entry.name = cut(text, ':');
    entry.dtype = cut(text, '[');
    entry.sizes = cut(text, ']');
    visit(entry);
    text = trimmed(text);
    if (text.starts_with(',')) text.remove_prefix(1);
  }
}

template <class Visitor>
void each_size(std::string_view sizes, const Visitor& visit) {
  while (!sizes.empty()) {
    const std::size_t comma = sizes.find(',');
    visit(trimmed(sizes.substr(0, comma)));
    sizes.remove_prefix(comma == sizes.npos ? sizes.size() : comma + 1);
  }
}

// A name, with a default or without, a number, or "a*b" or "a/b" of these, where b is not 0.
std::int64_t value_of(std::string_view size, Shape& shape) {
  const std::size_t sign = size.find_first_of("=*/");
  if (sign != size.npos) {
    const std::string_view left = size.substr(0, sign);
    const std::int64_t right = value_of(size.substr(sign + 1), shape);
    if (size[sign] == '=') return shape.size(left, right);
    return size[sign] == '*' ? value_of(left, shape) * right : value_of(left, shape) / right;
  }
  std::int64_t number = 0;
  if (std::from_chars(size.data(), size.data() + size.size(), number).ec == std::errc()) {
    return number;
  }
  return size == "x" ? 16 / size_of(shape.dtype) : shape.size(size, 1);
}

DType dtype_of(std::string_view dtype, const Shape& shape) {
  if (dtype == "T") return shape.dtype;
  if (dtype == "R") return accumulator_of(shape.dtype);
  for (const DType known :
       {DType::f32, DType::bf16, DType::f8_e4m3, DType::u8, DType::i32, DType::i64}) {
    if (dtype == to_string(known)) return known;
  }
  throw std::logic_error("no dtype " + std::string(dtype) + " in a description");
}

}  // namespace

void Described::take_sizes() const {
  each_entry(text_, [&](const Entry& entry) {
    each_size(entry.sizes, [&](std::string_view size) { value_of(size, shape_); });
  });
}

TensorView Described::tensor(std::string_view name) const {
  TensorView view;
  each_entry(text_, [&](const Entry& entry) {
    if (entry.name != name) return;
    std::vector<std::int64_t> sizes;
    each_size(entry.sizes, [&](std::string_view size) { sizes.push_back(value_of(size, shape_)); });
    view = without_memory(dtype_of(entry.dtype, shape_), sizes, shape_.device);
  });
  return view;
}

}  // namespace winnow::python
