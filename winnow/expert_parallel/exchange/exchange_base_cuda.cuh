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

// Params has what this rank sends: `header`; `counts`, counts_bytes() in device memory that travel
// behind it (null: none); `table`, table_bytes for the rail peers alone. It also has `phase`, which
// errors name, and layer(), the LayerView. A row is the header and the counts of one rank.
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
  // Writes this rank's row to to_of(0), ..., to_of(count - 1): its places at the ranks of the node,
  // or the one in its own memory that the puts to the rail peers read.
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

  // Tells all ranks of the node that the row of `rank` has been written to them. The whole block.
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
      for (int step = 1; step < nodes; ++step) {  // nodes begin with different peers
        const int to = topology_.rank_at((topology_.node + step) % nodes, topology_.local);
        Fabric::put(view_.control, to, at, own(at), bytes);
        Fabric::signal(view_.control, to, layout_.rail + topology_.node * kWord, epoch_);
      }
    }
    const std::int64_t at = layout_.row(epoch_, topology_.world, topology_.rank);
    write_row(topology_.locals, [&](int to) { return view_.control.node[to] + at; });
    signal_received(topology_.rank);
  }

  // Waits for the rows of the rail peers, in the order in which they are posted, and copies each to
  // the ranks of this node. False: the layer is broken.
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

  // Waits for all rows. The ranks of this node come first: if one is missing, so are the rows that
  // it passes on, and the error has to name that rank.
  __device__ bool receive() const {
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
