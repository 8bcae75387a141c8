// The exchange of notify: the ranks meet, and one block of each adds up what comes to it. Device
// code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/cuda/report.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/exchange/block_scan.cuh"
#include "winnow/expert_parallel/exchange/count_exchange_cuda.h"
#include "winnow/expert_parallel/exchange/exchange_base_cuda.cuh"
#include "winnow/expert_parallel/exchange/received.cuh"

namespace winnow::expert_parallel {

template <class Fabric>
class NotifyBlock : ExchangeBase<Fabric, CountExchangeParams> {
  using Base = ExchangeBase<Fabric, CountExchangeParams>;
  using Base::params_;
  using Base::topology_;
  using Base::view_;

 public:
  struct Shared {
    std::int64_t scratch[kExchangeThreads / 32];
    unsigned first;  // of what is wrong, in the order in which errors name it
  };

  __device__ NotifyBlock(const CountExchangeParams& params, Shared& shared, std::uint64_t call)
      : Base(params, call), shared_(shared), received_(view_, call) {}

  __device__ void run() {
    if (params_.counts != nullptr) take_counts();
    this->post();
    if (!this->pass_on() || !this->receive()) return;
    if (threadIdx.x == 0) shared_.first = kNone;
    const bool refused = find_refusals();
    if (!refused) add_up();
    __syncthreads();
    const unsigned first = shared_.first;  // of the results that are too large
    const bool runs = !refused && first == kNone;
    if (threadIdx.x == 0) view_.state->refused = !runs;
    if (runs) write_outputs();
    if (params_.waits) {
      signal_host(params_.view.report, refused, first);
    } else if (!runs && __syncthreads_or(threadIdx.x == 0 && can_defer())) {
      signal_host(params_.view.deferred, refused, first);
    }
  }

 private:
  using Sum = std::int64_t;
  static constexpr unsigned kNone = ~0u;

  // What this rank tells: its counts, and the first thing in them that contradicts its tokens, in
  // the order of the CPU's checks.
  __device__ void take_counts() {
    const int world = topology_.world, nodes = topology_.nodes, all = topology_.experts;
    const int experts = topology_.per_rank();
    auto* counts = reinterpret_cast<std::int32_t*>(params_.counts);
    const auto take = [&](std::int32_t* to, const std::int32_t* from, int size) {
      for (int i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
    };
    take(counts, params_.per_expert, all);
    take(counts + all, params_.per_rank, world);
    take(counts + all + world, params_.per_node, nodes);
    if (threadIdx.x == 0) shared_.first = kNone;
    __syncthreads();
    const std::int32_t* sums = params_.view.sums;
    for (int i = threadIdx.x; i < world + nodes; i += blockDim.x) {
      if (counts[all + i] != sums[i]) atomicMin(&shared_.first, unsigned(i));
    }
    const int lane = threadIdx.x % 32;
    for (int rank = threadIdx.x / 32; rank < world; rank += blockDim.x / 32) {
      Sum pairs = 0;
      bool negative = false;
      for (int x = lane; x < experts; x += 32) {
        const std::int32_t count = counts[rank * experts + x];
        negative = negative || count < 0;
        pairs += count;
      }
      pairs = device::warp_sum(pairs);
      negative = __any_sync(device::kFullWarp, negative);
      const Sum tokens = counts[all + rank];
      if (lane == 0 && (negative || pairs < tokens || pairs > kMaxTopk * tokens)) {
        atomicMin(&shared_.first, unsigned(world + nodes + rank));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      *reinterpret_cast<CountFinding*>(params_.counts + CountRow::found(topology_)) =
          shared_.first == kNone ? CountFinding{} : describe(counts, int(shared_.first));
    }
    __syncthreads();
  }

  __device__ CountFinding describe(const std::int32_t* counts, int i) const {
    const int world = topology_.world, nodes = topology_.nodes, experts = topology_.per_rank();
    const std::int32_t *tokens = counts + topology_.experts, *sums = params_.view.sums;
    if (i < world) return {CountFault::tokens_of_rank, i, sums[i], tokens[i]};
    if (i < world + nodes) return {CountFault::tokens_of_node, i - world, sums[i], tokens[i]};
    const int rank = i - world - nodes;
    Sum pairs = 0;
    for (int x = rank * experts; x < (rank + 1) * experts; ++x) {
      if (counts[x] < 0) return {CountFault::negative, x, 0, counts[x]};
      pairs += counts[x];
    }
    return {CountFault::pairs, rank, tokens[rank], pairs};
  }

  // What `rank` has found in its counts; nothing where it refuses the call, and has told none.
  __device__ CountFinding found(int rank) const {
    if (received_.header(rank).refusal != 0) return {};
    const auto* row = reinterpret_cast<const std::byte*>(received_.pairs(rank));
    return *reinterpret_cast<const CountFinding*>(row + CountRow::found(topology_));
  }

  // Every rank has received the same and comes to the same verdict.
  __device__ bool find_refusals() const {
    bool refuses = false;
    for (int rank = threadIdx.x; rank < topology_.world; rank += blockDim.x) {
      refuses = refuses || received_.header(rank).refusal != 0 ||
                found(rank).fault != CountFault::none ||
                received_.header(rank).options.channels != received_.header(0).options.channels;
    }
    return __syncthreads_or(refuses);
  }

  // The results, and the first of them that is too large.
  __device__ void add_up() {
    const int nodes = topology_.nodes, world = topology_.world, experts = topology_.per_rank();
    std::int64_t* results = params_.view.results;
    const auto store_at = [&](int first) {
      return [=, this](std::int64_t i, Sum sum) {
        results[first + i] = sum;
        if (sum > INT32_MAX) atomicMin(&shared_.first, unsigned(first + i));
      };
    };
    inclusive_sums(
        nodes, shared_.scratch,
        [&](std::int64_t node) {
          const int rank = topology_.rank_at(int(node), topology_.local);
          return Sum(received_.tokens(rank)[world + topology_.node]);
        },
        store_at(0));
    inclusive_sums(
        world, shared_.scratch,
        [&](std::int64_t rank) { return Sum(received_.tokens(int(rank))[topology_.rank]); },
        store_at(nodes));
    for (int x = threadIdx.x; x < experts; x += blockDim.x) {
      Sum pairs = 0;
      for (int rank = 0; rank < world; ++rank) {
        pairs += received_.pairs(rank)[topology_.rank * experts + x];
      }
      const Sum segments = (pairs + params_.alignment - 1) / params_.alignment;
      store_at(nodes + world)(x, segments * params_.alignment);
    }
  }

  __device__ void write_outputs() const {
    const int nodes = topology_.nodes, world = topology_.world, experts = topology_.per_rank();
    const std::int64_t* results = params_.view.results;
    const auto write = [&](std::int32_t* to, int first, int size) {
      for (int i = threadIdx.x; to != nullptr && i < size; i += blockDim.x) {
        to[i] = std::int32_t(results[first + i]);
      }
    };
    write(params_.recv_node_prefix, 0, nodes);
    write(params_.recv_rank_prefix, nodes, world);
    write(params_.num_forward, nodes - 1, 1);
    write(params_.num_recv, nodes + world - 1, 1);
    write(params_.pairs, nodes + world, experts);
    if (!params_.waits) return;
    std::int32_t* totals = params_.view.report.totals;
    write(totals, nodes + world - 1, 1);
    write(totals + 1, nodes - 1, 1);
    write(totals + 2, nodes + world, experts);
  }

  __device__ bool can_defer() const {
    return device::ld_acquire_sys(&params_.view.deferred.report->call) == 0;
  }

  __device__ void signal_host(const NotifyReportView& to, bool refused, unsigned too_large) const {
    using Word = std::uint64_t;
    constexpr int kWords = sizeof(Header) / sizeof(Word);
    for (int i = threadIdx.x; refused && i < topology_.world * kWords; i += blockDim.x) {
      reinterpret_cast<Word*>(&to.statements[i / kWords].message)[i % kWords] =
          reinterpret_cast<const Word*>(&received_.header(i / kWords))[i % kWords];
    }
    for (int rank = threadIdx.x; refused && rank < topology_.world; rank += blockDim.x) {
      to.statements[rank].found = found(rank);
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    const bool pairs = too_large >= unsigned(topology_.nodes + topology_.world);
    to.report->refused = refused;
    to.report->too_many = too_large == kNone ? 0 : pairs ? 2 : 1;
    to.report->count = too_large == kNone ? 0 : params_.view.results[too_large];
    __threadfence_system();
    device::st_release_sys(&to.report->call, params_.call);
  }

  Shared& shared_;
  Received received_;
};

template <class Fabric>
__global__ void __launch_bounds__(kExchangeThreads)
    notify_kernel(const __grid_constant__ CountExchangeParams params) {
  WINNOW_BLOCK_SHARED(shared, typename NotifyBlock<Fabric>::Shared);
  const LayerView& view = params.view.layer;
  const bool was_broken = broken(view);  // all of the block or none go on
  const std::uint64_t call = epoch_of(view) + 1;
  if (__syncthreads_or(was_broken || (threadIdx.x == 0 && fault_signalled(view)))) return;
  if (threadIdx.x == 0) view.state->epoch = call;
  NotifyBlock<Fabric>(params, shared, call).run();
}

}  // namespace winnow::expert_parallel
