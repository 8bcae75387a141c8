// Top-k sparse MLA attention, backward, sm90, deterministic with up to 64 heads: the launches.
//
// Integers need the scale of a row before anything is added to it. So the bounds of all addends
// come first (backward_bounds_sm90.cuh), then the fused kernel adds to rows whose scale is known.
// What is before and after these two is that of the split design: its lists of entries, unlike
// those of the fused design, have one order.
#include <algorithm>
#include <cstdint>

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
  std::int64_t head_sizes, row_sizes, step, dq_parts;

  Layout(const BackwardParams& params, int multiprocessors) : SplitLayout{} {
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
    sums = place(params.dkv_dtype == DType::f32 ? 0 : problem.s_kv * problem.d_qk * 4);
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
fused::KernelParams fused_params(const BackwardParams& params, const split::Params& chunk,
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
  kernel.tiles = chunk.tiles;
  if (fused::keeps_step(kRuntime, problem)) {
    kernel.step = reinterpret_cast<std::uint32_t*>(workspace + layout.step);
  }
  return kernel;
}

template <int kColumns>
void launch_bounds(const split::Params& chunk, std::int64_t s_kv, int blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(split::ScoresLayout<kColumns>);
  kRuntime.allow_shared_memory(split::bounds_kernel<kColumns>, kBytes);
  kRuntime.launch(split::bounds_kernel<kColumns>, blocks, split::kScoresThreads, kBytes, stream,
                  chunk);
  split::launch_rows(kRuntime, split::settle_kernel, chunk, s_kv, stream);
}

template <int kColumns>
void run(const BackwardParams& params, const Layout& layout, char* workspace, int blocks,
         cudaStream_t stream) {
  const Problem& problem = params.problem;
  const auto view = [&](std::int64_t first, std::int64_t count) {
    split::Params chunk = split::kernel_params(params, layout, workspace, first, count);
    chunk.head_sizes = reinterpret_cast<float2*>(workspace + layout.head_sizes);
    chunk.row_sizes = reinterpret_cast<float*>(workspace + layout.row_sizes);
    return chunk;
  };
  const split::Params all = view(0, 0);
  split::clear_sums(kRuntime, params, layout, all, stream);
  if (problem.h_q > 0) {
    split::launch_rows(kRuntime, split::row_sizes_kernel, all, problem.s_kv, stream);
  }
  for (std::int64_t first = 0; first < problem.s_q && problem.h_q > 0; first += layout.chunk) {
    const split::Params chunk = view(first, std::min(layout.chunk, problem.s_q - first));
    kRuntime.launch(split::prepare_kernel<true>, chunk.queries, split::kPrepareThreads, 0, stream,
                    chunk);
    launch_bounds<kColumns>(chunk, problem.s_kv, blocks, stream);
    const fused::KernelParams kernel = fused_params(params, chunk, layout, workspace, blocks);
    if (kernel.step != nullptr) {
      kRuntime.check(cudaMemsetAsync(kernel.step, 0, 4, stream), "cudaMemsetAsync");
    }
    fused::launch_fused<kColumns, fused::FixedDrain>(kRuntime, kernel, blocks, stream);
  }
  split::finish(kRuntime, params, all, stream);
}

}  // namespace

std::int64_t backward_fused_fixed_workspace_bytes(const BackwardParams& params) {
  return Layout(params, kRuntime.multiprocessors()).bytes;
}

void backward_fused_fixed_sm90(const BackwardParams& params, void* workspace, void* stream) {
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
