"""The tokens of a call, and what a rank computes of its own and of all others' rows."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from winnow.context_parallel import attention, choice, loss, windows
from winnow.context_parallel.attention import AnyRows
from winnow.context_parallel.group import ContextParallel, refuse, refused_on_all_ranks
from winnow.context_parallel.history import history
from winnow.context_parallel.placement import Placement, chunks_of
from winnow.context_parallel.rows import Rows, cast, gathered
from winnow.context_parallel.windows import Windows

Attention = Tuple[Tensor, Rows, Tensor, Optional[float], Optional[Tensor]]


def checked_lengths(
    context: ContextParallel, count: Any, batch: Any, cu_seqlens: Optional[List[int]]
) -> Tuple[List[int], List[bool]]:
    """(the lengths of the sequences, which fill the batch; which of them are padding)"""
    step = context.size * context.chunks
    if not isinstance(count, int) or count < 1 or count % step:
        kind = "twice the ranks" if context.chunks == 2 else "the ranks"
        refuse("tokens", f"a multiple of {step}, {kind}", count)
    if not isinstance(batch, int) or batch < 1:
        refuse("batch", "1 or more", batch)
    if cu_seqlens is None:
        return [count] * batch, [False] * batch
    every = batch * count
    if not isinstance(cu_seqlens, list) or not all(isinstance(at, int) for at in cu_seqlens):
        refuse("cu_seqlens", "whole numbers in a list or a tensor of one dimension", cu_seqlens)
    starts = cu_seqlens
    lengths = [b - a for a, b in zip(starts[:-1], starts[1:], strict=True)]
    fits = len(starts) > 1 and starts[0] == 0 and min(lengths) >= 0 and starts[-1] <= every
    if not fits:
        refuse("cu_seqlens", f"numbers that ascend from 0 to at most {every}", starts)
    for begin, length in zip(starts, lengths, strict=False):
        if length and begin // count != (begin + length - 1) // count:
            wanted = f"sequences within the batch's rows of {count} tokens"
            refuse("cu_seqlens", wanted, f"one from {begin} to {begin + length}")
    if starts[-1] == every:
        return lengths, [False] * len(lengths)
    return [*lengths, every - starts[-1]], [*[False] * len(lengths), True]


class _Numbers(NamedTuple):
    """Of this rank's tokens, on a device, [batch * own] each."""

    placement: Placement
    number: Tensor  # within all tokens of the batch, int64
    place: Tensor  # within the sequence, int32; -1 for padding
    start: Tensor  # int32: the rows that a query sees, itself the last one
    end: Tensor


class Tokens:
    """The tokens of a call, [batch, count], of which this rank has [batch, own]. Tensors of this
    rank's tokens are [batch * own, ...]. Rows have their numbers within the whole batch,
    [batch * count]. ContextParallel.tokens() makes it."""

    def __init__(
        self,
        context: ContextParallel,
        count: int,
        batch: int,
        lengths: List[int],
        padding: List[bool],
    ):
        """lengths, padding: as checked_lengths() returns them, alike on all ranks."""
        self.context, self.count, self.batch = context, count, batch
        self.lengths, self.padding = lengths, padding
        self.own = count // context.size
        self.chunk = self.own // context.chunks
        self._numbers: Dict[torch.device, _Numbers] = {}
        self._windows: Dict[Tuple[Any, ...], Windows] = {}

    def columns(self, device: Union[torch.device, str] = "cpu") -> Tensor:
        """Which tokens of a row of the batch this rank has, int64 [own]."""
        chunks = chunks_of(self.context.rank, self.context.size, self.context.chunks)
        first = torch.tensor(chunks, device=device)[:, None] * self.chunk
        return (first + torch.arange(self.chunk, device=device)).flatten()

    @refused_on_all_ranks
    def shard(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor that has a token of a row for each element of a dimension,
        for example [batch, count] with dim=1."""
        if whole.shape[dim] != self.count:
            refuse("shard", f"{self.count} tokens in dimension {dim}", list(whole.shape))
        return whole.index_select(dim, self.columns(whole.device))

    def numbers(self, device: torch.device) -> _Numbers:
        if device not in self._numbers:
            self._numbers[device] = self._find(device)
        return self._numbers[device]

    def _find(self, device: torch.device) -> _Numbers:
        context, batch, own = self.context, self.batch, self.own
        rows = torch.arange(batch, device=device)[:, None] * self.count
        number = (rows + self.columns(device)).flatten()
        order = None
        if batch > 1 or context.chunks > 1:
            column = torch.arange(self.count, device=device)
            chunk, within = column // self.chunk, column % self.chunk
            rank = torch.minimum(chunk, context.size * context.chunks - 1 - chunk)
            second = torch.zeros_like(chunk)
            if context.chunks > 1:
                second = (chunk >= context.size).long()
            else:
                rank = chunk
            place = rank * batch * own + second * self.chunk + within
            order = (place + torch.arange(batch, device=device)[:, None] * own).flatten()
        placement = Placement(context.size, batch * own, batch * self.count, order)
        ends = torch.tensor(self.lengths, device=device).cumsum(0)
        sequence = torch.searchsorted(ends, number, right=True)
        start = torch.nn.functional.pad(ends, (1, 0))[sequence]
        padding = torch.tensor(self.padding, device=device)[sequence]
        place = (number - start).masked_fill(padding, -1)
        end = start + place + 1
        return _Numbers(placement, number, place.int(), start.int(), end.int())

    @refused_on_all_ranks
    def of_sequences(self, lengths: List[int], padding: List[bool]) -> "Tokens":
        """The same tokens in other sequences, of these lengths, which fill the batch; some of them
        may be padding. A collective call."""
        self.context.agree("of_sequences", lengths=str(lengths), padding=str(padding))
        return Tokens(self.context, self.count, self.batch, lengths, padding)

    # ---- rows

    @refused_on_all_ranks
    def whole(self, x: Tensor) -> Tensor:
        """[batch * count, ...] of [batch * own, ...] on each rank; without a gradient. A collective
        call."""
        self._agree_on("whole", "x", x)
        x = x.detach().contiguous()
        return gathered(self.context, x, self.numbers(x.device).placement.in_order).wait()

    @refused_on_all_ranks
    def gather(self, rows: Tensor, of: Optional[Windows] = None) -> Rows:
        """Begins to gather the rows of all ranks. A collective call, which returns when all ranks
        have made it.

        Args:
            rows: this rank's, contiguous in the last dimension: [batch * own, ...], one for each of
                its tokens; with `of`, [of.own, ...]: one for each of its windows.
            of: of windows(), for what compressor_forward() returned.

        Returns:
            A handle, which stands for the rows of all ranks in the calls below; their gradients
            reach `rows`. Under torch.autocast rows are cast to its dtype. Make it before what does
            not need it, such as the projections of the queries, and let go of it (`del`, the end of
            a function, release()) when the layer has run: it holds the rows of all ranks.
        """
        rows = cast(rows)
        self._agree_on("gather", "rows", rows, of)
        placement = self.numbers(rows.device).placement if of is None else of.placement
        return Rows(self.context, placement, rows)

    def _agree_on(
        self, call: str, argument: str, rows: Tensor, of: Optional[Windows] = None, **others: str
    ) -> None:
        """Refuses, on all ranks alike, rows that are not one for each of this rank's tokens or
        windows, or that differ from those of other ranks."""
        if of is None:
            own, every = self.batch * self.own, f"{self.batch} x {self.count} tokens"
        else:
            own, every = of.own, f"{of.total} windows, up to {of.placement.capacity} of a rank"
        if rows.layout != torch.strided:
            refuse(f"{call}: {argument}", "a dense tensor", rows.layout)
        shape, dtype = list(rows.shape), str(rows.dtype)
        surplus = str(shape[0] - own) if shape else "none"
        self.context.agree(
            call, rows_of=every, surplus_rows=surplus, columns=str(shape[1:]), dtype=dtype,
            device=rows.device.type, **others,
        )  # fmt: skip
        if surplus != "0":
            refuse(f"{call}: {argument}", f"{own} rows", f"shape {shape}")

    @refused_on_all_ranks
    def history(self, x: Tensor, width: int) -> Tensor:
        """This rank's tokens, and up to `width` before each of its chunks. A collective call.

        Args:
            x: [batch * own, ...]; width: 0 or more.

        Returns:
            [chunks, batch, width + chunk, ...], differentiable: the last `chunk` are this rank's
            own, in the chunk's place; before the first token of all there are zeros. It takes what
            attends to a window of neighbours, without gathering all rows.
        """
        self._agree_on("history", "x", x, width=str(width))
        if not isinstance(width, int) or width < 0:
            refuse("width", "0 or more", width)
        return history(self, x, width)

    @refused_on_all_ranks
    def window(self, width: int, device: torch.device) -> Dict[str, Tensor]:
        """key_start and key_end of this rank's queries in history(x, width - 1), flattened to
        [chunks * batch * (width - 1 + chunk), ...]: the last `width` tokens that each one sees,
        itself among them."""
        if not isinstance(width, int) or width < 1:
            refuse("width", "1 or more", width)
        place = self.numbers(device).place
        chunks, chunk = self.context.chunks, self.chunk
        blocks = torch.arange(chunks * self.batch, device=device).view(chunks, self.batch)
        at = blocks.T[:, :, None] * (width - 1 + chunk) + width - 1
        at = (at + torch.arange(chunk, device=device)).flatten().int()
        start = at - place.clamp(0, width - 1)
        return {"key_start": start, "key_end": torch.where(place < 0, start, at + 1)}

    # ---- the operations

    def _limits(
        self, q: Tensor, key_start: Optional[Tensor], key_end: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor]:
        if (key_start is None) != (key_end is None):
            refuse("key_start", "key_end with it", "one of them")
        if key_start is not None and key_end is not None:
            return key_start, key_end
        if q.dim() != 3 or q.shape[0] != self.batch * self.own:
            wanted = f"3 dimensions and {self.batch * self.own} tokens"
            refuse("q", wanted, f"shape {list(q.shape)}")
        numbers = self.numbers(q.device)
        return numbers.start, numbers.end

    @refused_on_all_ranks
    def sparse_mla_attention(
        self,
        q: Tensor,
        kv: AnyRows,
        indices: Optional[Tensor] = None,
        *,
        scale: Optional[float] = None,
        topk_length: Optional[Tensor] = None,
        attn_sink: Optional[Tensor] = None,
        key_start: Optional[Tensor] = None,
        key_end: Optional[Tensor] = None,
        extra_kv: Optional[AnyRows] = None,
        extra_indices: Optional[Tensor] = None,
        extra_topk_length: Optional[Tensor] = None,
        extra_key_start: Optional[Tensor] = None,
        extra_key_end: Optional[Tensor] = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """winnow.torch.sparse_mla_attention() of this rank's queries to rows of all ranks.

        Args:
            q: [batch * own, h_q, d_qk]
            kv: a handle of gather(), of rows [n, 1, d_qk]; or a tensor of rows that only this rank
                reads, such as history(), with numbers of its own.
            indices: [s_q, topk] or [s_q, 1, topk], int32, numbers of rows within the whole batch;
                or None with key_start and key_end, a range of them. If none of these is given, a
                query sees its sequence's tokens up to its own.
            extra_kv and what belongs to it: a second source, with a list or a range of its own.
            deterministic, return_lse, and all others: as there.

        Returns:
            out [s_q, h_q, 512], or (out, lse); gradients reach q, attn_sink and the rows of all
            ranks. With sharded keys the parts are merged in float32 by their lse.
        """
        if attn_sink is not None and attn_sink.dtype in (torch.bfloat16, torch.float16):
            attn_sink = attn_sink.float()
        if indices is None and key_start is None and isinstance(kv, Rows):
            key_start, key_end = self._limits(q, None, None)
        rows: List[AnyRows] = [kv]
        choices = [(_two(indices), topk_length, key_start, key_end)]
        if extra_kv is not None:
            rows.append(extra_kv)
            choices.append((_two(extra_indices), extra_topk_length, extra_key_start, extra_key_end))
        out, lse = attention.attend(q, attn_sink, scale, rows, choices, deterministic)
        self.context.taken("sparse_mla_attention")
        return (out, lse) if return_lse else out

    @refused_on_all_ranks
    @torch.no_grad()
    def indexer_topk(
        self,
        q: Tensor,
        k: Rows,
        weights: Tensor,
        topk: int,
        *,
        k_scale: Optional[Rows] = None,
        key_start: Optional[Tensor] = None,
        key_end: Optional[Tensor] = None,
        ties: str = "smaller",
        return_scores: bool = False,
    ) -> Tuple[Tensor, ...]:
        """winnow.torch.indexer_topk() of this rank's queries over the keys of all ranks: the
        choices of one rank that has them all, bit for bit.

        Args:
            k, k_scale: handles of gather(). key_start, key_end: as numbers within the whole batch;
                without them a query sees its sequence's tokens up to its own. All others: as there.

        Returns:
            (indices, length), with return_scores (indices, length, scores).
        """
        _check_handle("k", k)
        if k_scale is not None:
            _check_handle("k_scale", k_scale)
        start, end = self._limits(q, key_start, key_end)
        found = choice.choose(cast(q, k.dtype), k, weights, topk, k_scale, start, end, ties)
        self.context.taken("indexer_topk")
        return found if return_scores else found[:2]

    @refused_on_all_ranks
    def indexer_loss(
        self,
        q: Tensor,
        k: Rows,
        weights: Tensor,
        target: Optional[Tensor] = None,
        indices: Optional[Tensor] = None,
        *,
        attention: Optional[Attention] = None,
        key_start: Optional[Tensor] = None,
        key_end: Optional[Tensor] = None,
        reduction: str = "mean",
        chunk: Optional[int] = None,
        heads_group: Optional[dist.ProcessGroup] = None,
    ) -> Tensor:
        """winnow.torch.indexer_loss() of this rank's queries over the keys of all ranks.

        Args:
            k: a handle of gather(). indices, key_start, key_end: as numbers within the whole batch;
                without a range a query sees its sequence's tokens up to its own.
            attention: (q, kv, lse, scale, attn_sink) as there, with a handle of gather() as kv.
            reduction: "mean": so that the mean over the ranks, which data parallelism forms of
                losses and gradients, is the mean over all queries that see something. "sum": of
                this rank's queries; the sum over the ranks is that of all. "none": of each query.
            heads_group: of ranks that have other heads of the same queries: the target of
                `attention` is summed over it.
            target, chunk: as there.

        Returns:
            The loss, float32, differentiable in q, weights and the rows of k.
        """
        if (target is None) == (attention is None):
            got = "neither" if target is None else "both"
            refuse("target", "it or attention", got)
        if reduction not in ("mean", "sum", "none"):
            refuse("reduction", "mean, sum or none", reduction)
        _check_handle("k", k)
        teacher = None
        if attention is not None:
            of_q, rows, lse, scale, sink = attention
            _check_handle("attention: kv", rows)
            lse = lse.detach() if sink is None else torch.logaddexp(lse, sink).detach()
            of_q = cast(of_q.detach(), rows.dtype)
            teacher = loss.Teacher(of_q, rows, lse, scale, heads_group)
        start, end = self._limits(q, key_start, key_end)
        deterministic = torch.are_deterministic_algorithms_enabled()
        problem = loss.Problem(k, teacher, chunk, deterministic)
        target = None if target is None else target.detach()
        q = cast(q, k.dtype)
        with torch.autocast(q.device.type, enabled=False):  # what comes again has this dtype
            losses, sees = loss.losses(problem, q, weights, start, end, _two(indices), target)
        self.context.taken("indexer_loss", reduction=str(reduction))
        if reduction == "none":
            return losses
        total = losses.sum()
        if reduction == "sum":
            return total
        count = self.context.sum(sees.sum()).clamp(min=1)
        return total * (self.context.size / count)

    # ---- the compressor

    @refused_on_all_ranks
    def windows(
        self, ratio: int, device: Union[torch.device, str], overlap: bool = False
    ) -> Windows:
        """Where the windows of `ratio` tokens lie, whose rows compressor_forward() computes: each
        on the rank that has its last token."""
        key = ratio, overlap, torch.device(device)
        if key not in self._windows:
            self._windows[key] = windows.find(self, ratio, overlap, torch.device(device))
        return self._windows[key]

    @refused_on_all_ranks
    def compressor_forward(
        self,
        kv: Tensor,
        gate: Tensor,
        position_bias: Tensor,
        *,
        overlap: bool = False,
        norm_weight: Optional[Tensor] = None,
        eps: Optional[float] = None,
        cos: Optional[Tensor] = None,
        sin: Optional[Tensor] = None,
        first_position: Optional[Sequence[int]] = None,
        hadamard: bool = False,
    ) -> Tensor:
        """winnow.torch.compressor_forward() of this rank's windows: those whose last token it has.
        Tokens before its chunks come from the ranks before. A collective call.

        Args:
            kv, gate: [batch * own, columns], of this rank's tokens. position_bias, and all others
                as there; cos and sin have a row for each position.
            first_position: of each sequence, on the host; None: 0.

        Returns:
            [windows(...).own, d]: rows bit for bit those of one rank that has all tokens,
            differentiable in kv, gate, position_bias and norm_weight. The gradients of the last two
            are this rank's, as those of any weight.
        """
        at = self.windows(position_bias.shape[0], kv.device, overlap)
        rows = windows.compress(
            self, at, kv, gate, position_bias, first_position, overlap=overlap,
            norm_weight=norm_weight, eps=eps, cos=cos, sin=sin, hadamard=hadamard,
        )  # fmt: skip
        self.context.taken("compressor_forward")
        return rows


def _check_handle(argument: str, rows: Any) -> None:
    if not isinstance(rows, Rows):
        refuse(argument, "a handle of gather()", type(rows).__name__)


def _two(indices: Optional[Tensor]) -> Optional[Tensor]:
    return indices[:, 0] if indices is not None and indices.dim() == 3 else indices
