"""The lightning indexer's torch operators: gradients, torch.compile, and quantize."""

import numpy as np
import pytest
import torch
import winnow.torch as ops
from compiled import assert_compiles, assert_replays
from kinds import DEVICES, gpu

import winnow


def problem(s_q=5, h=3, s_k=40, d=64, topk=9, seed=0, device="cpu", dtype=torch.float32):
    """q, k and weights, and indices of which some name no row."""
    made = torch.Generator().manual_seed(seed)
    q, k = torch.randn(s_q, h, d, generator=made), torch.randn(s_k, d, generator=made)
    weights = torch.randn(s_q, h, generator=made)
    indices = torch.randint(-2, s_k + 2, (s_q, topk), generator=made, dtype=torch.int32)
    return (
        q.to(device, dtype), k.to(device, dtype), weights.to(device), indices.to(device),
    )  # fmt: skip


def formula(q, k, weights, indices=None, start=0, end=None):
    """The scores in double precision; autograd differentiates them."""
    s_k = k.shape[0]
    dots = torch.einsum("ihd,td->iht", q.double(), k.double()).relu()
    scores = torch.einsum("ih,iht->it", weights.double(), dots)
    rows = torch.arange(s_k, device=q.device).expand(scores.shape)
    hidden = (rows < start) | (rows >= (s_k if end is None else end))
    scores = scores.masked_fill(hidden, -torch.inf)
    if indices is None:
        return scores
    absent = (indices < 0) | (indices >= s_k)
    return scores.gather(1, indices.clamp(0, s_k - 1).long()).masked_fill(absent, -torch.inf)


@pytest.mark.parametrize("dense", [False, True])
def test_gradients_of_scores(dense):
    q, k, weights, indices = problem()
    indices = None if dense else indices
    end = torch.tensor([40, 9, 33, 0, 25], dtype=torch.int32)
    results = []
    for scores in (
        lambda *leaves: formula(*leaves, indices, end=end[:, None]),
        lambda *leaves: ops.indexer_scores(*leaves, indices, key_end=end),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, weights)]
        found = scores(*leaves)
        torch.where(found.isinf(), 0, found).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_gradients_of_scores_from_each_querys_first_row_on():
    q, k, weights, _ = problem()
    starts, width = torch.tensor([-3, 0, 7, 39, 2**31 - 1], dtype=torch.int32), 12
    end = torch.tensor([40, 9, 33, 40, 25], dtype=torch.int32)
    rows = starts.long()[:, None] + torch.arange(width)
    results = []
    for scores in (
        lambda *leaves: formula(*leaves, rows.clamp(-1, len(k)), end=end[:, None]),
        lambda *leaves: ops.indexer_scores(*leaves, key_start=starts, key_end=end, width=width),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, weights)]
        found = scores(*leaves)
        torch.where(found.isinf(), 0, found).square().sum().backward()
        results.append([found.detach().float(), *(leaf.grad for leaf in leaves)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_the_choice_may_be_made_of_leaves_but_its_scores_have_no_gradient():
    q, k, weights, _ = problem()
    q.requires_grad_()
    indices, length = ops.indexer_topk(q, k, weights, 4)
    assert not indices.requires_grad and not length.requires_grad
    _, _, scores = ops.indexer_topk(q, k, weights, 4, return_scores=True)
    with pytest.raises(RuntimeError, match="winnow::indexer_topk has no gradient"):
        scores.sum().backward()


def test_bfloat16_leaves_get_gradients_of_their_dtypes():
    q, k, weights, indices = problem(dtype=torch.bfloat16)
    leaves = [q.requires_grad_(), k.requires_grad_(), weights.bfloat16().requires_grad_()]
    scores = ops.indexer_scores(*leaves, indices)
    torch.where(scores.isinf(), 0, scores).sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16] * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_with_gradients_in_one_graph(device):
    """Everything is in one function, since a compilation takes long."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, weights, _ = problem(device=device, dtype=dtype)
    attention = (
        torch.randn(5, 2, 512, device=device, dtype=dtype),
        torch.randn(40, 1, 512, device=device, dtype=dtype),
    )
    end = torch.full((5,), 33, dtype=torch.int32, device=device)

    def model(q, k, weights):
        indices, length = ops.indexer_topk(2 * q, k, weights, 6, key_end=end)
        scores = ops.indexer_scores(2 * q, k, weights, indices)
        out, lse = ops.sparse_mla_attention(
            *attention, indices[:, None], topk_length=length, return_lse=True
        )
        rows, scale = ops.indexer_quantize(k.detach())
        teacher = (*attention, lse, None, None)
        loss = ops.indexer_loss(2 * q, k, weights, indices=indices, attention=teacher, key_end=end)
        loss = loss + ops.indexer_loss(q, k, weights, scores.new_ones(5, 40), key_end=end)
        return loss + scores.square().sum() + out.float().sum(), rows.float().sum() + scale.sum()

    assert_compiles(model, (q, k, weights), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@gpu[1]
def test_a_training_step_in_a_graph():
    q, k, weights, _ = problem(s_q=130, h=16, s_k=3000, d=128, device="cuda", dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, weights)]
    kv = torch.randn(3000, 1, 576, device="cuda").bfloat16()
    attention_q = torch.randn(130, 16, 576, device="cuda").bfloat16()

    def step():
        indices, length = ops.indexer_topk(*leaves, 256, q_start=2870)
        _, lse = ops.sparse_mla_attention(
            attention_q, kv, indices[:, None], topk_length=length, return_lse=True
        )
        teacher = (attention_q, kv, lse, None, None)
        loss = ops.indexer_loss(*leaves, indices=indices, attention=teacher, chunk=50)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    torch.use_deterministic_algorithms(True)
    try:
        assert_replays(step, lambda: q.mul_(1.5))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- quantize


def _quantized(x, power_of_two):
    """The formula, by torch's own conversion."""
    scale = x.abs().amax(-1).clamp(min=1e-4) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantize(power_of_two, device):
    x = (
        torch.randn(7, 3, 128, device=device)
        * torch.logspace(-6, 6, 7, device=device)[:, None, None]
    )
    rows, scale = winnow.indexer.quantize(x, power_of_two=power_of_two)
    # On a GPU torch divides by a number as it multiplies with its inverse, which rounds twice.
    want_rows, want_scale = _quantized(x.cpu(), power_of_two)
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(rows.cpu().view(torch.uint8), want_rows.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_quantize_into_pages(device):
    x = torch.randn(100, 64, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(192, device=device)[:100]
    pages = torch.zeros(3, 64 * 68, dtype=torch.uint8, device=device)
    ops.indexer_quantize_pages(x, pages, slots)
    rows, scale = winnow.indexer.quantize(x)
    elements = pages[:, : 64 * 64].reshape(192, 64)
    scales = pages[:, 64 * 64 :].reshape(192, 4).view(torch.float32)[:, 0]
    assert torch.equal(elements[slots], rows.view(torch.uint8))
    assert torch.equal(scales[slots], scale)
    assert int((scales != 0).sum()) == 100


def test_quantize_numpy_needs_rows():
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    rows, scale = winnow.indexer.quantize(x, out=(np.empty((3, 64), np.uint8), None))
    want, want_scale = winnow.indexer.quantize(torch.from_numpy(x))
    np.testing.assert_array_equal(rows, want.view(torch.uint8).numpy())
    np.testing.assert_array_equal(scale, want_scale.numpy())
    with pytest.raises(
        ValueError,
        match="^indexer::quantize: numpy has no float8_e4m3fn, which the result has: pass tensors "
        "of torch, or out of uint8$",
    ):
        winnow.indexer.quantize(x)


def test_quantize_refusals():
    x, pages = torch.zeros(3, 64), torch.zeros(1, 64 * 68, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="slots: want a tensor \\[n\\], which pages need, got none"
    ):
        winnow.indexer.quantize(x, pages=pages)
    assert winnow.supports("indexer.quantize", dtype="bfloat16", n=100, d=64)
    assert "want d = 128 or 64" in winnow.supports("indexer.quantize", d=96).reason
