// The arguments and results of AllToAll::dispatch().
#pragma once

#include <cstdint>
#include <memory>

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
  ConstTensorView expert_indices{};  // [n, K] i32
  ConstTensorView weights{};         // optional [n, K], the layer's weight_dtype
  ConstTensorView scales{};  // [n, ceil(H / 128)] f32 with f8_e4m3, one for 128 columns: carried,
                             // not applied; absent otherwise
  ConstTensorView scatter_indices{};  // optional [n, K] or [sum of n, K] i32: the caller's own rows
  RowOrder order = RowOrder::expert_major;
  std::int64_t expert_alignment = 1;  // expert-major: rows of each expert are padded to a multiple
  std::int64_t worst_case_rows = 0;   // rows of the output; 0: as many as arrive
  bool copy_out = false;              // the output owns its memory instead of borrowing the arena
  TensorView out{};  // optional [R or more, H] of input's dtype: receives the output
  std::shared_ptr<const Descriptor> cached{};  // repeat the routing of this descriptor
  Stream stream{};                             // on the layer's GPU; each rank has its own
  // If non-null, this rank rejects the call: other fields are ignored and every rank throws.
  const Error* refusal = nullptr;
};

// The result of dispatch(). S = ceil(H / 128), e = E / W.
struct Dispatched {
  Tensor output;      // [R, H] of input's dtype; empty if `out` is given
  Tensor weights;     // expert-major [R], token-major [R, K], weight_dtype; empty without weights
  Tensor scales;      // [R, S] f32; empty without scales
  Tensor expert_ids;  // token-major: [R, K] i32, local expert 0 to e - 1 of each pair, -1 if it
                      // lives elsewhere or was dropped; empty in expert-major order
  std::shared_ptr<const Descriptor> descriptor;
  Backend backend = Backend::cpu;  // that carried the call out
};

}  // namespace winnow::expert_parallel
