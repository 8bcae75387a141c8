#include <utility>

#include "winnow/expert_parallel/all_to_all/all_to_all_impl.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/layer/layer.h"

namespace winnow::expert_parallel {
namespace {

class AllToAllCpu : public AllToAllBackend {
 public:
  AllToAllCpu(std::shared_ptr<Transport> transport, const Config& config)
      : AllToAllBackend(Backend::cpu), layer_(std::move(transport), config) {}

  Dispatched dispatch(const DispatchArgs& args) override {
    return expert_parallel::dispatch(layer_, args);
  }
  Tensor combine(const CombineArgs& args, const Descriptor& descriptor) override {
    return expert_parallel::combine(layer_, args, descriptor);
  }
  void barrier(bool intra_node_only, Stream) override {
    constexpr std::string_view operation = "expert_parallel::barrier";
    layer_.call(operation, [&] {
      const Deadline deadline(layer_.config.timeout);
      intra_node_only ? layer_.communicator.node_barrier(deadline, operation)
                      : layer_.communicator.world_barrier(deadline, operation);
    });
  }
  std::int64_t arena_bytes() const override { return layer_.arena.bytes(); }
  const std::shared_ptr<const char>& identity() const override { return layer_.identity; }

 private:
  Layer layer_;
};

}  // namespace

std::unique_ptr<AllToAllBackend> make_all_to_all_cpu(std::shared_ptr<Transport> transport,
                                                     const Config& config) {
  return std::make_unique<AllToAllCpu>(std::move(transport), config);
}

}  // namespace winnow::expert_parallel
