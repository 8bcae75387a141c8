// A small valid problem with the tensors of forward, distribution and backward, for tests that make
// one argument invalid and expect an error. out and lse hold random numbers, not results of
// forward. Each operation is a type, so that one test can run on all three.
#pragma once

#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/testing/generate.h"

namespace winnow::sparse_mla {

// The error texts that tests expect contain these default sizes.
struct Sizes {
  std::int64_t s_q = 2, h_q = 3, s_kv = 5, topk = 4, d_qk = 512;
  DType dtype = DType::f32;
};

struct TestProblem {
  Tensor q, kv, indices, topk_length, attn_sink, d_out, delta;
  Tensor out, max_logits, lse;  // results of forward; out and lse are also inputs of backward
  Tensor attn_sum, dq, dkv, d_sink;

  explicit TestProblem(const Sizes& n = {})
      : q(n.dtype, {n.s_q, n.h_q, n.d_qk}),
        kv(n.dtype, {n.s_kv, 1, n.d_qk}),
        indices(DType::i32, {n.s_q, 1, n.topk}),
        topk_length(DType::i32, {n.s_q}),
        attn_sink(accumulator_of(n.dtype), {n.h_q}),
        d_out(n.dtype, {n.s_q, n.h_q, kValueDim}),
        delta(accumulator_of(n.dtype), {n.s_q, n.h_q}),
        out(n.dtype, {n.s_q, n.h_q, kValueDim}),
        max_logits(accumulator_of(n.dtype), {n.s_q, n.h_q}),
        lse(accumulator_of(n.dtype), {n.s_q, n.h_q}),
        attn_sum(accumulator_of(n.dtype), {n.s_q, n.topk}),
        dq(n.dtype, {n.s_q, n.h_q, n.d_qk}),
        dkv(accumulator_of(n.dtype), {n.s_kv, 1, n.d_qk}),
        d_sink(accumulator_of(n.dtype), {n.h_q}) {
    testing::Random random(1);
    for (Tensor* tensor : {&q, &kv, &attn_sink, &d_out, &delta, &out, &lse}) {
      testing::fill_normal(*tensor, random);
    }
    if (n.s_kv > 0) testing::fill_below(indices, random, n.s_kv);
    for (std::int32_t& length : topk_length.values<std::int32_t>()) {
      length = static_cast<std::int32_t>(n.topk);
    }
  }
};

struct ForwardOp {
  using Args = ForwardArgs;
  static constexpr const char* kName = "sparse_mla::forward";
  static Args args(TestProblem& p) {
    return {.q = p.q,
            .kv = p.kv,
            .indices = p.indices,
            .topk_length = p.topk_length,
            .attn_sink = p.attn_sink,
            .out = p.out,
            .max_logits = p.max_logits,
            .lse = p.lse};
  }
  static Backend run(const Args& args, const RunOptions& options = {}) {
    return forward(args, options);
  }
  static std::vector<Tensor*> outputs(TestProblem& p) { return {&p.out, &p.max_logits, &p.lse}; }
};

struct DistributionOp {
  using Args = DistributionArgs;
  static constexpr const char* kName = "sparse_mla::distribution";
  static Args args(TestProblem& p) {
    return {.q = p.q,
            .kv = p.kv,
            .indices = p.indices,
            .lse = p.lse,
            .topk_length = p.topk_length,
            .attn_sum = p.attn_sum};
  }
  static Backend run(const Args& args, const RunOptions& options = {}) {
    return distribution(args, options);
  }
  static std::vector<Tensor*> outputs(TestProblem& p) { return {&p.attn_sum}; }
};

struct BackwardOp {
  using Args = BackwardArgs;
  static constexpr const char* kName = "sparse_mla::backward";
  static Args args(TestProblem& p) {
    return {.q = p.q,
            .kv = p.kv,
            .indices = p.indices,
            .out = p.out,
            .lse = p.lse,
            .d_out = p.d_out,
            .topk_length = p.topk_length,
            .attn_sink = p.attn_sink,
            .dq = p.dq,
            .dkv = p.dkv,
            .d_sink = p.d_sink};
  }
  static Backend run(const Args& args, const RunOptions& options = {}) {
    return backward(args, options);
  }
  static std::vector<Tensor*> outputs(TestProblem& p) { return {&p.dq, &p.dkv, &p.d_sink}; }
};

}  // namespace winnow::sparse_mla
