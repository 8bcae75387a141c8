// What paged_xl::append does, element by element. It shares no code with any backend.
#pragma once

#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/core/tensor.h"
#include "winnow/paged_xl/cache/append.h"

namespace winnow::paged_xl::oracle {

template <class T>
void append_as(const AppendArgs& args) {
  const std::int64_t block_size = args.value_cache.size(3), x = args.key_cache.size(4);
  for (std::int64_t t = 0; t < args.key.size(0); ++t) {
    const std::int64_t slot = args.slot_mapping.dtype() == DType::i64
                                  ? args.slot_mapping.at<std::int64_t>(t)
                                  : args.slot_mapping.at<std::int32_t>(t);
    if (slot < 0) continue;
    const std::int64_t block = slot / block_size, offset = slot % block_size;
    for (std::int64_t h = 0; h < args.key.size(1); ++h) {
      for (std::int64_t d = 0; d < args.key.size(2); ++d) {
        args.key_cache.at<T>(block, h, d / x, offset, d % x) = args.key.at<T>(t, h, d);
        args.value_cache.at<T>(block, h, d, offset) = args.value.at<T>(t, h, d);
      }
    }
  }
}

inline void append(const AppendArgs& args) {
  switch (args.key.dtype()) {
    case DType::f64:
      return append_as<double>(args);
    case DType::f16:
      return append_as<Half>(args);
    case DType::bf16:
      return append_as<BFloat16>(args);
    default:
      return append_as<float>(args);
  }
}

}  // namespace winnow::paged_xl::oracle
