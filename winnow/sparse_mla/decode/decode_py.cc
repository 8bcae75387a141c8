// Python binding of sparse_mla::decode.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/cache_py.h"
#include "winnow/sparse_mla/decode/decode.h"
#include "winnow/sparse_mla/decode/decode_fields.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::DecodeArgs> kDecode(
    "sparse_mla::decode",
    "def decode(q: T, cache: T, indices: T, *, format: str = 'fp8_656', "
    "scale: float | None = None, topk_length: T | None = None, attn_sink: T | None = None, "
    "extra_cache: T | None = None, extra_indices: T | None = None, "
    "extra_topk_length: T | None = None, batch_invariant: bool = True, "
    "out: T | tuple[T | None, T | None] | None = None, workspace: T | None = None, "
    "stream: Stream = None, backend: str | None = None) -> tuple[T, T]",
    "q: bf16[b, s_q, h_q=64, d_qk=576], cache: T[blocks, block_size=64, 1, d_qk], "
    "indices: i32[b, s_q, topk=64], out: bf16[b, s_q, h_q, 512]");

constexpr std::int64_t kValueColumns = 512;

nb::object decode(const Arguments<kDecode>& given) {
  Call call = given.call();
  sparse_mla::DecodeArgs args = given.read(call);
  const std::int64_t b = size_of_dim(args.q, 0), s_q = size_of_dim(args.q, 1);
  const std::int64_t h_q = size_of_dim(args.q, 2);
  auto [result, lse] = split_out<2>(kDecode.operation, given.get<"out">());
  args.out = call.output("out", result, DType::bf16, {b, s_q, h_q, kValueColumns});
  args.lse = call.output("lse", lse, DType::f32, {b, s_q, h_q});
  nb::object workspace = given.get<"workspace">();
  args.workspace = call.workspace(workspace, [&](const RunOptions& options) {
    return sparse_mla::decode_workspace_bytes(args, options);
  });
  call.run([&](const RunOptions& options) { sparse_mla::decode(args, options); });
  return nb::make_tuple(result, lse);
}

constexpr const char* kDoc =
    R"(Top-k sparse MLA attention of decode steps over a paged cache.

    x[i,s,h,j] = scale * dot(q[i,s,h,:], row(indices[i,s,j]))    over the visible entries j
    lse = log sum_j exp(x)                                       natural logarithm, without the sink
    out = sum_j exp(x - lse') * row(indices[i,s,j])[:512]        lse' = log(exp(lse) + exp(sink))

row(t) is slot t = block * block_size + offset of the cache, dequantised: bfloat16(f8 * scale). An
entry is visible if j < topk_length and its slot is in the cache. A query without visible entries
gets out = 0 and lse = -inf.

Args:
    q: [b, s_q, h_q, d_qk], bfloat16; d_qk is that of a cache row: 576 for "fp8_656", 512 for
        "fp8_584", for "bf16" the cache's own.
    cache: [blocks, block_size, 1, row] of the format, uint8 or float8_e4m3fn, or bfloat16.
    indices: [b, s_q, topk], int32: slots; outside of the cache means absent.
    format: "fp8_656" (DeepSeek-V3.2): rows of 512 float8_e4m3fn, 4 float32 scales and 64 bfloat16;
        "fp8_584" (DeepSeek-V4): in each block rows of 448 float8_e4m3fn and 64 bfloat16, then for
        each row 7 scales in ue8m0 and a byte of padding, the stride between blocks at least
        block_size * 584 rounded up to a multiple of 576; "bf16": rows of 576 or 512.
    scale: of the logits; 1 / sqrt(d_qk) if None.
    topk_length: [b] or [b, s_q], int32: entries of each row that count; clamped to [0, topk].
    attn_sink: [h_q], float32: a logit per head without a value.
    extra_cache, extra_indices, extra_topk_length: a second cache of the same format with a block
        size of its own, and its slots and lengths, attended in the same softmax.
    batch_invariant: the result of a query does not depend on the rest of the batch, bit for bit,
        which always holds on the CPU. Without it a GPU may be faster.
    out: [b, s_q, h_q, 512], bfloat16, to write into, or a tuple (out, lse) of which any may be
        None. They must not overlap inputs or each other.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes; the
        error for a smaller one gives the exact number. If None, it is allocated by torch for torch
        tensors. The CPU does not use it.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (out, lse); lse is [b, s_q, h_q], float32. No gradient is recorded.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kDecode, decode, kDoc, sparse_mla::decode, describe_cache> kRegistered;

}  // namespace
}  // namespace winnow::python
