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
#include "winnow/core/interrupt.h"
#include "winnow/core/on_host.h"
#include "winnow/core/read_once.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/core/slots.h"
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

void check_stored(const Check& check, const StepArgs& args, StepParams& params) {
  const DType dtype = args.kv.dtype();
  const Device device = args.kv.device();
  const std::int64_t d = args.kv.size(1) / (args.overlap ? 2 : 1);
  const bool cached = args.cache.present(), paged = args.pages.present(), stored = cached || paged;
  if (args.rows.present()) {
    check_row_columns(check, "rows", args.rows, args.kv, args.overlap);
  } else {
    if (!stored) check.rank("rows", args.rows, 2, "[tokens, d]");
    if (args.norm_weight.present()) check.shape("norm_weight", args.norm_weight, {{"d", d}});
  }
  check.that(!cached || !paged, "pages", "none beside a cache", "a tensor");
  check.that(!args.power_of_two || paged, "power_of_two", "false, where pages are absent", "true");
  check.that(stored == args.slots.present(), "slots",
             stored ? "a tensor [tokens], which cache and pages need"
                    : "none, where cache and pages are absent",
             stored ? "none" : "a tensor");
  if (!stored) return;
  check.that(dtype != DType::f64, cached ? "cache" : "pages", "none, where kv is f64", "a tensor");
  if (cached) {
    using sparse_mla::CacheFormat;
    const bool plain = args.cache.dtype() == DType::bf16;
    params.cache = sparse_mla::check_cache_output(
        check, "cache", args.cache, plain ? CacheFormat::bf16 : CacheFormat::fp8_584, device);
    check.that(params.cache.columns == d, "cache", "rows of d = " + std::to_string(d) + " columns",
               std::to_string(params.cache.columns));
  } else {
    check.that(d == 128 || d == 64, "pages", "none, unless d is 128 or 64",
               "a tensor, and d = " + std::to_string(d));
    params.pages =
        indexer::check_key_pages(check, "pages", args.pages, d, args.power_of_two, device);
  }
  check.input("slots", args.slots, {{"tokens", args.kv.size(0)}}, {DType::i64, DType::i32}, device);
  params.slots = Slots(args.slots);
}

namespace {

constexpr std::string_view kOperation = kStep.operation;

// The token that completes the window that many after the sequence's first.
std::int64_t token_of(const Sequence& sequence, std::int64_t ratio, std::int64_t window) {
  return sequence.token + (sequence.position / ratio + window + 1) * ratio - 1 - sequence.position;
}

// Checks the slots of tokens that complete a window; those of others count as negative.
void check_stored_slots(const StepArgs& args, const StepParams& params, const RunOptions& options) {
  if (!args.slots.present()) return;
  const std::int64_t tokens = params.problem.tokens;
  const OnHost<char> contents(static_cast<const char*>(args.slots.data()),
                              tokens * size_of(args.slots.dtype()), args.slots.device(),
                              options.stream);
  Slots slots = params.slots;
  slots.data = contents.data();
  std::vector<std::int64_t> looked_at(static_cast<std::size_t>(tokens), -1);
  for (const Sequence& sequence : params.sequences) {
    for (std::int64_t window = 0; window < sequence.rows; ++window) {
      const std::int64_t token = token_of(sequence, params.problem.ratio, window);
      looked_at[static_cast<std::size_t>(token)] = slots[token];
    }
  }
  const std::int64_t shape[] = {tokens}, strides[] = {1};
  const SlotSpace space = params.pages.present()
                              ? SlotSpace{params.pages.count, indexer::kPageRows, "pages", "token"}
                              : sparse_mla::slot_space(params.cache, "token");
  check_slots(kOperation, "slots",
              ConstTensorView(looked_at.data(), DType::i64, shape, strides, Device{}), space,
              options);
}

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
  Interrupts interrupts;
  std::sort(taken.begin(), taken.end(), [&](const auto& a, const auto& b) {
    interrupts.step();
    return a < b;
  });
  const auto twice = std::adjacent_find(
      taken.begin(), taken.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == taken.end()) return;
  check.that(false, "state_slots", "each state at most once",
             "state " + std::to_string(twice->first) + " for sequence " +
                 std::to_string(twice->second) + " and sequence " +
                 std::to_string((twice + 1)->second));
}

Backend run(const StepArgs& args, const RunOptions& options) {
  StepParams params;
  kStep.check(args, params);
  const Check check(kOperation);
  const Device device = args.kv.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) {
    check_for_cuda(check, args.kv, args.state_slots.size(0));
    constexpr std::int64_t kMost = std::int64_t{1} << 32;  // the kernel's numbers of four are ints
    const std::int64_t kept = std::min(args.kv.size(0), args.state.size(1)) * args.kv.size(1);
    if (kept > kMost) {
      check.unsupported("cuda: want up to 2^32 elements of kv that a state keeps, got " +
                        std::to_string(kept));
    }
    if (args.cache.present()) {
      sparse_mla::check_cache_for_gpu(check, "cache", args.cache, params.cache.format);
    }
    if (args.pages.present()) indexer::check_key_pages_for_gpu(check, "pages", args.pages);
  }
  if (options.dry_run) return backend;
  kStep.apart(args);
  params.problem = problem_of(args);
  params.state = rows_of<void*>(args.state, 0, 1);
  params.states = args.state.size(0);
  params.ring = args.state.size(1);
  params.rows_dtype = args.rows.present() ? args.rows.dtype() : args.kv.dtype();
  params.rows = rows_of<void*>(args.rows, 0);
  const Packed packed{
      args.cu_seqlens, {}, args.first_position, params.problem.tokens, params.problem.ratio};
  std::vector<Sequence> sequences;
  if (checks_contents(kOperation, device, options)) {
    sequences = read_sequences(kOperation, packed, options);
    params.sequences = sequences;
    try {
      take_states(check, args, options, sequences);
      check_stored_slots(args, params, options);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::resource, std::string(kOperation), "out of memory for the states");
    }
  }
  if (params.problem.tokens == 0) return backend;
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
