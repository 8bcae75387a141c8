#include "winnow/expert_parallel/layout/layout.h"

#include <algorithm>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/read_once.h"
#include "winnow/core/route.h"
#include "winnow/expert_parallel/layout/layout_impl.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = "expert_parallel::layout";
constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();

LayoutParams check_args(const Check& check, const LayoutArgs& args) {
  const ConstTensorView& indices = args.expert_indices;
  check.rank("expert_indices", indices, 2, "[n, K]");
  const Device device = indices.device();
  const Dim n{"n", indices.size(0)}, topk{"K", indices.size(1)};
  check.input("expert_indices", indices, {n, topk}, {DType::i32}, device);
  check.that(topk.size >= 1 && topk.size <= kMaxTopk, "expert_indices",
             "K from 1 to " + std::to_string(kMaxTopk), std::to_string(topk.size));
  check.that(n.size <= kMostInt32 / topk.size, "expert_indices", "fewer than 2^31 pairs",
             std::to_string(n.size) + " tokens of " + std::to_string(topk.size) + " experts");
  check.that(args.world_size >= 1, "world_size", "at least 1", std::to_string(args.world_size));
  check.that(args.local_world_size >= 1 && args.world_size % args.local_world_size == 0,
             "local_world_size", "a divisor of world_size " + std::to_string(args.world_size),
             std::to_string(args.local_world_size));
  check.that(args.experts >= 1 && args.experts <= kMostInt32 && args.experts % args.world_size == 0,
             "experts",
             "a multiple of world_size " + std::to_string(args.world_size) + " below 2^31",
             std::to_string(args.experts));

  const auto output = [&](std::string_view name, const TensorView& view, DType dtype,
                          std::initializer_list<Dim> dims) {
    if (view.present()) check.output(name, view, dims, {dtype}, device);
  };
  const Dim ranks{"W", args.world_size}, nodes{"W/L", args.world_size / args.local_world_size};
  output("tokens_per_rank", args.tokens_per_rank, DType::i32, {ranks});
  output("tokens_per_node", args.tokens_per_node, DType::i32, {nodes});
  output("tokens_per_expert", args.tokens_per_expert, DType::i32, {{"E", args.experts}});
  output("is_token_in_rank", args.is_token_in_rank, DType::u8, {n, ranks});

  LayoutParams params;
  params.num_tokens = n.size;
  params.topk = topk.size;
  params.experts = args.experts;
  params.world_size = args.world_size;
  params.local_world_size = args.local_world_size;
  params.expert_indices = rows_of<const std::int32_t*>(indices, 0);
  params.tokens_per_rank = static_cast<std::int32_t*>(args.tokens_per_rank.data());
  params.tokens_per_node = static_cast<std::int32_t*>(args.tokens_per_node.data());
  params.tokens_per_expert = static_cast<std::int32_t*>(args.tokens_per_expert.data());
  params.is_token_in_rank = rows_of<std::uint8_t*>(args.is_token_in_rank, 0);
  return params;
}

void check_indices(const Check& check, LayoutParams params, Device device, Stream stream) {
  std::vector<std::int32_t> host;  // a dense copy of what is on a GPU
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
             "experts below " + experts + ", or " + experts +
                 " or -1 for "
                 "none",
             std::to_string(bad->value) + " for token " + std::to_string(bad->token) + ", k " +
                 std::to_string(bad->k));
}

// Counts that may be absent: then they are kept where nobody looks.
class Counts {
 public:
  Counts(std::int32_t* wanted, std::int64_t size)
      : unseen_(wanted == nullptr ? static_cast<std::size_t>(size) : 0),
        counts_(wanted == nullptr ? unseen_.data() : wanted),
        size_(size) {}
  void clear() { std::fill_n(counts_, size_, 0); }
  void add(std::int64_t index) { ++counts_[index]; }

 private:
  std::vector<std::int32_t> unseen_;
  std::int32_t* counts_;
  std::int64_t size_;
};

}  // namespace

std::optional<BadIndex> find_bad_index(const LayoutParams& params) {
  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    const std::int32_t* row = params.expert_indices.data + params.expert_indices.offset(token);
    for (std::int64_t k = 0; k < params.topk; ++k) {
      const std::int32_t index = read_once(row + k);
      if (index < -1 || index > params.experts) return BadIndex{token, k, index};
    }
  }
  return std::nullopt;
}

void count_layout(const LayoutParams& params) {
  const std::int64_t nodes = params.world_size / params.local_world_size;
  const auto experts_per_rank = static_cast<std::int32_t>(params.experts / params.world_size);
  const auto ranks_per_node = static_cast<std::int32_t>(params.local_world_size);
  Counts per_rank(params.tokens_per_rank, params.world_size);
  Counts per_node(params.tokens_per_node, nodes);
  Counts per_expert(params.tokens_per_expert, params.experts);
  // The last token that was counted for a rank or node, so that each token counts once.
  std::vector<std::int64_t> last_in_rank(static_cast<std::size_t>(params.world_size), -1);
  std::vector<std::int64_t> last_in_node(static_cast<std::size_t>(nodes), -1);
  per_rank.clear();
  per_node.clear();
  per_expert.clear();

  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    const std::int32_t* indices = params.expert_indices.data + params.expert_indices.offset(token);
    std::uint8_t* in_rank = nullptr;
    if (params.is_token_in_rank.data != nullptr) {
      in_rank = params.is_token_in_rank.data + params.is_token_in_rank.offset(token);
      std::fill_n(in_rank, params.world_size, std::uint8_t{0});
    }
    for (std::int64_t k = 0; k < params.topk; ++k) {
      const std::int32_t index = read_once(indices + k);
      if (!params.is_expert(index)) continue;
      per_expert.add(index);
      const std::int32_t rank = index / experts_per_rank;
      if (last_in_rank[static_cast<std::size_t>(rank)] == token) continue;
      last_in_rank[static_cast<std::size_t>(rank)] = token;
      per_rank.add(rank);
      if (in_rank != nullptr) in_rank[rank] = 1;
      const std::int32_t node = rank / ranks_per_node;
      if (last_in_node[static_cast<std::size_t>(node)] == token) continue;
      last_in_node[static_cast<std::size_t>(node)] = token;
      per_node.add(node);
    }
  }
}

Backend layout(const LayoutArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  const LayoutParams params = check_args(check, args);
  const Device device = args.expert_indices.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (options.dry_run) return backend;
  check.apart({{"tokens_per_rank", args.tokens_per_rank},
               {"tokens_per_node", args.tokens_per_node},
               {"tokens_per_expert", args.tokens_per_expert},
               {"is_token_in_rank", args.is_token_in_rank}},
              {{"expert_indices", args.expert_indices}});
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

}  // namespace winnow::expert_parallel
