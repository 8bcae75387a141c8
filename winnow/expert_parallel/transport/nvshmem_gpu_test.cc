// The transport nvshmem on two GPUs, one process each: memory, layers inside and across nodes, and
// what remains when a rank is killed. Each process is this program again, started as
// `winnow launch` would. Skipped where there are fewer GPUs or no NVSHMEM.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include "winnow/expert_parallel/all_to_all_check.h"
#include "winnow/expert_parallel/notify/notify_problem.h"
#include "winnow/expert_parallel/transport/agreement.h"
#include "winnow/expert_parallel/transport/launch_environment.h"
#include "winnow/expert_parallel/transport/nvshmem.h"
#include "winnow/expert_parallel/transport/nvshmem_library.h"
#include "winnow/expert_parallel/transport/test_ranks.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kRanks = 2;

// ---- What a process does: its bodies by name. What a body returns or throws is its answer.

struct Rank {
  LaunchEnvironment environment = launch_environment().value();
  std::shared_ptr<Store> store = std::make_shared<FileStore>(environment.rendezvous);
  Device gpu{DeviceType::cuda, environment.local_rank};
  int rank = environment.rank;

  std::shared_ptr<Transport> join(const std::string& prefix = "winnow") const {
    return create_nvshmem(store, rank, environment.world_size, gpu, generous(), prefix);
  }
  void tell(const std::string& key) const { store->set("test/" + key, "told"); }
  void await(const std::string& key) const {
    if (!store->get("test/" + key, generous())) throw std::runtime_error("never told: " + key);
  }
};

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  return free;
}

template <class Call>
double seconds_of(const Call& call) {
  const auto begin = Deadline::Clock::now();
  call();
  return std::chrono::duration<double>(Deadline::Clock::now() - begin).count();
}

std::string count_gpus(const Rank*) {
  const std::string error = error_of([] { nvshmem_library(); });
  return error.empty() ? std::to_string(gpus().gpus.size()) : error;
}

// Zeros at first; each rank writes to its peer by pointer.
std::string memory(const Rank* me) {
  check(cudaSetDevice(me->gpu.index));
  const auto transport = me->join();
  constexpr std::size_t kBytes = 1 << 20;
  const auto memory = transport->allocate_device(me->gpu, kBytes, generous(), "a test");
  if (reinterpret_cast<std::uintptr_t>(memory->local()) % 4096 != 0) return "not aligned";
  if (memory->peer(me->rank) != memory->local()) return "not its own peer";
  std::vector<std::byte> bytes(kBytes, std::byte{9});
  check(cudaMemcpy(bytes.data(), memory->local(), kBytes, cudaMemcpyDefault));
  if (bytes != std::vector<std::byte>(kBytes)) return "no zeros";
  std::byte* const peer = memory->peer(1 - me->rank);
  if (peer == nullptr) return "no pointer";
  agree(*transport, *me->store, "looked", {}, generous());
  std::memset(bytes.data(), 5 + me->rank, kBytes);
  check(cudaMemcpy(peer, bytes.data(), kBytes, cudaMemcpyDefault));
  check(cudaDeviceSynchronize());
  agree(*transport, *me->store, "written", {}, generous());
  check(cudaMemcpy(bytes.data(), memory->local(), kBytes, cudaMemcpyDefault));
  const std::vector<std::byte> wanted(kBytes, std::byte(6 - me->rank));
  return bytes == wanted ? "good" : "other bytes";
}

// A world of its own for each layer in turn and two at once; memory comes back.
std::string many_layers(const Rank* me) {
  check(cudaSetDevice(me->gpu.index));
  std::size_t before = 0;
  constexpr int kLayers = 20;
  for (int i = 0; i < kLayers; ++i) {
    const auto transport = me->join();
    Config config{.max_tokens = 4096, .hidden = 7168, .topk = 8, .experts = 256};
    config.local_world_size = 1 + i % kRanks;
    config.device = me->gpu;
    AllToAll one(transport, me->store, config), two(transport, me->store, config);
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
std::string all_to_all(const Rank* me) {
  check(cudaSetDevice(me->gpu.index));
  const auto transport = me->join();
  Comparisons all;
  for (const int nodes : {1, kRanks}) {
    Problem problem{.nodes = nodes, .local_world_size = kRanks / nodes, .experts_per_rank = 4};
    problem.topk = 4;
    problem.max_tokens = 700;  // several chunks of the rail
    problem.hidden = 128;
    problem.weights = problem.bias = true;
    problem.rounds = 3;
    for (const Mode mode : {Mode::counted, Mode::cached, Mode::worst_case}) {
      for (const bool token_major : {false, true}) {
        problem.mode = mode;
        problem.token_major = token_major;
        problem.local_combine = !token_major && mode == Mode::cached;
        problem.fp8 = mode == Mode::worst_case;
        Config config = problem.config();
        config.device = me->gpu;
        AllToAll layer(transport, me->store, config);
        all.add(run_rank(layer, problem, make_rounds(problem)), me->rank);
      }
    }
  }
  for (const testing::Comparison& one : all.list()) {
    if (!one.passed) return one.what + ": " + one.detail;
  }
  return "good";
}

std::string notify(const Rank* me) {
  check(cudaSetDevice(me->gpu.index));
  const auto transport = me->join();
  for (const int nodes : {1, kRanks}) {
    NotifyShape shape{.nodes = nodes, .local_world_size = kRanks / nodes, .experts_per_rank = 5};
    NotifierConfig config = shape.config();
    config.device = me->gpu;
    const Place place(me->gpu);
    Notifier notifier(transport, me->store, config);
    for (std::uint64_t call = 0; call < 60; ++call) {
      testing::Random random(call);
      shape.most_tokens = random.below(300);
      shape.channels = 1 + random.below(20);
      const std::vector<Tensor> indices = make_indices(shape, random);
      NotifyInputs inputs(shape, indices[static_cast<std::size_t>(me->rank)]);
      NotifyOutputs outputs(shape);
      NotifyArgs args = make_args(shape, inputs, outputs);
      args.worst_case_rows = call % 3 == 1;
      notify_at(place, notifier, args, inputs, outputs);
      if (args.worst_case_rows > 0) continue;
      for (const testing::Comparison& one :
           compare(shape, indices, me->rank, outputs, notifier.totals()).comparisons) {
        if (!one.passed) return one.what + ": " + one.detail;
      }
    }
  }
  return "good";
}

std::string another_world(const Rank* me) {
  const auto transport = me->join();
  return error_of([&] {
    create_nvshmem(me->store, 0, 1, me->gpu, generous(), "alone" + std::to_string(me->rank));
  });
}

std::string one_gpu(const Rank* me) {
  create_nvshmem(me->store, me->rank, kRanks, {DeviceType::cuda, 0}, generous());
  return "no error";
}

std::string no_such_gpu(const Rank* me) {
  create_nvshmem(me->store, me->rank, kRanks, {DeviceType::cuda, 99 * me->rank}, generous());
  return "no error";
}

// The others find out at the next wait on the device; letting go is quick, and nothing new begins.
std::string lost_rank(const Rank* me) {
  check(cudaSetDevice(me->gpu.index));
  const auto transport = me->join();
  Config config{.max_tokens = 64, .hidden = 64, .topk = 2, .experts = 4};
  config.timeout = std::chrono::seconds(1);
  config.device = me->gpu;
  auto layer = std::make_unique<AllToAll>(transport, me->store, config);
  layer->barrier();
  check(cudaDeviceSynchronize());
  if (me->rank == 1) raise(SIGKILL);
  while (!transport->peer_gone(1)) sleep_ms(1);
  layer->barrier();  // only enqueues
  check(cudaDeviceSynchronize());
  std::ostringstream said;
  said << error_of([&] { layer->barrier(); }) << "\n";
  const double close = seconds_of([&] {
    layer->close();
    layer.reset();
  });
  if (close > 0.5) said << "close took " << close << " s\n";
  said << error_of([&] { AllToAll(transport, me->store, config); }) << "\n";
  said << error_of([&] { me->join("anew"); }) << "\n";
  return said.str();
}

// The peer is killed when NVSHMEM is already waiting for it.
std::string lost_in_nvshmem(const Rank* me) {
  const auto transport = me->join();
  if (me->rank == 1) {
    // The agreement that begins allocate_device(), and no more.
    agree(*transport, *me->store, "expert_parallel::allocate_device",
          {{"allocation", "4096 bytes for a test"}}, generous());
    raise(SIGKILL);
  }
  return error_of([&] { transport->allocate_device(me->gpu, 4096, brief(2000), "a test"); });
}

const std::map<std::string, std::string (*)(const Rank*)> kBodies = {
    {"count_gpus", count_gpus},           {"memory", memory},
    {"all_to_all", all_to_all},           {"many_layers", many_layers},
    {"another_world", another_world},     {"one_gpu", one_gpu},
    {"no_such_gpu", no_such_gpu},         {"lost_rank", lost_rank},
    {"lost_in_nvshmem", lost_in_nvshmem}, {"notify", notify},
};

// ---- The tests.

// This program as a rank. What it prints is its answer; it ends by returning from main().
class Process {
 public:
  Process(const std::string& body, int rank, const std::string& rendezvous) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // none outlives the test
      dup2(ends[1], 100);
      close(ends[0]);
      close(ends[1]);
      setenv("WINNOW_TEST_BODY", body.c_str(), 1);
      setenv("WINNOW_RANK", std::to_string(rank).c_str(), 1);
      setenv("WINNOW_WORLD_SIZE", std::to_string(kRanks).c_str(), 1);
      setenv("WINNOW_RENDEZVOUS", rendezvous.c_str(), 1);
      execl("/proc/self/exe", "rank", nullptr);
      _exit(127);
    }
    close(ends[1]);
    answer_ = ends[0];
  }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), answer_(std::exchange(other.answer_, -1)) {}
  Process& operator=(Process&&) = delete;
  ~Process() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    if (answer_ >= 0) close(answer_);
  }

  // Its answer and how it ended. The end of a process must not hang either.
  std::string wait() {
    std::string text;
    char buffer[1024];
    for (ssize_t count; (count = read(answer_, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<std::size_t>(count));
      if (text.ends_with('\0')) break;  // the answer is complete, the process not yet at its end
    }
    if (text.ends_with('\0')) text.pop_back();
    const auto begin = Deadline::Clock::now();
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      sleep_ms(2);
      if (Deadline::Clock::now() - begin < std::chrono::seconds(20)) continue;
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      return text + "\nits end hung";
    }
    pid_ = -1;
    const double end = std::chrono::duration<double>(Deadline::Clock::now() - begin).count();
    std::printf("  a process ended %.2f s after its answer\n", end);
    if (WIFSIGNALED(status)) return text + "killed by signal " + std::to_string(WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? text
                                    : text + "exit code " + std::to_string(WEXITSTATUS(status));
  }

 private:
  pid_t pid_ = -1;
  int answer_ = -1;
};

class NvshmemGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    // In another process, since this one must stay clean of CUDA until it has started the ranks.
    static const std::string gpus = Process("count_gpus", 0, "/tmp").wait();
    if (std::atoi(gpus.c_str()) < kRanks) GTEST_SKIP() << "wants two GPUs and NVSHMEM: " << gpus;
  }
  std::vector<std::string> run(const std::string& body) {
    std::vector<Process> processes;
    for (int rank = 0; rank < kRanks; ++rank) processes.emplace_back(body, rank, folder_.path());
    std::vector<std::string> answers;
    const double seconds = seconds_of([&] {
      for (Process& process : processes) answers.push_back(process.wait());
    });
    std::printf("  %s: %.2f s\n", body.c_str(), seconds);
    return answers;
  }
  TemporaryFolder folder_;
};

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

TEST_F(NvshmemGpu, ARankThatIsLost) {
  const auto answers = run("lost_rank");
  EXPECT_EQ(answers[1], "killed by signal 9");
  std::istringstream lines(answers[0]);
  std::string line;
  std::getline(lines, line);
  EXPECT_THAT(line, AllOf(StartsWith("expert_parallel::barrier: rank 0 waited 1."),
                          HasSubstr("of rank 1")));
  for (int i = 0; i < 2; ++i) {
    std::getline(lines, line);
    EXPECT_THAT(line, AllOf(StartsWith("expert_parallel::nvshmem: rank 1 has ended (process "),
                            HasSubstr("restart all processes")));
  }
  EXPECT_FALSE(std::getline(lines, line)) << line;
}
TEST_F(NvshmemGpu, ARankThatIsLostInsideNvshmem) {
  const auto answers = run("lost_in_nvshmem");
  EXPECT_EQ(answers[0],
            "expert_parallel::nvshmem: an allocation of NVSHMEM has not ended within 2.0 s");
  EXPECT_EQ(answers[1], "killed by signal 9");
}

}  // namespace

// As a rank: the body's answer, with a zero behind it.
int run_body(const std::string& name) {
  std::string answer;
  const auto body = kBodies.at(name);
  const std::string error = error_of([&] {
    const Rank rank;
    answer = body(&rank);
  });
  if (!error.empty()) answer = error;
  const ssize_t size = static_cast<ssize_t>(answer.size()) + 1;
  return write(100, answer.c_str(), answer.size() + 1) == size ? 0 : 1;
}

}  // namespace winnow::expert_parallel

int main(int argc, char** argv) {
  if (const char* body = std::getenv("WINNOW_TEST_BODY")) {
    return winnow::expert_parallel::run_body(body);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

#endif
