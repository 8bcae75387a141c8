// The case table of indexer::quantize. All backends give the bits of the oracle: no tolerance.
#include <limits>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/quantize/quantize_contract.h"
#include "winnow/indexer/quantize/quantize_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> quantize_benchmarks();
testing::Operation quantize_operation();

namespace {

using testing::numbered;
using testing::Target;

struct QuantizeCase {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t n = 40, h = -1, d = 128;  // h -1: x is [n, d]
  bool power_of_two = false;
  std::int64_t num_pages = 0;  // 0: not into pages
  DType slot_dtype = DType::i64;
  bool skipped = false;  // every third slot is negative
  Layout layout = Layout::dense;
  std::int64_t gap = 32;  // elements before and behind each row, where the layout has gaps
};

std::vector<QuantizeCase> make_cases() {
  std::vector<QuantizeCase> list;
  const auto add_case = [&list](const QuantizeCase& shape) {
    testing::add(list, {DType::f32, DType::f16, DType::bf16}, shape);
  };
  for (const std::int64_t d : {64, 128}) {
    for (const bool power_of_two : {false, true}) {
      const std::string name = numbered("d", d) + (power_of_two ? "-power" : "");
      add_case({.name = name, .d = d, .power_of_two = power_of_two});
      add_case({.name = name + "-pages", .d = d, .power_of_two = power_of_two, .num_pages = 3});
    }
  }
  add_case({.name = "heads", .n = 7, .h = 5});
  add_case({.name = "heads-wide", .n = 7, .h = 5, .layout = Layout::wide});
  add_case({.name = "no-row", .n = 0});
  add_case({.name = "no-row-pages", .n = 0, .num_pages = 2});
  add_case({.name = "no-head", .n = 3, .h = 0});
  add_case({.name = "one-row", .n = 1});
  add_case({.name = "many", .n = 5000, .d = 64});
  add_case({.name = "full-pages", .n = 128, .num_pages = 2});
  add_case({.name = "i32-slots", .num_pages = 2, .slot_dtype = DType::i32});
  add_case({.name = "skipped", .num_pages = 2, .skipped = true});
  add_case({.name = "wide", .layout = Layout::wide});
  add_case({.name = "unaligned", .layout = Layout::wide, .gap = 3});
  add_case({.name = "wide-pages", .num_pages = 3, .layout = Layout::wide});
  add_case({.name = "reversed", .layout = Layout::reversed});
  add_case({.name = "reversed-pages", .num_pages = 3, .layout = Layout::reversed});
  add_case({.name = "broadcast", .layout = Layout::broadcast});
  return list;
}

std::string describe(const QuantizeCase& shape) {
  return "n " + std::to_string(shape.n) + (shape.h < 0 ? "" : ", h " + std::to_string(shape.h)) +
         ", d " + std::to_string(shape.d) + ", num_pages " + std::to_string(shape.num_pages);
}

// Fills a row with numbers of a kind: ordinary ones, zeros, numbers below the least amax and below
// the smallest f8, ties, the largest of a dtype, powers of two, NaN and infinities.
void fill_row(const TensorView& row, std::int64_t kind, testing::Random& random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::int64_t last = row.rank() - 1, d = row.size(last);
  const auto element = [&](std::int64_t c) { return row.slice(last, c, c + 1); };
  testing::fill_normal(row, random);
  switch (kind % 11) {
    case 1:
      return testing::fill(row, -0.0);
    case 2:
      return testing::fill_normal(row, random, 1e-5);
    case 3:  // ties and neighbours of ties: the scale is 1
      for (std::int64_t c = 0; c < d; ++c) {
        testing::fill(element(c), (c % 2 == 0 ? 1.0 : -1.0) * double(c) * 0.0009765625 * 3);
      }
      return testing::fill(element(0), 448);
    case 4:
      for (std::int64_t c = 0; c < d; ++c) testing::fill(element(c), 16 + double(c) / 2);
      return testing::fill(element(d - 1), -448);
    case 5:
      return testing::fill(element(d / 2), row.dtype() == DType::f16 ? 65504 : 3e38);
    case 6:
      return testing::fill(element(1), std::nan(""));
    case 7:
      return testing::fill(element(d - 1), -kInfinity);
    case 8:  // the scale is a power of two
      return testing::fill(element(3), 896);
    case 9:  // the scale is just above a power of two
      return testing::fill(element(3), 900);
    default:
      return;
  }
}

testing::Gaps gaps_of(const QuantizeCase& shape) { return {.length = shape.gap}; }

// The outputs of a call, before it runs.
struct Outputs {
  StridedTensor rows, scale, pages;

  explicit Outputs(const QuantizeCase& shape) {
    const testing::Gaps gaps = gaps_of(shape);
    if (shape.num_pages > 0) {
      pages = make_output(DType::u8, {shape.num_pages, page_bytes(shape.d)}, shape.layout);
    } else if (shape.h >= 0) {
      rows = make_output(DType::f8_e4m3, {shape.n, shape.h, shape.d}, shape.layout, gaps);
      scale = make_output(DType::f32, {shape.n, shape.h}, shape.layout);
    } else {
      rows = make_output(DType::f8_e4m3, {shape.n, shape.d}, shape.layout, gaps);
      scale = make_output(DType::f32, {shape.n}, Layout::dense);
    }
  }
};

testing::CaseOutcome run(const QuantizeCase& shape, const Target& target) {
  const Device device = testing::device_of(target);
  testing::Random random(testing::seed_from(shape.name));
  const testing::Gaps gaps = gaps_of(shape);
  const StridedTensor x =
      shape.h >= 0 ? make_tensor(shape.dtype, {shape.n, shape.h, shape.d}, shape.layout, gaps)
                   : make_tensor(shape.dtype, {shape.n, shape.d}, shape.layout, gaps);
  for (std::int64_t i = 0; i < shape.n; ++i) {
    const TensorView row = x.view.slice(0, i, i + 1);
    if (shape.h < 0) fill_row(row, i, random);
    for (std::int64_t h = 0; h < shape.h; ++h) fill_row(row.slice(1, h, h + 1), i + 3 * h, random);
  }
  Tensor slots, slots_there;
  if (shape.num_pages > 0) {
    slots = testing::make_slots(shape.slot_dtype, shape.n, shape.num_pages * kPageRows,
                                shape.skipped, random);
    slots_there = slots.to(device);
  }
  const Outputs expected(shape);
  const StridedTensor x_there = testing::on(device, x);
  const StridedTensor rows = testing::on(device, expected.rows);
  const StridedTensor scale = testing::on(device, expected.scale);
  const StridedTensor pages = testing::on(device, expected.pages);
  testing::CaseOutcome outcome;
  outcome.backend = quantize({x_there.view, shape.power_of_two, rows.view, scale.view, pages.view,
                              shape.num_pages > 0 ? slots_there.view() : ConstTensorView()},
                             target.options);
  oracle::quantize({x.view, shape.power_of_two, expected.rows.view, expected.scale.view,
                    expected.pages.view, shape.num_pages > 0 ? slots.view() : ConstTensorView()});
  const auto compare = [&](std::string_view what, const StridedTensor& actual,
                           const StridedTensor& wanted) {
    if (!wanted.view.present()) return;
    testing::compare_bytes(outcome, what, actual.storage.to({}), wanted.storage);
  };
  compare("rows", rows, expected.rows);
  compare("scale", scale, expected.scale);
  compare("pages", pages, expected.pages);
  return outcome;
}

}  // namespace

testing::Operation quantize_operation() {
  const auto on_gpu = [](const QuantizeCase&) { return true; };
  return {"indexer::quantize", "rows of f8_e4m3 with a scale each, plain or into pages",
          testing::cases_of<QuantizeCase>(make_cases(), run, on_gpu), quantize_benchmarks(),
          testing::repeated(kQuantize, quantize)};
}

}  // namespace winnow::indexer
