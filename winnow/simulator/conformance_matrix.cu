// Conformance: matrix products of a warpgroup, ldmatrix and stmatrix.
#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/simulator/conformance.h"

namespace winnow::conformance {
namespace {

using namespace winnow::device;

constexpr Runtime kRuntime{"conformance", "sm90"};
constexpr int kThreads = 128;

// Words of `in` to shared memory, as they are.
__device__ void fill_shared(std::uint32_t smem, const std::uint32_t* in, int words) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) {
    st_shared(smem + 4 * i, in[i]);
  }
}

// in: a chunk. The registers of its fragments come out, and go to a second chunk plus one.
// out: [128][4 steps][4]; the second chunk.
__global__ void moves_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  fill_shared(smem, in, kChunkBytes / 4);
  __syncthreads();
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
    ldmatrix_x4(fragment_address(smem, warp, lane, k16), r[0], r[1], r[2], r[3]);
    for (int i = 0; i < 4; ++i) out[16 * threadIdx.x + 4 * k16 + i] = r[i];
    stmatrix_x4(fragment_address(smem + kChunkBytes, warp, lane, k16), r[0] + 1, r[1] + 1, r[2] + 1,
                r[3] + 1);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kChunkBytes / 4; i += kThreads) {
    out[16 * kThreads + i] = ld_shared<std::uint32_t>(smem + kChunkBytes + 4 * i);
  }
}

template <int kN, Major kA, Major kB, bool kF8>
__device__ void product_step(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b) {
  if constexpr (kF8 && kN % 64 != 0) {
    wgmma_f8_negated(d, a, b, true);
  } else if constexpr (kF8 && kN == 64) {
    wgmma_m64n64k32_f8(d, a, b, true);
  } else if constexpr (kF8) {
    wgmma_m64n128k32_f8(d, a, b, true);
  } else if constexpr (kN == 32) {
    wgmma_m64n32k16<kA, kB>(d, a, b, true);
  } else if constexpr (kN == 64) {
    wgmma_m64n64k16<kA, kB>(d, a, b, true);
  } else if constexpr (kN == 128) {
    wgmma_m64n128k16<kA, kB>(d, a, b, true);
  } else {
    wgmma_m64n256k16<kA, kB>(d, a, b, true);
  }
}
template <int kN, Major kB>
__device__ void product_step(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b) {
  if constexpr (kN == 32) {
    wgmma_m64n32k16<kB>(d, a[0], a[1], a[2], a[3], b, true);
  } else if constexpr (kN == 64) {
    wgmma_m64n64k16<kB>(d, a[0], a[1], a[2], a[3], b, true);
  } else if constexpr (kN == 128) {
    wgmma_m64n128k16<kB>(d, a[0], a[1], a[2], a[3], b, true);
  } else {
    wgmma_m64n256k16<kB>(d, a[0], a[1], a[2], a[3], b, true);
  }
}

template <Major kMajor>
__device__ std::uint64_t descriptor_of(std::uint32_t chunk, int step) {
  if constexpr (kMajor == Major::K) {
    return descriptor_offset(descriptor_k_major(chunk), 32 * step);
  } else {
    return descriptor_mn_major(chunk, step);
  }
}

// Four steps along K. in: a chunk with A, four chunks with B, as the instruction reads them;
// [64][256] f32 to begin with. out: [128][n / 2], the accumulators.
template <int kN, Major kA, Major kB, bool kRegisters, bool kF8>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  fill_shared(smem, in, 5 * kChunkBytes / 4);
  fence_proxy_async_shared();
  __syncthreads();
  float d[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[i] = __uint_as_float(in[5 * kChunkBytes / 4 + kMaxProductColumns * row + column]);
  }
  std::uint32_t a[4][4] = {};
  if constexpr (kRegisters) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ldmatrix_x4(fragment_address(smem, warp, lane, step), a[step][0], a[step][1], a[step][2],
                  a[step][3]);
    }
  }
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const std::uint64_t b = descriptor_of<kB>(smem + kChunkBytes, step);
    if constexpr (kRegisters) {
      product_step<kN, kB>(d, a[step], b);
    } else {
      product_step<kN, kA, kB, kF8>(d, descriptor_of<kA>(smem, step), b);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) out[kN / 2 * threadIdx.x + i] = __float_as_uint(d[i]);
}

// Two products of the first 16 columns, which replace what the accumulators hold, on their way at
// once. in: a chunk with A, two chunks with B. out: [2][128][32].
__global__ void __launch_bounds__(kThreads)
    two_products_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  fill_shared(smem, in, 3 * kChunkBytes / 4);
  fence_proxy_async_shared();
  __syncthreads();
  float d[2][32];
#pragma unroll
  for (int i = 0; i < 32; ++i) d[0][i] = d[1][i] = __uint_as_float(in[i] | 0x7fc00000u);  // NaN
  wgmma_fence();
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    wgmma_m64n64k16<Major::K, Major::K>(d[p], descriptor_k_major(smem),
                                        descriptor_k_major(smem + (1 + p) * kChunkBytes), false);
    wgmma_commit();
  }
  wgmma_wait<1>();
  wgmma_pin(d[0]);
#pragma unroll
  for (int i = 0; i < 32; ++i) out[32 * threadIdx.x + i] = __float_as_uint(d[0][i]);
  wgmma_wait<0>();
  wgmma_pin(d[1]);
#pragma unroll
  for (int i = 0; i < 32; ++i) out[32 * (kThreads + threadIdx.x) + i] = __float_as_uint(d[1][i]);
}

template <int kN, Major kA, Major kB, bool kRegisters, bool kF8>
void launch_product(const std::uint32_t* in, std::uint32_t* out) {
  auto* const kernel = product_kernel<kN, kA, kB, kRegisters, kF8>;
  kRuntime.launch(kernel, 1, kThreads, 5 * kChunkBytes, nullptr, in, out);
}
template <int kN, Major kA, Major kB, bool kRegisters = false, bool kF8 = false>
constexpr ProductLaunch product() {
  return {kN,
          kRegisters,
          kA == Major::MN,
          kB == Major::MN,
          kF8,
          kF8 && kN % 64 != 0,
          launch_product<kN, kA, kB, kRegisters, kF8>};
}

}  // namespace

void launch_matrix_moves(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(moves_kernel, 1, kThreads, 2 * kChunkBytes, nullptr, in, out);
}

void launch_two_products(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(two_products_kernel, 1, kThreads, 3 * kChunkBytes, nullptr, in, out);
}

#define WINNOW_PRODUCTS(n)                                                   \
  product<n, Major::K, Major::K>(), product<n, Major::K, Major::MN>(),       \
      product<n, Major::MN, Major::K>(), product<n, Major::MN, Major::MN>(), \
      product<n, Major::K, Major::K, true>(), product<n, Major::K, Major::MN, true>()
const ProductLaunch kProducts[kProductLaunches] = {WINNOW_PRODUCTS(32),
                                                   WINNOW_PRODUCTS(64),
                                                   WINNOW_PRODUCTS(128),
                                                   WINNOW_PRODUCTS(256),
                                                   product<64, Major::K, Major::K, false, true>(),
                                                   product<128, Major::K, Major::K, false, true>(),
                                                   product<72, Major::K, Major::K, false, true>(),
                                                   product<136, Major::K, Major::K, false, true>()};
#undef WINNOW_PRODUCTS

}  // namespace winnow::conformance
