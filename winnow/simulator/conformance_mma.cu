// Conformance: matrix products of a warp, and the tiles that their operands come from.
#include <cuda_runtime.h>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm80/mma.cuh"
#include "winnow/device/sm80/tile.cuh"
#include "winnow/simulator/conformance.h"

namespace winnow::conformance {
namespace {

using namespace winnow::device;

constexpr Runtime kRuntime{"conformance", "cuda"};
constexpr int kThreads = 128;

struct MmaMemory {
  Tile<kMmaRows, kMmaColumns> a, b;
  Tile<64, 64> d;
};
struct MmaShared : Shared<MmaMemory> {
  WINNOW_PLACE(a)
  WINNOW_PLACE(b)
  WINNOW_PLACE(d)
};

// in: the matrices A and B [64][128] of 16 bits; [16][16] f32 to begin with. Warp w multiplies four
// squares of A with four of B, transposed ones of A if w & 1 and of B if w & 2 (MmaSquares).
// out: [4][32][8], the accumulators; [4][16][8] words, the same rounded to 16 bits.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    mma_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const MmaShared shared{shared_address(dynamic_shared<1024>())};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  constexpr int kUnits = kMmaRows * kMmaColumns / 8;
  for (int i = thread; i < kUnits; i += kThreads) {
    const int row = i / (kMmaColumns / 8), unit = i % (kMmaColumns / 8);
    cp_async(shared.a().unit(row, unit), in + 4 * i);
    cp_async_commit();
    const uint4 words = reinterpret_cast<const uint4*>(in + 4 * kUnits)[i];
    st_shared(shared.b().unit(row, unit), words);
  }
  cp_async_wait<0>();
  __syncthreads();

  const auto a_squares = shared.a().squares(lane), b_squares = shared.b().squares(lane);
  float d[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = 8 * n + lane % 4 * 2 + i % 2;
      d[n][i] = __uint_as_float(in[8 * kUnits + 16 * row + column]);
    }
  }
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t a[4], b[4];
    if (warp & 1) {
      ldmatrix_x4_trans(a_squares.at(k16, MmaSquares::kColumn), a[0], a[2], a[1], a[3]);
    } else {
      ldmatrix_x4(a_squares.at(MmaSquares::kRow, MmaSquares::kFirst + k16), a[0], a[1], a[2], a[3]);
    }
    if (warp & 2) {
      ldmatrix_x4_trans(b_squares.at(k16, MmaSquares::kColumn), b[0], b[1], b[2], b[3]);
    } else {
      ldmatrix_x4(b_squares.at(MmaSquares::kRow, MmaSquares::kFirst + k16), b[0], b[2], b[1], b[3]);
    }
    mma_m16n8k16<kType>(d[0], a, b[0], b[1]);
    mma_m16n8k16<kType>(d[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[8 * thread + 4 * n + i] = __float_as_uint(d[n][i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      st_shared(shared.d().pair(16 * warp + lane / 4 + 8 * half, 8 * n + lane % 4 * 2),
                pack_pair<kType>(d[n][2 * half], d[n][2 * half + 1]));
    }
  }
  __syncthreads();
  const uint4 rounded = ld_shared_words(shared.d().unit(thread / 2, thread % 2));
  reinterpret_cast<uint4*>(out + 8 * kThreads)[thread] = rounded;
}

// in: a word of each thread. out: those of the warp's transposed matrix of 8 x 8.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const std::uint32_t* in, std::uint32_t* out) {
  out[threadIdx.x] = movmatrix_trans(in[threadIdx.x]);
}

template <DType kType>
void launch_mma(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(mma_kernel<kType>, 1, kThreads, sizeof(MmaMemory), nullptr, in, out);
}

}  // namespace

void launch_mma_f16(const std::uint32_t* in, std::uint32_t* out) {
  launch_mma<DType::f16>(in, out);
}
void launch_mma_bf16(const std::uint32_t* in, std::uint32_t* out) {
  launch_mma<DType::bf16>(in, out);
}
void launch_transpose(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(transpose_kernel, 1, kThreads, 0, nullptr, in, out);
}

}  // namespace winnow::conformance
