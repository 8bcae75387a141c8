#include "winnow/expert_parallel/dispatch/dispatch_dense_cuda.h"

#include "winnow/expert_parallel/layer/layer_kernels_cuda.h"

namespace winnow::expert_parallel {

DenseRows dense_rows(CudaLayer& layer, const ConstTensorView& rows) {
  const std::int64_t count = rows.size(0), bytes = rows.size(1) * size_of(rows.dtype());
  const auto* data = static_cast<const std::byte*>(rows.data());
  if (count == 1 || row_stride(rows) == bytes) return {data, bytes, nullptr};
  const std::shared_ptr<Region> copy = layer.keep(count * bytes);
  layer.calls().check(
      copy_rows(copy->data(), bytes, data, row_stride(rows), bytes, count, layer.calls().stream()),
      "the copy of weights");
  return {copy->data(), bytes, copy};
}

DenseRows rows_of_words(CudaLayer& layer, const ConstTensorView& rows) {
  constexpr std::int64_t kWord = sizeof(std::uint32_t);
  const std::int64_t size = size_of(rows.dtype()), count = rows.size(0), columns = rows.size(1);
  const std::int64_t row = count > 1 ? rows.stride(0) * size : kWord;
  const auto* data = static_cast<const std::byte*>(rows.data());
  const bool together = columns <= 1 || rows.stride(1) == 1;
  if (together && row % kWord == 0 && reinterpret_cast<std::uintptr_t>(data) % kWord == 0) {
    return {data, row, nullptr};
  }
  const std::int64_t column = columns > 1 ? rows.stride(1) * size : size, bytes = columns * size;
  const std::shared_ptr<Region> copy = layer.keep(count * bytes);
  layer.calls().check(
      copy_columns(copy->data(), data, row, column, count, columns, size, layer.calls().stream()),
      "the copy of scales");
  return {copy->data(), bytes, copy};
}

}  // namespace winnow::expert_parallel
