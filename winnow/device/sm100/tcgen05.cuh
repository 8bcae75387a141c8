// The tensor cores of sm_100 and their memory: 128 lanes of 512 columns of 32 bits in each
// multiprocessor. An address there is lane << 16 | column.
//
// kBlocks is the cta_group of an instruction: 1, or 2 for the pair of blocks of a cluster whose
// ranks differ in the lowest bit alone. All instructions of a kernel have the same. Where the sums
// of a product stand: with M = 128 of a block, and M = 256 of a pair, row i of a block in lane i;
// with M = 128 of a pair row i (of 64) in lane i, its columns from N / 2 on in lane i + 64.
//
// Instructions that read and write tensor memory are ordered between threads by
//   tcgen05_fence_before(), a barrier, tcgen05_fence_after();
// a commit does the first of these itself. Device code for sm_100a.
#pragma once

#include <cstdint>

namespace winnow::device {

#define WINNOW_TCGEN05_GROUP(before, after, ...)                        \
  if constexpr (kBlocks == 1) {                                         \
    asm volatile(before "cta_group::1" after ::__VA_ARGS__ : "memory"); \
  } else {                                                              \
    asm volatile(before "cta_group::2" after ::__VA_ARGS__ : "memory"); \
  }

// ---- Allocation --------------------------------------------------------------------------------

// Allocates columns, a power of two from 32 to 512, and writes the address of the first to shared
// memory. A whole warp, of each block of a pair; waits while there is no room.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_alloc(std::uint32_t to, std::uint32_t columns) {
  static_assert(kBlocks == 1 || kBlocks == 2);
  WINNOW_TCGEN05_GROUP("tcgen05.alloc.", ".sync.aligned.shared::cta.b32 [%0], %1;", "r"(to),
                       "r"(columns))
}
// The block allocates nothing more, so that others may.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_relinquish() {
  if constexpr (kBlocks == 1) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  } else {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
  }
}
// Of an allocation as a whole, before the kernel ends. A whole warp, of each block of a pair.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_dealloc(std::uint32_t address, std::uint32_t columns){
    WINNOW_TCGEN05_GROUP("tcgen05.dealloc.", ".sync.aligned.b32 %0, %1;", "r"(address),
                         "r"(columns))}

// ---- Order -------------------------------------------------------------------------------------

__device__ __forceinline__ void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// ---- Products ----------------------------------------------------------------------------------
// One thread issues them, of a pair one of its even block; they run in the order of issue.

// D[M x N] = A B^T, plus D if `accumulate`, for 16 columns of K. D is an address of tensor memory,
// the same in both blocks; operands and `instruction` are described in device/sm100/operand.cuh.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_mma(std::uint32_t d, std::uint64_t a, std::uint64_t b,
                                            std::uint32_t instruction, bool accumulate) {
  WINNOW_TCGEN05_GROUP("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\ntcgen05.mma.",
                       ".kind::f16 [%0], %1, %2, %3, p;\n}", "r"(d), "l"(a), "l"(b),
                       "r"(instruction), "r"(static_cast<std::uint32_t>(accumulate)))
}

// 128 rows of 32 bytes of shared memory (of each block), described as a K-major operand, to 128
// lanes of 8 columns.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_cp_128x256b(std::uint32_t to, std::uint64_t from) {
  WINNOW_TCGEN05_GROUP("tcgen05.cp.", ".128x256b [%0], %1;", "r"(to), "l"(from))
}

// One arrival at `barrier` when all products and copies that this thread has issued are done.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_commit(std::uint32_t barrier) {
  WINNOW_TCGEN05_GROUP("tcgen05.commit.", ".mbarrier::arrive::one.shared::cluster.b64 [%0];",
                       "r"(barrier))
}
// The same at the barriers of that offset in the blocks of the cluster whose bits are set.
template <int kBlocks>
__device__ __forceinline__ void tcgen05_commit_multicast(std::uint32_t barrier,
                                                         std::uint16_t ranks){
    WINNOW_TCGEN05_GROUP("tcgen05.commit.",
                         ".mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;",
                         "r"(barrier), "h"(ranks))}
#undef WINNOW_TCGEN05_GROUP

// ---- Registers ---------------------------------------------------------------------------------
// Whole warps. Warp w of a block reaches the lanes from 32 (w % 4) on.

#define WINNOW_R4(r, i) "=r"(r[i]), "=r"(r[(i) + 1]), "=r"(r[(i) + 2]), "=r"(r[(i) + 3])
#define WINNOW_R16(r) WINNOW_R4(r, 0), WINNOW_R4(r, 4), WINNOW_R4(r, 8), WINNOW_R4(r, 12)

// 16 columns from the address on of the thread's lane, which is the address's plus its own number.
// Registers hold them after tcgen05_wait_ld() and a tcgen05_pin().
__device__ __forceinline__ void tcgen05_ld_32x32b(std::uint32_t address, std::uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : WINNOW_R16(r)
      : "r"(address));
}
// 32 columns of the 16 lanes from the address on: r[4 j + e] and r[4 j + 2 + e] are columns
// 8 j + 2 (l % 4) + e of lanes l / 4 and l / 4 + 8, as the sums of wgmma (device/sm90/wgmma.cuh).
__device__ __forceinline__ void tcgen05_ld_16x256b(std::uint32_t address, std::uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : WINNOW_R16(r)
      : "r"(address));
}
#undef WINNOW_R16
#undef WINNOW_R4
__device__ __forceinline__ void tcgen05_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
// Nothing that uses the registers moves above it.
__device__ __forceinline__ void tcgen05_pin(std::uint32_t (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// The way back of tcgen05_ld_32x32b(), done after tcgen05_wait_st().
__device__ __forceinline__ void tcgen05_st_32x32b(std::uint32_t address,
                                                  const std::uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]),
      "r"(r[8]), "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15])
      : "memory");
}
__device__ __forceinline__ void tcgen05_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// ---- Stores ------------------------------------------------------------------------------------

// 32 bytes, a sector of L2, at a multiple of 32 of global memory.
__device__ __forceinline__ void store_sector(void* address, const std::uint32_t (&w)[8]) {
  asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(address), "r"(w[0]),
               "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5]), "r"(w[6]), "r"(w[7])
               : "memory");
}

}  // namespace winnow::device
