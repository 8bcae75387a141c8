#include "winnow/python/framework.h"

#include <unordered_map>

#include <nanobind/stl/string.h>

#include "winnow/core/foreign_dtype.h"
#include "winnow/python/text.h"

namespace winnow::python {

nb::object imported(const char* module) {
  const nb::dict modules = nb::borrow<nb::dict>(PySys_GetObject("modules"));
  return modules.contains(module) ? nb::object(modules[module]) : nb::object();
}

nb::object type_in(const nb::object& module, const char* name) {
  if (!module.is_valid()) return {};
  nb::object type = nb::getattr(module, name, nb::none());
  return PyType_Check(type.ptr()) ? type : nb::object();
}

namespace {

const dlpack::ExchangeApi* exchange_api_of(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->version.major > dlpack::kMajor) api = api->previous;
  const bool usable = api != nullptr && api->version.major == dlpack::kMajor;
  return usable && api->to_tensor != nullptr ? api : nullptr;
}

// The framework's root module, if it has been imported and `type` is its tensor or one derived.
nb::object module_of(nb::handle type, const char* module, const char* tensor_name) {
  nb::object found = imported(module);
  const nb::object base = type_in(found, tensor_name);
  if (!base.is_valid()) return {};
  const int derived = PyObject_IsSubclass(type.ptr(), base.ptr());
  if (derived < 0) throw nb::python_error();
  return derived == 1 ? found : nb::object();
}

Framework inspect(nb::handle type) {
  Framework framework;
  nb::object module = module_of(type, "numpy", "ndarray");
  if (module.is_valid()) {
    framework.kind = Framework::Kind::numpy;
  } else if (module = module_of(type, "torch", "Tensor"); module.is_valid()) {
    framework.kind = Framework::Kind::torch;
  }
  framework.masked = module_of(type, "numpy.ma", "MaskedArray").is_valid();
  framework.api = exchange_api_of(type);
  if (!module.is_valid()) return framework;
  framework.empty = nb::object(module.attr("empty")).release().ptr();
  framework.zeros = nb::object(module.attr("zeros")).release().ptr();
  for (std::size_t i = 0; i < kDTypeNames.size(); ++i) {
    nb::object dtype = nb::getattr(module, kDTypeNames[i], nb::none());
    if (i == kFlags && dtype.is_none()) dtype = module.attr("bool_");  // numpy 1
    if (!dtype.is_none()) framework.dtypes[i] = dtype.release().ptr();
  }
  return framework;
}

}  // namespace

// Kept for the life of the process, like the types themselves; guarded by the interpreter lock.
const Framework& framework_of_type(PyTypeObject* type) {
  static auto& known = *new std::unordered_map<PyTypeObject*, Framework>();
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  const nb::handle object(reinterpret_cast<PyObject*>(type));
  Framework framework = inspect(object);
  object.inc_ref();  // the key must not name another type later
  return known.emplace(type, framework).first->second;
}

const Framework& framework_of(nb::handle object) {
  return framework_of_type(Py_TYPE(object.ptr()));
}

dlpack::dtype dlpack_dtype(std::size_t dtype) {
  using Code = dlpack::dtype_code;
  constexpr std::array kCodes = {Code::Float,         Code::Float, Code::Bfloat,
                                 Code::Float8_E4M3FN, Code::UInt,  Code::Int,
                                 Code::Int,           Code::Float, Code::Bool};
  const std::int64_t bytes = dtype == kFlags ? 1 : size_of(static_cast<DType>(dtype));
  return {static_cast<std::uint8_t>(kCodes[dtype]), static_cast<std::uint8_t>(8 * bytes), 1};
}

std::optional<DType> dtype_from(dlpack::dtype dtype, bool flags) {
  for (std::size_t i = 0; i < kFlags; ++i) {
    if (dtype == dlpack_dtype(i)) return static_cast<DType>(i);
  }
  return flags && dtype == dlpack_dtype(kFlags) ? std::optional(DType::u8) : std::nullopt;
}

std::optional<DType> dtype_from(const char* format, std::int64_t bytes, bool flags) {
  if (format == nullptr) return DType::u8;
  if (*format == '<' || *format == '=' || *format == '@') ++format;
  if (format[0] == '\0' || format[1] != '\0') return std::nullopt;
  switch (*format) {
    case 'd':
      return DType::f64;
    case 'f':
      return DType::f32;
    case 'e':
      return DType::f16;
    case 'B':
      return DType::u8;
    case '?':
      return flags ? std::optional(DType::u8) : std::nullopt;
    case 'i':
    case 'l':
    case 'q':
      return bytes == 4 ? DType::i32 : DType::i64;
    default:
      return std::nullopt;
  }
}

std::string kind_of(nb::handle object) { return text_of(nb::type_name(object.type())); }

std::string dtype_of_object(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  return dtype.is_none() ? "that of " + kind_of(object) : text_of(dtype);
}

DType dtype_or_foreign(std::optional<DType> dtype, nb::handle object) {
  return dtype.has_value() ? *dtype : foreign_dtype(dtype_of_object(object));
}

nb::object namespace_of(nb::handle tensor) {
  if (nb::hasattr(tensor, "__array_namespace__")) return tensor.attr("__array_namespace__")();
  const std::string module = text_of(tensor.type().attr("__module__"));
  return nb::module_::import_(module.substr(0, module.find('.')).c_str());
}

}  // namespace winnow::python
