// Backward of top-k sparse MLA attention, cuda: the launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/scratch.h"
#include "winnow/sparse_mla/backward/backward_cuda.cuh"
#include "winnow/sparse_mla/backward/backward_impl.h"

namespace winnow::sparse_mla {
namespace {

using namespace backward_cuda_detail;

constexpr device::Runtime kRuntime{"sparse_mla::backward", "cuda"};

// Where what lies in the workspace; offsets in bytes, multiples of 256.
struct Layout {
  std::int64_t heads, columns, blocks;     // padded heads, entries of a segment
  std::int64_t taken, bounds, rows, sums;  // side by side: they begin as zeros
  std::int64_t lse2, deltas, shares, weights, dq_sums, bytes = 0;

  explicit Layout(const BackwardParams& params) {
    const Problem& problem = params.problem;
    const auto take = [this](std::int64_t size) {
      const std::int64_t offset = bytes;
      bytes += device::scratch_bytes(size);
      return offset;
    };
    const auto padded = [](std::int64_t size, std::int64_t unit) {
      return ceil_div<std::int64_t>(size, unit) * unit;
    };
    heads = padded(problem.h_q, kHeads);
    const std::int64_t entries =
        padded(padded(problem.topk, kRows) + padded(problem.extra.topk, kRows), kGroupRows);
    columns = std::min<std::int64_t>(entries, kSegment);
    blocks = std::min<std::int64_t>(problem.s_q, kRuntime.multiprocessors());
    const bool fixed = params.deterministic;
    taken = take(sizeof(std::uint32_t));
    bounds = take(fixed ? std::int64_t{sizeof(Bounds)} : 0);
    rows = take(fixed ? problem.all_rows() * 4 : 0);
    sums = take(problem.all_rows() * problem.d_qk * (fixed ? 8 : 4));
    lse2 = take(problem.s_q * heads * 4);
    deltas = take(problem.s_q * heads * 4);
    shares = take(params.d_sink.present() ? problem.s_q * problem.h_q * 4 : 0);
    weights = take(blocks * 2 * heads * columns * 2);
    dq_sums = take(entries > kSegment ? blocks * heads * problem.d_qk * 4 : 0);
  }
};

KernelParams kernel_params(const BackwardParams& params, const Layout& layout, std::byte* memory) {
  const Problem& problem = params.problem;
  KernelParams kernel{};
  kernel.sources = two_sources(problem);
  kernel.q = static_cast<const char*>(problem.q.data);
  kernel.q_stride0 = problem.q.stride0 * 2;
  kernel.q_stride1 = problem.q.stride1 * 2;
  kernel.out = static_cast<const char*>(params.out.data);
  kernel.out_stride0 = params.out.stride0 * 2;
  kernel.out_stride1 = params.out.stride1 * 2;
  kernel.d_out = static_cast<const char*>(params.d_out.data);
  kernel.d_out_stride0 = params.d_out.stride0 * 2;
  kernel.d_out_stride1 = params.d_out.stride1 * 2;
  kernel.lse = params.lse.as<const float>();
  kernel.delta = params.delta.as<const float>();
  kernel.attn_sink = params.attn_sink.as<const float>();
  kernel.scale = static_cast<float>(problem.scale);
  kernel.h_q = static_cast<int>(problem.h_q);
  kernel.heads = static_cast<int>(layout.heads);
  kernel.first_rows = static_cast<std::int32_t>(problem.s_kv);
  kernel.columns = static_cast<std::int32_t>(layout.columns);
  kernel.s_q = problem.s_q;
  kernel.taken = reinterpret_cast<std::uint32_t*>(memory + layout.taken);
  kernel.lse2 = reinterpret_cast<float*>(memory + layout.lse2);
  kernel.deltas = reinterpret_cast<float*>(memory + layout.deltas);
  if (params.d_sink.present()) kernel.shares = reinterpret_cast<float*>(memory + layout.shares);
  kernel.rows = reinterpret_cast<std::uint32_t*>(memory + layout.rows);
  kernel.bounds = reinterpret_cast<Bounds*>(memory + layout.bounds);
  kernel.weights = reinterpret_cast<char*>(memory + layout.weights);
  kernel.dq_sums = reinterpret_cast<float*>(memory + layout.dq_sums);
  kernel.sums = memory + layout.sums;
  kernel.dq = static_cast<char*>(params.dq.data);
  kernel.dq_stride0 = params.dq.stride0 * size_of(params.dq_dtype);
  kernel.dq_stride1 = params.dq.stride1 * size_of(params.dq_dtype);
  kernel.dq_f32 = params.dq_dtype == DType::f32;
  return kernel;
}

unsigned blocks_for(std::int64_t work, std::int64_t each) {
  return static_cast<unsigned>(ceil_div(work, each));
}

template <class P, bool kFixed>
void launch_products(const Layout& layout, const KernelParams& kernel, cudaStream_t stream) {
  auto* const function = products_kernel<P, kFixed>;
  kRuntime.allow_shared_memory(function, P::kBytes);
  kRuntime.launch(function, static_cast<unsigned>(layout.blocks), kThreads, P::kBytes, stream,
                  kernel);
}

template <DType kType, int kDim, bool kFixed>
void run(const BackwardParams& params, const Layout& layout, const KernelParams& kernel,
         cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (problem.s_q * problem.h_q > 0) {
    kRuntime.launch(prepare_kernel<kType, kDim, kFixed>, static_cast<unsigned>(problem.s_q),
                    kThreads, 0, stream, kernel);
    for (const Source* source : {static_cast<const Source*>(&problem), &problem.extra}) {
      if (!kFixed || source->s_kv == 0) continue;
      const std::int64_t first = source == &problem.extra ? problem.s_kv : 0;
      kRuntime.launch(bound_rows_kernel<kType>, blocks_for(source->s_kv, kWarps), kThreads, 0,
                      stream, static_cast<const char*>(source->kv.data), source->kv.stride0 * 2,
                      source->s_kv, kDim / 8, kernel.rows + first, kernel.bounds);
    }
    using Large = Phases<kType, kDim, true>;
    using Small = Phases<kType, kDim, false>;
    static_assert(Small::kBytes <= 99 * 1024);  // as GPUs have at least
    const bool large = kRuntime.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= Large::kBytes;
    (large ? launch_products<Large, kFixed> : launch_products<Small, kFixed>)(layout, kernel,
                                                                              stream);
  }
  const auto finish = [&](std::int64_t first, std::int64_t count, const Rows<void*>& to,
                          DType dtype) {
    if (count == 0) return;
    kRuntime.launch(finish_kernel<kType, kFixed>, blocks_for(count * kDim, kThreads), kThreads, 0,
                    stream, kernel, first, count, kDim, static_cast<char*>(to.data),
                    to.stride0 * size_of(dtype), dtype == DType::f32);
  };
  finish(0, problem.s_kv, params.dkv, params.dkv_dtype);
  finish(problem.s_kv, problem.extra.s_kv, params.dextra_kv, params.dextra_kv_dtype);
  if (params.d_sink.present() && problem.h_q > 0) {
    kRuntime.launch(sink_kernel, static_cast<unsigned>(problem.h_q), kThreads, 0, stream,
                    kernel.shares, problem.s_q, kernel.h_q, params.d_sink.as<float>());
  }
}

}  // namespace

std::int64_t backward_cuda_workspace_bytes(const BackwardParams& params) {
  return std::max<std::int64_t>(Layout(params).bytes, 1);  // there always is an address
}

void backward_cuda(const BackwardParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, backward_cuda_workspace_bytes(params), queue);
  auto* const memory = static_cast<std::byte*>(scratch.data());
  const Layout layout(params);
  kRuntime.check(cudaMemsetAsync(memory + layout.taken, 0,
                                 static_cast<std::size_t>(layout.lse2 - layout.taken), queue),
                 "cudaMemsetAsync");
  const auto run_as = [&]<DType kType, int kDim>() {
    (params.deterministic
         ? run<kType, kDim, true>
         : run<kType, kDim, false>)(params, layout, kernel_params(params, layout, memory), queue);
  };
  const bool wide = params.problem.d_qk == 576;
  if (params.problem.dtype == DType::f16) {
    wide ? run_as.operator()<DType::f16, 576>() : run_as.operator()<DType::f16, 512>();
  } else {
    wide ? run_as.operator()<DType::bf16, 576>() : run_as.operator()<DType::bf16, 512>();
  }
}

}  // namespace winnow::sparse_mla
