// Backward of the indexer, sm90: workspace and launches.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/scratch.h"
#include "winnow/indexer/backward/backward_impl.h"
#include "winnow/indexer/backward/backward_sm90.cuh"

namespace winnow::indexer {
namespace {

using namespace backward_sm90_detail;

constexpr device::Runtime kRuntime{"indexer::backward", "sm90"};

// Whether the kernel adds to dk itself: f32 rows behind each other, which cudaMemset2DAsync clears.
bool adds_in_place(const BackwardParams& params) {
  const std::int64_t stride = params.dk.stride0, d = params.problem.d;
  return !params.deterministic && params.dk_dtype == DType::f32 &&
         (params.problem.s_k == 1 || (stride >= d && stride <= (std::int64_t{1} << 28)));
}

// What lies where in the workspace; offsets in bytes, multiples of 256.
struct Workspace {
  std::int64_t sums = 0, bounds = 0, scales = 0, bytes = 0;

  explicit Workspace(const BackwardParams& params) {
    const std::int64_t rows = params.problem.s_k, numbers = rows * params.problem.d;
    const auto take = [&](std::int64_t size) {
      const std::int64_t offset = bytes;
      bytes += device::scratch_bytes(size);
      return offset;
    };
    if (!adds_in_place(params)) sums = take(numbers * (params.deterministic ? 8 : 4));
    if (params.deterministic) {
      bounds = take(rows * 4);
      scales = take(rows * 4);
    }
    bytes = std::max<std::int64_t>(bytes, 1);  // there always is an address
  }
};

Params kernel_params(const BackwardParams& params, const Workspace& layout, char* workspace) {
  const Problem& problem = params.problem;
  Params p{};
  p.view = chosen_sm90::view_of(problem, params.indices, params.columns());
  p.d_scores = params.d_scores.data;
  p.d_scores_stride = params.d_scores.stride0;
  p.dq = static_cast<char*>(params.dq.data);
  p.dq_stride0 = params.dq.stride0;
  p.dq_stride1 = params.dq.stride1;
  p.dq_f32 = params.dq_dtype == DType::f32;
  p.d_weights = static_cast<char*>(params.d_weights.data);
  p.d_weights_stride = params.d_weights.stride0;
  p.d_weights_f32 = params.d_weights_dtype == DType::f32;
  if (params.deterministic) {
    p.bounds = reinterpret_cast<unsigned*>(workspace + layout.bounds);
    p.scales = reinterpret_cast<float*>(workspace + layout.scales);
    p.fixed = reinterpret_cast<unsigned long long*>(workspace + layout.sums);
  } else if (adds_in_place(params)) {
    p.dk = static_cast<float*>(params.dk.data);
    p.dk_stride = params.dk.stride0;
  } else {
    p.dk = reinterpret_cast<float*>(workspace + layout.sums);
    p.dk_stride = problem.d;
  }
  const auto addends =
      static_cast<std::uint64_t>(problem.s_q) * static_cast<std::uint64_t>(params.columns());
  // 128 heads are two addends.
  p.headroom = static_cast<int>(std::bit_width(addends)) + 1;
  p.head_blocks = static_cast<unsigned>((problem.h + kBlockHeads - 1) / kBlockHeads);
  p.items = static_cast<unsigned>(problem.s_q) * p.head_blocks;
  return p;
}

void clear(void* data, std::int64_t bytes, cudaStream_t stream) {
  kRuntime.check(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream),
                 "cudaMemsetAsync");
}

// Zeros where the kernel adds.
void clear_sums(const BackwardParams& params, const Params& p, cudaStream_t stream) {
  const std::int64_t rows = params.problem.s_k, d = params.problem.d;
  if (rows == 0) return;
  if (params.deterministic) {
    clear(p.fixed, rows * d * 8, stream);
    clear(p.bounds, rows * 4, stream);
  } else if (rows == 1 || p.dk_stride == d) {
    clear(p.dk, rows * d * 4, stream);
  } else {
    kRuntime.check(
        cudaMemset2DAsync(p.dk, static_cast<std::size_t>(p.dk_stride) * 4, 0,
                          static_cast<std::size_t>(d) * 4, static_cast<std::size_t>(rows), stream),
        "cudaMemset2DAsync");
  }
}

template <int kChunks, bool kF8, bool kFixed>
void launch_products(const Params& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = Plan<kChunks>::kBytes;
  const unsigned blocks = std::min(p.items, 2 * static_cast<unsigned>(multiprocessors));
  const auto kernel = backward_kernel<kChunks, kF8, kFixed>;
  kRuntime.allow_shared_memory(kernel, kBytes);
  // Two blocks share a multiprocessor only where shared memory gets all of its room.
  kRuntime.check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 "cudaFuncSetAttribute");
  kRuntime.launch(kernel, blocks, kThreads, kBytes, stream, p);
}

// Calls function(chunks, f8, fixed) with the constants that the problem asks for.
template <class Function>
void with_kernel(const BackwardParams& params, const Function& function) {
  const auto choose = [](bool value, const auto& then) {
    value ? then(std::true_type()) : then(std::false_type());
  };
  choose(params.problem.dtype == DType::f8_e4m3, [&](auto f8) {
    choose(params.deterministic, [&](auto fixed) {
      if (params.problem.d == 128) {
        function(std::integral_constant<int, 2>(), f8, fixed);
      } else {
        function(std::integral_constant<int, 1>(), f8, fixed);
      }
    });
  });
}

// The bounds of the rows, and their scales.
void launch_scales(const BackwardParams& params, const Params& p, int multiprocessors,
                   cudaStream_t stream) {
  const std::int64_t rows = params.problem.s_k;
  if (rows == 0) return;
  const auto blocks = std::min<std::int64_t>(params.problem.s_q, 8 * std::int64_t{multiprocessors});
  if (blocks > 0) {
    kRuntime.launch(bound_kernel, static_cast<unsigned>(blocks), kBoundThreads, 0, stream, p,
                    static_cast<int>(params.problem.d));
  }
  kRuntime.launch(scale_kernel, static_cast<unsigned>((rows + 255) / 256), 256, 0, stream, p);
}

void finish(const BackwardParams& params, const Params& p, int multiprocessors,
            cudaStream_t stream) {
  FinishParams finish{};
  finish.sums = p.dk;
  finish.fixed = p.fixed;
  finish.scales = p.scales;
  finish.dk = static_cast<char*>(params.dk.data);
  finish.dk_stride = params.dk.stride0;
  finish.row_quads = static_cast<int>(params.problem.d / 4);
  finish.quads = params.problem.s_k * finish.row_quads;
  finish.f32 = params.dk_dtype == DType::f32;
  const std::int64_t wanted = (finish.quads + kFinishThreads - 1) / kFinishThreads;
  const auto blocks = std::min<std::int64_t>(wanted, 32 * std::int64_t{multiprocessors});
  kRuntime.launch(finish_kernel, static_cast<unsigned>(blocks), kFinishThreads, 0, stream, finish);
}

void run(const BackwardParams& params, char* workspace, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const Params p = kernel_params(params, Workspace(params), workspace);
  const int multiprocessors = kRuntime.multiprocessors();
  clear_sums(params, p, stream);
  if (params.deterministic) launch_scales(params, p, multiprocessors, stream);
  if (problem.s_q > 0) {
    with_kernel(params, [&](auto chunks, auto f8, auto fixed) {
      launch_products<decltype(chunks)::value, decltype(f8)::value, decltype(fixed)::value>(
          p, multiprocessors, stream);
    });
  }
  if (!adds_in_place(params) && problem.s_k > 0) finish(params, p, multiprocessors, stream);
}

}  // namespace

std::int64_t backward_sm90_workspace_bytes(const BackwardParams& params) {
  return Workspace(params).bytes;
}

void backward_sm90(const BackwardParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, backward_sm90_workspace_bytes(params), queue);
  run(params, static_cast<char*>(scratch.data()), queue);
}

}  // namespace winnow::indexer
