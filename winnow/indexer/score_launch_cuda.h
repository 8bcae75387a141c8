// How the kernels of score_tiles_cuda.cuh are prepared and chosen. Host code of .cu files.
#pragma once

#include <cstdint>
#include <type_traits>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/problem.h"
#include "winnow/indexer/score_tiles_cuda.cuh"

namespace winnow::indexer::cuda_detail {

// The heads of query 0.
inline HeadsView heads_view(const Problem& problem) {
  HeadsView view{};
  view.q = static_cast<const char*>(problem.q.data);
  view.query_stride = problem.q.stride0 * size_of(problem.dtype);
  view.head_stride = problem.q.stride1 * size_of(problem.dtype);
  view.weights = problem.weights.data;
  view.weights_stride = problem.weights.stride0;
  view.heads = static_cast<int>(problem.h);
  view.d = static_cast<int>(problem.d);
  view.weights_are_bf16 = problem.weights_dtype == DType::bf16;
  return view;
}

// Calls function(std::integral_constant<DType, dtype>()).
template <class Function>
void with_dtype(DType dtype, const Function& function) {
  if (dtype == DType::f8_e4m3) {
    function(std::integral_constant<DType, DType::f8_e4m3>());
  } else if (dtype == DType::f16) {
    function(std::integral_constant<DType, DType::f16>());
  } else {
    function(std::integral_constant<DType, DType::bf16>());
  }
}

template <class Params>
void launch_scores(const device::Runtime& runtime, void (*kernel)(Params), std::int64_t blocks,
                   cudaStream_t stream, const std::type_identity_t<Params>& params) {
  runtime.allow_shared_memory(kernel, Plan::kBytes);
  runtime.launch(kernel, static_cast<unsigned>(blocks), kThreads, Plan::kBytes, stream, params);
}

}  // namespace winnow::indexer::cuda_detail
