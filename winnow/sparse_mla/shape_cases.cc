// The case table: the shapes on which the sparse MLA operations are tested and verified.
#include <tuple>
#include <utility>

#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::add;
using winnow::testing::add_f64;
using winnow::testing::numbered;

constexpr std::int64_t kFar = std::int64_t{1} << 40;  // a position after every token

std::vector<CaseShape> make_case_shapes() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  std::vector<CaseShape> list;
  // Sizes.
  for (const std::int64_t heads : {1, 3, 16, 64, 96, 128, 192}) {
    add(list, {f32, bf16}, {.name = numbered("h", heads), .s_q = 3, .h_q = heads});
  }
  for (const std::int64_t topk : {0, 1, 64, 100, 512, 2048}) {
    add(list, {f32, bf16},
        {.name = numbered("k", topk), .s_kv = 2500, .topk = topk, .free_out = topk == 1});
  }
  add(list, {f32, f16, bf16}, {.name = "d512-h16-k100", .h_q = 16, .d_qk = 512, .topk = 100});
  add(list, {f32, bf16},
      {.name = "d512-h64-k512", .h_q = 64, .s_kv = 700, .d_qk = 512, .topk = 512});
  add(list, {bf16}, {.name = "h64-k128", .s_q = 1, .h_q = 64, .topk = 128});
  add(list, {f16}, {.name = "h64-k512", .h_q = 64, .s_kv = 700, .topk = 512});
  add(list, {f32, bf16}, {.name = "h128-k2048", .s_q = 1, .h_q = 128, .s_kv = 4096, .topk = 2048});
  // More entries than kernels keep of a query at a time.
  add(list, {f32, bf16}, {.name = "h16-k2300", .s_q = 2, .h_q = 16, .s_kv = 4096, .topk = 2300});
  add(list, {f32, bf16}, {.name = "sq1", .s_q = 1, .h_q = 16});
  add(list, {f32, bf16}, {.name = "sq4096", .s_q = 4096, .h_q = 2, .s_kv = 5000});
  for (const auto& [name, s_q, h_q, s_kv] :
       {std::tuple("sq0", 0, 3, 300), {"h0", 4, 0, 300}, {"skv0", 4, 3, 0}}) {
    add(list, {f32, bf16},
        {.name = name, .s_q = s_q, .h_q = h_q, .s_kv = s_kv, .choice = Choice::nothing});
  }
  add(list, {f32, bf16}, {.name = "skv1", .s_kv = 1, .topk = 1, .free_out = true});
  add(list, {f32, bf16}, {.name = "skv63", .s_kv = 63, .topk = 63});
  add(list, {f32, bf16}, {.name = "skv70000", .s_q = 2, .h_q = 16, .s_kv = 70000, .topk = 512});
  add(list, {f32}, {.name = "scale", .scale = 0.02});
  add_f64(list, {"h1", "h16", "h96", "k0", "k1", "k2048", "d512-h16-k100", "sq1", "sq4096",
                 "skv70000", "scale"});
  // Which entries count.
  add(list, {bf16}, {.name = "skv50000", .s_q = 6, .h_q = 16, .s_kv = 50000, .topk = 300});
  add(list, {f32, bf16}, {.name = "repeated", .s_kv = 20, .choice = Choice::repeated});
  add(list, {f32, bf16}, {.name = "one-row", .choice = Choice::one_row, .free_out = true});
  add(list, {f32, bf16},
      {.name = "skv1-repeated", .s_kv = 1, .choice = Choice::repeated, .free_out = true});
  add(list, {f32, f16, bf16}, {.name = "scattered", .h_q = 16, .choice = Choice::scattered});
  add(list, {f32, bf16}, {.name = "some-nothing", .choice = Choice::some_nothing});
  add(list, {f32, bf16}, {.name = "nothing", .choice = Choice::nothing});
  add(list, {f32, bf16}, {.name = "length-zero", .lengths = Lengths::zero});
  add(list, {f32, bf16}, {.name = "length-one", .lengths = Lengths::one, .free_out = true});
  add(list, {f32, bf16},
      {.name = "length-ragged", .s_q = 9, .choice = Choice::scattered, .lengths = Lengths::ragged});
  add(list, {f32, bf16}, {.name = "length-out-of-range", .lengths = Lengths::out_of_range});
  for (const std::int64_t k_stride : {1, 3, 4}) {
    const std::string name = numbered("stride", k_stride) + "-from";
    // From 0 and 2 the first queries see nothing or next to nothing; the middle one sees half.
    for (const std::int64_t start : {std::int64_t{0}, std::int64_t{2}, 20 * k_stride, kFar}) {
      add(list, {f32, bf16},
          {.name = start == kFar ? name + "far" : numbered(name, start),
           .s_q = 9,
           .s_kv = 40,
           .choice = Choice::repeated,
           .q_start = start,
           .k_stride = k_stride});
    }
  }
  add(list, {f32, f16, bf16},
      {.name = "all-rules",
       .s_q = 12,
       .h_q = 16,
       .s_kv = 50,
       .topk = 100,
       .choice = Choice::scattered,
       .lengths = Lengths::ragged,
       .sink = Sink::mixed,
       .layout = Layout::wide,
       .q_start = 60,
       .k_stride = 4});
  add_f64(list, {"repeated", "one-row", "scattered", "some-nothing", "nothing", "length-ragged",
                 "stride4-from80", "all-rules"});
  // Memory.
  add(list, {f32, f16, bf16}, {.name = "wide", .layout = Layout::wide});
  add(list, {f32, bf16}, {.name = "reversed", .layout = Layout::reversed});
  add(list, {f32, bf16}, {.name = "broadcast", .layout = Layout::broadcast});
  // Values.
  add(list, {f32, bf16}, {.name = "sink-minus-inf", .sink = Sink::minus_inf});
  add(list, {f32, f16, bf16}, {.name = "sink-finite", .h_q = 16, .sink = Sink::finite});
  add(list, {f32, bf16}, {.name = "sink-plus-inf", .sink = Sink::plus_inf});
  add(list, {f32, bf16},
      {.name = "sink-mixed", .h_q = 70, .choice = Choice::some_nothing, .sink = Sink::mixed});
  add(list, {f32, f16, bf16},
      {.name = "large-logits", .h_q = 16, .logits = 2500, .free_out = true});
  add_f64(list, {"wide", "reversed", "broadcast", "sink-plus-inf", "sink-mixed", "large-logits"});
  return list;
}

}  // namespace

const std::vector<CaseShape>& case_shapes() {
  static const std::vector<CaseShape> list = make_case_shapes();
  return list;
}

std::vector<CaseShape> with_dense_shapes(std::vector<CaseShape> shapes) {
  const auto add_dense = [&shapes](CaseShape shape) {
    shape.topk = shape.s_kv;
    add(shapes, {DType::f32, DType::bf16}, shape);
  };
  constexpr std::pair<Ranges, const char*> kRanges[] = {{Ranges::whole, "dense"},
                                                        {Ranges::ragged, "dense-ragged"},
                                                        {Ranges::late, "dense-late"},
                                                        {Ranges::empty, "dense-empty"},
                                                        {Ranges::out_of_range, "dense-outside"}};
  for (const auto& [ranges, name] : kRanges) {
    add_dense({.name = name, .s_q = 7, .ranges = ranges});
    add_dense({.name = std::string(name) + "-h70-d512",
               .s_q = 5,
               .h_q = 70,
               .s_kv = 129,
               .d_qk = 512,
               .ranges = ranges});
  }
  add_dense({.name = "dense-skv0", .s_kv = 0, .ranges = Ranges::whole});
  add_dense({.name = "dense-skv1", .s_kv = 1, .ranges = Ranges::whole, .free_out = true});
  add_dense({.name = "dense-h130", .s_q = 3, .h_q = 130, .ranges = Ranges::ragged});
  add_dense({.name = "dense-sq300", .s_q = 300, .s_kv = 200, .ranges = Ranges::ragged});
  add_dense({.name = "dense-skv20000", .s_q = 2, .s_kv = 20000, .ranges = Ranges::ragged});
  add_dense({.name = "dense-causal",
             .s_q = 9,
             .s_kv = 200,
             .ranges = Ranges::ragged,
             .sink = Sink::mixed,
             .layout = Layout::wide,
             .q_start = 500,
             .k_stride = 4});
  return shapes;
}

std::vector<CaseShape> with_extra_shapes(std::vector<CaseShape> shapes) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16, f64 = DType::f64;
  const auto add_extra = [&shapes](std::initializer_list<DType> dtypes, CaseShape shape) {
    if (shape.ranges != Ranges::absent) shape.topk = shape.s_kv;
    if (shape.extra->ranges != Ranges::absent) shape.extra->topk = shape.extra->s_kv;
    for (const DType dtype : dtypes) add(shapes, {dtype}, shape);
  };
  for (const bool range : {false, true}) {
    for (const bool extra_range : {false, true}) {
      const std::string name =
          std::string("extra-") + (range ? "range" : "list") + (extra_range ? "-range" : "-list");
      CaseShape shape{.name = name,
                      .s_q = 7,
                      .choice = Choice::scattered,
                      .ranges = range ? Ranges::ragged : Ranges::absent,
                      .lengths = range ? Lengths::absent : Lengths::ragged};
      shape.extra = ExtraShape{.choice = Choice::scattered,
                               .ranges = extra_range ? Ranges::ragged : Ranges::absent,
                               .lengths = extra_range ? Lengths::absent : Lengths::out_of_range};
      add_extra({f32, f16, bf16, f64}, shape);
      // Every rule at once, and heads and rows of more than one block.
      shape.name += "-all-rules";
      shape.s_q = 12;
      shape.h_q = 70;
      shape.d_qk = 512;
      shape.sink = Sink::mixed;
      shape.layout = Layout::wide;
      shape.q_start = 250;
      shape.extra->s_kv = 200;
      shape.extra->topk = 150;
      shape.extra->k_stride = 4;
      add_extra({f32, bf16, f64}, shape);
    }
  }
  const ExtraShape list{};
  add_extra({f32, bf16}, {.name = "extra-sq0", .s_q = 0, .extra = list});
  add_extra({f32, bf16}, {.name = "extra-h0", .h_q = 0, .extra = list});
  add_extra({f32, bf16}, {.name = "extra-k0", .extra = ExtraShape{.topk = 0}});
  add_extra({f32, bf16},
            {.name = "extra-rows0", .extra = ExtraShape{.s_kv = 0, .ranges = Ranges::whole}});
  add_extra({f32, bf16}, {.name = "extra-nothing", .extra = ExtraShape{.choice = Choice::nothing}});
  add_extra({f32, bf16}, {.name = "extra-alone", .topk = 0, .extra = list});
  add_extra({f32, bf16}, {.name = "extra-skv0", .s_kv = 0, .topk = 0, .extra = list});
  add_extra({f32, bf16}, {.name = "extra-range-empty",
                          .s_q = 6,
                          .ranges = Ranges::empty,
                          .extra = ExtraShape{.s_kv = 100, .ranges = Ranges::empty}});
  // Strides and positions far beyond the rows, with all of them before the first query or after it.
  for (const auto& [name, start] : {std::pair{"extra-strides-before", std::int64_t{-3}},
                                    {"extra-strides-among", (std::int64_t{1} << 33) - 5},
                                    {"extra-strides-far", kFar}}) {
    add_extra({f32, bf16}, {.name = name,
                            .s_q = 9,
                            .ranges = Ranges::ragged,
                            .q_start = start,
                            .k_stride = 2,
                            .extra = ExtraShape{.k_stride = std::int64_t{1} << 32}});
  }
  add_extra({f32}, {.name = "extra-reversed", .layout = Layout::reversed, .extra = list});
  return shapes;
}

std::string describe(const CaseShape& shape) {
  return "s_q " + std::to_string(shape.s_q) + ", h_q " + std::to_string(shape.h_q) + ", s_kv " +
         std::to_string(shape.s_kv) + ", d_qk " + std::to_string(shape.d_qk) + ", topk " +
         std::to_string(shape.topk) +
         (shape.extra ? ", s_extra " + std::to_string(shape.extra->s_kv) + ", extra_topk " +
                            std::to_string(shape.extra->topk)
                      : "");
}

}  // namespace winnow::sparse_mla
