// What docstrings say of arguments: what the contracts say of them.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "winnow/core/contract.h"

namespace winnow::python {

// The docstring with an entry for each parameter under "Args:", in their order: those that `doc`
// has of its own, and for the others what the contract says. Throws std::logic_error where a
// parameter has two of these, or none.
std::string documented(std::string_view doc, std::span<const std::string_view> parameters,
                       std::span<const contract::Spec> specs);

// "[s_q, 1, topk] or [s_q, topk]", and "f32, f16 or bf16": with Python's names, whose docstrings
// say of the query what f64 does to the others, or with the library's.
std::string shapes_of(const contract::Spec& spec);
std::string dtypes_of(const contract::Spec& spec, std::span<const contract::Spec> specs,
                      bool of_python);

}  // namespace winnow::python
