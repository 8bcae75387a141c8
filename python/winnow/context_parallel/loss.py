"""The loss that trains an indexer, over rows of all ranks."""

from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow.context_parallel.placement import Placement
from winnow.context_parallel.rows import Part, Rows

CHUNK_SCORES = 1 << 24
"""About how many scores a chunk of queries has, unless the caller says otherwise."""


class Teacher(NamedTuple):
    """The attention that teaches; all of it without gradients."""

    q: Tensor  # [s_q, heads, d]
    rows: Rows
    lse: Tensor  # [s_q, heads], with the sink
    scale: Optional[float]
    heads: Optional[dist.ProcessGroup]  # of ranks that have other heads of the same queries


class Problem(NamedTuple):
    """What a call is about, but for what autograd keeps."""

    keys: Rows
    teacher: Optional[Teacher]
    chunk: Optional[int]
    deterministic: bool


class _Tensors(NamedTuple):
    q: Tensor
    weights: Tensor
    k: Tensor  # this rank's
    start: Tensor
    end: Tensor
    indices: Optional[Tensor]
    target: Optional[Tensor]  # or a teacher
    attention_q: Optional[Tensor]
    attention_rows: Optional[Tensor]  # this rank's
    lse: Optional[Tensor]


class _Chunk(NamedTuple):
    """Some queries and the rows of a part: [queries, columns] each."""

    queries: slice
    visible: Tensor
    scores: Tensor
    target: Tensor  # 0 where not visible; of the sum over all parts, not divided by it
    limits: dict


class _Half(NamedTuple):
    """What forward and backward pass do alike."""

    tensors: _Tensors
    placement: Placement
    scale: Optional[float]
    heads: Optional[dist.ProcessGroup]
    chunk: Optional[int]

    def chunks(self, part: Part, teaching: Optional[Part]) -> Iterator[_Chunk]:
        number, keys = part
        q, weights, _, start, end, indices, target, attending, _, lse = self.tensors
        if number is not None:
            start, end = (self.placement.of_limits(number, limit) for limit in (start, end))
            if indices is not None:
                indices = self.placement.of_indices(number, indices)
            elif target is not None:
                target = self.placement.columns(number, target)
        else:
            start, end = (limit.clamp(0, keys.shape[0]) for limit in (start, end))
        columns = keys.shape[0] if indices is None else indices.shape[1]
        step = self.chunk or max(1, CHUNK_SCORES // max(1, columns))
        every = torch.arange(columns, dtype=torch.int32, device=q.device)[None]
        for begin in range(0, q.shape[0], step):
            at = slice(begin, min(q.shape[0], begin + step))
            ranges = {"key_start": start[at], "key_end": end[at]}
            chosen = None if indices is None else indices[at]
            rows = every if chosen is None else chosen
            visible = (rows >= start[at, None]) & (rows < end[at, None])
            scores = torch.ops.winnow.indexer_scores(q[at], keys, weights[at], chosen, **ranges)
            if target is not None:
                wanted = target[at].float()
            else:
                wanted, _ = torch.ops.winnow.sparse_mla_distribution(
                    attending[at], teaching[1], chosen, lse[at], scale=self.scale,
                    **(ranges if chosen is None else {}),
                )  # fmt: skip
                if self.heads is not None:
                    dist.all_reduce(wanted, group=self.heads)
            wanted = torch.where(visible, wanted.float(), 0)
            yield _Chunk(at, visible, scores, wanted, {"indices": chosen, **ranges})


class _Loss(torch.autograd.Function):
    """The loss of each query from sums over its rows, so that no part is needed twice:

    (sum of t log t - sum of t s) / Z - log Z + logsumexp(s),  Z = sum of t
    """

    @staticmethod
    def forward(ctx, problem, carrier, *values):
        tensors = _Tensors(*values)
        half = _half(problem, tensors)
        zeros = torch.zeros(tensors.q.shape[0], device=tensors.q.device)
        total, cross, lse = zeros.clone(), zeros.clone(), torch.full_like(zeros, -torch.inf)
        sees = torch.zeros_like(zeros, dtype=torch.bool)
        teaching = iter(()) if problem.teacher is None else problem.teacher.rows.parts()
        for part in problem.keys.parts():
            for chunk in half.chunks(part, next(teaching, None)):
                at, target = chunk.queries, chunk.target
                total[at] += target.sum(1)
                terms = target * (target.log() - chunk.scores)
                cross[at] += torch.where(target == 0, 0, terms).sum(1)
                lse[at] = torch.logaddexp(lse[at], torch.logsumexp(chunk.scores, 1))
                sees[at] |= chunk.visible.any(1)
        learns = total != 0
        losses = torch.where(learns, cross / total - total.log() + lse, 0)
        ctx.save_for_backward(total, lse, *values)
        ctx.source = problem.keys.source
        ctx.teaching = None if problem.teacher is None else problem.teacher.rows.source
        ctx.half = half._replace(tensors=None)
        ctx.deterministic = problem.deterministic
        sees = sees.float()
        ctx.mark_non_differentiable(sees)
        return losses, sees

    @staticmethod
    @once_differentiable
    def backward(ctx, d_losses, d_sees):
        total, lse, *values = ctx.saved_tensors
        tensors = _Tensors(*values)
        half = ctx.half._replace(tensors=tensors)
        q, weights = tensors.q, tensors.weights
        dq, d_weights = (torch.zeros_like(t, dtype=torch.float32) for t in (q, weights))
        learns = total != 0
        teaching = iter(())
        if ctx.teaching is not None:
            teaching = ctx.teaching.parts_again(tensors.attention_rows)
        for part in ctx.source.parts_again(tensors.k):
            dk = torch.zeros(part[1].shape, device=q.device)
            for chunk in half.chunks(part, next(teaching, None)):
                at = chunk.queries
                given = learns[at, None]
                wanted = torch.where(given, chunk.target / total[at, None], 0)
                difference = (chunk.scores - lse[at, None]).exp() * given - wanted
                d_scores = torch.where(chunk.visible, difference * d_losses[at, None], 0)
                gradients = torch.ops.winnow.indexer_backward(
                    q[at], part[1], weights[at], d_scores=d_scores,
                    deterministic=ctx.deterministic, **chunk.limits,
                )  # fmt: skip
                dq[at] += gradients[0]
                dk += gradients[1]
                d_weights[at] += gradients[2]
            ctx.source.add(part[0], dk)
        if ctx.teaching is not None:
            ctx.teaching.leave()
        carrier = ctx.source.leave()
        others: List[Any] = [None] * (len(_Tensors._fields) - 2)
        return None, carrier, dq.to(q.dtype), d_weights.to(weights.dtype), *others


def _half(problem: Problem, tensors: _Tensors) -> _Half:
    teacher = problem.teacher
    of_teacher = (None, None) if teacher is None else (teacher.scale, teacher.heads)
    return _Half(tensors, problem.keys.placement, *of_teacher, problem.chunk)


def losses(
    problem: Problem,
    q: Tensor,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    indices: Optional[Tensor],
    target: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """The loss of every query, and 1 for those that see something: float32, [s_q] each."""
    teacher = problem.teacher
    of_teacher = (None,) * 3 if teacher is None else (teacher.q, teacher.rows.local, teacher.lse)
    keys = problem.keys
    return _Loss.apply(
        problem, keys.read(), q, weights, keys.local, start, end, indices, target, *of_teacher
    )
