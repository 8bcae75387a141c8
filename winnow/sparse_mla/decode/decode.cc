#include "winnow/sparse_mla/decode/decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "winnow/cpu/entry.h"
#include "winnow/sparse_mla/decode/decode_contract.h"
#include "winnow/sparse_mla/decode/decode_impl.h"

namespace winnow::sparse_mla {
namespace {

template <class Pointer, class View>
Heads<Pointer> heads_of(const View& view) {
  if (!view.present()) return {};
  return {static_cast<Pointer>(view.data()), view.stride(0), view.stride(1), view.stride(2)};
}

// The names of a cache's three arguments.
struct ChosenNames {
  std::string_view cache, indices, topk_length;
};

Rows<const std::int32_t*> check_lengths(const Check& check, const DecodeArgs& args,
                                        std::string_view name, const ConstTensorView& lengths) {
  const Dim sizes[] = {{"b", args.q.size(0)}, {"s_q", args.q.size(1)}};
  const bool of_queries = lengths.rank() == 2;
  if (!of_queries) check.rank(name, lengths, 1, "[b], or 2 dimensions [b, s_q]");
  check.shape(name, lengths, std::span(sizes, of_queries ? 2 : 1));
  check.dtype(name, lengths, {DType::i32});
  check.device(name, lengths, args.q.device());
  check.aligned(name, lengths, size_of(DType::i32));  // of any strides: read one by one
  return rows_of<const std::int32_t*>(lengths, 0, of_queries ? 1 : -1);
}

ChosenRows check_chosen(const Check& check, const DecodeArgs& args, const ChosenNames& names,
                        const ConstTensorView& cache, const ConstTensorView& indices,
                        const ConstTensorView& topk_length) {
  const Device device = args.q.device();
  const Dim b{"b", args.q.size(0)}, s_q{"s_q", args.q.size(1)};
  ChosenRows chosen;
  chosen.cache = check_cache(check, names.cache, cache, args.format, device);
  check.rank(names.indices, indices, 3, "[b, s_q, topk]");
  chosen.topk = indices.size(2);
  check.input(names.indices, indices, {b, s_q, {"topk", chosen.topk}}, {DType::i32}, device);
  chosen.indices = rows_of<const std::int32_t*>(indices, 0, 1);
  if (topk_length.present()) {
    chosen.topk_length = check_lengths(check, args, names.topk_length, topk_length);
  }
  return chosen;
}

ChosenRows check_paged(const Check& check, const DecodeArgs& args) {
  ChosenRows all;
  all.cache = check_cache(check, "cache", args.cache, args.format, args.q.device());
  const std::pair<std::string_view, ConstTensorView> others[] = {
      {"indices", args.indices},
      {"topk_length", args.topk_length},
      {"extra_cache", args.extra_cache},
      {"extra_indices", args.extra_indices},
      {"extra_topk_length", args.extra_topk_length}};
  for (const auto& [name, view] : others) {
    check.that(!view.present(), name, "none, with block_tables and context_lens", "a tensor");
  }
  check.rank("block_tables", args.block_tables, 2, "[b, n]");
  const std::int64_t n = args.block_tables.size(1), block_size = all.cache.block_size;
  check.input("block_tables", args.block_tables, {{"b", args.q.size(0)}, {"n", n}}, {DType::i32},
              args.q.device());
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  check.that(block_size == 0 || n <= kMost / block_size, "block_tables",
             "n * block_size up to 2^31 - 1",
             std::to_string(n) + " blocks of " + std::to_string(block_size));
  all.paged = true;
  all.topk = n * block_size;
  all.indices = rows_of<const std::int32_t*>(args.block_tables, 0);
  all.topk_length = check_lengths(check, args, "context_lens", args.context_lens);
  if (args.context_lens.rank() == 1 && args.causal) all.step = args.q.size(1);
  return all;
}

}  // namespace

void check_chosen_rows(const Check& check, const DecodeArgs& args, DecodeParams& params) {
  if (args.block_tables.present() || args.context_lens.present()) {
    params.chosen = check_paged(check, args);
  } else {
    params.chosen = check_chosen(check, args, {"cache", "indices", "topk_length"}, args.cache,
                                 args.indices, args.topk_length);
    check.that(args.causal, "causal", "true, without context_lens", "false");
  }
  params.d_qk = params.chosen.cache.columns;
  const Dim b{"b", args.q.size(0)}, s_q{"s_q", args.q.size(1)}, h_q{"h_q", args.q.size(2)};
  check.input("q", args.q, {b, s_q, h_q, {"d_qk", params.d_qk}}, {DType::bf16}, args.q.device());
}

void check_extra_rows(const Check& check, const DecodeArgs& args, DecodeParams& params) {
  if (args.extra_cache.present() || args.extra_indices.present()) {
    const ChosenNames names{"extra_cache", "extra_indices", "extra_topk_length"};
    params.extra = check_chosen(check, args, names, args.extra_cache, args.extra_indices,
                                args.extra_topk_length);
    check.that(params.extra.cache.columns == params.d_qk, "extra_cache",
               "rows of " + std::to_string(params.d_qk) + " columns as in cache",
               std::to_string(params.extra.cache.columns));
  } else {
    check.that(!args.extra_topk_length.present(), "extra_topk_length", "none, without extra_cache",
               "a tensor");
  }
}

void check_tensor_scales(const Check& check, const DecodeArgs& args) {
  const std::pair<std::string_view, ConstTensorView> scales[] = {{"q_scale", args.q_scale},
                                                                 {"kv_scale", args.kv_scale}};
  for (const auto& [name, view] : scales) {
    check.that(!view.present() || args.format == CacheFormat::fp8_576, name,
               "none, but for the format fp8_576", "a tensor");
  }
}

void check_decode_scale(const Check& check, const DecodeArgs& args, DecodeParams& params) {
  const double scale = args.scale.value_or(1.0 / std::sqrt(double(params.d_qk)));
  params.scale = static_cast<float>(scale);
  check.finite("scale", scale, DType::f32);
}

namespace {

struct Decode {
  using Args = DecodeArgs;
  using Params = DecodeParams;
  static constexpr const auto& kContract = kDecode;
  static constexpr auto kCpu = &CpuKernels::sparse_mla_decode;
  static constexpr bool kNeedsWorkspace = true;

  static Params check_args(const Args& args) {
    Params params;
    params.b = args.q.size(0);
    params.s_q = args.q.size(1);
    params.h_q = args.q.size(2);
    params.format = args.format;
    params.batch_invariant = args.batch_invariant;
    params.in_list_order = args.in_list_order;
    params.lse_of_nothing = lse_of_nothing(args);
    kDecode.check(args, params);
    params.q = heads_of<const void*>(args.q);
    params.attn_sink = rows_of<const float*>(args.attn_sink, 0);
    params.q_scale = static_cast<const float*>(args.q_scale.data());
    params.kv_scale = static_cast<const float*>(args.kv_scale.data());
    params.out = heads_of<void*>(args.out);
    params.lse = heads_of<float*>(args.lse);
    return params;
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params,
                            Backend backend) {
    constexpr std::int64_t kAlignment = 16;
    check.aligned("q", args.q, kAlignment);
    check.aligned("out", args.out, kAlignment);
    check_cache_for_gpu(check, "cache", args.cache, args.format);
    if (args.extra_cache.present()) {
      check_cache_for_gpu(check, "extra_cache", args.extra_cache, args.format);
    }
    if (params.format == CacheFormat::fp8_576 &&
        (backend != Backend::sm90 || !params.chosen.paged)) {
      check.unsupported(std::string(to_string(backend)) +
                        ": the format fp8_576 is for sm90 with block_tables");
    }
    if (backend == Backend::sm90 && params.chosen.paged && params.d_qk != 576) {
      check.unsupported("sm90: want rows of 576 columns with block_tables, got " +
                        std::to_string(params.d_qk));
    }
    // What the kernels count in 32 bits.
    constexpr std::int64_t kLimit = std::int64_t{1} << 23, kRowsLimit = std::int64_t{1} << 30;
    const auto at_least_1 = [](std::int64_t size) { return std::max<std::int64_t>(size, 1); };
    if (params.chosen.topk <= kLimit && params.extra.topk <= kLimit && params.b <= kLimit &&
        params.s_q <= kLimit / at_least_1(params.b) &&
        params.h_q <= kRowsLimit / at_least_1(params.b * params.s_q)) {
      return;
    }
    check.unsupported(
        std::string(to_string(backend)) +
        ": want topk, extra_topk and b * s_q up to 2^23, and b * s_q * h_q up to 2^30, got "
        "topk " +
        std::to_string(params.chosen.topk) + ", extra_topk " + std::to_string(params.extra.topk) +
        ", b " + std::to_string(params.b) + ", s_q " + std::to_string(params.s_q) + ", h_q " +
        std::to_string(params.h_q));
  }
  static bool empty(const Args& args, const Params&) { return args.out.numel() == 0; }
  static std::int64_t workspace_bytes(const Params& params, Backend backend) {
    return backend == Backend::sm90 ? decode_sm90_workspace_bytes(params)
                                    : decode_cuda_workspace_bytes(params);
  }
  static void run_on_gpu(const Params& params, Backend backend, void* workspace, void* stream) {
    (backend == Backend::sm90 ? decode_sm90 : decode_cuda)(params, workspace, stream);
  }
};

}  // namespace

Backend decode(const DecodeArgs& args, const RunOptions& options) {
  return enter<Decode>(args, options);
}

std::int64_t decode_workspace_bytes(const DecodeArgs& args, const RunOptions& options) {
  return workspace_bytes_of<Decode>(args, options);
}

}  // namespace winnow::sparse_mla
