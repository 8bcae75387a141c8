// The exchange of counts on GPUs: what its kernel knows and is given. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/exchange/count_finding.h"
#include "winnow/expert_parallel/exchange/exchange.h"

namespace winnow::expert_parallel {

// What its waits wait for: a rail peer; a rank of the node.
inline constexpr Phase kRailCountsPhase{11}, kNodeCountsPhase{12};

// What a rank says about its call, with what the kernels found in its counts.
struct CheckedStatement {
  Header said;
  CountFinding found;
};

// The symmetric memory, offsets in bytes, two of each for calls
// of even and of odd numbers. Messages are 64-bit words.
struct NotifyLayout {
  static constexpr std::int64_t kWord = sizeof(std::int64_t);
  static constexpr int kStatementWords = sizeof(CheckedStatement) / kWord;
  static_assert(sizeof(CheckedStatement) % kWord == 0);

  std::int64_t node_signals = 0;    // [2, NN] words
  std::int64_t local_signals = 0;   // [2, L] words
  std::int64_t node_messages = 0;   // [2, NN]: statement | tokens [L] | pairs [L * E/W] | tokens
  std::int64_t local_messages = 0;  // [2, L]: [NN] (statement | tokens) | pairs [E/W]
  std::int64_t outbox = 0;          // [2, NN]: messages that puts carry to the other nodes
  int node_message_words = 0, local_message_words = 0;

  WINNOW_HD std::int64_t node_signal(std::uint64_t call, int nodes, int node) const {
    return node_signals + (std::int64_t(call % 2) * nodes + node) * kWord;
  }
  WINNOW_HD std::int64_t local_signal(std::uint64_t call, int locals, int local) const {
    return local_signals + (std::int64_t(call % 2) * locals + local) * kWord;
  }
  WINNOW_HD std::int64_t node_message(std::uint64_t call, int nodes, int node) const {
    return node_messages + (std::int64_t(call % 2) * nodes + node) * node_message_words * kWord;
  }
  WINNOW_HD std::int64_t local_message(std::uint64_t call, int locals, int local) const {
    return local_messages + (std::int64_t(call % 2) * locals + local) * local_message_words * kWord;
  }
  WINNOW_HD std::int64_t outgoing(std::uint64_t call, int nodes, int node) const {
    return outbox + (std::int64_t(call % 2) * nodes + node) * node_message_words * kWord;
  }
};

// What the host reads of a call, in pinned memory: this, then the totals and all statements.
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

// LayerView's parts that waits need, and notify's own.
struct NotifyView {
  LayerView layer;
  NotifyLayout layout;
  // In the memory of this rank alone.
  std::int32_t* sums = nullptr;     // [W + NN]: this rank's tokens for each rank and node
  std::int64_t* results = nullptr;  // [NN + W + E/W]
  NotifyReportView report, deferred;
};

// One block: tells, hears, decides, writes the results. Null outputs are not written.
struct CountExchangeParams {
  NotifyView view;
  Header statement;
  const std::int32_t* per_rank = nullptr;  // [W], [NN], [E]; null where the statement refuses
  const std::int32_t* per_node = nullptr;
  const std::int32_t* per_expert = nullptr;
  std::int64_t alignment = 1;
  std::int32_t* recv_node_prefix = nullptr;  // [NN]
  std::int32_t* recv_rank_prefix = nullptr;  // [W]
  std::int32_t* num_recv = nullptr;          // [1]
  std::int32_t* num_forward = nullptr;       // [1]
  std::int32_t* pairs = nullptr;             // [E/W]
  std::uint64_t call = 0;
  bool waits = false;  // the host waits for the report
};

}  // namespace winnow::expert_parallel
