// That decode() and forward() give the same bits of the same rows in bf16, where both sum in the
// order of the list. Only for tests: needs GoogleTest.
#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/sparse_mla/decode/decode_step_cases.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {

// Steps over bf16 caches: tiles and blocks that are full and not, more heads than one block has, a
// second cache, entries that are absent, nothing to see.
inline std::vector<DecodeCase> steps_beside_forward() {
  constexpr CacheFormat kFormat = CacheFormat::bf16;
  return {
      {.name = "short", .format = kFormat, .b = 3, .s_q = 2, .h_q = 16, .sink = Sink::finite},
      {.name = "long",
       .format = kFormat,
       .b = 1,
       .h_q = 70,
       .topk = 400,
       .blocks = 8,
       .choice = Choice::scattered,
       .lengths = Lengths::ragged,
       .logits = 4},
      {.name = "two",
       .format = kFormat,
       .b = 2,
       .h_q = 9,
       .topk = 200,
       .lengths = Lengths::ragged,
       .extra_topk = 90,
       .sink = Sink::mixed},
      {.name = "narrow",
       .format = kFormat,
       .columns = 512,
       .b = 2,
       .h_q = 33,
       .topk = 200,
       .choice = Choice::some_nothing,
       .extra_topk = 40},
      {.name = "one", .format = kFormat, .b = 2, .h_q = 1, .topk = 1},
  };
}

// The call of forward() over the rows of a step, whose tensors are dense; without outputs. Lengths
// of a sequence are those of each of its queries: s_q is 1 where there are any.
inline ForwardArgs forward_args(const DecodeStep& step) {
  const auto flat = [](const StridedTensor& tensor, std::vector<std::int64_t> shape) {
    return tensor.view.present() ? ConstTensorView(tensor.view.data(), tensor.view.dtype(), shape,
                                                   tensor.view.device())
                                 : ConstTensorView();
  };
  const DecodeCase& shape = step.shape;
  const std::int64_t queries = shape.b * shape.s_q, d = step.q.view.size(3);
  return {
      .q = flat(step.q, {queries, shape.h_q, d}),
      .kv = flat(step.chosen.cache, {shape.blocks * shape.block_size, 1, d}),
      .indices = flat(step.chosen.indices, {queries, shape.topk}),
      .topk_length = step.chosen.topk_length.view,
      .attn_sink = step.attn_sink.view,
      .scale = shape.scale,
      .extra_kv = flat(step.extra.cache, {shape.extra_blocks * shape.extra_block_size, 1, d}),
      .extra_indices = flat(step.extra.indices, {queries, shape.extra_topk}),
      .extra_topk_length = step.extra.topk_length.view,
      .in_list_order = true,
  };
}

inline void expect_bits_of_forward(const DecodeCase& shape, Device device) {
  const DecodeStep step = DecodeStep(shape).on(device);
  DecodeArgs args = step.args();
  args.in_list_order = true;
  Tensor scratch(DType::u8, {decode_workspace_bytes(args)}, device);
  args.workspace = scratch;
  decode(args);
  const std::int64_t queries = shape.b * shape.s_q;
  for (const bool hands_on : {false, true}) {
    Tensor out(DType::bf16, {queries, shape.h_q, 512}, device);
    Tensor lse(DType::f32, {queries, shape.h_q}, device);
    ForwardArgs beside = forward_args(step);
    beside.out = out;
    beside.lse = lse;
    Tensor workspace(DType::u8, {hands_on ? forward_workspace_bytes(beside) : 0}, device);
    if (hands_on) beside.workspace = workspace;
    forward(beside);
    synchronize(device);
    const auto read = [](const StridedTensor& tensor) {
      return testing::read(testing::on({}, tensor).view);
    };
    EXPECT_EQ(read(step.out), testing::read(out.to({}))) << shape.name;
    EXPECT_EQ(read(step.lse), testing::read(lse.to({}))) << shape.name;
  }
}

}  // namespace winnow::sparse_mla
