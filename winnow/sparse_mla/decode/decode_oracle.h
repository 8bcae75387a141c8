// The formula of sparse_mla::decode in double precision: forward() over the dequantised rows that a
// query sees. It shares no code with any backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "winnow/cache/cache_oracle.h"
#include "winnow/sparse_mla/decode/decode.h"
#include "winnow/sparse_mla/forward/forward_oracle.h"

namespace winnow::sparse_mla::oracle {

// The slots of one cache that query s of sequence i sees.
inline std::vector<std::int64_t> visible_slots(const ConstTensorView& cache,
                                               const ConstTensorView& indices,
                                               const ConstTensorView& topk_length, std::int64_t i,
                                               std::int64_t s) {
  std::vector<std::int64_t> slots;
  if (!cache.present()) return slots;
  std::int64_t length = indices.size(2);
  if (topk_length.present()) {
    const std::int64_t given = topk_length.rank() == 2 ? topk_length.at<std::int32_t>(i, s)
                                                       : topk_length.at<std::int32_t>(i);
    length = std::clamp<std::int64_t>(given, 0, length);
  }
  for (std::int64_t j = 0; j < length; ++j) {
    const std::int64_t slot = indices.at<std::int32_t>(i, s, j);
    if (slot >= 0 && slot < cache.size(0) * cache.size(1)) slots.push_back(slot);
  }
  return slots;
}

// The slots of the positions that query s of sequence i sees.
inline std::vector<std::int64_t> paged_slots(const DecodeArgs& args, std::int64_t i,
                                             std::int64_t s) {
  std::vector<std::int64_t> slots;
  const std::int64_t blocks = args.cache.size(0), block_size = args.cache.size(1);
  const std::int64_t room = args.block_tables.size(1) * block_size, s_q = args.q.size(1);
  std::int64_t seen = 0;
  if (args.context_lens.rank() == 2) {
    seen = std::clamp<std::int64_t>(args.context_lens.at<std::int32_t>(i, s), 0, room);
  } else {
    seen = std::clamp<std::int64_t>(args.context_lens.at<std::int32_t>(i), 0, room);
    if (args.causal) seen += s + 1 - s_q;
  }
  for (std::int64_t t = 0; t < seen; ++t) {
    const std::int64_t block = args.block_tables.at<std::int32_t>(i, t / block_size);
    if (block >= 0 && block < blocks) slots.push_back(block * block_size + t % block_size);
  }
  return slots;
}

// cache_row() of a cache that is only read.
inline std::vector<double> row_at(const ConstTensorView& cache, CacheFormat format,
                                  std::int64_t slot) {
  const TensorView writable(const_cast<void*>(cache.data()), cache.dtype(), cache.shape(),
                            cache.strides());
  return dequantised(cache_row(writable, format, slot), format);
}

struct Decode {
  std::vector<double> out;   // [b, s_q, h_q, 512]
  std::vector<double> lse;   // [b, s_q, h_q]
  double largest_logit = 0;  // of all finite |x| met
};

inline Decode decode(const DecodeArgs& args) {
  Decode result;
  const auto value_of = [](const ConstTensorView& scale) {
    return scale.present() ? double(scale.at<float>(0)) : 1.0;
  };
  const double values = value_of(args.kv_scale), logits = value_of(args.q_scale) * values;
  const std::int64_t h_q = args.q.size(2), d_qk = args.q.size(3);
  for (std::int64_t i = 0; i < args.q.size(0); ++i) {
    for (std::int64_t s = 0; s < args.q.size(1); ++s) {
      std::vector<double> rows;
      const auto add_rows = [&](const ConstTensorView& cache,
                                const std::vector<std::int64_t>& slots) {
        for (const std::int64_t slot : slots) {
          const std::vector<double> row = row_at(cache, args.format, slot);
          rows.insert(rows.end(), row.begin(), row.end());
        }
      };
      add_rows(args.cache, args.block_tables.present()
                               ? paged_slots(args, i, s)
                               : visible_slots(args.cache, args.indices, args.topk_length, i, s));
      add_rows(args.extra_cache,
               visible_slots(args.extra_cache, args.extra_indices, args.extra_topk_length, i, s));
      std::vector<double> q = winnow::testing::read(args.q.slice(0, i, i + 1).slice(1, s, s + 1));
      Inputs in;
      in.q = ConstTensorView(q.data(), DType::f64, {1, h_q, d_qk});
      in.kv = ConstTensorView(rows.data(), DType::f64,
                              {static_cast<std::int64_t>(rows.size()) / d_qk, 1, d_qk});
      in.attn_sink = args.attn_sink;
      in.scale = args.scale.value_or(1 / std::sqrt(double(d_qk))) * logits;
      in.flash_mla_lse = args.flash_mla_lse;
      const std::int64_t only[] = {0};
      Forward one = forward(in, only);
      for (double& value : one.out) value *= values;
      result.out.insert(result.out.end(), one.out.begin(), one.out.end());
      result.lse.insert(result.lse.end(), one.lse.begin(), one.lse.end());
      result.largest_logit = std::max(result.largest_logit, one.largest_logit);
    }
  }
  return result;
}

}  // namespace winnow::sparse_mla::oracle
