"""The types of torch.py, for type checkers. Written by python/stubs/torch_stub.py."""

import typing

import torch
from torch import Tensor

from winnow.expert_parallel.autograd import combine as expert_parallel_combine
from winnow.expert_parallel.autograd import dispatch_traced as expert_parallel_dispatch
from winnow.expert_parallel.autograd import notify as expert_parallel_notify
from winnow.indexer_loss import indexer_loss as indexer_loss

__all__ = [
    "compressor_backward",
    "compressor_forward",
    "compressor_step",
    "expert_parallel_combine",
    "expert_parallel_dispatch",
    "expert_parallel_layout",
    "expert_parallel_notify",
    "indexer_backward",
    "indexer_loss",
    "indexer_quantize",
    "indexer_quantize_pages",
    "indexer_scores",
    "indexer_topk",
    "indexer_topk_paged",
    "paged_xl_append",
    "paged_xl_attention",
    "paged_xl_attention_fused",
    "paged_xl_position_term",
    "sparse_mla_attention",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_distribution",
    "sparse_mla_forward",
    "sparse_mla_store",
]

def compressor_backward(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    cu_seqlens: Tensor,
    cu_rows: Tensor,
    d_rows: Tensor,
    *,
    overlap: bool = False,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    first_position: Tensor | None = None,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def compressor_forward(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    cu_seqlens: Tensor,
    cu_rows: Tensor,
    *,
    overlap: bool = False,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    first_position: Tensor | None = None,
    hadamard: bool = False,
    num_rows: int | None = None,
) -> Tensor: ...
def compressor_step(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    cu_seqlens: Tensor,
    first_position: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    overlap: bool = False,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    hadamard: bool = False,
) -> Tensor: ...
def expert_parallel_layout(
    expert_indices: Tensor,
    experts: int,
    world_size: int,
    local_world_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def indexer_backward(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    d_scores: Tensor,
    *,
    k_scale: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dk_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def indexer_quantize(
    x: Tensor,
    *,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]: ...
def indexer_quantize_pages(
    x: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    power_of_two: bool = False,
) -> None: ...
def indexer_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
) -> Tensor: ...
@typing.overload
def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    k_scale: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    ties: str = "smaller",
    return_scores: typing.Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@typing.overload
def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    k_scale: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    ties: str = "smaller",
    return_scores: typing.Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@typing.overload
def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    k_scale: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    ties: str = "smaller",
    return_scores: bool = False,
) -> tuple[Tensor, ...]: ...
@typing.overload
def indexer_topk_paged(
    q: Tensor,
    pages: Tensor,
    weights: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    topk: int,
    *,
    positions: bool = False,
    ties: str = "smaller",
    return_scores: typing.Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@typing.overload
def indexer_topk_paged(
    q: Tensor,
    pages: Tensor,
    weights: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    topk: int,
    *,
    positions: bool = False,
    ties: str = "smaller",
    return_scores: typing.Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@typing.overload
def indexer_topk_paged(
    q: Tensor,
    pages: Tensor,
    weights: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    topk: int,
    *,
    positions: bool = False,
    ties: str = "smaller",
    return_scores: bool = False,
) -> tuple[Tensor, ...]: ...
def paged_xl_append(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None: ...
@typing.overload
def paged_xl_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    matrix_bd: Tensor,
    scale: float | None,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: typing.Literal[False] = False,
) -> Tensor: ...
@typing.overload
def paged_xl_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    matrix_bd: Tensor,
    scale: float | None,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: typing.Literal[True],
) -> tuple[Tensor, Tensor]: ...
@typing.overload
def paged_xl_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    matrix_bd: Tensor,
    scale: float | None,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
@typing.overload
def paged_xl_attention_fused(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    pos_bias_v: Tensor,
    r: Tensor,
    scale: float | None,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: typing.Literal[False] = False,
) -> Tensor: ...
@typing.overload
def paged_xl_attention_fused(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    pos_bias_v: Tensor,
    r: Tensor,
    scale: float | None,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: typing.Literal[True],
) -> tuple[Tensor, Tensor]: ...
@typing.overload
def paged_xl_attention_fused(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pos_bias_u: Tensor,
    pos_bias_v: Tensor,
    r: Tensor,
    scale: float | None,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_xl_position_term(
    query: Tensor,
    pos_bias_v: Tensor,
    r: Tensor,
    context_lens: Tensor,
) -> Tensor: ...
@typing.overload
def sparse_mla_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
    return_lse: typing.Literal[False] = False,
) -> Tensor: ...
@typing.overload
def sparse_mla_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
    return_lse: typing.Literal[True],
) -> tuple[Tensor, Tensor]: ...
@typing.overload
def sparse_mla_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
@typing.overload
def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor | None,
    lse: Tensor,
    d_out: Tensor,
    *,
    delta: Tensor | None = None,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dq_dtype: torch.dtype | None = None,
    dkv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@typing.overload
def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor | None,
    lse: Tensor,
    d_out: Tensor,
    *,
    delta: Tensor | None = None,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dq_dtype: torch.dtype | None = None,
    dkv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@typing.overload
def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor | None,
    lse: Tensor,
    d_out: Tensor,
    *,
    delta: Tensor | None = None,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dq_dtype: torch.dtype | None = None,
    dkv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]: ...
def sparse_mla_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    *,
    format: str = "fp8_656",
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    batch_invariant: bool = True,
) -> tuple[Tensor, Tensor]: ...
def sparse_mla_distribution(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    lse: Tensor,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
) -> Tensor: ...
def sparse_mla_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def sparse_mla_store(
    rows: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    format: str = "fp8_656",
) -> None: ...
