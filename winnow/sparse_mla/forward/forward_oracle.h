// The formula of sparse_mla::forward in double precision. It shares no code with any backend, and
// the oracles of distribution and backward build on it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/dot.h"

namespace winnow::sparse_mla::oracle {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One element of a tensor in f32 or f64.
template <class... Index>
double element(const ConstTensorView& view, Index... index) {
  return view.dtype() == DType::f64 ? view.at<double>(index...)
                                    : static_cast<double>(view.at<float>(index...));
}

// A source of rows.
struct Source {
  ConstTensorView kv{}, indices{};
  ConstTensorView topk_length{};           // may be absent
  ConstTensorView key_start{}, key_end{};  // in the place of indices, or absent
  std::int64_t k_stride = 1;

  std::int64_t s_kv() const { return kv.present() ? kv.size(0) : 0; }
  std::int64_t topk() const { return indices.present() ? indices.size(2) : s_kv(); }
};

// The inputs that the three operations share; tensors on the host, as the operation gets them.
struct Inputs : Source {
  ConstTensorView q{};
  ConstTensorView attn_sink{};  // may be absent
  std::optional<double> scale{};
  std::optional<std::int64_t> q_start{};
  Source extra{};  // may be absent
  bool flash_mla_lse = false;

  std::int64_t s_q() const { return q.size(0); }
  std::int64_t h_q() const { return q.size(1); }
  std::int64_t d_qk() const { return q.size(2); }
  std::int64_t d_v() const { return 512; }
  double logit_scale() const { return scale.value_or(1 / std::sqrt(double(d_qk()))); }
  double sink(std::int64_t h) const {
    return attn_sink.present() ? element(attn_sink, h) : -kInfinity;
  }
};

// Entry j of a query's indices, and the row of kv that it names. Those of the extra source go on
// with topk and s_kv.
struct Entry {
  std::int64_t j, row;
};

inline std::vector<Entry> visible_entries(const Inputs& in, std::int64_t i) {
  std::vector<Entry> entries;
  for (const Source* source : {static_cast<const Source*>(&in), &in.extra}) {
    const bool extra = source == &in.extra;
    std::int64_t length = source->topk();
    if (source->topk_length.present()) {
      length = std::clamp<std::int64_t>(source->topk_length.at<std::int32_t>(i), 0, length);
    }
    for (std::int64_t j = 0; j < length; ++j) {
      const std::int64_t row =
          source->indices.present() ? source->indices.at<std::int32_t>(i, 0, j) : j;
      if (row < 0 || row >= source->s_kv()) continue;
      if (source->key_start.present() && row < source->key_start.at<std::int32_t>(i)) continue;
      if (source->key_end.present() && row >= source->key_end.at<std::int32_t>(i)) continue;
      if (in.q_start.has_value()) {
        const __int128 last_token = static_cast<__int128>(row + 1) * source->k_stride - 1;
        const __int128 position = static_cast<__int128>(*in.q_start) + i;
        if (last_token > position) continue;
      }
      entries.push_back({j + (extra ? in.topk() : 0), row + (extra ? in.s_kv() : 0)});
    }
  }
  return entries;
}

// Row (i, h) of a tensor [s, h, columns].
inline std::vector<double> row_of(const ConstTensorView& view, std::int64_t i, std::int64_t h) {
  return winnow::testing::read(view.slice(0, i, i + 1).slice(1, h, h + 1));
}

// The rows that the entries name, one after the other.
inline std::vector<std::vector<double>> gather(const Inputs& in, std::span<const Entry> entries) {
  std::vector<std::vector<double>> rows;
  for (const Entry& entry : entries) {
    rows.push_back(entry.row < in.s_kv() ? row_of(in.kv, entry.row, 0)
                                         : row_of(in.extra.kv, entry.row - in.s_kv(), 0));
  }
  return rows;
}

using winnow::testing::dot;

// log(exp(lse) + exp(sink)); NaN if either is.
inline double lse_with_sink(double lse, double sink) {
  if (std::isnan(lse) || std::isnan(sink)) return lse + sink;
  const double larger = std::max(lse, sink);
  if (std::isinf(larger)) return larger;
  return larger + std::log(std::exp(lse - larger) + std::exp(sink - larger));
}

// Takes a logit into the largest magnitude of the finite ones.
inline void note_logit(double x, double& largest) {
  if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
}

// For the chosen queries, one after the other.
struct Forward {
  std::vector<double> out;              // [queries, h_q, 512]
  std::vector<double> max_logits, lse;  // [queries, h_q]
  double largest_logit = 0;             // of all finite |x| met
};

inline Forward forward(const Inputs& in, std::span<const std::int64_t> queries) {
  Forward result;
  for (const std::int64_t i : queries) {
    const std::vector<Entry> entries = visible_entries(in, i);
    const std::vector<std::vector<double>> keys = gather(in, entries);
    for (std::int64_t h = 0; h < in.h_q(); ++h) {
      const std::vector<double> q = row_of(in.q, i, h);
      std::vector<double> x;
      double max_logit = -kInfinity;
      for (const std::vector<double>& key : keys) {
        x.push_back(in.logit_scale() * dot(q, key, in.d_qk()));
        if (!(max_logit >= x.back())) max_logit = std::isnan(max_logit) ? max_logit : x.back();
        note_logit(x.back(), result.largest_logit);
      }
      double sum = 0;
      for (const double logit : x) sum += std::exp(logit - max_logit);
      const double lse = std::isinf(max_logit) ? max_logit : max_logit + std::log(sum);
      const double denominator = lse_with_sink(lse, in.sink(h));
      std::vector<double> out(static_cast<std::size_t>(in.d_v()), 0.0);
      // Without a logit above -inf, or with a sink of inf, nothing has weight whatever it holds.
      const bool nothing = lse == -kInfinity || in.sink(h) == kInfinity;
      for (std::size_t e = 0; e < entries.size() && !nothing; ++e) {
        const double p = std::exp(x[e] - denominator);
        for (std::int64_t c = 0; c < in.d_v(); ++c) out[c] += p * keys[e][c];
      }
      result.out.insert(result.out.end(), out.begin(), out.end());
      result.max_logits.push_back(max_logit);
      result.lse.push_back(in.flash_mla_lse && lse == -kInfinity ? kInfinity : lse);
    }
  }
  return result;
}

}  // namespace winnow::sparse_mla::oracle
