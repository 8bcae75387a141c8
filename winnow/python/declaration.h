// The declaration of a function, read at compile time from its text in Python's own syntax, and
// compared with the contract of its operation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "winnow/core/contract.h"
#include "winnow/core/tensor.h"

namespace winnow::python {

// A text as a template argument.
template <std::size_t kSize>
struct FixedString {
  char text[kSize]{};
  consteval FixedString(const char (&given)[kSize]) {  // NOLINT: implicit on purpose
    for (std::size_t i = 0; i < kSize; ++i) text[i] = given[i];
  }
  constexpr operator std::string_view() const { return {text, kSize - 1}; }  // NOLINT
};

// "k_stride: int = 1": name, annotation and default.
struct Parameter {
  std::array<char, 32> name{};  // ends with 0
  std::string_view annotation, value;
  bool has_value = false;

  constexpr std::string_view view() const { return {name.data()}; }
};

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

// What Python knows of an operation with that contract.
template <const auto& kContract_>
struct Declaration {
  static constexpr const auto& kContract = kContract_;
  using Args = typename std::decay_t<decltype(kContract_)>::Args;
  static constexpr std::size_t kMost = 32;

  const char* operation = kContract.operation;  // as errors name it: "sparse_mla::forward"
  std::string_view signature;  // "def forward(q: T, kv: T, ...) -> tuple[T, T, T]", a literal
  std::array<Parameter, kMost> parameters{};
  std::size_t count = 0;
  std::size_t positional = 0;  // those before the *
  std::string_view name{};     // "forward"

  consteval Declaration(const char* text) : signature(text) {  // NOLINT: implicit on purpose
    constexpr std::string_view kDef = "def ";
    if (!signature.starts_with(kDef)) throw "a signature begins with def";
    const std::size_t open = signature.find('(');
    name = signature.substr(kDef.size(), open - kDef.size());
    bool keywords = false;
    int depth = 0;
    for (std::size_t i = open + 1, start = i; depth >= 0; ++i) {
      const char c = signature.at(i);
      depth += c == '(' || c == '[' ? 1 : c == ')' || c == ']' ? -1 : 0;
      if (depth > 0 || (depth == 0 && c != ',')) continue;
      const std::string_view given = trimmed(signature.substr(start, i - start));
      start = i + 1;
      if (given == "*") {
        keywords = true;
        continue;
      }
      parameters.at(count++) = parameter(given);
      if (!keywords) positional = count;
    }
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

  std::vector<std::string_view> parameter_names() const {
    std::vector<std::string_view> names;
    for (std::size_t i = 0; i < count; ++i) names.push_back(parameters[i].view());
    return names;
  }
  // kMost where there is none.
  constexpr std::size_t place(std::string_view wanted) const {
    for (std::size_t i = 0; i < count; ++i) {
      if (parameters[i].view() == wanted) return i;
    }
    return kMost;
  }

 private:
  static consteval std::string_view trimmed(std::string_view text) {
    while (text.starts_with(' ')) text.remove_prefix(1);
    while (text.ends_with(' ')) text.remove_suffix(1);
    return text;
  }
  static consteval Parameter parameter(std::string_view text) {
    const std::size_t colon = text.find(':'), equals = text.find('=');
    Parameter parsed;
    for (std::size_t i = 0; i < colon; ++i) parsed.name.at(i) = text[i];
    parsed.has_value = equals != text.npos;
    const std::size_t end = parsed.has_value ? equals : text.size();
    parsed.annotation = trimmed(text.substr(colon + 1, end - colon - 1));
    if (parsed.has_value) parsed.value = trimmed(text.substr(equals + 1));
    return parsed;
  }
};

}  // namespace winnow::python
