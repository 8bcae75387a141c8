// The position term of one decode step, CUDA. A warp reads the rows of r for a few neighbouring
// distances of one head once, into registers, and serves all sequences with them.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/paged_xl/launch_cuda.cuh"
#include "winnow/paged_xl/position_term/position_term_impl.h"
#include "winnow/paged_xl/split_cuda.cuh"
#include "winnow/paged_xl/tile_cuda.cuh"

namespace winnow::paged_xl {
namespace {

constexpr device::Runtime kRuntime{"paged_xl::position_term", "cuda"};
constexpr int kWarps = 4;
constexpr int kBlocksPerSm = 5;

struct KernelParams {
  int dim;
  Rows<const void*> query, pos_bias_v, r;
  Lengths lengths;
  Rows<void*> matrix_bd;
  bool matrix_bd_f32;
};

// Grid: (blocks, heads).
template <class T, int kMaxDim, bool kAligned>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    position_term_kernel(const __grid_constant__ KernelParams p) {
  const int lane = threadIdx.x % kWarpSize, head = blockIdx.y;
  const int longest = static_cast<int>(sum_up<T>(p.lengths, lane).longest);
  const int token = lane % kTile<T>;
  const int stride = gridDim.x * kWarps;
  const int tiles = tiles_of<T>(longest);
  for (int tile = blockIdx.x * kWarps + threadIdx.x / kWarpSize; tile < tiles; tile += stride) {
    // Tiles of the longest context: that of a sequence which is shorter by some tokens begins by
    // as many columns earlier.
    const int first = tile * kTile<T>;
    RelativeTile<T, kMaxDim> relative;
    relative.template load<kAligned>(row_of<T>(p.r, head), p.r.stride1, longest - 1 - first, p.dim,
                                     lane);
    for (int s = 0; s < p.lengths.num_seqs; ++s) {
      const int column = p.lengths[s] - longest + first;
      if (column + kTile<T> <= 0) continue;
      typename RelativeTile<T, kMaxDim>::Query query_v;
      query_v.load(row_of<T>(p.query, s, head), row_of<T>(p.pos_bias_v, s, head), p.dim, lane);
      const float term = relative.dot(query_v, lane);
      if (lane >= kTile<T> || column + token < 0 || first + token >= longest) continue;
      if (p.matrix_bd_f32) {
        row_of<float>(p.matrix_bd, s, head)[column + token] = term;
      } else {
        row_of<T>(p.matrix_bd, s, head)[column + token] = from_float<T>(term);
      }
    }
  }
}

}  // namespace

void position_term_cuda(const PositionTermParams& params, void* stream) {
  const int limit = static_cast<int>(std::min<std::int64_t>(params.max_context, INT32_MAX));
  if (limit == 0) return;
  KernelParams kernel = {};
  kernel.dim = static_cast<int>(params.head_size);
  kernel.query = params.query;
  kernel.pos_bias_v = params.pos_bias_v;
  kernel.r = params.r;
  kernel.lengths = {params.context_lens, static_cast<int>(params.num_seqs), limit};
  kernel.matrix_bd = params.matrix_bd;
  kernel.matrix_bd_f32 = params.matrix_bd_dtype == DType::f32;

  const auto heads = static_cast<int>(params.num_heads);
  const int room = std::max(1, kRuntime.multiprocessors() * kBlocksPerSm * 4 / heads);
  const bool aligned = is_aligned(params.r, size_of(params.dtype));
  with_element_type(params.dtype, [&](auto element) {
    using T = decltype(element);
    const int blocks = std::min(room, limit / (kTile<T> * kWarps) + 1);
    auto* const function = !aligned           ? position_term_kernel<T, 256, false>
                           : kernel.dim > 128 ? position_term_kernel<T, 256, true>
                                              : position_term_kernel<T, 128, true>;
    kRuntime.launch(function, dim3(blocks, heads), kWarps * kWarpSize, 0,
                    static_cast<cudaStream_t>(stream), kernel);
  });
}

}  // namespace winnow::paged_xl
