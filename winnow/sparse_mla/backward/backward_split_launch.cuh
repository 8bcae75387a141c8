// Backward of top-k sparse MLA attention through P and dS in memory: what the launches of sm90 and
// sm100 share, which is how the work is cut, the workspace, the kernels' view of a chunk of
// queries, and what runs before and after their own kernels. Host code of .cu files. Each of these
// compiles the kernels for its architecture, so functions that launch some of them by name are
// static.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/backward/backward_joint_sm90.h"
#include "winnow/sparse_mla/backward/backward_split_products_sm90.cuh"

namespace winnow::sparse_mla::backward_split_detail {

// What differs between the architectures.
struct SplitTarget {
  Runtime runtime;
  int multiprocessors;  // of a full GPU: chunks of queries are whole rounds of it
  // Where the f32 sums of the cache outgrow L2, they are added range after range of keys, each of
  // 2^range_shift rows.
  std::int64_t rows_in_l2;
  int range_shift;
};

// The most bytes of the images of one chunk of queries.
inline constexpr std::int64_t kImageBytes = (std::int64_t{1} << 30) + (std::int64_t{64} << 20);
// Up to so many rows, the sums of the cache leave room in L2 for P and dS.
inline constexpr std::int64_t kRowsBesideImages = 8192;
inline constexpr std::int64_t kAlignment = 256;

// In the deterministic mode, the bytes for each row's state, bound and count.
inline constexpr std::int64_t kRowBytes = sizeof(RowState) + 8;

// How the work is cut, and where things are in the workspace.
struct SplitLayout {
  std::int64_t blocks, tiles;  // of heads, of a query's entries
  std::int64_t chunk;          // queries worked on at a time
  int ranges, range_shift;
  std::int64_t images, lists, offsets, lse2, delta, sums, taken;
  // With `deterministic`; rows: states, bounds and counts of the rows.
  std::int64_t head_norms, tile_norms, rows, fixed;
  std::int64_t waste_rows;  // after those of the cache: they take what absent entries add
  std::int64_t bytes;

  std::int64_t place(std::int64_t wanted) {
    const std::int64_t at = bytes;
    bytes += (wanted + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  // Ranges of at least 2^shift rows.
  void cut_keys(std::int64_t s_kv, int shift) {
    while (((s_kv - 1) >> shift) + 1 > kMaxRanges) ++shift;
    range_shift = shift;
    ranges = static_cast<int>(std::max<std::int64_t>(((s_kv - 1) >> shift) + 1, 1));
  }
};

inline SplitLayout layout_of(const JointParams& params, const SplitTarget& target) {
  const Problem& problem = params.problem;
  SplitLayout layout{};
  layout.blocks = (problem.h_q + kBlockHeads - 1) / kBlockHeads;
  layout.tiles = (problem.topk + kTileRows - 1) / kTileRows;
  const std::int64_t per_query =
      std::max<std::int64_t>(layout.blocks * layout.tiles * kImagePair, 1);
  layout.chunk = std::max<std::int64_t>(kImageBytes / per_query, 1);
  // If a chunk is larger than the GPU, it is whole rounds of it.
  if (layout.chunk > target.multiprocessors) layout.chunk -= layout.chunk % target.multiprocessors;
  layout.chunk = std::min<std::int64_t>({layout.chunk, problem.s_q, 1 << 16});
  layout.cut_keys(problem.s_kv, target.range_shift + (problem.s_kv <= target.rows_in_l2 ? 1 : 0));

  const auto place = [&](std::int64_t bytes) { return layout.place(bytes); };
  const std::int64_t heads = layout.blocks * kBlockHeads;
  layout.images = place(layout.chunk * per_query);
  layout.lists = place(layout.chunk * layout.tiles * kTileRows * 4);
  layout.offsets = place(layout.chunk * (layout.ranges + 1) * 4);
  layout.lse2 = place(problem.s_q * heads * 4);
  layout.delta = place(problem.s_q * heads * 4);
  layout.taken = place(4);
  layout.sums = place(params.sums_in_dkv() ? 0 : problem.s_kv * problem.d_qk * 4);
  if (params.deterministic) {
    layout.head_norms = place(layout.chunk * layout.blocks * 32);
    layout.tile_norms = place(layout.chunk * layout.blocks * layout.tiles * 32);
    layout.rows = place(problem.s_kv * kRowBytes);
    layout.fixed = place(problem.s_kv * problem.d_qk * 4);
  }
  return layout;
}

// The kernels' view of queries [first, first + count).
inline Params kernel_params(const JointParams& params, const SplitLayout& layout, char* workspace,
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
  if (params.out.present()) kernel.out = bytes_of(params.out);
  kernel.out_stride0 = 2 * params.out.stride0;
  kernel.out_stride1 = 2 * params.out.stride1;
  kernel.d_out = bytes_of(params.d_out);
  kernel.d_out_stride0 = 2 * params.d_out.stride0;
  kernel.d_out_stride1 = 2 * params.d_out.stride1;
  kernel.lse = params.lse.as<const float>().data + params.lse.offset(first);
  kernel.lse_stride = params.lse.stride0;
  kernel.attn_sink = params.attn_sink.as<const float>().data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  if (params.delta.present()) {
    kernel.given_delta = params.delta.as<const float>().data + params.delta.offset(first);
  }
  kernel.given_delta_stride = params.delta.stride0;

  const std::int64_t heads = layout.blocks * kBlockHeads;
  kernel.images = workspace + layout.images;
  kernel.dkv_taken = reinterpret_cast<unsigned*>(workspace + layout.taken);
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
  if (params.sums_in_dkv()) {
    kernel.dkv = static_cast<float*>(params.dkv.data);
    kernel.dkv_stride = params.dkv.stride0;
  } else {
    kernel.dkv = reinterpret_cast<float*>(workspace + layout.sums);
    kernel.dkv_stride = problem.d_qk;
  }
  if (params.deterministic) {
    kernel.head_norms = reinterpret_cast<float*>(workspace + layout.head_norms);
    kernel.tile_norms = reinterpret_cast<float*>(workspace + layout.tile_norms);
    kernel.row_states = reinterpret_cast<RowState*>(workspace + layout.rows);
    const std::int64_t rows = problem.s_kv + layout.waste_rows;
    kernel.row_bounds = reinterpret_cast<unsigned*>(kernel.row_states + rows);
    kernel.row_counts = kernel.row_bounds + rows;
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
  kernel.one_chunk = layout.chunk >= problem.s_q;
  kernel.scale = static_cast<float>(problem.scale);
  kernel.scale_log2 = kernel.scale * device::kLog2e;
  return kernel;
}

// Launches a thread for each of `count` items.
template <class... Arguments>
inline void launch_flat(const Runtime& runtime, void (*kernel)(Arguments...), std::int64_t count,
                        cudaStream_t stream, const std::type_identity_t<Arguments>&... arguments) {
  if (count == 0) return;
  runtime.launch(kernel, static_cast<unsigned>((count + 255) / 256), 256, 0, stream, arguments...);
}

// Launches a warp for each row.
inline void launch_rows(const Runtime& runtime, void (*kernel)(Params, std::int64_t),
                        const Params& params, std::int64_t s_kv, cudaStream_t stream) {
  if (s_kv == 0) return;
  runtime.launch(kernel, static_cast<unsigned>((s_kv + kRowsOfBlock - 1) / kRowsOfBlock),
                 kRowThreads, 0, stream, params, s_kv);
}

// Launches what comes before a chunk of queries. With ranges, theirs and the number of all entries
// of each query go to `ranges` and `lengths`.
template <bool kForBounds>
void launch_prepare(const Runtime& runtime, const JointParams& params, const Params& chunk,
                    std::int64_t first, QueryRanges* ranges, std::int32_t* lengths,
                    cudaStream_t stream) {
  if (!params.joint()) {
    runtime.launch(prepare_kernel<kForBounds>, chunk.queries, kPrepareThreads, 0, stream, chunk);
    return;
  }
  SourcesParams sources = sources_params(params.sources, first);
  sources.ranges = ranges;
  sources.lengths = lengths;
  runtime.launch(prepare_sources_kernel<kForBounds>, chunk.queries, kPrepareThreads, 0, stream,
                 chunk, sources);
}

// Launches what comes before the fixed-point additions of a chunk of queries.
[[maybe_unused]] static void launch_settle(const Runtime& runtime, const Params& params,
                                           std::int64_t s_kv, cudaStream_t stream) {
  runtime.launch(bound_kernel, static_cast<unsigned>(params.queries), kBoundThreads, 0, stream,
                 params);
  launch_rows(runtime, settle_kernel, params, s_kv, stream);
}

inline void clear_sums(const Runtime& runtime, const JointParams& params, const SplitLayout& layout,
                       const Params& kernel, cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (problem.s_kv == 0) return;
  if (kernel.fixed == nullptr || !kernel.one_chunk) {  // else fold_kernel writes every row
    // The stride of a single row may be anything.
    const std::int64_t pitch = problem.s_kv > 1 ? kernel.dkv_stride * 4 : problem.d_qk * 4;
    runtime.check(cudaMemset2DAsync(kernel.dkv, pitch, 0, problem.d_qk * 4, problem.s_kv, stream),
                  "cudaMemset2DAsync");
  }
  if (kernel.fixed == nullptr) return;
  const std::int64_t rows = problem.s_kv + layout.waste_rows;
  runtime.check(cudaMemsetAsync(kernel.row_states, 0, rows * kRowBytes, stream), "cudaMemsetAsync");
  runtime.check(cudaMemsetAsync(kernel.fixed, 0, rows * problem.d_qk * 4, stream),
                "cudaMemsetAsync");
}

// Adds up d_sink. `all` begins at query 0.
[[maybe_unused]] static void sum_sinks(const Runtime& runtime, const BackwardParams& params,
                                       const Params& all, cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (params.d_sink.present() && problem.h_q > 0) {
    const int heads = all.blocks * kBlockHeads;
    runtime.launch(d_sink_kernel, heads / 32, 32 * kSinkWarps, 0, stream, all.lse2, all.delta,
                   problem.s_q, heads, all.h_q, all.attn_sink, all.attn_sink_stride,
                   params.d_sink.as<float>().data, params.d_sink.stride0);
  }
}

// Completes the sums of rows, and rounds or copies them where they are not in dkv.
[[maybe_unused]] static void finish_rows(const Runtime& runtime, const JointParams& params,
                                         const Params& all, cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (all.fixed != nullptr) launch_rows(runtime, fold_kernel, all, problem.s_kv, stream);
  if (params.sums_in_dkv()) return;
  const int columns = static_cast<int>(problem.d_qk);
  for (const RowOutput& output : params.outputs()) {
    const float* const sums = all.dkv + output.first * columns;
    auto* const to = static_cast<char*>(output.to.data);
    if (output.dtype == DType::f32) {
      copy_rows(runtime, sums, 4 * columns, to, 4 * output.to.stride0, output.rows, 4 * columns,
                stream);
    } else {
      launch_flat(runtime, round_kernel, output.rows * columns / 8, stream, sums, output.rows,
                  columns, to, output.to.stride0);
    }
  }
}

}  // namespace winnow::sparse_mla::backward_split_detail
