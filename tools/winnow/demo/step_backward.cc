// Step 9: the gradients against finite differences of the plain formula.
#include <cmath>

#include "tools/winnow/demo/comparison.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

constexpr std::int64_t kQueries = 6;
constexpr std::int64_t kRows = 96;
constexpr std::int64_t kEntries = 40;
constexpr int kDirections = 3;
constexpr double kStepLength = 1e-4;  // the formula is in double: the error is about its square

// A little attention problem from the document: its first rows, and the queries that stand there
// last. The entries are random: some occur twice, some are invalid, some lie after their query.
struct Problem {
  Tensor q, kv, indices, sink, d_out;
  std::int64_t q_start = kRows - kQueries;
};

Problem make_problem(const Layer& layer, Random& random) {
  Problem problem;
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < kQueries; ++i) positions.push_back(problem.q_start + i);
  problem.q = gather_queries(layer.q(), positions);
  problem.kv = Tensor(DType::f32, {kRows, 1, kRowDim});
  const std::span<const float> rows = layer.kv().values<float>();
  std::copy_n(rows.begin(), kRows * kRowDim, problem.kv.values<float>().begin());
  problem.indices = Tensor(DType::i32, {kQueries, 1, kEntries});
  for (std::int32_t& index : problem.indices.values<std::int32_t>()) {
    index = static_cast<std::int32_t>(random.below(kRows + 8)) - 4;
  }
  problem.sink = Tensor(DType::f32, {kHeads});
  testing::fill_normal(problem.sink, random);
  problem.d_out = Tensor(DType::f32, {kQueries, kHeads, sparse_mla::kValueDim});
  testing::fill_normal(problem.d_out, random);
  return problem;
}

// sum(d_out * out) by the plain formula.
double objective(const Problem& problem, const PlainInputs& inputs) {
  const std::span<const float> d_out = problem.d_out.values<float>();
  const std::span<const std::int32_t> indices = problem.indices.values<std::int32_t>();
  double sum = 0;
  std::size_t next = 0;
  for (std::int64_t i = 0; i < kQueries; ++i) {
    std::vector<std::int32_t> entries;
    for (const std::int32_t index : indices.subspan(i * kEntries, kEntries)) {
      entries.push_back(index < kRows ? index : -1);
    }
    const PlainResult plain = plain_attention(inputs, i, problem.q_start + i, entries);
    for (const double value : plain.out) sum += value * double(d_out[next++]);
  }
  return sum;
}

// Compares derivatives of the objective along random directions in one of the inputs. `variable`
// is that input, a member of `inputs`. Returns the largest error relative to the largest
// derivative.
double directional_error(const Problem& problem, PlainInputs& inputs, std::vector<double>& variable,
                         std::span<const float> gradient, Random& random) {
  const std::vector<double> start = variable;
  double largest_error = 0, largest_derivative = 0;
  for (int d = 0; d < kDirections; ++d) {
    std::vector<double> direction(start.size());
    double predicted = 0;
    for (std::size_t i = 0; i < start.size(); ++i) {
      direction[i] = random.normal();
      predicted += direction[i] * double(gradient[i]);
    }
    const auto objective_at = [&](double distance) {
      for (std::size_t i = 0; i < start.size(); ++i) {
        variable[i] = start[i] + distance * direction[i];
      }
      return objective(problem, inputs);
    };
    const double measured =
        (objective_at(kStepLength) - objective_at(-kStepLength)) / (2 * kStepLength);
    largest_error = larger(largest_error, std::fabs(predicted - measured));
    largest_derivative = larger(largest_derivative, std::fabs(measured));
  }
  variable = start;
  return largest_error / largest_derivative;
}

}  // namespace

void run_backward_step(DemoState& state, StepReport& report) {
  Layer& layer = *state.layer;
  Random random(19);
  Problem problem = make_problem(layer, random);
  Tensor out = unwritten({kQueries, kHeads, sparse_mla::kValueDim});
  Tensor lse = unwritten({kQueries, kHeads});
  Tensor dq = unwritten({kQueries, kHeads, kRowDim});
  Tensor dkv = unwritten({kRows, 1, kRowDim});
  Tensor d_sink = unwritten({kHeads});
  layer.note(sparse_mla::forward({.q = problem.q,
                                  .kv = problem.kv,
                                  .indices = problem.indices,
                                  .attn_sink = problem.sink,
                                  .q_start = problem.q_start,
                                  .out = out,
                                  .lse = lse},
                                 layer.placement().cpu_options()),
             "backward");
  layer.note(sparse_mla::backward({.q = problem.q,
                                   .kv = problem.kv,
                                   .indices = problem.indices,
                                   .out = out,
                                   .lse = lse,
                                   .d_out = problem.d_out,
                                   .attn_sink = problem.sink,
                                   .q_start = problem.q_start,
                                   .deterministic = true,
                                   .dq = dq,
                                   .dkv = dkv,
                                   .d_sink = d_sink},
                                  layer.placement().cpu_options()),
             "backward");

  PlainInputs inputs;
  inputs.q = to_double(problem.q.values<float>());
  inputs.kv = to_double(problem.kv.values<float>());
  inputs.sink = to_double(problem.sink.values<float>());
  inputs.heads = kHeads;
  inputs.width = kRowDim;
  inputs.value_width = sparse_mla::kValueDim;
  report.size =
      format_text("%ld queries, %ld heads, topk %ld, %ld rows", kQueries, kHeads, kEntries, kRows);
  report.done.push_back("sparse_mla::backward with sinks, some entries repeated, invalid or after");
  report.done.push_back("the query; derivatives along random directions by central differences");
  if (layer.placement().device.type != DeviceType::cpu) {
    report.done.push_back("runs on the cpu, in f32: bf16 has too few digits for this");
  }
  report.require("dq, dkv and d_sink are finite",
                 all_finite(dq) && all_finite(dkv) && all_finite(d_sink));
  report.at_most("dq against finite differences",
                 directional_error(problem, inputs, inputs.q, dq.values<float>(), random),
                 kGradientTolerance);
  report.at_most("dkv against finite differences",
                 directional_error(problem, inputs, inputs.kv, dkv.values<float>(), random),
                 kGradientTolerance);
  report.at_most("d_sink against finite differences",
                 directional_error(problem, inputs, inputs.sink, d_sink.values<float>(), random),
                 kGradientTolerance);
}

}  // namespace winnow::demo
