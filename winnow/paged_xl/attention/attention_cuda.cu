// Decode attention over a paged cache, CUDA: the launch.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/paged_xl/attention/attention_cuda.cuh"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/attention/one_sequence_cuda.cuh"
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

// Small memory that stays with a stream, so that a call spares the time of taking and giving it
// back, about 0.7 us of a GPU. Calls on one stream use it one after the other, and its holder alone
// may launch with it. Has none (null) in a capture and where very many streams have come.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    kRuntime.check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) return;
    std::pair<int, unsigned long long> id;  // never used again, unlike the handle
    kRuntime.check(cudaGetDevice(&id.first), "cudaGetDevice");
    kRuntime.check(cudaStreamGetId(stream, &id.second), "cudaStreamGetId");
    static std::mutex mutex;
    static std::map<std::pair<int, unsigned long long>, Block> blocks;
    std::unique_lock lock(mutex);
    if (blocks.size() >= kMostStreams && !blocks.contains(id)) return;
    Block& block = blocks[id];
    if (block.bytes < bytes) {
      if (block.memory != nullptr) cudaFreeAsync(block.memory, stream);
      block = {};
      kRuntime.check(cudaMallocAsync(&block.memory, bytes, stream), "memory for partial results");
      block.bytes = bytes;
    }
    lock_ = std::move(lock);
    memory_ = block.memory;
  }
  float* data() const { return static_cast<float*>(memory_); }

 private:
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };
  static constexpr std::size_t kMostStreams = 64;
  std::unique_lock<std::mutex> lock_;
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

// Queues a kernel of one-dimensional blocks. `early`: it may start before the one before has ended,
// and waits for that itself.
template <class... Params>
void queue(void (*kernel)(Params...), dim3 grid, int threads, bool early, cudaStream_t stream,
           const Params&... params) {
  if (early && kRuntime.attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    kRuntime.check(device::launch_early(kernel, grid, threads, 0, stream, params...), "launch");
  } else {
    kRuntime.launch(kernel, grid, static_cast<unsigned>(threads), 0, stream, params...);
  }
}

dim3 grid_of(std::int64_t x, std::int64_t y = 1, std::int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

// Bytes of partial results that a call may take. More would only serve to cut very many tokens
// finely.
constexpr std::int64_t kWorkspace = std::int64_t{64} << 20;

template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned>
void launch(KernelParams kernel, cudaStream_t stream) {
  constexpr int kWarps = warps_of_block<kMaxDim, kHeads, kFused>();
  constexpr int kThreads = kWarps * kWarpSize;
  kernel.passes = (kernel.group + kHeads - 1) / kHeads;
  kernel.machine = {kRuntime.multiprocessors(), kWarps, 0, kFused};
  const std::int64_t heads = std::int64_t{kernel.num_kv_heads} * kernel.passes;
  const std::int64_t bytes = Record::floats(kHeads, kernel.dim) * std::int64_t{sizeof(float)};
  if constexpr (kAligned) {
    const int blocks =
        blocks_of_head(kernel.lengths.num_seqs, kernel.num_kv_heads, kernel.passes, kernel.machine);
    if (blocks > 0 && is_aligned(kernel.query, sizeof(T)) &&
        is_aligned(kernel.pos_bias_u, sizeof(T))) {
      using BlockRecord = BlockRecord<kMaxDim>;
      const std::int64_t records = heads * kHeads * BlockRecord::room(blocks);
      const std::size_t size = static_cast<std::size_t>(records) * sizeof(BlockRecord);
      const StreamMemory kept(size, stream);
      std::optional<Workspace> workspace;
      if (kept.data() == nullptr) workspace.emplace(size, stream);
      kernel.partials = workspace ? workspace->data() : kept.data();
      queue(one_sequence_kernel<T, kMaxDim, kHeads, kFused>,
            grid_of(blocks, kernel.num_kv_heads, kernel.passes), kThreads, false, stream, kernel);
      queue(merge_blocks_kernel<T, kMaxDim, kHeads>, grid_of(kernel.group, kernel.num_kv_heads),
            kMaxDim, true, stream, kernel, blocks);
      return;
    }
  }
  // Room for the parts of the longest contexts that may come, cut as finely as ever, or at least
  // for one part of each.
  const std::int64_t most =
      (kernel.lengths.limit / (kTile<T> * kLeastPart) + 2) * heads * kernel.lengths.num_seqs;
  const std::int64_t least = 2 * heads * kernel.lengths.num_seqs;
  const std::int64_t parts =
      std::clamp<std::int64_t>(kWorkspace / bytes, least, std::max(most, least));
  kernel.machine.max_parts = parts;
  const Workspace workspace(static_cast<std::size_t>(parts * bytes), stream);
  kernel.partials = workspace.data();
  queue(attention_kernel<T, kMaxDim, kHeads, kFused, kAligned>, grid_of(kernel.machine.blocks),
        kThreads, false, stream, kernel);
  queue(merge_kernel<T, kMaxDim>,
        grid_of(kernel.num_kv_heads * kernel.group, kernel.lengths.num_seqs),
        kMergeWarps * kWarpSize, true, stream, kernel, kHeads);
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
