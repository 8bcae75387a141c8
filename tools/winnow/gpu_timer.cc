#include "tools/winnow/gpu_timer.h"

#include "winnow/core/error.h"

#if WINNOW_WITH_CUDA
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tools/winnow/l2_flush.h"
#include "tools/winnow/mma_product.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/testing/generate.h"
#endif

namespace winnow::cli {

#if WINNOW_WITH_CUDA
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::internal, "bench", cudaGetErrorString(error));
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

constexpr Device kDevice{DeviceType::cuda, 0};

Device device_of_rank() {
  const auto launch = expert_parallel::launch_environment();
  return {DeviceType::cuda, launch ? launch->local_rank : 0};
}

Tensor random_matrix(std::int64_t rows, std::int64_t columns) {
  Tensor matrix(DType::bf16, {rows, columns});
  testing::Random random(static_cast<std::uint64_t>(rows + columns));
  testing::fill_normal_rows(matrix, random);
  return matrix.to(device_of_rank());
}

// c[m, n] = a[m, k] * b[k, n] in bf16 with f32 sums. cuBLAS is looked up at run time, so that only
// those who measure on a GPU need it.
class CublasMatmul {
 public:
  CublasMatmul(const testing::Ceiling& size, cudaStream_t stream)
      : size_(size),
        a_(random_matrix(size.m, size.k)),
        b_(random_matrix(size.k, size.n)),
        c_(DType::bf16, {size.m, size.n}, device_of_rank()) {
    void* library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) library = dlopen("libcublas.so.12", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw Error(ErrorCode::unsupported, "bench",
                  "the ceiling needs cuBLAS (libcublas.so.13 of the CUDA toolkit was not found; "
                  "LD_LIBRARY_PATH can name its folder)");
    }
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    const auto set_stream =
        reinterpret_cast<int (*)(void*, cudaStream_t)>(dlsym(library, "cublasSetStream_v2"));
    if (create == nullptr || gemm_ == nullptr || set_stream == nullptr || create(&handle_) != 0 ||
        set_stream(handle_, stream) != 0) {
      throw Error(ErrorCode::unsupported, "bench", "cuBLAS did not start");
    }
  }

  void run() {
    constexpr int kBf16 = 14, kCompute32F = 68, kDefaultAlgorithm = -1;  // of cublas_api.h
    const float one = 1, zero = 0;
    const int m = int(size_.m), n = int(size_.n), k = int(size_.k);
    // cuBLAS is column-major: the transposed product is ours in row-major.
    const int status = gemm_(handle_, 0, 0, n, m, k, &one, b_.data(), kBf16, n, a_.data(), kBf16, k,
                             &zero, c_.data(), kBf16, n, kCompute32F, kDefaultAlgorithm);
    if (status != 0) {
      throw Error(ErrorCode::internal, "bench", "cublasGemmEx returned " + std::to_string(status));
    }
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       const void*, int, int, const void*, void*, int, int, int, int);

  testing::Ceiling size_;
  Tensor a_, b_, c_;
  void* handle_ = nullptr;  // lives as long as the program
  Gemm gemm_ = nullptr;
};

// The same with mma.sync and a transposed b.
class MmaMatmul {
 public:
  MmaMatmul(const testing::Ceiling& size, cudaStream_t stream)
      : a_(random_matrix(size.m, size.k)),
        b_(random_matrix(size.n, size.k)),
        c_(DType::bf16, {size.m, size.n}, kDevice),
        product_(a_, b_, c_),
        stream_(stream) {}
  void run() { product_.queue(stream_); }

 private:
  Tensor a_, b_, c_;
  MmaProduct product_;
  cudaStream_t stream_;
};

// Copies half of ceiling.bytes, which reads the half and writes it.
class Copy {
 public:
  Copy(const testing::Ceiling& ceiling, cudaStream_t stream)
      : from_(DType::u8, {ceiling.bytes / 2}, kDevice),
        to_(DType::u8, {ceiling.bytes / 2}, kDevice),
        stream_(stream) {
    Tensor random_bytes(DType::f32, {1 << 20});
    testing::Random random(1);
    testing::fill_normal(random_bytes, random);
    const std::int64_t part = random_bytes.numel() * 4;
    for (std::int64_t done = 0; done + part <= from_.numel(); done += part) {
      check(cudaMemcpy(static_cast<char*>(from_.data()) + done, random_bytes.data(), part,
                       cudaMemcpyHostToDevice));
    }
  }
  void run() {
    check(cudaMemcpyAsync(to_.data(), from_.data(), static_cast<std::size_t>(from_.numel()),
                          cudaMemcpyDeviceToDevice, stream_));
  }

 private:
  Tensor from_, to_;
  cudaStream_t stream_;
};

// What runs the ceiling once on the stream; empty if there is none.
std::function<void()> prepare_ceiling(const testing::Ceiling& ceiling, Backend backend,
                                      cudaStream_t stream) {
  const auto run_of = [](auto prepared) { return [prepared] { prepared->run(); }; };
  switch (ceiling.kind) {
    case testing::Ceiling::Kind::matmul:
      if (backend == Backend::cuda) return run_of(std::make_shared<MmaMatmul>(ceiling, stream));
      return run_of(std::make_shared<CublasMatmul>(ceiling, stream));
    case testing::Ceiling::Kind::copy:
      return run_of(std::make_shared<Copy>(ceiling, stream));
    case testing::Ceiling::Kind::none:
      break;
  }
  return nullptr;
}

class L2Flush {
 public:
  void queue() { queue_l2_flush(zeros_.data(), zeros_.numel(), word_.data()); }

 private:
  Tensor zeros_{DType::u8, {std::int64_t{512} << 20}, kDevice}, word_{DType::i32, {1}, kDevice};
};

// Negative where `end` came first, which is possible on two streams.
double seconds_between(const Event& begin, const Event& end) {
  for (const Event* event : {&begin, &end}) check(cudaEventSynchronize(*event));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  return milliseconds * 1e-3;
}

// Of the work between two events.
class Span {
 public:
  void begin(cudaStream_t stream) { check(cudaEventRecord(begin_, stream)); }
  void end(cudaStream_t stream) { check(cudaEventRecord(end_, stream)); }
  double await() const { return seconds_between(begin_, end_); }
  // Whether all of it happened while `others` happened, one after the other.
  bool within(const std::vector<Span>& others) const {
    return seconds_between(others.front().begin_, begin_) >= 0 &&
           seconds_between(end_, others.back().end_) >= 0;
  }

 private:
  Event begin_, end_;
};

// The host queues each run and awaits it; with `queued` it queues all runs first.
std::vector<double> seconds_of(const std::function<void()>& run, int launches, L2Flush* flush,
                               bool queued, cudaStream_t stream) {
  std::vector<Span> spans(queued ? static_cast<std::size_t>(launches) : 1);
  std::vector<double> seconds;
  for (int i = 0; i < launches; ++i) {
    Span& span = spans[queued ? static_cast<std::size_t>(i) : 0];
    if (flush != nullptr) flush->queue();
    span.begin(stream);
    run();
    span.end(stream);
    if (!queued) seconds.push_back(span.await());
  }
  for (const Span& span : spans) {
    if (queued) seconds.push_back(span.await());
  }
  return seconds;
}

// Several runs as one CUDA graph, which the stream gets at once. It reads what `run` owns.
constexpr int kRunsOfGraph = 20;
std::function<void()> graph_of(const std::function<void()>& run, cudaStream_t stream) {
  run();  // what only the first run does is not captured
  check(cudaStreamSynchronize(stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kRunsOfGraph; ++i) run();
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t program = nullptr;
  check(cudaGraphInstantiate(&program, graph, 0));
  cudaGraphDestroy(graph);
  const std::shared_ptr<CUgraphExec_st> owned(program, cudaGraphExecDestroy);
  return [run, owned, stream] { check(cudaGraphLaunch(owned.get(), stream)); };
}

// Products on a stream of their own, one after the other: those of 4,096 tokens with the gate and
// up projections of an expert of DeepSeek-V3. cuBLAS keeps its SMs until a product ends, and a
// larger one would show little but the wait for that.
class Products {
 public:
  Products() {
    run();
    seconds_ = median(seconds_of([this] { run(); }, kAlone, nullptr, true, stream_));
  }
  ~Products() { cudaStreamDestroy(stream_); }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  double seconds() const { return seconds_; }  // of one alone

  // Adds to the lists what runs of the operation and products took while both were running all the
  // time. `once`: the operation's seconds alone.
  void run_beside(const std::function<void()>& operation, cudaStream_t stream, double once,
                  std::vector<double>& of_operation, std::vector<double>& of_product) {
    // As many runs on every rank, and products to outlast them.
    constexpr int kRuns = 60, kMostProducts = 500;
    std::vector<Span> runs(kRuns);
    std::vector<Span> products(
        std::size_t(std::clamp(int(2 * kRuns * once / seconds_), kAlone, kMostProducts)));
    queue([this] { run(); }, products, stream_);
    queue(operation, runs, stream);
    take_within(runs, products, of_operation);
    take_within(products, runs, of_product);
  }

 private:
  static constexpr int kAlone = 10;

  static cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }
  void run() { product_.run(); }
  static void queue(const std::function<void()>& run, std::vector<Span>& spans,
                    cudaStream_t stream) {
    for (Span& span : spans) {
      span.begin(stream);
      run();
      span.end(stream);
    }
  }
  static void take_within(const std::vector<Span>& spans, const std::vector<Span>& others,
                          std::vector<double>& seconds) {
    for (const Span& span : spans) {
      if (span.within(others)) seconds.push_back(span.await());
    }
  }

  cudaStream_t stream_ = make_stream();
  CublasMatmul product_{{testing::Ceiling::Kind::matmul, 4096, 4096, 7168}, stream_};
  double seconds_ = 0;
};

}  // namespace

Stream timed_stream(const testing::Benchmark& benchmark) {
  if (!benchmark.beside_product && !benchmark.in_graph) return {};
  static cudaStream_t stream = [] {
    check(cudaSetDevice(device_of_rank().index));
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t made = nullptr;
    // Not the greatest, which streams of memory have: kernels that wait for other ranks must not be
    // in their hardware queues.
    check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, least - 1));
    return made;
  }();
  return {stream};
}

Measured measure_on_gpu(const std::function<void()>& operation, const testing::Benchmark& benchmark,
                        Backend backend, const BenchOptions& options) {
  const auto launch = expert_parallel::launch_environment();
  check(cudaSetDevice(device_of_rank().index));
  const auto stream = static_cast<cudaStream_t>(timed_stream(benchmark).handle);
  std::function<void()> run = operation,
                        ceiling = prepare_ceiling(benchmark.ceiling, backend, stream);
  int runs_at_once = 1;
  if (benchmark.in_graph) {
    run = graph_of(operation, stream);
    if (ceiling) ceiling = graph_of(ceiling, stream);
    runs_at_once = kRunsOfGraph;
  }
  const bool queued = benchmark.queued || benchmark.in_graph;
  std::unique_ptr<L2Flush> flush;
  if (benchmark.cold) flush = std::make_unique<L2Flush>();
  // Both sides get about the same time in each turn, so that they meet the same clocks and heat.
  constexpr int kOfRanks = 20;
  const auto launches = [&](double each) {
    return launch ? kOfRanks : std::clamp(int(options.seconds / 4 / each), 3, 1000);
  };
  const auto take = [](const std::vector<double>& turn, std::vector<double>& list) {
    list.insert(list.end(), turn.begin(), turn.end());
  };
  const auto time = [&](int runs) { return seconds_of(run, runs, flush.get(), queued, stream); };
  const auto time_ceiling = [&](int runs) {
    return seconds_of(ceiling, runs, nullptr, queued, stream);
  };
  const double first = time(1).front();
  const double once = median(time(launches(first)));
  const double ceiling_once = ceiling ? time_ceiling(1).front() : 0;
  std::unique_ptr<Products> products;
  if (benchmark.beside_product) products = std::make_unique<Products>();
  std::vector<double> operation_seconds, ceiling_seconds, beside, product_beside;
  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    take(time(launches(once)), operation_seconds);
    if (ceiling) take(time_ceiling(launches(ceiling_once)), ceiling_seconds);
    if (products) products->run_beside(operation, stream, once, beside, product_beside);
  }
  if (products && (beside.empty() || product_beside.empty())) {
    throw Error(ErrorCode::internal, "bench", "no run was beside products all the time");
  }
  Measured measured{median(operation_seconds) / runs_at_once,
                    median(ceiling_seconds) / runs_at_once};
  if (products) {
    measured.product = products->seconds();
    measured.beside = median(beside);
    measured.product_beside = median(product_beside);
  }
  return measured;
}

#else

Stream timed_stream(const testing::Benchmark&) { return {}; }

Measured measure_on_gpu(const std::function<void()>&, const testing::Benchmark&, Backend,
                        const BenchOptions&) {
  throw Error(ErrorCode::unsupported, "bench", "this build has no CUDA kernels");
}

#endif

}  // namespace winnow::cli
