// The arguments and results of AllToAll::dispatch().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "winnow/core/backend.h"
#include "winnow/core/error.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/layer/descriptor.h"

namespace winnow::expert_parallel {

// Arguments of dispatch(). n, 0 to T, is this rank's own.
struct DispatchArgs {
  ConstTensorView input{};  // [n, H], the layer's dtype; or f8_e4m3 with scales, H a multiple of 16
  ConstTensorView expert_indices{};  // [n, K] i32 or i64
  ConstTensorView weights{};         // optional [n, K], the layer's weight_dtype
  // With f8_e4m3: [n, S] of any dtype and strides. They are sent as bytes and not applied; a row
  // has a multiple of 4 bytes and at most 4 * ceil(H / 32). Absent otherwise.
  ConstTensorView scales{};
  ConstTensorView scatter_indices{};  // optional [n, K] or [sum of n, K] i32: the caller's own rows
  RowOrder order = RowOrder::expert_major;
  std::int64_t expert_alignment = 1;  // expert-major: rows of each expert are padded to a multiple
  std::int64_t worst_case_rows = 0;   // rows of the output; 0: as many as arrive
  bool copy_out = false;              // the output owns its memory instead of borrowing the arena
  // With copy_out: allocates each result, a dense tensor on the layer's device, once its shape is
  // known. An exception that it throws counts as a failed allocation and breaks the layer.
  std::function<Tensor(DType dtype, std::span<const std::int64_t> shape)> allocate{};
  TensorView out{};  // optional [R or more, H] of input's dtype: receives the output
  int sm_count = 0;  // of this call, at most the layer's; 0: the layer's
  std::shared_ptr<const Descriptor> cached{};  // repeat the routing of this descriptor
  Stream stream{};                             // on the layer's GPU; each rank has its own
  // If non-null, this rank rejects the call: other fields are ignored and every rank throws.
  const Error* refusal = nullptr;
};

// The result of dispatch(). S: columns of the scales that were given; e = E / W.
struct Dispatched {
  Tensor output;      // [R, H] of input's dtype; empty if `out` is given
  Tensor weights;     // expert-major [R], token-major [R, K], weight_dtype; empty without weights
  Tensor scales;      // [R, S], dense, of the dtype of the scales; empty without
  Tensor expert_ids;  // token-major: [R, K] i32, local expert 0 to e - 1 of each pair, -1 if it
                      // lives elsewhere or was dropped; empty in expert-major order
  std::shared_ptr<const Descriptor> descriptor;
  Backend backend = Backend::cpu;  // the backend that ran
};

}  // namespace winnow::expert_parallel
