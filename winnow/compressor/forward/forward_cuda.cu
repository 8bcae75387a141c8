// Compressed rows on CUDA. A window with more slots than a thread loads at once is the work of a
// team of threads that covers all columns. A smaller window is the work of a warp, or a part of
// one, which loops over the columns: it finds the window once, and waits for no other warp.
#include <algorithm>

#include "winnow/compressor/forward/forward_impl.h"
#include "winnow/compressor/window_cuda.cuh"
#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"

namespace winnow::compressor {
namespace {

using namespace cuda;

constexpr device::Runtime kRuntime{"compressor::forward", "cuda"};

struct KernelParams {
  KernelProblem problem;
  int num_rows;
  bool wide;  // rows are floats, not as kv
  Rows<void*> rows;
  float* rstd;  // null: not wanted
};

__device__ __forceinline__ void store_rstd(const KernelParams& params, int row, const Place& place,
                                           float rstd) {
  if (params.rstd != nullptr) params.rstd[row] = place.found ? rstd : 0.0f;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    forward_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(exchange, Exchange);
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const int row = static_cast<int>(blockIdx.x) * p.team.windows() + thread.window;
  const int column = thread.lane * kColumns;
  const bool inside = row < params.num_rows && column < p.d;
  const Place place = inside ? Windows().of_row(p, row) : Place();

  const Factors<kAligned> factors(p, place.position, column);
  Sums sums = Sums::of_none();
  if (place.found) {
    add_range(SlotLoader<T, kAligned>(p, place.token, column), Range(p, thread.group),
              place.window == 0 ? p.slots() - p.ratio : 0, sums);
  }
  add_groups(p.team, thread, exchange, sums);
  float result[kColumns];
  divide(sums, result);
  const float rstd = finish(p, thread, factors, exchange, result);
  if (!inside || thread.group != 0) return;
  if (!place.found) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) result[c] = 0;
  }
  store_columns<T, kAligned>(params.rows.data, row * params.rows.stride0 + column, params.wide,
                             result);
  if (thread.lane == 0) store_rstd(params, row, place, rstd);
}

// Shared memory through which the slots of small windows pass: for each thread its own columns.
template <class T>
struct Part {
  Pack<T> kv[kSlotsAtOnce][kThreads], gate[kSlotsAtOnce][kThreads];
};

template <class T>
struct SharedMemory {
  static constexpr int kParts = sizeof(T) == 2 ? 2 : 1;  // so that two blocks fit on an SM
  Part<T> parts[kParts];
  alignas(16) float rows[kWarps * kMostColumns];
};

// How a team goes through its rows: those from `row` on, `stride` apart, each in `turns` of `step`
// columns.
struct Course {
  int row, stride, turns, step;
  __device__ Course(const KernelProblem& p, const Thread& thread)
      : row(static_cast<int>(blockIdx.x) * p.team.windows() + thread.window),
        stride(static_cast<int>(gridDim.x) * p.team.windows()),
        turns((p.d + p.team.lanes() * kColumns - 1) / (p.team.lanes() * kColumns)),
        step(p.team.lanes() * kColumns) {}
};

// Copies the parts of a course one after the other. Copies of 16 bytes bypass L1. Where a thread's
// columns are 8 bytes, the first of two neighbouring threads therefore copies kv of both, and the
// second the gates of both. So the threads of a warp wait for each other before they read a part,
// and before it is written again.
template <class T, bool kAligned>
class Copier {
 public:
  __device__ __forceinline__ Copier(const KernelParams& params, const Thread& thread,
                                    const Course& course)
      : params_(params), course_(course), row_(course.row), column_(thread.lane * kColumns) {
    enter();
  }
  // The next part, if there is one.
  __device__ __forceinline__ void copy(Part<T>& part) {
    __syncwarp();
    const KernelProblem& p = params_.problem;
    if (place_.found && column_ + turn_ * course_.step < p.d) {
      const int first = place_.window == 0 ? p.slots() - p.ratio : 0;
      if (first == 0 && p.slots() == kSlotsAtOnce) {
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) copy_slot(j, part);
      } else {
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) {
          if (j >= first && j < p.slots()) copy_slot(j, part);
        }
      }
    }
    device::cp_async_commit();
    if (++turn_ < course_.turns) return;
    turn_ = 0;
    row_ += course_.stride;
    enter();
  }

 private:
  static constexpr bool kPairs = kAligned && sizeof(Pack<T>) == 8;

  // Finds the window of row_.
  __device__ __forceinline__ void enter() {
    const KernelProblem& p = params_.problem;
    place_ = row_ < params_.num_rows ? windows_.of_row(p, row_) : Place();
    const bool second = kPairs && threadIdx.x % 2 == 1;
    walk_ = slots_of<T, kAligned>(p, second ? p.gate : p.kv, place_.token,
                                  second ? column_ - kColumns : column_);
    if constexpr (!kPairs) gate_walk_ = slots_of<T, kAligned>(p, p.gate, place_.token, column_);
  }
  __device__ __forceinline__ void copy_slot(int j, Part<T>& part) const {
    const int own = params_.problem.slots() - params_.problem.ratio;
    const int thread = static_cast<int>(threadIdx.x), at = turn_ * course_.step;
    const T* const source = walk_.at(0, j, own) + at;
    const auto copy = [](Pack<T>& to, const T* from) {
      device::cp_async(device::shared_address(&to), from);
    };
    if constexpr (kPairs) {
      copy((thread % 2 == 0 ? part.kv : part.gate)[j][thread & ~1], source);
      return;
    }
    const T* const gates = gate_walk_.at(0, j, own) + at;
    if constexpr (kAligned) {
      copy(part.kv[j][thread], source);
      copy(part.gate[j][thread], gates);
    } else {
      part.kv[j][thread] = Pack<T>::template load<false>(source);
      part.gate[j][thread] = Pack<T>::template load<false>(gates);
    }
  }

  const KernelParams& params_;
  const Course& course_;
  Windows windows_;
  Place place_;
  Walk<const T, StrideOf<kAligned>> walk_, gate_walk_;
  int row_, column_, turn_ = 0;
};

// Loads from a part.
template <class T, bool kAligned>
struct PartLoader {
  using Raw = typename SlotLoader<T, kAligned>::Raw;

  const Part<T>& part;
  Biases<kAligned> biases;

  __device__ __forceinline__ Raw fetch(int, int j) const {
    return {part.kv[j][threadIdx.x], part.gate[j][threadIdx.x]};
  }
  __device__ __forceinline__ void kv(const Raw& raw, int, int, float (&kv)[kColumns]) const {
    raw.kv.to_floats(kv);
  }
  __device__ __forceinline__ void gate(const Raw& raw, int from, int j,
                                       float (&gate)[kColumns]) const {
    biases.add(raw.gate, from, j, gate);
  }
};

// Windows of up to kSlotsAtOnce slots. While a team adds up a part, the next one is under way.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    small_windows_kernel(const __grid_constant__ KernelParams params) {
  constexpr int kParts = SharedMemory<T>::kParts;
  auto& shared = *reinterpret_cast<SharedMemory<T>*>(device::dynamic_shared<16>());
  const KernelProblem& p = params.problem;
  const Thread thread(p.team);
  const Range range(p, thread.group);
  const Course course(p, thread);
  const int first = thread.lane * kColumns, last = first + (course.turns - 1) * course.step;
  const bool norm = p.norm_weight != nullptr;
  float* const kept = shared.rows + thread.window * p.d;

  Copier<T, kAligned> copier(params, thread, course);
  int next = 0;  // the part to read
  if (kParts > 1) copier.copy(shared.parts[0]);

  Windows windows;
  for (int block_row = course.row - thread.window; block_row < params.num_rows;
       block_row += course.stride) {
    const int row = block_row + thread.window;
    const Place place = row < params.num_rows ? windows.of_row(p, row) : Place();
    const int first_slot = place.window == 0 ? p.slots() - p.ratio : 0;
    const Factors<kAligned> last_factors(p, place.position, last);
    float squares = 0, result[kColumns];
#pragma unroll 1
    for (int column = first; column <= last; column += course.step) {
      copier.copy(shared.parts[(next + kParts - 1) % kParts]);
      device::cp_async_wait<kParts - 1>();
      __syncwarp();
      Sums sums = Sums::of_none();
      if (place.found && column < p.d) {
        add_part(PartLoader<T, kAligned>{shared.parts[next], Biases<kAligned>(p, column, 0)}, range,
                 first_slot, 0, sums);
      }
      next = (next + 1) % kParts;
      divide(sums, result);
      if (column >= p.d) continue;
      squares += squares_of(result);
      Pack<float>::of(result).template store<true>(kept + column);
    }
    const float rstd = norm ? norm_of(p, add_lanes_of_warp(p.team, squares)) : 1;
    if (thread.lane == 0 && thread.group == 0 && row < params.num_rows) {
      store_rstd(params, row, place, rstd);
    }
    const auto put = [&](int column) {
      if (row >= params.num_rows) return;
      if (!place.found) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) result[c] = 0;
      }
      store_columns<T, kAligned>(params.rows.data, row * params.rows.stride0 + column, params.wide,
                                 result);
    };
    const auto finish_turn = [&](const Factors<kAligned>& factors, int column) {
      if (column >= p.d) return;
      Pack<float>::load<true>(kept + column).to_floats(result);
      if (norm) factors.normalise(rstd, result);
      if (p.pairs > 0) factors.rotate(1, result);
      if (p.hadamard) {
        Pack<float>::of(result).template store<true>(kept + column);
      } else {
        put(column);
      }
    };
#pragma unroll 1
    for (int column = first; column < last; column += course.step) {
      finish_turn(Factors<kAligned>(p, place.position, column), column);
    }
    finish_turn(last_factors, last);
    if (!p.hadamard) continue;
    transform_in_memory(p, kept, thread.lane);
    for (int column = first; column <= last && column < p.d; column += course.step) {
      Pack<float>::load<true>(kept + column).to_floats(result);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) result[c] *= hadamard_scale(p);
      put(column);
    }
  }
}

template <class T>
void launch(const ForwardParams& params, const Packed& lists, cudaStream_t stream) {
  const Problem& problem = params.problem;
  KernelParams kernel = {kernel_problem_of(problem, lists), static_cast<int>(params.num_rows),
                         params.rows_dtype != problem.dtype, params.rows,
                         static_cast<float*>(params.rstd)};
  Team& team = kernel.problem.team;
  const bool aligned =
      aligned_inputs(problem) && aligned_rows(params.rows, size_of(params.rows_dtype));
  const bool small = problem.slots() <= kSlotsAtOnce;
  if (small) team.lanes_log = std::min(team.lanes_log, 5);
  const std::int64_t windows = team.windows(), blocks = (params.num_rows + windows - 1) / windows;
  if (!small) {
    kRuntime.launch(aligned ? forward_kernel<T, true> : forward_kernel<T, false>,
                    static_cast<unsigned>(blocks), kThreads, 0, stream, kernel);
    return;
  }
  auto* const function = aligned ? small_windows_kernel<T, true> : small_windows_kernel<T, false>;
  constexpr int kBytes = sizeof(SharedMemory<T>);
  kRuntime.allow_shared_memory(function, kBytes);
  const std::int64_t at_a_time = std::int64_t{kRuntime.multiprocessors()} * kBlocksOfSm;
  kRuntime.launch(function, static_cast<unsigned>(std::min(blocks, at_a_time)), kThreads, kBytes,
                  stream, kernel);
}

}  // namespace

void forward_cuda(const ForwardParams& params, const Packed& lists, void* stream) {
  with_elements(params.problem.dtype,
                [&]<class T>(T) { launch<T>(params, lists, static_cast<cudaStream_t>(stream)); });
}

}  // namespace winnow::compressor
