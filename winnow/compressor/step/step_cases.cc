// The case table of compressor::step: a prompt of each sequence, then steps of some tokens, some of
// which are undone.
#include <algorithm>
#include <cmath>

#include "winnow/compressor/cases.h"
#include "winnow/compressor/step/step.h"
#include "winnow/compressor/step/step_contract.h"
#include "winnow/compressor/step/step_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> step_benchmarks();
testing::Operation step_operation();

namespace {

struct StepCase {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> prompts = {13, 0, 3, 40};
  std::int64_t steps = 9, most = 3;           // tokens of a sequence and a step
  std::int64_t ratio = 4, d = 64, spare = 3;  // places of the ring beyond a window
  bool overlap = true, norm = false, hadamard = false, undone = false, left_out = false;
  std::int64_t pairs = 0;
  bool wide = false;
  Layout layout = Layout::dense;

  std::int64_t ring() const { return ratio * (overlap ? 2 : 1) + spare; }
  // What forward() has for it: the sequence of all tokens of a call.
  CaseShape call(std::int64_t index, const std::vector<std::int64_t>& counts) const {
    return {.name = name + std::to_string(index),
            .dtype = dtype,
            .lengths = counts,
            .ratio = ratio,
            .d = d,
            .overlap = overlap,
            .norm = norm,
            .hadamard = hadamard,
            .pairs = pairs,
            .wide = wide,
            .layout = layout,
            .poison = false};
  }
};

std::vector<StepCase> make_cases() {
  std::vector<StepCase> list;
  const auto add = [&list](const StepCase& shape) {
    testing::add(list, {DType::f32, DType::f16, DType::bf16}, shape);
  };
  for (const bool overlap : {false, true}) {
    const std::string kind = overlap ? "overlap" : "plain";
    add({.name = kind, .overlap = overlap});
    add({.name = kind + "-undone", .overlap = overlap, .undone = true});
    add({.name = kind + "-one-undone", .spare = 0, .overlap = overlap, .undone = true});
    for (const std::int64_t ratio : {1, 3, 7}) {
      add({.name = testing::numbered("ratio", ratio) + "-" + kind,
           .ratio = ratio,
           .d = 24,
           .overlap = overlap,
           .norm = true,
           .undone = true,
           .pairs = 5});
    }
  }
  add({.name = "csa", .steps = 5, .d = 512, .norm = true, .undone = true, .pairs = 32});
  add({.name = "keys", .d = 128, .norm = true, .hadamard = true, .undone = true, .pairs = 32});
  add({.name = "hca",
       .prompts = {130, 255, 5},
       .steps = 2,
       .ratio = 128,
       .d = 512,
       .overlap = false,
       .norm = true,
       .pairs = 32});
  add({.name = "one-token", .steps = 20, .most = 1, .d = 8});
  add({.name = "long-steps", .most = 30, .d = 16});
  add({.name = "left-out", .undone = true, .left_out = true});
  add({.name = "no-sequence", .prompts = {}, .steps = 1});
  add({.name = "wide-result", .norm = true, .wide = true});
  add({.name = "strided", .undone = true, .pairs = 3, .layout = Layout::wide});
  add({.name = "reversed", .undone = true, .layout = Layout::reversed});
  testing::add_f64(list, {"overlap-undone", "plain-undone", "ratio3-overlap", "keys", "strided"});
  return list;
}

std::string describe(const StepCase& shape) {
  return "sequences " + std::to_string(shape.prompts.size()) + ", steps " +
         std::to_string(shape.steps) + ", ratio " + std::to_string(shape.ratio) + ", d " +
         std::to_string(shape.d) + ", ring " + std::to_string(shape.ring());
}

testing::CaseOutcome run(const StepCase& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  testing::Random random(testing::seed_from(shape.name));
  const auto n = static_cast<std::int64_t>(shape.prompts.size());
  const DType real = accumulator_of(shape.dtype);
  const std::int64_t states = n + 2, columns = shape.d * (shape.overlap ? 2 : 1);
  const StridedTensor state_there =
      testing::on(device, make_tensor(real, {states, shape.ring(), 2 * columns}, shape.layout));
  std::vector<oracle::History> histories(static_cast<std::size_t>(states));
  std::vector<std::int64_t> positions(static_cast<std::size_t>(n), 0);
  // What stays the same from call to call.
  const CaseInputs fixed = make_inputs(shape.call(-1, {200})), fixed_there = fixed.on(device);
  oracle::Vector rows, wanted_rows;
  testing::CaseOutcome outcome;
  StepArgs args;
  for (std::int64_t call = 0; call <= shape.steps; ++call) {
    std::vector<std::int64_t> counts = shape.prompts;
    for (std::int64_t& count : counts) {
      if (call > 0) count = shape.most == 1 ? 1 : random.below(shape.most + 1);
    }
    const CaseInputs inputs = make_inputs(shape.call(call, counts));
    Tensor first(DType::i32, {n}), slots(DType::i32, {n});
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const bool left_out = shape.left_out && (call + i) % 3 == 1;
      first.values<std::int32_t>()[at] = static_cast<std::int32_t>(positions[at]);
      slots.values<std::int32_t>()[at] = left_out ? -1 - int(i) : int(n - i);
    }
    const StridedTensor out =
        testing::on(device, make_output(shape.wide ? real : shape.dtype,
                                        {inputs.kv.view.size(0), shape.d}, shape.layout));
    const auto pass = [&](const CaseInputs& call_inputs, const CaseInputs& fixed_inputs,
                          const ConstTensorView& positions_of_call,
                          const ConstTensorView& states_of_call) {
      args.kv = call_inputs.kv.view;
      args.gate = call_inputs.gate.view;
      args.cu_seqlens = call_inputs.cu_seqlens.view;
      args.first_position = positions_of_call;
      args.state_slots = states_of_call;
      args.position_bias = fixed_inputs.position_bias.view;
      args.norm_weight = fixed_inputs.norm_weight.view;
      args.cos = fixed_inputs.cos.view;
      args.sin = fixed_inputs.sin.view;
    };
    args = {.overlap = shape.overlap,
            .hadamard = shape.hadamard,
            .state = state_there.view,
            .rows = out.view};
    const CaseInputs there = inputs.on(device);
    const Tensor first_there = first.to(device), slots_there = slots.to(device);
    pass(there, fixed_there, first_there, slots_there);
    outcome.backend = step(args, target.options);
    pass(inputs, fixed, first, slots);  // for the oracle
    const StridedTensor out_here = testing::on({}, out);
    const oracle::Vector got = testing::read(out_here.view);
    const oracle::Vector wanted = oracle::step(args, histories, std::nan(""));
    rows.insert(rows.end(), got.begin(), got.end());
    wanted_rows.insert(wanted_rows.end(), wanted.begin(), wanted.end());
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (slots.values<std::int32_t>()[at] < 0) continue;
      const std::int64_t most = std::min(counts[at], shape.spare + 1);
      positions[at] += counts[at] - (shape.undone ? random.below(most + 1) : 0);
    }
  }
  const std::int64_t of_rows[] = {static_cast<std::int64_t>(rows.size()) / shape.d, shape.d};
  outcome.comparisons.push_back(testing::compare("rows", rows, wanted_rows, of_rows,
                                                 rows_tolerance(shape.wide ? real : shape.dtype)));
  // The tokens of the open windows; states of nobody are as they were.
  const StridedTensor state = testing::on({}, state_there);
  oracle::Vector places, wanted_places;
  for (std::int64_t slot = 0; slot < states; ++slot) {
    const TensorView ring = state.view.slice(0, slot, slot + 1);
    if (slot == 0 || slot > n) {
      const oracle::Vector all = testing::read(ring);
      places.insert(places.end(), all.begin(), all.end());
      wanted_places.resize(places.size(), std::nan(""));
      continue;
    }
    const std::int64_t position = positions[static_cast<std::size_t>(n - slot)];
    const std::int64_t open = (position / shape.ratio - (shape.overlap ? 1 : 0)) * shape.ratio;
    for (std::int64_t p = std::max<std::int64_t>(open, 0); p < position; ++p) {
      const std::int64_t place = p % shape.ring();
      const oracle::Vector got = testing::read(ring.slice(1, place, place + 1));
      const oracle::Vector wanted = oracle::place_of(args, histories[std::size_t(slot)], p);
      places.insert(places.end(), got.begin(), got.end());
      wanted_places.insert(wanted_places.end(), wanted.begin(), wanted.end());
    }
  }
  const std::int64_t of_places[] = {static_cast<std::int64_t>(places.size())};
  outcome.comparisons.push_back(
      testing::compare("state", places, wanted_places, of_places, {1e-7}));
  return outcome;
}

}  // namespace

testing::Operation step_operation() {
  return {"compressor::step", "rows of tokens that come some at a time, from a state",
          testing::cases_of(make_cases(), run, testing::all_but_f64<StepCase>), step_benchmarks(),
          testing::repeated(kStep, step)};
}

}  // namespace winnow::compressor
