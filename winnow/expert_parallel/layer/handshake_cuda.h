// How a call of a GPU layer begins and what the host learns of it: each rank sends all others a
// header, and kernels of all ranks decide alike whether the call goes on. Only in builds with CUDA.
// Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "winnow/expert_parallel/cuda/calls.h"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/layer/place.h"
#include "winnow/expert_parallel/layer/regions.h"
#include "winnow/expert_parallel/transport/fault_notice.h"

namespace winnow::expert_parallel {

// What the host learns of a call.
enum class Report {
  none,     // nothing: it does not wait
  later,    // what the ranks offered, when a later call asks: Handshake::read_offers()
  headers,  // the same at once: it waits
  more,     // the same, and what a later kernel of the call adds before it calls complete()
};

class Handshake {
 public:
  // Allocates the reports that kernels write, and sets their pointers in `view`. The references
  // must stay valid.
  Handshake(const Place& place, LayerView& view, const FabricKernels& fabric, Regions& regions,
            CudaCalls& calls);

  // Begins a call on the stream of the CudaCalls.
  void begin();
  // Enqueues the exchange: posts header, counts ([E + W] i32 and Findings behind them, in device
  // memory; null: none) and table (device memory, to the rail peers; stays as it is until the call
  // is over), receives from all ranks, and makes the rest of the call do nothing where one refuses
  // or options differ. A rank whose header refuses enqueues nothing else and calls wait_report().
  // Errors name `phase` where a rank does not come.
  void exchange(Phase phase, const Header& header, const std::int32_t* counts,
                const std::byte* table, std::int64_t table_bytes, Report report);
  // The host waits until the report is complete, then throws faults and refusals, alike on every
  // rank. In capture: throws what this rank's own header refused.
  void wait_report();
  // What was received, after wait_report().
  std::span<const Header> received() const {
    return {host_report_.headers, static_cast<std::size_t>(place_.world())};
  }
  std::span<const std::int32_t> report_words() const { return {host_report_.words, report_words_}; }
  // Whether this call's exchange is enqueued: then the other ranks go on, and this one has to.
  bool others_go_on() const { return others_go_on_; }
  // Reads the report of the call for which the Regions wait, which keep what its ranks offered.
  void read_offers();
  // Throws the errors that earlier calls left for this one: faults, and the refusals and overflows
  // of calls for which the host did not wait.
  void throw_deferred();

 private:
  void throw_received(const ReportView& received, bool deferred, std::uint64_t call);
  std::vector<Header> refusals(const ReportView& received, bool deferred) const;

  const Place& place_;
  LayerView& view_;
  const FabricKernels& fabric_;
  Regions& regions_;
  CudaCalls& calls_;
  ReportView host_report_, host_deferred_;
  std::size_t report_words_ = 0;
  Header own_header_;  // of this call
  bool others_go_on_ = false;
};

}  // namespace winnow::expert_parallel
