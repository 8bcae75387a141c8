"""The lightning indexer's operations as torch operators; public as winnow.torch.indexer_*."""

import torch

from winnow import _operators
from winnow._winnow import indexer as _indexer

# What torch.autocast casts. Weights may be float32 beside any q and k.
_CASTS = {"q": None, "k": None}


# The products with k; the sums over heads are not counted, as torch counts none of its own.


def _columns(k, indices, width):
    """Of scores, by the shapes of k and of indices."""
    if indices is not None:
        return indices[1]
    return k[0] if width is None else width


def _flops(products):
    def count(q, k, indices=None, width=None, **options):
        s_q, heads, d = q
        return 2 * s_q * heads * d * _columns(k, indices, width) * products

    return count


# ---- topk


def _three_results(native):
    def choose(q, *others, return_scores=False, **options):
        results = native(q, *others, return_scores=return_scores, **options)
        return results if return_scores else (*results, q.new_empty(0, dtype=torch.float32))

    return choose


def _choice(q, topk, return_scores):
    length = q.new_empty(q.shape[:-2], dtype=torch.int32)
    indices = q.new_empty((*length.shape, topk), dtype=torch.int32)
    return indices, length, q.new_empty(indices.shape if return_scores else 0, dtype=torch.float32)


def _scores_if_wanted(results, options):
    return results if options.get("return_scores", False) else results[:2]


@_operators.operator(
    _three_results(_indexer.topk),
    _operators.signature_of(_indexer.topk),
    results=3,
    after=_scores_if_wanted,
    casts=_CASTS,
    flops=_flops(1),
)
def indexer_topk(q, k, weights, topk, *, return_scores=False, **options):
    """winnow.indexer.topk() as an operator: (indices, length), with return_scores (indices, length,
    scores).

    The choice has no gradient, and asking for one of these scores is an error: those of
    indexer_scores() at the indices have one. The operator itself always has three results; the last
    one is empty where scores are not asked for.
    """
    return _choice(q, topk, return_scores)


# ---- topk over a paged cache


def _paged_flops(q, block_tables, **options):
    b, s_q, heads, d = q
    return 2 * b * s_q * heads * d * 64 * block_tables[1]


@_operators.operator(
    _three_results(_indexer.topk_paged),
    _operators.signature_of(_indexer.topk_paged),
    results=3,
    after=_scores_if_wanted,
    flops=_paged_flops,
)
def indexer_topk_paged(
    q, pages, weights, block_tables, context_lens, topk, *, return_scores=False, **options
):
    """winnow.indexer.topk_paged() as an operator: (indices, length), with return_scores (indices,
    length, scores). It has no gradient. The operator itself always has three results; the last one
    is empty where scores are not asked for.
    """
    return _choice(q, topk, return_scores)


@_operators.operator(_indexer.scores_paged, results=1, flops=_paged_flops)
def indexer_scores_paged(q, pages, weights, block_tables, context_lens, max_context, **options):
    """winnow.indexer.scores_paged() as an operator. It has no gradient."""
    return q.new_empty((*q.shape[:2], max_context), dtype=torch.float32)


# ---- scores and their gradient


def _backward(q, k, *others, dk_dtype=None, **options):
    dk = torch.empty(k.shape, dtype=dk_dtype or torch.float32, device=k.device)
    return _indexer.backward(q, k, *others, dk=dk, **options)


@_operators.operator(
    _backward,
    _operators.signature_of(
        _indexer.backward, plus="dk_dtype: dtype | None = None", without=("dq", "dk", "d_weights")
    ),
    results=3,
    flops=_flops(3),
)
def indexer_backward(q, k, weights, *others, dk_dtype=None, **options):
    """winnow.indexer.backward() as an operator: (dq, dk, d_weights).

    dq is as q (float32 for float8), d_weights float32, and dk float32 unless its dtype is given.
    """
    f8 = q.dtype == torch.float8_e4m3fn
    return (
        q.new_empty(q.shape, dtype=torch.float32 if f8 else q.dtype),
        k.new_empty(k.shape, dtype=dk_dtype or torch.float32),
        weights.new_empty(weights.shape, dtype=torch.float32),
    )


class _RecordedScores(_operators.Recorded):
    """indexer_scores under autograd; arguments as in winnow.torch._Recorded."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, weights, _, values, arguments = inputs
        indices, k_scale, start, end, width, *ctx.options = arguments.of(
            values, "indices", "k_scale", "key_start", "key_end", "width", "q_start", "k_stride",
            "deterministic",
        )  # fmt: skip
        ctx.width = width
        ctx.save_for_backward(q, k, weights, indices, k_scale, start, end)

    @staticmethod
    def backward(ctx, d_scores):
        q, k, weights, indices, k_scale, key_start, key_end = ctx.saved_tensors
        q_start, k_stride, deterministic = ctx.options
        if ctx.width is not None:  # those of the columns, which may be no rows
            columns = torch.arange(ctx.width, device=k.device)
            rows = key_start.long()[:, None] + columns
            indices = rows.clamp_(-1, k.shape[0]).int()
        dq, dk, d_weights = torch.ops.winnow.indexer_backward(
            q,
            k,
            weights,
            indices,
            # A sum of scores gives an expanded gradient, whose last dimension is not contiguous.
            d_scores.contiguous(),
            k_scale=k_scale,
            key_start=key_start,
            key_end=key_end,
            q_start=q_start,
            k_stride=k_stride,
            deterministic=deterministic,
            dk_dtype=None if k.dtype == torch.float8_e4m3fn else k.dtype,
        )
        gradients = dq.to(q.dtype), dk.to(k.dtype), d_weights.to(weights.dtype)
        wanted = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None, None


@_operators.operator(
    _indexer.scores,
    plus="deterministic: bool = False",
    results=1,
    casts=_CASTS,
    autograd=_operators.recording(
        _operators.recorded_by(_RecordedScores), leaves=("q", "k", "weights")
    ),
    flops=_flops(1),
)
def indexer_scores(q, k, weights, indices=None, *, width=None, **options):
    """winnow.indexer.scores() as an operator, differentiable in q, k and weights.

    Entries that are absent or not visible are -inf and pass no gradient on. deterministic is for
    the gradient, as in winnow.indexer.backward().
    """
    columns = _columns(k.shape, None if indices is None else indices.shape, width)
    return q.new_empty((q.shape[0], columns), dtype=torch.float32)


# ---- quantize


@_operators.operator(
    _indexer.quantize,
    _operators.signature_of(_indexer.quantize, without=("pages", "slots")),
    results=2,
)
def indexer_quantize(x, **options):
    """winnow.indexer.quantize() as an operator: (rows, scale). It has no gradient."""
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


def _quantize_pages(x, pages, slots, **options):
    _indexer.quantize(x, pages=pages, slots=slots, **options)


@_operators.operator(
    _quantize_pages,
    "x: T, pages: T, slots: T, *, power_of_two: bool = False",
    results=0,
    changes=("pages",),
)
def indexer_quantize_pages(*tensors, **options):
    """winnow.indexer.quantize() into pages, as an operator that changes them."""
