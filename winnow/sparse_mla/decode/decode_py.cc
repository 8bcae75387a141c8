// Python binding of sparse_mla::decode.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/cache_py.h"
#include "winnow/sparse_mla/decode/decode.h"
#include "winnow/sparse_mla/decode/decode_contract.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::kDecode> kDecode(
    "def decode(q: T, cache: T, indices: T | None = None, *, format: str = 'fp8_656', "
    "scale: float | None = None, topk_length: T | None = None, attn_sink: T | None = None, "
    "extra_cache: T | None = None, extra_indices: T | None = None, "
    "extra_topk_length: T | None = None, batch_invariant: bool = True, "
    "in_list_order: bool = False, "
    "block_tables: T | None = None, context_lens: T | None = None, "
    "q_scale: T | None = None, kv_scale: T | None = None, causal: bool = True, "
    "flash_mla_lse: bool = False, "
    "out: T | tuple[T | None, T | None] | None = None, workspace: T | None = None, "
    "stream: Stream = None, backend: str | None = None) -> tuple[T, T]");

nb::object decode(const Arguments<kDecode>& given) {
  Call call = given.call();
  sparse_mla::DecodeArgs args = given.read(call);
  auto [result, lse] = split_out<2>(kDecode.operation, given.get<"out">());
  given.output<&sparse_mla::DecodeArgs::out>(call, args, result);
  given.output<&sparse_mla::DecodeArgs::lse>(call, args, lse);
  given.run(call, args, sparse_mla::decode, sparse_mla::decode_workspace_bytes);
  return nb::make_tuple(result, lse);
}

constexpr const char* kDoc =
    R"(MLA attention of decode steps over a paged cache: over chosen rows, or over all of a sequence.

    x[i,s,h,j] = scale * dot(q[i,s,h,:], row(indices[i,s,j]))    over the visible entries j
    lse = log sum_j exp(x)                                       natural logarithm, without the sink
    out = sum_j exp(x - lse') * row(indices[i,s,j])[:512]        lse' = log(exp(lse) + exp(sink))

row(t) is what slot t = block * block_size + offset of the cache holds: float8 values are multiplied
by the scales stored beside them and rounded to bfloat16. An entry is visible if j < topk_length and
its slot is in the cache. With block_tables the entries are the positions of the sequence, position
t being row t % block_size of block block_tables[i, t // block_size]; query s sees those below
context_lens[i] - s_q + s + 1, with causal=False those below context_lens[i], or those below
context_lens[i,s]. On a GPU rows have 576 columns with block_tables. Of "fp8_576", which a GPU takes
with block_tables alone, logits are multiplied by q_scale * kv_scale and out by kv_scale.
sink = attn_sink[h], or -inf without one. A query without visible entries gets out = 0 and
lse = -inf, or with flash_mla_lse +inf.

Args:
    out: [b, s_q, h_q, 512], bfloat16, to write into, or a tuple (out, lse), each a tensor or
        None. out and lse must overlap neither an input nor each other.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes; the
        error for a smaller one gives the exact number. If None, it is allocated by torch for torch
        tensors. The CPU does not use it.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (out, lse); lse is [b, s_q, h_q], float32. No gradient is recorded.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kDecode, decode, kDoc, sparse_mla::decode, cache_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
