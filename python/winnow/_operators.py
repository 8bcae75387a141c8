"""torch operators from declarations.

An operator is declared by the signature of the function that carries it out, or by one of its own,
and by a function whose docstring describes it and whose body makes empty results, for torch's fake
tensors; it names the parameters that this takes. torch passes every argument of an operator by
position; callers, kernels and declarations take the parameters after the * of a signature by
keyword.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import operator as operator_module
import weakref
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, TypeVar, Union

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from winnow import _torch_private as _private
from winnow._fakes import checked
from winnow._refusal import refuse
from winnow._signatures import Parameter, Signature
from winnow._winnow import OF_A_CALL, by_position
from winnow.errors import InvalidArgument

_library = torch.library.Library("winnow", "FRAGMENT")

# What annotations mean: the types of torch, and of its schema language.
_TYPES: Dict[str, Tuple[Any, str]] = {
    "T": (Tensor, "Tensor"),
    "T | None": (Optional[Tensor], "Tensor?"),
    "float | None": (Optional[float], "float?"),
    "int | None": (Optional[int], "int?"),
    "int": (int, "int"),
    "bool": (bool, "bool"),
    "str": (str, "str"),
    "size": (SymInt, "SymInt"),
    "size | None": (Optional[SymInt], "SymInt?"),
    "sizes": (Sequence[SymInt], "SymInt[]"),
    "device": (torch.device, "Device"),
    "dtype": (torch.dtype, "ScalarType"),
    "dtype | None": (Optional[torch.dtype], "ScalarType?"),
}


def accumulator(tensor: Tensor) -> torch.dtype:
    """The dtype of the sums, the lse and the sinks that come with a tensor."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


Function = TypeVar("Function", bound=Callable[..., Any])
Before = Optional[Callable[[Dict[str, Any]], Any]]
After = Optional[Callable[[Any, Any], Any]]


def signature_of(native, plus: str = "", without: Sequence[str] = ()) -> Signature:
    """The signature that an operator gets from a function of the extension: without the parameters
    that only say how a call runs (OF_A_CALL).

    Args:
        native: the function, or a functools.partial of it, whose keywords are left out.
        plus: further parameters of the operator, at the end: "dkv_dtype: dtype | None = None".
        without: keyword parameters that the operator does not have.
    """
    fixed = ()
    if isinstance(native, functools.partial):
        native, fixed = native.func, tuple(native.keywords)
    signature = Signature.parse(native.__nb_signature__[0][0])
    left_out = {*OF_A_CALL, *without, *fixed}
    names = tuple(p.name for p in signature.parameters if p.by_keyword and p.name in left_out)
    return signature.without(names).plus(plus)


def _native(kernel):
    """For a function of the extension, its variant that takes all arguments by position, as torch's
    dispatcher passes them; None for a Python function."""
    if not hasattr(kernel, "__nb_signature__"):
        return None
    return by_position[f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"]


def parameters_of(fields) -> str:
    """The text of a signature whose parameters are the fields of a NamedTuple, without defaults."""
    texts = {kind: text for text, (kind, _) in _TYPES.items()}
    return ", ".join(f"{n}: {texts[kind]}" for n, kind in fields.__annotations__.items())


class Arguments:
    """The parameters of an operator, to take arguments by name from those by position."""

    def __init__(self, operator: str, parameters: Sequence[Parameter]):
        self.operator = operator
        self.places = {p.name: i for i, p in enumerate(parameters)}
        self.defaults = tuple(_default(p) for p in parameters)
        self._takers: Dict[Tuple[str, ...], Callable[..., Any]] = {}

    def of(self, values: Sequence[Any], *names: str) -> Tuple[Any, ...]:
        """Some of a call's arguments. `values` may lack trailing ones that have their default."""
        take = self._takers.get(names)
        if take is None:
            take = operator_module.itemgetter(*(self.places[name] for name in names))
            self._takers[names] = take
        return take((*values, *self.defaults[len(values) :]))


def _default(parameter: Parameter) -> Any:
    empty = inspect.Parameter.empty
    return empty if parameter.default is None else ast.literal_eval(parameter.default)


def _result_type(signature: Signature) -> Any:
    def made(text):
        if not text.startswith("tuple"):
            return {"T": Tensor, "None": type(None)}[text]
        return Tuple[Tensor, ...] if "..." in text else Tuple[(Tensor,) * text.count("T")]

    return Union[tuple(made(text) for text in signature.results()[0])]


def _inspected(signature: Signature) -> inspect.Signature:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [
        inspect.Parameter(
            p.name, kinds[p.by_keyword], default=_default(p), annotation=_TYPES[p.annotation][0]
        )
        for p in signature.parameters
    ]
    return inspect.Signature(parameters, return_annotation=_result_type(signature))


def _refuse_unknown(signature: Signature, name: str, given: Mapping[str, Any]) -> None:
    """TypeError for a keyword that names no parameter, as functions of the extension have it."""
    known = [p.name for p in signature.parameters]
    for word in given:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1, 0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(known)}"
            text = f"{name}() got an unexpected keyword argument '{word}'; {hint}"
            raise TypeError(text) from None


def _refuse_beyond(
    signature: Signature, name: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """ValueError for an integer that is too large or too small for its parameter."""
    given = dict(zip((p.name for p in signature.parameters), arguments, strict=False))
    for word, value in {**given, **options}.items():
        kind = next(p.annotation for p in signature.parameters if p.name == word).split(" ")[0]
        if type(value) is not int or kind not in ("int", "size", "float"):
            continue
        if kind == "float" and abs(value) < 2**1023 or -(2**63) <= value < 2**63:
            continue
        bits = value.bit_length()
        shown = value if bits <= 256 else f"one of {bits} bits"
        refuse(name, word, "a number" if kind == "float" else "an integer of 64 bits", shown)


def calling(
    operator, signature: Signature, before: Before = None, after: After = None
) -> Callable[[Function], Function]:
    """A decorator that replaces a declaration by a function of this signature, its attribute
    `declared`, that calls `operator`.

    Args:
        before: removes the keywords that only the function has, and returns the second argument of
            `after`. Without it that is all keywords.
        after: turns the operator's results, and what `before` returned, into the function's.
    """
    most = sum(not p.by_keyword for p in signature.parameters)

    def decorate(declaration: Function) -> Function:
        name = declaration.__name__
        shown = _inspected(signature)

        @functools.wraps(declaration)
        def call(*arguments, **options):
            if len(arguments) > most:
                raise TypeError(f"{name}() takes {most} positional arguments, got {len(arguments)}")
            kept = options if before is None else before(options)
            try:
                results = operator(*arguments, **options)
            except (RuntimeError, ValueError) as error:
                if not isinstance(error, InvalidArgument):
                    # Of unknown keywords torch's message only has the number, of integers that it
                    # does not take that they are integers; of very long ones none can be made.
                    _refuse_unknown(signature, name, options)
                    _refuse_beyond(signature, name, arguments, options)
                raise
            return results if after is None else after(results, kept)

        call.__signature__ = shown
        call.__annotations__ = {p.name: p.annotation for p in shown.parameters.values()}
        call.__annotations__["return"] = shown.return_annotation
        call.declared = dataclasses.replace(signature, name=name)
        return call

    return decorate


# For each tracer of torch, and apart for the forward and the backward pass: a result of the latest
# call, which the next call gets as an argument so that it stays behind it.
_traces: "weakref.WeakKeyDictionary[Any, dict]" = weakref.WeakKeyDictionary()


def _refuse_tangents(operator, values):
    """Forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are an error: without
    a formula torch would take them as zero."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{operator.name()} has no forward-mode derivative; use reverse mode"
            )


def recorded_by(function):
    """The `apply` of a torch.autograd.Function for recording().

    Function.apply() would start the transforms of torch.func again. An operator's kernel already
    runs inside them, so a call is recorded on their current level alone, as torch's own operators
    are.
    """
    names = ("forward", "setup_context", "backward", "jvp")
    parts = {name: staticmethod(getattr(function, name)) for name in names}
    record = type(function.__name__, (_private.SingleLevelFunction,), parts).apply

    def apply(*arguments):
        if not _private.transforms_active():
            return record(*arguments)
        with _private.recording_inside_transform():
            return record(*arguments)

    return apply


def recording(apply, leaves, follows=None):
    """Makes the argument `autograd` of operator(). It does what
    torch.library.register_autograd() does, in half the time.

    The kernel runs first and the call is recorded after it, so that the way to the kernel is the
    same whether a gradient is recorded or not.

    Args:
        apply: records one call, with a torch.autograd.Function, and returns its results. It is
            called with the leaves, the kernel's results, the arguments (which may lack trailing
            ones that have their default), and the operator's Arguments.
        leaves: the names of the arguments that have gradients.
        follows: for an operator that all ranks must call in the same order: the name of an
            argument that is None in eager mode. In a traced graph it becomes a result of the call
            before: compilers keep only an order that data dictates, and would otherwise choose one
            by the sizes of each rank. They are also kept from dropping such a call.
    """
    direct = {}  # by dispatch keys: whether the kernel comes next, so that it is called directly

    def make(operator, kernel, arguments):
        places = [arguments.places[name] for name in leaves]
        after = None if follows is None else arguments.places[follows]

        def redispatch(keys, *values):
            trace = _private.tracing_mode() if after is not None else None
            if trace is not None:
                _private.keep_calls(operator)
                calls = _traces.setdefault(trace.tracer, {})
                forward = not _private.in_backward()
                values = (*values[:after], calls.get(forward), *values[after + 1 :])
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
                for i in places:
                    if i < len(values) and values[i] is not None and values[i].requires_grad:
                        given = [values[i] if i < len(values) else None for i in places]
                        # Where transforms of torch.func are nested, the outer ones have to record
                        # what this one does, or their derivatives would be zero.
                        with _private.GradPaused(not _private.transforms_active()):
                            results = run(*values)
                        return apply(*given, results, values, arguments)
            return run(*values)

        return record

    return make


class Recorded(torch.autograd.Function):
    """Records a call whose results the kernel has computed already, so that forward() only returns
    them. A subclass says in setup_context() what it keeps, and has the formula."""

    @staticmethod
    def forward(*arguments):
        *_, results, _, _ = arguments
        return results


class _Refused(Recorded):
    """A call of an operator without a gradient: an error where one is asked for."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[-1].operator

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(f"{ctx.name} has no gradient; detach() its inputs")


# What torch.autocast casts, as torch's own operators have it: neither float64 nor float8.
AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def _casting(packet, device_type, names, casts):
    """The operator under torch.autocast: `casts` as in operator()."""
    positions = {name: i for i, name in enumerate(names)}

    def cast(values, name, follows):
        value = values[positions[name]] if positions[name] < len(values) else None
        if value is None or value.device.type != device_type or value.dtype not in AUTOCAST:
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


# The tags of operators that must not be in the CUDA graphs that torch.compile records.
_UNSAFE = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]


def operator(
    kernel: Callable[..., Any],
    signature: Union[Signature, str, None] = None,
    *,
    plus: str = "",
    face: str = "",
    results: int,
    changes: Sequence[str] = (),
    before: Before = None,
    after: After = None,
    autograd: Optional[Callable[..., Any]] = None,
    recordable: bool = True,
    casts: Mapping[str, Optional[str]] = {},  # noqa: B006
    flops: Optional[Callable[..., int]] = None,
) -> Callable[[Function], Function]:
    """A decorator that makes an operator of a declaration, which makes empty results, and makes the
    declaration call it.

    Args:
        kernel: runs it on CPU and CUDA tensors; it and the declaration take its arguments as the
            signature says.
        signature: of the operator; a text is what stands between "def f(" and ")"; None:
            signature_of(kernel), which is then a function of the extension.
        plus: further parameters of the operator; the kernel does not get them.
        face: further parameters of the declaration alone; `before` has to remove them.
        results: how many tensors it returns. changes: names of the tensors that it writes to.
        before, after: as in calling().
        autograd: called with the operator, its kernel and the Arguments; returns the kernel that
            records gradients. None: a gradient that is asked for is an error.
        recordable: False where the host takes part in every call, so that the CUDA graphs that
            torch.compile records by itself leave it out. Such a call is checked at run time alone:
            its errors are those of all ranks, and one that does not come would be waited for.
        casts: what torch.autocast casts: names of tensors, with None for autocast's dtype or the
            name of the tensor whose dtype they take.
        flops: for torch.utils.flop_counter, of the arguments by name, shapes in place of tensors.
    """
    if signature is None:
        signature = signature_of(kernel)
    elif isinstance(signature, str):
        returned = "None" if results == 0 else "T" if results == 1 else f"tuple[{'T, ' * results}]"
        signature = Signature.parse(f"def f({signature}) -> {returned}")
    taken = [p.name for p in signature.parameters if p.by_keyword]
    signature = signature.plus(plus)
    parameters = signature.parameters
    most = sum(not p.by_keyword for p in parameters)
    every = [p.name for p in parameters[most:]]

    def called(function, options):
        """The function as torch calls it, all by position; passes `options` on by keyword."""
        if not options and not every:
            return function

        def call(*values):  # torch leaves out arguments at the end that have their default
            return function(*values[:most], **dict(zip(options, values[most:], strict=False)))

        return call

    def argument(parameter):
        _, kind = _TYPES[parameter.annotation]
        if parameter.name in changes:
            kind = f"Tensor({chr(ord('a') + changes.index(parameter.name))}!)"
        default = "" if parameter.default is None else f"={parameter.default}"
        return f"{kind} {parameter.name}{default}"

    def decorate(declaration: Function) -> Function:
        name = declaration.__name__
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        _library.define(
            f"{name}({', '.join(map(argument, parameters))}) -> {returned}",
            tags=(torch.Tag.pt2_compliant_tag, *([] if recordable else _UNSAFE)),
        )
        packet = getattr(torch.ops.winnow, name)
        run = _native(kernel) or called(kernel, taken)
        _library.impl(name, run, "CPU")
        _library.impl(name, run, "CUDA")
        checks = run if recordable else None
        fake = checked(name, parameters, checks, called(declaration, every))
        torch.library.register_fake(f"winnow::{name}", fake, lib=_library)
        names = [p.name for p in parameters]
        if casts:
            for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
                _library.impl(name, _casting(packet.default, device_type, names, casts), key)
        if flops is not None:

            @register_flop_formula(packet)
            def count(*shapes, out_shape=None, **options):
                return flops(**dict(zip(names, shapes, strict=False)), **options)

        arguments = Arguments(packet.default.name(), parameters)
        if autograd is not None:
            recorded = autograd(packet.default, run, arguments)
            _library.impl(name, recorded, "Autograd", with_keyset=True)
        elif not changes:
            tensors = [p.name for p in parameters if "Tensor" in argument(p)]
            refusing = recording(recorded_by(_Refused), tensors)(packet.default, run, arguments)
            _library.impl(name, refusing, "Autograd", with_keyset=True)
        else:
            passing = recording(None, ())(packet.default, run, arguments)
            _library.impl(name, passing, "Autograd", with_keyset=True)
        return calling(packet, signature.plus(face), before, after)(declaration)

    return decorate
