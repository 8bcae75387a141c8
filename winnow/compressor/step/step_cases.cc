// The case table of compressor::step: a prompt of each sequence, then steps of some tokens, some of
// which are undone.
#include <algorithm>
#include <cmath>

#include "winnow/cache/cache_cases.h"
#include "winnow/cache/cache_oracle.h"
#include "winnow/cache/key_oracle.h"
#include "winnow/compressor/cases.h"
#include "winnow/compressor/step/step.h"
#include "winnow/compressor/step/step_contract.h"
#include "winnow/compressor/step/step_oracle.h"
#include "winnow/testing/repeated.h"

namespace winnow::compressor {

std::vector<testing::Benchmark> step_benchmarks();
testing::Operation step_operation();

namespace {

using sparse_mla::CacheFormat;

enum class Stored { nowhere, cache, pages };

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
  Stored stored = Stored::nowhere;
  CacheFormat format = CacheFormat::fp8_584;
  std::int64_t block_size = 64;
  bool power_of_two = false;
  DType slot_dtype = DType::i64;

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
  const auto add_stored = [&](const std::string& kind, Stored stored, StepCase shape) {
    const bool pages = stored == Stored::pages;
    shape.name = kind + "-" + shape.name;
    shape.stored = stored;
    shape.format = kind == "bf16" ? CacheFormat::bf16 : CacheFormat::fp8_584;
    shape.d = pages ? shape.d : 512;
    shape.hadamard = pages;
    shape.norm = shape.undone = true;
    shape.pairs = 32;
    add(shape);
  };
  for (const auto& [kind, stored] :
       {std::pair("fp8_584", Stored::cache), {"bf16", Stored::cache}, {"pages", Stored::pages}}) {
    add_stored(kind, stored, {.name = "csa", .steps = 5, .d = 128});
    add_stored(kind, stored, {.name = "wide", .steps = 3, .d = 64, .wide = true});
    add_stored(kind, stored, {.name = "i32-slots", .steps = 3, .d = 64, .slot_dtype = DType::i32});
    add_stored(kind, stored, {.name = "left-out", .steps = 5, .d = 128, .left_out = true});
    add_stored(kind, stored, {.name = "gaps", .steps = 3, .d = 64, .layout = Layout::wide});
    // Windows that the first call completes, the third one from new tokens alone, and one of a
    // step.
    add_stored(kind, stored,
               {.name = "hca",
                .prompts = {1, 384, 127},
                .steps = 8,
                .ratio = 128,
                .d = 128,
                .overlap = false});
    if (stored == Stored::cache) add_stored(kind, stored, {.name = "block3", .block_size = 3});
  }
  add_stored("pages", Stored::pages, {.name = "power-128", .d = 128, .power_of_two = true});
  add_stored("pages", Stored::pages, {.name = "power-64", .d = 64, .power_of_two = true});
  testing::add_f64(list, {"overlap-undone", "plain-undone", "ratio3-overlap", "keys", "strided"});
  return list;
}

std::string describe(const StepCase& shape) {
  return "sequences " + std::to_string(shape.prompts.size()) + ", steps " +
         std::to_string(shape.steps) + ", ratio " + std::to_string(shape.ratio) + ", d " +
         std::to_string(shape.d) + ", ring " + std::to_string(shape.ring());
}

// The cache or the pages of a case, and what should be in them.
struct Store {
  static constexpr std::int64_t kSlots = 512;  // tokens of a call at most

  const StepCase& shape;
  StridedTensor expected, there;
  Tensor slots;

  Store(const StepCase& given, Device device) : shape(given) {
    if (shape.stored == Stored::nowhere) return;
    const std::int64_t blocks = kSlots / shape.block_size + 1;
    expected =
        shape.stored == Stored::cache
            ? sparse_mla::make_cache(shape.format, blocks, shape.block_size, shape.d, shape.layout)
            : make_output(DType::u8, {blocks, indexer::page_bytes(shape.d)}, shape.layout);
    there = testing::on(device, expected);
  }
  // Slots for the tokens of a call. Those of tokens that complete no window lead nowhere.
  void draw(const oracle::Vector& wanted, testing::Random& random) {
    const auto tokens = static_cast<std::int64_t>(wanted.size()) / shape.d;
    slots = testing::make_slots(shape.slot_dtype, tokens, kSlots, true, random);
    for (std::int64_t token = 0; token < tokens; ++token) {
      if (!std::isnan(wanted[static_cast<std::size_t>(token * shape.d)])) continue;
      constexpr std::int32_t kNowhere = 1 << 20;
      if (shape.slot_dtype == DType::i64) {
        slots.view().at<std::int64_t>(token) = kNowhere;
      } else {
        slots.view().at<std::int32_t>(token) = kNowhere;
      }
    }
  }
  // Writes the rows of a call that are stored.
  void expect(const oracle::Vector& rows, const oracle::Vector& wanted) {
    const std::vector<double> places = testing::read(slots.view());
    for (std::size_t token = 0; token < places.size(); ++token) {
      const auto first = token * static_cast<std::size_t>(shape.d);
      const auto slot = static_cast<std::int64_t>(places[token]);
      if (slot < 0 || std::isnan(wanted[first])) continue;
      const std::vector<double> row(rows.begin() + std::ptrdiff_t(first),
                                    rows.begin() + std::ptrdiff_t(first) + shape.d);
      const std::int64_t block = slot / shape.block_size, offset = slot % shape.block_size;
      if (shape.stored == Stored::cache) {
        std::vector<std::uint8_t> brain;
        for (const double x : row) {
          const std::uint16_t bits = BFloat16(static_cast<float>(x)).bits;
          brain.insert(brain.end(), {std::uint8_t(bits), std::uint8_t(bits >> 8)});
        }
        const auto bytes = sparse_mla::oracle::quantised(brain, shape.format);
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          sparse_mla::oracle::cache_byte(expected.view, shape.format, block, offset,
                                         std::int64_t(i)) = bytes[i];
        }
      } else {
        indexer::oracle::write_key(expected.view, slot,
                                   indexer::oracle::quantize_row(row, shape.power_of_two));
      }
    }
  }
};

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
  const CaseInputs fixed = make_inputs(shape.call(-1, {400})), fixed_there = fixed.on(device);
  oracle::Vector rows, wanted_rows;
  Store store(shape, device);
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
    pass(inputs, fixed, first, slots);  // for the oracle
    const oracle::Vector wanted = oracle::step(args, histories, std::nan(""));
    pass(there, fixed_there, first_there, slots_there);
    Tensor stored_slots;
    if (shape.stored != Stored::nowhere) {
      store.draw(wanted, random);
      stored_slots = store.slots.to(device);
      (shape.stored == Stored::cache ? args.cache : args.pages) = store.there.view;
      args.slots = stored_slots;
      args.power_of_two = shape.power_of_two;
    }
    outcome.backend = step(args, target.options);
    pass(inputs, fixed, first, slots);
    const StridedTensor out_here = testing::on({}, out);
    const oracle::Vector got = testing::read(out_here.view);
    if (shape.stored != Stored::nowhere) store.expect(got, wanted);
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
  if (shape.stored != Stored::nowhere) {
    testing::compare_bytes(outcome, "stored", store.there.storage.to({}), store.expected.storage);
  }
  return outcome;
}

}  // namespace

testing::Operation step_operation() {
  return {"compressor::step", "rows of tokens that come some at a time, from a state",
          testing::cases_of(make_cases(), run, testing::all_but_f64<StepCase>), step_benchmarks(),
          testing::repeated(kStep, step)};
}

}  // namespace winnow::compressor
