// Host half of winnow/device/sm90/barrier.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/common/named_barrier.cuh"
#include "winnow/device/common/shared.cuh"

namespace winnow::device {

inline constexpr int kWarpArrival = 1;

inline void mbarrier_init(std::uint32_t barrier, std::uint32_t count,
                          Where where = Where::current()) {
  simulator::mbarrier_init(barrier, count, where);
}
inline void fence_mbarrier_init(Where where = Where::current()) {
  simulator::mbarrier_init_fence(where);
}
inline void mbarrier_arrive(std::uint32_t barrier, Where where = Where::current()) {
  simulator::mbarrier_arrive(barrier, 1, 0, where);
}
inline void mbarrier_arrive_warp(std::uint32_t barrier, int count = 1,
                                 Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::warp_meeting("__syncwarp", 0xffffffffu, 0, true, where);
  if (static_cast<int>(simulator::lane()) < count) {
    simulator::mbarrier_arrive(barrier, 1, 0, where);
  }
}
inline void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes,
                                   Where where = Where::current()) {
  simulator::mbarrier_arrive(barrier, 1, bytes, where);
}
inline void mbarrier_arrive_cp_async(std::uint32_t barrier, Where where = Where::current()) {
  simulator::mbarrier_arrive_after_copies(barrier, where);
}
inline bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity,
                              Where where = Where::current()) {
  const bool ended = simulator::mbarrier_test(barrier, parity, where);
  if (!ended) simulator::poll();
  return ended;
}
inline bool mbarrier_test_wait(std::uint32_t barrier, std::uint32_t parity,
                               Where where = Where::current()) {
  return mbarrier_try_wait(barrier, parity, where);
}
inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, const char* role, int what,
                          Where where = Where::current()) {
  simulator::mbarrier_wait(barrier, parity, role, what, where);
}

inline void fence_proxy_async_shared(Where where = Where::current()) {
  simulator::proxy_fence(simulator::Space::shared, where);
}
inline void fence_proxy_async_global(Where where = Where::current()) {
  simulator::proxy_fence(simulator::Space::global, where);
}

template <int kRegisters>
void setmaxnreg_inc(Where where = Where::current()) {
  simulator::set_max_registers(kRegisters, true, where);
}
template <int kRegisters>
void setmaxnreg_dec(Where where = Where::current()) {
  simulator::set_max_registers(kRegisters, false, where);
}

}  // namespace winnow::device
