"""The loss that trains a lightning indexer; public as winnow.torch.indexer_loss."""

from numbers import Integral
from typing import Any, NamedTuple, NoReturn, Optional, Tuple, Union

import torch
from torch import Tensor

from winnow import _operators
from winnow._refusal import refuse
from winnow._winnow import _in_dry_run
from winnow._winnow import indexer as _indexer
from winnow._winnow import sparse_mla as _sparse_mla

# About how many scores a chunk of queries has, unless the caller gives `chunk`: 64 MiB in float32.
# A few tensors of that size exist at a time.
_CHUNK_SCORES = 1 << 24


class _Problem(NamedTuple):
    """The arguments of the operators. Everything but q, k and weights may be absent."""

    q: Tensor
    k: Tensor
    weights: Tensor
    target: Optional[Tensor] = None
    indices: Optional[Tensor] = None
    attention_q: Optional[Tensor] = None
    attention_kv: Optional[Tensor] = None
    lse: Optional[Tensor] = None
    scale: Optional[float] = None
    attn_sink: Optional[Tensor] = None
    key_start: Optional[Tensor] = None
    key_end: Optional[Tensor] = None
    chunk: int = 0

    def ranges(self):
        """key_start and key_end, [s_q], within the rows of k."""
        s_q, s_k = self.q.shape[0], self.k.shape[0]
        device = self.q.device
        start, end = self.key_start, self.key_end
        if start is None:
            start = torch.zeros(s_q, dtype=torch.int32, device=device)
        if end is None:
            end = torch.full((s_q,), s_k, dtype=torch.int32, device=device)
        return start.clamp(0, s_k), end.clamp(0, s_k)

    def chunks(self):
        s_q = self.q.shape[0]
        step = self.chunk
        if step <= 0:
            columns = self.k.shape[0] if self.indices is None else self.indices.shape[1]
            step = max(1, _CHUNK_SCORES // max(1, columns))
        for begin in range(0, s_q, step):
            yield slice(begin, min(s_q, begin + step))
            if _in_dry_run():  # the other chunks are checked in the same way
                return


class _Chunk(NamedTuple):
    """What the loss needs of one chunk of queries. The first three are [queries, columns]."""

    visible: Tensor  # whether the query sees the entry
    log_p: Tensor  # the log softmax of the scores; 0 for a query that sees nothing
    target: Tensor  # each row sums to 1, or to 0 where it has no weight
    sees: Tensor  # [queries]: something is visible
    limits: dict  # keywords for the indexer: indices, key_start and key_end of these queries


def attention_of_heads(
    q: Tensor,
    kv: Tensor,
    indices: Optional[Tensor],
    lse: Tensor,
    scale: Optional[float],
    attn_sink: Optional[Tensor],
    **limits: Tensor,
) -> Tensor:
    """The attention summed over the heads, [s_q, topk], or [s_q, s_kv] without indices: a target.

    lse is that of the forward pass; limits are key_start and key_end where there are no indices.
    """
    if attn_sink is not None:  # the sink has a share of each head's softmax
        lse = torch.logaddexp(lse, attn_sink)
    return _sparse_mla.distribution(q, kv, indices, lse, scale=scale, **limits)


def _look_at(problem: _Problem, queries: slice, start: Tensor, end: Tensor) -> _Chunk:
    q, k, weights, target, indices = problem[:5]
    start, end = start[queries], end[queries]
    s_k = k.shape[0]
    limits = {"key_start": start, "key_end": end}
    if indices is None:
        rows = torch.arange(s_k, dtype=torch.int32, device=q.device)[None]
        chosen = {"indices": None}
    else:
        rows = indices[queries]
        chosen = {"indices": rows}
    visible = (rows >= start[:, None]) & (rows < end[:, None])
    scores = _indexer.scores(q[queries], k, weights[queries], **chosen, **limits)

    if target is not None:
        wanted = target[queries].float()
    else:
        wanted = attention_of_heads(
            problem.attention_q[queries],
            problem.attention_kv,
            chosen["indices"],
            problem.lse[queries],
            problem.scale,
            problem.attn_sink,
            **(limits if indices is None else {}),
        )
    wanted = torch.where(visible, wanted, 0)
    total = wanted.sum(-1, keepdim=True)
    wanted = torch.where(total == 0, 0, wanted / total)
    sees = visible.any(-1)
    log_p = torch.where(sees[:, None], torch.log_softmax(scores, -1), 0)
    return _Chunk(visible, log_p, wanted, sees, {**chosen, **limits})


def _flops(products):
    """A function that counts the FLOPs of a call from the shapes of its arguments: `products` times
    those of the scores, and those that form the target from the attention."""

    def count(q, k, weights, target, indices, attention_q, *others, out_shape=None, **options):
        s_q, heads, d = q
        rows = k[0] if indices is None else indices[1]
        teacher = 0 if attention_q is None else attention_q[1] * attention_q[2]
        return 2 * s_q * rows * (heads * d * products + teacher)

    return count


# The kernels of the two operators. They take the fields of _Problem, _gradient also d_rows.


def _rows(*arguments):
    problem = _Problem(*arguments)
    values = problem.q.new_empty(problem.q.shape[0], dtype=torch.float32)
    sees = torch.empty_like(values)
    start, end = problem.ranges()
    for queries in problem.chunks():
        chunk = _look_at(problem, queries, start, end)
        target = chunk.target
        # An entry whose target is 0 adds 0: the product would be NaN where log_p is -inf.
        terms = torch.where(target == 0, 0, target * (target.log() - chunk.log_p))
        values[queries] = terms.sum(-1)
        sees[queries] = chunk.sees.float()
    return values, sees


def _gradient(d_rows, *arguments):
    problem = _Problem(*arguments)
    q, k, weights = problem[:3]
    dq, d_weights = torch.empty_like(q), torch.empty_like(weights)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dk_of_chunk = torch.empty_like(dk)
    start, end = problem.ranges()
    deterministic = torch.are_deterministic_algorithms_enabled()
    for queries in problem.chunks():
        chunk = _look_at(problem, queries, start, end)
        # The target of a query sums to 1, or to 0 if there is nothing to learn from it.
        weight = chunk.target.sum(-1, keepdim=True)
        difference = chunk.log_p.exp() * weight - chunk.target
        d_scores = torch.where(chunk.visible, difference * d_rows[queries, None], 0)
        _indexer.backward(
            q[queries],
            k,
            weights[queries],
            d_scores=d_scores,
            deterministic=deterministic,
            dq=dq[queries],
            dk=dk_of_chunk,
            d_weights=d_weights[queries],
            **chunk.limits,
        )
        dk += dk_of_chunk
    return dq, dk.to(k.dtype), d_weights


@_operators.operator(
    _gradient,
    "d_rows: T, " + _operators.parameters_of(_Problem),
    results=3,
    flops=lambda d_rows, *others, **options: _flops(4)(*others, **options),
)
def indexer_loss_backward(d_rows, q, k, weights, *others):
    """The gradients of indexer_loss_rows() in q, k and weights."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(weights)


class _Recorded(_operators.Recorded):
    """indexer_loss_rows under autograd: saves only its inputs; backward computes the rest again."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, _, _, values, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in values]

    @staticmethod
    def backward(ctx, d_rows, d_sees):
        tensors = iter(ctx.saved_tensors)
        values = [next(tensors) if other is None else other[0] for other in ctx.others]
        gradients = torch.ops.winnow.indexer_loss_backward(d_rows.contiguous(), *values)
        wanted = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None, None


@_operators.operator(
    _rows,
    _operators.parameters_of(_Problem),
    results=2,
    casts={"q": None, "k": None, "attention_q": None, "attention_kv": None},
    autograd=_operators.recording(_operators.recorded_by(_Recorded), leaves=("q", "k", "weights")),
    flops=_flops(1),
)
def indexer_loss_rows(q, *others):
    """The loss of every query, and 1 for those that see something: float32, [s_q] each."""
    values = q.new_empty(q.shape[0], dtype=torch.float32)
    return values, torch.empty_like(values)


def _refuse(argument: str, wanted: str, got: Any) -> NoReturn:
    refuse("indexer_loss", argument, wanted, got)


def _dense(argument: str, value: Any) -> Tensor:
    """The value, if it is a tensor whose shape can be looked at."""
    if not isinstance(value, Tensor):
        _refuse(argument, "a tensor of torch", type(value).__name__)
    if value.is_nested:
        _refuse(argument, "a dense tensor", "a nested one")
    return value


def _teacher(attention: Any, s_q: int, s_k: int) -> Tuple[Union[Tensor, float, None], ...]:
    """The parts of the argument `attention`, without their gradients."""
    if not isinstance(attention, (tuple, list)) or len(attention) != 5:
        listed = isinstance(attention, (tuple, list))
        got = f"{len(attention)} of them" if listed else type(attention).__name__
        _refuse("attention", "(q, kv, lse, scale, attn_sink)", got)
    q, kv, lse, _, sink = attention
    if _dense("attention: q", q).dim() != 3:
        _refuse("attention: q", "3 dimensions [s_q, h, d]", f"shape {list(q.shape)}")
    if _dense("attention: kv", kv).dim() != 3:
        _refuse("attention: kv", "3 dimensions [s_k, 1, d]", f"shape {list(kv.shape)}")
    if (q.shape[0], kv.shape[0]) != (s_q, s_k):
        wanted = f"q of s_q={s_q} queries and kv of s_k={s_k} rows"
        _refuse("attention", wanted, f"{q.shape[0]} and {kv.shape[0]}")
    heads = q.shape[1]
    # Checked here, since logaddexp(lse, sink) takes shapes and dtypes that the library refuses.
    wide = (torch.float32, torch.float64)
    sinks = (*wide, torch.bfloat16, torch.float16)
    if _dense("attention: lse", lse).shape != (s_q, heads) or lse.dtype not in wide:
        wanted = f"float32 or float64 of shape [s_q={s_q}, h={heads}]"
        _refuse("attention: lse", wanted, f"{lse.dtype} of shape {list(lse.shape)}")
    if sink is not None and (
        _dense("attention: attn_sink", sink).shape != (heads,) or sink.dtype not in sinks
    ):
        wanted = f"floating-point numbers of shape [h={heads}]"
        _refuse("attention: attn_sink", wanted, f"{sink.dtype} of shape {list(sink.shape)}")
    return tuple(a.detach() if isinstance(a, Tensor) else a for a in attention)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Optional[Tensor] = None,
    indices: Optional[Tensor] = None,
    *,
    attention: Optional[Tuple[Tensor, Tensor, Tensor, Optional[float], Optional[Tensor]]] = None,
    key_start: Optional[Tensor] = None,
    key_end: Optional[Tensor] = None,
    reduction: str = "mean",
    chunk: Optional[int] = None,
) -> Tensor:
    """The KL divergence of the softmax of the indexer's scores from the attention's distribution,
    differentiable in q, k and weights.

        loss[i] = sum over j of t[i,j] * (log t[i,j] - log softmax(scores[i,:])[j])

    over the rows j that query i sees: all of them (the warm-up), or with indices the chosen ones. t
    is the target, divided by its sum over these rows; it has no gradient, and a term with t = 0 is
    0. A query whose target sums to 0 has the loss 0.

    Args:
        q: [s_q, h, d], k: [s_k, d], weights: [s_q, h]: as in winnow.indexer.scores(), float32 or
            bfloat16 (on the CPU also float16).
        target: [s_q, s_k], or [s_q, topk] with indices, any float dtype; what it holds for rows
            that a query does not see is ignored. Exactly one of target and attention is given.
        indices: [s_q, topk] or [s_q, 1, topk], int32, as indexer_topk() gives them; one outside
            [0, s_k) is absent.
        attention: (q, kv, lse, scale, attn_sink) of the attention that teaches: those that
            sparse_mla_attention() was called with, over the same rows as the loss, and the lse that
            it returned. scale and attn_sink may be None. The target is formed from them chunk by
            chunk, by winnow.sparse_mla.distribution().
        key_start, key_end: [s_q], int32: query i sees rows [max(0, start), min(s_k, end)).
        reduction: "mean" over the queries that see something (0 if none does), "sum", or "none":
            [s_q], 0 where a query sees nothing.
        chunk: queries that are worked on at a time. Memory grows with chunk * s_k, or chunk * topk;
            None takes as many as give 2^24 scores.

    Returns:
        The loss, float32. The backward pass forms scores and target again, chunk by chunk. Its
        gradient of k is bitwise equal from run to run with torch.use_deterministic_algorithms().

    Raises:
        ValueError, winnow.Error: an argument is not as described.
    """
    if (target is None) == (attention is None):
        _refuse("target", "it or attention", "neither" if target is None else "both")
    if reduction not in ("mean", "sum", "none"):
        _refuse("reduction", "mean, sum or none", reduction)
    if chunk is not None and not (isinstance(chunk, Integral) and chunk >= 1):
        _refuse("chunk", "1 or more", chunk)
    if _dense("q", q).dim() != 3:
        _refuse("q", "3 dimensions [s_q, h, d]", f"shape {list(q.shape)}")
    if _dense("k", k).dim() != 2:
        _refuse("k", "2 dimensions [s_k, d]", f"shape {list(k.shape)}")
    s_q, s_k = q.shape[0], k.shape[0]
    if s_k >= 2**31:
        _refuse("k", "up to 2^31 - 1 rows", s_k)
    if _dense("weights", weights).shape != q.shape[:2]:
        _refuse("weights", f"shape [s_q={s_q}, h={q.shape[1]}]", list(weights.shape))
    name, columns = "s_k", s_k
    if indices is not None:
        if _dense("indices", indices).dim() == 3 and indices.shape[1] == 1:
            indices = indices[:, 0]
        if indices.dim() != 2 or indices.shape[0] != s_q or indices.dtype != torch.int32:
            got = f"{indices.dtype} of shape {list(indices.shape)}"
            _refuse("indices", f"int32 of shape [s_q={s_q}, topk]", got)
        name, columns = "topk", indices.shape[1]
    for argument, limit in (("key_start", key_start), ("key_end", key_end)):
        if limit is None:
            continue
        if _dense(argument, limit).shape != (s_q,) or limit.dtype != torch.int32:
            got = f"{limit.dtype} of shape {list(limit.shape)}"
            _refuse(argument, f"int32 of shape [s_q={s_q}]", got)
    teacher: Tuple[Union[Tensor, float, None], ...] = (None,) * 5
    if target is not None:
        if _dense("target", target).shape != (s_q, columns):
            _refuse("target", f"shape [s_q={s_q}, {name}={columns}]", list(target.shape))
        if not target.is_floating_point():
            _refuse("target", "a float dtype", target.dtype)
        target = target.detach()
    else:
        teacher = _teacher(attention, s_q, s_k)
    losses, sees = torch.ops.winnow.indexer_loss_rows(
        q, k, weights, target, indices, *teacher, key_start, key_end, chunk or 0
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / sees.sum().clamp(min=1)
