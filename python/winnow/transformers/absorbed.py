"""Multi-head latent attention in its absorbed form: over latent rows, without K and V of each head.

A head's key is its matrix w_k applied to a latent row. Its logit is therefore the product of the
row's first 512 columns with the query times w_k, plus that of the 64 rotary columns behind them.
Attention gives each head a weighted sum of those 512 columns; times w_v it is the head's output.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from winnow import torch as operators

# Absorbed queries of up to WHOLE_BYTES are one piece; more are made in pieces of PIECE_BYTES, but
# of at least 64 queries. In several pieces, or without indices, they are not kept for the backward
# pass, which makes them again.
WHOLE_BYTES = 3 << 30
PIECE_BYTES = 1 << 30


class Problem(NamedTuple):
    """What attention takes. All of one dtype but the indices and the sink (float32)."""

    q_pass: Tensor  # [queries, heads, d]
    q_rope: Tensor  # [queries, heads, 64 or 0]
    rows: Tensor  # [rows, 1, 512 + 64 or 0]
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


def piece_of(problem: Problem) -> int:
    """How many queries are worked on at a time."""
    queries, heads, _ = problem.q_pass.shape
    rows = problem.rows
    bytes_of_one = heads * rows.shape[-1] * rows.element_size()
    if problem.indices is None:
        bytes_of_one += rows.shape[0] * 4  # the indices that the backward pass makes
    if queries * bytes_of_one <= WHOLE_BYTES:
        return max(1, queries)
    return max(64, PIECE_BYTES // bytes_of_one // 64 * 64)


class _InPieces(torch.autograd.Function):
    """Attention of a piece of the queries at a time, done again in the backward pass.

    The gradients that all pieces share are summed in float32 (float64 with float64).
    """

    @staticmethod
    def forward(ctx, scale, piece, *tensors):
        problem = Problem(*tensors)
        count, heads, _ = problem.q_pass.shape
        values = problem.rows.new_empty(count, heads, problem.w_v.shape[-1])
        wide = torch.promote_types(values.dtype, torch.float32)
        lse = torch.empty((count, heads), dtype=wide, device=values.device)
        for queries in _pieces(problem, piece):
            _, out, lse[queries] = _forward(problem, queries, scale)
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
            q, out, lse = _forward(problem, queries, ctx.scale)
            d_piece = d_values[queries].to(rows.dtype)
            d_out = torch.einsum("shd,chd->shc", d_piece, w_v)
            d_w_v += torch.einsum("shc,shd->chd", out, d_piece)
            gradients = operators.sparse_mla_backward(
                q, rows, _indices(problem, queries), out, lse, d_out.contiguous(),
                scale=ctx.scale, attn_sink=sink, deterministic=_deterministic(),
            )  # fmt: skip
            d_latent, d_q_rope[queries] = gradients[0].split([512, q_rope.shape[-1]], -1)
            d_rows += gradients[1]
            if sink is not None:
                d_sink += gradients[2]
            d_q_pass[queries] = torch.einsum("shc,chd->shd", d_latent, w_k)
            d_w_k += torch.einsum("shc,shd->chd", d_latent, q_pass[queries])
        shared = (d_rows.to(rows.dtype), d_w_k.to(w_k.dtype), d_w_v.to(w_v.dtype), d_sink)
        return None, None, d_q_pass, d_q_rope, *shared, None, None, None


def _pieces(problem, piece):
    queries = problem.q_pass.shape[0]
    for begin in range(0, queries, piece):
        yield slice(begin, min(queries, begin + piece))


def _forward(problem: Problem, queries: slice, scale: float):
    """(q, out, lse) of some queries."""
    q = absorbed_queries(problem.q_pass[queries], problem.q_rope[queries], problem.w_k)
    if problem.indices is None:
        chosen = None
        limits = {"key_start": problem.key_start[queries], "key_end": problem.key_end[queries]}
    else:
        chosen, limits = problem.indices[queries], {}
    out, _, lse = operators.sparse_mla_forward(
        q, problem.rows, chosen, scale=scale, attn_sink=problem.sink, **limits
    )
    return q, out, lse


def _indices(problem: Problem, queries: slice) -> Tensor:
    """The indices of some queries; where a range is given, made from it and padded with -1."""
    if problem.indices is not None:
        return problem.indices[queries]
    start, end = problem.key_start[queries, None], problem.key_end[queries, None]
    width = max(1, int((end - start).amax()))
    rows = start + torch.arange(width, dtype=torch.int32, device=start.device)
    return torch.where(rows < end, rows, -1)


def attend(problem: Problem, scale: float) -> Tuple[Tensor, Tensor]:
    """The values that each head reads, [queries, heads, d_v], and the lse without the sink,
    [queries, heads]. Differentiable in all floating-point tensors, through the values."""
    piece = piece_of(problem)
    if piece < problem.q_pass.shape[0] or problem.indices is None:
        return _InPieces.apply(scale, piece, *problem)
    q = absorbed_queries(problem.q_pass, problem.q_rope, problem.w_k)
    out, lse = operators.sparse_mla_attention(
        q, problem.rows, problem.indices, scale=scale, attn_sink=problem.sink,
        deterministic=_deterministic(), return_lse=True,
    )  # fmt: skip
    return _values(out, problem.w_v), lse
