// The expired wait of a kernel, as its rank reports it to the others. Internal.
#pragma once

#include <cstdint>
#include <string_view>

namespace winnow::expert_parallel {

// The number of what was waited for. Each room defines its own beside its kernels, and says what
// they are called (PhaseText); no two are the same.
enum class Phase : std::int32_t {
  none = 0,
  world_barrier = 9,
  node_barrier = 10,
  blocks = 13,       // the other blocks of this rank's kernel, whose numbers the notice has
  memory = 14,       // no wait: the reporter lacks memory for the rest of its call
  interrupted = 15,  // no wait: the reporter's program interrupted it
};

// How errors name a phase: the operation that waits there, and what for ("the counts").
struct PhaseText {
  Phase phase;
  std::string_view operation, text;
};

// A wait that expired, as its rank reports it to the others.
struct FaultNotice {
  std::uint64_t waited_for = 0, seen = 0, elapsed_ns = 0;
  Phase phase = Phase::none;
  std::int32_t peer = -1;  // the rank it waited for
};

}  // namespace winnow::expert_parallel
