// Host half of winnow/device/sm90/cluster.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/sm90/barrier.cuh"

namespace winnow::device {

inline std::uint32_t cluster_rank() { return simulator::cluster_rank(); }
inline std::uint32_t map_shared(std::uint32_t address, std::uint32_t rank,
                                Where where = Where::current()) {
  return simulator::cluster_address(address, rank, where);
}
inline void cluster_arrive(Where where = Where::current()) { simulator::cluster_arrive(where); }
inline void cluster_wait(Where where = Where::current()) { simulator::cluster_wait(where); }
inline void cluster_sync(Where where = Where::current()) {
  simulator::cluster_arrive(where);
  simulator::cluster_wait(where);
}

inline void mbarrier_arrive_cluster(std::uint32_t barrier, Where where = Where::current()) {
  simulator::mbarrier_arrive_cluster(barrier, 1, where);
}
inline void mbarrier_arrive_warp_cluster(std::uint32_t barrier, Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::warp_meeting("__syncwarp", 0xffffffffu, 0, true, where);
  if (simulator::lane() == 0) simulator::mbarrier_arrive_cluster(barrier, 1, where);
}
inline void mbarrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity, const char* role,
                                  int what, Where where = Where::current()) {
  simulator::mbarrier_wait(barrier, parity, role, what, where, true);
}
inline void st_shared_cluster(std::uint32_t address, float2 value, Where where = Where::current()) {
  simulator::write_shared_cluster(address, &value, sizeof(value), where);
}
inline uint2 ld_shared_cluster(std::uint32_t address, Where where = Where::current()) {
  uint2 value;
  simulator::read_shared_cluster(address, &value, sizeof(value), where);
  return value;
}

}  // namespace winnow::device
