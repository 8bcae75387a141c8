// The benchmarks of expert_parallel::low_latency on GPUs: rows of 7168 columns, top 8 of 288
// experts. Beside them runs a copy of the same bytes: on one GPU, or under a launcher from each
// rank's memory to the next one's. Useful bytes are those of the rows that are read and written on
// one GPU, or that leave a GPU.
#include <memory>
#include <string>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/expert_parallel/testing/gpu_bench.h"
#include "winnow/expert_parallel/testing/rank_device.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kTopk = 8, kExperts = 288;
constexpr std::int64_t kHidden = 7168;

enum class Work { dispatch, dispatch_bf16, combine };

struct Shape {
  Work work = Work::dispatch;
  std::int64_t tokens = 128;
  // Bytes of a row in a message: f8 with its scales, or bf16.
  std::int64_t row_bytes() const {
    return work == Work::dispatch ? kHidden + kHidden / 128 * 4 : kHidden * 2;
  }
};

// The pairs of one GPU's ranks whose experts are on other GPUs, if every rank had those of rank 0.
std::int64_t leaving_pairs(const BenchWorld& world, std::int64_t tokens) {
  std::int64_t pairs = 0;
  const Tensor indices = distinct_experts(0, tokens, kTopk, kExperts);
  for (const std::int32_t expert : indices.values<std::int32_t>()) {
    pairs += expert / (kExperts / world.ranks) >= world.ranks_on_gpu;
  }
  return pairs * world.ranks_on_gpu;
}

// One rank with its layer and tensors; enqueue() is what is timed.
class Rank {
 public:
  Rank(const std::shared_ptr<Transport>& transport, const std::shared_ptr<Store>& store,
       Device device, bool alone, const Shape& shape)
      : shape_(shape),
        place_(device),
        stream_(alone ? Stream{} : place_.stream()),
        layer_(transport, store,
               {.max_tokens = shape.tokens,
                .hidden = kHidden,
                .topk = kTopk,
                .experts = kExperts,
                .device = device}) {
    const bool bf16 = shape_.work != Work::dispatch;
    const int world = layer_.world_size();
    const std::int64_t experts = kExperts / world, rows = world * shape.tokens;
    testing::Random random(3);
    Tensor input(DType::bf16, {shape.tokens, kHidden}), weights(DType::f32, {shape.tokens, kTopk});
    testing::fill_normal_rows(input, random);
    testing::fill_normal(weights, random);
    input_ = place_.copy(input);
    weights_ = place_.copy(weights);
    indices_ = place_.copy(distinct_experts(layer_.rank(), shape.tokens, kTopk, kExperts));
    output_ = place_.make(bf16 ? DType::bf16 : DType::f8_e4m3, {{experts, rows, kHidden}});
    if (!bf16) {
      scales_ = place_.make(DType::f32, {{experts, kHidden / 128, rows}});
      scales_by_row_ = TensorView(scales_.data(), DType::f32, {experts, rows, kHidden / 128},
                                  {rows * (kHidden / 128), 1, rows}, device);
    }
    counts_ = place_.make(DType::i32, {{experts}});
    tokens_ = place_.make(DType::i32, {{experts, rows}});
    pairs_ = place_.make(DType::i32, {{experts, rows}});
    pair_rows_ = place_.make(DType::i32, {{world, shape.tokens, kTopk}});
    ranges_ = place_.make(DType::i64, {{experts, world}});
    out_ = place_.make(DType::bf16, {{shape.tokens, kHidden}});
    dispatch();  // combine returns its rows
    place_.wait();
  }

  Device device() const { return place_.device(); }
  Stream stream() const { return stream_; }

  void enqueue() { shape_.work == Work::combine ? combine() : dispatch(); }

 private:
  void dispatch() {
    layer_.dispatch({.input = input_,
                     .expert_indices = indices_,
                     .format = shape_.work == Work::dispatch ? RowFormat::fp8 : RowFormat::bf16,
                     .output = output_,
                     .scales = scales_by_row_,
                     .counts = counts_,
                     .source_tokens = tokens_,
                     .source_pairs = pairs_,
                     .pair_rows = pair_rows_,
                     .ranges = ranges_,
                     .stream = stream_});
  }
  void combine() {
    layer_.combine({.expert_output = output_,
                    .pair_rows = pair_rows_,
                    .expert_indices = indices_,
                    .weights = weights_,
                    .out = out_,
                    .stream = stream_});
  }

  Shape shape_;
  RankDevice place_;
  Stream stream_;
  LowLatency layer_;
  Tensor input_, indices_, weights_, output_, scales_, counts_, tokens_, pairs_, pair_rows_,
      ranges_, out_;
  TensorView scales_by_row_;
};

testing::Benchmark make_benchmark(const Shape& shape, const BenchWorld& world,
                                  std::int64_t leaving) {
  testing::Benchmark benchmark;
  const std::string tokens = testing::numbered("", shape.tokens);
  benchmark.name = (shape.work == Work::dispatch        ? "cuda-dispatch-fp8-"
                    : shape.work == Work::dispatch_bf16 ? "cuda-dispatch-bf16-"
                                                        : "cuda-combine-") +
                   tokens;
  benchmark.shape = world.text() + ", " + tokens + " tokens each, hidden " +
                    testing::numbered("", kHidden) + ", top " + testing::numbered("", kTopk) +
                    " of " + testing::numbered("", kExperts) + " experts";
  benchmark.device = DeviceType::cuda;
  benchmark.queued = true;
  if (world.one_gpu()) {
    // A row moves three times: dispatch writes it to the receiver's memory, reads it there and
    // writes the output; combine reads it, writes it to the receiver's memory and reads it there.
    const std::int64_t pairs = world.ranks * shape.tokens * kTopk;
    benchmark.bytes = double(3 * pairs * shape.row_bytes());
    benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
    benchmark.ceiling.bytes = std::int64_t(benchmark.bytes);
  } else {
    benchmark.bytes = double(leaving * shape.row_bytes());
  }
  if (world.launched && world.ranks == 2 && world.nodes == 1 && shape.tokens == 128) {
    if (shape.work == Work::dispatch) benchmark.target_seconds = 26e-6;
    if (shape.work == Work::combine) benchmark.target_seconds = 32e-6;
  }
  benchmark.prepare = [shape](const testing::Target&) { return prepare_ranks<Rank>(shape); };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> low_latency_benchmarks() {
  const BenchWorld world = bench_world();
  std::vector<testing::Benchmark> list;
  if (kExperts % world.ranks != 0) return list;
  for (const std::int64_t tokens : {128, 256, 512}) {
    const std::int64_t leaving = leaving_pairs(world, tokens);
    for (const Work work : {Work::dispatch, Work::dispatch_bf16, Work::combine}) {
      const Shape shape{work, tokens};
      list.push_back(make_benchmark(shape, world, leaving));
      if (!world.launched || work == Work::combine) continue;
      const char* format = work == Work::dispatch ? "fp8-" : "bf16-";
      list.push_back(peer_copy_benchmark("cuda-peer-copy-" + (format + std::to_string(tokens)),
                                         world, leaving * shape.row_bytes()));
    }
  }
  return list;
}

}  // namespace winnow::expert_parallel
