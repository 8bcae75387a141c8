// Helpers for case tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/dtype.h"
#include "winnow/core/error.h"
#include "winnow/testing/operation.h"

namespace winnow::testing {

// "d64" for "d" and 64.
std::string numbered(std::string_view prefix, std::int64_t number);

// Appends the shape once per dtype, with the dtype before its name.
template <class Shape>
void add(std::vector<Shape>& list, std::initializer_list<DType> dtypes, const Shape& shape) {
  for (const DType dtype : dtypes) {
    list.push_back(shape);
    list.back().dtype = dtype;
    list.back().name = std::string(to_string(dtype)) + "-" + shape.name;
  }
}

// Appends in f64 the f32 shapes whose names end in "-" and one of `names`. Throws Error if no shape
// matches one of them.
template <class Shape>
void add_f64(std::vector<Shape>& list, const std::vector<std::string>& names) {
  std::vector<bool> used(names.size());
  for (Shape shape : std::vector<Shape>(list)) {
    bool chosen = false;
    for (std::size_t n = 0; n < names.size() && shape.dtype == DType::f32; ++n) {
      if (!shape.name.ends_with(std::string("-").append(names[n]))) continue;
      chosen = used[n] = true;
    }
    if (!chosen) continue;
    shape.name.erase(0, to_string(DType::f32).size() + 1);
    add(list, {DType::f64}, shape);
  }
  const auto unused = std::find(used.begin(), used.end(), false);
  if (unused == used.end()) return;
  throw Error(ErrorCode::invalid_argument, "testing::add_f64", "names", "the end of a shape's name",
              names[static_cast<std::size_t>(unused - used.begin())]);
}

// The cases of a case table, from shapes that have a name and a describe(). on_gpu(shape): whether
// GPU backends run the shape; null: they run none. only_gpu(shape): as in Case.
template <class Shape>
std::vector<Case> cases_of(const std::vector<Shape>& shapes,
                           CaseOutcome (*run)(const Shape& shape, const Target& target),
                           bool (*on_gpu)(const Shape& shape) = nullptr,
                           std::optional<Backend> (*only_gpu)(const Shape& shape) = nullptr) {
  std::vector<Case> cases;
  for (const Shape& shape : shapes) {
    cases.push_back({shape.name, describe(shape),
                     [shape, run](const Target& target) { return run(shape, target); },
                     on_gpu != nullptr && on_gpu(shape)});
    if (only_gpu != nullptr) cases.back().only_gpu = only_gpu(shape);
  }
  return cases;
}

// only_gpu where sm90 has no kernels for f16.
template <class Shape>
std::optional<Backend> cuda_for_f16(const Shape& shape) {
  return shape.dtype == DType::f16 ? std::optional(Backend::cuda) : std::nullopt;
}

// on_gpu for GPU backends with all dtypes but f64.
template <class Shape>
bool all_but_f64(const Shape& shape) {
  return shape.dtype != DType::f64;
}

// Where a target's tensors live: the host or the first GPU.
inline Device device_of(const Target& target) { return {target.device, 0}; }

// Throws Error (unsupported) unless the target is the CPU: for operations without a GPU backend.
void require_cpu(std::string_view operation, const Target& target);

}  // namespace winnow::testing
