// The choice of a query from the choices of its ranges of rows, sm90: a cluster of blocks for each
// query, whose warps share out the candidates and keep them in registers. The k-th largest key is
// found by histograms of ever smaller ranges of keys; then the chosen candidates are counted, and
// written where they belong.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/cluster.cuh"
#include "winnow/indexer/topk/select_sm90.cuh"

namespace winnow::indexer::sm90_detail {

// The parts of a query in MergeInput's arrays: `count` of them, `stride` apart.
struct MergeParts {
  std::int64_t first;
  int stride, count;
};

// What a merge reads. `Params` of the kernel below are this and what says where a query has its
// parts and its results:
//   parts_of(query), indices_of(query), length_of(query), scores_of(query) (null: not wanted),
//   and index_of(query), whose (row) is what stands for a row in the indices.
struct MergeInput {
  const Candidate* parts;          // `kept` for each part, their rows ascending
  const std::int32_t* part_count;  // of each part
  int queries, kept, topk, later_ties;
  int blocks;  // of a query: 1 to kMergeBlocks, the cluster's
};

// The parts of a query stand behind each other, as do the queries.
struct MergeParams : MergeInput {
  std::int32_t* indices;  // [s_q, topk]
  std::int32_t* length;   // [s_q]
  float* scores;          // [s_q, topk], or null
  std::int64_t indices_stride, length_stride, scores_stride;
  int splits;

  __device__ MergeParts parts_of(std::int64_t query) const { return {query * splits, 1, splits}; }
  __device__ std::int32_t* indices_of(std::int64_t query) const {
    return indices + query * indices_stride;
  }
  __device__ std::int32_t* length_of(std::int64_t query) const {
    return length + query * length_stride;
  }
  __device__ float* scores_of(std::int64_t query) const {
    return scores == nullptr ? nullptr : scores + query * scores_stride;
  }
  struct RowItself {
    __device__ std::int32_t operator()(std::int32_t row) const { return row; }
  };
  __device__ RowItself index_of(std::int64_t) const { return {}; }
};

inline constexpr int kMergeThreads = 1024;
inline constexpr int kMergeWarps = 32;
static_assert(kMergeWarps * 32 == kMergeThreads);  // a lane for each warp
inline constexpr int kMergeParts = kMergeThreads;  // of a query at most: one for each thread
inline constexpr int kMergeBins = 2 * kMergeThreads;
inline constexpr int kMergeBlocks = 8;

struct MergeShared {
  // Counts of two rounds: others of the cluster still read one while the next is counted.
  alignas(16) std::uint32_t bins[2][kMergeBins];
  std::int32_t candidates[kMergeParts];      // of each part
  std::int32_t chunks_through[kMergeParts];  // of a part and of those before it
  std::uint32_t warp_sum[kMergeWarps], other_warp_sum[kMergeWarps];
  uint2 range, counts;  // of this block, which others of the cluster read
  // The bin in which the k-th largest key lies, the candidates above it, and in it.
  std::uint32_t bin;
  int higher, here;
};

// kHeld: chunks of candidates that a warp holds in registers, one in each; with many some other
// values are spilled.
template <class Params, int kHeld>
class Merge {
 public:
  __device__ Merge(const Params& params, MergeShared& shared, std::int64_t query, int rank)
      : p_(params), shared_(shared), query_(query), parts_(params.parts_of(query)), rank_(rank) {}

  __device__ void run() {
    share_out();
    Cut cut{0, 0, 0, true};
    if (total_ > p_.topk) cut = find_cut();
    count_chosen(cut);
    write(cut);
    const int length = min(total_, p_.topk);
    std::int32_t* const indices = p_.indices_of(query_);
    float* const scores = p_.scores_of(query_);
    // From the end on: a sum with topk may pass 2^31.
    for (int i = p_.topk - 1 - rank_ * kMergeThreads - thread(); i >= length;
         i -= p_.blocks * kMergeThreads) {
      indices[i] = -1;
      if (scores != nullptr) scores[i] = device::negative_infinity();
    }
    if (rank_ == 0 && thread() == 0) *p_.length_of(query_) = length;
    if (p_.blocks > 1) device::cluster_wait();  // for the arrival in count_chosen()
  }

 private:
  // What is chosen: keys above `key`, and of those equal to it [first_equal, end_equal) in their
  // order; or everything.
  struct Cut {
    std::uint32_t key;
    int first_equal, end_equal;
    bool everything;

    __device__ bool is_above(std::uint32_t k) const { return everything || k > key; }
    __device__ bool is_equal(std::uint32_t k) const { return !everything && k == key; }
  };
  struct TwoSums {
    int first, second;
  };

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % 32; }
  __device__ static int warp() { return thread() / 32; }

  // ---- Sums over the block and the cluster ----

  __device__ void sync() const {
    if (p_.blocks == 1) {
      __syncthreads();
    } else {
      device::cluster_sync();
    }
  }

  // The sum over the threads before this one, and over all of them. A barrier stands behind the
  // reads of earlier sums.
  __device__ TwoSums before_and_all(int value) {
    const int through = device::warp_prefix(value, lane());
    if (lane() == 31) shared_.warp_sum[warp()] = static_cast<std::uint32_t>(through);
    __syncthreads();
    const int of_warp = static_cast<int>(shared_.warp_sum[lane()]);
    const int through_warp = device::warp_prefix(of_warp, lane());
    return {__shfl_sync(device::kFullWarp, through_warp - of_warp, warp()) + through - value,
            __shfl_sync(device::kFullWarp, through_warp, 31)};
  }

  // Shows two words of this block to the others, by `shown`, which is written once; then calls
  // use(rank, words) for each block's in turn.
  template <class Use>
  __device__ __forceinline__ void exchange(uint2 mine, uint2& shown, const Use& use) const {
    if (p_.blocks == 1) return use(0, mine);
    if (thread() == 0) shown = mine;
    device::cluster_sync();
    const std::uint32_t address = device::shared_address(&shown);
    uint2 words{0, 0};
    if (lane() < p_.blocks) {
      words = device::ld_shared_cluster(
          device::map_shared(address, static_cast<std::uint32_t>(lane())));
    }
    for (int rank = 0; rank < p_.blocks; ++rank) {
      use(rank, uint2{__shfl_sync(device::kFullWarp, words.x, rank),
                      __shfl_sync(device::kFullWarp, words.y, rank)});
    }
  }

  // ---- Candidates ----
  // Chunks of up to 32 neighbouring candidates of a part are numbered through all parts. A warp
  // has the chunks [first_, end_), kHeld of which it holds at a time, one in each register.

  __device__ void share_out() {
    int candidates = 0;
    if (thread() < parts_.count) candidates = p_.part_count[part_number(thread())];
    const int of_warp = __reduce_add_sync(device::kFullWarp, candidates);
    if (lane() == 0) shared_.other_warp_sum[warp()] = static_cast<std::uint32_t>(of_warp);
    const int own = device::ceil_div(candidates, 32);
    const TwoSums chunks = before_and_all(own);
    total_ = static_cast<int>(__reduce_add_sync(device::kFullWarp, shared_.other_warp_sum[lane()]));
    shared_.candidates[thread()] = candidates;
    shared_.chunks_through[thread()] = chunks.first + own;
    const std::int64_t warps = std::int64_t{p_.blocks} * kMergeWarps;
    const int per_warp = static_cast<int>(device::ceil_div(std::int64_t{chunks.second}, warps));
    first_ = min(chunks.second, (rank_ * kMergeWarps + warp()) * per_warp);
    end_ = min(chunks.second, first_ + per_warp);
    batches_ = device::ceil_div(per_warp, kHeld);  // the same for all warps
    __syncthreads();
    if (batches_ == 1) load(0);
  }

  __device__ std::int64_t part_number(int part) const {
    return parts_.first + std::int64_t{part} * parts_.stride;
  }

  __device__ __forceinline__ void load(int batch) {
    // A lane looks up a chunk: the part to which it belongs, and the candidates that it has.
    static_assert(kHeld <= 32);
    const int chunk = first_ + batch * kHeld + lane();
    at_ = count_ = 0;
    if (lane() < kHeld && chunk < end_) {
      int low = 0, high = parts_.count - 1;  // the first part that ends behind the chunk
      while (low < high) {
        const int middle = (low + high) / 2;
        if (shared_.chunks_through[middle] > chunk) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const int begin = 32 * (chunk - (low == 0 ? 0 : shared_.chunks_through[low - 1]));
      at_ = static_cast<int>(part_number(low)) * p_.kept + begin;
      count_ = min(32, shared_.candidates[low] - begin);
    }
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      const Candidate* const candidate = candidate_of(e);
      if (there(e)) key_[e] = candidate->key;
    }
  }

  // Whether this lane has a candidate of chunk e, and which.
  __device__ bool there(int e) const { return lane() < __shfl_sync(device::kFullWarp, count_, e); }
  __device__ const Candidate* candidate_of(int e) const {
    return p_.parts + __shfl_sync(device::kFullWarp, at_, e) + lane();
  }

  // Calls visit(there, key) for all candidates of this warp; every lane does.
  template <class Visit>
  __device__ __forceinline__ void for_each_key(const Visit& visit) {
    for (int batch = 0; batch < batches_; ++batch) {
      if (batches_ > 1) load(batch);
#pragma unroll
      for (int e = 0; e < kHeld; ++e) visit(there(e), key_[e]);
    }
  }

  // ---- The choice ----

  // The key of the k-th best, and which of its equals are chosen.
  __device__ Cut find_cut() {
    std::uint32_t low = 0xffffffffu, high = 0;  // of all candidates
    for_each_key([&](bool there, std::uint32_t key) {
      if (!there) return;
      low = min(low, key);
      high = max(high, key);
    });
    low = __reduce_min_sync(device::kFullWarp, low);
    high = __reduce_max_sync(device::kFullWarp, high);
    clear(0);
    if (lane() == 0) {
      shared_.warp_sum[warp()] = low;
      shared_.other_warp_sum[warp()] = high;
    }
    __syncthreads();
    const uint2 own{__reduce_min_sync(device::kFullWarp, shared_.warp_sum[lane()]),
                    __reduce_max_sync(device::kFullWarp, shared_.other_warp_sum[lane()])};
    exchange(own, shared_.range, [&](int, uint2 words) {
      low = min(low, words.x);
      high = max(high, words.y);
    });
    int wanted = p_.topk, same = total_;
    for (int round = 0; low < high; round ^= 1) {
      const int bits = 32 - __clz(static_cast<int>(high - low));
      const int shift = max(0, bits - kBinBits);
      std::uint32_t* const bins = shared_.bins[round];
      for_each_key([&](bool there, std::uint32_t key) {
        const std::uint32_t distance = key - low;
        if (there && distance <= high - low) atomicAdd(bins + (distance >> shift), 1u);
      });
      find_bin(bins, round, wanted);
      low += shared_.bin << shift;
      wanted -= shared_.higher;
      if (wanted == shared_.here) return {low - 1, 0, 0, false};  // some key lies below
      high = min(high, low + ((1u << shift) - 1));
      same = shared_.here;
    }
    if (p_.later_ties) return {low, same - wanted, same, false};
    return {low, 0, wanted, false};
  }

  __device__ void clear(int round) {
    shared_.bins[round][2 * thread()] = shared_.bins[round][2 * thread() + 1] = 0;
  }

  // Of a round that has been counted: the bin from the top in which the `wanted`-th candidate lies.
  __device__ void find_bin(const std::uint32_t* bins, int round, int wanted) {
    sync();
    clear(round ^ 1);  // nobody reads the round before any more
    const int first = kMergeBins - 2 - 2 * thread();
    uint2 count{bins[first], bins[first + 1]};
    if (p_.blocks > 1) {
      const std::uint32_t address = device::shared_address(bins + first);
      constexpr int kTogether = 4;  // loads on their way
      for (int from = 1; from < p_.blocks; from += kTogether) {
        uint2 other[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          other[i] = {0, 0};
          if (from + i >= p_.blocks) continue;
          const int rank = (rank_ + from + i) % p_.blocks;
          other[i] = device::ld_shared_cluster(
              device::map_shared(address, static_cast<std::uint32_t>(rank)));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) count.x += other[i].x, count.y += other[i].y;
      }
    }
    const int upper = static_cast<int>(count.y), both = upper + static_cast<int>(count.x);
    const int before = before_and_all(both).first;
    if (before < wanted && wanted <= before + both) {
      const bool is_upper = before + upper >= wanted;
      shared_.bin = static_cast<std::uint32_t>(first) + (is_upper ? 1 : 0);
      shared_.higher = is_upper ? before : before + upper;
      shared_.here = is_upper ? upper : both - upper;
    }
    __syncthreads();
  }

  // How many candidates above the cut, and equal to it, stand before those of this warp.
  __device__ void count_chosen(const Cut& cut) {
    int above = 0, equal = 0;
    for_each_key([&](bool there, std::uint32_t key) {
      above += there && cut.is_above(key);
      equal += there && cut.is_equal(key);
    });
    above = __reduce_add_sync(device::kFullWarp, above);
    equal = __reduce_add_sync(device::kFullWarp, equal);
    __syncthreads();  // nobody reads earlier sums any more
    if (lane() == 0) {
      shared_.warp_sum[warp()] = static_cast<std::uint32_t>(above);
      shared_.other_warp_sum[warp()] = static_cast<std::uint32_t>(equal);
    }
    __syncthreads();
    const std::uint32_t above_of_warp = shared_.warp_sum[lane()];
    const std::uint32_t equal_of_warp = shared_.other_warp_sum[lane()];
    const std::uint32_t above_through = device::warp_prefix(above_of_warp, lane());
    const std::uint32_t equal_through = device::warp_prefix(equal_of_warp, lane());
    std::uint32_t above_before =
        __shfl_sync(device::kFullWarp, above_through - above_of_warp, warp());
    std::uint32_t equal_before =
        __shfl_sync(device::kFullWarp, equal_through - equal_of_warp, warp());
    const uint2 all{__shfl_sync(device::kFullWarp, above_through, 31),
                    __shfl_sync(device::kFullWarp, equal_through, 31)};
    exchange(all, shared_.counts, [&](int rank, uint2 words) {
      if (rank >= rank_) return;
      above_before += words.x;
      equal_before += words.y;
    });
    if (p_.blocks > 1) device::cluster_arrive();  // run() waits: nobody reaches into an ended block
    above_before_ = static_cast<int>(above_before);
    equal_before_ = static_cast<int>(equal_before);
  }

  __device__ void write(const Cut& cut) {
    std::int32_t* const indices = p_.indices_of(query_);
    float* const scores = p_.scores_of(query_);
    const auto index_of = p_.index_of(query_);
    const unsigned below = (1u << lane()) - 1;
    constexpr int kTogether = kHeld == 12 ? 4 : 6;  // loads on their way
    for (int batch = 0; batch < batches_; ++batch) {
      if (batches_ > 1) load(batch);
#pragma unroll
      for (int from = 0; from < kHeld; from += kTogether) {
        std::int32_t index[kTogether];  // at first the row
        unsigned may_be_chosen = 0;     // a bit for each
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Candidate* const candidate = candidate_of(from + i);
          const std::uint32_t key = key_[from + i];
          if (there(from + i) && (cut.is_above(key) || cut.is_equal(key))) {
            index[i] = candidate->row;
            may_be_chosen |= 1u << i;
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (may_be_chosen >> i & 1) index[i] = index_of(index[i]);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const std::uint32_t key = key_[from + i];
          const bool may_be = may_be_chosen >> i & 1;
          const bool above = may_be && cut.is_above(key), equal = may_be && cut.is_equal(key);
          const unsigned aboves = __ballot_sync(device::kFullWarp, above);
          const unsigned equals = __ballot_sync(device::kFullWarp, equal);
          const int equal_place = equal_before_ + __popc(equals & below);
          if (above || (equal && equal_place >= cut.first_equal && equal_place < cut.end_equal)) {
            // Equals that are chosen and stand before this one.
            const int chosen_equals =
                min(max(equal_place - cut.first_equal, 0), cut.end_equal - cut.first_equal);
            const int place = above_before_ + __popc(aboves & below) + chosen_equals;
            indices[place] = index[i];
            if (scores != nullptr) scores[place] = score_of(key);
          }
          above_before_ += __popc(aboves);
          equal_before_ += __popc(equals);
        }
      }
    }
  }

  static constexpr int kBinBits = 11;
  static_assert(kMergeBins == 1 << kBinBits);

  const Params& p_;
  MergeShared& shared_;
  const std::int64_t query_;
  const MergeParts parts_;
  const int rank_;             // of this block among those of the query
  int total_;                  // candidates of the query
  int first_, end_, batches_;  // chunks of this warp, and in how many batches it holds them
  std::uint32_t key_[kHeld];   // of the batch, one of each chunk
  int at_, count_;             // where chunk lane() begins, and how many candidates it has
  int above_before_, equal_before_;
};

template <class Params, int kHeld>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Params p) {
  WINNOW_BLOCK_SHARED(shared, MergeShared);
  device::wait_for_kernel_before();
  const int block = static_cast<int>(blockIdx.x);
  Merge<Params, kHeld>(p, shared, block / p.blocks, block % p.blocks).run();
}

// Queues the merge of all queries, each of which has about so many candidates, behind the kernel
// that leaves them.
template <class Params>
void launch_merge(const device::Runtime& runtime, Params params, std::int64_t candidates,
                  cudaStream_t stream) {
  // As many blocks as the GPU has room for, where each gets something to do.
  const std::int64_t room = runtime.multiprocessors() / params.queries;
  params.blocks = 1;
  while (2 * params.blocks <= std::min<std::int64_t>(room, kMergeBlocks) &&
         2 * kMergeThreads * params.blocks < candidates) {
    params.blocks *= 2;
  }
  constexpr int kFew = 12, kMany = 18;
  const bool few = candidates <= std::int64_t{kFew} * kMergeThreads * params.blocks;
  runtime.check(device::launch_clusters_early(
                    few ? merge_kernel<Params, kFew> : merge_kernel<Params, kMany>, params.blocks,
                    params.queries * params.blocks, kMergeThreads, 0, stream, params),
                "launch");
}

}  // namespace winnow::indexer::sm90_detail
