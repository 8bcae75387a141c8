// The calls of one rank's layer or notifier on its GPU, as the host sees them: their order, the end
// of the last one, and the fault that broke them. Only in builds with CUDA. Internal.
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
  // Kernels know `view` from the first call on. Errors before that call name the operation
  // `creation`; `texts` are the names of the waits of its kernels. Errors (winnow::Error):
  // unsupported, if the transport does not support GPUs.
  CudaCalls(std::shared_ptr<Transport> transport, const LayerView& view, Device device,
            std::string_view creation, std::vector<PhaseText> texts);
  // Waits for nothing: memory that is released from now on is freed when the last call has ended.
  // The owner therefore declares this object after everything that kernels use.
  ~CudaCalls();
  CudaCalls(const CudaCalls&) = delete;
  CudaCalls& operator=(const CudaCalls&) = delete;

  // Allocates the pinned memory that kernels write, their FaultReport and the reports of a call and
  // of its deferred results, whose parts `add(tables, report)` lists, and the flags of ended ranks,
  // which kernels read. Sets the pointers in `view`. To be called once.
  template <class Report, class Add>
  void make_reports(std::array<Report*, 2> host, std::array<Report*, 2> device, LayerView& view,
                    const Add& add) {
    std::uint32_t *gone_flags = nullptr, *device_gone_flags = nullptr;
    const auto lay_out = [&](Tables tables, FaultReport*& fault, std::uint32_t*& gone,
                             auto& reports) {
      tables.add(fault, 1);
      tables.add(gone, transport_->world_size());
      for (Report* report : reports) add(tables, *report);
      return static_cast<std::size_t>(tables.bytes());
    };
    page_ = PinnedPage(lay_out(Tables(), fault_report_, gone_flags, host));
    lay_out(Tables(page_.host()), fault_report_, gone_flags, host);
    lay_out(Tables(page_.device()), view.fault, device_gone_flags, device);
    view.gone = device_gone_flags;
    peers_ = transport_->watch_peers([gone_flags](int rank) {
      std::atomic_ref(gone_flags[rank]).store(1, std::memory_order_release);
    });
  }
  // Counts the ranks on this GPU, after the last allocation. Errors: unsupported, if too many.
  int count_ranks();
  // Whether other ranks use this GPU, too; after count_ranks().
  bool shares_gpu() const { return shares_gpu_; }

  // ---- A call. The GPU is the thread's current one.

  // Throws the error that broke the calls. Orders `stream` after the stream of the last call.
  void begin(std::string_view operation, Stream stream);
  const std::string& operation() const { return operation_; }
  std::uint64_t number() const { return number_; }  // of the call, the same on every rank
  cudaStream_t stream() const { return stream_; }
  bool capturing() const { return capturing_; }  // a graph is recorded: the host cannot wait
  // Waits on the host until kernels have written `number`, which is that of this call or of the
  // last one that reports, to `call`. Throws faults.
  void wait_for(const std::uint64_t& call, std::uint64_t number);
  // Waits on the host until the call's stream has ended; `what` is what errors name.
  void wait_for_stream(const char* what);
  // Ends a call whose work is all enqueued.
  void end();
  // Waits on the host until the last call has ended.
  void wait_for_last() const;
  // Runs the body of a call, from begin() to end(), on this GPU. If it throws, the work that it has
  // enqueued still runs. If this rank has no host memory for the rest of the call,
  // fail_without_memory() applies; while a graph is recorded, only this rank throws.
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

  // Throws the error of a kernel whose wait has expired, in this call or an earlier one. Kernels
  // have told the node; the first throw tells the other nodes.
  void throw_fault();
  // If a kernel has written the number of an earlier call to `deferred`, lets tell(number) throw
  // its error. An error of the current call, even if it is there already, is left for the next
  // call. Afterwards kernels may write the next error.
  template <class Signal>
  void throw_deferred(std::uint64_t& deferred, const Signal& signal) {
    const std::uint64_t call = load_acquire(&deferred);
    if (call == 0 || call == number_) return;
    struct Read {
      std::uint64_t& deferred;
      ~Read() { store_release(&deferred, 0); }
    } read{deferred};
    signal(call);
  }
  // For a rank that has no memory for the rest of its call: tells all ranks, breaks the calls for
  // good and throws the error.
  [[noreturn]] void fail_without_memory();
  // Throws Error (internal or resource) if something was not enqueued, and breaks the calls.
  void check(int cuda_error, const char* what);

 private:
  void leave() noexcept;
  [[noreturn]] void fail_without_host_memory();
  void signal_fault(const FaultNotice& found = {});
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
  Event last_;  // the end of the last call that was not recorded
  // For telling other ranks of a fault: made early, since later there may be no memory for them.
  std::unique_ptr<CUstream_st, Destroy> fault_stream_;
  Event fault_signalled_;
  // The ids of the call's stream and of the last one's: one handle may stand for several streams.
  unsigned long long stream_id_ = 0, last_stream_ = 0;
  bool any_call_ = false;
  std::optional<FaultRecord> fault_;
  std::string broken_;  // the step that was not enqueued
};

}  // namespace winnow::expert_parallel
