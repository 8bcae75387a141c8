// The k best of a stream of scored rows, by one warp: a buffer of candidates that are above a bar.
// When the buffer is full, a histogram of its keys finds a new bar, and what lies below is dropped.
// The order of the rows is kept, so that the choice comes out ascending, and among equal scores
// those that came first (or last) are known by their place.
//
// A key orders scores as unsigned integers: NaN is 0, then -inf, ..., +inf; -0 is +0.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"

namespace winnow::indexer::sm90_detail {

inline constexpr std::uint32_t kLowestScoreKey = 0x007fffffu;  // of -inf

__device__ __forceinline__ std::uint32_t key_of(float score) {
  const std::uint32_t bits = __float_as_uint(score + 0.0f);
  const std::uint32_t sign = static_cast<std::uint32_t>(static_cast<int>(bits) >> 31);
  return score != score ? 0u : bits ^ (sign | 0x80000000u);
}
__device__ __forceinline__ float score_of(std::uint32_t key) {
  if (key == 0) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Candidates that a selection of the k best has room for: 1,152 more than k at least.
__host__ __device__ constexpr std::int64_t candidate_capacity(std::int64_t k) {
  const std::int64_t spare = k < 1024 ? 1024 : k;
  return (k + spare + 255) / 128 * 128;
}

struct alignas(8) Candidate {  // one word of 8 bytes to memory
  std::uint32_t key;
  std::int32_t row;
};

class Selection {
 public:
  static constexpr int kBins = 1024;  // words of shared memory

  // `candidates` is aligned to 16 bytes and has room for `capacity`.
  __device__ void begin(Candidate* candidates, int capacity, int k, bool later_ties) {
    candidates_ = candidates;
    capacity_ = capacity;
    k_ = k;
    later_ties_ = later_ties;
    count_ = 0;
    bar_ = 0;
    lowest_ = 0xffffffffu;
    highest_ = 0;
  }

  // Takes the scores of rows first_row + lane + {0, 32, 64, 96}, of which those in [begin, end) are
  // there.
  __device__ __forceinline__ void offer(const float (&score)[4], int first_row, int begin, int end,
                                        std::uint32_t* bins) {
    const bool whole = first_row >= begin && first_row + 128 <= end;
    const int row = first_row + lane();
    if (whole && bar_ == 0 && count_ + 128 <= capacity_) {  // all pass
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint32_t key = key_of(score[e]);
        candidates_[count_ + 32 * e + lane()] = {key, row + 32 * e};
        lowest_ = min(lowest_, key);
        highest_ = max(highest_, key);
      }
      count_ += 128;
      return;
    }
    bool passes[4];
    unsigned passing[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      passes[e] = score[e] >= bar_score_ || bar_ == 0;
      if (!whole) passes[e] = passes[e] && row + 32 * e >= begin && row + 32 * e < end;
      passing[e] = __ballot_sync(device::kFullWarp, passes[e]);
    }
    if ((passing[0] | passing[1] | passing[2] | passing[3]) == 0) return;
    if (count_ + 128 > capacity_) drop(bins);  // what passes may lie below the new bar
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      append(passing[e], passes[e], {key_of(score[e]), row + 32 * e});
    }
  }

  // Takes one candidate of each lane that has one.
  __device__ __forceinline__ void take(bool present, Candidate candidate, std::uint32_t* bins) {
    const bool passes = present && candidate.key >= bar_;
    const unsigned passing = __ballot_sync(device::kFullWarp, passes);
    if (passing == 0) return;
    if (count_ + 128 > capacity_) drop(bins);
    append(passing, passes, candidate);
  }

  // Ends the stream: calls store(place, candidate) for the chosen ones, in the order they came, and
  // returns how many they are.
  template <class Store>
  __device__ __forceinline__ int finish(std::uint32_t* bins, const Store& store) {
    __syncwarp();
    const Cut cut = count_ <= k_ ? Cut{0, 0, INT32_MAX} : find_cut(0, bins);
    return sweep(cut, store);
  }

 private:
  // What stays: keys above `key`, and of those equal to it [first_equal, end_equal) in their order.
  struct Cut {
    std::uint32_t key;
    int first_equal, end_equal;
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  // How many of `lanes` are below this one.
  __device__ static int rank(unsigned lanes) { return __popc(lanes & ((1u << lane()) - 1)); }

  __device__ __forceinline__ void append(unsigned passing, bool passes, Candidate candidate) {
    Candidate* const place = candidates_ + (count_ + rank(passing));
    if (passes) *place = candidate;
    lowest_ = min(lowest_, passes ? candidate.key : 0xffffffffu);
    highest_ = max(highest_, passes ? candidate.key : 0u);
    count_ += __popc(passing);
  }

  // Makes room: keeps the k best, and up to half of the rest where that saves work.
  __device__ void drop(std::uint32_t* bins) {
    __syncwarp();
    const Cut cut = find_cut((capacity_ - k_ - 128) / 2, bins);
    count_ = sweep(cut, [&](int place, Candidate candidate) { candidates_[place] = candidate; });
    __syncwarp();
    lowest_ = cut.key;
    // All that stayed is at or above the cut, and as many as are chosen: what comes later and is
    // equal is chosen only if later ones win.
    const std::uint32_t bar = cut.key + (later_ties_ ? 0 : 1);
    bar_ = bar == 0 ? 0 : max(bar, kLowestScoreKey);  // between NaN and -inf are no keys
    bar_score_ = score_of(bar_);
  }

  // Where to cut so that k candidates stay, or up to `slack` more.
  __device__ Cut find_cut(int slack, std::uint32_t* bins) const {
    std::uint32_t low = __reduce_min_sync(device::kFullWarp, lowest_);
    std::uint32_t high = __reduce_max_sync(device::kFullWarp, highest_);
    int above = 0;  // candidates with keys above `high`
    while (low < high) {
      // Equal ranges of keys, up to kBins of them.
      const int bits = 32 - __clz(static_cast<int>(high - low));
      const int shift = bits > 10 ? bits - 10 : 0;
      count_keys(low, high, shift, bins);
      // The bin in which the k-th best lies: first the lane whose 32 bins hold it, from the top.
      unsigned sum = 0;
#pragma unroll 8
      for (int i = 0; i < 32; ++i) sum += bins[kBins - 32 - 32 * lane() + (i + lane()) % 32];
      const unsigned wanted = static_cast<unsigned>(k_ - above);
      const unsigned through = device::warp_prefix(sum, lane());
      const int holder = __ffs(__ballot_sync(device::kFullWarp, through >= wanted)) - 1;
      const unsigned before = __shfl_sync(device::kFullWarp, through - sum, holder);
      const unsigned in_bin = bins[kBins - 1 - 32 * holder - lane()];
      const unsigned within = before + device::warp_prefix(in_bin, lane());
      const int found = __ffs(__ballot_sync(device::kFullWarp, within >= wanted)) - 1;
      const unsigned higher = __shfl_sync(device::kFullWarp, within - in_bin, found);
      const unsigned here = __shfl_sync(device::kFullWarp, in_bin, found);
      __syncwarp();
      const auto bin = static_cast<std::uint32_t>(kBins - 1 - 32 * holder - found);
      low += bin << shift;
      if (higher + here <= wanted + static_cast<unsigned>(slack)) return {low, 0, INT32_MAX};
      above += static_cast<int>(higher);
      high = min(high, low + ((1u << shift) - 1));
    }
    // Many have the same key: the first of them stay, or the last.
    const int wanted = k_ - above;
    int equal = 0;
    if (later_ties_) {
      for (int i = lane(); i < count_; i += 32) equal += candidates_[i].key == low;
      equal = static_cast<int>(__reduce_add_sync(device::kFullWarp, static_cast<unsigned>(equal)));
    }
    return later_ties_ ? Cut{low, equal - wanted, equal} : Cut{low, 0, wanted};
  }

  // How many keys of [low, high] lie in each range of 2^shift, from `low` on.
  __device__ void count_keys(std::uint32_t low, std::uint32_t high, int shift,
                             std::uint32_t* bins) const {
    for (int i = lane(); i < kBins / 4; i += 32) {
      reinterpret_cast<uint4*>(bins)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    const auto count_key = [&](std::uint32_t key) {
      const std::uint32_t distance = key - low;
      if (distance <= high - low) atomicAdd(bins + (distance >> shift), 1u);
    };
    const uint4* const pairs = reinterpret_cast<const uint4*>(candidates_);
    const int whole = count_ / 2;
    int i = lane();
    for (; i + 224 < whole; i += 256) {  // so many loads at once: L2 is far
      uint4 pair[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) pair[n] = pairs[i + 32 * n];
#pragma unroll
      for (int n = 0; n < 8; ++n) count_key(pair[n].x), count_key(pair[n].z);
    }
    for (; i < whole; i += 32) {
      const uint4 pair = pairs[i];
      count_key(pair.x), count_key(pair.z);
    }
    if (count_ % 2 != 0 && lane() == 0) count_key(candidates_[count_ - 1].key);
    __syncwarp();
  }

  // Calls store(place, candidate) for what stays, in order; what is stored may overwrite the buffer
  // from its begin on. Returns how many they are.
  template <class Store>
  __device__ __forceinline__ int sweep(const Cut& cut, const Store& store) {
    return cut.end_equal == INT32_MAX ? sweep<true>(cut, store) : sweep<false>(cut, store);
  }
  template <bool kAllEqual, class Store>
  __device__ __forceinline__ int sweep(const Cut& cut, const Store& store) {
    constexpr int kTogether = 8;  // loads of a lane, twice as many on their way: L2 is far
    int stored = 0, equal_before = 0;
    Candidate next[kTogether];
    const auto load = [&](int from) {
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        const int at = from + 32 * e + lane();
        next[e] = at < count_ ? candidates_[at] : Candidate{0, -1};
      }
    };
    load(0);
    for (int i = 0; i < count_; i += 32 * kTogether) {
      Candidate candidate[kTogether];
#pragma unroll
      for (int e = 0; e < kTogether; ++e) candidate[e] = next[e];
      load(i + 32 * kTogether);
      __syncwarp();  // all lanes have read before what they read is written over
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        const bool there = candidate[e].row >= 0;
        bool stays = there && candidate[e].key >= cut.key;
        if constexpr (!kAllEqual) {
          const bool equal = there && candidate[e].key == cut.key;
          const unsigned equals = __ballot_sync(device::kFullWarp, equal);
          const int place = equal_before + rank(equals);
          if (equal) stays = place >= cut.first_equal && place < cut.end_equal;
          equal_before += __popc(equals);
        }
        const unsigned staying = __ballot_sync(device::kFullWarp, stays);
        const int place = stored + rank(staying);
        if (stays) store(place, candidate[e]);
        stored += __popc(staying);
      }
    }
    return stored;
  }

  Candidate* candidates_;
  int capacity_, k_, count_;
  bool later_ties_;
  std::uint32_t bar_;               // the least key that a new candidate needs
  float bar_score_;                 // its score, unless it is 0
  std::uint32_t lowest_, highest_;  // bounds of this lane's candidates, for all lanes together
};

}  // namespace winnow::indexer::sm90_detail
