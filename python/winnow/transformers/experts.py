"""Expert parallelism of transformers on Winnow: the implementation "winnow" of its registry.

    import winnow.transformers
    config = DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation="winnow")

Each token travels once to each rank that has an expert of it, and comes home as that rank's sum.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from winnow.compat.deep_ep._entry import calling
from winnow.compat.deep_ep._layers import Layers, Sizes, check_room
from winnow.expert_parallel import autograd

_SMS = 24

# One for each process group: all layers of a model share what they can.
_layers: "weakref.WeakKeyDictionary[Any, Layers]" = weakref.WeakKeyDictionary()


class WinnowEP(EPImplementation):
    """See transformers' EPImplementation. Collective, also of ranks without tokens, forward and
    backward; gradients reach tokens and routing weights. Ranks of a tensor-parallel group, which
    hold the same batch, send a slice of it each.

    Raises:
        ValueError, winnow.Error: as AllToAll.dispatch() and combine().
    """

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = hidden_states.shape[0]
        if self.tp_mesh.size() > 1:
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for whole in (hidden_states, top_k_index, top_k_weights)
            )
        combined = self._exchange(hidden_states, top_k_index, top_k_weights)
        if self.tp_mesh.size() == 1:
            return combined
        hidden = combined.shape[1]
        sharded = DTensor.from_local(
            combined.contiguous(),
            self.tp_mesh,
            [Shard(0)],
            shape=(tokens, hidden),
            stride=(hidden, 1),
        )
        return sharded.full_tensor()

    def _exchange(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        with calling("winnow.transformers.WinnowEP"):
            return self._of_layer(hidden_states, index, weights)

    def _of_layer(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        group = self.ep_mesh.get_group()
        if group not in _layers:
            _layers[group] = Layers(group, _SMS)
        _layers[group].count_call()
        experts = self.num_local_experts * self.ep_mesh.size()
        tokens = hidden_states.contiguous()
        sizes = Sizes(tokens.shape[1], index.shape[1], experts, tokens.dtype, tokens.device)
        indices, factors = index.to(torch.int32).contiguous(), weights.float().contiguous()

        def call(layer):
            check_room(layer, len(tokens))
            return autograd.dispatch(
                layer,
                tokens,
                indices,
                weights=factors,
                order="token_major",
                copy_out=True,
                return_expert_ids=True,
            )

        with torch.device(tokens.device):
            layer, (rows, sent, descriptor, ids) = _layers[group].with_layer(
                sizes, len(tokens), index.shape[1], call
            )
        # Experts of other ranks have the number behind the last one here, and weight 0.
        local = torch.where(ids >= 0, ids, self.num_local_experts).to(index.dtype)
        sent = sent.to(weights.dtype)
        if len(rows) > 0:
            results = self.experts_forward(rows, local, sent)
        else:  # connected to the backward pass, in which the other ranks wait for this one
            one = rows.sum(0, keepdim=True) + sent.sum()
            zeros = torch.zeros((1, 1), dtype=local.dtype, device=rows.device)
            results = self.experts_forward(
                one.to(rows.dtype), zeros, torch.ones_like(zeros, dtype=sent.dtype)
            )[:0]
        return autograd.combine(layer, results.to(tokens.dtype), descriptor)


def register() -> None:
    EPImplementationInterface.register("winnow", WinnowEP)
