"""float64 on the CPU: gradcheck in its standard form, and results against formulas in double."""

import numpy as np
import oracle
import problems
import pytest
import torch
import winnow.torch as ops

import winnow

TOLERANCE = 1e-11  # relative to the largest element


def assert_near(got, want):
    want = torch.as_tensor(want)
    assert got.dtype == torch.float64 and got.shape == want.shape
    finite = torch.isfinite(want)
    assert torch.equal(got[~finite], want[~finite])
    got, want = got[finite], want[finite]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def _sparse(**shape):
    q, kv, indices, options = problems.sparse_mla(dtype="float64", **shape)
    tensors = [torch.from_numpy(a) for a in (q, kv, indices)]
    return tensors, {name: torch.from_numpy(a) for name, a in options.items()}


def _paged():
    p = {n: torch.from_numpy(a) for n, a in problems.paged_xl(dtype="float64").items()}
    ops.paged_xl_append(p["key"], p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"])
    p["key_cache"].nan_to_num_()
    p["value_cache"].nan_to_num_()
    return p


def _step(p):
    return [p[n] for n in ("query", "key_cache", "value_cache", "pos_bias_u")]


CASES = {
    "plain": ({}, {}),
    "576": ({"d_qk": 576, "s_q": 1, "h_q": 1}, {}),
    "sink": ({"sink": True}, {}),
    "scale": ({}, {"scale": 0.2}),
    "nothing visible": ({"invalid": 1.0, "sink": True}, {}),
    "repeated rows": ({"s_kv": 2, "invalid": 0}, {}),
    "causal": ({"sink": True}, {"q_start": 5, "k_stride": 3}),
    "lengths": ({"sink": True}, {"topk_length": torch.tensor([1, 3], dtype=torch.int32)}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck_in_its_standard_form(case):
    shape, more = CASES[case]
    (q, kv, indices), options = _sparse(**{"s_q": 2, "h_q": 1, "s_kv": 3, "d_qk": 512, **shape})
    leaves = [t.requires_grad_() for t in (q, kv, *options.values())]

    def attention(q, kv, sink=None):
        return ops.sparse_mla_attention(q, kv, indices, attn_sink=sink, **more)

    assert torch.autograd.gradcheck(attention, leaves)


def test_gradgradcheck_is_refused():
    (q, kv, indices), _ = _sparse(s_q=1, h_q=1, s_kv=2, d_qk=512)
    leaves = [q.requires_grad_(), kv.requires_grad_()]
    with pytest.raises(RuntimeError, match="sparse_mla_backward has no gradient"):
        torch.autograd.gradgradcheck(
            lambda *leaves: ops.sparse_mla_attention(*leaves, indices), leaves
        )


def _attention_in_torch(q, kv, indices, sink):
    """(out, lse) of entries that are visible unless they are outside of the cache."""
    index = indices[:, 0, :].long()
    seen = (index >= 0) & (index < len(kv))
    rows = kv[index.where(seen, 0), 0]
    logits = torch.einsum("ihd,ijd->ihj", q, rows) * q.shape[2] ** -0.5
    logits = logits.masked_fill(~seen[:, None, :], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - torch.logaddexp(lse, sink[None, :])[..., None]).exp()
    return torch.einsum("ihj,ijd->ihd", weights, rows[:, :, :512]), lse


def test_forward_and_backward_equal_torch_in_double():
    (q, kv, indices), options = _sparse(s_q=5, h_q=3, s_kv=40, topk=30, sink=True)
    results = []
    for attention in (
        lambda q, kv, sink: ops.sparse_mla_attention(
            q, kv, indices, attn_sink=sink, return_lse=True
        ),
        lambda q, kv, sink: _attention_in_torch(q, kv, indices, sink),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, kv, options["attn_sink"])]
        out, lse = attention(*leaves)
        out.square().sum().backward()
        results.append([out, lse, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        assert_near(got.detach(), want.detach())


def test_functions_equal_the_oracle():
    (q, kv, indices), options = _sparse(topk=30, sink=True)
    arrays = [t.numpy() for t in (q, kv, indices)]
    more = {"attn_sink": options["attn_sink"].numpy(), "q_start": 12, "k_stride": 2}
    got = winnow.sparse_mla.forward(*arrays, **more)
    assert [a.dtype for a in got] == [np.float64] * 3
    want = oracle.forward(*arrays, **more)
    for g, w in zip(got, want, strict=True):
        assert_near(torch.from_numpy(g), w)
    out, _, lse = got
    d_out = np.random.default_rng(1).standard_normal(out.shape)
    got = winnow.sparse_mla.backward(*arrays, out, lse, d_out, **more)
    want = oracle.backward(*arrays, out, lse, d_out, **more)
    for g, w in zip(got, want, strict=True):
        assert_near(torch.from_numpy(g), w)
    delta = (out * d_out).sum(-1)
    again = winnow.sparse_mla.backward(*arrays, None, lse, d_out, delta=delta, **more)
    assert_near(torch.from_numpy(again[0]), want[0])
    del more["attn_sink"]
    got = winnow.sparse_mla.distribution(*arrays, lse, **more)
    assert_near(torch.from_numpy(got), oracle.distribution(*arrays, lse, **more))


def test_paged_decode_equals_the_oracle():
    p = _paged()
    assert p["key_cache"].shape[-1] == 2  # 16 bytes of a key lie together
    n = {name: t.numpy() for name, t in p.items()}
    tables = [p["block_tables"], p["context_lens"]]
    term = ops.paged_xl_position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    want = oracle.position_term(
        n["query"], n["pos_bias_v"], n["r"], n["context_lens"], n["r"].shape[1]
    )
    assert_near(term, want)
    out, lse = oracle.attention(*_step(n), want, None, n["block_tables"], n["context_lens"])
    got = ops.paged_xl_attention(*_step(p), term, None, *tables, return_lse=True)
    fused = ops.paged_xl_attention_fused(
        *_step(p), p["pos_bias_v"], p["r"], None, *tables, return_lse=True
    )
    for g in (got, fused):
        assert_near(g[0], out)
        assert_near(g[1], lse)


def _refusals():
    (q, kv, indices), _ = _sparse(sink=True)
    sink = torch.zeros(q.shape[1], dtype=torch.float64)
    out, _, lse = winnow.sparse_mla.forward(q, kv, indices)
    f = winnow.sparse_mla
    p = _paged()
    term = winnow.paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    tables = (None, p["block_tables"], p["context_lens"])
    attention, position = winnow.paged_xl.attention, winnow.paged_xl.position_term
    others = (p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"])
    return {
        "kv": (lambda: f.forward(q, kv.float(), indices), "kv: want dtype f64, got f32"),
        "q": (lambda: f.forward(q.float(), kv, indices), "kv: want dtype f32, got f64"),
        "sink": (
            lambda: f.forward(q, kv, indices, attn_sink=sink.float()),
            "attn_sink: want dtype f64, got f32",
        ),
        "sink of f32": (
            lambda: f.forward(q.float(), kv.float(), indices, attn_sink=sink),
            "attn_sink: want dtype f32, got f64",
        ),
        "lse": (
            lambda: f.distribution(q, kv, indices, lse.float()),
            "lse: want dtype f64, got f32",
        ),
        "lse of bf16": (
            lambda: f.distribution(q.bfloat16(), kv.bfloat16(), indices, lse),
            "lse: want dtype f32, got f64",
        ),
        "attn_sum": (
            lambda: f.distribution(q, kv, indices, lse, out=torch.empty(3, 7)),
            "attn_sum: want dtype f64, got f32",
        ),
        "delta": (
            lambda: f.backward(q, kv, indices, None, lse, out, delta=lse.float()),
            "delta: want dtype f64, got f32",
        ),
        "dkv": (
            lambda: ops.sparse_mla_backward(q, kv, indices, out, lse, out, dkv_dtype=torch.float32),
            "dkv: want dtype f64, got f32",
        ),
        "matrix_bd": (
            lambda: attention(*_step(p), term.float(), *tables),
            "matrix_bd: want dtype f64, got f32",
        ),
        "key_cache": (
            lambda: attention(p["query"], p["key_cache"].float(), *_step(p)[2:], term, *tables),
            "key_cache: want dtype f64, got f32",
        ),
        "r": (
            lambda: position(p["query"], p["pos_bias_v"], p["r"].float(), p["context_lens"]),
            "r: want dtype f64, got f32",
        ),
        "key": (
            lambda: winnow.paged_xl.append(p["key"].float(), *others),
            "key_cache: want dtype f32, got f64",
        ),
    }


@pytest.mark.parametrize("case", _refusals())
def test_float64_beside_another_dtype_is_refused(case):
    call, text = _refusals()[case]
    with pytest.raises(ValueError, match=text):
        call()


def _operator_calls():
    (q, kv, indices), options = _sparse(s_q=2, h_q=2, topk=4, sink=True)
    sink = options["attn_sink"]
    out, _, lse = winnow.sparse_mla.forward(q, kv, indices)
    p = _paged()
    tables = [p["block_tables"], p["context_lens"]]
    position = (p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    leaves = [t.clone().requires_grad_() for t in (q, kv, sink)]
    w = torch.ops.winnow
    return {
        "forward": (w.sparse_mla_forward, (*leaves[:2], indices, None, None, leaves[2])),
        "backward": (w.sparse_mla_backward, (q, kv, indices, out, lse, out)),
        "backward-sink": (
            w.sparse_mla_backward,
            (q, kv, indices, out, lse, out, None, None, None, sink),
        ),
        "distribution": (w.sparse_mla_distribution, (q, kv, indices, lse)),
        "position_term": (w.paged_xl_position_term, position),
        "attention": (
            w.paged_xl_attention,
            (*_step(p), winnow.paged_xl.position_term(*position), None, *tables),
        ),
        "fused": (
            w.paged_xl_attention_fused,
            (*_step(p), p["pos_bias_v"], p["r"], None, *tables),
        ),
        "append": (
            w.paged_xl_append,
            (p["key"] + 1, p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"]),
        ),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _operator_calls())
def test_opcheck(name):
    operator, arguments = _operator_calls()[name]
    torch.library.opcheck(operator.default, arguments)


@pytest.mark.filterwarnings("ignore")
def test_compiled_in_one_graph():
    (q, kv, indices), options = _sparse(sink=True)
    p = _paged()
    tables = [p["block_tables"], p["context_lens"]]

    def model(q, kv, sink):
        out, lse = ops.sparse_mla_attention(2 * q, kv, indices, attn_sink=sink, return_lse=True)
        teacher = ops.sparse_mla_distribution(2 * q, kv, indices, lse)
        term = ops.paged_xl_position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
        decoded, scale = ops.paged_xl_attention(*_step(p), term, None, *tables, return_lse=True)
        return out.square().sum(), teacher.sum() + decoded.sum() + scale[0].sum()

    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (q, kv, options["attn_sink"])]
        loss, other = run(*leaves)
        loss.backward()
        results.append([loss, other, *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert compiled.dtype == torch.float64
        torch.testing.assert_close(compiled, eager, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "operation",
    [
        "sparse_mla.forward",
        "sparse_mla.distribution",
        "sparse_mla.backward",
        "paged_xl.attention",
        "paged_xl.attention_fused",
        "paged_xl.append",
        "paged_xl.position_term",
    ],
)
def test_supports_says_so(operation):
    for dtype in ("float64", np.float64, torch.float64):
        answer = winnow.supports(operation, dtype=dtype)
        assert answer and answer.backend == "cpu", answer.reason


def test_what_else_takes_no_float64_says_so():
    for operation in ("indexer.topk", "indexer.scores"):
        assert "got f64" in winnow.supports(operation, dtype="float64").reason
    answer = winnow.supports("expert_parallel.dispatch", dtype="float64")
    assert not answer and "got f64" in answer.reason
