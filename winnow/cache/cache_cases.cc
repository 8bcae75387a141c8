#include "winnow/cache/cache_cases.h"

namespace winnow::sparse_mla {

using testing::Layout;
using testing::StridedTensor;

std::int64_t row_elements(CacheFormat format, std::int64_t columns) {
  switch (format) {
    case CacheFormat::fp8_656:
      return 656;
    case CacheFormat::fp8_584:
      return 584;
    case CacheFormat::fp8_576:
      return 576;
    case CacheFormat::bf16:
      return columns;
  }
  return 0;
}

std::int64_t row_columns(CacheFormat format, std::int64_t columns) {
  switch (format) {
    case CacheFormat::fp8_656:
      return 576;
    case CacheFormat::fp8_584:
      return 512;
    case CacheFormat::fp8_576:
      return 576;
    case CacheFormat::bf16:
      return columns;
  }
  return 0;
}

std::string name_of(CacheFormat format, std::int64_t columns) {
  const std::string name(to_string(format));
  return format == CacheFormat::bf16 ? name + "_" + std::to_string(columns) : name;
}

StridedTensor make_cache(CacheFormat format, std::int64_t blocks, std::int64_t block_size,
                         std::int64_t columns, Layout layout) {
  const std::int64_t elements = row_elements(format, columns);
  const DType dtype = format == CacheFormat::bf16 ? DType::bf16 : DType::u8;
  if (format != CacheFormat::fp8_584) {
    return testing::make_output(dtype, {blocks, block_size, 1, elements}, layout);
  }
  // Rounded up to a multiple of 576, and before and after it a gap.
  const std::int64_t padded = (block_size * 584 + 575) / 576 * 576;
  const std::int64_t gap = layout == Layout::dense ? 0 : 48;
  StridedTensor cache = testing::make_output(DType::u8, {blocks, padded + 2 * gap}, Layout::dense);
  const std::int64_t shape[] = {blocks, block_size, 1, 584};
  const std::int64_t strides[] = {padded + 2 * gap, 584, 584, 1};
  auto* bytes = static_cast<std::uint8_t*>(cache.storage.data());
  cache.view = TensorView(cache.storage.numel() == 0 ? bytes : bytes + gap, dtype, shape, strides);
  return cache;
}

}  // namespace winnow::sparse_mla
