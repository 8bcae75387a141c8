// The kernels that put across nodes, as a table: the device code of a transport's puts may live in
// a library of its own. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

// One block. Posts header, counts and table, hears all ranks, decides. See exchange_cuda.cuh.
struct ExchangeParams {
  LayerView view;
  Header header;
  const std::int32_t* counts = nullptr;  // [E + W], and Findings behind them; or null
  const std::byte* table = nullptr;      // for the rail peers; may be null
  std::int64_t table_bytes = 0;
  Phase phase = Phase::counts;
  std::uint64_t call = 0;  // the host's number of this call
  bool reports = false;    // the host reads a report,
  bool waits = false;      // and waits for it
  bool completes = false;  // this kernel makes it; else a later one, unless the call is refused
};

// One block. Waits until all ranks of the world or of this node have come.
struct BarrierParams {
  LayerView view;
  bool node_only = false;
};

struct NotifyParams;    // notify_cuda.h
struct RailSendParams;  // rail_cuda.h

// Each returns a cudaError_t. Made by make_wire() of wire_kernels.cuh.
struct Wire {
  int (*load)() = nullptr;  // the kernels onto the current GPU
  int (*exchange)(const ExchangeParams& params, void* stream) = nullptr;
  int (*barrier)(const BarrierParams& params, void* stream) = nullptr;
  int (*rail_send)(const RailSendParams& params, int blocks, void* stream) = nullptr;
  // Behind rail_send: until what it has put may be written again. Enqueues nothing where that is so
  // when rail_send has ended.
  int (*quiet)(const LayerView& view, void* stream) = nullptr;
  int (*notify)(const NotifyParams& params, void* stream) = nullptr;
  // Tells the other nodes of the fault that `reporter` told this rank of, or found itself. One that
  // the host of this rank has `found` is told to its own node too.
  int (*tell_fault)(const LayerView& view, int reporter, const FaultNotice& found,
                    void* stream) = nullptr;
};

// Copies through SymmetricView::peers: in_process.
const Wire& pointer_wire();

}  // namespace winnow::expert_parallel
