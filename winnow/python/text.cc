#include "winnow/python/text.h"

#include <cstddef>

namespace winnow::python {
namespace {

std::string utf8(PyObject* text) {
  if (text == nullptr) throw nb::python_error();
  const nb::object owner = nb::steal(text);
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(owner.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
}

}  // namespace

std::string text_of(nb::handle object) { return utf8(PyObject_Str(object.ptr())); }
std::string repr_of(nb::handle object) { return utf8(PyObject_Repr(object.ptr())); }

std::string number_text(nb::handle number) {
  const auto bits = nb::cast<std::size_t>(number.attr("bit_length")());
  return bits <= 256 ? repr_of(number) : "one of " + std::to_string(bits) + " bits";
}

std::string first_line(const nb::python_error& error) {
  const std::string text = text_of(error.value());
  return text.substr(0, text.find('\n'));
}

bool passes_unchanged(const nb::python_error& error) {
  return !error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError);
}

}  // namespace winnow::python
