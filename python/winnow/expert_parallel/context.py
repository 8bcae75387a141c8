"""Configuration, buffers and barriers under the names of Triton-distributed's layer."""

import os
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll
from winnow.expert_parallel import rendezvous

__all__ = ["BarrierAllContext", "DispatchCombineContext", "EPConfig", "barrier_all_on_stream"]


@dataclass
class EPConfig:
    """The fixed sizes of a layer."""

    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    rank: int
    world_size: int
    local_world_size: int
    token_dtype: torch.dtype
    weight_dtype: torch.dtype
    offset_dtype: torch.dtype

    def __post_init__(self) -> None:
        # 0: all ranks, one node.
        self.local_world_size = self.local_world_size or self.world_size

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.world_size

    @property
    def is_intra_node(self) -> bool:
        return self.world_size == self.local_world_size


class BarrierAllContext:
    """A barrier of all ranks, or of those of this node, with winnow's deadline.

    Collective to make.

    Args:
        is_intra_node: whether only the ranks of this node take part: LOCAL_WORLD_SIZE of them,
            which torchrun sets, or as many as `layer` has on a node.
        layer: an AllToAll whose barriers serve; None: one is made for the default process group.
        timeout: seconds of every wait of the one that is made; None: WINNOW_TIMEOUT_SECONDS, else
            30.

    Attributes:
        rank, local_rank, num_local_ranks: where this process stands.

    Raises:
        ValueError: there are other ranks, but no process group.
        winnow.Error: a rank that does not come within the timeout.
    """

    def __init__(
        self,
        is_intra_node: bool,
        layer: Optional[AllToAll] = None,
        *,
        timeout: Optional[float] = None,
    ) -> None:
        self.is_intra_node = is_intra_node
        self._own = layer is None
        if layer is None:
            if dist.is_initialized():
                rank, world_size = dist.get_rank(), dist.get_world_size()
            else:
                rank = int(os.environ.get("RANK", 0))
                world_size = int(os.environ.get("WORLD_SIZE", 1))
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            layer = rendezvous.barrier_layer(rank, world_size, local, timeout)
        self._layer = layer
        self.rank = layer.rank
        self.num_local_ranks = layer.local_world_size
        self.local_rank = layer.rank % layer.local_world_size

    def finalize(self) -> None:
        """Leaves the barrier; idempotent."""
        if self._own:
            self._layer.close()


# For each default process group: the barrier of its ranks, dropped with the group.
_worlds: "weakref.WeakKeyDictionary[Any, BarrierAllContext]" = weakref.WeakKeyDictionary()


def barrier_all_on_stream(ctx: Optional[BarrierAllContext], stream: Any = None) -> None:
    """Returns when every rank of the context has called it. On a GPU it returns at once, and what
    is queued on `stream` behind it waits.

    Args:
        ctx: None: all ranks of the default process group. Their context is made at the first such
            call, with the default timeout, and stays as long as the group.
        stream: of CUDA; None: torch's current one.

    Raises:
        ValueError, winnow.Error: as EPAll2AllLayer.ep_barrier_all(); the first call with None
            also as BarrierAllContext().
    """
    if ctx is None:
        ctx = _world()
    ctx._layer.barrier(ctx.is_intra_node, stream=stream)


def _world() -> BarrierAllContext:
    if not dist.is_initialized():
        return BarrierAllContext(False)
    if dist.group.WORLD not in _worlds:
        _worlds[dist.group.WORLD] = BarrierAllContext(False)
    return _worlds[dist.group.WORLD]


class DispatchCombineContext:
    """Buffers under the names and shapes that kernels written for the upstream layer expect.

    The library keeps rows in an arena of its own and uses none of these, so each takes memory when
    it is first asked for. NN nodes, L ranks per node, W ranks, E experts, T = max_tokens, K = topk,
    H = hidden, M = int(capacity * T * K) until it is reallocated. A number behind the dtype is what
    the buffer is filled with:

        token_send_buf_rdma, intra_node_reduce_buf              [NN, T, H]   token_dtype
        dispatch_output_buf                                     [M, H]       token_dtype
        weight_recv_buf                                         [M]          weight_dtype
        weight_send_buf_rdma                                    [NN, T, K]   weight_dtype
        topk_indices_buf_rdma                                   [NN, T, K]   offset_dtype
        send_reqs_for_nodes_rdma, send_reqs_recv_bufs_rdma      [NN, 2, T]   offset_dtype, -1
        local_splits_buf                                        [E + 1]      offset_dtype, 0
        full_splits_buf                                         [W, E + 1]   offset_dtype
        num_input_tokens_per_rank_comm_buf                      [W]          offset_dtype
        grid_sync_buf                                           [W]          offset_dtype, 0
        signal_buf, splits_signal_buf, expert_indices_signal_buf  [W]        int64, 0
        intra_node_dispatch_skipped_token_mapping_indices       [L*T*K]      int64, -1
        intra_node_dispatch_skipped_token_topk_mapping_indices  [L*T*K, K]   int64, -1
    """

    ep_config: EPConfig

    def __init__(self, ep_config: EPConfig, capacity: float, barrier: BarrierAllContext) -> None:
        self.ep_config = ep_config
        self._barrier = barrier
        self._device = torch.device(barrier._layer.device)
        self._rows = int(capacity * ep_config.max_tokens * ep_config.topk)
        self._shapes = _shapes(ep_config)

    @staticmethod
    def create(
        ep_config: EPConfig, capacity: float = 2, *, timeout: Optional[float] = None
    ) -> "DispatchCombineContext":
        """Collective: ends with a barrier of all ranks.

        Args:
            capacity: dispatch_output_buf has capacity * max_tokens * topk rows, rounded down.
            timeout: seconds of every wait; None: WINNOW_TIMEOUT_SECONDS, else 30.

        Raises:
            ValueError, winnow.Error: as BarrierAllContext.
        """
        layer = rendezvous.barrier_layer(
            ep_config.rank, ep_config.world_size, ep_config.local_world_size, timeout
        )
        barrier = BarrierAllContext(False, layer)
        barrier._own = True
        barrier_all_on_stream(barrier)
        return DispatchCombineContext(ep_config, capacity, barrier)

    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> Tuple[Tensor, Tensor]:
        """dispatch_output_buf and weight_recv_buf of at least so many rows.

        Collective where they must grow; contents are lost then. Never shrinks.
        """
        if dispatch_recv_tokens > self._rows:
            barrier_all_on_stream(self._barrier)
            self.__dict__.pop("dispatch_output_buf", None)
            self.__dict__.pop("weight_recv_buf", None)
            self._rows = dispatch_recv_tokens
        return self.dispatch_output_buf, self.weight_recv_buf

    def finalize(self) -> None:
        """Lets go of all buffers; idempotent."""
        for name in self._shapes:
            self.__dict__.pop(name, None)
        self._shapes = {}
        self._barrier.finalize()

    def __getattr__(self, name: str) -> Tensor:
        make = self.__dict__.get("_shapes", {}).get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}, or is finalized")
        shape, dtype, value = make(self._rows)
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        if value is not None:
            buffer.fill_(value)
        self.__dict__[name] = buffer
        return buffer


def _shapes(config: EPConfig) -> Dict[str, Callable]:
    """For each buffer a function of the rows of dispatch_output_buf: (shape, dtype, value)."""
    nodes = config.world_size // config.local_world_size
    tokens, hidden, topk = config.max_tokens, config.hidden, config.topk
    offset, ranks = config.offset_dtype, config.world_size
    node_pairs = config.local_world_size * tokens * topk
    sums = ((nodes, tokens, hidden), config.token_dtype, None)
    requests = ((nodes, 2, tokens), offset, -1)
    signals = ((ranks,), torch.int64, 0)
    skipped = "intra_node_dispatch_skipped_token"
    fixed = {
        "send_reqs_for_nodes_rdma": requests,
        "send_reqs_recv_bufs_rdma": requests,
        "token_send_buf_rdma": sums,
        "topk_indices_buf_rdma": ((nodes, tokens, topk), offset, None),
        "weight_send_buf_rdma": ((nodes, tokens, topk), config.weight_dtype, None),
        "signal_buf": signals,
        "splits_signal_buf": signals,
        "expert_indices_signal_buf": signals,
        "local_splits_buf": ((config.num_experts + 1,), offset, 0),
        "full_splits_buf": ((ranks, config.num_experts + 1), offset, None),
        "num_input_tokens_per_rank_comm_buf": ((ranks,), offset, None),
        "intra_node_reduce_buf": sums,
        f"{skipped}_mapping_indices": ((node_pairs,), torch.int64, -1),
        f"{skipped}_topk_mapping_indices": ((node_pairs, topk), torch.int64, -1),
        "grid_sync_buf": ((ranks,), offset, 0),
    }
    return {
        "dispatch_output_buf": lambda rows: ((rows, hidden), config.token_dtype, None),
        "weight_recv_buf": lambda rows: ((rows,), config.weight_dtype, None),
        **{name: lambda rows, made=made: made for name, made in fixed.items()},
    }
