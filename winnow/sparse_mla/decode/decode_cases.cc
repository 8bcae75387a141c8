// The case table of sparse_mla::decode: each shape in every format against the oracle.
#include "winnow/sparse_mla/decode/decode_contract.h"
#include "winnow/sparse_mla/decode/decode_oracle.h"
#include "winnow/sparse_mla/decode/decode_step_cases.h"
#include "winnow/testing/repeated.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> decode_benchmarks();
testing::Operation decode_operation();

namespace {

using testing::numbered;

// The tolerance table, for f8 and bf16 alike: the oracle dequantises as the backends do.
testing::Tolerance out_tolerance() { return {1e-2, testing::RelativeTo::tensor, 1e-5}; }
testing::Tolerance lse_tolerance(double largest_logit) {
  return {1e-4 + 8 * 0x1p-23 * largest_logit, testing::RelativeTo::nothing};
}

std::vector<DecodeCase> make_cases() {
  std::vector<DecodeCase> list;
  const auto add_format = [&list](DecodeCase shape, CacheFormat format, std::int64_t columns) {
    shape.format = format;
    shape.columns = columns;
    shape.name = name_of(format, columns) + "-" + shape.name;
    list.push_back(shape);
  };
  const auto add_case = [&](const DecodeCase& shape) {
    add_format(shape, CacheFormat::fp8_656, 576);
    add_format(shape, CacheFormat::fp8_584, 512);
    add_format(shape, CacheFormat::bf16, 576);
    add_format(shape, CacheFormat::bf16, 512);
  };
  const auto add_scaled = [&](DecodeCase shape) {
    shape.q_scale = 1.7;
    shape.kv_scale = 0.45;
    add_format(shape, CacheFormat::fp8_576, 576);
  };
  // Sizes.
  for (const std::int64_t heads : {1, 3, 8, 16, 32, 64, 96, 128, 129, 192}) {
    add_case({.name = numbered("h", heads), .h_q = heads});
  }
  for (const std::int64_t topk : {0, 1, 63, 100, 192, 512, 2048}) {
    add_case({.name = numbered("k", topk), .b = 1, .topk = topk, .blocks = 33});
  }
  add_case({.name = "sq2-h16", .b = 3, .s_q = 2, .h_q = 16});
  add_case({.name = "sq8", .b = 1, .s_q = 8});
  add_case({.name = "b9", .b = 9, .h_q = 4});
  add_case({.name = "no-sequence", .b = 0});
  add_case({.name = "no-query", .s_q = 0});
  add_case({.name = "no-head", .h_q = 0});
  add_case({.name = "no-block", .topk = 5, .blocks = 0, .choice = Choice::scattered});
  add_case({.name = "empty-blocks", .topk = 5, .block_size = 0, .choice = Choice::scattered});
  add_case({.name = "block1", .blocks = 70, .block_size = 1});
  add_case({.name = "block2", .blocks = 70, .block_size = 2});
  add_case({.name = "block128", .blocks = 3, .block_size = 128});
  add_case({.name = "scale", .scale = 0.02});
  // Which entries count.
  add_case({.name = "repeated", .blocks = 1, .choice = Choice::repeated});
  add_case({.name = "scattered", .h_q = 16, .choice = Choice::scattered});
  add_case({.name = "some-nothing", .b = 3, .s_q = 2, .choice = Choice::some_nothing});
  add_case({.name = "nothing", .choice = Choice::nothing});
  add_case({.name = "length-zero", .lengths = Lengths::zero});
  add_case({.name = "length-one", .lengths = Lengths::one});
  add_case({.name = "length-ragged",
            .b = 5,
            .s_q = 2,
            .choice = Choice::scattered,
            .lengths = Lengths::ragged});
  add_case({.name = "length-query",
            .b = 3,
            .s_q = 4,
            .lengths = Lengths::ragged,
            .length_per_query = true});
  add_case({.name = "length-query-gaps",
            .b = 3,
            .s_q = 2,
            .lengths = Lengths::ragged,
            .length_per_query = true,
            .length_stride = 2});
  add_case({.name = "length-out-of-range", .b = 4, .lengths = Lengths::out_of_range});
  // The second cache.
  add_case({.name = "extra", .h_q = 16, .extra_topk = 40});
  add_case({.name = "extra-sq2-length",
            .b = 3,
            .s_q = 2,
            .choice = Choice::scattered,
            .lengths = Lengths::ragged,
            .extra_topk = 70,
            .sink = Sink::finite});
  add_case({.name = "extra-length-query",
            .b = 2,
            .s_q = 3,
            .lengths = Lengths::ragged,
            .length_per_query = true,
            .extra_topk = 90});
  add_case({.name = "extra-none-chosen", .extra_topk = 0});
  add_case({.name = "extra-alone", .topk = 0, .extra_topk = 33});
  add_case({.name = "extra-nothing", .choice = Choice::nothing, .extra_topk = 33});
  add_case({.name = "extra-large",
            .b = 1,
            .h_q = 64,
            .topk = 512,
            .blocks = 12,
            .extra_topk = 128,
            .extra_blocks = 4,
            .extra_block_size = 64});
  // Splits that hang on the batch: several for a query, and between queries.
  add_case({.name = "k2048-batch",
            .b = 1,
            .topk = 2048,
            .blocks = 33,
            .sink = Sink::finite,
            .batch_invariant = false});
  add_case({.name = "sq3-length-batch",
            .b = 1,
            .s_q = 3,
            .topk = 1000,
            .blocks = 33,
            .lengths = Lengths::ragged,
            .length_per_query = true,
            .extra_topk = 90,
            .batch_invariant = false});
  // Both blocks of 64 heads, in several pieces each.
  add_case({.name = "h128-k512", .b = 1, .h_q = 128, .topk = 512, .blocks = 12});
  add_case({.name = "h128-length-batch",
            .b = 3,
            .s_q = 2,
            .h_q = 128,
            .topk = 320,
            .blocks = 12,
            .choice = Choice::scattered,
            .lengths = Lengths::ragged,
            .length_per_query = true,
            .extra_topk = 70,
            .sink = Sink::finite,
            .batch_invariant = false});
  // More blocks of 64 heads than two, the last one not full: whole queries, and parts that one
  // kernel merges or the other.
  add_case({.name = "h300-extra",
            .h_q = 300,
            .topk = 100,
            .lengths = Lengths::ragged,
            .extra_topk = 40,
            .sink = Sink::mixed,
            .batch_invariant = false});
  add_case({.name = "h300-batch",
            .b = 1,
            .h_q = 300,
            .topk = 500,
            .blocks = 8,
            .extra_topk = 70,
            .sink = Sink::finite,
            .batch_invariant = false});
  add_case({.name = "h200-invariant",
            .b = 1,
            .h_q = 200,
            .topk = 1100,
            .blocks = 18,
            .sink = Sink::finite});
  // Short calls, whose queries are cut into up to as many parts as there are tiles: the last part
  // shorter than the others; empty ones, by their length or as nothing is chosen; one head and 65,
  // which leave most of a block of heads; parts that begin in the second cache; few and many.
  add_case({.name = "parts-h65",
            .b = 1,
            .s_q = 2,
            .h_q = 65,
            .topk = 1100,
            .blocks = 18,
            .sink = Sink::mixed,
            .batch_invariant = false});
  add_case({.name = "parts-h1-length",
            .b = 2,
            .s_q = 2,
            .h_q = 1,
            .topk = 700,
            .blocks = 11,
            .lengths = Lengths::ragged,
            .length_per_query = true,
            .extra_topk = 330,
            .extra_blocks = 11,
            .sink = Sink::finite,
            .batch_invariant = false});
  add_case({.name = "parts-nothing",
            .b = 2,
            .s_q = 2,
            .h_q = 128,
            .topk = 260,
            .blocks = 5,
            .choice = Choice::some_nothing,
            .sink = Sink::finite,
            .batch_invariant = false});
  add_case({.name = "parts-length-one",
            .b = 3,
            .h_q = 20,
            .topk = 500,
            .blocks = 8,
            .lengths = Lengths::one,
            .batch_invariant = false});
  add_case({.name = "parts-length-zero",
            .b = 1,
            .h_q = 64,
            .topk = 500,
            .blocks = 8,
            .lengths = Lengths::zero,
            .extra_topk = 130,
            .extra_blocks = 5,
            .batch_invariant = false});
  add_case({.name = "parts-invariant-h100",
            .b = 1,
            .s_q = 2,
            .h_q = 100,
            .topk = 2200,
            .blocks = 35,
            .lengths = Lengths::ragged,
            .extra_topk = 900,
            .extra_blocks = 29,
            .sink = Sink::finite});
  // Queries that see nothing, among others: of one block each, of blocks side by side, and in
  // parts.
  add_case({.name = "flash-mla-lse",
            .b = 3,
            .s_q = 2,
            .choice = Choice::some_nothing,
            .flash_mla_lse = true});
  for (const bool invariant : {true, false}) {
    add_case({.name = invariant ? "flash-mla-lse-k2048" : "flash-mla-lse-batch",
              .b = 1,
              .s_q = 2,
              .topk = 2048,
              .blocks = 33,
              .choice = Choice::some_nothing,
              .batch_invariant = invariant,
              .flash_mla_lse = true});
  }
  // Sinks.
  add_case({.name = "sink", .h_q = 16, .sink = Sink::finite});
  add_case({.name = "sink-minus-inf", .sink = Sink::minus_inf});
  add_case({.name = "sink-plus-inf", .sink = Sink::plus_inf});
  add_case({.name = "sink-mixed-nothing",
            .b = 3,
            .h_q = 16,
            .choice = Choice::some_nothing,
            .sink = Sink::mixed});
  // Memory.
  for (const Layout layout : {Layout::wide, Layout::reversed, Layout::broadcast}) {
    const std::string name = layout == Layout::wide       ? "wide"
                             : layout == Layout::reversed ? "reversed"
                                                          : "broadcast";
    add_case({.name = name,
              .b = 3,
              .s_q = 2,
              .h_q = 3,
              .lengths = Lengths::ragged,
              .length_per_query = true,
              .extra_topk = 20,
              .layout = layout});
  }
  // All rows of a sequence.
  const auto add_paged = [&](DecodeCase shape) {
    if (shape.table < 0) shape.table = 4;
    add_case(shape);
    add_scaled(shape);
  };
  add_paged({.name = "paged"});
  add_paged(
      {.name = "paged-sq3", .b = 3, .s_q = 3, .lengths = Lengths::ragged, .sink = Sink::finite});
  add_paged({.name = "paged-length-query",
             .b = 3,
             .s_q = 3,
             .lengths = Lengths::ragged,
             .length_per_query = true});
  add_paged({.name = "paged-length-for-all-queries",
             .b = 3,
             .s_q = 3,
             .lengths = Lengths::ragged,
             .length_per_query = true,
             .length_stride = 0});
  add_paged({.name = "paged-all-queries-see-all",
             .b = 3,
             .s_q = 3,
             .lengths = Lengths::ragged,
             .causal = false});
  add_paged({.name = "paged-length-gaps",
             .b = 3,
             .s_q = 2,
             .lengths = Lengths::ragged,
             .length_stride = 3});
  add_paged({.name = "paged-length-zero", .s_q = 2, .lengths = Lengths::zero});
  add_paged({.name = "paged-length-one", .s_q = 2, .lengths = Lengths::one});
  add_paged(
      {.name = "paged-length-out-of-range", .b = 4, .s_q = 3, .lengths = Lengths::out_of_range});
  add_paged({.name = "paged-query-out-of-range",
             .s_q = 4,
             .lengths = Lengths::out_of_range,
             .length_per_query = true});
  add_paged({.name = "paged-repeated", .blocks = 2, .choice = Choice::repeated});
  add_paged({.name = "paged-scattered",
             .b = 3,
             .s_q = 2,
             .choice = Choice::scattered,
             .lengths = Lengths::ragged});
  add_paged({.name = "paged-nothing", .choice = Choice::nothing, .sink = Sink::finite});
  add_paged({.name = "paged-flash-mla-lse",
             .b = 3,
             .s_q = 2,
             .choice = Choice::some_nothing,
             .flash_mla_lse = true});
  add_paged({.name = "paged-no-table", .table = 0});
  add_paged({.name = "paged-no-block", .blocks = 0, .choice = Choice::scattered});
  add_paged({.name = "paged-empty-blocks", .block_size = 0});
  add_paged({.name = "paged-block1", .blocks = 80, .block_size = 1, .table = 70});
  add_paged({.name = "paged-block3",
             .blocks = 60,
             .block_size = 3,
             .lengths = Lengths::ragged,
             .table = 50});
  add_paged({.name = "paged-block128",
             .s_q = 2,
             .blocks = 5,
             .block_size = 128,
             .lengths = Lengths::ragged});
  add_paged({.name = "paged-h128-batch",
             .b = 1,
             .s_q = 2,
             .h_q = 128,
             .blocks = 24,
             .table = 20,
             .sink = Sink::finite,
             .batch_invariant = false});
  add_paged({.name = "paged-h70-ragged-batch",
             .b = 5,
             .h_q = 70,
             .blocks = 24,
             .lengths = Lengths::ragged,
             .table = 20,
             .batch_invariant = false});
  add_paged(
      {.name = "paged-long", .h_q = 64, .blocks = 45, .lengths = Lengths::ragged, .table = 40});
  for (const auto& [name, layout] :
       {std::pair("paged-wide", Layout::wide), std::pair("paged-reversed", Layout::reversed),
        std::pair("paged-broadcast", Layout::broadcast)}) {
    add_paged({.name = name,
               .b = 3,
               .s_q = 2,
               .h_q = 3,
               .lengths = Lengths::ragged,
               .length_per_query = true,
               .layout = layout});
  }
  // One scale of the queries, and one of all rows.
  add_format({.name = "paged-no-scale", .table = 4}, CacheFormat::fp8_576, 576);
  add_format(
      {.name = "paged-negative-q-scale", .h_q = 64, .blocks = 12, .table = 9, .q_scale = -0.6},
      CacheFormat::fp8_576, 576);
  add_format({.name = "paged-kv-scale-batch",
              .h_q = 70,
              .blocks = 24,
              .table = 20,
              .kv_scale = 3,
              .batch_invariant = false},
             CacheFormat::fp8_576, 576);
  add_scaled({.name = "h40", .h_q = 40});
  add_scaled({.name = "extra-sq2-length",
              .b = 3,
              .s_q = 2,
              .choice = Choice::scattered,
              .lengths = Lengths::ragged,
              .extra_topk = 70,
              .sink = Sink::mixed});
  // Numbers.
  add_case({.name = "logits-30", .logits = 30});
  add_case({.name = "logits-3000", .sink = Sink::finite, .logits = 3000});
  add_case({.name = "no-poison", .poison = false});
  // Rows that nothing was written to: beside others, and in whole tiles before others.
  add_case({.name = "zero-rows", .zero_slots = 200});
  add_case({.name = "zero-rows-alone", .sink = Sink::finite, .zero_slots = 384});
  add_case({.name = "zero-rows-extra", .extra_topk = 70, .zero_slots = 384});
  for (const std::int64_t heads : {8, 64, 128}) {
    list.push_back(
        {.name = numbered("fp8_656-odd-scales-h", heads), .h_q = heads, .odd_scales = true});
  }
  return list;
}

testing::CaseOutcome run(const DecodeCase& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  const DecodeStep step(shape);
  const DecodeStep there = step.on(device);
  DecodeArgs args = there.args();
  Tensor workspace;
  workspace = Tensor(DType::u8, {decode_workspace_bytes(args, target.options)}, device);
  args.workspace = workspace;
  testing::CaseOutcome outcome;
  outcome.backend = decode(args, target.options);
  const oracle::Decode expected = oracle::decode(step.args());
  testing::compare_output(outcome, "out", testing::on({}, there.out), expected.out,
                          out_tolerance());
  testing::compare_output(outcome, "lse", testing::on({}, there.lse), expected.lse,
                          lse_tolerance(expected.largest_logit));
  return outcome;
}

}  // namespace

testing::Operation decode_operation() {
  const auto on_gpu = [](const DecodeCase& shape) {
    return shape.format == CacheFormat::fp8_576
               ? shape.table >= 0
               : shape.table < 0 || row_columns(shape.format, shape.columns) == 576;
  };
  const std::vector<DecodeCase> shapes = make_cases();
  std::vector<testing::Case> cases = testing::cases_of<DecodeCase>(shapes, run, on_gpu);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (shapes[i].format == CacheFormat::fp8_576) cases[i].only_gpu = Backend::sm90;
  }
  return {"sparse_mla::decode", "top-k sparse MLA attention of decode steps over a paged cache",
          std::move(cases), decode_benchmarks(), testing::repeated(kDecode, decode)};
}

}  // namespace winnow::sparse_mla
