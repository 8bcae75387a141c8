#include "winnow/expert_parallel/layout/layout.h"

#include <limits>
#include <new>
#include <string>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/layout/layout_contract.h"
#include "winnow/expert_parallel/layout/layout_impl.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = kLayout.operation;
constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

}  // namespace

void check_sizes(const Check& check, const LayoutArgs& args) {
  const std::int64_t n = args.expert_indices.size(0), topk = args.expert_indices.size(1);
  check.that(topk >= 1 && topk <= kMaxTopk, "expert_indices",
             "K from 1 to " + std::to_string(kMaxTopk), std::to_string(topk));
  check.that(n <= kMaxInt32 / topk, "expert_indices", "fewer than 2^31 pairs",
             std::to_string(n) + " tokens of " + std::to_string(topk) + " experts");
  check.that(args.world_size >= 1, "world_size", "at least 1", std::to_string(args.world_size));
  check.that(args.local_world_size >= 1 && args.world_size % args.local_world_size == 0,
             "local_world_size", "a divisor of world_size " + std::to_string(args.world_size),
             std::to_string(args.local_world_size));
  check.that(args.experts >= 1 && args.experts <= kMaxInt32 && args.experts % args.world_size == 0,
             "experts",
             "a multiple of world_size " + std::to_string(args.world_size) + " below 2^31",
             std::to_string(args.experts));
}

namespace {

LayoutParams check_args(const LayoutArgs& args) {
  kLayout.check(args);
  LayoutParams params;
  params.num_tokens = args.expert_indices.size(0);
  params.topk = args.expert_indices.size(1);
  params.experts = args.experts;
  params.world_size = args.world_size;
  params.local_world_size = args.local_world_size;
  params.expert_indices = rows_of<const std::int32_t*>(args.expert_indices, 0);
  params.tokens_per_rank = static_cast<std::int32_t*>(args.tokens_per_rank.data());
  params.tokens_per_node = static_cast<std::int32_t*>(args.tokens_per_node.data());
  params.tokens_per_expert = static_cast<std::int32_t*>(args.tokens_per_expert.data());
  params.is_token_in_rank = rows_of<std::uint8_t*>(args.is_token_in_rank, 0);
  return params;
}

void check_indices(const Check& check, LayoutParams params, Device device, Stream stream) {
  std::vector<std::int32_t> host;  // a dense copy of indices on a GPU
  if (device.type != DeviceType::cpu) {
    host.resize(static_cast<std::size_t>(params.num_tokens * params.topk));
    synchronize(device, stream);
    Rows<const std::int32_t*>& rows = params.expert_indices;
    const bool dense = rows.stride0 == params.topk;
    const std::int64_t at_once = dense ? params.num_tokens : 1;
    for (std::int64_t token = 0; token < params.num_tokens; token += at_once) {
      copy_between(host.data() + token * params.topk, {}, rows.data + rows.offset(token), device,
                   static_cast<std::size_t>(at_once * params.topk) * sizeof(std::int32_t));
    }
    rows = {host.data(), params.topk};
  }
  const auto bad = find_bad_index(params);
  if (!bad) return;
  const std::string experts = std::to_string(params.experts);
  check.that(false, "expert_indices",
             "-1 to " + experts + " (-1 and " + experts + " name no expert)",
             std::to_string(bad->value) + " for token " + std::to_string(bad->token) + ", k " +
                 std::to_string(bad->k));
}

Backend run(const LayoutArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const LayoutParams params = check_args(args);
  const Device device = args.expert_indices.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (options.dry_run) return backend;
  kLayout.apart(args);
  try {
    if (checks_contents(kOperation, device, options)) {
      check_indices(check, params, device, options.stream);
    }
    if (backend == Backend::cpu) {
      count_layout(params);
    } else if constexpr (kBuiltWithCuda) {
      const DeviceGuard guard(device);
      layout_cuda(params, options.stream.handle);
    }
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, std::string(kOperation), "out of memory for the counts");
  }
  return backend;
}

}  // namespace

Backend layout(const LayoutArgs& args, const RunOptions& options) {
  return recorded(kLayout, args, options, run);
}

}  // namespace winnow::expert_parallel
