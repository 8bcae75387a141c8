// The formulas of sparse_mla::backward in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "winnow/sparse_mla/forward/forward_oracle.h"

namespace winnow::sparse_mla::oracle {

// What backward gets beyond the shared inputs. `out` may be absent where `delta` is given.
struct Gradients {
  ConstTensorView out, lse, d_out, delta;
};

struct Backward {
  std::vector<double> dq;      // [queries, h_q, d_qk]
  std::vector<double> dkv;     // [rows, d_qk]
  std::vector<double> d_sink;  // [h_q]
  double largest_logit = 0;    // of all finite |x| met
};

inline double delta_of(const Inputs& in, const Gradients& given, std::int64_t i, std::int64_t h) {
  if (given.delta.present()) return element(given.delta, i, h);
  return dot(row_of(given.out, i, h), row_of(given.d_out, i, h), in.d_v());
}

// dq of the chosen queries and dkv of the chosen rows, numbered as in Entry; d_sink always sums
// over all queries.
inline Backward backward(const Inputs& in, const Gradients& given,
                         std::span<const std::int64_t> queries,
                         std::span<const std::int64_t> rows) {
  Backward result;
  result.d_sink.assign(static_cast<std::size_t>(in.h_q()), 0.0);
  std::map<std::int64_t, std::vector<double>> dq_of, dkv_of;
  for (const std::int64_t i : queries) dq_of[i].assign(in.h_q() * in.d_qk(), 0.0);
  for (const std::int64_t row : rows) dkv_of[row].assign(in.d_qk(), 0.0);

  for (std::int64_t i = 0; i < in.s_q(); ++i) {
    std::vector<Entry> entries = visible_entries(in, i);
    if (entries.empty()) continue;
    for (std::int64_t h = 0; h < in.h_q(); ++h) {
      const double sink = in.sink(h);
      if (std::isinf(sink)) continue;  // -inf has no share, +inf leaves no gradient
      const double lse = lse_with_sink(element(given.lse, i, h), sink);
      result.d_sink[h] -= std::exp(sink - lse) * delta_of(in, given, i, h);
    }

    // Only entries that reach a chosen query or row have to be looked at.
    const auto dq = dq_of.find(i);
    if (dq == dq_of.end()) {
      std::erase_if(entries, [&](const Entry& entry) { return !dkv_of.contains(entry.row); });
    }
    const std::vector<std::vector<double>> keys = gather(in, entries);
    for (std::int64_t h = 0; h < in.h_q() && !entries.empty(); ++h) {
      if (in.sink(h) == kInfinity) continue;
      const std::vector<double> q = row_of(in.q, i, h);
      const std::vector<double> d_out = row_of(given.d_out, i, h);
      const double delta = delta_of(in, given, i, h);
      const double lse = lse_with_sink(element(given.lse, i, h), in.sink(h));
      for (std::size_t e = 0; e < entries.size(); ++e) {
        const double x = in.logit_scale() * dot(q, keys[e], in.d_qk());
        const double p = std::exp(x - lse);
        const double dp = dot(d_out, keys[e], in.d_v());
        const double ds = p * (dp - delta) * in.logit_scale();
        note_logit(x, result.largest_logit);
        if (dq != dq_of.end()) {
          for (std::int64_t c = 0; c < in.d_qk(); ++c) {
            dq->second[h * in.d_qk() + c] += ds * keys[e][c];
          }
        }
        const auto dkv = dkv_of.find(entries[e].row);
        if (dkv == dkv_of.end()) continue;
        for (std::int64_t c = 0; c < in.d_qk(); ++c) dkv->second[c] += ds * q[c];
        for (std::int64_t c = 0; c < in.d_v(); ++c) dkv->second[c] += p * d_out[c];
      }
    }
  }
  for (const std::int64_t i : queries) {
    result.dq.insert(result.dq.end(), dq_of[i].begin(), dq_of[i].end());
  }
  for (const std::int64_t row : rows) {
    result.dkv.insert(result.dkv.end(), dkv_of[row].begin(), dkv_of[row].end());
  }
  return result;
}

}  // namespace winnow::sparse_mla::oracle
