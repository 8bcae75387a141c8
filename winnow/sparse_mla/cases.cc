#include "winnow/sparse_mla/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "winnow/core/error.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::add;
using winnow::testing::numbered;
using winnow::testing::Random;
using winnow::testing::RelativeTo;
using winnow::testing::Tolerance;

// Rows [start, end) of query i, as tests of the limits want them.
std::pair<std::int32_t, std::int32_t> range_of(const CaseShape& shape, std::int64_t i,
                                               Random& random) {
  constexpr auto kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr auto kMost = std::numeric_limits<std::int32_t>::max();
  const auto s_kv = static_cast<std::int32_t>(shape.s_kv);
  switch (shape.ranges) {
    case Ranges::whole:
      return {0, s_kv};
    case Ranges::late:
      return {s_kv - 70, s_kv - static_cast<std::int32_t>(i)};
    case Ranges::empty:
      return i % 2 == 0 ? std::pair{50, 20} : std::pair{10, 90};
    case Ranges::out_of_range:
      return {i % 2 == 0 ? kLeast : s_kv / 2, i % 3 == 0 ? kMost : i % 3 == 1 ? kLeast : s_kv + 1};
    case Ranges::window:
      return {static_cast<std::int32_t>(i + 1 - kWindow), static_cast<std::int32_t>(i + 1)};
    default:
      return {static_cast<std::int32_t>(random.below(shape.s_kv / 2 + 1)),
              static_cast<std::int32_t>(shape.s_kv / 2 + random.below(shape.s_kv / 2 + 1))};
  }
}

// Entries of `indices` that the contract excludes.
void scatter_invalid(const CaseShape& shape, const TensorView& indices, Random& random) {
  const auto s_kv = static_cast<std::int32_t>(shape.s_kv);
  const std::int32_t invalid[] = {std::numeric_limits<std::int32_t>::min(), -1, s_kv,
                                  std::numeric_limits<std::int32_t>::max()};
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    const bool whole_row =
        shape.choice == Choice::nothing || (shape.choice == Choice::some_nothing && i % 2 == 0);
    for (std::int64_t j = 0; j < shape.topk; ++j) {
      if (whole_row || random.below(3) == 0) {
        indices.at<std::int32_t>(i, 0, j) = invalid[random.below(4)];
      }
    }
  }
}

constexpr std::int32_t kHotRows = 8;

void fill_indices(const CaseShape& shape, const TensorView& indices, Random& random) {
  switch (shape.choice) {
    case Choice::distinct:
      return winnow::testing::fill_distinct(indices, random, shape.s_kv);
    case Choice::hot_rows:
      winnow::testing::fill_distinct(indices, random, shape.s_kv - kHotRows);
      for (std::int64_t i = 0; i < shape.s_q; ++i) {
        for (std::int32_t j = 0; j < shape.topk; ++j) {
          std::int32_t& index = indices.at<std::int32_t>(i, 0, j);
          index = j < kHotRows ? j : index + kHotRows;
        }
      }
      return;
    case Choice::repeated:
      return winnow::testing::fill_below(indices, random, shape.s_kv);
    case Choice::one_row:
      for (std::int64_t i = 0; i < shape.s_q; ++i) {
        const auto row = static_cast<std::int32_t>(random.below(shape.s_kv));
        for (std::int64_t j = 0; j < shape.topk; ++j) indices.at<std::int32_t>(i, 0, j) = row;
      }
      return;
    case Choice::scattered:
    case Choice::some_nothing:
    case Choice::nothing:
      winnow::testing::fill_below(indices, random, shape.s_kv);
      return scatter_invalid(shape, indices, random);
  }
}

std::int32_t length_of(const CaseShape& shape, std::int64_t i, Random& random) {
  const auto topk = static_cast<std::int32_t>(shape.topk);
  const std::int32_t outside[] = {-1, std::numeric_limits<std::int32_t>::min(), topk + 1,
                                  std::numeric_limits<std::int32_t>::max()};
  switch (shape.lengths) {
    case Lengths::one:
      return 1;
    case Lengths::ragged:
      return static_cast<std::int32_t>(i == 0 ? topk : random.below(topk + 1));
    case Lengths::out_of_range:
      return outside[i % 4];
    case Lengths::absent:
    case Lengths::zero:
      break;
  }
  return 0;
}

double sink_of(const CaseShape& shape, std::int64_t h, Random& random) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double finite = 2 * random.normal();
  const double mixed[] = {-kInf, finite, kInf, 40.0, -40.0};
  switch (shape.sink) {
    case Sink::minus_inf:
      return -kInf;
    case Sink::plus_inf:
      return kInf;
    case Sink::mixed:
      return mixed[h % 5];
    case Sink::absent:
    case Sink::finite:
      break;
  }
  return finite;
}

// Rows that some query sees get random numbers, the others NaN and infinity in turn.
void fill_kv(const CaseShape& shape, const CaseInputs& inputs, Random& random) {
  std::vector<bool> seen(static_cast<std::size_t>(shape.all_rows()), !shape.poison);
  const oracle::Inputs in = inputs.for_oracle();
  for (std::int64_t i = 0; i < shape.s_q && shape.poison; ++i) {
    for (const oracle::Entry& entry : oracle::visible_entries(in, i)) seen[entry.row] = true;
  }
  const double poison[] = {std::nan(""), oracle::kInfinity, -oracle::kInfinity};
  for (std::int64_t row = 0; row < shape.all_rows(); ++row) {
    const bool first = row < shape.s_kv;
    const std::int64_t t = first ? row : row - shape.s_kv;
    const TensorView view = (first ? inputs.kv : inputs.extra.kv).view.slice(0, t, t + 1);
    if (seen[row]) {
      winnow::testing::fill_normal(view, random);
    } else {
      winnow::testing::fill(view, poison[row % 3]);
    }
  }
}

// A source without the numbers of its rows, which fill_kv() draws when all choices are known.
SourceInputs make_source(const CaseShape& shape, Random& random) {
  SourceInputs inputs;
  inputs.k_stride = shape.k_stride;
  const Layout kv_layout = shape.layout == Layout::broadcast ? Layout::wide : shape.layout;
  inputs.kv = make_tensor(shape.dtype, {shape.s_kv, 1, shape.d_qk}, kv_layout);
  if (shape.ranges == Ranges::absent) {
    inputs.indices = make_tensor(DType::i32, {shape.s_q, 1, shape.topk}, shape.layout);
    fill_indices(shape, inputs.indices.view, random);
  } else {
    inputs.key_start = make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    inputs.key_end = make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      std::tie(inputs.key_start.view.at<std::int32_t>(i), inputs.key_end.view.at<std::int32_t>(i)) =
          range_of(shape, i, random);
    }
  }
  if (shape.lengths != Lengths::absent) {
    inputs.topk_length = make_tensor(DType::i32, {shape.s_q}, Layout::dense);
    for (std::int64_t i = 0; i < shape.s_q; ++i) {
      inputs.topk_length.view.at<std::int32_t>(i) = length_of(shape, i, random);
    }
  }
  return inputs;
}

CaseShape shape_of_extra(CaseShape shape) {
  const ExtraShape& extra = *shape.extra;
  shape.s_kv = extra.s_kv;
  shape.topk = extra.topk;
  shape.choice = extra.choice;
  shape.ranges = extra.ranges;
  shape.lengths = extra.lengths;
  shape.k_stride = extra.k_stride;
  return shape;
}

}  // namespace

oracle::Inputs CaseInputs::for_oracle() const {
  oracle::Inputs in;
  in.q = q.view;
  in.attn_sink = attn_sink.view;
  in.scale = scale;
  in.q_start = q_start;
  const auto source = [](const SourceInputs& from) {
    return oracle::Source{.kv = from.kv.view,
                          .indices = from.indices.view,
                          .topk_length = from.topk_length.view,
                          .key_start = from.key_start.view,
                          .key_end = from.key_end.view,
                          .k_stride = from.k_stride};
  };
  static_cast<oracle::Source&>(in) = source(*this);
  in.extra = source(extra);
  return in;
}

CaseInputs make_inputs(const CaseShape& shape) {
  Random random(winnow::testing::seed_from(shape.name));
  CaseInputs inputs;
  inputs.scale = shape.scale;
  inputs.q_start = shape.q_start;
  inputs.q = make_tensor(shape.dtype, {shape.s_q, shape.h_q, shape.d_qk}, shape.layout);
  constexpr std::int64_t kMany = 1 << 24;  // more than drawing number by number is good for
  if (inputs.q.view.numel() > kMany && shape.logits == 1) {
    winnow::testing::fill_normal_rows(inputs.q.view, random);
  } else {
    winnow::testing::fill_normal(inputs.q.view, random, shape.logits);
  }
  static_cast<SourceInputs&>(inputs) = make_source(shape, random);
  if (shape.extra) inputs.extra = make_source(shape_of_extra(shape), random);
  if (shape.sink != Sink::absent) {
    inputs.attn_sink = make_tensor(accumulator_of(shape.dtype), {shape.h_q}, Layout::dense);
    for (std::int64_t h = 0; h < shape.h_q; ++h) {
      winnow::testing::fill(inputs.attn_sink.view.slice(0, h, h + 1), sink_of(shape, h, random));
    }
  }
  fill_kv(shape, inputs, random);
  return inputs;
}

SourceInputs SourceInputs::on(Device device) const {
  return {.kv = testing::on(device, kv),
          .indices = testing::on(device, indices),
          .topk_length = testing::on(device, topk_length),
          .key_start = testing::on(device, key_start),
          .key_end = testing::on(device, key_end),
          .k_stride = k_stride};
}

CaseInputs CaseInputs::on(Device device) const {
  CaseInputs copy;
  static_cast<SourceInputs&>(copy) = SourceInputs::on(device);
  copy.q = testing::on(device, q);
  copy.attn_sink = testing::on(device, attn_sink);
  copy.scale = scale;
  copy.q_start = q_start;
  copy.extra = extra.on(device);
  return copy;
}

std::vector<std::int64_t> choose(std::int64_t count, std::int64_t at_most, std::uint64_t seed) {
  std::set<std::int64_t> chosen;
  for (std::int64_t i = 0; i < count && count <= at_most; ++i) chosen.insert(i);
  if (count > at_most) chosen = {0, count - 1};
  Random random(seed);
  while (std::int64_t(chosen.size()) < std::min(count, at_most)) chosen.insert(random.below(count));
  return {chosen.begin(), chosen.end()};
}

std::vector<std::int64_t> checked_queries(const CaseShape& shape) {
  const bool large = shape.s_q > 16;
  return choose(shape.s_q, large ? kCheckedQueries : shape.s_q,
                winnow::testing::seed_from(shape.name));
}

std::vector<std::int64_t> checked_rows(const CaseShape& shape, const CaseInputs& inputs) {
  const std::uint64_t seed = winnow::testing::seed_from(shape.name);
  const std::int64_t all = shape.all_rows();
  if (all <= 512) return choose(all, all, seed);
  // Half of them at random, which few queries may have chosen, the others from the indices.
  const std::vector<std::int64_t> any = choose(all, kCheckedRows / 2, seed);
  std::set<std::int64_t> rows(any.begin(), any.end());
  const oracle::Inputs in = inputs.for_oracle();
  std::set<std::int64_t> seen;
  for (const std::int64_t i : choose(shape.s_q, kCheckedQueries, seed)) {
    for (const oracle::Entry& entry : oracle::visible_entries(in, i)) seen.insert(entry.row);
  }
  Random random(seed);
  for (std::int64_t row : seen) {
    if (std::int64_t(rows.size()) >= kCheckedRows) break;
    if (random.below(std::int64_t(seen.size())) < kCheckedRows) rows.insert(row);
  }
  return {rows.begin(), rows.end()};
}

Tolerance tolerance(Quantity quantity, const CaseShape& shape, double largest_logit) {
  constexpr double kEps32 = 0x1p-23;
  if (shape.dtype == DType::f64) {
    const bool logits = quantity == Quantity::max_logits || quantity == Quantity::lse;
    const auto relative_to = logits                           ? RelativeTo::nothing
                             : quantity == Quantity::attn_sum ? RelativeTo::row
                                                              : RelativeTo::tensor;
    return {1e-11 + 64 * 0x1p-52 * largest_logit, relative_to};
  }
  const bool narrow = shape.dtype != DType::f32;
  const double rounding = kEps32 * largest_logit;
  // P = exp(x - lse) carries the rounding of x and of an lse that is passed in. The spec grants it
  // to attn_sum; with large logits gradients and sums are as exposed.
  const double beyond = shape.large_logits() ? 64 * rounding : 0;
  switch (quantity) {
    case Quantity::out:
      return narrow ? Tolerance{1e-2, RelativeTo::tensor, 1e-5} : Tolerance{2e-5};
    case Quantity::dq:
      return narrow ? Tolerance{1e-2 + beyond, RelativeTo::tensor, 1e-5} : Tolerance{1e-4 + beyond};
    case Quantity::dkv:
      return narrow ? Tolerance{1e-2 + beyond, RelativeTo::tensor, 1e-4} : Tolerance{1e-4 + beyond};
    case Quantity::d_sink:  // f32 sums over the queries; the spec leaves it open
      return Tolerance{1e-4 + beyond};
    case Quantity::max_logits:
    case Quantity::lse:
      return {(narrow ? 1e-4 : 1e-5) + 8 * rounding, RelativeTo::nothing};
    case Quantity::attn_sum:
      return {(narrow ? 1e-3 : 2e-4) + 64 * rounding, RelativeTo::row};
    case Quantity::row_sums:
      return {1e-3 + beyond};
  }
  return {};
}

std::vector<BenchShape> bench_shapes() {
  CaseShape base{.name = "", .s_q = 64, .h_q = 64, .s_kv = 8192, .topk = 512, .poison = false};
  std::vector<BenchShape> list;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::string prefix(to_string(dtype));
    CaseShape shape = base;
    shape.dtype = dtype;
    shape.name = prefix + "-h64-k512";
    list.push_back({shape, dtype == DType::f32});
    shape.s_q = 8;
    shape.h_q = 128;
    shape.topk = 2048;
    shape.name = prefix + "-h128-k2048";
    list.push_back({shape});
    shape.s_q = 1;
    shape.name = prefix + "-decode-h128-k2048";
    list.push_back({shape});
  }
  return list;
}

testing::Benchmark make_benchmark(const BenchShape& bench, std::int64_t k, double target) {
  const CaseShape& shape = bench.shape;
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  benchmark.ceiling = {testing::Ceiling::Kind::matmul, shape.s_q * shape.h_q, shape.topk, k, 0};
  benchmark.flops = 2.0 * double(shape.s_q * shape.h_q) * double(shape.topk) * double(k);
  if (bench.promised) benchmark.target = target;
  return benchmark;
}

namespace {

testing::Benchmark make_gpu_benchmark(const CaseShape& shape, std::int64_t k,
                                      std::optional<double> reach) {
  testing::Benchmark benchmark = make_benchmark(BenchShape{shape}, k, 0);
  benchmark.device = DeviceType::cuda;
  benchmark.ceiling = {testing::Ceiling::Kind::matmul, 8192, 8192, 8192, 0};
  benchmark.target = reach;
  return benchmark;
}

}  // namespace

CaseShape case_shape(const GpuBenchShape& bench) {
  const bool hot = bench.choice == Choice::hot_rows;
  return {.name = "bf16-h" + std::to_string(bench.h_q) + "-kv" + std::to_string(bench.s_kv) +
                  (hot ? "-hot" : ""),
          .dtype = DType::bf16,
          .s_q = 4096,
          .h_q = bench.h_q,
          .s_kv = bench.s_kv,
          .topk = 2048,
          .choice = bench.choice,
          .poison = false};
}

testing::Benchmark make_benchmark(const GpuBenchShape& bench, std::int64_t k) {
  return make_gpu_benchmark(case_shape(bench), k, bench.reach);
}

CaseShape case_shape(const LayerBenchShape& bench) {
  constexpr std::int64_t kTokens = 16384;
  const bool all = bench.extra_topk == 0;
  ExtraShape extra{.s_kv = kTokens / bench.compression,
                   .topk = all ? kTokens / bench.compression : bench.extra_topk,
                   .ranges = all ? Ranges::whole : Ranges::absent};
  return {.name = "bf16-h" + std::to_string(bench.h_q) + (all ? "-hca" : "-csa"),
          .dtype = DType::bf16,
          .s_q = kTokens,
          .h_q = bench.h_q,
          .s_kv = kTokens,
          .d_qk = 512,
          .topk = kTokens,
          .ranges = Ranges::window,
          .poison = false,
          .extra = extra};
}

testing::Benchmark make_benchmark(const LayerBenchShape& bench, std::int64_t k) {
  const CaseShape shape = case_shape(bench);
  CaseShape seen = shape;
  seen.topk = kWindow + shape.extra->topk;
  testing::Benchmark benchmark = make_gpu_benchmark(seen, k, bench.reach);
  benchmark.shape = describe(shape) + ", window " + std::to_string(kWindow);
  return benchmark;
}

}  // namespace winnow::sparse_mla
