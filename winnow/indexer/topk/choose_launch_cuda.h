// The launch of choose.cuh on any GPU. Host code of .cu files.
#pragma once

#include <cstdint>

#include "winnow/device/common/runtime.h"
#include "winnow/indexer/topk/choose.cuh"

namespace winnow::indexer::cuda_detail {

// Queues the choice of so many queries, each from up to `rows` rows, with a block for each.
template <class Params>
void launch_choice(const device::Runtime& runtime, const Params& params, std::int64_t queries,
                   std::int64_t rows, cudaStream_t stream) {
  const auto launch = [&](auto* kernel, int warps) {
    runtime.launch(kernel, static_cast<unsigned>(queries), static_cast<unsigned>(32 * warps), 0,
                   stream, params);
  };
  constexpr int kFew = 8, kMost = gpu::kChooseMostWarps;
  if (rows <= kFew * 32 * gpu::kChooseHeld) {
    launch(gpu::choose_kernel<Params, kFew, gpu::OneBlock>, kFew);
  } else if (rows <= gpu::kMostStoredRows) {
    launch(gpu::choose_kernel<Params, kMost, gpu::OneBlock>, kMost);
  } else {
    launch(gpu::choose_kernel<Params, kMost, gpu::OneBlockThatRereads>, kMost);
  }
}

}  // namespace winnow::indexer::cuda_detail
