// Decode, cuda: the launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/sparse_mla/decode/decode_cuda.cuh"
#include "winnow/sparse_mla/decode/decode_impl.h"
#include "winnow/sparse_mla/decode/decode_split_cuda.h"

namespace winnow::sparse_mla {
namespace {

using namespace decode_cuda_detail;

constexpr device::Runtime kRuntime{"sparse_mla::decode", "cuda"};

std::int64_t head_blocks_of(const DecodeParams& params) {
  return ceil_div<std::int64_t>(params.h_q, kHeads);
}

std::int64_t all_tiles_of(const DecodeParams& params) {
  return tiles_of<kRows>(params.chosen) + tiles_of<kRows>(params.extra);
}

Split split_of(const DecodeParams& params) {
  const std::int64_t tiles = all_tiles_of(params);
  if (params.in_list_order) return split_into(std::max<std::int64_t>(tiles, 1), tiles);
  if (params.batch_invariant) return batch_invariant_split(tiles);
  return fastest_split(tiles, params.b * params.s_q * head_blocks_of(params),
                       kRuntime.multiprocessors());
}

// Of partial sums and of partial outputs, for 64 heads of a segment.
std::int64_t sums_bytes(std::int64_t partials) {
  return device::scratch_bytes(partials * kHeads * std::int64_t{sizeof(PartialSums)});
}
constexpr std::int64_t kOutBytes = std::int64_t{kHeads} * kValueColumns * 4;

template <class D>
void launch(const KernelParams& kernel, std::uint32_t blocks, cudaStream_t stream) {
  auto* const function = decode_kernel<D>;
  kRuntime.allow_shared_memory(function, D::kBytes);
  kRuntime.launch(function, blocks, kThreads, D::kBytes, stream, kernel);
}

}  // namespace

std::int64_t decode_cuda_workspace_bytes(const DecodeParams& params) {
  std::int64_t partials = 0;
  if (params.batch_invariant || params.in_list_order) {
    const Split split = split_of(params);
    if (split.segments > 1)
      partials = params.b * params.s_q * split.segments * head_blocks_of(params);
  } else if (all_tiles_of(params) > kLeastCutTiles) {
    // As many for all that may be split, so that it does not shrink where the batch grows.
    partials = kRuntime.multiprocessors();
  }
  return sums_bytes(partials) + partials * kOutBytes;
}

void decode_cuda(const DecodeParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto count = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const Split split = split_of(params);
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
  kernel.h_q = static_cast<int>(params.h_q);
  kernel.s_q = count(params.s_q);
  kernel.head_blocks = count(head_blocks_of(params));
  kernel.segments = count(split.segments);
  kernel.segment_tiles = count(split.segment_tiles);
  kernel.paged = params.chosen.paged;
  kernel.step = static_cast<std::int32_t>(params.chosen.step);
  kernel.blocks = count(params.chosen.cache.blocks);
  kernel.partial_sums = nullptr;
  kernel.partial_out = nullptr;
  const std::int64_t blocks = queries * split.segments * kernel.head_blocks;
  if (split.segments > 1) {
    kernel.partial_sums = static_cast<PartialSums*>(workspace);
    kernel.partial_out =
        reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + sums_bytes(blocks));
  }

  using enum CacheFormat;
  const int most = kRuntime.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const auto choose = [&]<CacheFormat kFormat, int kDim>() {
    using Pipelined = DecodePlan<kFormat, kDim, 4, true>;
    // Rows in f8 leave room for four parts everywhere.
    using Small = DecodePlan<kFormat, kDim, kFormat == bf16 ? 2 : 4, false>;
    static_assert(Small::kBytes <= 99 * 1024);
    return most >= Pipelined::kBytes ? launch<Pipelined> : launch<Small>;
  };
  const auto function = params.format == fp8_656   ? choose.operator()<fp8_656, 576>()
                        : params.format == fp8_584 ? choose.operator()<fp8_584, 512>()
                        : params.d_qk == 512       ? choose.operator()<bf16, 512>()
                                                   : choose.operator()<bf16, 576>();
  function(kernel, count(blocks), queue);
  if (split.segments == 1) return;
  kRuntime.launch(merge_kernel, count(queries * params.h_q), kMergeThreads, 0, queue, kernel);
}

}  // namespace winnow::sparse_mla
