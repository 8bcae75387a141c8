// Micro-kernels, one or more for each wrapper of winnow/device: run on a GPU and in the simulator,
// they show that both do the same. The test gives both the same inputs and expects the same words.
//
// A launch takes words in the device's memory, `in` and `out`, and queues one block on the default
// stream. What they hold stands beside the kernels (conformance_*.cu).
#pragma once

#include <cstdint>

namespace winnow::conformance {

using ConformanceLaunch = void (*)(const std::uint32_t* in, std::uint32_t* out);

// conformance_basic.cu
void launch_math(const std::uint32_t* in, std::uint32_t* out);
void launch_narrow(const std::uint32_t* in, std::uint32_t* out);
void launch_memory(const std::uint32_t* in, std::uint32_t* out);
void launch_handover(const std::uint32_t* in, std::uint32_t* out);
void launch_reductions(const std::uint32_t* in, std::uint32_t* out);
void launch_shared(const std::uint32_t* in, std::uint32_t* out);
void launch_warp(const std::uint32_t* in, std::uint32_t* out);

// conformance_barrier.cu
void launch_mbarriers(const std::uint32_t* in, std::uint32_t* out);
void launch_ring(const std::uint32_t* in, std::uint32_t* out);
void launch_named_barriers(const std::uint32_t* in, std::uint32_t* out);
void launch_cluster(const std::uint32_t* in, std::uint32_t* out);
void launch_early_kernel(const std::uint32_t* in, std::uint32_t* out);

// conformance_copy.cu
void launch_cp_async(const std::uint32_t* in, std::uint32_t* out);
void launch_cp_async_words(const std::uint32_t* in, std::uint32_t* out);
void launch_cp_async_groups(const std::uint32_t* in, std::uint32_t* out);
void launch_bulk(const std::uint32_t* in, std::uint32_t* out);
void launch_global_proxy(const std::uint32_t* in, std::uint32_t* out);

// The tensors that `in` holds, and the boxes whose images come out, one after the other.
inline constexpr int kPlaneColumns = 72, kPlaneRows = 40;  // bf16, rows 160 bytes apart
inline constexpr int kPlaneStride = 160;
inline constexpr int kCubeColumns = 100, kCubeRows = 6, kCubePlanes = 5;  // u8
inline constexpr int kCubeRowStride = 112, kCubePlaneStride = 800;
inline constexpr std::uint32_t kPlaneBox[] = {64, 16}, kCubeBox[] = {128, 4, 2};
struct Boxes {
  int plane[5][2], cube[4][3];  // where they begin
};
inline constexpr Boxes kBoxes = {{{0, 0}, {16, 30}, {-8, -3}, {64, 5}, {0, 40}},
                                 {{0, 0, 0}, {16, 4, 3}, {-32, -1, -1}, {0, 0, 5}}};
void launch_tensor(const std::uint32_t* in, std::uint32_t* out);

// conformance_matrix.cu
inline constexpr int kMaxProductColumns = 256;
void launch_matrix_moves(const std::uint32_t* in, std::uint32_t* out);
void launch_two_products(const std::uint32_t* in, std::uint32_t* out);
struct ProductLaunch {
  int n;
  bool a_in_registers, a_transposed, b_transposed, f8, negated;
  ConformanceLaunch launch;
};
inline constexpr int kProductLaunches = 28;
extern const ProductLaunch kProducts[kProductLaunches];

// conformance_mma.cu
inline constexpr int kMmaRows = 64, kMmaColumns = 128;
// The squares of 16 x 16 that are multiplied: a row of them from the column kFirst on, or where the
// operand is transposed a column of them.
struct MmaSquares {
  static constexpr int kRow = 2, kFirst = 2, kColumn = 5;
};
void launch_mma_f16(const std::uint32_t* in, std::uint32_t* out);
void launch_mma_bf16(const std::uint32_t* in, std::uint32_t* out);
void launch_transpose(const std::uint32_t* in, std::uint32_t* out);

}  // namespace winnow::conformance
