// The kernels that put across nodes, for transports whose puts are copies, and the table of arena
// segments that kernels look up.
#include "winnow/expert_parallel/device/layer_kernels.h"
#include "winnow/expert_parallel/device/wire_kernels.cuh"

namespace winnow::expert_parallel {
namespace {

__global__ void set_segment_kernel(std::byte** row, const __grid_constant__ NodePointers pointers,
                                   int locals) {
  for (int i = threadIdx.x; i < locals; i += blockDim.x) row[i] = pointers.data[i];
}

}  // namespace

const Wire& pointer_wire() {
  static const Wire wire = make_wire<PointerWire>();
  return wire;
}

int load_layer_kernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, set_segment_kernel);
}

int set_segment(std::byte** row, const NodePointers& pointers, int locals, void* stream) {
  set_segment_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(row, pointers, locals);
  return cudaGetLastError();
}

}  // namespace winnow::expert_parallel
