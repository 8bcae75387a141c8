"""The three sparse MLA operations against the oracle, on every kind of tensor."""

import numpy as np
import oracle
import problems
import pytest
import torch
from compare import assert_close
from kinds import CPU, CUDA_BFLOAT16, assert_same_kind, like, numbers

import winnow
from winnow import sparse_mla

CASES = {
    "plain": ({}, {}),
    "d_qk-512": ({"d_qk": 512}, {}),
    "scale": ({}, {"scale": 0.3}),
    "topk_length": ({}, {"topk_length": np.array([0, 3, 99], np.int32)}),
    "causal": ({}, {"q_start": 11}),
    "k_stride": ({}, {"q_start": 20, "k_stride": 4}),
    "nothing-visible": ({"invalid": 1.0}, {}),
    "sink": ({"sink": True}, {}),
    "no-topk": ({"topk": 0}, {}),
    "no-cache": ({"s_kv": 0}, {}),
    "no-queries": ({"s_q": 0}, {}),
    "no-heads": ({"h_q": 0}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [*CPU, CUDA_BFLOAT16])
def test_all_three_agree_with_the_oracle(case, kind):
    convert, dtype = kind
    shape, options = CASES[case]
    exact = {"dtype": dtype} if dtype == "float64" else {}
    q, kv, indices, more = problems.sparse_mla(**shape, **exact)
    options = {**options, **more}
    arguments = [convert(a) for a in (q, kv, indices)]
    given = {
        name: like(v, arguments[0]) if isinstance(v, np.ndarray) else v
        for name, v in options.items()
    }
    q, kv = numbers(arguments[0]), numbers(arguments[1])

    out, max_logits, lse = sparse_mla.forward(*arguments, **given)
    want = oracle.forward(q, kv, indices, **options)
    for got, expected, quantity in zip(
        (out, max_logits, lse), want, ("out", "lse", "lse"), strict=True
    ):
        assert_same_kind(got, arguments[0])
        assert_close(numbers(got), expected, quantity, dtype)

    without_sink = {k: v for k, v in given.items() if k != "attn_sink"}
    attn_sum = sparse_mla.distribution(*arguments, lse, **without_sink)
    assert_same_kind(attn_sum, arguments[0])
    plain = {k: v for k, v in options.items() if k != "attn_sink"}
    assert_close(
        numbers(attn_sum),
        oracle.distribution(q, kv, indices, numbers(lse), **plain),
        "attn_sum",
        dtype,
    )

    d_out = convert(np.random.default_rng(9).standard_normal(out.shape).astype(np.float32))
    gradients = sparse_mla.backward(*arguments, out, lse, d_out, **given)
    expected = oracle.backward(
        q, kv, indices, numbers(out), numbers(lse), numbers(d_out), **options
    )
    assert len(gradients) == (3 if "attn_sink" in options else 2)
    for got, wanted, quantity in zip(gradients, expected, ("dq", "dkv", "d_sink"), strict=False):
        assert_same_kind(got, arguments[0])
        assert_close(numbers(got), wanted, quantity, dtype)


def test_out_is_written_and_returned():
    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)
    out = tuple(np.full_like(w, np.nan) for w in want)
    got = sparse_mla.forward(q, kv, indices, out=out)
    assert all(g is o for g, o in zip(got, out, strict=True))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    alone = np.full_like(want[0], np.nan)
    assert sparse_mla.forward(q, kv, indices, out=alone)[0] is alone
    np.testing.assert_array_equal(alone, want[0])
    lse = np.full_like(want[2], np.nan)
    assert sparse_mla.forward(q, kv, indices, out=(None, None, lse))[2] is lse


def test_gradients_go_into_the_tensors_given():
    q, kv, indices, options = problems.sparse_mla(sink=True)
    out, _, lse = sparse_mla.forward(q, kv, indices, **options)
    want = sparse_mla.backward(q, kv, indices, out, lse, out, **options)
    given = [np.full_like(w, np.nan) for w in want]
    got = sparse_mla.backward(
        q, kv, indices, out, lse, out, dq=given[0], dkv=given[1], d_sink=given[2], **options
    )
    for g, o, w in zip(got, given, want, strict=True):
        assert g is o
        np.testing.assert_array_equal(g, w)


def test_delta_takes_the_place_of_out():
    q, kv, indices, _ = problems.sparse_mla()
    out, _, lse = sparse_mla.forward(q, kv, indices)
    d_out = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    want = sparse_mla.backward(q, kv, indices, out, lse, d_out)
    delta = (out * d_out).sum(-1)
    got = sparse_mla.backward(q, kv, indices, None, lse, d_out, delta=delta)
    assert_close(got[0], want[0], "dq")
    assert_close(got[1], want[1], "dkv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dkv_in_either_dtype(dtype):
    q, kv, indices, _ = problems.sparse_mla()
    q, kv, indices = (torch.from_numpy(a) for a in (q, kv, indices))
    q, kv = q.bfloat16(), kv.bfloat16()
    out, _, lse = sparse_mla.forward(q, kv, indices)
    _, want = sparse_mla.backward(q, kv, indices, out, lse, out)
    assert want.dtype == torch.float32
    dkv = torch.full(kv.shape, torch.nan, dtype=dtype)
    sparse_mla.backward(q, kv, indices, out, lse, out, dkv=dkv)
    assert torch.equal(dkv, want.to(dtype))


def test_the_backend_can_be_forced():
    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)[0]
    np.testing.assert_array_equal(sparse_mla.forward(q, kv, indices, backend="cpu")[0], want)
    with pytest.raises(
        ValueError, match="backend: want one that supports tensors on cpu, got sm90"
    ):
        sparse_mla.forward(q, kv, indices, backend="sm90")
    with pytest.raises(ValueError, match='one of sm100, sm90, cuda, cpu, got "abacus"'):
        sparse_mla.forward(q, kv, indices, backend="abacus")


def test_set_num_threads():
    before = winnow.num_threads()
    try:
        winnow.set_num_threads(1)
        assert winnow.num_threads() == 1
        with pytest.raises(ValueError, match="set_num_threads"):
            winnow.set_num_threads(0)
    finally:
        winnow.set_num_threads(before)
