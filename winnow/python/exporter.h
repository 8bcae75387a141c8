// Tensors of a framework on memory that the library owns.
#pragma once

#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

#include "winnow/core/tensor.h"

namespace winnow::python {

namespace nb = nanobind;

struct Framework;

// Makes tensors of one framework on memory that the library owns; the memory lives as long as they.
class Exporter {
 public:
  Exporter() = default;
  // Of numpy or torch.
  explicit Exporter(const Framework& framework);
  // Of another framework, by its function from_dlpack().
  explicit Exporter(nb::object from_dlpack) : import_(std::move(from_dlpack)) {}

  // None for an absent tensor.
  nb::object operator()(Tensor&& tensor) const;
  nb::object operator()(const TensorView& view, std::shared_ptr<const void> owner) const;
  // Where the framework has tensors that cannot be written to, one of them.
  nb::object operator()(const ConstTensorView& view, std::shared_ptr<const void> owner) const;

 private:
  nb::object make(const ConstTensorView& view, std::shared_ptr<const void> owner,
                  bool read_only) const;
  nb::object import_;  // its function that takes an object with __dlpack__
  bool has_read_only_ = false;
  bool takes_capsule_ = false;  // also what __dlpack__() gives
};

}  // namespace winnow::python
