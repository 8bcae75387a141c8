"""Where rows lie: numbers of the whole, and numbers within the part of a rank."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor


class Placement:
    """Rows of a whole over ranks. Each rank has up to `capacity` of them, in the order of the
    whole, and no other rank has them."""

    def __init__(self, ranks: int, capacity: int, total: int, order: Optional[Tensor]):
        """order: int64 [total], on the device of the rows: where each row stands if the ranks'
        rows stand behind each other, `capacity` of each. None: just there."""
        self.ranks, self.capacity, self.total, self.order = ranks, capacity, total, order
        self._numbers: Optional[Tensor] = None

    def in_order(self, of_ranks: Tensor) -> Tensor:
        """[total, ...] of [ranks * capacity, ...]"""
        return of_ranks if self.order is None else of_ranks.index_select(0, self.order)

    def by_rank(self, whole: Tensor) -> Tensor:
        """The other way, with zeros where a rank has no row."""
        if self.order is None:
            return whole
        shape = self.ranks * self.capacity, *whole.shape[1:]
        return whole.new_zeros(shape).index_copy_(0, self.order, whole)

    # ---- of the part of one rank

    def of_indices(self, part: int, indices: Tensor) -> Tensor:
        """Numbers of the whole as those within a part; -1 where it has not the row."""
        first = part * self.capacity
        known = (indices >= 0) & (indices < self.total)
        if self.order is None:
            within = indices - first
        elif self.total == 0:
            return torch.full_like(indices, -1)
        else:
            at = self.order[indices.clamp(0, self.total - 1)] - first
            within = at.to(indices.dtype)
        known &= (within >= 0) & (within < self.capacity)
        return torch.where(known, within, -1)

    def of_whole(self, part: int, indices: Tensor) -> Tensor:
        """Numbers within a part as those of the whole; negative ones stay."""
        if self.order is None:
            found = indices + part * self.capacity
        else:
            found = self.numbers(part)[indices.clamp(min=0)].to(indices.dtype)
        return torch.where(indices < 0, indices, found)

    def of_limits(self, part: int, limits: Tensor) -> Tensor:
        """How many rows of a part stand before each limit in the whole."""
        if self.order is None:
            return (limits - part * self.capacity).clamp(0, self.capacity)
        return torch.searchsorted(self.numbers(part), limits.long()).to(limits.dtype)

    def columns(self, part: int, whole: Tensor) -> Tensor:
        """[..., capacity] of [..., total]: those of a part's rows, and 0 where there is no row."""
        if self.order is None:
            return whole.narrow(-1, part * self.capacity, self.capacity)
        return torch.nn.functional.pad(whole, (0, 1)).index_select(-1, self.numbers(part))

    def numbers(self, part: int) -> Tensor:
        """The numbers in the whole of a part's rows, which have an order, int64 [capacity]; `total`
        where there is no row."""
        if self._numbers is None:
            numbers = self.order.new_full((self.ranks * self.capacity,), self.total)
            numbers[self.order] = torch.arange(self.total, device=self.order.device)
            self._numbers = numbers
        return self._numbers.view(self.ranks, self.capacity)[part]


def chunk_owners(ranks: int, chunks: int) -> List[Tuple[int, int]]:
    """(rank, which of its chunks) of each chunk of a sequence, in its order."""
    if chunks == 1:
        return [(rank, 0) for rank in range(ranks)]
    return [(rank, 0) for rank in range(ranks)] + [(rank, 1) for rank in reversed(range(ranks))]


def chunks_of(rank: int, ranks: int, chunks: int) -> List[int]:
    """The chunks of a sequence that a rank has, ascending."""
    return [rank] if chunks == 1 else [rank, 2 * ranks - 1 - rank]
