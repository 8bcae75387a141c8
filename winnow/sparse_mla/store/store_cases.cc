// The case table of sparse_mla::store. All backends give the bits of the oracle: no tolerance.
#include <cmath>
#include <limits>

#include "winnow/cache/cache_cases.h"
#include "winnow/cache/cache_oracle.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/sparse_mla/store/store_contract.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/repeated.h"
#include "winnow/testing/table.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> store_benchmarks();
testing::Operation store_operation();

namespace {

using testing::Layout;
using testing::numbered;
using testing::StridedTensor;

struct StoreCase {
  std::string name;
  CacheFormat format = CacheFormat::fp8_656;
  std::int64_t columns = 576;  // of bf16
  std::int64_t n = 40, blocks = 3, block_size = 64;
  DType slot_dtype = DType::i64, bytes = DType::u8;
  bool skipped = false;  // every third slot is negative
  Layout layout = Layout::dense;
};

std::vector<StoreCase> make_cases() {
  std::vector<StoreCase> list;
  const auto add_case = [&list](StoreCase shape) {
    const std::string name = shape.name;
    const auto add_format = [&](CacheFormat format, std::int64_t columns) {
      shape.format = format;
      shape.columns = columns;
      shape.name = name_of(format, columns) + "-" + name;
      list.push_back(shape);
    };
    add_format(CacheFormat::fp8_656, 576);
    add_format(CacheFormat::fp8_584, 512);
    add_format(CacheFormat::bf16, 576);
    add_format(CacheFormat::bf16, 512);
  };
  add_case({.name = "rows"});
  add_case({.name = "no-row", .n = 0});
  add_case({.name = "no-block", .n = 0, .blocks = 0});
  add_case({.name = "one-row", .n = 1});
  add_case({.name = "whole-cache", .n = 192});
  add_case({.name = "many", .n = 500, .blocks = 9});
  add_case({.name = "table", .n = 1100, .blocks = 18});  // of the last rows of slots, on a GPU
  add_case({.name = "block1", .n = 7, .blocks = 11, .block_size = 1});
  add_case({.name = "block3", .n = 7, .blocks = 5, .block_size = 3});
  add_case({.name = "one-block", .blocks = 1, .block_size = 100});
  add_case({.name = "i32-slots", .slot_dtype = DType::i32});
  add_case({.name = "skipped", .skipped = true});
  add_case({.name = "wide", .skipped = true, .layout = Layout::wide});
  add_case({.name = "reversed", .layout = Layout::reversed});
  add_case({.name = "broadcast", .layout = Layout::broadcast});
  for (StoreCase shape : std::vector<StoreCase>(list)) {
    if (!shape.name.ends_with("-rows") || shape.format == CacheFormat::bf16) continue;
    shape.name += "-f8";
    shape.bytes = DType::f8_e4m3;
    list.push_back(shape);
  }
  return list;
}

std::string describe(const StoreCase& shape) {
  return "n " + std::to_string(shape.n) + ", blocks " + std::to_string(shape.blocks) +
         ", block_size " + std::to_string(shape.block_size) + ", columns " +
         std::to_string(row_columns(shape.format, shape.columns));
}

// One group of 64 columns of every kind, again and again: ordinary numbers, zeros, numbers below
// the least amax, ties, scales that are just reached and just passed, the largest, NaN, infinities.
void fill_group(const TensorView& group, std::int64_t kind, testing::Random& random) {
  const auto element = [&](std::int64_t c) { return group.slice(1, c, c + 1); };
  testing::fill_normal(group, random);
  switch (kind % 13) {
    case 1:
      return testing::fill(group, -0.0);
    case 2:
      return testing::fill_normal(group, random, 1e-5);
    case 3:  // ties and neighbours of ties: the scale is 1
      for (std::int64_t c = 0; c < 64; ++c) testing::fill(element(c), double(c % 32) / 1024 * 3);
      return testing::fill(element(0), 448);
    case 4:
      for (std::int64_t c = 0; c < 64; ++c) testing::fill(element(c), -16 - double(c) / 2);
      return testing::fill(element(63), -448);
    case 5:
      return testing::fill(element(5), 450);  // the next bf16: the scale is 2
    case 6:
      return testing::fill(element(7), 3e38);
    case 7:
      return testing::fill(element(1), std::nan(""));
    case 8:
      return testing::fill(element(63), -std::numeric_limits<double>::infinity());
    case 9:
      return testing::fill(element(2), 0.875);
    case 10:
      return testing::fill_normal(group, random, 1e-40);
    default:
      return;
  }
}

std::int64_t slot_of(const Tensor& slots, std::int64_t i) {
  return slots.dtype() == DType::i64 ? slots.view().at<std::int64_t>(i)
                                     : slots.view().at<std::int32_t>(i);
}

// The same bytes as f8_e4m3.
TensorView as(DType dtype, const TensorView& view) {
  return {view.data(), dtype, view.shape(), view.strides(), view.device()};
}

testing::CaseOutcome run(const StoreCase& shape, const testing::Target& target) {
  const Device device = testing::device_of(target);
  testing::Random random(testing::seed_from(shape.name));
  const std::int64_t columns = row_columns(shape.format, shape.columns);
  const StridedTensor rows = testing::make_tensor(DType::bf16, {shape.n, columns}, shape.layout);
  for (std::int64_t i = 0; i < shape.n; ++i) {
    for (std::int64_t first = 0; first < columns; first += 64) {
      fill_group(rows.view.slice(0, i, i + 1).slice(1, first, first + 64), i * 3 + first / 64,
                 random);
    }
  }
  const Tensor slots = testing::make_slots(shape.slot_dtype, shape.n,
                                           shape.blocks * shape.block_size, shape.skipped, random);
  const StridedTensor expected =
      make_cache(shape.format, shape.blocks, shape.block_size, columns, shape.layout);

  const StridedTensor rows_there = testing::on(device, rows);
  const StridedTensor cache = testing::on(device, expected);
  const Tensor slots_there = slots.to(device);
  StoreArgs args{
      .rows = rows_there.view,
      .slots = slots_there,
      .format = shape.format,
      .cache = shape.format == CacheFormat::bf16 ? cache.view : as(shape.bytes, cache.view)};
  Tensor workspace;
  workspace = Tensor(DType::u8, {store_workspace_bytes(args, target.options)}, device);
  args.workspace = workspace;
  testing::CaseOutcome outcome;
  outcome.backend = store(args, target.options);

  for (std::int64_t i = 0; i < shape.n; ++i) {
    const std::int64_t slot = slot_of(slots, i);
    if (slot < 0) continue;
    const auto* brain = reinterpret_cast<const std::uint8_t*>(&rows.view.at<BFloat16>(i, 0));
    const std::vector<std::uint8_t> bytes =
        oracle::quantised({brain, brain + 2 * columns}, shape.format);
    for (std::size_t byte = 0; byte < bytes.size(); ++byte) {
      oracle::cache_byte(expected.view, shape.format, slot / shape.block_size,
                         slot % shape.block_size, static_cast<std::int64_t>(byte)) = bytes[byte];
    }
  }
  testing::compare_bytes(outcome, "cache", cache.storage.to({}), expected.storage);
  return outcome;
}

}  // namespace

testing::Operation store_operation() {
  const auto on_gpu = [](const StoreCase&) { return true; };
  return {"sparse_mla::store", "new rows into a paged cache of latent rows",
          testing::cases_of<StoreCase>(make_cases(), run, on_gpu), store_benchmarks(),
          testing::repeated(kStore, store)};
}

}  // namespace winnow::sparse_mla
