// Backward of top-k sparse MLA attention, sm90: the entries of a query with ranges of rows or two
// sources (backward_joint_sm90.h). Rows are numbered on from the first source to the second.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/core/row_limits.h"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/sparse_mla/gather_sm90.cuh"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

// What a query sees of ranges; 16 bytes that are loaded at once.
struct QueryRanges {
  std::int32_t begin, count, extra_begin, extra_count;

  __device__ __forceinline__ int rows() const { return count + extra_count; }
};
static_assert(sizeof(QueryRanges) == sizeof(int4));

// One source: a list or, with key_start, a range for each query.
struct JointSource {
  GatherView list;
  RangeView ranges;

  __device__ __forceinline__ bool dense() const { return ranges.key_start != nullptr; }
  __device__ __forceinline__ QueryRange range(std::int64_t query) const {
    return dense() ? query_range(list, ranges, query) : QueryRange{0, 0};
  }
  __device__ __forceinline__ int entries(std::int64_t query) const {  // of the list
    return dense() ? 0 : query_entries(list, query);
  }
};

// Of the sources of a problem, queries from `first` on, numbered from 0.
inline JointSource joint_source(const Problem& problem, const Source& source, std::int64_t first) {
  Problem alone;
  static_cast<Source&>(alone) = source;
  alone.q = problem.q;
  JointSource view{gather_view(alone), range_view(alone)};
  const auto skip = [first](const std::int32_t*& data, std::int64_t stride) {
    if (data != nullptr) data += first * stride;
  };
  skip(view.list.indices, view.list.indices_stride);
  skip(view.list.topk_length, view.list.topk_length_stride);
  skip(view.ranges.key_start, view.ranges.key_start_stride);
  skip(view.ranges.key_end, view.ranges.key_end_stride);
  view.list.q_start += first;
  return view;
}

// The sources, and what is found out of each query before its entries are wanted.
struct SourcesParams {
  JointSource first, extra;
  QueryRanges* ranges;    // [queries]; null where both sources are lists
  std::int32_t* lengths;  // [queries]: all entries, those of ranges and the valid ones of lists
};

inline SourcesParams sources_params(const Problem& problem, std::int64_t first_query) {
  return {joint_source(problem, problem, first_query),
          joint_source(problem, problem.extra, first_query), nullptr, nullptr};
}

__device__ __forceinline__ QueryRanges ranges_of(const SourcesParams& p, std::int64_t query) {
  const QueryRange range = p.first.range(query), extra = p.extra.range(query);
  const auto rows = static_cast<std::int32_t>(p.first.list.s_kv);
  return {range.begin, range.end - range.begin, rows + extra.begin, extra.end - extra.begin};
}

// The entries of a query's list: their number, and loads of them, which are rows that the query
// sees where they are below visible(): load(first, lane) is entry first + lane.
template <class Query>
struct OneList {
  const GatherView& list;
  Query query;

  __device__ __forceinline__ int count() const { return query_entries(list, query); }
  __device__ __forceinline__ std::uint32_t visible() const { return visible_rows(list, query); }
  __device__ __forceinline__ auto loads() const {
    return [indices = list.indices + query * list.indices_stride](int first, int lane = 0) {
      return __ldg(indices + first + lane);
    };
  }
};

// The same of two sources, those of the first one first.
struct ListedEntries {
  const SourcesParams& p;
  std::int64_t query;
  int first_entries, extra_entries;  // one reading of the lengths, whoever rewrites them

  __device__ __forceinline__ ListedEntries(const SourcesParams& sources, std::int64_t of_query)
      : p(sources),
        query(of_query),
        first_entries(sources.first.entries(of_query)),
        extra_entries(sources.extra.entries(of_query)) {}
  __device__ __forceinline__ int count() const { return first_entries + extra_entries; }
  // Entries that the query does not see are loaded as -1.
  __device__ __forceinline__ std::uint32_t visible() const { return std::uint32_t{1} << 31; }
  __device__ __forceinline__ auto loads() const {
    const std::int32_t* const indices = p.first.list.indices + query * p.first.list.indices_stride;
    const std::int32_t* const extra = p.extra.list.indices + query * p.extra.list.indices_stride;
    return [indices, extra, first_entries = first_entries,
            visible = visible_rows(p.first.list, query),
            extra_visible = visible_rows(p.extra.list, query),
            rows = static_cast<std::int32_t>(p.first.list.s_kv)](int at, int lane = 0) {
      const int entry = at + lane;
      const bool first = entry < first_entries;
      const std::int32_t index = __ldg(first ? indices + entry : extra + (entry - first_entries));
      if (static_cast<std::uint32_t>(index) >= (first ? visible : extra_visible)) return -1;
      return first ? index : rows + index;
    };
  }
};

// What kernels with ranges get beside the parameters of those without.
template <class Params>
struct WithRanges : Params {
  const QueryRanges* query_ranges;  // [queries]
};
template <class Params>
inline constexpr bool kHasRanges = requires(Params p) { p.query_ranges; };

// The entries of a query, those of its ranges first.
struct RangedEntries {
  QueryRanges ranges;
  const std::int32_t* list;  // what follows, all valid

  __device__ __forceinline__ RangedEntries(const QueryRanges* from, const std::int32_t* valid)
      : list(valid) {
    const int4 words = __ldg(reinterpret_cast<const int4*>(from));
    ranges = {words.x, words.y, words.z, words.w};
  }
  // The row of an entry, which is below the query's count if it counts; else -1.
  __device__ __forceinline__ std::int32_t load(int entry, bool counts) const {
    const int extra = entry - ranges.count, listed = entry - ranges.rows();
    const int row = extra < 0 ? ranges.begin + entry : ranges.extra_begin + extra;
    return device::load_if(counts && listed >= 0, list + listed, counts ? row : -1);
  }
};

// load_tile() of them.
__device__ __forceinline__ TileEntries load_tile(const RangedEntries& rows, int tile, int entries,
                                                 int lane) {
  const int first = tile * kTileRows + lane;
  return {rows.load(first, first < entries), rows.load(first + 32, first + 32 < entries)};
}

// Copies rows of 16 * pieces bytes. Strides count bytes.
inline constexpr int kCopyThreads = 256;
static __global__ void __launch_bounds__(kCopyThreads)
    copy_rows_kernel(const char* from, std::int64_t from_stride, char* to, std::int64_t to_stride,
                     std::int64_t rows, int pieces) {
  const std::int64_t at = blockIdx.x * std::int64_t{kCopyThreads} + threadIdx.x;
  if (at >= rows * pieces) return;
  const std::int64_t row = at / pieces, piece = at % pieces;
  *reinterpret_cast<uint4*>(to + row * to_stride + piece * 16) =
      __ldg(reinterpret_cast<const uint4*>(from + row * from_stride + piece * 16));
}

[[maybe_unused]] static void copy_rows(const device::Runtime& runtime, const void* from,
                                       std::int64_t from_stride, void* to, std::int64_t to_stride,
                                       std::int64_t rows, std::int64_t bytes, cudaStream_t stream) {
  const std::int64_t pieces = bytes / 16;
  if (rows == 0) return;
  runtime.launch(copy_rows_kernel,
                 static_cast<unsigned>((rows * pieces + kCopyThreads - 1) / kCopyThreads),
                 kCopyThreads, 0, stream, static_cast<const char*>(from), from_stride,
                 static_cast<char*>(to), to_stride, rows, static_cast<int>(pieces));
}

}  // namespace winnow::sparse_mla
