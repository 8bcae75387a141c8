// Programmatic dependent launch: how a kernel and the one behind it in the stream overlap. Device
// code only. Before sm_90, where kernels of a stream follow each other, these functions do nothing.
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
// The same, once the address is known from which a thread reads first; not null. Otherwise ptxas
// has the wait before the instructions that compute it.
__device__ __forceinline__ void wait_for_kernel_before(const void* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred known;\n"
      "setp.ne.u64 known, %0, 0;\n"
      "@known griddepcontrol.wait;\n"
      "}" ::"l"(address)
      : "memory");
#else
  static_cast<void>(address);
#endif
}

}  // namespace winnow::device
