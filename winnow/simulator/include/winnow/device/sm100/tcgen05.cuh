// Host half of winnow/device/sm100/tcgen05.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

template <int kBlocks>
void tcgen05_alloc(std::uint32_t to, std::uint32_t columns, Where where = Where::current()) {
  simulator::tensor_allocate(kBlocks, to, columns, where);
}
template <int kBlocks>
void tcgen05_relinquish(Where where = Where::current()) {
  simulator::tensor_relinquish(kBlocks, where);
}
template <int kBlocks>
void tcgen05_dealloc(std::uint32_t address, std::uint32_t columns, Where where = Where::current()) {
  simulator::tensor_deallocate(kBlocks, address, columns, where);
}

inline void tcgen05_fence_before(Where where = Where::current()) {
  simulator::tensor_fence_before(where);
}
inline void tcgen05_fence_after(Where where = Where::current()) {
  simulator::tensor_fence_after(where);
}

template <int kBlocks>
void tcgen05_mma(std::uint32_t d, std::uint64_t a, std::uint64_t b, std::uint32_t instruction,
                 bool accumulate, Where where = Where::current()) {
  simulator::tensor_multiply(kBlocks, d, a, b, instruction, accumulate, where);
}
template <int kBlocks>
void tcgen05_cp_128x256b(std::uint32_t to, std::uint64_t from, Where where = Where::current()) {
  simulator::tensor_copy_128x256b(kBlocks, to, from, where);
}
template <int kBlocks>
void tcgen05_commit(std::uint32_t barrier, Where where = Where::current()) {
  simulator::tensor_commit(kBlocks, barrier, 0, where);
}
template <int kBlocks>
void tcgen05_commit_multicast(std::uint32_t barrier, std::uint16_t ranks,
                              Where where = Where::current()) {
  simulator::tensor_commit(kBlocks, barrier, ranks, where);
}

inline void tcgen05_ld_32x32b(std::uint32_t address, std::uint32_t (&r)[16],
                              Where where = Where::current()) {
  simulator::tensor_read(simulator::TensorShape::lanes32x32b, address, r, 16, where);
}
inline void tcgen05_ld_16x256b(std::uint32_t address, std::uint32_t (&r)[16],
                               Where where = Where::current()) {
  simulator::tensor_read(simulator::TensorShape::lanes16x256b, address, r, 16, where);
}
inline void tcgen05_wait_ld(Where where = Where::current()) { simulator::tensor_wait(true, where); }
inline void tcgen05_pin(std::uint32_t (&)[16]) {}
inline void tcgen05_st_32x32b(std::uint32_t address, const std::uint32_t (&r)[16],
                              Where where = Where::current()) {
  simulator::tensor_write(address, r, 16, where);
}
inline void tcgen05_wait_st(Where where = Where::current()) {
  simulator::tensor_wait(false, where);
}

inline void store_sector(void* address, const std::uint32_t (&w)[8],
                         Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(address, 32, 32, where);
  std::memcpy(address, w, 32);
}

}  // namespace winnow::device
