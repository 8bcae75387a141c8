// Host half of winnow/device/sm90/wgmma.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/common/matrix.cuh"
#include "winnow/device/sm90/chunk.cuh"
#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

inline void wgmma_fence(Where where = Where::current()) { simulator::wgmma_fence(where); }
inline void wgmma_commit(Where where = Where::current()) { simulator::wgmma_commit(where); }
template <int kPending>
void wgmma_wait(Where where = Where::current()) {
  simulator::wgmma_wait(kPending, where);
}
template <int kCount>
void wgmma_pin(float (&)[kCount]) {}
template <int kCount>
void wgmma_pin(std::uint32_t (&)[kCount]) {}

namespace host {
constexpr simulator::MatrixMajor major(Major of) {
  return of == Major::K ? simulator::MatrixMajor::k : simulator::MatrixMajor::mn;
}
// d = `sign` A B^T (+ d), both from shared memory.
template <Major kA, Major kB, int kCount>
void product(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate,
             simulator::MatrixElement element, const Where& where, int sign = 1) {
  simulator::WgmmaCall call{.wgmma = {.n = 2 * kCount,
                                      .a = element,
                                      .b = element,
                                      .major_a = major(kA),
                                      .major_b = major(kB),
                                      .scale_a = sign,
                                      .accumulate = accumulate},
                            .a = a,
                            .b = b};
  simulator::wgmma_issue(call, d, kCount, where);
}
// The same with A from registers, which are read until the product is done.
template <Major kB, int kCount>
void product(float (&d)[kCount], const std::uint32_t& a0, const std::uint32_t& a1,
             const std::uint32_t& a2, const std::uint32_t& a3, std::uint64_t b, bool accumulate,
             const Where& where) {
  constexpr auto kBf16 = simulator::MatrixElement::bf16;
  simulator::WgmmaCall call{.wgmma = {.n = 2 * kCount,
                                      .a = kBf16,
                                      .b = kBf16,
                                      .major_b = major(kB),
                                      .accumulate = accumulate},
                            .a_registers = {&a0, &a1, &a2, &a3},
                            .b = b};
  simulator::wgmma_issue(call, d, kCount, where);
}
}  // namespace host

#define WINNOW_HOST_WGMMA(name, count)                                                          \
  template <Major kA, Major kB>                                                                 \
  void name(float(&d)[count], std::uint64_t a, std::uint64_t b, bool accumulate,                \
            Where where = Where::current()) {                                                   \
    host::product<kA, kB>(d, a, b, accumulate, simulator::MatrixElement::bf16, where);          \
  }                                                                                             \
  template <Major kB>                                                                           \
  void name(float(&d)[count], const std::uint32_t& a0, const std::uint32_t& a1,                 \
            const std::uint32_t& a2, const std::uint32_t& a3, std::uint64_t b, bool accumulate, \
            Where where = Where::current()) {                                                   \
    host::product<kB>(d, a0, a1, a2, a3, b, accumulate, where);                                 \
  }
WINNOW_HOST_WGMMA(wgmma_m64n32k16, 16)
WINNOW_HOST_WGMMA(wgmma_m64n64k16, 32)
WINNOW_HOST_WGMMA(wgmma_m64n128k16, 64)
WINNOW_HOST_WGMMA(wgmma_m64n256k16, 128)
#undef WINNOW_HOST_WGMMA

inline void wgmma_m64n128k32_f8(float (&d)[64], std::uint64_t a, std::uint64_t b, bool accumulate,
                                Where where = Where::current()) {
  host::product<Major::K, Major::K>(d, a, b, accumulate, simulator::MatrixElement::e4m3, where);
}
inline void wgmma_m64n64k32_f8(float (&d)[32], std::uint64_t a, std::uint64_t b, bool accumulate,
                               Where where = Where::current()) {
  host::product<Major::K, Major::K>(d, a, b, accumulate, simulator::MatrixElement::e4m3, where);
}

inline void wgmma_f8_negated(float (&d)[68], std::uint64_t a, std::uint64_t b, bool accumulate,
                             Where where = Where::current()) {
  host::product<Major::K, Major::K>(d, a, b, accumulate, simulator::MatrixElement::e4m3, where, -1);
}
inline void wgmma_f8_negated(float (&d)[36], std::uint64_t a, std::uint64_t b, bool accumulate,
                             Where where = Where::current()) {
  host::product<Major::K, Major::K>(d, a, b, accumulate, simulator::MatrixElement::e4m3, where, -1);
}

inline void stmatrix_x4(std::uint32_t address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                        std::uint32_t r3, Where where = Where::current()) {
  const std::uint32_t registers[4] = {r0, r1, r2, r3};
  simulator::stmatrix_x4(address, registers, where);
}

}  // namespace winnow::device
