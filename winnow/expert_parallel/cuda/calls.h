// The calls of one rank's layer or notifier on its GPU, as the host sees them: their order, the end
// of the last one, what has broken them. Only in builds with CUDA. Internal.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/core/device.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/stream.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/fault_notice.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

class CudaCalls {
 public:
  // `view` is what kernels know, from the first call on. `creation` is the operation that errors
  // name before it, `texts` what they call the waits of its kernels. Errors (winnow::Error):
  // unsupported, where the transport serves no GPUs.
  CudaCalls(std::shared_ptr<Transport> transport, const LayerView& view, Device device,
            std::string_view creation, std::vector<PhaseText> texts);
  // Waits for nobody: memory that is given back from now on goes when the last call has ended. So
  // its owner declares it behind everything that kernels use.
  ~CudaCalls();
  CudaCalls(const CudaCalls&) = delete;
  CudaCalls& operator=(const CudaCalls&) = delete;

  // Pinned memory that kernels write: their FaultReport, and the reports of a call and of what it
  // defers, whose parts `add(tables, report)` tells. And that they read: which ranks have ended,
  // from now on. `view` learns where both are. Once.
  template <class Report, class Add>
  void make_reports(std::array<Report*, 2> host, std::array<Report*, 2> device, LayerView& view,
                    const Add& add) {
    std::uint32_t *told = nullptr, *device_told = nullptr;
    const auto lay_out = [&](Tables tables, FaultReport*& fault, std::uint32_t*& gone,
                             auto& reports) {
      tables.add(fault, 1);
      tables.add(gone, transport_->world_size());
      for (Report* report : reports) add(tables, *report);
      return static_cast<std::size_t>(tables.bytes());
    };
    page_ = PinnedPage(lay_out(Tables(), fault_report_, told, host));
    lay_out(Tables(page_.host()), fault_report_, told, host);
    lay_out(Tables(page_.device()), view.fault, device_told, device);
    view.gone = device_told;
    peers_ = transport_->watch_peers(
        [told](int rank) { std::atomic_ref(told[rank]).store(1, std::memory_order_release); });
  }
  // The ranks on this GPU, after the last allocation. Errors: unsupported, where they are too many.
  int count_ranks();

  // ---- A call. The GPU is the thread's current one.

  // Throws what has broken the calls. Orders `stream` after the stream of the call before.
  void begin(std::string_view operation, Stream stream);
  const std::string& operation() const { return operation_; }
  std::uint64_t number() const { return number_; }  // of the call, the same on every rank
  cudaStream_t stream() const { return stream_; }
  bool capturing() const { return capturing_; }  // a graph is recorded: the host cannot wait
  // The host waits until kernels have written `number`, of this call or the last one that has them
  // write it, to `call`; throws faults.
  void wait_for(const std::uint64_t& call, std::uint64_t number);
  // Everything is enqueued.
  void end();
  // The host waits until the last call has ended.
  void wait_for_last() const;
  // The body of a call, from begin() to end(), on this GPU. What a call that throws has enqueued
  // still runs. A rank whose host has no memory for the rest of its call does as
  // fail_without_memory() says; while a graph is recorded, only this rank throws.
  template <class Body>
  auto run(const Body& body) -> decltype(body()) {
    const DeviceGuard guard(device_);
    try {
      try {
        return body();
      } catch (const std::bad_alloc&) {
        fail_without_host_memory();
      }
    } catch (...) {
      leave();
      throw;
    }
  }

  // Throws what a kernel has waited for in vain, in this call or before. Kernels have told the node
  // of it; the first throw tells the others.
  void throw_fault();
  // Throws what tell(number) says of an earlier call, whose number a kernel has written to
  // `deferred` with what the host did not wait for. What this very call has found so soon waits for
  // the next one, as it would if it came later. Kernels may write the next one afterwards.
  template <class Tell>
  void throw_deferred(std::uint64_t& deferred, const Tell& tell) {
    const std::uint64_t call = load_acquire(&deferred);
    if (call == 0 || call == number_) return;
    struct Read {
      std::uint64_t& deferred;
      ~Read() { store_release(&deferred, 0); }
    } read{deferred};
    tell(call);
  }
  // This rank alone has no memory for the rest of its call: tells all ranks, breaks the calls for
  // good, and throws it.
  [[noreturn]] void fail_without_memory();
  // Throws Error (internal or resource) where something was not enqueued; breaks the calls.
  void check(int cuda_error, const char* what);

 private:
  void leave() noexcept;
  [[noreturn]] void fail_without_host_memory();
  void tell_fault(const FaultNotice& found = {});
  void break_for(Phase phase);

  std::shared_ptr<Transport> transport_;
  const LayerView& view_;
  std::vector<PhaseText> texts_;
  Device device_;
  PinnedPage page_;
  std::shared_ptr<void> peers_;  // writes to the page
  FaultReport* fault_report_ = nullptr;
  bool shares_gpu_ = false;

  std::string operation_;
  std::uint64_t number_ = 0;
  cudaStream_t stream_ = nullptr;
  bool capturing_ = false, in_call_ = false;
  struct Destroy {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<CUevent_st, Destroy>;
  Event make_event();
  Event last_;  // the end of the last call that was no recording
  // To tell other ranks of a fault: when there is one, the GPU may have no memory for them.
  std::unique_ptr<CUstream_st, Destroy> fault_stream_;
  Event fault_told_;
  // Of the call's stream and of the last one's: one handle may stand for several streams.
  unsigned long long stream_id_ = 0, last_stream_ = 0;
  bool any_call_ = false;
  std::optional<FaultRecord> fault_;
  std::string broken_;  // what could not be enqueued
};

}  // namespace winnow::expert_parallel
