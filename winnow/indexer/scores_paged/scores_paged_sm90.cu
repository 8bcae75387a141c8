// Scores of all rows of a paged cache, sm90: the launches.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/scores_paged/scores_paged_impl.h"
#include "winnow/indexer/scores_paged/scores_paged_sm90.cuh"
#include "winnow/indexer/topk_paged/paged_launch_sm90.h"

namespace winnow::indexer {
namespace {

using namespace sm90_detail;

constexpr device::Runtime kRuntime{"indexer::scores_paged", "sm90"};

template <class Shape>
void launch(const ScoresPagedParams& params, cudaStream_t stream) {
  PagedParams<PagedScores> p{};
  describe<Shape>(kRuntime, params, p);
  PagedScores& stored = p.stored;
  stored.scores = params.scores.data;
  stored.stride0 = params.scores.stride0;
  stored.stride1 = params.scores.stride1;
  stored.columns = static_cast<int>(params.max_context);
  stored.clean = params.clean;
  stored.aligned = reinterpret_cast<std::uintptr_t>(stored.scores) % 16 == 0 &&
                   stored.stride0 % 4 == 0 && stored.stride1 % 4 == 0;
  if (params.num_pages == 0) stored.absent_table = static_cast<int>(params.table);
  constexpr int kBytes = sizeof(PagedLayout<Shape, true>);
  const auto kernel = paged_scores_kernel<Shape, PagedParams<PagedScores>>;
  kRuntime.allow_shared_memory(kernel, kBytes);
  const auto blocks = static_cast<unsigned>(kRuntime.multiprocessors());
  p.blocks = device::FastDivmod(blocks);
  const std::int64_t all = params.b * groups_of_a_sequence<Shape>(params);
  // The tiles of a launch are counted in 32 bits.
  const std::int64_t tiles = std::max<std::int64_t>((params.table + 1) / 2, 1);
  const std::int64_t most = std::min<std::int64_t>(INT32_MAX / tiles, kMostGroups);
  for (std::int64_t group = 0; group < all; group += most) {
    p.line.set_groups(group, std::min(group + most, all));
    kRuntime.check(device::launch_early(kernel, blocks, kPagedThreads, kBytes, stream, p),
                   "launch");
  }
}

}  // namespace

void scores_paged_sm90(const ScoresPagedParams& params, void* stream) {
  constexpr std::int64_t kAnyNumber = std::numeric_limits<std::int64_t>::max();
  with_paged_shape(params, kAnyNumber, [&](auto shape) {
    launch<decltype(shape)>(params, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace winnow::indexer
