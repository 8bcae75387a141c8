"""torch operators from declarations.

A declaration is a function with a signature and a docstring and without a body. Operators know
their arguments by position; what stands after the * of a declaration goes by keyword to and from
everybody else.
"""

import functools
import inspect
import weakref
from typing import Any, Callable, Mapping, Optional, Sequence, Tuple, TypeVar

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from winnow import _torch_private as _private

_library = torch.library.Library("winnow", "FRAGMENT")

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Optional[Tensor]: "Tensor?",
    Optional[float]: "float?",
    Optional[int]: "int?",
    int: "int",
    bool: "bool",
    str: "str",
    SymInt: "SymInt",
    Optional[SymInt]: "SymInt?",
    Sequence[SymInt]: "SymInt[]",
    torch.device: "Device",
    torch.dtype: "ScalarType",
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


# By what torch traces with: the last result of a call that the next one has to follow, in the
# forward pass and in the backward pass.
_traces: "weakref.WeakKeyDictionary[Any, dict]" = weakref.WeakKeyDictionary()


def _refuse_tangents(operator, values):
    """Forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are an error: without
    a formula torch would take them as zero."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{operator.name()} has no forward-mode derivative; use reverse mode"
            )


def _recorded_further_out(run):
    """Function.apply() runs what it records without recording. Where transforms are nested, the
    outer ones have to record there, or their derivatives would be zero."""

    def call(*values):
        with torch.enable_grad(), _private.forward_mode(True):
            return run(*values)

    return call


def recorded_by(function):
    """The `apply` of a torch.autograd.Function for recording().

    Function.apply() starts the transforms of torch.func; an operator's kernel stands inside them
    already, where a call is recorded like one of torch's own operators.
    """
    record = super(torch.autograd.Function, function).apply

    def apply(*arguments):
        if not _private.transforms_active():
            return record(*arguments)
        with _private.recording_inside_transform():
            return record(*arguments)

    return apply


def recording(apply, leaves, follows=None):
    """An `autograd` for operator(), as torch.library.register_autograd() in half the time.

    Args:
        apply: records one call, with a torch.autograd.Function: of the leaves, the operator's
            kernel, its arguments without those at the end that have their default, and the
            defaults of all.
        leaves: which of the arguments have gradients, by position.
        follows: of an operator that several ranks call in the same order: the position of an
            argument that is None. In a graph that torch traces it becomes a result of the call
            before, since a compiler keeps no other order, and chooses it by the sizes of a rank.
            No call is dropped either.
    """
    direct = {}  # by keys: nothing, a mode of torch for instance, stands before the kernel

    def make(operator, kernel, defaults):
        def redispatch(keys, *values):
            trace = _private.tracing_mode() if follows is not None else None
            if trace is not None:
                _private.keep_calls(operator)
                calls = _traces.setdefault(trace.tracer, {})
                forward = not _private.in_backward()
                values = (*values[:follows], calls.get(forward), *values[follows + 1 :])
            with _private.below_autograd():
                results = operator.redispatch(keys & _private.after_autograd_keys, *values)
            if trace is not None:
                calls[forward] = results[-1] if isinstance(results, tuple) else results
            return results

        def record(keys, *values):
            _refuse_tangents(operator, values)
            bits = keys.raw_repr()
            if bits not in direct:
                below = keys & _private.after_autograd_keys
                direct[bits] = below.highestPriorityTypeId() in _private.kernel_keys
            run = kernel if direct[bits] else functools.partial(redispatch, keys)
            if torch.is_grad_enabled():
                for i in leaves:
                    if i < len(values) and values[i] is not None and values[i].requires_grad:
                        given = [values[i] if i < len(values) else None for i in leaves]
                        if _private.transforms_active():
                            run = _recorded_further_out(run)
                        return apply(*given, run, values, defaults)
            return run(*values)

        return record

    return make


class _Refused(torch.autograd.Function):
    """A call of an operator without a gradient: an error where one is asked for."""

    @staticmethod
    def forward(*arguments):
        run, values, _ = arguments[-3:]
        return run(*values)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[-1]

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(f"{ctx.name} has no gradient; detach() its inputs")


# What torch.autocast casts, as torch's own operators have it: neither float64 nor float8.
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def _casting(packet, device_type, names, casts):
    """The operator under torch.autocast: `casts` as in operator()."""
    positions = {name: i for i, name in enumerate(names)}

    def cast(values, name, follows):
        value = values[positions[name]] if positions[name] < len(values) else None
        if value is None or value.device.type != device_type or value.dtype not in _AUTOCAST:
            return
        given = torch.get_autocast_dtype(device_type)
        dtype = values[positions[follows]].dtype if follows else given
        values[positions[name]] = value.to(dtype)

    def call(*values):
        values = list(values)
        for name, follows in casts.items():
            cast(values, name, follows)
        with torch.autocast(device_type, enabled=False):
            return packet(*values)

    return call


# For operators of which the CUDA graphs that torch.compile records must hold none.
_UNSAFE = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]


def operator(
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    results: int,
    changes: Sequence[str] = (),
    how: Optional[Callable[..., Any]] = None,
    autograd: Optional[Callable[..., Any]] = None,
    recordable: bool = True,
    casts: Mapping[str, Optional[str]] = {},  # noqa: B006
    flops: Optional[Callable[..., int]] = None,
) -> Callable[[Function], Function]:
    """Makes an operator of a declaration, and the declaration call it.

    Args:
        kernel: runs it on CPU and CUDA tensors. fake: makes empty results. Both take its arguments
            as the declaration does.
        results: how many tensors it returns. changes: names of the tensors that it writes to.
        how: as in calling().
        autograd: makes the kernel that records gradients from the operator, the other kernel and
            the defaults of the arguments; None: a gradient that is asked for is an error.
        recordable: False where the host takes part in every call, so that the CUDA graphs that
            torch.compile records by itself leave it out.
        casts: what torch.autocast casts: names of tensors, with None for autocast's dtype or the
            name of the tensor whose dtype they take.
        flops: of the shapes of the arguments, as torch.utils.flop_counter wants it.
    """

    def decorate(declaration: Function) -> Function:
        parameters, most = _arguments(declaration)
        options = [p.name for p in parameters[most:]]

        def by_position(function):
            if not options:
                return function

            def call(*values):  # torch leaves out arguments at the end that have their default
                return function(*values[:most], **dict(zip(options, values[most:], strict=False)))

            return call

        def argument(parameter):
            kind = _SCHEMA_TYPES[parameter.annotation]
            if parameter.name in changes:
                kind = f"Tensor({chr(ord('a') + changes.index(parameter.name))}!)"
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            return f"{kind} {parameter.name}{default}"

        name = declaration.__name__
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        _library.define(
            f"{name}({', '.join(map(argument, parameters))}) -> {returned}",
            tags=(torch.Tag.pt2_compliant_tag, *([] if recordable else _UNSAFE)),
        )
        packet = getattr(torch.ops.winnow, name)
        run = by_position(kernel)
        _library.impl(name, run, "CPU")
        _library.impl(name, run, "CUDA")
        torch.library.register_fake(f"winnow::{name}", by_position(fake), lib=_library)
        if casts:
            names = [p.name for p in parameters]
            for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
                _library.impl(name, _casting(packet.default, device_type, names, casts), key)
        if flops is not None:
            register_flop_formula(packet)(flops)
        if autograd is not None:
            defaults = tuple(p.default for p in parameters)
            recorded = autograd(packet.default, run, defaults)
            _library.impl(name, recorded, "Autograd", with_keyset=True)
        elif not changes:
            tensors = [i for i, p in enumerate(parameters) if "Tensor" in argument(p)]
            refusing = recording(recorded_by(_Refused), tensors)(
                packet.default, run, packet.default.name()
            )
            _library.impl(name, refusing, "Autograd", with_keyset=True)
        else:
            passing = recording(None, ())(packet.default, run, None)
            _library.impl(name, passing, "Autograd", with_keyset=True)
        return calling(packet, how)(declaration)

    return decorate
