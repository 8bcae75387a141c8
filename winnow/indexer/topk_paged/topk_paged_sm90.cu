// The choice of rows from a paged cache, sm90: workspace and launches.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "winnow/device/common/scratch.h"
#include "winnow/device/sm90/tensor_map.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"
#include "winnow/indexer/topk_paged/topk_paged_sm90.cuh"

namespace winnow::indexer {
namespace {

using namespace sm90_detail;

constexpr device::Runtime kRuntime{"indexer::topk_paged", "sm90"};

// How a call is cut into launches, and what lies where in the workspace, which they share.
struct Work {
  std::int64_t groups_of_a_sequence;
  std::int64_t groups;    // of a launch at most
  std::int64_t capacity;  // candidates of a buffer
  int blocks;
  std::int64_t count_offset, pieces_offset, bytes;  // candidate buffers begin at 0
};

template <class Shape>
Work plan(const TopkPagedParams& params) {
  constexpr std::int64_t kQueries = Shape::kQueries;
  Work work{};
  work.groups_of_a_sequence = (params.s_q + kQueries - 1) / kQueries;
  const std::int64_t rows = std::max<std::int64_t>(params.table * kPagedPageRows, 1);
  // What may wait is never more than there are rows.
  work.capacity = std::min(candidate_capacity(params.topk), (rows + 255) / 128 * 128);
  // Every piece has buffers, and there are fewer pieces than blocks and groups.
  constexpr std::int64_t kBuffers = Shape::kParts * kQueries;
  const std::int64_t piece_bytes =
      kBuffers * (work.capacity * std::int64_t{sizeof(Candidate)} + std::int64_t{4});
  const std::int64_t most_pieces =
      std::max<std::int64_t>(2, (kWorkspaceLimit - (1 << 16)) / piece_bytes);
  work.blocks = static_cast<int>(std::clamp<std::int64_t>(
      kRuntime.multiprocessors(), 1,
      std::min<std::int64_t>(most_pieces / 2, kMergeParts / Shape::kParts)));
  const std::int64_t tiles = (rows + kPagedTileRows - 1) / kPagedTileRows;
  work.groups = std::min({params.b * work.groups_of_a_sequence, std::int64_t{kMostGroups},
                          most_pieces - work.blocks, (std::int64_t{1} << 30) / tiles});
  const std::int64_t pieces = work.blocks + work.groups;
  work.count_offset =
      device::scratch_bytes(pieces * kBuffers * work.capacity * std::int64_t{sizeof(Candidate)});
  work.pieces_offset = work.count_offset + device::scratch_bytes(pieces * kBuffers * 4);
  work.bytes = work.pieces_offset +
               device::scratch_bytes(work.groups * static_cast<std::int64_t>(sizeof(GroupPieces)));
  return work;
}

// Pages as the tensor memory accelerator sees them, whose strides are above 0.
void describe_pages(const TopkPagedParams& params, PagedParams& p) {
  const std::int64_t stride = params.pages.stride0;
  const bool many = params.num_pages > 1 && stride != 0;
  p.map_step = !many ? 0 : stride > 0 ? 1 : -1;
  p.map_first = p.map_step < 0 ? static_cast<int>(params.num_pages - 1) : 0;
  p.page_base = params.pages.data + (p.map_step < 0 ? p.map_first * stride : 0);
  p.page_stride = many ? std::abs(stride) : page_bytes(params.d);
  if (params.num_pages == 0) return;
  const auto d = static_cast<std::uint64_t>(params.d);
  // Columns beyond d read as zeros.
  const device::MapDim dims[] = {{d, 0, kPanelRowBytes},
                                 {kPagedPageRows, d, kPagedPageRows},
                                 {many ? static_cast<std::uint64_t>(params.num_pages) : 1,
                                  static_cast<std::uint64_t>(p.page_stride), 1}};
  p.pages = device::tensor_map(kRuntime, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.page_base, dims);
}

template <class Shape>
void launch(const TopkPagedParams& params, char* workspace, cudaStream_t stream) {
  const Work work = plan<Shape>(params);
  PagedParams p{};
  describe_pages(params, p);
  p.q = static_cast<const std::uint8_t*>(params.q.data);
  p.q_stride0 = params.q.stride0;
  p.q_stride1 = params.q.stride1;
  p.q_head_stride = params.q_head_stride;
  p.weights = params.weights.data;
  p.weights_stride0 = params.weights.stride0;
  p.weights_stride1 = params.weights.stride1;
  p.weights_are_bf16 = params.weights_dtype == DType::bf16;
  p.block_tables = params.block_tables.data;
  p.block_tables_stride = params.block_tables.stride0;
  p.h = static_cast<int>(params.h);
  p.d = static_cast<int>(params.d);
  p.num_pages = static_cast<int>(params.num_pages);
  p.line.context_lens = params.context_lens.data;
  p.line.context_stride = params.context_lens.stride0;
  p.line.groups_of_a_sequence = static_cast<int>(work.groups_of_a_sequence);
  p.line.queries = Shape::kQueries;
  p.line.s_q = params.s_q;
  p.line.table = params.num_pages == 0 ? 0 : static_cast<int>(params.table);
  p.pieces = reinterpret_cast<GroupPieces*>(workspace + work.pieces_offset);
  p.candidates = reinterpret_cast<Candidate*>(workspace);
  p.part_count = reinterpret_cast<std::int32_t*>(workspace + work.count_offset);
  p.capacity = static_cast<int>(work.capacity);
  p.topk = static_cast<int>(params.topk);
  p.later_ties = params.later_ties;

  PagedMergeParams merge{};
  merge.parts = p.candidates;
  merge.part_count = p.part_count;
  merge.kept = p.capacity;
  merge.topk = p.topk;
  merge.later_ties = p.later_ties;
  merge.s_q = params.s_q;
  merge.groups_of_a_sequence = work.groups_of_a_sequence;
  merge.queries_of_group = Shape::kQueries;
  merge.parts_of_piece = Shape::kParts;
  merge.pieces = p.pieces;
  merge.block_tables = p.block_tables;
  merge.block_tables_stride = p.block_tables_stride;
  merge.num_pages = p.num_pages;
  merge.positions = params.positions;
  merge.indices = params.indices.data;
  merge.indices_stride0 = params.indices.stride0;
  merge.indices_stride1 = params.indices.stride1;
  merge.length = params.length.data;
  merge.length_stride0 = params.length.stride0;
  merge.length_stride1 = params.length.stride1;
  merge.scores = params.scores.data;
  merge.scores_stride0 = params.scores.stride0;
  merge.scores_stride1 = params.scores.stride1;

  constexpr int kBytes = PagedPlan<Shape>::kBytes;
  kRuntime.allow_shared_memory(topk_paged_kernel<Shape>, kBytes);
  const std::int64_t all = params.b * work.groups_of_a_sequence;
  // The query with which a group begins.
  const auto first_query = [&](std::int64_t group) {
    return group / work.groups_of_a_sequence * params.s_q +
           group % work.groups_of_a_sequence * Shape::kQueries;
  };
  for (std::int64_t group = 0; group < all; group += work.groups) {
    const std::int64_t end = std::min(group + work.groups, all);
    p.line.first_group = merge.first_group = group;
    p.line.groups = static_cast<int>(end - group);
    merge.first_query = first_query(group);
    merge.queries = static_cast<int>(first_query(end) - merge.first_query);
    kRuntime.check(
        device::launch_early(topk_paged_kernel<Shape>, static_cast<unsigned>(work.blocks),
                             Shape::kThreads, kBytes, stream, p),
        "launch");
    launch_merge(kRuntime, merge, params.table * kPagedPageRows, stream);
  }
}

// Calls function(Shape()) with the shape for the heads, which are padded to 16, 32, 64 or 128, and
// as few columns as hold those of all queries, or the most that there are.
template <int kHeads, class Function>
void with_columns(std::int64_t s_q, const Function& function) {
  if constexpr (kHeads <= 64) {
    if (s_q * kHeads <= 64) return function(PagedShape<kHeads, 64>());
  }
  if constexpr (kHeads == 64) {
    if (s_q * kHeads > 128) return function(PagedShape<kHeads, 256>());
  }
  return function(PagedShape<kHeads, 128>());
}
template <class Function>
void with_paged_shape(const TopkPagedParams& params, const Function& function) {
  if (params.h > 64) return with_columns<128>(params.s_q, function);
  if (params.h > 32) return with_columns<64>(params.s_q, function);
  if (params.h > 16) return with_columns<32>(params.s_q, function);
  return with_columns<16>(params.s_q, function);
}

}  // namespace

std::int64_t topk_paged_sm90_workspace_bytes(const TopkPagedParams& params) {
  std::int64_t bytes = 0;
  with_paged_shape(params, [&](auto shape) { bytes = plan<decltype(shape)>(params).bytes; });
  return bytes;
}

void topk_paged_sm90(const TopkPagedParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, topk_paged_sm90_workspace_bytes(params),
                                queue);
  with_paged_shape(params, [&](auto shape) {
    launch<decltype(shape)>(params, static_cast<char*>(scratch.data()), queue);
  });
}

}  // namespace winnow::indexer
