"""Multi-head latent attention in its absorbed form: over latent rows, without K and V of each head.

A head's key is its matrix w_k applied to a latent row. Its logit is therefore the product of the
row's first 512 columns with the query times w_k, plus that of the 64 rotary columns behind them.
Attention gives each head a weighted sum of those 512 columns; times w_v it is the head's output.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from winnow import torch as operators
from winnow.context_parallel import Rows, attention

# Absorbed queries of up to WHOLE_BYTES are one piece; more are made in pieces of PIECE_BYTES, but
# of at least 64 queries. In several pieces, or without indices, they are not kept for the backward
# pass, which makes them again.
WHOLE_BYTES = 3 << 30
PIECE_BYTES = 1 << 30


class Problem(NamedTuple):
    """What attention takes. All of one dtype but the indices and the sink (float32)."""

    q_pass: Tensor  # [queries, heads, d]
    q_rope: Tensor  # [queries, heads, 64 or 0]
    rows: Tensor  # [rows, 1, 512 + 64 or 0]; of this rank, where others have more
    w_k: Tensor  # [512, heads, d]
    w_v: Tensor  # [512, heads, d_v]
    sink: Optional[Tensor]  # [heads]
    indices: Optional[Tensor]  # [queries, topk], int32
    # Without indices: the range of rows that each query attends to.
    key_start: Optional[Tensor] = None  # [queries], int32
    key_end: Optional[Tensor] = None  # [queries], int32


def absorbed_queries(q_pass: Tensor, q_rope: Tensor, w_k: Tensor) -> Tensor:
    """[queries, heads, 576 or 512]."""
    return torch.cat((torch.einsum("shd,chd->shc", q_pass, w_k), q_rope), -1)


def _values(out: Tensor, w_v: Tensor) -> Tensor:
    return torch.einsum("shc,chd->shd", out, w_v)


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def piece_of(problem: Problem, gathered: Optional[Rows] = None) -> int:
    """How many queries are worked on at a time."""
    queries, heads, _ = problem.q_pass.shape
    rows = problem.rows
    count = rows.shape[0] if gathered is None else gathered.shape[0]
    bytes_of_one = heads * rows.shape[-1] * rows.element_size()
    if problem.indices is None:
        bytes_of_one += count * 4  # the indices that the backward pass makes
    if queries * bytes_of_one <= WHOLE_BYTES:
        return max(1, queries)
    return max(64, PIECE_BYTES // bytes_of_one // 64 * 64)


class _InPieces(torch.autograd.Function):
    """Attention of a piece of the queries at a time, done again in the backward pass.

    The gradients that all pieces share are summed in float32 (float64 with float64).
    """

    @staticmethod
    def forward(ctx, scale, piece, gathered, carrier, *tensors):
        problem = Problem(*tensors)
        ctx.source = None if gathered is None else gathered.source
        count, heads, _ = problem.q_pass.shape
        values = problem.rows.new_empty(count, heads, problem.w_v.shape[-1])
        wide = torch.promote_types(values.dtype, torch.float32)
        lse = torch.empty((count, heads), dtype=wide, device=values.device)
        for queries in _pieces(problem, piece):
            parts = iter([(None, problem.rows)]) if gathered is None else gathered.parts()
            _, out, lse[queries] = _forward(problem, queries, scale, ctx.source, parts)
            values[queries] = _values(out, problem.w_v)
        ctx.save_for_backward(*tensors)
        ctx.scale, ctx.piece = scale, piece
        ctx.mark_non_differentiable(lse)
        return values, lse

    @staticmethod
    def backward(ctx, d_values, d_lse):
        problem = Problem(*ctx.saved_tensors)
        q_pass, q_rope, rows, w_k, w_v, sink = problem[:6]
        wide = torch.promote_types(rows.dtype, torch.float32)
        d_q_pass, d_q_rope = torch.empty_like(q_pass), torch.empty_like(q_rope)
        d_rows, d_w_k, d_w_v = (torch.zeros_like(t, dtype=wide) for t in (rows, w_k, w_v))
        d_sink = None if sink is None else torch.zeros_like(sink)
        for queries in _pieces(problem, ctx.piece):
            sources, read = [ctx.source], _read(problem, queries)
            (parts,) = attention.parts_again([read], sources)
            q, out, lse = _forward(problem, queries, ctx.scale, ctx.source, parts)
            d_piece = d_values[queries].to(rows.dtype)
            d_out = torch.einsum("shd,chd->shc", d_piece, w_v)
            d_w_v += torch.einsum("shc,shd->chd", out, d_piece)
            read = read._replace(indices=_indices(problem, queries), start=None, end=None)
            dq, of_sink, (of_rows,) = attention.backward(
                q, sink, ctx.scale, [read], sources, out, lse, d_out.contiguous(), _deterministic()
            )
            d_latent, d_q_rope[queries] = dq.split([512, q_rope.shape[-1]], -1)
            if of_rows is not None:
                d_rows += of_rows
            if sink is not None:
                d_sink += of_sink
            d_q_pass[queries] = torch.einsum("shc,chd->shd", d_latent, w_k)
            d_w_k += torch.einsum("shc,shd->chd", d_latent, q_pass[queries])
        shared = (d_rows.to(rows.dtype), d_w_k.to(w_k.dtype), d_w_v.to(w_v.dtype), d_sink)
        carrier = None if ctx.source is None else ctx.source.leave()
        return None, None, None, carrier, d_q_pass, d_q_rope, *shared, None, None, None


def _pieces(problem, piece):
    queries = problem.q_pass.shape[0]
    for begin in range(0, queries, piece):
        yield slice(begin, min(queries, begin + piece))


def _read(problem: Problem, queries: slice) -> attention.Read:
    if problem.indices is None:
        start, end = problem.key_start[queries], problem.key_end[queries]
        return attention.Read(problem.rows, None, None, start, end)
    return attention.Read(problem.rows, problem.indices[queries], None, None, None)


def _forward(problem: Problem, queries: slice, scale: float, source, parts):
    """(q, out, lse) of some queries; source and parts: as in attention.forward()."""
    q = absorbed_queries(problem.q_pass[queries], problem.q_rope[queries], problem.w_k)
    read = _read(problem, queries)
    return q, *attention.forward(q, problem.sink, scale, [read], [source], [parts])


def _indices(problem: Problem, queries: slice) -> Tensor:
    """The indices of some queries; where a range is given, made from it and padded with -1."""
    if problem.indices is not None:
        return problem.indices[queries]
    start, end = problem.key_start[queries, None], problem.key_end[queries, None]
    width = max(1, int((end - start).amax()))
    rows = start + torch.arange(width, dtype=torch.int32, device=start.device)
    return torch.where(rows < end, rows, -1)


def attend(
    problem: Problem, scale: float, gathered: Optional[Rows] = None
) -> Tuple[Tensor, Tensor]:
    """The values that each head reads, [queries, heads, d_v], and the lse without the sink,
    [queries, heads]. Differentiable in all floating-point tensors, through the values. gathered:
    the rows of all ranks, which indices, key_start and key_end then count."""
    piece = piece_of(problem, gathered)
    if piece < problem.q_pass.shape[0] or problem.indices is None:
        carrier = None
        if gathered is not None:
            problem = problem._replace(rows=gathered.local)
            carrier = gathered.read()
        return _InPieces.apply(scale, piece, gathered, carrier, *problem)
    q = absorbed_queries(problem.q_pass, problem.q_rope, problem.w_k)
    if gathered is not None:
        choice = problem.indices, None, None, None
        out, lse = attention.attend(q, problem.sink, scale, [gathered], [choice], _deterministic())
        return gathered.begin_again_with(_values(out, problem.w_v)), lse
    out, lse = operators.sparse_mla_attention(
        q, problem.rows, problem.indices, scale=scale, attn_sink=problem.sink,
        deterministic=_deterministic(), return_lse=True,
    )  # fmt: skip
    return _values(out, problem.w_v), lse


def attend_evenly(problem: Problem, scale: float, batch: int) -> Tensor:
    """What each head reads where the logits of all rows of a sequence are the same: the mean of the
    rows, [queries, heads, d_v]. Its derivatives are those of softmax at such logits, where it is
    linear in them: a query moves what it reads by its product with the covariance of keys and
    values."""
    rows = problem.rows.view(batch, -1, problem.rows.shape[-1])
    values = rows[..., :512]
    mean = values.mean(1)[:, None]
    apart = rows - rows.mean(1, keepdim=True)
    covariance = apart.mT @ values.detach() / rows.shape[1]
    q = absorbed_queries(problem.q_pass, problem.q_rope, problem.w_k)
    moved = scale * q.reshape(batch, -1, q.shape[-1]) @ covariance
    read = mean + (moved - moved.detach())
    return _values(read.view(*q.shape[:2], 512), problem.w_v)
