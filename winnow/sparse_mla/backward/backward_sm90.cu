// Top-k sparse MLA attention, backward, sm90: the choice between the designs, and their memory.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/scratch.h"
#include "winnow/sparse_mla/backward/backward_fused_fixed_sm90.h"
#include "winnow/sparse_mla/backward/backward_fused_sm90.h"
#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/backward/backward_joint_sm90.h"
#include "winnow/sparse_mla/backward/backward_sources_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_split_sm90.h"

namespace winnow::sparse_mla {

namespace {

// The fused kernel adds to dkv once for every 64 heads. The split kernel adds once for all heads,
// in ranges of rows that stay in L2 (in deterministic mode integers, in any order), but it writes P
// and dS and reads them back. Measured on an H200, s_q 4096, topk 2048: the fused kernel wins with
// 64 heads, by less the larger the cache is (365 TFLOP/s beside 268 at s_kv 65536, 213 beside 192
// at 262144).
//
// In deterministic mode the fused kernel first computes bounds of its addends. This takes longer
// the more rows of the cache come from memory, so its limit of s_kv is lower.
//
// The fused design takes all calls with ranges of rows. The split design has memory for P and dS of
// the most tiles that a query can have. With lists alone, the host knows this number from topk; a
// range may cover all rows.
struct Design {
  std::int64_t (*workspace_bytes)(const JointParams&);
  void (*run)(const JointParams&, void* workspace, void* stream);
};

Design design_of(const JointParams& params) {
  const Problem& problem = params.problem;
  const bool many = problem.h_q > 64 || problem.s_kv > (params.deterministic ? 65536 : 262144);
  if (many && !params.ranges()) {
    return {backward_split_workspace_bytes, backward_split_sm90};
  }
  if (params.deterministic) {
    return {backward_fused_fixed_workspace_bytes, backward_fused_fixed_sm90};
  }
  return {backward_fused_workspace_bytes, backward_fused_sm90};
}

constexpr device::Runtime kRuntime{"sparse_mla::backward", "sm90"};

// The rows of both sources come first in the workspace.
std::int64_t rows_bytes(const BackwardParams& params) {
  return device::scratch_bytes(joint_rows_bytes(params.problem));
}

void copy_sources(const Problem& problem, void* to, cudaStream_t stream) {
  const std::int64_t bytes = 2 * problem.d_qk;
  const auto copy = [&](const Source& source, std::int64_t first) {
    copy_rows(kRuntime, source.kv.data, 2 * source.kv.stride0,
              static_cast<char*>(to) + first * bytes, bytes, source.s_kv, bytes, stream);
  };
  copy(problem, 0);
  copy(problem.extra, problem.s_kv);
}

}  // namespace

std::int64_t backward_sm90_workspace_bytes(const BackwardParams& params) {
  const JointParams joint = joint_params(params, nullptr);
  const std::int64_t bytes = rows_bytes(params) + design_of(joint).workspace_bytes(joint);
  return std::max<std::int64_t>(bytes, 1);  // there always is an address
}

void backward_sm90(const BackwardParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, backward_sm90_workspace_bytes(params), queue);
  const JointParams joint = joint_params(params, scratch.data());
  if (params.problem.extra.kv.present()) copy_sources(params.problem, scratch.data(), queue);
  design_of(joint).run(joint, static_cast<char*>(scratch.data()) + rows_bytes(params), stream);
}

}  // namespace winnow::sparse_mla
