#include "winnow/python/arguments.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "winnow/core/error.h"
#include "winnow/core/nearest.h"
#include "winnow/python/framework.h"
#include "winnow/python/text.h"

namespace winnow::python {

void split_out(const char* operation, nb::handle out, std::span<nb::object> members) {
  std::fill(members.begin(), members.end(), nb::none());
  if (!PyTuple_Check(out.ptr())) {
    members[0] = nb::borrow(out);
    return;
  }
  const auto tuple = nb::borrow<nb::tuple>(out);
  if (tuple.size() != members.size()) {
    throw Error(ErrorCode::invalid_argument, operation, "out",
                "a tensor or a tuple of " + std::to_string(members.size()),
                "a tuple of " + std::to_string(tuple.size()));
  }
  for (std::size_t i = 0; i < members.size(); ++i) members[i] = tuple[i];
}

void refuse_argument(const char* operation, const char* argument, const std::string& wanted,
                     nb::handle got) {
  const bool number = PyLong_Check(got.ptr()) && !PyBool_Check(got.ptr());
  const bool shown = got.is_none() || PyBool_Check(got.ptr()) || PyFloat_Check(got.ptr()) ||
                     PyUnicode_Check(got.ptr());
  throw Error(ErrorCode::invalid_argument, operation, argument, wanted,
              number  ? number_text(got)
              : shown ? repr_of(got)
                      : text_of(got.type().attr("__name__")));
}

DType dtype_argument(const char* operation, const char* argument, nb::handle dtype) {
  // numpy.float32 is a type, numpy.dtype("float32") and torch.float32 are not.
  std::string name = PyType_Check(dtype.ptr()) ? text_of(dtype.attr("__name__")) : text_of(dtype);
  if (name.starts_with("torch.")) name = name.substr(6);
  for (std::size_t i = 0; i < kFlags; ++i) {
    const auto type = static_cast<DType>(i);
    if (name == to_string(type) || name == kDTypeNames[i]) return type;
  }
  throw Error(ErrorCode::invalid_argument, operation, argument, "one of f32, f16, bf16", name);
}

Backend backend_argument(const char* operation, const std::string& name) {
  std::vector<std::string> known;
  for (const BackendStatus& status : backends()) {
    const std::string_view text = to_string(status.backend);
    if (name == text) return status.backend;
    known.emplace_back(text);
  }
  refuse_name(operation, "backend", name, known);
}

std::optional<Backend> optional_backend(const char* operation, nb::handle backend) {
  if (backend.is_none()) return std::nullopt;
  if (!PyUnicode_Check(backend.ptr())) {
    refuse_argument(operation, "backend", "None or the name of a backend", backend);
  }
  return backend_argument(operation, text_of(backend));
}

Device device_argument(const char* operation, nb::handle device) {
  const std::string name = text_of(device);
  if (name == "cpu" || name == "cpu:0") return {};  // torch has both
  if (name == "cuda") {
    const nb::object torch = imported("torch");
    const bool asks = torch.is_valid() && nb::cast<bool>(torch.attr("cuda").attr("is_available")());
    return {DeviceType::cuda,
            asks ? nb::cast<int>(torch.attr("cuda").attr("current_device")()) : 0};
  }
  const std::string_view prefix = "cuda:";
  int index = 0;
  const char* const end = name.data() + name.size();
  if (name.starts_with(prefix)) {
    const auto read = std::from_chars(name.data() + prefix.size(), end, index);
    if (read.ec == std::errc() && read.ptr == end && index >= 0) return {DeviceType::cuda, index};
  }
  throw Error(ErrorCode::invalid_argument, operation, "device", "cpu, cuda or cuda:INDEX", name);
}

}  // namespace winnow::python
