"""The low-latency calls of deep_ep.Buffer, over winnow.expert_parallel.LowLatency."""

from typing import Callable, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import LowLatency, LowLatencyDispatched
from winnow.compat._refusal import refuse, refuse_call
from winnow.compat.deep_ep._checks import wrong_indices
from winnow.compat.deep_ep._layers import Layers
from winnow.compat.deep_ep._streams import CommStream, on_device
from winnow.compat.deep_ep.utils import EventOverlap

TensorOrPair = Union[Tensor, Tuple[Tensor, Tensor]]


class Key(NamedTuple):
    """What a layer is made for, alike on every rank."""

    max_tokens: int
    hidden: int
    topk: int
    experts: int
    device: torch.device


class Handle(tuple):
    """(source tokens [e, W * M] int32, ranges [e, W] int64, M, H, E), and what combine needs."""

    layer: LowLatency
    dispatched: LowLatencyDispatched

    @classmethod
    def of(cls, key: Key, layer: LowLatency, dispatched: LowLatencyDispatched) -> "Handle":
        sizes = (key.max_tokens, key.hidden, key.experts)
        handle = cls((dispatched.source_tokens, dispatched.ranges, *sizes))
        handle.layer, handle.dispatched = layer, dispatched
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
        """Bytes of the places of rows that arrive, and of 8 rows a token that come back, twice."""
        tokens = 2 * num_max_dispatch_tokens_per_rank
        return tokens * (num_ranks + 8) * hidden * 2

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
        """Carries every token to its experts, without counts before. Collective.

        Args:
            x: [n, H], bfloat16, n up to M = num_max_dispatch_tokens_per_rank.
            topk_idx: [n, K], int64 or int32, -1 for none; every expert of a token once.
            cumulative_local_expert_recv_stats: int32 [e], to which the counts are added.
            dispatch_wait_recv_cost_stats: int64 [W], to which the nanoseconds are added that were
                waited for each rank.
            use_fp8: rows of float8_e4m3fn with float32 scales [e, W * M, H/128], stored by column;
                round_scale: powers of two; use_ue8m0, with it: four exponents in an int32.
            return_recv_hook: the call only sends, and the hook receives, on the stream that is the
                current one then. At most two calls may be waiting for their hooks.
            async_finish: the current stream does not wait for the call; its event tells.

        Returns:
            (rows [e, W * M, H], with scales or without, of which the first `counts` of each expert
            are written; counts int32 [e]; handle; event; hook or None).

        Raises:
            ValueError, winnow.Error: as dispatch(). A rank that does not come: with enable_shrink
                it is masked.
        """
        name = "deep_ep.Buffer.low_latency_dispatch"
        if use_ue8m0 and not (round_scale and use_fp8):
            refuse(name, "use_ue8m0", "False without round_scale and use_fp8", use_ue8m0)
        scaled = "fp8_ue8m0" if use_ue8m0 else "fp8_power_of_two" if round_scale else "fp8"
        row_format = scaled if use_fp8 else "bfloat16"
        self._check("low_latency_dispatch", async_finish, return_recv_hook)
        why = wrong_indices(topk_idx)
        if why or not isinstance(x, Tensor) or x.dim() != 2:
            refuse(name, *(why or ("x", "a tensor [n, H]", type(x).__name__)))
        sizes = (num_max_dispatch_tokens_per_rank, x.shape[1], topk_idx.shape[1], num_experts)
        key = Key(*sizes, x.device)
        layer = self._layers.low_latency(key, self.enable_shrink)
        tokens, indices = x.detach().contiguous(), topk_idx.contiguous()
        statistics = (cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)

        def call(part: str, out: Optional[LowLatencyDispatched] = None) -> LowLatencyDispatched:
            sends = part != "receive"
            with torch.no_grad(), on_device(key.device):
                return layer.dispatch(
                    tokens if sends else None,
                    indices if sends else None,
                    format=row_format,
                    part=part,
                    out=out,
                    expert_statistics=statistics[0],
                    wait_statistics=statistics[1],
                )

        hook = None
        if return_recv_hook:
            arrived, event = call("send"), EventOverlap()

            def hook() -> None:
                call("receive", arrived)
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
    ) -> Tuple[Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Adds the rows of each token of this rank, by its weights. Collective.

        Args:
            x: [e, W * M, H], bfloat16: the experts' rows, in the places of the dispatch's.
            topk_idx: as in the dispatch; topk_weights: [n, K], float32; handle: of the dispatch.
            use_logfmt: refused. zero_copy: without effect, for rows are read where they are.
            out: [n, H], bfloat16, to write into.
            combine_wait_recv_cost_stats, async_finish, return_recv_hook: as in the dispatch.

        Returns:
            (sums [n, H], event, hook or None). Pairs of masked ranks are left out.
        """
        name = "deep_ep.Buffer.low_latency_combine"
        self._check("low_latency_combine", async_finish, return_recv_hook)
        if use_logfmt:
            refuse_call(name, "use_logfmt: rows travel as bfloat16 only")
        if not isinstance(handle, Handle):
            refuse(name, "handle", "one of low_latency_dispatch()", type(handle).__name__)
        rows = x.detach() if isinstance(x, Tensor) else x
        indices, weights = topk_idx.contiguous(), topk_weights.detach().contiguous()

        def call(part: str, result: Optional[Tensor]) -> Tensor:
            with torch.no_grad(), on_device(indices.device):
                return handle.layer.combine(
                    rows,
                    handle.dispatched,
                    indices,
                    weights,
                    part=part,
                    out=result,
                    wait_statistics=combine_wait_recv_cost_stats,
                )

        if return_recv_hook:
            combined = call("send", out)

            def hook() -> None:
                call("receive", combined)

            return combined, EventOverlap(), hook
        given = (x, topk_idx, topk_weights, out, combine_wait_recv_cost_stats)
        (combined,), event = self._stream.run(
            indices.device, lambda: (call("both", out),), given, None, async_finish
        )
        return combined, event, None

    def get_next_low_latency_combine_buffer(self, handle: Tuple) -> Tensor:
        """New memory [e, W * M, H], bfloat16, for the experts' rows; any other will do too."""
        self._check("get_next_low_latency_combine_buffer")
        output = handle.dispatched.output
        return torch.empty(output.shape, dtype=torch.bfloat16, device=output.device)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing has to be cleaned: what comes carries the number of its call."""
        self._check("clean_low_latency_buffer")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks or unmasks another rank. A rank that has missed a call cannot rejoin."""
        self._check("low_latency_update_mask_buffer")
        for layer in self._layers.low_latency_layers():
            layer.set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each masked rank to mask_status [W], int32, 0 for the others."""
        self._check("low_latency_query_mask_buffer")
        mask_status.copy_(self._masks())

    def low_latency_clean_mask_buffer(self) -> None:
        """Masks none."""
        self._check("low_latency_clean_mask_buffer")
        for layer in self._layers.low_latency_layers():
            for rank, masked in enumerate(layer.mask()):
                if masked:
                    layer.set_mask(rank, False)

    def _masks(self) -> Tensor:
        masked = torch.zeros(self._layers.world_size, dtype=torch.int32, device="cpu")
        for layer in self._layers.low_latency_layers():
            masked |= torch.tensor(layer.mask(), dtype=torch.int32, device="cpu")
        return masked

    def _check(self, name: str, asynchronous: bool = False, with_hook: bool = False) -> None:
        if not self.low_latency_mode:
            refuse_call(f"deep_ep.Buffer.{name}", "the buffer was made without low_latency_mode")
        if asynchronous and with_hook:
            why = "async_finish: want False with return_recv_hook, got True"
            refuse_call(f"deep_ep.Buffer.{name}", why)


def _with_tensors(arrived: LowLatencyDispatched) -> Tuple:
    """And its tensors, which a stream has to keep."""
    return (
        arrived,
        arrived.output,
        arrived.scales,
        arrived.counts,
        arrived.source_tokens,
        arrived.source_pairs,
        arrived.ranges,
    )
