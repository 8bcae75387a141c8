// Decode, cuda: the launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/sparse_mla/decode/decode_few_cuda.cuh"
#include "winnow/sparse_mla/decode/decode_impl.h"
#include "winnow/sparse_mla/decode/decode_split_cuda.h"

namespace winnow::sparse_mla {
namespace {

using namespace decode_cuda_detail;

constexpr device::Runtime kRuntime{"sparse_mla::decode", "cuda"};
constexpr int kLeastShared = 99 * 1024;  // of a block, on every GPU

// The blocks of a call, whose kernel has so many heads of a query in each.
struct Blocks {
  void (*kernel)(KernelParams);
  int threads, heads, bytes;
  int resident;  // of a multiprocessor
};

template <class D>
Blocks blocks_of(int most_shared) {
  using P = typename D::Attention;
  static_assert(P::kWarps == 8 || D::kBytes <= kLeastShared);
  constexpr int kReserved = 1024;  // bytes, of each block
  return {decode_kernel<D>, P::kThreads, P::kHeads, D::kBytes,
          std::clamp((most_shared + kReserved) / (D::kBytes + kReserved), 1, D::kResident)};
}

template <class D>
Blocks blocks_of_few() {
  return {few_kernel<D>, D::kThreads, D::kHeads, D::kBytes, 1};
}

Blocks choose_blocks(const DecodeParams& params) {
  using enum CacheFormat;
  const int most = kRuntime.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  // Rows in bf16: in as many parts as forward() has them, whose bits those of in_list_order are.
  const auto choose = [&]<int kDim>() {
    using Pipelined = DecodePlan<bf16, kDim, 4, true, 64>;
    using Few = DecodePlan<bf16, kDim, 4, false, 32>;
    using Small = DecodePlan<bf16, kDim, 2, false, 64>;
    using FewSmall = DecodePlan<bf16, kDim, 2, false, 32>;
    static_assert(Small::kBytes <= kLeastShared);
    const bool four_parts = most >= AttendPlan<DType::bf16, kDim, 4, false>::kBytes;
    if (params.h_q <= Few::Attention::kHeads)
      return four_parts ? blocks_of<Few>(most) : blocks_of<FewSmall>(most);
    if (!four_parts) return blocks_of<Small>(most);
    return most >= Pipelined::kBytes ? blocks_of<Pipelined>(most) : blocks_of<Few>(most);
  };
  const auto choose_raw = [&]<CacheFormat kFormat, int kDim>() {
    using Pipelined = DecodePlan<kFormat, kDim, 4, true, 64>;
    using Small = DecodePlan<kFormat, kDim, 4, false, 64>;
    using TwoTeams = FewPlan<kFormat, kDim, 2>;
    using OneTeam = FewPlan<kFormat, kDim, 1>;
    static_assert(Small::kBytes <= kLeastShared && OneTeam::kBytes <= kLeastShared);
    if (params.h_q <= 2 * kFewHeads) {
      // In list order a sum is one chain, which two teams would cut.
      const bool two = most >= TwoTeams::kBytes && !params.in_list_order;
      return two ? blocks_of_few<TwoTeams>() : blocks_of_few<OneTeam>();
    }
    return most >= Pipelined::kBytes ? blocks_of<Pipelined>(most) : blocks_of<Small>(most);
  };
  if (params.format == fp8_656) return choose_raw.operator()<fp8_656, 576>();
  if (params.format == fp8_584) return choose_raw.operator()<fp8_584, 512>();
  return params.d_qk == 512 ? choose.operator()<512>() : choose.operator()<576>();
}

std::int64_t head_blocks_of(const DecodeParams& params, const Blocks& blocks) {
  return ceil_div<std::int64_t>(params.h_q, blocks.heads);
}

std::int64_t all_tiles_of(const DecodeParams& params) {
  return tiles_of<kRows>(params.chosen) + tiles_of<kRows>(params.extra);
}

// That run at a time.
std::int64_t resident_blocks(const Blocks& blocks) {
  return std::int64_t{kRuntime.multiprocessors()} * blocks.resident;
}

Split split_of(const DecodeParams& params, const Blocks& blocks) {
  const std::int64_t tiles = all_tiles_of(params);
  if (params.in_list_order) return split_into(std::max<std::int64_t>(tiles, 1), tiles);
  if (params.batch_invariant) return batch_invariant_split(tiles);
  return fastest_split(tiles, params.b * params.s_q * head_blocks_of(params, blocks),
                       resident_blocks(blocks));
}

// Of the partial sums of so many heads of a segment.
std::int64_t sums_bytes(std::int64_t heads) {
  return device::scratch_bytes(heads * std::int64_t{sizeof(PartialSums)});
}

}  // namespace

std::int64_t decode_cuda_workspace_bytes(const DecodeParams& params) {
  const Blocks blocks = choose_blocks(params);
  std::int64_t partials = 0;
  if (params.batch_invariant || params.in_list_order) {
    const Split split = split_of(params, blocks);
    if (split.segments > 1)
      partials = params.b * params.s_q * split.segments * head_blocks_of(params, blocks);
  } else if (all_tiles_of(params) > kLeastCutTiles) {
    // As many for all that may be split, so that it does not shrink where the batch grows.
    partials = resident_blocks(blocks);
  }
  const std::int64_t heads = partials * blocks.heads;
  return sums_bytes(heads) + heads * kValueColumns * 4;
}

void decode_cuda(const DecodeParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto count = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const Blocks blocks = choose_blocks(params);
  const Split split = split_of(params, blocks);
  const std::int64_t queries = params.b * params.s_q;
  KernelParams kernel;
  kernel.chosen[0] = chosen_view<kRows>(params, params.chosen);
  kernel.chosen[1] = chosen_view<kRows>(params, params.extra);
  kernel.q = heads_view(params.q, 2);
  kernel.out = heads_view(params.out, 2);
  kernel.lse = heads_view(params.lse, 4);
  kernel.attn_sink = params.attn_sink.data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  kernel.scale = params.scale * device::kLog2e;
  kernel.lse_of_nothing = params.lse_of_nothing;
  kernel.h_q = static_cast<int>(params.h_q);
  kernel.s_q = count(params.s_q);
  kernel.head_blocks = count(head_blocks_of(params, blocks));
  kernel.padded_heads = kernel.head_blocks * count(blocks.heads);
  kernel.segments = count(split.segments);
  kernel.segment_tiles = count(split.segment_tiles);
  kernel.paged = params.chosen.paged;
  kernel.step = static_cast<std::int32_t>(params.chosen.step);
  kernel.blocks = count(params.chosen.cache.blocks);
  kernel.partial_sums = nullptr;
  kernel.partial_out = nullptr;
  const std::int64_t parts = queries * split.segments;
  if (split.segments > 1) {
    kernel.partial_sums = static_cast<PartialSums*>(workspace);
    kernel.partial_out = reinterpret_cast<float*>(static_cast<std::byte*>(workspace) +
                                                  sums_bytes(parts * kernel.padded_heads));
  }
  kRuntime.allow_all_shared_memory(blocks.kernel, blocks.bytes);
  kRuntime.launch(blocks.kernel, count(parts * kernel.head_blocks), blocks.threads, blocks.bytes,
                  queue, kernel);
  if (split.segments == 1) return;
  kRuntime.launch(merge_kernel, count(queries * params.h_q), kMergeThreads, 0, queue, kernel);
}

}  // namespace winnow::sparse_mla
