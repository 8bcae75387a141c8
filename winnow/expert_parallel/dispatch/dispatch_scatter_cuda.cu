// The kernels of scatter_indices: translate turns the caller's numbers into rows of each expert's
// rank, claim finds rows that two pairs name. The host reads the finding after each of them. Both
// are one block, since they move little.
#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/expert_parallel/cuda/view.cuh"
#include "winnow/expert_parallel/dispatch/dispatch_kernels_cuda.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter_cuda.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kThreads = 1024;
constexpr unsigned long long kNone = ~0ull;

// The finding of the kernel, where the host reads it.
__device__ ScatterFinding* finding_of(const LayerView& view) {
  return reinterpret_cast<ScatterFinding*>(view.report.words);
}

__global__ __launch_bounds__(kThreads) void translate(const __grid_constant__ ScatterParams p) {
  if (!runs(p.view)) return;
  WINNOW_BLOCK_SHARED(first_bad, unsigned long long);
  const CudaTopology& topology = p.view.topology;
  const int topk = topology.topk;
  if (threadIdx.x == 0) first_bad = kNone;
  __syncthreads();
  const std::int32_t* indices =
      p.tables.indices + topology.node * p.max_tokens * std::int64_t(topk);
  for (std::int64_t pair = threadIdx.x; pair < p.tokens * topk; pair += kThreads) {
    p.rows[pair] = -1;
    if (!topology.kept(indices[pair])) continue;
    const int rank = indices[pair] / topology.per_rank();
    std::int64_t begin = 0;
    for (int before = 0; before < rank; ++before) begin += p.tables.wanted[before];
    const std::int64_t token = pair / topk;
    const std::int64_t row = p.given[token * p.stride + pair % topk] - begin;
    if (row < 0 || row >= p.tables.wanted[rank]) {
      atomicMin(&first_bad, static_cast<unsigned long long>(pair));
    } else {
      p.rows[pair] = static_cast<std::int32_t>(row);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  ScatterFinding finding;
  if (first_bad != kNone) {
    finding.bad = 1;
    finding.pair = static_cast<std::int64_t>(first_bad);
    finding.rank = topology.rank;
    finding.expert_rank = indices[finding.pair] / topology.per_rank();
    finding.value = p.given[finding.pair / topk * p.stride + finding.pair % topk];
  }
  *finding_of(p.view) = finding;
}

// Each pair writes its number among the pairs of all ranks into the word of its row. Of two numbers
// the smaller one stays, so that the larger one is at fault whichever came first.
__global__ __launch_bounds__(kThreads) void claim(const __grid_constant__ ScatterParams p) {
  if (!runs(p.view)) return;
  WINNOW_BLOCK_SHARED(first_bad, unsigned long long);
  const CudaTopology& topology = p.view.topology;
  const std::int64_t most_pairs = p.max_tokens * topology.topk;
  const int per_node = topology.experts / topology.nodes;
  if (threadIdx.x == 0) {
    first_bad = kNone;
    *finding_of(p.view) = ScatterFinding{};
  }
  __syncthreads();
  ScatterFinding found;              // of this thread
  unsigned long long worst = kNone;  // the smallest pair at fault
  for (int from = 0; from < topology.nodes; ++from) {
    const int source = topology.rank_at(from, topology.local);
    const std::int64_t pairs = std::int64_t(p.tables.tokens[source]) * topology.topk;
    const std::int32_t* rows = p.rows;
    if (from != topology.node) {
      rows = reinterpret_cast<const std::int32_t*>(
          p.view.control.local +
          p.view.control_layout.rail_table(epoch_of(p.view), topology.nodes, from));
    }
    for (std::int64_t pair = threadIdx.x; pair < pairs; pair += kThreads) {
      const std::int64_t at = from * most_pairs + pair;
      const std::int32_t expert = p.tables.indices[at];
      if (!topology.kept(expert) || expert / per_node != topology.node) continue;
      const std::int32_t row = rows[pair];
      p.tables.rows[at] = row;
      const int rank = expert / topology.per_rank();
      auto* word =
          reinterpret_cast<unsigned long long*>(p.owners.data[rank % topology.locals]) + row;
      const unsigned long long mine = source * most_pairs + pair;
      const unsigned long long other = atomicMin_system(word, mine);
      const unsigned long long again = max(mine, other);
      if (other == kNone || again >= worst) continue;
      worst = again;
      found = {1, std::int64_t(again % most_pairs), std::int64_t(again / most_pairs), rank, row};
    }
  }
  if (worst != kNone) atomicMin(&first_bad, worst);
  __syncthreads();
  if (worst != kNone && worst == first_bad)
    *finding_of(p.view) = found;  // in one thread: a pair loses its row once
}

}  // namespace

int launch_translate(const ScatterParams& params, void* stream) {
  return device::launch(translate, 1, kThreads, 0, static_cast<cudaStream_t>(stream), params);
}

int launch_claim(const ScatterParams& params, void* stream) {
  return device::launch(claim, 1, kThreads, 0, static_cast<cudaStream_t>(stream), params);
}

int load_scatter() { return device::load_kernels(translate, claim); }

}  // namespace winnow::expert_parallel
