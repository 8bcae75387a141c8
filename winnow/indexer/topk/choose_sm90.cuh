// The choice from stored scores, sm90: a block for each query, whose warps hold the keys of
// neighbouring rows in registers. Histograms of the digits of the keys, the highest first, find the
// topk-th largest key; then every warp counts what it has of the chosen, and writes it where it
// belongs.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/indexer/score_tiles_sm90.cuh"
#include "winnow/indexer/topk/select_sm90.cuh"

namespace winnow::indexer::sm90_detail {

struct ChooseParams {
  SeenRows seen;
  const float* stored;         // [s_q, stored_stride], aligned to 16 bytes
  std::int64_t stored_stride;  // a multiple of 4, not less than s_k
  std::int32_t* indices;       // [s_q, topk]
  std::int32_t* length;        // [s_q]
  float* scores;               // [s_q, topk], or null
  std::int64_t indices_stride, length_stride, scores_stride;
  int topk, later_ties;
};

inline constexpr int kChooseBits = 11;  // of a digit; the highest has 10
inline constexpr int kChooseBins = 1 << kChooseBits;
inline constexpr int kChooseHeld = 32;                       // keys of a thread
inline constexpr int kChooseThreadsOfMultiprocessor = 1024;  // 64 registers for each

template <int kWarps>
struct ChooseShared {
  alignas(16) std::uint32_t bins[kChooseBins + 1];  // the last is not looked at
  std::uint32_t of_warp[kWarps], equal_of_warp[kWarps];
  // The bin in which the wanted key lies, the keys above it, and in it. Apart from the rest, as
  // they are loaded as 16 bytes.
  alignas(16) std::uint32_t bin;
  int higher, here;
};

// For up to kMostRows rows.
template <int kWarps>
class Choice {
 public:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMostRows = kThreads * kChooseHeld;

  __device__ Choice(const ChooseParams& params, ChooseShared<kWarps>& shared, int query)
      : p_(params), shared_(shared), query_(query) {}

  __device__ void run() {
    const RowRange rows = visible_rows(p_.seen, query_);
    load(rows);
    const int visible = rows.end - rows.begin, length = min(visible, p_.topk);
    if (threadIdx.x == 0) p_.length[query_ * p_.length_stride] = length;
    // From the end on: a sum with topk may pass 2^31.
    for (int i = p_.topk - 1 - static_cast<int>(threadIdx.x); i >= length; i -= kThreads) {
      indices()[i] = -1;
      if (p_.scores != nullptr) scores()[i] = device::negative_infinity();
    }
    Cut cut{kAbsent, 0, 0};
    if (visible > p_.topk) cut = find_cut();
    if (cut.end_equal > 0) {
      write<true>(cut);
    } else {
      write<false>(cut);
    }
  }

 private:
  // The key of rows that the query does not see: no score has it. That of NaN is 1 here, so that it
  // lies above; no other key lies between.
  static constexpr std::uint32_t kAbsent = 0, kNan = 1;
  static constexpr int kChunkRows = 128;  // of which a lane holds four
  static constexpr int kChunks = kChooseHeld / 4;

  // What is chosen: keys above `key`, and of those equal to it [first_equal, end_equal) in their
  // order.
  struct Cut {
    std::uint32_t key;
    int first_equal, end_equal;
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ std::int32_t* indices() const { return p_.indices + query_ * p_.indices_stride; }
  __device__ float* scores() const { return p_.scores + query_ * p_.scores_stride; }

  // ---- Keys ----
  // Chunks of 128 rows are shared out among the warps, as many to each, its own next to each other.

  // The first of this lane's four rows of a chunk.
  __device__ int row_of(int chunk) const {
    return first_ + kChunkRows * (warp() * per_warp_ + chunk) + 4 * lane();
  }

  __device__ __forceinline__ void load(RowRange rows) {
    first_ = rows.begin / 4 * 4;
    per_warp_ = device::ceil_div(device::ceil_div(rows.end - first_, kChunkRows), kWarps);
    const float* const stored = p_.stored + query_ * p_.stored_stride;
    float4 four[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c < per_warp_ && row_of(c) < rows.end) {
        four[c] = *reinterpret_cast<const float4*>(stored + row_of(c));
      }
    }
    const auto seen = static_cast<unsigned>(rows.end - rows.begin);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= per_warp_) continue;
      const float score[4] = {four[c].x, four[c].y, four[c].z, four[c].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) key_[4 * c + e] = key_of_stored(score[e]);
    }
    const int first = row_of(0) - 4 * lane();
    if (first >= rows.begin && first + kChunkRows * per_warp_ <= rows.end) return;  // most see all
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= per_warp_) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (static_cast<unsigned>(row_of(c) + e - rows.begin) >= seen) key_[4 * c + e] = kAbsent;
      }
    }
  }

  // As key_of(); what is stored is never -0.
  __device__ static std::uint32_t key_of_stored(float score) {
    const std::uint32_t bits = __float_as_uint(score);
    const std::uint32_t sign = static_cast<std::uint32_t>(static_cast<int>(bits) >> 31);
    return score != score ? kNan : bits ^ (sign | 0x80000000u);
  }

  // Calls visit(key) for all keys of this thread.
  template <class Visit>
  __device__ __forceinline__ void for_each_key(const Visit& visit) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= per_warp_) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(key_[4 * c + e]);
    }
  }

  // ---- The cut ----

  // More rows are visible than are chosen.
  __device__ __forceinline__ Cut find_cut() {
#pragma unroll
    for (int i = 0; i < kOwnBins / 2; ++i) own_bins()[i] = make_uint2(0, 0);
    __syncthreads();
    int wanted = p_.topk;
    for_each_key(
        [&](std::uint32_t key) { atomicAdd(shared_.bins + (key >> (2 * kChooseBits)), 1u); });
    find_bin(wanted);
    std::uint32_t low = shared_.bin << (2 * kChooseBits);
    if (wanted == shared_.here) return {low - 1, 0, 0};  // not all are wanted: something lies below
#pragma unroll 1
    for (int shift = kChooseBits; shift >= 0; shift -= kChooseBits) {
      // Without branches: what differs in a digit before this one goes to a last bin.
      for_each_key([&](std::uint32_t key) {
        const std::uint32_t distance = min(key - low, std::uint32_t{kChooseBins} << shift);
        atomicAdd(shared_.bins + (distance >> shift), 1u);
      });
      find_bin(wanted);
      low += shared_.bin << shift;
      if (wanted == shared_.here) return {low - 1, 0, 0};
    }
    const int same = shared_.here;
    return p_.later_ties ? Cut{low, same - wanted, same} : Cut{low, 0, wanted};
  }

  // Bins of a thread, those of thread 0 being the last.
  static constexpr int kOwnBins = kChooseBins / kThreads;
  __device__ static int first_bin() {
    return kChooseBins - kOwnBins * (static_cast<int>(threadIdx.x) + 1);
  }
  __device__ uint2* own_bins() { return reinterpret_cast<uint2*>(shared_.bins + first_bin()); }

  // The bin from the top in which the `wanted`-th of the counted keys lies, of which `wanted` then
  // is the place within it. Leaves the bins empty.
  __device__ __forceinline__ void find_bin(int& wanted) {
    __syncthreads();
    int count[kOwnBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnBins / 2; ++i) {
      const uint2 pair = own_bins()[i];
      own_bins()[i] = make_uint2(0, 0);
      count[2 * i] = static_cast<int>(pair.x);
      count[2 * i + 1] = static_cast<int>(pair.y);
      sum += count[2 * i] + count[2 * i + 1];
    }
    const int through = device::warp_prefix(sum, lane());
    if (lane() == 31) shared_.of_warp[warp()] = static_cast<std::uint32_t>(through);
    __syncthreads();
    int before = before_this_warp(shared_.of_warp) + through - sum;
    if (before < wanted && wanted <= before + sum) {
#pragma unroll
      for (int i = kOwnBins - 1; i >= 0; --i) {
        if (before < wanted && wanted <= before + count[i]) {
          shared_.bin = static_cast<std::uint32_t>(first_bin() + i);
          shared_.higher = before;
          shared_.here = count[i];
        }
        before += count[i];
      }
    }
    __syncthreads();
    wanted -= shared_.higher;
  }

  // The sum over the warps before this one.
  __device__ int before_this_warp(const std::uint32_t (&of_warp)[kWarps]) const {
    const std::uint32_t value = lane() < warp() ? of_warp[lane()] : 0;
    return static_cast<int>(__reduce_add_sync(device::kFullWarp, value));
  }

  // ---- The choice ----

  // How many keys of each chunk a condition holds for, a byte for each chunk: of the lanes below
  // this one, and of all.
  struct Counts {
    std::uint32_t below[kChunks / 4], all[kChunks / 4];
    __device__ static int byte(const std::uint32_t (&words)[kChunks / 4], int chunk) {
      return static_cast<int>(words[chunk / 4] >> (8 * (chunk % 4)) & 0xff);
    }
    __device__ int below_of(int chunk) const { return byte(below, chunk); }
    __device__ int all_of(int chunk) const { return byte(all, chunk); }
    __device__ std::uint32_t total() const {
      int sum = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) sum += all_of(c);
      return static_cast<std::uint32_t>(sum);
    }
  };
  template <class Holds>
  __device__ __forceinline__ Counts count(const Holds& holds) const {
    Counts counts;
#pragma unroll
    for (int word = 0; word < kChunks / 4; ++word) {
      std::uint32_t own = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (4 * word + c >= per_warp_) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) own += holds(key_[16 * word + 4 * c + e]) ? 1u << (8 * c) : 0u;
      }
      const std::uint32_t through = device::warp_prefix(own, lane());
      counts.below[word] = through - own;
      counts.all[word] = __shfl_sync(device::kFullWarp, through, 31);
    }
    return counts;
  }

  // kEqual: some keys equal to the cut are chosen.
  template <bool kEqual>
  __device__ __forceinline__ void write(const Cut& cut) {
    const Counts above = count([&](std::uint32_t key) { return key > cut.key; });
    Counts equal;
    if constexpr (kEqual) equal = count([&](std::uint32_t key) { return key == cut.key; });
    if (lane() == 0) {
      shared_.of_warp[warp()] = above.total();
      if constexpr (kEqual) shared_.equal_of_warp[warp()] = equal.total();
    }
    __syncthreads();
    int above_before = before_this_warp(shared_.of_warp), equal_before = 0;
    if constexpr (kEqual) equal_before = before_this_warp(shared_.equal_of_warp);
    // Kept, as its computation is long.
    const auto address = reinterpret_cast<std::uintptr_t>(indices());
    auto* const out = reinterpret_cast<std::int32_t*>(
        std::uintptr_t{device::keep_in_register(static_cast<std::uint32_t>(address >> 32))} << 32 |
        device::keep_in_register(static_cast<std::uint32_t>(address)));
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= per_warp_) continue;
      // Calls store(place, e) for what is chosen of this lane's four keys.
      const auto for_each_chosen = [&](const auto& store) {
        int place = above_before + above.below_of(c);
        [[maybe_unused]] int equal_place = 0;
        if constexpr (kEqual) equal_place = equal_before + equal.below_of(c) - cut.first_equal;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const std::uint32_t key = key_[4 * c + e];
          if constexpr (kEqual) {
            const int most = cut.end_equal - cut.first_equal;
            const bool same = key == cut.key;
            if (key > cut.key || (same && equal_place >= 0 && equal_place < most)) {
              store(static_cast<unsigned>(place + min(max(equal_place, 0), most)), e);
            }
            equal_place += same;
          } else {
            if (key > cut.key) store(static_cast<unsigned>(place), e);
          }
          place += key > cut.key;
        }
      };
      for_each_chosen([&](unsigned place, int e) { out[place] = row_of(c) + e; });
      if (p_.scores != nullptr) {
        for_each_chosen([&](unsigned place, int e) {
          const std::uint32_t key = key_[4 * c + e];
          scores()[place] = score_of(key == kNan ? 0 : key);
        });
      }
      above_before += above.all_of(c);
      if constexpr (kEqual) equal_before += equal.all_of(c);
    }
  }

  const ChooseParams& p_;
  ChooseShared<kWarps>& shared_;
  const int query_;
  int first_, per_warp_;  // the first row of the first chunk; chunks of a warp
  std::uint32_t key_[kChooseHeld];
};

template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kChooseThreadsOfMultiprocessor / (32 * kWarps))
    choose_kernel(const __grid_constant__ ChooseParams p) {
  WINNOW_BLOCK_SHARED(shared, ChooseShared<kWarps>);
  device::wait_for_kernel_before();
  Choice<kWarps>(p, shared, static_cast<int>(blockIdx.x)).run();
}

// The most rows from which launch_choice() chooses.
inline constexpr int kMostStoredRows = Choice<32>::kMostRows;

// Queues the choice of all queries behind the kernel that stores the scores. A block is as large as
// the rows need.
inline void launch_choice(const device::Runtime& runtime, const ChooseParams& params,
                          cudaStream_t stream) {
  const auto launch = [&](auto* kernel, int warps) {
    runtime.check(device::launch_early(kernel, dim3(static_cast<unsigned>(params.seen.s_q)),
                                       32 * warps, 0, stream, params),
                  "launch");
  };
  if (params.seen.s_k <= Choice<4>::kMostRows) {
    launch(choose_kernel<4>, 4);
  } else if (params.seen.s_k <= Choice<8>::kMostRows) {
    launch(choose_kernel<8>, 8);
  } else if (params.seen.s_k <= Choice<16>::kMostRows) {
    launch(choose_kernel<16>, 16);
  } else {
    launch(choose_kernel<32>, 32);
  }
}

}  // namespace winnow::indexer::sm90_detail
