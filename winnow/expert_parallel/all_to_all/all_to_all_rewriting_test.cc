// Fuzzing: another process overwrites random words of the memory that calling ranks share, or bytes
// of their store's files. Rows may become wrong, but each rank completes or ends with an Error.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/uio.h>

#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/processes.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using testing::Random;

constexpr int kRanks = 4, kTurns = 400;
constexpr std::chrono::milliseconds kTimeout{400};

// ---- The calls of the ranks. They do not check rows, which may have been overwritten.

void call_low_latency(const ProcessRank& world, int rank, Random random, RankReport& report) {
  LowLatencyProblem problem{.name = "rewritten", .world = kRanks, .max_tokens = 8};
  problem.format = static_cast<RowFormat>(random.below(2));
  problem.shrink = random.below(4) == 0;
  const bool halves = random.below(2) == 0;
  const std::vector<LowLatencyRound> rounds = make_rounds(problem);
  LowLatencyConfig config = problem.config();
  config.timeout = kTimeout;
  LowLatency layer(world.transport, world.store, config);
  LowLatencyTensors tensors(kHere, problem, rounds[0], rank);
  tensors.dispatch(layer, CallPart::both);
  tensors.make_expert_output();
  for (int turn = 0; turn < kTurns; ++turn) {
    report.stage = 1;
    if (!halves) {
      tensors.dispatch(layer, CallPart::both);
      tensors.combine(layer, CallPart::both);
      continue;
    }
    tensors.dispatch(layer, CallPart::send);
    tensors.dispatch(layer, CallPart::receive);
    tensors.combine(layer, CallPart::send);
    tensors.combine(layer, CallPart::receive);
  }
}

void call_all_to_all(const ProcessRank& world, int rank, Random random, RankReport& report) {
  constexpr std::int64_t kTokens = 12, kTopk = 3, kExperts = 2 * kRanks;
  const int nodes = 1 << random.below(3);
  const RowOrder order = random.below(2) == 0 ? RowOrder::expert_major : RowOrder::token_major;
  const bool cached = random.below(2) == 0, worst_case = random.below(3) == 0;
  const std::int64_t hidden = 64;
  AllToAll layer(world.transport, world.store,
                 {.max_tokens = kTokens,
                  .hidden = hidden,
                  .topk = kTopk,
                  .experts = kExperts,
                  .local_world_size = kRanks / nodes,
                  .arena_rows = 4,  // small, so that the arena grows
                  .timeout = kTimeout});
  Random mine(std::uint64_t(rank) + 1);
  const std::int64_t n = 1 + mine.below(kTokens);
  Tensor input(DType::bf16, {n, hidden}), experts(DType::i32, {n, kTopk});
  Tensor weights(DType::f32, {n, kTopk}), values;
  for (std::int32_t& expert : experts.values<std::int32_t>()) {
    expert = std::int32_t(mine.below(kExperts + 1)) - 1;
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    DispatchArgs args{
        .input = input, .expert_indices = experts, .weights = weights, .order = order};
    if (worst_case) args.worst_case_rows = kRanks * kTokens * kTopk;
    Dispatched got = layer.dispatch(args);
    report.stage = 1;
    if (cached) {
      got = layer.dispatch({.input = input, .weights = weights, .cached = got.descriptor});
    }
    const TensorView rows = layer.combine_buffer(*got.descriptor);
    layer.combine({.expert_output = rows, .weighted = true}, *got.descriptor);
  }
}

void call_notifier(const ProcessRank& world, int, Random random, RankReport& report) {
  const int nodes = 1 << random.below(3);
  Notifier notifier(world.transport, world.store,
                    {.experts = kRanks, .local_world_size = kRanks / nodes, .timeout = kTimeout});
  Tensor per_rank(DType::i32, {kRanks}), per_node(DType::i32, {nodes});
  Tensor per_expert(DType::i32, {kRanks}), in_rank(DType::u8, {3, kRanks});
  for (std::uint8_t& in : in_rank.values<std::uint8_t>()) in = 1;
  for (Tensor* counts : {&per_rank, &per_node, &per_expert}) {
    for (std::int32_t& count : counts->values<std::int32_t>()) count = 3;
  }
  Tensor received(DType::i32, {kRanks}), pairs(DType::i32, {1});
  for (int turn = 0; turn < kTurns; ++turn) {
    notifier.notify({.tokens_per_rank = per_rank,
                     .tokens_per_node = per_node,
                     .tokens_per_expert = per_expert,
                     .is_token_in_rank = in_rank,
                     .recv_rank_prefix_sum = received,
                     .recv_pairs_per_expert = pairs});
    report.stage = 1;
  }
}

using Calls = void (*)(const ProcessRank&, int rank, Random, RankReport&);
struct Caller {
  const char* name;
  Calls calls;
};
constexpr Caller kCallers[] = {
    {"LowLatency", call_low_latency}, {"AllToAll", call_all_to_all}, {"Notifier", call_notifier}};

// ---- The process that overwrites.

// Random bits, or numbers that could pass for valid counts, ranks, flags or limits.
std::uint64_t word_of(Random& random) {
  switch (random.below(5)) {
    case 0:
      return random.next();
    case 1:
      return std::uint64_t(random.below(40)) << 32 | std::uint64_t(random.below(40));
    case 2:
      return std::uint64_t(random.below(20)) - 3;
    case 3:
      return std::uint64_t{1} << random.below(64);
    default:
      return random.below(2) == 0 ? 0x7fffffff7fffffff : 0;
  }
}

struct Range {
  std::uint64_t begin, end;
};
std::vector<Range> shared_memory_of(pid_t process) {
  std::ifstream maps("/proc/" + std::to_string(process) + "/maps");
  std::vector<Range> ranges;
  for (std::string line; std::getline(maps, line);) {
    Range range{};
    if (line.find("/memfd:winnow") == std::string::npos) continue;
    if (std::sscanf(line.c_str(), "%lx-%lx", &range.begin, &range.end) == 2) {
      ranges.push_back(range);
    }
  }
  return ranges;
}

// Whether both halves of the word are small integers, as in headers and counts but rarely in rows.
bool may_be_numbers(std::uint64_t word) {
  const auto may_be = [](std::uint64_t half) {
    const auto number = static_cast<std::int32_t>(half);
    return number >= -1 && number <= 1 << 16;
  };
  return word != 0 && may_be(word & 0xffffffff) && may_be(word >> 32);
}

// Overwrites up to 128 neighbouring words of a rank's shared memory; in three of four cases only
// words that look like numbers.
class Rewriting {
 public:
  explicit Rewriting(Random random) : random_(random) {}

  void write_some(pid_t process) {
    if (words_.empty()) choose(process);
    for (int i = 0; i < 64 && !words_.empty(); ++i) {
      std::uint64_t word = word_of(random_);
      const std::uint64_t at = words_[std::size_t(random_.below(std::int64_t(words_.size())))];
      const iovec from{&word, sizeof(word)}, to{reinterpret_cast<void*>(at), sizeof(word)};
      if (process_vm_writev(process, &from, 1, &to, 1, 0) != sizeof(word)) words_.clear();
    }
  }

 private:
  void choose(pid_t process) {
    const bool numbers = random_.below(4) > 0;
    std::vector<std::uint64_t> all;
    for (const Range& range : shared_memory_of(process)) {
      std::vector<std::uint64_t> there((range.end - range.begin) / 8);
      const iovec from{reinterpret_cast<void*>(range.begin), there.size() * 8},
          to{there.data(), there.size() * 8};
      if (process_vm_readv(process, &to, 1, &from, 1, 0) != ssize_t(there.size() * 8)) continue;
      for (std::size_t i = 0; i < there.size(); ++i) {
        if (!numbers || may_be_numbers(there[i])) all.push_back(range.begin + 8 * i);
      }
    }
    const auto most =
        std::min<std::int64_t>(std::int64_t{1} << random_.below(8), std::int64_t(all.size()));
    const auto first = all.begin() + random_.below(std::int64_t(all.size()) - most + 1);
    words_.assign(first, first + most);
  }

  Random random_;
  std::vector<std::uint64_t> words_;  // their addresses in the process
};

// Overwrites a byte in some of the store's files.
void rewrite_store(const std::filesystem::path& folder, Random& random) {
  std::error_code error;
  for (std::filesystem::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    if (random.below(3) != 0) continue;
    const int descriptor = open(file->path().c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor < 0) continue;
    const char letter = "0129 \n=-x\0\xff"[random.below(11)];
    if (pwrite(descriptor, &letter, 1, random.below(300)) < 0) std::perror("pwrite");
    close(descriptor);
  }
}

// ---- Tests.

class Worlds : public ::testing::TestWithParam<Caller> {
 protected:
  // Expects every rank to exit by itself. Only an Error is caught: any other exception fails.
  void run_world(std::uint64_t seed, bool stores) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const TemporaryFolder folder;
    Processes processes(kRanks, [&](int rank, RankReport& report) {
      report.code = -1;
      try {
        const ProcessRank world(folder.path(), rank, kRanks, "winnow",
                                stores ? kTimeout : std::chrono::milliseconds(20'000));
        GetParam().calls(world, rank, Random(seed), report);
      } catch (const Error& error) {
        report.code = int(error.code());
      }
      report.stage = 2;
    });
    Random random(seed);
    Rewriting memory(random);
    const bool early = random.below(4) == 0;  // also while the ranks create the layer
    const auto ended = [&] {
      for (int rank = 0; rank < kRanks; ++rank) {
        if (processes.report(rank).stage.load() < 2 && processes.running(rank)) return false;
      }
      return true;
    };
    for (const auto start = std::chrono::steady_clock::now();
         !ended() && seconds_since(start) < 30;) {
      if (stores) rewrite_store(folder.path(), random);
      if (!stores && (early || processes.report(0).stage.load() == 1)) {
        memory.write_some(processes.process(0));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(stores ? 300 : 50));
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      processes.expect_ended_well(rank);
      failed_ += processes.report(rank).code >= 0;
    }
  }

  const std::int64_t runs_ = testing::environment_number("WINNOW_REWRITING_RUNS", 6);
  int failed_ = 0;  // ranks that ended with an Error
};

TEST_P(Worlds, EndWithAnErrorAtMostWhenTheirMemoryIsRewritten) {
  for (int run = 0; run < runs_ && !HasFailure(); ++run) run_world(std::uint64_t(run) + 1, false);
  EXPECT_GT(failed_, 0);  // else nothing that matters was overwritten
}

TEST_P(Worlds, EndWithAnErrorAtMostWhenTheirStoreIsRewritten) {
  for (int run = 0; run < runs_ / 2 && !HasFailure(); ++run) {
    run_world(std::uint64_t(run) + 1, true);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Worlds, ::testing::ValuesIn(kCallers),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace winnow::expert_parallel
