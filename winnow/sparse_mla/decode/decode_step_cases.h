// The problems on which sparse_mla::decode is tested and timed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "winnow/cache/cache_cases.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/decode/decode.h"

namespace winnow::sparse_mla {

struct DecodeCase {
  std::string name;
  CacheFormat format = CacheFormat::fp8_656;
  std::int64_t columns = 576;  // of bf16
  std::int64_t b = 2, s_q = 1, h_q = 8, topk = 64;
  std::int64_t blocks = 6, block_size = 64;
  Choice choice = Choice::distinct;  // distinct, repeated, scattered, some_nothing or nothing
  Lengths lengths = Lengths::absent;
  bool length_per_query = false;
  std::int64_t length_stride = 1;  // of the lengths over their last dimension
  // Block tables in place of indices, with that many blocks each; -1: none. `choice` and `lengths`
  // are those of their entries and of the contexts.
  std::int64_t table = -1;
  bool causal = true;            // of lengths [b]
  std::int64_t extra_topk = -1;  // of the second cache; -1: none
  std::int64_t extra_blocks = 3, extra_block_size = 32;
  Sink sink = Sink::absent;
  Layout layout = Layout::dense;
  std::optional<double> scale{};
  double logits = 1;                 // standard deviation of the logits
  bool odd_scales = false;           // of fp8_656: any f32, not powers of two
  std::int64_t zero_slots = 0;       // the first ones of the first cache, whose bytes are 0
  double q_scale = 0, kv_scale = 0;  // of fp8_576; 0: absent
  bool poison = true;                // rows that no query chose are NaN
  bool batch_invariant = true;
  bool flash_mla_lse = false;
};

std::string describe(const DecodeCase& shape);

// One cache of a step, and what is chosen of it: by block tables where the case has them.
struct ChosenTensors {
  StridedTensor cache, indices, topk_length, block_tables, context_lens;
  ChosenTensors on(Device device) const;
};

// A step's tensors. The same for the same shape on every platform.
struct DecodeStep {
  explicit DecodeStep(const DecodeCase& shape);
  DecodeStep on(Device device) const;
  // Without workspace; the views are those of this step.
  DecodeArgs args() const;

  DecodeCase shape;
  StridedTensor q, attn_sink, q_scale, kv_scale, out, lse;
  ChosenTensors chosen, extra;
};

}  // namespace winnow::sparse_mla
