#include "winnow/indexer/topk_paged/topk_paged.h"

#include <limits>
#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/topk_paged/topk_paged_fields.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = "indexer::topk_paged";
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};

void check_inputs(const Check& check, const TopkPagedArgs& args, TopkPagedParams& params) {
  check.rank("q", args.q, 4, "[b, s_q, h, d]");
  check.rank("pages", args.pages, 2, "[num_pages, 64 * (d + 4)]");
  check.rank("block_tables", args.block_tables, 2, "[b, n]");
  const Device device = args.q.device();
  params.b = args.q.size(0);
  params.s_q = args.q.size(1);
  params.h = args.q.size(2);
  params.d = args.q.size(3);
  params.num_pages = args.pages.size(0);
  params.table = args.block_tables.size(1);
  check.that(params.d == 128 || params.d == 64, "q", "d = 128 or 64",
             "d = " + std::to_string(params.d));
  check.that(params.h >= 1 && params.h <= 128, "q", "1 to 128 heads", std::to_string(params.h));
  const Dim b{"b", params.b}, s_q{"s_q", params.s_q}, h{"h", params.h}, d{"d", params.d};
  check.input("q", args.q, {b, s_q, h, d}, {DType::f8_e4m3}, device);
  check.input("pages", args.pages,
              {{"num_pages", params.num_pages}, {"64 * (d + 4)", page_bytes(params.d)}},
              {DType::u8}, device);
  check.input("weights", args.weights, {b, s_q, h}, {DType::f32, DType::bf16}, device);
  check.input("block_tables", args.block_tables, {b, {"n", params.table}}, {DType::i32}, device);
  params.lens_of_queries = args.context_lens.rank() > 1;
  if (params.lens_of_queries) {
    check.rank("context_lens", args.context_lens, 2, "[b, s_q], or one, [b]");
    check.input("context_lens", args.context_lens, {b, s_q}, {DType::i32}, device);
  } else {
    check.input("context_lens", args.context_lens, {b}, {DType::i32}, device);
  }
  // Whole tiles of two pages, so that counts of their rows are below 2^31, too.
  constexpr std::int64_t kMostPages =
      std::numeric_limits<std::int32_t>::max() / (2 * kPageRows) * 2;
  check.that(params.num_pages <= kMostPages, "pages",
             "at most 2^31 - 128 rows, the range of the indices",
             std::to_string(params.num_pages) + " pages of 64");
  check.that(params.table <= kMostPages, "block_tables",
             "at most 2^31 - 128 rows, the range of the positions",
             std::to_string(params.table) + " pages of 64");
}

TopkPagedParams check_args(const TopkPagedArgs& args) {
  const Check check(kOperation);
  TopkPagedParams params;
  check_inputs(check, args, params);
  const Device device = args.q.device();
  check.rank("indices", args.indices, 3, "[b, s_q, topk]");
  params.topk = args.indices.size(2);
  check.that(params.topk >= 1 && params.topk <= std::numeric_limits<std::int32_t>::max(), "indices",
             "topk from 1 to 2^31 - 1", std::to_string(params.topk));
  const Dim b{"b", params.b}, s_q{"s_q", params.s_q}, topk{"topk", params.topk};
  check.output("indices", args.indices, {b, s_q, topk}, {DType::i32}, device);
  check.output("length", args.length, {b, s_q}, {DType::i32}, device);
  if (args.scores.present()) {
    check.output("scores", args.scores, {b, s_q, topk}, {DType::f32}, device);
  }
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
  const TensorView workspace = backend == Backend::cpu ? TensorView{} : args.workspace;
  Check(kOperation)
      .apart({{"indices", args.indices},
              {"length", args.length},
              {"scores", args.scores},
              {"workspace", workspace}},
             {{"q", args.q},
              {"pages", args.pages},
              {"weights", args.weights},
              {"block_tables", args.block_tables},
              {"context_lens", args.context_lens}});
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
  return recorded(kOperation, args, options, run);
}

std::int64_t topk_paged_workspace_bytes(const TopkPagedArgs& args, const RunOptions& options) {
  const TopkPagedParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) check_for_sm90(args, params);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::indexer
