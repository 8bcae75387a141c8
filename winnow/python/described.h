// The tensors of a call that winnow.supports() is asked about: described by the declaration of the
// operation and by sizes, without memory.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/python/bindings.h"

namespace winnow::python {

// Gives the fields of an operation's arguments what a description says of them:
//
//   "q: T[s_q, h_q=64, d_qk=576], kv: T[s_kv, 1, d_qk], indices: i32[s_q, 1, topk=64]"
//
// T is the dtype that is asked for, R the one of its sums, x how many elements of it 16 bytes hold.
// A size is a name, with a default where it is mentioned first (else 1), a number, or a quotient or
// product of these. "sizes: [world_size, ...]" names sizes of no tensor. Whole numbers among the
// arguments have the size of their name.
class Described {
 public:
  Described(std::string_view text, Shape& shape) : text_(text), shape_(shape) {}

  void operator()(std::string_view name, ConstTensorView& view) const { view = tensor(name); }
  void operator()(std::string_view name, TensorView& view) const { view = tensor(name); }
  void operator()(std::string_view name, std::int64_t& value) const {
    value = shape_.known(name, value);
  }
  template <class T>
  void operator()(std::string_view, T&) const {}

  // Takes every size that the description names. Throws Error (invalid_argument) if one is not a
  // number, std::logic_error for a description that does not parse.
  void take_sizes() const;

 private:
  TensorView tensor(std::string_view name) const;  // absent where the description has none

  std::string_view text_;
  Shape& shape_;
};

// Supports of an operation: `adjust` changes what a description cannot say.
template <class Args, class Adjust>
Backend supports_described(std::string_view text,
                           Backend (*operation)(const Args&, const RunOptions&), Shape& shape,
                           const RunOptions& options, const Adjust& adjust) {
  const Described described(text, shape);
  described.take_sizes();
  shape.done();
  Args args;
  each_argument(args, described);
  adjust(shape, args);
  return operation(args, options);
}

}  // namespace winnow::python
