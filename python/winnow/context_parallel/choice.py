"""The rows that an indexer chooses among those of all ranks."""

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

from winnow.context_parallel.rows import Part, Rows

# About how many candidates are sorted at a time: some 0.5 GiB.
_SORTED = 1 << 24
_ABSENT = torch.iinfo(torch.int32).min


def _keys(scores: Tensor, indices: Tensor) -> Tensor:
    """Whole numbers in the order of the scores: absent, NaN, -inf, ..., +inf; -0 equals 0."""
    bits = (scores + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)
    keys = keys.masked_fill_(scores.isnan(), _ABSENT + 1)
    return keys.masked_fill_(indices < 0, _ABSENT)


def _best(indices: Tensor, scores: Tensor, topk: int, larger: bool) -> Tuple[Tensor, Tensor]:
    """The topk best of candidates [queries, more], ascending by index, then -1 and -inf. Between
    equal scores the smaller index is better, or the larger one."""
    last = torch.iinfo(torch.int32).max
    places = indices.masked_fill(indices < 0, last).argsort(1, descending=larger)
    keys = _keys(scores, indices).gather(1, places)
    places = places.gather(1, keys.argsort(dim=1, descending=True, stable=True)[:, :topk])
    indices, scores = indices.gather(1, places), scores.gather(1, places)
    places = indices.masked_fill(indices < 0, last).argsort(1)
    return indices.gather(1, places), scores.gather(1, places)


def choose(
    q: Tensor,
    keys: Rows,
    weights: Tensor,
    topk: int,
    k_scale: Optional[Rows],
    start: Tensor,
    end: Tensor,
    ties: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    """(indices, length, scores) as winnow.indexer.topk() gives them, over the rows of all ranks."""
    scales: Iterator[Optional[Part]] = iter(()) if k_scale is None else k_scale.parts()
    best: Optional[Tuple[Tensor, Tensor]] = None
    for part, rows in keys.parts():
        scale = next(scales, None)
        placement = keys.placement
        limits = (
            limit if part is None else placement.of_limits(part, limit) for limit in (start, end)
        )
        key_start, key_end = limits
        indices, length, scores = torch.ops.winnow.indexer_topk(
            q, rows, weights, topk, k_scale=None if scale is None else scale[1],
            key_start=key_start, key_end=key_end, ties=ties, return_scores=True,
        )  # fmt: skip
        if part is None:
            return indices, length, scores
        indices = placement.of_whole(part, indices)
        if best is None:
            best = indices, scores
            continue
        step = max(1, _SORTED // (2 * topk))
        for begin in range(0, q.shape[0], step):
            piece = slice(begin, begin + step)
            both = (
                torch.cat((best[i][piece], new[piece]), 1)
                for i, new in enumerate((indices, scores))
            )
            found = _best(*both, topk, ties == "larger")
            best[0][piece], best[1][piece] = found
    assert best is not None
    return best[0], (best[0] >= 0).sum(1, dtype=torch.int32), best[1]
