// One rank's layer on a GPU, host side: what dispatch and combine share. The counterpart of Layer
// (layer.h). Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/core/stream.h"
#include "winnow/expert_parallel/all_to_all.h"
#include "winnow/expert_parallel/arena.h"
#include "winnow/expert_parallel/device/view.h"
#include "winnow/expert_parallel/exchange.h"
#include "winnow/expert_parallel/placement.h"

namespace winnow::expert_parallel {

// Memory of one GPU that only this rank uses, given back in stream order... or at destruction.
class DeviceBuffer;

class DeviceLayer {
 public:
  // Collective. `config` is checked and resolved; config.device is a GPU.
  DeviceLayer(std::shared_ptr<Transport> transport, const Config& config);
  ~DeviceLayer();

  const Config& config() const;
  const ExpertMap& map() const;
  Device device() const;
  Arena& arena();
  std::int64_t row_bytes() const;
  LayerView view() const;
  // At most config.sm_count, and so few that the blocks of all ranks on this GPU run side by side.
  int blocks() const;
  const std::shared_ptr<const char>& token() const;  // stands for this layer in descriptors

  // ---- A call, in this order on every rank.

  // Throws what broke the layer. Orders `stream` after the stream of the call before. `number`
  // counts calls: the same on every rank.
  std::uint64_t begin(std::string_view operation, Stream stream);
  bool capturing() const;  // the stream of this call records a graph: the host cannot wait

  // Enqueues the exchange: posts header, counts ([E + W] i32, in device memory; null: none) and
  // table (device memory, to the rail peers), hears all ranks, and sets DeviceState::refused where
  // one refuses or options differ. Its report goes to the host under this call's number.
  void exchange(const Header& header, const std::int32_t* counts, const std::byte* table,
                std::int64_t table_bytes);
  // Host waits until `report` is complete for this call (kernels write the words behind the
  // headers, then the number; finish_report() of report.cuh), then throws refusals and faults.
  // Reads: heard_header(rank), report_words().
  void wait_report(std::string_view operation);
  const Header& heard_header(int rank) const;
  std::span<const std::int32_t> report_words() const;  // [report_capacity], as the kernels left them
  std::int32_t* report_words_on_device() const;

  // After everything is enqueued: throws what earlier calls left for this one (deferred faults,
  // refusals of calls that did not wait). Every rank has enqueued the same by then.
  void end(std::string_view operation);

  // ---- Arena regions, the same decision on every rank (see "Holes" in the design).
  // `bytes` [W]: what each rank needs. False: not all fit into the holes as they are known: the
  // caller exchanges headers with the host's wait (which refreshes the holes) and calls grow().
  bool fits(std::span<const std::int64_t> bytes) const;
  void learn_holes();  // from the headers of an exchange that the host has waited for
  std::vector<Extent> reserve(std::span<const std::int64_t> bytes);  // grows where it must; collective
  Extent offered_hole() const;  // for Header::rows and releasable of a header that the host waits for
  std::uint64_t releasable() const;

  void barrier(bool intra_node_only, Stream stream);
};

}  // namespace winnow::expert_parallel
