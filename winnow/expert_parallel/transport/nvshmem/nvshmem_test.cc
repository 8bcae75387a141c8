// The transport nvshmem without a GPU: what it refuses, and its protocol over a library that is
// none. What needs GPUs is in nvshmem_gpu_test.cc.
#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"

#include <cstdlib>
#include <cstring>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_world.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr Device kGpu{DeviceType::cuda, 0};

// ---- A library whose memory is the host's; every process pretends to have a GPU of its own.

bool g_hangs = false;      // the next allocation never returns
bool g_no_memory = false;  // it returns nothing
int g_allocated = 0;       // allocations that were not freed

void fake_version(int* major, int* minor, int* patch) { *major = 3, *minor = 4, *patch = 5; }
int fake_gpu_id(int, void* id) {
  const pid_t pid = getpid();
  std::memcpy(id, &pid, sizeof(pid));
  return 0;
}
int fake_unique_id(void* id) {
  std::memset(id, 7, NvshmemLibrary::kUniqueIdBytes);
  return 0;
}
int fake_use_gpu(int) { return 0; }
int fake_start(const void* id, int, int) {
  return static_cast<const char*>(id)[NvshmemLibrary::kUniqueIdBytes - 1] == 7 ? 0 : -1;
}
void* fake_allocate(std::size_t bytes) {
  while (g_hangs) sleep_ms(1000);
  if (g_no_memory) return nullptr;
  ++g_allocated;
  void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(memory, 0, bytes);
  return memory;
}
void fake_free(void* memory) {
  --g_allocated;
  std::free(memory);
}
void* fake_pointer(void*, int) { return nullptr; }

const NvshmemLibrary kFake{"",         fake_version,  fake_unique_id, fake_gpu_id,  fake_use_gpu,
                           fake_start, fake_allocate, fake_free,      fake_pointer, nullptr};

class Nvshmem : public ::testing::Test {
 protected:
  using Body = std::function<std::string(const std::shared_ptr<Store>& store, int rank)>;

  // What the body says in a process of its own for each rank.
  std::vector<std::string> on_processes(int ranks, const Body& body) {
    std::vector<RankProcess> processes;
    for (int rank = 0; rank < ranks; ++rank) {
      processes.emplace_back(
          [&, rank] { return body(std::make_shared<FileStore>(folder_.path()), rank); });
    }
    std::vector<std::string> message;
    for (RankProcess& process : processes) message.push_back(process.wait());
    return message;
  }

  static std::shared_ptr<Transport> join(const std::shared_ptr<Store>& store, int rank, int ranks,
                                         const Deadline& deadline = generous(),
                                         const std::string& prefix = "test") {
    return join_nvshmem(&kFake, "", store, rank, ranks, kGpu, deadline, prefix);
  }

  TemporaryFolder folder_;
};

// The first of all tests: once NVSHMEM is loaded, that one is used.
TEST_F(Nvshmem, IsWhereTheProgramOrTheEnvironmentSays) {
  const auto version_with = [](const std::function<void()>& write) {
    return RankProcess([&] {
             unsetenv("NVSHMEM_HOME");
             write();
             int major = 0, minor = 0, patch = 0;
             open_nvshmem_library(STAND_IN_LIBRARY).version(&major, &minor, &patch);
             return std::to_string(major);
           })
        .wait();
  };
  const std::string none = "expert_parallel::nvshmem: NVSHMEM cannot be loaded: ";
  EXPECT_THAT(version_with([] {}), StartsWith(none));
  EXPECT_THAT(version_with([] { set_nvshmem_folder("/nowhere"); }), StartsWith(none));
  EXPECT_EQ(version_with([] { set_nvshmem_folder(STAND_IN_HOME "/lib"); }), "9");
  EXPECT_EQ(version_with([] { setenv("NVSHMEM_HOME", STAND_IN_HOME, 1); }), "9");
}

// Of a relative path another folder's code would run in each current directory.
TEST_F(Nvshmem, IsNotWhereARelativePathSays) {
  const auto refusal_with = [](const std::string& home, const std::string& folder) {
    return RankProcess([&] {
             EXPECT_EQ(chdir(STAND_IN_HOME), 0);
             setenv("NVSHMEM_HOME", home.c_str(), 1);
             set_nvshmem_folder(folder);
             return error_of([] { open_nvshmem_library(STAND_IN_LIBRARY); });
           })
        .wait();
  };
  for (const std::string home : {".", "lib/..", "../stand_in"}) {
    for (const std::string folder : {"", STAND_IN_HOME "/lib"}) {
      EXPECT_EQ(
          refusal_with(home, folder),
          "expert_parallel::nvshmem: NVSHMEM_HOME: want an absolute path, got \"" + home + "\"");
    }
  }
}

TEST_F(Nvshmem, SaysWhereThereIsNone) {
  testing::expect_error([] { open_nvshmem_library("/nowhere/libwinnow_nvshmem.so"); },
                        ErrorCode::unsupported,
                        "expert_parallel::nvshmem: NVSHMEM cannot be loaded: "
                        "/nowhere/libwinnow_nvshmem.so: cannot open shared object file: No such "
                        "file or directory (pip install nvidia-nvshmem-cu13==3.4.5)");
  testing::expect_error([] { open_nvshmem_library("libdl.so.2"); }, ErrorCode::unsupported,
                        "expert_parallel::nvshmem: libdl.so.2 is not a library of Winnow");
}

// The library of this build can be opened without a GPU, and multicast is off from then on.
TEST_F(Nvshmem, TheLibraryOpensWithoutAGpu) {
  const std::string error = error_of([] { nvshmem_library(); });
  if (!error.empty()) {  // built without, or on a machine without libnvshmem_host.so
    EXPECT_THAT(error, AnyOf(StartsWith("expert_parallel::nvshmem: this build has no NVSHMEM: "),
                             StartsWith("expert_parallel::nvshmem: NVSHMEM cannot be loaded: ")));
    GTEST_SKIP() << error;
  }
  int major = 0, minor = 0, patch = 0;
  nvshmem_library().version(&major, &minor, &patch);
  EXPECT_EQ(major, 3);
  EXPECT_STREQ(std::getenv("NVSHMEM_DISABLE_NVLS"), "1");
  EXPECT_STREQ(std::getenv("NVSHMEM_DISABLE_NCCL"), "1");
  EXPECT_STREQ(std::getenv("NVSHMEM_DISABLE_LOCAL_ONLY_PROXY"), "1");
}

TEST_F(Nvshmem, EveryRankReceivesWhatStandsAgainstIt) {
  const auto texts = [&](Device device) {
    return on_processes(2, [device](const auto& store, int rank) {
      create_nvshmem(store, rank, 2, rank == 0 ? kGpu : device, generous());
      return "";
    });
  };
  EXPECT_THAT(on_processes(2,
                           [](const auto& store, int rank) {
                             join_nvshmem(rank == 0 ? &kFake : nullptr,
                                          rank == 0 ? "" : "device: want a GPU, got cpu", store,
                                          rank, 2, kGpu, generous(), "test");
                             return "";
                           }),
              Each("expert_parallel::nvshmem: rank 1: device: want a GPU, got cpu"));
  if (!gpus().gpus.empty()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(texts(kGpu), Each(StartsWith("expert_parallel::nvshmem: rank 0: device: want a GPU, "
                                           "but there is none: ")));
}

TEST_F(Nvshmem, WantsAProcessForEachRank) {
  const auto store = std::make_shared<MemoryStore>();
  EXPECT_THAT(on_threads(2, [&](int rank) { join(store, rank, 2); }),
              Each("expert_parallel::nvshmem: rank 1: it and rank 0 are in one process: want a "
                   "process for each rank"));
}

TEST_F(Nvshmem, MemoryIsAgreedOnAndFreedWhenAllHaveLetGo) {
  EXPECT_THAT(on_processes(3,
                           [](const auto& store, int rank) {
                             const auto transport = join(store, rank, 3);
                             std::vector<std::shared_ptr<SymmetricMemory>> kept;
                             std::string most;
                             for (int round = 0; round < 5; ++round) {
                               auto memory =
                                   transport->allocate_cuda(kGpu, 100, generous(), "a test");
                               if (rank == 1 && round == 0) kept.push_back(memory);
                               most += std::to_string(g_allocated);
                             }
                             return most;
                           }),
              Each("12222"));
}

TEST_F(Nvshmem, RefusesWhatRanksAskForDifferently) {
  const auto errors = on_processes(2, [](const auto& store, int rank) {
    const auto transport = join(store, rank, 2);
    std::string first = error_of([&] {
      transport->allocate_cuda(kGpu, std::size_t(64 + 8 * rank), generous(), "the arena");
    });
    // Nothing more over this transport; a new one serves.
    const std::string again =
        error_of([&] { transport->allocate_cuda(kGpu, 64, generous(), "more"); });
    join(store, rank, 2)->allocate_cuda(kGpu, 64, generous(), "more");
    return again == first ? first : again;
  });
  EXPECT_THAT(errors, Each("expert_parallel::allocate_cuda: allocation: want the same on every "
                           "rank, got 64 bytes for the arena (rank 0), 72 bytes for the arena "
                           "(rank 1)"));
}

TEST_F(Nvshmem, EveryRankLearnsOfMissingMemory) {
  EXPECT_THAT(on_processes(2,
                           [](const auto& store, int rank) {
                             const auto transport = join(store, rank, 2);
                             g_no_memory = rank == 1;
                             const std::string error = error_of([&] {
                               transport->allocate_cuda(kGpu, 64, generous(), "the arena");
                             });
                             g_no_memory = false;
                             for (int i = 0; i < 3; ++i) {  // a new transport has some
                               join(store, rank, 2)->allocate_cuda(kGpu, 64, generous(), "more");
                             }
                             return error;
                           }),
              Each("expert_parallel::allocate_cuda: rank 1: no GPU memory of 64 bytes for the "
                   "arena"));
  EXPECT_THAT(on_processes(2,
                           [](const auto& store, int rank) {
                             join(store, rank, 2)
                                 ->allocate_cuda({DeviceType::cuda, rank}, 64, generous(),
                                                 "the arena");
                             return "";
                           }),
              Each("expert_parallel::allocate_cuda: rank 1: the arena: want cuda:0, got cuda:1"));
}

TEST_F(Nvshmem, ASecondTransportSharesTheWorld) {
  EXPECT_THAT(on_processes(2,
                           [](const auto& store, int rank) {
                             const auto one = join(store, rank, 2), two = join(store, rank, 2);
                             if (one->world_id() == two->world_id()) return std::string("one id");
                             auto a = one->allocate_cuda(kGpu, 64, generous(), "a");
                             auto b = two->allocate_cuda(kGpu, 64, generous(), "b");
                             return std::to_string(g_allocated) + " " + one->name();
                           }),
              Each("2 nvshmem"));
}

TEST_F(Nvshmem, AnotherGroupIsRefused) {
  const std::string text =
      "expert_parallel::nvshmem: rank 0 is in another NVSHMEM world: a process has one for its "
      "life, of the same ranks; restart all processes";
  EXPECT_THAT(on_processes(2,
                           [](const auto& store, int rank) {
                             join(store, rank, 2);
                             // A world of this rank alone, then the ranks the other way round.
                             const std::string alone = error_of([&] {
                               join(store, 0, 1, generous(), "alone" + std::to_string(rank));
                             });
                             const std::string turned =
                                 error_of([&] { join(store, 1 - rank, 2, generous(), "turned"); });
                             return alone == turned ? alone : alone + "\n" + turned;
                           }),
              Each(text));
}

TEST_F(Nvshmem, ALostRankEndsTheWorld) {
  std::vector<std::unique_ptr<RankProcess>> processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.push_back(std::make_unique<RankProcess>([&, rank] {
      const auto store = std::make_shared<FileStore>(folder_.path());
      const auto transport = join(store, rank, 2);
      const auto memory = transport->allocate_cuda(kGpu, 64, generous(), "the arena");
      if (rank == 1) raise(SIGKILL);
      while (!transport->peer_gone(1)) sleep_ms(1);
      // At once, although the deadline is far.
      return error_of([&] { transport->allocate_cuda(kGpu, 64, generous(), "more"); }) + "\n" +
             error_of([&] { join(store, 0, 2); }) + "\n" +
             error_of([&] { agree(*transport, *store, "a layer", {}, generous()); });
    }));
  }
  const std::string text = processes[0]->wait();
  EXPECT_EQ(processes[1]->wait(), "killed by signal 9");
  int advice = 0;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string line(take_line(rest));
    EXPECT_THAT(line, StartsWith("expert_parallel::nvshmem: rank 1 has ended (process "));
    EXPECT_THAT(line, HasSubstr(", gone), and an NVSHMEM world cannot go on without a rank: "
                                "restart all processes"));
    ++advice;
  }
  EXPECT_EQ(advice, 3);
}

TEST_F(Nvshmem, WaitsEnd) {
  const auto errors = on_processes(2, [](const auto& store, int rank) {
    const auto transport = join(store, rank, 2);
    if (rank == 1) {
      g_hangs = true;
      const std::string first =
          error_of([&] { transport->allocate_cuda(kGpu, 64, brief(), "the arena"); });
      return first + "\n" + error_of([&] { join(store, 1, 2); });
    }
    return error_of([&] { transport->allocate_cuda(kGpu, 64, brief(1000), "the arena"); });
  });
  EXPECT_THAT(errors[0], AllOf(StartsWith("expert_parallel::allocate_cuda: rank 1 ended before "
                                          "all ranks had met: process "),
                               HasSubstr(", gone")));
  EXPECT_EQ(errors[1],
            "expert_parallel::nvshmem: an allocation of NVSHMEM has not ended within 0.3 s\n"
            "expert_parallel::nvshmem: an allocation of NVSHMEM has not ended within 0.3 s, and an "
            "NVSHMEM world cannot go on without a rank: restart all processes");
}

TEST_F(Nvshmem, HasNoMemoryOfTheHost) {
  EXPECT_THAT(on_processes(1,
                           [](const auto& store, int) {
                             join(store, 0, 1)->allocate(64, generous(), "the counts");
                             return "";
                           }),
              Each("expert_parallel::allocate: the counts: nvshmem has GPU memory only "
                   "(allocate_cuda)"));
}

}  // namespace
}  // namespace winnow::expert_parallel
