// Compressed rows on CUDA: a team of threads for each row.
#include "winnow/compressor/forward/forward_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/runtime.h"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::forward", "cuda"};

struct KernelParams {
  KernelProblem problem;
  int num_rows;
  bool wide;  // rows are floats, not as kv
  Rows<void*> rows;
};

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    forward_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(exchange, Exchange);
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const int row = static_cast<int>(blockIdx.x) * p.team.windows() + thread.window;
  const int column = thread.lane * kColumns;
  const bool inside = row < params.num_rows && column < p.d;
  const Place place = inside ? place_of_row(p, row) : Place();

  const Factors<kAligned> factors(p, place.position, column);
  Sums sums = Sums::of_none();
  if (place.found) {
    add_range(SlotLoader<T, kAligned>(p, place.token, column), Range(p, thread.group),
              place.window == 0 ? p.slots() - p.ratio : 0, sums);
  }
  add_groups(p.team, thread, exchange, sums);
  float result[kColumns];
  finish(p, thread, factors, exchange, sums, result);
  if (!inside || thread.group != 0) return;
  if (!place.found) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) result[c] = 0;
  }
  store_columns<T, kAligned>(params.rows.data, row * params.rows.stride0 + column, params.wide,
                             result);
}

template <class T>
void launch(const ForwardParams& params, const Packed& lists, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const KernelParams kernel = {kernel_problem_of(problem, lists), static_cast<int>(params.num_rows),
                               params.rows_dtype != problem.dtype, params.rows};
  const bool aligned =
      aligned_inputs(problem) && aligned_rows(params.rows, size_of(params.rows_dtype));
  const int windows = kernel.problem.team.windows();
  kRuntime.launch(aligned ? forward_kernel<T, true> : forward_kernel<T, false>,
                  static_cast<unsigned>((params.num_rows + windows - 1) / windows), kThreads, 0,
                  stream, kernel);
}

}  // namespace

void forward_cuda(const ForwardParams& params, const Packed& lists, void* stream) {
  with_elements(params.problem.dtype,
                [&]<class T>(T) { launch<T>(params, lists, static_cast<cudaStream_t>(stream)); });
}

}  // namespace winnow::compressor
