#include "winnow/indexer/topk_paged/topk_paged.h"

#include <limits>
#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/topk_paged/topk_paged_contract.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = kTopkPaged.operation;
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};

}  // namespace

void check_pages(const Check& check, const TopkPagedArgs& args) {
  const Dim num_pages{"num_pages", args.pages.size(0)};
  check.input("pages", args.pages, {num_pages, {"64 * (d + 4)", page_bytes(args.q.size(3))}},
              {DType::u8}, args.q.device());
}

void check_context_lens(const Check& check, const TopkPagedArgs& args) {
  const Dim b{"b", args.q.size(0)}, s_q{"s_q", args.q.size(1)};
  const Device device = args.q.device();
  if (args.context_lens.rank() > 1) {
    check.rank("context_lens", args.context_lens, 2, "[b, s_q], or one, [b]");
    check.input("context_lens", args.context_lens, {b, s_q}, {DType::i32}, device);
  } else {
    check.input("context_lens", args.context_lens, {b}, {DType::i32}, device);
  }
  // Whole tiles of two pages, so that counts of their rows are below 2^31, too.
  constexpr std::int64_t kMostPages =
      std::numeric_limits<std::int32_t>::max() / (2 * kPageRows) * 2;
  const std::int64_t pages = args.pages.size(0), table = args.block_tables.size(1);
  check.that(pages <= kMostPages, "pages", "at most 2^31 - 128 rows, the range of the indices",
             std::to_string(pages) + " pages of 64");
  check.that(table <= kMostPages, "block_tables",
             "at most 2^31 - 128 rows, the range of the positions",
             std::to_string(table) + " pages of 64");
}

namespace {

TopkPagedParams check_args(const TopkPagedArgs& args) {
  kTopkPaged.check(args);
  TopkPagedParams params;
  params.b = args.q.size(0);
  params.s_q = args.q.size(1);
  params.h = args.q.size(2);
  params.d = args.q.size(3);
  params.num_pages = args.pages.size(0);
  params.table = args.block_tables.size(1);
  params.topk = args.indices.size(2);
  params.lens_of_queries = args.context_lens.rank() > 1;
  params.later_ties = args.ties == Ties::larger;
  params.positions = args.positions;
  params.q = rows_of<const void*>(args.q, 0, 1);
  params.q_head_stride = args.q.stride(2);
  params.weights_dtype = args.weights.dtype();
  params.weights = rows_of<const void*>(args.weights, 0, 1);
  params.pages = rows_of<const std::uint8_t*>(args.pages, 0);
  params.block_tables = rows_of<const std::int32_t*>(args.block_tables, 0);
  params.context_lens =
      rows_of<const std::int32_t*>(args.context_lens, 0, params.lens_of_queries ? 1 : -1);
  params.indices = rows_of<std::int32_t*>(args.indices, 0, 1);
  params.length = rows_of<std::int32_t*>(args.length, 0, 1);
  params.scores = rows_of<float*>(args.scores, 0, 1);
  return params;
}

void check_for_sm90(const TopkPagedArgs& args, const TopkPagedParams& params) {
  const Check check(kOperation);
  constexpr std::int64_t kAlignment = 16;  // of asynchronous copies
  check.aligned("q", args.q, kAlignment);
  check.aligned("pages", args.pages, kAlignment);
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (params.s_q > kLimit) {
    check.unsupported("sm90: want s_q up to 2^30, got " + std::to_string(params.s_q));
  }
}

// What `workspace` must hold.
std::int64_t workspace_bytes(const TopkPagedArgs& args, const TopkPagedParams& params,
                             Backend backend) {
  if (backend == Backend::cpu || params.b == 0 || params.s_q == 0) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    return topk_paged_sm90_workspace_bytes(params);
  }
  return 0;
}

Backend run(const TopkPagedArgs& args, const RunOptions& options) {
  const TopkPagedParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) {
    check_for_sm90(args, params);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  kTopkPaged.apart(args, backend == Backend::cpu ? TensorView{} : args.workspace);
  if (params.b == 0 || params.s_q == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_topk_paged, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    topk_paged_sm90(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend topk_paged(const TopkPagedArgs& args, const RunOptions& options) {
  return recorded(kTopkPaged, args, options, run);
}

std::int64_t topk_paged_workspace_bytes(const TopkPagedArgs& args, const RunOptions& options) {
  const TopkPagedParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) check_for_sm90(args, params);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::indexer
