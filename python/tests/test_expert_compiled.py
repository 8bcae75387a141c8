"""dispatch and combine in torch.compile(fullgraph=True), and as operators."""

import gc

import pytest
import torch
import winnow.torch as ops
from expert_launch import alone  # noqa: F401
from ranks import Ranks, run_all, run_each
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from winnow.expert_parallel import (
    Descriptor,
    EPAll2AllLayer,
    InProcessWorld,
    Notifier,
    autograd,
    layout,
    operators,
)

WORLD, HIDDEN, TOPK, EXPERTS = 2, 16, 3, 8
CONFIG = {"max_tokens": 16, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "dtype": "float32"}
TOKENS = [7, 4]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A fresh one. Tracing on a second thread crashes torch 2.11 where CUDA finds no GPU, in what
    this leaves out."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def _inputs(rank, seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    tokens = tokens[rank]
    return (
        torch.randn(tokens, HIDDEN, generator=generator),
        torch.rand(tokens, TOPK, generator=generator),
        torch.randn(tokens, HIDDEN, generator=generator),
        torch.randint(-1, EXPERTS + 1, (tokens, TOPK), generator=generator).int(),
    )


def _leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


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
        for inputs in problems:
            *values, indices = inputs(rank)
            results = []
            for run in (model, compiled):
                leaves = _leaves(*values)
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
    _compare(*MODES[mode], [lambda rank, seed=seed: _inputs(rank, seed) for seed in range(2)])


@pytest.mark.parametrize("mode", ["counted", "twice"])
def test_a_rank_without_tokens_calls_like_the_others(mode):
    """Also where nobody reads what it gets: nothing is added to nothing."""
    tokens = [(3, 0), (0, 4), (1, 1)]
    _compare(*MODES[mode], [lambda rank, n=n: _inputs(rank, tokens=n) for n in tokens])


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
    *values, indices = _inputs(0)
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        compiled = torch.compile(_twice, fullgraph=True, backend=backend)
        out = compiled(layer, *_leaves(*values), indices, worst_case_rows=60)
        out.sum().backward()
    for graph, count in zip(graphs, (6, 7), strict=True):
        calls = _follows(graph)
        assert len(calls) == count
        assert [before for _, before in calls] == [None, *(node for node, _ in calls[:-1])]


def test_a_traced_descriptor_has_the_attributes_of_a_descriptor():
    x, w, _, indices = _inputs(0)

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
    x, _, _, indices = _inputs(0)
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
    x, w, _, indices = _inputs(0)
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
    x, w, _, indices = _inputs(0)

    def model(x, w):
        rows, given, desc = layer.dispatch(x, indices, w)
        return layer.combine(rows * rows * given[:, None], desc), desc

    def checkpointed(x, w):
        return torch.utils.checkpoint.checkpoint(lambda *a: model(*a)[0], x, w, use_reentrant=False)

    results = []
    compiled = torch.compile(model, fullgraph=True)
    for run in (model, compiled, torch.compile(checkpointed, fullgraph=True)):
        leaves = _leaves(x, w)
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
    x, _, _, indices = _inputs(0)

    def model(layer, x, indices):
        return autograd.dispatch(layer, x, indices, worst_case_rows=60)[0]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        with pytest.raises(ValueError, match="expert_indices: want dtype i32, got i64"):
            compiled(layer, x, indices.long())
        layer.close()
        with pytest.raises(ValueError, match="the layer is closed"):
            compiled(layer, x, indices)


# ---- operators


def _operator_calls(layer):
    """(operator, arguments) of a layer of one rank."""
    x, w, b, indices = _inputs(0)
    number, ops = layer._traced[0], torch.ops.winnow
    dispatch, combine = ops.expert_parallel_dispatch.default, ops.expert_parallel_combine.default

    def options(order="expert_major", alignment=1, worst_case_rows=0, copy_out=False):
        return None, number, TOPK, indices, None, None, order, alignment, worst_case_rows, copy_out

    leaves = _leaves(x, w, b)
    rows, given, _, _, handle = dispatch(x, w, *options(), None)
    repeat = (None, number, TOPK, None, None, None, "expert_major", 1, 0, False, handle, len(rows))
    tail = (None, number, TOPK, len(x), handle)
    fp8 = x.to(torch.float8_e4m3fn), torch.ones(len(x), 1)
    return {
        "fixed size": (dispatch, (x, w, *options(worst_case_rows=len(rows)), None)),
        "counted": (dispatch, (x, None, *options(copy_out=True), None)),
        "with gradients": (dispatch, (leaves[0], leaves[1], *options(), None)),
        "token major": (dispatch, (leaves[0], leaves[1], *options("token_major"), None)),
        "repeated": (dispatch, (leaves[0], leaves[1], *repeat)),
        "a gradient": (dispatch, (x, None, *repeat, True)),
        "float8": (
            dispatch,
            (fp8[0], None, None, number, TOPK, indices, fp8[1], None, "expert_major", 1, 0, False,
             None),
        ),
        "combine": (combine, (rows, None, None, *tail)),
        "combine with gradients": (combine, (*_leaves(rows, given), leaves[2], *tail)),
        "weight gradient": (
            ops.expert_parallel_weight_gradient.default,
            (given, None, number, TOPK, len(x), handle),
        ),
        "table": (
            ops.expert_parallel_table.default,
            (handle, "expert_offsets", (EXPERTS + 1,), torch.int32, torch.device("cpu")),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "fixed size", "counted", "with gradients", "token major", "repeated", "a gradient",
        "float8", "combine", "combine with gradients", "weight gradient", "table",
    ],
)  # fmt: skip
def test_opcheck(name, monkeypatch):
    with Ranks(1, **CONFIG) as ranks:
        operator, arguments = _operator_calls(ranks.layers[0])[name]
        if "dispatch" not in operator.name():
            torch.library.opcheck(operator, arguments)
            return
        if name == "float8":  # torch compares none
            torch.library.opcheck(operator, arguments, test_utils="test_faketensor")
            return
        # Every call has a handle with a number of its own: what is compared leaves it out.
        compare, compared = torch.testing.assert_close, []

        def without_handle(got, want, **options):
            if isinstance(got, (tuple, list)) and len(got) == len(want) == 5:
                assert got[4].dtype == want[4].dtype and got[4].shape == want[4].shape
                got, want = got[:4], want[:4]
                compared.append(want[0])
            compare(got, want, **options)

        monkeypatch.setattr(torch.testing, "assert_close", without_handle)
        torch.library.opcheck(operator, arguments)
        assert compared and all(len(rows) > 0 for rows in compared)


def test_operators_give_everything():
    x, w, _, indices = _inputs(0)
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        got = ops.expert_parallel_dispatch(layer, x, indices, weights=w, order="token_major")
        want = layer.dispatch(x, indices, weights=w, order="token_major")
        for name in ("output", "weights", "expert_ids"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert got.scales is None and got.descriptor.order == "token_major"
        out = ops.expert_parallel_combine(layer, got.output, got.descriptor)
        assert torch.equal(out, layer.combine(want.output, want.descriptor))
    with Ranks(1, **{**CONFIG, "dtype": "bfloat16"}) as ranks:
        layer, scales = ranks.layers[0], torch.rand(len(x), 1)

        def model(x, scales):
            return ops.expert_parallel_dispatch(layer, x, indices, scales=scales)

        fp8 = x.to(torch.float8_e4m3fn)
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(fp8, scales)
        want = layer.dispatch(fp8, indices, scales=scales)
        assert torch.equal(got.output.view(torch.uint8), want.output.view(torch.uint8))
        assert torch.equal(got.scales, want.scales) and got.weights is None


def test_notify_compiles():
    world = InProcessWorld(WORLD)

    def model(notifier, indices):
        counts = ops.expert_parallel_layout(indices, EXPERTS, WORLD, 1)
        return ops.expert_parallel_notify(notifier, *counts, channels=3, expert_alignment=4)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def body(rank):
        notifier = Notifier(
            world.transport(rank), world.store(), experts=EXPERTS, local_world_size=1, timeout=60
        )
        *_, indices = _inputs(rank)
        got = compiled(notifier, indices)
        counts = layout(indices, EXPERTS, WORLD, 1)
        want = notifier.notify(*counts, channels=3, expert_alignment=4)
        assert isinstance(got, operators.Notified)
        for name in got._fields:
            assert torch.equal(getattr(got, name), getattr(want, name)), name

    run_all(WORLD, body)


def test_opcheck_notify():
    world = InProcessWorld(1)
    notifier = Notifier(world.transport(0), world.store(), experts=EXPERTS)
    counts = layout(_inputs(0)[-1], EXPERTS, 1, 1)
    arguments = (*counts, None, notifier._traced, 3, 4, 0)
    torch.library.opcheck(torch.ops.winnow.expert_parallel_notify.default, arguments)


def test_a_descriptor_lives_as_long_as_the_memory_of_its_handle():
    x, _, _, indices = _inputs(0)
    with Ranks(1, **CONFIG) as ranks:
        layer = ranks.layers[0]
        made = layer.dispatch(x, indices).descriptor
        handle = operators.handle_of(layer, made)
        copy = handle.clone()
        assert operators.descriptor_of(copy) is made
        (number,) = operators._kept
        for other in (handle.detach(), handle.view(1, 1), handle[:]):
            del handle
            gc.collect()
            assert operators.descriptor_of(other) is made
            handle = other
        storage = handle.untyped_storage()
        del handle, other
        gc.collect()
        assert list(operators._kept) == [number]
        del storage
        gc.collect()
        assert not operators._kept
        with pytest.raises(ValueError, match="descriptor: want one that still exists"):
            operators.descriptor_of(copy)


def test_a_backward_pass_keeps_what_it_needs():
    """The layer too, when nobody else has it."""
    x, w, _, indices = _inputs(0)
    leaf = x.clone().requires_grad_()

    def model(layer, x):
        rows, _, descriptor = autograd.dispatch(layer, x, indices, worst_case_rows=60)
        return autograd.combine(layer, 2 * rows, descriptor)

    ranks = Ranks(1, **CONFIG)
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(ranks.layers[0], leaf)
    number = ranks.layers[0]._traced[0]
    del ranks
    gc.collect()
    out.sum().backward()
    kept = ((indices >= 0) & (indices < EXPERTS)).sum(1, keepdim=True)
    assert torch.equal(leaf.grad, 2.0 * kept.expand(-1, HIDDEN))
    del out
    torch._dynamo.reset()
    gc.collect()
    assert not operators._kept
    with pytest.raises(ValueError, match="want a layer that still exists, got one that was freed"):
        operators._living(number)


def test_fake_tensors_run_nothing():
    with Ranks(1, **CONFIG) as ranks, FakeTensorMode(shape_env=ShapeEnv()):
        layer = ranks.layers[0]
        x = torch.empty(7, HIDDEN, requires_grad=True)
        indices = torch.empty(7, TOPK, dtype=torch.int32)
        rows, _, descriptor = autograd.dispatch(layer, x, indices, worst_case_rows=60)
        out = autograd.combine(layer, rows, descriptor)
        assert rows.shape == (60, HIDDEN) and out.shape == x.shape
        assert descriptor.expert_offsets.shape == (EXPERTS + 1,)
        out.sum().backward()
        assert x.grad.shape == x.shape
        rows = autograd.dispatch(layer, x, indices)[0]
        assert isinstance(rows.shape[0], torch.SymInt) and rows.shape[1] == HIDDEN
