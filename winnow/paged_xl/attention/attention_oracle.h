// The formula of paged_xl::attention in double precision. It shares no code with any backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/position_term/position_term_oracle.h"

namespace winnow::paged_xl::oracle {

struct Attention {
  std::vector<double> out;   // [num_seqs, num_heads, head_size]
  std::vector<double> lse;   // [num_seqs, num_heads]
  double largest_logit = 0;  // of all finite |logit|
};

inline Attention attention(const AttentionArgs& args) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::int64_t num_heads = args.query.size(1), head_size = args.query.size(2);
  const std::int64_t block_size = args.value_cache.size(3), x = args.key_cache.size(4);
  const std::int64_t heads_per_kv_head =
      num_heads / std::max<std::int64_t>(args.key_cache.size(1), 1);
  const double scale = args.scale.value_or(1 / std::sqrt(double(head_size)));
  Attention result;
  for (std::int64_t s = 0; s < args.query.size(0); ++s) {
    const std::int64_t context_len = args.context_lens.at<std::int32_t>(s);
    const auto block = [&](std::int64_t j) {
      return args.block_tables.at<std::int32_t>(s, j / block_size);
    };
    for (std::int64_t h = 0; h < num_heads; ++h) {
      const std::int64_t kv_head = h / heads_per_kv_head;
      const std::vector<double> q_u = add_bias(args.query, args.pos_bias_u, s, h);
      std::vector<double> q_v;
      if (args.r.present()) q_v = add_bias(args.query, args.pos_bias_v, s, h);

      std::vector<double> logits;
      double largest = -kInfinity;  // NaN left out
      bool any_nan = false;
      for (std::int64_t j = 0; j < context_len; ++j) {
        double dot = 0;
        for (std::int64_t d = 0; d < head_size; ++d) {
          dot += q_u[static_cast<std::size_t>(d)] *
                 element(args.key_cache, block(j), kv_head, d / x, j % block_size, d % x);
        }
        const double bd = args.r.present() ? position_entry(q_v, args.r, h, context_len, j)
                                           : element(args.matrix_bd, s, h, j);
        logits.push_back(scale * (dot + bd));
        largest = std::max(largest, logits.back());
        any_nan = any_nan || std::isnan(logits.back());
        if (std::isfinite(logits.back())) {
          result.largest_logit = std::max(result.largest_logit, std::abs(logits.back()));
        }
      }

      std::vector<double> out(static_cast<std::size_t>(head_size), 0.0);
      double sum = 0;
      for (std::int64_t j = 0; j < context_len && (any_nan || largest != -kInfinity); ++j) {
        const double weight = std::exp(logits[static_cast<std::size_t>(j)] - largest);
        sum += weight;
        for (std::int64_t d = 0; d < head_size; ++d) {
          out[static_cast<std::size_t>(d)] +=
              weight * element(args.value_cache, block(j), kv_head, d, j % block_size);
        }
      }
      for (const double value : out) result.out.push_back(sum == 0 ? 0 : value / sum);
      const double lse = sum == 0 ? -kInfinity : largest + std::log(sum);
      result.lse.push_back(largest == kInfinity && !any_nan ? kInfinity : lse);
    }
  }
  return result;
}

}  // namespace winnow::paged_xl::oracle
