// The kernels that put across nodes, for transports whose puts are copies.
#include "winnow/expert_parallel/exchange/fabric_kernels.cuh"

namespace winnow::expert_parallel {

const FabricKernels& pointer_fabric() {
  static const FabricKernels fabric = make_fabric<PointerFabric>();
  return fabric;
}

}  // namespace winnow::expert_parallel
