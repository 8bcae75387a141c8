"""The sequences of a forward pass, from which DeepSeek-V4 cuts its windows.

Each row of a batch holds one sequence with padding around it, or several packed ones. Windows begin
at a sequence's first token, wherever that is. The numbers that say so are needed on the host: they
decide how many compressed rows there are.
"""

import functools
import itertools
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from winnow.transformers import masks
from winnow.transformers.refusal import refuse


class Piece(NamedTuple):
    """Neighbouring tokens in a row of the batch, of one sequence; or padding."""

    row: int
    begin: int  # within the row's tokens of this call
    length: int
    before: int  # tokens of the sequence in earlier calls; -1 for padding
    position: int  # of the sequence's first token

    @property
    def total(self) -> int:
        """Tokens of the sequence so far."""
        return self.before + self.length if self.before >= 0 else 0


def _once(method):
    """Keeps what a method returns, for all layers of a forward pass."""

    @functools.wraps(method)
    def found(self, *arguments):
        key = (method.__name__, *arguments)
        if key not in self._made:
            self._made[key] = method(self, *arguments)
        return self._made[key]

    return found


class Sequences:
    """The tokens of a call, [batch, queries], as pieces that cover all of them in their order."""

    def __init__(self, pieces: List[Piece], position_ids: Tensor, seen: int):
        self.pieces = pieces
        self.position_ids = position_ids  # [batch, queries]
        self.batch, self.queries = position_ids.shape
        self.seen = seen  # columns of the batch in earlier calls
        self._made: Dict[tuple, object] = {}

    @property
    def real(self) -> List[Piece]:
        return [piece for piece in self.pieces if piece.before >= 0]

    @property
    def aligned(self) -> bool:
        """Whether each row is one sequence and has no padding, now and before."""
        return all(piece.begin == 0 and piece.total == self.seen + self.queries
                   for piece in self.pieces)  # fmt: skip

    @property
    def longest(self) -> int:
        return max((piece.total for piece in self.pieces), default=0)

    @_once
    def piece_of_token(self, device: torch.device) -> Tensor:
        """[batch * queries]"""
        lengths = torch.tensor([piece.length for piece in self.pieces], device=device)
        count = self.batch * self.queries
        numbers = torch.arange(len(lengths), device=device)
        return torch.repeat_interleave(numbers, lengths, output_size=count)

    def of_pieces(self, values: List[int], device: torch.device) -> Tensor:
        """A value of each token's piece, int32 [batch * queries]."""
        found = torch.tensor(values, dtype=torch.int32, device=device)
        return found[self.piece_of_token(device)]

    @_once
    def place(self, device: torch.device) -> Tensor:
        """Of each token within its sequence, int32 [batch * queries]; -1 for padding."""
        pieces = self.pieces
        column = torch.arange(self.batch * self.queries, dtype=torch.int32, device=device)
        first = [p.row * self.queries + p.begin - p.before for p in pieces]
        padding = self.of_pieces([p.before for p in pieces], device) < 0
        return torch.where(padding, -1, column - self.of_pieces(first, device))

    @_once
    def window(self, width: int, rows: int, device: torch.device) -> Tensor:
        """The last tokens that each token sees, itself among them, as numbers of the rows of the
        whole batch, [batch * queries, up to width]; rows: how many a sequence of the batch has,
        those of this call at the end. -1 where there is none."""
        back = torch.arange(min(width, max(1, self.longest)), dtype=torch.int32, device=device)
        back = back.flip(0)
        at = torch.arange(self.batch * self.queries, dtype=torch.int32, device=device)
        at = at + (at // self.queries + 1) * (rows - self.queries)
        return torch.where(back <= self.place(device)[:, None], at[:, None] - back, -1)

    # ---- compressed rows: a cache has as many of each row of the batch, `stride`; without one they
    # follow each other, piece by piece.

    @_once
    def seen_rows(self, ratio: int, stride: Optional[int], device: torch.device) -> Dict:
        """key_start and key_end of each token, int32 [batch * queries]."""
        if stride is None:
            counts = [piece.length // ratio for piece in self.pieces]
            first = list(itertools.accumulate(counts, initial=0))[:-1]
        else:
            first = [piece.row * stride for piece in self.pieces]
        start = self.of_pieces(first, device)
        return {"key_start": start, "key_end": start + (self.place(device) + 1) // ratio}

    @_once
    def window_and_all(
        self, width: int, rows: int, ratio: int, stride: Optional[int], device: torch.device
    ) -> Tensor:
        """The window, and all compressed rows, which stand behind those of the whole batch."""
        start, end = (t[:, None] for t in self.seen_rows(ratio, stride, device).values())
        at = start + torch.arange(self.longest // ratio, dtype=torch.int32, device=device)
        at = torch.where(at < end, at + self.batch * rows, -1)
        return torch.cat((self.window(width, rows, device), at), -1)


class Mask:
    """What takes the place of transformers' mask: sequences, once the first layer has seen the
    positions."""

    def __init__(self, ranges: Optional[Tensor], packed: bool):
        self.ranges = ranges  # as in masks.py, without a sliding window; None: a causal mask
        self.packed = packed  # whether positions that restart begin a sequence
        self._found: Optional[Tuple[Tensor, int, Sequences]] = None

    def sequences(self, ranges: Callable[[], Tensor], position_ids: Tensor, seen: int) -> Sequences:
        """ranges: what self.ranges is within a layer's call."""
        if self._found is None or self._found[0] is not position_ids or self._found[1] != seen:
            sequences = find(ranges(), position_ids, seen, self.packed)
            self._found = position_ids, seen, sequences
        return self._found[2]


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset=0, kv_offset: int = 0,
    mask_function=None, attention_mask: Optional[Tensor] = None, use_vmap: bool = False,
    device="cpu", **_,
) -> Mask:  # fmt: skip
    """With the arguments of transformers' mask functions. The function itself is that of a sliding
    window, for one sequence or, without attention_mask, for those that the positions tell apart."""
    if isinstance(q_offset, Tensor):
        refuse("cache", "a DynamicCache of the model's configuration", "a static one")
    ranges = masks.ranges(
        batch_size, q_length, kv_offset + kv_length, q_offset, 0, causal_mask_function,
        attention_mask, use_vmap, device,
    )  # fmt: skip
    return Mask(ranges, packed=attention_mask is None)


def find(ranges: Tensor, position_ids: Tensor, seen: int, packed: bool) -> Sequences:
    """ranges: [batch, queries, 2], from the first token of each query's sequence on."""
    batch, queries, _ = ranges.shape
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        refuse("position_ids", "whole numbers", str(position_ids.dtype).removeprefix("torch."))
    position_ids = position_ids.expand(batch, queries)
    positions = position_ids.cpu().long()
    start, end = ranges.cpu().long().unbind(-1)
    column = torch.arange(seen, seen + queries).expand(batch, queries)
    ascends = positions.diff(dim=-1) == 1
    real = (start <= column) & (column < end)
    if bool((real & (positions < 0)).any()):
        refuse("position_ids", "0 or more", int(positions[real].min()))
    if packed:
        restarts = torch.nn.functional.pad(~ascends, (1, 0))
        wrong = positions[restarts & real & (start != column) & (positions != 0)]
        if len(wrong):
            wanted = "numbers that ascend by one within a sequence, the next one from 0"
            refuse("position_ids", wanted, f"a sequence from {int(wrong[0])}")
        start = torch.maximum(start, torch.where(restarts, column, 0).cummax(-1).values)
        real = (start <= column) & (column < end)
    start = torch.where(real, start, -1)
    together = real[:, 1:] & (start[:, 1:] == start[:, :-1])
    if not bool((ascends | ~together).all()):
        refuse("position_ids", "numbers that ascend by one within a sequence", "others")
    # Neighbours of the same row and start are a piece.
    step = seen + queries + 1
    keys = (torch.arange(batch)[:, None] * step + start + 1).flatten()
    keys, lengths = torch.unique_consecutive(keys, return_counts=True)
    firsts = lengths.cumsum(0) - lengths
    pieces = []
    found = (keys, firsts, lengths, positions.flatten()[firsts])
    for key, first, length, position in zip(*(t.tolist() for t in found), strict=True):
        row, begin = divmod(first, queries)
        before = seen + begin - (key % step - 1) if key % step else -1
        pieces.append(Piece(row, begin, length, before, position - max(before, 0)))
    return Sequences(pieces, position_ids, seen)
