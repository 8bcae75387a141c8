// The exchange of notify: one block of each rank tells the others its counts and learns what comes
// to it. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/cuda/report.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/cuda/wire.cuh"
#include "winnow/expert_parallel/exchange/block_scan.cuh"
#include "winnow/expert_parallel/exchange/count_exchange_cuda.h"

namespace winnow::expert_parallel {

inline constexpr int kNotifyThreads = 512;

template <class W>
class NotifyBlock {
 public:
  struct Shared {
    CountFinding found;
    std::int64_t scratch[kNotifyThreads / 32];
    unsigned first;  // of what is wrong, in the order in which errors name it
  };

  __device__ NotifyBlock(const CountExchangeParams& params, Shared& shared, std::uint64_t call)
      : params_(params),
        shared_(shared),
        view_(params.view.layer),
        topology_(view_.topology),
        layout_(params.view.layout),
        call_(call) {}

  __device__ void run() {
    state_own_case();
    post_between_nodes();
    if (!hear_between_nodes()) return;
    post_in_node();
    if (!hear_in_node()) return;
    const bool refused = find_refusals();
    if (!refused) add_up();
    __syncthreads();
    const unsigned first = shared_.first;  // of the results that are too large
    const bool runs = !refused && first == kNone;
    if (threadIdx.x == 0) view_.state->refused = !runs;
    if (runs) write_outputs();
    if (params_.waits) {
      tell_host(params_.view.report, refused, first);
    } else if (!runs && __syncthreads_or(threadIdx.x == 0 && can_defer())) {
      tell_host(params_.view.deferred, refused, first);
    }
  }

 private:
  using Word = std::int64_t;
  static constexpr unsigned kNone = ~0u;
  static constexpr int kStatement = NotifyLayout::kStatementWords;
  static constexpr int kSaid = sizeof(Header) / sizeof(Word);  // of them, before what was found

  __device__ std::byte* own(std::int64_t offset) const { return view_.control.local + offset; }
  __device__ const Word* from_node(int node) const {
    return reinterpret_cast<const Word*>(own(layout_.node_message(call_, topology_.nodes, node)));
  }
  __device__ const Word* from_local(int local) const {
    return reinterpret_cast<const Word*>(
        own(layout_.local_message(call_, topology_.locals, local)));
  }
  // What rank (node, local) says, in the message of the rank of this node with its local index.
  __device__ const Word* said_by(int rank) const {
    const int node = rank / topology_.locals, local = rank % topology_.locals;
    return from_local(local) + node * (kStatement + 1);
  }

  // The first thing that contradicts the tokens themselves, in the order of the CPU's checks.
  __device__ void state_own_case() {
    const int world = topology_.world, nodes = topology_.nodes, experts = topology_.per_rank();
    if (threadIdx.x == 0) {
      shared_.found = {};
      shared_.first = kNone;
    }
    __syncthreads();
    if (params_.statement.refusal != 0) return;
    const std::int32_t* sums = params_.view.sums;
    const auto given = [&](int i) {
      return i < world ? params_.per_rank[i] : params_.per_node[i - world];
    };
    for (int i = threadIdx.x; i < world + nodes; i += blockDim.x) {
      if (given(i) != sums[i]) atomicMin(&shared_.first, unsigned(i));
    }
    const int lane = threadIdx.x % 32;
    for (int rank = threadIdx.x / 32; rank < world; rank += blockDim.x / 32) {
      Word pairs = 0;
      bool negative = false;
      for (int x = lane; x < experts; x += 32) {
        const std::int32_t count = params_.per_expert[rank * experts + x];
        negative = negative || count < 0;
        pairs += count;
      }
      pairs = device::warp_sum(pairs);
      negative = __any_sync(device::kFullWarp, negative);
      const Word tokens = params_.per_rank[rank];
      if (lane == 0 && (negative || pairs < tokens || pairs > kMaxTopk * tokens)) {
        atomicMin(&shared_.first, unsigned(world + nodes + rank));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && shared_.first != kNone) {
      shared_.found = describe(int(shared_.first));
    }
    __syncthreads();
    if (threadIdx.x == 0) shared_.first = kNone;
  }

  __device__ CountFinding describe(int i) const {
    const int world = topology_.world, nodes = topology_.nodes, experts = topology_.per_rank();
    const std::int32_t* sums = params_.view.sums;
    if (i < world) return {CountFault::tokens_of_rank, i, sums[i], params_.per_rank[i]};
    if (i < world + nodes) {
      return {CountFault::tokens_of_node, i - world, sums[i], params_.per_node[i - world]};
    }
    const int rank = i - world - nodes;
    Word pairs = 0;
    for (int x = rank * experts; x < (rank + 1) * experts; ++x) {
      if (params_.per_expert[x] < 0) return {CountFault::negative, x, 0, params_.per_expert[x]};
      pairs += params_.per_expert[x];
    }
    return {CountFault::pairs, rank, params_.per_rank[rank], pairs};
  }

  // To the rank of the own local index on every node, the own one included.
  __device__ void post_between_nodes() const {
    const int nodes = topology_.nodes;
    __syncthreads();
    for (int step = 1; step < nodes; ++step) {  // no rank is everyone's first
      const int to = (topology_.node + step) % nodes;
      std::byte* message = own(layout_.outgoing(call_, nodes, to));
      write_for_node(to, reinterpret_cast<Word*>(message));
      __threadfence_system();
      __syncthreads();
      const int peer = topology_.rank_at(to, topology_.local);
      W::put(view_.control, peer, layout_.node_message(call_, nodes, topology_.node), message,
             layout_.node_message_words * NotifyLayout::kWord);
      W::signal(view_.control, peer, layout_.node_signal(call_, nodes, topology_.node), call_);
    }
    write_for_node(topology_.node, const_cast<Word*>(from_node(topology_.node)));
    __syncthreads();
    if (threadIdx.x == 0) {
      device::st_release_sys(word_at(layout_.node_signal(call_, nodes, topology_.node)), call_);
    }
  }

  __device__ void write_for_node(int node, Word* message) const {
    const int locals = topology_.locals, pairs = locals * topology_.per_rank();
    const bool silent = params_.statement.refusal != 0;
    const auto* said = reinterpret_cast<const Word*>(&params_.statement);
    const auto* found = reinterpret_cast<const Word*>(&shared_.found);
    for (int i = threadIdx.x; i < kStatement + locals + pairs + 1; i += blockDim.x) {
      int at = i - kStatement;
      Word word = 0;
      if (at < 0) {
        word = i < kSaid ? said[i] : found[i - kSaid];
      } else if (silent) {
        word = 0;
      } else if (at < locals) {
        word = params_.per_rank[node * locals + at];
      } else if ((at -= locals) < pairs) {
        word = params_.per_expert[node * pairs + at];
      } else {
        word = params_.per_node[node];
      }
      message[i] = word;
    }
  }

  __device__ bool hear_between_nodes() const {
    const auto word = [&](int node) {
      return word_at(layout_.node_signal(call_, topology_.nodes, node));
    };
    const auto peer = [&](int node) { return topology_.rank_at(node, topology_.local); };
    return wait_for_all(view_, topology_.nodes, word, call_, kRailCountsPhase, peer);
  }

  // To every rank of the node: what the rail has said, its tokens for that rank, its pairs summed.
  __device__ void post_in_node() const {
    const int nodes = topology_.nodes, locals = topology_.locals, experts = topology_.per_rank();
    const int statements = nodes * (kStatement + 1), words = statements + experts;
    for (int i = threadIdx.x; i < locals * words; i += blockDim.x) {
      const int to = i / words, at = i % words;
      Word word = 0;
      if (at < statements) {
        const int in = at % (kStatement + 1);
        word = from_node(at / (kStatement + 1))[in < kStatement ? in : kStatement + to];
      } else {
        const int pair = kStatement + locals + to * experts + at - statements;
        for (int node = 0; node < nodes; ++node) word += from_node(node)[pair];
      }
      auto* message = reinterpret_cast<Word*>(
          view_.control.node[to] + layout_.local_message(call_, locals, topology_.local));
      message[at] = word;
    }
    __syncthreads();
    for (int to = threadIdx.x; to < locals; to += blockDim.x) {
      __threadfence_system();
      device::st_release_sys(
          reinterpret_cast<std::uint64_t*>(view_.control.node[to] +
                                           layout_.local_signal(call_, locals, topology_.local)),
          call_);
    }
  }

  __device__ bool hear_in_node() const {
    const auto word = [&](int local) {
      return word_at(layout_.local_signal(call_, topology_.locals, local));
    };
    const auto peer = [&](int local) { return topology_.rank_at(topology_.node, local); };
    return wait_for_all(view_, topology_.locals, word, call_, kNodeCountsPhase, peer);
  }

  // Every rank has the same statements and comes to the same verdict.
  __device__ bool find_refusals() const {
    const auto statement = [&](int rank) {
      return reinterpret_cast<const CheckedStatement*>(said_by(rank));
    };
    bool refuses = false;
    for (int rank = threadIdx.x; rank < topology_.world; rank += blockDim.x) {
      refuses = refuses || statement(rank)->said.refusal != 0 ||
                statement(rank)->found.fault != CountFault::none ||
                statement(rank)->said.options.channels != statement(0)->said.options.channels;
    }
    return __syncthreads_or(refuses);
  }

  // The results, and the first of them that is too large.
  __device__ void add_up() {
    const int nodes = topology_.nodes, world = topology_.world, experts = topology_.per_rank();
    const int tokens_for_node = kStatement + topology_.locals * (1 + experts);
    std::int64_t* results = params_.view.results;
    const auto store_at = [&](int first) {
      return [=, this](std::int64_t i, Word sum) {
        results[first + i] = sum;
        if (sum > INT32_MAX) atomicMin(&shared_.first, unsigned(first + i));
      };
    };
    inclusive_sums(
        nodes, shared_.scratch,
        [&](std::int64_t node) { return from_node(int(node))[tokens_for_node]; }, store_at(0));
    inclusive_sums(
        world, shared_.scratch, [&](std::int64_t rank) { return said_by(int(rank))[kStatement]; },
        store_at(nodes));
    for (int x = threadIdx.x; x < experts; x += blockDim.x) {
      Word pairs = 0;
      for (int local = 0; local < topology_.locals; ++local) {
        pairs += from_local(local)[nodes * (kStatement + 1) + x];
      }
      const Word segments = (pairs + params_.alignment - 1) / params_.alignment;
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

  __device__ void tell_host(const NotifyReportView& to, bool refused, unsigned too_large) const {
    for (int i = threadIdx.x; refused && i < topology_.world * kStatement; i += blockDim.x) {
      reinterpret_cast<Word*>(to.statements)[i] = said_by(i / kStatement)[i % kStatement];
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

  __device__ std::uint64_t* word_at(std::int64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(own(offset));
  }

  const CountExchangeParams& params_;
  Shared& shared_;
  const LayerView& view_;
  const DeviceTopology& topology_;
  const NotifyLayout& layout_;
  std::uint64_t call_;
};

template <class W>
__global__ void __launch_bounds__(kNotifyThreads)
    notify_kernel(const __grid_constant__ CountExchangeParams params) {
  WINNOW_BLOCK_SHARED(shared, typename NotifyBlock<W>::Shared);
  const LayerView& view = params.view.layer;
  if (broken(view)) return;
  const std::uint64_t call = epoch_of(view) + 1;
  if (__syncthreads_or(threadIdx.x == 0 && told_of_fault(view))) return;
  if (threadIdx.x == 0) view.state->epoch = call;
  NotifyBlock<W>(params, shared, call).run();
}

}  // namespace winnow::expert_parallel
