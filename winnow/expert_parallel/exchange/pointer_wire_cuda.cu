// The kernels that put across nodes, for transports whose puts are copies.
#include "winnow/expert_parallel/exchange/wire_kernels.cuh"

namespace winnow::expert_parallel {

const Wire& pointer_wire() {
  static const Wire wire = make_wire<PointerWire>();
  return wire;
}

}  // namespace winnow::expert_parallel
