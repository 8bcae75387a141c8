#include "winnow/expert_parallel/testing/all_to_all_problem.h"

#include <algorithm>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

using testing::Random;

// A number that position and seed alone decide, so that a wrong element tells where it came from.
std::uint64_t mix(std::uint64_t seed, std::int64_t rank, std::int64_t token, std::int64_t column) {
  return Random(seed ^ (std::uint64_t(rank + 1) << 48) ^ (std::uint64_t(token + 1) << 24) ^
                std::uint64_t(column))
      .next();
}

// Between -1 and 1 and never 0: 2^24 odd multiples of 2^-24, rounded to the dtype.
float payload(std::uint64_t bits) { return float(double(bits >> 40) * 0x1p-23 + 0x1p-24 - 1.0); }

void fill_payload(const TensorView& view, std::uint64_t seed, std::int64_t rank) {
  for (std::int64_t t = 0; t < view.size(0); ++t) {
    for (std::int64_t c = 0; c < view.size(1); ++c) {
      const std::uint64_t bits = mix(seed, rank, t, c);
      if (view.dtype() == DType::u8) {
        view.at<std::uint8_t>(t, c) = std::uint8_t(bits >> 32);
      } else if (view.dtype() == DType::i32) {
        view.at<std::int32_t>(t, c) = std::int32_t(bits >> 32);
      } else if (view.dtype() == DType::f8_e4m3) {
        view.at<Float8E4M3>(t, c).bits = std::uint8_t(bits >> 32);
      } else {
        oracle::store(view, t, c, payload(bits));
      }
    }
  }
}

std::int64_t token_count(const Problem& problem, int rank, Random& random) {
  switch (problem.tokens) {
    case Tokens::full:
      return problem.max_tokens;
    case Tokens::uneven:  // one rank is full, so that the limit is met
      return rank == problem.world_size() / 2 ? problem.max_tokens
                                              : random.below(problem.max_tokens + 1);
    case Tokens::even_ranks_empty:
      return rank % 2 == 0 ? 0 : problem.max_tokens;
    case Tokens::none:
      return 0;
  }
  return 0;
}

// Positions in the concatenation of all outputs: the tokens of a block of one expert and one source
// stand in reverse order, which no other rule gives; dropped pairs come after all rows.
void fill_scatter(Round& round, const Problem& problem) {
  std::vector<Tensor*> tables;
  for (Round::Rank& rank : round.ranks) {
    rank.scatter = Tensor(DType::i32, {rank.input.size(0), problem.topk});
    tables.push_back(&rank.scatter);
  }
  std::int64_t base = 0;
  for (const auto& rows : oracle::place(round.world)) {
    std::size_t begin = 0;
    while (begin < rows.size()) {
      const auto expert = [&](std::size_t i) {
        return round.world.expert(rows[i].source, rows[i].token, rows[i].k);
      };
      std::size_t end = begin;
      while (end < rows.size() && expert(end) == expert(begin) &&
             rows[end].source == rows[begin].source) {
        ++end;
      }
      for (std::size_t i = begin; i < end; ++i) {
        tables[std::size_t(rows[i].source)]->view().at<std::int32_t>(rows[i].token, rows[i].k) =
            std::int32_t(base + std::int64_t(end - 1 - (i - begin)));
      }
      begin = end;
    }
    base += std::int64_t(rows.size());
  }
  std::int64_t total = 0;
  for (int s = 0; s < problem.world_size(); ++s) {
    const std::int64_t n = round.world.tokens(s);
    total += n;
    for (std::int64_t t = 0; t < n; ++t) {
      for (int k = 0; k < problem.topk; ++k) {
        if (round.world.home(s, t, k) >= 0) continue;
        tables[std::size_t(s)]->view().at<std::int32_t>(t, k) = std::int32_t(base++);
      }
    }
  }
  round.scatter_table = Tensor(DType::i32, {total, problem.topk});
  std::int64_t row = 0;
  for (int s = 0; s < problem.world_size(); ++s) {
    for (std::int64_t t = 0; t < round.world.tokens(s); ++t, ++row) {
      for (int k = 0; k < problem.topk; ++k) {
        round.scatter_table.view().at<std::int32_t>(row, k) =
            tables[std::size_t(s)]->view().at<std::int32_t>(t, k);
      }
    }
    round.world.ranks[std::size_t(s)].scatter = *tables[std::size_t(s)];
  }
}

}  // namespace

Round make_round(const Problem& problem, std::uint64_t routing_seed, std::uint64_t payload_seed) {
  Round round;
  const int world_size = problem.world_size();
  oracle::World& world = round.world;
  world.world_size = world_size;
  world.local_world_size = problem.local_world_size;
  world.experts = problem.experts();
  world.topk = problem.topk;
  world.max_tokens = problem.max_tokens;
  world.token_major = problem.token_major;
  world.enable_local_combine = problem.local_combine;
  world.alignment = problem.alignment;
  round.ranks.resize(std::size_t(world_size));
  Random random(routing_seed);
  for (int r = 0; r < world_size; ++r) {
    Round::Rank& rank = round.ranks[std::size_t(r)];
    const std::int64_t n = token_count(problem, r, random);
    rank.input = Tensor(problem.fp8 ? DType::f8_e4m3 : problem.dtype, {n, problem.hidden});
    fill_payload(rank.input, payload_seed, r);
    rank.expert_indices = Tensor(DType::i32, {n, problem.topk});
    choose_experts(rank.expert_indices, random, problem.experts(), problem.choice);
    if (problem.weights) {
      rank.weights = Tensor(problem.weight_dtype, {n, problem.topk});
      fill_payload(rank.weights, payload_seed + 1, r);
    }
    if (problem.fp8) {
      const std::int64_t columns = problem.scale_columns;
      rank.scales =
          Tensor(problem.scale_dtype, {n, columns > 0 ? columns : (problem.hidden + 127) / 128});
      fill_payload(rank.scales, payload_seed + 2, r);
    }
    if (problem.bias) {
      rank.bias = Tensor(problem.dtype, {n, problem.hidden});
      fill_payload(rank.bias, payload_seed + 3, r);
    }
    if (problem.second_bias) {
      rank.second_bias = Tensor(problem.dtype, {n, problem.hidden});
      fill_payload(rank.second_bias, payload_seed + 5, r);
    }
    if (problem.combine_weights) {
      rank.combine_weights = Tensor(problem.weight_dtype, {n, problem.topk});
      fill_payload(rank.combine_weights, payload_seed + 6, r);
    }
    world.ranks.push_back({rank.input, rank.expert_indices, rank.weights, rank.scales, {}});
  }
  if (problem.scatter != Scatter::none) fill_scatter(round, problem);
  round.rows = oracle::place(world);
  std::vector<ConstTensorView> expert_outputs, pair_values;
  for (int r = 0; r < world_size; ++r) {
    Tensor& output = round.ranks[std::size_t(r)].expert_output;
    output =
        Tensor(problem.dtype, {std::int64_t(round.rows[std::size_t(r)].size()), problem.hidden});
    fill_payload(output, payload_seed + 4, r);
    expert_outputs.push_back(output);
    if (!problem.pair_values) continue;
    Tensor& values = round.ranks[std::size_t(r)].pair_values;
    values = Tensor(problem.weight_dtype, {output.size(0), problem.token_major ? problem.topk : 1});
    fill_payload(values, payload_seed + 7, r);
    pair_values.push_back(values);
  }
  for (int r = 0; r < world_size; ++r) {
    Round::Rank& rank = round.ranks[std::size_t(r)];
    std::vector<ConstTensorView> biases;
    if (problem.bias) biases.push_back(rank.bias);
    if (problem.second_bias) biases.push_back(rank.second_bias);
    ConstTensorView weights;
    if (problem.weighted_combine) weights = rank.weights;
    if (problem.combine_weights) weights = rank.combine_weights;
    rank.combined = oracle::combine(world, r, round.rows, expert_outputs, weights,
                                    problem.combine_weights, biases);
    if (!problem.pair_values) continue;
    rank.values = problem.add_values ? oracle::added_values(world, r, round.rows, pair_values)
                                     : oracle::pair_values(world, r, round.rows, pair_values);
  }
  return round;
}

std::int64_t Round::most_rows() const {
  std::size_t most = 0;
  for (const auto& list : rows) most = std::max(most, list.size());
  return std::int64_t(most);
}

std::vector<Round> make_rounds(const Problem& problem) {
  std::vector<Round> rounds;
  Random seeds(problem.seed ^ testing::seed_from(problem.name));
  const std::uint64_t routing = seeds.next();
  for (int i = 0; i < problem.rounds; ++i) {
    const bool again = problem.mode == Mode::cached;
    rounds.push_back(make_round(problem, again ? routing : seeds.next(), seeds.next()));
  }
  return rounds;
}

Config Problem::config() const {
  Config config;
  config.max_tokens = max_tokens;
  config.hidden = hidden;
  config.topk = topk;
  config.experts = experts();
  config.dtype = dtype;
  config.weight_dtype = weight_dtype;
  config.local_world_size = local_world_size;
  config.enable_local_combine = local_combine;
  config.sm_count = sm_count;
  config.arena_rows = arena_rows;
  config.timeout = std::chrono::seconds(60);
  return config;
}

std::string describe(const Problem& problem) {
  return std::to_string(problem.nodes) + " nodes of " + std::to_string(problem.local_world_size) +
         ", " + std::to_string(problem.experts()) + " experts, topk " +
         std::to_string(problem.topk) + ", max_tokens " + std::to_string(problem.max_tokens) +
         ", hidden " + std::to_string(problem.hidden);
}

}  // namespace winnow::expert_parallel
