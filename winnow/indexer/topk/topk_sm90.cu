// The indexer's choice of rows, sm90: workspace and launches.
#include <algorithm>
#include <cstdint>

#include "winnow/device/common/scratch.h"
#include "winnow/indexer/score_launch_sm90.h"
#include "winnow/indexer/scores/scores_impl.h"
#include "winnow/indexer/topk/choose_sm90.cuh"
#include "winnow/indexer/topk/choose_stored.h"
#include "winnow/indexer/topk/merge_sm90.cuh"
#include "winnow/indexer/topk/topk_impl.h"
#include "winnow/indexer/topk/topk_sm90.cuh"

namespace winnow::indexer {
namespace {

using namespace sm90_detail;

constexpr device::Runtime kRuntime{"indexer::topk", "sm90"};

// ---- Few rows or queries: their scores are stored, and a second kernel chooses ----

// Products hide a choice that is made beside them better the more rows there are and the longer
// their products take, and worst where few queries leave multiprocessors idle
// (docs/notes/indexer.md).
bool stores_scores(const Problem& problem) {
  // Of few queries clusters of blocks choose, from as many rows as the workspace may hold.
  if (problem.s_q <= kRuntime.multiprocessors() / 8 && problem.s_k <= kWorkspaceLimit / 8) {
    return true;
  }
  const bool hidden = problem.dtype == DType::bf16 && problem.s_q > kRuntime.multiprocessors();
  return problem.s_k <= (hidden ? kMostStoredRows / 2 : kMostStoredRows);
}

void choose_from_stored(const TopkParams& params, float* stored, cudaStream_t stream) {
  for_each_stored_turn(params, stored, [&](const Problem& problem, const ChooseParams& choose) {
    if (problem.s_k > 0) {
      dense_scores_sm90(problem, {.data = stored, .stride0 = choose.stored_stride}, DenseRows::seen,
                        stream);
    }
    if (problem.s_k > kMostStoredRows) {
      launch_spread_choice(kRuntime, choose, problem.s_q, stream);
    } else {
      launch_choice(kRuntime, choose, problem.s_q, warps_for(problem.s_k), stream);
    }
  });
}

// ---- Many rows: candidates are kept while scores are formed ----

// How the work is cut, and what lies where in the workspace.
struct Work {
  std::int64_t capacity;  // candidates of a buffer
  int splits, blocks;
  std::int64_t kept;                               // candidates of a range of rows that are merged
  std::int64_t parts_offset, count_offset, bytes;  // candidate buffers begin at 0
};

Work plan(const TopkParams& params, int queries) {
  const Problem& problem = params.problem;
  const std::int64_t groups = (problem.s_q + queries - 1) / queries;
  const int multiprocessors = kRuntime.multiprocessors();
  const std::int64_t rows = problem.s_k;
  Work work{};
  // A buffer never holds more candidates than there are rows.
  work.capacity = std::min(candidate_capacity(params.topk), (rows + 255) / 128 * 128);
  const std::int64_t buffer_bytes = work.capacity * std::int64_t{sizeof(Candidate)};
  // The rows of few queries are cut into ranges of at least 2048, to occupy every multiprocessor.
  const std::int64_t most_splits = std::max<std::int64_t>(1, rows / 2048);
  std::int64_t splits = std::clamp<std::int64_t>(multiprocessors / groups, 1, most_splits);
  work.kept = std::min(params.topk, rows);
  const auto parts_bytes = [&] {
    return splits == 1 ? 0
                       : device::scratch_bytes(problem.s_q * splits * work.kept *
                                               std::int64_t{sizeof(Candidate)});
  };
  while (splits > 1 && parts_bytes() > kWorkspaceLimit / 4) splits /= 2;
  work.splits = static_cast<int>(splits);
  const std::int64_t most_blocks =
      std::max<std::int64_t>(1, kWorkspaceLimit / 2 / (buffer_bytes * queries));
  work.blocks =
      static_cast<int>(std::min({groups * splits, std::int64_t{multiprocessors}, most_blocks}));
  work.parts_offset = device::scratch_bytes(std::int64_t{work.blocks} * queries * buffer_bytes);
  work.count_offset = work.parts_offset + parts_bytes();
  work.bytes =
      work.count_offset + (splits == 1 ? 0 : device::scratch_bytes(problem.s_q * splits * 4));
  return work;
}

template <class Shape>
void launch(const TopkParams& params, char* workspace, cudaStream_t stream) {
  const Work work = plan(params, Shape::kQueries);
  ScoreParams scores = score_params<Shape>(kRuntime, params.problem);
  scores.splits = work.splits;
  const TopkKernelParams topk{
      .indices = params.indices.data,
      .length = params.length.data,
      .scores = params.scores.data,
      .indices_stride = params.indices.stride0,
      .length_stride = params.length.stride0,
      .scores_stride = params.scores.stride0,
      .candidates = reinterpret_cast<Candidate*>(workspace),
      .parts = reinterpret_cast<Candidate*>(workspace + work.parts_offset),
      .part_count = reinterpret_cast<std::int32_t*>(workspace + work.count_offset),
      .capacity = static_cast<int>(work.capacity),
      .topk = static_cast<int>(params.topk),
      .later_ties = params.later_ties,
      .kept = static_cast<int>(work.kept)};
  constexpr int kBytes = sizeof(Layout<Shape, TopkSink>);
  kRuntime.allow_shared_memory(topk_kernel<Shape>, kBytes);
  kRuntime.launch(topk_kernel<Shape>, static_cast<unsigned>(work.blocks), kThreads, kBytes, stream,
                  scores, topk);
  if (work.splits > 1) {
    const MergeParams merge{{.parts = topk.parts,
                             .part_count = topk.part_count,
                             .queries = scores.s_q,
                             .kept = topk.kept,
                             .topk = topk.topk,
                             .later_ties = topk.later_ties,
                             .blocks = 1},
                            topk.indices,
                            topk.length,
                            topk.scores,
                            topk.indices_stride,
                            topk.length_stride,
                            topk.scores_stride,
                            work.splits};
    launch_merge(kRuntime, merge, work.splits * work.kept, stream);
  }
}

}  // namespace

std::int64_t topk_sm90_workspace_bytes(const TopkParams& params) {
  if (stores_scores(params.problem)) return plan_stored(params.problem).bytes;
  std::int64_t bytes = 0;
  with_shape(params.problem,
             [&](auto shape) { bytes = plan(params, decltype(shape)::kQueries).bytes; });
  return bytes;
}

void topk_sm90(const TopkParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, topk_sm90_workspace_bytes(params), queue);
  if (stores_scores(params.problem)) {
    return choose_from_stored(params, static_cast<float*>(scratch.data()), queue);
  }
  with_shape(params.problem, [&](auto shape) {
    launch<decltype(shape)>(params, static_cast<char*>(scratch.data()), queue);
  });
}

}  // namespace winnow::indexer
