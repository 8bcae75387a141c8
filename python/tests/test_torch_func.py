"""The torch operators in torch.func: what it gives is what autograd gives, or an error."""

import problems
import pytest
import torch
import winnow.torch as ops
from test_indexer_torch import problem

# torch's own, at the first torch.func.jvp of a process.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")


def _losses():
    """By the names of the operators of the forward and of the backward pass: a function of tensors,
    and those."""
    (q, kv, rows), _ = problems.of_torch()
    iq, k, weights, indices = problem()
    target = torch.linspace(0, 1, 200).reshape(5, 40)
    scores = {"deterministic": True}
    return {
        ("sparse_mla_forward", "sparse_mla_backward"): (
            lambda q, kv: ops.sparse_mla_attention(q, kv, rows, deterministic=True).square().sum(),
            (q, kv),
        ),
        ("indexer_scores", "indexer_backward"): (
            lambda *leaves: ops.indexer_scores(*leaves, **scores).square().sum(),
            (iq, k, weights),
        ),
        ("indexer_loss_rows", "indexer_loss_backward"): (
            lambda *leaves: ops.indexer_loss(*leaves, target),
            (iq, k, weights),
        ),
    }


def _gradients():
    """By operator: the first gradient that a function of one tensor gives, and the tensor."""
    (q, kv, rows), _ = problems.of_torch()
    out, _, lse = ops.sparse_mla_forward(q, kv, rows)
    iq, k, weights, indices = problem()
    d_scores = torch.linspace(-1, 1, 45).reshape(5, 9)
    return {
        "sparse_mla_backward": (
            lambda q: ops.sparse_mla_backward(q, kv, rows, out, lse, out)[0],
            q,
        ),
        "indexer_backward": (
            lambda q: ops.indexer_backward(q, k, weights, indices, d_scores)[0],
            iq,
        ),
    }


def _named(calls):
    return [
        pytest.param(*call, id=name if isinstance(name, str) else name[0])
        for name, call in calls.items()
    ]


@pytest.mark.parametrize(("loss", "values"), _named(_losses()))
def test_gradients_are_those_of_autograd(loss, values):
    leaves = [value.clone().requires_grad_() for value in values]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    every = tuple(range(len(values)))
    assert all(map(torch.equal, torch.func.grad(loss, every)(*values), wanted))
    value, pull = torch.func.vjp(loss, *values)
    assert all(map(torch.equal, pull(torch.ones_like(value)), wanted))


def test_the_loss_of_an_indexer_through_functional_call():
    q, k, weights, _ = problem()
    target = torch.linspace(0, 1, 200).reshape(5, 40)
    module = torch.nn.Linear(64, 64)

    def loss(parameters):
        return ops.indexer_loss(
            torch.func.functional_call(module, parameters, (q,)), k, weights, target
        )

    parameters = dict(module.named_parameters())
    wanted = torch.autograd.grad(loss(parameters), list(parameters.values()))
    assert all(map(torch.equal, torch.func.grad(loss)(parameters).values(), wanted))


@pytest.mark.parametrize("operators", _losses(), ids=lambda names: names[0])
def test_second_derivatives_are_errors_that_name_the_operator(operators):
    """They were zero: the outer one of two transforms recorded nothing."""
    forward, backward = operators
    loss, (first, *others) = _losses()[operators]

    def gradient(value):
        return torch.func.grad(lambda value: loss(value, *others))(value)

    with pytest.raises(RuntimeError, match=f"{backward} has no gradient; detach"):
        torch.func.grad(lambda value: gradient(value).square().sum())(first)
    with pytest.raises(RuntimeError, match=f"{forward} has no forward-mode derivative"):
        torch.func.jvp(gradient, (first,), (first,))


@pytest.mark.parametrize("name", _gradients())
def test_gradients_have_no_derivative_in_any_transform(name):
    call, value = _gradients()[name]
    with pytest.raises(RuntimeError, match=f"{name} has no gradient; detach"):
        torch.func.grad(lambda value: call(value).sum())(value)
    result, pull = torch.func.vjp(call, value)
    with pytest.raises(RuntimeError, match=f"{name} has no gradient; detach"):
        pull(result)
    with pytest.raises(RuntimeError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(call, (value,), (value,))


@pytest.mark.parametrize("name", ["indexer_loss_rows"])
def test_the_loss_has_no_forward_mode_derivative(name):
    loss, (q, *others) = _losses()[name, "indexer_loss_backward"]
    with pytest.raises(RuntimeError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(lambda q: loss(q, *others), (q,), (q,))


@pytest.mark.filterwarnings("ignore:.*batching rule.*")
@pytest.mark.parametrize(("call", "value"), _named(_gradients()))
def test_vmap_calls_an_operator_for_each_sample(call, value):
    values = torch.stack([value, 2 * value])
    wanted = [call(value) for value in values]
    assert all(map(torch.equal, torch.vmap(call)(values), wanted))
