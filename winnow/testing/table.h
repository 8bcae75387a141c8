// What the rooms make their case tables with.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/dtype.h"
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

// The rows of a case table from shapes that have a name and a describe().
template <class Shape>
std::vector<Case> cases_of(const std::vector<Shape>& shapes,
                           CaseOutcome (*run)(const Shape& shape, const Target& target)) {
  std::vector<Case> cases;
  for (const Shape& shape : shapes) {
    cases.push_back({shape.name, describe(shape),
                     [shape, run](const Target& target) { return run(shape, target); }});
  }
  return cases;
}

// Where a target's tensors live: the host or the first GPU.
inline Device device_of(const Target& target) { return {target.device, 0}; }

// Throws Error (unsupported) unless the target is the CPU: for operations without a GPU backend.
void require_cpu(std::string_view operation, const Target& target);

}  // namespace winnow::testing
