// Scores of all rows of a paged cache, cuda: the launches.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/scores_paged/scores_paged_cuda.cuh"
#include "winnow/indexer/scores_paged/scores_paged_impl.h"
#include "winnow/indexer/topk_paged/paged_launch_cuda.h"

namespace winnow::indexer {

void scores_paged_cuda(const ScoresPagedParams& params, void* stream) {
  using namespace cuda_detail;
  constexpr device::Runtime kRuntime{"indexer::scores_paged", "cuda"};
  constexpr std::int64_t kAnyNumber = std::numeric_limits<std::int64_t>::max();
  auto p = paged_params<PagedScores>(params, kAnyNumber);
  PagedScores& stored = p.stored;
  stored.scores = params.scores.data;
  stored.stride0 = params.scores.stride0;
  stored.stride1 = params.scores.stride1;
  stored.columns = static_cast<int>(params.max_context);
  stored.clean = params.clean;
  stored.aligned = reinterpret_cast<std::uintptr_t>(stored.scores) % 16 == 0 &&
                   stored.stride0 % 4 == 0 && stored.stride1 % 4 == 0;
  const std::int64_t all = params.b * p.line.groups_of_a_sequence;
  const std::int64_t tiles = device::ceil_div<std::int64_t>(params.max_context, kTileRows);
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // blocks of a launch
  for (std::int64_t group = 0; group < all; group += kMost) {
    launch_paged(kRuntime, p, group, std::min(group + kMost, all), tiles,
                 static_cast<cudaStream_t>(stream));
  }
}

}  // namespace winnow::indexer
