"""The operations as torch operators: for torch.compile, CUDA graphs and autograd.

Each function calls an operator ``torch.ops.winnow.*`` with a fake implementation, so that it works
in ``torch.compile(fullgraph=True)``. On CUDA tensors the work joins torch's current stream; nothing
is copied and nothing waits. Arguments mean what they mean in ``winnow.sparse_mla`` and
``winnow.paged_xl``, where shapes, dtypes, units and errors are documented.
"""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from winnow._winnow import paged_xl as _paged_xl
from winnow._winnow import sparse_mla as _sparse_mla

__all__ = [
    "paged_xl_append",
    "paged_xl_attention",
    "paged_xl_attention_fused",
    "paged_xl_position_term",
    "sparse_mla_attention",
    "sparse_mla_backward",
    "sparse_mla_distribution",
    "sparse_mla_forward",
]

_VALUE_DIM = 512

_library = torch.library.Library("winnow", "FRAGMENT")


def _define(schema: str, kernel, fake) -> None:
    """Registers an operator that runs `kernel` on CPU and CUDA tensors.

    torch leaves out arguments that have their default: both functions repeat the schema's defaults.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CPU")
    _library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"winnow::{name}", fake, lib=_library)


def _no_gradient(name: str) -> None:
    """Lets nothing require a gradient through this operator unnoticed."""

    def refuse(ctx, *gradients):
        raise RuntimeError(f"winnow::{name} has no gradient; detach() its inputs")

    torch.library.register_autograd(f"winnow::{name}", refuse, lib=_library)


# ---- sparse MLA: forward and its gradient


def _forward(
    q,
    kv,
    indices,
    scale=None,
    topk_length=None,
    attn_sink=None,
    q_start=None,
    k_stride=1,
    deterministic=False,
    dkv_dtype=None,
):
    return _sparse_mla.forward(
        q,
        kv,
        indices,
        scale=scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        q_start=q_start,
        k_stride=k_stride,
    )


def _forward_fake(
    q,
    kv,
    indices,
    scale=None,
    topk_length=None,
    attn_sink=None,
    q_start=None,
    k_stride=1,
    deterministic=False,
    dkv_dtype=None,
):
    s_q, h_q = q.shape[:2]
    max_logits = q.new_empty((s_q, h_q), dtype=torch.float32)
    return q.new_empty((s_q, h_q, _VALUE_DIM)), max_logits, torch.empty_like(max_logits)


_define(
    "sparse_mla_forward(Tensor q, Tensor kv, Tensor indices, float? scale=None, "
    "Tensor? topk_length=None, Tensor? attn_sink=None, int? q_start=None, int k_stride=1, "
    "bool deterministic=False, ScalarType? dkv_dtype=None) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)


def _backward(
    q,
    kv,
    indices,
    out,
    lse,
    d_out,
    delta=None,
    scale=None,
    topk_length=None,
    attn_sink=None,
    q_start=None,
    k_stride=1,
    deterministic=False,
    dq_dtype=None,
    dkv_dtype=None,
):
    gradients = _sparse_mla.backward(
        q,
        kv,
        indices,
        out,
        lse,
        d_out,
        delta=delta,
        scale=scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        q_start=q_start,
        k_stride=k_stride,
        deterministic=deterministic,
        dq=torch.empty(q.shape, dtype=dq_dtype or q.dtype, device=q.device),
        dkv=torch.empty(kv.shape, dtype=dkv_dtype or torch.float32, device=kv.device),
    )
    return gradients if attn_sink is not None else (*gradients, lse.new_empty(0))


def _backward_fake(
    q,
    kv,
    indices,
    out,
    lse,
    d_out,
    delta=None,
    scale=None,
    topk_length=None,
    attn_sink=None,
    q_start=None,
    k_stride=1,
    deterministic=False,
    dq_dtype=None,
    dkv_dtype=None,
):
    return (
        q.new_empty(q.shape, dtype=dq_dtype or q.dtype),
        kv.new_empty(kv.shape, dtype=dkv_dtype or torch.float32),
        lse.new_empty(0 if attn_sink is None else (q.shape[1],)),
    )


# The third result is empty where there is no sink.
_define(
    "sparse_mla_backward(Tensor q, Tensor kv, Tensor indices, Tensor out, Tensor lse, "
    "Tensor d_out, Tensor? delta=None, float? scale=None, Tensor? topk_length=None, "
    "Tensor? attn_sink=None, int? q_start=None, int k_stride=1, bool deterministic=False, "
    "ScalarType? dq_dtype=None, ScalarType? dkv_dtype=None) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_no_gradient("sparse_mla_backward")


def _save_for_backward(ctx, inputs, output):
    q, kv, indices, scale, topk_length, attn_sink, q_start, k_stride = inputs[:8]
    out, max_logits, lse = output
    ctx.mark_non_differentiable(max_logits, lse)
    ctx.save_for_backward(q, kv, indices, topk_length, attn_sink, out, lse)
    ctx.options = (scale, q_start, k_stride, inputs[8], inputs[9] or kv.dtype)


def _gradients(ctx, d_out, d_max_logits, d_lse):
    q, kv, indices, topk_length, attn_sink, out, lse = ctx.saved_tensors
    scale, q_start, k_stride, deterministic, dkv_dtype = ctx.options
    dq, dkv, d_sink = torch.ops.winnow.sparse_mla_backward(
        q,
        kv,
        indices,
        out,
        lse,
        # Sums over out give an expanded gradient, whose last dimension is not contiguous.
        d_out.contiguous(),
        None,
        scale,
        topk_length,
        attn_sink,
        q_start,
        k_stride,
        deterministic,
        None,
        dkv_dtype,
    )
    sink = d_sink if attn_sink is not None and ctx.needs_input_grad[5] else None
    return dq, dkv, None, None, None, sink, None, None, None, None


torch.library.register_autograd(
    "winnow::sparse_mla_forward", _gradients, setup_context=_save_for_backward, lib=_library
)


def sparse_mla_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: Optional[float] = None,
    topk_length: Optional[Tensor] = None,
    attn_sink: Optional[Tensor] = None,
    q_start: Optional[int] = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: Optional[torch.dtype] = None,
    return_lse: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Top-k sparse MLA attention, differentiable in q, kv and attn_sink.

    Args:
        q: [s_q, h_q, d_qk]; kv: [s_kv, 1, d_qk]; indices: [s_q, 1, topk], int32; all others up to
            k_stride: as in winnow.sparse_mla.forward().
        deterministic: gradients that are bitwise equal run after run.
        dkv_dtype: in which the backward kernel gives the gradient of kv: torch.float32, or kv's
            own (None). Autograd then casts it to kv's dtype.
        return_lse: return (out, lse); lse [s_q, h_q] is not differentiable.

    Returns:
        out [s_q, h_q, 512], as q.

    Raises:
        ValueError, winnow.Error: as winnow.sparse_mla.forward().
    """
    out, _, lse = torch.ops.winnow.sparse_mla_forward(
        q,
        kv,
        indices,
        scale,
        topk_length,
        attn_sink,
        q_start,
        k_stride,
        deterministic,
        dkv_dtype,
    )
    return (out, lse) if return_lse else out


def sparse_mla_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: Optional[float] = None,
    topk_length: Optional[Tensor] = None,
    attn_sink: Optional[Tensor] = None,
    q_start: Optional[int] = None,
    k_stride: int = 1,
) -> Tuple[Tensor, Tensor, Tensor]:
    """winnow.sparse_mla.forward() as an operator: (out, max_logits, lse), differentiable in out."""
    return torch.ops.winnow.sparse_mla_forward(
        q, kv, indices, scale, topk_length, attn_sink, q_start, k_stride
    )


def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    *,
    delta: Optional[Tensor] = None,
    scale: Optional[float] = None,
    topk_length: Optional[Tensor] = None,
    attn_sink: Optional[Tensor] = None,
    q_start: Optional[int] = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dq_dtype: Optional[torch.dtype] = None,
    dkv_dtype: Optional[torch.dtype] = None,
) -> Union[Tuple[Tensor, Tensor], Tuple[Tensor, Tensor, Tensor]]:
    """winnow.sparse_mla.backward() as an operator: (dq, dkv), with a sink (dq, dkv, d_sink).

    dq is as q and dkv float32 unless their dtypes are given.
    """
    gradients = torch.ops.winnow.sparse_mla_backward(
        q,
        kv,
        indices,
        out,
        lse,
        d_out,
        delta,
        scale,
        topk_length,
        attn_sink,
        q_start,
        k_stride,
        deterministic,
        dq_dtype,
        dkv_dtype,
    )
    return gradients if attn_sink is not None else gradients[:2]


# ---- sparse MLA: the attention distribution


def _distribution(q, kv, indices, lse, scale=None, topk_length=None, q_start=None, k_stride=1):
    return _sparse_mla.distribution(
        q,
        kv,
        indices,
        lse,
        scale=scale,
        topk_length=topk_length,
        q_start=q_start,
        k_stride=k_stride,
    )


def _distribution_fake(q, kv, indices, lse, *options):
    return q.new_empty((q.shape[0], indices.shape[2]), dtype=torch.float32)


_define(
    "sparse_mla_distribution(Tensor q, Tensor kv, Tensor indices, Tensor lse, float? scale=None, "
    "Tensor? topk_length=None, int? q_start=None, int k_stride=1) -> Tensor",
    _distribution,
    _distribution_fake,
)
_no_gradient("sparse_mla_distribution")


def sparse_mla_distribution(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    scale: Optional[float] = None,
    topk_length: Optional[Tensor] = None,
    q_start: Optional[int] = None,
    k_stride: int = 1,
) -> Tensor:
    """winnow.sparse_mla.distribution() as an operator; a teacher, without a gradient."""
    with torch.no_grad():
        return torch.ops.winnow.sparse_mla_distribution(
            q, kv, indices, lse, scale, topk_length, q_start, k_stride
        )


# ---- paged decode


def _attention(
    query,
    key_cache,
    value_cache,
    pos_bias_u,
    matrix_bd,
    scale,
    block_tables,
    context_lens,
):
    return _paged_xl.attention(
        query,
        key_cache,
        value_cache,
        pos_bias_u,
        matrix_bd,
        scale,
        block_tables,
        context_lens,
        return_lse=True,
    )


def _attention_fused(
    query,
    key_cache,
    value_cache,
    pos_bias_u,
    pos_bias_v,
    r,
    scale,
    block_tables,
    context_lens,
):
    return _paged_xl.attention_fused(
        query,
        key_cache,
        value_cache,
        pos_bias_u,
        pos_bias_v,
        r,
        scale,
        block_tables,
        context_lens,
        return_lse=True,
    )


def _attention_fake(query, *others):
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


_define(
    "paged_xl_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor pos_bias_u, "
    "Tensor matrix_bd, float? scale, Tensor block_tables, Tensor context_lens) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
_no_gradient("paged_xl_attention")
_define(
    "paged_xl_attention_fused(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor pos_bias_u, Tensor pos_bias_v, Tensor r, float? scale, Tensor block_tables, "
    "Tensor context_lens) -> (Tensor, Tensor)",
    _attention_fused,
    _attention_fake,
)
_no_gradient("paged_xl_attention_fused")


def _append(key, value, key_cache, value_cache, slot_mapping):
    _paged_xl.append(key, value, key_cache, value_cache, slot_mapping)


_define(
    "paged_xl_append(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()",
    _append,
    lambda key, value, key_cache, value_cache, slot_mapping: None,
)


def _position_term(query, pos_bias_v, r, context_lens):
    return _paged_xl.position_term(query, pos_bias_v, r, context_lens)


_define(
    "paged_xl_position_term(Tensor query, Tensor pos_bias_v, Tensor r, Tensor context_lens) "
    "-> Tensor",
    _position_term,
    lambda query, pos_bias_v, r, context_lens: query.new_empty((*query.shape[:2], r.shape[1])),
)
_no_gradient("paged_xl_position_term")


def paged_xl_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    matrix_bd: Tensor,
    scale: Optional[float],
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """winnow.paged_xl.attention() as an operator: out, or (out, lse)."""
    out, lse = torch.ops.winnow.paged_xl_attention(
        query, key_cache, value_cache, pos_bias_u, matrix_bd, scale, block_tables, context_lens
    )
    return (out, lse) if return_lse else out


def paged_xl_attention_fused(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    pos_bias_v: Tensor,
    r: Tensor,
    scale: Optional[float],
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """winnow.paged_xl.attention_fused() as an operator: out, or (out, lse)."""
    out, lse = torch.ops.winnow.paged_xl_attention_fused(
        query,
        key_cache,
        value_cache,
        pos_bias_u,
        pos_bias_v,
        r,
        scale,
        block_tables,
        context_lens,
    )
    return (out, lse) if return_lse else out


def paged_xl_append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """winnow.paged_xl.append() as an operator that changes both caches."""
    torch.ops.winnow.paged_xl_append(key, value, key_cache, value_cache, slot_mapping)


def paged_xl_position_term(
    query: Tensor, pos_bias_v: Tensor, r: Tensor, context_lens: Tensor
) -> Tensor:
    """winnow.paged_xl.position_term() as an operator: [num_seqs, num_heads, max_distance]."""
    return torch.ops.winnow.paged_xl_position_term(query, pos_bias_v, r, context_lens)
