// Quantisation on CUDA: a warp for each row, whose lanes hold neighbouring elements.
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "winnow/cache/write_row.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/warp.cuh"
#include "winnow/indexer/quantize/quantize_impl.h"

namespace winnow::indexer {
namespace {

constexpr device::Runtime kRuntime{"indexer::quantize", "cuda"};
constexpr int kWarpSize = 32, kWarps = 8;

struct KernelParams {
  std::int64_t rows_in_all, h;
  Rows<const void*> x;
  Rows<std::uint8_t*> rows;
  Rows<float*> scale;
  KeyPages pages;
  Slots slots;
  bool power_of_two;
};

// Neighbouring elements, moved whole where their place is aligned.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T elements[kCount];

  template <bool kAligned>
  static __device__ Pack load(const T* from) {
    if constexpr (kAligned) {
      return *reinterpret_cast<const Pack*>(from);
    } else {
      Pack pack;
#pragma unroll
      for (int c = 0; c < kCount; ++c) pack.elements[c] = from[c];
      return pack;
    }
  }
  template <bool kAligned>
  __device__ void store(T* to) const {
    if constexpr (kAligned) {
      *reinterpret_cast<Pack*>(to) = *this;
    } else {
#pragma unroll
      for (int c = 0; c < kCount; ++c) to[c] = elements[c];
    }
  }
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Grid: groups of kWarps rows; block: (kWarpSize, kWarps).
template <class T, int kDim, bool kAligned>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    quantize_kernel(const __grid_constant__ KernelParams p) {
  constexpr int kCount = kDim / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.y;
  if (row >= p.rows_in_all) return;
  const std::int64_t i = row / p.h, h = row % p.h;

  std::uint8_t* elements;
  float* scale_at;
  if (!p.slots.present()) {
    elements = p.rows.data + i * p.rows.stride0 + h * p.rows.stride1;
    scale_at = p.scale.data + i * p.scale.stride0 + h * p.scale.stride1;
  } else {
    // One lane reads it: what a warp does hangs on a single value whoever rewrites the slot.
    std::int64_t slot = 0;
    if (lane == 0) slot = cache::read_slot(p.slots, i);
    slot = __shfl_sync(device::kFullWarp, slot, 0);
    if (!p.pages.holds(slot)) return;
    const cache::KeyPlace place(p.pages.pages, slot, kDim);
    elements = place.row;
    scale_at = place.scale;
  }

  const T* from = static_cast<const T*>(p.x.data) + i * p.x.stride0 + h * p.x.stride1;
  const auto pack = Pack<T, kCount>::template load<kAligned>(from + lane * kCount);
  float x[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c) x[c] = as_float(pack.elements[c]);
  Pack<std::uint8_t, kCount> result;
  const float scale = cache::quantise_key<kWarpSize>(x, p.power_of_two, result.elements);
  result.template store<kAligned>(elements + lane * kCount);
  if (lane == 0) *scale_at = scale;
}

template <class T, int kDim>
void launch(const QuantizeParams& params, const KernelParams& kernel, cudaStream_t stream) {
  constexpr int kCount = kDim / kWarpSize;
  const auto aligned_to = [](const auto& tensor, std::int64_t size, std::int64_t bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
    return static_cast<std::int64_t>(address) % bytes == 0 && tensor.stride0 * size % bytes == 0 &&
           tensor.stride1 * size % bytes == 0;
  };
  const bool aligned = aligned_to(params.x, sizeof(T), sizeof(T) * kCount) &&
                       aligned_to(params.rows, 1, kCount) &&
                       aligned_to(params.pages.pages, 1, kCount);
  auto* const function = aligned ? quantize_kernel<T, kDim, true> : quantize_kernel<T, kDim, false>;
  const std::int64_t groups = (kernel.rows_in_all + kWarps - 1) / kWarps;
  kRuntime.launch(function, static_cast<unsigned>(groups), dim3(kWarpSize, kWarps), 0, stream,
                  kernel);
}

template <class T>
void launch(const QuantizeParams& params, const KernelParams& kernel, cudaStream_t stream) {
  if (params.d == 128) {
    launch<T, 128>(params, kernel, stream);
  } else {
    launch<T, 64>(params, kernel, stream);
  }
}

}  // namespace

void quantize_cuda(const QuantizeParams& params, void* stream) {
  const KernelParams kernel = {params.n * params.h, params.h,           params.x,
                               params.rows,         params.scale,       params.pages,
                               params.slots,        params.power_of_two};
  const auto queue = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::f32) {
    launch<float>(params, kernel, queue);
  } else if (params.dtype == DType::f16) {
    launch<__half>(params, kernel, queue);
  } else {
    launch<__nv_bfloat16>(params, kernel, queue);
  }
}

}  // namespace winnow::indexer
