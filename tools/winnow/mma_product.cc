#include "tools/winnow/mma_product.h"

#include <array>

#include "tools/winnow/mma_product_launch.h"
#include <cuda_runtime_api.h>

#include "winnow/core/error.h"

namespace winnow::cli {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw Error(ErrorCode::internal, "bench", cudaGetErrorString(error));
}

// Of the current device.
int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

std::span<const MmaProduct::Plan> MmaProduct::plans() {
  static constexpr std::array kPlans = {Plan::tensor_192x256, Plan::threads_128x256,
                                        Plan::threads_128x128};
  const std::span<const Plan> all(kPlans);
  const int shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
      shared >= mma_product::kBytesOfTensor192) {
    return all;
  }
  return all.subspan(shared >= mma_product::kBytesOfThreads256 ? 1 : 2);
}

MmaProduct::MmaProduct(ConstTensorView a, ConstTensorView b, TensorView c, Plan plan) {
  const int blocks = attribute(cudaDevAttrMultiProcessorCount);
  const std::int64_t count_bytes = sizeof(unsigned);  // behind the sums of all blocks
  sums_ = Tensor(DType::u8, {blocks * (mma_product::kSumsBytes + count_bytes)}, a.device());
  check(cudaMemset(sums_.data(), 0, static_cast<std::size_t>(sums_.numel())));
  auto* const sums = static_cast<char*>(sums_.data());
  const mma_product::Product product = {
      .m = static_cast<int>(a.size(0)),
      .n = static_cast<int>(b.size(0)),
      .k = static_cast<int>(a.size(1)),
      .a = a.data(),
      .b = b.data(),
      .c = static_cast<char*>(c.data()),
      .partial = reinterpret_cast<float*>(sums),
      .steps_of_shared = reinterpret_cast<unsigned*>(sums + blocks * mma_product::kSumsBytes)};
  const auto prepare = plan == Plan::tensor_192x256    ? mma_product::tensor_192x256
                       : plan == Plan::threads_128x256 ? mma_product::threads_128x256
                                                       : mma_product::threads_128x128;
  queue_ = prepare(product, blocks);
}

}  // namespace winnow::cli
