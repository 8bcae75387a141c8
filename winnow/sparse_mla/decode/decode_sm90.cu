// Decode, sm90: the launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/decode/decode_chain_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_impl.h"
#include "winnow/sparse_mla/decode/decode_merge_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_split_sm90.h"

namespace winnow::sparse_mla {

namespace {

using namespace decode_sm90_detail;

constexpr device::Runtime kRuntime{"sparse_mla::decode", "sm90"};

std::int64_t head_blocks_of(const DecodeParams& params) {
  return (params.h_q + kHeads - 1) / kHeads;
}

std::int64_t resident_groups_for(const DecodeParams& params) {
  return resident_groups(head_blocks_of(params), kRuntime.multiprocessors());
}

std::int64_t tiles_of(const DecodeParams& params) {
  return tiles_of<kTileRows>(params.chosen) + tiles_of<kTileRows>(params.extra);
}

// Whether every sum of a query is formed in one go.
bool is_chain(const DecodeParams& params) { return params.batch_invariant || params.in_list_order; }

Split split_of(const DecodeParams& params) {
  const auto split = is_chain(params) ? split_of_whole_queries : fastest_split;
  return split(tiles_of(params), params.b * params.s_q, resident_groups_for(params));
}

constexpr std::int64_t kPartialBytes =  // of a block of 64 heads
    kHeads * (kPartialRowBytes + std::int64_t{sizeof(PartialSums)});
constexpr std::int64_t kMaximaBytes = kHeads * std::int64_t{sizeof(float)};  // of a chain's tile

std::uint32_t count(std::int64_t value) { return static_cast<std::uint32_t>(value); }

// What all kernels take.
KernelParams params_of(const DecodeParams& params) {
  KernelParams kernel;
  kernel.chosen[0] = chosen_view<kTileRows>(params, params.chosen);
  kernel.chosen[1] = chosen_view<kTileRows>(params, params.extra);
  kernel.q = heads_view(params.q, 2);
  kernel.out = heads_view(params.out, 2);
  kernel.lse = heads_view(params.lse, 4);
  kernel.attn_sink = params.attn_sink.data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  kernel.scale = logit_scale(params.scale);
  kernel.lse_of_nothing = params.lse_of_nothing;
  kernel.h_q = static_cast<int>(params.h_q);
  kernel.s_q = count(params.s_q);
  kernel.head_blocks = count(head_blocks_of(params));
  kernel.cut_tiles = kernel.cut_query = kernel.cut_end = 0;
  kernel.partial_out = nullptr;
  kernel.partial_sums = nullptr;
  kernel.partials_in_pairs = false;
  return kernel;
}

// Calls launch(all), and it launch.operator()<format, columns>(all): all params, with what only
// calls with block tables need.
template <class Launch>
void with_kind(const DecodeParams& params, const KernelParams& kernel, const Launch& launch) {
  using enum CacheFormat;
  if (params.chosen.paged) {
    const PagedKernelParams paged{kernel, static_cast<std::int32_t>(params.chosen.step),
                                  count(params.chosen.cache.blocks), params.q_scale,
                                  params.kv_scale};
    if (params.format == fp8_656) return launch.template operator()<fp8_656, 576>(paged);
    if (params.format == fp8_576) return launch.template operator()<fp8_576, 576>(paged);
    return launch.template operator()<bf16, 576>(paged);
  }
  if (params.format == fp8_656) return launch.template operator()<fp8_656, 576>(kernel);
  if (params.format == fp8_584) return launch.template operator()<fp8_584, 512>(kernel);
  if (params.d_qk == 576) return launch.template operator()<bf16, 576>(kernel);
  return launch.template operator()<bf16, 512>(kernel);
}

template <CacheFormat kFormat, int kDim, bool kShort, class Params>
void launch(const Params& params, std::uint32_t blocks, cudaStream_t queue) {
  constexpr int kBytes = sizeof(DecodeLayout<kDim>);
  auto* const function = decode_kernel<kFormat, kDim, kShort, Params>;
  kRuntime.allow_shared_memory(function, kBytes);
  kRuntime.launch(function, blocks, kBlockThreads<kFormat>, kBytes, queue, params);
}

// One block or some for each query and head block, and where queries are cut a second kernel.
void run_split(const DecodeParams& params, void* workspace, cudaStream_t queue) {
  const Split split = split_of(params);
  KernelParams kernel = params_of(params);
  const std::int64_t queries = params.b * params.s_q;
  kernel.segments = 1;
  kernel.segment_tiles = kernel.query_tiles = count(split.query_tiles);
  kernel.group_segments = count(split.group_queries);
  const std::int64_t whole = std::min(split.groups * split.group_queries, queries);
  const std::int64_t cut = split.cut_tiles > 0 ? queries - whole : 0;
  kernel.whole_segments = count(whole);
  kernel.cut_tiles = count(split.cut_tiles);
  kernel.cut_query = cut > 0 ? count(whole) : 0;
  kernel.cut_end = count(cut * split.query_tiles);
  const std::int64_t partials = cut > 0 ? 2 * split.groups * kernel.head_blocks : 0;
  const bool is_short = split.is_short() && !params.chosen.paged;
  kernel.partials_in_pairs = is_short;
  kernel.partial_out = static_cast<char*>(workspace);
  kernel.partial_sums = reinterpret_cast<PartialSums*>(static_cast<std::byte*>(workspace) +
                                                       partials * kHeads * kPartialRowBytes);
  with_kind(params, kernel, [&]<CacheFormat kFormat, int kDim, class Params>(const Params& all) {
    const std::uint32_t blocks = count(split.groups) * kernel.head_blocks;
    if constexpr (!Params::kPaged) {
      if (is_short) return launch<kFormat, kDim, true>(all, blocks, queue);
    }
    launch<kFormat, kDim, false>(all, blocks, queue);
  });
  if (cut == 0) return;
  const bool few = split.most_parts() <= kFewParts;
  const std::int64_t blocks = few ? round_up_div(params.h_q, kFewHeads) : params.h_q;
  kRuntime.check(device::launch_early(few ? merge_few_kernel : merge_kernel, count(cut * blocks),
                                      kMergeThreads, 0, queue, kernel),
                 "launch of the merge");
}

// Many blocks for each, in three kernels.
void run_chain(const DecodeParams& params, void* workspace, cudaStream_t queue) {
  const std::int64_t tiles = tiles_of(params), queries = params.b * params.s_q;
  const std::int64_t head_blocks = head_blocks_of(params), items = queries * head_blocks;
  const ChainSplit split = chain_split(tiles, queries, head_blocks, kRuntime.multiprocessors());
  KernelParams kernel = params_of(params);
  kernel.group_segments = 1;
  const auto with_segments = [&](std::int64_t segments, std::int64_t segment_tiles) {
    kernel.segments = count(segments);
    kernel.segment_tiles = count(segment_tiles);
    kernel.query_tiles = count(segments * segment_tiles);
    kernel.whole_segments = count(queries * segments);
  };
  auto* const chain = static_cast<char*>(workspace);
  auto* const maxima = reinterpret_cast<float*>(chain + items * tiles * kChainTileBytes);
  with_segments(split.segments, split.segment_tiles);
  with_kind(params, kernel, [&]<CacheFormat kFormat, int kDim, class Params>(const Params& all) {
    const ChainParams<Params, true> logits{all, chain, maxima, count(tiles), 0};
    launch<kFormat, kDim, true>(logits, count(items * split.segments), queue);
  });
  with_segments(1, tiles);
  with_kind(params, kernel, [&]<CacheFormat kFormat, int kDim, class Params>(const Params& all) {
    const ChainParams<Params, false> rest{all, chain, maxima, count(tiles), count(split.run_tiles)};
    const dim3 runs(count(items), count(round_up_div(tiles, split.run_tiles)));
    kRuntime.check(device::launch_early(weights_kernel<ChainParams<Params, false>>, runs,
                                        kWeightsThreads, 0, queue, rest),
                   "launch of the weights");
    const auto values = [&](auto* function) {
      constexpr int kBytes = sizeof(ValuesLayout);
      kRuntime.allow_shared_memory(function, kBytes);
      kRuntime.check(device::launch_early(function, dim3(count(items), count(split.column_blocks)),
                                          kValuesThreads<kFormat>, kBytes, queue, rest),
                     "launch of the values");
    };
    using Rest = ChainParams<Params, false>;
    if (split.column_blocks == 8) {
      values(values_kernel<kFormat, kDim, 1, Rest>);
    } else {
      values(values_kernel<kFormat, kDim, 2, Rest>);
    }
  });
}

bool runs_side_by_side(const DecodeParams& params) {
  return is_chain(params) &&
         works_side_by_side(tiles_of(params), params.b * params.s_q * head_blocks_of(params),
                            kRuntime.multiprocessors());
}

}  // namespace

// None of them shrinks where there are more sequences, queries or entries.
std::int64_t decode_sm90_workspace_bytes(const DecodeParams& params) {
  const std::int64_t tiles = tiles_of(params);
  if (is_chain(params)) {
    return chain_tiles_for(tiles, params.b * params.s_q * head_blocks_of(params),
                           kRuntime.multiprocessors()) *
           (kChainTileBytes + kMaximaBytes);
  }
  if (tiles <= 1) return 0;
  return 2 * resident_groups_for(params) * kPartialBytes * head_blocks_of(params);
}

void decode_sm90(const DecodeParams& params, void* workspace, void* stream) {
  const auto run = runs_side_by_side(params) ? run_chain : run_split;
  run(params, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::sparse_mla
