// The benchmarks of sparse_mla::decode: useful FLOPs are those of the products with the real heads.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>

#include "winnow/sparse_mla/decode/decode_step_cases.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/table.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> decode_benchmarks();

namespace {

testing::Benchmark make_benchmark(DecodeCase shape) {
  shape.name = name_of(shape.format, shape.columns) + testing::numbered("-b", shape.b) +
               testing::numbered("-h", shape.h_q) + testing::numbered("-k", shape.topk);
  shape.poison = false;
  const std::int64_t columns = row_columns(shape.format, shape.columns) + 512;
  const std::int64_t rows = shape.b * shape.s_q * shape.h_q;
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  benchmark.shape = describe(shape);
  benchmark.flops = 2.0 * double(rows) * double(shape.topk) * double(columns);
  benchmark.ceiling = {testing::Ceiling::Kind::matmul, rows, shape.topk, columns, 0};
  benchmark.prepare = [shape](const testing::Target& target) -> std::function<void()> {
    const Device device = testing::device_of(target);
    struct Data {
      DecodeStep step;
      Tensor workspace;
    };
    auto data = std::make_shared<Data>(Data{DecodeStep(shape).on(device), {}});
    DecodeArgs args = data->step.args();
    data->workspace = Tensor(DType::u8, {decode_workspace_bytes(args, target.options)}, device);
    args.workspace = data->workspace;
    return [data, args, options = target.options] { decode(args, options); };
  };
  return benchmark;
}

// --- on a GPU -----------------------------------------------------------------------------------

constexpr std::int64_t kContext = 32768, kBlockRows = 64;  // rows of a sequence, and of a block
constexpr double kCeilingReference = 770e12;  // FLOP/s of the product, at which `reach_us` holds

struct GpuShape {
  CacheFormat format = CacheFormat::fp8_656;
  std::int64_t b = 64, h_q = 128, topk = 2048;
  std::optional<double> reach_us{};
  bool batch_invariant = false, in_list_order = false;
  std::int64_t s_q = 2;
  // Contexts of so many rows, all attended; 0: topk of kContext.
  std::int64_t dense = 0;

  std::int64_t context() const { return dense > 0 ? dense : kContext; }
  std::int64_t row_bytes() const {
    return row_elements(format) * (format == CacheFormat::bf16 ? 2 : 1);
  }
  // With so few heads reading a query's rows takes longer than multiplying them.
  bool bound_by_rows() const { return h_q <= 32; }
};

// Every sequence has blocks of its own, all with the same random rows.
Tensor gpu_cache(const GpuShape& shape, Device device) {
  DecodeCase block{.name = "block",
                   .format = shape.format,
                   .b = 1,
                   .topk = kBlockRows,
                   .blocks = 1,
                   .block_size = kBlockRows,
                   .poison = false};
  const DecodeStep step(block);
  const TensorView& view = step.chosen.cache.view;
  const auto blocks = shape.b * (shape.context() / kBlockRows);
  const std::int64_t bytes = shape.format == CacheFormat::fp8_584
                                 ? Row584::block_bytes(kBlockRows)
                                 : view.numel() * size_of(view.dtype());
  Tensor cache(DType::u8, {blocks, bytes});
  for (std::int64_t i = 0; i < blocks; ++i) {
    std::memcpy(static_cast<std::byte*>(cache.data()) + i * bytes, view.data(),
                static_cast<std::size_t>(bytes));
  }
  return cache.to(device);
}

std::function<void()> prepare_gpu(const GpuShape& shape, const testing::Target& target) {
  struct Data {
    Tensor q, cache, indices, tables, lengths, out, lse, workspace;
  };
  const Device device = testing::device_of(target);
  auto data = std::make_shared<Data>();
  testing::Random random(1);
  const std::int64_t columns = row_columns(shape.format);
  data->q = Tensor(DType::bf16, {shape.b, shape.s_q, shape.h_q, columns});
  testing::fill_normal(data->q, random);
  data->q = data->q.to(device);
  data->cache = gpu_cache(shape, device);
  if (shape.dense > 0) {
    const std::int64_t n = shape.dense / kBlockRows;
    data->tables = Tensor(DType::i32, {shape.b, n});
    std::span<std::int32_t> blocks = data->tables.values<std::int32_t>();
    std::iota(blocks.begin(), blocks.end(), 0);
    testing::shuffle(blocks, random);
    data->lengths = Tensor(DType::i32, {shape.b});
    std::ranges::fill(data->lengths.values<std::int32_t>(), static_cast<std::int32_t>(shape.dense));
    data->tables = data->tables.to(device);
    data->lengths = data->lengths.to(device);
  } else {
    data->indices = Tensor(DType::i32, {shape.b, shape.s_q, shape.topk});
    testing::fill_distinct(data->indices, random, kContext);
    for (std::int64_t i = 0, each = shape.s_q * shape.topk; i < shape.b * each; ++i) {
      static_cast<std::int32_t*>(data->indices.data())[i] +=
          static_cast<std::int32_t>(i / each * kContext);
    }
    data->indices = data->indices.to(device);
  }
  data->out = Tensor(DType::bf16, {shape.b, shape.s_q, shape.h_q, 512}, device);
  data->lse = Tensor(DType::f32, {shape.b, shape.s_q, shape.h_q}, device);
  const std::int64_t blocks = data->cache.view().size(0), stride = data->cache.view().size(1);
  const std::int64_t row = row_elements(shape.format),
                     bytes = shape.format == CacheFormat::bf16 ? 2 : 1;
  const TensorView cache(data->cache.data(),
                         shape.format == CacheFormat::bf16 ? DType::bf16 : DType::u8,
                         {blocks, kBlockRows, 1, row}, {stride / bytes, row, row, 1}, device);
  DecodeArgs args{.q = data->q,
                  .cache = cache,
                  .indices = shape.dense > 0 ? ConstTensorView() : data->indices.view(),
                  .block_tables = shape.dense > 0 ? data->tables.view() : ConstTensorView(),
                  .context_lens = shape.dense > 0 ? data->lengths.view() : ConstTensorView(),
                  .format = shape.format,
                  .batch_invariant = shape.batch_invariant,
                  .in_list_order = shape.in_list_order,
                  .out = data->out,
                  .lse = data->lse};
  data->workspace = Tensor(DType::u8, {decode_workspace_bytes(args, target.options)}, device);
  args.workspace = data->workspace;
  return [data, args, options = target.options] { decode(args, options); };
}

testing::Benchmark make_gpu_benchmark(const GpuShape& shape) {
  const std::int64_t columns = row_columns(shape.format) + 512;
  testing::Benchmark benchmark;
  benchmark.name = name_of(shape.format) + testing::numbered("-b", shape.b) +
                   testing::numbered("-sq", shape.s_q) + testing::numbered("-h", shape.h_q) +
                   (shape.dense > 0 ? testing::numbered("-dense", shape.dense)
                                    : testing::numbered("-k", shape.topk)) +
                   (shape.in_list_order     ? "-list-order"
                    : shape.batch_invariant ? "-invariant"
                                            : "");
  benchmark.shape = testing::numbered("s_kv ", shape.context()) +
                    testing::numbered(", s_q ", shape.s_q) + testing::numbered(", b ", shape.b) +
                    testing::numbered(", h_q ", shape.h_q) +
                    (shape.dense > 0 ? std::string() : testing::numbered(", topk ", shape.topk));
  const std::int64_t rows = shape.dense > 0 ? shape.dense : shape.topk;
  if (shape.bound_by_rows()) {
    benchmark.bytes = double(shape.b * shape.s_q * rows) * double(shape.row_bytes());
    benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
    benchmark.ceiling.bytes = std::int64_t{4} << 30;
  } else {
    benchmark.flops =
        2.0 * double(shape.b * shape.s_q * shape.h_q) * double(rows) * double(columns);
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, 8192, 8192, 8192, 0};
  }
  benchmark.device = DeviceType::cuda;
  benchmark.queued = true;
  benchmark.slow = shape.b > 128;
  if (shape.reach_us.has_value()) {
    const double seconds = *shape.reach_us * 1e-6;
    if (seconds >= 100e-6) {
      benchmark.target = benchmark.flops / seconds / kCeilingReference;
    } else {
      benchmark.target_seconds = seconds;
    }
  }
  benchmark.prepare = [shape](const testing::Target& target) { return prepare_gpu(shape, target); };
  return benchmark;
}

void add_gpu_benchmarks(std::vector<testing::Benchmark>& list) {
  const auto add = [&](const GpuShape& shape) { list.push_back(make_gpu_benchmark(shape)); };
  // Beside FlashMLA, whose split hangs on the batch too.
  add({.b = 2, .reach_us = 19});
  add({.b = 64, .reach_us = 176});
  add({.b = 74, .reach_us = 205});
  add({.b = 128, .reach_us = 345});
  add({.b = 148, .h_q = 64, .topk = 16384, .reach_us = 1760});
  add({.b = 148, .h_q = 128, .topk = 16384, .reach_us = 2880});
  // What batch_invariant costs: beside the same without.
  for (const std::int64_t b : {1, 8, 16, 32}) add({.b = b});
  for (const std::int64_t b : {16, 32, 74}) add({.b = b, .batch_invariant = true});
  add({.b = 148, .h_q = 128, .topk = 16384, .batch_invariant = true});
  for (const std::int64_t b : {2, 64, 128}) add({.b = b, .in_list_order = true});
  for (const std::int64_t b : {1, 2, 8, 64, 128, 256}) {
    add({.b = b, .batch_invariant = true});
    for (const std::int64_t heads : {16, 32}) add({.b = b, .h_q = heads});
  }
  for (const CacheFormat format : {CacheFormat::fp8_584, CacheFormat::bf16}) {
    for (const std::int64_t b : {2, 64}) add({.format = format, .b = b});
    for (const std::int64_t heads : {16, 32}) add({.format = format, .b = 64, .h_q = heads});
  }
  // All rows of the contexts, one query each.
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_656, CacheFormat::fp8_576}) {
    for (const std::int64_t rows : {4096, 16384}) {
      for (const std::int64_t b : {64, 128}) {
        add({.format = format, .b = b, .s_q = 1, .dense = rows});
      }
    }
  }
}

}  // namespace

std::vector<testing::Benchmark> decode_benchmarks() {
  std::vector<testing::Benchmark> list;
  add_gpu_benchmarks(list);
  for (const CacheFormat format : {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::bf16}) {
    list.push_back(make_benchmark(
        {.name = {}, .format = format, .b = 2, .s_q = 2, .h_q = 128, .topk = 2048, .blocks = 64}));
  }
  list.push_back(make_benchmark({.name = {}, .b = 8, .h_q = 16, .topk = 2048, .blocks = 64}));
  return list;
}

}  // namespace winnow::sparse_mla
