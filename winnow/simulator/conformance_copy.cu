// Conformance: cp.async, bulk copies, and boxes of tensors.
#include <cuda_runtime.h>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/tensor_copy.cuh"
#include "winnow/device/sm90/tensor_map.h"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/simulator/conformance.h"

namespace winnow::conformance {
namespace {

using namespace winnow::device;

constexpr Runtime kRuntime{"conformance", "sm90"};
constexpr int kThreads = 128;

__device__ void copy_out(std::uint32_t smem, std::uint32_t bytes, std::uint32_t* out) {
  for (std::uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
    out[i] = ld_shared<std::uint32_t>(smem + 4 * i);
  }
}

// in: [64][32], the rows of a chunk; [512] whether a unit of 16 bytes is there. out: the chunk.
__global__ void cp_async_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t barrier = smem + kChunkBytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, kThreads);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 512; i += kThreads) {
    const std::uint32_t to = smem + chunk_offset(i / 8, i % 8);
    if (i % 3 > 0) {
      cp_async_zfill(to, in + 4 * i, in[2048 + i] != 0, policy_evict_last());
    } else {
      cp_async_zfill<128>(to, in + 4 * i, in[2048 + i] != 0, policy_evict_last());
    }
  }
  mbarrier_arrive_cp_async(barrier);
  mbarrier_wait(barrier, 0, "copied", 0);
  copy_out(smem, kChunkBytes, out);
}

// in: [512] words; [512] whether a word is there. out: [512], in reverse.
constexpr int kCopiedWords = 512;
__global__ void cp_async_words_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t barrier = smem + 4 * kCopiedWords;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, kThreads);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kCopiedWords; i += kThreads) {
    cp_async_word_zfill(smem + 4 * (kCopiedWords - 1 - i), in + i, in[kCopiedWords + i] != 0);
  }
  mbarrier_arrive_cp_async(barrier);
  mbarrier_wait(barrier, 0, "copied", 0);
  copy_out(smem, 4 * kCopiedWords, out);
}

// in: [1024], in two groups of copies, of 16 bytes a thread; out: the same, each 16 bytes by the
// thread beside that which copied them.
__global__ void cp_async_groups_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const int own = static_cast<int>(threadIdx.x), other = own ^ 1;
  for (int group = 0; group < 2; ++group) {
    const int at = 512 * group + 4 * own;
    cp_async(smem + 4 * at, in + at);
    cp_async_commit();
  }
  const auto read = [&](int group) {
    __syncwarp();
    const int at = 512 * group + 4 * other;
    for (int i = at; i < at + 4; ++i) out[i] = ld_shared<std::uint32_t>(smem + 4 * i);
  };
  cp_async_wait<1>();
  read(0);
  cp_async_wait<0>();
  read(1);
}

// in: [1024], which come in four copies to two barriers; out: [1024] what came plus its place,
// stored by two copies of different groups.
__global__ void bulk_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t barriers = smem + 4096;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) mbarrier_init(barriers + 8 * i, 1);
    fence_mbarrier_init();
    bulk_prefetch_l2(in, 4096);
    const std::uint64_t policy = policy_evict_first();
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t barrier = barriers + 8 * i;
      mbarrier_arrive_expect(barrier, 2048);
      bulk_load(smem + 2048 * i, in + 512 * i, 1536, barrier, policy);
      bulk_load(smem + 2048 * i + 1536, in + 512 * i + 384, 512, barrier, policy);
    }
  }
  __syncthreads();
  for (std::uint32_t i = 0; i < 2; ++i) {
    mbarrier_wait(barriers + 8 * i, 0, "loaded", static_cast<int>(i));
    for (std::uint32_t at = 512 * i + threadIdx.x; at < 512 * i + 512; at += kThreads) {
      st_shared(smem + 4 * at, ld_shared<std::uint32_t>(smem + 4 * at) + at);
    }
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(out + 512 * i, smem + 2048 * i, 2048, policy_evict_normal());
      bulk_commit();
    }
  }
  if (threadIdx.x == 0) {
    bulk_wait_read<1>();
    bulk_wait<0>();
  }
}

// in: [32]; one thread writes them to out [32] plus one, from where a bulk copy takes them; what
// came goes to the next [32].
__global__ void global_proxy_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t barrier = smem + 128;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    for (int i = 0; i < 32; ++i) out[i] = in[i] + 1;
    fence_proxy_async_global();
    mbarrier_arrive_expect(barrier, 128);
    bulk_load(smem, out, 128, barrier, policy_evict_first());
  }
  __syncthreads();
  mbarrier_wait(barrier, 0, "loaded", 0);
  copy_out(smem, 128, out + 32);
}

constexpr std::uint32_t kPlaneBoxBytes = kPlaneBox[0] * kPlaneBox[1] * 2;
constexpr std::uint32_t kCubeBoxBytes = kCubeBox[0] * kCubeBox[1] * kCubeBox[2];
static_assert(kCubeBoxBytes <= kPlaneBoxBytes);  // the barrier stands behind

__global__ void tensor_kernel(const __grid_constant__ CUtensorMap plane,
                              const __grid_constant__ CUtensorMap cube,
                              const __grid_constant__ Boxes boxes, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  const std::uint32_t barrier = smem + kPlaneBoxBytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    prefetch_tensor_map(&plane);
    prefetch_tensor_map(&cube);
  }
  __syncthreads();
  const std::uint64_t policy = policy_evict_last();
  std::uint32_t parity = 0;
  for (const auto& at : boxes.plane) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(barrier, kPlaneBoxBytes);
      tensor_load(smem, &plane, barrier, at[0], at[1], policy);
    }
    mbarrier_wait(barrier, parity, "plane", 0);
    parity ^= 1;
    copy_out(smem, kPlaneBoxBytes, out);
    out += kPlaneBoxBytes / 4;
    __syncthreads();
  }
  for (const auto& at : boxes.cube) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(barrier, kCubeBoxBytes);
      tensor_load(smem, &cube, barrier, at[0], at[1], at[2], policy);
    }
    mbarrier_wait(barrier, parity, "cube", 0);
    parity ^= 1;
    copy_out(smem, kCubeBoxBytes, out);
    out += kCubeBoxBytes / 4;
    __syncthreads();
  }
}

}  // namespace

void launch_cp_async(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(cp_async_kernel, 1, kThreads, kChunkBytes + 8, nullptr, in, out);
}
void launch_cp_async_words(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(cp_async_words_kernel, 1, kThreads, 4 * kCopiedWords + 8, nullptr, in, out);
}
void launch_cp_async_groups(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(cp_async_groups_kernel, 1, kThreads, 4096, nullptr, in, out);
}
void launch_bulk(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(bulk_kernel, 1, kThreads, 4096 + 16, nullptr, in, out);
}
void launch_global_proxy(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(global_proxy_kernel, 1, 32, 136, nullptr, in, out);
}
void launch_tensor(const std::uint32_t* in, std::uint32_t* out) {
  const MapDim plane[] = {{kPlaneColumns, 0, kPlaneBox[0]},
                          {kPlaneRows, kPlaneStride, kPlaneBox[1]}};
  const MapDim cube[] = {{kCubeColumns, 0, kCubeBox[0]},
                         {kCubeRows, kCubeRowStride, kCubeBox[1]},
                         {kCubePlanes, kCubePlaneStride, kCubeBox[2]}};
  const CUtensorMap plane_map = tensor_map(kRuntime, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, in, plane);
  const CUtensorMap cube_map = tensor_map(kRuntime, CU_TENSOR_MAP_DATA_TYPE_UINT8, in, cube);
  kRuntime.launch(tensor_kernel, 1, kThreads, kPlaneBoxBytes + 8, nullptr, plane_map, cube_map,
                  kBoxes, out);
}

}  // namespace winnow::conformance
