// The call that winnow.supports() asks about: tensors without memory, made from the operation's
// contract and the sizes and dtype that the caller of supports() gave.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/core/backend.h"
#include "winnow/core/contract.h"
#include "winnow/core/tensor.h"
#include "winnow/python/bindings.h"

namespace winnow::python {

// A tensor for that row of the table. Takes the sizes that it names; throws Error
// (invalid_argument) if one is not a number. The size "x" is how many elements 16 bytes hold.
TensorView described(const contract::Spec& spec, std::span<const contract::Spec> specs,
                     Shape& shape);
// A size of that name among the arguments.
std::int64_t described_size(const contract::Dimension& dim, Shape& shape);

// The backend that runs such a call, or the Error of the operation. The call has the arguments that
// are required and those that the table marks as described(); `adjust` sets what no table can say.
template <const auto& kDeclaration, class Args, class Adjust>
Backend supports_described(Backend (*operation)(const Args&, const RunOptions&), Shape& shape,
                           const RunOptions& options, const Adjust& adjust) {
  constexpr const auto& kContract = kDeclaration.kContract;
  Args args;
  kContract.visit(args, [&]<class T>(const contract::Spec& spec, T& value) {
    if constexpr (contract::kIsTensor<T>) {
      const bool given =
          spec.role == contract::Role::output || kDeclaration.place(spec.name) < kDeclaration.count;
      if (given && (!spec.optional || spec.described)) {
        value = described(spec, kContract.specs, shape);
      }
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      for (const contract::Dimension& dim : spec.asked.view()) value = described_size(dim, shape);
    }
  });
  adjust(shape, args);
  shape.done();
  return operation(args, options);
}

}  // namespace winnow::python
