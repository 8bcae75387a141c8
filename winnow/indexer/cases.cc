#include "winnow/indexer/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace winnow::indexer {
namespace {

using winnow::testing::numbered;
using winnow::testing::Random;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::initializer_list<DType> kAll = {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3};
constexpr std::initializer_list<DType> kSome = {DType::f32, DType::bf16, DType::f8_e4m3};
constexpr std::initializer_list<DType> kGpu = {DType::bf16, DType::f8_e4m3};
constexpr std::initializer_list<DType> kNarrow = {DType::f16, DType::bf16, DType::f8_e4m3};

std::vector<CaseShape> make_case_shapes() {
  std::vector<CaseShape> list;
  const auto add = [&](std::initializer_list<DType> dtypes, const CaseShape& shape) {
    winnow::testing::add(list, dtypes, shape);
  };
  // Sizes.
  for (const std::int64_t heads : {1, 3, 16, 20, 32, 64, 96, 128}) {
    const bool common = heads == 20 || heads == 64;
    add(common ? kAll : kSome, {.name = numbered("h", heads), .h = heads});
  }
  add(kAll, {.name = "d64-h16", .h = 16, .d = 64});
  add(kNarrow, {.name = "d64-h64", .h = 64, .d = 64});
  for (const std::int64_t topk : {1, 2, 128, 300, 512}) {
    add(kSome, {.name = numbered("k", topk), .topk = topk});
  }
  add(kSome, {.name = "sk0", .s_k = 0});
  add(kSome, {.name = "sk1", .s_k = 1});
  add(kSome, {.name = "sk127", .s_k = 127, .topk = 100});
  add(kSome, {.name = "sq1-sk20000-k2048", .s_q = 1, .h = 16, .s_k = 20000, .topk = 2048});
  add(kSome, {.name = "h64-sk9000-k2048", .s_q = 7, .h = 64, .s_k = 9000, .topk = 2048});
  add(kGpu, {.name = "sq300", .s_q = 300, .h = 8, .s_k = 700});
  add(kGpu, {.name = "sq70001", .s_q = 70001, .h = 1, .s_k = 40, .d = 64, .topk = 8});
  add({DType::f32}, {.name = "k40000", .s_q = 2, .h = 1, .s_k = 50000, .d = 64, .topk = 40000});
  add({DType::f32},
      {.name = "k40000-of-30000", .s_q = 2, .h = 1, .s_k = 30000, .d = 64, .topk = 40000});
  // What a query sees.
  add(kSome, {.name = "ranges-ragged", .s_q = 9, .ranges = Ranges::ragged});
  add(kSome, {.name = "ranges-empty", .s_k = 299, .ranges = Ranges::empty});
  add(kSome, {.name = "ranges-out-of-range", .ranges = Ranges::out_of_range});
  for (const std::int64_t k_stride : {1, 4}) {
    for (const std::int64_t start : {std::int64_t{-3}, std::int64_t{2}, std::int64_t{700}}) {
      add(kSome, {.name = numbered("stride", k_stride) +
                          (start < 0 ? "-before" : numbered("-from", start)),
                  .s_q = 9,
                  .q_start = start,
                  .k_stride = k_stride});
    }
  }
  add(kAll, {.name = "all-rules",
             .s_q = 12,
             .h = 16,
             .s_k = 900,
             .topk = 100,
             .ranges = Ranges::ragged,
             .ties = Ties::larger,
             .weights_dtype = DType::bf16,
             .layout = Layout::wide,
             .q_start = 2000,
             .k_stride = 4});
  // Memory.
  add(kAll, {.name = "wide", .layout = Layout::wide});
  add({DType::f32}, {.name = "reversed", .layout = Layout::reversed});
  add({DType::f32}, {.name = "broadcast", .layout = Layout::broadcast});
  add(kSome, {.name = "weights-bf16", .weights_dtype = DType::bf16});
  // Orders of scores, few and many candidates, and either choice among equals.
  constexpr std::pair<Order, const char*> kOrders[] = {{Order::ascending, "ascending"},
                                                       {Order::descending, "descending"},
                                                       {Order::equal, "equal"},
                                                       {Order::zero, "zero"},
                                                       {Order::one_huge, "one-huge"},
                                                       {Order::duplicates, "duplicates"},
                                                       {Order::nan, "nan"},
                                                       {Order::infinite, "infinite"}};
  for (const auto& [order, name] : kOrders) {
    for (const Ties ties : {Ties::smaller, Ties::larger}) {
      const std::string full = std::string(name) + (ties == Ties::larger ? "-larger" : "");
      add(kSome, {.name = full, .s_k = 5000, .order = order, .ties = ties});
    }
  }
  // With as many heads sm90 forms the sums of f8_e4m3 in another way, unless weights are infinite.
  add(kSome, {.name = "h64-zero", .h = 64, .s_k = 700, .order = Order::zero});
  for (const std::int64_t heads : {16, 33, 64, 128}) {
    for (const Ties ties : {Ties::smaller, Ties::larger}) {
      const std::string larger = ties == Ties::larger ? "-larger" : "";
      add(kSome, {.name = numbered("h", heads) + "-plateau" + larger,
                  .h = heads,
                  .s_k = 700,
                  .topk = 300,
                  .order = Order::plateau,
                  .ties = ties});
    }
  }
  constexpr std::pair<Order, const char*> kSplitOrders[] = {
      {Order::last_head, "last-head"}, {Order::nan, "nan"}, {Order::huge, "huge-weights"}};
  for (const std::int64_t heads : {33, 64, 128}) {
    for (const auto& [order, name] : kSplitOrders) {
      add(kSome, {.name = numbered("h", heads) + "-" + name,
                  .h = heads,
                  .s_k = 700,
                  .topk = 300,
                  .order = order});
    }
  }
  add(kSome, {.name = "h128-infinite", .h = 128, .s_k = 700, .order = Order::infinite});
  return list;
}

// Factors of the keys, so that row t has about the score that its place in the order asks for. All
// are exact in f8_e4m3 after rounding, or ties, which are as good.
double factor_of(const CaseShape& shape, std::int64_t t) {
  const double place = double(t + 1) / double(shape.s_k);
  switch (shape.order) {
    case Order::ascending:
      return place;
    case Order::descending:
      return 1.1 - place;
    case Order::zero:
      return -1;
    case Order::one_huge:
      return t == shape.s_k / 3 ? 8 : 0.01;
    default:
      return 1;
  }
}

void fill_keys(const CaseShape& shape, const CaseInputs& inputs, Random& random) {
  const StridedTensor pattern = make_tensor(DType::f32, {shape.d}, Layout::dense);
  winnow::testing::fill_uniform(pattern.view, random, 0.2, 1);
  const oracle::Inputs in = inputs.for_oracle();
  const double poison[] = {std::nan(""), kInfinity, -kInfinity};
  std::vector<bool> seen(static_cast<std::size_t>(shape.s_k), !shape.poison);
  for (std::int64_t t = 0; t < shape.s_k && shape.poison; ++t) {
    for (std::int64_t i = 0; i < shape.s_q && !seen[t]; ++i) seen[t] = oracle::visible(in, i, t);
  }
  constexpr std::int64_t kDistinct = 40;
  for (std::int64_t t = 0; t < shape.s_k; ++t) {
    const TensorView row = inputs.k.view.slice(0, t, t + 1);
    if (!seen[t]) {
      winnow::testing::fill(row, poison[t % 3]);
    } else if (shape.order == Order::nan && t % 3 == 1) {
      winnow::testing::fill(row, std::nan(""));
    } else if (shape.order == Order::duplicates) {
      Random same(1000 + std::uint64_t(t) * 7 % kDistinct);
      winnow::testing::fill_normal(row, same);
    } else if (shape.order == Order::plateau || shape.order == Order::last_head) {
      // A row of zeros here and there.
      const double sign = t % 4 == 3 ? 1 : t % 16 == 5 ? 0 : -1;
      winnow::testing::fill_uniform(row, random, 0.2 * sign, sign);
    } else if (shape.order == Order::random || shape.order == Order::nan ||
               shape.order == Order::infinite || shape.order == Order::huge) {
      winnow::testing::fill_normal(row, random);
    } else {
      const double factor = factor_of(shape, t);
      const StridedTensor scaled = make_tensor(DType::f32, {1, shape.d}, Layout::dense);
      for (std::int64_t c = 0; c < shape.d; ++c) {
        scaled.view.at<float>(0, c) = static_cast<float>(pattern.view.at<float>(c) * factor);
      }
      // A copy in the dtype of the keys, through the generator that rounds once.
      for (std::int64_t c = 0; c < shape.d; ++c) {
        winnow::testing::fill(row.slice(1, c, c + 1), scaled.view.at<float>(0, c));
      }
    }
  }
}

std::int32_t start_of(const CaseShape& shape, std::int64_t i, Random& random) {
  if (shape.ranges == Ranges::empty) return i % 2 == 0 ? 50 : 10;
  if (shape.ranges == Ranges::out_of_range) {
    return i % 2 == 0 ? std::numeric_limits<std::int32_t>::min() : 250;
  }
  return static_cast<std::int32_t>(random.below(shape.s_k / 2));
}
std::int32_t end_of(const CaseShape& shape, std::int64_t i, Random& random) {
  if (shape.ranges == Ranges::empty) return i % 2 == 0 ? 20 : 90;
  if (shape.ranges == Ranges::out_of_range) {
    return i % 3 == 0 ? std::numeric_limits<std::int32_t>::max() : i % 3 == 1 ? -5 : 270;
  }
  return static_cast<std::int32_t>(shape.s_k / 2 + random.below(shape.s_k / 2));
}

}  // namespace

const std::vector<CaseShape>& case_shapes() {
  static const std::vector<CaseShape> list = make_case_shapes();
  return list;
}

std::string describe(const CaseShape& shape) {
  return "s_q " + std::to_string(shape.s_q) + ", h " + std::to_string(shape.h) + ", s_k " +
         std::to_string(shape.s_k) + ", d " + std::to_string(shape.d) + ", topk " +
         std::to_string(shape.topk);
}

oracle::Inputs CaseInputs::for_oracle() const {
  oracle::Inputs in;
  pass_to(in);
  return in;
}

CaseInputs make_inputs(const CaseShape& shape) {
  Random random(winnow::testing::seed_from(shape.name));
  CaseInputs inputs;
  inputs.q_start = shape.q_start;
  inputs.k_stride = shape.k_stride;
  const Layout key_layout = shape.layout == Layout::broadcast ? Layout::wide : shape.layout;
  inputs.q = make_tensor(shape.dtype, {shape.s_q, shape.h, shape.d}, shape.layout);
  inputs.k = make_tensor(shape.dtype, {shape.s_k, shape.d}, key_layout);
  inputs.weights = make_tensor(shape.weights_dtype, {shape.s_q, shape.h}, shape.layout);
  const bool ordered = shape.order == Order::ascending || shape.order == Order::descending ||
                       shape.order == Order::equal || shape.order == Order::zero ||
                       shape.order == Order::one_huge;
  if (ordered) {  // positive products, whose sums follow the keys
    winnow::testing::fill_uniform(inputs.q.view, random, 0.1, 1);
    winnow::testing::fill_uniform(inputs.weights.view, random, 0.1, 1);
  } else {
    winnow::testing::fill_normal(inputs.q.view, random);
    winnow::testing::fill_normal(inputs.weights.view, random);
  }
  if (shape.order == Order::plateau || shape.order == Order::last_head) {
    winnow::testing::fill_uniform(inputs.q.view, random, 0.1, 1);
    // Of one sign in a query: else a sum could be so close to 0 that its sign is one of rounding.
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      const double sign = i % 2 == 0 ? 1 : -1;
      winnow::testing::fill_uniform(inputs.weights.view.slice(0, i, i + 1), random, 0.1 * sign,
                                    sign);
    }
    // A head without weight, whose products are positive where those of the others are not.
    winnow::testing::fill_uniform(inputs.q.view.slice(1, 1, 2), random, -1, -0.1);
    winnow::testing::fill(inputs.weights.view.slice(1, 1, 2), 0);
  }
  if (shape.order == Order::last_head) {
    winnow::testing::fill_uniform(inputs.q.view.slice(1, shape.h - 1, shape.h), random, -1, -0.1);
  }
  for (std::int64_t i = 0; i < shape.s_q && shape.order == Order::huge; i += 2) {
    winnow::testing::fill_normal(inputs.weights.view.slice(0, i, i + 1), random, 1e30);
  }
  if (shape.order == Order::infinite) {
    winnow::testing::fill(inputs.weights.view.slice(1, 0, 1), -kInfinity);
    if (shape.h > 1) winnow::testing::fill(inputs.weights.view.slice(1, 1, 2), kInfinity);
  }
  if (shape.dtype == DType::f8_e4m3) {
    inputs.k_scale = make_tensor(DType::f32, {shape.s_k}, Layout::dense);
    const bool plain = ordered || shape.order == Order::duplicates;
    winnow::testing::fill_uniform(inputs.k_scale.view, random, plain ? 1 : 0.5, plain ? 1 : 1.5);
  }
  if (shape.ranges != Ranges::absent) {
    inputs.key_start = make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    inputs.key_end = make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      inputs.key_start.view.at<std::int32_t>(i) = start_of(shape, i, random);
      inputs.key_end.view.at<std::int32_t>(i) = end_of(shape, i, random);
    }
  }
  fill_keys(shape, inputs, random);
  return inputs;
}

CaseInputs CaseInputs::on(Device device) const {
  CaseInputs copy;
  copy.q = testing::on(device, q);
  copy.k = testing::on(device, k);
  copy.weights = testing::on(device, weights);
  copy.k_scale = testing::on(device, k_scale);
  copy.key_start = testing::on(device, key_start);
  copy.key_end = testing::on(device, key_end);
  copy.q_start = q_start;
  copy.k_stride = k_stride;
  return copy;
}

std::vector<std::int64_t> checked_queries(const CaseShape& shape) {
  std::vector<std::int64_t> queries;
  const std::int64_t step = shape.s_q > 16 ? shape.s_q / 7 : 1;
  for (std::int64_t i = 0; i < shape.s_q; i += step) queries.push_back(i);
  return queries;
}

double score_tolerance(DType dtype) { return dtype == DType::f8_e4m3 ? 2e-3 : 1e-5; }

testing::Tolerance gradient_tolerance(DType narrowest) {
  using testing::RelativeTo;
  if (narrowest == DType::f32) return {1e-4, RelativeTo::tensor};
  return {1e-2, RelativeTo::tensor, 1e-5};
}

Tensor chosen_rows(const CaseShape& shape) {
  Random random(winnow::testing::seed_from(shape.name + "-rows"));
  Tensor rows(DType::i32, {shape.s_q, shape.topk});
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    std::int64_t visible = shape.s_k;
    if (shape.q_start.has_value()) visible = std::min(visible, *shape.q_start + i + 1);
    for (std::int64_t j = 0; j < shape.topk; ++j) {  // one of each part of the visible rows
      const std::int64_t begin = visible * j / shape.topk;
      const std::int64_t end = visible * (j + 1) / shape.topk;
      rows.view().at<std::int32_t>(i, j) =
          end == begin ? -1 : static_cast<std::int32_t>(begin + random.below(end - begin));
    }
  }
  return rows;
}

std::vector<ChosenBench> chosen_benches(std::initializer_list<double> targets_ms) {
  std::vector<ChosenBench> list;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    list.push_back({.shape = {.name = std::string(to_string(dtype)) + "-h64-k512",
                              .dtype = dtype,
                              .s_q = 64,
                              .h = 64,
                              .s_k = 8192,
                              .topk = 512,
                              .poison = false},
                    .device = DeviceType::cpu});
  }
  // Queries at the end of the cache, as in a prefill of chunks.
  const auto add = [&](DType dtype, std::int64_t h, std::int64_t s_k,
                       std::optional<double> target_ms) {
    list.push_back({.shape = {.name = std::string(to_string(dtype)) + numbered("-h", h) +
                                      numbered("-sk", s_k) + "-k2048",
                              .dtype = dtype,
                              .s_q = 4096,
                              .h = h,
                              .s_k = s_k,
                              .topk = 2048,
                              .q_start = s_k - 4096,
                              .poison = false},
                    .target_ms = target_ms});
  };
  std::int64_t s_k = 8192;
  for (const double target_ms : targets_ms) {
    add(DType::bf16, 64, s_k, target_ms);
    s_k *= 4;
  }
  add(DType::bf16, 32, 32768, {});
  add(DType::bf16, 16, 32768, {});
  add(DType::f8_e4m3, 64, 32768, {});
  return list;
}

testing::Benchmark make_chosen_benchmark(const ChosenBench& bench, int products) {
  constexpr double kCeilingReference = 770e12;  // FLOP/s, at which target_ms holds
  const CaseShape& shape = bench.shape;
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  benchmark.flops =
      2.0 * products * double(shape.s_q) * double(shape.topk) * double(shape.h) * double(shape.d);
  benchmark.device = bench.device;
  benchmark.ceiling = bench.device == DeviceType::cuda
                          ? testing::Ceiling{testing::Ceiling::Kind::matmul, 8192, 8192, 8192, 0}
                          : testing::Ceiling{testing::Ceiling::Kind::matmul, shape.s_q * shape.h,
                                             shape.topk, shape.d, 0};
  if (bench.target_ms.has_value()) {
    // The share of the ceiling that this time would be.
    benchmark.target = benchmark.flops / (*bench.target_ms * 1e-3) / kCeilingReference;
  }
  return benchmark;
}

}  // namespace winnow::indexer
