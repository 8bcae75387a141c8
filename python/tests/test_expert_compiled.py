"""dispatch and combine in torch.compile(fullgraph=True)."""

import gc

import pytest
import torch
from compiled_problem import (
    CONFIG,
    EXPERTS,
    HIDDEN,
    TOPK,
    WORLD,
    compiler,  # noqa: F401
    leaves_of,
    make_inputs,
)
from expert_launch import alone  # noqa: F401
from ranks import Ranks, run_each
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from winnow.expert_parallel import Descriptor, EPAll2AllLayer, autograd, operators

pytestmark = pytest.mark.filterwarnings("ignore")


def _weighted_by_library(layer, x, w, b, indices, **options):
    rows, given, descriptor = autograd.dispatch(layer, x, indices, weights=w, **options)
    # Also what tells the experts where their rows are.
    rows = rows * rows + descriptor.expert_offsets.sum()
    return autograd.combine(layer, rows, descriptor, weights=given, bias=b)


def _weighted_by_caller(layer, x, w, b, indices, **options):
    rows, given, descriptor = autograd.dispatch(layer, x, indices, weights=w, **options)
    return autograd.combine(layer, rows * rows * given[:, None], descriptor, bias=b)


def _token_major(layer, x, w, b, indices, **options):
    rows, given, descriptor = autograd.dispatch(
        layer, x, indices, weights=w, order="token_major", **options
    )
    return autograd.combine(layer, rows * rows * given.sum(1)[:, None], descriptor, bias=b)


def _twice(layer, x, w, b, indices, **options):
    """Two calls that nothing but their order relates, and one that repeats a routing."""
    first, given, descriptor = autograd.dispatch(layer, x, indices, weights=w, **options)
    second, _, other = autograd.dispatch(layer, b, indices.flip(0), **options)
    third, _, again = autograd.dispatch(layer, x.sin(), cached=descriptor)
    one = autograd.combine(layer, first * given[:, None], descriptor)
    two = autograd.combine(layer, second.cos(), other)
    return one + two.exp() + autograd.combine(layer, third, again)


MODES = {
    "fixed size": (_weighted_by_library, {"worst_case_rows": 60}),
    "counted": (_weighted_by_library, {}),
    "own memory": (_weighted_by_caller, {"copy_out": True}),
    "padded": (_weighted_by_caller, {"expert_alignment": 4}),
    "token major": (_token_major, {}),
    "twice": (_twice, {"worst_case_rows": 60}),
}


def _compare(model, options, problems):
    """Values and gradients of eager and of compiled code, for each problem's inputs of a rank."""
    compiled = torch.compile(model, fullgraph=True)

    def body(layer, rank):
        for problem in problems:
            *values, indices = problem(rank)
            results = []
            for run in (model, compiled):
                leaves = leaves_of(*values)
                out = run(layer, *leaves, indices, **options)
                (out * out).sum().backward()
                results.append([out, *(leaf.grad for leaf in leaves)])
            for eager, got in zip(*results, strict=True):
                torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)

    with Ranks(WORLD, **CONFIG, local_world_size=1, timeout=300) as ranks:
        for result in run_each(WORLD, lambda rank: body(ranks.layers[rank], rank), seconds=300):
            if isinstance(result, BaseException):
                raise result
        gc.collect()
        assert not operators._kept  # descriptors went with their tensors


@pytest.mark.parametrize("mode", MODES)
def test_compiled_code_gives_what_eager_code_gives(mode):
    """With gradients, on ranks of different sizes, whose graphs torch plans differently."""
    _compare(*MODES[mode], [lambda rank, seed=seed: make_inputs(rank, seed) for seed in range(2)])


@pytest.mark.parametrize("mode", ["counted", "twice"])
def test_a_rank_without_tokens_calls_like_the_others(mode):
    """Also where nobody reads what it gets: nothing is added to nothing."""
    tokens = [(3, 0), (0, 4), (1, 1)]
    _compare(*MODES[mode], [lambda rank, n=n: make_inputs(rank, tokens=n) for n in tokens])


def _follows(graph):
    """For each of our calls in a graph: (name, the call before it by data)."""
    calls = [n for n in graph.graph.nodes if str(n.target).startswith("winnow.expert_parallel_")]
    position = {"dispatch": 2, "combine": 3, "weight_gradient": 1}
    found = []
    for node in calls:
        name = str(node.target).removeprefix("winnow.expert_parallel_").removesuffix(".default")
        if name not in position:
            continue
        before = node.args[position[name]]
        while before is not None and before not in calls:
            (before,) = before.all_input_nodes
        found.append((node, before))
    return found


def test_calls_follow_each_other_in_a_graph():
    """By data, since a compiler keeps no other order, which every rank must share."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    *values, indices = make_inputs(0)
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        compiled = torch.compile(_twice, fullgraph=True, backend=backend)
        out = compiled(layer, *leaves_of(*values), indices, worst_case_rows=60)
        out.sum().backward()
    for graph, count in zip(graphs, (6, 7), strict=True):
        calls = _follows(graph)
        assert len(calls) == count
        assert [before for _, before in calls] == [None, *(node for node, _ in calls[:-1])]


def test_a_traced_descriptor_has_the_attributes_of_a_descriptor():
    x, w, _, indices = make_inputs(0)

    def dispatch(layer):
        return autograd.dispatch(layer, x, indices, weights=w)

    with Ranks(1, **CONFIG, local_world_size=1) as ranks:
        layer = ranks.layers[0]
        rows, given, made = torch.compile(dispatch, fullgraph=True)(layer)
        want_rows, want_given, want = dispatch(layer)
        assert type(made) is autograd.TracedDescriptor and type(want) is Descriptor
        assert torch.equal(rows, want_rows) and torch.equal(given, want_given)
        names = [n for n in dir(Descriptor) if not n.startswith("_")]
        assert {"expert_offsets", "host_expert_offsets"} <= set(names)
        for name in names:
            got, expected = getattr(made, name), getattr(want, name)
            if isinstance(expected, torch.Tensor):
                assert got.dtype == expected.dtype and torch.equal(got, expected), name
            else:
                assert got == expected, name
        made.expert_counts.zero_()  # a copy
        assert torch.equal(made.expert_counts, want.expert_counts)
        # Elsewhere it serves as well: in eager code, and the library has its own.
        combined = autograd.combine(layer, rows, made)
        assert torch.equal(combined, autograd.combine(layer, rows, want))
        assert torch.equal(layer.combine(rows, made.descriptor), combined)
        again, _, _ = autograd.dispatch(layer, 2 * x, cached=made)
        assert torch.equal(again, 2 * rows)


def test_what_the_host_knows_is_there_when_the_call_has_run():
    """Under a mode of torch, which needs the operators, and not while a compiler traces."""
    x, _, _, indices = make_inputs(0)
    known = []

    def dispatch(layer, x, indices):
        rows, _, made = autograd.dispatch(layer, x, indices)
        known.append((made.host_expert_counts, made.host_expert_offsets))
        return rows

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            return function(*arguments, **(options or {}))

    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        with Mode():
            dispatch(layer, x, indices)
        with FakeTensorMode(shape_env=ShapeEnv()) as fake:
            dispatch(layer, fake.from_tensor(x), fake.from_tensor(indices))
        want = layer.dispatch(x, indices).descriptor
        torch.compile(dispatch, fullgraph=True, backend="eager")(layer, x, indices)
    assert known[0] == (want.host_expert_counts, want.host_expert_offsets)
    assert known[1:] == [(None, None)] * 2


def test_descriptors_of_eager_code_in_compiled_code():
    x, w, _, indices = make_inputs(0)
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        rows, given, made = autograd.dispatch(layer, x, indices, weights=w, expert_alignment=2)
        descriptor = autograd.traced(layer, made)

        def model(x, rows):
            again, _, repeated = autograd.dispatch(layer, x, cached=descriptor)
            return again, autograd.combine(layer, rows, descriptor), repeated.expert_alignment

        again, out, alignment = torch.compile(model, fullgraph=True)(2 * x, rows)
        assert torch.equal(again, 2 * rows) and alignment == 2
        assert torch.equal(out, autograd.combine(layer, rows, made))


def test_the_layer_of_torch_compiles(alone):  # noqa: F811
    layer = EPAll2AllLayer(
        None, 16, HIDDEN, TOPK, 0, EXPERTS, 1, 1, dtype=torch.float32, device="cpu"
    )
    x, w, _, indices = make_inputs(0)

    def model(x, w):
        rows, given, desc = layer.dispatch(x, indices, w)
        return layer.combine(rows * rows * given[:, None], desc), desc

    def checkpointed(x, w):
        return torch.utils.checkpoint.checkpoint(lambda *a: model(*a)[0], x, w, use_reentrant=False)

    results = []
    compiled = torch.compile(model, fullgraph=True)
    for run in (model, compiled, torch.compile(checkpointed, fullgraph=True)):
        leaves = leaves_of(x, w)
        got = run(*leaves)
        out, desc = got if isinstance(got, tuple) else (got, None)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
        if run is model:
            want = desc
        elif desc is not None:
            for name in ("topk_indices_tensor", "token_dst_scatter_idx"):
                assert torch.equal(getattr(desc, name), getattr(want, name))
    for got in results[1:]:
        for one, eager in zip(got, results[0], strict=True):
            torch.testing.assert_close(one, eager)
    layer.finalize()


def test_errors_come_out_of_compiled_code():
    x, _, _, indices = make_inputs(0)

    def model(layer, x, indices):
        return autograd.dispatch(layer, x, indices, worst_case_rows=60)[0]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        with pytest.raises(ValueError, match="expert_indices: want dtype i32 or i64, got f64"):
            compiled(layer, x, indices.double())
        layer.close()
        with pytest.raises(ValueError, match="the layer is closed"):
            compiled(layer, x, indices)
