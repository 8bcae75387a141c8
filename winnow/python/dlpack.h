// DLPack beyond what nanobind declares: tensors with an owner, and the table of C functions through
// which a framework hands out tensors without a Python call. Layouts are those of DLPack 1.3.
#pragma once

#include <cstdint>

#include <nanobind/ndarray.h>

namespace winnow::python::dlpack {

using nanobind::dlpack::dltensor;
using nanobind::dlpack::dtype;
using nanobind::dlpack::dtype_code;

enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Version {
  std::uint32_t major = 0, minor = 0;
};
inline constexpr std::uint32_t kMajor = 1;

// What a capsule named "dltensor" points at.
struct ManagedTensor {
  dltensor tensor;
  void* context = nullptr;
  void (*deleter)(ManagedTensor*) = nullptr;
};

// What a capsule named "dltensor_versioned" points at.
struct ManagedTensorVersioned {
  Version version;
  void* context = nullptr;
  void (*deleter)(ManagedTensorVersioned*) = nullptr;
  std::uint64_t flags = 0;
  dltensor tensor;
};
inline constexpr std::uint64_t kReadOnly = 1;

// The capsule "dlpack_exchange_api" in the attribute __dlpack_c_exchange_api__ of a tensor type.
// Functions return 0, or -1 with a Python exception set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous = nullptr;  // the same for an older major version
  int (*allocate)(dltensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* text));
  int (*to_managed)(void* object, ManagedTensorVersioned** out);
  int (*from_managed)(ManagedTensorVersioned* tensor, void** object);  // takes the tensor over
  int (*to_tensor)(void* object, dltensor* out);  // may be null; valid while the object is
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

}  // namespace winnow::python::dlpack
