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

// The operations that have a kernel per instruction set: the family, the operation and the plain
// parameters that its kernel FAMILY::OPERATION_cpu() takes.
#define WINNOW_CPU_KERNELS(X)                     \
  X(indexer, topk, TopkParams)                    \
  X(indexer, topk_paged, TopkPagedParams)         \
  X(indexer, scores, ScoresParams)                \
  X(indexer, scores_paged, ScoresPagedParams)     \
  X(indexer, backward, BackwardParams)            \
  X(indexer, quantize, QuantizeParams)            \
  X(sparse_mla, forward, ForwardParams)           \
  X(sparse_mla, distribution, DistributionParams) \
  X(sparse_mla, backward, BackwardParams)         \
  X(sparse_mla, decode, DecodeParams)             \
  X(sparse_mla, store, StoreParams)               \
  X(paged_xl, attention, AttentionParams)         \
  X(paged_xl, append, AppendParams)               \
  X(paged_xl, position_term, PositionTermParams)  \
  X(compressor, forward, ForwardParams)           \
  X(compressor, backward, BackwardParams)         \
  X(compressor, step, StepParams)

#define WINNOW_DECLARE_(family, operation, params)                     \
  namespace family {                                                   \
  struct params;                                                       \
  void operation##_cpu(const params& given, const Executor& executor); \
  }
WINNOW_CPU_KERNELS(WINNOW_DECLARE_)
#undef WINNOW_DECLARE_

namespace expert_parallel {
struct RowSumParams;
}  // namespace expert_parallel

// The entry points of one module. A module is a shared object of its own that shows nothing but
// its table, so that no inline function built for one instruction set serves another.
struct CpuKernels {
  const char* name;          // "x86_64_v3"
  const char* instructions;  // what the compiler was allowed to use, told by its own macros
  const char* libraries;     // "Eigen 3.4.0"

  void (*expert_parallel_sum_rows)(const expert_parallel::RowSumParams&);
#define WINNOW_MEMBER_(family, operation, params) \
  void (*family##_##operation)(const family::params&, const Executor&);
  WINNOW_CPU_KERNELS(WINNOW_MEMBER_)
#undef WINNOW_MEMBER_

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
