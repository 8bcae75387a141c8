// The benchmarks of expert_parallel::all_to_all on GPUs: 4096 tokens of 7168 bf16 on each rank, top
// 8 of 256 experts. Alone, two ranks share each GPU, beside a copy of the same bytes where there is
// one; under `winnow launch` every process is a rank with a GPU of its own, and a plain copy from
// each rank's memory to the next one's is a benchmark too. Useful bytes are those that are read and
// written (on one GPU), or that leave a GPU.
#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/memory/gpu_memory.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/expert_parallel/testing/place.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kTopk = 8, kExperts = 256, kRanksOnGpu = 2;
constexpr std::int64_t kTokens = 4096, kHidden = 7168;
constexpr std::int64_t kRowBytes = kHidden * 2;

enum class Work { counted, cached, combine, peer_copy };

// Of the world that benchmarks are listed for. One that makes no sense is told when they run.
std::optional<LaunchEnvironment> environment_if_good() {
  try {
    return launch_environment();
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Of ranks: those that are launched, each with a GPU, or those of this process.
struct World {
  bool launched = false;
  int ranks = 1, nodes = 1, ranks_on_gpu = 1;
  bool one_gpu() const { return ranks == ranks_on_gpu; }
};
World world_here() {
  if (const auto environment = environment_if_good()) {
    const int ranks = environment->world_size;
    return {true, ranks, ranks / environment->local_world_size, 1};
  }
  // The experts can be shared by a power of two.
  const unsigned gpus = std::max(1u, unsigned(winnow::gpus().gpus.size()));
  return {false, kRanksOnGpu * int(std::bit_floor(gpus)), 1, kRanksOnGpu};
}

struct Shape {
  Work work = Work::counted;
  RowOrder order = RowOrder::token_major;
  int sms = 24;
  bool copy_out = false, local_combine = false;
};

Tensor choose(int rank) {
  Tensor indices(DType::i32, {kTokens, kTopk});
  testing::Random random(std::uint64_t(rank) + 1);
  choose_experts(indices, random, kExperts, ExpertChoice::distinct);
  return indices;
}

// What all ranks' tokens are, by what they cost.
struct Routing {
  std::int64_t copies = 0;   // (token, rank) with an expert there: token-major rows
  std::int64_t leaving = 0;  // those that leave the first GPU
  std::int64_t pairs = 0;
};

Routing count(const World& world) {
  Routing routing;
  if (kExperts % world.ranks != 0) return routing;  // told when the benchmarks run
  for (int rank = 0; rank < world.ranks; ++rank) {
    const Tensor indices = choose(rank);
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

// One rank with its layer and inputs; enqueue() is what is timed. A rank that has a GPU for itself
// uses the default stream.
class Rank {
 public:
  Rank(const std::shared_ptr<Transport>& transport, const std::shared_ptr<Store>& store,
       const Shape& shape, Device device, bool alone)
      : shape_(shape),
        place_(device),
        stream_(alone ? Stream{} : place_.stream()),
        layer_(transport, store, config_of(shape, transport->world_size(), device)) {
    Tensor rows(DType::bf16, {kTokens, kHidden});
    testing::Random random(3);
    testing::fill_normal_rows(rows, random);
    input_ = place_.copy(rows);
    indices_ = place_.copy(choose(layer_.rank()));
    sums_ = place_.make(DType::bf16, {{kTokens, kHidden}});
    kept_ = dispatch(nullptr);
    // Whatever the experts would say: the rows themselves.
    if (kept_.output.numel() > 0) {
      rows_ = layer_.combine_buffer(*kept_.descriptor);
      place_.write(rows_, kept_.output.view());
    }
    place_.wait();
  }

  // The rank's stream goes on after the first GPU's default one, and the other way round.
  void follow_default() { order(kFirst, {}, place_.device(), stream_); }
  void hold_default() { order(place_.device(), stream_, kFirst, {}); }

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
      case Work::peer_copy:
        break;
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

  static constexpr Device kFirst{DeviceType::cuda, 0};
  Shape shape_;
  Place place_;
  Stream stream_;
  AllToAll layer_;
  Tensor input_, indices_, sums_;
  TensorView rows_;
  Dispatched kept_;
};

// The ranks of this process: all of them, or one.
class Ranks {
 public:
  explicit Ranks(const Shape& shape)
      : team_(world_here().ranks), ranks_(std::size_t(team_.world().world_size())) {
    team_.run([&](int rank, const std::shared_ptr<Transport>& transport) {
      const Device device{DeviceType::cuda, rank / kRanksOnGpu};
      ranks_[std::size_t(rank)] =
          std::make_unique<Rank>(transport, team_.world().store(), shape, device, false);
    });
  }
  ~Ranks() {
    team_.run([&](int rank, const auto&) { ranks_[std::size_t(rank)].reset(); });
  }
  // No rank may wait for another one's end by way of the default stream.
  void run() {
    for (const auto& rank : ranks_) rank->follow_default();
    team_.run([&](int rank, const auto&) { ranks_[std::size_t(rank)]->enqueue(); });
    for (const auto& rank : ranks_) rank->hold_default();
  }

 private:
  RankTeam team_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// This process in a launched world; kept to the end.
struct Launched {
  LaunchEnvironment environment = launch_environment().value();
  Device device{DeviceType::cuda, environment.local_rank};
  std::shared_ptr<Store> store = std::make_shared<FileStore>(environment.rendezvous);
  std::shared_ptr<Transport> transport = create_nvshmem(
      store, environment.rank, environment.world_size, device, Deadline(), "winnow-bench");
};
Launched& launched() {
  static Launched world;
  return world;
}

// All ranks at once, each to the next one.
std::function<void()> peer_copy(std::int64_t bytes) {
  Launched& world = launched();
  const auto to = world.transport->allocate_device(world.device, std::size_t(bytes), Deadline(),
                                                   "the target of copies");
  std::byte* next = to->peer((world.environment.rank + 1) % world.environment.world_size);
  if (next == nullptr) throw Error(ErrorCode::unsupported, "bench", "no pointer to the next GPU");
  const auto from = allocate_on_gpu(world.device, std::size_t(bytes));
  const auto stream = std::make_shared<GpuStream>(world.device, Stream{});
  return [to, next, from, stream, bytes] { stream->copy(next, from.get(), std::size_t(bytes)); };
}

std::function<void()> prepare(const Shape& shape, std::int64_t leaving) {
  if (!launch_environment()) {
    return [ranks = std::make_shared<Ranks>(shape)] { ranks->run(); };
  }
  if (shape.work == Work::peer_copy) return peer_copy(leaving * kRowBytes);
  Launched& world = launched();
  return [rank = std::make_shared<Rank>(world.transport, world.store, shape, world.device, true)] {
    rank->enqueue();
  };
}

std::string name_of(const Shape& shape) {
  if (shape.work == Work::peer_copy) return "cuda-peer-copy";
  std::string name = shape.work == Work::counted  ? "cuda-dispatch"
                     : shape.work == Work::cached ? "cuda-cached-dispatch"
                                                  : "cuda-combine";
  name += shape.order == RowOrder::token_major ? "-token-major" : "-expert-major";
  if (shape.local_combine) name += "-local";
  if (shape.copy_out) name += "-copied";
  return name + "-" + std::to_string(shape.sms) + "-sms";
}

testing::Benchmark make_benchmark(const Shape& shape, const World& world, const Routing& routing) {
  const bool token_major = shape.order == RowOrder::token_major;
  testing::Benchmark benchmark;
  benchmark.name = name_of(shape);
  const int gpus = world.ranks / world.ranks_on_gpu;
  benchmark.shape =
      std::to_string(world.ranks) + " ranks on " + std::to_string(gpus) +
      (gpus > 1 ? " GPUs" : " GPU") +
      (world.launched ? " and " + std::to_string(world.nodes) + " nodes, " : std::string(", ")) +
      testing::numbered("", kTokens) + " tokens each, hidden " + testing::numbered("", kHidden) +
      ", bf16, top " + testing::numbered("", kTopk) + " of " + testing::numbered("", kExperts) +
      " experts";
  benchmark.device = DeviceType::cuda;
  benchmark.queued = true;
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
  if (four && !shape.copy_out) {
    if (shape.work == Work::counted && token_major) benchmark.target_seconds = 540e-6;
    if (shape.work == Work::cached) benchmark.target_seconds = token_major ? 500e-6 : 700e-6;
    if (shape.work == Work::combine && token_major) benchmark.target_seconds = 500e-6;
    if (shape.local_combine) benchmark.target_seconds = 750e-6;
  }
  benchmark.prepare = [shape, leaving = routing.leaving](const testing::Target&) {
    return prepare(shape, leaving);
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> all_to_all_gpu_benchmarks() {
  const World world = world_here();
  const Routing routing = count(world);
  std::vector<testing::Benchmark> list;
  const auto add = [&](const Shape& shape) {
    list.push_back(make_benchmark(shape, world, routing));
  };
  if (world.launched) add({.work = Work::peer_copy});
  for (const int sms : {8, 16, 24, 48}) {
    for (const RowOrder order : {RowOrder::token_major, RowOrder::expert_major}) {
      add({.work = Work::cached, .order = order, .sms = sms});
      add({.work = Work::counted, .order = order, .sms = sms});
      if (sms == 24) add({.work = Work::cached, .order = order, .sms = sms, .copy_out = true});
      add({.work = Work::combine, .order = order, .sms = sms});
      if (order == RowOrder::expert_major) {
        add({.work = Work::combine, .order = order, .sms = sms, .local_combine = true});
      }
    }
  }
  return list;
}

}  // namespace winnow::expert_parallel
