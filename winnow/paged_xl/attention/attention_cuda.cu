// Decode attention over a paged cache, CUDA: the launch.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/paged_xl/attention/attention_cuda.cuh"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/launch_cuda.cuh"

namespace winnow::paged_xl {
namespace {

using namespace attention_cuda_detail;

constexpr device::Runtime kRuntime{"paged_xl::attention", "cuda"};

// Memory for one call, ordered by its stream. Outside of a capture it comes from a pool that keeps
// what it once had; in a capture it belongs to the graph.
class Workspace {
 public:
  Workspace(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    kRuntime.check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    if (capture == cudaStreamCaptureStatusNone) {
      kRuntime.check(cudaMallocFromPoolAsync(&memory_, bytes, pool(), stream),
                     "memory for partial results");
    } else {
      kRuntime.check(cudaMallocAsync(&memory_, bytes, stream), "memory for partial results");
    }
  }
  ~Workspace() { cudaFreeAsync(memory_, stream_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  float* data() const { return static_cast<float*>(memory_); }

 private:
  // Of the current device; lives as long as the process.
  static cudaMemPool_t pool() {
    static std::mutex mutex;
    static std::map<int, cudaMemPool_t> pools;
    int device = 0;
    kRuntime.check(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard lock(mutex);
    cudaMemPool_t& result = pools[device];
    if (result == nullptr) {
      cudaMemPoolProps properties = {};
      properties.allocType = cudaMemAllocationTypePinned;
      properties.location = {cudaMemLocationTypeDevice, device};
      kRuntime.check(cudaMemPoolCreate(&result, &properties), "cudaMemPoolCreate");
      std::uint64_t everything = UINT64_MAX;
      kRuntime.check(cudaMemPoolSetAttribute(result, cudaMemPoolAttrReleaseThreshold, &everything),
                     "cudaMemPoolSetAttribute");
    }
    return result;
  }

  cudaStream_t stream_;
  void* memory_ = nullptr;
};

KernelParams kernel_params(const AttentionParams& params) {
  KernelParams kernel = {};
  const CacheShape& cache = params.cache;
  kernel.num_kv_heads = static_cast<int>(cache.num_kv_heads);
  kernel.group = static_cast<int>(params.num_heads / cache.num_kv_heads);
  kernel.dim = static_cast<int>(cache.head_size);
  kernel.block_shift = std::countr_zero(static_cast<std::uint64_t>(cache.block_size));
  kernel.num_blocks = static_cast<std::int32_t>(cache.num_blocks);
  kernel.scale = params.scale;
  kernel.query = params.query;
  kernel.key = params.key;
  kernel.value = params.value;
  kernel.pos_bias_u = params.pos_bias_u;
  kernel.pos_bias_v = params.pos_bias_v;
  kernel.matrix_bd = params.matrix_bd;
  kernel.matrix_bd_f32 = params.matrix_bd_dtype == DType::f32;
  kernel.r = params.r;
  kernel.block_tables = params.block_tables;
  kernel.lengths = {params.context_lens, static_cast<int>(params.num_seqs),
                    static_cast<int>(std::min<std::int64_t>(params.max_context, INT32_MAX))};
  kernel.out = params.out;
  kernel.lse = params.lse;
  return kernel;
}

// Bytes of partial results that a call may take. More would only serve to cut very many tokens
// finely.
constexpr std::int64_t kWorkspace = std::int64_t{64} << 20;

template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned>
void launch(KernelParams kernel, cudaStream_t stream) {
  constexpr int kWarps = warps_of_block<kMaxDim, kHeads, kFused>();
  kernel.passes = (kernel.group + kHeads - 1) / kHeads;
  // Room for the parts of the longest contexts that may come, cut as finely as ever, or at least
  // for one part of each.
  const std::int64_t heads = std::int64_t{kernel.num_kv_heads} * kernel.passes;
  const std::int64_t most =
      (kernel.lengths.limit / (kTile<T> * kLeastPart) + 2) * heads * kernel.lengths.num_seqs;
  const std::int64_t bytes = Record::floats(kHeads, kernel.dim) * std::int64_t{sizeof(float)};
  const std::int64_t parts =
      std::clamp<std::int64_t>(kWorkspace / bytes, 2 * heads * kernel.lengths.num_seqs,
                               std::max(most, 2 * heads * kernel.lengths.num_seqs));
  kernel.machine = {kRuntime.multiprocessors(), kWarps, parts, kFused};
  const Workspace workspace(static_cast<std::size_t>(parts * bytes), stream);
  kernel.partials = workspace.data();

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(kernel.machine.blocks));
  config.blockDim = dim3(kWarps * kWarpSize);
  config.stream = stream;
  kRuntime.check(
      cudaLaunchKernelEx(&config, attention_kernel<T, kMaxDim, kHeads, kFused, kAligned>, kernel),
      "launch");

  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = kRuntime.attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  config.gridDim = dim3(static_cast<unsigned>(kernel.num_kv_heads * kernel.group),
                        static_cast<unsigned>(kernel.lengths.num_seqs));
  config.blockDim = dim3(kMergeWarps * kWarpSize);
  kRuntime.check(cudaLaunchKernelEx(&config, merge_kernel<T, kMaxDim>, kernel, kHeads), "launch");
}

// The query heads of a cached head are taken four at a time.
template <class T, bool kFused>
void choose(const KernelParams& kernel, bool aligned, cudaStream_t stream) {
  if (!aligned) {
    launch<T, 256, 1, kFused, false>(kernel, stream);
  } else if (kernel.dim > 128) {
    launch<T, 256, 1, kFused, true>(kernel, stream);
  } else if (kernel.group > 1) {
    launch<T, 128, 4, kFused, true>(kernel, stream);
  } else {
    launch<T, 128, 1, kFused, true>(kernel, stream);
  }
}

}  // namespace

void attention_cuda(const AttentionParams& params, void* stream) {
  const KernelParams kernel = kernel_params(params);
  const std::int64_t size = size_of(params.cache.dtype);
  const bool fused = params.r.data != nullptr;
  const bool aligned = is_aligned(params.key, size) && is_aligned(params.value, size) &&
                       (!fused || is_aligned(params.r, size));
  with_element_type(params.cache.dtype, [&](auto element) {
    using T = decltype(element);
    if (fused) {
      choose<T, true>(kernel, aligned, static_cast<cudaStream_t>(stream));
    } else {
      choose<T, false>(kernel, aligned, static_cast<cudaStream_t>(stream));
    }
  });
}

}  // namespace winnow::paged_xl
