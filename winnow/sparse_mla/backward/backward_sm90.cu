// Top-k sparse MLA attention, backward, sm90: the choice between the designs, and their memory.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/scratch.h"
#include "winnow/sparse_mla/backward/backward_fused_fixed_sm90.h"
#include "winnow/sparse_mla/backward/backward_fused_sm90.h"
#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/backward/backward_split_sm90.h"

namespace winnow::sparse_mla {

namespace {

// The fused kernel adds to dkv once for 64 heads, the split one once for all of them, in ranges of
// rows that stay in L2, and in any order where that must not show; but it writes P and dS and reads
// them back. Measured on an H200, s_q 4096, topk 2048: the fused kernel wins with 64 heads, the
// less the larger the cache (365 TFLOP/s beside 268 at s_kv 65536, 213 beside 192 at 262144).
//
// Deterministic, the fused kernel needs the bounds of its addends first, which takes the longer the
// more rows of the cache come from memory.
struct Design {
  std::int64_t (*workspace_bytes)(const BackwardParams&);
  void (*run)(const BackwardParams&, void* workspace, void* stream);
};

Design design_of(const BackwardParams& params) {
  const Problem& problem = params.problem;
  if (problem.h_q > 64 || problem.s_kv > (params.deterministic ? 65536 : 262144)) {
    return {backward_split_workspace_bytes, backward_split_sm90};
  }
  if (params.deterministic) {
    return {backward_fused_fixed_workspace_bytes, backward_fused_fixed_sm90};
  }
  return {backward_fused_workspace_bytes, backward_fused_sm90};
}

}  // namespace

std::int64_t backward_sm90_workspace_bytes(const BackwardParams& params) {
  const std::int64_t bytes = design_of(params).workspace_bytes(params);
  return std::max<std::int64_t>(bytes, 1);  // there always is an address
}

void backward_sm90(const BackwardParams& params, void* workspace, void* stream) {
  const device::Scratch scratch({"sparse_mla::backward", "sm90"}, workspace,
                                backward_sm90_workspace_bytes(params),
                                static_cast<cudaStream_t>(stream));
  design_of(params).run(params, scratch.data(), stream);
}

}  // namespace winnow::sparse_mla
