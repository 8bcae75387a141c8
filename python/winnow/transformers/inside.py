"""Calls into a model from outside of its forward pass.

A module may have its parameters only while its own forward pass runs, or that of a module around
it: FSDP gathers them, offloading brings them back, tensor parallelism shows each process its part.
Hooks and wrappers around `forward` do this, and know the backward pass by the tensors that
`forward` took and returned. What needs parameters after the forward pass of a model is therefore
one more forward pass of the modules that have them, with another function in the place of their
own.
"""

import contextlib
from typing import Any, Callable, Dict, Iterable, List, Tuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from winnow.transformers.refusal import refuse

OPTION = "winnow_inside"
"""With this option the forward pass of an attention or indexer module is the function given."""


_INSTEAD = "_winnow_instead"
"""The attribute of a module in whose forward pass another function runs."""


def is_instead(module: nn.Module) -> bool:
    """Whether the forward pass that runs is none of the module's own: for hooks."""
    return hasattr(module, _INSTEAD)


def call(module: nn.Module, function: Callable[[Tensor], Any], carrier: Tensor) -> Any:
    """function(carrier) as the forward pass of an attention or indexer module.

    What the function returns has to depend on the carrier, a zero that requires a gradient: the
    gradient that comes back to it tells a sharded module that its backward pass is over.
    """
    return module(carrier, **{OPTION: function})


def _call_instead(
    module: nn.Module, inner: nn.Module, function: Callable[[Tensor], Any], carrier: Tensor
) -> Any:
    """The forward pass of module with function in the place of inner.forward; inner is module, or
    what module wraps."""
    # Where accelerate has put its hooks in the place of `forward`, they call what has this name.
    name = "_old_forward" if "_old_forward" in vars(inner) else "forward"
    own = vars(inner).get(name)
    setattr(inner, name, function)
    setattr(inner, _INSTEAD, True)
    try:
        return module(carrier)
    finally:
        # What torch.compile has made passes the attribute on to the module within, which is rid of
        # it by now.
        with contextlib.suppress(AttributeError):
            delattr(inner, _INSTEAD)
        if own is None:
            delattr(inner, name)
        else:
            setattr(inner, name, own)


def with_parameters(module: nn.Module, function: Callable[[Tensor], Any], given: Tensor) -> Any:
    """function(given), which reads parameters of a module, as its forward pass."""
    return _call_instead(module, module, function, given)


def _fsdp1() -> Tuple[type, ...]:
    """The wrappers whose forward pass gathers parameters, and calls that of the module within."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.fsdp import FullyShardedDataParallel

    return (FullyShardedDataParallel,)


def _check_sharding(model: nn.Module, paths: Iterable[List[nn.Module]]) -> None:
    """Refuses what would lose gradients: ways of sharding that do not allow for two forward passes
    before a backward pass."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

    name = FullyShardedDataParallel.__name__
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    if wrappers and not FullyShardedDataParallel.fsdp_modules(model, root_only=True):
        refuse("model", f"the outermost {name}", f"{type(model).__name__}, a part of it")
    for wrapper in wrappers:
        if wrapper.sharding_strategy == ShardingStrategy.NO_SHARD:
            refuse("model", f"DistributedDataParallel, or a {name} that shards", "NO_SHARD")
        if wrapper.mixed_precision.param_dtype is not None:
            wanted = f"torch.autocast, fully_shard, or a {name} without param_dtype"
            refuse("model", wanted, str(wrapper.mixed_precision.param_dtype))
    for path in paths:
        checkpointed = False
        for module in path:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                if module.find_unused_parameters:  # the indexers, which only this loss reaches
                    refuse("model", "find_unused_parameters=False", True)
                if module.static_graph:  # gradients are reduced with those of its own output alone
                    refuse("model", "static_graph=False", True)
            if checkpointed and isinstance(module, (FSDPModule, FullyShardedDataParallel)):
                # What is computed again in the backward pass gathers its parameters for good.
                wanted = "no sharding of modules inside of one that is checkpointed"
                refuse("model", wanted, f"a {type(module).__name__} there")
            layer = isinstance(module, GradientCheckpointingLayer)
            checkpointed |= isinstance(module, CheckpointWrapper)
            checkpointed |= layer and module.gradient_checkpointing


@torch.compiler.disable  # functions that are there for one call are not worth compiling
def each(
    model: nn.Module, calls: Dict[nn.Module, Callable[[Tensor], Tensor]], device: torch.device
) -> Tuple[Tensor, ...]:
    """What the functions return, each called in the forward pass of its module (see call()) and in
    those of all modules of the model around it; in the order of the model's modules."""
    ways = []  # from the model to each module
    for name, module in model.named_modules():
        if module in calls:
            parts = name.split(".") if name else []
            ways.append([model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)])
    gradients = torch.is_grad_enabled()
    if gradients:
        _check_sharding(model, ([*way, *way[-1].modules()] for way in ways))
    around = {module for way in ways for module in way}
    wrappers = _fsdp1()

    def visit(module: nn.Module, carrier: Tensor) -> Tuple[Tensor, ...]:
        inner = module
        while isinstance(inner, wrappers):
            (inner,) = inner.children()
        if inner in calls:
            return (call(module, calls[inner], carrier),)

        def forward(carrier: Tensor, **_) -> Tuple[Tensor, ...]:  # hooks may add options
            inside = [child for child in inner.children() if child in around]
            return tuple(result for child in inside for result in visit(child, carrier))

        return _call_instead(module, inner, forward, carrier)

    with torch.compiler.set_stance("force_eager"):  # modules that are compiled for themselves
        return visit(model, torch.zeros((), device=device, requires_grad=gradients))
