// How every call of a layer begins on a GPU: the ranks meet, and one block of each decides. Device
// code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/expert_parallel/cuda/report.cuh"
#include "winnow/expert_parallel/cuda/view.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/exchange/exchange_base_cuda.cuh"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"
#include "winnow/expert_parallel/exchange/received.cuh"

namespace winnow::expert_parallel {

template <class Fabric>
class ExchangeBlock : ExchangeBase<Fabric, ExchangeParams> {
  using Base = ExchangeBase<Fabric, ExchangeParams>;
  using Base::epoch_;
  using Base::params_;
  using Base::topology_;
  using Base::view_;

 public:
  using Base::Base;

  __device__ void run() {
    this->post();
    if (!this->pass_on() || !this->receive()) return;
    // Not before: what follows would hold SMs while it may take another rank's kernel to go on.
    device::allow_next_kernel();
    decide();
    // What goes on is reported by the kernel that completes the report.
    if (params_.reports && (refused_ || params_.completes)) report();
    const bool bad = __syncthreads_or(any_bad_);
    if ((refused_ && !params_.waits) || (!refused_ && bad)) defer();
  }

 private:
  // Without branches, so that no load waits for another.
  __device__ void decide() {
    const Received received(view_, epoch_);
    bool refuses = false;
    for (int rank = threadIdx.x; rank < topology_.world; rank += blockDim.x) {
      const Header& header = received.header(rank);
      const bool bad = received.findings(rank).bad != 0;
      const auto* options = reinterpret_cast<const std::int64_t*>(&header.options);
      const auto* first = reinterpret_cast<const std::int64_t*>(&received.header(0).options);
      bool differ = false;
#pragma unroll
      for (int i = 0; i < int(sizeof(Options) / sizeof(std::int64_t)); ++i) {
        differ |= options[i] != first[i];
      }
      any_bad_ |= bad;
      refuses |= ((header.refusal != 0) & (header.deferred == 0)) | differ |
                 (bad & (header.options.worst_case_rows == 0));
    }
    refused_ = __syncthreads_or(refuses);
    if (threadIdx.x == 0) view_.state->refused = refused_;
  }

  __device__ void report() const {
    report_received(view_, view_.report, refused_);
    if (threadIdx.x != 0) return;
    view_.report.report->refused = refused_;
    complete(view_, view_.report);
  }

  __device__ void defer() const {
    if (!__syncthreads_or(threadIdx.x == 0 && can_defer(view_))) return;
    report_received(view_, view_.deferred, true);
    if (threadIdx.x != 0) return;
    view_.deferred.report->refused = refused_;
    view_.deferred.report->overflow = 0;
    complete(view_, view_.deferred);
  }

  bool refused_ = false;  // the same in all threads
  bool any_bad_ = false;  // of the ranks that this thread looked at
};

template <class Fabric>
__global__ void __launch_bounds__(kExchangeThreads)
    exchange_kernel(const __grid_constant__ ExchangeParams params) {
  const LayerView& view = params.view;
  device::wait_for_kernel_before();
  const bool was_broken = broken(view);
  const std::uint64_t epoch = epoch_of(view) + 1;
  if (__syncthreads_or(was_broken || (threadIdx.x == 0 && fault_signalled(view)))) return;
  if (threadIdx.x == 0) {
    view.state->epoch = epoch;
    view.state->call = params.call;
    for (std::uint32_t& claim : view.state->claims) claim = 0;
  }
  __syncthreads();
  ExchangeBlock<Fabric>(params, epoch).run();
}

}  // namespace winnow::expert_parallel
