"""The parts of torch that are not public and that winnow uses, all of them, and what each is for.

torch's public ways to the same end cost more than a call may (register_autograd, twice the time) or
do not exist. The private parts may change from one version of torch to the next: TESTED names the
versions that the tests have run with, the first of them in `make test`. With another one `import
winnow.torch` warns, and a part that is gone is an ImportError that names it; a part that has
changed its meaning is for the tests to find.
"""

import importlib
import sys
import warnings
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad

TESTED = ("2.11", "2.14", "2.15")
_TESTED_TEXT = f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"


def _check_version(version: str) -> None:
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        warnings.warn(
            f"winnow.torch was tested with torch {_TESTED_TEXT}, not with {version}", stacklevel=2
        )


def _part(module: str, name: str, purpose: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise ImportError(
            f"torch {torch.__version__} has no {module}.{name}, which winnow.torch needs "
            f"{purpose}; it was tested with torch {_TESTED_TEXT}"
        ) from None


_check_version(torch.__version__)

# Autograd: our operators record gradients themselves, and run their kernels below autograd in the
# dispatch of torch.
below_autograd = _part("torch._C", "_AutoDispatchBelowAutograd", "to record gradients")
after_autograd_keys = _part("torch._C", "_after_autograd_keyset", "to record gradients")
_set_grad_enabled = _part("torch._C", "_set_grad_enabled", "to record gradients")
_dispatch_key = _part("torch._C", "DispatchKey", "to record gradients")
kernel_keys = (_dispatch_key.CPU, _dispatch_key.CUDA)


class GradPaused:
    """torch.no_grad() where `paused` holds, at a third of its cost."""

    __slots__ = ("_resumes",)

    def __init__(self, paused: bool) -> None:
        self._resumes = paused and torch.is_grad_enabled()

    def __enter__(self) -> None:
        if self._resumes:
            _set_grad_enabled(False)

    def __exit__(self, *exception: Any) -> None:
        if self._resumes:
            _set_grad_enabled(True)


# torch.func: whether one of its transforms runs, and recording of a call inside of one.
transforms_active = _part("torch._C", "_are_functorch_transforms_active", "for torch.func")
SingleLevelFunction = _part(
    "torch.autograd.function", "_SingleLevelFunction", "for torch.func"
)  # torch.autograd.Function without the transforms of torch.func
recording_inside_transform = _part(
    "torch._functorch.utils", "enable_single_level_autograd_function", "for torch.func"
)
_part("torch.autograd.forward_ad", "_current_level", "to refuse tangents")  # only checked here


def forward_mode_level() -> int:
    """The level of forward-mode differentiation; below 0 where there is none."""
    return _forward_ad._current_level


# Compilers: what traces, whether anything does, and whether a backward pass runs.
tracing_mode = _part(
    "torch.fx.experimental.proxy_tensor", "get_proxy_mode", "to keep the calls of ranks in order"
)
count_modes = _part("torch._C", "_len_torch_dispatch_stack", "to see that a compiler traces")
graph_task = _part(
    "torch._C", "_current_graph_task_id", "to tell forward from backward, and backward passes"
)


# Has a GPU check a condition: where it does not hold, the stream has an error.
assert_async = _part("torch", "_assert_async", "to check masks in compiled code")


def value_now(number: Any) -> Any:
    """The value of a symbolic number in the call that is traced; None: only run time tells."""
    return getattr(number.node, "hint", None)


def in_backward() -> bool:
    return graph_task() != -1


def keep_calls(operator: Any) -> None:
    """Has inductor, where it is loaded, keep all calls of the operator.

    It drops a call whose results are read by nothing but operations on empty tensors, as on a rank
    without tokens, and the other ranks would wait for it.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operator in lowering.lowerings:
        return
    tag = lowering.get_layout_constraint_tag(operator, with_default=True)
    constraint = lowering.tag_to_layout_constraint(tag)
    lowering.make_fallback(operator, layout_constraint=constraint, warn=False)
    fallback = lowering.lowerings[operator]

    def lower(*values, **options):
        operations = lowering.V.graph.operations
        before = len(operations)
        results = fallback(*values, **options)
        for made in operations[before:]:
            made.has_side_effects = lambda: True
        return results

    lowering.lowerings[operator] = lower
