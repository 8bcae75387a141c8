// Arguments of a call from Python that are not tensors.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include <nanobind/nanobind.h>

#include "winnow/core/backend.h"
#include "winnow/core/device.h"
#include "winnow/core/dtype.h"
#include "winnow/python/signature.h"

namespace winnow::python {

namespace nb = nanobind;

// The members of an `out` argument that takes one tensor or a tuple of this many; None for those
// that the call makes.
void split_out(const char* operation, nb::handle out, std::span<nb::object> members);
template <std::size_t kCount>
std::array<nb::object, kCount> split_out(const char* operation, nb::handle out) {
  std::array<nb::object, kCount> members;
  split_out(operation, out, members);
  return members;
}

// Throws Error: the argument is not what the operation wants. The text shows numbers and strings,
// and the type of anything else.
[[noreturn]] void refuse_argument(const char* operation, const char* argument,
                                  const std::string& wanted, nb::handle got);

// A flag, a number, or a pointer to a bound object, null for None. It takes what an argument of
// that type in a binding's signature takes, but the Error names `operation` and `argument`.
template <class T>
T value_argument(const char* operation, const char* argument, nb::handle value) {
  T result{};
  if (nb::try_cast(value, result)) return result;
  refuse_argument(operation, argument, InWords<T>::text(), value);
}

// A dtype by its name in numpy, torch or the library. Errors name `operation` and `argument`.
DType dtype_argument(const char* operation, const char* argument, nb::handle dtype);

// A backend by its name. Errors name `operation` and the argument "backend".
Backend backend_argument(const char* operation, const std::string& name);
// The same of an argument that may be None, or be no text.
std::optional<Backend> optional_backend(const char* operation, nb::handle backend);

// "cpu", "cpu:0", "cuda:1", or a device of torch; "cuda" is torch's current GPU, or the first one
// where torch has not been imported. Errors name `operation`.
Device device_argument(const char* operation, nb::handle device);

}  // namespace winnow::python
