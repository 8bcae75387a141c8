"""Attention of this rank's queries to rows of all ranks."""

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow.context_parallel.placement import Placement
from winnow.context_parallel.rows import Part, Rows, Source, cast

AnyRows = Union[Rows, Tensor]
_TENSORS = 5  # of a Read


class Read(NamedTuple):
    """Which rows of a source the queries read: a list, or a range for each query."""

    rows: Tensor  # this rank's
    indices: Optional[Tensor]  # [s_q, topk], int32
    length: Optional[Tensor]  # [s_q], int32
    start: Optional[Tensor]  # [s_q], int32
    end: Optional[Tensor]

    def of_part(self, placement: Placement, part: Optional[int]) -> "Read":
        """The same within a part; a list begins with the entries that are in the part."""
        if part is None:
            return self
        start, end = (
            None if limit is None else placement.of_limits(part, limit)
            for limit in (self.start, self.end)
        )
        if self.indices is None:
            return Read(self.rows, None, None, start, end)
        indices = placement.of_indices(part, self.indices)
        if self.length is not None:
            behind = torch.arange(indices.shape[1], device=indices.device) >= self.length[:, None]
            indices = indices.masked_fill(behind, -1)
        here = indices >= 0
        place = torch.where(here, here.cumsum(1) - 1, indices.shape[1])
        front = indices.new_full((indices.shape[0], indices.shape[1] + 1), -1)
        front = front.scatter_(1, place, indices)[:, :-1].contiguous()
        return Read(self.rows, front, here.sum(1, dtype=torch.int32), start, end)

    def options(self, prefix: str) -> Dict[str, Optional[Tensor]]:
        return {
            f"{prefix}topk_length": self.length,
            f"{prefix}key_start": self.start,
            f"{prefix}key_end": self.end,
        }


class _Call(NamedTuple):
    """One call of an operation: some parts, of one source or two."""

    which: List[int]  # of the sources
    parts: List[Part]
    reads: List[Read]

    @property
    def rows(self) -> Tensor:
        return self.parts[0][1]

    @property
    def indices(self) -> Optional[Tensor]:
        return self.reads[0].indices

    def options(self) -> Dict[str, Any]:
        found: Dict[str, Any] = self.reads[0].options("")
        if len(self.reads) > 1:
            found.update(self.reads[1].options("extra_"))
            found.update(extra_kv=self.parts[1][1], extra_indices=self.reads[1].indices)
        return found


def _calls(
    reads: Sequence[Read], sources: Sequence[Optional[Source]], parts: Iterable[Iterator[Part]]
) -> Iterator[_Call]:
    """Each call takes the next part of every source that has one. Rows that are this rank's alone
    are one part, which the first call takes."""
    iterators = list(parts)
    while True:
        call = _Call([], [], [])
        for which, iterator in enumerate(iterators):
            found = next(iterator, None)
            if found is None:
                continue
            source = sources[which]
            read = reads[which]
            call.which.append(which)
            call.parts.append(found)
            call.reads.append(read if source is None else read.of_part(source.placement, found[0]))
        if not call.which:
            return
        yield call


def _reads(tensors: Sequence[Optional[Tensor]]) -> List[Read]:
    of_each = [tensors[at : at + _TENSORS] for at in range(0, len(tensors), _TENSORS)]
    return [Read(*of_one) for of_one in of_each]


def forward(
    q: Tensor,
    sink: Optional[Tensor],
    scale: Optional[float],
    reads: Sequence[Read],
    sources: Sequence[Optional[Source]],
    parts: Iterable[Iterator[Part]],
) -> Tuple[Tensor, Tensor]:
    """(out, lse); nothing is recorded. sources: None where the rows are this rank's alone; parts:
    of each source."""
    attend = torch.ops.winnow.sparse_mla_forward
    if not _several(sources):
        (call,) = _calls(reads, sources, parts)
        out, _, lse = attend(
            q, call.rows, call.indices, scale=scale, attn_sink=sink, **call.options()
        )
        return out, lse
    wide = torch.promote_types(q.dtype, torch.float32)
    total: Optional[Tensor] = None
    lse = torch.empty(0)
    for call in _calls(reads, sources, parts):
        out, _, own = attend(q, call.rows, call.indices, scale=scale, **call.options())
        if total is None:
            total, lse = out.to(wide), own
            continue
        both = torch.logaddexp(lse, own)
        total.mul_(_weight(lse, both)).add_(out * _weight(own, both))
        lse = both
    if sink is not None:
        total.mul_(_weight(lse, torch.logaddexp(lse, sink)))
    return total.to(q.dtype), lse


def _several(sources: Sequence[Optional[Source]]) -> bool:
    return any(source is not None and source.context.sharded for source in sources)


def _weight(lse: Tensor, of_all: Tensor) -> Tensor:
    """The share of what has this lse; 0 where nothing is visible."""
    return torch.where(lse == -torch.inf, 0, (lse - of_all).exp())[..., None]


def parts_again(reads: Sequence[Read], sources: Sequence[Optional[Source]]) -> List[Iterator[Part]]:
    """The parts of each source once more, in the backward pass."""
    return [
        iter([(None, read.rows)]) if source is None else source.parts_again(read.rows)
        for read, source in zip(reads, sources, strict=True)
    ]


def backward(
    q: Tensor,
    sink: Optional[Tensor],
    scale: Optional[float],
    reads: Sequence[Read],
    sources: Sequence[Optional[Source]],
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    deterministic: bool,
) -> Tuple[Tensor, Optional[Tensor], List[Optional[Tensor]]]:
    """(dq, d_sink, the gradients of rows that are this rank's alone, in float32 or float64). The
    gradients of other rows go to their source, by add()."""
    several = _several(sources)
    wide = torch.promote_types(q.dtype, torch.float32)
    parts = parts_again(reads, sources)
    dq: Optional[Tensor] = None
    d_sink: Optional[Tensor] = None
    own: List[Optional[Tensor]] = [None] * len(reads)
    for call in _calls(reads, sources, parts):
        of_q, dkv, of_sink, dextra = torch.ops.winnow.sparse_mla_backward(
            q, call.rows, call.indices, out, lse, d_out, scale=scale, attn_sink=sink,
            deterministic=deterministic, dq_dtype=wide if several else None, **call.options(),
        )  # fmt: skip
        dq = of_q if dq is None else dq.add_(of_q)
        d_sink = of_sink
        for which, part, gradient in zip(call.which, call.parts, (dkv, dextra), strict=False):
            source = sources[which]
            if source is None:
                own[which] = gradient
            else:
                source.add(part[0], gradient)
    if sink is None:
        d_sink = None
    elif several:  # a call leaves out the queries that see nothing of its part
        both = torch.logaddexp(lse, sink)
        share = torch.where(both.isinf(), 0, (sink - both).exp())
        d_sink = -(share * (out * d_out).sum(-1, dtype=wide)).sum(0)
    return dq.to(q.dtype), d_sink, own


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, deterministic, rows, q, sink, *tensors):
        """tensors: the carriers of all rows, then the fields of all reads."""
        reads = _reads(tensors[len(rows) :])
        ctx.sources = [one.source if isinstance(one, Rows) else None for one in rows]
        parts = [one.parts() if isinstance(one, Rows) else iter([(None, one)]) for one in rows]
        out, lse = forward(q, sink, scale, reads, ctx.sources, parts)
        ctx.save_for_backward(q, sink, out, lse, *tensors[len(rows) :])
        ctx.scale, ctx.deterministic = scale, deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, sink, out, lse, *tensors = ctx.saved_tensors
        reads = _reads(tensors)
        dq, d_sink, own = backward(
            q, sink, ctx.scale, reads, ctx.sources, out, lse, d_out.contiguous(), ctx.deterministic
        )
        carriers = [None if source is None else source.leave() for source in ctx.sources]
        of_reads = []
        for gradient, read in zip(own, reads, strict=True):
            gradient = None if gradient is None else gradient.to(read.rows.dtype)
            of_reads += [gradient, *[None] * (_TENSORS - 1)]
        return None, None, None, dq, d_sink, *carriers, *of_reads


def attend(
    q: Tensor,
    sink: Optional[Tensor],
    scale: Optional[float],
    rows: Sequence[AnyRows],
    choices: Sequence[Tuple[Optional[Tensor], ...]],
    deterministic: bool,
) -> Tuple[Tensor, Tensor]:
    """(out, lse), differentiable in q, the sink and all rows. choices: the fields of a Read but
    its rows, for each of the rows."""
    # Under autocast gather() has already cast its rows; q and the other rows take their dtype.
    dtype = next((one.dtype for one in rows if isinstance(one, Rows)), None)
    q = cast(q, dtype)
    rows = [one if isinstance(one, Rows) else cast(one, dtype) for one in rows]
    carriers = [one.read() if isinstance(one, Rows) else None for one in rows]
    reads = [
        Read(one.local if isinstance(one, Rows) else one, *choice)
        for one, choice in zip(rows, choices, strict=True)
    ]
    tensors = [tensor for read in reads for tensor in read]
    with torch.autocast(q.device.type, enabled=False):
        return _Attention.apply(scale, deterministic, rows, q, sink, *carriers, *tensors)
