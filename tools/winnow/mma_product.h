// A matrix product made with mma.sync, as fast as that goes: the ceiling of the portable kernels.
#pragma once

#include <functional>
#include <span>

#include "winnow/core/tensor.h"

namespace winnow::cli {

// c[m, n] = a[m, k] * b[n, k]^T in bf16 with f32 sums, dense on one GPU, the current one. m is a
// multiple of 128, n of 256, k of 64.
class MmaProduct {
 public:
  // How rows of a and b come to shared memory, and what a block computes of c at a time.
  enum class Plan {
    tensor_192x256,   // by the tensor memory accelerator; compute capability 9.0 and newer
    threads_128x256,  // by cp.async
    threads_128x128,  // the same in 99 KiB of shared memory
  };
  // Those that the current GPU can run, the fastest first.
  static std::span<const Plan> plans();

  MmaProduct(ConstTensorView a, ConstTensorView b, TensorView c, Plan plan = plans().front());

  // Queues the product on the stream, null for the default one; one at a time.
  void queue(void* stream = nullptr) { queue_(stream); }

 private:
  Tensor sums_;  // of tiles that several blocks share; zeros between products
  std::function<void(void* stream)> queue_;
};

}  // namespace winnow::cli
