// The declaration of a function, read at compile time from its text in Python's own syntax.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

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

// A function or method as Python would declare it.
struct Declared {
  static constexpr std::size_t kMost = 32;

  std::string_view signature;  // "def forward(q: T, kv: T, ...) -> tuple[T, T, T]", a literal
  std::array<Parameter, kMost> parameters{};  // without self
  std::size_t count = 0;
  std::size_t positional = 0;  // those before the *
  std::string_view name{};     // "forward"

  consteval Declared(std::string_view text) : signature(text) {  // NOLINT: implicit on purpose
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
      if (given == "*") keywords = true;
      if (given.empty() || given == "self" || given == "*") continue;
      parameters.at(count++) = parameter(given);
      if (!keywords) positional = count;
    }
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
