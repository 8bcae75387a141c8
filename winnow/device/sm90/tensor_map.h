// Descriptions of tensors for the tensor memory accelerator. Host code.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"

namespace winnow::device {

// One dimension of a tensor and of the boxes that are copied from it.
struct MapDim {
  std::uint64_t size;          // elements of the tensor
  std::uint64_t stride_bytes;  // a multiple of 16; not used for dimension 0, which is contiguous
  std::uint32_t box;           // elements of a box, up to 256; may reach beyond the tensor
};

// Describes a tensor whose boxes have rows of 128 bytes, which land in the 128-byte swizzle
// (device/sm90/wgmma.cuh), or of the bytes of another swizzle. `data` is aligned to 16 bytes. The
// driver's function is found at run time: nothing links libcuda.
template <int kDims>
CUtensorMap tensor_map(const Runtime& runtime, CUtensorMapDataType type, const void* data,
                       const MapDim (&dims)[kDims],
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  runtime.check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                 cudaEnableDefault, &found),
                "cuTensorMapEncodeTiled");
  cuuint64_t size[kDims], stride[kDims];
  cuuint32_t box[kDims], step[kDims];
  for (int i = 0; i < kDims; ++i) {
    size[i] = dims[i].size;
    box[i] = dims[i].box;
    step[i] = 1;
    if (i > 0) stride[i - 1] = dims[i].stride_bytes;
  }
  CUtensorMap map;
  const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
      &map, type, kDims, const_cast<void*>(data), size, stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::internal, runtime.operation,
                std::string(runtime.backend) + ": cuTensorMapEncodeTiled failed with CUresult " +
                    std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace winnow::device
