#include "winnow/python/signature.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "winnow/core/error.h"
#include "winnow/python/text.h"

namespace winnow::python {

Signature::Signature(const Declared& declared, nb::handle scope) : Signature(declared) {
  if (function_ == "__init__") function_ = nb::cast<std::string>(scope.attr("__name__"));
}

void Signature::refuse_unknown(const nb::kwargs& unknown) const {
  const std::vector<std::string_view> known = declared_.parameter_names();
  for (const auto [key, value] : unknown) {
    const std::string word = text_of(key);
    const auto near = nb::cast<std::vector<std::string>>(
        nb::module_::import_("difflib").attr("get_close_matches")(word, known, 1, 0.5));
    std::string hint = "did you mean '" + (near.empty() ? "" : near.front()) + "'?";
    if (near.empty()) {
      hint = "it takes";
      for (const std::string_view& name : known) {
        hint += (&name == known.data() ? " " : ", ") + std::string(name);
      }
    }
    throw nb::type_error(
        (function_ + "() got an unexpected keyword argument '" + word + "'; " + hint).c_str());
  }
}

void Signature::refuse_extra(std::size_t extra) const {
  const std::size_t positional = declared_.positional;
  std::string text = function_ + "() takes at most " + std::to_string(positional) +
                     " positional argument" + (positional == 1 ? "" : "s") + ", got " +
                     std::to_string(positional + extra);
  if (positional < declared_.count) {
    text += "; others go by keyword, such as '" + parameter(positional) + "'";
  }
  throw nb::type_error(text.c_str());
}

void Signature::refuse_missing(std::size_t place) const {
  throw nb::type_error((function_ + "() misses the argument '" + parameter(place) + "'").c_str());
}

void Signature::refuse(std::size_t place, const std::string& wanted, nb::handle got) const {
  const bool number = wanted.starts_with("an integer") || wanted.starts_with("a number");
  if (number && PyLong_Check(got.ptr()) && !PyBool_Check(got.ptr())) {  // too large, or too small
    throw Error(ErrorCode::invalid_argument, function_, parameter(place), wanted, number_text(got));
  }
  const std::string given = nb::type_name(got.type()).c_str();
  const std::string text =
      function_ + "(): " + parameter(place) + ": want " + wanted + ", got " + given;
  const nb::object error = nb::borrow(PyExc_TypeError)(text);
  error.attr("argument") = parameter(place);
  error.attr("wanted") = wanted;
  error.attr("got") = given;
  PyErr_SetObject(PyExc_TypeError, error.ptr());
  throw nb::python_error();
}

}  // namespace winnow::python
