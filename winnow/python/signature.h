// Functions for Python whose TypeErrors name the argument, where nanobind's own print the
// signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
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

  // Throws TypeError for arguments beyond the `positional` ones that may come by position, and for
  // a keyword that names no parameter, with the nearest one that there is.
  void check(std::size_t positional, const nb::args& extra, const nb::kwargs& unknown) const {
    if (extra.size() != 0) [[unlikely]]
      refuse_extra(positional, extra.size());
    if (unknown.size() != 0) [[unlikely]]
      refuse_unknown(unknown);
  }
  // Throws TypeError: a parameter, by its place, got nothing, or not what it takes; Error where
  // that is an integer out of the range of the numbers that it takes.
  [[noreturn]] void refuse_missing(std::size_t place) const;
  [[noreturn]] void refuse(std::size_t place, const std::string& wanted, nb::handle got) const;

 private:
  void refuse_unknown(const nb::kwargs& unknown) const;
  [[noreturn]] void refuse_extra(std::size_t positional, std::size_t extra) const;

  std::string function_;
  std::vector<std::string> parameters_;  // without self
};

// Signature::check() of a function that is called otherwise than by define().
inline void check_none(std::string_view signature, std::size_t positional, const nb::args& extra,
                       const nb::kwargs& unknown) {
  if (extra.size() == 0 && unknown.size() == 0) return;
  Signature(signature).check(positional, extra, unknown);
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

// The same for all annotations of a function, in a tuple; where its positional parameters end, one
// for what comes beyond them.
template <class Annotation>
auto lenient_tuple(const Annotation& annotation) {
  if constexpr (std::is_same_v<Annotation, nb::kw_only>) {
    return std::make_tuple(nb::arg("extra"), nb::kw_only());
  } else {
    return std::make_tuple(lenient(annotation));
  }
}
template <class... Annotations>
auto lenient_all(const Annotations&... annotations) {
  auto all = std::tuple_cat(lenient_tuple(annotations)...);
  if constexpr ((std::is_same_v<Annotations, nb::kw_only> || ...)) {
    return std::tuple_cat(all, std::make_tuple(nb::arg("unknown")));
  } else {
    return std::tuple_cat(all, std::make_tuple(nb::arg("extra"), nb::arg("unknown")));
  }
}

// How many of `parameters` may come by position: those before nb::kw_only().
template <class... Annotations>
constexpr std::size_t positional(std::size_t parameters) {
  std::size_t before = 0;
  bool found = false;
  ((found = found || std::is_same_v<Annotations, nb::kw_only>, before += found ? 0 : 1), ...);
  return found ? before : parameters;
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

template <class... Args>
struct Types {};

// Cuts the first kCount types off.
template <std::size_t kCount, class First, class Rest>
struct Cut {
  using Before = First;
  using After = Rest;
};
template <std::size_t kCount, class... First, class Next, class... Rest>
  requires(kCount > 0)
struct Cut<kCount, Types<First...>, Types<Next, Rest...>>
    : Cut<kCount - 1, Types<First..., Next>, Types<Rest...>> {};

// The function for nanobind. `Self`: of a method, the object, which `function` takes first.
template <class R, class... Self, class... First, class... Rest, class Function>
auto checked(Types<Self...>, Types<First...>, Types<Rest...>, const Function& function,
             const Signature& signature) {
  return [function, signature](Self... self, Given<First>... first, const nb::args& extra,
                               Given<Rest>... rest, const nb::kwargs& unknown) -> R {
    signature.check(sizeof...(First), extra, unknown);
    return [&]<std::size_t... kFirst, std::size_t... kRest>(std::index_sequence<kFirst...>,
                                                            std::index_sequence<kRest...>) -> R {
      return function(static_cast<Self>(self)..., argument<First>(signature, kFirst, first)...,
                      argument<Rest>(signature, sizeof...(First) + kRest, rest)...);
    }(std::index_sequence_for<First...>(), std::index_sequence_for<Rest...>());
  };
}

template <class R, class... Self, class... Args, class Scope, class Function, class... Annotations>
void define(Types<Self...> self, Types<Args...>, Scope& scope, const char* name,
            const Function& function, const Signature& signature,
            const Annotations&... annotations) {
  using Parts = Cut<positional<Annotations...>(sizeof...(Args)), Types<>, Types<Args...>>;
  std::apply(
      [&](const auto&... all) {
        scope.def(name,
                  checked<R>(self, typename Parts::Before(), typename Parts::After(), function,
                             signature),
                  all...);
      },
      lenient_all(annotations...));
}

}  // namespace detail

// module.def(), with annotations that name every parameter, and an nb::sig().
template <class R, class... Args, class... Annotations>
void define(nb::module_& module, const char* name, R (*function)(Args...),
            const Annotations&... annotations) {
  detail::define<R>(detail::Types<>(), detail::Types<Args...>(), module, name, function,
                    Signature(detail::signature_in(annotations...)), annotations...);
}

// The same of a method, whose first parameter is the object.
template <class Class, class R, class Self, class... Args, class... Annotations>
  requires(!std::is_same_v<Class, nb::module_>)
void define(Class& type, const char* name, R (*function)(Self, Args...),
            const Annotations&... annotations) {
  detail::define<R>(detail::Types<Self>(), detail::Types<Args...>(), type, name, function,
                    Signature(detail::signature_in(annotations...), type), annotations...);
}

}  // namespace winnow::python
