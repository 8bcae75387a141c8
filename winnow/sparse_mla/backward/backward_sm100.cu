// Backward of top-k sparse MLA attention, sm100: the launches.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/scratch.h"
#include "winnow/device/sm90/tensor_map.h"
#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/backward/backward_products_sm100.cuh"
#include "winnow/sparse_mla/backward/backward_split_launch.cuh"

namespace winnow::sparse_mla {

namespace {

namespace detail = backward_sm100_detail;
namespace split = backward_split_detail;
using detail::Params;

// A B200: 148 multiprocessors, and twice the rows_in_l2 of an H200, whose L2 is half as large; not
// measured.
constexpr split::SplitTarget kTarget{{"sparse_mla::backward", "sm100"}, 148, 49152, 15};
constexpr const device::Runtime& kRuntime = kTarget.runtime;

// Rows [outer, inner] of bf16 that are read through a tensor map, whose strides may not be smaller
// than what they step over, the outer one a multiple of the inner one. Other rows are first copied
// into the workspace.
struct MappedRows {
  const void* data;
  std::int64_t outer, inner, columns;
  std::int64_t outer_bytes, inner_bytes;

  static MappedRows of(const Rows<const void*>& rows, std::int64_t outer, std::int64_t inner,
                       std::int64_t columns) {
    MappedRows mapped{rows.data, outer, inner, columns, 2 * rows.stride0, 2 * rows.stride1};
    // The stride of a single row may be anything.
    if (inner <= 1) mapped.inner_bytes = 2 * columns;
    if (outer <= 1) mapped.outer_bytes = std::max<std::int64_t>(inner, 1) * mapped.inner_bytes;
    return mapped;
  }
  bool can_be_mapped() const {
    constexpr std::int64_t kLimit = std::int64_t{1} << 40;
    return inner_bytes >= 2 * columns && outer_bytes >= inner_bytes && outer_bytes < kLimit &&
           outer_bytes % inner_bytes == 0;
  }
  std::int64_t bytes() const { return outer * inner * columns * 2; }
  // The copy of these rows at `to`.
  MappedRows packed(void* to) const {
    return {to, outer, inner, columns, inner * columns * 2, columns * 2};
  }
};

// One thread for 16 bytes.
__global__ void pack_kernel(MappedRows from, char* to) {
  const std::int64_t at = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) * 16;
  if (at >= from.outer * from.inner * from.columns * 2) return;
  const std::int64_t row = at / (2 * from.columns), column = at - row * 2 * from.columns;
  const char* source = static_cast<const char*>(from.data) + row / from.inner * from.outer_bytes +
                       row % from.inner * from.inner_bytes + column;
  *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(source);
}

// The tensors that are read through maps.
struct Sources {
  MappedRows q, d_out, kv;
};
Sources sources_of(const BackwardParams& params) {
  const Problem& problem = params.problem;
  Sources all{MappedRows::of(problem.q, problem.s_q, problem.h_q, problem.d_qk),
              MappedRows::of(params.d_out, problem.s_q, problem.h_q, split::kValueColumns),
              MappedRows::of(problem.kv, problem.s_kv, 1, problem.d_qk)};
  // With s_kv = 0 nothing is gathered, but a map needs at least one row: it gets one of q.
  if (problem.s_kv == 0)
    all.kv = {problem.q.data, 1, 1, problem.d_qk, 2 * problem.d_qk, 2 * problem.d_qk};
  return all;
}

struct Layout : split::SplitLayout {
  std::int64_t packed[3];  // where the copies of q, d_out and kv begin; -1: read in place
};
Layout layout_of(const JointParams& params) {
  Layout layout{split::layout_of(params, kTarget), {}};
  const Sources sources = sources_of(params);
  const MappedRows* const all[] = {&sources.q, &sources.d_out, &sources.kv};
  for (int i = 0; i < 3; ++i) {
    layout.packed[i] = all[i]->can_be_mapped() ? -1 : layout.place(all[i]->bytes());
  }
  return layout;
}

// Copies the sources that cannot be mapped into the workspace. Returns all as the maps read them.
Sources pack(const JointParams& params, const Layout& layout, char* workspace,
             cudaStream_t stream) {
  Sources sources = sources_of(params);
  MappedRows* const all[] = {&sources.q, &sources.d_out, &sources.kv};
  for (int i = 0; i < 3; ++i) {
    if (layout.packed[i] < 0) continue;
    char* const to = workspace + layout.packed[i];
    split::launch_flat(kRuntime, pack_kernel, all[i]->bytes() / 16, stream, *all[i], to);
    *all[i] = all[i]->packed(to);
  }
  return sources;
}

constexpr auto kBf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Boxes of kBoxHeads x `columns` of the chunk's `count` queries, which begin at `first`.
CUtensorMap heads_map(const MappedRows& rows, std::int64_t first, std::int64_t count, int columns) {
  const auto swizzle = columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return device::tensor_map<3>(
      kRuntime, kBf16, static_cast<const char*>(rows.data) + first * rows.outer_bytes,
      {{static_cast<std::uint64_t>(rows.columns), 0, static_cast<std::uint32_t>(columns)},
       {static_cast<std::uint64_t>(rows.inner), static_cast<std::uint64_t>(rows.inner_bytes),
        detail::kBoxHeads},
       {static_cast<std::uint64_t>(count), static_cast<std::uint64_t>(rows.outer_bytes), 1}},
      swizzle);
}
CUtensorMap rows_map(const MappedRows& rows, int columns) {
  const auto swizzle = columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return device::tensor_map<2>(
      kRuntime, kBf16, rows.data,
      {{static_cast<std::uint64_t>(rows.columns), 0, static_cast<std::uint32_t>(columns)},
       {static_cast<std::uint64_t>(rows.outer), static_cast<std::uint64_t>(rows.outer_bytes), 1}},
      swizzle);
}

Params kernel_params(const JointParams& params, const Layout& layout, const Sources& sources,
                     char* workspace, std::int64_t first, std::int64_t count) {
  Params kernel{
      split::kernel_params(params, layout, workspace, first, count), {}, {}, {}, {}, {}, {}};
  kernel.q_map = heads_map(sources.q, first, count, 64);
  kernel.q_half_map = heads_map(sources.q, first, count, 32);
  kernel.d_out_map = heads_map(sources.d_out, first, count, 64);
  kernel.kv_map = rows_map(sources.kv, 64);
  kernel.kv_half_map = rows_map(sources.kv, 32);
  const std::int64_t images = 2 * layout.chunk * layout.tiles * layout.blocks;
  kernel.image_map = device::tensor_map<2>(
      kRuntime, kBf16, kernel.images,
      {{64, 0, 64}, {static_cast<std::uint64_t>(std::max<std::int64_t>(images, 1)) * 64, 128, 64}});
  return kernel;
}

void launch_pairs(void (*kernel)(Params), int pairs, int shared, const Params& params,
                  cudaStream_t stream) {
  kRuntime.allow_shared_memory(kernel, shared);
  kRuntime.check(device::launch_clusters(kernel, 2, dim3(static_cast<unsigned>(2 * pairs)),
                                         dim3(detail::kThreads), static_cast<std::size_t>(shared),
                                         stream, params),
                 "launch");
}

template <int kColumns>
void launch_dkv(const Params& params, std::int64_t s_kv, int pairs, cudaStream_t stream) {
  constexpr int kBytes = sizeof(detail::DkvLayout<kColumns>);
  if (params.fixed == nullptr) {
    launch_pairs(detail::dkv_kernel<kColumns, split::FloatDrain>, pairs, kBytes, params, stream);
    return;
  }
  kRuntime.launch(detail::head_norms_kernel, static_cast<unsigned>(params.queries * params.blocks),
                  32 * detail::kNormWarps, 0, stream, params);
  split::launch_settle(kRuntime, params, s_kv, stream);
  launch_pairs(detail::dkv_kernel<kColumns, split::FixedDrain>, pairs, kBytes, params, stream);
}

template <int kColumns>
void run(const JointParams& params, const Layout& layout, char* workspace, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int pairs = std::max(kRuntime.multiprocessors() / 2, 1);
  const split::Params all = split::kernel_params(params, layout, workspace, 0, 0);
  split::clear_sums(kRuntime, params, layout, all, stream);
  if (problem.s_q > 0 && problem.h_q > 0) {
    const Sources sources = pack(params, layout, workspace, stream);
    for (std::int64_t first = 0; first < problem.s_q; first += layout.chunk) {
      const Params chunk = kernel_params(params, layout, sources, workspace, first,
                                         std::min(layout.chunk, problem.s_q - first));
      kRuntime.launch(split::prepare_kernel<false>, static_cast<unsigned>(chunk.queries),
                      split::kPrepareThreads, 0, stream, static_cast<const split::Params&>(chunk));
      launch_pairs(detail::scores_kernel<kColumns>, pairs, sizeof(detail::ScoresLayout<kColumns>),
                   chunk, stream);
      launch_pairs(detail::dq_kernel<kColumns>, pairs, sizeof(detail::DqLayout<kColumns>), chunk,
                   stream);
      launch_dkv<kColumns>(chunk, problem.s_kv, pairs, stream);
    }
  }
  split::sum_sinks(kRuntime, params, all, stream);
  split::finish_rows(kRuntime, params, all, stream);
}

}  // namespace

std::int64_t backward_sm100_workspace_bytes(const BackwardParams& params) {
  return std::max<std::int64_t>(layout_of({params, params.problem}).bytes, 1);  // has an address
}

void backward_sm100(const BackwardParams& given, void* workspace, void* stream) {
  const JointParams params{given, given.problem};  // one source, a list
  const Layout layout = layout_of(params);
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, backward_sm100_workspace_bytes(given), queue);
  char* const memory = static_cast<char*>(scratch.data());
  if (params.problem.d_qk == 576) {
    run<576>(params, layout, memory, queue);
  } else {
    run<512>(params, layout, memory, queue);
  }
}

}  // namespace winnow::sparse_mla
