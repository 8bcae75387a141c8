// What the binding knows of frameworks: how the objects of a Python type are read and made, and how
// dtypes are called there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>

#include "winnow/core/dtype.h"
#include "winnow/python/dlpack.h"

namespace winnow::python {

namespace nb = nanobind;

// In the order of DType, then what flags are.
inline constexpr std::array kDTypeNames = {"float32",       "float16", "bfloat16",
                                           "float8_e4m3fn", "uint8",   "int32",
                                           "int64",         "float64", "bool"};
inline constexpr std::size_t kFlags = 8;

inline const char* dtype_name(DType dtype) { return kDTypeNames[static_cast<std::size_t>(dtype)]; }

// Of one Python type.
struct Framework {
  enum class Kind { numpy, torch, other } kind = Kind::other;
  const dlpack::ExchangeApi* api = nullptr;
  bool masked = false;  // arrays whose elements may be missing
  // Of numpy and torch: functions and dtypes, in the order of kDTypeNames; null where there is
  // none.
  PyObject* empty = nullptr;
  PyObject* zeros = nullptr;
  std::array<PyObject*, 9> dtypes{};
};

// Found once for each type, and kept for the life of the process.
const Framework& framework_of_type(PyTypeObject* type);
const Framework& framework_of(nb::handle object);

// The module, if it has been imported.
nb::object imported(const char* module);
// The type of that name in a module that has been imported.
nb::object type_in(const nb::object& module, const char* name);
// Where the functions of any other framework are: its namespace of the array API standard, or its
// root module (cupy).
nb::object namespace_of(nb::handle tensor);

// The dtype there; kFlags: bool.
dlpack::dtype dlpack_dtype(std::size_t dtype);
// `flags`: bool is u8. Nothing for a dtype that the library does not have.
std::optional<DType> dtype_from(dlpack::dtype dtype, bool flags);
// From the letter that the buffer protocol gives, and the size of an element.
std::optional<DType> dtype_from(const char* format, std::int64_t bytes, bool flags);

// The name of an object's type.
std::string kind_of(nb::handle object);
// What a framework calls the dtype of an object: "float64" or "torch.float64".
std::string dtype_of_object(nb::handle object);
// The dtype, or the foreign one of that name: the operation says what it takes instead.
DType dtype_or_foreign(std::optional<DType> dtype, nb::handle object);

}  // namespace winnow::python
