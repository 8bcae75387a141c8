"""The torch operators of expert_parallel: checks by torch, and the lifetime of their objects."""

import gc

import pytest
import torch
import winnow.torch as ops
from compiled_problem import CONFIG, EXPERTS, HIDDEN, TOPK, WORLD, compiler, leaves_of, make_inputs  # noqa: F401
from ranks import Ranks, run_all

from winnow.expert_parallel import InProcessWorld, Notifier, autograd, layout, operators

pytestmark = pytest.mark.filterwarnings("ignore")


def _operator_calls(layer):
    """(operator, arguments) of a layer of one rank."""
    x, w, b, indices = make_inputs(0)
    number, ops = layer._traced[0], torch.ops.winnow
    dispatch, combine = ops.expert_parallel_dispatch.default, ops.expert_parallel_combine.default

    def options(order="expert_major", alignment=1, worst_case_rows=0, copy_out=False):
        return None, number, TOPK, indices, None, None, order, alignment, worst_case_rows, copy_out

    leaves = leaves_of(x, w, b)
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
        "combine with gradients": (combine, (*leaves_of(rows, given), leaves[2], *tail)),
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
    x, w, _, indices = make_inputs(0)
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
        *_, indices = make_inputs(rank)
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
    counts = layout(make_inputs(0)[-1], EXPERTS, 1, 1)
    arguments = (*counts, None, notifier._traced, 3, 4, 0)
    torch.library.opcheck(torch.ops.winnow.expert_parallel_notify.default, arguments)


def test_a_descriptor_lives_as_long_as_the_memory_of_its_handle():
    x, _, _, indices = make_inputs(0)
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
    x, w, _, indices = make_inputs(0)
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
    with pytest.raises(ValueError, match="want a layer or notifier that still exists, got one"):
        operators._living(number)
