// Matrix products of a warpgroup (wgmma, sm_90a), bf16 operands and f32 sums, on the chunks of
// shared memory of chunk.cuh. Written out instead of taken from CuTe: five instructions, a second
// to compile.
//
// Accumulators: thread (warp w, lane l) of the warpgroup holds of row 16 w + l / 4 the columns
// 8 j + 2 (l % 4) + {0, 1} in d[4 j + {0, 1}], and of the row 8 below the same ones in
// d[4 j + {2, 3}]. A from registers, 16 columns of K: a[0], a[1] hold columns 2 (l % 4) + {0, 1} of
// the two rows, a[2], a[3] those 8 further right; so the accumulators of two neighbouring j, packed
// in order, are the A operand of one step of the next product.
#pragma once

#include <cstdint>

#include "winnow/device/common/matrix.cuh"
#include "winnow/device/sm90/chunk.cuh"

namespace winnow::device {

// Orders this thread's accesses to accumulators and A registers before the next wgmma. Needed
// before the first one of a batch.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Stands between a wait and the use of the registers it covers: the compiler moves no access
// across.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(std::uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// clang-format off
#define WINNOW_F4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define WINNOW_F8(d, i) WINNOW_F4(d, i), WINNOW_F4(d, (i) + 4)
#define WINNOW_F16(d, i) WINNOW_F8(d, i), WINNOW_F8(d, (i) + 8)
#define WINNOW_F32(d, i) WINNOW_F16(d, i), WINNOW_F16(d, (i) + 16)
#define WINNOW_F64(d, i) WINNOW_F32(d, i), WINNOW_F32(d, (i) + 32)
#define WINNOW_F128(d, i) WINNOW_F64(d, i), WINNOW_F64(d, (i) + 64)

#define WINNOW_LIST16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WINNOW_LIST32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WINNOW_LIST64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WINNOW_LIST128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

// d (64 x 32) = A B^T, or d + A B^T with `accumulate`; A is 64 x 16, B 32 x 16.
template <Major kA, Major kB>
__device__ __forceinline__ void wgmma_m64n32k16(float (&d)[16], std::uint64_t a, std::uint64_t b,
                                                bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" WINNOW_LIST16
      "}, %16, %17, p, 1, 1, %19, %20;\n"
      "}"
      : WINNOW_F16(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)),
        "n"(static_cast<int>(kB)));
}

// The same with A from registers.
template <Major kB>
__device__ __forceinline__ void wgmma_m64n32k16(float (&d)[16], std::uint32_t a0, std::uint32_t a1,
                                                std::uint32_t a2, std::uint32_t a3, std::uint64_t b,
                                                bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" WINNOW_LIST16
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n"
      "}"
      : WINNOW_F16(d, 0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(static_cast<int>(kB)));
}

// d (64 x 64) = A B^T, or d + A B^T with `accumulate`; A is 64 x 16, B 64 x 16.
template <Major kA, Major kB>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                                bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_LIST32
      "}, %32, %33, p, 1, 1, %35, %36;\n"
      "}"
      : WINNOW_F32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)),
        "n"(static_cast<int>(kB)));
}

// The same with A from registers.
template <Major kB>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], std::uint32_t a0, std::uint32_t a1,
                                                std::uint32_t a2, std::uint32_t a3, std::uint64_t b,
                                                bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_LIST32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
      "}"
      : WINNOW_F32(d, 0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(static_cast<int>(kB)));
}

// d (64 x 128) = A B^T, or d + A B^T with `accumulate`; A is 64 x 16, B 128 x 16.
template <Major kA, Major kB>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], std::uint64_t a, std::uint64_t b,
                                                 bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WINNOW_LIST64
      "}, %64, %65, p, 1, 1, %67, %68;\n"
      "}"
      : WINNOW_F64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)),
        "n"(static_cast<int>(kB)));
}

// The same with A from registers.
template <Major kB>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], std::uint32_t a0, std::uint32_t a1,
                                                 std::uint32_t a2, std::uint32_t a3,
                                                 std::uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WINNOW_LIST64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n"
      "}"
      : WINNOW_F64(d, 0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(static_cast<int>(kB)));
}

// d (64 x 128) = A B^T, or d + A B^T with `accumulate`; A is 64 x 32, B 128 x 32, both f8_e4m3 and
// K-major. The sums within one instruction keep fewer bits than f32.
__device__ __forceinline__ void wgmma_m64n128k32_f8(float (&d)[64], std::uint64_t a,
                                                    std::uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WINNOW_LIST64
      "}, %64, %65, p, 1, 1;\n"
      "}"
      : WINNOW_F64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// The same with 64 columns.
__device__ __forceinline__ void wgmma_m64n64k32_f8(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                                   bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WINNOW_LIST32
      "}, %32, %33, p, 1, 1;\n"
      "}"
      : WINNOW_F32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// The negated product with 136 columns, d = -A B^T or d - A B^T, and with 72.
__device__ __forceinline__ void wgmma_f8_negated(float (&d)[68], std::uint64_t a, std::uint64_t b,
                                                 bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %70, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" WINNOW_LIST64
      ", %64, %65, %66, %67}, %68, %69, p, -1, 1;\n"
      "}"
      : WINNOW_F64(d, 0), WINNOW_F4(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_f8_negated(float (&d)[36], std::uint64_t a, std::uint64_t b,
                                                 bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %38, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 {" WINNOW_LIST32
      ", %32, %33, %34, %35}, %36, %37, p, -1, 1;\n"
      "}"
      : WINNOW_F32(d, 0), WINNOW_F4(d, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d (64 x 256) = A B^T, or d + A B^T with `accumulate`; A is 64 x 16, B 256 x 16.
template <Major kA, Major kB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], std::uint64_t a, std::uint64_t b,
                                                 bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WINNOW_LIST128
      "}, %128, %129, p, 1, 1, %131, %132;\n"
      "}"
      : WINNOW_F128(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)),
        "n"(static_cast<int>(kB)));
}

// The same with A from registers.
template <Major kB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], std::uint32_t a0,
                                                 std::uint32_t a1, std::uint32_t a2,
                                                 std::uint32_t a3, std::uint64_t b,
                                                 bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WINNOW_LIST128
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n"
      "}"
      : WINNOW_F128(d, 0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(static_cast<int>(kB)));
}

#undef WINNOW_F4
#undef WINNOW_F8
#undef WINNOW_F16
#undef WINNOW_F32
#undef WINNOW_F64
#undef WINNOW_F128
#undef WINNOW_LIST16
#undef WINNOW_LIST32
#undef WINNOW_LIST64
#undef WINNOW_LIST128

// Stores four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix
// l / 8; register i holds of matrix i row l / 4, columns 2 (l % 4) + {0, 1}.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t address, std::uint32_t r0,
                                            std::uint32_t r1, std::uint32_t r2, std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace winnow::device
