"""dispatch and combine as functions of torch: gradients against the same sums on one rank. What
they refuse, test_expert_refusals.py has."""

import numpy as np
import pytest
import torch
from ranks import Ranks

from winnow.expert_parallel import autograd

WORLD, HIDDEN, TOPK, EXPERTS = 4, 16, 3, 8
CONFIG = {"max_tokens": 8, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS}
TOKENS = [5, 0, 8, 3]


def _problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(n, HIDDEN, generator=generator) for n in TOKENS]
    scores = [torch.rand(n, TOPK, generator=generator) for n in TOKENS]
    indices = [torch.randint(-1, EXPERTS + 1, (n, TOPK), generator=generator) for n in TOKENS]
    bias = [torch.randn(n, HIDDEN, generator=generator) for n in TOKENS]
    weigh = [torch.randn(n, HIDDEN, generator=generator) for n in TOKENS]
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)
    return tokens, scores, [i.int() for i in indices], bias, weigh, experts


def _leaf(tensor):
    return tensor.clone().requires_grad_()


def _want(tokens, scores, indices, bias, weigh, experts):
    """The gradients of sum(weigh * out) in float64, where all experts are at hand."""
    leaves = [[_leaf(t.double()) for t in group] for group in (tokens, scores, bias)]
    experts = _leaf(experts.double())
    total = torch.zeros((), dtype=torch.double)
    for x, w, b, i, g in zip(*leaves, indices, weigh, strict=True):
        for t, k in np.ndindex(*i.shape):
            if 0 <= i[t, k] < EXPERTS:
                total = total + (x[t] @ experts[i[t, k]] * w[t, k] * g[t].double()).sum()
        total = total + (b * g.double()).sum()
    total.backward()
    x, w, b = ([t.grad if t.grad is not None else torch.zeros_like(t) for t in g] for g in leaves)
    return x, w, b, experts.grad


MODES = {
    "weighted by the caller": ({}, False),
    "weighted by the library": ({}, True),
    "padded": ({"expert_alignment": 8}, True),
    "own memory": ({"copy_out": True}, False),
    "fixed size": ({"worst_case_rows": 40}, True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("local", [4, 2])
def test_a_mixture_of_experts_has_the_gradients_of_its_formula(mode, local):
    options, by_library = MODES[mode]
    problem = _problem()
    tokens, scores, indices, bias, weigh, experts = problem
    x_want, w_want, b_want, e_want = _want(*problem)

    def body(layer, rank):
        x, w, b = _leaf(tokens[rank]), _leaf(scores[rank]), _leaf(bias[rank])
        mine = _leaf(experts[2 * rank : 2 * rank + 2])
        output, given, descriptor = autograd.dispatch(layer, x, indices[rank], weights=w, **options)
        # The local expert of each row; padding counts to the expert before it.
        owner = torch.repeat_interleave(descriptor.expert_offsets.diff().long())
        rows = torch.einsum("rh,rhj->rj", output[: len(owner)], mine[owner])
        if "worst_case_rows" in options:
            unused = len(output) - len(owner)
            rows = torch.cat([rows, torch.full((unused, HIDDEN), float("nan"))])
        if by_library:
            out = autograd.combine(layer, rows, descriptor, weights=given, bias=b)
        else:
            out = autograd.combine(layer, rows * given[:, None], descriptor, bias=b)
        (out * weigh[rank]).sum().backward()
        for got, want in (
            (x, x_want[rank]),
            (w, w_want[rank]),
            (b, b_want[rank]),
            (mine, e_want[2 * rank : 2 * rank + 2]),
        ):
            torch.testing.assert_close(got.grad.double(), want, rtol=1e-4, atol=1e-4)

    with Ranks(WORLD, **CONFIG, dtype="float32", local_world_size=local) as ranks:
        ranks.run(body)


def test_token_major_rows_have_gradients():
    tokens, scores, indices, _, weigh, _ = _problem(1)

    def body(layer, rank):
        x, w = _leaf(tokens[rank]), _leaf(scores[rank])
        output, given, descriptor = autograd.dispatch(
            layer, x, indices[rank], weights=w, order="token_major"
        )
        # Expert-free: a row counts as often as its weights say, and once more by its square.
        out = autograd.combine(layer, output * given.sum(1)[:, None], descriptor)
        (out * weigh[rank]).sum().backward()
        kept = (indices[rank] >= 0) & (indices[rank] < EXPERTS)
        want_x = weigh[rank] * (scores[rank] * kept).sum(1)[:, None]
        want_w = (tokens[rank] * weigh[rank]).sum(1)[:, None] * kept
        torch.testing.assert_close(x.grad, want_x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w.grad, want_w, rtol=1e-4, atol=1e-4)

    with Ranks(WORLD, **CONFIG, dtype="float32", local_world_size=2) as ranks:
        ranks.run(body)


def test_each_is_the_adjoint_of_the_other():
    """<dispatch(x), y> = <x, combine(y)>, for whole numbers exactly, and twice differentiable."""
    _, _, indices, _, _, _ = _problem(2)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(-9, 9, (n, HIDDEN), generator=generator).float() for n in TOKENS]

    def body(layer, rank):
        x = _leaf(tokens[rank])
        output, none, descriptor = autograd.dispatch(layer, x, indices[rank])
        assert none is None
        y = torch.randint(-9, 9, output.shape, generator=torch.Generator().manual_seed(rank))
        y = _leaf(y.float())
        back = autograd.combine(layer, y, descriptor)
        (d_x,) = torch.autograd.grad(output, x, y, create_graph=True)
        assert torch.equal(d_x, back)
        (twice,) = torch.autograd.grad(d_x, y, x)
        assert torch.equal(twice, output)
        return (output * y).sum().item(), (x * back).sum().item()

    with Ranks(WORLD, **CONFIG, dtype="float32", local_world_size=2) as ranks:
        sums = np.array(ranks.run(body))
    assert sums[:, 0].sum() == sums[:, 1].sum()


def test_rows_without_a_token_get_no_gradient():
    _, _, indices, _, _, _ = _problem()

    def body(layer, rank):
        tokens = torch.zeros(TOKENS[rank], HIDDEN)
        got = layer.dispatch(tokens, indices[rank], worst_case_rows=40)
        rows = torch.zeros(40, HIDDEN, requires_grad=True)
        out = autograd.combine(layer, rows, got.descriptor)
        # What the memory for the gradient holds.
        everywhere = torch.arange(24).view(8, 3).int() % EXPERTS
        kept = [layer.dispatch(torch.full((8, HIDDEN), float("nan")), everywhere) for _ in range(9)]
        kept.clear()
        out.sum().backward()  # an expanded gradient
        count = got.descriptor.wanted_rows
        assert (rows.grad[:count] == 1).all() and (rows.grad[count:] == 0).all()

    with Ranks(WORLD, **CONFIG, dtype="float32", local_world_size=2) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("order", ["expert_major", "token_major"])
def test_gradients_of_weights_travel_bit_for_bit(dtype, order):
    """Also through rows of 16-bit numbers, and where the bytes of K weights exceed a row."""
    topk, experts = 6, 8
    rng = np.random.default_rng(1)
    indices = [torch.from_numpy(rng.integers(-1, experts + 1, (n, topk)).astype(np.int32))
               for n in TOKENS]  # fmt: skip
    # Any bits are possible, but for NaNs, which do not compare.
    bits = [rng.integers(0, 2**32, (n, topk), dtype=np.uint32) for n in TOKENS]
    gradients = [torch.from_numpy(np.nan_to_num(b.view(np.float32), nan=-0.0)) for b in bits]

    def body(layer, rank):
        w = _leaf(torch.zeros(TOKENS[rank], topk))
        x = torch.zeros(TOKENS[rank], HIDDEN, dtype=getattr(torch, dtype))
        _, given, _ = autograd.dispatch(layer, x, indices[rank], weights=w, order=order)
        # The gradient of a row is that of its pair: known at the source, carried here as weights.
        _, there, _ = autograd.dispatch(
            layer, x, indices[rank], weights=gradients[rank], order=order
        )
        given.backward(there)
        kept = (indices[rank] >= 0) & (indices[rank] < experts)
        want = torch.where(kept, gradients[rank], torch.zeros(()))
        assert torch.equal(w.grad.view(torch.int32), want.view(torch.int32))

    config = {**CONFIG, "topk": topk, "experts": experts, "dtype": dtype}
    with Ranks(WORLD, **config, local_world_size=2) as ranks:
        ranks.run(body)


def test_gradients_of_gradients_of_weights_are_refused():
    def body(layer, rank):
        w = _leaf(torch.ones(2, TOPK))
        x = torch.ones(2, HIDDEN)
        _, given, _ = autograd.dispatch(layer, x, torch.zeros(2, TOPK).int(), weights=w)
        (d_w,) = torch.autograd.grad((given * given).sum(), w, create_graph=True)
        with pytest.raises(RuntimeError, match="the gradient of weights has no gradient"):
            d_w.sum().backward()

    with Ranks(1, **CONFIG, dtype="float32") as ranks:
        ranks.run(body)


def test_plain_calls_record_no_gradient():
    x = torch.ones(2, HIDDEN, requires_grad=True)
    indices = torch.zeros(2, TOPK).int()
    with Ranks(1, **CONFIG, dtype="float32") as ranks:
        layer = ranks.layers[0]
        with pytest.raises(ValueError, match="winnow.expert_parallel.autograd"):
            layer.dispatch(x, indices)
        with torch.no_grad():
            assert not layer.dispatch(x, indices).output.requires_grad


def test_rows_written_to_combine_buffer_keep_their_gradient():
    """Later combines of the descriptor, those of the backward pass too, write there."""
    tokens, scores, indices, *_ = _problem(4)

    def body(layer, rank):
        x, w = _leaf(tokens[rank]), _leaf(scores[rank])
        rows, given, descriptor = autograd.dispatch(layer, x, indices[rank], weights=w)
        buffer = layer.combine_buffer(descriptor)
        buffer.copy_(rows * 3)
        out = autograd.combine(layer, buffer, descriptor, weights=given)
        layer.combine(torch.zeros_like(rows), descriptor)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        kept = (indices[rank] >= 0) & (indices[rank] < EXPERTS)
        want = 6 * tokens[rank].sum(1)[:, None] * kept
        torch.testing.assert_close(w.grad, want, rtol=1e-4, atol=1e-4)

    with Ranks(WORLD, **CONFIG, dtype="float32", local_world_size=2) as ranks:
        ranks.run(body)


def test_outputs_want_a_gradient_where_their_inputs_do():
    tokens, scores, indices, *_ = _problem(5)

    def body(layer, rank):
        for of_input, of_weights in [(True, True), (True, False), (False, True), (False, False)]:
            x = tokens[rank].clone().requires_grad_(of_input)
            w = scores[rank].clone().requires_grad_(of_weights)
            rows, given, _ = autograd.dispatch(layer, x, indices[rank], weights=w)
            assert (rows.requires_grad, given.requires_grad) == (of_input, of_weights)

    with Ranks(WORLD, **CONFIG, dtype="float32", local_world_size=2) as ranks:
        ranks.run(body)


def test_a_rank_alone_hears_which_argument_it_is():
    tokens, _, indices, *_ = _problem()
    with Ranks(1, **CONFIG, dtype="float32") as ranks:
        with pytest.raises(ValueError, match="out: want none with gradients") as refused:
            autograd.dispatch(ranks.layers[0], tokens[0], indices[0], out=tokens[0])
    error = refused.value
    assert (error.argument, error.wanted, error.got) == ("out", "none with gradients", "one")


class _Mixture(torch.nn.Module):
    """One expert a rank, and a router's scores as they come."""

    def __init__(self, layer, weight):
        super().__init__()
        self.layer, self.weight = layer, torch.nn.Parameter(weight)

    def forward(self, x, indices, scores):
        rows, given, descriptor = autograd.dispatch(self.layer, x, indices, weights=scores)
        return autograd.combine(self.layer, rows @ self.weight, descriptor, weights=given)


def _losses_of_two_ranks():
    """For two ranks: the experts' weights, the routing, the tokens and the scores."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(2, HIDDEN, HIDDEN, generator=generator)
    indices = torch.tensor([[0, 1], [1, 0], [1, 2]], dtype=torch.int32)
    x = torch.randn(2, 3, HIDDEN, generator=generator)
    scores = torch.rand(2, 3, 2, generator=generator)
    return weights, indices, x, scores


def test_torch_func_and_functional_call_give_the_gradients_of_autograd():
    weights, indices, x, scores = _losses_of_two_ranks()

    def body(layer, rank):
        module = _Mixture(layer, weights[rank])

        def loss(parameters, x, scores):
            out = torch.func.functional_call(module, parameters, (x, indices, scores))
            return out.square().sum()

        leaves = _leaf(x[rank]), _leaf(scores[rank])
        module(leaves[0], indices, leaves[1]).square().sum().backward()
        want = (module.weight.grad, leaves[0].grad, leaves[1].grad)
        parameters = {"weight": weights[rank]}
        got = torch.func.grad(loss, argnums=(0, 1, 2))(parameters, x[rank], scores[rank])
        value, pull = torch.func.vjp(lambda x: loss(parameters, x, scores[rank]), x[rank])
        return want, (got[0]["weight"], *got[1:]), pull(torch.ones_like(value))[0]

    config = {"max_tokens": 3, "hidden": HIDDEN, "topk": 2, "experts": 2, "dtype": "f32"}
    with Ranks(2, **config) as ranks:
        results = ranks.run(body)
    for want, got, pulled in results:
        for expected, gradient in zip(want, got, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
        torch.testing.assert_close(pulled, want[1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_forward_mode_is_an_error():
    weights, indices, x, scores = _losses_of_two_ranks()

    def body(layer, rank):
        def moved(x):
            return autograd.dispatch(layer, x, indices, weights=scores[0])[0]

        with pytest.raises(RuntimeError, match="dispatch.* forward-mode derivative"):
            torch.func.jvp(moved, (x[0],), (x[0],))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x[0], x[0])
            with pytest.raises(RuntimeError, match="dispatch.* forward-mode derivative"):
                moved(dual)

    with Ranks(1, max_tokens=3, hidden=HIDDEN, topk=2, experts=2, dtype="f32") as ranks:
        ranks.run(body)


def test_second_derivatives_through_nested_transforms_are_those_of_autograd():
    weights, indices, x, scores = _losses_of_two_ranks()

    def body(layer, rank):
        def loss(x):
            rows, _ = autograd.dispatch(layer, x, indices, weights=scores[0])[:2]
            return rows.square().square().sum()

        leaf = _leaf(x[0])
        (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        (want,) = torch.autograd.grad(gradient.square().sum(), leaf)
        got = torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x[0])
        return want, got

    with Ranks(1, max_tokens=3, hidden=HIDDEN, topk=2, experts=2, dtype="f32") as ranks:
        ((want, got),) = ranks.run(body)
    assert want.abs().max() > 0
    torch.testing.assert_close(got, want, rtol=0, atol=0)
