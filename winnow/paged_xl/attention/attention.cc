#include "winnow/paged_xl/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "winnow/core/interrupt.h"
#include "winnow/core/on_host.h"
#include "winnow/core/read_once.h"
#include "winnow/cpu/entry.h"
#include "winnow/paged_xl/attention/attention_contract.h"
#include "winnow/paged_xl/attention/attention_impl.h"

namespace winnow::paged_xl {
namespace {

// Tokens that a block table has room for.
std::int64_t slots_of_table(const AttentionArgs& args, std::int64_t block_size) {
  const std::int64_t blocks = args.block_tables.size(1);
  // It may claim more slots than 64 bits count if its stride is 0; lengths are 32-bit anyhow.
  return blocks > INT32_MAX ? INT32_MAX : blocks * block_size;
}

}  // namespace

void check_caches(const Check& check, const AttentionArgs& args, AttentionParams& params) {
  const std::int64_t num_heads = args.query.size(1), head_size = args.query.size(2);
  params.cache =
      check_cache(check, args.key_cache, args.value_cache, args.query.dtype(), args.query.device());
  check.that(params.cache.head_size == head_size, "value_cache",
             "head_size " + std::to_string(head_size) + " as in query",
             std::to_string(params.cache.head_size));
  const std::int64_t kv_heads = params.cache.num_kv_heads;
  check.that(kv_heads > 0 ? num_heads % kv_heads == 0 : num_heads == 0, "key_cache",
             "num_kv_heads that divides num_heads = " + std::to_string(num_heads),
             std::to_string(kv_heads));
}

void check_position_term(const Check& check, const AttentionArgs& args) {
  const bool fused = args.pos_bias_v.present() || args.r.present();
  check.that(args.matrix_bd.present() != fused, "matrix_bd",
             "either matrix_bd or pos_bias_v with r", fused ? "both" : "neither");
  if (!fused) check_matrix_bd(check, args.matrix_bd, args.query);
}

namespace {

struct Attention {
  using Args = AttentionArgs;
  using Params = AttentionParams;
  static constexpr const auto& kContract = kAttention;
  static constexpr auto kCpu = &CpuKernels::paged_xl_attention;
  static constexpr bool kNeedsWorkspace = false;

  static Params check_args(const Args& args) {
    Params params;
    kAttention.check(args, params);
    params.num_seqs = args.query.size(0);
    params.num_heads = args.query.size(1);
    params.pos_bias_u = pos_bias_of(args.pos_bias_u);
    if (args.matrix_bd.present()) {
      params.matrix_bd = rows_of<const void*>(args.matrix_bd, 0, 1);
      params.matrix_bd_dtype = args.matrix_bd.dtype();
    } else {
      params.pos_bias_v = pos_bias_of(args.pos_bias_v);
      params.r = rows_of<const void*>(args.r, 0, 1);
    }
    params.context_lens = static_cast<const std::int32_t*>(args.context_lens.data());
    params.scale = round_to_accumulator(
        args.query.dtype(), args.scale.value_or(1.0 / std::sqrt(double(args.query.size(2)))));
    params.query = rows_of<const void*>(args.query, 0, 1);
    params.key = rows_of<const void*>(args.key_cache, 0, 1);
    params.value = rows_of<const void*>(args.value_cache, 0, 1);
    params.block_tables = rows_of<const std::int32_t*>(args.block_tables, 0);
    params.max_context =
        std::min(slots_of_table(args, params.cache.block_size),
                 args.matrix_bd.present() ? args.matrix_bd.size(2) : args.r.size(1));
    params.out = rows_of<void*>(args.out, 0, 1);
    params.lse = rows_of<void*>(args.lse, 0);
    return params;
  }
  static std::span<const Backend> backends(const Args&) { return kPortable; }
  // What the kernels hold in a grid dimension or 32 bits.
  static void check_for_gpu(const Check& check, const Args&, const Params& params, Backend) {
    constexpr std::int64_t kLimit = 65535;
    const std::int64_t num_blocks = params.cache.num_blocks;
    if (params.num_seqs <= kLimit && params.num_heads <= kLimit && num_blocks <= INT32_MAX) return;
    check.unsupported(
        "cuda: want num_seqs and num_heads up to 65535 and num_blocks below 2^31, got " +
        std::to_string(params.num_seqs) + ", " + std::to_string(params.num_heads) + " and " +
        std::to_string(num_blocks));
  }
  static bool empty(const Args& args, const Params&) { return args.out.numel() == 0; }
  static std::int64_t workspace_bytes(const Params& params, Backend) {
    return attention_cuda_workspace_bytes(params);
  }
  // Lengths and numbers of blocks.
  static void check_contents(const Check& check, const Args& args, const Params& params,
                             const RunOptions& options) {
    const Device device = args.query.device();
    if (!checks_contents(kAttention.operation, device, options)) return;
    const std::int64_t table = args.block_tables.size(1), block_size = params.cache.block_size;
    const OnHost<std::int32_t> context_lens(params.context_lens, params.num_seqs, device,
                                            options.stream);
    check_lengths(check, context_lens.data(), params.num_seqs, slots_of_table(args, block_size),
                  "block_tables holds " + std::to_string(table) + " blocks of " +
                      std::to_string(block_size) + " slots");
    if (args.matrix_bd.present()) {
      check_lengths(check, context_lens.data(), params.num_seqs, args.matrix_bd.size(2),
                    "matrix_bd has that many columns");
    } else {
      check_lengths(check, context_lens.data(), params.num_seqs, args.r.size(1),
                    "r holds that many distances");
    }
    Interrupts interrupts;  // sequences may share a table of millions of blocks
    for (std::int64_t s = 0; s < params.num_seqs; ++s) {
      // Another thread may have changed the length since check_lengths() saw it.
      const std::int64_t needed = params.cache.blocks_for(
          std::clamp<std::int64_t>(read_once(context_lens.data() + s), 0, params.max_context));
      if (needed == 0) continue;
      const OnHost<std::int32_t> row(params.block_tables.data + params.block_tables.offset(s),
                                     needed, device, options.stream);
      for (std::int64_t b = 0; b < needed; ++b) {
        interrupts.step();
        const std::int32_t block = read_once(row.data() + b);
        if (block >= 0 && block < params.cache.num_blocks) continue;
        check.that(false, "block_tables",
                   "a block of [0, " + std::to_string(params.cache.num_blocks) +
                       ") for each of the " + std::to_string(needed) + " blocks that sequence " +
                       std::to_string(s) + " needs",
                   std::to_string(block) + " at position " + std::to_string(b));
      }
    }
  }
  static void run_on_gpu(const Params& params, Backend, void* workspace, void* stream) {
    attention_cuda(params, workspace, stream);
  }
};

}  // namespace

Backend attention(const AttentionArgs& args, const RunOptions& options) {
  return enter<Attention>(args, options);
}

std::int64_t attention_workspace_bytes(const AttentionArgs& args, const RunOptions& options) {
  return workspace_bytes_of<Attention>(args, options);
}

}  // namespace winnow::paged_xl
