// The case table of paged_xl::append. Moving bytes has no tolerance.

#include "winnow/paged_xl/cache/append_contract.h"
#include "winnow/paged_xl/cache/append_oracle.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/testing/repeated.h"

namespace winnow::paged_xl {

std::vector<testing::Benchmark> append_benchmarks();

namespace {

using testing::CaseOutcome;
using testing::numbered;
using testing::Target;

struct AppendCase {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t num_tokens = 21, num_kv_heads = 3, head_size = 64, block_size = 16, num_blocks = 9;
  DType slot_dtype = DType::i64;
  bool ascending = false;  // slots one after the other, else all over the cache
  bool skipped = false;    // every third slot is negative
  Layout layout = Layout::dense;
};

std::vector<AppendCase> make_cases() {
  std::vector<AppendCase> list;
  const auto add_case = [&list](const AppendCase& shape) {
    testing::add(list, {DType::f32, DType::f16, DType::bf16, DType::f64}, shape);
  };
  for (const std::int64_t head_size : {32, 64, 80, 96, 112, 128, 160, 192, 256}) {
    add_case({.name = numbered("d", head_size), .head_size = head_size});
  }
  for (const std::int64_t block_size : {8, 32, 64, 128}) {
    add_case({.name = numbered("b", block_size), .block_size = block_size});
  }
  add_case({.name = "no-token", .num_tokens = 0});
  add_case({.name = "one-token", .num_tokens = 1});
  add_case({.name = "whole-cache", .num_tokens = 9 * 16});
  add_case({.name = "prompt", .num_tokens = 100, .ascending = true});
  add_case({.name = "i32-slots", .slot_dtype = DType::i32});
  add_case({.name = "skipped", .skipped = true});
  add_case({.name = "wide", .skipped = true, .layout = Layout::wide});
  add_case({.name = "reversed", .layout = Layout::reversed});
  return list;
}

std::string describe(const AppendCase& shape) {
  return "num_tokens " + std::to_string(shape.num_tokens) + ", num_kv_heads " +
         std::to_string(shape.num_kv_heads) + ", head_size " + std::to_string(shape.head_size) +
         ", block_size " + std::to_string(shape.block_size) + ", num_blocks " +
         std::to_string(shape.num_blocks);
}

struct Caches {
  StridedTensor key, value;
  explicit Caches(const AppendCase& shape) {
    const std::int64_t x = 16 / size_of(shape.dtype);
    key = make_unaligned(
        shape.dtype,
        {shape.num_blocks, shape.num_kv_heads, shape.head_size / x, shape.block_size, x},
        shape.layout, 3);
    value = make_unaligned(
        shape.dtype, {shape.num_blocks, shape.num_kv_heads, shape.head_size, shape.block_size},
        shape.layout, 2);
  }
};

CaseOutcome run_case(const AppendCase& shape, const Target& target) {
  const Device device = testing::device_of(target);
  testing::Random random(testing::seed_from(shape.name));
  const std::vector<std::int64_t> tokens = {shape.num_tokens, shape.num_kv_heads, shape.head_size};
  const StridedTensor key = make_unaligned(shape.dtype, tokens, shape.layout);
  const StridedTensor value = make_unaligned(shape.dtype, tokens, shape.layout);
  testing::fill_normal(key.view, random);
  testing::fill_normal(value.view, random);
  const Tensor slots =
      testing::make_slots(shape.slot_dtype, shape.num_tokens, shape.num_blocks * shape.block_size,
                          shape.skipped, random, shape.ascending);
  const Caches expected(shape);
  const StridedTensor key_cache = testing::on(device, expected.key);
  const StridedTensor value_cache = testing::on(device, expected.value);
  const StridedTensor key_there = testing::on(device, key),
                      value_there = testing::on(device, value);
  const Tensor slots_there = slots.to(device);
  CaseOutcome outcome;
  outcome.backend =
      append({key_there.view, value_there.view, slots_there, key_cache.view, value_cache.view},
             target.options);
  oracle::append({key.view, value.view, slots, expected.key.view, expected.value.view});
  testing::compare_bytes(outcome, "key_cache", key_cache.storage.to({}), expected.key.storage);
  testing::compare_bytes(outcome, "value_cache", value_cache.storage.to({}),
                         expected.value.storage);
  return outcome;
}

}  // namespace

testing::Operation append_operation() {
  return {"paged_xl::append", "new keys and values into a paged cache",
          testing::cases_of(make_cases(), run_case, testing::all_but_f64<AppendCase>),
          append_benchmarks(), testing::repeated(kAppend, append)};
}

}  // namespace winnow::paged_xl
