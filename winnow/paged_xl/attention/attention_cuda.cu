// Decode attention over a paged cache, CUDA: the launch.
#include <algorithm>
#include <bit>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/scratch.h"
#include "winnow/paged_xl/attention/attention_cuda.cuh"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/attention/one_sequence_cuda.cuh"
#include "winnow/paged_xl/launch_cuda.cuh"

namespace winnow::paged_xl {
namespace {

using namespace attention_cuda_detail;

constexpr device::Runtime kRuntime{"paged_xl::attention", "cuda"};

KernelParams kernel_params(const AttentionParams& params) {
  KernelParams kernel = {};
  const CacheShape& cache = params.cache;
  kernel.num_kv_heads = static_cast<int>(cache.num_kv_heads);
  kernel.group = static_cast<int>(params.num_heads / cache.num_kv_heads);
  kernel.dim = static_cast<int>(cache.head_size);
  kernel.block_shift = std::countr_zero(static_cast<std::uint64_t>(cache.block_size));
  kernel.num_blocks = static_cast<std::int32_t>(cache.num_blocks);
  kernel.scale = static_cast<float>(params.scale);
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
  kernel.lse = params.lse.as<float>();
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

// Bytes of partial results that a batch may take. More would only serve to cut very many tokens
// finely.
constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;

// The kernels of one choice, and the partial results that they pass to each other.
template <class T, int kMaxDim, int kHeads, bool kFused, bool kAligned>
class Launch {
 public:
  explicit Launch(const KernelParams& params) : kernel_(params) {
    kernel_.passes = (kernel_.group + kHeads - 1) / kHeads;
    kernel_.machine = {kRuntime.multiprocessors(), kWarps, parts(), kFused};
  }

  // Bytes of this call, and the most of any call with these sizes, or with fewer sequences or less
  // room for tokens: one sequence has kernels of its own.
  std::int64_t bytes() const {
    return blocks_of_one() > 0 ? bytes_of_one(blocks_of_one()) : bytes_of_batch();
  }
  std::int64_t most_bytes() const {
    return std::max(bytes_of_batch(), kAligned ? bytes_of_one(blocks_of_head(1)) : 0);
  }

  void run(void* partials, cudaStream_t stream) {
    kernel_.partials = static_cast<float*>(partials);
    if constexpr (kAligned) {
      if (const int blocks = blocks_of_one(); blocks > 0) {
        queue(one_sequence_kernel<T, kMaxDim, kHeads, kFused>,
              grid_of(blocks, kernel_.num_kv_heads, kernel_.passes), kThreads, false, stream,
              kernel_);
        queue(merge_blocks_kernel<T, kMaxDim, kHeads>, grid_of(kernel_.group, kernel_.num_kv_heads),
              kMaxDim, true, stream, kernel_, blocks);
        return;
      }
    }
    queue(attention_kernel<T, kMaxDim, kHeads, kFused, kAligned>, grid_of(kernel_.machine.blocks),
          kThreads, false, stream, kernel_);
    queue(merge_kernel<T, kMaxDim>,
          grid_of(kernel_.num_kv_heads * kernel_.group, kernel_.lengths.num_seqs),
          kMergeWarps * kWarpSize, true, stream, kernel_, kHeads);
  }

 private:
  static constexpr int kWarps = warps_of_block<kMaxDim, kHeads, kFused>();
  static constexpr int kThreads = kWarps * kWarpSize;

  std::int64_t heads() const { return std::int64_t{kernel_.num_kv_heads} * kernel_.passes; }
  std::int64_t part_bytes() const {
    return Record::floats(kHeads, kernel_.dim) * std::int64_t{sizeof(float)};
  }
  // Room for the parts of the longest contexts that may come, cut as finely as ever, or at least
  // for one part of each.
  std::int64_t parts() const {
    const std::int64_t pairs = heads() * kernel_.lengths.num_seqs;
    const std::int64_t most = (kernel_.lengths.limit / (kTile<T> * kLeastPart) + 2) * pairs;
    return std::clamp<std::int64_t>(kMostBytes / part_bytes(), 2 * pairs,
                                    std::max(most, 2 * pairs));
  }
  std::int64_t bytes_of_batch() const { return parts() * part_bytes(); }

  // Thread blocks of a head where `sequences` are alone; 0: they are a batch.
  int blocks_of_head(int sequences) const {
    return paged_xl::blocks_of_head(sequences, kernel_.num_kv_heads, kernel_.passes,
                                    kernel_.machine);
  }
  int blocks_of_one() const {
    const bool aligned = kAligned && is_aligned(kernel_.query, sizeof(T)) &&
                         is_aligned(kernel_.pos_bias_u, sizeof(T));
    return aligned ? blocks_of_head(kernel_.lengths.num_seqs) : 0;
  }
  std::int64_t bytes_of_one(int blocks) const {
    using Record = BlockRecord<kMaxDim>;
    return heads() * kHeads * Record::room(blocks) * std::int64_t{sizeof(Record)};
  }

  KernelParams kernel_;
};

// body(launch) with the kernels for the sizes and, if `aligned`, for K, V and r at multiples of 16
// bytes. The query heads of a cached head are taken four at a time.
template <class T, bool kFused, class Body>
void with_launch(const KernelParams& kernel, bool aligned, const Body& body) {
  if (!aligned) {
    body(Launch<T, 256, 1, kFused, false>(kernel));
  } else if (kernel.dim > 128) {
    body(Launch<T, 256, 1, kFused, true>(kernel));
  } else if (kernel.group > 1) {
    body(Launch<T, 128, 4, kFused, true>(kernel));
  } else {
    body(Launch<T, 128, 1, kFused, true>(kernel));
  }
}
template <class Body>
void with_launch(const AttentionParams& params, bool aligned, const Body& body) {
  const KernelParams kernel = kernel_params(params);
  with_element_type(params.cache.dtype, [&](auto element) {
    using T = decltype(element);
    if (params.r.present()) {
      with_launch<T, true>(kernel, aligned, body);
    } else {
      with_launch<T, false>(kernel, aligned, body);
    }
  });
}

}  // namespace

std::int64_t attention_cuda_workspace_bytes(const AttentionParams& params) {
  std::int64_t bytes = 0;
  for (const bool aligned : {true, false}) {
    with_launch(params, aligned,
                [&](const auto& launch) { bytes = std::max(bytes, launch.most_bytes()); });
  }
  return bytes;
}

void attention_cuda(const AttentionParams& params, void* workspace, void* stream) {
  const std::int64_t size = size_of(params.cache.dtype);
  const bool aligned = is_aligned(params.key, size) && is_aligned(params.value, size) &&
                       (!params.r.present() || is_aligned(params.r, size));
  with_launch(params, aligned, [&](auto launch) {
    const auto queue = static_cast<cudaStream_t>(stream);
    const device::Scratch scratch(kRuntime, workspace, launch.bytes(), queue);
    launch.run(scratch.data(), queue);
  });
}

}  // namespace winnow::paged_xl
