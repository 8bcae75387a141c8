// compressor::step: the case table, the bits of forward(), states of prompts and of undone tokens,
// and what it refuses.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include <gtest/gtest.h>

#include "winnow/cache/cache_cases.h"
#include "winnow/compressor/cases.h"
#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/step/step.h"
#include "winnow/testing/expect.h"

namespace winnow::compressor {
namespace {

using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(CompressorStepCase, "compressor::step");

// One sequence of 45 tokens, and steps of some of them with a state of its own.
struct Stream {
  CaseShape shape;
  CaseInputs inputs;
  Tensor state, rows, cu_seqlens{DType::i32, {2}}, first{DType::i32, {1}}, slot{DType::i32, {1}};

  explicit Stream(const CaseShape& given, std::int64_t spare = 3)
      : shape(given),
        inputs(make_inputs(given)),
        state(DType::f32,
              {1, given.columns() / given.d * given.ratio + spare, 2 * given.columns()}),
        rows(given.dtype, {given.tokens(), given.d}) {
    winnow::testing::fill_unwritten(state);
    winnow::testing::fill_unwritten(rows);
  }
  StepArgs args(std::int64_t begin, std::int64_t end) {
    StepArgs args{.first_position = first, .state_slots = slot, .state = state};
    args.kv = inputs.kv.view.slice(0, begin, end);
    args.gate = inputs.gate.view.slice(0, begin, end);
    args.position_bias = inputs.position_bias.view;
    args.cu_seqlens = cu_seqlens;
    args.overlap = shape.overlap;
    args.norm_weight = inputs.norm_weight.view;
    args.cos = inputs.cos.view;
    args.sin = inputs.sin.view;
    args.hadamard = shape.hadamard;
    args.rows = rows.view().slice(0, begin, end);
    cu_seqlens.values<std::int32_t>()[1] = static_cast<std::int32_t>(end - begin);
    first.values<std::int32_t>()[0] = static_cast<std::int32_t>(begin);
    return args;
  }
  void take(std::int64_t begin, std::int64_t end) { step(args(begin, end)); }
  // The rows that forward() gives, at the places of the tokens that complete them.
  Tensor expected() {
    Tensor dense(shape.dtype, {shape.rows(), shape.d}), spread = rows.clone();
    ForwardArgs whole{.rows = dense};
    inputs.pass_to(whole);
    forward(whole);
    winnow::testing::fill_unwritten(spread);
    const std::int64_t bytes = shape.d * size_of(shape.dtype);
    for (std::int64_t w = 0; w < shape.rows(); ++w) {
      std::memcpy(static_cast<char*>(spread.data()) + ((w + 1) * shape.ratio - 1) * bytes,
                  static_cast<const char*>(dense.data()) + w * bytes, std::size_t(bytes));
    }
    return spread;
  }
};

std::vector<CaseShape> streams() {
  std::vector<CaseShape> list;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool overlap : {false, true}) {
      for (const std::int64_t ratio : {1, 4, 7}) {
        list.push_back({.name = "stream",
                        .dtype = dtype,
                        .lengths = {45},
                        .ratio = ratio,
                        .d = 128,
                        .overlap = overlap,
                        .norm = true,
                        .hadamard = true,
                        .pairs = 32,
                        .poison = false});
      }
    }
  }
  return list;
}

TEST(CompressorStep, GivesTheBitsOfForwardAndAPromptLeavesThoseOfItsTokens) {
  for (const CaseShape& shape : streams()) {
    Stream single(shape), chunks(shape), prompt(shape);
    for (int t = 0; t < 45; ++t) single.take(t, t + 1);
    for (const auto& [begin, end] : {std::pair(0, 2), {2, 30}, {30, 30}, {30, 33}, {33, 45}}) {
      chunks.take(begin, end);
    }
    prompt.take(0, 45);
    const Tensor expected = single.expected();
    for (Stream* stream : {&single, &chunks, &prompt}) {
      EXPECT_TRUE(winnow::testing::same_bytes(stream->rows, expected)) << describe(shape);
      EXPECT_TRUE(winnow::testing::same_bytes(stream->state, single.state)) << describe(shape);
    }
  }
}

TEST(CompressorStep, UndoneTokensLeaveNothing) {
  for (const CaseShape& shape : streams()) {
    for (std::int64_t spare : {0, 1, 4}) {
      const std::int64_t drafts = spare + 1;
      Stream kept(shape, spare), drafted(shape, spare);
      CaseShape others = shape;
      others.name = "drafts";
      Stream rejected(others, spare);
      for (std::int64_t t = 0; t < 45; ++t) {
        kept.take(t, t + 1);
        // Tokens of another text after this one, from the same state; then they are undone.
        const std::int64_t end = std::min<std::int64_t>(t + drafts, 45);
        StepArgs draft = rejected.args(t, end);
        draft.position_bias = drafted.inputs.position_bias.view;
        draft.state = drafted.state;
        step(draft);
        drafted.take(t, t + 1);
      }
      EXPECT_TRUE(winnow::testing::same_bytes(drafted.rows, kept.rows)) << describe(shape) << spare;
    }
  }
}

// One more is one too many: the case table and the test above would see what it destroys.
TEST(CompressorStep, MoreThanTheRingHoldsCannotBeUndone) {
  const CaseShape shape = streams()[1];  // plain, ratio 4
  Stream kept(shape, 0), drafted(shape, 0);
  kept.take(0, 8);
  drafted.take(0, 7);
  Stream other(shape, 0);
  other.inputs = make_inputs([&] {
    CaseShape s = shape;
    s.name = "drafts";
    return s;
  }());
  StepArgs draft = other.args(7, 9);  // token 8 takes the place of token 4
  draft.state = drafted.state;
  step(draft);
  drafted.take(7, 8);
  EXPECT_FALSE(winnow::testing::same_bytes(drafted.rows, kept.rows));
}

// Two windows of two tokens with equal gates, and the third slot of the ring.
TEST(CompressorStep, ByHand) {
  const CaseShape shape{.name = "hand",
                        .lengths = {45},
                        .ratio = 2,
                        .d = 8,
                        .overlap = false,
                        .gates = Gates::equal,
                        .poison = false};
  Stream stream(shape, 1);
  for (int t = 0; t < 4; ++t) stream.inputs.kv.view.at<float>(t, 0) = float(1 << t);
  stream.inputs.gate.view.at<float>(3, 0) = std::log(3.0f);
  stream.inputs.position_bias.view.at<float>(1, 7) = 5;
  stream.take(0, 1);
  EXPECT_EQ(winnow::testing::count_unwritten(stream.rows.view()), stream.rows.numel());
  stream.take(1, 4);
  EXPECT_FLOAT_EQ(stream.rows.view().at<float>(1, 0), 1.5f);
  EXPECT_FLOAT_EQ(stream.rows.view().at<float>(3, 0), (4 + 3 * 8) / 4.0f);
  EXPECT_EQ(winnow::testing::count_unwritten(stream.rows.view()), stream.rows.numel() - 16);
  const TensorView state = stream.state.view();  // token 3 has taken the place of token 0
  EXPECT_EQ(state.at<float>(0, 0, 0), 8);
  EXPECT_EQ(state.at<float>(0, 0, 8), std::log(3.0f));
  EXPECT_EQ(state.at<float>(0, 0, 15), 5);
  EXPECT_EQ(state.at<float>(0, 1, 0), 2);
  EXPECT_EQ(state.at<float>(0, 2, 0), 4);
  EXPECT_EQ(state.at<float>(0, 2, 15), 0);
}

TEST(CompressorStep, DoesNotDependOnThreads) {
  const CaseShape shape{.name = "threads",
                        .dtype = DType::bf16,
                        .lengths = std::vector<std::int64_t>(40, 11),
                        .norm = true,
                        .poison = false};
  const CaseInputs inputs = make_inputs(shape);
  Tensor first(DType::i32, {40}), slots(DType::i32, {40});
  std::iota(slots.values<std::int32_t>().begin(), slots.values<std::int32_t>().end(), 0);
  std::vector<Tensor> results;
  for (const int threads : {1, 3}) {
    const winnow::testing::Threads number(threads);
    Tensor state(DType::f32, {40, 8, 256}), rows(DType::bf16, {440, 64});
    StepArgs args{.first_position = first,
                  .state_slots = slots,
                  .overlap = true,
                  .state = state,
                  .rows = rows};
    args.kv = inputs.kv.view;
    args.gate = inputs.gate.view;
    args.position_bias = inputs.position_bias.view;
    args.cu_seqlens = inputs.cu_seqlens.view;
    args.norm_weight = inputs.norm_weight.view;
    step(args);
    results.push_back(std::move(state));
    results.push_back(std::move(rows));
  }
  EXPECT_TRUE(winnow::testing::same_bytes(results[0], results[2]));
  EXPECT_TRUE(winnow::testing::same_bytes(results[1], results[3]));
}

// The slots of `tokens` tokens: window w goes to slot 2 * w + 1, and those of tokens that complete
// none are of no window.
Tensor slots_of(std::int64_t first, std::int64_t tokens, std::int64_t ratio) {
  Tensor slots(DType::i32, {tokens});
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t done = first + t + 1;
    slots.view().at<std::int32_t>(t) =
        done % ratio == 0 ? static_cast<std::int32_t>(2 * (done / ratio) - 1) : 7;
  }
  return slots;
}

// One call, single tokens, drafts that are undone, and no rows besides: the same bytes.
TEST(CompressorStep, StoresTheSameBytesHoweverTokensCome) {
  for (const std::int64_t d : {512, 128}) {
    const CaseShape shape{.name = "stored",
                          .dtype = DType::bf16,
                          .lengths = {45},
                          .d = d,
                          .norm = true,
                          .hadamard = d == 128,
                          .pairs = 32,
                          .poison = false};
    CaseShape others = shape;
    others.name = "drafts";
    const auto bytes_of = [&](std::int64_t drafts, std::int64_t at_a_time, bool rows) {
      Stream stream(shape, drafts), rejected(others, drafts);
      testing::StridedTensor into =
          d == 512 ? sparse_mla::make_cache(sparse_mla::CacheFormat::fp8_584, 2, 16, 512)
                   : testing::make_output(DType::u8, {1, 64 * 132}, Layout::dense);
      const auto take = [&](StepArgs args, std::int64_t begin, std::int64_t end) {
        const Tensor slots = slots_of(begin, end - begin, shape.ratio);
        (d == 512 ? args.cache : args.pages) = into.view;
        args.slots = slots;
        if (!rows) args.rows = {};
        step(args);
      };
      for (std::int64_t t = 0; t < 45; t += at_a_time) {
        if (drafts > 0) {
          const std::int64_t end = std::min<std::int64_t>(t + drafts + 1, 45);
          StepArgs draft = rejected.args(t, end);
          draft.position_bias = stream.inputs.position_bias.view;
          draft.state = stream.state;
          take(draft, t, end);
        }
        const std::int64_t end = std::min<std::int64_t>(t + at_a_time, 45);
        take(stream.args(t, end), t, end);
      }
      return std::move(into.storage);
    };
    const Tensor prompt = bytes_of(0, 45, true);
    EXPECT_TRUE(winnow::testing::same_bytes(bytes_of(0, 1, true), prompt)) << d;
    EXPECT_TRUE(winnow::testing::same_bytes(bytes_of(0, 7, false), prompt)) << d;
    EXPECT_TRUE(winnow::testing::same_bytes(bytes_of(3, 1, false), prompt)) << d;
  }
}

TEST(CompressorStep, Refuses) {
  Tensor kv(DType::f32, {7, 16}), bias(DType::f32, {2, 16}), cos(DType::f32, {8, 2});
  Tensor cu_seqlens(DType::i32, {3}), first(DType::i32, {2}), slots(DType::i32, {2});
  Tensor state(DType::f32, {3, 4, 32}), rows(DType::f32, {7, 8});
  Tensor small(DType::f32, {3, 3, 32}), narrow(DType::f32, {3, 4, 16}), flat(DType::f32, {3, 32});
  Tensor brain(DType::bf16, {3, 4, 32}), three(DType::i32, {3}), wide(DType::i64, {2});
  Tensor few(DType::f32, {3, 8});
  const auto set = [](Tensor& tensor, std::initializer_list<std::int32_t> values) {
    std::copy(values.begin(), values.end(), tensor.values<std::int32_t>().begin());
  };
  winnow::testing::fill_unwritten(state);
  winnow::testing::fill_unwritten(rows);
  const auto reject = [&](const std::function<void(StepArgs&)>& bend, const std::string& text,
                          bool dry = true) {
    set(cu_seqlens, {0, 5, 7});
    set(first, {3, 0});
    set(slots, {2, 0});
    StepArgs args{.kv = kv,
                  .gate = kv,
                  .position_bias = bias,
                  .cu_seqlens = cu_seqlens,
                  .first_position = first,
                  .state_slots = slots,
                  .overlap = true,
                  .cos = cos,
                  .sin = cos,
                  .state = state,
                  .rows = rows};
    bend(args);
    expect_refused(step, args, "compressor::step: " + text, {state, rows}, dry);
  };
  using Args = StepArgs;
  reject([&](Args& a) { a.first_position = three; }, "first_position: want shape [n=2], got [3]");
  reject([](Args& a) { a.first_position = {}; },
         "first_position: want a tensor of shape [n=2], got none");
  reject([&](Args& a) { a.state_slots = wide; }, "state_slots: want dtype i32, got i64");
  reject([](Args& a) { a.state = {}; },
         "state: want a tensor [states, ring, 2 * columns], got none");
  reject([&](Args& a) { a.state = flat; },
         "state: want 3 dimensions [states, ring, 2 * columns], got shape [3, 32]");
  reject([&](Args& a) { a.state = narrow; },
         "state: want shape [states=3, ring=4, 2 * columns=32], got [3, 4, 16]");
  reject([&](Args& a) { a.state = brain; }, "state: want dtype f32, got bf16");
  reject([&](Args& a) { a.state = small; },
         "state: want a ring of at least 4 tokens, those of a window, got 3");
  reject([&](Args& a) { a.rows = few; }, "rows: want shape [tokens=7, d=8], got [3, 8]");
  reject([&](Args&) { set(slots, {2, 3}); },
         "state_slots: want slots below 3 states, got 3 for sequence 1", false);
  reject([&](Args&) { set(slots, {2, 2}); },
         "state_slots: want each state at most once, got state 2 for sequence 0 and sequence 1",
         false);
  reject([&](Args&) { set(first, {3, -2}); },
         "first_position: want positions of at least 0, got -2 for sequence 1", false);
  reject([&](Args&) { set(first, {3, 8}); },
         "cos: want a row for position 8, where a window of sequence 1 begins, got 8 rows", false);
  reject([&](Args&) { set(cu_seqlens, {0, 5, 6}); },
         "cu_seqlens: want 7 last, the tokens of kv, got 6", false);
  reject([&](Args& a) { a.rows = TensorView(state.data(), DType::f32, {7, 8}); },
         "rows: want memory apart from state, got memory that both use", false);
}

TEST(CompressorStep, RefusesToStore) {
  Tensor kv(DType::bf16, {5, 512}), bias(DType::f32, {2, 512}), cu_seqlens(DType::i32, {2}),
      first(DType::i32, {1}), state_slot(DType::i32, {1}), slots(DType::i32, {5}),
      state(DType::f32, {1, 2, 1024}), rows(DType::bf16, {5, 512}),
      cache(DType::bf16, {2, 3, 1, 512}), wide(DType::bf16, {2, 3, 1, 576}),
      narrow(DType::u8, {2, 3, 1, 656}), floats(DType::f32, {2, 3, 1, 512}), few(DType::i32, {4}),
      short_norm(DType::f32, {511}), keys(DType::u8, {1, 64 * 132}),
      small_kv(DType::bf16, {5, 128}), small_bias(DType::f32, {2, 128}),
      small_state(DType::f32, {1, 2, 256}), f64(DType::f64, {5, 512}),
      f64_bias(DType::f64, {2, 512}), f64_state(DType::f64, {1, 2, 1024}),
      odd_keys(DType::u8, {1, 64 * 131});
  cu_seqlens.values<std::int32_t>()[1] = 5;
  winnow::testing::fill_unwritten(cache);
  winnow::testing::fill_unwritten(state);
  const auto reject = [&](const std::function<void(StepArgs&)>& bend, const std::string& text,
                          bool dry = true) {
    std::ranges::copy(std::array{-1, 2, 99, 0, -7}, slots.values<std::int32_t>().begin());
    StepArgs args{.kv = kv,
                  .gate = kv,
                  .position_bias = bias,
                  .cu_seqlens = cu_seqlens,
                  .first_position = first,
                  .state_slots = state_slot,
                  .state = state,
                  .cache = cache,
                  .slots = slots};
    bend(args);
    expect_refused(step, args, "compressor::step: " + text, {cache, state}, dry);
  };
  using Args = StepArgs;
  const auto small = [&](Args& a) {
    a.kv = a.gate = small_kv;
    a.position_bias = small_bias;
    a.state = small_state;
  };
  reject([](Args& a) { a.cache = {}, a.slots = {}; }, "rows: want a tensor [tokens, d], got none");
  reject([&](Args& a) { a.norm_weight = short_norm; },
         "norm_weight: want shape [d=512], got [511]");
  reject([&](Args& a) { a.pages = keys; }, "pages: want none beside a cache, got a tensor");
  reject([](Args& a) { a.power_of_two = true; },
         "power_of_two: want false, where pages are absent, got true");
  reject([](Args& a) { a.slots = {}; },
         "slots: want a tensor [tokens], which cache and pages need, got none");
  reject([&](Args& a) { a.cache = {}, a.rows = rows; },
         "slots: want none, where cache and pages are absent, got a tensor");
  reject(
      [&](Args& a) {
        a.kv = a.gate = f64;
        a.position_bias = f64_bias;
        a.state = f64_state;
      },
      "cache: want none, where kv is f64, got a tensor");
  reject([&](Args& a) { a.cache = wide; }, "cache: want rows of d = 512 columns, got 576");
  reject([&](Args& a) { small(a); }, "cache: want rows of d = 128 columns, got 512");
  reject(
      [&](Args& a) { a.cache = narrow; },
      "cache: want [blocks, block_size, 1, 584] for the format fp8_584 (fp8_656 has rows of 656 "
      "bytes, fp8_584 of 584, fp8_576 of 576, bf16 of 576 or 512 elements), got a last dimension "
      "of 656");
  reject(
      [&](Args& a) { a.cache = floats; },
      "cache: want [blocks, block_size, 1, 584] for the format fp8_584 (fp8_656 has rows of 656 "
      "bytes, fp8_584 of 584, fp8_576 of 576, bf16 of 576 or 512 elements), got a last dimension "
      "of 512");
  reject([&](Args& a) { a.cache = {}, a.pages = keys; },
         "pages: want none, unless d is 128 or 64, got a tensor, and d = 512");
  reject([&](Args& a) { small(a), a.cache = {}, a.pages = odd_keys; },
         "pages: want shape [num_pages=1, 64 * (d + 4)=8448], got [1, 8384]");
  reject([&](Args& a) { a.slots = few; }, "slots: want shape [tokens=5], got [4]");
  reject([&](Args&) { slots.values<std::int32_t>()[3] = 6; },
         "slots: want slots below 2 blocks * 3 slots, got slot 6 for token 3", false);
  reject([&](Args&) { slots.values<std::int32_t>()[3] = 2; },
         "slots: want each slot at most once, got slot 2 for token 1 and token 3", false);
  reject(
      [&](Args& a) {
        small(a), a.cache = {}, a.pages = keys, slots.values<std::int32_t>()[3] = 64;
      },
      "slots: want slots below 1 pages * 64 slots, got slot 64 for token 3", false);
  reject([&](Args& a) { a.rows = TensorView(cache.data(), DType::bf16, {5, 512}); },
         "cache: want memory apart from rows, got memory that both use", false);
}

}  // namespace
}  // namespace winnow::compressor
