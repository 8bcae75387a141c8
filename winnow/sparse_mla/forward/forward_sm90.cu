// Top-k sparse MLA attention, forward, sm90: the launch.
#include <algorithm>
#include <bit>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/forward/forward_sm90.cuh"

namespace winnow::sparse_mla {

namespace {

using forward_sm90_detail::Entries;
using forward_sm90_detail::flag_bytes;
using forward_sm90_detail::KernelParams;
using forward_sm90_detail::ParamsOf;

constexpr device::Runtime kRuntime{"sparse_mla::forward", "sm90"};

std::int64_t head_blocks_of(const Problem& problem) {
  return (problem.h_q + attention_sm90::kHeads - 1) / attention_sm90::kHeads;
}

// Rows of a cache that outgrows L2 are read range after range. Two blocks of heads read the rows of
// a query at the same time anyway, and gain nothing. Measured on an H100 with 64 heads: 1.08, 1.2
// and 1.38 times as fast with 49,152, 65,536 and 131,072 rows.
constexpr std::int64_t kRowsInL2 = 40960;
Entries entries_of(const ForwardParams& params) {
  const Problem& problem = params.problem;
  if (problem.extra.kv.present()) return Entries::two;
  if (problem.dense) return Entries::range;
  const bool listed =
      params.in_list_order || head_blocks_of(problem) > 1 || problem.s_kv <= kRowsInL2;
  return listed ? Entries::listed : Entries::ordered;
}
int order_shift(const Problem& problem) {
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(problem.s_kv - 1))) -
         static_cast<int>(std::bit_width(unsigned{kOrderRanges} - 1));
}

// Where two blocks of heads read rows that mostly come from memory, they ask for them earlier. It
// wants neighbouring blocks to have the same query. Where rows are in L2 it costs 1 %.
bool prefetches(const Problem& problem, std::int64_t head_blocks) {
  return !problem.dense && head_blocks == 2 && problem.s_kv > kRowsInL2;
}

std::int64_t tiles_of(std::int64_t entries) { return (entries + kTileRows - 1) / kTileRows; }

// Where rows are read in their order the items stay whole, since blocks that began with a part
// would not walk through the cache with the others: 2.6 instead of 2.4 ms with 131,072 rows. So
// they do where a range stands beside another source, as a window of few rows of many: how many
// tiles there are shows when the kernel runs.
forward_sm90_detail::Rounds rounds_of(const ForwardParams& params, bool may_hand_on) {
  const Problem& problem = params.problem;
  const std::int64_t head_blocks = head_blocks_of(problem);
  const auto items = static_cast<std::uint32_t>(problem.s_q * head_blocks);
  const std::uint32_t blocks =
      std::min(items, static_cast<std::uint32_t>(kRuntime.multiprocessors()));
  const Source& extra = problem.extra;
  const std::int64_t tiles = tiles_of(problem.topk) + tiles_of(extra.topk);
  const bool whole = entries_of(params) == Entries::ordered ||
                     (extra.kv.present() && (problem.dense || extra.dense));
  return forward_sm90_detail::make_rounds(items, blocks, tiles, may_hand_on && !whole);
}

void fill(KernelParams& kernel, const ForwardParams& params, void* workspace) {
  const Problem& problem = params.problem;
  const std::int64_t head_blocks = head_blocks_of(problem);
  kernel.kv = gather_view(problem);
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.q_stride0 = problem.q.stride0 * 2;
  kernel.q_stride1 = problem.q.stride1 * 2;
  kernel.out = static_cast<char*>(params.out.data);
  kernel.out_stride0 = params.out.stride0 * 2;
  kernel.out_stride1 = params.out.stride1 * 2;
  kernel.max_logits = params.max_logits.as<float>().data;
  kernel.max_logits_stride0 = params.max_logits.stride0;
  kernel.max_logits_stride1 = params.max_logits.stride1;
  kernel.lse = params.lse.as<float>().data;
  kernel.lse_stride0 = params.lse.stride0;
  kernel.lse_stride1 = params.lse.stride1;
  kernel.attn_sink = params.attn_sink.as<const float>().data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  kernel.scale = attention_sm90::logit_scale(problem.scale);
  kernel.lse_of_nothing = params.lse_of_nothing;
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.head_blocks = static_cast<std::uint32_t>(head_blocks);
  kernel.rounds = rounds_of(params, workspace != nullptr);
  kernel.handed = static_cast<char*>(workspace);
  kernel.ranges = range_view(problem);
  kernel.order_shift = order_shift(problem);
  kernel.prefetch = prefetches(problem, head_blocks);
}

template <int kDim, Entries kEntries, bool kAsDecode>
void launch(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  ParamsOf<kEntries> kernel{};
  fill(kernel, params, workspace);
  if constexpr (kEntries == Entries::two) kernel.sources = two_sources(params.problem);
  constexpr int kBytes = forward_sm90_detail::kSharedBytes<kDim, kEntries, kAsDecode>;
  auto* const function = forward_sm90_detail::forward_kernel<kDim, kEntries, kAsDecode>;
  kRuntime.allow_shared_memory(function, kBytes);
  if (kernel.rounds.chunk > 0) {
    const auto flags = static_cast<std::size_t>(flag_bytes(kernel.rounds.blocks));
    kRuntime.check(cudaMemsetAsync(kernel.handed, 0, flags, stream), "cudaMemsetAsync");
  }
  kRuntime.launch(function, kernel.rounds.blocks, attention_sm90::kThreads, kBytes, stream, kernel);
}

template <int kDim, bool kAsDecode>
void launch(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  switch (entries_of(params)) {
    case Entries::listed:
      return launch<kDim, Entries::listed, kAsDecode>(params, workspace, stream);
    case Entries::ordered:  // never kAsDecode
      return launch<kDim, Entries::ordered, false>(params, workspace, stream);
    case Entries::range:
      return launch<kDim, Entries::range, kAsDecode>(params, workspace, stream);
    case Entries::two:
      return launch<kDim, Entries::two, kAsDecode>(params, workspace, stream);
  }
}

}  // namespace

std::int64_t forward_sm90_workspace_bytes(const ForwardParams& params) {
  const forward_sm90_detail::Rounds rounds = rounds_of(params, true);
  return rounds.chunk > 0 ? forward_sm90_detail::handed_bytes(rounds.blocks) : 0;
}

void forward_sm90(const ForwardParams& params, void* workspace, void* stream) {
  // With 512 columns all kernels have the order of decode.
  const auto function = params.problem.d_qk == 512 ? launch<512, false>
                        : params.in_list_order     ? launch<576, true>
                                                   : launch<576, false>;
  function(params, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::sparse_mla
