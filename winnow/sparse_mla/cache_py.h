// What the bindings of decode and store share.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "winnow/cache/cache_format.h"
#include "winnow/python/operation.h"

namespace winnow::python {

template <>
struct Choices<sparse_mla::CacheFormat> {
  using Format = sparse_mla::CacheFormat;
  static constexpr std::pair<std::string_view, Format> kAll[] = {{"fp8_656", Format::fp8_656},
                                                                 {"fp8_584", Format::fp8_584},
                                                                 {"fp8_576", Format::fp8_576},
                                                                 {"bf16", Format::bf16}};
};

// Sets the cache in the call that winnow.supports() asks about. For float8 and uint8 its format is
// fp8_656 with 576 columns, fp8_584 with 512. For other dtypes, of which only bfloat16 is right,
// its rows are plain.
constexpr auto cache_for_supports = [](Shape& shape, auto& args) {
  args.format = sparse_mla::CacheFormat::bf16;
  if (shape.dtype != DType::f8_e4m3 && shape.dtype != DType::u8) return;
  const bool narrow = shape.size("d_qk") == sparse_mla::Row584::kColumns;
  args.format = narrow ? sparse_mla::CacheFormat::fp8_584 : sparse_mla::CacheFormat::fp8_656;
  const std::int64_t row = narrow ? sparse_mla::Row584::kBytes : sparse_mla::Row656::kBytes;
  const std::int64_t block_size = shape.size("block_size");
  const std::int64_t sizes[] = {shape.size("blocks"), block_size, 1, row};
  const std::int64_t strides[] = {
      narrow ? sparse_mla::Row584::block_bytes(block_size) : block_size * row, row, row, 1};
  TensorView cache = shape.view(shape.dtype, {});
  args.cache = TensorView(cache.data(), shape.dtype, sizes, strides, shape.device);
};

}  // namespace winnow::python
