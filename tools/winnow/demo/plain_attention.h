// The formulas of sparse MLA for one query, in double and as in a textbook. The demo measures the
// library against them, so they share nothing with it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace winnow::demo {

// Dense row-major inputs in double.
struct PlainInputs {
  std::vector<double> q;     // [s_q, heads, width]
  std::vector<double> kv;    // [s_kv, width]
  std::vector<double> sink;  // [heads], or empty
  std::int64_t heads = 0;
  std::int64_t width = 0;  // d_qk; the first value_width columns of a row are its value
  std::int64_t value_width = 0;
};

struct PlainResult {
  std::vector<double> out;      // [heads, value_width]
  std::vector<double> lse;      // [heads], without the sink
  std::vector<double> weights;  // per entry, summed over the heads, without the sink
};

// Attention of the query in row `query` of q, which stands at `position`, over the rows `entries`;
// entries below 0 or beyond `position` are not visible.
PlainResult plain_attention(const PlainInputs& inputs, std::int64_t query, std::int64_t position,
                            std::span<const std::int32_t> entries);

std::vector<double> to_double(std::span<const float> values);

}  // namespace winnow::demo
