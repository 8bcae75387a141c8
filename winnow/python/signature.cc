#include "winnow/python/signature.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "winnow/core/error.h"
#include "winnow/python/text.h"

namespace winnow::python {

Signature::Signature(std::string_view text) {
  text.remove_prefix(text.find("def ") + 4);
  const std::size_t open = text.find('(');
  function_ = text.substr(0, open);
  int depth = 0;
  std::size_t start = open + 1;  // of the parameter that is read
  for (std::size_t i = open; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '(' || c == '[') ++depth;
    if (c == ')' || c == ']') --depth;
    if (depth > 1 || (depth == 1 && c != ',')) continue;
    const std::size_t begin = text.find_first_not_of(' ', start);
    const std::size_t end = text.find_first_of(":=,)", begin);
    const std::string_view name = text.substr(begin, end - begin);
    if (name != "self" && name != "*" && !name.empty()) parameters_.emplace_back(name);
    start = i + 1;
    if (depth == 0) return;
  }
}

Signature::Signature(std::string_view text, nb::handle type) : Signature(text) {
  if (function_ == "__init__") function_ = nb::cast<std::string>(type.attr("__name__"));
}

void Signature::refuse_unknown(const nb::kwargs& unknown) const {
  for (const auto [key, value] : unknown) {
    const std::string word = text_of(key);
    const auto near = nb::cast<std::vector<std::string>>(
        nb::module_::import_("difflib").attr("get_close_matches")(word, parameters_, 1, 0.5));
    std::string hint = "did you mean '" + (near.empty() ? "" : near.front()) + "'?";
    if (near.empty()) {
      hint = "it takes";
      for (const std::string& name : parameters_) {
        hint += (&name == parameters_.data() ? " " : ", ") + name;
      }
    }
    throw nb::type_error(
        (function_ + "() got an unexpected keyword argument '" + word + "'; " + hint).c_str());
  }
}

void Signature::refuse_extra(std::size_t positional, std::size_t extra) const {
  std::string text = function_ + "() takes at most " + std::to_string(positional) +
                     " positional argument" + (positional == 1 ? "" : "s") + ", got " +
                     std::to_string(positional + extra);
  if (positional < parameters_.size()) {
    text += "; others go by keyword, such as '" + parameters_[positional] + "'";
  }
  throw nb::type_error(text.c_str());
}

void Signature::refuse_missing(std::size_t place) const {
  throw nb::type_error((function_ + "() misses the argument '" + parameters_[place] + "'").c_str());
}

void Signature::refuse(std::size_t place, const std::string& wanted, nb::handle got) const {
  const bool number = wanted.starts_with("an integer") || wanted.starts_with("a number");
  if (number && PyLong_Check(got.ptr()) && !PyBool_Check(got.ptr())) {  // too large, or too small
    throw Error(ErrorCode::invalid_argument, function_, parameters_[place], wanted,
                number_text(got));
  }
  const std::string given = nb::type_name(got.type()).c_str();
  const std::string text =
      function_ + "(): " + parameters_[place] + ": want " + wanted + ", got " + given;
  const nb::object error = nb::borrow(PyExc_TypeError)(text);
  error.attr("argument") = parameters_[place];
  error.attr("wanted") = wanted;
  error.attr("got") = given;
  PyErr_SetObject(PyExc_TypeError, error.ptr());
  throw nb::python_error();
}

}  // namespace winnow::python
