// How the kernels of score_tiles_sm90.cuh are prepared and chosen. Host code of .cu files.
#pragma once

#include <cstdint>

#include "winnow/device/sm90/tensor_map.h"
#include "winnow/indexer/problem.h"
#include "winnow/indexer/score_tiles_sm90.cuh"

namespace winnow::indexer::sm90_detail {

template <class Shape>
ScoreParams score_params(const device::Runtime& runtime, const Problem& problem) {
  ScoreParams p{};
  static_cast<SeenRows&>(p) = seen_rows(problem);
  const auto bytes = static_cast<std::uint64_t>(size_of(problem.dtype));
  const auto type = Shape::kElement == Element::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto d = static_cast<std::uint64_t>(problem.d);
  // The stride of a dimension of size 1 does not matter, but must be valid for a tensor map.
  const auto stride = [&](std::int64_t elements, std::int64_t size) {
    return size > 1 ? static_cast<std::uint64_t>(elements) * bytes : d * bytes;
  };
  // Columns beyond d read as zeros, as do heads and queries beyond the last.
  const device::MapDim q_dims[] = {
      {d, 0, Shape::kPanelElements},
      {static_cast<std::uint64_t>(problem.h), stride(problem.q.stride1, problem.h), Shape::kHeads},
      {static_cast<std::uint64_t>(problem.s_q), stride(problem.q.stride0, problem.s_q),
       Shape::kSideQueries}};
  const device::MapDim k_dims[] = {
      {d, 0, Shape::kPanelElements},
      {static_cast<std::uint64_t>(problem.s_k), stride(problem.k.stride0, problem.s_k), kTileRows}};
  p.q = device::tensor_map(runtime, type, problem.q.data, q_dims);
  if (problem.s_k > 0) p.k = device::tensor_map(runtime, type, problem.k.data, k_dims);
  p.weights = problem.weights.data;
  p.weights_stride = problem.weights.stride0;
  p.weights_are_bf16 = problem.weights_dtype == DType::bf16;
  p.k_scale = problem.k_scale.data;
  p.k_scale_stride = problem.k_scale.stride0;
  p.h = static_cast<int>(problem.h);
  p.groups = static_cast<int>((problem.s_q + Shape::kQueries - 1) / Shape::kQueries);
  p.splits = 1;
  return p;
}

// Calls function(Shape()) with the shape that a problem's heads, columns and dtype ask for. Other
// numbers of heads are padded to 16, 32, 64 or 128. With f8 a weight of 0 hides the padding. Keys
// in bf16 may be infinite, so that sums leave the padding out by a comparison for each product.
template <Element kElement, int kPanels, class Function>
void with_heads(std::int64_t h, const Function& function) {
  if constexpr (kElement == Element::bf16) {
    if (h > 64 && h < 128) return function(Shape<kElement, 128, true, kPanels>());
    if (h > 16 && h < 64 && h != 32) return function(Shape<kElement, 64, true, kPanels>());
    if (h < 16) return function(Shape<kElement, 16, true, kPanels>());
  }
  if (h > 64) return function(Shape<kElement, 128, false, kPanels>());
  if (h > 32) return function(Shape<kElement, 64, false, kPanels>());
  if (h > 16) return function(Shape<kElement, 32, false, kPanels>());
  return function(Shape<kElement, 16, false, kPanels>());
}
template <class Function>
void with_shape(const Problem& problem, const Function& function) {
  if (problem.dtype == DType::f8_e4m3) {
    with_heads<Element::f8, 1>(problem.h, function);
  } else if (problem.d == 128) {
    with_heads<Element::bf16, 2>(problem.h, function);
  } else {
    with_heads<Element::bf16, 1>(problem.h, function);
  }
}

}  // namespace winnow::indexer::sm90_detail
