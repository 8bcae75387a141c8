// A rank's layer as AllToAll holds it: one interface, a class for each backend. Internal.
#pragma once

#include <cstdint>
#include <memory>

#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/layer/backend.h"

namespace winnow::expert_parallel {

class AllToAllBackend : public CollectiveBackend {
 public:
  using CollectiveBackend::CollectiveBackend;

  virtual Dispatched dispatch(const DispatchArgs& args) = 0;
  virtual Tensor combine(const CombineArgs& args, const Descriptor& descriptor) = 0;
  virtual void barrier(bool intra_node_only, Stream stream) = 0;
  virtual std::int64_t arena_bytes() const = 0;
  // Stands for this layer in the descriptors that its dispatches make.
  virtual const std::shared_ptr<const char>& identity() const = 0;
};

// Collective. `config` is checked and its defaults are resolved.
std::unique_ptr<AllToAllBackend> make_all_to_all_cpu(std::shared_ptr<Transport> transport,
                                                     const Config& config);
// For a GPU, only in builds with CUDA. Errors: those of the allocations; unsupported, where the
// transport serves no GPUs or the layer is too large for one.
std::unique_ptr<AllToAllBackend> make_all_to_all_cuda(std::shared_ptr<Transport> transport,
                                                      const Config& config);

}  // namespace winnow::expert_parallel
