// The exchange of a GPU layer: the parameters of its kernel. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/host_device.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/exchange/exchange.h"

namespace winnow::expert_parallel {

// What the kernels of this rank found wrong in its indices; sent after the counts.
struct Findings {
  std::int32_t bad = 0;    // 1: an index is out of range
  std::int32_t token = 0;  // of the first one, and its value as it was given, in two halves
  std::uint32_t low = 0, high = 0;
  WINNOW_HOST_DEVICE void set_value(std::int64_t value) {
    low = static_cast<std::uint32_t>(value);
    high = static_cast<std::uint32_t>(value >> 32);
  }
  std::int64_t value() const { return static_cast<std::int64_t>(std::uint64_t{high} << 32 | low); }
};

// One block. Posts header, counts and table, receives from all ranks, decides. See
// exchange_cuda.cuh.
struct ExchangeParams {
  LayerView view;
  Header header;
  const std::int32_t* counts = nullptr;  // [E + W], and Findings behind them; or null
  const std::byte* table = nullptr;      // for the rail peers; may be null
  std::int64_t table_bytes = 0;
  Phase phase = Phase::none;
  std::uint64_t call = 0;  // the host's number of this call
  bool reports = false;    // the host reads a report,
  bool waits = false;      // and waits for it
  bool completes = false;  // this kernel completes it; else a later one, unless the call is refused

  WINNOW_HOST_DEVICE const LayerView& layer() const { return view; }
  WINNOW_HOST_DEVICE std::int64_t counts_bytes() const {
    return (view.topology.experts + view.topology.world) * std::int64_t(sizeof(std::int32_t)) +
           std::int64_t(sizeof(Findings));
  }
};

}  // namespace winnow::expert_parallel
