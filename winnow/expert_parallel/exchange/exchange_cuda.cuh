// How every call begins on a GPU: one block of each rank tells all others what the rank wants,
// hears the same from all, and decides. The counterpart of Exchange (exchange.h). Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/expert_parallel/cuda/report.cuh"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/cuda/wire.cuh"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"
#include "winnow/expert_parallel/exchange/heard.cuh"

namespace winnow::expert_parallel {

inline constexpr int kExchangeThreads = 512;

template <class W>
class ExchangeBlock {
 public:
  __device__ ExchangeBlock(const ExchangeParams& params, std::uint64_t epoch)
      : params_(params),
        view_(params.view),
        topology_(params.view.topology),
        layout_(params.view.control_layout),
        epoch_(epoch) {}

  __device__ void run() {
    post();
    if (!pass_on() || !hear()) return;
    // Not before: what follows would hold SMs while it may take another rank's kernel to go on.
    device::allow_next_kernel();
    decide();
    // What goes on is reported by the kernel that completes the report.
    if (params_.reports && (refused_ || params_.completes)) report();
    const bool bad = __syncthreads_or(any_bad_);
    if ((refused_ && !params_.waits) || (!refused_ && bad)) defer();
  }

 private:
  __device__ std::byte* own(std::int64_t offset) const { return view_.control.local + offset; }
  // This rank's row, to its places at the ranks of the node or to the one that the rail's puts
  // read.
  template <class ToOf>
  __device__ void write_row(int count, const ToOf& to_of) const {
    const Header& header = params_.header;
    copy_to_each(count, to_of, reinterpret_cast<const std::byte*>(&header),
                 header.refusal != 0 ? std::int64_t(sizeof(Header)) : kHeadBytes);
    if (params_.counts == nullptr) return;
    const std::int64_t counts =
        (topology_.experts + topology_.world) * std::int64_t(sizeof(std::int32_t));
    copy_to_each(
        count, [&](int i) { return to_of(i) + sizeof(Header); },
        reinterpret_cast<const std::byte*>(params_.counts),
        counts + std::int64_t(sizeof(Findings)));
  }

  // The row of `rank` has been written to all ranks of the node.
  __device__ void tell_heard(int rank) const {
    __syncthreads();
    for (int to = threadIdx.x; to < topology_.locals; to += blockDim.x) {
      device::st_release_sys(
          reinterpret_cast<std::uint64_t*>(view_.control.node[to] + layout_.heard) + rank, epoch_);
    }
  }

  __device__ void post() const {
    const int nodes = topology_.nodes;
    if (nodes > 1) {
      const std::int64_t at = layout_.rail_row(epoch_, nodes, topology_.node);
      const std::int64_t bytes =
          params_.table_bytes > 0 ? layout_.row_bytes + params_.table_bytes : layout_.row_bytes;
      write_row(1, [&](int) { return own(at); });
      copy_by_block(own(at + layout_.row_bytes), params_.table, params_.table_bytes);
      __threadfence_system();
      __syncthreads();
      for (int step = 1; step < nodes; ++step) {  // no rank is everyone's first
        const int to = topology_.rank_at((topology_.node + step) % nodes, topology_.local);
        W::put(view_.control, to, at, own(at), bytes);
        W::signal(view_.control, to, layout_.rail + topology_.node * kWord, epoch_);
      }
    }
    const std::int64_t at = layout_.row(epoch_, topology_.world, topology_.rank);
    write_row(topology_.locals, [&](int to) { return view_.control.node[to] + at; });
    tell_heard(topology_.rank);
  }

  // The rows of the other nodes, to the ranks of this one, in the order in which they are posted.
  __device__ bool pass_on() const {
    const int nodes = topology_.nodes;
    for (int step = nodes - 1; step > 0; --step) {
      const int from = (topology_.node + step) % nodes;
      const int peer = topology_.rank_at(from, topology_.local);
      const auto word = [&](int) {
        return reinterpret_cast<const std::uint64_t*>(own(layout_.rail)) + from;
      };
      if (!wait_for_all(view_, 1, word, epoch_, params_.phase, [&](int) { return peer; })) {
        return false;
      }
      const std::byte* row = own(layout_.rail_row(epoch_, nodes, from));
      const std::int64_t at = layout_.row(epoch_, topology_.world, peer);
      copy_to_each(
          topology_.locals, [&](int to) { return view_.control.node[to] + at; }, row,
          layout_.row_bytes);
      tell_heard(peer);
    }
    return true;
  }

  // This node first: its ranks pass on the others' rows, so one that is missing is named itself.
  __device__ bool hear() const {
    const auto rank = [&](int i) {
      return (topology_.node * topology_.locals + i) % topology_.world;
    };
    const auto word = [&](int i) {
      return reinterpret_cast<const std::uint64_t*>(own(layout_.heard)) + rank(i);
    };
    return wait_for_all(view_, topology_.world, word, epoch_, params_.phase, rank);
  }

  // Without branches, so that no load waits for another.
  __device__ void decide() {
    const Heard heard(view_, epoch_);
    bool refuses = false;
    for (int rank = threadIdx.x; rank < topology_.world; rank += blockDim.x) {
      const Header& header = heard.header(rank);
      const bool bad = heard.findings(rank).bad != 0;
      const auto* options = reinterpret_cast<const std::int64_t*>(&header.options);
      const auto* first = reinterpret_cast<const std::int64_t*>(&heard.header(0).options);
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
    report_heard(view_, view_.report, refused_);
    if (threadIdx.x != 0) return;
    view_.report.report->refused = refused_;
    complete(view_, view_.report);
  }

  __device__ void defer() const {
    if (!__syncthreads_or(threadIdx.x == 0 && can_defer(view_))) return;
    report_heard(view_, view_.deferred, true);
    if (threadIdx.x != 0) return;
    view_.deferred.report->refused = refused_;
    view_.deferred.report->overflow = 0;
    complete(view_, view_.deferred);
  }

  static constexpr std::int64_t kWord = sizeof(std::uint64_t);

  const ExchangeParams& params_;
  const LayerView& view_;
  const DeviceTopology& topology_;
  const ControlLayout& layout_;
  std::uint64_t epoch_;
  bool refused_ = false;  // the same in all threads
  bool any_bad_ = false;  // of the ranks that this thread looked at
};

template <class W>
__global__ void __launch_bounds__(kExchangeThreads)
    exchange_kernel(const __grid_constant__ ExchangeParams params) {
  const LayerView& view = params.view;
  device::wait_for_kernel_before();
  const bool was_broken = broken(view);
  const std::uint64_t epoch = epoch_of(view) + 1;
  if (__syncthreads_or(was_broken || (threadIdx.x == 0 && told_of_fault(view)))) return;
  if (threadIdx.x == 0) {
    view.state->epoch = epoch;
    view.state->call = params.call;
    for (std::uint32_t& claim : view.state->claims) claim = 0;
  }
  __syncthreads();
  ExchangeBlock<W>(params, epoch).run();
}

}  // namespace winnow::expert_parallel
