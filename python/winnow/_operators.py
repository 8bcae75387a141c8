"""torch operators from declarations.

A declaration is a function with a signature and a docstring and without a body. Operators know
their arguments by position; what stands after the * of a declaration goes by keyword to and from
everybody else.
"""

import functools
import inspect
from typing import Any, Callable, Optional, Tuple, TypeVar

import torch
from torch import Tensor

_library = torch.library.Library("winnow", "FRAGMENT")

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Optional[Tensor]: "Tensor?",
    Optional[float]: "float?",
    Optional[int]: "int?",
    int: "int",
    bool: "bool",
    Optional[torch.dtype]: "ScalarType?",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def _arguments(declaration: Callable[..., Any]) -> Tuple[list, int]:
    """The operator's parameters, and how many of them stand before the *.

    return_lse is the function's alone: operators return whatever they have.
    """
    parameters = inspect.signature(declaration).parameters.values()
    parameters = [p for p in parameters if p.name != "return_lse"]
    return parameters, sum(p.kind is not p.KEYWORD_ONLY for p in parameters)


def calling(operator, how=None) -> Callable[[Function], Function]:
    """Makes a declaration call `operator`: how(operator, arguments, options), or as it stands."""

    def decorate(declaration: Function) -> Function:
        _, most = _arguments(declaration)

        @functools.wraps(declaration)
        def call(*arguments, **options):
            if len(arguments) > most:
                name = declaration.__name__
                raise TypeError(f"{name}() takes {most} positional arguments, got {len(arguments)}")
            if how is not None:
                return how(operator, arguments, options)
            return operator(*arguments, **options)

        return call

    return decorate


def operator(kernel, fake, results, changes=(), how=None, autograd=None):
    """Makes an operator of a declaration, and the declaration call it.

    Args:
        kernel: runs it on CPU and CUDA tensors. fake: makes empty results. Both take its arguments
            as the declaration does.
        results: how many tensors it returns. changes: names of the tensors that it writes to.
        how: as in calling().
        autograd: makes the kernel that records gradients from the operator, the other kernel and
            the defaults of the arguments; None: a gradient that is asked for is an error.
    """

    def decorate(declaration: Function) -> Function:
        parameters, most = _arguments(declaration)
        options = [p.name for p in parameters[most:]]

        def by_position(function):
            def call(*values):  # torch leaves out arguments at the end that have their default
                return function(*values[:most], **dict(zip(options, values[most:], strict=False)))

            return call

        def argument(parameter):
            kind = _SCHEMA_TYPES[parameter.annotation]
            if parameter.name in changes:
                kind = f"Tensor({chr(ord('a') + changes.index(parameter.name))}!)"
            default = "" if parameter.default is parameter.empty else f"={parameter.default}"
            return f"{kind} {parameter.name}{default}"

        name = declaration.__name__
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        _library.define(
            f"{name}({', '.join(map(argument, parameters))}) -> {returned}",
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        packet = getattr(torch.ops.winnow, name)
        run = by_position(kernel)
        _library.impl(name, run, "CPU")
        _library.impl(name, run, "CUDA")
        torch.library.register_fake(f"winnow::{name}", by_position(fake), lib=_library)
        if autograd is not None:
            defaults = tuple(p.default for p in parameters)
            recording = autograd(packet.default, run, defaults)
            _library.impl(name, recording, "Autograd", with_keyset=True)
        elif not changes:

            def refuse(ctx, *gradients):
                raise RuntimeError(f"winnow::{name} has no gradient; detach() its inputs")

            torch.library.register_autograd(f"winnow::{name}", refuse, lib=_library)
        return calling(packet, how)(declaration)

    return decorate
