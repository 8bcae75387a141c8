// What follows from the table of an operation.
#include "winnow/core/contract.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow::contract {
namespace {

using enum DType;

struct ScaleArgs {
  ConstTensorView x{}, y{}, rows{}, bias{}, mean{};
  std::optional<double> scale{};
  std::int64_t groups = 1;
  TensorView out{}, sums{}, counts{}, workspace{};
};

void check_even(const Check& check, const ScaleArgs& args, int& seen) {
  check.that(args.x.size(1) % 2 == 0, "x", "an even d", std::to_string(args.x.size(1)));
  ++seen;
}
void check_groups(const Check& check, std::int64_t groups) {
  check.that(groups > 0, "groups", "1 or more", std::to_string(groups));
}

struct ScaleTable {
  using Args = ScaleArgs;
  static constexpr const char* kOperation = "room::scale";
  static consteval auto entries() {
    return std::tuple(
        ranks<&Args::x, &Args::y>, rule<check_even>,
        input<&Args::x>("[n, d=4]", any_of(f32, bf16, f64).on_gpu(bf16).asked(), "rows"),
        input<&Args::y>("[m, d]", as("x"), "others"),
        optional_input<&Args::rows>("[n, k]", any_of(i32, i64), "chosen"),
        optional_input<&Args::bias>("[d]", sums_of("x"), "bias")
            .or_as("[n, d]", "[d], or 2 dimensions [n, d]"),
        input<&Args::mean>("[d]", as("x"), "instead of bias").unless<&Args::bias>(),
        value<&Args::scale>("factor"), value<&Args::groups>("groups", "[g]"),
        rule<check_groups, &Args::groups>,
        output<&Args::out>("[n, k or m, two:2]", follows("x", same, accumulator_of)),
        optional_output<&Args::sums>("[n/g]", sums_of("x")),
        optional_output<&Args::counts>("[7]", any_of(u8)).by_rule(), scratch<&Args::workspace>());
  }
};
constexpr Contract<ScaleTable> kScale;

struct ShortTable {
  using Args = ScaleArgs;
  static consteval auto entries() { return std::tuple(value<&Args::scale>("factor")); }
};
static_assert(complete<ScaleTable>() && !complete<ShortTable>());

alignas(64) double g_data[16][64];

// A call that is as the table says: n 4, d 2, m 3, k 5, g 2.
ScaleArgs good() {
  return {.x = {g_data[0], f32, {4, 2}},
          .y = {g_data[1], f32, {3, 2}},
          .rows = {g_data[2], i64, {4, 5}},
          .bias = {g_data[3], f32, {2}},
          .groups = 2,
          .out = {g_data[4], f32, {4, 5, 2}},
          .sums = {g_data[5], f32, {2}}};
}

void check(const std::function<void(ScaleArgs&)>& bend, const std::string& text = "") {
  ScaleArgs args = good();
  bend(args);
  int seen = 0;
  const auto call = [&] {
    kScale.check(args, seen);
    kScale.apart(args, args.workspace);
  };
  if (text.empty()) {
    call();
    EXPECT_EQ(seen, 1);
  } else {
    testing::expect_error(call, ErrorCode::invalid_argument, "room::scale: " + text);
  }
}

TEST(Contract, TakesWhatTheTableSays) {
  check([](ScaleArgs&) {});
  check([](ScaleArgs& args) { args.bias = {g_data[3], f32, {4, 2}}; });  // the second shape
  check([](ScaleArgs& args) {  // without the tensor that gives k, m
    args.rows = {};
    args.out = {g_data[4], f32, {4, 3, 2}};
  });
  check([](ScaleArgs& args) { args.mean = {g_data[6], u8, {9, 9}}; });  // is not looked at
  check([](ScaleArgs& args) { args.counts = {g_data[6], f32, {9}}; });  // nor is this
  check([](ScaleArgs& args) {
    args.bias = {};
    args.mean = {g_data[6], f32, {2}};
  });
}

TEST(Contract, RefusesTheRestInTheOrderOfTheTable) {
  check([](ScaleArgs& args) { args.x = {}; }, "x: want a tensor [n, d], got none");
  check([](ScaleArgs& args) { args.x = {g_data[0], u8, {4, 3}}, args.y = {}; },
        "y: want a tensor [m, d], got none");
  check([](ScaleArgs& args) { args.x = {g_data[0], u8, {4, 3}}; }, "x: want an even d, got 3");
  check([](ScaleArgs& args) { args.x = {g_data[0], u8, {4, 2}}; },
        "x: want dtype f32 or bf16 or f64, got u8");
  check([](ScaleArgs& args) { args.y = {g_data[1], f32, {3, 6}}; },
        "y: want shape [m=3, d=2], got [3, 6]");
  check([](ScaleArgs& args) { args.y = {g_data[1], bf16, {3, 2}}; }, "y: want dtype f32, got bf16");
  check([](ScaleArgs& args) { args.rows = {g_data[2], i32, {4}}; },
        "rows: want 2 dimensions [n, k], got shape [4]");
  check([](ScaleArgs& args) { args.bias = {g_data[3], f32, {4, 2, 1}}; },
        "bias: want 1 dimensions [d], or 2 dimensions [n, d], got shape [4, 2, 1]");
  check([](ScaleArgs& args) { args.bias = {}; }, "mean: want a tensor of shape [d=2], got none");
  check([](ScaleArgs& args) { args.groups = 0; }, "groups: want 1 or more, got 0");
  check([](ScaleArgs& args) { args.out = {g_data[4], f32, {4, 3, 2}}; },
        "out: want shape [n=4, k=5, two=2], got [4, 3, 2]");
  check([](ScaleArgs& args) { args.rows = {}; },
        "out: want shape [n=4, m=3, two=2], got [4, 5, 2]");
  check([](ScaleArgs& args) { args.out = {g_data[4], f32, {4, 5, 2}, {0, 2, 1}}; },
        "out: want an output whose elements do not share memory, got shape [4, 5, 2] with strides "
        "[0, 2, 1]");
  check([](ScaleArgs& args) { args.sums = {g_data[5], f32, {3}}; },
        "sums: want shape [n/g=2], got [3]");
  const Device gpu{DeviceType::cuda, 0};
  check([&](ScaleArgs& args) { args.y = {g_data[1], f32, {3, 2}, gpu}; },
        "y: want device cpu, got cuda:0");
  check([&](ScaleArgs& args) { args.x = {g_data[0], f32, {4, 2}, gpu}; },
        "x: want dtype bf16 on a GPU (the CPU takes f32), got f32");
}

TEST(Contract, RefusesOutputsThatOverlap) {
  check([](ScaleArgs& args) { args.out = {g_data[1], f32, {4, 5, 2}}; },
        "out: want memory apart from y, got memory that both use");
  check([](ScaleArgs& args) { args.sums = {g_data[4], f32, {2}}; },
        "sums: want memory apart from out, got memory that both use");
  check([](ScaleArgs& args) { args.workspace = {g_data[5], u8, {8}}; },
        "workspace: want memory apart from sums, got memory that both use");
  check([](ScaleArgs& args) { args.counts = {g_data[0], u8, {7}}; },
        "counts: want memory apart from x, got memory that both use");
  check([](ScaleArgs& args) { args.mean = {g_data[4], f32, {2}}; });  // is not looked at
}

TEST(Contract, NamesEveryArgument) {
  ScaleArgs args = good();
  std::vector<std::string> names;
  kScale.visit(args, [&](const Spec& spec, auto&) { names.emplace_back(spec.name); });
  const std::vector<std::string> wanted{"x",      "y",   "rows", "bias",   "mean",     "scale",
                                        "groups", "out", "sums", "counts", "workspace"};
  EXPECT_EQ(names, wanted);
  EXPECT_EQ(kScale.place("out"), 7u);
  EXPECT_EQ(kScale.place("none"), kScale.kCount);
}

TEST(Contract, SaysWhatNewResultsAre) {
  const auto shape = [](const ScaleArgs& args, std::string_view name) {
    const Sizes sizes = kScale.sizes(args);
    std::vector<std::int64_t> found;
    for (const Dimension& dim : kScale.specs[kScale.place(name)].extents.view()) {
      found.push_back(sizes.of(dim).size);
    }
    return found;
  };
  ScaleArgs args = good();
  EXPECT_EQ(shape(args, "out"), (std::vector<std::int64_t>{4, 5, 2}));
  EXPECT_EQ(shape(args, "sums"), (std::vector<std::int64_t>{2}));
  args.rows = {};
  EXPECT_EQ(shape(args, "out"), (std::vector<std::int64_t>{4, 3, 2}));
  args.groups = 0;
  EXPECT_EQ(shape(args, "sums"), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(shape(ScaleArgs{}, "out"), (std::vector<std::int64_t>{0, 0, 2}));
  args.x = {g_data[0], bf16, {4, 2}};
  EXPECT_EQ(kScale.dtype(kScale.specs[kScale.place("out")], args), bf16);
  EXPECT_EQ(kScale.dtype(kScale.specs[kScale.place("sums")], args), f32);
  EXPECT_EQ(in_words(kScale.specs[kScale.place("out")].extents), "[n, k or m, 2]");
}

}  // namespace
}  // namespace winnow::contract
