// Step 11: the tokens go through a mixture of experts that is spread over several ranks.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"

#include "winnow/expert_parallel/testing/ranks.h"

namespace winnow::demo {
namespace {

namespace ep = expert_parallel;
using Clock = std::chrono::steady_clock;

// A router that picks the experts of a token, and the experts.
//
// The bits of an f32 sum depend on the order of its additions where they round. None rounds here:
// weights are multiples of kWeightUnit that add up to 1, experts' outputs are multiples of
// kOutputUnit and at most kMostOutput, so that every sum of their products is a multiple of
// kWeightUnit * kOutputUnit and at most 2^24 times that.
constexpr float kWeightUnit = 0x1p-8f;
constexpr float kOutputUnit = 0x1p-12f;
constexpr float kMostOutput = 16;
static_assert(kMostOutput / (kWeightUnit * kOutputUnit) <= 0x1p24f);

class Mixture {
 public:
  Mixture(int experts, std::int64_t width);

  int experts() const { return int(experts_.size()); }
  Routing route(const MatrixRef& tokens) const;
  // The feed-forward network of one expert, relu(rows * up) * down, rounded to kOutputUnit.
  Matrix apply(int expert, const MatrixRef& rows) const;
  // The same of one row by the plain formula, not rounded.
  std::vector<double> apply_plain(int expert, const float* row) const;

 private:
  struct Expert {
    Matrix up;    // [width, hidden]
    Matrix down;  // [hidden, width]
  };
  Matrix router_;  // [width, experts]
  std::vector<Expert> experts_;
};

constexpr std::uint64_t kSeed = 31;
constexpr std::int64_t kHidden = 64;
// The size of what an expert adds to a token; it keeps outputs far below kMostOutput.
constexpr double kOutputStrength = 0.5;

// The softmax of the scores in multiples of kWeightUnit: all but the first are rounded down, and
// the first gets the rest, so that they add up to 1.
void write_weights(std::span<const float> scores, float* weights) {
  std::array<double, kExpertTopk> shares;
  double sum = 0;
  for (int k = 0; k < kExpertTopk; ++k) {
    sum += shares[k] = std::exp(double(scores[k]) - double(scores[0]));
  }
  float left = 1;
  for (int k = 1; k < kExpertTopk; ++k) {
    weights[k] = kWeightUnit * float(std::floor(shares[k] / sum / double(kWeightUnit)));
    left -= weights[k];
  }
  weights[0] = left;
}

Mixture::Mixture(int experts, std::int64_t width) {
  Random random(kSeed);
  router_ = random_matrix(width, experts, 1, random);
  for (int i = 0; i < experts; ++i) {
    experts_.push_back(
        {random_matrix(width, kHidden, 1, random),
         random_matrix(kHidden, width, kOutputStrength / std::sqrt(double(kHidden)), random)});
  }
}

Routing Mixture::route(const MatrixRef& tokens) const {
  const Matrix scores = tokens * router_;
  Routing result{Tensor(DType::i32, {tokens.rows(), kExpertTopk}),
                 Tensor(DType::f32, {tokens.rows(), kExpertTopk})};
  std::vector<std::int32_t> order(experts_.size());
  for (std::int64_t t = 0; t < tokens.rows(); ++t) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + kExpertTopk, order.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return scores(t, a) != scores(t, b) ? scores(t, a) > scores(t, b) : a < b;
                      });
    std::array<float, kExpertTopk> best;
    for (int k = 0; k < kExpertTopk; ++k) {
      result.experts.values<std::int32_t>()[t * kExpertTopk + k] = order[k];
      best[k] = scores(t, order[k]);
    }
    write_weights(best, &result.weights.values<float>()[t * kExpertTopk]);
  }
  return result;
}

Matrix Mixture::apply(int expert, const MatrixRef& rows) const {
  const Matrix hidden = (rows * experts_[expert].up).cwiseMax(0.0f);
  Matrix result = hidden * experts_[expert].down;
  result.array() = (result.array() * (1 / kOutputUnit)).rint() * kOutputUnit;
  return result;
}

std::vector<double> Mixture::apply_plain(int expert, const float* row) const {
  const auto& [up, down] = experts_[expert];
  std::vector<double> result(down.cols());
  for (std::int64_t h = 0; h < kHidden; ++h) {
    double sum = 0;
    for (std::int64_t c = 0; c < up.rows(); ++c) sum += double(row[c]) * double(up(c, h));
    for (std::int64_t c = 0; c < down.cols(); ++c) {
      result[c] += std::max(sum, 0.0) * double(down(h, c));
    }
  }
  return result;
}

constexpr int kLeastExperts = 64;
constexpr std::int64_t kRowBytes = kNopeDim * sizeof(float);
constexpr int kBarWidth = 24;
// Outputs differ from the formula by the rounding to kOutputUnit and by that of f32 before it.
constexpr double kPlainTolerance = double(kOutputUnit) / 2 + 1e-5;

struct Problem {
  Matrix tokens;  // [tokens, kNopeDim]: the columns of the latent rows that stand for bytes
  Mixture mixture;
  Routing routing;
  std::int64_t pairs() const { return tokens.rows() * kExpertTopk; }
};

// Where the tokens of a rank begin: the last one has about three times as many as the first.
std::int64_t first_token(std::int64_t tokens, int rank, int ranks) {
  return tokens * rank * (rank + ranks) / (2 * ranks * ranks);
}

// What one rank had to do.
struct RankWork {
  std::int64_t tokens = 0;  // its own
  std::int64_t rows = 0;    // rows that arrived
  std::int64_t pairs = 0;   // pairs that its experts computed
  float largest = 0;        // largest magnitude of its experts' outputs
  Clock::duration dispatch{}, compute{}, combine{};
};

// For each expert of the rank: gathers its rows and adds its outputs, times the pairs' weights, to
// `sums`, which has a row for each row that arrived. These are in the order of all tokens, so that
// an expert's products have the same bits with any number of ranks.
void apply_experts(const Mixture& mixture, int first_expert, const ep::Dispatched& arrived,
                   const TensorView& sums, RankWork& work) {
  const Eigen::Map<const Matrix> input(arrived.output.values<float>().data(), work.rows, kNopeDim);
  Eigen::Map<Matrix> output(static_cast<float*>(sums.data()), work.rows, kNopeDim);
  output.setZero();
  const std::int64_t local_experts = arrived.descriptor->expert_counts().size(0);
  for (std::int32_t local = 0; local < local_experts; ++local) {
    std::vector<std::int64_t> rows;
    std::vector<float> weights;
    for (std::int64_t pair = 0; pair < work.rows * kExpertTopk; ++pair) {
      if (arrived.expert_ids.values<std::int32_t>()[pair] != local) continue;
      rows.push_back(pair / kExpertTopk);
      weights.push_back(arrived.weights.values<float>()[pair]);
    }
    if (rows.empty()) continue;
    const Matrix gathered = input(rows, Eigen::all);
    const Matrix made = mixture.apply(first_expert + local, gathered);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      output.row(rows[i]) += weights[i] * made.row(static_cast<std::int64_t>(i));
    }
    work.pairs += std::ssize(rows);
    work.largest = std::max(work.largest, made.cwiseAbs().maxCoeff());
  }
}

// One rank's part of the layer: its tokens out to the experts, its experts, the sums back.
RankWork run_rank(ep::InProcessWorld& world, int rank, const Problem& problem,
                  const TensorView& out) {
  const int ranks = world.world_size(), experts = problem.mixture.experts();
  const std::int64_t all = problem.tokens.rows();
  const std::int64_t begin = first_token(all, rank, ranks);
  const std::int64_t end = first_token(all, rank + 1, ranks);
  ep::AllToAll layer(world.transport(rank), world.store(),
                     {.max_tokens = all - first_token(all, ranks - 1, ranks),
                      .hidden = kNopeDim,
                      .topk = kExpertTopk,
                      .experts = experts,
                      .dtype = DType::f32});
  const ConstTensorView tokens(problem.tokens.data(), DType::f32, {all, kNopeDim});

  const auto start = Clock::now();
  const ep::Dispatched arrived =
      layer.dispatch({.input = tokens.slice(0, begin, end),
                      .expert_indices = problem.routing.experts.view().slice(0, begin, end),
                      .weights = problem.routing.weights.view().slice(0, begin, end),
                      .order = ep::RowOrder::token_major});
  const auto dispatched = Clock::now();
  RankWork work;
  work.tokens = end - begin;
  work.rows = arrived.descriptor->rows();
  const TensorView sums = layer.combine_buffer(*arrived.descriptor);
  apply_experts(problem.mixture, rank * (experts / ranks), arrived, sums, work);
  const auto computed = Clock::now();
  layer.combine({.expert_output = sums, .out = out.slice(0, begin, end)}, *arrived.descriptor);
  work.combine = Clock::now() - computed;
  work.compute = computed - dispatched;
  work.dispatch = dispatched - start;
  return work;
}

struct WorldWork {
  Tensor out;  // [tokens, kNopeDim]
  std::vector<RankWork> ranks;
};

// The ranks are threads.
WorldWork run_world(int ranks, const Problem& problem) {
  ep::RankTeam team(ranks);
  WorldWork result{unwritten({problem.tokens.rows(), kNopeDim}),
                   std::vector<RankWork>(static_cast<std::size_t>(ranks))};
  team.run([&](int rank, const std::shared_ptr<ep::Transport>&) {
    result.ranks[static_cast<std::size_t>(rank)] =
        run_rank(team.world(), rank, problem, result.out);
  });
  return result;
}

// Rows that a dispatch carries, counted from the routing alone.
struct Traffic {
  std::int64_t pair_rows_away = 0;  // one row per pair, where the expert lives on another rank
  std::int64_t rank_rows = 0;       // one row per (token, rank)
  std::int64_t rank_rows_away = 0;  // of these, to another rank than the token's own
};

Traffic count_traffic(const Problem& problem, int ranks) {
  Traffic result;
  const int experts_per_rank = problem.mixture.experts() / ranks;
  for (int source = 0; source < ranks; ++source) {
    const std::int64_t end = first_token(problem.tokens.rows(), source + 1, ranks);
    for (std::int64_t t = first_token(problem.tokens.rows(), source, ranks); t < end; ++t) {
      std::vector<bool> reached(ranks);
      for (int k = 0; k < kExpertTopk; ++k) {
        const int rank = problem.routing.experts.view().at<std::int32_t>(t, k) / experts_per_rank;
        result.pair_rows_away += rank != source;
        if (!reached[rank]) {
          ++result.rank_rows;
          result.rank_rows_away += rank != source;
        }
        reached[rank] = true;
      }
    }
  }
  return result;
}

// The largest difference to the sum over k of weight * expert(token), for some tokens.
double difference_to_plain(const Problem& problem, const Tensor& out) {
  double largest = 0;
  for (const std::int64_t t : spread_rows(problem.tokens.rows(), kSample)) {
    std::vector<double> wanted(kNopeDim);
    for (int k = 0; k < kExpertTopk; ++k) {
      const std::vector<double> made = problem.mixture.apply_plain(
          problem.routing.experts.view().at<std::int32_t>(t, k), problem.tokens.row(t).data());
      const double weight = problem.routing.weights.view().at<float>(t, k);
      for (std::int64_t c = 0; c < kNopeDim; ++c) wanted[c] += weight * made[c];
    }
    largest = larger(
        largest, largest_difference(out.values<float>().subspan(t * kNopeDim, kNopeDim), wanted));
  }
  return largest;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.numel() == b.numel() &&
         std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.numel()) * sizeof(float)) == 0;
}

// The time of the slowest rank.
double milliseconds(const WorldWork& work, Clock::duration RankWork::* part) {
  Clock::duration longest{};
  for (const RankWork& rank : work.ranks) longest = std::max(longest, rank.*part);
  return std::chrono::duration<double, std::milli>(longest).count();
}

}  // namespace

void run_experts_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  const int ranks = int(state.options.ranks);
  const int experts = (kLeastExperts + ranks - 1) / ranks * ranks;  // as many on every rank
  Problem problem{rows_of(layer.kv()).leftCols(kNopeDim), Mixture(experts, kNopeDim), {}};
  problem.routing = problem.mixture.route(problem.tokens);
  const WorldWork many = run_world(ranks, problem), one = run_world(1, problem);
  layer.note(Backend::cpu, "experts");

  const Traffic traffic = count_traffic(problem, ranks);
  const double saved = traffic.pair_rows_away == 0
                           ? 0
                           : 1 - double(traffic.rank_rows_away) / double(traffic.pair_rows_away);
  const double dispatch_ms = milliseconds(many, &RankWork::dispatch);
  const double compute_ms = milliseconds(many, &RankWork::compute);
  const double combine_ms = milliseconds(many, &RankWork::combine);
  report.size = format_text("%ld tokens, %d of %d experts each, %d rank%s", problem.tokens.rows(),
                            kExpertTopk, experts, ranks, ranks == 1 ? "" : "s");
  report.done.push_back(
      format_text("%ld pairs of a token and one of its experts; a token travels", problem.pairs()));
  report.done.push_back("once to each rank that has experts of its own, and one sum comes back:");
  report.done.push_back(format_text("%6ld rows of %ld bytes, %5.1f MB, if every pair sent its own",
                                    traffic.pair_rows_away, kRowBytes,
                                    double(traffic.pair_rows_away * kRowBytes) / 1e6));
  report.done.push_back(
      format_text("%6ld rows of %ld bytes, %5.1f MB, moved between ranks: %.1f %% saved",
                  traffic.rank_rows_away, kRowBytes,
                  double(traffic.rank_rows_away * kRowBytes) / 1e6, 100 * saved));
  report.done.push_back(format_text("dispatch %.1f ms, experts %.0f ms, combine %.1f ms",
                                    dispatch_ms, compute_ms, combine_ms));

  std::int64_t rows = 0, pairs = 0, most_pairs = 1;
  double largest = 0;
  for (const RankWork& rank : many.ranks) {
    rows += rank.rows;
    pairs += rank.pairs;
    most_pairs = std::max(most_pairs, rank.pairs);
    largest = larger(largest, rank.largest);
  }
  auto loads = nlohmann::ordered_json::array();
  for (int rank = 0; rank < ranks; ++rank) {
    const RankWork& work = many.ranks[rank];
    report.done.push_back(format_text("rank %2d has %4ld tokens, computes %5ld pairs ", rank,
                                      work.tokens, work.pairs));
    report.done.back() += std::string(work.pairs * kBarWidth / most_pairs, '#');
    loads.push_back({{"tokens", work.tokens}, {"rows", work.rows}, {"pairs", work.pairs}});
  }

  report.require("every token came once to each rank of its experts, every pair was computed",
                 rows == traffic.rank_rows && pairs == problem.pairs());
  report.at_most("experts' outputs, small enough for sums that do not round", largest, kMostOutput);
  report.require("equal to the result of one rank, bit for bit", same_bits(many.out, one.out));
  report.at_most(format_text("out of %ld tokens against the plain formula", kSample),
                 difference_to_plain(problem, many.out), kPlainTolerance);
  report.numbers = {{"ranks", ranks},
                    {"experts", experts},
                    {"experts_per_token", kExpertTopk},
                    {"pairs", problem.pairs()},
                    {"bytes_per_pair_sent", traffic.pair_rows_away * kRowBytes},
                    {"bytes_moved", traffic.rank_rows_away * kRowBytes},
                    {"saved", saved},
                    {"dispatch_ms", dispatch_ms},
                    {"experts_ms", compute_ms},
                    {"combine_ms", combine_ms},
                    {"load", loads}};
  state.experts = experts;
  state.routing = std::move(problem.routing);
}

}  // namespace winnow::demo
