// What the launches of the CUDA kernels on a paged cache share. Host code of .cu files.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "winnow/core/dtype.h"
#include "winnow/core/rows.h"

namespace winnow::paged_xl {

// Every address is a multiple of 16 bytes.
inline bool is_aligned(const Rows<const void*>& rows, std::int64_t element_size) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 &&
         rows.stride0 * element_size % 16 == 0 && rows.stride1 * element_size % 16 == 0;
}

// Calls body with a value of the device's type for the dtype.
template <class Body>
void with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f16:
      return body(__half{});
    case DType::bf16:
      return body(__nv_bfloat16{});
    default:
      return body(float{});
  }
}

}  // namespace winnow::paged_xl
