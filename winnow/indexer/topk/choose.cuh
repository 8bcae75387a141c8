// The choice from stored scores: a block for each query, or on sm90 a cluster of blocks
// (choose_sm90.cuh), whose warps hold the keys of neighbouring rows in registers. Histograms of the
// digits of the keys, the highest first, find the topk-th largest key; then every warp counts what
// it has of the chosen, and writes it where it belongs.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/indexer/seen_rows.cuh"
#include "winnow/indexer/topk/score_key.cuh"

namespace winnow::indexer::gpu {

// The key of a row that is not there, which no score has. That of NaN is 1 here, so that it lies
// above; no other key lies between.
inline constexpr std::uint32_t kAbsentKey = 0, kNanKey = 1;
__device__ __forceinline__ std::uint32_t stored_key(bool present, float score) {
  return !present ? kAbsentKey : score != score ? kNanKey : key_of(score);
}

// What the workspace of a choice may take, however many queries and rows there are.
inline constexpr std::int64_t kWorkspaceLimit = std::int64_t{256} << 20;

// What is chosen from. `Params` of the classes below say where a query has its rows and its
// results:
//   rows_of(query)              the rows that it sees
//   stored_of(query)            what is stored for row 0 and those behind it, aligned to 16 bytes
//   kKeys                       whether keys are stored; else scores
//   indices_of(query), length_of(query), scores_of(query) (null: not wanted)
//   index_of(query)             .of_four(row) is what stands in the indices for a row that is a
//                               multiple of 4, and .behind(that, e) for the row `e` behind it
//   topk, later_ties
//   blocks                      with Team::kSpread: those of a query, the cluster's
struct ChooseParams {
  static constexpr bool kKeys = false;
  SeenRows seen;
  const float* stored;         // [s_q, stored_stride], aligned to 16 bytes
  std::int64_t stored_stride;  // a multiple of 4, not less than s_k
  std::int32_t* indices;       // [s_q, topk]
  std::int32_t* length;        // [s_q]
  float* scores;               // [s_q, topk], or null
  std::int64_t indices_stride, length_stride, scores_stride;
  int topk, later_ties;
  int blocks = 1;

  __device__ RowRange rows_of(int query) const { return visible_rows(seen, query); }
  __device__ const float* stored_of(int query) const { return stored + query * stored_stride; }
  __device__ std::int32_t* indices_of(int query) const { return indices + query * indices_stride; }
  __device__ std::int32_t* length_of(int query) const { return length + query * length_stride; }
  __device__ float* scores_of(int query) const {
    return scores == nullptr ? nullptr : scores + query * scores_stride;
  }
  struct RowItself {
    __device__ std::int32_t of_four(int row) const { return row; }
    __device__ static std::int32_t behind(std::int32_t first, int e) { return first + e; }
  };
  __device__ RowItself index_of(int) const { return {}; }
};

inline constexpr int kChooseBits = 11;  // of a digit; the highest has 10
inline constexpr int kChooseBins = 1 << kChooseBits;
inline constexpr int kChooseHeld = 32;                       // keys of a thread at most
inline constexpr int kChooseThreadsOfMultiprocessor = 1024;  // 64 registers for each
inline constexpr int kChooseMostWarps = 32;

// Who chooses for a query. kRereads: rows that the threads cannot hold are read again for each
// pass. kSpread: a cluster of blocks; such a team has sync(), arrive(), wait() and load().
struct OneBlock {
  static constexpr bool kRereads = false, kSpread = false;
};
struct OneBlockThatRereads {
  static constexpr bool kRereads = true, kSpread = false;
};

template <int kWarps, bool kSpread>
struct ChooseShared {
  // The last bin is not looked at. Counts of two rounds where others of the cluster still read one
  // while the next is counted.
  alignas(16) std::uint32_t bins[kSpread ? 2 : 1][kChooseBins + 4];
  std::uint32_t of_warp[kWarps], equal_of_warp[kWarps];
  // The bin in which the wanted key lies, the keys above it, and in it. Apart from the rest, as
  // they are loaded as 16 bytes.
  alignas(16) std::uint32_t bin;
  int higher, here;
  uint2 counts;  // of this block, which others of the cluster read
};

// For up to kHeld rows for each thread of the team, or for any number.
template <class Params, int kWarps, class Team>
class Choice {
  static constexpr bool kSpread = Team::kSpread;

 public:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kHeld = Team::kRereads ? kChooseHeld / 2 : kChooseHeld;
  using Shared = ChooseShared<kWarps, kSpread>;

  __device__ Choice(const Params& params, Shared& shared, int block)
      : p_(params),
        shared_(shared),
        query_(kSpread ? block / blocks() : block),
        rank_(kSpread ? block % blocks() : 0) {}

  __device__ void run() {
    const RowRange rows = p_.rows_of(query_);
    share_out(rows);
    Cut cut{kAbsentKey, 0, 0};
    if (rows.end - rows.begin > p_.topk) cut = find_cut(rows);
    const int length = cut.end_equal > 0 ? write<true>(rows, cut) : write<false>(rows, cut);
    if (rank_ == 0 && threadIdx.x == 0) *p_.length_of(query_) = length;
    std::int32_t* const indices = p_.indices_of(query_);
    float* const scores = p_.scores_of(query_);
    // From the end on: a sum with topk may pass 2^31.
    const int own = rank_ * kThreads + static_cast<int>(threadIdx.x);
    for (int i = p_.topk - 1 - own; i >= length; i -= blocks() * kThreads) {
      indices[i] = -1;
      if (scores != nullptr) scores[i] = device::negative_infinity();
    }
    if constexpr (kSpread) Team::wait();  // for the arrival in write()
  }

 private:
  static constexpr int kChunkRows = 128;  // of which a lane holds four
  static constexpr int kChunks = kHeld / 4;

  // What is chosen: keys above `key`, and of those equal to it [first_equal, end_equal) in their
  // order.
  struct Cut {
    std::uint32_t key;
    int first_equal, end_equal;
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ int blocks() const {
    if constexpr (kSpread) return p_.blocks;
    return 1;
  }
  __device__ static void sync() {
    if constexpr (kSpread) {
      Team::sync();
    } else {
      __syncthreads();
    }
  }

  // ---- Keys ----
  // Chunks of 128 rows are shared out among the warps, as many to each, its own next to each other;
  // kChunks of them are held at a time, a batch.

  __device__ __forceinline__ void share_out(RowRange rows) {
    first_ = rows.begin / 4 * 4;
    per_warp_ =
        device::ceil_div(device::ceil_div(rows.end - first_, kChunkRows), blocks() * kWarps);
    first_ += kChunkRows * per_warp_ * (rank_ * kWarps + warp()) + 4 * lane();
    if (batches() == 1) load(rows, 0);
  }
  __device__ int batches() const {
    if constexpr (Team::kRereads) return max(1, device::ceil_div(per_warp_, kChunks));
    return 1;
  }

  // Whether the warp has a chunk of a batch, and the first of this lane's four rows of it.
  __device__ bool has(int batch, int chunk) const { return batch * kChunks + chunk < per_warp_; }
  __device__ int row_of(int batch, int chunk) const {
    return first_ + kChunkRows * (batch * kChunks + chunk);
  }

  __device__ __forceinline__ void load(RowRange rows, int batch) {
    const auto* const stored = p_.stored_of(query_);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint4 four = make_uint4(kAbsentKey, kAbsentKey, kAbsentKey, kAbsentKey);
      if (has(batch, c) && row_of(batch, c) < rows.end) {
        four = *reinterpret_cast<const uint4*>(stored + row_of(batch, c));
      }
      key_[4 * c] = four.x, key_[4 * c + 1] = four.y;
      key_[4 * c + 2] = four.z, key_[4 * c + 3] = four.w;
    }
    const auto seen = static_cast<unsigned>(rows.end - rows.begin);
    if constexpr (!Params::kKeys) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (!has(batch, c)) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) key_[4 * c + e] = key_of_stored(key_[4 * c + e]);
      }
    }
    const int first = first_ - 4 * lane();
    if (first >= rows.begin && first + kChunkRows * per_warp_ <= rows.end) return;  // most see all
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!has(batch, c)) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (static_cast<unsigned>(row_of(batch, c) + e - rows.begin) >= seen) {
          key_[4 * c + e] = kAbsentKey;
        }
      }
    }
  }

  // As key_of(), of the bits of a score; what is stored is never -0.
  __device__ static std::uint32_t key_of_stored(std::uint32_t bits) {
    const float score = __uint_as_float(bits);
    const std::uint32_t sign = static_cast<std::uint32_t>(static_cast<int>(bits) >> 31);
    return score != score ? kNanKey : bits ^ (sign | 0x80000000u);
  }

  // Calls visit(batch) for every batch, whose keys are then held.
  template <class Visit>
  __device__ __forceinline__ void for_each_batch(RowRange rows, const Visit& visit) {
    if constexpr (Team::kRereads) {
#pragma unroll 1
      for (int batch = 0; batch < batches(); ++batch) {
        if (batches() > 1) load(rows, batch);
        visit(batch);
      }
    } else {
      visit(0);
    }
  }

  // Calls visit(key) for all keys of this thread.
  template <class Visit>
  __device__ __forceinline__ void for_each_key(RowRange rows, const Visit& visit) {
    for_each_batch(rows, [&](int batch) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (!has(batch, c)) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) visit(key_[4 * c + e]);
      }
    });
  }

  // ---- The cut ----

  // There are more rows than are chosen, some of which may be absent.
  __device__ __forceinline__ Cut find_cut(RowRange rows) {
    int round = 0;
    clear(round);
    __syncthreads();
    int wanted = p_.topk;
    for_each_key(rows, [&](std::uint32_t key) {
      atomicAdd(shared_.bins[0] + (key >> (2 * kChooseBits)), 1u);
    });
    find_bin(wanted, round);
    std::uint32_t low = shared_.bin << (2 * kChooseBits);
    if (wanted == shared_.here) return {low - 1, 0, 0};  // not all are wanted: something lies below
#pragma unroll 1
    for (int shift = kChooseBits; shift >= 0; shift -= kChooseBits) {
      // Without branches: what differs in a digit before this one goes to a last bin.
      std::uint32_t* const bins = shared_.bins[kSpread ? round : 0];
      for_each_key(rows, [&](std::uint32_t key) {
        const std::uint32_t distance = min(key - low, std::uint32_t{kChooseBins} << shift);
        atomicAdd(bins + (distance >> shift), 1u);
      });
      find_bin(wanted, round);
      low += shared_.bin << shift;
      if (wanted == shared_.here) return {low - 1, 0, 0};
    }
    if (low == kAbsentKey) return {kAbsentKey, 0, 0};  // fewer are there than are wanted
    const int same = shared_.here;
    return p_.later_ties ? Cut{low, same - wanted, same} : Cut{low, 0, wanted};
  }

  // Bins of a thread, those of thread 0 being the last.
  static constexpr int kOwnBins = kChooseBins / kThreads;
  static_assert(!kSpread || kOwnBins == 2);
  __device__ static int first_bin() {
    return kChooseBins - kOwnBins * (static_cast<int>(threadIdx.x) + 1);
  }
  __device__ uint2* own_bins(int round) {
    return reinterpret_cast<uint2*>(shared_.bins[kSpread ? round : 0] + first_bin());
  }
  __device__ void clear(int round) {
#pragma unroll
    for (int i = 0; i < kOwnBins / 2; ++i) own_bins(round)[i] = make_uint2(0, 0);
  }

  // What the other blocks of the cluster have counted in this thread's two bins.
  __device__ __forceinline__ void add_others(int round, int (&count)[kOwnBins]) {
    const std::uint32_t address = device::shared_address(own_bins(round));
    constexpr int kTogether = 4;  // loads on their way
    for (int from = 1; from < blocks(); from += kTogether) {
      uint2 other[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        other[i] = make_uint2(0, 0);
        if (from + i >= blocks()) continue;
        const int rank = (rank_ + from + i) % blocks();
        other[i] = Team::load(address, rank);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        count[0] += static_cast<int>(other[i].x), count[1] += static_cast<int>(other[i].y);
      }
    }
  }

  // The bin from the top in which the `wanted`-th of the counted keys lies, of which `wanted` then
  // is the place within it. Leaves the bins of the next round empty.
  __device__ __forceinline__ void find_bin(int& wanted, int& round) {
    sync();
    int count[kOwnBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnBins / 2; ++i) {
      const uint2 pair = own_bins(round)[i];
      count[2 * i] = static_cast<int>(pair.x);
      count[2 * i + 1] = static_cast<int>(pair.y);
    }
    if constexpr (kSpread) add_others(round, count);
    round ^= 1;
    clear(round);  // nobody reads the round before any more
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) sum += count[i];
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

  // The sum over the warps before this one, and over all of the block.
  __device__ int before_this_warp(const std::uint32_t (&of_warp)[kWarps]) const {
    const std::uint32_t value = lane() < warp() ? of_warp[lane()] : 0;
    return static_cast<int>(__reduce_add_sync(device::kFullWarp, value));
  }
  __device__ int of_all_warps(const std::uint32_t (&of_warp)[kWarps]) const {
    const std::uint32_t value = lane() < kWarps ? of_warp[lane()] : 0;
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
  __device__ __forceinline__ Counts count(int batch, const Holds& holds) const {
    Counts counts;
#pragma unroll
    for (int word = 0; word < kChunks / 4; ++word) {
      std::uint32_t own = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!has(batch, 4 * word + c)) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) own += holds(key_[16 * word + 4 * c + e]) ? 1u << (8 * c) : 0u;
      }
      const std::uint32_t through = device::warp_prefix(own, lane());
      counts.below[word] = through - own;
      counts.all[word] = __shfl_sync(device::kFullWarp, through, 31);
    }
    return counts;
  }

  // What stands before the rows of this warp, and all there is.
  struct Places {
    int above_before, equal_before, above_all;
  };
  template <bool kEqual>
  __device__ __forceinline__ Places places() {
    Places found{before_this_warp(shared_.of_warp), 0, of_all_warps(shared_.of_warp)};
    if constexpr (kEqual) found.equal_before = before_this_warp(shared_.equal_of_warp);
    if constexpr (kSpread) {
      std::uint32_t equal_all = 0;
      if constexpr (kEqual) equal_all = of_all_warps(shared_.equal_of_warp);
      if (threadIdx.x == 0) {
        shared_.counts = make_uint2(static_cast<std::uint32_t>(found.above_all), equal_all);
      }
      Team::sync();
      uint2 words = make_uint2(0, 0);
      if (lane() < blocks()) words = Team::load(device::shared_address(&shared_.counts), lane());
      Team::arrive();  // run() waits: nobody reaches into an ended block
      found.above_all = static_cast<int>(__reduce_add_sync(device::kFullWarp, words.x));
      const bool before = lane() < rank_;
      found.above_before +=
          static_cast<int>(__reduce_add_sync(device::kFullWarp, before ? words.x : 0));
      found.equal_before +=
          static_cast<int>(__reduce_add_sync(device::kFullWarp, before ? words.y : 0));
    }
    return found;
  }

  // Returns how many are chosen. kEqual: some keys equal to the cut are.
  template <bool kEqual>
  __device__ __forceinline__ int write(RowRange rows, const Cut& cut) {
    Counts above, equal;
    const auto count_chosen = [&](int batch) {
      above = count(batch, [&](std::uint32_t key) { return key > cut.key; });
      if constexpr (kEqual) {
        equal = count(batch, [&](std::uint32_t key) { return key == cut.key; });
      }
    };
    std::uint32_t own_above = 0, own_equal = 0;
    for_each_batch(rows, [&](int batch) {
      count_chosen(batch);
      own_above += above.total();
      if constexpr (kEqual) own_equal += equal.total();
    });
    if (lane() == 0) {
      shared_.of_warp[warp()] = own_above;
      if constexpr (kEqual) shared_.equal_of_warp[warp()] = own_equal;
    }
    __syncthreads();
    Places found = places<kEqual>();
    // Kept, as its computation is long.
    const auto address = reinterpret_cast<std::uintptr_t>(p_.indices_of(query_));
    auto* const out = reinterpret_cast<std::int32_t*>(
        std::uintptr_t{device::keep_in_register(static_cast<std::uint32_t>(address >> 32))} << 32 |
        device::keep_in_register(static_cast<std::uint32_t>(address)));
    float* const scores = p_.scores_of(query_);
    const auto index = p_.index_of(query_);
    for_each_batch(rows, [&](int batch) {
      if (batches() > 1) count_chosen(batch);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (!has(batch, c)) continue;
        // Calls store(place, e) for what is chosen of this lane's four keys.
        const auto for_each_chosen = [&](const auto& store) {
          int place = found.above_before + above.below_of(c);
          [[maybe_unused]] int equal_place = 0;
          if constexpr (kEqual) {
            equal_place = found.equal_before + equal.below_of(c) - cut.first_equal;
          }
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
        const std::int32_t first = index.of_four(row_of(batch, c));
        for_each_chosen([&](unsigned place, int e) { out[place] = index.behind(first, e); });
        if (scores != nullptr) {
          for_each_chosen([&](unsigned place, int e) {
            const std::uint32_t key = key_[4 * c + e];
            scores[place] = score_of(key == kNanKey ? 0 : key);
          });
        }
        found.above_before += above.all_of(c);
        if constexpr (kEqual) found.equal_before += equal.all_of(c);
      }
    });
    return found.above_all + cut.end_equal - cut.first_equal;
  }

  const Params& p_;
  Shared& shared_;
  const int query_, rank_;  // rank_: of this block among those of the query
  int first_, per_warp_;    // the first row of this lane; chunks of a warp
  std::uint32_t key_[kHeld];
};

// Static, as one that objects of several architectures have would be the same to the linker.
template <class Params, int kWarps, class Team>
static __global__ void __launch_bounds__(32 * kWarps,
                                         kChooseThreadsOfMultiprocessor / (32 * kWarps))
    choose_kernel(const __grid_constant__ Params p) {
  using Kernel = Choice<Params, kWarps, Team>;
  WINNOW_BLOCK_SHARED(shared, typename Kernel::Shared);
  device::wait_for_kernel_before();
  Kernel(p, shared, static_cast<int>(blockIdx.x)).run();
}

// The most rows that OneBlock holds.
inline constexpr int kMostStoredRows = 32 * kChooseMostWarps * kChooseHeld;

// The warps that hold so many rows, up to kMostStoredRows.
constexpr int warps_for(std::int64_t rows) {
  int warps = 4;
  while (warps < kChooseMostWarps && 32 * kChooseHeld * warps < rows) warps *= 2;
  return warps;
}

}  // namespace winnow::indexer::gpu
