// The routing of a dispatch in the memory of a GPU, as the kernels of later calls read it.
// Internal.
#pragma once

#include <cstdint>

#include "winnow/core/host_device.h"

namespace winnow::expert_parallel {

// Where a row of a new expert-major routing came from.
struct RowSource {
  std::int32_t rank = -1;  // -1: padding
  std::int32_t token = -1;
  std::int32_t k = -1;
  std::int32_t first = -1;  // the row of the token's first pair on the same rank
};

// The first row that a rank has of a token, and whether it has others too: the largest of what each
// of the rows says.
struct FirstRow {
  static constexpr std::int32_t kNone = INT32_MIN;
  // `is_first`: the row is the first one itself.
  static WINNOW_HOST_DEVICE constexpr std::int32_t pack(std::int64_t first, bool is_first) {
    return is_first ? ~std::int32_t(first) : std::int32_t(first);
  }

  std::int32_t word = kNone;
  WINNOW_HOST_DEVICE bool has_others() const { return word >= 0; }
  WINNOW_HOST_DEVICE std::int32_t row() const {  // -1: none
    return word == kNone ? -1 : word < 0 ? ~word : word;
  }
};

// The tables of a routing, see Descriptor, as dispatch fills them; shared by the descriptors that
// repeat it.
struct RoutingTables {
  // 1: the tables are filled. 0: the dispatch that should have filled them was refused.
  std::uint32_t* placed = nullptr;
  std::int64_t* wanted = nullptr;          // [W] rows of each rank, as the routing asks
  std::int32_t* tokens = nullptr;          // [W] n of every rank
  std::int32_t* expert_counts = nullptr;   // [E/W]
  std::int32_t* expert_offsets = nullptr;  // [E/W + 1]
  std::int32_t* indices = nullptr;         // [NN, T, K]
  std::int32_t* rows = nullptr;            // [NN, T, K]
  std::int32_t* send_reqs = nullptr;       // [NN, 2, T]; null on one node
  std::int64_t* first_copies = nullptr;    // [R]
  std::int64_t* copies = nullptr;          // [R, K]
  // [W, T], expert-major only: a FirstRow of each token of the ranks of other rails; none for those
  // of this rail.
  std::int32_t* firsts = nullptr;
  // Token-major only, where a rank's tokens have their rows one behind the other: [W + 1] where
  // those of each rank begin here, and [NN, L] where those of each rail source do at the ranks of
  // this node.
  std::int32_t* source_begins = nullptr;
  std::int32_t* rail_begins = nullptr;
};

// The weights of one dispatch. Null where none were sent.
struct CudaWeights {
  const float* pairs = nullptr;  // [NN, T, K] of the rail sources
  const float* rows = nullptr;   // [R] of the rows here, expert-major only
};

}  // namespace winnow::expert_parallel
