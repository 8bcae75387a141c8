"""Tensors of any layout, in every family: the same bits as from contiguous copies."""

import expert_oracle
import numpy as np
import problems
import pytest
import torch
import winnow.torch as ops
from kinds import numbers
from layouts import GAP, LAYOUTS, lay_out
from ranks import Ranks

from winnow import expert_parallel, paged_xl, sparse_mla

DENSE = {"key_cache": 3, "value_cache": 2}  # inner dimensions without gaps; of others one


def _normal(*shape):
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def _sparse_inputs(*names):
    q, kv, indices, _ = problems.sparse_mla()
    out, _, lse = sparse_mla.forward(q, kv, indices)
    inputs = {"q": q, "kv": kv, "indices": indices, "out": out, "lse": lse}
    inputs["d_out"] = _normal(*out.shape)
    return {name: inputs[name] for name in ("q", "kv", "indices", *names)}


def _paged_inputs(*names):
    p = problems.paged_xl()
    for cache in ("key_cache", "value_cache"):
        p[cache] = _normal(*p[cache].shape)
    p["matrix_bd"] = _normal(3, 4, 19)
    return {name: p[name] for name in names}


STEP = ("query", "key_cache", "value_cache", "pos_bias_u")
TABLES = ("block_tables", "context_lens")
TOKENS = ("key", "value", "key_cache", "value_cache", "slot_mapping")


def _append(key, value, slot_mapping):
    caches = [a.copy() for a in _paged_inputs("key_cache", "value_cache").values()]
    if isinstance(key, torch.Tensor):
        caches = [torch.from_numpy(a) for a in caches]
    paged_xl.append(key, value, *caches, slot_mapping)
    return caches


def _attention(attention):
    def call(*, block_tables, context_lens, **tensors):
        scale = {"scale": None, "block_tables": block_tables, "context_lens": context_lens}
        return attention(**tensors, **scale, return_lse=True)

    return call


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


def _scattered(input, expert_indices, scatter_indices):
    def body(layer):
        got = layer.dispatch(input, expert_indices, scatter_indices=scatter_indices)
        return [numbers(got.output).copy()]

    return _exchange(body)


def _scatter_inputs():
    table, _ = expert_oracle.scatter_table([EXPERTS, EXPERTS], 6, 2, lambda pairs: pairs[::-1])
    return {"input": _normal(6, 16), "expert_indices": EXPERTS, "scatter_indices": table}


def _with_operators(layer, input, expert_indices, rows, bias):
    got = ops.expert_parallel_dispatch(layer, input, expert_indices)
    here = rows[: got.output.shape[0]]
    out = ops.expert_parallel_combine(layer, here, got.descriptor, bias=bias)
    return [numbers(got.output).copy(), numbers(out)]


def _all_to_all_operators(**tensors):
    return _exchange(lambda layer: _with_operators(layer, **tensors))


def _all_to_all_inputs(*names):
    inputs = {
        "input": _normal(6, 16),
        "expert_indices": EXPERTS,
        "weights": _normal(6, 3),
        "rows": _normal(36, 16),
        "bias": _normal(6, 16),
    }
    return {name: inputs[name] for name in names}


PLAIN, FUSED = (*STEP, "matrix_bd", *TABLES), (*STEP, "pos_bias_v", "r", *TABLES)
TERM = ("query", "pos_bias_v", "r", "context_lens")
EXCHANGE = ("input", "expert_indices", "rows", "bias")
# What makes the inputs, and the call.
CALLS = {
    "forward": (_sparse_inputs, sparse_mla.forward),
    "distribution": (lambda: _sparse_inputs("lse"), sparse_mla.distribution),
    "backward": (lambda: _sparse_inputs("out", "lse", "d_out"), sparse_mla.backward),
    "attention": (lambda: _paged_inputs(*PLAIN), _attention(paged_xl.attention)),
    "attention_fused": (lambda: _paged_inputs(*FUSED), _attention(paged_xl.attention_fused)),
    "position_term": (lambda: _paged_inputs(*TERM), paged_xl.position_term),
    "append": (lambda: _paged_inputs("key", "value", "slot_mapping"), _append),
    "layout": (
        lambda: {"expert_indices": EXPERTS},
        lambda expert_indices: expert_parallel.layout(expert_indices, 6, 2, 1),
    ),
    "all_to_all": (lambda: _all_to_all_inputs(*EXCHANGE, "weights"), _all_to_all),
    "scatter": (_scatter_inputs, _scattered),
}
OPERATORS = {
    "forward": (_sparse_inputs, ops.sparse_mla_attention),
    "attention": (
        lambda: _paged_inputs(*PLAIN),
        _attention(ops.paged_xl_attention),
    ),
    "attention_fused": (
        lambda: _paged_inputs(*FUSED),
        _attention(ops.paged_xl_attention_fused),
    ),
    "all_to_all": (lambda: _all_to_all_inputs(*EXCHANGE), _all_to_all_operators),
}


def _tensors(kind, inputs):
    return {name: kind(array) for name, array in inputs.items()}


def _results(call, inputs):
    results = call(**inputs)
    results = results if isinstance(results, (tuple, list)) else [results]
    return [numbers(result) for result in results if result is not None]


KINDS = [
    pytest.param(kind, layout, id=f"{module}-{layout}")
    for kind, module in ((np.asarray, "numpy"), (torch.from_numpy, "torch"))
    for layout in LAYOUTS
    if (module, layout) != ("torch", "backwards")
]


def _check_inputs(kind, layout, make, function):
    inputs = make()
    for name, array in inputs.items():
        dense = DENSE.get(name, 1)
        if array.ndim == dense or (name, layout) == ("scatter_indices", "expanded"):
            continue
        changed = lay_out(array, dense=dense, **LAYOUTS[layout](array.ndim - dense))
        copy = np.ascontiguousarray(changed)
        want, got = (
            _results(function, _tensors(kind, {**inputs, name: given})) for given in (copy, changed)
        )
        for one, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, expected, name)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_inputs_of_any_layout_give_the_same_bits(kind, layout, call):
    _check_inputs(kind, layout, *CALLS[call])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "backwards"])
def test_operators_take_inputs_of_any_layout(layout, operator):
    _check_inputs(torch.from_numpy, layout, *OPERATORS[operator])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_gaps_in_the_last_dimension_are_refused_by_name(kind, call):
    make, function = CALLS[call]
    inputs = make()
    for name, array in inputs.items():
        gaps = np.repeat(array, 2, axis=-1)[..., ::2]
        name_of = {"rows": "expert_output"}.get(name, name)
        with pytest.raises(ValueError, match=f"{name_of}: want stride 1 in the last dimension"):
            _results(function, _tensors(kind, {**inputs, name: gaps}))


def _write_rows(kind, rows, sums):
    inputs = _tensors(kind, _all_to_all_inputs("input", "expert_indices"))

    def body(layer):
        if layer.rank == 1:
            got = layer.dispatch(**inputs, copy_out=True)
            layer.combine(got.output, got.descriptor)
        else:
            got = layer.dispatch(**inputs, out=rows)
            layer.combine(rows, got.descriptor, out=sums)
        return []

    _exchange(body)


# The shapes of the outputs, and what writes to them.
WRITERS = {
    "forward": (
        {"out": (3, 4, 512), "max_logits": (3, 4), "lse": (3, 4)},
        lambda kind, **outputs: sparse_mla.forward(
            **_tensors(kind, _sparse_inputs()), out=(*outputs.values(),)
        ),
    ),
    "distribution": (
        {"out": (3, 7)},
        lambda kind, out: sparse_mla.distribution(**_tensors(kind, _sparse_inputs("lse")), out=out),
    ),
    "backward": (
        {"dq": (3, 4, 576), "dkv": (20, 1, 576)},
        lambda kind, **outputs: sparse_mla.backward(
            **_tensors(kind, _sparse_inputs("out", "lse", "d_out")), **outputs
        ),
    ),
    "attention": (
        {"out": (3, 4, 32), "lse": (3, 4)},
        lambda kind, **outputs: paged_xl.attention(
            **_tensors(kind, _paged_inputs(*PLAIN)), scale=None, out=(*outputs.values(),)
        ),
    ),
    "attention_fused": (
        {"out": (3, 4, 32)},
        lambda kind, out: paged_xl.attention_fused(
            **_tensors(kind, _paged_inputs(*FUSED)), scale=None, out=out
        ),
    ),
    "position_term": (
        {"out": (3, 4, 19)},
        lambda kind, out: paged_xl.position_term(**_tensors(kind, _paged_inputs(*TERM)), out=out),
    ),
    "append": (
        {"key_cache": (10, 2, 8, 8, 4), "value_cache": (10, 2, 32, 8)},
        lambda kind, **caches: paged_xl.append(
            **_tensors(kind, _paged_inputs("key", "value", "slot_mapping")), **caches
        ),
    ),
    "all_to_all": ({"rows": (18, 16), "sums": (6, 16)}, _write_rows),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("kind", "layout"), [k for k in KINDS if k.values[1] != "expanded"])
def test_outputs_of_any_layout_get_the_same_bits(kind, writer, layout):
    shapes, write = WRITERS[writer]
    want = {name: np.full(shape, GAP, np.float32) for name, shape in shapes.items()}
    got = {
        name: lay_out(a, dense=DENSE.get(name, 1), **LAYOUTS[layout](a.ndim - DENSE.get(name, 1)))
        for name, a in want.items()
    }
    write(np.asarray, **want)
    write(kind, **_tensors(kind, got))
    for name, output in got.items():
        np.testing.assert_array_equal(output, want[name], name)
        assert (output != GAP).any()
        output[...] = GAP
        assert (output.base == GAP).all(), f"{name}: wrote between the rows"
