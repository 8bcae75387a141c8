"""Models whose sequences lie on the ranks of a group: inputs, masks and labels of a rank's part.

What a model gets in the place of an attention mask says which tokens a rank has, so that layers
need nothing else, neither in the forward pass nor where checkpointing repeats it.
"""

import inspect
from typing import Any, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import PreTrainedModel

from winnow.context_parallel import ContextParallel, Tokens
from winnow.context_parallel import context_parallel as make_context
from winnow.transformers import inside, masks
from winnow.transformers.families import DeepseekV4, Dots3Note, Family
from winnow.transformers.placed import Placed
from winnow.transformers.refusal import refuse
from winnow.transformers.registry import check, family_of
from winnow.transformers.sequences import find

_CACHES = ("cache", "past_key_values")
_TOWERS = ("pixel_values", "pixel_values_videos", "input_features")
_IGNORED = -100  # the label that takes no part in a loss, if the caller names no other


def enable_context_parallel(
    model: PreTrainedModel,
    mesh: Any,
    *,
    placement: str = "balanced",
    keys: str = "gathered",
    shard_inputs: bool = True,
) -> RemovableHandle:
    """Has the ranks of a group share the sequences of a model's forward and backward passes.

    From then on each rank computes its tokens alone: hidden states and logits are theirs, [batch,
    tokens / ranks, ...]. The loss of the model, and indexer_loss(), are such that their mean over
    the ranks is that of one rank, and so are gradients: FSDP, which forms the mean of gradients,
    gets the group among its ranks, as does DistributedDataParallel; alone, average them over the
    group. A collective call, as are the forward and backward passes after it. Call it before the
    model is wrapped.

    Args:
        model: one of transformers on "winnow", without a cache.
        mesh: a DeviceMesh of one dimension, such as mesh["cp"], or a ProcessGroup.
        placement, keys: as in winnow.torch.context_parallel().
        shard_inputs: every rank gives input_ids or inputs_embeds, labels, attention_mask and
            position_ids of all tokens, and takes its own. False: a rank gives those of its own
            tokens, in the order of winnow.torch.context_parallel(...).tokens(count).columns();
            position_ids then are those within the whole sequence. cu_seq_lens_q and _k are of all
            tokens in either case.

    Returns:
        A handle, whose remove() has a rank compute whole sequences again.

    Raises:
        ValueError: the model, or an argument of a forward pass, cannot be divided.
    """
    if isinstance(mesh, dist.DeviceMesh):
        if mesh.ndim != 1:
            refuse("mesh", "one dimension, as of mesh['cp']", f"{mesh.ndim} dimensions")
        mesh = mesh.get_group()
    context = make_context(mesh, placement=placement, keys=keys)
    with context.refusals():
        if not isinstance(model, PreTrainedModel):
            refuse("model", "a model of transformers", type(model).__name__)
        check(model)
        family = family_of(model.config.get_text_config())
        if family is None or isinstance(family, Dots3Note):
            got = f"{model.config.model_type}, whose layers with a sliding window do not"
            refuse("model", "one all of whose layers run on Winnow", got)
        context.agree("enable_context_parallel", model=model.config.model_type)
    inputs = _Inputs(context, family, shard_inputs)
    return model.register_forward_pre_hook(inputs, with_kwargs=True)


def context_of(model: nn.Module) -> Optional[ContextParallel]:
    """Of the ranks that share the sequences of a model, or of one that it wraps."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Inputs):
                return hook.context
    return None


class _Inputs:
    """What a rank's forward pass gets for what the caller gave."""

    def __init__(self, context: ContextParallel, family: Family, whole: bool):
        self.context, self.family = context, family
        self.whole = whole  # whether the caller gives all tokens
        self.compresses = isinstance(family, DeepseekV4)

    def __call__(self, model: nn.Module, arguments: tuple, options: dict) -> Tuple[tuple, dict]:
        if inside.is_instead(model):
            return arguments, options
        with self.context.refusals():
            given = self._given(model, arguments, options)
            self.context.agree("forward")
        return (), given

    def _given(self, model: nn.Module, arguments: tuple, options: dict) -> Dict[str, Any]:
        names = inspect.signature(model.forward).parameters
        given = {**dict(zip(names, arguments, strict=False)), **options}
        self._check(model, given)
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        tensor = given.get(name)
        if not isinstance(tensor, Tensor):
            refuse("input_ids", "a tensor, or inputs_embeds", type(tensor).__name__)
        batch, count = tensor.shape[:2]
        device = tensor.device
        if not self.whole:
            count *= self.context.size
        tokens = self.context.tokens(count, batch=batch)

        def of_all(name: str) -> Optional[Tensor]:
            """[batch or 1, count]"""
            value = given.get(name)
            if value is None or self.whole:
                return value
            columns = value.shape[1] if value.dim() == 2 else -1
            if columns != tokens.own:
                refuse(name, f"shape [batch, {tokens.own}]", list(value.shape))
            numbers = value.long().expand(batch, columns).flatten()
            return tokens.whole(numbers).view(batch, count)

        mask, positions = of_all("attention_mask"), of_all("position_ids")
        if positions is None:
            positions = torch.arange(count, device=device)[None]
        if positions.dim() != 2 or positions.shape[1] != count:
            refuse("position_ids", f"shape [batch, {count}]", list(positions.shape))
        ranges = self._ranges(batch, count, mask, positions, given, device)
        sequences = None
        if self.compresses:
            sequences = find(ranges, positions, 0, packed=mask is None)
            tokens = tokens.of_sequences(
                [piece.length for piece in sequences.pieces],
                [piece.before < 0 for piece in sequences.pieces],
            )
        own = tokens.shard(positions, 1)
        placed = Placed(tokens, tokens.shard(ranges, 1), own, sequences)
        given[name] = tokens.shard(tensor, 1) if self.whole else tensor
        given["position_ids"] = own
        given["attention_mask"] = {"indexed_attention": placed}
        given["use_cache"] = False
        if given.get("labels") is not None:
            self._set_labels(given, tokens, of_all)
        return given

    def _check(self, model: nn.Module, given: Dict[str, Any]) -> None:
        for name in (*_CACHES, *_TOWERS):
            if given.get(name) is not None:
                refuse(name, "None with context parallelism", type(given[name]).__name__)
        if given.get("use_cache"):
            refuse("use_cache", "False with context parallelism", True)
        keep = given.get("logits_to_keep", 0)
        if isinstance(keep, Tensor) or keep != 0:
            refuse("logits_to_keep", "0 with context parallelism", keep)
        routers = given.get("output_router_logits")
        if routers or getattr(model.config, "output_router_logits", False):
            refuse("output_router_logits", "False with context parallelism", True)
        mask = given.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            refuse("attention_mask", "shape [batch, rows] with context parallelism", got)

    def _ranges(
        self, batch: int, count: int, mask: Optional[Tensor], positions: Tensor, given: dict, device
    ) -> Tensor:
        """What the tokens of all ranks see, [batch, count, 2]: as one rank has it."""
        found = masks.ranges(batch, count, count, attention_mask=mask, device=device)
        if mask is None and self.family.restarts and not self.compresses:
            restarts = torch.nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0))
            column = torch.arange(count, device=device)
            start = torch.where(restarts, column, 0).cummax(-1).values.to(torch.int32)
            start = torch.maximum(found[..., 0], start.expand(batch, count))
            found = torch.stack((start, found[..., 1]), -1)
        lengths = [given.pop(f"cu_seq_lens_{of}", None) for of in ("q", "k")]
        for of in ("q", "k"):
            given.pop(f"max_length_{of}", None)
        if lengths[0] is not None:
            found = masks.of_sequences(found, count, *lengths)
        return found

    def _set_labels(self, given: Dict[str, Any], tokens: Tokens, of_all) -> None:
        """Labels of this rank's tokens, shifted over the borders of ranks, and what the loss is
        divided by: so that the mean over the ranks is that of all tokens."""
        ignored = given.get("ignore_index", _IGNORED)
        labels = of_all("labels")
        shifted = of_all("shift_labels")
        if shifted is None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=ignored)[:, 1:]
        count = given.get("num_items_in_batch")
        if count is None:
            count = (shifted != ignored).sum()
        given["labels"] = tokens.shard(labels, 1)
        given["shift_labels"] = tokens.shard(shifted, 1).contiguous()
        given["num_items_in_batch"] = count / self.context.size
