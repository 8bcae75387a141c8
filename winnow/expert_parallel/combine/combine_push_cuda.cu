// Pushes rows that combine reads from memory of their reducers' own: token-major rows, of which a
// rank has those of each other rank's tokens one behind the other. Writes leave more of a link to
// the rows than reads do, whose requests travel against the rows of others.
#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/combine/combine_sources.cuh"
#include "winnow/expert_parallel/cuda/claims.cuh"
#include "winnow/expert_parallel/cuda/row_pipe.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {
namespace {

using device::ceil_div;

// What the warps of a block do: one loads rows, one thread of another stores them, and one of the
// last tells of what has been written, whose fences would hold up the rows.
enum Warp { kLoads, kStores, kSignals, kWarps };

// Few large pieces, since each takes its time to begin; all but the ones that are being loaded may
// be on their way to another GPU.
constexpr int kStages = 6, kReading = 4;
static_assert(kReading < kStages);

// From the storing thread to the telling one: the marks whose rows have been written.
class Written {
 public:
  static constexpr std::uint32_t kMost = 32;
  struct Shared {
    int marks[kMost];
    std::uint32_t put, taken;
  };
  __device__ explicit Written(Shared& shared) : shared_(shared) {}
  // One thread; the block's barrier follows.
  __device__ void begin() { shared_.put = shared_.taken = 0; }
  __device__ void put(int mark) {
    const std::uint32_t number = shared_.put;
    while (number - device::ld_acquire_cta_shared(&shared_.taken) == kMost) continue;
    shared_.marks[number % kMost] = mark;
    device::st_release_cta_shared(&shared_.put, number + 1);
  }
  // Waits until there are some; visits all there are.
  template <class Visit>
  __device__ void take(const Visit& visit) {
    const std::uint32_t begin = shared_.taken;
    std::uint32_t end;
    while ((end = device::ld_acquire_cta_shared(&shared_.put)) == begin) continue;
    for (std::uint32_t number = begin; number != end; ++number) {
      visit(shared_.marks[number % kMost], number == begin);
    }
    device::st_release_cta_shared(&shared_.taken, end);
  }

 private:
  Shared& shared_;
};

// Where the rows are that this rank has of a rank's tokens.
struct Segment {
  std::int32_t begin, rows;
};
__device__ Segment segment_of(const CudaSumParams& params, Sources::Source source) {
  const int rank = params.view.topology.rank_at(source.node, source.local);
  const std::int32_t* begins = params.routing.source_begins + rank;
  return {begins[0], begins[1] - begins[0]};
}

// kPushedTogether rows for a source's tokens, from its row `first` on; each time another's.
struct Item {
  Sources::Source source;
  std::int64_t first;
};
__device__ Item item_at(const Sources& sources, std::uint32_t number) {
  return {sources.at(number % sources.count()),
          std::int64_t(number / sources.count()) * kPushedTogether};
}

// The loading warp.
__device__ void load_rows(const CudaSumParams& params, Part part, RowPipe& pipe) {
  const CudaTopology& topology = params.view.topology;
  const Sources sources(topology, part);
  const std::uint32_t lane = threadIdx.x % 32;
  int longest = 0;
  for (std::uint32_t i = lane; i < sources.count(); i += 32) {
    longest = max(longest, segment_of(params, sources.at(i)).rows);
  }
  longest = __reduce_max_sync(device::kFullWarp, longest);
  const std::int64_t items = ceil_div<std::int64_t>(longest, kPushedTogether) * sources.count();
  Claims claims(&params.view.state->claims[part == kOwn ? kPushOwnClaims : kPushOthersClaims]);
  claims.begin();
  for (std::uint32_t number = claims.next(); number < items; number = claims.next()) {
    const auto [source, first] = item_at(sources, number);
    const Segment segment = segment_of(params, source);
    const std::int64_t last = min(first + kPushedTogether, std::int64_t(segment.rows));
    if (first >= last) continue;
    std::byte* to = params.view.pushed.node[source.local] +
                    pushed_offset(topology, source.node, topology.local, params.max_tokens, first,
                                  params.row_bytes);
    const std::byte* from = params.expert_rows + (segment.begin + first) * params.expert_stride;
    const bool dense = params.expert_stride == params.row_bytes;
    const std::int64_t bytes = dense ? (last - first) * params.row_bytes : params.row_bytes;
    for (std::int64_t row = first; row < last; row += dense ? kPushedTogether : 1) {
      pipe.send(from, bytes, 0, lane == 0, to);
      from += params.expert_stride;
      to += params.row_bytes;
    }
    pipe.mark(int(number));
  }
  pipe.end();
}

// The telling thread.
__device__ void signal_reducers(const CudaSumParams& params, Part part, Written& written) {
  const LayerView& view = params.view;
  const CudaTopology& topology = view.topology;
  const Sources sources(topology, part);
  const std::uint64_t epoch = epoch_of(view);
  for (bool more = true; more;) {
    written.take([&](int mark, bool oldest) {
      if (oldest) __threadfence_system();
      more = mark >= 0;
      if (!more) return;
      const auto [source, first] = item_at(sources, std::uint32_t(mark));
      const std::int64_t word =
          view.control_layout.pushed_row(source.node, topology.locals, topology.local, first);
      device::st_relaxed_sys(
          reinterpret_cast<std::uint64_t*>(view.control.node[source.local] + word), epoch);
    });
  }
}

__global__ void __launch_bounds__(32 * kWarps, 1)
    push_rows(const __grid_constant__ CudaSumParams params, const __grid_constant__ PipeShape shape,
              Part part) {
  std::byte* const stages = device::dynamic_shared<128>();
  WINNOW_BLOCK_SHARED(pipe_memory, RowPipe::Shared);
  WINNOW_BLOCK_SHARED(written_memory, Written::Shared);
  RowPipe pipe(pipe_memory, stages, shape);
  Written written(written_memory);
  if (threadIdx.x == 0) pipe.begin(1), written.begin();
  device::wait_for_kernel_before();
  device::allow_next_kernel();  // the sums of what others push
  // All of the block or none.
  if (__syncthreads_or(!runs(params.view) || *params.routing.placed == 0)) return;
  const int warp = threadIdx.x / 32;
  if (warp == kLoads) {
    load_rows(params, part, pipe);
  } else if (threadIdx.x == 32 * kStores) {
    pipe.store<kReading>([&](int mark) { written.put(mark); });
    written.put(-1);
  } else if (threadIdx.x == 32 * kSignals) {
    signal_reducers(params, part, written);
  }
}

}  // namespace

int launch_push_rows(Part part, const CudaSumParams& params, int blocks, void* stream) {
  const PipeShape shape(kPushedTogether * params.row_bytes, kStages);
  return device::launch_early(push_rows, blocks, 32 * kWarps, std::size_t(shape.bytes()),
                              static_cast<cudaStream_t>(stream), params, shape, part);
}

int load_push_rows() { return device::load_kernel(push_rows, int(PipeShape::kBytes)); }

}  // namespace winnow::expert_parallel
