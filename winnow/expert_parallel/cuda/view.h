// What the kernels of one rank's GPU layer know: plain structs, passed by value. Internal.
//
// Memory that all ranks have alike ("symmetric") is reached in two ways. Ranks of one node: through
// pointers, node[local]. Ranks of other nodes: through puts of a Wire (wire.cuh) only, and only
// along the rail.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/memory/arena.h"

#ifdef __CUDACC__
#define WINNOW_HD __host__ __device__
#else
#define WINNOW_HD
#endif

namespace winnow::expert_parallel {

inline constexpr int kMaxSegments = 64;  // of an arena
inline constexpr int kMaxLocals = 72;    // ranks of a node, so that kernels take their pointers
// Equal slices of a call's tokens whose rows, or sums, are told of one by one.
inline constexpr int kSlices = 8;
// Rows that combine pushes before it tells of them.
inline constexpr int kPushedTogether = 16;

// A pointer for each rank of this node, by local index. A kernel parameter.
struct NodePointers {
  std::byte* data[kMaxLocals] = {};
};

// What the kernels of this rank found in its indices; travels behind the counts.
struct Findings {
  std::int32_t bad = 0;  // 1: an index is out of range, the first one:
  std::int32_t token = 0, k = 0, value = 0;
};

// Who is where. Expert x lives on rank x / per_rank().
struct DeviceTopology {
  int world = 1, locals = 1, nodes = 1;  // W, L, NN
  int rank = 0, node = 0, local = 0;
  int experts = 0, topk = 0;  // E, K

  WINNOW_HD int per_rank() const { return experts / world; }
  WINNOW_HD int rank_of(int at_node, int at_local) const { return at_node * locals + at_local; }
  // Who writes to this rank's memory what comes from that one: itself, or the rank of this node
  // that passes its words on.
  WINNOW_HD int writer_for(int from) const {
    const bool itself = from / locals == node || from % locals == local;
    return itself ? from : rank_of(node, from % locals);
  }
  WINNOW_HD bool kept(std::int32_t expert) const { return expert >= 0 && expert < experts; }
};

// A symmetric memory as this rank's kernels see it.
struct SymmetricView {
  std::byte* local = nullptr;
  std::byte* const* node = nullptr;  // [L], in device memory: the ranks of this node by local index
  std::byte* const* peers = nullptr;  // [W], for wires that are copies (in_process); else null
};

// What a device wait waited for, as errors say it (fault_report.h).
enum class Phase : std::int32_t {
  none,
  counts,       // "the counts"
  expert_rows,  // "the expert rows"
  tokens,       // "the tokens": a chunk of the rail
  rows,         // "the rows": dispatch's end
  sums,         // "the sums": a chunk of the rail
  pushed_sums,  // "the sums": of a rank of the node
  pushed_rows,  // "the expert rows": of a rank of the node
  end_of_sums,  // "the end of the sums"
  world_barrier,
  node_barrier,
  notify_counts,  // "the counts": of a rail peer
  notify_sums,    // "the sums": of a rank of the node
  blocks,         // the other blocks of this rank's kernel, whose numbers the notice has
  memory,         // no wait: the reporter has none for the rest of its call
  interrupted,    // no wait: the reporter's program wanted no more
};

// A wait that expired, as its rank tells the others.
struct FaultNotice {
  std::uint64_t waited_for = 0, seen = 0, elapsed_ns = 0;
  Phase phase = Phase::none;
  std::int32_t peer = -1;  // whom it waited for
};

// Offsets of the control memory, the same on every rank. Words are 64-bit and hold epochs.
struct ControlLayout {
  std::int64_t heard = 0;   // [W] words: the row of that rank is there
  std::int64_t rail = 0;    // [NN] words: the rail row and table of that node are there
  std::int64_t done = 0;    // [L] words: that rank of the node is done with the others' memory
  std::int64_t slices = 0;  // [L] words: epoch * kSlices + slices of dispatch that rank has written
  // [2, L] words: epoch * kSlices + slices that rank has pushed, of tokens of other nodes; and
  // of this one.
  std::int64_t sum_slices = 0;
  // [NN, L, pushed_words] words, where rows may be pushed: of what that rank pushes of the tokens
  // that this rank reduces for that node, the epoch in which each kPushedTogether rows have come.
  std::int64_t pushed = 0, pushed_words = 0;
  std::int64_t arrived = 0;  // [3, W] words: the rounds of barriers (see barrier.cuh)
  std::int64_t fault = 0;    // word: 0, or 1 + a rank that broke the layer
  std::int64_t notices = 0;  // [W] FaultNotice: what that rank waited for then
  std::int64_t rows = 0;     // [2, W] rows: Header, pairs [E] i32, tokens [W] i32, Findings
  // [2, NN] rows, each with a table behind it. That of the own node is what this rank sends.
  std::int64_t rail_rows = 0;
  std::int64_t row_bytes = 0, table_bytes = 0;
  std::int64_t bytes = 0;  // of all

  WINNOW_HD std::int64_t pushed_row(int node, int locals, int local, std::int64_t row) const {
    return pushed + ((std::int64_t(node) * locals + local) * pushed_words + row / kPushedTogether) *
                        std::int64_t(sizeof(std::uint64_t));
  }
  WINNOW_HD std::int64_t notice(int rank) const {
    return notices + rank * std::int64_t(sizeof(FaultNotice));
  }
  WINNOW_HD std::int64_t row(std::uint64_t epoch, int world, int rank) const {
    return rows + (std::int64_t(epoch % 2) * world + rank) * row_bytes;
  }
  WINNOW_HD std::int64_t rail_row(std::uint64_t epoch, int nodes, int node) const {
    return rail_rows + (std::int64_t(epoch % 2) * nodes + node) * (row_bytes + table_bytes);
  }
  WINNOW_HD std::int64_t rail_table(std::uint64_t epoch, int nodes, int node) const {
    return rail_row(epoch, nodes, node) + row_bytes;
  }
};

// Offsets of the rail memory (only with more than one node): where rail peers put rows, each at its
// token's own place, and the chunks' signals.
struct RailLayout {
  std::int64_t signals = 0;                    // [NN, chunks] words: epochs
  std::int64_t rows = 0;                       // [NN, T] rows, row_bytes apart at most
  std::int64_t scales = 0;                     // [NN, T] scales, scale_bytes apart at most
  std::int64_t staged = 0, staged_scales = 0;  // [NN, T] rows and scales on the way to that node
  std::int64_t chunks = 0;                     // of kChunkTokens tokens
  std::int64_t max_tokens = 0, row_bytes = 0, scale_bytes = 0;
  std::int64_t bytes = 0;

  WINNOW_HD std::int64_t signal(int node, std::int64_t chunk) const {
    return signals + (node * chunks + chunk) * std::int64_t(sizeof(std::uint64_t));
  }
  WINNOW_HD std::int64_t row(int node, std::int64_t token, std::int64_t size) const {
    return rows + node * max_tokens * row_bytes + token * size;
  }
  WINNOW_HD std::int64_t scale(int node, std::int64_t token, std::int64_t size) const {
    return scales + node * max_tokens * scale_bytes + token * size;
  }
  WINNOW_HD std::int64_t staged_row(int node, std::int64_t token, std::int64_t size) const {
    return staged + node * max_tokens * row_bytes + token * size;
  }
  WINNOW_HD std::int64_t staged_scale(int node, std::int64_t token, std::int64_t size) const {
    return staged_scales + node * max_tokens * scale_bytes + token * size;
  }
};

// The first wait of this rank that expired, in pinned host memory that kernels write.
struct FaultReport {
  std::uint32_t state = 0;     // 1: complete
  std::int32_t reporter = -1;  // the rank that told this one, or this one itself
  FaultNotice notice;
};

// Who counts with which of DeviceState::arrivals.
enum Arrival { kBlocksArrived, kBlocksLeft, kMoveDone, kSumsDone, kArrivals };
// What warps claim from which of DeviceState::claims: in dispatch tokens to send and rows to
// repeat; in combine tokens of other nodes and then of this one, to push (or rows together) and to
// sum.
enum DispatchClaim { kSendClaims, kRepeatClaims };
enum SumClaim { kPushOthersClaims, kSumOthersClaims, kPushOwnClaims, kSumOwnClaims, kClaims };

// In the device memory of this rank, not symmetric. Zero-filled at first.
struct DeviceState {
  std::uint64_t epoch = 0;       // of the last exchange: device time, also in replayed graphs
  std::uint64_t call = 0;        // the host's number of the last call
  std::uint64_t rounds[2] = {};  // of barriers: of the world, of a node
  std::uint32_t broken = 0;      // 1: a wait has expired; every later kernel returns at once
  std::uint32_t refused = 0;     // 1: this call does nothing, on every rank alike
  // For kernels that count who has come, so far or with a slice of a call; back to 0 after each.
  std::uint64_t arrivals[kArrivals] = {}, slice_arrivals[kSlices] = {};
  // What warps claimed behind the exchange, which sets them to 0.
  std::uint32_t claims[kClaims] = {};
};

// The beginning of what the host reads of a call, in pinned memory that kernels write.
struct CallReport {
  std::uint64_t call = 0;  // number of the last one whose report is complete; written last
  std::uint32_t refused = 0;
  std::uint32_t overflow = 0;        // 1: `wanted` says how many rows there were
  std::int64_t worst_case_rows = 0;  // that were there for them
};

// Pointers to a report and its parts, for the host or for kernels.
struct ReportView {
  CallReport* report = nullptr;
  Header* headers = nullptr;       // [W]
  Findings* findings = nullptr;    // [W]
  std::int64_t* wanted = nullptr;  // [W] rows
  std::int32_t* words = nullptr;   // DeviceLayer::report_words(): what the call's own kernels add
};

struct LayerView {
  DeviceTopology topology;
  ControlLayout control_layout;
  RailLayout rail_layout;
  SymmetricView control, rail, pushed;  // pushed: by other ranks, see pushed_offset()
  DeviceState* state = nullptr;
  // Device pointers of pinned memory. `deferred` is for calls that the host does not wait for: its
  // number is 0 until a kernel has something to tell, and again when the host has read it.
  FaultReport* fault = nullptr;
  ReportView report, deferred;
  const std::uint32_t* gone = nullptr;  // [W], pinned too: 1 once the host knows that rank's end
  std::uint64_t timeout_ns = 0;
  std::byte* const* segments =
      nullptr;  // [kMaxSegments, L], in device memory: arena segments of
                // the ranks of this node, by Extent::segment % kMaxSegments
};

// Where local rank `local` pushes what it has of a rank's tokens, in the memory of the rank that
// reduces them: [NN, L, T] rows, by the node of the tokens' rank. Expert-major the sum of a token's
// rows, at the token's place; token-major the rows one behind the other.
WINNOW_HD inline std::int64_t pushed_offset(const DeviceTopology& topology, int node, int local,
                                            std::int64_t max_tokens, std::int64_t place,
                                            std::int64_t row_bytes) {
  return ((std::int64_t(node) * topology.locals + local) * max_tokens + place) * row_bytes;
}

#ifdef __CUDACC__
// A kernel before the exchange begins with `if (broken(view)) return;`,
__device__ __forceinline__ bool broken(const LayerView& view) {
  return *const_cast<const volatile std::uint32_t*>(&view.state->broken) != 0;
}
// one behind it with `if (!runs(view)) return;`.
__device__ __forceinline__ bool runs(const LayerView& view) {
  const volatile DeviceState* state = view.state;
  return state->broken == 0 && state->refused == 0;
}
// The epoch of this call (after its exchange kernel).
__device__ __forceinline__ std::uint64_t epoch_of(const LayerView& view) {
  return *const_cast<const volatile std::uint64_t*>(&view.state->epoch);
}
// What the exchange of a call has heard from each rank.
class Heard {
 public:
  __device__ explicit Heard(const LayerView& view) : Heard(view, epoch_of(view)) {}
  __device__ Heard(const LayerView& view, std::uint64_t epoch)
      : rows_(view.control.local + view.control_layout.row(epoch, view.topology.world, 0)),
        row_bytes_(view.control_layout.row_bytes),
        world_(view.topology.world),
        experts_(view.topology.experts) {}
  __device__ const Header& header(int rank) const {
    return *reinterpret_cast<const Header*>(rows_ + rank * row_bytes_);
  }
  // A dispatch of new indices that was not refused has these behind its header.
  __device__ const std::int32_t* pairs(int rank) const {  // [E]
    return reinterpret_cast<const std::int32_t*>(&header(rank) + 1);
  }
  __device__ const std::int32_t* tokens(int rank) const { return pairs(rank) + experts_; }  // [W]
  __device__ Findings findings(int rank) const {  // none of other calls
    const Findings findings = *reinterpret_cast<const Findings*>(tokens(rank) + world_);
    const Header& said = header(rank);
    const bool there = (said.options.call == Call::dispatch) & (said.refusal == 0);
    return there ? findings : Findings{};
  }

 private:
  const std::byte* rows_;
  std::int64_t row_bytes_;
  int world_, experts_;
};
// An extent of a rank of this node, as its header gave it.
__device__ __forceinline__ std::byte* at_extent(const LayerView& view, int local,
                                                const Extent& extent) {
  return view.segments[(extent.segment % kMaxSegments) * view.topology.locals + local] +
         extent.offset;
}
#endif

}  // namespace winnow::expert_parallel
