"""The operations as torch operators: for torch.compile, CUDA graphs and autograd.

Each function calls an operator ``torch.ops.winnow.*`` with a fake implementation, so that it works
in ``torch.compile(fullgraph=True)``. On CUDA tensors the work joins torch's current stream; nothing
is copied, and the host waits only in a dispatch or notify that counts. Arguments mean what they
mean in ``winnow.indexer``, ``winnow.sparse_mla``, ``winnow.compressor``, ``winnow.paged_xl`` and
``winnow.expert_parallel``, where shapes, dtypes, units and errors are documented.

Under ``torch.autocast`` the tensors of sparse MLA and of paged_xl_position_term, and q and k of the
indexer, are cast to its dtype, and those of the other paged operators to the dtype of the cache,
which is never cast; float32 tensors beside them (sinks, lse, weights) stay.
``torch.utils.flop_counter`` counts the operators, without regard to lengths, ranges and masks.
"""

import functools

import torch
from torch import Tensor

from winnow import _operators
from winnow._operators import accumulator as _accumulator
from winnow._winnow import expert_parallel as _expert_parallel
from winnow._winnow import paged_xl as _paged_xl
from winnow._winnow import sparse_mla as _sparse_mla
from winnow.compressor_operators import (
    compressor_backward,
    compressor_forward,
    compressor_step,
    compressor_step_pages,
    compressor_step_store,
)
from winnow.context_parallel import context_parallel
from winnow.decode_operators import sparse_mla_decode, sparse_mla_store
from winnow.expert_parallel.autograd import combine as expert_parallel_combine
from winnow.expert_parallel.autograd import dispatch_traced as expert_parallel_dispatch
from winnow.expert_parallel.autograd import notify as expert_parallel_notify
from winnow.indexer_loss import indexer_loss
from winnow.indexer_operators import (
    indexer_backward,
    indexer_quantize,
    indexer_quantize_pages,
    indexer_scores,
    indexer_scores_paged,
    indexer_topk,
    indexer_topk_paged,
)

# Type checkers read torch.pyi, which python/stubs/torch_stub.py writes from these declarations.

__all__ = [
    "compressor_backward",
    "compressor_forward",
    "compressor_step",
    "compressor_step_pages",
    "compressor_step_store",
    "context_parallel",
    "expert_parallel_combine",
    "expert_parallel_dispatch",
    "expert_parallel_layout",
    "expert_parallel_notify",
    "indexer_backward",
    "indexer_loss",
    "indexer_quantize",
    "indexer_quantize_pages",
    "indexer_scores",
    "indexer_scores_paged",
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

_VALUE_DIM = 512


def _whether_lse(options):
    return options.pop("return_lse", False)


def _lse_if_wanted(results, wanted):
    return (results[0], results[-1]) if wanted else results[0]


# A product of [m, k] with [k, n] counts 2 m k n, as in torch. Lengths and masks take no part: the
# count is of all rows that `indices` or the block tables have room for, or of all that there are.


def _sparse_mla_flops(products):
    def count(q, kv, indices=None, extra_kv=None, extra_indices=None, **options):
        s_q, h_q, d_qk = q
        entries = 0
        for rows, chosen in ((kv, indices), (extra_kv, extra_indices)):
            if rows is not None:
                entries += rows[0] if chosen is None else chosen[-1]
        return 2 * s_q * h_q * entries * products(d_qk)

    return count


# ---- sparse MLA: the gradient


def _backward(
    q, kv, *others, dq_dtype=None, dkv_dtype=None, attn_sink=None, extra_kv=None, **options
):
    def of_rows(rows):
        return torch.empty(rows.shape, dtype=dkv_dtype or _accumulator(rows), device=rows.device)

    if extra_kv is not None:
        options["dextra_kv"] = of_rows(extra_kv)
    dq, dkv, *more = _sparse_mla.backward(
        q,
        kv,
        *others,
        attn_sink=attn_sink,
        extra_kv=extra_kv,
        dq=torch.empty(q.shape, dtype=dq_dtype or q.dtype, device=q.device),
        dkv=of_rows(kv),
        **options,
    )
    if attn_sink is None:
        more.insert(0, q.new_empty(0, dtype=_accumulator(q)))
    if extra_kv is None:
        more.append(kv.new_empty(0))
    return dq, dkv, *more


def _those_asked_for(gradients, options):
    dq, dkv, d_sink, dextra_kv = gradients
    asked = ((d_sink, "attn_sink"), (dextra_kv, "extra_kv"))
    return dq, dkv, *(gradient for gradient, of in asked if options.get(of) is not None)


@_operators.operator(
    _backward,
    _operators.signature_of(
        _sparse_mla.backward,
        plus="dq_dtype: dtype | None = None, dkv_dtype: dtype | None = None",
        without=("dq", "dkv", "d_sink", "dextra_kv"),
    ),
    results=4,
    after=_those_asked_for,
    flops=_sparse_mla_flops(lambda d_qk: 3 * d_qk + 2 * _VALUE_DIM),
)
def sparse_mla_backward(
    q, kv, *others, attn_sink=None, extra_kv=None, dq_dtype=None, dkv_dtype=None, **options
):
    """winnow.sparse_mla.backward() as an operator: (dq, dkv), then d_sink with a sink, then
    dextra_kv with extra_kv.

    dq is as q, and dkv and dextra_kv are float32 (float64 with float64), unless dq_dtype or
    dkv_dtype is given. The operator itself always has four results; what is not asked for is empty.
    """

    def of_rows(rows):
        return rows.new_empty(rows.shape, dtype=dkv_dtype or _accumulator(rows))

    return (
        q.new_empty(q.shape, dtype=dq_dtype or q.dtype),
        of_rows(kv),
        q.new_empty(0 if attn_sink is None else (q.shape[1],), dtype=_accumulator(q)),
        kv.new_empty(0) if extra_kv is None else of_rows(extra_kv),
    )


# ---- sparse MLA: forward


_CHOICE = (
    "indices", "topk_length", "key_start", "key_end",
    "extra_indices", "extra_topk_length", "extra_key_start", "extra_key_end",
)  # fmt: skip
_NUMBERS = ("scale", "q_start", "k_stride", "extra_k_stride", "deterministic", "dkv_dtype")


class _Recorded(_operators.Recorded):
    """sparse_mla_forward under autograd. The inputs are the tensors with gradients, which torch
    only tracks as inputs of their own, the results, and all arguments of the operator (`values`),
    which `arguments` finds by name."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, kv, attn_sink, extra_kv, _, values, arguments = inputs
        out, max_logits, lse = output
        ctx.mark_non_differentiable(max_logits, lse)
        ctx.numbers = arguments.of(values, *_NUMBERS)
        choice = arguments.of(values, *_CHOICE)
        ctx.save_for_backward(q, kv, attn_sink, extra_kv, out, lse, *choice)

    @staticmethod
    def backward(ctx, d_out, d_max_logits, d_lse):
        q, kv, attn_sink, extra_kv, out, lse, indices, *choice = ctx.saved_tensors
        options = dict(zip(_CHOICE[1:], choice, strict=True))
        options.update(zip(_NUMBERS, ctx.numbers, strict=True))
        options["dkv_dtype"] = options["dkv_dtype"] or kv.dtype
        dq, dkv, d_sink, dextra_kv = torch.ops.winnow.sparse_mla_backward(
            q,
            kv,
            indices,
            out,
            lse,
            # Sums over out give an expanded gradient, whose last dimension is not contiguous.
            d_out.contiguous(),
            attn_sink=attn_sink,
            extra_kv=extra_kv,
            **options,
        )
        _, _, sink, extra, *_ = ctx.needs_input_grad
        gradients = dq, dkv, d_sink if sink else None, dextra_kv if extra else None
        return *gradients, None, None, None


@_operators.operator(
    _sparse_mla.forward,
    plus="deterministic: bool = False, dkv_dtype: dtype | None = None",
    results=3,
    autograd=_operators.recording(
        _operators.recorded_by(_Recorded), leaves=("q", "kv", "attn_sink", "extra_kv")
    ),
    casts={"q": None, "kv": None, "extra_kv": None},
    flops=_sparse_mla_flops(lambda d_qk: d_qk + _VALUE_DIM),
)
def sparse_mla_forward(q, *others, **options):
    """winnow.sparse_mla.forward() as an operator: (out, max_logits, lse), differentiable in out.

    deterministic and dkv_dtype are for its gradient, as in sparse_mla_attention().
    """
    s_q, h_q = q.shape[:2]
    max_logits = q.new_empty((s_q, h_q), dtype=_accumulator(q))
    return q.new_empty((s_q, h_q, _VALUE_DIM)), max_logits, torch.empty_like(max_logits)


def _sink_in_f32(options):
    sink = options.get("attn_sink")
    if isinstance(sink, Tensor) and sink.dtype in (torch.bfloat16, torch.float16):
        options["attn_sink"] = sink.float()  # as module.bfloat16() makes one
    return _whether_lse(options)


@_operators.calling(
    torch.ops.winnow.sparse_mla_forward,
    sparse_mla_forward.declared.plus(
        "return_lse: bool = False", "tuple[T, T] if return_lse else T"
    ),
    before=_sink_in_f32,
    after=_lse_if_wanted,
)
def sparse_mla_attention(q, kv, indices, **options):
    """Top-k sparse MLA attention, differentiable in q, kv, attn_sink and extra_kv.

    Args:
        q: [s_q, h_q, d_qk]; kv: [s_kv, 1, d_qk]; indices: [s_q, 1, topk] or [s_q, topk], int32, or
            None with key_start and key_end: dense; extra_kv: [s_extra, 1, d_qk], a second source of
            rows; all others up to in_list_order: as in winnow.sparse_mla.forward(). Under
            torch.autocast q, kv and extra_kv are cast to its dtype. attn_sink may be bfloat16 or
            float16, too, as module.bfloat16() makes one.
        deterministic: gradients that are bitwise equal run after run.
        dkv_dtype: the dtype in which the backward kernel writes the gradients of kv and extra_kv:
            torch.float32, or that of kv (None). Autograd then casts them to the tensors' own.
        return_lse: return (out, lse); lse [s_q, h_q] is not differentiable.

    Returns:
        out [s_q, h_q, 512], as q.

    Raises:
        ValueError, winnow.Error: as winnow.sparse_mla.forward().
    """


# ---- sparse MLA: the attention distribution


def _distribution(q, *others, extra_kv=None, **options):
    if extra_kv is not None:
        return _sparse_mla.distribution(q, *others, extra_kv=extra_kv, **options)
    return _sparse_mla.distribution(q, *others, **options), q.new_empty(0, dtype=_accumulator(q))


def _first_without_extra(sums, options):
    return sums[0] if options.get("extra_kv") is None else sums


@torch.no_grad()
@_operators.operator(
    _distribution,
    _operators.signature_of(_sparse_mla.distribution),
    results=2,
    after=_first_without_extra,
    casts={"q": None, "kv": None, "extra_kv": None},
    flops=_sparse_mla_flops(lambda d_qk: d_qk),
)
def sparse_mla_distribution(q, kv, indices, *others, extra_kv=None, extra_indices=None, **options):
    """winnow.sparse_mla.distribution() as an operator; a teacher, without a gradient.

    The operator itself always has two results; without extra_kv the second one is empty.
    """

    def sums(rows, chosen):
        columns = rows.shape[0] if chosen is None else chosen.shape[-1]
        return q.new_empty((q.shape[0], columns), dtype=_accumulator(q))

    extra = q.new_empty(0, dtype=_accumulator(q))
    return sums(kv, indices), extra if extra_kv is None else sums(extra_kv, extra_indices)


# ---- paged decode


def _paged_flops(products):
    def count(query, key_cache, block_tables, **options):
        num_seqs, num_heads, head_size = query
        tokens = block_tables[1] * key_cache[3]  # for which the block tables have room
        return 2 * num_seqs * num_heads * tokens * products * head_size

    return count


def _step(query):
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=_accumulator(query))


@_operators.operator(
    functools.partial(_paged_xl.attention, return_lse=True),
    face="return_lse: bool = False",
    results=2,
    before=_whether_lse,
    after=_lse_if_wanted,
    casts=dict.fromkeys(("query", "pos_bias_u", "matrix_bd"), "key_cache"),
    flops=_paged_flops(2),
)
def paged_xl_attention(query, *others):
    """winnow.paged_xl.attention() as an operator: out, or (out, lse)."""
    return _step(query)


@_operators.operator(
    functools.partial(_paged_xl.attention_fused, return_lse=True),
    face="return_lse: bool = False",
    results=2,
    before=_whether_lse,
    after=_lse_if_wanted,
    casts=dict.fromkeys(("query", "pos_bias_u", "pos_bias_v", "r"), "key_cache"),
    flops=_paged_flops(3),
)
def paged_xl_attention_fused(query, *others):
    """winnow.paged_xl.attention_fused() as an operator: out, or (out, lse)."""
    return _step(query)


@_operators.operator(
    _paged_xl.append,
    results=0,
    changes=("key_cache", "value_cache"),
    casts={"key": "key_cache", "value": "value_cache"},
)
def paged_xl_append(*tensors):
    """winnow.paged_xl.append() as an operator that changes both caches."""


@_operators.operator(
    _paged_xl.position_term,
    results=1,
    casts=dict.fromkeys(("query", "pos_bias_v", "r")),
    flops=lambda query, r, **options: 2 * query[0] * r[0] * r[1] * r[2],
)
def paged_xl_position_term(query, pos_bias_v, r, *others):
    """winnow.paged_xl.position_term() as an operator: [num_seqs, num_heads, max_distance]."""
    return query.new_empty((*query.shape[:2], r.shape[1]))


# ---- expert parallelism: the counts; what moves tokens is in winnow.expert_parallel.operators


@_operators.operator(_expert_parallel.layout, results=4)
def expert_parallel_layout(expert_indices, experts, world_size, local_world_size):
    """winnow.expert_parallel.layout() as an operator: (tokens_per_rank, tokens_per_node,
    tokens_per_expert, is_token_in_rank)."""
    return (
        expert_indices.new_empty(world_size),
        expert_indices.new_empty(world_size // local_world_size),
        expert_indices.new_empty(experts),
        expert_indices.new_empty((expert_indices.shape[0], world_size), dtype=torch.bool),
    )
