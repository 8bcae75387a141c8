// Decode on the CPU: the rows of each query are dequantised in blocks and join a running softmax.
// The blocks are the same whatever the batch and the threads are, and those of forward(), and so
// are the results.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "winnow/cpu/convert.h"
#include "winnow/sparse_mla/decode/decode_impl.h"
#include "winnow/sparse_mla/softmax_cpu.h"

namespace winnow::sparse_mla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// to[c] = bf16(f8[c] * scale)
void dequantise_group(const std::uint8_t* f8, std::int64_t count, float scale, float* to) {
  for (std::int64_t c = 0; c < count; ++c) {
    const float value = static_cast<float>(std::bit_cast<Float8E4M3>(f8[c]));
    to[c] = static_cast<float>(BFloat16(value * scale));
  }
}

// Caches may be unaligned memory, of which bf16 and f32 are copied by bytes.
void load_brain(const std::uint8_t* from, std::int64_t count, float* to) {
  BFloat16 brain[Row656::kColumns];
  std::memcpy(brain, from, static_cast<std::size_t>(count) * sizeof(BFloat16));
  load_f32(DType::bf16, brain, 0, count, to);
}

void load_row(const Cache<const std::uint8_t>& cache, std::int64_t slot, float* to) {
  const std::uint8_t* row = cache.row(slot);
  switch (cache.format) {
    case CacheFormat::fp8_656: {
      float scales[Row656::kGroups];
      std::memcpy(scales, row + Row656::kScaleOffset, sizeof scales);
      for (std::int64_t g = 0; g < Row656::kGroups; ++g) {
        const std::int64_t first = g * Row656::kGroup;
        dequantise_group(row + first, Row656::kGroup, scales[g], to + first);
      }
      load_brain(row + Row656::kRopeOffset, Row656::kRope, to + Row656::kQuantised);
      return;
    }
    case CacheFormat::fp8_584: {
      const std::uint8_t* scales = cache.scales_584(slot);
      for (std::int64_t g = 0; g < Row584::kGroups; ++g) {
        const std::int64_t first = g * Row584::kGroup;
        dequantise_group(row + first, Row584::kGroup, ue8m0_to_f32(scales[g]), to + first);
      }
      load_brain(row + Row584::kRopeOffset, Row584::kRope, to + Row584::kQuantised);
      return;
    }
    case CacheFormat::fp8_576:
      dequantise_group(row, Row576::kColumns, 1, to);
      return;
    case CacheFormat::bf16:
      load_brain(row, cache.columns, to);
      return;
  }
}

// The heads of an item share the dequantised rows.
HeadItems items_of(const DecodeParams& params) { return {params.h_q, 32}; }

float value_of(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

struct Scratch {
  RunningSoftmax<float> softmax;
  // The visible ones of a query, those of the second cache behind the others.
  std::vector<std::int32_t> slots;
  Index visible = 0;

  explicit Scratch(const DecodeParams& params)
      : softmax(items_of(params).most(), params.d_qk),
        slots(static_cast<std::size_t>(params.chosen.topk + params.extra.topk)) {}

  void add(const ChosenRows& chosen, std::int64_t i, std::int64_t s) {
    const std::int64_t entries = chosen.topk > 0 ? chosen.entries(i, s) : 0;
    for (std::int64_t j = 0; j < entries; ++j) {
      const std::int64_t slot = chosen.slot(i, s, j);
      if (!chosen.cache.holds(slot)) continue;
      slots[static_cast<std::size_t>(visible++)] = static_cast<std::int32_t>(slot);
    }
  }
};

// What logits and values of a call are multiplied by.
struct Scales {
  float logits, values;
};

void decode_query(const DecodeParams& params, const Scales& scales, std::int64_t i, std::int64_t s,
                  std::int64_t first, Index heads, Scratch& scratch, const Executor& executor) {
  RunningSoftmax<float>& softmax = scratch.softmax;
  for (Index h = 0; h < heads; ++h) {
    load_f32(DType::bf16, params.q.data, params.q.offset(i, s, first + h), params.d_qk,
             softmax.q.row(h).data());
  }
  softmax.reset();
  scratch.visible = 0;
  scratch.add(params.chosen, i, s);
  const Index of_first = scratch.visible;
  scratch.add(params.extra, i, s);
  for (Index begin = 0; begin < scratch.visible && !executor.stopped(); begin += kBlock) {
    const Index count = std::min(kBlock, scratch.visible - begin);
    for (Index r = 0; r < count; ++r) {
      const auto& cache = (begin + r < of_first ? params.chosen : params.extra).cache;
      load_row(cache, scratch.slots[static_cast<std::size_t>(begin + r)],
               softmax.rows.row(r).data());
    }
    softmax.accumulate(heads, count, scales.logits);
  }
  for (Index h = 0; h < heads; ++h) {
    const float sink = params.attn_sink.present() ? params.attn_sink.data[first + h] : -kInfinity;
    const float lse = softmax.finish(h, sink, params.lse_of_nothing);
    if (scales.values != 1.0f) softmax.sum.row(h) *= scales.values;
    store_f32(DType::bf16, softmax.sum.row(h).data(), kValueColumns, params.out.data,
              params.out.offset(i, s, first + h));
    if (params.lse.present()) params.lse.data[params.lse.offset(i, s, first + h)] = lse;
  }
}

}  // namespace

void decode_cpu(const DecodeParams& params, const Executor& executor) {
  const HeadItems items = items_of(params);
  const float values = value_of(params.kv_scale);
  const Scales scales{params.scale * (value_of(params.q_scale) * values), values};
  const std::int64_t ranges = params.b * params.s_q * items.count;
  auto scratch = scratch_of_workers<Scratch>(executor, ranges, params);
  executor.for_each_range(ranges, 1, [&](std::int64_t item, std::int64_t, int worker) {
    const std::int64_t query = item / items.count;
    const Index part = item % items.count;
    decode_query(params, scales, query / params.s_q, query % params.s_q, items.first(part),
                 items.size(part), scratch[static_cast<std::size_t>(worker)], executor);
  });
}

}  // namespace winnow::sparse_mla
