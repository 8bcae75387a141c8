// The table of one module. Built once per instruction set, with WINNOW_CPU_MODULE its name.
#include <Eigen/Core>

#include "winnow/cpu/kernels.h"
#include "winnow/expert_parallel/combine/combine_row_sum.h"

#define WINNOW_STRINGIFY_(x) #x
#define WINNOW_STRINGIFY(x) WINNOW_STRINGIFY_(x)
#define WINNOW_CONCAT_(a, b) a##b
#define WINNOW_CONCAT(a, b) WINNOW_CONCAT_(a, b)

namespace winnow {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

void matmul(const float* a, const float* b, float* c, std::int64_t m, std::int64_t n,
            std::int64_t k, const Executor& executor) {
  const Eigen::Map<const RowMajor> whole_b(b, k, n);
  const std::int64_t grain = (m + executor.workers() - 1) / executor.workers();
  executor.for_each_range(m, grain, [&](std::int64_t begin, std::int64_t end, int) {
    Eigen::Map<RowMajor>(c + begin * n, end - begin, n).noalias() =
        Eigen::Map<const RowMajor>(a + begin * k, end - begin, k) * whole_b;
  });
}

constexpr const char* kInstructions =
#if defined(__AVX512F__)
    "AVX-512"
#elif defined(__AVX2__)
    "AVX2"
#elif defined(__SSE2__)
    "SSE2"
#else
    "baseline"
#endif
    ;

constexpr CpuKernels kKernels = {
    .name = WINNOW_STRINGIFY(WINNOW_CPU_MODULE),
    .instructions = kInstructions,
    .libraries = "Eigen " WINNOW_STRINGIFY(EIGEN_WORLD_VERSION) "." WINNOW_STRINGIFY(
        EIGEN_MAJOR_VERSION) "." WINNOW_STRINGIFY(EIGEN_MINOR_VERSION),
    .expert_parallel_sum_rows = expert_parallel::sum_rows_cpu,
#define WINNOW_MEMBER_(family, operation, params) .family##_##operation = family::operation##_cpu,
    WINNOW_CPU_KERNELS(WINNOW_MEMBER_)
#undef WINNOW_MEMBER_
        .matmul = matmul,
};

}  // namespace
}  // namespace winnow

extern "C" __attribute__((visibility("default"))) const winnow::CpuKernels* WINNOW_CONCAT(
    winnow_cpu_kernels_, WINNOW_CPU_MODULE)() {
  return &winnow::kKernels;
}
