// The exchange of counts on GPUs: the view and the parameters of its kernel. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/exchange/count_finding.h"
#include "winnow/expert_parallel/exchange/exchange.h"

namespace winnow::expert_parallel {

// The phases of its waits.
inline constexpr Phase kNotifyCountsPhase{11};

// The statement of a rank about its call, and what its kernels found in its counts.
struct CheckedStatement {
  Header message;
  CountFinding found;
};

// The report of a call to the host, in pinned memory: this, then the totals and all statements.
struct NotifyReport {
  std::uint64_t call = 0;      // number of the last call whose report is complete; written last
  std::uint32_t refused = 0;   // 1: the statements say why
  std::uint32_t too_many = 0;  // 1: `count` tokens come to this rank, 2: pairs, 2^31 or more
  std::int64_t count = 0;
};
struct NotifyReportView {
  NotifyReport* report = nullptr;
  std::int32_t* totals = nullptr;          // [2 + E/W]: received, to forward, pairs
  CheckedStatement* statements = nullptr;  // [W]
};

// What a rank tells the others behind its header: pairs [E], tokens [W], tokens for each node [NN],
// all i32, and what is wrong with them.
struct CountRow {
  static constexpr std::int64_t kIndex = sizeof(std::int32_t);

  // Of the CountFinding.
  WINNOW_HOST_DEVICE static std::int64_t found(const CudaTopology& topology) {
    return round_up((topology.experts + topology.world + topology.nodes) * kIndex);
  }
  WINNOW_HOST_DEVICE static std::int64_t bytes(const CudaTopology& topology) {
    return round_up(found(topology) + std::int64_t(sizeof(CountFinding)));
  }

 private:
  // Copies are widest where everything is a multiple of 16.
  WINNOW_HOST_DEVICE static std::int64_t round_up(std::int64_t bytes) {
    return (bytes + 15) / 16 * 16;
  }
};

// LayerView's parts that the exchange needs, and notify's own.
struct NotifyView {
  LayerView layer;
  // In the memory of this rank alone.
  std::int32_t* sums = nullptr;     // [W + NN]: this rank's tokens for each rank and node
  std::int64_t* results = nullptr;  // [NN + W + E/W]
  std::byte* row = nullptr;         // CountRow::bytes(): what this rank tells
  NotifyReportView report, deferred;
};

// One block: tells, receives, decides, writes the results. Null outputs are not written.
struct CountExchangeParams {
  NotifyView view;
  Header header;
  const std::int32_t* per_rank = nullptr;  // [W], [NN], [E]
  const std::int32_t* per_node = nullptr;
  const std::int32_t* per_expert = nullptr;
  std::byte* counts = nullptr;  // NotifyView::row; null where the header refuses
  std::int64_t alignment = 1;
  std::int32_t* recv_node_prefix = nullptr;  // [NN]
  std::int32_t* recv_rank_prefix = nullptr;  // [W]
  std::int32_t* num_recv = nullptr;          // [1]
  std::int32_t* num_forward = nullptr;       // [1]
  std::int32_t* pairs = nullptr;             // [E/W]
  std::uint64_t call = 0;
  bool waits = false;  // the host waits for the report
  static constexpr Phase phase = kNotifyCountsPhase;
  static constexpr const std::byte* table = nullptr;
  static constexpr std::int64_t table_bytes = 0;

  WINNOW_HOST_DEVICE const LayerView& layer() const { return view.layer; }
  WINNOW_HOST_DEVICE std::int64_t counts_bytes() const {
    return CountRow::bytes(view.layer.topology);
  }
};

}  // namespace winnow::expert_parallel
