// Backward of top-k sparse MLA attention, sm90, for many heads: the launches.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/sparse_mla/backward/backward_split_launch.cuh"
#include "winnow/sparse_mla/backward/backward_split_products_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_split_sm90.h"

namespace winnow::sparse_mla {

namespace {

namespace detail = backward_split_detail;
using detail::Params;

// For 132 multiprocessors. Measured: the f32 sums of 24576 rows still fit into L2; with more rows,
// dkv adds to one range of at least 2^14 of them after the other.
constexpr detail::SplitTarget kTarget{{"sparse_mla::backward", "sm90"}, 132, 24576, 14};
constexpr const device::Runtime& kRuntime = kTarget.runtime;

template <class Kernel>
void launch(Kernel* kernel, int blocks, int threads, int shared, const Params& params,
            cudaStream_t stream) {
  kRuntime.allow_shared_memory(kernel, shared);
  kRuntime.launch(kernel, blocks, threads, shared, stream, params);
}

template <int kColumns>
void launch_scores(const Params& params, int blocks, cudaStream_t stream) {
  auto* const kernel = params.fixed == nullptr ? detail::scores_kernel<kColumns, false>
                                               : detail::scores_kernel<kColumns, true>;
  launch(kernel, blocks, detail::kScoresThreads, sizeof(detail::ScoresLayout<kColumns>), params,
         stream);
}

template <int kColumns>
void launch_dq(const Params& params, int blocks, cudaStream_t stream) {
  launch(detail::dq_kernel<kColumns>, blocks, detail::kProductThreads, sizeof(detail::DqLayout),
         params, stream);
}

// The last items are cut into shares, so that blocks end together: those of an incomplete round,
// and after many rounds, in which blocks may have drifted apart, those of one round more. A share
// has four tiles, or fewer if that would give less than two shares for each block.
detail::DkvCut dkv_cut(const Params& params, int blocks) {
  const int items = 2 * params.queries * detail::ceil_div(params.blocks, 2) * params.ranges;
  const int rounds = items / blocks;
  const int fixed = params.ranges == 1 ? std::max(rounds * 7 / 8, 1) : 1;
  const int cut = items % blocks + (rounds >= 8 ? blocks : 0);
  if (cut == 0) return {fixed, items, 1};
  const int tiles = std::max(params.tiles / params.ranges, 1);
  const int shares = std::max(tiles / 4, detail::ceil_div(2 * blocks, cut));
  return {fixed, items - cut, std::min(shares, tiles)};
}

template <int kColumns>
void launch_dkv(Params params, std::int64_t s_kv, int blocks, cudaStream_t stream) {
  params.dkv_cut = dkv_cut(params, blocks);
  constexpr int kBytes = sizeof(detail::DkvLayout);
  if (params.fixed == nullptr) {
    launch(detail::dkv_kernel<kColumns, detail::FloatDrain>, blocks, detail::kProductThreads,
           kBytes, params, stream);
    return;
  }
  detail::launch_settle(kRuntime, params, s_kv, stream);
  launch(detail::dkv_kernel<kColumns, detail::FixedDrain>, blocks, detail::kProductThreads, kBytes,
         params, stream);
}

template <int kColumns>
void run(const JointParams& params, const detail::SplitLayout& layout, char* workspace,
         cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int blocks = kRuntime.multiprocessors();
  const Params all = detail::kernel_params(params, layout, workspace, 0, 0);
  detail::clear_sums(kRuntime, params, layout, all, stream);
  for (std::int64_t first = 0; first < problem.s_q && problem.h_q > 0; first += layout.chunk) {
    const Params chunk = detail::kernel_params(params, layout, workspace, first,
                                               std::min(layout.chunk, problem.s_q - first));
    detail::launch_prepare<false>(kRuntime, params, chunk, first, nullptr, nullptr, stream);
    launch_scores<kColumns>(chunk, blocks, stream);
    launch_dq<kColumns>(chunk, blocks, stream);
    launch_dkv<kColumns>(chunk, problem.s_kv, blocks, stream);
  }
  detail::sum_sinks(kRuntime, params, all, stream);
  detail::finish_rows(kRuntime, params, all, stream);
}

}  // namespace

std::int64_t backward_split_workspace_bytes(const JointParams& params) {
  return detail::layout_of(params, kTarget).bytes;
}

void backward_split_sm90(const JointParams& params, void* workspace, void* stream) {
  const Problem& problem = params.problem;
  const detail::SplitLayout layout = detail::layout_of(params, kTarget);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (problem.d_qk == 576) {
    run<576>(params, layout, static_cast<char*>(workspace), queue);
  } else {
    run<512>(params, layout, static_cast<char*>(workspace), queue);
  }
}

}  // namespace winnow::sparse_mla
