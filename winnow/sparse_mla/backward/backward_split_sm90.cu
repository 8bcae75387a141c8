// Backward of top-k sparse MLA attention, sm90, for many heads: the launches.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/backward/backward_split_products_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_split_sm90.h"

namespace winnow::sparse_mla {

namespace {

namespace detail = backward_split_detail;
using detail::Params;

constexpr device::Runtime kRuntime{"sparse_mla::backward", "sm90"};

// What the images of one chunk of queries may take.
constexpr std::int64_t kImageBytes = (std::int64_t{1} << 30) + (std::int64_t{64} << 20);
// Where the f32 sums of the cache outgrow L2 (measured: 24576 rows still fit), they are added range
// after range of keys.
constexpr std::int64_t kRowsInL2 = 24576;
constexpr int kRangeShift = 14;
// Up to so many rows their sums leave room in L2 for P and dS.
constexpr std::int64_t kRowsBesideImages = 8192;
constexpr std::int64_t kAlignment = 256;

// How the work is cut, and where things are in the workspace.
struct Layout {
  std::int64_t blocks, tiles;  // of heads, of a query's entries
  std::int64_t chunk;          // queries worked on at a time
  int ranges, range_shift;
  std::int64_t images, lists, offsets, lse2, delta, sums;
  // With `deterministic`; rows: bounds and counts of the rows.
  std::int64_t head_norms, tile_norms, rows, scales, fixed;
  std::int64_t bytes;
};

Layout layout_of(const BackwardParams& params) {
  const Problem& problem = params.problem;
  Layout layout{};
  layout.blocks = (problem.h_q + detail::kBlockHeads - 1) / detail::kBlockHeads;
  layout.tiles = (problem.topk + kTileRows - 1) / kTileRows;
  const std::int64_t per_query =
      std::max<std::int64_t>(layout.blocks * layout.tiles * detail::kImagePair, 1);
  layout.chunk = std::max<std::int64_t>(kImageBytes / per_query, 1);
  // Whole rounds of a full GPU, where there are some.
  if (layout.chunk > 132) layout.chunk -= layout.chunk % 132;
  layout.chunk = std::min<std::int64_t>({layout.chunk, problem.s_q, 1 << 16});
  layout.range_shift = problem.s_kv <= kRowsInL2 ? 15 : kRangeShift;
  while (((problem.s_kv - 1) >> layout.range_shift) + 1 > detail::kMaxRanges) ++layout.range_shift;
  layout.ranges =
      static_cast<int>(std::max<std::int64_t>(((problem.s_kv - 1) >> layout.range_shift) + 1, 1));

  const auto place = [&](std::int64_t bytes) {
    const std::int64_t at = layout.bytes;
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  const std::int64_t heads = layout.blocks * detail::kBlockHeads;
  layout.images = place(layout.chunk * per_query);
  layout.lists = place(layout.chunk * layout.tiles * kTileRows * 4);
  layout.offsets = place(layout.chunk * (layout.ranges + 1) * 4);
  layout.lse2 = place(problem.s_q * heads * 4);
  layout.delta = place(problem.s_q * heads * 4);
  layout.sums = place(params.dkv_dtype == DType::f32 ? 0 : problem.s_kv * problem.d_qk * 4);
  if (params.deterministic) {
    layout.head_norms = place(layout.chunk * layout.blocks * 32);
    layout.tile_norms = place(layout.chunk * layout.blocks * layout.tiles * 32);
    layout.rows = place(problem.s_kv * 8);
    layout.scales = place(problem.s_kv * 4);
    layout.fixed = place(problem.s_kv * problem.d_qk * 4);
  }
  return layout;
}

// The kernels' view of queries [first, first + count).
Params kernel_params(const BackwardParams& params, const Layout& layout, char* workspace,
                     std::int64_t first, std::int64_t count) {
  const Problem& problem = params.problem;
  Params kernel{};
  kernel.chosen = gather_view(problem);
  kernel.chosen.indices += problem.indices.offset(first);
  if (kernel.chosen.topk_length != nullptr) {
    kernel.chosen.topk_length += problem.topk_length.offset(first);
  }
  kernel.chosen.q_start += first;
  const auto bytes_of = [&](const Rows<const void*>& rows) {
    return static_cast<const char*>(rows.data) + 2 * rows.offset(first);
  };
  kernel.q = bytes_of(problem.q);
  kernel.q_stride0 = 2 * problem.q.stride0;
  kernel.q_stride1 = 2 * problem.q.stride1;
  if (params.out.data != nullptr) kernel.out = bytes_of(params.out);
  kernel.out_stride0 = 2 * params.out.stride0;
  kernel.out_stride1 = 2 * params.out.stride1;
  kernel.d_out = bytes_of(params.d_out);
  kernel.d_out_stride0 = 2 * params.d_out.stride0;
  kernel.d_out_stride1 = 2 * params.d_out.stride1;
  kernel.lse = params.lse.as<const float>().data + params.lse.offset(first);
  kernel.lse_stride = params.lse.stride0;
  kernel.attn_sink = params.attn_sink.as<const float>().data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  if (params.delta.data != nullptr) {
    kernel.given_delta = params.delta.as<const float>().data + params.delta.offset(first);
  }
  kernel.given_delta_stride = params.delta.stride0;

  const std::int64_t heads = layout.blocks * detail::kBlockHeads;
  kernel.images = workspace + layout.images;
  kernel.lists = reinterpret_cast<std::int32_t*>(workspace + layout.lists);
  kernel.offsets = reinterpret_cast<std::int32_t*>(workspace + layout.offsets);
  kernel.lse2 = reinterpret_cast<float*>(workspace + layout.lse2) + first * heads;
  kernel.delta = reinterpret_cast<float*>(workspace + layout.delta) + first * heads;
  kernel.rows = kernel.chosen;
  kernel.rows.indices = kernel.lists;
  kernel.rows.indices_stride = layout.tiles * kTileRows;
  kernel.rows.topk_length = kernel.offsets + layout.ranges;
  kernel.rows.topk_length_stride = layout.ranges + 1;

  kernel.dq_f32 = params.dq_dtype == DType::f32;
  kernel.dq =
      static_cast<char*>(params.dq.data) + (kernel.dq_f32 ? 4 : 2) * params.dq.offset(first);
  kernel.dq_stride0 = params.dq.stride0;
  kernel.dq_stride1 = params.dq.stride1;
  if (params.dkv_dtype == DType::f32) {
    kernel.dkv = static_cast<float*>(params.dkv.data);
    kernel.dkv_stride = params.dkv.stride0;
  } else {
    kernel.dkv = reinterpret_cast<float*>(workspace + layout.sums);
    kernel.dkv_stride = problem.d_qk;
  }
  if (params.deterministic) {
    kernel.head_norms = reinterpret_cast<float*>(workspace + layout.head_norms);
    kernel.tile_norms = reinterpret_cast<float*>(workspace + layout.tile_norms);
    kernel.row_bounds = reinterpret_cast<unsigned*>(workspace + layout.rows);
    kernel.row_counts = kernel.row_bounds + problem.s_kv;
    kernel.row_scales = reinterpret_cast<float*>(workspace + layout.scales);
    kernel.fixed = reinterpret_cast<unsigned long long*>(workspace + layout.fixed);
  }
  kernel.queries = static_cast<int>(count);
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.blocks = static_cast<int>(layout.blocks);
  kernel.tiles = static_cast<int>(layout.tiles);
  kernel.columns = static_cast<int>(problem.d_qk);
  kernel.ranges = layout.ranges;
  kernel.range_shift = layout.range_shift;
  kernel.keep_images = problem.s_kv <= kRowsBesideImages;
  kernel.scale = static_cast<float>(problem.scale);
  kernel.scale_log2 = kernel.scale * device::kLog2e;
  return kernel;
}

template <class Kernel>
void launch(Kernel* kernel, int blocks, int threads, int shared, const Params& params,
            cudaStream_t stream) {
  kRuntime.allow_shared_memory(kernel, shared);
  kRuntime.launch(kernel, blocks, threads, shared, stream, params);
}

void launch_prepare(const Params& params, cudaStream_t stream) {
  launch(detail::prepare_kernel, params.queries, detail::kPrepareThreads, 0, params, stream);
}

template <int kColumns>
void launch_scores(const Params& params, int blocks, cudaStream_t stream) {
  auto* const kernel = params.fixed == nullptr ? detail::scores_kernel<kColumns, false>
                                               : detail::scores_kernel<kColumns, true>;
  launch(kernel, blocks, detail::kScoresThreads, detail::ScoresPlan<kColumns>::kBytes, params,
         stream);
}

template <int kColumns>
void launch_dq(const Params& params, int blocks, cudaStream_t stream) {
  launch(detail::dq_kernel<kColumns>, blocks, detail::kProductThreads, detail::DqPlan::kBytes,
         params, stream);
}

// A thread for each of `count` things.
template <class... Arguments>
void launch_flat(void (*kernel)(Arguments...), std::int64_t count, cudaStream_t stream,
                 const std::type_identity_t<Arguments>&... arguments) {
  if (count == 0) return;
  kRuntime.launch(kernel, static_cast<unsigned>((count + 255) / 256), 256, 0, stream, arguments...);
}

template <int kColumns>
void launch_dkv(const Params& params, std::int64_t s_kv, int blocks, cudaStream_t stream) {
  constexpr int kBytes = detail::DkvPlan::kBytes;
  if (params.fixed == nullptr) {
    launch(detail::dkv_kernel<kColumns, detail::FloatDrain>, blocks, detail::kProductThreads,
           kBytes, params, stream);
    return;
  }
  launch(detail::bound_kernel, params.queries, detail::kBoundThreads, 0, params, stream);
  launch_flat(detail::scale_kernel, s_kv, stream, params, s_kv);
  launch(detail::dkv_kernel<kColumns, detail::FixedDrain>, blocks, detail::kProductThreads, kBytes,
         params, stream);
  if (s_kv == 0) return;
  const dim3 fold_threads(kColumns / 4, detail::kFoldRows);
  const auto fold_blocks = (s_kv + detail::kFoldRows - 1) / detail::kFoldRows;
  kRuntime.launch(detail::fold_kernel, static_cast<unsigned>(fold_blocks), fold_threads, 0, stream,
                  params, s_kv);
}

void clear_sums(const BackwardParams& params, const Params& kernel, cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (problem.s_kv == 0) return;
  // The stride of a single row may be anything.
  const std::int64_t pitch = problem.s_kv > 1 ? kernel.dkv_stride * 4 : problem.d_qk * 4;
  kRuntime.check(cudaMemset2DAsync(kernel.dkv, pitch, 0, problem.d_qk * 4, problem.s_kv, stream),
                 "cudaMemset2DAsync");
  if (kernel.fixed == nullptr) return;
  kRuntime.check(cudaMemsetAsync(kernel.row_bounds, 0, problem.s_kv * 8, stream),
                 "cudaMemsetAsync");
  kRuntime.check(cudaMemsetAsync(kernel.fixed, 0, problem.s_kv * problem.d_qk * 4, stream),
                 "cudaMemsetAsync");
}

// Rounds the sums where dkv is bf16, and adds up d_sink. `all` begins at query 0.
void finish(const BackwardParams& params, const Params& all, cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (params.d_sink.data != nullptr && problem.h_q > 0) {
    const int heads = all.blocks * detail::kBlockHeads;
    kRuntime.launch(detail::d_sink_kernel, heads / 32, 32 * detail::kSinkWarps, 0, stream, all.lse2,
                    all.delta, problem.s_q, heads, all.h_q, all.attn_sink, all.attn_sink_stride,
                    params.d_sink.as<float>().data, params.d_sink.stride0);
  }
  if (params.dkv_dtype != DType::f32 && problem.s_kv > 0) {
    launch_flat(detail::round_kernel, problem.s_kv * problem.d_qk / 8, stream, all.dkv,
                problem.s_kv, static_cast<int>(problem.d_qk), static_cast<char*>(params.dkv.data),
                params.dkv.stride0);
  }
}

template <int kColumns>
void run(const BackwardParams& params, const Layout& layout, char* workspace, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int blocks = kRuntime.multiprocessors();
  const Params all = kernel_params(params, layout, workspace, 0, 0);
  clear_sums(params, all, stream);
  for (std::int64_t first = 0; first < problem.s_q && problem.h_q > 0; first += layout.chunk) {
    const Params chunk = kernel_params(params, layout, workspace, first,
                                       std::min(layout.chunk, problem.s_q - first));
    launch_prepare(chunk, stream);
    launch_scores<kColumns>(chunk, blocks, stream);
    launch_dq<kColumns>(chunk, blocks, stream);
    launch_dkv<kColumns>(chunk, problem.s_kv, blocks, stream);
  }
  finish(params, all, stream);
}

}  // namespace

std::int64_t backward_split_workspace_bytes(const BackwardParams& params) {
  return layout_of(params).bytes;
}

void backward_split_sm90(const BackwardParams& params, void* workspace, void* stream) {
  const Problem& problem = params.problem;
  const Layout layout = layout_of(params);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (problem.d_qk == 576) {
    run<576>(params, layout, static_cast<char*>(workspace), queue);
  } else {
    run<512>(params, layout, static_cast<char*>(workspace), queue);
  }
}

}  // namespace winnow::sparse_mla
