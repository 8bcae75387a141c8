// The descriptor of a dispatch as Python has it.
#pragma once

#include <memory>

#include "winnow/expert_parallel/layer/descriptor.h"
#include "winnow/python/call.h"

namespace winnow::python {

// A descriptor, and of which kind its tensors are.
struct BoundDescriptor {
  std::shared_ptr<const expert_parallel::Descriptor> descriptor;
  Exporter exporter;

  template <ConstTensorView (expert_parallel::Descriptor::*kField)() const>
  nanobind::any field() const {
    return nanobind::borrow<nanobind::any>(exporter((*descriptor.*kField)(), descriptor));
  }
};

// Null for None. Errors name `operation`.
std::shared_ptr<const expert_parallel::Descriptor> descriptor_argument(const char* operation,
                                                                       const char* argument,
                                                                       nanobind::handle value);

}  // namespace winnow::python
