// Functions for Python whose TypeErrors name the argument, where nanobind's own print the
// signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

namespace winnow::python {

namespace nb = nanobind;

// A type in words: what an error says that an argument of it takes.
template <class T>
struct InWords {
  static std::string text() {
    if constexpr (std::is_same_v<T, bool>) {
      return "True or False";
    } else if constexpr (std::is_integral_v<T>) {
      return "an integer of " + std::to_string(8 * sizeof(T)) + " bits";
    } else if constexpr (std::is_floating_point_v<T>) {
      return "a number";
    } else if constexpr (std::is_same_v<T, std::string>) {
      return "a string";
    } else if constexpr (std::is_convertible_v<T, std::string>) {
      return "a path";
    } else {
      const nb::object name = nb::type<T>().attr("__name__");
      return "a " + std::string(nb::str(name).c_str());
    }
  }
};
template <class T>
struct InWords<std::optional<T>> {
  static std::string text() { return InWords<T>::text() + " or None"; }
};
template <class T>
struct InWords<T*> : InWords<T> {};
template <class T>
struct InWords<std::shared_ptr<T>> : InWords<T> {};

// The names of a function and of its parameters.
class Signature {
 public:
  // In Python's syntax: "def forward(q: T, *, out: T | None = None) -> T".
  explicit Signature(std::string_view text);
  // That of a constructor goes by the name of its class.
  Signature(std::string_view text, nb::handle type);

  // Throws TypeError for a keyword that names no parameter, with the nearest one that there is.
  void check(const nb::kwargs& unknown) const;
  // Throws TypeError: a parameter, by its place, got nothing, or not what it takes.
  [[noreturn]] void refuse_missing(std::size_t place) const;
  [[noreturn]] void refuse(std::size_t place, const std::string& wanted, nb::handle got) const;

 private:
  std::string function_;
  std::vector<std::string> parameters_;  // without self
};

// Throws TypeError for a keyword that names no parameter of that signature.
inline void check_none(std::string_view signature, const nb::kwargs& unknown) {
  if (unknown.size() != 0) Signature(signature).check(unknown);
}

namespace detail {

template <class T>
using Given = nb::handle;  // in place of a parameter of type T

// Stands for an argument that was not given and has no default.
inline nb::handle missing() { return Py_Ellipsis; }

// What the function gets for a parameter of type T.
template <class T>
decltype(auto) argument(const Signature& signature, std::size_t place, nb::handle given) {
  using Value = std::decay_t<T>;
  constexpr bool is_bound = std::is_reference_v<T> && !std::is_convertible_v<Value, std::string>;
  if (given.is(missing())) signature.refuse_missing(place);
  if constexpr (std::is_same_v<Value, nb::handle>) {
    return nb::handle(given);
  } else if constexpr (std::is_same_v<Value, nb::object>) {
    return nb::borrow(given);
  } else {
    std::conditional_t<is_bound, Value*, Value> value{};
    bool fits = nb::try_cast(given, value);
    if constexpr (is_bound || requires { value.use_count(); }) fits = fits && value != nullptr;
    if (!fits) signature.refuse(place, InWords<Value>::text(), given);
    if constexpr (is_bound) {
      return static_cast<T>(*value);
    } else {
      return value;
    }
  }
}

// An annotation of nb::arg() whose argument may be left out or None: what it is then is our error.
template <class Annotation>
const Annotation& lenient(const Annotation& annotation) {
  return annotation;
}
template <std::uint32_t kFlags, bool kLocked>
auto lenient(const nb::arg_t<kFlags, kLocked>& annotation) {
  return nb::arg(annotation.name_).none() = nb::borrow(missing());
}
template <std::uint32_t kFlags, bool kLocked>
auto lenient(const nb::arg_v_t<kFlags, kLocked>& annotation) {
  return nb::arg(annotation.name_).none() = annotation.value;
}

template <class Annotation>
void find_signature(const char*& text, const Annotation& annotation) {
  if constexpr (std::is_same_v<Annotation, nb::sig>) text = annotation.value;
}

template <class... Annotations>
const char* signature_in(const Annotations&... annotations) {
  const char* text = nullptr;
  (find_signature(text, annotations), ...);
  return text;
}

template <class... Args, class Function>
decltype(auto) call(const Signature& signature, const nb::kwargs& unknown, const Function& function,
                    Given<Args>... given) {
  signature.check(unknown);
  return [&]<std::size_t... kPlace>(std::index_sequence<kPlace...>) -> decltype(auto) {
    return function(argument<Args>(signature, kPlace, given)...);
  }(std::index_sequence_for<Args...>());
}

}  // namespace detail

// module.def(), with annotations that name every parameter, and an nb::sig().
template <class R, class... Args, class... Annotations>
void define(nb::module_& module, const char* name, R (*function)(Args...),
            const Annotations&... annotations) {
  module.def(
      name,
      [function, signature = Signature(detail::signature_in(annotations...))](
          detail::Given<Args>... given, const nb::kwargs& unknown) -> R {
        return detail::call<Args...>(signature, unknown, function, given...);
      },
      detail::lenient(annotations)..., nb::arg("unknown"));
}

// The same of a method, whose first parameter is the object.
template <class Class, class R, class Self, class... Args, class... Annotations>
  requires(!std::is_same_v<Class, nb::module_>)
void define(Class& type, const char* name, R (*function)(Self, Args...),
            const Annotations&... annotations) {
  type.def(
      name,
      [function, signature = Signature(detail::signature_in(annotations...), type)](
          Self self, detail::Given<Args>... given, const nb::kwargs& unknown) -> R {
        const auto bound = [&](auto&&... arguments) -> R {
          return function(static_cast<Self>(self), std::forward<decltype(arguments)>(arguments)...);
        };
        return detail::call<Args...>(signature, unknown, bound, given...);
      },
      detail::lenient(annotations)..., nb::arg("unknown"));
}

}  // namespace winnow::python
