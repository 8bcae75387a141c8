// Top-k sparse MLA attention, backward, sm90, deterministic, 64 heads at a time: the launches.
//
// Integers need the scale of a row before anything is added to it. So the bounds of all addends
// come first (backward_bounds_sm90.cuh), then the fused kernel adds to rows whose scale is known.
// What is before and after these two is that of the split design: its lists of entries, unlike
// those of the fused design, have one order.
#include <algorithm>
#include <cstdint>
#include <limits>

#include <cuda_runtime.h>

#include "winnow/sparse_mla/backward/backward_bounds_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_fused_fixed_sm90.h"
#include "winnow/sparse_mla/backward/backward_fused_launch.cuh"
#include "winnow/sparse_mla/backward/backward_split_launch.cuh"

namespace winnow::sparse_mla {

namespace {

namespace fused = backward_fused_sm90_detail;
namespace split = backward_split_detail;

constexpr device::Runtime kRuntime{"sparse_mla::backward", "sm90"};

// Queries worked on at a time: so many rounds of all blocks. The more there are, the fewer bits an
// addend to a row that all of them choose can have.
constexpr std::int64_t kRounds = 62;

struct Layout : split::SplitLayout {
  std::int64_t query_ranges, lengths, head_sizes, row_sizes, step, dq_parts;

  Layout(const JointParams& params, int multiprocessors) : SplitLayout{} {
    const Problem& problem = params.problem;
    blocks = 1;
    tiles = (problem.topk + kTileRows - 1) / kTileRows;
    chunk = std::max<std::int64_t>(std::min(kRounds * multiprocessors, problem.s_q), 1);
    cut_keys(problem.s_kv, 0);
    waste_rows = multiprocessors;
    lists = place(chunk * tiles * kTileRows * 4);
    offsets = place(chunk * (ranges + 1) * 4);
    lse2 = place(problem.s_q * split::kBlockHeads * 4);
    delta = place(problem.s_q * split::kBlockHeads * 4);
    query_ranges = place(params.ranges() ? chunk * std::int64_t{sizeof(QueryRanges)} : 0);
    lengths = place(params.ranges() ? chunk * 4 : 0);
    sums = place(params.sums_in_dkv() ? 0 : problem.s_kv * problem.d_qk * 4);
    rows = place((problem.s_kv + waste_rows) * split::kRowBytes);
    fixed = place((problem.s_kv + waste_rows) * problem.d_qk * 4);
    head_sizes = place(chunk * split::kBlockHeads * 8);
    row_sizes = place(problem.s_kv * 4);
    step = place(4);
    // Chunks that are followed by others have no tail.
    const bool tail = problem.s_q % multiprocessors > 0;
    dq_parts = place(tail ? 2 * multiprocessors * fused::kHeads * problem.d_qk * 4 : 0);
  }
};

// The fused kernel's view of a chunk of queries.
fused::KernelParams fused_params(const JointParams& params, const split::Params& chunk,
                                 const Layout& layout, char* workspace, int blocks) {
  const Problem& problem = params.problem;
  fused::KernelParams kernel{};
  kernel.kv = chunk.rows;
  kernel.q = chunk.q;
  kernel.q_stride0 = chunk.q_stride0;
  kernel.q_stride1 = chunk.q_stride1;
  kernel.d_out = chunk.d_out;
  kernel.d_out_stride0 = chunk.d_out_stride0;
  kernel.d_out_stride1 = chunk.d_out_stride1;
  kernel.delta = chunk.delta;
  kernel.delta_stride = fused::kHeads;
  kernel.dq_f32 = chunk.dq_f32;
  kernel.dq_stride0 = size_of(params.dq_dtype) * chunk.dq_stride0;
  kernel.dq_stride1 = size_of(params.dq_dtype) * chunk.dq_stride1;
  kernel.dq = chunk.dq;
  kernel.dq_parts = reinterpret_cast<float*>(workspace + layout.dq_parts);
  kernel.lse2 = chunk.lse2;
  kernel.row_states = chunk.row_states;
  kernel.fixed = chunk.fixed;
  kernel.waste_row = static_cast<std::int32_t>(problem.s_kv);
  kernel.scale = chunk.scale;
  kernel.scale_log2 = chunk.scale_log2;
  kernel.h_q = chunk.h_q;
  kernel.head_blocks = 1;
  kernel.items = static_cast<std::uint32_t>(chunk.queries);
  kernel.rounds = kernel.items / blocks;
  kernel.tiles = params.ranges() ? fused::kTailShares : chunk.tiles;
  if (fused::keeps_step(kRuntime, params)) {
    kernel.step = reinterpret_cast<std::uint32_t*>(workspace + layout.step);
  }
  return kernel;
}

template <int kColumns, class Params>
void launch_bounds(const Params& chunk, int blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(split::ScoresLayout<kColumns>);
  auto* const function = split::bounds_kernel<kColumns, Params>;
  kRuntime.allow_shared_memory(function, kBytes);
  kRuntime.launch(function, blocks, split::kScoresThreads, kBytes, stream, chunk);
}

// The kernels' view of queries [first, first + count). Their calls add to the same rows, whose
// scales must leave room for what comes later, unless all queries and heads are in one.
split::Params split_params(const JointParams& params, const Layout& layout, char* workspace,
                           std::int64_t first, std::int64_t count) {
  split::Params chunk = split::kernel_params(params, layout, workspace, first, count);
  chunk.head_sizes = reinterpret_cast<float2*>(workspace + layout.head_sizes);
  chunk.row_sizes = reinterpret_cast<float*>(workspace + layout.row_sizes);
  if (params.ranges()) {
    chunk.rows.topk = std::numeric_limits<std::int32_t>::max();
    chunk.rows.topk_length = reinterpret_cast<std::int32_t*>(workspace + layout.lengths);
    chunk.rows.topk_length_stride = 1;
  }
  chunk.one_chunk = chunk.one_chunk && params.sources.h_q <= fused::kHeads;
  return chunk;
}

// Up to 64 heads of all queries, but for the ends of the rows' sums.
template <int kColumns>
void add_heads(const JointParams& params, const Layout& layout, char* workspace, int blocks,
               cudaStream_t stream) {
  const Problem& problem = params.problem;
  QueryRanges* const ranges =
      params.ranges() ? reinterpret_cast<QueryRanges*>(workspace + layout.query_ranges) : nullptr;
  auto* const lengths = reinterpret_cast<std::int32_t*>(workspace + layout.lengths);
  for (std::int64_t first = 0; first < problem.s_q; first += layout.chunk) {
    const split::Params chunk =
        split_params(params, layout, workspace, first, std::min(layout.chunk, problem.s_q - first));
    split::launch_prepare<true>(kRuntime, params, chunk, first, ranges, lengths, stream);
    if (ranges == nullptr) {
      launch_bounds<kColumns>(chunk, blocks, stream);
    } else {
      launch_bounds<kColumns>(WithRanges<split::Params>{chunk, ranges}, blocks, stream);
    }
    split::launch_rows(kRuntime, split::settle_kernel, chunk, problem.s_kv, stream);
    const fused::KernelParams kernel = fused_params(params, chunk, layout, workspace, blocks);
    if (kernel.step != nullptr) {
      kRuntime.check(cudaMemsetAsync(kernel.step, 0, 4, stream), "cudaMemsetAsync");
    }
    fused::launch_fused<kColumns, fused::FixedDrain>(kRuntime, kernel, ranges, blocks, stream);
  }
  split::sum_sinks(kRuntime, params, split_params(params, layout, workspace, 0, 0), stream);
}

void skip(Rows<const void*>& rows, std::int64_t bytes) {
  if (rows.present()) rows.data = static_cast<const char*>(rows.data) + bytes;
}
void skip(Rows<void*>& rows, std::int64_t bytes) {
  if (rows.present()) rows.data = static_cast<char*>(rows.data) + bytes;
}

// The call with heads [first, first + 64) alone, those that there are.
JointParams with_heads(const JointParams& params, std::int64_t first) {
  JointParams some = params;
  some.problem.h_q = std::min<std::int64_t>(params.problem.h_q - first, fused::kHeads);
  skip(some.problem.q, 2 * first * params.problem.q.stride1);
  skip(some.out, 2 * first * params.out.stride1);
  skip(some.d_out, 2 * first * params.d_out.stride1);
  skip(some.lse, 4 * first);
  skip(some.delta, 4 * first);
  skip(some.attn_sink, 4 * first * params.attn_sink.stride0);
  skip(some.dq, size_of(params.dq_dtype) * first * params.dq.stride1);
  skip(some.d_sink, 4 * first * params.d_sink.stride0);
  return some;
}

template <int kColumns>
void run(const JointParams& params, const Layout& layout, char* workspace, int blocks,
         cudaStream_t stream) {
  const Problem& problem = params.problem;
  const split::Params all = split_params(params, layout, workspace, 0, 0);
  split::clear_sums(kRuntime, params, layout, all, stream);
  if (problem.h_q > 0) {
    split::launch_rows(kRuntime, split::row_sizes_kernel, all, problem.s_kv, stream);
  }
  for (std::int64_t first = 0; first < problem.h_q; first += fused::kHeads) {
    add_heads<kColumns>(with_heads(params, first), layout, workspace, blocks, stream);
  }
  split::finish_rows(kRuntime, params, all, stream);
}

}  // namespace

std::int64_t backward_fused_fixed_workspace_bytes(const JointParams& params) {
  return Layout(params, kRuntime.multiprocessors()).bytes;
}

void backward_fused_fixed_sm90(const JointParams& params, void* workspace, void* stream) {
  const int blocks = kRuntime.multiprocessors();
  const Layout layout(params, blocks);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (params.problem.d_qk == 576) {
    run<576>(params, layout, static_cast<char*>(workspace), blocks, queue);
  } else {
    run<512>(params, layout, static_cast<char*>(workspace), blocks, queue);
  }
}

}  // namespace winnow::sparse_mla
