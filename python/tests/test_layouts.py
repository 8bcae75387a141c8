"""Tensors of any layout, in every operation: the same bits as from contiguous copies."""

import every_operation
import expert_oracle
import numpy as np
import pytest
import torch
import winnow.torch as ops
from kinds import numbers
from layouts import GAP, LAYOUTS, lay_out
from ranks import Ranks

DENSE = {"key_cache": 3, "value_cache": 2}  # inner dimensions without gaps; of others one
# Read one by one: of any strides.
NUMBERS = {("sparse_mla::decode", name) for name in ("topk_length", "extra_topk_length")}
# What the table makes a tensor of torch of, which has no negative strides.
IN_TORCH = {("sparse_mla::decode", "q"), ("sparse_mla::decode", "out"),
            ("sparse_mla::store", "rows"), ("indexer::topk_paged", "q"),
            ("indexer::scores_paged", "q")}  # fmt: skip

KINDS = [
    pytest.param(kind, layout, id=f"{module}-{layout}")
    for kind, module in ((np.asarray, "numpy"), (torch.from_numpy, "torch"))
    for layout in LAYOUTS
    if (module, layout) != ("torch", "backwards")
]


def _normal(*shape):
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def _outputs(operation, kind, given):
    """What a call writes where it has these arrays in the place of its own."""
    outputs = {name: np.zeros_like(operation.tensors[name]) for name in operation.outputs}
    arrays = {**operation.tensors, **outputs, **given}
    operation.call(**{name: kind(array) for name, array in arrays.items()})
    return {name: arrays[name] for name in operation.outputs}


def _layouts(name, array, layout):
    """The array in the layout and in none, where the tensor of that name may have it."""
    dense = DENSE.get(name, 1)
    if array.ndim == dense or (name, layout) == ("scatter_indices", "expanded"):
        return None
    changed = lay_out(array, dense=dense, **LAYOUTS[layout](array.ndim - dense))
    return changed, np.ascontiguousarray(changed)


@pytest.mark.parametrize("name", every_operation.ALL)
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_tensors_of_any_layout_give_the_same_bits(kind, layout, name):
    operation = every_operation.ALL[name]
    for argument, array in operation.tensors.items():
        output = argument in operation.outputs
        if (layout, output) == ("expanded", True):
            continue
        if layout == "backwards" and (name, argument) in IN_TORCH:
            continue
        laid_out = _layouts(argument, np.full_like(array, GAP) if output else array, layout)
        if laid_out is None:
            continue
        changed, copy = laid_out
        want = _outputs(operation, kind, {argument: copy})
        for result, got in _outputs(operation, kind, {argument: changed}).items():
            np.testing.assert_array_equal(got, want[result], f"{argument}: {result}")
        if output:
            assert (changed != GAP).any()
            changed[...] = GAP
            assert (changed.base == GAP).all(), f"{argument}: wrote between the rows"


@pytest.mark.parametrize("name", every_operation.ALL)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_gaps_in_the_last_dimension_are_refused_by_name(kind, name):
    operation = every_operation.ALL[name]
    for argument, array in operation.tensors.items():
        if array.shape[-1] == 1 or (name, argument) in NUMBERS:
            continue
        gaps = np.repeat(array, 2, axis=-1)[..., ::2]
        with pytest.raises(ValueError, match=f"{argument}: want stride 1 in the last dimension"):
            _outputs(operation, kind, {argument: gaps})


# ---- Two ranks, and operators

# Two ranks that give the same: 6 tokens of 3 pairs, 18 rows for each rank.
EXPERTS = np.arange(18, dtype=np.int32).reshape(6, 3) % 6


def _exchange(body):
    """body(layer) on two ranks, of two nodes: a list of the results of both."""
    sizes = {"max_tokens": 6, "hidden": 16, "topk": 3, "experts": 6, "dtype": "float32"}
    with Ranks(2, **sizes, local_world_size=1) as ranks:
        return [result for both in ranks.run(lambda layer, rank: body(layer)) for result in both]


def _all_to_all(input, expert_indices, weights, rows, bias):
    def body(layer):
        got = layer.dispatch(input, expert_indices, weights=weights)
        here = rows[: got.output.shape[0]]
        out = layer.combine(here, got.descriptor, bias=bias, weighted=True)
        return [numbers(a).copy() for a in (got.output, got.weights, out)]

    return _exchange(body)


def _all_to_all_operators(input, expert_indices, rows, bias):
    def body(layer):
        got = ops.expert_parallel_dispatch(layer, input, expert_indices)
        here = rows[: got.output.shape[0]]
        out = ops.expert_parallel_combine(layer, here, got.descriptor, bias=bias)
        return [numbers(got.output).copy(), numbers(out)]

    return _exchange(body)


def _scattered(input, expert_indices, scatter_indices):
    def body(layer):
        got = layer.dispatch(input, expert_indices, scatter_indices=scatter_indices)
        return [numbers(got.output).copy()]

    return _exchange(body)


# Inputs, and the calls that take them: tensors of torch for those of operators.
TABLE, _ = expert_oracle.scatter_table([EXPERTS, EXPERTS], 6, 2, lambda pairs: pairs[::-1])
EXCHANGE = {"input": _normal(6, 16), "expert_indices": EXPERTS}
BACK = {**EXCHANGE, "rows": _normal(36, 16), "bias": _normal(6, 16)}


def _operator(name, call):
    operation = every_operation.ALL[name]
    inputs = {n: a for n, a in operation.tensors.items() if n not in operation.outputs}
    paged = {"scale": None, "return_lse": True} if "paged" in name else {}
    return inputs, lambda **tensors: [numbers(result) for result in call(**tensors, **paged)]


CALLS = {
    "all_to_all": ({**BACK, "weights": _normal(6, 3)}, _all_to_all),
    "scatter": ({**EXCHANGE, "scatter_indices": TABLE}, _scattered),
}
OPERATORS = {
    "all_to_all": (BACK, _all_to_all_operators),
    "forward": _operator("sparse_mla::forward", ops.sparse_mla_attention),
    "attention": _operator("paged_xl::attention", ops.paged_xl_attention),
    "attention_fused": _operator("paged_xl::attention, fused", ops.paged_xl_attention_fused),
}


def _check_inputs(kind, layout, inputs, call):
    for name, array in inputs.items():
        laid_out = _layouts(name, array, layout)
        if laid_out is None:
            continue
        got, want = (
            call(**{n: kind(a) for n, a in {**inputs, name: given}.items()}) for given in laid_out
        )
        for one, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, expected, name)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_two_ranks_take_inputs_of_any_layout(kind, layout, call):
    _check_inputs(kind, layout, *CALLS[call])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "backwards"])
def test_operators_take_inputs_of_any_layout(layout, operator):
    _check_inputs(torch.from_numpy, layout, *OPERATORS[operator])
