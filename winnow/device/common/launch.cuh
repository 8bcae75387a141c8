// Programmatic dependent launch: the next kernel of the stream may start before this one has
// ended. Both do nothing before sm_90, where kernels of a stream follow each other. Device code
// only.
#pragma once

namespace winnow::device {

// The next kernel's blocks may take the room that this one leaves.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before has ended and its writes can be seen.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace winnow::device
