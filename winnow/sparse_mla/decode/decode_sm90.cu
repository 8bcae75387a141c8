// Decode, sm90: the launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
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

Split split_of(const DecodeParams& params) {
  const std::int64_t tiles = tiles_of<kTileRows>(params.chosen) + tiles_of<kTileRows>(params.extra);
  const auto split = params.in_list_order     ? split_of_whole_queries
                     : params.batch_invariant ? batch_invariant_split
                                              : fastest_split;
  return split(tiles, params.b * params.s_q, resident_groups_for(params));
}

constexpr std::int64_t kSumsBytes = kHeads * std::int64_t{sizeof(PartialSums)};  // of a partial
constexpr std::int64_t kPartialBytes = kHeads * kPartialRowBytes + kSumsBytes;
constexpr std::int64_t kOwnPartialBytes = kPartialBytes + kSumsBytes;  // sums of two consumers

// The partials of a split, of one block of heads: those that a second kernel merges, and those that
// groups merge themselves.
struct Partials {
  std::int64_t handed, own;
  std::int64_t bytes() const { return handed * kPartialBytes + own * kOwnPartialBytes; }
};
Partials partials_of(const Split& split, std::int64_t queries) {
  if (split.merges) {
    const std::int64_t whole = split.groups * split.group_segments / split.segments;
    return {std::max<std::int64_t>(queries - whole, 0) * split.segments,
            split.groups * (split.segments - 1)};
  }
  if (split.cut_tiles > 0) return {2 * split.groups, 0};
  return {split.segments > 1 ? queries * split.segments : 0, 0};
}

template <CacheFormat kFormat, int kDim, class Params>
void launch(const Params& kernel, bool is_short, std::uint32_t groups, cudaStream_t stream) {
  constexpr int kBytes = sizeof(DecodeLayout<kDim>);
  auto* function = decode_kernel<kFormat, kDim, false, Params>;
  if constexpr (!Params::kPaged && !Params::kMerges) {
    if (is_short) function = decode_kernel<kFormat, kDim, true, Params>;
  }
  kRuntime.allow_shared_memory(function, kBytes);
  kRuntime.launch(function, groups * kernel.head_blocks, kBlockThreads<kFormat>, kBytes, stream,
                  kernel);
}

}  // namespace

std::int64_t decode_sm90_workspace_bytes(const DecodeParams& params) {
  const std::int64_t tiles = tiles_of<kTileRows>(params.chosen) + tiles_of<kTileRows>(params.extra);
  const std::int64_t groups = resident_groups_for(params), queries = params.b * params.s_q;
  const Split split = split_of(params);
  std::int64_t bytes = 0;
  if (params.in_list_order || tiles <= 1) return 0;
  if (!params.batch_invariant) {
    // As many for all that may be split, so that it does not shrink where the batch grows.
    bytes = 2 * groups * kPartialBytes;
  } else if (split.segments > 1) {
    // Nor does it here, or where the lists grow.
    constexpr std::int64_t kFew = Split::kFewParts;
    const std::int64_t few = std::min(split.segments, kFew);
    if (queries < groups || split.segments > kFew) {
      bytes = partials_of(split_whole(split.segments, 1, queries, groups), queries).bytes();
    }
    if (queries >= groups) {
      const Partials most{(groups - 1) * few, std::max(groups, split.groups) * (few - 1)};
      bytes = std::max(bytes, most.bytes());
    }
  }
  return bytes * head_blocks_of(params);
}

void decode_sm90(const DecodeParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const Split split = split_of(params);
  KernelParams kernel;
  kernel.chosen[0] = chosen_view<kTileRows>(params, params.chosen);
  kernel.chosen[1] = chosen_view<kTileRows>(params, params.extra);
  kernel.q = heads_view(params.q, 2);
  kernel.out = heads_view(params.out, 2);
  kernel.lse = heads_view(params.lse, 4);
  kernel.attn_sink = params.attn_sink.data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  kernel.scale = logit_scale(params.scale);
  kernel.h_q = static_cast<int>(params.h_q);
  kernel.s_q = static_cast<std::uint32_t>(params.s_q);
  const std::int64_t queries = params.b * params.s_q;
  const auto count = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  kernel.head_blocks = count(head_blocks_of(params));
  kernel.segments = count(split.segments);
  kernel.segment_tiles = count(split.segment_tiles);
  kernel.query_tiles = kernel.segments * kernel.segment_tiles;
  kernel.group_segments = count(split.group_segments);
  const std::int64_t whole =
      std::min(split.groups * split.group_segments, queries * split.segments);
  const std::int64_t whole_queries = whole / split.segments;
  const bool cuts = split.cut_tiles > 0 || split.merges;
  const std::int64_t cut = cuts ? queries - whole_queries : 0;
  kernel.whole_segments = count(whole);
  kernel.cut_tiles = count(split.cut_tiles);
  kernel.cut_query = cuts ? count(whole_queries) : 0;
  kernel.cut_end = count(cut * (split.merges ? split.segments : split.segment_tiles));
  const Partials partials = partials_of(split, queries);
  const std::int64_t partial_count = (partials.handed + partials.own) * head_blocks_of(params);
  const bool is_short = split.is_short() && !params.chosen.paged;
  kernel.partials_in_pairs = is_short;
  kernel.partial_out = static_cast<char*>(workspace);
  kernel.partial_sums = reinterpret_cast<PartialSums*>(static_cast<std::byte*>(workspace) +
                                                       partial_count * kHeads * kPartialRowBytes);

  // `all`: with what only some calls need.
  const auto launch_all = [&]<class Params>(const Params& all) {
    using enum CacheFormat;
    const auto function = [&] {
      if constexpr (Params::kPaged) {
        return params.format == fp8_656 ? launch<fp8_656, 576, Params> : launch<bf16, 576, Params>;
      } else {
        return params.format == fp8_656   ? launch<fp8_656, 576, Params>
               : params.format == fp8_584 ? launch<fp8_584, 512, Params>
               : params.d_qk == 576       ? launch<bf16, 576, Params>
                                          : launch<bf16, 512, Params>;
      }
    }();
    function(all, is_short, count(split.groups), queue);
  };
  const auto launch_merging = [&]<class Base>(const Base& base) {
    if (!split.merges) return launch_all(base);
    launch_all(MergingParams<Base>{
        base, count(split.cut_segments), count(partials.handed),
        kernel.partial_sums + partials.handed * head_blocks_of(params) * kHeads});
  };
  if (params.chosen.paged) {
    launch_merging(PagedKernelParams{kernel, static_cast<std::int32_t>(params.chosen.step),
                                     count(params.chosen.cache.blocks)});
  } else {
    launch_merging(kernel);
  }
  const std::int64_t merged = split.segments > 1 && !split.merges ? queries : cut;
  if (merged == 0) return;
  const bool few = split.most_parts() <= kFewParts;
  const std::int64_t blocks = few ? round_up_div(params.h_q, kFewHeads) : params.h_q;
  kRuntime.check(device::launch_early(few ? merge_few_kernel : merge_kernel, count(merged * blocks),
                                      kMergeThreads, 0, queue, kernel),
                 "launch of the merge");
}

}  // namespace winnow::sparse_mla
