// Texts of Python objects, for messages and names.
#pragma once

#include <string>

#include <nanobind/nanobind.h>

namespace winnow::python {

namespace nb = nanobind;

// str(object) and repr(object) in UTF-8; what Unicode cannot encode becomes an escape.
std::string text_of(nb::handle object);
std::string repr_of(nb::handle object);
// An int of Python; of one that is longer than a line how long it is.
std::string number_text(nb::handle number);

// The first line of an exception's text; torch adds a C++ backtrace below it.
std::string first_line(const nb::python_error& error);

// Whether an exception must pass as it is: one that ends the program or interrupts it, or for want
// of memory.
bool passes_unchanged(const nb::python_error& error);

}  // namespace winnow::python
