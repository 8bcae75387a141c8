// The CPU backend's kernels, built once per instruction set; the best one that the processor has is
// used. Internal.
#pragma once

#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "winnow/core/error.h"
#include "winnow/core/executor.h"
#include "winnow/core/export.h"

namespace winnow {

namespace expert_parallel {
struct RowSumParams;
}  // namespace expert_parallel

namespace sparse_mla {
struct ForwardParams;
struct DistributionParams;
struct BackwardParams;
struct DecodeParams;
struct StoreParams;
}  // namespace sparse_mla

namespace indexer {
struct TopkParams;
struct TopkPagedParams;
struct ScoresParams;
struct BackwardParams;
struct QuantizeParams;
}  // namespace indexer

namespace paged_xl {
struct AttentionParams;
struct AppendParams;
struct PositionTermParams;
}  // namespace paged_xl

// The entry points of one module. A module is a shared object of its own that shows nothing but
// its table, so that no inline function built for one instruction set serves another.
struct CpuKernels {
  const char* name;          // "x86_64_v3"
  const char* instructions;  // what the compiler was allowed to use, told by its own macros
  const char* libraries;     // "Eigen 3.4.0"

  void (*expert_parallel_sum_rows)(const expert_parallel::RowSumParams&);
  void (*indexer_topk)(const indexer::TopkParams&, const Executor&);
  void (*indexer_topk_paged)(const indexer::TopkPagedParams&, const Executor&);
  void (*indexer_scores)(const indexer::ScoresParams&, const Executor&);
  void (*indexer_backward)(const indexer::BackwardParams&, const Executor&);
  void (*indexer_quantize)(const indexer::QuantizeParams&, const Executor&);
  void (*sparse_mla_forward)(const sparse_mla::ForwardParams&, const Executor&);
  void (*sparse_mla_distribution)(const sparse_mla::DistributionParams&, const Executor&);
  void (*sparse_mla_backward)(const sparse_mla::BackwardParams&, const Executor&);
  void (*sparse_mla_decode)(const sparse_mla::DecodeParams&, const Executor&);
  void (*sparse_mla_store)(const sparse_mla::StoreParams&, const Executor&);
  void (*paged_xl_attention)(const paged_xl::AttentionParams&, const Executor&);
  void (*paged_xl_append)(const paged_xl::AppendParams&, const Executor&);
  void (*paged_xl_position_term)(const paged_xl::PositionTermParams&, const Executor&);

  // The ceiling of benchmarks: c[m, n] = a[m, k] * b[k, n], dense row-major f32, one call of the
  // matrix library per block of rows.
  void (*matmul)(const float* a, const float* b, float* c, std::int64_t m, std::int64_t n,
                 std::int64_t k, const Executor&);
};

// The modules of this build, best first.
struct CpuModule {
  const CpuKernels* kernels;
  bool runs_here;  // the processor has its instructions
};
WINNOW_EXPORT std::span<const CpuModule> cpu_modules();

// The first module that runs here, or the one that the environment variable WINNOW_CPU_ISA names.
// Throws Error if that one is unknown or does not run here. Read at the first call.
WINNOW_EXPORT const CpuKernels& cpu_kernels();

// Runs a kernel with num_threads() workers; a failed allocation of scratch memory becomes an Error.
template <class Params>
void run_on_cpu(std::string_view operation, void (*kernel)(const Params&, const Executor&),
                const Params& params) {
  try {
    kernel(params, ThreadExecutor());
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, std::string(operation), "out of memory for the scratch space");
  }
}

}  // namespace winnow
