"""The compressor's operations as torch operators; public as winnow.torch.compressor_*."""

import torch

from winnow import _operators
from winnow._operators import accumulator
from winnow._winnow import compressor as _compressor


def _backward(*tensors, **options):
    gradients = _compressor.backward(*tensors, **options)
    if len(gradients) == 4:
        return gradients
    kv = tensors[0]
    return *gradients, kv.new_empty(0, dtype=accumulator(kv))


@_operators.operator(
    _backward,
    _operators.signature_of(
        _compressor.backward, without=("d_kv", "d_gate", "d_position_bias", "d_norm_weight")
    ).plus("", "tuple[T, T, T, T]"),
    results=4,
)
def compressor_backward(kv, gate, position_bias, *others, norm_weight=None, **options):
    """winnow.compressor.backward() as an operator: (d_kv, d_gate, d_position_bias, d_norm_weight),
    of which the last one is empty without norm_weight."""
    real = accumulator(kv)
    return (
        kv.new_empty(kv.shape),
        kv.new_empty(kv.shape),
        kv.new_empty(position_bias.shape, dtype=real),
        kv.new_empty(0 if norm_weight is None else norm_weight.shape, dtype=real),
    )


class _Recorded(_operators.Recorded):
    """compressor_forward under autograd; arguments as in winnow.torch._Recorded. Rows are kept
    where they are normalised."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        kv, gate, position_bias, norm_weight, _, values, arguments = inputs
        *tensors, ctx.overlap, ctx.eps, ctx.hadamard = arguments.of(
            values, "cu_seqlens", "cu_rows", "cos", "sin", "first_position", "overlap", "eps",
            "hadamard",
        )  # fmt: skip
        rows, rstd = output
        ctx.mark_non_differentiable(rstd)
        made = (None, None) if norm_weight is None else (rows, rstd)
        ctx.save_for_backward(kv, gate, position_bias, norm_weight, *made, *tensors)

    @staticmethod
    def backward(ctx, d_rows, d_rstd):
        kv, gate, position_bias, norm_weight, rows, rstd, *others = ctx.saved_tensors
        cu_seqlens, cu_rows, cos, sin, first_position = others
        *gradients, d_norm_weight = torch.ops.winnow.compressor_backward(
            kv,
            gate,
            position_bias,
            cu_seqlens,
            cu_rows,
            rows,
            rstd,
            d_rows.contiguous(),  # a sum over rows gives an expanded one
            overlap=ctx.overlap,
            norm_weight=norm_weight,
            eps=ctx.eps,
            cos=cos,
            sin=sin,
            first_position=first_position,
            hadamard=ctx.hadamard,
        )
        return *gradients, None if norm_weight is None else d_norm_weight, None, None, None


def _forward(kv, *others, norm_weight=None, **options):
    if norm_weight is None:
        return _compressor.forward(kv, *others, **options), kv.new_empty(0, dtype=accumulator(kv))
    return _compressor.forward(kv, *others, norm_weight=norm_weight, return_rstd=True, **options)


def _rows_alone(results, options):
    return results[0]


@_operators.operator(
    _forward,
    _operators.signature_of(_compressor.forward, without=("return_rstd",)).plus("", "T"),
    results=2,
    after=_rows_alone,
    autograd=_operators.recording(
        _operators.recorded_by(_Recorded), leaves=("kv", "gate", "position_bias", "norm_weight")
    ),
)
def compressor_forward(
    kv, gate, position_bias, *others,
    overlap=False, norm_weight=None, num_rows=None, **options,
):  # fmt: skip
    """winnow.compressor.forward() as an operator: rows, differentiable in kv, gate, position_bias
    and norm_weight. Gradients are bitwise equal run after run.

    The operator itself always has two results: rows, and rstd, which is empty without norm_weight.
    """
    rows = kv.shape[0] // position_bias.shape[0] if num_rows is None else num_rows
    rstd = kv.new_empty(0 if norm_weight is None else rows, dtype=accumulator(kv))
    return kv.new_empty((rows, kv.shape[1] // (2 if overlap else 1))), rstd


_step = _operators.signature_of(
    _compressor.step, without=("cache", "pages", "slots", "power_of_two")
)


@_operators.operator(_compressor.step, _step, results=1, changes=("state",))
def compressor_step(kv, *others, overlap=False, **options):
    """winnow.compressor.step() as an operator that changes the state: [tokens, d], zeros where a
    token completes no window. No gradient is recorded."""
    return kv.new_empty((kv.shape[0], kv.shape[1] // (2 if overlap else 1)))


_STORING = (
    "kv: T, gate: T, position_bias: T, cu_seqlens: T, first_position: T, state: T, state_slots: T, "
    "{}: T, slots: T, *, overlap: bool = False, norm_weight: T | None = None, "
    "eps: float | None = None, cos: T | None = None, sin: T | None = None, hadamard: bool = False"
)


def _step_store(*tensors, **options):
    *tensors, cache, slots = tensors
    _compressor.step(*tensors, cache=cache, slots=slots, **options)


@_operators.operator(_step_store, _STORING.format("cache"), results=0, changes=("state", "cache"))
def compressor_step_store(*tensors, **options):
    """winnow.compressor.step() into a cache of sparse MLA, as an operator that changes the state
    and the cache."""


def _step_pages(*tensors, **options):
    *tensors, pages, slots = tensors
    _compressor.step(*tensors, pages=pages, slots=slots, **options)


@_operators.operator(
    _step_pages,
    _STORING.format("pages") + ", power_of_two: bool = False",
    results=0,
    changes=("state", "pages"),
)
def compressor_step_pages(*tensors, **options):
    """winnow.compressor.step() into pages of the indexer's keys, as an operator that changes the
    state and the pages."""
