#include "winnow/expert_parallel/all_to_all/all_to_all.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/expert_parallel/all_to_all/all_to_all_impl.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/layer/backend.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = "expert_parallel::AllToAll";
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
// Products of these and of a few ranks fit 63 bits.
constexpr std::int64_t kMostHidden = std::int64_t{1} << 24;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;
constexpr std::int64_t kLargestFirstArena = std::int64_t{64}
                                            << 20;  // bytes of rows; it grows by itself

struct BarrierArgs {
  bool intra_node_only;
  Stream stream;
};

// What another field decides. Ranks compare the result, so that a default equals its value.
Config with_defaults(Config config, int world) {
  if (config.local_world_size == 0) config.local_world_size = world;
  const std::int64_t row_bytes = std::max<std::int64_t>(config.hidden * size_of(config.dtype), 1);
  if (config.arena_rows == 0) {
    const std::int64_t most_rows = 2 * std::max<std::int64_t>(config.max_tokens * config.topk, 1);
    config.arena_rows = std::clamp<std::int64_t>(kLargestFirstArena / row_bytes, 1, most_rows);
  }
  return config;
}

// Every field that ranks compare is in its range.
void check_config(const Check& check, const Config& config, int world) {
  const auto in_range = [&](std::string_view field, std::int64_t value, std::int64_t least,
                            std::int64_t most) {
    check.that(value >= least && value <= most, field,
               std::to_string(least) + " to " + std::to_string(most), std::to_string(value));
  };
  const auto one_of = [&](std::string_view field, DType value) {
    check.that(value == DType::f32 || value == DType::f16 || value == DType::bf16, field,
               "f32, f16 or bf16", to_string(value));
  };
  const auto that = [&](std::string_view field, std::int64_t value, bool holds,
                        const std::string& wanted) {
    check.that(holds, field, wanted, std::to_string(value));
  };
  const std::string ranks = std::to_string(world) + " ranks";
  one_of("dtype", config.dtype);
  one_of("weight_dtype", config.weight_dtype);
  in_range("topk", config.topk, 1, kMaxTopk);
  in_range("max_tokens", config.max_tokens, 1, kMost / kMaxTopk);
  in_range("hidden", config.hidden, 1, kMostHidden);
  const std::int64_t row_bytes = config.hidden * size_of(config.dtype);
  check.that(row_bytes % 16 == 0, "hidden", "rows of a multiple of 16 bytes",
             std::to_string(row_bytes) + " bytes, " + std::to_string(config.hidden) + " of " +
                 std::string(to_string(config.dtype)));
  in_range("experts", config.experts, 1, kMost);
  that("experts", config.experts, config.experts % world == 0, "a multiple of the " + ranks);
  in_range("local_world_size", config.local_world_size, 1, world);
  that("local_world_size", config.local_world_size, world % config.local_world_size == 0,
       "a divisor of the " + ranks);
  in_range("sm_count", config.sm_count, 1, kMost);
  in_range("arena_rows", config.arena_rows, 1, kMostBytes / row_bytes);
}

Fields fields_of(const Config& config) {
  const auto text = [](auto value) { return std::to_string(value); };
  return {{"max_tokens", text(config.max_tokens)},
          {"hidden", text(config.hidden)},
          {"topk", text(config.topk)},
          {"experts", text(config.experts)},
          {"dtype", std::string(to_string(config.dtype))},
          {"weight_dtype", std::string(to_string(config.weight_dtype))},
          {"local_world_size", text(config.local_world_size)},
          {"enable_local_combine", config.enable_local_combine ? "true" : "false"},
          {"sm_count", text(config.sm_count)},
          {"arena_rows", text(config.arena_rows)},
          {"device", config.device.type == DeviceType::cuda ? "cuda" : "cpu"},
          {"backend", std::string(config.backend ? to_string(*config.backend) : "any")}};
}

std::unique_ptr<AllToAllBackend> make_backend(Backend backend, std::shared_ptr<Transport> transport,
                                              const Config& config) {
  if constexpr (kBuiltWithCuda) {
    if (backend == Backend::cuda) return make_all_to_all_cuda(std::move(transport), config);
  }
  return make_all_to_all_cpu(std::move(transport), config);
}

}  // namespace

AllToAll::AllToAll(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
                   const Config& config) {
  const Check check(kOperation);
  check.that(transport != nullptr, "transport", "one", "null");
  check.that(store != nullptr, "store", "one", "null");
  check.that(config.timeout.count() >= 0, "timeout", "0 or more",
             std::to_string(config.timeout.count()) + " ns");
  const int world = transport->world_size();
  rank_ = transport->rank();
  config_ = with_defaults(config, world);
  if (config_.timeout.count() == 0) config_.timeout = default_timeout();
  const Deadline deadline(config_.timeout);
  const auto choose = [&] {
    check_config(check, config_, world);
    topology_ = Topology(world, config_.local_world_size);
    return choose_layer_backend(kOperation, config_.device, config_.backend);
  };
  backend_ =
      make_collective({kOperation, *transport, *store, deadline}, fields_of(config_), choose,
                      [&](Backend backend) { return make_backend(backend, transport, config_); });
  which_ = backend_->backend();
}

AllToAll::~AllToAll() { close(); }

AllToAllBackend& AllToAll::open(std::string_view operation) const {
  if (backend_ == nullptr) {
    throw Error(ErrorCode::invalid_argument, std::string(operation), "the layer is closed");
  }
  return *backend_;
}

Dispatched AllToAll::dispatch(const DispatchArgs& args) {
  constexpr std::string_view operation = "expert_parallel::dispatch";
  AllToAllBackend& backend = open(operation);
  using A = DispatchArgs;
  constexpr Members<&A::input, &A::expert_indices, &A::weights, &A::scales, &A::scatter_indices,
                    &A::order, &A::expert_alignment, &A::worst_case_rows, &A::copy_out, &A::out,
                    &A::sm_count, &A::cached, &A::allocate, &A::stream, &A::refusal>
      members;
  return logged(members, operation, rank_, args, which_, [&] { return backend.dispatch(args); });
}

Tensor AllToAll::combine(const CombineArgs& args, const Descriptor& descriptor) {
  constexpr std::string_view operation = "expert_parallel::combine";
  AllToAllBackend& backend = open(operation);
  using A = CombineArgs;
  constexpr Members<&A::expert_output, &A::bias, &A::second_bias, &A::weighted, &A::weights,
                    &A::pair_values, &A::pair_values_out, &A::add_values, &A::pair_columns, &A::out,
                    &A::sm_count, &A::stream, &A::refusal>
      members;
  return logged(members, operation, rank_, args, which_,
                [&] { return backend.combine(args, descriptor); });
}

TensorView AllToAll::combine_buffer(const Descriptor& descriptor) {
  constexpr std::string_view operation = "expert_parallel::combine_buffer";
  check_descriptor(Check(operation), open(operation).identity(), descriptor.state());
  return buffer_of(config_, descriptor.state());
}

void AllToAll::barrier(bool intra_node_only, Stream stream) {
  constexpr std::string_view operation = "expert_parallel::barrier";
  AllToAllBackend& backend = open(operation);
  using A = BarrierArgs;
  constexpr Members<&A::intra_node_only, &A::stream> members;
  logged(members, operation, rank_, BarrierArgs{intra_node_only, stream}, which_,
         [&] { backend.barrier(intra_node_only, stream); });
}

void AllToAll::close() noexcept { backend_.reset(); }

const Config& AllToAll::config() const { return config_; }
const Topology& AllToAll::topology() const { return topology_; }
int AllToAll::rank() const { return rank_; }
Backend AllToAll::backend() const { return which_; }
std::int64_t AllToAll::arena_bytes() const { return backend_ ? backend_->arena_bytes() : 0; }

}  // namespace winnow::expert_parallel
