// Top-k sparse MLA attention, backward, sm90: the launches of the fused design.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/sparse_mla/backward/backward_fused_launch.cuh"
#include "winnow/sparse_mla/backward/backward_fused_sm90.h"
#include "winnow/sparse_mla/backward/backward_fused_steps_sm90.cuh"

namespace winnow::sparse_mla {

namespace {

namespace fused = backward_fused_sm90_detail;
using namespace fused;

constexpr device::Runtime kRuntime{"sparse_mla::backward", "sm90"};

std::int64_t head_blocks(const Problem& problem) {
  return (problem.h_q + fused::kHeads - 1) / fused::kHeads;
}

int tiles(const Problem& problem) {
  return static_cast<int>((problem.topk + kTileRows - 1) / kTileRows);
}

// Whether prepare_kernel computes delta.
bool has_delta_ahead(const JointParams& params) {
  return !params.delta.present() && (params.ranges() || tiles(params.problem) < fused::kDeltaSteps);
}

// Where what lies in the workspace of the fused kernel; offsets in bytes, multiples of 256.
struct Workspace {
  std::int64_t step, accumulator;  // side by side: both begin as zeros
  std::int64_t ordered, lengths, ranges, delta, sink_share, dq_parts, bytes;

  Workspace(const JointParams& params, int blocks) {
    const Problem& problem = params.problem;
    bytes = 0;
    const auto take = [&](std::int64_t size) {
      const std::int64_t offset = bytes;
      bytes += device::scratch_bytes(size);
      return offset;
    };
    const std::int64_t heads = problem.s_q * problem.h_q;
    const bool tail = problem.s_q * head_blocks(problem) % blocks > 0;
    step = take(4);
    accumulator = take((problem.s_kv + blocks) * problem.d_qk * 4);
    ordered = take(problem.s_q * problem.topk * 4);
    lengths = take(problem.s_q * 4);
    ranges = take(params.ranges() ? problem.s_q * std::int64_t{sizeof(QueryRanges)} : 0);
    delta = take(has_delta_ahead(params) ? heads * 4 : 0);
    sink_share = take(params.d_sink.present() ? heads * 4 : 0);
    dq_parts = take(tail ? 2 * blocks * fused::kHeads * problem.d_qk * 4 : 0);
  }
};

// One call: what every step of it needs.
struct Call {
  const JointParams& params;
  const Problem& problem;
  const Workspace& layout;
  char* workspace;
  int blocks;
  cudaStream_t stream;
  std::int64_t heads() const { return problem.s_q * problem.h_q; }
  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  QueryRanges* ranges() const { return params.ranges() ? at<QueryRanges>(layout.ranges) : nullptr; }
};

// The order of the entries, zeros, delta where topk is short.
void prepare(const Call& call) {
  const Problem& problem = call.problem;
  const JointParams& params = call.params;
  PrepareParams p{};
  p.zeros = call.at<float4>(call.layout.step);
  p.zero_count =
      (call.layout.accumulator - call.layout.step) / 16 + problem.s_kv * problem.d_qk / 4;
  p.zero_blocks =
      static_cast<unsigned>(std::min<std::int64_t>((p.zero_count + 2047) / 2048, 16 * call.blocks));
  if (call.heads() > 0) {
    // Ranges of 2^shift rows, at most kRanges of them.
    const auto last = static_cast<std::uint64_t>(std::max<std::int64_t>(problem.s_kv, 1) - 1);
    p.order.shift = std::max(0, static_cast<int>(std::bit_width(last)) -
                                    static_cast<int>(std::bit_width(unsigned{kRanges}) - 1));
    p.order.rows = gather_view(problem);
    p.order.ordered = call.at<std::int32_t>(call.layout.ordered);
    p.order.lengths = call.at<std::int32_t>(call.layout.lengths);
    p.order_blocks = static_cast<unsigned>(problem.s_q);
  }
  if (call.heads() > 0 && has_delta_ahead(params)) {
    p.delta.out = static_cast<const char*>(params.out.data);
    p.delta.out_stride0 = 2 * params.out.stride0;
    p.delta.out_stride1 = 2 * params.out.stride1;
    p.delta.d_out = static_cast<const char*>(params.d_out.data);
    p.delta.d_out_stride0 = 2 * params.d_out.stride0;
    p.delta.d_out_stride1 = 2 * params.d_out.stride1;
    p.delta.delta = call.at<float>(call.layout.delta);
    p.delta.rows = call.heads();
    p.delta.h_q = static_cast<int>(problem.h_q);
    p.delta_blocks = static_cast<unsigned>((call.heads() + kDeltaRows - 1) / kDeltaRows);
  }
  const unsigned blocks = p.order_blocks + p.delta_blocks + p.zero_blocks;
  if (!params.joint()) {
    kRuntime.launch(prepare_kernel, blocks, kPrepareThreads, 0, call.stream, p);
    return;
  }
  SourcesParams sources = sources_params(params.sources, 0);
  sources.ranges = call.ranges();
  kRuntime.launch(prepare_sources_kernel, blocks, kPrepareThreads, 0, call.stream, p, sources);
}

fused::KernelParams kernel_params(const Call& call) {
  const Problem& problem = call.problem;
  const JointParams& params = call.params;
  fused::KernelParams kernel{};
  kernel.kv = gather_view(problem);
  kernel.kv.indices = call.at<std::int32_t>(call.layout.ordered);
  kernel.kv.indices_stride = problem.topk;
  kernel.kv.topk_length = call.at<std::int32_t>(call.layout.lengths);
  kernel.kv.topk_length_stride = 1;
  if (params.ranges()) kernel.kv.topk = std::numeric_limits<std::int32_t>::max();
  kernel.q_stride0 = 2 * problem.q.stride0;
  kernel.q_stride1 = 2 * problem.q.stride1;
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.d_out_stride0 = 2 * params.d_out.stride0;
  kernel.d_out_stride1 = 2 * params.d_out.stride1;
  kernel.d_out = static_cast<const char*>(params.d_out.data);
  kernel.lse_stride = params.lse.stride0;
  kernel.lse = params.lse.as<const float>().data;
  kernel.out_stride0 = 2 * params.out.stride0;
  kernel.out_stride1 = 2 * params.out.stride1;
  kernel.out = static_cast<const char*>(params.out.data);
  const bool ahead = has_delta_ahead(params);
  kernel.delta_stride = ahead ? problem.h_q : params.delta.stride0;
  kernel.delta = ahead ? call.at<float>(call.layout.delta) : params.delta.as<const float>().data;
  kernel.attn_sink = params.attn_sink.as<const float>().data;
  kernel.attn_sink_stride = params.attn_sink.stride0;
  if (params.d_sink.present()) {
    kernel.sink_share = call.at<float>(call.layout.sink_share);
  }
  kernel.dq_f32 = params.dq_dtype == DType::f32;
  kernel.dq_stride0 = size_of(params.dq_dtype) * params.dq.stride0;
  kernel.dq_stride1 = size_of(params.dq_dtype) * params.dq.stride1;
  kernel.dq = static_cast<char*>(params.dq.data);
  kernel.dq_parts = call.at<float>(call.layout.dq_parts);
  kernel.scale = static_cast<float>(problem.scale);
  kernel.scale_log2 = kernel.scale * device::kLog2e;
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.head_blocks = static_cast<std::uint32_t>(head_blocks(problem));
  kernel.items = static_cast<std::uint32_t>(problem.s_q * head_blocks(problem));
  kernel.rounds = kernel.items / call.blocks;
  kernel.tiles = params.ranges() ? fused::kTailShares : tiles(problem);
  kernel.dkv = call.at<float>(call.layout.accumulator);
  kernel.waste_row = static_cast<std::int32_t>(problem.s_kv);
  if (fused::keeps_step(kRuntime, params)) {
    kernel.step = call.at<std::uint32_t>(call.layout.step);
  }
  return kernel;
}

// dkv, dextra_kv and d_sink as the caller wants them.
void finish(const Call& call) {
  const Problem& problem = call.problem;
  const JointParams& params = call.params;
  for (const RowOutput& output : params.outputs()) {
    if (output.rows == 0) continue;
    FinishParams p;
    p.accumulator = call.at<float>(call.layout.accumulator) + output.first * problem.d_qk;
    p.dkv = static_cast<char*>(output.to.data);
    p.f32 = output.dtype == DType::f32;
    p.dkv_stride = size_of(output.dtype) * output.to.stride0;
    p.quads = output.rows * problem.d_qk / 4;
    p.row_quads = static_cast<int>(problem.d_qk / 4);
    const std::int64_t wanted = (p.quads + kFinishThreads - 1) / kFinishThreads;
    kRuntime.launch(finish_kernel,
                    static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * call.blocks)),
                    kFinishThreads, 0, call.stream, p);
  }
  if (params.d_sink.present() && problem.h_q > 0) {
    kRuntime.launch(sink_kernel, static_cast<unsigned>((problem.h_q + 31) / 32), kSinkThreads, 0,
                    call.stream, call.at<float>(call.layout.sink_share), problem.s_q,
                    static_cast<int>(problem.h_q), params.d_sink.as<float>().data,
                    params.d_sink.stride0);
  }
}

}  // namespace

std::int64_t backward_fused_workspace_bytes(const JointParams& params) {
  return Workspace(params, kRuntime.multiprocessors()).bytes;
}

void backward_fused_sm90(const JointParams& params, void* workspace, void* stream) {
  const int blocks = kRuntime.multiprocessors();
  const Workspace layout(params, blocks);
  const Call call{params, params.problem,
                  layout, static_cast<char*>(workspace),
                  blocks, static_cast<cudaStream_t>(stream)};
  prepare(call);
  if (call.heads() > 0) {
    const fused::KernelParams kernel = kernel_params(call);
    if (params.problem.d_qk == 576) {
      fused::launch_fused<576, fused::FloatDrain>(kRuntime, kernel, call.ranges(), blocks,
                                                  call.stream);
    } else {
      fused::launch_fused<512, fused::FloatDrain>(kRuntime, kernel, call.ranges(), blocks,
                                                  call.stream);
    }
  }
  finish(call);
}

}  // namespace winnow::sparse_mla
