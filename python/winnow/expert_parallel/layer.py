"""EPAll2AllLayer: the interface of Triton-distributed's layer, over winnow's all-to-all."""

from dataclasses import dataclass, field
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor
from winnow.expert_parallel import autograd, rendezvous
from winnow.expert_parallel.context import BarrierAllContext, DispatchCombineContext, EPConfig

__all__ = ["EPAll2AllLayer", "EPAllToAllLayoutDesc"]


@dataclass
class EPAllToAllLayoutDesc:
    """The data of a dispatch that combine() needs: a snapshot, so several may be alive at once.

    W ranks, NN nodes, n tokens of this rank, T = max_tokens, K = topk, R rows of the output; "rail
    source j" is the rank of node j with this rank's local index. Not to be written to.
    """

    num_dispatch_token_cur_rank: int
    """n."""
    num_input_tokens_per_rank: Tensor
    """[W], int32: n of every rank."""
    send_reqs_recv_tensor: Optional[Tensor]
    """[NN, 2, T], int32, None on one node: first and end of the runs of tokens that rail source j
    sent to this node; -1 in empty slots."""
    topk_indices_tensor: Tensor
    """[NN, T, K], int32: expert indices of rail source j; on one node [n, K], this rank's."""
    token_dst_scatter_idx: Tensor
    """[NN, T, K], int32: the row of each pair of rail source j in the output of the expert's rank,
    -1 where that is on another node and for dropped pairs."""
    skipped_token_mapping_indices: Optional[Tensor]
    """[R], int64, on one node: the row of the first copy of the same token here."""
    skipped_token_topk_mapping_indices: Optional[Tensor]
    """[R, K], int64, on one node: for a first copy the row of each pair's copy, else -1."""
    descriptor: Descriptor = field(repr=False)
    """The library's own, with expert_counts and expert_offsets for grouped products."""


class EPAll2AllLayer(torch.nn.Module):
    """Sends tokens to the ranks of their experts and returns the experts' outputs.

    Creating the layer is collective.

    W ranks, n tokens of this rank (may differ, and be 0), T = max_tokens, K = topk, H = hidden, R
    rows that arrive here. Outputs own their memory. dispatch() and combine() are differentiable.

    Args:
        ep_group: the process group of all ranks, in whose store they meet; None: the default one.
        max_tokens: most tokens that one rank dispatches.
        hidden: H; a row is a multiple of 16 bytes.
        topk: experts per token, 1 to 32.
        rank: of this process in the group.
        num_tot_experts: E, a multiple of W; expert x lives on rank x / (E / W).
        local_world_size: ranks per node, a divisor of W; 0: all, one node.
        world_size: W.
        dtype: of tokens: bfloat16, float16 or float32.
        weight_dtype: of routing weights, the same.
        num_sm: SMs that a GPU layer uses at most; without effect on the CPU, but equal on every
            rank. From 20 on a layer on several GPUs may take W * T rows of memory more, up to
            1 GiB: combine then pushes rows.
        enable_local_combine: on one node, rows of a token on one rank are summed there first.
        use_aot: has no effect: everything is compiled ahead of time.
        device: where tensors are; None: this process's current GPU if the machine has one (compute
            capability 9.0) for each of its ranks and NVSHMEM is installed, else the CPU: with a
            RuntimeWarning that says why, if there are GPUs.
        timeout: seconds of every wait, here and in calls; None: WINNOW_TIMEOUT_SECONDS, else 30.

    On a GPU work joins torch's current stream, and dispatch() waits for the number of rows.

    Attributes: the arguments but timeout; device with its index, enable_local_combine False with
    several nodes; and
        experts_per_rank: E / W.
        nnodes, node_id, is_intra_node: how many nodes, this rank's, whether it is one.
        offset_dtype: torch.int32.
        ep_config: the sizes as an EPConfig.
        a2a_ctx: a DispatchCombineContext with 2 T K rows.
        intra_node_barrier_ctx: a BarrierAllContext of this node's ranks.

    Raises:
        ValueError: a size is invalid or differs between ranks. Every rank raises it.
        winnow.Error: a rank does not take part within the timeout, or a rank has no GPU or no
            NVSHMEM. Every rank raises the same text.
    """

    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.float32,
        num_sm: int = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> None:
        super().__init__()
        local_world_size = local_world_size or world_size
        prefix = rendezvous.next_prefix(ep_group)
        self.offset_dtype = torch.int32
        self.ep_group = ep_group
        self.max_tokens = max_tokens
        self.topk = topk
        self.hidden = hidden
        self.dtype = dtype
        self.weight_dtype = weight_dtype
        self.num_sm = num_sm
        self.num_tot_experts = num_tot_experts
        self.local_world_size = local_world_size
        self.world_size = world_size
        self.rank = rank
        self.is_intra_node = world_size == local_world_size
        self.enable_local_combine = enable_local_combine and self.is_intra_node
        self.use_aot = use_aot

        self.device = rendezvous.resolve(device)
        transport, store = rendezvous.connect(
            ep_group, prefix, rank, world_size, self.device, timeout
        )
        self._all_to_all = AllToAll(
            transport,
            store,
            max_tokens=max_tokens,
            hidden=hidden,
            topk=topk,
            experts=num_tot_experts,
            dtype=dtype,
            weight_dtype=weight_dtype,
            enable_local_combine=self.enable_local_combine,
            local_world_size=local_world_size,
            sm_count=num_sm,
            timeout=timeout,
            device=self.device,
        )
        self.experts_per_rank = num_tot_experts // world_size
        self.nnodes = world_size // local_world_size
        self.node_id = rank // local_world_size
        self.ep_config = EPConfig(
            max_tokens=max_tokens,
            hidden=hidden,
            topk=topk,
            num_experts=num_tot_experts,
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            token_dtype=dtype,
            weight_dtype=weight_dtype,
            offset_dtype=self.offset_dtype,
        )
        self.a2a_ctx = DispatchCombineContext(
            self.ep_config, 2, BarrierAllContext(False, self._all_to_all)
        )
        self.intra_node_barrier_ctx = BarrierAllContext(True, self._all_to_all)

    def dispatch(
        self,
        input: Tensor,
        exp_indices: Tensor,
        weight: Optional[Tensor] = None,
        full_scatter_indices: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor], EPAllToAllLayoutDesc]:
        """Sends every token to the ranks of its experts.

        Args:
            input: [n, H], the layer's dtype.
            exp_indices: [n, K], int32 or int64; E or -1 drops the pair.
            weight: [n, K], weight_dtype.
            full_scatter_indices: [sum of n over ranks, K], or this rank's [n, K], int32: the row of
                each pair as a position in the concatenation of all ranks' outputs. It is checked.

        Returns:
            (output [R, H], weights [R] or None, desc). One row per pair whose expert lives here, by
            local expert, source rank and token, or as full_scatter_indices say.

        Raises:
            ValueError: an argument of some rank is not as described. Every rank raises it and names
                that rank; no row has moved, and the next call works.
            winnow.Error: a timeout, which names the rank that was waited for, or a failure of CUDA.
                The layer is broken then.
        """
        output, weights, descriptor = autograd.dispatch(
            self._all_to_all,
            input,
            exp_indices,
            weights=weight,
            scatter_indices=full_scatter_indices,
            copy_out=True,
        )
        return output, weights, self._describe(descriptor)

    def combine(self, input: Tensor, ep_a2a_layout_desc: EPAllToAllLayoutDesc) -> Tensor:
        """Sums, unweighted, the experts' rows of each token of this rank.

        Args:
            input: [R, H], the layer's dtype, rows as dispatch() gave them; not changed.
            ep_a2a_layout_desc: of the dispatch; any number may be outstanding.

        Returns:
            [n, H]; zeros for a token without kept pairs. Sums are in float32 and rounded at the
            end, between nodes, and under enable_local_combine between ranks.

        Raises:
            ValueError, winnow.Error: as dispatch(). On a GPU the call returns when it is queued: it
                raises errors in this rank's own arguments, and a later call raises those of other
                ranks or of the kernels. To observe them here, synchronise the stream and call
                ep_barrier_all().
        """
        # What has none is refused there, on all ranks.
        descriptor = getattr(ep_a2a_layout_desc, "descriptor", ep_a2a_layout_desc)
        return autograd.combine(self._all_to_all, input, descriptor)

    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Returns when every rank (of this node) has called it. winnow.Error at the deadline.

        On a GPU it returns at once, work that is queued after it waits, and a later call raises its
        errors. It raises the errors that earlier calls have found by now; after the stream has been
        synchronised these are all of them.
        """
        self._all_to_all.barrier(intra_node_only, stream=stream)

    def finalize(self) -> None:
        """Leaves the layer. Idempotent; never waits for other ranks. The process group stays."""
        self.a2a_ctx.finalize()
        self._all_to_all.close()

    def _describe(self, descriptor: Descriptor) -> EPAllToAllLayoutDesc:
        one_node = self.is_intra_node
        indices = descriptor.topk_indices
        tokens = descriptor.num_dispatch_token_cur_rank
        return EPAllToAllLayoutDesc(
            num_dispatch_token_cur_rank=tokens,
            num_input_tokens_per_rank=descriptor.num_input_tokens_per_rank,
            send_reqs_recv_tensor=descriptor.send_reqs_recv,
            topk_indices_tensor=indices[0, :tokens] if one_node else indices,
            token_dst_scatter_idx=descriptor.token_dst_scatter_idx,
            skipped_token_mapping_indices=(
                descriptor.skipped_token_mapping_indices if one_node else None
            ),
            skipped_token_topk_mapping_indices=(
                descriptor.skipped_token_topk_mapping_indices if one_node else None
            ),
            descriptor=descriptor,
        )
