// The benchmarks of expert_parallel::all_to_all on GPUs: 4096 tokens of 7168 bf16 on each rank, top
// 8 of 256 experts, beside a copy of the same bytes on one GPU, or under a launcher a plain
// copy from each rank's memory to the next one's. Useful bytes are those that are read and written
// (on one GPU), or that leave a GPU.
#include <memory>
#include <string>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/expert_parallel/testing/gpu_bench.h"
#include "winnow/expert_parallel/testing/rank_device.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kTopk = 8, kExperts = 256;
constexpr std::int64_t kTokens = 4096, kHidden = 7168;
constexpr std::int64_t kRowBytes = kHidden * 2;

enum class Work { counted, cached, combine };

struct Shape {
  Work work = Work::counted;
  RowOrder order = RowOrder::token_major;
  int sms = 24;
  bool copy_out = false, local_combine = false;
  bool beside_product = false;
  Stream stream{};  // of the rank, if it has a GPU for itself
};

// What all ranks' tokens are, by what they cost.
struct Routing {
  std::int64_t copies = 0;   // (token, rank) with an expert there: token-major rows
  std::int64_t leaving = 0;  // those that leave the first GPU
  std::int64_t pairs = 0;
};

Routing count(const BenchWorld& world) {
  Routing routing;
  if (kExperts % world.ranks != 0) return routing;  // told when the benchmarks run
  for (int rank = 0; rank < world.ranks; ++rank) {
    const Tensor indices = distinct_experts(rank, kTokens, kTopk, kExperts);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      std::vector<bool> wanted(std::size_t(world.ranks), false);
      for (int k = 0; k < kTopk; ++k) {
        wanted[std::size_t(indices.view().at<std::int32_t>(t, k) / (kExperts / world.ranks))] =
            true;
      }
      for (int to = 0; to < world.ranks; ++to) {
        if (!wanted[std::size_t(to)]) continue;
        ++routing.copies;
        routing.leaving += rank < world.ranks_on_gpu && to >= world.ranks_on_gpu;
      }
    }
  }
  routing.pairs = world.ranks * kTokens * kTopk;
  return routing;
}

Config config_of(const Shape& shape, int world, Device device) {
  Config config;
  config.max_tokens = kTokens;
  config.hidden = kHidden;
  config.topk = kTopk;
  config.experts = kExperts;
  if (const auto environment = launch_environment()) {
    config.local_world_size = environment->local_world_size;
  }
  config.enable_local_combine = shape.local_combine;
  config.sm_count = shape.sms;
  // Three dispatches with their combine buffers, some more rows on one rank than on another.
  const bool token_major = shape.order == RowOrder::token_major;
  config.arena_rows = 2 * 3 * kTokens * (token_major ? world : kTopk) * 9 / 8;
  config.device = device;
  return config;
}

// One rank with its layer and inputs; enqueue() is what is timed.
class Rank {
 public:
  Rank(const std::shared_ptr<Transport>& transport, const std::shared_ptr<Store>& store,
       Device device, bool alone, const Shape& shape)
      : shape_(shape),
        place_(device),
        stream_(alone ? shape.stream : place_.stream()),
        layer_(transport, store, config_of(shape, transport->world_size(), device)) {
    Tensor rows(DType::bf16, {kTokens, kHidden});
    testing::Random random(3);
    testing::fill_normal_rows(rows, random);
    input_ = place_.copy(rows);
    indices_ = place_.copy(distinct_experts(layer_.rank(), kTokens, kTopk, kExperts));
    sums_ = place_.make(DType::bf16, {{kTokens, kHidden}});
    kept_ = dispatch(nullptr);
    // Whatever the experts would say: the rows themselves.
    if (kept_.output.numel() > 0) {
      rows_ = layer_.combine_buffer(*kept_.descriptor);
      place_.write(rows_, kept_.output.view());
    }
    place_.wait();
  }

  Device device() const { return place_.device(); }
  Stream stream() const { return stream_; }

  void enqueue() {
    switch (shape_.work) {
      case Work::counted:
        dispatch(nullptr);
        break;
      case Work::cached:
        dispatch(kept_.descriptor);
        break;
      case Work::combine: {
        CombineArgs args;
        args.expert_output = rows_;
        args.out = sums_;
        args.stream = stream_;
        layer_.combine(args, *kept_.descriptor);
        break;
      }
    }
  }

 private:
  Dispatched dispatch(const std::shared_ptr<const Descriptor>& cached) {
    DispatchArgs args;
    args.input = input_;
    if (cached == nullptr) args.expert_indices = indices_;
    if (cached == nullptr) args.order = shape_.order;
    args.copy_out = shape_.copy_out;
    args.cached = cached;
    args.stream = stream_;
    return layer_.dispatch(args);
  }

  Shape shape_;
  RankDevice place_;
  Stream stream_;
  AllToAll layer_;
  Tensor input_, indices_, sums_;
  TensorView rows_;
  Dispatched kept_;
};

std::string name_of(const Shape& shape) {
  std::string name = shape.work == Work::counted  ? "cuda-dispatch"
                     : shape.work == Work::cached ? "cuda-cached-dispatch"
                                                  : "cuda-combine";
  name += shape.order == RowOrder::token_major ? "-token-major" : "-expert-major";
  if (shape.local_combine) name += "-local";
  if (shape.copy_out) name += "-copied";
  name += '-';
  name += std::to_string(shape.sms);
  name += "-sms";
  if (shape.beside_product) name += "-beside-product";
  return name;
}

testing::Benchmark make_benchmark(const Shape& shape, const BenchWorld& world,
                                  const Routing& routing) {
  const bool token_major = shape.order == RowOrder::token_major;
  testing::Benchmark benchmark;
  benchmark.name = name_of(shape);
  benchmark.shape = world.text() + ", " + testing::numbered("", kTokens) + " tokens each, hidden " +
                    testing::numbered("", kHidden) + ", bf16, top " + testing::numbered("", kTopk) +
                    " of " + testing::numbered("", kExperts) + " experts";
  benchmark.device = DeviceType::cuda;
  benchmark.queued = true;
  benchmark.beside_product = shape.beside_product;
  if (!world.one_gpu() || world.launched) {
    benchmark.bytes = double(routing.leaving * kRowBytes);
  } else {
    const std::int64_t rows = token_major ? routing.copies : routing.pairs;
    // Dispatch reads each copy once; combine reads every row and writes each token.
    const std::int64_t others =
        shape.work == Work::combine ? world.ranks * kTokens : routing.copies;
    benchmark.bytes = double((rows + others) * kRowBytes);
    benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
    benchmark.ceiling.bytes = std::int64_t(benchmark.bytes);
  }
  // What one run may take on four GPUs with 24 SMs.
  const bool four = world.launched && world.ranks == 4 && world.nodes == 1 && shape.sms == 24;
  if (four && !shape.copy_out && !shape.beside_product) {
    if (shape.work == Work::counted && token_major) benchmark.target_seconds = 540e-6;
    if (shape.work == Work::cached) benchmark.target_seconds = token_major ? 500e-6 : 700e-6;
    if (shape.work == Work::combine && token_major) benchmark.target_seconds = 500e-6;
    if (shape.local_combine) benchmark.target_seconds = 750e-6;
  }
  // A repeated dispatch of `deep_ep.Buffer` may take 5 % longer than one whose rows stay in the
  // arena.
  const bool two = world.launched && world.ranks == 2 && world.nodes == 1 && shape.sms == 24;
  if (two && shape.copy_out && token_major) benchmark.target_seconds = 193e-6;
  benchmark.prepare = [shape](const testing::Target& target) {
    Shape here = shape;
    here.stream = target.stream;
    return prepare_ranks<Rank>(here);
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> all_to_all_gpu_benchmarks() {
  const BenchWorld world = bench_world();
  const Routing routing = count(world);
  std::vector<testing::Benchmark> list;
  const auto add = [&](const Shape& shape) {
    list.push_back(make_benchmark(shape, world, routing));
  };
  if (world.launched) {
    list.push_back(peer_copy_benchmark("cuda-peer-copy", world, routing.leaving * kRowBytes));
  }
  for (const int sms : {4, 6, 8, 16, 20, 24, 48}) {
    for (const RowOrder order : {RowOrder::token_major, RowOrder::expert_major}) {
      add({.work = Work::cached, .order = order, .sms = sms});
      add({.work = Work::counted, .order = order, .sms = sms});
      if (sms == 24) add({.work = Work::cached, .order = order, .sms = sms, .copy_out = true});
      add({.work = Work::combine, .order = order, .sms = sms});
      if (order == RowOrder::expert_major) {
        add({.work = Work::combine, .order = order, .sms = sms, .local_combine = true});
      }
    }
    // A product beside them: a training step has them at the same time.
    for (const Work work : {Work::cached, Work::combine}) {
      if (world.launched) add({.work = work, .sms = sms, .beside_product = true});
    }
  }
  return list;
}

}  // namespace winnow::expert_parallel
