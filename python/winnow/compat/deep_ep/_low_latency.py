"""The low-latency calls of deep_ep.Buffer, over winnow.expert_parallel.LowLatency."""

import operator
from typing import Any, Callable, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import LowLatency, LowLatencyDispatched
from winnow.compat._refusal import refuse, refuse_call
from winnow.compat.deep_ep._checks import (
    Wrong,
    described,
    usable,
    wrong_counters,
    wrong_flags,
    wrong_indices,
    wrong_number,
    wrong_weights,
)
from winnow.compat.deep_ep._entry import entry, later
from winnow.compat.deep_ep._layers import Layers
from winnow.compat.deep_ep._route import dense
from winnow.compat.deep_ep._streams import CommStream
from winnow.compat.deep_ep.utils import EventOverlap

TensorOrPair = Union[Tensor, Tuple[Tensor, Tensor]]


class Key(NamedTuple):
    """What a layer is made for; the same on every rank."""

    max_tokens: int
    hidden: int
    topk: int
    experts: int
    device: torch.device


class Handle(tuple):
    """(source tokens [e, W * M] int32, ranges [e, W] int64, M, H, E), and what combine needs."""

    key: Key
    layer: LowLatency
    dispatched: LowLatencyDispatched

    @classmethod
    def of(cls, key: Key, layer: LowLatency, dispatched: LowLatencyDispatched) -> "Handle":
        sizes = (key.max_tokens, key.hidden, key.experts)
        handle = cls((dispatched.source_tokens, dispatched.ranges, *sizes))
        handle.key, handle.layer, handle.dispatched = key, layer, dispatched
        return handle


class LowLatencyBuffer:
    """The low-latency half of Buffer. W ranks, E experts, e = E / W of them here."""

    low_latency_mode: bool
    enable_shrink: bool
    _layers: Layers
    _stream: CommStream

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of two calls in bfloat16: for each token num_ranks rows arrive and 8 return."""
        tokens = 2 * num_max_dispatch_tokens_per_rank
        return tokens * (num_ranks + 8) * hidden * 2

    @entry(
        lambda layers, why: layers.refuse_low_latency(LowLatency._refuse_dispatch, why),
        experts="num_experts",
        max_tokens="num_max_dispatch_tokens_per_rank",
        format="use_fp8",
        expert_statistics="cumulative_local_expert_recv_stats",
        part="return_recv_hook",
        wait_statistics="dispatch_wait_recv_cost_stats",
    )
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Tuple[TensorOrPair, Tensor, Tuple, EventOverlap, Optional[Callable[[], None]]]:
        """Sends every token to its experts; no counts are exchanged beforehand. Collective.

        Args:
            x: [n, H], bfloat16, n up to M = num_max_dispatch_tokens_per_rank.
            topk_idx: [n, K], int64 or int32, -1 for none; no expert twice for one token.
            cumulative_local_expert_recv_stats: int32 [e], to which the counts are added.
            dispatch_wait_recv_cost_stats: int64 [W], to which the nanoseconds are added that were
                waited for each rank.
            use_fp8: rows of float8_e4m3fn with float32 scales [e, W * M, H/128], stored by column;
                round_scale: scales are powers of two. use_ue8m0, only with round_scale: four scale
                exponents are packed in an int32.
            return_recv_hook: the call only sends; the hook receives, on the stream that is current
                when it is called. At most two calls may be waiting for their hooks. Each rank may
                call the hooks in any order; each hook receives the rows of its own call.
            async_finish: the current stream does not wait for the call; the returned event tells
                when it is done.

        Returns:
            (rows [e, W * M, H], with scales or without, of which the first `counts` of each expert
            are written; counts int32 [e]; handle; event; hook or None).

        Raises:
            ValueError, winnow.Error: as in dispatch(). With enable_shrink a rank that does not come
                is masked, and raises no error.
        """
        self._check("low_latency_dispatch")
        formats = {"use_fp8": use_fp8, "round_scale": round_scale, "use_ue8m0": use_ue8m0}
        why = wrong_flags(**formats) or _wrong_end(async_finish, return_recv_hook)
        if not why and use_ue8m0 and not (round_scale and use_fp8):
            why = ("use_ue8m0", "False without round_scale and use_fp8", use_ue8m0)
        if not why and (not usable(x) or x.dim() != 2):
            why = ("x", "a tensor [n, H]", described(x))
        why = why or wrong_indices(topk_idx)
        most = num_max_dispatch_tokens_per_rank
        why = why or wrong_number("num_max_dispatch_tokens_per_rank", most, 1)
        why = why or wrong_number("num_experts", num_experts, 1)
        world = self._layers.world_size
        statistics = (cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        if not why:
            per_rank, name = num_experts // world, "cumulative_local_expert_recv_stats"
            why = wrong_counters(name, statistics[0], per_rank, torch.int32)
        name = "dispatch_wait_recv_cost_stats"
        if why := why or wrong_counters(name, statistics[1], world, torch.int64):
            self._layers.refuse_low_latency(LowLatency._refuse_dispatch, why)
        scaled = "fp8_ue8m0" if use_ue8m0 else "fp8_power_of_two" if round_scale else "fp8"
        row_format = scaled if use_fp8 else "bfloat16"
        sizes = (operator.index(most), x.shape[1], topk_idx.shape[1], operator.index(num_experts))
        key = Key(*sizes, x.device)
        layer = self._layers.low_latency(key, self.enable_shrink)
        tokens, indices = dense(x), dense(topk_idx)

        def call(part: str, out: Optional[LowLatencyDispatched] = None) -> LowLatencyDispatched:
            sends = part != "receive"

            def dispatch() -> LowLatencyDispatched:
                return layer.dispatch(
                    tokens if sends else None,
                    indices if sends else None,
                    format=row_format,
                    part=part,
                    out=out,
                    expert_statistics=statistics[0],
                    wait_statistics=statistics[1],
                )

            with torch.no_grad():
                return self._layers.call_low_latency(key, layer, dispatch)

        hook: Optional[Callable[[], None]] = None
        if return_recv_hook:
            arrived, event = call("send"), EventOverlap()
            hook = _hook(lambda: call("receive", arrived), "dispatch")
        else:
            (arrived, *_), event = self._stream.run(
                key.device,
                lambda: _with_tensors(call("both")),
                (x, topk_idx, statistics),
                None,
                async_finish,
            )
        rows = arrived.output if arrived.scales is None else (arrived.output, arrived.scales)
        return rows, arrived.counts, Handle.of(key, layer, arrived), event, hook

    @entry(
        lambda layers, why: layers.refuse_low_latency(LowLatency._refuse_combine, why),
        dispatched="handle",
        wait_statistics="combine_wait_recv_cost_stats",
        part="return_recv_hook",
    )
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[Tensor] = None,
        combine_wait_recv_cost_stats: Optional[Tensor] = None,
        *,
        overlap: bool = False,
        packed_recv_count: Optional[Tensor] = None,
        comp_signal: Optional[Tensor] = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: Optional[int] = None,
        src_signals: Optional[Tensor] = None,
        src_signal_expect_value: int = 0,
    ) -> Tuple[Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Adds the rows of each token of this rank, by its weights. Collective.

        Args:
            x: [e, W * M, H], bfloat16: the experts' rows, each where dispatch put its input.
            topk_idx: as in the dispatch; topk_weights: [n, K], float32; handle: of the dispatch.
            use_logfmt: refused. zero_copy: without effect, for rows are read where they are.
            out: [n, H], bfloat16, to write into.
            combine_wait_recv_cost_stats, async_finish, return_recv_hook: as in the dispatch.
            overlap: of the forks that SGLang uses, only with return_recv_hook: x is still being
                written when the call is made. The hook sends and receives what work that is queued
                on its stream has written by then, so that all ranks call such hooks in the same
                order; the arguments below, by which the forks send parts of x earlier, are not
                read.

        Returns:
            (sums [n, H], event, hook or None). Pairs of masked ranks are left out.
        """
        self._check("low_latency_combine")
        why = wrong_flags(use_logfmt=use_logfmt, overlap=overlap)
        why = why or _wrong_end(async_finish, return_recv_hook)
        if not why and overlap and not return_recv_hook:
            why = ("overlap", "False without return_recv_hook", overlap)
        if not why and use_logfmt:
            why = ("use_logfmt", "False: rows travel as bfloat16 only", use_logfmt)
        if not why and not isinstance(handle, Handle):
            why = ("handle", "one of low_latency_dispatch()", type(handle).__name__)
        if not why and not usable(x):
            why = ("x", "a tensor [e, W * M, H]", described(x))
        why = why or wrong_indices(topk_idx)
        if not why and topk_weights is None:
            why = ("topk_weights", "float32", None)
        if not why and out is not None and not usable(out):
            why = ("out", "a tensor [n, H], bfloat16", described(out))
        name, world = "combine_wait_recv_cost_stats", self._layers.world_size
        why = why or wrong_counters(name, combine_wait_recv_cost_stats, world, torch.int64)
        why = why or wrong_weights("topk_weights", topk_weights)
        if not why and overlap:  # the layer would say so in the hook
            why = _wrong_overlapped(x, topk_idx, topk_weights, handle, out)
        if why:
            self._layers.refuse_low_latency(LowLatency._refuse_combine, why)
        indices, weights = dense(topk_idx), dense(topk_weights)
        rows = None if overlap else dense(x)  # a copy is one of what is there

        def call(part: str, result: Any) -> Any:
            def combine() -> Any:
                return handle.layer.combine(
                    dense(x) if rows is None else rows,
                    handle.dispatched,
                    indices,
                    weights,
                    part=part,
                    out=result,
                    wait_statistics=combine_wait_recv_cost_stats,
                )

            with torch.no_grad():
                return self._layers.call_low_latency(handle.key, handle.layer, combine)

        if overlap:
            if out is None:
                sizes = (len(indices), handle.key.hidden)
                out = torch.empty(sizes, dtype=torch.bfloat16, device=x.device)
            return out, EventOverlap(), _hook(lambda: call("both", out), "combine")
        if return_recv_hook:
            sent = call("send", out)
            return sent.out, EventOverlap(), _hook(lambda: call("receive", sent), "combine")
        given = (x, topk_idx, topk_weights, out, combine_wait_recv_cost_stats)
        (combined,), event = self._stream.run(
            indices.device, lambda: (call("both", out),), given, None, async_finish
        )
        return combined, event, None

    def get_next_low_latency_combine_buffer(self, handle: Tuple) -> Tensor:
        """New memory [e, W * M, H], bfloat16, for the experts' rows; combine takes others too."""
        self._check("get_next_low_latency_combine_buffer")
        if not isinstance(handle, Handle):
            name = "deep_ep.Buffer.get_next_low_latency_combine_buffer"
            refuse(name, "handle", "one of low_latency_dispatch()", type(handle).__name__)
        output = handle.dispatched.output
        return torch.empty(output.shape, dtype=torch.bfloat16, device=output.device)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing has to be cleaned: arriving data carry the number of their call."""
        self._check("clean_low_latency_buffer")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks or unmasks another rank, for calls of any sizes. Only with enable_shrink.

        A rank that has missed a call cannot rejoin this buffer: make a new one on all ranks.
        """
        self._check("low_latency_update_mask_buffer")
        name, world = "deep_ep.Buffer.low_latency_update_mask_buffer", self._layers.world_size
        if not self.enable_shrink:
            refuse_call(name, "the buffer was made without enable_shrink")
        why = wrong_number("rank_to_mask", rank_to_mask, 0) or wrong_flags(mask=mask)
        if not why and (rank_to_mask >= world or rank_to_mask == self._layers.rank):
            why = ("rank_to_mask", f"another rank of {world}", rank_to_mask)
        if why:
            refuse(name, *why)
        self._layers.set_mask(operator.index(rank_to_mask), mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each masked rank to mask_status [W], int32, 0 for the others."""
        self._check("low_latency_query_mask_buffer")
        world = self._layers.world_size
        if not usable(mask_status) or mask_status.shape != (world,):
            name = "deep_ep.Buffer.low_latency_query_mask_buffer"
            refuse(name, "mask_status", f"a tensor [{world}], int32", described(mask_status))
        masked = self._layers.masked()
        status = [int(rank in masked) for rank in range(world)]
        mask_status.copy_(torch.tensor(status, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks."""
        self._check("low_latency_clean_mask_buffer")
        for rank in sorted(self._layers.masked()):
            self._layers.set_mask(rank, False)

    def _check(self, name: str) -> None:
        if not self.low_latency_mode:
            refuse_call(f"deep_ep.Buffer.{name}", "the buffer was made without low_latency_mode")


def _wrong_end(async_finish: bool, return_recv_hook: bool) -> Wrong:
    wrong = wrong_flags(async_finish=async_finish, return_recv_hook=return_recv_hook)
    if not wrong and async_finish and return_recv_hook:
        wrong = ("async_finish", "False with return_recv_hook", async_finish)
    return wrong


def _wrong_overlapped(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Handle, out: Optional[Tensor]
) -> Wrong:
    """The sizes and dtypes of a combine whose hook makes the call."""
    sums = (len(topk_idx), handle.key.hidden)
    if x.shape != handle.dispatched.output.shape or x.dtype != torch.bfloat16:
        return "x", f"{list(handle.dispatched.output.shape)}, bfloat16", described(x)
    if topk_weights.shape != topk_idx.shape:
        return (
            "topk_weights",
            f"{list(topk_idx.shape)}, float32, as topk_idx",
            described(topk_weights),
        )
    if out is not None and (out.shape != sums or out.dtype != torch.bfloat16):
        return "out", f"{list(sums)}, bfloat16", described(out)
    return None


def _hook(receive: Callable[[], Any], name: str) -> Callable[[], None]:
    """The hook of a call, which receives the results of that call, once."""
    receive, received = later(receive), False

    def hook() -> None:
        nonlocal received
        if received:
            refuse_call(f"deep_ep.Buffer.low_latency_{name}", "its hook was called before")
        receive()
        received = True

    return hook


def _with_tensors(arrived: LowLatencyDispatched) -> Tuple:
    """`arrived` with its tensors, so that CommStream.run() records them for the current stream."""
    return (
        arrived,
        arrived.output,
        arrived.scales,
        arrived.counts,
        arrived.source_tokens,
        arrived.source_pairs,
        arrived.pair_rows,
        arrived.ranges,
    )
