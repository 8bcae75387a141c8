#include <utility>

#include "winnow/expert_parallel/all_to_all/all_to_all_impl.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/dispatch/dispatch_impl.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"

namespace winnow::expert_parallel {
namespace {

const CudaOperation kOperations[] = {cuda_dispatch(), cuda_combine()};

class AllToAllCuda : public AllToAllBackend {
 public:
  AllToAllCuda(std::shared_ptr<Transport> transport, const Config& config)
      : AllToAllBackend(Backend::cuda), layer_(std::move(transport), config, kOperations) {}

  Dispatched dispatch(const DispatchArgs& args) override {
    return layer_.calls().run([&] { return expert_parallel::dispatch(layer_, args); });
  }
  Tensor combine(const CombineArgs& args, const Descriptor& descriptor) override {
    return layer_.calls().run([&] { return expert_parallel::combine(layer_, args, descriptor); });
  }
  void barrier(bool intra_node_only, Stream stream) override {
    layer_.calls().run([&] { layer_.barrier(intra_node_only, stream); });
  }
  std::int64_t arena_bytes() const override { return layer_.regions().arena().bytes(); }
  const std::shared_ptr<const char>& identity() const override { return layer_.identity(); }

 private:
  CudaLayer layer_;
};

}  // namespace

std::unique_ptr<AllToAllBackend> make_all_to_all_cuda(std::shared_ptr<Transport> transport,
                                                      const Config& config) {
  return std::make_unique<AllToAllCuda>(std::move(transport), config);
}

}  // namespace winnow::expert_parallel
