// Rows of any floating dtype to and from f32, and of f64 as they are. Internal; compiled once per
// instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "winnow/core/dtype.h"

namespace winnow {

// destination[c] = source[offset + c] for c < count; offset in elements of `dtype`.
inline void load_f32(DType dtype, const void* source, std::int64_t offset, std::int64_t count,
                     float* destination) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(destination, static_cast<const float*>(source) + offset,
                  static_cast<std::size_t>(count) * sizeof(float));
      break;
    case DType::f16: {
      const auto* half = static_cast<const Half*>(source) + offset;
      for (std::int64_t c = 0; c < count; ++c) destination[c] = static_cast<float>(half[c]);
      break;
    }
    case DType::bf16: {
      const auto* brain = static_cast<const BFloat16*>(source) + offset;
      for (std::int64_t c = 0; c < count; ++c) destination[c] = static_cast<float>(brain[c]);
      break;
    }
    case DType::f8_e4m3: {
      const auto* eighth = static_cast<const Float8E4M3*>(source) + offset;
      for (std::int64_t c = 0; c < count; ++c) destination[c] = static_cast<float>(eighth[c]);
      break;
    }
    default:
      break;  // the checks let no other dtype in
  }
}

// destination[offset + c] = source[c], rounded to nearest even.
inline void store_f32(DType dtype, const float* source, std::int64_t count, void* destination,
                      std::int64_t offset) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(static_cast<float*>(destination) + offset, source,
                  static_cast<std::size_t>(count) * sizeof(float));
      break;
    case DType::f16: {
      auto* half = static_cast<Half*>(destination) + offset;
      for (std::int64_t c = 0; c < count; ++c) half[c] = Half(source[c]);
      break;
    }
    case DType::bf16: {
      auto* brain = static_cast<BFloat16*>(destination) + offset;
      for (std::int64_t c = 0; c < count; ++c) brain[c] = BFloat16(source[c]);
      break;
    }
    default:
      break;
  }
}

// The same to and from the type in which a kernel computes: float, or double where dtype is f64.
inline void load_real(DType dtype, const void* source, std::int64_t offset, std::int64_t count,
                      float* destination) {
  load_f32(dtype, source, offset, count, destination);
}
inline void load_real(DType, const void* source, std::int64_t offset, std::int64_t count,
                      double* destination) {
  std::memcpy(destination, static_cast<const double*>(source) + offset,
              static_cast<std::size_t>(count) * sizeof(double));
}
inline void store_real(DType dtype, const float* source, std::int64_t count, void* destination,
                       std::int64_t offset) {
  store_f32(dtype, source, count, destination, offset);
}
inline void store_real(DType, const double* source, std::int64_t count, void* destination,
                       std::int64_t offset) {
  std::memcpy(static_cast<double*>(destination) + offset, source,
              static_cast<std::size_t>(count) * sizeof(double));
}

}  // namespace winnow
