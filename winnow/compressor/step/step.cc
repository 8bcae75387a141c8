#include "winnow/compressor/step/step.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "winnow/compressor/step/step_contract.h"
#include "winnow/compressor/step/step_impl.h"
#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/on_host.h"
#include "winnow/core/read_once.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"

namespace winnow::compressor {

void check_state(const Check& check, const StepArgs& args) {
  const Device device = args.kv.device();
  const Dim n{"n", args.cu_seqlens.size(0) - 1};
  check.input("first_position", args.first_position, {n}, {DType::i32}, device);
  check.input("state_slots", args.state_slots, {n}, {DType::i32}, device);
  check.rank("state", args.state, 3, "[states, ring, 2 * columns]");
  const std::int64_t ring = args.state.size(1);
  check.output(
      "state", args.state,
      {{"states", args.state.size(0)}, {"ring", ring}, {"2 * columns", 2 * args.kv.size(1)}},
      {accumulator_of(args.kv.dtype())}, device);
  const std::int64_t window = args.position_bias.size(0) * (args.overlap ? 2 : 1);
  check.that(ring >= window, "state",
             "a ring of at least " + std::to_string(window) + " tokens, those of a window",
             std::to_string(ring));
}

namespace {

constexpr std::string_view kOperation = kStep.operation;

// Gives the sequences their states, each to one of them, and the windows that they complete.
void take_states(const Check& check, const StepArgs& args, const RunOptions& options,
                 std::vector<Sequence>& sequences) {
  const std::int64_t states = args.state.size(0), ratio = args.position_bias.size(0);
  const OnHost<std::int32_t> slots(static_cast<const std::int32_t*>(args.state_slots.data()),
                                   args.state_slots.size(0), args.kv.device(), options.stream);
  std::vector<std::pair<std::int64_t, std::size_t>> taken;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = sequences[i];
    sequence.state = read_once(slots.data() + i);
    sequence.row = row;
    if (sequence.state < 0) continue;
    if (sequence.state >= states) {
      check.that(false, "state_slots", "slots below " + std::to_string(states) + " states",
                 std::to_string(sequence.state) + " for sequence " + std::to_string(i));
    }
    taken.emplace_back(sequence.state, i);
    const std::int64_t complete = (sequence.position + sequence.tokens) / ratio;
    sequence.rows = complete - sequence.position / ratio;
    row += sequence.rows;
    if (args.cos.present() && sequence.rows > 0) {
      check_position(check, args.cos, (complete - 1) * ratio, i);
    }
  }
  std::sort(taken.begin(), taken.end());
  const auto twice = std::adjacent_find(
      taken.begin(), taken.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == taken.end()) return;
  check.that(false, "state_slots", "each state at most once",
             "state " + std::to_string(twice->first) + " for sequence " +
                 std::to_string(twice->second) + " and sequence " +
                 std::to_string((twice + 1)->second));
}

Backend run(const StepArgs& args, const RunOptions& options) {
  kStep.check(args);
  const Check check(kOperation);
  const Device device = args.kv.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) check_for_cuda(check, args.kv, args.state_slots.size(0));
  if (options.dry_run) return backend;
  kStep.apart(args);
  const Problem problem = problem_of(args);
  const Packed packed{args.cu_seqlens, {}, args.first_position, problem.tokens, problem.ratio};
  std::vector<Sequence> sequences;
  if (checks_contents(kOperation, device, options)) {
    sequences = read_sequences(kOperation, packed, options);
    try {
      take_states(check, args, options, sequences);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::resource, std::string(kOperation), "out of memory for the states");
    }
  }
  if (problem.tokens == 0) return backend;
  const StepParams params{problem,
                          sequences,
                          rows_of<void*>(args.state, 0, 1),
                          args.state.size(0),
                          args.state.size(1),
                          args.rows.dtype(),
                          rows_of<void*>(args.rows, 0)};
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().compressor_step, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    step_cuda(params, packed, static_cast<const std::int32_t*>(args.state_slots.data()),
              options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend step(const StepArgs& args, const RunOptions& options) {
  return recorded(kStep, args, options, run);
}

}  // namespace winnow::compressor
