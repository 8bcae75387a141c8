// The formula of sparse_mla::distribution in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "winnow/sparse_mla/forward/forward_oracle.h"

namespace winnow::sparse_mla::oracle {

struct Distribution {
  std::vector<double> attn_sum;        // [queries, topk]
  std::vector<double> extra_attn_sum;  // [queries, topk of the extra source]
  double largest_logit = 0;            // of all finite |x| met
};

// `lse` [s_q, h_q] is used as passed.
inline Distribution distribution(const Inputs& in, const ConstTensorView& lse,
                                 std::span<const std::int64_t> queries) {
  Distribution result;
  for (const std::int64_t i : queries) {
    const std::vector<Entry> entries = visible_entries(in, i);
    const std::vector<std::vector<double>> keys = gather(in, entries);
    std::vector<double> attn_sum(static_cast<std::size_t>(in.topk() + in.extra.topk()), 0.0);
    for (std::int64_t h = 0; h < in.h_q(); ++h) {
      const std::vector<double> q = row_of(in.q, i, h);
      for (std::size_t e = 0; e < entries.size(); ++e) {
        const double x = in.logit_scale() * dot(q, keys[e], in.d_qk());
        attn_sum[entries[e].j] += std::exp(x - element(lse, i, h));
        note_logit(x, result.largest_logit);
      }
    }
    const auto extra = attn_sum.begin() + in.topk();
    result.attn_sum.insert(result.attn_sum.end(), attn_sum.begin(), extra);
    result.extra_attn_sum.insert(result.extra_attn_sum.end(), extra, attn_sum.end());
  }
  return result;
}

}  // namespace winnow::sparse_mla::oracle
