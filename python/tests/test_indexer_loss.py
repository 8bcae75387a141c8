"""winnow.torch.indexer_loss against its formula in double precision, with torch's autograd."""

import numpy as np
import pytest
import torch
import winnow.torch as ops
from kinds import gpu
from test_indexer_torch import formula, problem

import winnow
from winnow import indexer_loss as module

# Of the loss (absolute and relative) and of gradients (relative to the largest), by dtype: float32
# is limited by the sums of the kernels, bfloat16 by the rounding of the gradients.
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-3, 1e-2)}
RANGES = {
    "all": (None, None),
    "ranges": ([0, 3, 7, 30, -5, 9], [40, 9, 90, 20, 33, 10]),  # the fourth sees nothing
    "nothing": ([1] * 6, [0] * 6),
}


def loss_formula(q, k, weights, target, indices=None, start=None, end=None, reduction="mean"):
    s_k = k.shape[0]
    start = 0 if start is None else start[:, None]
    end = s_k if end is None else end[:, None]
    scores = formula(q, k, weights, indices, start, end)
    visible = ~scores.detach().isinf()
    target = torch.where(visible, target.double(), 0)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-300)
    sees = visible.any(-1)
    log_p = torch.where(sees[:, None], scores, 0).log_softmax(-1)
    terms = torch.where(target > 0, target * (target.clamp(min=1e-300).log() - log_p), 0)
    rows = torch.where(sees, torch.where(terms.isnan(), 0, terms).sum(-1), 0)
    if reduction == "none":
        return rows
    return rows.sum() / (max(int(sees.sum()), 1) if reduction == "mean" else 1)


def _limits(name, device):
    return [
        None if limit is None else torch.tensor(limit, dtype=torch.int32, device=device)
        for limit in RANGES[name]
    ]


def _compare(q, k, weights, call, want, gradient_seed=None):
    """The loss of `call` and its gradients with those of `want`."""
    loss_tolerance, tolerance = TOLERANCE[q.dtype]
    results = []
    for function in (call, want):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, weights)]
        loss = function(*leaves)
        loss.backward(torch.linspace(-1, 2, 6).to(loss) if loss.dim() else None)
        results.append((loss.detach(), [leaf.grad for leaf in leaves]))
    (got, gradients), (expected, want_gradients) = results
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=loss_tolerance, atol=loss_tolerance)
    for leaf, have, wanted in zip((q, k, weights), gradients, want_gradients, strict=True):
        assert have.dtype == leaf.dtype
        limit = tolerance * float(wanted.double().abs().max())
        torch.testing.assert_close(have.double(), wanted.double(), rtol=0, atol=limit)


DEVICES = [
    pytest.param(("cpu", torch.float32), id="cpu"),
    pytest.param(("cuda", torch.bfloat16), id="cuda", marks=gpu),
]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_a_target_that_is_given(dense, ranges, chunk, where):
    q, k, weights, indices = problem(s_q=6, device=where[0], dtype=where[1])
    indices = None if dense else indices
    start, end = _limits(ranges, where[0])
    target = torch.rand(6, 40 if dense else 9, device=where[0])
    target[target < 0.3] = 0  # 0 * log 0
    target[1] = 0  # a query that has nothing to learn
    for reduction in ("mean", "sum", "none"):
        _compare(
            q, k, weights,
            lambda *leaves, reduction=reduction: ops.indexer_loss(
                *leaves, target, indices, key_start=start, key_end=end,
                reduction=reduction, chunk=chunk,
            ),
            lambda *leaves, reduction=reduction: loss_formula(
                *leaves, target, indices, start, end, reduction
            ),
        )  # fmt: skip


def attention_formula(attention, indices, start, end):
    """The weights of the attention, summed over the heads, for each row or chosen row."""
    q, kv, _, scale, sink = attention
    s_kv = kv.shape[0]
    x = torch.einsum("ihd,td->iht", q.double(), kv[:, 0].double())
    x = x * (q.shape[2] ** -0.5 if scale is None else scale)
    if indices is not None:
        at = indices.clamp(0, s_kv - 1).long()[:, None].expand(-1, q.shape[1], -1)
        x = x.gather(2, at)
        hidden = (indices < 0) | (indices >= s_kv)
    else:
        rows = torch.arange(s_kv, device=q.device)
        hidden = (rows < start[:, None]) | (rows >= end[:, None])
    x = x.masked_fill(hidden[:, None], -torch.inf)
    if sink is not None:
        of_sink = sink.double()[None, :, None].expand(q.shape[0], -1, 1)
        x = torch.cat([x, of_sink], -1)
    p = x.softmax(-1).nan_to_num(0).sum(1)
    return p if sink is None else p[:, :-1]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_a_target_that_is_formed_from_the_attention(dense, sink, where):
    device, dtype = where
    q, k, weights, indices = problem(s_q=6, device=device, dtype=dtype)
    start, end = _limits("ranges", device)
    attention_q = torch.randn(6, 4, 512, device=device).to(dtype).requires_grad_()
    kv = torch.randn(40, 1, 512, device=device).to(dtype).requires_grad_()
    attn_sink = torch.randn(4, device=device) if sink else None
    options = {"scale": 0.1, "attn_sink": attn_sink}
    with torch.no_grad():
        if dense:
            ranges = {"key_start": start, "key_end": end}
            _, _, lse = winnow.sparse_mla.forward(attention_q, kv, None, **options, **ranges)
        else:
            _, _, lse = winnow.sparse_mla.forward(attention_q, kv, indices, **options)
    attention = (attention_q, kv, lse, 0.1, attn_sink)
    chosen = None if dense else indices
    target = attention_formula([None if t is None else t.detach() if isinstance(t, torch.Tensor)
                                else t for t in attention], chosen, start, end)  # fmt: skip
    _compare(
        q, k, weights,
        lambda *leaves: ops.indexer_loss(
            *leaves, indices=chosen, attention=attention, key_start=start, key_end=end, chunk=2
        ),
        lambda *leaves: loss_formula(*leaves, target, chosen, start, end),
    )  # fmt: skip
    assert attention_q.grad is None and kv.grad is None


def test_a_target_has_no_gradient():
    q, k, weights, _ = problem()
    target = torch.rand(5, 40, requires_grad=True)
    loss = ops.indexer_loss(q.requires_grad_(), k, weights, target)
    loss.backward()
    assert target.grad is None and q.grad is not None


def test_what_a_target_holds_for_hidden_rows_is_ignored():
    q, k, weights, _ = problem()
    end = torch.full((5,), 30, dtype=torch.int32)
    target = torch.rand(5, 40)
    want = ops.indexer_loss(q, k, weights, target, key_end=end)
    target[:, 30:] = torch.nan
    assert torch.equal(ops.indexer_loss(q, k, weights, target, key_end=end), want)


def test_the_loss_is_zero_where_the_indexer_is_right():
    q, k, weights, indices = problem()
    target = winnow.indexer.scores(q, k, weights).softmax(-1)
    q.requires_grad_()
    loss = ops.indexer_loss(q, k, weights, target)
    assert abs(loss.item()) < 1e-6
    loss.backward()
    assert float(q.grad.abs().max()) < 1e-5


def test_a_chunk_bounds_what_is_formed(monkeypatch):
    formed = []

    class Watched:
        backward = staticmethod(module._indexer.backward)

        @staticmethod
        def scores(*arguments, **options):
            scores = winnow.indexer.scores(*arguments, **options)
            formed.append(scores.numel())
            return scores

    monkeypatch.setattr(module, "_indexer", Watched)
    q, k, weights, _ = problem(s_q=10)
    target = torch.rand(10, 40)
    ops.indexer_loss(q.requires_grad_(), k, weights, target, chunk=3).backward()
    assert formed == [120, 120, 120, 40] * 2
    formed.clear()
    monkeypatch.setattr(module, "_CHUNK_SCORES", 100)
    ops.indexer_loss(q, k, weights, target)
    assert formed == [80] * 5


def test_empty_problems():
    q, k, weights, indices = problem(s_q=0)
    leaves = [t.requires_grad_() for t in (q, k, weights)]
    loss = ops.indexer_loss(*leaves, torch.empty(0, 40))
    loss.backward()
    assert loss.item() == 0 and leaves[1].grad.count_nonzero() == 0
    q, k, weights, _ = problem(s_k=0)
    assert float(ops.indexer_loss(q, k, weights, torch.empty(5, 0))) == 0


def test_refusals():
    q, k, weights, indices = problem()
    target = torch.rand(5, 40)

    def refused(text, *arguments, **options):
        with pytest.raises(ValueError, match="indexer_loss: " + text):
            ops.indexer_loss(q, k, weights, *arguments, **options)

    refused("target: want it or attention, got neither")
    attention = (torch.zeros(5, 2, 512), torch.zeros(40, 1, 512), torch.zeros(5, 2), None, None)
    refused("target: want it or attention, got both", target, attention=attention)
    refused(r"target: want shape \[s_q=5, s_k=40\], got \[5, 9\]", target[:, :9])
    refused(r"target: want shape \[s_q=5, topk=9\], got \[5, 40\]", target, indices)
    of_rows = r"indices: want int32 of shape \[s_q=5, topk\], got torch"
    refused(of_rows + r".int32 of shape \[4, 9\]", target, indices[:4])
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
        refused(of_rows, target, indices.to(dtype))
    for dtype in (torch.int32, torch.bool, torch.complex64):
        refused("target: want a float dtype, got torch", target.to(dtype))
    refused("reduction: want mean, sum or none, got max", target, reduction="max")
    refused("chunk: want 1 or more, got 0", target, chunk=0)
    refused(r"key_end: want int32 of shape \[s_q=5\]", target, key_end=torch.zeros(5))
    refused("attention: want q of s_q=5", attention=(attention[0][:4], *attention[1:]))
    refused(r"attention: want \(q, kv, lse", attention=attention[:3])
    refused("attention: want .*, got 3 of them", attention=attention[:3])
    refused("attention: want .*, got int", attention=3)
    a_q, a_kv, lse, _, _ = attention
    for bad, text in (
        ((None, a_kv, lse, None, None), "q: want a tensor of torch, got NoneType"),
        ((a_q[:, 0], a_kv, lse, None, None), r"q: want 3 dimensions"),
        ((a_q, a_kv[:, 0], lse, None, None), r"kv: want 3 dimensions"),
        # Added to a sink, these would take another shape or dtype without a word.
        ((a_q, a_kv, torch.zeros(5, 3), None, None), r"lse: want float32 or float64 of shape"),
        ((a_q, a_kv, lse[:1], None, torch.zeros(2)), r"lse: want float32 or float64 of shape"),
        ((a_q, a_kv, lse.half(), None, torch.zeros(2)), r"lse: want float32 or float64"),
        ((a_q, a_kv, lse, None, torch.zeros(1)), r"attn_sink: want floating-point numbers"),
        ((a_q, a_kv, lse, None, torch.zeros(2).int()), r"attn_sink: want floating-point"),
    ):
        refused("attention: " + text, attention=bad)


@pytest.mark.parametrize("wrong", [None, 1.5, "x", [], np.zeros((5, 2), np.float32)])
def test_arguments_that_are_no_tensors(wrong):
    q, k, weights, _ = problem()
    given = {"q": q, "k": k, "weights": weights, "target": torch.rand(5, 40)}
    for name in ("q", "k", "weights", "target", "indices", "key_start", "key_end"):
        if wrong is None and name not in ("q", "k", "weights"):
            continue
        text = f"indexer_loss: {name}: want a tensor of torch, got {type(wrong).__name__}"
        with pytest.raises(ValueError, match=text) as caught:
            ops.indexer_loss(**{**given, name: wrong})
        assert caught.value.argument == name


def test_weights_of_more_queries():
    q, k, weights, _ = problem()
    with pytest.raises(ValueError, match=r"weights: want shape \[s_q=5, h=\d+\]"):
        ops.indexer_loss(q, k, torch.cat((weights, weights)), torch.rand(5, 40))
    with pytest.raises(ValueError, match="chunk: want 1 or more, got 1.5"):
        ops.indexer_loss(q, k, weights, torch.rand(5, 40), chunk=1.5)


def test_more_rows_than_indices_count():
    q, k, weights, indices = problem()
    many = k[:1].expand(2**31, -1)
    with pytest.raises(ValueError, match=r"indexer_loss: k: want up to 2\^31 - 1 rows, got 2147"):
        ops.indexer_loss(q, many, weights, torch.rand(5, 9), indices)


def test_refusals_of_the_operations():
    q, k, weights, _ = problem()
    target = torch.rand(5, 40)
    with pytest.raises(ValueError, match="indexer::scores: q: want d = 128 or 64, got d = 32"):
        ops.indexer_loss(q[..., :32], k[:, :32], weights, target)
