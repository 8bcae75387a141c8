// How the ranks of a call meet on GPUs: one block of each rank tells all others what the rank wants
// and receives the same from all. The counterpart of Exchange (exchange.h). Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/fabric.cuh"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/exchange/received.cuh"

namespace winnow::expert_parallel {

inline constexpr int kExchangeThreads = 512;

// What a rank says is in Params: header, counts (counts_bytes() in device memory, which travel
// behind the header; null: none), table (table_bytes for the rail peers) and phase, which errors
// name. layer() are the layer's memories.
template <class Fabric, class Params>
class ExchangeBase {
 public:
  __device__ ExchangeBase(const Params& params, std::uint64_t epoch)
      : params_(params),
        view_(params.layer()),
        topology_(params.layer().topology),
        layout_(params.layer().control_layout),
        epoch_(epoch) {}

 protected:
  __device__ std::byte* own(std::int64_t offset) const { return view_.control.local + offset; }
  // This rank's row, to its places at the ranks of the node or to the one that the rail's puts
  // read.
  template <class ToOf>
  __device__ void write_row(int count, const ToOf& to_of) const {
    const Header& header = params_.header;
    copy_to_each(count, to_of, reinterpret_cast<const std::byte*>(&header),
                 header.refusal != 0 ? std::int64_t(sizeof(Header)) : kHeadBytes);
    if (params_.counts == nullptr) return;
    copy_to_each(
        count, [&](int i) { return to_of(i) + sizeof(Header); },
        reinterpret_cast<const std::byte*>(params_.counts), params_.counts_bytes());
  }

  // The row of `rank` has been written to all ranks of the node.
  __device__ void signal_received(int rank) const {
    __syncthreads();
    for (int to = threadIdx.x; to < topology_.locals; to += blockDim.x) {
      device::st_release_sys(
          reinterpret_cast<std::uint64_t*>(view_.control.node[to] + layout_.received) + rank,
          epoch_);
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
        Fabric::put(view_.control, to, at, own(at), bytes);
        Fabric::signal(view_.control, to, layout_.rail + topology_.node * kWord, epoch_);
      }
    }
    const std::int64_t at = layout_.row(epoch_, topology_.world, topology_.rank);
    write_row(topology_.locals, [&](int to) { return view_.control.node[to] + at; });
    signal_received(topology_.rank);
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
      signal_received(peer);
    }
    return true;
  }

  // This node first: its ranks pass on the others' rows, so one that is missing is named itself.
  __device__ bool read() const {
    const auto rank = [&](int i) {
      return (topology_.node * topology_.locals + i) % topology_.world;
    };
    const auto word = [&](int i) {
      return reinterpret_cast<const std::uint64_t*>(own(layout_.received)) + rank(i);
    };
    return wait_for_all(view_, topology_.world, word, epoch_, params_.phase, rank);
  }

  const Params& params_;
  const LayerView& view_;
  const CudaTopology& topology_;
  const ControlLayout& layout_;
  std::uint64_t epoch_;

 private:
  static constexpr std::int64_t kWord = sizeof(std::uint64_t);
};

}  // namespace winnow::expert_parallel
