// What Python knows of an operation: its declaration, compared with its contract.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "winnow/core/contract.h"
#include "winnow/core/tensor.h"
#include "winnow/python/declared.h"

namespace winnow::python {

// The names in Python of an enum's values. A specialisation beside the operation has
//   static constexpr std::pair<std::string_view, Choice> kAll[]
template <class Choice>
struct Choices;

// The annotation of a field's type, and whether the text of a default means the struct's value.
template <class T>
struct FieldInPython {
  static constexpr std::string_view kAnnotation = "str";
  static constexpr bool same(T value, std::string_view text) {
    for (const auto& [name, choice] : Choices<T>::kAll) {
      if (text.substr(1, text.size() - 2) == name) return choice == value;
    }
    return false;
  }
};
template <>
struct FieldInPython<bool> {
  static constexpr std::string_view kAnnotation = "bool";
  static constexpr bool same(bool value, std::string_view text) {
    return text == (value ? "True" : "False");
  }
};
template <>
struct FieldInPython<std::int64_t> {
  static constexpr std::string_view kAnnotation = "int";
  static constexpr bool same(std::int64_t value, std::string_view text) {
    return text.size() == 1 && text[0] - '0' == value;
  }
};
template <class T>
struct FieldInPython<std::optional<T>> {
  static constexpr std::string_view kAnnotation =
      std::is_integral_v<T> ? "int | None" : "float | None";
  static constexpr bool same(const std::optional<T>& value, std::string_view text) {
    return !value.has_value() && text == "None";
  }
};
template <>
struct FieldInPython<ConstTensorView> {
  static constexpr std::string_view kAnnotation = "T";  // or "T | None"
  static constexpr bool same(const ConstTensorView&, std::string_view text) {
    return text == "None";
  }
};

// The declaration of the operation with that contract.
template <const auto& kContract_>
struct Declaration : Declared {
  static constexpr const auto& kContract = kContract_;
  using Args = typename std::decay_t<decltype(kContract_)>::Args;

  const char* operation = kContract.operation;  // as errors name it: "sparse_mla::forward"

  consteval Declaration(const char* text) : Declared(text) {  // NOLINT: implicit on purpose
    kContract.visit(Args(), [&]<class T>(const contract::Spec& spec, const T& value) {
      if constexpr (!std::is_same_v<T, TensorView>) {
        const std::size_t at = place(spec.name);
        if (at == kMost) return;
        const Parameter& parameter = parameters[at];
        const bool tensor = std::is_same_v<T, ConstTensorView>;
        const bool fits = parameter.annotation == FieldInPython<T>::kAnnotation ||
                          (tensor && parameter.annotation == "T | None");
        if (!fits) throw "an annotation is not that of the field in C++";
        if (parameter.has_value && !FieldInPython<T>::same(value, parameter.value)) {
          throw "a default is not that of the field in C++";
        }
      }
    });
  }
};

}  // namespace winnow::python
