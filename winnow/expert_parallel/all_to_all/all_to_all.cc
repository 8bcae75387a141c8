#include "winnow/expert_parallel/all_to_all/all_to_all.h"

#include <algorithm>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/layer.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"

#if WINNOW_WITH_CUDA
#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"
#endif

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = "expert_parallel::AllToAll";
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
// Products of these and of a few ranks fit 63 bits.
constexpr std::int64_t kMostHidden = std::int64_t{1} << 24;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;
constexpr std::int64_t kLargestFirstArena = std::int64_t{64}
                                            << 20;  // bytes of rows; it grows by itself

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
  that("hidden", config.hidden, row_bytes % 16 == 0, "rows of a multiple of 16 bytes");
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
          {"device", config.device.type == DeviceType::cuda ? "cuda" : "cpu"}};
}

const std::shared_ptr<const char>& token_of(const Layer& layer) { return layer.token; }

void barrier(Layer& layer, bool intra_node_only, Stream) {
  constexpr std::string_view operation = "expert_parallel::barrier";
  layer.call(operation, [&] {
    const Deadline deadline(layer.config.timeout);
    intra_node_only ? layer.communicator.node_barrier(deadline, operation)
                    : layer.communicator.world_barrier(deadline, operation);
  });
}

#if WINNOW_WITH_CUDA
const std::shared_ptr<const char>& token_of(const DeviceLayer& layer) { return layer.token(); }

void barrier(DeviceLayer& layer, bool intra_node_only, Stream stream) {
  layer.barrier(intra_node_only, stream);
}
#endif

}  // namespace

class AllToAll::Impl {
 public:
  Impl(std::shared_ptr<Transport> transport, Store& store, const Config& config)
      : rank_(transport->rank()) {
    const Check check{std::string(kOperation)};
    const int world = transport->world_size();
    check.that(config.timeout.count() >= 0, "timeout", "0 or more",
               std::to_string(config.timeout.count()) + " ns");
    config_ = with_defaults(config, world);
    if (config_.timeout.count() == 0) config_.timeout = default_timeout();
    // What ranks disagree about is named first: a bad value on one rank must not make the others
    // wait.
    agree(*transport, store, std::string(kOperation), fields_of(config_),
          Deadline(config_.timeout));
    check_config(check, config_, world);
    topology_ = Topology(world, config_.local_world_size);
    const std::uint64_t agreed = transport->agreements();
    if (config_.device.type == DeviceType::cpu) {
      layer_.emplace(transport, config_);
    } else {
      make_device_layer(transport);
    }
    // Behind the collective allocations, where these were no agreements themselves.
    if (transport->agreements() == agreed) forget_agreement(*transport, store);
  }

  void make_device_layer(const std::shared_ptr<Transport>& transport) {
#if WINNOW_WITH_CUDA
    const CudaOperation operations[] = {cuda_dispatch(), cuda_combine()};
    device_layer_ = std::make_unique<DeviceLayer>(transport, config_, operations);
#else
    static_cast<void>(transport);
    throw Error(ErrorCode::unsupported, std::string(kOperation),
                to_string(config_.device) + " cannot be used: this build has no CUDA kernels");
#endif
  }

  // Runs body(layer) with the layer, while it is open: a Layer or a DeviceLayer, whose GPU is the
  // current one then.
  template <class Body>
  auto with_layer(std::string_view operation, const Body& body) {
    if (layer_) return body(*layer_);
#if WINNOW_WITH_CUDA
    if (device_layer_) {
      const DeviceGuard guard(config_.device);
      try {
        try {
          return body(*device_layer_);
        } catch (const std::bad_alloc&) {
          device_layer_->fail_without_host_memory();
        }
      } catch (...) {
        device_layer_->leave();
        throw;
      }
    }
#endif
    throw Error(ErrorCode::invalid_argument, std::string(operation), "the layer is closed");
  }
  std::int64_t arena_bytes() const {
#if WINNOW_WITH_CUDA
    if (device_layer_) return device_layer_->arena().bytes();
#endif
    return layer_ ? layer_->arena.bytes() : 0;
  }
  void close() noexcept {
    layer_.reset();
#if WINNOW_WITH_CUDA
    device_layer_.reset();
#endif
  }

  const Config& config() const { return config_; }
  const Topology& topology() const { return topology_; }
  int rank() const { return rank_; }

 private:
  Config config_;
  Topology topology_;
  int rank_ = 0;
  std::optional<Layer> layer_;
#if WINNOW_WITH_CUDA
  std::unique_ptr<DeviceLayer> device_layer_;
#endif
};

AllToAll::AllToAll(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
                   const Config& config) {
  const Check check{std::string(kOperation)};
  check.that(transport != nullptr, "transport", "one", "null");
  check.that(store != nullptr, "store", "one", "null");
  impl_ = std::make_unique<Impl>(std::move(transport), *store, config);
}

AllToAll::~AllToAll() { close(); }

Dispatched AllToAll::dispatch(const DispatchArgs& args) {
  return impl_->with_layer("expert_parallel::dispatch",
                           [&](auto& layer) { return expert_parallel::dispatch(layer, args); });
}

Tensor AllToAll::combine(const CombineArgs& args, const Descriptor& descriptor) {
  return impl_->with_layer("expert_parallel::combine", [&](auto& layer) {
    return expert_parallel::combine(layer, args, descriptor);
  });
}

TensorView AllToAll::combine_buffer(const Descriptor& descriptor) {
  constexpr std::string_view operation = "expert_parallel::combine_buffer";
  const Descriptor::State& state = descriptor.state();
  impl_->with_layer(operation, [&](auto& layer) {
    Check{std::string(operation)}.that(state.layer == token_of(layer), "descriptor",
                                       "one of this layer", "another layer's");
  });
  return buffer_of(impl_->config(), state);
}

void AllToAll::barrier(bool intra_node_only, Stream stream) {
  impl_->with_layer("expert_parallel::barrier", [&](auto& layer) {
    winnow::expert_parallel::barrier(layer, intra_node_only, stream);
  });
}

void AllToAll::close() noexcept { impl_->close(); }

const Config& AllToAll::config() const { return impl_->config(); }
const Topology& AllToAll::topology() const { return impl_->topology(); }
int AllToAll::rank() const { return impl_->rank(); }
std::int64_t AllToAll::arena_bytes() const { return impl_->arena_bytes(); }

}  // namespace winnow::expert_parallel
