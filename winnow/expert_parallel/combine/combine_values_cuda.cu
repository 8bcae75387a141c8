// What combine does with single numbers: the values of pairs travel home, and the weights that it
// is given become f32 tables.
#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/combine/combine_finish.cuh"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/cuda/bits.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/exchange/received.cuh"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kThreads = 256;

// One (token, k) pair of a rail source after the other, each thread its own.
struct PairItem {
  int node, k;
  std::int64_t token;
};

class Values {
 public:
  __device__ Values(const ValueParams& params, const std::byte* const* tables)
      : params_(params), topology_(params.view.topology), tables_(tables) {}

  // The bits of a pair whose expert lives on this node; 0 where it has no row here.
  __device__ std::uint32_t here(const PairItem& item) const {
    const std::int64_t at = table_index(item);
    const std::int32_t expert = params_.routing.indices[at], row = params_.routing.rows[at];
    if (!topology_.kept(expert) || row < 0) return 0;
    const int home = expert / topology_.per_rank();
    if (home / topology_.locals != topology_.node) return 0;
    const std::int64_t value =
        params_.token_major ? std::int64_t(row) * topology_.topk + item.k : row;
    return load_bits(tables_[home % topology_.locals], value, params_.dtype);
  }
  // The sum of the values [k] of all rows of the item's token on this node, ranks ascending.
  __device__ float sum_here(const PairItem& item) const {
    float sum = 0;
    for (int local = 0; local < topology_.locals; ++local) {
      for (int k = 0; k < topology_.topk; ++k) {
        const std::int64_t at = table_index({item.node, k, item.token});
        const std::int32_t expert = params_.routing.indices[at], row = params_.routing.rows[at];
        if (!topology_.kept(expert) || row < 0) continue;
        if (expert / topology_.per_rank() != topology_.rank_at(topology_.node, local)) continue;
        const std::int64_t value = std::int64_t(row) * topology_.topk + item.k;
        sum = __fadd_rn(sum,
                        to_float(params_.dtype, load_bits(tables_[local], value, params_.dtype)));
        break;
      }
    }
    return sum;
  }
  // Whether a pair of this rank's token has an expert on the node.
  __device__ bool wants(int node, const PairItem& item) const {
    for (int k = 0; k < topology_.topk; ++k) {
      if (node_of({item.node, k, item.token}) == node) return true;
    }
    return false;
  }
  // The same of all nodes. False: what another node sends does not come.
  __device__ bool total(const PairItem& item, float& sum) const {
    sum = 0;
    for (int node = 0; node < topology_.nodes; ++node) {
      if (node == topology_.node) {
        sum = __fadd_rn(sum, sum_here(item));
      } else if (wants(node, item)) {
        std::uint32_t bits = 0;
        if (!arrived(node, item, bits)) return false;
        sum = __fadd_rn(sum, to_float(params_.dtype, bits));
      }
    }
    return true;
  }
  // The node of the pair's expert; -1: the pair is dropped.
  __device__ int node_of(const PairItem& item) const {
    const std::int32_t expert = params_.routing.indices[table_index(item)];
    return topology_.kept(expert) ? expert / (topology_.per_rank() * topology_.locals) : -1;
  }
  // What the rail peer on that node has sent. False: it does not come.
  __device__ bool arrived(int node, const PairItem& item, std::uint32_t& bits) const {
    const LayerView& view = params_.view;
    const auto* signal = reinterpret_cast<const std::uint64_t*>(
        view.rail.local + view.rail_layout.signal(node, item.token / kChunkTokens));
    if (!wait_at_least(view, signal, epoch_of(view), kSumsPhase,
                       topology_.rank_at(node, topology_.local))) {
      return false;
    }
    bits = load_bits(view.rail.local + view.rail_layout.scale(node, item.token, row_bytes()),
                     item.k, params_.dtype);
    return true;
  }
  __device__ std::int64_t row_bytes() const { return topology_.topk * bytes_of(params_.dtype); }

 private:
  __device__ std::int64_t table_index(const PairItem& item) const {
    return (item.node * params_.max_tokens + item.token) * topology_.topk + item.k;
  }

  const ValueParams& params_;
  const CudaTopology& topology_;
  const std::byte* const* tables_;
};

__global__ void __launch_bounds__(kThreads)
    values_kernel(const __grid_constant__ ValueParams params, Part part) {
  const LayerView& view = params.view;
  const CudaTopology& topology = view.topology;
  WINNOW_BLOCK_SHARED(tables, const std::byte* [kMaxLocals]);
  if (__syncthreads_or(!runs(view) || *params.routing.placed == 0)) return;
  const Received received(view);
  for (int local = int(threadIdx.x); local < topology.locals; local += kThreads) {
    const Header& header = received.header(topology.rank_at(topology.node, local));
    tables[local] = at_extent(view, local, header.values);
  }
  __syncthreads();
  const Values values(params, tables);
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  const std::int64_t begin = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (part == kOwn) {
    bool there = true;
    for (std::int64_t i = begin; there && i < params.tokens * topology.topk; i += step) {
      const PairItem item{topology.node, int(i % topology.topk), i / topology.topk};
      const int node = values.node_of(item);
      std::uint32_t bits = 0;
      if (params.adds) {
        float sum = 0;
        there = values.total(item, sum);
        bits = from_float(params.dtype, sum);
      } else if (node == topology.node) {
        bits = values.here(item);
      } else if (node >= 0) {
        there = values.arrived(node, item, bits);
      }
      store_bits(params.out + item.token * params.out_stride, item.k, params.dtype, bits);
    }
    if (params.finishes) finish(view);
    return;
  }
  const std::int64_t of_node = params.max_tokens * topology.topk;
  for (std::int64_t i = begin; i < (topology.nodes - 1) * of_node; i += step) {
    const int node = (topology.node + 1 + int(i / of_node)) % topology.nodes;
    const PairItem item{node, int(i % topology.topk), i % of_node / topology.topk};
    if (item.token >= params.routing.tokens[topology.rank_at(node, topology.local)]) continue;
    std::byte* to =
        view.rail.local + view.rail_layout.staged_scale(node, item.token, values.row_bytes());
    const std::uint32_t bits =
        params.adds ? from_float(params.dtype, values.sum_here(item)) : values.here(item);
    store_bits(to, item.k, params.dtype, bits);
  }
}

__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ WeightParams params) {
  const LayerView& view = params.view;
  const CudaTopology& topology = view.topology;
  if (!runs(view)) return;
  const std::int64_t of_node = params.max_tokens * topology.topk;
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
       i < topology.nodes * of_node; i += step) {
    const int node = int(i / of_node);
    const std::int64_t pair = i % of_node, token = pair / topology.topk;
    const bool own = node == topology.node;
    const std::int64_t tokens =
        own ? params.tokens : params.rail_tokens[topology.rank_at(node, topology.local)];
    if (token >= tokens) continue;
    std::uint32_t bits;
    if (own) {
      bits = load_bits(params.weights + token * params.stride, pair % topology.topk, params.dtype);
    } else {
      const std::byte* table =
          view.control.local + view.control_layout.rail_table(epoch_of(view), topology.nodes, node);
      bits = load_bits(table, pair, params.dtype);
    }
    params.pairs[i] = to_float(params.dtype, bits);
  }
}

}  // namespace

int launch_values(Part part, const ValueParams& params, int blocks, void* stream) {
  return device::launch(values_kernel, unsigned(blocks), kThreads, 0,
                        static_cast<cudaStream_t>(stream), params, part);
}

int launch_weights(const WeightParams& params, int blocks, void* stream) {
  return device::launch(weights_kernel, unsigned(blocks), kThreads, 0,
                        static_cast<cudaStream_t>(stream), params);
}

int load_values() { return device::load_kernels(values_kernel, weights_kernel); }

}  // namespace winnow::expert_parallel
