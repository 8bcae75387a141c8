// What indexer::quantize() writes. It shares no code with any backend.
#pragma once

#include <cstdint>

#include "winnow/cache/key_oracle.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/testing/compare.h"

namespace winnow::indexer::oracle {

inline void quantize(const QuantizeArgs& args) {
  const std::int64_t d = args.x.size(args.x.rank() - 1);
  for (std::int64_t i = 0; i < args.x.size(0); ++i) {
    for (std::int64_t h = 0; h < (args.x.rank() == 3 ? args.x.size(1) : 1); ++h) {
      const ConstTensorView of_query = args.x.slice(0, i, i + 1);
      const QuantizedRow row =
          quantize_row(testing::read(args.x.rank() == 3 ? of_query.slice(1, h, h + 1) : of_query),
                       args.power_of_two);
      if (args.slots.present()) {
        const std::int64_t slot = args.slots.dtype() == DType::i64 ? args.slots.at<std::int64_t>(i)
                                                                   : args.slots.at<std::int32_t>(i);
        if (slot >= 0) write_key(args.pages, slot, row);
        continue;
      }
      for (std::int64_t c = 0; c < d; ++c) {
        if (args.x.rank() == 3) {
          args.rows.at<Float8E4M3>(i, h, c).bits = row.elements[c];
        } else {
          args.rows.at<Float8E4M3>(i, c).bits = row.elements[c];
        }
      }
      (args.x.rank() == 3 ? args.scale.at<float>(i, h) : args.scale.at<float>(i)) = row.scale;
    }
  }
}

}  // namespace winnow::indexer::oracle
