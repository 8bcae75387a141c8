// Functions for Python whose TypeErrors name the argument, where nanobind's own print the
// signature.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <nanobind/nanobind.h>

#include "winnow/python/declared.h"

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

// A declared function as errors name it and its parameters.
class Signature {
 public:
  explicit Signature(const Declared& declared)
      : declared_(declared), function_(std::string(declared.name)) {}
  // A constructor goes by the name of its class.
  Signature(const Declared& declared, nb::handle scope);

  // Throws TypeError for arguments beyond those that may come by position, and for a keyword that
  // names no parameter, with the nearest one that there is.
  void check(const nb::args& extra, const nb::kwargs& unknown) const {
    if (extra.size() != 0) [[unlikely]]
      refuse_extra(extra.size());
    if (unknown.size() != 0) [[unlikely]]
      refuse_unknown(unknown);
  }
  // Throws TypeError: a parameter, by its place, got nothing, or not what it takes; Error where
  // that is an integer out of the range of the numbers that it takes.
  [[noreturn]] void refuse_missing(std::size_t place) const;
  [[noreturn]] void refuse(std::size_t place, const std::string& wanted, nb::handle got) const;

 private:
  void refuse_unknown(const nb::kwargs& unknown) const;
  [[noreturn]] void refuse_extra(std::size_t extra) const;
  std::string parameter(std::size_t place) const {
    return std::string(declared_.parameters[place].view());
  }

  const Declared& declared_;
  std::string function_;
};

namespace detail {

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

// The default of a parameter, from its text.
inline nb::object default_value(std::string_view text) {
  const std::string value(text);
  if (value == "None") return nb::none();
  if (value == "True" || value == "False") return nb::bool_(value == "True");
  if (value.front() == '\'') return nb::str(value.substr(1, value.size() - 2).c_str());
  return nb::int_(std::stoll(value));
}

// What stands for the argument if it is left out.
inline nb::object otherwise(const Parameter& parameter, nb::handle without_default) {
  return parameter.has_value ? default_value(parameter.value) : nb::borrow(without_default);
}

// Each parameter may be left out or None, since what that is then is our error: also arguments
// beyond the positional ones, and keywords that name no parameter.
template <const auto& kDeclared, class Scope, class Function, std::size_t... kFirst,
          std::size_t... kRest, class... Doc>
void define_lenient(Scope& scope, const Function& function, nb::handle without_default,
                    std::index_sequence<kFirst...>, std::index_sequence<kRest...>,
                    const Doc&... doc) {
  const auto annotation = [&](const Parameter& parameter) {
    return nb::arg(parameter.name.data()).none() = otherwise(parameter, without_default);
  };
  const auto& parameters = kDeclared.parameters;
  const std::string name(kDeclared.name);
  const auto define = [&](const auto&... keyword_only) {
    scope.def(name.c_str(), function, annotation(parameters[kFirst])..., nb::arg("extra"),
              keyword_only..., annotation(parameters[sizeof...(kFirst) + kRest])...,
              nb::arg("unknown"), nb::sig(kDeclared.signature.data()), doc...);
  };
  if constexpr (sizeof...(kRest) > 0) {
    define(nb::kw_only());
  } else {
    define();
  }
}

template <const auto& kDeclared>
using First = std::make_index_sequence<kDeclared.positional>;
template <const auto& kDeclared>
using Rest = std::make_index_sequence<kDeclared.count - kDeclared.positional>;

template <std::size_t>
using Given = nb::handle;

// `Self`: of a method, the object, which `function` takes first. `All`: a tuple of the types of its
// other parameters.
template <class R, class... Self>
struct Checked {
  template <const auto& kDeclared, class All, class Scope, class F, class... Doc>
  static void define(Scope& scope, const F& function, const Doc&... doc) {
    static_assert(std::tuple_size_v<All> == kDeclared.count, "not the parameters of the function");
    const auto checked = [&]<std::size_t... kFirst, std::size_t... kRest>(
                             std::index_sequence<kFirst...>, std::index_sequence<kRest...>) {
      constexpr std::size_t kBefore = sizeof...(kFirst);
      return [function, signature = Signature(kDeclared, scope)](
                 Self... self, Given<kFirst>... first, const nb::args& extra, Given<kRest>... rest,
                 const nb::kwargs& unknown) -> R {
        signature.check(extra, unknown);
        return function(static_cast<Self>(self)...,
                        argument<std::tuple_element_t<kFirst, All>>(signature, kFirst, first)...,
                        argument<std::tuple_element_t<kBefore + kRest, All>>(
                            signature, kBefore + kRest, rest)...);
      };
    };
    const First<kDeclared> first;
    const Rest<kDeclared> rest;
    define_lenient<kDeclared>(scope, checked(first, rest), missing(), first, rest, doc...);
  }
};

template <FixedString kText>
inline constexpr Declared kDeclaredBy{kText};

}  // namespace detail

// Makes a function of the module as the text declares it: define<"def f(x: int = 1) -> None">(...).
template <FixedString kText, class R, class... Args, class... Doc>
void define(nb::module_& module, R (*function)(Args...), const Doc&... doc) {
  detail::Checked<R>::template define<detail::kDeclaredBy<kText>, std::tuple<Args...>>(
      module, function, doc...);
}

// The same of a method, whose first parameter is the object.
template <FixedString kText, class Class, class R, class Self, class... Args, class... Doc>
  requires(!std::is_same_v<Class, nb::module_>)
void define(Class& type, R (*function)(Self, Args...), const Doc&... doc) {
  detail::Checked<R, Self>::template define<detail::kDeclaredBy<kText>, std::tuple<Args...>>(
      type, function, doc...);
}

// A method that all ranks call, and that reads its arguments itself: it gets them as handles, in
// the places of `extra` and `unknown` what Signature::check() takes, and None for what is missing.
template <const Declared& kDeclared, class Class, class Function>
void define_collective(Class& type, const Function& function, const char* doc) {
  detail::define_lenient<kDeclared>(type, function, nb::none(), detail::First<kDeclared>(),
                                    detail::Rest<kDeclared>(), doc);
}

}  // namespace winnow::python
