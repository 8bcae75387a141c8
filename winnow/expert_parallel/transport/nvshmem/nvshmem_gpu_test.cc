// The transport nvshmem on two GPUs: memory, and layers inside and across nodes. What remains when
// a rank is killed or stopped is in nvshmem_faults_gpu_test.cc. Skipped where there are fewer GPUs
// or no NVSHMEM.
#if WINNOW_WITH_CUDA
#include <cstring>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/testing/gpu_processes.h"
#include "winnow/expert_parallel/testing/notify_problem.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using ::testing::StartsWith;

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  return free;
}

// Zeros at first; each rank writes to its peer by pointer.
std::string memory(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  constexpr std::size_t kBytes = 1 << 20;
  const auto memory = transport->allocate_cuda(me.gpu, kBytes, generous(), "a test");
  if (reinterpret_cast<std::uintptr_t>(memory->local()) % 4096 != 0) return "not aligned";
  if (memory->peer(me.rank) != memory->local()) return "not its own peer";
  std::vector<std::byte> bytes(kBytes, std::byte{9});
  check(cudaMemcpy(bytes.data(), memory->local(), kBytes, cudaMemcpyDefault));
  if (bytes != std::vector<std::byte>(kBytes)) return "no zeros";
  std::byte* const peer = memory->peer(1 - me.rank);
  if (peer == nullptr) return "no pointer";
  agree(*transport, *me.store, "looked", {}, generous());
  std::memset(bytes.data(), 5 + me.rank, kBytes);
  check(cudaMemcpy(peer, bytes.data(), kBytes, cudaMemcpyDefault));
  check(cudaDeviceSynchronize());
  agree(*transport, *me.store, "written", {}, generous());
  check(cudaMemcpy(bytes.data(), memory->local(), kBytes, cudaMemcpyDefault));
  const std::vector<std::byte> wanted(kBytes, std::byte(6 - me.rank));
  return bytes == wanted ? "good" : "other bytes";
}

// A world of its own for each layer in turn and two at once; memory comes back.
std::string many_layers(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  std::size_t before = 0;
  constexpr int kLayers = 20;
  for (int i = 0; i < kLayers; ++i) {
    const auto transport = me.join();
    Config config{.max_tokens = 4096, .hidden = 7168, .topk = 8, .experts = 256};
    config.local_world_size = 1 + i % kRanks;
    config.device = me.gpu;
    AllToAll one(transport, me.store, config), two(transport, me.store, config);
    for (int round = 0; round < 3; ++round) {
      one.barrier();
      two.barrier(true);
      one.barrier();
    }
    check(cudaDeviceSynchronize());
    if (i == 1) before = free_memory();
    if (i > 1 && free_memory() + (64u << 20) < before) {
      return "layer " + std::to_string(i) + " leaves " + std::to_string(free_memory()) + " of " +
             std::to_string(before) + " bytes";
    }
  }
  return "good";
}

// Bit for bit, on one node by pointers and on two by puts.
std::string all_to_all(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  Comparisons all;
  for (const int nodes : {1, kRanks}) {
    Problem problem{.nodes = nodes, .local_world_size = kRanks / nodes, .experts_per_rank = 4};
    problem.topk = 4;
    problem.max_tokens = 700;  // several chunks of the rail
    problem.hidden = 128;
    problem.weights = problem.bias = true;
    problem.rounds = 3;
    problem.sm_count = 24;  // two ranks push token-major rows under enable_local_combine
    for (const Mode mode : {Mode::counted, Mode::cached, Mode::worst_case}) {
      for (const bool token_major : {false, true}) {
        problem.mode = mode;
        problem.token_major = token_major;
        problem.local_combine = mode != Mode::counted;
        problem.fp8 = mode == Mode::worst_case;
        Config config = problem.config();
        config.device = me.gpu;
        AllToAll layer(transport, me.store, config);
        all.add(run_rank(layer, problem, make_rounds(problem)), me.rank);
      }
    }
  }
  // Rows enough to be pushed unasked if any rank has that many, and none.
  Problem many{.local_world_size = kRanks,
               .max_tokens = 1800,
               .hidden = 7168,
               .token_major = true,
               .rounds = 1,
               .sm_count = 24};
  Config config = many.config();
  config.device = me.gpu;
  AllToAll layer(transport, me.store, config);
  for (const Tokens tokens :
       {Tokens::full, Tokens::none, Tokens::even_ranks_empty, Tokens::none, Tokens::full}) {
    many.tokens = tokens;
    all.add(run_rank(layer, many, make_rounds(many)), me.rank);
  }
  want_passed(all.list());
  return "good";
}

std::string notify(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  for (const int nodes : {1, kRanks}) {
    NotifyShape shape{.nodes = nodes, .local_world_size = kRanks / nodes, .experts_per_rank = 5};
    NotifierConfig config = shape.config();
    config.device = me.gpu;
    const RankDevice place(me.gpu);
    Notifier notifier(transport, me.store, config);
    for (std::uint64_t call = 0; call < 60; ++call) {
      testing::Random random(call);
      shape.most_tokens = random.below(300);
      shape.channels = 1 + random.below(20);
      const std::vector<Tensor> indices = make_indices(shape, random);
      NotifyInputs inputs(shape, indices[static_cast<std::size_t>(me.rank)]);
      NotifyOutputs outputs(shape);
      NotifyArgs args = make_args(shape, inputs, outputs);
      args.worst_case_rows = call % 3 == 1;
      notify_at(place, notifier, args, inputs, outputs);
      if (args.worst_case_rows > 0) continue;
      want_passed(compare(shape, indices, me.rank, outputs, notifier.totals()).comparisons);
    }
  }
  return "good";
}

std::string another_world(const Rank& me) {
  const auto transport = me.join();
  return error_of([&] {
    create_nvshmem(me.store, 0, 1, me.gpu, generous(), "alone" + std::to_string(me.rank));
  });
}

std::string one_gpu(const Rank& me) {
  create_nvshmem(me.store, me.rank, kRanks, {DeviceType::cuda, 0}, generous());
  return "no error";
}

std::string no_such_gpu(const Rank& me) {
  create_nvshmem(me.store, me.rank, kRanks, {DeviceType::cuda, 99 * me.rank}, generous());
  return "no error";
}

// ---- The tests.

using NvshmemGpu = GpuProcesses;

TEST_F(NvshmemGpu, MemoryIsSharedByPointer) { EXPECT_THAT(run("memory"), Each("good")); }
TEST_F(NvshmemGpu, ManyLayersLeaveNothing) { EXPECT_THAT(run("many_layers"), Each("good")); }

TEST_F(NvshmemGpu, TokensTravelInsideAndAcrossNodes) {
  EXPECT_THAT(run("all_to_all"), Each("good"));
}

TEST_F(NvshmemGpu, CountsTravelInsideAndAcrossNodes) { EXPECT_THAT(run("notify"), Each("good")); }

TEST_F(NvshmemGpu, RefusesAnotherGroup) {
  EXPECT_THAT(run("another_world"),
              Each("expert_parallel::nvshmem: rank 0 is in another NVSHMEM world: a process has "
                   "one for its life, of the same ranks; restart all processes"));
}
TEST_F(NvshmemGpu, WantsAGpuForEachRank) {
  EXPECT_THAT(run("one_gpu"), Each("expert_parallel::nvshmem: rank 1: it and rank 0 have the same "
                                   "GPU: want one for each rank"));
  EXPECT_THAT(run("no_such_gpu"),
              Each(StartsWith("expert_parallel::nvshmem: rank 1: device: want one GPU for each "
                              "rank, got cuda:99 on a machine with ")));
}

}  // namespace
}  // namespace winnow::expert_parallel

int main(int argc, char** argv) {
  using namespace winnow::expert_parallel;  // NOLINT
  return run_tests(argc, argv,
                   {{"memory", memory},
                    {"many_layers", many_layers},
                    {"all_to_all", all_to_all},
                    {"notify", notify},
                    {"another_world", another_world},
                    {"one_gpu", one_gpu},
                    {"no_such_gpu", no_such_gpu}});
}

#endif
