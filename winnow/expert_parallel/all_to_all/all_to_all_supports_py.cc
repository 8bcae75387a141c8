// Whether dispatch and combine can run: calls without tokens on a layer of one rank.

#include "winnow/expert_parallel/all_to_all/all_to_all_calls_py.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/python/bindings.h"

namespace winnow::python {
namespace {

// A layer of one rank, and calls of it without tokens.
class LoneLayer {
 public:
  explicit LoneLayer(const ep::Config& config)
      : config_(config), layer_(world_.transport(0), world_.store(), config) {}

  ep::Dispatched dispatch() {
    return layer_.dispatch({.input = no_rows(config_.dtype, config_.hidden),
                            .expert_indices = no_rows(DType::i32, config_.topk)});
  }
  Backend combine(const ep::Descriptor& descriptor) {
    layer_.combine({.expert_output = no_rows(config_.dtype, config_.hidden)}, descriptor);
    return layer_.backend();
  }

 private:
  ConstTensorView no_rows(DType dtype, std::int64_t columns) const {
    return without_memory(dtype, {0, columns}, config_.device);
  }

  ep::InProcessWorld world_{1};
  ep::Config config_;
  ep::AllToAll layer_;
};

// Of one rank and of the sizes that were asked for.
ep::Config lone_config(Shape& shape, const RunOptions& options) {
  const ep::Config config{.max_tokens = shape.take("max_tokens", 1),
                          .hidden = shape.take("hidden", 128),
                          .topk = shape.take<int>("topk", 1),
                          .experts = shape.take<int>("experts", 8),
                          .dtype = shape.dtype,
                          .arena_rows = 1,
                          .device = shape.device,
                          .backend = options.backend};
  shape.done();
  return config;
}

}  // namespace

Backend supports_expert_parallel_dispatch(Shape& shape, const RunOptions& options) {
  const ep::Config config = lone_config(shape, options);
  const Unlocked unlocked;
  return LoneLayer(config).dispatch().backend;
}

Backend supports_expert_parallel_combine(Shape& shape, const RunOptions& options) {
  const ep::Config config = lone_config(shape, options);
  const Unlocked unlocked;
  LoneLayer layer(config);
  return layer.combine(*layer.dispatch().descriptor);
}

}  // namespace winnow::python
