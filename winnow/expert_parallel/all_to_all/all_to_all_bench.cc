// The benchmarks of expert_parallel::all_to_all: two ranks, one of them the calling thread, beside
// a plain copy of the same bytes by as many threads. Useful bytes are those of the rows that arrive
// (dispatch) or are added (combine).
//
// With shared_memory the other rank is a child of fork(): it makes its transport itself, talks to
// this process through a page of shared memory, and dies with it.
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/expert_parallel/transport/backoff.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

std::vector<testing::Benchmark> all_to_all_gpu_benchmarks();  // all_to_all_gpu_bench.cc

namespace {

constexpr int kRanks = 2, kTopk = 8, kExperts = 64;
constexpr std::int64_t kTokens = 1024, kHidden = 2048;

enum class Work { dispatch, cached_dispatch, combine };

struct Shape {
  bool processes = false;
  Work work = Work::dispatch;
  RowOrder order = RowOrder::token_major;
};

// One rank with its layer and inputs; run() is what is timed.
class Rank {
 public:
  Rank(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store, const Shape& shape)
      : shape_(shape),
        layer_(transport, store,
               {.max_tokens = kTokens, .hidden = kHidden, .topk = kTopk, .experts = kExperts}),
        input_(DType::bf16, {kTokens, kHidden}),
        indices_(distinct_experts(layer_.rank(), kTokens, kTopk, kExperts)),
        sums_(DType::bf16, {kTokens, kHidden}) {
    testing::Random random(3);
    testing::fill_normal_rows(input_, random);
    kept_ = layer_.dispatch({.input = input_, .expert_indices = indices_, .order = shape.order});
    const TensorView rows = layer_.combine_buffer(*kept_.descriptor);
    if (rows.numel() > 0) testing::fill_normal_rows(rows, random);
  }
  void run() {
    switch (shape_.work) {
      case Work::dispatch:
        layer_.dispatch({.input = input_, .expert_indices = indices_, .order = shape_.order});
        break;
      case Work::cached_dispatch:
        layer_.dispatch({.input = input_, .cached = kept_.descriptor});
        break;
      case Work::combine:
        layer_.combine({.expert_output = layer_.combine_buffer(*kept_.descriptor), .out = sums_},
                       *kept_.descriptor);
        break;
    }
  }

 private:
  Shape shape_;
  AllToAll layer_;
  Tensor input_, indices_, sums_;
  Dispatched kept_;
};

// What the caller and the other rank tell each other.
struct Page {
  std::atomic<std::uint32_t> begun{0}, ended{0}, failed{0};
  static constexpr std::uint32_t kEnd = 0xffffffffu;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

void serve(Page& page, const std::function<std::unique_ptr<Rank>()>& make) {
  try {
    const std::unique_ptr<Rank> rank = make();
    for (std::uint32_t done = 0;;) {
      Backoff backoff;
      while (page.begun == done) backoff.pause();
      if (page.begun == Page::kEnd) return;
      rank->run();
      page.ended = ++done;
    }
  } catch (const std::exception&) {
    page.failed = 1;  // the caller's own rank knows why
  }
}

class Pair {
 public:
  explicit Pair(const Shape& shape) {
    void* memory =
        mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error(ErrorCode::resource, "bench", "no page to share");
    page_ = new (memory) Page;
    try {
      shape.processes ? start_process(shape) : start_thread(shape);
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pair() { stop(); }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  void run() {
    const std::uint32_t number = ++page_->begun;
    mine_->run();
    Backoff backoff;
    while (page_->ended != number) {
      if (page_->failed != 0) throw Error(ErrorCode::internal, "bench", "the other rank failed");
      backoff.pause();
    }
  }

 private:
  void start_thread(const Shape& shape) {
    const auto world = std::make_shared<InProcessWorld>(kRanks);
    thread_ = std::thread([this, world, shape] {
      serve(*page_,
            [&] { return std::make_unique<Rank>(world->transport(1), world->store(), shape); });
    });
    mine_ = std::make_unique<Rank>(world->transport(0), world->store(), shape);
  }

  void start_process(const Shape& shape) {
    std::string pattern = (std::filesystem::temp_directory_path() / "winnow-bench-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw Error(ErrorCode::resource, "bench", "no folder " + pattern);
    }
    folder_ = pattern;
    const auto make = [&](int rank) {
      const auto store = std::make_shared<FileStore>(folder_, "bench");
      return std::make_unique<Rank>(create_shared_memory(*store, rank, kRanks, Deadline()), store,
                                    shape);
    };
    const pid_t parent = getpid();
    child_ = fork();
    if (child_ < 0) throw Error(ErrorCode::resource, "bench", "fork failed");
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() == parent) serve(*page_, [&] { return make(1); });
      _exit(0);
    }
    mine_ = make(0);
  }

  void stop() {
    page_->begun = Page::kEnd;
    if (thread_.joinable()) thread_.join();
    if (child_ > 0) waitpid(child_, nullptr, 0);
    mine_.reset();
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
    munmap(page_, sizeof(Page));
  }

  Page* page_ = nullptr;
  std::unique_ptr<Rank> mine_;
  std::thread thread_;
  pid_t child_ = 0;
  std::string folder_;
};

// Rows that arrive at both ranks together.
std::int64_t count_rows(RowOrder order) {
  std::int64_t rows = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Tensor indices = distinct_experts(rank, kTokens, kTopk, kExperts);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      int pairs[kRanks] = {};
      for (int k = 0; k < kTopk; ++k) {
        ++pairs[indices.view().at<std::int32_t>(t, k) / (kExperts / kRanks)];
      }
      for (const int count : pairs) rows += order == RowOrder::token_major ? count > 0 : count;
    }
  }
  return rows;
}

testing::Benchmark make_benchmark(const Shape& shape) {
  const bool token_major = shape.order == RowOrder::token_major;
  const char* work = shape.work == Work::dispatch          ? "dispatch"
                     : shape.work == Work::cached_dispatch ? "cached-dispatch"
                                                           : "combine";
  testing::Benchmark benchmark;
  benchmark.name = std::string(shape.processes ? "shared-memory-" : "in-process-") + work +
                   (token_major ? "-token-major" : "-expert-major");
  benchmark.shape = testing::numbered("", kRanks) + " ranks, " + testing::numbered("", kTokens) +
                    " tokens each, hidden " + testing::numbered("", kHidden) + ", bf16, top " +
                    testing::numbered("", kTopk) + " of " + testing::numbered("", kExperts) +
                    " experts";
  benchmark.bytes = double(count_rows(shape.order) * kHidden * size_of(DType::bf16));
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes = std::int64_t(benchmark.bytes);
  benchmark.ceiling.threads = kRanks;
  benchmark.target = 0.5;
  benchmark.prepare = [shape](const testing::Target& target) -> std::function<void()> {
    testing::require_cpu("expert_parallel::all_to_all", target);
    return [pair = std::make_shared<Pair>(shape)] { pair->run(); };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> all_to_all_benchmarks() {
  std::vector<testing::Benchmark> list = all_to_all_gpu_benchmarks();
  for (const bool processes : {false, true}) {
    for (const RowOrder order : {RowOrder::token_major, RowOrder::expert_major}) {
      for (const Work work : {Work::dispatch, Work::cached_dispatch, Work::combine}) {
        list.push_back(make_benchmark({processes, work, order}));
      }
    }
  }
  return list;
}

}  // namespace winnow::expert_parallel
