"""deep_ep.HybridEPBuffer: dispatch and combine of rows that stand by expert."""

import operator
from types import SimpleNamespace
from typing import Any, List, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from winnow.compat._refusal import refuse, refuse_call
from winnow.compat.deep_ep._checks import (
    Wrong,
    described,
    plain_number,
    usable,
    wrong_flag,
    wrong_handle,
    wrong_indices,
    wrong_number,
    wrong_rows,
    wrong_sums,
)
from winnow.compat.deep_ep._entry import called, entry
from winnow.compat.deep_ep._layers import Layers, Sizes, refuse_new, wrong_group
from winnow.compat.deep_ep._route import OF_ROWS, Route, report_later, sums_in

__all__ = ["HybridEPBuffer", "indices_to_map"]

_MOST_TOPK = 32  # of a layer
_NAME = "deep_ep.HybridEPBuffer"

# What the methods call the arguments of a layer, for entry().
_BY_INDEX = {
    **OF_ROWS,
    **{name: "hidden" for name, argument in OF_ROWS.items() if argument == "x"},
    "scales": "scaling_factor",
    "experts": "num_of_experts",
    "expert_alignment": "pad_multiple",
    "worst_case_rows": "num_permuted_tokens",
    "pair_values": "probs",
    "pair_columns": "probs, number of columns",
}
_BY_MAP = {
    **_BY_INDEX,
    "weights": "probs",
    "experts": "routing_map",
    "topk": "routing_map",
    "expert_indices": "routing_map",
}


def indices_to_map(
    topk_idx: Tensor, topk_weights: Optional[Tensor], num_of_tokens: int, num_of_experts: int
) -> Tuple[Tensor, Optional[Tensor]]:
    """(routing map bool [n, E], probabilities float32 [n, E] or None) of [n, K] each; -1: none.

    Indices of E or more are an error on the CPU. On a GPU, where the host does not wait for them,
    they are left out.
    """
    why = _wrong_choice(topk_idx, topk_weights, num_of_tokens, num_of_experts)
    if why:
        refuse("deep_ep.indices_to_map", *why)
    device = topk_idx.device
    # One more column takes what names no expert.
    absent = (topk_idx < 0) | (topk_idx >= num_of_experts)
    columns = torch.where(absent, topk_idx.new_full((), num_of_experts), topk_idx).long()
    shape = (num_of_tokens, num_of_experts + 1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, columns, True)
    probs = None
    if topk_weights is not None:
        probs = torch.zeros(shape, dtype=torch.float32, device=device)
        probs = probs.scatter(1, columns, topk_weights.float())[:, :num_of_experts].contiguous()
    return chosen[:, :num_of_experts].contiguous(), probs


class Handle(tuple):
    """A tuple of eleven, as deep_ep has it, and the route. tokens_per_expert, without padding,
    comes eighth and the number of tokens ninth; the rest describe kernels that are not here."""

    route: Route

    @classmethod
    def of(cls, route: Route) -> "Handle":
        counts = route.descriptor.expert_counts.to(torch.int32)
        handle = cls((None,) * 7 + (counts, route.tokens, None, None))
        handle.route = route
        return handle


class HybridEPBuffer:
    """What deep_ep.HybridEPBuffer does, over winnow.expert_parallel.

    W ranks, n tokens of this rank, e local experts, E = W * e, R rows that arrive here, by local
    expert, source rank and token. Tensors are on the CPU, or on torch's current GPU, whose current
    stream the work joins. A token may have up to 32 experts.

    Args:
        group: a process group of torch. Collective to make.
        hidden_dim, max_num_of_tokens_per_rank, num_local_experts: kept in
            configurer.buffer_config; layers grow by themselves.
        use_fp8: rows of float8_e4m3fn with a scaling_factor are taken in any case.
        num_sms_dispatch_api, num_sms_combine_api: the larger one is the SMs of a layer.
        The rest: without effect.
    """

    _name = _NAME
    _names = _BY_MAP

    @entry(refuse_new)
    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: Optional[int] = None,
        num_sms_combine_api: Optional[int] = None,
        num_sms_preprocessing_api: Optional[int] = None,
        num_blocks_permute: Optional[int] = None,
        num_blocks_unpermute: Optional[int] = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
        use_mnnvl: Optional[bool] = None,
    ) -> None:
        if (why := wrong_group(group)) is not None:
            refuse(called(), *why)
        given = {
            "num_sms_dispatch_api": num_sms_dispatch_api,
            "num_sms_combine_api": num_sms_combine_api,
        }
        for name, number in given.items():
            if number is not None:
                why = why or wrong_number(name, number, 0)
        if why:
            refuse_new(group, why)
        self.group = group
        self.rank, self.group_size = group.rank(), group.size()
        sms = max(num_sms_dispatch_api or 0, num_sms_combine_api or 0) or 24
        self._layers = Layers(group, sms)
        local = self._layers.local_world_size
        self.local_rank, self.node_rank = self.rank % local, self.rank // local
        self.num_of_nodes = self.group_size // local
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = local
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_of_experts_per_rank=num_local_experts,
                num_of_ranks_per_node=local,
                num_of_nodes=self.num_of_nodes,
            )
        )

    def empty_jit_cache(self) -> None:
        """Nothing is compiled at run time."""

    def update_template_config(self, **options: Any) -> NoReturn:
        """Raises an error: kernels have no templates here."""
        refuse_call(f"{_NAME}.update_template_config", "there are no templates to configure")

    def dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: dispatch_with_permute() gives rows by expert, Buffer.dispatch() by token."""
        refuse_call(f"{_NAME}.dispatch", "use dispatch_with_permute(), or Buffer.dispatch()")

    def combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as dispatch()."""
        refuse_call(f"{_NAME}.combine", "use combine_with_unpermute(), or Buffer.combine()")

    @entry(Layers.refuse)
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        num_of_experts_per_rank: Optional[int] = None,
        num_of_experts: Optional[int] = None,
        use_fp8: Optional[bool] = None,
        routing_map: Optional[Tensor] = None,
        probs: Optional[Tensor] = None,
        scaling_factor: Optional[Tensor] = None,
        num_permuted_tokens: Optional[int] = None,
        pad_multiple: Optional[int] = None,
        handle: Optional[Tuple] = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Optional[int] = None,
        use_host_meta: Optional[bool] = None,
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor], Tensor, Tuple]:
        """Carries every token once to each of its experts. Collective.

        Args:
            hidden: [n, H], bfloat16, float16, float32, or float8_e4m3fn with a scaling_factor.
            routing_map: bool [n, E]; probs: float32 [n, E]. Or topk_idx [n, K], topk_weights and
                num_of_experts in their place.
            scaling_factor: [n, ...] of any dtype, up to 4 bytes for 32 columns.
            num_permuted_tokens: rows of the results, without a wait for counts; also as a tensor
                of one integer. More that arrive are an error of a later call: nothing is dropped
                in silence.
            pad_multiple: the rows of each expert are padded with zeros to a multiple.
            handle: of an earlier dispatch, to repeat its routing. num_permuted_tokens and
                pad_multiple may be given again, but not others.
            non_blocking: takes num_permuted_tokens.
            The rest: without effect.

        Returns:
            (rows [R, H], probabilities float32 [R] or None, scaling factors or None, rows of each
            local expert with padding int64 [e], on the CPU where the host knows them, handle).

        Raises:
            ValueError, winnow.Error: as Buffer.dispatch().
        """
        num_permuted_tokens = plain_number(num_permuted_tokens)
        if isinstance(handle, Handle):
            return self._repeat(
                hidden, probs, scaling_factor, num_permuted_tokens, pad_multiple, handle
            )
        self._names = _BY_INDEX if routing_map is None else _BY_MAP
        why = _wrong(hidden, scaling_factor, topk_idx, topk_weights, num_of_experts, routing_map,
                     probs, handle)  # fmt: skip
        if num_permuted_tokens is not None:
            why = why or wrong_number("num_permuted_tokens", num_permuted_tokens, 0)
        if pad_multiple is not None:
            why = why or wrong_number("pad_multiple", pad_multiple, 0)
        why = why or wrong_flag("non_blocking", non_blocking)
        if not why and non_blocking and num_permuted_tokens is None:
            why = ("num_permuted_tokens", "a number with non_blocking", None)
        if why:
            self._layers.refuse(why)
        with torch.no_grad():
            by_index = routing_map is None
            if by_index:
                routing_map, probs = indices_to_map(
                    topk_idx, topk_weights, len(hidden), num_of_experts
                )
            experts = routing_map.shape[1]
            sizes = Sizes(hidden.shape[1], 0, experts, sums_in(hidden), hidden.device)
            waits = num_permuted_tokens is None or hidden.device.type == "cpu"
            most = int(routing_map.sum(1).max()) if waits and len(routing_map) else 1
            if most > _MOST_TOPK:
                why = ("routing_map", f"at most {_MOST_TOPK} experts a token", most)
                self._layers.refuse(why, sizes)
            indices = _indices_of(routing_map, max(most, 1) if waits else None)
            if by_index and hidden.device.type != "cpu":
                self._tell_of_indices(topk_idx, indices, sizes, waits)
            weights = None if probs is None else _of_pairs(probs.detach().float(), indices)
            route = Route(
                self._layers,
                sizes,
                hidden,
                scaling_factor,
                indices,
                weights=weights,
                order="expert_major",
                expert_alignment=pad_multiple or 1,
                worst_case_rows=num_permuted_tokens or 0,
            )
            arrived = route.take_arrived()
            rows = route.with_zeros(arrived.rows)
            return rows, arrived.weights, arrived.scales, _padded(route), Handle.of(route)

    @entry(Layers.refuse_combine)
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Optional[Tensor] = None,
        handle: Optional[Tuple] = None,
        pad_multiple: Optional[int] = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Optional[int] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Adds, unweighted, the rows of each token of this rank. Collective.

        Args:
            hidden: [R, H]; probs: float32 [R], which travel home each for itself; handle: of the
                dispatch. The rest: without effect.

        Returns:
            (sums [n, H], float32 [n, E] with the probs of each token's experts, 0 elsewhere, or
            None).

        Raises:
            ValueError, winnow.Error: as Buffer.dispatch().
        """
        if why := wrong_handle(handle, Handle):
            self._layers.refuse_combine(why)
        route = handle.route
        if (why := wrong_sums("hidden", hidden, "probs", probs)) is not None:
            route.refuse_combine(why)
        with torch.no_grad():
            combined, values = route.combine(hidden, values=probs)
            if values is None:
                return combined, None
            experts = route.sizes.experts
            shape = (route.tokens, experts + 1)
            dense = torch.zeros(shape, dtype=torch.float32, device=values.device)
            columns = route.indices.long().clamp(max=experts)
            return combined, dense.scatter_(1, columns, values)[:, :experts].contiguous()

    def _tell_of_indices(
        self, topk_idx: Tensor, indices: Tensor, sizes: Sizes, waits: bool
    ) -> None:
        """Refuses indices of E or more on a GPU, or has the layer do so in a later call."""
        if waits:
            largest = int(topk_idx.max()) if topk_idx.numel() else -1
            if largest >= sizes.experts:
                self._layers.refuse(("topk_idx", f"experts below {sizes.experts}", largest), sizes)
        else:
            report_later(indices, (topk_idx >= sizes.experts).any(1), sizes.experts)

    def _repeat(self, hidden, probs, scaling_factor, num_permuted_tokens, pad_multiple, handle):
        route = handle.route
        why = wrong_rows("hidden", hidden, "scaling_factor", scaling_factor, route.tokens)
        if not why and probs is not None:
            why = _wrong_probs(probs, (route.tokens, route.sizes.experts))
        why = why or _another("num_permuted_tokens", num_permuted_tokens, route.rows)
        alignment = route.descriptor.expert_alignment
        why = why or _another("pad_multiple", pad_multiple, alignment, least=1)
        if why:
            route.refuse_repeat(why)
        with torch.no_grad():
            weights = None if probs is None else _of_pairs(probs.detach().float(), route.indices)
            arrived = route.repeat(hidden, scaling_factor, weights)
            rows = route.with_zeros(arrived.rows)
            return rows, arrived.weights, arrived.scales, _padded(route), handle


def _indices_of(routing_map: Tensor, most: Optional[int]) -> Tensor:
    """int32 [n, most experts of a token]: ascending, E behind them, which drops a pair.

    Where the host does not know how many there are 32 columns, or E. A token with more gets an
    index in the last one that the layer reports.
    """
    experts = routing_map.shape[1]
    columns = min(experts, _MOST_TOPK) if most is None else most
    names = torch.arange(experts, dtype=torch.int32, device=routing_map.device)
    named = torch.where(routing_map, names, names.new_full((), experts))
    indices = named.topk(columns, dim=1, largest=False, sorted=True).values
    if most is None and columns < experts:
        report_later(indices, routing_map.sum(1) > columns, experts)
    return indices


def _of_pairs(probs: Tensor, indices: Tensor) -> Tensor:
    """[n, K] of [n, E]; what a dropped pair has travels nowhere."""
    return probs.gather(1, indices.long().clamp(max=probs.shape[1] - 1))


def _padded(route: Route) -> Tensor:
    """Rows of each local expert: on the host where it knows them."""
    known: List[int] = route.aligned_counts(route.descriptor.expert_alignment)
    if known:
        return torch.tensor(known, dtype=torch.int64, device="cpu")
    offsets = route.descriptor.expert_offsets.to(torch.int64)
    return offsets[1:] - offsets[:-1]


def _another(name: str, given: Any, of_handle: int, least: int = 0) -> Wrong:
    """Of a repeat: a number that is not the handle's, where 0 stands for the least."""
    if given is None:
        return None
    wrong = wrong_number(name, given, 0)
    if wrong or max(operator.index(given), least) == of_handle:
        return wrong
    return name, f"{of_handle} as in the handle", given


def _wrong(hidden, scales, topk_idx, topk_weights, num_of_experts, routing_map, probs, handle):
    """(argument, wanted, got), or None."""
    if handle is not None:
        return wrong_handle(handle, Handle)
    wrong = wrong_rows("hidden", hidden, "scaling_factor", scales)
    if wrong:
        return wrong
    if routing_map is None:
        if topk_idx is None:
            return "routing_map", "one, or topk_idx, without a handle", "none"
        if num_of_experts is None:
            return "num_of_experts", "a number beside topk_idx", None
        return _wrong_choice(topk_idx, topk_weights, len(hidden), num_of_experts)
    right = usable(routing_map) and routing_map.dtype == torch.bool and routing_map.dim() == 2
    if not right or len(routing_map) != len(hidden):
        return "routing_map", f"[{len(hidden)}, E], bool", described(routing_map)
    return None if probs is None else _wrong_probs(probs, routing_map.shape)


def _wrong_probs(probs: Any, shape: Any) -> Wrong:
    if usable(probs) and probs.shape == shape and probs.dtype.is_floating_point:
        return None
    return "probs", f"{list(shape)}, numbers with a point, as routing_map", described(probs)


def _wrong_choice(topk_idx: Any, topk_weights: Any, tokens: Any, experts: Any) -> Wrong:
    wrong = wrong_number("num_of_tokens", tokens, 0) or wrong_number("num_of_experts", experts, 1)
    if wrong := wrong or wrong_indices(topk_idx):
        return wrong
    if len(topk_idx) != tokens:
        return "topk_idx", f"[{tokens}, K], one row for each token", described(topk_idx)
    # On a GPU the host would wait for it.
    on_host = topk_idx.device.type == "cpu" and topk_idx.numel() > 0
    if on_host and int(topk_idx.max()) >= experts:
        return "topk_idx", f"experts below {experts}", int(topk_idx.max())
    if topk_weights is None or (usable(topk_weights) and topk_weights.shape == topk_idx.shape):
        return None
    return "topk_weights", f"{list(topk_idx.shape)} as topk_idx", described(topk_weights)
