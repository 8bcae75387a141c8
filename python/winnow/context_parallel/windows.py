"""The compressor's windows, which cross the borders of ranks."""

import itertools
from typing import TYPE_CHECKING, Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from winnow.context_parallel.group import refuse
from winnow.context_parallel.placement import Placement, chunk_owners

if TYPE_CHECKING:
    from winnow.context_parallel.tokens import Tokens


class Windows(NamedTuple):
    """The windows of a call's tokens, numbered sequence by sequence, and how this rank computes the
    rows of its own ones."""

    ratio: int
    total: int  # windows of all ranks
    own: int  # windows of this rank
    # int32 [this rank's tokens]: at each query windows [key_start, key_end) are complete.
    key_start: Tensor
    key_end: Tensor
    placement: Placement  # of the windows on the ranks
    # The compressor's input: this rank's chunks with the tokens before them, cut into sequences.
    before: int  # tokens before a chunk
    cu_seqlens: Tensor
    cu_rows: Tensor
    pieces: List[Tuple[int, int]]  # each one's sequence, or -1, and its first token in that
    rows: int  # that the compressor returns
    kept: Tensor  # int64 [own]: which of these rows are this rank's


class _Run(NamedTuple):
    """Consecutive windows of a sequence whose rows a rank computes from one of its chunks."""

    sequence: int
    block: int  # the chunk and the row of the batch, as an index of history()'s result
    at: int  # where the first window begins in the block
    first: int  # the number of the first window within its sequence
    lead: int  # 1 if the first window is another rank's and overlap needs its tokens, else 0
    count: int  # windows, with the lead
    number: int  # of the first window after the lead, among all windows


def _runs(tokens: "Tokens", ratio: int, before: int, overlap: bool) -> List[List[_Run]]:
    """The runs of each rank, in the order of their windows."""
    context, chunk = tokens.context, tokens.chunk
    owners = chunk_owners(context.size, context.chunks)
    found: List[List[_Run]] = [[] for _ in range(context.size)]
    number = begin = 0
    for sequence, length in enumerate(tokens.lengths):
        row, column = divmod(begin, tokens.count)
        begin += length
        if tokens.padding[sequence] or length < ratio:
            continue
        for c in range(column // chunk, (column + length - 1) // chunk + 1):
            low = max(c * chunk - column, 0)
            high = min((c + 1) * chunk - column, length)
            first, last = low // ratio, high // ratio
            if last <= first:
                continue
            rank, second = owners[c]
            lead = int(overlap and first > 0)
            at = before + column + (first - lead) * ratio - c * chunk
            block = second * tokens.batch + row
            count = last - first + lead
            found[rank].append(_Run(sequence, block, at, first - lead, lead, count, number + first))
        number += length // ratio
    return found


def _pieces(
    runs: Sequence[_Run], blocks: int, width: int, ratio: int
) -> Iterator[Tuple[int, int, Optional[_Run]]]:
    """(tokens, rows, run) of each sequence that the compressor gets, in order. Tokens of no run are
    cut into sequences of at most one row, which is dropped: a longer one would have rows at
    positions that cos and sin may lack."""

    def between(count: int) -> Iterator[Tuple[int, int, Optional[_Run]]]:
        while count:
            length = min(count, 2 * ratio - 1)
            yield length, length // ratio, None
            count -= length

    at = 0
    for run in sorted(runs, key=lambda run: (run.block, run.at)):
        begin = run.block * width + run.at
        yield from between(begin - at)
        yield run.count * ratio, run.count, run
        at = begin + run.count * ratio
    yield from between(blocks * width - at)


def find(tokens: "Tokens", ratio: int, overlap: bool, device: torch.device) -> Windows:
    if not isinstance(ratio, int) or not 1 <= ratio <= 128:
        refuse("ratio", "1 to 128", ratio)
    before = (1 + overlap) * ratio - 1
    runs = _runs(tokens, ratio, before, overlap)
    own_of = [sum(run.count - run.lead for run in of_rank) for of_rank in runs]
    capacity, total = max(own_of), sum(own_of)
    order = torch.zeros(total, dtype=torch.int64)
    for rank, of_rank in enumerate(runs):
        place = rank * capacity
        for run in of_rank:
            count = run.count - run.lead
            order[run.number : run.number + count] = torch.arange(place, place + count)
            place += count
    placement = Placement(tokens.context.size, capacity, total, order.to(device))

    own = runs[tokens.context.rank]
    blocks, width = tokens.context.chunks * tokens.batch, before + tokens.chunk
    pieces = list(_pieces(own, blocks, width, ratio))
    lengths, rows = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    first_rows = list(itertools.accumulate(rows, initial=0))
    place_of = {id(run): first for (_, _, run), first in zip(pieces, first_rows, strict=False)}
    kept = [
        torch.arange(place_of[id(run)] + run.lead, place_of[id(run)] + run.count) for run in own
    ]
    listed = [(-1, 0) if run is None else (run.sequence, run.first * ratio) for *_, run in pieces]

    def cumulative(counts: Sequence[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)

    # For each query, the complete windows of its sequence.
    numbers = tokens.numbers(device)
    real = zip(tokens.lengths, tokens.padding, strict=True)
    firsts = [0, *itertools.accumulate(0 if hidden else n // ratio for n, hidden in real)]
    ends = torch.tensor(tokens.lengths, device=device).cumsum(0)
    sequence = torch.searchsorted(ends, numbers.number, right=True)
    start = torch.tensor(firsts, dtype=torch.int32, device=device)[sequence]
    end = start + (numbers.place + 1) // ratio
    return Windows(
        ratio, total, own_of[tokens.context.rank], start, end, placement, before,
        cumulative(lengths), cumulative(rows), listed, sum(rows),
        (torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)).to(device),
    )  # fmt: skip


def compress(
    tokens: "Tokens",
    windows: Windows,
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    first_position: Optional[Sequence[int]],
    **options: Any,
) -> Tensor:
    """The rows of this rank's windows, [windows.own, d]."""
    if kv.shape != gate.shape or kv.dim() != 2:
        refuse("gate", f"shape {list(kv.shape)} as kv, of 2 dimensions", list(gate.shape))
    sequences = sum(not hidden for hidden in tokens.padding)
    if first_position is not None and len(first_position) < sequences:
        refuse("first_position", f"a number for each of {sequences} sequences", first_position)
    if gate.dtype != kv.dtype:
        refuse("gate", f"dtype {kv.dtype} as kv", gate.dtype)
    both = tokens.history(torch.cat((kv, gate), 1), windows.before).flatten(0, 2)
    fed = both.split(kv.shape[1], 1)
    if windows.rows == 0:  # the backward pass of history() still needs this rank
        return fed[0][:0, : kv.shape[1] // (2 if options["overlap"] else 1)]
    positions = [
        offset if first_position is None or at < 0 else first_position[at] + offset
        for at, offset in windows.pieces
    ]
    rows, _ = torch.ops.winnow.compressor_forward(
        *fed, position_bias, windows.cu_seqlens, windows.cu_rows, num_rows=windows.rows,
        first_position=torch.tensor(positions, dtype=torch.int32, device=kv.device), **options,
    )  # fmt: skip
    return rows.index_select(0, windows.kept)
