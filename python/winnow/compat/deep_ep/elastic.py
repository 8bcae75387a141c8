"""deep_ep.ElasticBuffer: the calls of its second interface."""

import operator
from typing import Any, Callable, List, NoReturn, Optional, Tuple, Union

import torch
from torch import Tensor

from winnow.compat._refusal import refuse, refuse_call
from winnow.compat.deep_ep._checks import (
    wrong_bias,
    wrong_handle,
    wrong_number,
    wrong_sums,
)
from winnow.compat.deep_ep._elastic_checks import (
    wrong_choice_of_experts,
    wrong_numbers,
    wrong_repeat,
    wrong_way,
)
from winnow.compat.deep_ep._entry import called, entry
from winnow.compat.deep_ep._layers import Layers, Sizes, refuse_new, wrong_group
from winnow.compat.deep_ep._route import OF_ROWS, Route, dense, sums_in
from winnow.compat.deep_ep._streams import CommStream, event_of
from winnow.compat.deep_ep.buffer import Buffer
from winnow.compat.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer"]

_NAME = "deep_ep.ElasticBuffer"
TensorOrPair = Union[Tensor, Tuple[Tensor, Tensor]]


class EPHandle:
    """What ElasticBuffer.dispatch() leaves behind for combine() and for a repeat.

    Attributes:
        do_expand: rows stand by expert, one for each pair; else one for each token.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: [n, K], a copy of what was given, or with do_handle_copy False that itself.
        num_recv_tokens: tokens that arrive here, num_expanded_tokens: rows; those of the results
            where the host did not wait.
        num_recv_tokens_per_expert_list: pairs of each local expert rounded up to the alignment;
            empty without do_cpu_sync.
        psum_num_recv_tokens_per_expert: int32 [e]. Of tokens the inclusive sums of the rounded
            counts; expanded where each expert's rows begin plus its true count.
        num_unaligned_recv_tokens_per_expert: int32 [e], the true counts.
        psum_num_recv_tokens_per_scaleup_rank: int32 [W], inclusive sums of the tokens of each
            source rank: a token with several experts here is one.
        recv_src_metadata, dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list:
            describe queues that are not here: None.
    """

    recv_src_metadata = dst_buffer_slot_idx = None
    token_metadata_at_forward = channel_linked_list = None

    def __init__(
        self,
        route: Route,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
    ) -> None:
        self.route = route
        self.do_expand, self.num_experts = bool(do_expand), num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms, self.topk_idx = num_sms, topk_idx
        described = route.descriptor
        self.num_recv_tokens_per_expert_list = route.aligned_counts(expert_alignment)
        self.num_unaligned_recv_tokens_per_expert = described.expert_counts
        self.num_expanded_tokens = self.num_recv_tokens = route.rows
        if do_expand:
            begins = described.expert_offsets[:-1]
            self.psum_num_recv_tokens_per_expert = begins + described.expert_counts
            sums, total = route.tokens_of_sources()
            self.psum_num_recv_tokens_per_scaleup_rank = sums
            if total is not None:
                self.num_recv_tokens = total
        else:
            counts = described.expert_counts
            aligned = (counts + expert_alignment - 1) // expert_alignment * expert_alignment
            self.psum_num_recv_tokens_per_expert = aligned.cumsum(0, dtype=torch.int32)
            self.psum_num_recv_tokens_per_scaleup_rank = described.source_begins[1:]


class ElasticBuffer:
    """What deep_ep.ElasticBuffer does for mixtures of experts, over winnow.expert_parallel.

    Args:
        group: a process group of torch. Collective to make.
        num_max_tokens_per_rank: T, the default of dispatch().
        The rest: kept where they have a name here, without effect. Layers are made when they are
            needed; every result is deterministic. Waits last WINNOW_TIMEOUT_SECONDS (30), whatever
            num_cpu_timeout_secs and num_gpu_timeout_secs say.
    """

    _name = _NAME
    _names = {
        **OF_ROWS,
        "experts": "num_experts",
        "order": "do_expand",
        "worst_case_rows": "num_max_tokens_per_rank",
    }

    @entry(refuse_new, hidden="hidden")
    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if (why := wrong_group(group)) is not None:
            refuse(called(), *why)
        why = wrong_number("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        if (why := why or wrong_number("hidden", hidden, 0)) is not None:
            refuse_new(group, why)
        self.group = group
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        hint = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden)
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.hidden, self.num_topk = hidden, num_topk
        self.use_fp8_dispatch, self.deterministic = use_fp8_dispatch, deterministic
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps
        self._layers = Layers(group, Buffer.num_sms)
        self._stream = CommStream(self._layers.shares_gpu)
        local = self._layers.local_world_size
        self.num_rdma_ranks = self.num_scaleout_ranks = self.num_ranks // local
        self.num_nvlink_ranks = self.num_scaleup_ranks = local
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, local)

    def destroy(self) -> None:
        """Releases the layers without waiting for other ranks. Only with explicitly_destroy."""
        if not self.explicitly_destroy:
            refuse_call(f"{_NAME}.destroy", "the buffer was made without explicitly_destroy")
        self._layers.close()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of twice the rows of all ranks, a multiple of 2 MiB. Nothing here needs it."""
        rows = 2 * num_max_tokens_per_rank * group.size()
        return -(-rows * (2 * hidden + 16 * num_topk) // 2**21) * 2**21

    @staticmethod
    def capture() -> EventHandle:
        """An event of the current stream as it is now."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream of this buffer's calls on a GPU."""
        return self._stream.get()

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks of each)"""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks of each)"""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """The SMs of the layers here."""
        return self._layers.sm_count

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: there are no queue pairs to choose."""
        return 0

    @entry(Layers.refuse)
    def dispatch(
        self,
        x: TensorOrPair,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Tuple[TensorOrPair, Optional[Tensor], Optional[Tensor], EPHandle, EventOverlap]:
        """Carries every token to the ranks of its experts. Collective.

        Args:
            x, topk_idx, topk_weights: as in Buffer.dispatch().
            cumulative_local_expert_recv_stats: int32 [e], to which the true counts are added; not
                with a handle, which counts nothing.
            num_experts: E. num_max_tokens_per_rank: T, the same on every rank.
            expert_alignment: of the rows of each expert when expanded, else of the counts alone.
            handle: of an earlier dispatch, to repeat its routing; topk_idx is absent then.
            do_cpu_sync: False: the results have W * T rows, expanded as many as can arrive, and
                nothing waits for counts.
            do_expand: one row for each pair, by local expert, source rank and token; with a handle
                as there. Padding is zero in any case.
            use_tma_aligned_col_major_sf: scales column by column.
            num_sms: 0 for Buffer.num_sms.
            previous_event, async_with_compute_stream: as in Buffer.dispatch().
            previous_event_before_epilogue: the whole call waits for it, too.
            The rest: without effect.

        Returns:
            (recv_x [R, H], with scales where x has them; local experts [R, K] or, expanded, None;
            weights [R, K], expanded [R], or None; handle; event). With a handle local experts
            are None.

        Raises:
            ValueError, winnow.Error: as Buffer.dispatch().
        """
        x, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        why = wrong_way(
            previous_event, previous_event_before_epilogue, num_sms,
            async_with_compute_stream=async_with_compute_stream, do_expand=do_expand,
            allocate_on_comm_stream=allocate_on_comm_stream, do_cpu_sync=do_cpu_sync,
            do_handle_copy=do_handle_copy,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )  # fmt: skip
        if handle is None:
            why = why or wrong_choice_of_experts(x, scales, topk_idx, topk_weights, num_experts)
            why = why or wrong_numbers(
                num_max_tokens_per_rank, expert_alignment, cumulative_local_expert_recv_stats,
                num_experts // self.num_ranks,
            )  # fmt: skip
        elif isinstance(handle, EPHandle):
            why = why or wrong_repeat(
                handle, x, scales, topk_idx, topk_weights, do_cpu_sync,
                cumulative_local_expert_recv_stats, do_expand,
                num_experts=num_experts, expert_alignment=expert_alignment,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
            )  # fmt: skip
        else:
            why = wrong_handle(handle, EPHandle)
        if why and isinstance(handle, EPHandle):
            handle.route.refuse_repeat(why)
        if why:
            self._layers.refuse(why)

        self._layers.sm_count = num_sms or Buffer.num_sms
        experts = 0 if num_experts is None else operator.index(num_experts)

        def finished(arrived, made):
            """In the body, whose stream the rows are on."""
            rows, factors = arrived.rows, arrived.scales
            if do_expand:
                rows = made.route.with_zeros(rows)
            if factors is not None and use_tma_aligned_col_major_sf and factors.dim() == 2:
                factors = factors.t().contiguous().t()
            given = rows if factors is None else (rows, factors)
            return given, arrived.expert_ids, arrived.weights, made

        def repeat():
            arrived = handle.route.repeat(x, scales, topk_weights)
            return finished(arrived._replace(expert_ids=None), handle)

        def choose():
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank or len(x)
            alignment = expert_alignment or 1
            worst = 0
            if do_cpu_sync is False:
                worst = self._worst_case(most, topk_idx, experts, alignment, do_expand)
            route = Route(
                self._layers,
                Sizes(x.shape[1], topk_idx.shape[1], experts, sums_in(x), x.device),
                x,
                scales,
                dense(topk_idx),
                weights=topk_weights,
                order="expert_major" if do_expand else "token_major",
                expert_alignment=alignment if do_expand else 1,
                worst_case_rows=worst,
            )
            kept = topk_idx.clone() if do_handle_copy else topk_idx
            sms = num_sms or self._layers.sm_count
            made = EPHandle(route, do_expand, experts, alignment, most, sms, kept)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(made.num_unaligned_recv_tokens_per_expert)
            arrived = route.take_arrived()
            ids = None if arrived.expert_ids is None else arrived.expert_ids.to(topk_idx.dtype)
            return finished(arrived._replace(expert_ids=ids), made)

        results, event = self._stream.run(
            x.device if handle is None else handle.route.sizes.device,
            _after(previous_event_before_epilogue, choose if handle is None else repeat),
            (x, scales, topk_idx, topk_weights, cumulative_local_expert_recv_stats),
            event_of(previous_event),
            async_with_compute_stream,
        )
        return (*results, event)

    @entry(Layers.refuse_combine)
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Optional[Tensor] = None,
        bias: Union[Tensor, Tuple[Tensor, Tensor], None] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Adds, unweighted, the rows of each token of this rank; arguments and results as of
        Buffer.combine(), topk_weights of expanded rows [R]; num_sms 0: handle's;
        previous_event_before_epilogue as in dispatch(). Collective."""
        if why := wrong_handle(handle, EPHandle):
            self._layers.refuse_combine(why)
        why = wrong_way(
            previous_event, previous_event_before_epilogue, num_sms,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )  # fmt: skip
        route = handle.route
        why = why or wrong_sums("x", x, "topk_weights", topk_weights)
        if (why := why or wrong_bias(bias)) is not None:
            route.refuse_combine(why)

        self._layers.sm_count = num_sms or handle.num_sms

        def body():
            return route.combine(x, bias, topk_weights)

        results, event = self._stream.run(
            route.sizes.device,
            _after(previous_event_before_epilogue, body),
            (x, topk_weights, bias),
            event_of(previous_event),
            async_with_compute_stream,
        )
        return (*results, event)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(("engram_", "pp_", "agrs_")) or name in _ELSEWHERE:
            refuse_call(f"{_NAME}.{name}", "only dispatch and combine are here")
        raise AttributeError(f"ElasticBuffer has no {name!r}")

    def _worst_case(
        self, most: int, topk_idx: Tensor, experts: int, alignment: int, expand: bool
    ) -> int:
        rows = most * self.num_ranks
        if not expand:
            return rows
        local = experts // self.num_ranks
        return rows * min(topk_idx.shape[1], local) + local * (alignment - 1)


_ELSEWHERE: List[str] = ["all_gather", "create_agrs_session", "destroy_agrs_session", "barrier"]


def _after(event: Any, body: Callable[[], Tuple]) -> Callable[[], Tuple]:
    """The body, on a stream that waits for the event first, where there is one."""
    event = event_of(event)
    if event is None:
        return body

    def waiting() -> Tuple:
        event.current_stream_wait()
        return body()

    return waiting
