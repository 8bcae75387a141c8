// The sums of combine: which rows belong to each, in which order, where they are and where they go.
#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/combine/combine_finish.cuh"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/combine/combine_sources.cuh"
#include "winnow/expert_parallel/combine/combine_sum_cuda.cuh"
#include "winnow/expert_parallel/cuda/claims.cuh"
#include "winnow/expert_parallel/cuda/pairs.cuh"
#include "winnow/expert_parallel/cuda/signal_node.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/exchange/received.cuh"
#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {
namespace {

using device::ceil_div;
using device::FastDivmod;
using row_sums::Addend;
using row_sums::Cut;
using row_sums::Feeder;
using row_sums::kTeam;
using row_sums::Ring;
using row_sums::teams_of;

WINNOW_DYNAMIC_SHARED(ring_memory, 128);

// Tokens of a rank in kSlices parts of equal length, the same for all ranks. The warp.
__device__ std::uint32_t slice_length(const CudaSumParams& params) {
  int longest = 1;
  for (int rank = threadIdx.x % 32; rank < params.view.topology.world; rank += 32) {
    longest = max(longest, __ldcg(&params.routing.tokens[rank]));
  }
  return std::uint32_t(
      ceil_div<std::int64_t>(__reduce_max_sync(device::kFullWarp, longest), kSlices));
}

// The words that say how many slices of a part the ranks of this node have pushed here.
__device__ std::int64_t slice_words(const LayerView& view, Part part) {
  return view.control_layout.sum_slices +
         part * view.topology.locals * std::int64_t(sizeof(std::uint64_t));
}

// Tokens that a warp takes under one claim: where rows are large so few that a rank has about two
// of them, since all that has been claimed is the end of the slowest SM. A claim takes its time
// too: few SMs take more at once of what they read, and twice as many are taken of what is pushed,
// for which each claim waits.
__device__ PairLane claimed_tokens(const CudaSumParams& params) {
  constexpr std::int64_t kLargeRow = 4096;  // bytes
  const CudaTopology& topology = params.view.topology;
  int few = max(2, 2 * topology.world / topology.topk);
  if (params.travel == Travel::rows_are_read) few = max(few, 32 / int(gridDim.x));
  if (params.travel == Travel::rows_are_pushed) few *= 2;
  return PairLane(topology.topk, int(threadIdx.x) % 32, params.row_bytes >= kLargeRow ? few : 32);
}

// What this rank has of tokens that other ranks of its node reduce: for each the sum of its rows,
// rounded, to its place there. Each step uses what the one before has begun to load.
template <bool kWeighted>
class Pushes {
 public:
  __device__ Pushes(const CudaSumParams& params, Part part, std::uint32_t slice_length)
      : params_(params),
        topology_(params.view.topology),
        lane_(claimed_tokens(params)),
        sources_(topology_, part),
        slice_length_(slice_length),
        by_slice_(max(1u, sources_.count() *
                              std::uint32_t(ceil_div<std::int64_t>(slice_length_, lane_.tokens)))),
        by_source_(max(1u, sources_.count())),
        claims_(&params.view.state->claims[part == kOwn ? kPushOwnClaims : kPushOthersClaims]) {}
  // Behind the kernel before.
  __device__ void begin() {
    if (!any()) return;
    claims_.begin();
    first_ = find_first(claims_.next());
    second_ = find_row(first_);
    first_ = find_first(claims_.next());
    third_ = find_weight(second_);
    second_ = find_row(first_);
    first_ = find_first(claims_.next());
  }
  __device__ bool any() const {
    return params_.travel == Travel::sums_are_pushed && sources_.count() > 0;
  }

  // Feeds what has been claimed, false: nothing is left. Marks the slices that are over.
  __device__ bool feed(Feeder& feeder) {
    const Step now = third_;
    third_ = find_weight(second_);
    second_ = find_row(first_);
    first_ = find_first(claims_.next());
    for (; slice_ < now.slice; ++slice_) feeder.mark();
    if (now.slice == kSlices) return false;
    const unsigned rows = __ballot_sync(device::kFullWarp, now.row >= 0);
    if (rows == 0) return true;
    if (now.row >= 0) {
      const unsigned of_token = rows & lane_.token_lanes();
      const bool first = (of_token & lanes_below(lane_.lane)) == 0;
      const bool last = of_token >> lane_.lane == 1;
      feeder.addends()[__popc(rows & lanes_below(lane_.lane))] = {
          params_.expert_rows + now.row * params_.expert_stride,
          params_.view.pushed.node[now.source.local] +
              pushed_offset(topology_, now.source.node, topology_.local, params_.max_tokens,
                            now.token, params_.row_bytes),
          nullptr,
          nullptr,
          now.weight,
          (first ? row_sums::kBeginsRank : 0u) |
              (last ? row_sums::kEndsRank | row_sums::kEndsNode | row_sums::kEndsSum : 0u)};
    }
    feeder.sum(__popc(rows));
    return true;
  }

 private:
  // A claim, and this lane's pair of it.
  struct Step {
    int slice = kSlices;
    Sources::Source source{};
    std::int64_t token = 0;
    FirstRow first;
    std::int32_t row = -1;
    float weight = 1.0f;
  };

  __device__ Step find_first(std::uint32_t claim) const {
    Step step;
    const FastDivmod::Result slice = by_slice_.divide(claim);
    if (slice.quotient >= kSlices) return step;
    step.slice = int(slice.quotient);
    // From claim to claim another rank.
    const FastDivmod::Result source = by_source_.divide(slice.remainder);
    step.source = sources_.at(source.remainder);
    const std::uint32_t in_slice = source.quotient * lane_.tokens + lane_.slot;
    step.token = slice.quotient * slice_length_ + in_slice;
    if (lane_.used && in_slice < slice_length_ && step.token < params_.max_tokens) {
      const int rank = topology_.rank_at(step.source.node, step.source.local);
      step.first.word = __ldcg(&params_.routing.firsts[rank * params_.max_tokens + step.token]);
    }
    return step;
  }
  __device__ Step find_row(Step step) const {
    const std::int64_t first = step.first.row();
    if (first < 0) return step;
    const std::int64_t at = first * topology_.topk + lane_.k;
    step.row = std::int32_t(__ldcg(&params_.routing.copies[at]));
    return step;
  }
  __device__ Step find_weight(Step step) const {
    if (kWeighted && step.row >= 0) step.weight = __ldcg(&params_.weights.rows[step.row]);
    return step;
  }

  const CudaSumParams& params_;
  const CudaTopology& topology_;
  PairLane lane_;
  Sources sources_;
  std::uint32_t slice_length_;
  FastDivmod by_slice_, by_source_;
  Claims claims_;
  Step first_, second_, third_;
  int slice_ = 0;
};

// The tokens that this rank reduces: rows of its own, rows or sums of its node's other ranks, and
// with kAllNodes the sums of other nodes.
template <bool kWeighted, bool kAllNodes>
class Reductions {
 public:
  __device__ Reductions(const CudaSumParams& params, Part part, std::uint32_t slice_length,
                        std::byte* const* rows)
      : params_(params),
        view_(params.view),
        topology_(params.view.topology),
        part_(part),
        lane_(claimed_tokens(params)),
        rows_(rows),
        by_slice_(slice_length),
        by_source_(part == kOwn ? 1 : topology_.nodes - 1),
        by_home_(topology_.per_rank()),
        by_node_(topology_.locals),
        items_((part == kOwn ? 1 : topology_.nodes - 1) *
               std::uint32_t(ceil_div<std::int64_t>(
                   part == kOwn ? params.tokens : slice_length * kSlices, lane_.tokens))),
        claims_(&view_.state->claims[part == kOwn ? kSumOwnClaims : kSumOthersClaims], feeders()) {
    next_ = load(feeders() / gridDim.x * blockIdx.x + threadIdx.x / kTeam);
  }
  // Behind the kernel before.
  __device__ void begin() {
    epoch_ = epoch_of(view_);
    claims_.begin();
  }
  __device__ bool any() const { return next_.claim < items_; }

  // Whether what comes next has been pushed, if this is the time to look.
  __device__ bool ready() {
    constexpr int kLooks = 4;  // as long as it takes to look
    if (next_.slice < ready_slices_) return true;
    if (++looks_ % kLooks != 0) return false;
    bool there = true;
    for_each_mate([&](const std::uint64_t* word, std::uint64_t value, int) {
      there = there && device::ld_acquire_sys(word) >= value;
    });
    return take(there);
  }
  // Waits for that; false: it does not come.
  __device__ bool wait() {
    if (next_.slice < ready_slices_) return true;
    bool there = true;
    for_each_mate([&](const std::uint64_t* word, std::uint64_t value, int rank) {
      there = there && wait_at_least(view_, word, value, kPushedSumsPhase, rank);
    });
    return take(there);
  }

  // Feeds what has been claimed, which is ready. False: a sum of another node does not come.
  __device__ bool feed(Feeder& feeder) {
    const Step now = next_;
    next_ = load(claims_.next());
    const int count = list(now, feeder.addends());
    if (count > 0) feeder.sum(count);
    return count >= 0;
  }

 private:
  // Each begins with the claim of its own number.
  static __device__ std::uint32_t feeders() { return gridDim.x * (blockDim.x / kTeam); }

  // A claim, and this lane's pair of it.
  struct Step {
    std::uint32_t claim = 0;
    std::int64_t token = 0;
    int source_node = 0, slice = 0;
    bool valid = false;  // there is such a token
    std::int32_t expert = -1, row = -1;
    float weight = 1.0f;
  };

  __device__ Step load(std::uint32_t claim) const {
    Step step;
    step.claim = claim;
    if (claim >= items_) return step;
    const FastDivmod::Result source = by_source_.divide(claim);
    const std::uint32_t begin = source.quotient * lane_.tokens;
    const std::uint32_t slice = by_slice_.divide(begin + lane_.tokens - 1).quotient;
    step.slice = int(min(slice, kSlices - 1u));
    step.token = begin + lane_.slot;
    std::int64_t tokens = params_.tokens;
    step.source_node = topology_.node;
    if (part_ == kOthers) {
      step.source_node = wrap(topology_.node + 1 + int(source.remainder), topology_.nodes);
      // What a dispatch that was refused has left there may be anything.
      tokens =
          min(params_.max_tokens,
              std::int64_t(__ldcg(
                  &params_.routing.tokens[topology_.rank_at(step.source_node, topology_.local)])));
    }
    step.valid = lane_.used && step.token < tokens;
    if (!step.valid) return step;
    const std::int64_t at =
        (step.source_node * params_.max_tokens + step.token) * topology_.topk + lane_.k;
    step.expert = __ldcg(&params_.routing.indices[at]);
    step.row = __ldcg(&params_.routing.rows[at]);
    if constexpr (kWeighted) step.weight = __ldcg(&params_.weights.pairs[at]);
    return step;
  }

  // The addends of the claimed tokens, each token's in the order of the nodes, of the ranks and of
  // k. Their number, -1 where the wait for another node's sum has failed.
  __device__ int list(const Step& step, Addend* addends) const {
    const bool kept = topology_.kept(step.expert);
    const int home = int(by_home_.divide(kept ? step.expert : 0).quotient);
    const FastDivmod::Result place = by_node_.divide(home);
    const int node = int(place.quotient), local = int(place.remainder);
    const bool here = kept && node == topology_.node && step.row >= 0;
    const bool there = kAllNodes && kept && node != topology_.node;
    // Ascending groups: ranks of this node, and each other node as one.
    const int group = here ? home : there ? node * topology_.locals : -1;
    const unsigned mates = __match_any_sync(device::kFullWarp, group) & lane_.token_lanes();
    const unsigned below = lanes_below(lane_.lane);
    const bool pushed = here && params_.travel != Travel::rows_are_read && local != topology_.local;
    const bool one = there || pushed || params_.token_major;  // of its group
    const bool counts = group >= 0 && (!one || (mates & below) == 0);
    const unsigned counted = __ballot_sync(device::kFullWarp, counts);
    const unsigned of_token = counted & lane_.token_lanes();
    const unsigned of_node = __ballot_sync(device::kFullWarp, counts && here) & of_token;
    const unsigned before =
        __ballot_sync(device::kFullWarp, counts && there && node < topology_.node) & of_token;
    // Tokens that have a sum: of another rank's those that want this node, even where no row found
    // room.
    bool valid = step.valid;
    if (part_ == kOthers) {
      const unsigned wants = __ballot_sync(device::kFullWarp, kept && node == topology_.node);
      valid = valid && (wants & lane_.token_lanes()) != 0;
    }
    const bool empty = valid && lane_.k == 0 && of_token == 0;
    const unsigned empties = __ballot_sync(device::kFullWarp, empty);
    int at = 0;  // in the token
#pragma unroll 4
    for (int k = 0; k < topology_.topk; ++k) {
      const int other_lane = lane_.begin() + k;
      const int other = __shfl_sync(device::kFullWarp, group, other_lane & 31);
      at += (counted >> (other_lane & 31) & 1) != 0 &&
            (other < group || (other == group && k < lane_.k));
    }
    const unsigned earlier = lanes_below(lane_.begin());
    Addend* addend = addends + __popc(counted & earlier) + __popc(empties & earlier) + at;
    bool arrived = true;
    if (counts || empty) {
      *addend = {nullptr, target(step), nullptr, nullptr, 1.0f, row_sums::kEndsSum};
      if (part_ == kOwn && params_.bias != nullptr) {
        addend->bias = params_.bias + step.token * params_.bias_stride;
      }
      if (part_ == kOwn && params_.second_bias != nullptr) {
        addend->second_bias = params_.second_bias + step.token * params_.second_bias_stride;
      }
    }
    if (counts) {
      const bool begins_rank = one || (mates & below) == 0;
      const bool ends_rank = one || mates >> lane_.lane == 1;
      const bool ends_node = there || at + 1 == __popc(before) + __popc(of_node);
      if (there) {
        const std::byte* signal =
            view_.rail.local + view_.rail_layout.signal(node, step.token / kChunkTokens);
        arrived = wait_at_least(view_, reinterpret_cast<const std::uint64_t*>(signal), epoch_,
                                kSumsPhase, topology_.rank_at(node, topology_.local));
        addend->row = view_.rail.local + view_.rail_layout.row(node, step.token, params_.row_bytes);
      } else if (pushed) {
        const std::int64_t place = place_of(step, local);
        addend->row =
            view_.pushed.local + pushed_offset(topology_, step.source_node, local,
                                               params_.max_tokens, place, params_.row_bytes);
        if (params_.token_major) {
          const auto* word = reinterpret_cast<const std::uint64_t*>(
              view_.control.local +
              view_.control_layout.pushed_row(step.source_node, topology_.locals, local, place));
          arrived = wait_at_least(view_, word, epoch_, kPushedRowsPhase, home);
        }
      } else {
        addend->row = row_of(step, local);
        addend->weight = step.weight;
      }
      addend->flags = (begins_rank ? row_sums::kBeginsRank : 0u) |
                      (ends_rank ? row_sums::kEndsRank : 0u) |
                      (ends_node ? row_sums::kEndsNode : 0u) |
                      (at + 1 == __popc(of_token) ? row_sums::kEndsSum : 0u);
    }
    if (kAllNodes || params_.travel == Travel::rows_are_pushed) {
      if (!__all_sync(device::kFullWarp, arrived)) return -1;
      device::fence_proxy_async_global();
    }
    return __popc(counted) + __popc(empties);
  }

  __device__ std::byte* target(const Step& step) const {
    if (part_ == kOwn) return params_.out + step.token * params_.out_stride;
    return view_.rail.local +
           view_.rail_layout.staged_row(step.source_node, step.token, params_.row_bytes);
  }
  // Among what a rank of this node pushes: see pushed_offset().
  __device__ std::int64_t place_of(const Step& step, int local) const {
    if (!params_.token_major) return step.token;
    return step.row -
           __ldcg(&params_.routing.rail_begins[step.source_node * topology_.locals + local]);
  }
  // Where a rank of this node has it.
  __device__ const std::byte* row_of(const Step& step, int local) const {
    if (local == topology_.local) return params_.expert_rows + step.row * params_.expert_stride;
    return rows_[local] + step.row * params_.row_bytes;
  }

  template <class Visit>
  __device__ void for_each_mate(const Visit& visit) const {
    const auto* words =
        reinterpret_cast<const std::uint64_t*>(view_.control.local + slice_words(view_, part_));
    for (int local = lane_.lane; local < topology_.locals; local += 32) {
      if (local == topology_.local) continue;
      visit(words + local, epoch_ * kSlices + next_.slice + 1,
            topology_.rank_at(topology_.node, local));
    }
  }
  __device__ bool take(bool there) {
    if (!__all_sync(device::kFullWarp, there)) return false;
    device::fence_proxy_async_global();
    ready_slices_ = next_.slice + 1;
    return true;
  }

  const CudaSumParams& params_;
  const LayerView& view_;
  const CudaTopology& topology_;
  Part part_;
  PairLane lane_;
  std::byte* const* rows_;
  std::uint64_t epoch_ = 0;
  FastDivmod by_slice_, by_source_, by_home_, by_node_;
  std::uint32_t items_;
  Claims claims_;
  Step next_;
  int ready_slices_ = params_.travel == Travel::sums_are_pushed ? 0 : kSlices, looks_ = 0;
};

// Where the expert rows of the other ranks of this node are, from their headers.
__device__ void find_rows(const LayerView& view, std::byte** rows) {
  const CudaTopology& topology = view.topology;
  const Received received(view);
  for (int local = int(threadIdx.x); local < topology.locals; local += int(blockDim.x)) {
    if (local == topology.local) continue;
    rows[local] =
        at_extent(view, local, received.header(topology.rank_at(topology.node, local)).rows);
  }
}

// Tells the ranks of the node of the slices that all blocks have pushed. The fences take time, so
// not the adding warps do it, but the feeder of one team for its block.
class SliceSignaller {
 public:
  __device__ SliceSignaller(const CudaSumParams& params, Part part, const Cut& cut, int teams)
      : view_(params.view), part_(part), cut_(cut), teams_(teams) {}

  // Tells of what is there. The feeding warp.
  __device__ void signal() {
    for (; signalled_ < reached(); ++signalled_) {
      if (threadIdx.x % 32 == 0 && runs(view_)) {
        signal_node(view_, &view_.state->slice_arrivals[signalled_], gridDim.x,
                    slice_words(view_, part_), epoch_of(view_) * kSlices + signalled_ + 1);
      }
      __syncwarp();
    }
  }
  // All slices, when this team has been fed the last mark.
  __device__ void finish() {
    while (signalled_ < kSlices) signal();
  }

 private:
  // The slices that all teams of the block have reached.
  __device__ std::uint32_t reached() {
    std::uint32_t least = kSlices;
    for (int team = 0; team < teams_; ++team) {
      least = min(least, row_sums::marks_of(Ring(ring_memory, cut_, team)));
    }
    return __shfl_sync(device::kFullWarp, least, 0);
  }

  const LayerView& view_;
  Part part_;
  const Cut& cut_;
  int teams_;
  std::uint32_t signalled_ = 0;
};

template <class T, bool kWeighted, int kLevels>
__global__ void __launch_bounds__(kTeam* teams_of(kLevels), 1)
    sum_kernel(const __grid_constant__ CudaSumParams params, const __grid_constant__ Cut cut,
               Part part) {
  const LayerView& view = params.view;
  WINNOW_BLOCK_SHARED(rows, std::byte* [kMaxLocals]);
  const int team = int(threadIdx.x) / kTeam;
  const Ring ring(ring_memory, cut, team);
  if (threadIdx.x % kTeam == 0) row_sums::begin(ring);
  // All of the block or none; with it, where the rows are. The kernel that pushes rows has waited
  // for the exchange, and is waited for at the end.
  const auto may_begin = [&] {
    if (params.travel != Travel::rows_are_pushed) device::wait_for_kernel_before();
    const bool runs_here = runs(view) && __ldcg(params.routing.placed) != 0;
    if (runs_here && params.travel == Travel::rows_are_read) find_rows(view, rows);
    const bool all_run = __syncthreads_and(runs_here) != 0;
    if (!all_run) device::wait_for_kernel_before();
    return all_run;
  };
  if (row_sums::adds()) {
    if (!may_begin()) return;
    row_sums::add_rows<T, kWeighted, kLevels>(ring);
  } else {
    // Dispatch wrote the routing and its weights: what comes first of them is read while the kernel
    // before runs. Weights of this call come from that kernel.
    if (kWeighted && params.weights_are_new) device::wait_for_kernel_before();
    Feeder feeder(ring);
    const std::uint32_t length = slice_length(params);
    Reductions<kWeighted, (kLevels > 2)> reductions(params, part, length, rows);
    if constexpr (kLevels == 1) {  // no sums are pushed
      if (!may_begin()) return;
      reductions.begin();
      while (reductions.any() && reductions.feed(feeder)) continue;
    } else {
      Pushes<kWeighted> pushes(params, part, length);
      SliceSignaller signaller(params, part, cut, teams_of(kLevels));
      if (!may_begin()) return;
      pushes.begin();
      reductions.begin();
      const bool signals = pushes.any() && team == 0;
      // In turns, so that the links are in use all the time; but sums that also wait for other
      // nodes come when nothing is left to push.
      for (bool pushing = pushes.any(), summing = reductions.any(); pushing || summing;) {
        if (pushing) {
          pushing = pushes.feed(feeder);
          if (signals && pushing) signaller.signal();
          if (signals && !pushing) signaller.finish();
        }
        if (!summing || (pushing && (kLevels > 2 || !reductions.ready()))) continue;
        if (!reductions.wait() || !reductions.feed(feeder)) break;
        summing = reductions.any();
      }
    }
    feeder.end();
  }
  if (params.travel == Travel::rows_are_pushed) device::wait_for_kernel_before();
  if (part == kOwn && params.travel == Travel::rows_are_read) finish(view);
}

using Kernel = void (*)(CudaSumParams, Cut, Part);

template <class T>
Kernel kernel_of(int levels, bool weighted) {
  if (levels == 1) return sum_kernel<T, false, 1>;
  if (levels == 2) return weighted ? sum_kernel<T, true, 2> : sum_kernel<T, false, 2>;
  return weighted ? sum_kernel<T, true, 3> : sum_kernel<T, false, 3>;
}
Kernel kernel_of(int levels, DType dtype, bool weighted) {
  switch (dtype) {
    case DType::f32:
      return kernel_of<float>(levels, weighted);
    case DType::f16:
      return kernel_of<__half>(levels, weighted);
    default:  // the checks let no other dtype in
      return kernel_of<__nv_bfloat16>(levels, weighted);
  }
}

// What a part's tokens need of row_sums.
int levels_of(const CudaSumParams& params, Part part) {
  if (part == kOwn && params.view.topology.nodes > 1) return 3;
  return params.token_major ? 1 : 2;
}

}  // namespace

int launch_sums(Part part, const CudaSumParams& params, int blocks, void* stream) {
  const int levels = levels_of(params, part);
  const int teams = teams_of(levels);
  const Kernel kernel = kernel_of(levels, params.dtype, params.weights.pairs != nullptr);
  // More rows at a time from several ranks hold each other up.
  const std::int64_t most =
      params.travel == Travel::rows_are_read ? std::int64_t{9} << 19 : INT64_MAX;
  const Cut cut = row_sums::cut_rows(params.row_bytes, teams, blocks, most);
  const int bytes = row_sums::shared_bytes(cut, teams);
  return device::launch_early(kernel, blocks, kTeam * teams, std::size_t(bytes),
                              static_cast<cudaStream_t>(stream), params, cut, part);
}

int load_sums() {
  for (const int levels : {1, 2, 3}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const bool weighted : {false, true}) {
        const Kernel kernel = kernel_of(levels, dtype, weighted);
        if (const int status = device::load_kernel(kernel, row_sums::kRingBytes);
            status != cudaSuccess) {
          return status;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace winnow::expert_parallel
