// notify on GPUs: the launches of its own kernels. Internal.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/exchange/count_exchange_cuda.h"

namespace winnow::expert_parallel {

// This rank's tokens; the kernels on them have a block for each rank, then for each node.
struct TokenParams {
  NotifyView view;
  const std::uint8_t* in_rank = nullptr;  // [n, W]
  std::int64_t stride = 0, tokens = 0;    // n
  std::int64_t channels = 0;
  std::int32_t* rank_prefix = nullptr;  // [W, C], or null
  std::int32_t* node_prefix = nullptr;  // [NN, C], or null
  std::int64_t rank_stride = 0, node_stride = 0;
};
int sum_tokens(const TokenParams& params, void* stream);       // to NotifyView::sums
int prefix_channels(const TokenParams& params, void* stream);  // unless the call was refused
int load_notify_kernels();

}  // namespace winnow::expert_parallel
