// The table of one module. Built once per instruction set, with WINNOW_CPU_MODULE its name.
#include <Eigen/Core>

#include "winnow/cpu/kernels.h"
#include "winnow/expert_parallel/combine/combine_row_sum.h"
#include "winnow/indexer/backward/backward_impl.h"
#include "winnow/indexer/quantize/quantize_impl.h"
#include "winnow/indexer/scores/scores_impl.h"
#include "winnow/indexer/topk/topk_impl.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/cache/append_impl.h"
#include "winnow/paged_xl/position_term/position_term_impl.h"
#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/decode/decode_impl.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"
#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/store/store_impl.h"

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
    .indexer_topk = indexer::topk_cpu,
    .indexer_topk_paged = indexer::topk_paged_cpu,
    .indexer_scores = indexer::scores_cpu,
    .indexer_backward = indexer::backward_cpu,
    .indexer_quantize = indexer::quantize_cpu,
    .sparse_mla_forward = sparse_mla::forward_cpu,
    .sparse_mla_distribution = sparse_mla::distribution_cpu,
    .sparse_mla_backward = sparse_mla::backward_cpu,
    .sparse_mla_decode = sparse_mla::decode_cpu,
    .sparse_mla_store = sparse_mla::store_cpu,
    .paged_xl_attention = paged_xl::attention_cpu,
    .paged_xl_append = paged_xl::append_cpu,
    .paged_xl_position_term = paged_xl::position_term_cpu,
    .matmul = matmul,
};

}  // namespace
}  // namespace winnow

extern "C" __attribute__((visibility("default"))) const winnow::CpuKernels* WINNOW_CONCAT(
    winnow_cpu_kernels_, WINNOW_CPU_MODULE)() {
  return &winnow::kKernels;
}
