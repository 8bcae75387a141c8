"""Functions with the signatures and conventions of other libraries, for code that used them.

Each is a thin wrapper over ``winnow.sparse_mla`` or ``winnow.paged_xl`` and takes what they take.
"""

from typing import Any, NoReturn, Optional, Tuple

from winnow import paged_xl, sparse_mla
from winnow.errors import InvalidArgument

__all__ = ["flash_mla_sparse_fwd", "xl_single_query_cached_kv_attention"]


def _refuse(operation: str, argument: str, wanted: str, got: int) -> NoReturn:
    error = InvalidArgument(f"{operation}: {argument}: want {wanted}, got {got}")
    error.operation, error.argument = operation, argument
    raise error


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    indexer_topk: int = 0,
) -> Tuple[Any, Any, Any]:
    """Sparse MLA prefill as FlashMLA's function of this name.

    Args:
        q: [s_q, h_q, d_qk]; kv: [s_kv, 1, d_qk]; indices: [s_q, 1, topk], int32.
        sm_scale: of the logits.
        d_v: 512.
        attn_sink: [h_q], float32. topk_length: [s_q], int32.
        indexer_topk: 0.

    Returns:
        (out [s_q, h_q, 512], max_logits [s_q, h_q], lse [s_q, h_q]); natural logarithms without
        the sink. A query with nothing visible has max_logits = -inf and lse = +inf: FlashMLA's
        convention, where winnow.sparse_mla.forward() gives -inf.

    Raises:
        ValueError: d_v is not 512, indexer_topk is not 0, or as winnow.sparse_mla.forward().
    """
    if d_v != 512:
        _refuse("flash_mla_sparse_fwd", "d_v", "512", d_v)
    if indexer_topk != 0:
        _refuse("flash_mla_sparse_fwd", "indexer_topk", "0", indexer_topk)
    out, max_logits, lse = sparse_mla.forward(
        q, kv, indices, scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length
    )
    nothing = lse == float("-inf")
    if hasattr(lse, "masked_fill_"):
        lse.masked_fill_(nothing, float("inf"))
    else:
        lse[nothing] = float("inf")
    return out, max_logits, lse


def xl_single_query_cached_kv_attention(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    pos_bias_u: Any,
    matrix_bd: Any,
    scale: float,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    *,
    table_per_token: bool = False,
) -> None:
    """One decode step of relative-position attention into `out`.

    Args:
        out, query, key_cache, value_cache, pos_bias_u, matrix_bd, scale, block_tables,
            context_lens: as in winnow.paged_xl.attention().
        block_size: that of the caches.
        max_context_len: a hint that is not needed.
        table_per_token: `block_tables` has one entry per token, not one per block: every
            block_size-th entry is copied into a table by block. Each sequence's row then begins
            with the block of its first token.

    Raises:
        ValueError: block_size is not that of value_cache, or as winnow.paged_xl.attention().
    """
    if block_size != value_cache.shape[-1]:
        wanted = f"{value_cache.shape[-1]} as in value_cache"
        _refuse("xl_single_query_cached_kv_attention", "block_size", wanted, block_size)
    if table_per_token:
        table = block_tables[:, ::block_size]
        block_tables = table.contiguous() if hasattr(table, "contiguous") else table.copy()
    paged_xl.attention(
        query,
        key_cache,
        value_cache,
        pos_bias_u,
        matrix_bd,
        scale,
        block_tables,
        context_lens,
        out=out,
    )
