// Conformance on sm100: products of one block and of a pair, tensor memory, copies of a pair.
#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm100/operand.cuh"
#include "winnow/device/sm100/tcgen05.cuh"
#include "winnow/device/sm100/tensor_copy.cuh"
#include "winnow/device/sm90/cluster.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/tensor_map.h"
#include "winnow/simulator/conformance_sm100.h"

namespace winnow::conformance {
namespace {

using namespace winnow::device;

constexpr Runtime kRuntime{"conformance", "sm100"};
constexpr int kThreads = 128;

template <class... Params>
void launch(void (*kernel)(Params...), int blocks, int shared,
            const std::type_identity_t<Params>&... params) {
  kRuntime.allow_shared_memory(kernel, shared);
  kRuntime.check(
      launch_clusters(kernel, static_cast<unsigned>(blocks), dim3(static_cast<unsigned>(blocks)),
                      dim3(kThreads), static_cast<std::size_t>(shared), nullptr, params...),
      "launch");
}

// The columns that the block has allocated; all threads of the cluster come and go together.
template <int kBlocks>
__device__ std::uint32_t begin(std::uint32_t barrier, std::uint32_t slot, std::uint32_t columns) {
  if (threadIdx.x < 32) {
    tcgen05_alloc<kBlocks>(slot, columns);
    tcgen05_relinquish<kBlocks>();
    tcgen05_fence_before();
  }
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  tcgen05_fence_after();
  return ld_shared<std::uint32_t>(slot);
}
template <int kBlocks>
__device__ void end(std::uint32_t address, std::uint32_t columns) {
  tcgen05_fence_before();
  cluster_sync();
  tcgen05_fence_after();
  if (threadIdx.x < 32) tcgen05_dealloc<kBlocks>(address, columns);
}

__device__ void store_columns(std::uint32_t address, std::uint32_t* out) {
  std::uint32_t r[16];
  const std::uint32_t lanes = threadIdx.x / 32 * 32;
  tcgen05_ld_32x32b(address + (lanes << 16), r);
  tcgen05_wait_ld();
  tcgen05_pin(r);
  for (int i = 0; i < 16; ++i) out[i] = r[i];
}

template <int kBlocks>
__global__ void product_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t barrier = smem + 4 * kOperandWords, rank = cluster_rank();
  const std::uint32_t* words = in + kProductWords + rank * kOperandWords;
  for (int i = static_cast<int>(threadIdx.x); i < kOperandWords; i += kThreads) {
    st_shared(smem + 4 * static_cast<std::uint32_t>(i), words[i]);
  }
  fence_proxy_async_shared();
  const std::uint32_t d = begin<kBlocks>(barrier, barrier + 8, kTensorColumns);
  if (threadIdx.x == 0 && rank == 0) {
    const auto describe = [&](int at) {
      return (static_cast<std::uint64_t>(in[at + 1]) << 32 | in[at]) + ((smem & 0x3ffff) >> 4);
    };
    tcgen05_mma<kBlocks>(d, describe(0), describe(2), in[4], false);
    tcgen05_mma<kBlocks>(d, describe(0), describe(2), in[4], true);
    if constexpr (kBlocks == 1) {
      tcgen05_commit<kBlocks>(barrier);
    } else {
      tcgen05_commit_multicast<kBlocks>(barrier, 3);
    }
  }
  mbarrier_wait(barrier, 0, "product", 0);
  tcgen05_fence_after();
  for (int column = 0; column < kTensorColumns; column += 16) {
    store_columns(d + static_cast<std::uint32_t>(column),
                  out + (rank * kThreads + threadIdx.x) * kTensorColumns + column);
  }
  end<kBlocks>(d, kTensorColumns);
}

__global__ void moves_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t at = begin<1>(smem, smem + 8, 64) + 32;
  const std::uint32_t thread = threadIdx.x, warp = thread / 32, lanes = warp * 32 << 16;
  for (std::uint32_t half = 0; half < 32; half += 16) {
    std::uint32_t r[16];
    for (std::uint32_t i = 0; i < 16; ++i) r[i] = in[thread * 32 + half + i];
    tcgen05_st_32x32b(at + lanes + half, r);
  }
  tcgen05_wait_st();
  for (std::uint32_t half = 0; half < 32; half += 16) {
    store_columns(at + half, out + thread * 32 + half);
  }
  for (std::uint32_t half = 0; half < 2; ++half) {
    std::uint32_t r[16];
    tcgen05_ld_16x256b(at + lanes + (half * 16 << 16), r);
    tcgen05_wait_ld();
    tcgen05_pin(r);
    for (std::uint32_t i = 0; i < 16; ++i) {
      out[4096 + ((2 * warp + half) * 32 + thread % 32) * 16 + i] = r[i];
    }
  }
  end<1>(at - 32, 64);
}

__global__ void copy_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>()), rank = cluster_rank();
  const std::uint32_t barrier = smem + 4096;
  for (std::uint32_t i = threadIdx.x; i < 1024; i += kThreads) {
    st_shared(smem + 4 * i, in[rank * 1024 + i]);
  }
  fence_proxy_async_shared();
  const std::uint32_t to = begin<2>(barrier, barrier + 8, 32);
  if (threadIdx.x == 0 && rank == 0) {
    // Units of 8 lanes x 16 bytes: the second half of a lane 128 bytes further, the next 8 lanes
    // 256.
    tcgen05_cp_128x256b<2>(to, tcgen05_descriptor::make(smem, 128, 256, 0));
    tcgen05_commit_multicast<2>(barrier, 3);
  }
  mbarrier_wait(barrier, 0, "copy", 0);
  tcgen05_fence_after();
  std::uint32_t r[16];
  tcgen05_ld_32x32b(to + (threadIdx.x / 32 * 32 << 16), r);
  tcgen05_wait_ld();
  tcgen05_pin(r);
  std::uint32_t lane[8];
  for (std::uint32_t i = 0; i < 8; ++i) lane[i] = r[i];
  store_sector(out + (rank * kThreads + threadIdx.x) * 8, lane);
  end<2>(to, 32);
}

__global__ void gather_kernel(const __grid_constant__ CUtensorMap wide,
                              const __grid_constant__ CUtensorMap narrow,
                              const __grid_constant__ CUtensorMap box,
                              const __grid_constant__ CUtensorMap cube, const std::uint32_t* in,
                              std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>()), rank = cluster_rank();
  const std::uint32_t barrier = smem + 5120;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  constexpr std::uint32_t kBytes = 4 * 128 + 4 * 64 + 3 * 1024;
  if (threadIdx.x == 0) {
    // The even block's barrier hears of both.
    const std::uint32_t told = map_shared(barrier, 0);
    if (rank == 0) mbarrier_arrive_expect(barrier, 2 * kBytes);
    const std::uint32_t* given = in + kGatherRows * kGatherStride / 4;
    const auto row = [&](std::uint32_t i) { return static_cast<int>(given[4 * rank + i]); };
    const int4 rows = {row(0), row(1), row(2), row(3)};
    const int x = static_cast<int>(given[8]);
    tensor_gather4_pair(smem, &wide, told, x, rows, policy_evict_last());
    tensor_gather4_pair(smem + 1024, &narrow, told, x, rows, policy_evict_last());
    if (rank == 0) tensor_load_pair_multicast(smem + 2048, &box, told, 0, 3, 3);
    const int own = static_cast<int>(rank);
    tensor_load_pair(smem + 3072, &box, told, x, 32 * own, policy_evict_first());
    tensor_load_pair(smem + 4096, &cube, told, x, 4, 2 + own, policy_evict_first());
  }
  if (rank == 0) mbarrier_wait(barrier, 0, "gather", 0);
  cluster_sync();
  constexpr std::uint32_t kWords = kBytes / 4;
  for (std::uint32_t i = threadIdx.x; i < kWords; i += kThreads) {
    const std::uint32_t at = i < 128 ? i : i < 192 ? 256 + i - 128 : 512 + i - 192;
    out[rank * kWords + i] = ld_shared<std::uint32_t>(smem + 4 * at);
  }
}

}  // namespace

void launch_product_1(const std::uint32_t* in, std::uint32_t* out) {
  launch(product_kernel<1>, 1, 4 * kOperandWords + 16, in, out);
}
void launch_product_2(const std::uint32_t* in, std::uint32_t* out) {
  launch(product_kernel<2>, 2, 4 * kOperandWords + 16, in, out);
}
void launch_tensor_moves(const std::uint32_t* in, std::uint32_t* out) {
  launch(moves_kernel, 1, 16, in, out);
}
void launch_tensor_copy(const std::uint32_t* in, std::uint32_t* out) {
  launch(copy_kernel, 2, 4096 + 16, in, out);
}
void launch_gather(const std::uint32_t* in, std::uint32_t* out) {
  const auto map = [&](std::uint32_t columns, std::uint32_t rows, CUtensorMapSwizzle swizzle) {
    return tensor_map<2>(kRuntime, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, in,
                         {{kGatherColumns, 0, columns}, {kGatherRows, kGatherStride, rows}},
                         swizzle);
  };
  const CUtensorMap cube = tensor_map<3>(kRuntime, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, in,
                                         {{kGatherColumns, 0, 64},
                                          {kGatherPlaneRows, kGatherStride, 4},
                                          {6, kGatherPlaneRows * kGatherStride, 2}});
  launch(gather_kernel, 2, 5120 + 16, map(64, 1, CU_TENSOR_MAP_SWIZZLE_128B),
         map(32, 1, CU_TENSOR_MAP_SWIZZLE_64B), map(64, 8, CU_TENSOR_MAP_SWIZZLE_128B), cube, in,
         out);
}

}  // namespace winnow::conformance
