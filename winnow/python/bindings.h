// What the extension module has besides the operations (operation.h), and what `supports` asks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <nanobind/nanobind.h>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"

namespace winnow::python {

namespace nb = nanobind;

void bind_expert_parallel_all_to_all(nb::module_& m);
void bind_expert_parallel_descriptor(nb::module_& m);
void bind_expert_parallel_low_latency(nb::module_& m);
void bind_expert_parallel_notify(nb::module_& m);
void bind_expert_parallel_sizes(nb::module_& m);
void bind_expert_parallel_transport(nb::module_& m);

// Where tensors are that have no memory: aligned, never dereferenced.
inline void* nowhere() { return reinterpret_cast<void*>(std::uintptr_t{1} << 12); }

// A tensor that is only described: for dry runs and calls without tokens.
TensorView without_memory(DType type, std::span<const std::int64_t> shape, Device device);
inline TensorView without_memory(DType type, std::initializer_list<std::int64_t> shape,
                                 Device device) {
  return without_memory(type, std::span(shape.begin(), shape.size()), device);
}

// The sizes that somebody asks about with winnow.supports(): keyword arguments, each with the size
// it has if it is not given.
class Shape {
 public:
  explicit Shape(nb::dict sizes) : sizes_(std::move(sizes)) {}
  // Throws Error if it is not a number that T can hold; T is std::int64_t or int.
  template <class T = std::int64_t>
  T take(const char* name, std::type_identity_t<T> otherwise);
  // take() at the first call for a name, the same size at every later one.
  std::int64_t size(std::string_view name, std::int64_t otherwise = 1);
  // What size() gave, or `otherwise` where it has not been asked.
  std::int64_t known(std::string_view name, std::int64_t otherwise) const;
  // Throws TypeError naming what no take() asked for.
  void done() const;

  DType dtype = DType::f32;
  Device device;

  // On `device`.
  TensorView view(DType type, std::initializer_list<std::int64_t> shape) const {
    return without_memory(type, shape, device);
  }

 private:
  nb::dict sizes_;
  std::map<std::string, std::int64_t, std::less<>> known_;
};

// Calls the operation on tensors of the shape that was asked for. `options` ask for a dry run, so
// that the library checks and computes nothing. Returns the backend; throws Error with the reason.
using Supports = Backend (*)(Shape& shape, const RunOptions& options);
Backend supports_expert_parallel_combine(Shape& shape, const RunOptions& options);
Backend supports_expert_parallel_dispatch(Shape& shape, const RunOptions& options);
Backend supports_expert_parallel_low_latency(Shape& shape, const RunOptions& options);
Backend supports_expert_parallel_notify(Shape& shape, const RunOptions& options);

}  // namespace winnow::python
