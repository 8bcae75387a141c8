// Makes the call of an operation from arguments by name, such as those of a recorded call.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <type_traits>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/testing/operation.h"

namespace winnow::testing {

// Sets each field of the arguments to what `given` has under its name.
struct FillArguments {
  const NamedArguments& given;

  template <class Void>
  void operator()(std::string_view name, BasicTensorView<Void>& view) const {
    view = given.tensor(name);
  }
  template <class T>
  void operator()(std::string_view name, std::optional<T>& value) const {
    if (given.has(name)) (*this)(name, value.emplace());
  }
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void operator()(std::string_view name, T& value) const {
    if constexpr (std::is_same_v<T, double>) {
      value = given.number(name);
    } else {
      value = static_cast<T>(given.integer(name));
    }
  }
};

// Operation::repeat of `operation`. The arguments are filled once: their tensors must outlive the
// function that is returned.
template <class Contract, class Args>
auto repeated(const Contract& contract, Backend (*operation)(const Args&, const RunOptions&)) {
  return [&contract, operation](const NamedArguments& given, const RunOptions& options) {
    Args args;
    const FillArguments fill{given};
    contract.visit(args, [&](const auto& spec, auto& value) { fill(spec.name, value); });
    return std::function<Backend()>(
        [operation, args, options] { return operation(args, options); });
  };
}

}  // namespace winnow::testing
