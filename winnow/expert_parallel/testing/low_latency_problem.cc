#include "winnow/expert_parallel/testing/low_latency_problem.h"

#include <algorithm>

#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using testing::Random;

float number(std::uint64_t seed, std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  const std::uint64_t bits = Random(seed ^ (a << 48) ^ (b << 24) ^ c).next();
  return float(double(bits >> 40) * 0x1p-23 + 0x1p-24 - 1.0);
}

testing::Comparison that(std::string_view what, bool holds, const std::string& detail) {
  return {std::string(what), holds ? 0.0 : 1.0, 0, holds, holds ? "" : detail};
}

}  // namespace

LowLatencyConfig LowLatencyProblem::config() const {
  return {.max_tokens = max_tokens,
          .hidden = hidden,
          .topk = topk,
          .experts = experts(),
          .enable_shrink = shrink,
          .timeout = std::chrono::seconds(60)};
}

std::string describe(const LowLatencyProblem& problem) {
  return std::to_string(problem.world) + " ranks, " + std::to_string(problem.experts()) +
         " experts, topk " + std::to_string(problem.topk) + ", max_tokens " +
         std::to_string(problem.max_tokens) + ", hidden " + std::to_string(problem.hidden);
}

std::vector<LowLatencyRound> make_rounds(const LowLatencyProblem& problem) {
  std::vector<LowLatencyRound> rounds(std::size_t(problem.rounds));
  Random random(testing::seed_from(problem.name));
  const int topk = problem.given_topk > 0 ? problem.given_topk : problem.topk;
  for (LowLatencyRound& round : rounds) {
    round.seed = random.next();
    round.world.world_size = problem.world;
    round.world.experts = problem.experts();
    round.world.topk = problem.topk;
    for (int rank = 0; rank < problem.world; ++rank) {
      const bool all = problem.full || rank == problem.world / 2;
      const std::int64_t n = all ? problem.max_tokens : random.below(problem.max_tokens + 1);
      Tensor input(DType::bf16, {n, problem.hidden}), indices(DType::i32, {n, topk});
      Tensor weights(DType::f32, {n, topk});
      for (std::int64_t token = 0; token < n; ++token) {
        for (std::int64_t c = 0; c < problem.hidden; ++c) {
          // A block of zeros, and blocks of other magnitudes.
          const float magnitude = std::exp2(float((token + c / 128) % 9) - 4.0f);
          const bool zero = (token + c / 128) % 7 == 3;
          input.view().at<BFloat16>(token, c) =
              BFloat16(zero ? 0.0f
                            : magnitude * number(round.seed + 1, std::uint64_t(rank),
                                                 std::uint64_t(token), std::uint64_t(c)));
        }
        for (std::int64_t k = 0; k < topk; ++k) {
          weights.view().at<float>(token, k) =
              number(round.seed + 2, std::uint64_t(rank), std::uint64_t(token), std::uint64_t(k));
        }
      }
      choose_experts(indices, random, problem.experts(), problem.choice);
      round.inputs.push_back(std::move(input));
      round.indices.push_back(std::move(indices));
      round.weights.push_back(std::move(weights));
    }
    for (const Tensor& input : round.inputs) round.world.inputs.push_back(input);
    for (const Tensor& indices : round.indices) round.world.indices.push_back(indices);
  }
  return rounds;
}

LowLatencyTensors::LowLatencyTensors(const RankDevice& place, const LowLatencyProblem& problem,
                                     const LowLatencyRound& round, int rank)
    : place_(place), problem_(problem), round_(round), rank_(rank) {
  const std::size_t me = std::size_t(rank);
  const std::int64_t experts = problem.experts_per_rank, world = problem.world;
  const std::int64_t rows = world * problem.max_tokens, hidden = problem.hidden;
  input_ = place.copy(round.inputs[me]);
  weights_ = place.copy(round.weights[me]);
  const Tensor wide = problem.wide_indices ? widened(round.indices[me]) : Tensor();
  indices_ = place.copy(wide.view().present() ? wide.view() : round.indices[me].view());
  const auto make = [&](DType dtype, std::vector<std::int64_t> shape) {
    return place.make(dtype, shape);
  };
  const bool fp8 = problem.format != RowFormat::bf16;
  output_ = make(fp8 ? DType::f8_e4m3 : DType::bf16, {experts, rows, hidden});
  if (fp8) {
    const bool packed = problem.format == RowFormat::fp8_ue8m0;
    const std::int64_t columns = hidden / (packed ? 512 : 128);
    const DType dtype = packed ? DType::i32 : DType::f32;
    scales_ = make(dtype, {experts, columns, rows});
    scales_view_ = TensorView(scales_.data(), dtype, {experts, rows, columns},
                              {rows * columns, 1, rows}, place.device());
    if (!problem.scales_by_column) {
      scales_view_ = TensorView(scales_.data(), dtype, {experts, rows, columns}, place.device());
    }
  }
  counts_ = make(DType::i32, {experts});
  tokens_ = make(DType::i32, {experts, rows});
  pairs_ = make(DType::i32, {experts, rows});
  pair_rows_ = make(DType::i32, {world, problem.max_tokens, problem.topk});
  ranges_ = make(DType::i64, {experts, world});
  out_ = make(DType::bf16, {round.inputs[me].size(0), hidden});
  statistics = place.copy(Tensor(DType::i32, {experts}));
  waits = place.copy(Tensor(DType::i64, {world}));
}

void LowLatencyTensors::give(const LowLatencyRound& round) {
  const auto me = std::size_t(rank_);
  place_.write(input_, round.inputs[me]);
  place_.write(indices_, round.indices[me]);
  place_.write(weights_, round.weights[me]);
}

LowLatencyDispatchArgs LowLatencyTensors::dispatch_args(CallPart part) const {
  auto* self = const_cast<LowLatencyTensors*>(this);
  return {.input = input_,
          .expert_indices = indices_,
          .format = problem_.format,
          .part = part,
          .sent = dispatched_,
          .output = self->output_,
          .scales = scales_view_,
          .counts = self->counts_,
          .source_tokens = self->tokens_,
          .source_pairs = self->pairs_,
          .pair_rows = self->pair_rows_,
          .ranges = self->ranges_,
          .expert_statistics = self->statistics,
          .wait_statistics = self->waits,
          .stream = place_.stream()};
}

float LowLatencyTensors::expert_row(int expert, int source, std::int32_t pair,
                                    std::int64_t column) const {
  const std::uint64_t where = std::uint64_t(expert * problem_.world + source);
  return float(
      BFloat16(number(round_.seed + 3, where, std::uint64_t(pair), std::uint64_t(column))));
}

void LowLatencyTensors::make_expert_output() {
  const Tensor pairs = place_.to_host(pairs_.view()), ranges = place_.to_host(ranges_.view());
  Tensor made(DType::bf16,
              {problem_.experts_per_rank, problem_.world * problem_.max_tokens, problem_.hidden});
  testing::fill_unwritten(made.view());
  for (int x = 0; x < problem_.experts_per_rank; ++x) {
    for (int source = 0; source < problem_.world; ++source) {
      const std::int64_t range = ranges.view().at<std::int64_t>(x, source);
      const std::int64_t begin = range >> 32, count = range & 0xffffffff;
      // Of a dispatch that has gone wrong, which check_dispatched() tells of.
      if (begin < 0 || begin + count > made.size(1)) continue;
      for (std::int64_t row = begin; row < begin + count; ++row) {
        const std::int32_t pair = pairs.view().at<std::int32_t>(x, row);
        for (std::int64_t c = 0; c < problem_.hidden; ++c) {
          made.view().at<BFloat16>(x, row, c) =
              BFloat16(expert_row(rank_ * problem_.experts_per_rank + x, source, pair, c));
        }
      }
    }
  }
  expert_output_ = place_.copy(made);
}

LowLatencyCombineArgs LowLatencyTensors::combine_args(CallPart part) const {
  auto* self = const_cast<LowLatencyTensors*>(this);
  return {.expert_output = expert_output_,
          .pair_rows = pair_rows_,
          .expert_indices = indices_,
          .weights = weights_,
          .out = self->out_,
          .part = part,
          .sent = combined_,
          .stream = place_.stream()};
}

void LowLatencyTensors::dispatch(LowLatency& layer, CallPart part) {
  dispatched_ = layer.dispatch(dispatch_args(part));
}
void LowLatencyTensors::combine(LowLatency& layer, CallPart part) {
  combined_ = layer.combine(combine_args(part));
}

void LowLatencyTensors::check_dispatched(Comparisons& comparisons) const {
  const Tensor output = place_.to_host(output_.view()), counts = place_.to_host(counts_.view());
  const Tensor tokens = place_.to_host(tokens_.view()), pairs = place_.to_host(pairs_.view());
  const Tensor ranges = place_.to_host(ranges_.view()), seen = place_.to_host(statistics.view());
  Tensor scales;
  if (scales_.view().present()) scales = place_.to_host(scales_.view());
  const std::int64_t rows = problem_.world * problem_.max_tokens;
  const bool packed = problem_.format == RowFormat::fp8_ue8m0;
  for (int x = 0; x < problem_.experts_per_rank; ++x) {
    std::int64_t begin = 0;
    for (int source = 0; source < problem_.world; ++source) {
      std::vector<std::int32_t> wanted =
          low_latency_oracle::pairs_of(round_.world, source, rank_ * problem_.experts_per_rank + x);
      const auto count = std::int64_t(wanted.size());
      comparisons.add(that("ranges",
                           ranges.view().at<std::int64_t>(x, source) == (begin << 32 | count),
                           "expert " + std::to_string(x) + ", rank " + std::to_string(source)));
      std::vector<std::int32_t> got;
      for (std::int64_t row = begin; row < begin + count; ++row) {
        got.push_back(pairs.view().at<std::int32_t>(x, row));
        comparisons.add(that("source_tokens",
                             tokens.view().at<std::int32_t>(x, row) == got.back() / problem_.topk,
                             "row " + std::to_string(row)));
      }
      if (!place_.on_gpu()) {
        comparisons.add(that("order of tokens", got == wanted, "expert " + std::to_string(x)));
      }
      std::vector<std::int32_t> sorted = got;
      std::ranges::sort(sorted);
      std::ranges::sort(wanted);
      comparisons.add(that("source_pairs", sorted == wanted, "expert " + std::to_string(x)));
      if (sorted != wanted) return;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = begin + i, token = got[std::size_t(i)] / problem_.topk;
        const ConstTensorView& from = round_.world.inputs[std::size_t(source)];
        std::int64_t wrong = -1;
        for (std::int64_t c = 0; c < problem_.hidden; ++c) {
          const float value = float(from.at<BFloat16>(token, c));
          bool same;
          if (problem_.format == RowFormat::bf16) {
            same = float(output.view().at<BFloat16>(x, row, c)) == value;
          } else {
            const float scale = low_latency_oracle::scale_of(from, token, c / 128,
                                                             problem_.format != RowFormat::fp8);
            same = output.view().at<Float8E4M3>(x, row, c).bits ==
                   low_latency_oracle::element_of(value, scale);
            const std::int64_t block = c / (packed ? 512 : 128);
            const std::int64_t columns = problem_.hidden / (packed ? 512 : 128);
            const std::int64_t at = problem_.scales_by_column ? (x * columns + block) * rows + row
                                                              : (x * rows + row) * columns + block;
            if (packed) {
              const auto word = std::uint32_t(scales.values<std::int32_t>()[std::size_t(at)]);
              const auto exponent = std::bit_cast<std::uint32_t>(scale) >> 23;
              same = same && (word >> (8 * (c / 128 % 4)) & 0xff) == exponent;
            } else {
              same = same && scales.values<float>()[std::size_t(at)] == scale;
            }
          }
          if (!same && wrong < 0) wrong = c;
        }
        comparisons.add(that("output", wrong < 0,
                             "row " + std::to_string(row) + ", column " + std::to_string(wrong)));
      }
      begin += count;
    }
    comparisons.add(
        that("counts", counts.view().at<std::int32_t>(x) == begin, "expert " + std::to_string(x)));
    comparisons.add(that("expert_statistics", seen.view().at<std::int32_t>(x) == begin,
                         "expert " + std::to_string(x)));
  }
}

void LowLatencyTensors::check_combined(Comparisons& comparisons, int gone) const {
  Tensor indices = round_.indices[std::size_t(rank_)].clone();
  for (std::int32_t& expert : indices.values<std::int32_t>()) {
    if (expert >= 0 && expert / problem_.experts_per_rank == gone) expert = -1;
  }
  const Tensor out = place_.to_host(out_.view());
  std::string wrong;
  for (std::int64_t token = 0; token < out.size(0); ++token) {
    for (std::int64_t c = 0; c < problem_.hidden; ++c) {
      const BFloat16 want = low_latency_oracle::sum_of(
          round_.world, indices, round_.weights[std::size_t(rank_)], token,
          [&](std::int64_t k, std::int32_t expert) {
            return expert_row(expert, rank_, std::int32_t(token * problem_.topk + k), c);
          });
      if (float(out.view().at<BFloat16>(token, c)) == float(want) || !wrong.empty()) continue;
      wrong = "token " + std::to_string(token) + ", column " + std::to_string(c);
    }
  }
  comparisons.add(that("combine", wrong.empty(), wrong));
}

Comparisons run_rank(LowLatency& layer, const LowLatencyProblem& problem,
                     const std::vector<LowLatencyRound>& rounds) {
  Comparisons comparisons;
  const RankDevice place(layer.config().device);
  std::vector<std::unique_ptr<LowLatencyTensors>> all;
  for (const LowLatencyRound& round : rounds) {
    all.push_back(std::make_unique<LowLatencyTensors>(place, problem, round, layer.rank()));
  }
  const std::size_t together = problem.halves ? 2 : 1;
  for (std::size_t first = 0; first < all.size(); first += together) {
    const std::size_t last = std::min(first + together, all.size());
    const auto each = [&](const auto& call) {
      for (std::size_t i = first; i < last; ++i) call(*all[i]);
    };
    const bool reverse = problem.newest_first && layer.rank() % 2 == 0;
    const auto receive_each = [&](const auto& call) {
      for (std::size_t i = first; i < last; ++i) call(*all[reverse ? last - 1 - (i - first) : i]);
    };
    if (problem.halves) {
      each([&](auto& one) { one.dispatch(layer, CallPart::send); });
      receive_each([&](auto& one) { one.dispatch(layer, CallPart::receive); });
    } else {
      each([&](auto& one) { one.dispatch(layer, CallPart::both); });
    }
    comparisons.ran_on(layer.backend());
    each([&](auto& one) { one.check_dispatched(comparisons); });
    each([&](auto& one) { one.make_expert_output(); });
    if (problem.halves) {
      each([&](auto& one) { one.combine(layer, CallPart::send); });
      receive_each([&](auto& one) { one.combine(layer, CallPart::receive); });
    } else {
      each([&](auto& one) { one.combine(layer, CallPart::both); });
    }
    each([&](auto& one) { one.check_combined(comparisons); });
  }
  return comparisons;
}

}  // namespace winnow::expert_parallel
