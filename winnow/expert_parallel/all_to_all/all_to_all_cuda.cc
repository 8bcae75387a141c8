#include <new>
#include <utility>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/all_to_all/all_to_all_impl.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"

namespace winnow::expert_parallel {
namespace {

const CudaOperation kOperations[] = {cuda_dispatch(), cuda_combine()};

class AllToAllCuda : public AllToAllBackend {
 public:
  AllToAllCuda(std::shared_ptr<Transport> transport, const Config& config)
      : layer_(std::move(transport), config, kOperations) {}

  Backend backend() const override { return Backend::sm90; }
  Dispatched dispatch(const DispatchArgs& args) override {
    return call([&] { return expert_parallel::dispatch(layer_, args); });
  }
  Tensor combine(const CombineArgs& args, const Descriptor& descriptor) override {
    return call([&] { return expert_parallel::combine(layer_, args, descriptor); });
  }
  void barrier(bool intra_node_only, Stream stream) override {
    call([&] { layer_.barrier(intra_node_only, stream); });
  }
  std::int64_t arena_bytes() const override { return layer_.arena().bytes(); }
  bool made(const Descriptor& descriptor) const override {
    return descriptor.state().layer == layer_.token();
  }

 private:
  // The layer's GPU is the current one in a call. What a call that throws has queued still runs.
  template <class Body>
  auto call(const Body& body) -> decltype(body()) {
    const DeviceGuard guard(layer_.device());
    try {
      try {
        return body();
      } catch (const std::bad_alloc&) {
        layer_.fail_without_host_memory();
      }
    } catch (...) {
      layer_.leave();
      throw;
    }
  }

  DeviceLayer layer_;
};

}  // namespace

std::unique_ptr<AllToAllBackend> make_all_to_all_cuda(std::shared_ptr<Transport> transport,
                                                      const Config& config) {
  return std::make_unique<AllToAllCuda>(std::move(transport), config);
}

}  // namespace winnow::expert_parallel
