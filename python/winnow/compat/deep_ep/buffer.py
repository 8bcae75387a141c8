"""deep_ep.Buffer: the high-throughput calls of its first interface."""

from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor

from winnow.compat._refusal import refuse, refuse_call
from winnow.compat.deep_ep._checks import (
    wrong_bias,
    wrong_config,
    wrong_counts,
    wrong_dispatch,
    wrong_events,
    wrong_handle,
    wrong_indices,
    wrong_number,
    wrong_sums,
)
from winnow.compat.deep_ep._entry import called, entry
from winnow.compat.deep_ep._handle import Handle
from winnow.compat.deep_ep._layers import Layers, Sizes, refuse_new, wrong_group
from winnow.compat.deep_ep._low_latency import LowLatencyBuffer
from winnow.compat.deep_ep._route import OF_ROWS, Route, dense, int32_indices, report_later, sums_in
from winnow.compat.deep_ep._streams import CommStream
from winnow.compat.deep_ep.config import Config
from winnow.compat.deep_ep.utils import EventHandle, EventOverlap
from winnow.expert_parallel import layout

__all__ = ["Buffer"]

_MOST_TOPK = 32  # of a layer

TensorOrPair = Union[Tensor, Tuple[Tensor, Tensor]]


class Buffer(LowLatencyBuffer):
    """What deep_ep.Buffer does, over winnow.expert_parallel.

    W ranks, n tokens of this rank, K = topk, E experts, R rows that arrive here. Tensors are on the
    CPU, or on torch's current GPU. Sizes of memory are not needed: a layer is made at the first
    call that needs one, and made larger, by all ranks alike, when one of them has more tokens.

    Args:
        group: a process group of torch; the ranks meet in its store. Collective to make.
        num_nvl_bytes, num_rdma_bytes: kept, without effect.
        low_latency_mode: True for the low-latency calls.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: without
            effect.
        explicitly_destroy: destroy() may be called.
        enable_shrink: a rank that does not come to a low-latency call within
            WINNOW_TIMEOUT_SECONDS (30) is masked, and the others go on; else it is an error.
        comm: None: a communicator of mpi4py has no store.

    Raises:
        ValueError: an argument that is not as described. winnow.Error: a rank that does not come.
    """

    num_sms: int = 20
    _name = "deep_ep.Buffer"
    _names = {
        **OF_ROWS,
        "experts": "num_tokens_per_expert",
        "tokens_per_expert": "num_tokens_per_expert",
        "worst_case_rows": "num_worst_tokens",
    }

    @entry(refuse_new)
    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ) -> None:
        if group is None or comm is not None:
            refuse(called(), "group", "a process group of torch, and no comm", "none, or a comm")
        if (why := wrong_group(group)) is not None:
            refuse(called(), *why)
        if enable_shrink and not low_latency_mode:
            refuse_new(group, ("enable_shrink", "False without low_latency_mode", True))
        self.group = group
        self.rank, self.group_size = group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        self._layers = Layers(group, Buffer.num_sms)
        self._stream = CommStream(self._layers.shares_gpu)

    def destroy(self) -> None:
        """Releases the layers without waiting for other ranks. Only with explicitly_destroy."""
        if not self.explicitly_destroy:
            refuse_call("deep_ep.Buffer.destroy", "the buffer was made without explicitly_destroy")
        self._layers.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether the build has the kernels of Hopper."""
        from winnow._winnow import backends

        return any(backend["name"] == "sm90" for backend in backends())

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs of the calls from now on: even, of which up to 64 are used."""
        if wrong_number("new_num_sms", new_num_sms, 2) or new_num_sms % 2:
            refuse("deep_ep.Buffer.set_num_sms", "new_num_sms", "an even number", new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream as it is now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """For any number of ranks; see Config."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """For any number of ranks; see Config."""
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """The stream of this buffer's calls on a GPU."""
        return self._stream.get()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Optional[torch.Size] = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """The memory that the calls share, of which there is none here: a tensor without elements.

        Rows arrive in tensors of their own, and no call leaves anything for the next: there is
        nothing to clear after a fault.

        Args:
            dtype: of the result. size: None, or one without elements. offset: 0.
            use_rdma_buffer: without effect.

        Raises:
            ValueError: a size or an offset of memory that is not there.
        """
        name = "deep_ep.Buffer.get_local_buffer_tensor"
        wanted = "{} in memory without elements: rows arrive in the tensors that dispatch() returns"
        if not isinstance(dtype, torch.dtype):
            refuse(name, "dtype", "a dtype of torch", dtype)
        try:
            sizes = torch.Size((0,) if size is None else size)
        except (RuntimeError, TypeError, ValueError):
            refuse(name, "size", "numbers, or None", size)
        if 0 not in sizes or any(number < 0 for number in sizes):
            refuse(name, "size", wanted.format("None"), list(sizes))
        if wrong_number("offset", offset, 0) or offset != 0:
            refuse(name, "offset", wanted.format("0"), offset)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(sizes, dtype=dtype, device=device)

    @entry(experts="num_experts")
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], Tensor, Tensor, EventOverlap]:
        """How many tokens go where; not collective.

        Args:
            topk_idx: [n, K], int64 or int32, -1 for none.
            num_experts: E, a multiple of W.
            previous_event, async_finish, allocate_on_comm_stream: as in dispatch().

        Returns:
            (num_tokens_per_rank [W], num_tokens_per_rdma_rank [nodes] or None on one node,
            num_tokens_per_expert [E], all int32, is_token_in_rank bool [n, W], event).
        """
        why = wrong_indices(topk_idx) or wrong_number("num_experts", num_experts, 1)
        why = why or wrong_events(previous_event, async_finish, allocate_on_comm_stream)
        if why:
            refuse(called(), *why)

        local = self._layers.local_world_size

        def body():
            return layout(int32_indices(topk_idx, num_experts), num_experts, self.group_size, local)

        (ranks, nodes, experts, in_rank), event = self._stream.run(
            topk_idx.device, body, topk_idx, previous_event, async_finish
        )
        return ranks, nodes if local < self.group_size else None, experts, in_rank, event

    @entry(Layers.refuse)
    def dispatch(
        self,
        x: TensorOrPair,
        handle: Optional[Tuple] = None,
        num_tokens_per_rank: Optional[Tensor] = None,
        num_tokens_per_rdma_rank: Optional[Tensor] = None,
        is_token_in_rank: Optional[Tensor] = None,
        num_tokens_per_expert: Optional[Tensor] = None,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[
        TensorOrPair,
        Optional[Tensor],
        Optional[Tensor],
        Optional[List[int]],
        Optional[Tuple],
        EventOverlap,
    ]:
        """Carries every token once to each rank that it goes to. Collective.

        Args:
            x: [n, H], bfloat16, float16 or float32; or (float8_e4m3fn [n, H], scales [n, ...] of
                any dtype and strides, up to 4 bytes for 32 columns).
            handle: of an earlier dispatch, to repeat its routing; counts, topk_idx and
                topk_weights are absent then.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
                num_tokens_per_expert: what get_dispatch_layout() gave. Without topk_idx tokens go
                where is_token_in_rank says, to 32 ranks at most, and the counts returned are from
                num_tokens_per_expert. With topk_idx, which says it all, only the length of
                num_tokens_per_expert is read.
            topk_idx: [n, K], int64 or int32, -1 for none.
            topk_weights: [n, K], float32.
            expert_alignment: what the counts per expert are rounded up to; rows are not padded.
            num_worst_tokens: rows of the results, without a wait for counts. More that arrive are
                an error of a later call.
            config: without effect.
            previous_event: what the call waits for instead of the current stream.
            async_finish: the current stream does not wait for the call; its event tells.
            allocate_on_comm_stream: takes previous_event and async_finish.

        Returns:
            (recv_x [R, H], with scales where x has them, by source rank, then token;
            recv_topk_idx [R, K] of topk_idx's dtype: local experts, -1 elsewhere;
            recv_topk_weights [R, K] float32, 0 elsewhere; the rounded counts of the local experts,
            empty with num_worst_tokens; handle; event). With a handle all but recv_x and the event
            are None.

        Raises:
            ValueError: arguments that are not as described, on any rank: on every rank, with the
                rank in the text, and the next call works.
            winnow.Error: a rank that did not come within the timeout; a new layer is made then.
        """
        self._layers.sm_count = Buffer.num_sms
        x, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        given = (x, scales, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        why = wrong_events(previous_event, async_finish, allocate_on_comm_stream)
        why = why or wrong_config(config) or wrong_dispatch(self.group_size, handle, *given)
        why = why or wrong_counts(
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
        )
        why = why or wrong_number("expert_alignment", expert_alignment, 1)
        why = why or wrong_number("num_worst_tokens", num_worst_tokens, 0)
        if isinstance(handle, Handle):
            if why:
                handle.route.refuse_repeat(why)
            arrived, event = self._stream.run(
                handle.route.sizes.device,
                lambda: tuple(handle.route.repeat(x, scales)),
                (x, scales),
                previous_event,
                async_finish,
            )
            return _rows(arrived), None, None, None, None, event
        if why:
            self._layers.refuse(why)
        body = self._count if topk_idx is None else self._choose
        results, event = self._stream.run(
            x.device,
            lambda: body(*given, expert_alignment, num_worst_tokens),
            (*given, num_tokens_per_rank),
            previous_event,
            async_finish,
        )
        return (*results, event)

    @entry(Layers.refuse_combine)
    def combine(
        self,
        x: Tensor,
        handle: Tuple,
        topk_weights: Optional[Tensor] = None,
        bias: Union[Tensor, Tuple[Tensor, Tensor], None] = None,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Adds, unweighted, the rows of each token of this rank. Collective.

        Args:
            x: [R, H] of the dispatch's dtype (bfloat16 after float8).
            handle: of the dispatch.
            topk_weights: [R, K], float32: added over ranks, each pair's for itself.
            bias: [n, H], or two of them.
            config, previous_event, async_finish, allocate_on_comm_stream: as in dispatch().

        Returns:
            (sums [n, H], sums of topk_weights [n, K] float32 or None, event). Sums are in float32
            and rounded at the end.

        Raises:
            ValueError, winnow.Error: as dispatch().
        """
        if why := wrong_handle(handle, Handle):
            self._layers.refuse_combine(why)
        route = handle.route
        why = wrong_events(previous_event, async_finish, allocate_on_comm_stream)
        why = why or wrong_config(config)
        why = why or wrong_sums("x", x, "topk_weights", topk_weights)
        if (why := why or wrong_bias(bias)) is not None:
            route.refuse_combine(why)

        self._layers.sm_count = Buffer.num_sms

        def body():
            return route.combine(x, bias, topk_weights)

        results, event = self._stream.run(
            route.sizes.device, body, (x, topk_weights, bias), previous_event, async_finish
        )
        return (*results, event)

    def _choose(
        self, x, scales, in_rank, per_expert, topk_idx, topk_weights, alignment, worst
    ):  # fmt: skip
        """A dispatch by experts."""
        experts = per_expert.numel()
        sizes = Sizes(x.shape[1], topk_idx.shape[1], experts, sums_in(x), x.device)
        route = Route(
            self._layers,
            sizes,
            x,
            scales,
            dense(topk_idx),
            weights=topk_weights,
            worst_case_rows=worst,
        )
        arrived = route.take_arrived()
        return (
            _rows(arrived),
            arrived.expert_ids.to(topk_idx.dtype),
            arrived.weights,
            route.aligned_counts(alignment),
            Handle.of(route, in_rank),
        )

    def _count(self, x, scales, in_rank, per_expert, _, __, alignment, worst):
        """A dispatch by ranks: each is an expert."""
        world = self.group_size
        columns = min(world, _MOST_TOPK)
        sizes = Sizes(x.shape[1], columns, world, sums_in(x), x.device, per_expert.numel())
        ranks = torch.arange(world, dtype=torch.int32, device=x.device)
        chosen = torch.where(in_rank, ranks, ranks.new_full((), -1))
        if columns < world:
            chosen = chosen.topk(columns, dim=1).values
            wanted = in_rank.sum(1)
            waits = worst == 0 or x.device.type == "cpu"
            most = int(wanted.max()) if waits and len(x) else 0
            if most > columns:
                why = ("is_token_in_rank", f"at most {columns} ranks a token", most)
                self._layers.refuse(why, sizes)
            if not waits:
                report_later(chosen, wanted > columns, world)
        route = Route(self._layers, sizes, x, scales, chosen, worst_case_rows=worst, by_rank=True)
        counts: List[int] = []
        if worst == 0:
            counts = self._counts_of(route, per_expert, alignment)
        return _rows(route.take_arrived()), None, None, counts, Handle.of(route, in_rank)

    def _counts_of(self, route: Route, per_expert: Tensor, alignment: int) -> List[int]:
        ranks, nodes, _, in_rank = route.layout()
        counts = (ranks, nodes, per_expert.to(torch.int32), in_rank)
        _, totals = route.notify(per_expert.numel(), *counts, expert_alignment=alignment)
        return list(totals.recv_pairs_per_expert)


def _rows(arrived: Any) -> TensorOrPair:
    rows, scales = arrived[0], arrived[1]
    return rows if scales is None else (rows, scales)
