// Python binding of paged_xl::attention: the plain and the fused mode.

#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/attention/attention_fields.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<paged_xl::AttentionArgs> kAttention(
    "paged_xl::attention",
    "def attention(query: T, key_cache: T, value_cache: T, pos_bias_u: T, matrix_bd: T, "
    "scale: float | None, block_tables: T, context_lens: T, *, return_lse: bool = False, "
    "out: T | tuple[T | None, T | None] | None = None, check: bool = False, "
    "workspace: T | None = None, stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, T] if return_lse or out else T",
    "query: T[num_seqs, num_heads=16, head_size=128], "
    "key_cache: T[num_blocks, num_kv_heads=num_heads, head_size/x, block_size=16, x], "
    "value_cache: T[num_blocks, num_kv_heads, head_size, block_size], "
    "pos_bias_u: T[num_heads, head_size], block_tables: i32[num_seqs, 1], "
    "context_lens: i32[num_seqs], out: T[num_seqs, num_heads, head_size], "
    "matrix_bd: T[num_seqs, num_heads, 1]");

constexpr Declaration<paged_xl::AttentionArgs> kAttentionFused(
    "paged_xl::attention",
    "def attention_fused(query: T, key_cache: T, value_cache: T, pos_bias_u: T, "
    "pos_bias_v: T, r: T, scale: float | None, block_tables: T, context_lens: T, *, "
    "return_lse: bool = False, out: T | tuple[T | None, T | None] | None = None, "
    "check: bool = False, workspace: T | None = None, stream: Stream = None, "
    "backend: str | None = None) -> tuple[T, T] if return_lse or out else T",
    "query: T[num_seqs, num_heads=16, head_size=128], "
    "key_cache: T[num_blocks, num_kv_heads=num_heads, head_size/x, block_size=16, x], "
    "value_cache: T[num_blocks, num_kv_heads, head_size, block_size], "
    "pos_bias_u: T[num_heads, head_size], block_tables: i32[num_seqs, 1], "
    "context_lens: i32[num_seqs], out: T[num_seqs, num_heads, head_size], "
    "pos_bias_v: T[num_heads, head_size], r: T[num_heads, 1, head_size]");

// With the position term, or in the fused mode with what it is computed from.
template <const auto& kDeclaration>
nb::object attend(const Arguments<kDeclaration>& given) {
  Call call = given.call();
  paged_xl::AttentionArgs args = given.read(call);
  const std::int64_t num_seqs = size_of_dim(args.query, 0), num_heads = size_of_dim(args.query, 1);
  auto [result, lse] = split_out<2>(kDeclaration.operation, given.template get<"out">());
  args.out = call.output("out", result, args.query.dtype(),
                         {num_seqs, num_heads, size_of_dim(args.query, 2)});
  const bool return_lse = given.template get<"return_lse", bool>() || !lse.is_none();
  if (return_lse)
    args.lse = call.output("lse", lse, accumulator_of(args.query.dtype()), {num_seqs, num_heads});
  nb::object workspace = given.template get<"workspace">();
  args.workspace = call.workspace(workspace, [&](const RunOptions& options) {
    return paged_xl::attention_workspace_bytes(args, options);
  });
  call.run([&](const RunOptions& options) { paged_xl::attention(args, options); });
  if (return_lse) return nb::make_tuple(result, lse);
  return result;
}

constexpr const char* kDoc = R"(One decode step of relative-position attention over a paged cache.

The new token of each sequence s attends to its cached tokens j < context_lens[s]:

    logit[s,h,j] = scale * (dot(query[s,h] + pos_bias_u[h], key[j]) + matrix_bd[s,h,j])
    lse = log sum_j exp(logit)                               natural logarithm
    out = sum_j exp(logit - lse) * value[j]

Token j lies in block block_tables[s, j // block_size] at offset j % block_size. A context of 0
tokens gives out = 0 and lse = -inf.

Args:
    query: [num_seqs, num_heads, head_size], float32, float16, bfloat16 or, on the CPU, float64.
        With float64 all that is float32 here is float64.
    key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], as query, with x = 16
        bytes / size of an element.
    value_cache: [num_blocks, num_kv_heads, head_size, block_size], as query.
    pos_bias_u: [num_heads, head_size] or [num_seqs, num_heads, head_size], as query.
    matrix_bd: [num_seqs, num_heads, columns], as query or float32: the unscaled position term, as
        position_term() gives it; columns past a context are not read.
    scale: of the logits; 1 / sqrt(head_size) if None.
    block_tables: [num_seqs, max_blocks_per_seq], int32.
    context_lens: [num_seqs], int32: cached tokens, the step's own included.
    return_lse: return (out, lse).
    out: like query, to write into, or a tuple (out, lse) of which any may be None; new if None.
        They must not overlap inputs or each other.
    check: look on a GPU, too, at what lengths and block tables hold, and refuse what the tensors do
        not. It copies them to the host and waits for the stream, so nothing may capture it.
        Otherwise a GPU cuts such a length and masks the tokens of such a block. The environment
        variable WINNOW_CHECK=1 asks for it in every call.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of query, aligned to 256 bytes,
        at most 64 MiB for up to 2^16 pairs of sequence and head; the error for too few gives the
        exact number. None takes them from torch's allocator for tensors of torch, else from the
        stream's memory pool. The CPU does not use it.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    out [num_seqs, num_heads, head_size], as query; or (out, lse) with lse [num_seqs, num_heads],
    float32.

Raises:
    ValueError: an argument is not as described; on the CPU and with check also a length or a
        block number that the tensors do not hold. Nothing was written.
    winnow.Error: no backend can run it here.

head_size is 32, 64, 80, 96, 112, 128, 160, 192 or 256; block_size 8, 16, 32, 64 or 128.)";

constexpr const char* kFusedDoc = R"(attention() that forms the position term itself.

As attention() with matrix_bd = position_term(query, pos_bias_v, r, context_lens), which is never
written to memory.

Args:
    pos_bias_v: [num_heads, head_size] or [num_seqs, num_heads, head_size], as query.
    r: [num_heads, max_distance, head_size], as query: projected embedding of each distance.
    All others, results and errors: as in attention().)";

const Operation<kAttention, attend<kAttention>, kDoc, paged_xl::attention> kRegistered;
const Operation<kAttentionFused, attend<kAttentionFused>, kFusedDoc, paged_xl::attention>
    kRegisteredFused;

}  // namespace
}  // namespace winnow::python
