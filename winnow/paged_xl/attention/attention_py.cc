// Python binding of paged_xl::attention: the plain and the fused mode.

#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/attention/attention_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<paged_xl::kAttention> kAttention(
    "def attention(query: T, key_cache: T, value_cache: T, pos_bias_u: T, matrix_bd: T, "
    "scale: float | None, block_tables: T, context_lens: T, *, return_lse: bool = False, "
    "out: T | tuple[T | None, T | None] | None = None, check: bool = False, "
    "workspace: T | None = None, stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, T] if return_lse or out else T");

constexpr Declaration<paged_xl::kAttention> kAttentionFused(
    "def attention_fused(query: T, key_cache: T, value_cache: T, pos_bias_u: T, "
    "pos_bias_v: T, r: T, scale: float | None, block_tables: T, context_lens: T, *, "
    "return_lse: bool = False, out: T | tuple[T | None, T | None] | None = None, "
    "check: bool = False, workspace: T | None = None, stream: Stream = None, "
    "backend: str | None = None) -> tuple[T, T] if return_lse or out else T");

// With the position term, or in the fused mode with what it is computed from.
template <const auto& kDeclaration>
nb::object attend(const Arguments<kDeclaration>& given) {
  Call call = given.call();
  paged_xl::AttentionArgs args = given.read(call);
  using Args = paged_xl::AttentionArgs;
  auto [result, lse] = split_out<2>(kDeclaration.operation, given.template get<"out">());
  given.template output<&Args::out>(call, args, result);
  const bool return_lse = given.template get<"return_lse", bool>() || !lse.is_none();
  if (return_lse) given.template output<&Args::lse>(call, args, lse);
  given.run(call, args, paged_xl::attention, paged_xl::attention_workspace_bytes);
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
)";

constexpr const char* kFusedDoc = R"(attention() that forms the position term itself.

As attention() with matrix_bd = position_term(query, pos_bias_v, r, context_lens), which is never
written to memory.

Args:
    return_lse, out, check, workspace, stream, backend: as in attention().

Results and errors are those of attention().)";

const Operation<kAttention, attend<kAttention>, kDoc, paged_xl::attention> kRegistered;
const Operation<kAttentionFused, attend<kAttentionFused>, kFusedDoc, paged_xl::attention>
    kRegisteredFused;

}  // namespace
}  // namespace winnow::python
