// The choice of a query from the choices of its ranges of rows, sm90: one block for each query. The
// k-th largest key is found digit by digit, by histograms; then the chosen candidates are counted,
// and written where they belong.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
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
//   and index_of(query, row), what stands for a row in the indices.
struct MergeInput {
  const Candidate* parts;          // `kept` for each part, their rows ascending
  const std::int32_t* part_count;  // of each part
  int queries, kept, topk, later_ties;
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
  __device__ std::int32_t index_of(std::int64_t, std::int32_t row) const { return row; }
};

inline constexpr int kMergeThreads = 1024;
inline constexpr int kMergeWarps = kMergeThreads / 32;
inline constexpr int kMergeUnits = 1024;  // pieces of parts, a warp's work
inline constexpr int kMergeBins = 1 << 11;

struct MergeShared {
  std::uint32_t bins[kMergeBins];
  int above[kMergeUnits], equal[kMergeUnits];  // of each unit; then of all units before it
  // The digit that the k-th largest key has, how many candidates are wanted from those that share
  // its digits so far, and how many of these there are.
  std::uint32_t digit;
  int wanted, same;
  int total;  // candidates of all parts
};

// Candidates [begin, end) of a part.
struct MergeUnit {
  const Candidate* candidates;
  int begin, end;
};

template <class Params>
class Merge {
 public:
  __device__ Merge(const Params& params, MergeShared& shared, std::int64_t query)
      : p_(params),
        shared_(shared),
        query_(query),
        parts_(params.parts_of(query)),
        pieces_(max(1, min(kMergeUnits / max(1, parts_.count), device::ceil_div(p_.kept, 256)))),
        piece_(device::ceil_div(p_.kept, pieces_)),
        units_(parts_.count * pieces_) {}

  __device__ void run() {
    count_all();
    const int total = shared_.total;
    Cut cut{0, 0, 0x7fffffff, true};
    if (total > p_.topk) cut = find_cut();
    count_chosen(cut);
    write(cut);
    const int length = min(total, p_.topk);
    std::int32_t* const indices = p_.indices_of(query_);
    float* const scores = p_.scores_of(query_);
    for (int i = length + static_cast<int>(threadIdx.x); i < p_.topk; i += kMergeThreads) {
      indices[i] = -1;
      if (scores != nullptr) scores[i] = device::negative_infinity();
    }
    if (threadIdx.x == 0) *p_.length_of(query_) = length;
  }

 private:
  // What is chosen: keys above `key`, and of those equal to it [first_equal, end_equal) in their
  // order; or everything.
  struct Cut {
    std::uint32_t key;
    int first_equal, end_equal;
    bool everything;
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }

  __device__ std::int64_t part_number(int part) const {
    return parts_.first + std::int64_t{part} * parts_.stride;
  }
  __device__ MergeUnit unit(int number) const {
    const std::int64_t part = part_number(number / pieces_);
    const int begin = number % pieces_ * piece_;
    return {p_.parts + part * p_.kept, begin, min(begin + piece_, p_.part_count[part])};
  }

  __device__ void count_all() {
    if (warp() == 0) {
      int sum = 0;
      for (int part = lane(); part < parts_.count; part += 32) {
        sum += p_.part_count[part_number(part)];
      }
      sum = device::warp_sum(sum);
      if (lane() == 0) shared_.total = sum;
    }
    __syncthreads();
  }

  // Calls visit(key) for all candidates of this warp's units.
  template <class Visit>
  __device__ __forceinline__ void for_each_key(const Visit& visit) const {
    constexpr int kTogether = 8;  // loads on their way: L2 is far
    for (int number = warp(); number < units_; number += kMergeWarps) {
      const MergeUnit u = unit(number);
      for (int from = u.begin; from < u.end; from += 32 * kTogether) {
        std::uint32_t key[kTogether];
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          const int at = from + 32 * e + lane();
          if (at < u.end) key[e] = u.candidates[at].key;
        }
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          if (from + 32 * e + lane() < u.end) visit(key[e]);
        }
      }
    }
  }

  // The key of the k-th best, and which of its equals are chosen.
  __device__ Cut find_cut() {
    std::uint32_t prefix = 0;
    int wanted = p_.topk, same = 0;
#pragma unroll
    for (int digit = 0; digit < 3; ++digit) {  // of 11, 11 and 10 bits, from the top
      const int bits = digit < 2 ? 11 : 10, shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
      for (int i = static_cast<int>(threadIdx.x); i < kMergeBins; i += kMergeThreads) {
        shared_.bins[i] = 0;
      }
      __syncthreads();
      const std::uint32_t mask = (1u << bits) - 1;
      for_each_key([&](std::uint32_t key) {
        if (digit == 0 || key >> (shift + bits) == prefix) {
          atomicAdd(shared_.bins + (key >> shift & mask), 1u);
        }
      });
      __syncthreads();
      if (warp() == 0) find_digit(wanted);
      __syncthreads();
      prefix = prefix << bits | shared_.digit;
      wanted = shared_.wanted;
      same = shared_.same;
    }
    if (p_.later_ties) return {prefix, same - wanted, same, false};
    return {prefix, 0, wanted, false};
  }

  // By one warp: the bin from the top in which the `wanted`-th candidate lies.
  __device__ void find_digit(int wanted) {
    constexpr int kOwn = kMergeBins / 32;  // bins of a lane, the highest ones for lane 0
    int sum = 0;
    for (int i = 0; i < kOwn; ++i) {
      sum +=
          static_cast<int>(shared_.bins[kMergeBins - kOwn - kOwn * lane() + (i + lane()) % kOwn]);
    }
    const int through = device::warp_prefix(sum, lane());
    const unsigned reached = __ballot_sync(device::kFullWarp, through >= wanted);
    if (lane() != __ffs(static_cast<int>(reached)) - 1) return;
    int before = through - sum, bin = kMergeBins - 1 - kOwn * lane();
    while (before + static_cast<int>(shared_.bins[bin]) < wanted) {
      before += static_cast<int>(shared_.bins[bin]);
      --bin;
    }
    shared_.digit = static_cast<std::uint32_t>(bin);
    shared_.wanted = wanted - before;
    shared_.same = static_cast<int>(shared_.bins[bin]);
  }

  // Leaves how many candidates above the cut, and equal to it, the units before each one have.
  __device__ void count_chosen(const Cut& cut) {
    for (int number = warp(); number < units_; number += kMergeWarps) {
      const MergeUnit u = unit(number);
      int above = 0, equal = 0;
      if (cut.everything) {
        above = max(0, u.end - u.begin);
      } else {
        for (int at = u.begin + lane(); at < u.end; at += 32) {
          const std::uint32_t key = u.candidates[at].key;
          above += key > cut.key;
          equal += key == cut.key;
        }
        above = device::warp_sum(above);
        equal = device::warp_sum(equal);
      }
      if (lane() == 0) {
        shared_.above[number] = above;
        shared_.equal[number] = equal;
      }
    }
    __syncthreads();
    if (warp() == 0) {
      int above = 0, equal = 0;
      for (int from = 0; from < units_; from += 32) {
        const int number = from + lane();
        const int here_above = number < units_ ? shared_.above[number] : 0;
        const int here_equal = number < units_ ? shared_.equal[number] : 0;
        const int through_above = device::warp_prefix(here_above, lane());
        const int through_equal = device::warp_prefix(here_equal, lane());
        if (number < units_) {
          shared_.above[number] = above + through_above - here_above;
          shared_.equal[number] = equal + through_equal - here_equal;
        }
        above += __shfl_sync(device::kFullWarp, through_above, 31);
        equal += __shfl_sync(device::kFullWarp, through_equal, 31);
      }
    }
    __syncthreads();
  }

  __device__ void write(const Cut& cut) {
    std::int32_t* const indices = p_.indices_of(query_);
    float* const scores = p_.scores_of(query_);
    const unsigned below = (1u << lane()) - 1;
    for (int number = warp(); number < units_; number += kMergeWarps) {
      const MergeUnit u = unit(number);
      int above_before = shared_.above[number], equal_before = shared_.equal[number];
      for (int from = u.begin; from < u.end; from += 32) {
        const int at = from + lane();
        const bool there = at < u.end;
        const Candidate candidate = there ? u.candidates[at] : Candidate{0, -1};
        const bool above = there && (cut.everything || candidate.key > cut.key);
        const bool equal = there && !cut.everything && candidate.key == cut.key;
        const unsigned aboves = __ballot_sync(device::kFullWarp, above);
        const unsigned equals = __ballot_sync(device::kFullWarp, equal);
        const int equal_place = equal_before + __popc(equals & below);
        const bool chosen =
            above || (equal && equal_place >= cut.first_equal && equal_place < cut.end_equal);
        if (chosen) {
          // Equals that are chosen and stand before this one.
          const int chosen_equals =
              min(max(equal_place - cut.first_equal, 0), cut.end_equal - cut.first_equal);
          const int place = above_before + __popc(aboves & below) + chosen_equals;
          indices[place] = p_.index_of(query_, candidate.row);
          if (scores != nullptr) scores[place] = score_of(candidate.key);
        }
        above_before += __popc(aboves);
        equal_before += __popc(equals);
      }
    }
  }

  const Params& p_;
  MergeShared& shared_;
  const std::int64_t query_;
  const MergeParts parts_;
  const int pieces_, piece_, units_;  // of a part, candidates of a piece, of the query
};

template <class Params>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Params p) {
  WINNOW_BLOCK_SHARED(shared, MergeShared);
  for (int query = blockIdx.x; query < p.queries; query += gridDim.x) {
    Merge(p, shared, query).run();
    __syncthreads();
  }
}

}  // namespace winnow::indexer::sm90_detail
