// Host half of winnow/device/sm90/copy.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/common/copy.cuh"
#include "winnow/simulator/engine.h"
#include "winnow/simulator/instructions/bulk_copy.h"

namespace winnow::device {

using simulator::Where;

inline void bulk_prefetch_l2(const void* source, std::uint32_t bytes,
                             Where where = Where::current()) {
  simulator::checked(where, [&] { simulator::check_bulk_prefetch(source, bytes); });
  simulator::check_global_prefetch(source, bytes, 16, where);
}
inline void bulk_load(std::uint32_t destination, const void* source, std::uint32_t bytes,
                      std::uint32_t barrier, std::uint64_t, Where where = Where::current()) {
  bytes = simulator::altered(bytes, where);
  simulator::checked(where, [&] { simulator::check_bulk_copy(destination, source, bytes); });
  const int count = static_cast<int>(bytes);
  const simulator::CopyPiece piece{destination, count, 0, count, source};
  simulator::bulk_load("cp.async.bulk", &piece, 1, bytes, barrier, where);
}
inline void bulk_store(void* destination, std::uint32_t source, std::uint32_t bytes, std::uint64_t,
                       Where where = Where::current()) {
  simulator::bulk_store(destination, source, bytes, where);
}
inline void bulk_commit(Where where = Where::current()) { simulator::bulk_commit(where); }
template <int kPending>
void bulk_wait_read(Where where = Where::current()) {
  simulator::bulk_wait(kPending, true, where);
}
template <int kPending>
void bulk_wait(Where where = Where::current()) {
  simulator::bulk_wait(kPending, false, where);
}

}  // namespace winnow::device
