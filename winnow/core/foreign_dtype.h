// Dtypes that other libraries have and Winnow does not: complex numbers, 16-bit integers. A binding
// passes such a tensor on, so that the operation itself refuses it and says what it takes.
// Internal.
#pragma once

#include <string>
#include <string_view>

#include "winnow/core/dtype.h"
#include "winnow/core/export.h"

namespace winnow {

// A value that no operation takes; errors call it `name`. The same for the same name. Elements have
// 0 bytes.
WINNOW_EXPORT DType foreign_dtype(std::string_view name);
WINNOW_EXPORT bool is_foreign(DType dtype);

// As errors call it: "f32", or the name of a foreign dtype.
std::string name_of(DType dtype);

}  // namespace winnow
