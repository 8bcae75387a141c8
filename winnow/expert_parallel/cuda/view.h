// What the kernels of one rank's layer know: plain structs, passed by value. Internal.
//
// Symmetric memory, which all ranks have alike, is accessed in two ways: that of ranks of this node
// through pointers, node[local], that of other nodes only through puts of a fabric (fabric.cuh),
// and only along the rail.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/host_device.h"
#include "winnow/expert_parallel/memory/arena.h"
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/routing/topology_cuda.h"
#include "winnow/expert_parallel/transport/fault_notice.h"

namespace winnow::expert_parallel {

inline constexpr int kMaxSegments = 64;  // of an arena
inline constexpr int kMaxLocals = 72;    // ranks of a node; NodePointers is a kernel parameter

// A pointer for each rank of this node, by local index. A kernel parameter.
struct NodePointers {
  std::byte* data[kMaxLocals] = {};
};

// A symmetric memory as this rank's kernels see it.
struct SymmetricView {
  std::byte* local = nullptr;
  std::byte* const* node = nullptr;  // [L], in device memory: the ranks of this node by local index
  std::byte* const* peers = nullptr;  // [W], for fabrics that are copies (in_process); else null
};

// The first wait of this rank that expired, in pinned host memory that kernels write.
struct FaultReport {
  std::uint32_t state = 0;     // 1: complete
  std::int32_t reporter = -1;  // the rank that told this one, or this one itself
  FaultNotice notice;
};

// The counters of CudaState::arrivals.
enum Arrival { kBlocksArrived, kBlocksLeft, kMoveDone, kSumsDone, kArrivals };
// The counters of CudaState::claims, from which warps take the number of their next piece of work.
// In dispatch: tokens to send, rows to repeat or to take, tokens with rows of this rank. In
// combine, for the tokens of other nodes and for those of this rank: what to push, and tokens to
// sum.
enum DispatchClaim { kSendClaims, kRepeatClaims, kOwnClaims };
enum SumClaim { kPushOthersClaims, kSumOthersClaims, kPushOwnClaims, kSumOwnClaims, kClaims };

// What the kernels of a layer keep from call to call, in device memory of this rank alone. Zero at
// first.
struct CudaState {
  std::uint64_t epoch = 0;       // of the last exchange: device time, also in replayed graphs
  std::uint64_t call = 0;        // the host's number of the last call
  std::uint64_t rounds[2] = {};  // of barriers: of the world, of a node
  std::uint32_t broken = 0;      // 1: a wait has expired; every later kernel returns at once
  std::uint32_t refused = 0;     // 1: this call does nothing, on every rank alike
  // Counters of arrivals, in a call or in a slice of it; set back to 0 after each.
  std::uint64_t arrivals[kArrivals] = {}, slice_arrivals[kMostSlices] = {};
  // Counters of claimed work after the exchange, which sets them to 0.
  std::uint32_t claims[kClaims] = {};
};

struct Header;    // exchange.h
struct Findings;  // exchange_cuda.h

// The first part of a call's report to the host, in pinned memory that kernels write.
struct CallReport {
  std::uint64_t call = 0;  // number of the last one whose report is complete; written last
  std::uint32_t refused = 0;
  std::uint32_t overflow = 0;        // 1: a rank wanted more rows than there were; see `wanted`
  std::int64_t worst_case_rows = 0;  // how many there were
};

// Pointers to a report and its parts, for the host or for kernels.
struct ReportView {
  CallReport* report = nullptr;
  Header* headers = nullptr;       // [W]
  Findings* findings = nullptr;    // [W]
  std::int64_t* wanted = nullptr;  // [W] rows
  std::int32_t* words = nullptr;   // Handshake::report_words(): what the call's own kernels add
};

struct LayerView {
  CudaTopology topology;
  ControlLayout control_layout;
  RailLayout rail_layout;
  SymmetricView control, rail, pushed;  // pushed: by other ranks, see pushed_offset()
  CudaState* state = nullptr;
  // Device pointers of pinned memory. `deferred` is for calls for which the host does not wait: its
  // number is 0 unless a kernel has written an error that the host has not read yet.
  FaultReport* fault = nullptr;
  ReportView report, deferred;
  const std::uint32_t* gone = nullptr;  // [W], pinned too: 1 for a rank that has ended
  std::uint64_t timeout_ns = 0;
  std::byte* const* segments =
      nullptr;  // [kMaxSegments, L], in device memory: arena segments of
                // the ranks of this node, by Extent::segment % kMaxSegments
};

// Where local rank `local` pushes its part of a rank's tokens, in the memory of the rank that
// reduces them: [NN, L, T] rows, by the node of the tokens' rank. In expert-major order the sum of
// a token's rows, at the token's place; in token-major order the rows one after the other.
WINNOW_HOST_DEVICE inline std::int64_t pushed_offset(const CudaTopology& topology, int node,
                                                     int local, std::int64_t max_tokens,
                                                     std::int64_t place, std::int64_t row_bytes) {
  return ((std::int64_t(node) * topology.locals + local) * max_tokens + place) * row_bytes;
}

}  // namespace winnow::expert_parallel
