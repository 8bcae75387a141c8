// libFuzzer target: random tensor descriptors through the entry point of every operation, and
// random bytes through the text reader. Whatever comes in, the answer is a result or an Error that
// names the argument.
#include <cstddef>
#include <cstdint>
#include <optional>

#include "tools/winnow/demo/text_reader.h"
#include "tools/winnow/fuzz/tensors.h"

#include "winnow/core/error.h"
#include "winnow/winnow.h"

namespace {

using winnow::ConstTensorView;
using winnow::DType;
using winnow::TensorView;
using winnow::fuzz::attempt;
using winnow::fuzz::Bytes;
using winnow::fuzz::Tensors;

std::optional<std::int64_t> maybe(Bytes& bytes) {
  if (!bytes.flag()) return {};
  return bytes.number();
}

void fuzz_paged_cache(Bytes& bytes) {
  using winnow::sparse_mla::CacheFormat;
  const std::int64_t b = bytes.number(), s_q = bytes.number(), h = bytes.number();
  const std::int64_t topk = bytes.number(), blocks = bytes.number(), block_size = bytes.number();
  const auto format = static_cast<CacheFormat>(bytes.take<std::uint8_t>() % 3);
  const bool plain = format == CacheFormat::bf16;
  const std::int64_t columns = format == CacheFormat::fp8_584 || bytes.flag() ? 512 : 576;
  const std::int64_t row = plain ? columns : format == CacheFormat::fp8_584 ? 584 : 656;
  Tensors tensor(bytes);
  const auto cache = [&] {
    return tensor(plain ? DType::bf16 : DType::u8, {blocks, block_size, 1, row});
  };
  attempt([&] {
    winnow::sparse_mla::decode({.q = tensor(DType::bf16, {b, s_q, h, columns}),
                                .cache = cache(),
                                .indices = tensor(DType::i32, {b, s_q, topk}),
                                .topk_length = tensor(DType::i32, {b}),
                                .extra_cache = bytes.flag() ? cache() : TensorView(),
                                .extra_indices = tensor(DType::i32, {b, s_q, topk}),
                                .attn_sink = tensor(DType::f32, {h}),
                                .format = format,
                                .out = tensor(DType::bf16, {b, s_q, h, 512}),
                                .lse = tensor(DType::f32, {b, s_q, h})});
  });
  attempt([&] {
    winnow::sparse_mla::decode(
        {.q = tensor(DType::bf16, {b, s_q, h, columns}),
         .cache = cache(),
         .block_tables = tensor(DType::i32, {b, topk}),
         .context_lens = bytes.flag() ? tensor(DType::i32, {b, s_q}) : tensor(DType::i32, {b}),
         .format = format,
         .out = tensor(DType::bf16, {b, s_q, h, 512}),
         .lse = tensor(DType::f32, {b, s_q, h})});
  });
  attempt([&] {
    winnow::sparse_mla::store({.rows = tensor(DType::bf16, {b, columns}),
                               .slots = tensor(bytes.flag() ? DType::i64 : DType::i32, {b}),
                               .format = format,
                               .cache = cache()});
  });
  const std::int64_t d = bytes.flag() ? 128 : 64;
  attempt([&] {
    winnow::indexer::scores_paged(
        {.q = tensor(DType::f8_e4m3, {b, s_q, h, d}),
         .pages = tensor(DType::u8, {blocks, 64 * (d + 4)}),
         .weights = tensor(DType::f32, {b, s_q, h}),
         .block_tables = tensor(DType::i32, {b, block_size}),
         .context_lens = bytes.flag() ? tensor(DType::i32, {b, s_q}) : tensor(DType::i32, {b}),
         .clean = bytes.flag(),
         .scores = tensor(DType::f32, {b, s_q, topk})});
  });
  attempt([&] {
    winnow::indexer::topk_paged(
        {.q = tensor(DType::f8_e4m3, {b, s_q, h, d}),
         .pages = tensor(DType::u8, {blocks, 64 * (d + 4)}),
         .weights = tensor(DType::f32, {b, s_q, h}),
         .block_tables = tensor(DType::i32, {b, block_size}),
         .context_lens = bytes.flag() ? tensor(DType::i32, {b, s_q}) : tensor(DType::i32, {b}),
         .positions = bytes.flag(),
         .indices = tensor(DType::i32, {b, s_q, topk}),
         .length = tensor(DType::i32, {b, s_q}),
         .scores = tensor(DType::f32, {b, s_q, topk})});
  });
}

void fuzz_sparse_mla(Bytes& bytes) {
  const std::int64_t s_q = bytes.number(), h_q = bytes.number(), s_kv = bytes.number();
  const std::int64_t topk = bytes.number(), d_qk = bytes.flag() ? 512 : 576;
  const auto dtype = static_cast<DType>(bytes.take<std::uint8_t>() % 3);
  Tensors tensor(bytes);
  const TensorView q = tensor(dtype, {s_q, h_q, d_qk}), kv = tensor(dtype, {s_kv, 1, d_qk});
  const TensorView indices = tensor(DType::i32, {s_q, 1, topk});
  const TensorView length = tensor(DType::i32, {s_q}), sink = tensor(DType::f32, {h_q});
  const TensorView out = tensor(dtype, {s_q, h_q, 512}), lse = tensor(DType::f32, {s_q, h_q});
  const TensorView dq = tensor(dtype, {s_q, h_q, d_qk}), dkv = tensor(dtype, {s_kv, 1, d_qk});
  const std::optional<std::int64_t> q_start = maybe(bytes);
  const std::int64_t k_stride = bytes.number();
  const auto only = [&](bool wanted, DType of, std::vector<std::int64_t> shape) {
    return wanted ? tensor(of, std::move(shape)) : TensorView();
  };
  // Ranges stand for all rows, of which a megabyte has any number where they share memory.
  const auto few_rows = [](const TensorView& rows) {
    return !rows.present() || rows.rank() == 0 || rows.size(0) < 4096;
  };
  const bool extra = bytes.flag(), range = bytes.flag() && few_rows(kv);
  const std::int64_t s_extra = bytes.number(), extra_topk = bytes.number();
  const TensorView extra_kv = only(extra, dtype, {s_extra, 1, d_qk});
  const bool extra_range = bytes.flag() && few_rows(extra_kv);
  const TensorView start = only(range || extra_range, DType::i32, {s_q});
  const TensorView end = only(range || extra_range, DType::i32, {s_q});
  const TensorView extra_indices = only(extra && !extra_range, DType::i32, {s_q, 1, extra_topk});
  const TensorView attn_sum = tensor(DType::f32, {s_q, range ? s_kv : topk});
  const TensorView extra_sum = only(extra, DType::f32, {s_q, extra_range ? s_extra : extra_topk});
  const TensorView dextra_kv = only(extra, dtype, {s_extra, 1, d_qk});
  const auto with_inputs = [&](auto args) {
    args.q = q;
    args.kv = kv;
    if (range) {
      args.key_start = start;
      args.key_end = end;
    } else {
      args.indices = indices;
      args.topk_length = length;
    }
    args.q_start = q_start;
    args.k_stride = k_stride;
    args.extra_kv = extra_kv;
    args.extra_indices = extra_indices;
    if (extra && extra_range) args.extra_key_start = args.extra_key_end = end;
    if (extra) args.extra_k_stride = k_stride;
    return args;
  };
  winnow::sparse_mla::ForwardArgs forward{.out = out, .lse = lse};
  winnow::sparse_mla::BackwardArgs backward{
      .out = out, .lse = lse, .d_out = out, .dq = dq, .dkv = dkv, .dextra_kv = dextra_kv};
  forward.attn_sink = backward.attn_sink = sink;
  attempt([&] { winnow::sparse_mla::forward(with_inputs(forward)); });
  attempt([&] {
    winnow::sparse_mla::distribution(with_inputs(winnow::sparse_mla::DistributionArgs{
        .lse = lse, .attn_sum = attn_sum, .extra_attn_sum = extra_sum}));
  });
  attempt([&] { winnow::sparse_mla::backward(with_inputs(backward)); });
}

void fuzz_indexer(Bytes& bytes) {
  const std::int64_t s_q = bytes.number(), h = bytes.number(), s_k = bytes.number();
  const std::int64_t topk = bytes.number(), d = bytes.flag() ? 128 : 64, k_stride = bytes.number();
  const auto dtype = static_cast<DType>(bytes.take<std::uint8_t>() % 4);
  const bool listed = bytes.flag();
  const std::optional<std::int64_t> q_start = maybe(bytes);
  Tensors tensor(bytes);
  const TensorView q = tensor(dtype, {s_q, h, d}), k = tensor(dtype, {s_k, d});
  const TensorView weights = tensor(bytes.flag() ? DType::f32 : DType::bf16, {s_q, h});
  const TensorView k_scale = dtype == DType::f8_e4m3 ? tensor(DType::f32, {s_k}) : TensorView();
  const TensorView start = bytes.flag() ? tensor(DType::i32, {s_q}) : TensorView();
  const TensorView end = bytes.flag() ? tensor(DType::i32, {s_q}) : TensorView();
  const TensorView rows = listed ? tensor(DType::i32, {s_q, topk}) : TensorView();
  const std::int64_t columns = listed ? topk : s_k;
  const auto ties = bytes.flag() ? winnow::indexer::Ties::larger : winnow::indexer::Ties::smaller;
  const auto with_inputs = [&](auto args) {
    args.q = q;
    args.k = k;
    args.weights = weights;
    args.k_scale = k_scale;
    args.key_start = start;
    args.key_end = end;
    args.q_start = q_start;
    args.k_stride = k_stride;
    return args;
  };
  attempt([&] {
    winnow::indexer::topk(
        with_inputs(winnow::indexer::TopkArgs{.ties = ties,
                                              .indices = tensor(DType::i32, {s_q, topk}),
                                              .length = tensor(DType::i32, {s_q}),
                                              .scores = tensor(DType::f32, {s_q, topk})}));
  });
  attempt([&] {
    winnow::indexer::scores(with_inputs(winnow::indexer::ScoresArgs{
        .indices = rows, .scores = tensor(DType::f32, {s_q, columns})}));
  });
  attempt([&] {
    const DType gradient = bytes.flag() && dtype != DType::f8_e4m3 ? dtype : DType::f32;
    winnow::indexer::backward(
        with_inputs(winnow::indexer::BackwardArgs{.indices = rows,
                                                  .d_scores = tensor(DType::f32, {s_q, columns}),
                                                  .dq = tensor(gradient, {s_q, h, d}),
                                                  .dk = tensor(gradient, {s_k, d}),
                                                  .d_weights = tensor(DType::f32, {s_q, h})}));
  });
}

void fuzz_quantize(Bytes& bytes) {
  const std::int64_t n = bytes.number(), d = bytes.flag() ? 128 : 64;
  const auto dtype = static_cast<DType>(bytes.take<std::uint8_t>() % 3);
  const bool power_of_two = bytes.flag();
  Tensors tensor(bytes);
  attempt([&] {
    winnow::indexer::quantize({.x = tensor(dtype, {n, d}),
                               .power_of_two = power_of_two,
                               .rows = tensor(DType::f8_e4m3, {n, d}),
                               .scale = tensor(DType::f32, {n})});
  });
  attempt([&] {
    winnow::indexer::quantize({.x = tensor(dtype, {n, d}),
                               .power_of_two = power_of_two,
                               .pages = tensor(DType::u8, {bytes.number(), 64 * (d + 4)}),
                               .slots = tensor(bytes.flag() ? DType::i64 : DType::i32, {n})});
  });
}

void fuzz_compressor(Bytes& bytes) {
  const std::int64_t tokens = bytes.number(), rows = bytes.number();
  const std::int64_t n = bytes.take<std::uint8_t>() % 4;
  const std::int64_t ratio = bytes.number(), pairs = bytes.number(), d = bytes.flag() ? 64 : 24;
  const bool overlap = bytes.flag(), hadamard = bytes.flag();
  const std::int64_t columns = overlap ? 2 * d : d;
  const auto dtype = static_cast<DType>(bytes.take<std::uint8_t>() % 3);
  Tensors tensor(bytes);
  const TensorView kv = tensor(dtype, {tokens, columns}), gate = tensor(dtype, {tokens, columns});
  const TensorView bias = tensor(DType::f32, {ratio, columns});
  const TensorView ends = tensor(DType::i32, {n + 1}), cu_rows = tensor(DType::i32, {n + 1});
  const TensorView first = tensor(DType::i32, {n}), norm = tensor(DType::f32, {d});
  const TensorView cos = tensor(DType::f32, {bytes.number(), pairs}),
                   out = tensor(dtype, {rows, d});
  const auto with_inputs = [&](auto args) {
    args.kv = kv;
    args.gate = gate;
    args.position_bias = bias;
    args.cu_seqlens = ends;
    if constexpr (requires { args.cu_rows; }) args.cu_rows = cu_rows;
    args.overlap = overlap;
    args.norm_weight = norm;
    args.cos = args.sin = cos;
    args.first_position = first;
    args.hadamard = hadamard;
    return args;
  };
  attempt([&] {
    winnow::compressor::forward(with_inputs(winnow::compressor::ForwardArgs{.rows = out}));
  });
  attempt([&] {
    winnow::compressor::backward(with_inputs(
        winnow::compressor::BackwardArgs{.d_rows = out,
                                         .d_kv = tensor(dtype, {tokens, columns}),
                                         .d_gate = tensor(dtype, {tokens, columns}),
                                         .d_position_bias = tensor(DType::f32, {ratio, columns}),
                                         .d_norm_weight = tensor(DType::f32, {d})}));
  });
  attempt([&] {
    winnow::compressor::step(with_inputs(winnow::compressor::StepArgs{
        .state_slots = tensor(DType::i32, {n}),
        .state = tensor(DType::f32, {bytes.number(), bytes.number(), 2 * columns}),
        .rows = tensor(dtype, {tokens, d})}));
  });
}

void fuzz_paged_xl(Bytes& bytes) {
  const std::int64_t b = bytes.number(), kv_heads = bytes.number();
  const std::int64_t heads = bytes.flag() ? kv_heads : bytes.number();
  const std::int64_t blocks = bytes.number(), block_size = bytes.flag() ? 8 : bytes.number();
  const std::int64_t table = bytes.number(), columns = bytes.number(), size = 64;
  const auto dtype = static_cast<DType>(bytes.take<std::uint8_t>() % 3);
  const std::int64_t x = 16 / size_of(dtype);
  Tensors tensor(bytes);
  const TensorView query = tensor(dtype, {b, heads, size});
  const TensorView keys = tensor(dtype, {blocks, kv_heads, size / x, block_size, x});
  const TensorView values = tensor(dtype, {blocks, kv_heads, size, block_size});
  const TensorView bias = tensor(dtype, {heads, size}), r = tensor(dtype, {heads, columns, size});
  const TensorView tables = tensor(DType::i32, {b, table}), lengths = tensor(DType::i32, {b});
  const bool fused = bytes.flag();
  attempt([&] {
    winnow::paged_xl::position_term({.query = query,
                                     .pos_bias_v = bias,
                                     .r = r,
                                     .context_lens = lengths,
                                     .matrix_bd = tensor(DType::f32, {b, heads, columns})});
  });
  attempt([&] {
    winnow::paged_xl::attention(
        {.query = query,
         .key_cache = keys,
         .value_cache = values,
         .pos_bias_u = bias,
         .matrix_bd = fused ? TensorView() : tensor(DType::f32, {b, heads, columns}),
         .pos_bias_v = fused ? bias : TensorView(),
         .r = fused ? r : TensorView(),
         .block_tables = tables,
         .context_lens = lengths,
         .out = tensor(dtype, {b, heads, size}),
         .lse = tensor(DType::f32, {b, heads})});
  });
  attempt([&] {
    winnow::paged_xl::append({.key = tensor(dtype, {b, kv_heads, size}),
                              .value = tensor(dtype, {b, kv_heads, size}),
                              .slot_mapping = tensor(bytes.flag() ? DType::i64 : DType::i32, {b}),
                              .key_cache = keys,
                              .value_cache = values});
  });
}

void fuzz_text(const Bytes& bytes) {
  try {
    winnow::demo::parse_document(bytes.rest(), "fuzz", 4096);
  } catch (const winnow::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool single_threaded = [] {
    winnow::set_num_threads(1);
    return true;
  }();
  (void)single_threaded;
  Bytes bytes(data, size);
  switch (bytes.take<std::uint8_t>() % 7) {
    case 0:
      fuzz_text(bytes);
      break;
    case 1:
      fuzz_paged_cache(bytes);
      break;
    case 2:
      fuzz_indexer(bytes);
      break;
    case 3:
      fuzz_quantize(bytes);
      break;
    case 4:
      fuzz_paged_xl(bytes);
      break;
    case 5:
      fuzz_compressor(bytes);
      break;
    default:
      fuzz_sparse_mla(bytes);
  }
  return 0;
}
