// What the bindings of decode and store share.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/core/error.h"
#include "winnow/python/operation.h"
#include "winnow/sparse_mla/cache_format.h"

namespace winnow::python {

template <>
struct FromText<sparse_mla::CacheFormat> {
  static sparse_mla::CacheFormat from(const char* operation, const std::string& format) {
    try {
      return sparse_mla::cache_format_from_string(format);
    } catch (const Error&) {
      throw Error(ErrorCode::invalid_argument, operation, "format", "fp8_656, fp8_584 or bf16",
                  format);
    }
  }
};

// The cache that supports() asks about: of float8 or bytes with 576 columns fp8_656, with 512
// fp8_584, and of another dtype plain rows, which only bfloat16 may be.
struct CacheOfDtype {
  sparse_mla::CacheFormat format = sparse_mla::CacheFormat::bf16;
  TensorView view;

  CacheOfDtype(const Shape& shape, std::int64_t blocks, std::int64_t block_size,
               std::int64_t d_qk) {
    std::int64_t row = d_qk;
    if (shape.dtype == DType::f8_e4m3 || shape.dtype == DType::u8) {
      const bool narrow = d_qk == sparse_mla::Row584::kColumns;
      format = narrow ? sparse_mla::CacheFormat::fp8_584 : sparse_mla::CacheFormat::fp8_656;
      row = narrow ? sparse_mla::Row584::kBytes : sparse_mla::Row656::kBytes;
    }
    view = shape.view(shape.dtype, {blocks, block_size, 1, row});
    if (format != sparse_mla::CacheFormat::fp8_584) return;
    const std::int64_t sizes[] = {blocks, block_size, 1, row};
    const std::int64_t strides[] = {sparse_mla::Row584::block_bytes(block_size), row, row, 1};
    view = TensorView(view.data(), shape.dtype, sizes, strides, shape.device);
  }
};

}  // namespace winnow::python
