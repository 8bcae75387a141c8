// The k best of a stream of scored rows, by one warp: a buffer of candidates that are above a bar.
// When the buffer is full, a histogram of its keys finds a new bar, and what lies below is dropped.
// The order of the rows is kept, so that the choice comes out ascending, and among equal scores
// those that came first (or last) are known by their place.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/indexer/topk/score_key.cuh"

namespace winnow::indexer::sm90_detail {

using namespace gpu;

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
  static constexpr int kBins = 1024;
  static constexpr int kBinWords = kBins + 4;  // of shared memory

  // `candidates` is aligned to 16 bytes and has room for `capacity`.
  __device__ void begin(Candidate* candidates, int capacity, int k, bool later_ties) {
    candidates_ = candidates;
    capacity_ = capacity;
    k_ = k;
    later_ties_ = later_ties;
    count_ = 0;
    bar_ = 0;
    bar_score_ = 0.0f;
    lowest_ = 0xffffffffu;
    best_ = device::negative_infinity();
  }

  // Takes the scores of rows first_row + 4 lane + {0, 1, 2, 3}, of which those in [begin, end) are
  // there. No score is -0.
  __device__ __forceinline__ void offer(float (&score)[4], int first_row, int begin, int end,
                                        std::uint32_t* bins) {
    const bool whole = first_row >= begin && first_row + 128 <= end;
    const int row = first_row + 4 * lane();
    if (bar_ == 0) {
      take_all(score, row, whole, begin, end);
    } else {
      if (!whole) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (row + e < begin || row + e >= end) score[e] = score_of(0);  // NaN does not pass
        }
      }
      // Compared as numbers, since most rows need no key.
      bool passes[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) passes[e] = score[e] >= bar_score_;
      const bool any = passes[0] || passes[1] || passes[2] || passes[3];
      const unsigned lanes = __ballot_sync(device::kFullWarp, any);
      if (lanes == 0) return;
      const bool several = (passes[0] & passes[1]) | (passes[2] & passes[3]) |
                           ((passes[0] | passes[1]) & (passes[2] | passes[3]));
      if (!__any_sync(device::kFullWarp, several)) {
        append_one(score, row, passes, any, lanes);
      } else {
        std::uint32_t key[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          key[e] = key_of_number(score[e]);
          best_ = fmaxf(best_, score[e]);
        }
        append(key, row, passes);
      }
    }
    // Room for the next 128.
    if (count_ + 128 > capacity_) drop(bins);
  }

  // Ends the stream: calls store(chosen, place, candidate) for all that are left, `place` being the
  // number of those chosen before in the order they came, and returns how many are chosen.
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

  // While every row passes, NaN among them.
  __device__ __forceinline__ void take_all(const float (&score)[4], int row, bool whole, int begin,
                                           int end) {
    std::uint32_t key[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      key[e] = key_of(score[e]);
      lowest_ = min(lowest_, key[e]);
      best_ = fmaxf(best_, score[e]);
    }
    if (whole && count_ % 2 == 0) {
      uint4* const place = reinterpret_cast<uint4*>(candidates_ + count_ + 4 * lane());
      const auto first = static_cast<std::uint32_t>(row);
      place[0] = make_uint4(key[0], first, key[1], first + 1);
      place[1] = make_uint4(key[2], first + 2, key[3], first + 3);
      count_ += 128;
      return;
    }
    bool passes[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) passes[e] = row + e >= begin && row + e < end;
    append(key, row, passes);
  }

  // Appends the rows that pass. Without branches: a warp alone would wait for each of them.
  __device__ __forceinline__ void append(const std::uint32_t (&key)[4], int row,
                                         const bool (&passes)[4]) {
    int place = count_;
#pragma unroll
    for (int e = 0; e < 4; ++e) place += rank(__ballot_sync(device::kFullWarp, passes[e]));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (passes[e]) candidates_[place] = {key[e], row + e};
      place += passes[e];
    }
    count_ = __shfl_sync(device::kFullWarp, place, 31);
  }

  // The same where no lane has more than one of them, as in most tiles of many rows.
  __device__ __forceinline__ void append_one(const float (&score)[4], int row,
                                             const bool (&passes)[4], bool any, unsigned lanes) {
    const float lower = passes[1] ? score[1] : score[0], upper = passes[3] ? score[3] : score[2];
    const bool is_upper = passes[2] || passes[3];
    const float own = is_upper ? upper : lower;
    const int which = is_upper ? 2 + passes[3] : passes[1];
    best_ = fmaxf(best_, own);
    if (any) candidates_[count_ + rank(lanes)] = {key_of_number(own), row + which};
    count_ += __popc(lanes);
  }

  // Makes room: keeps the k best, and up to half of the rest where that saves work.
  __device__ void drop(std::uint32_t* bins) {
    __syncwarp();
    const Cut cut = find_cut((capacity_ - k_ - 128) / 2, bins);
    count_ = sweep(cut, [&](bool stays, int place, Candidate candidate) {
      if (stays) candidates_[place] = candidate;
    });
    __syncwarp();
    lowest_ = cut.key;
    // All that stayed is at or above the cut, and as many as are chosen: what comes later and is
    // equal is chosen only if later ones win.
    const std::uint32_t bar = cut.key + (later_ties_ ? 0 : 1);
    bar_ = bar == 0 ? 0 : max(bar, kLowestScoreKey);  // between NaN and -inf are no keys
    bar_score_ = score_of(bar_);                      // NaN above +inf: then nothing passes
  }

  // Where to cut so that k candidates stay, or up to `slack` more.
  __device__ Cut find_cut(int slack, std::uint32_t* bins) const {
    std::uint32_t low = __reduce_min_sync(device::kFullWarp, lowest_);
    std::uint32_t high = __reduce_max_sync(device::kFullWarp, key_of(best_));
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
    const auto count_key = [&](std::uint32_t key) {  // without a branch: others go to a last bin
      const std::uint32_t distance = key - low;
      atomicAdd(bins + (distance <= high - low ? distance >> shift : std::uint32_t{kBins}), 1u);
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

  // Calls store(stays, place, candidate) for all candidates, `place` being the number of those
  // before that stay; what is stored may overwrite the buffer from its begin on. Returns how many
  // stay.
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
        store(stays, stored + rank(staying), candidate[e]);
        stored += __popc(staying);
      }
    }
    return stored;
  }

  Candidate* candidates_;
  int capacity_, k_, count_;
  bool later_ties_;
  std::uint32_t bar_;     // the least key that a new candidate needs
  float bar_score_;       // the same as a score, unless all pass
  std::uint32_t lowest_;  // bounds of the candidates, the least and the greatest of all lanes'
  float best_;
};

}  // namespace winnow::indexer::sm90_detail
