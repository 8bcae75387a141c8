// A bar that warps share which choose for one query among different rows, sm90: a histogram of all
// their scores says what none of them needs to keep. It costs candidates nothing but their number:
// at least k rows lie at the bar or above, whichever warps they belong to.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"
#include "winnow/indexer/topk/select_sm90.cuh"

namespace winnow::indexer::sm90_detail {

class SharedBar {
 public:
  static constexpr int kShift = 21;  // sign, exponent, and two bits of what follows
  static constexpr int kBins = 1 << (32 - kShift);
  static constexpr int kBytes = kBins * 4;

  __device__ explicit SharedBar(std::uint32_t* bins) : bins_(bins) {}

  // Counts the rows first_row + 4 lane + {0, 1, 2, 3} that are in [begin, end) and not below `bar`,
  // which find() has returned to this warp, or 0.
  __device__ __forceinline__ void count(const float (&score)[4], int first_row, int begin, int end,
                                        std::uint32_t bar) const {
    const int row = first_row + 4 * static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t key = key_of(score[e]);
      if (key >= bar && row + e >= begin && row + e < end) atomicAdd(bins_ + (key >> kShift), 1u);
    }
  }

  // The highest edge of a bin with k counted rows at it or above; 0 if there are not so many.
  __device__ std::uint32_t find(int k) const {
    constexpr int kOwn = kBins / 32;  // bins of a lane, the highest ones for lane 0
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Others count meanwhile: atomic reads, each a number that was there, or less than is now.
    const auto read = [&](int bin) { return static_cast<int>(atomicAdd(bins_ + bin, 0u)); };
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < kOwn; ++i) sum += read(kBins - kOwn - kOwn * lane + (i + lane) % kOwn);
    const int through = device::warp_prefix(sum, lane);
    const unsigned reached = __ballot_sync(device::kFullWarp, through >= k);
    if (reached == 0) return 0;
    const int holder = __ffs(static_cast<int>(reached)) - 1;
    int before = __shfl_sync(device::kFullWarp, through - sum, holder);
    for (int from = 1; from <= kOwn; from += 32) {
      const int bin = kBins - kOwn * holder - from - lane;
      const int within = before + device::warp_prefix(read(bin), lane);
      const unsigned found = __ballot_sync(device::kFullWarp, within >= k);
      if (found != 0) {
        const int first = __ffs(static_cast<int>(found)) - 1;
        return static_cast<std::uint32_t>(__shfl_sync(device::kFullWarp, bin, first)) << kShift;
      }
      before = __shfl_sync(device::kFullWarp, within, 31);
    }
    return 0;  // not reached: counts do not fall
  }

 private:
  std::uint32_t* bins_;
};

}  // namespace winnow::indexer::sm90_detail
