// Where everything lies in the memories of a GPU layer, the same on every rank. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {

// Ranks of one GPU wait for each other there, in a hardware queue each; a process has 8 of them
// unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise.
inline constexpr int kMostRanksOnGpu = 8;

// Deals out a memory: where each part begins.
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

// Arrays one behind the other in one memory. They are told twice: without a memory they are only
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

DeviceTopology topology_of(const ExpertMap& map, int rank);
ControlLayout control_layout(const ExpertMap& map, const Config& config);
// Whether token-major rows are pushed to the rank of their node that sums them, in a call in which
// no rank has more than `tokens`; otherwise that one reads them. The same on every rank.
WINNOW_EXPORT bool pushes_rows(const ExpertMap& map, const Config& config, std::int64_t tokens);
// Of the memory for what other ranks push to one, rows or sums.
WINNOW_EXPORT std::int64_t pushed_bytes(const ExpertMap& map, const Config& config);
RailLayout rail_layout(const ExpertMap& map, const Config& config);  // of nothing on one node

}  // namespace winnow::expert_parallel
