// Where everything lies in the memories of a GPU layer, the same on every rank. Internal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "winnow/core/export.h"
#include "winnow/core/host_device.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/transport/fault_notice.h"

namespace winnow::expert_parallel {

// Ranks of one GPU wait for each other in a hardware queue each; a process has 8 of these unless
// CUDA_DEVICE_MAX_CONNECTIONS says otherwise.
inline constexpr int kMostRanksOnGpu = 8;

// Divides a memory into parts: where each part begins.
class Parts {
 public:
  static std::int64_t round_up(std::int64_t bytes) { return (bytes + 127) / 128 * 128; }
  std::int64_t add(std::int64_t bytes) {
    const std::int64_t at = end_;
    end_ = round_up(end_ + bytes);
    return at;
  }
  std::int64_t end() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

// Arrays one after the other in one memory. They are added twice: without a memory they are only
// measured, with it their pointers are set.
class Tables {
 public:
  explicit Tables(std::byte* memory = nullptr) : memory_(memory) {}
  template <class T>
  void add(T*& table, std::int64_t count) {
    const std::int64_t at = parts_.add(count * std::int64_t(sizeof(T)));
    if (memory_ != nullptr) table = reinterpret_cast<T*>(memory_ + at);
  }
  std::int64_t bytes() const { return parts_.end(); }

 private:
  std::byte* memory_;
  Parts parts_;
};

// Most bytes of scales that a row has beside it: 4 for each 32 columns.
inline std::int64_t most_scale_bytes(std::int64_t hidden) { return (hidden + 31) / 32 * 4; }
// Of what travels along the rail beside a row: its scales, or the values of its token's pairs.
inline std::int64_t rail_scale_bytes(const Config& config) {
  const std::int64_t values = config.topk * size_of(config.weight_dtype);
  return std::max(most_scale_bytes(config.hidden), (values + 15) / 16 * 16);
}

// Equal slices of a call's tokens whose rows, or sums, are told of one by one. For rows that are
// taken each rank chooses how many.
inline constexpr int kSlices = 8, kMostSlices = 12;
// Rows that combine pushes before it tells of them.
inline constexpr int kPushedTogether = 16;

// What a rank says of the rows that it has sent another of its node: of which epoch, of which it
// keeps the lower half, and that all below a row of the receiver's are there.
struct RowsSent {
  static WINNOW_HOST_DEVICE constexpr std::uint64_t pack(std::uint64_t epoch, std::uint32_t below) {
    return epoch << 32 | below;
  }
  static WINNOW_HOST_DEVICE constexpr bool cover(std::uint64_t word, std::uint64_t epoch,
                                                 std::uint32_t below) {
    return word >> 32 == (epoch & 0xffffffff) && std::uint32_t(word) >= below;
  }
};

// Offsets of the control memory, the same on every rank. Words are 64-bit and hold epochs.
struct ControlLayout {
  std::int64_t received = 0;  // [W] words: the row of that rank is there
  std::int64_t rail = 0;      // [NN] words: the rail row and table of that node are there
  std::int64_t done = 0;      // [L] words: that rank of the node is done with the others' memory
  std::int64_t slices = 0;  // [L] words: epoch * kSlices + slices of dispatch that rank has written
  std::int64_t sent = 0;    // [L] words: RowsSent, of a dispatch with copy_out
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

  WINNOW_HOST_DEVICE std::int64_t pushed_row(int node, int locals, int local,
                                             std::int64_t row) const {
    return pushed + ((std::int64_t(node) * locals + local) * pushed_words + row / kPushedTogether) *
                        std::int64_t(sizeof(std::uint64_t));
  }
  WINNOW_HOST_DEVICE std::int64_t notice(int rank) const {
    return notices + rank * std::int64_t(sizeof(FaultNotice));
  }
  WINNOW_HOST_DEVICE std::int64_t row(std::uint64_t epoch, int world, int rank) const {
    return rows + (std::int64_t(epoch % 2) * world + rank) * row_bytes;
  }
  WINNOW_HOST_DEVICE std::int64_t rail_row(std::uint64_t epoch, int nodes, int node) const {
    return rail_rows + (std::int64_t(epoch % 2) * nodes + node) * (row_bytes + table_bytes);
  }
  WINNOW_HOST_DEVICE std::int64_t rail_table(std::uint64_t epoch, int nodes, int node) const {
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

  WINNOW_HOST_DEVICE std::int64_t signal(int node, std::int64_t chunk) const {
    return signals + (node * chunks + chunk) * std::int64_t(sizeof(std::uint64_t));
  }
  WINNOW_HOST_DEVICE std::int64_t row(int node, std::int64_t token, std::int64_t size) const {
    return rows + node * max_tokens * row_bytes + token * size;
  }
  WINNOW_HOST_DEVICE std::int64_t scale(int node, std::int64_t token, std::int64_t size) const {
    return scales + node * max_tokens * scale_bytes + token * size;
  }
  WINNOW_HOST_DEVICE std::int64_t staged_row(int node, std::int64_t token,
                                             std::int64_t size) const {
    return staged + node * max_tokens * row_bytes + token * size;
  }
  WINNOW_HOST_DEVICE std::int64_t staged_scale(int node, std::int64_t token,
                                               std::int64_t size) const {
    return staged_scales + node * max_tokens * scale_bytes + token * size;
  }
};

// `row_bytes`: of what each rank tells all others in an exchange.
ControlLayout control_layout(const ExpertMap& map, const Config& config, std::int64_t row_bytes);
// The same for an exchange alone, without tables.
ControlLayout exchange_layout(const Topology& topology, std::int64_t row_bytes);
// Whether token-major rows are pushed to the rank of their node that sums them, in a call in which
// no rank has more than `tokens`; otherwise that one reads them. The same on every rank.
WINNOW_EXPORT bool pushes_rows(const ExpertMap& map, const Config& config, std::int64_t tokens);
// Of the memory for what other ranks push to one, rows or sums.
WINNOW_EXPORT std::int64_t pushed_bytes(const ExpertMap& map, const Config& config);
RailLayout rail_layout(const ExpertMap& map, const Config& config);  // of nothing on one node

}  // namespace winnow::expert_parallel
