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

Tensor random_matrix(std::int64_t rows, std::int64_t columns) {
  Tensor matrix(DType::bf16, {rows, columns});
  testing::Random random(static_cast<std::uint64_t>(rows + columns));
  testing::fill_normal_rows(matrix, random);
  return matrix.to(kDevice);
}

// c[m, n] = a[m, k] * b[k, n] in bf16 with f32 sums. cuBLAS is looked up at run time, so that only
// those who measure on a GPU need it.
class CublasMatmul {
 public:
  explicit CublasMatmul(const testing::Ceiling& size)
      : size_(size),
        a_(random_matrix(size.m, size.k)),
        b_(random_matrix(size.k, size.n)),
        c_(DType::bf16, {size.m, size.n}, kDevice) {
    void* library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) library = dlopen("libcublas.so.12", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw Error(ErrorCode::unsupported, "bench",
                  "the ceiling needs cuBLAS (libcublas.so.13 of the CUDA toolkit was not found; "
                  "LD_LIBRARY_PATH can name its folder)");
    }
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    if (create == nullptr || gemm_ == nullptr || create(&handle_) != 0) {
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
  explicit MmaMatmul(const testing::Ceiling& size)
      : a_(random_matrix(size.m, size.k)),
        b_(random_matrix(size.n, size.k)),
        c_(DType::bf16, {size.m, size.n}, kDevice),
        product_(a_, b_, c_) {}
  void run() { product_.queue(); }

 private:
  Tensor a_, b_, c_;
  MmaProduct product_;
};

// Copies half of ceiling.bytes, which reads the half and writes it.
class Copy {
 public:
  explicit Copy(const testing::Ceiling& ceiling)
      : from_(DType::u8, {ceiling.bytes / 2}, kDevice),
        to_(DType::u8, {ceiling.bytes / 2}, kDevice) {
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
                          cudaMemcpyDeviceToDevice));
  }

 private:
  Tensor from_, to_;
};

// What runs the ceiling once; empty if there is none.
std::function<void()> prepare_ceiling(const testing::Ceiling& ceiling, Backend backend) {
  const auto run_of = [](auto prepared) { return [prepared] { prepared->run(); }; };
  switch (ceiling.kind) {
    case testing::Ceiling::Kind::matmul:
      if (backend == Backend::cuda) return run_of(std::make_shared<MmaMatmul>(ceiling));
      return run_of(std::make_shared<CublasMatmul>(ceiling));
    case testing::Ceiling::Kind::copy:
      return run_of(std::make_shared<Copy>(ceiling));
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

// Of the work between two events.
class Span {
 public:
  void begin() { check(cudaEventRecord(begin_)); }
  void end() { check(cudaEventRecord(end_)); }
  double await() const {  // seconds
    check(cudaEventSynchronize(end_));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds * 1e-3;
  }

 private:
  Event begin_, end_;
};

// The host queues each run and awaits it; with `queued` it queues all runs first.
std::vector<double> seconds_of(const std::function<void()>& run, int launches, L2Flush* flush,
                               bool queued) {
  std::vector<Span> spans(queued ? static_cast<std::size_t>(launches) : 1);
  std::vector<double> seconds;
  for (int i = 0; i < launches; ++i) {
    Span& span = spans[queued ? static_cast<std::size_t>(i) : 0];
    if (flush != nullptr) flush->queue();
    span.begin();
    run();
    span.end();
    if (!queued) seconds.push_back(span.await());
  }
  for (const Span& span : spans) {
    if (queued) seconds.push_back(span.await());
  }
  return seconds;
}

}  // namespace

Measured measure_on_gpu(const std::function<void()>& operation, const testing::Benchmark& benchmark,
                        Backend backend, const BenchOptions& options) {
  const auto launch = expert_parallel::launch_environment();
  check(cudaSetDevice(launch ? launch->local_rank : 0));
  const std::function<void()> ceiling = prepare_ceiling(benchmark.ceiling, backend);
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
  const auto time = [&](int runs) {
    return seconds_of(operation, runs, flush.get(), benchmark.queued);
  };
  const auto time_ceiling = [&](int runs) {
    return seconds_of(ceiling, runs, nullptr, benchmark.queued);
  };
  const double first = time(1).front();
  const double once = median(time(launches(first)));
  const double ceiling_once = ceiling ? time_ceiling(1).front() : 0;
  std::vector<double> operation_seconds, ceiling_seconds;
  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    take(time(launches(once)), operation_seconds);
    if (ceiling) take(time_ceiling(launches(ceiling_once)), ceiling_seconds);
  }
  return {median(operation_seconds), ceiling ? median(ceiling_seconds) : 0};
}

#else

Measured measure_on_gpu(const std::function<void()>&, const testing::Benchmark&, Backend,
                        const BenchOptions&) {
  throw Error(ErrorCode::unsupported, "bench", "this build has no CUDA kernels");
}

#endif

}  // namespace winnow::cli
