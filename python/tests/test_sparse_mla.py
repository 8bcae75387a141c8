"""The three sparse MLA operations against the oracle, on every kind of tensor."""

import numpy as np
import oracle
import problems
import pytest
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


# The extra rows stand for 4 tokens each, from position 30 on; what a range leaves out is -1.
_POSITIONS = {"q_start": 30, "k_stride": 2, "extra_k_stride": 4}


def _source(rng, form, s_q, s_kv, topk):
    """The arguments of a source, by their names without "extra_", and its rows as a list."""
    if form == "list":
        indices = rng.integers(-1, s_kv + 1, (s_q, 1, topk), dtype=np.int32)
        length = np.array([topk, 2, 99], np.int32)
        hidden = np.arange(topk) >= length[:, None]
        return {"indices": indices, "topk_length": length}, np.where(hidden, -1, indices[:, 0])
    start, end = np.array([0, 3, -5], np.int32), np.array([4, s_kv, 99], np.int32)
    rows = np.arange(s_kv, dtype=np.int32)
    hidden = (rows < start[:, None]) | (rows >= end[:, None])
    return {"key_start": start, "key_end": end}, np.where(hidden, -1, rows)


def _one_list(first, extra, s_kv, s_extra, s_q=3):
    """Both lists as one over the rows of both, without what the causal limit hides."""
    tokens = _POSITIONS["q_start"] + np.arange(s_q)[:, None] + 1
    seen = (first >= 0) & (first < s_kv) & ((first + 1) * _POSITIONS["k_stride"] <= tokens)
    listed = (
        (extra >= 0) & (extra < s_extra) & ((extra + 1) * _POSITIONS["extra_k_stride"] <= tokens)
    )
    both = np.concatenate([np.where(seen, first, -1), np.where(listed, extra + s_kv, -1)], 1)
    return both[:, None].astype(np.int32)


@pytest.mark.parametrize("forms", ["list list", "range list", "list range", "range range"])
@pytest.mark.parametrize("kind", CPU)
def test_two_sources_are_one_with_the_rows_of_both(forms, kind):
    convert, dtype = kind
    exact = {"dtype": dtype} if dtype == "float64" else {}
    q, kv, _, more = problems.sparse_mla(sink=True, **exact)
    _, extra_kv, _, _ = problems.sparse_mla(seed=1, s_kv=9, **exact)
    rng = np.random.default_rng(4)
    form, extra_form = forms.split()
    chosen, listed = _source(rng, form, 3, len(kv), 7)
    extra, extra_listed = _source(rng, extra_form, 3, len(extra_kv), 5)
    both = _one_list(listed, extra_listed, len(kv), len(extra_kv))
    sink = more["attn_sink"]

    q, kv, extra_kv = (convert(a) for a in (q, kv, extra_kv))
    options = {**chosen, **{f"extra_{name}": value for name, value in extra.items()}}
    options = {name: like(value, q) for name, value in options.items()}
    indices = options.pop("indices", None)
    options.update(extra_kv=extra_kv, **_POSITIONS)
    rows = np.concatenate([numbers(kv), numbers(extra_kv)])
    attn_sink = like(sink, q)

    out, max_logits, lse = sparse_mla.forward(q, kv, indices, attn_sink=attn_sink, **options)
    want = oracle.forward(numbers(q), rows, both, attn_sink=sink)
    for got, expected, quantity in zip(
        (out, max_logits, lse), want, ("out", "lse", "lse"), strict=True
    ):
        assert_same_kind(got, q)
        assert_close(numbers(got), expected, quantity, dtype)

    sums = sparse_mla.distribution(q, kv, indices, lse, **options)
    want = oracle.distribution(numbers(q), rows, both, numbers(lse))
    together = np.concatenate([numbers(part) for part in sums], 1)
    assert_close(together, want, "attn_sum", dtype)
    # The lse is given: one source alone has the same part.
    one = {name: v for name, v in options.items() if not name.startswith("extra_")}
    alone = sparse_mla.distribution(q, kv, indices, lse, **one)
    assert_close(numbers(alone), numbers(sums[0]), "attn_sum", dtype)

    d_out = convert(np.random.default_rng(9).standard_normal(out.shape).astype(np.float32))
    gradients = sparse_mla.backward(q, kv, indices, out, lse, d_out, attn_sink=attn_sink, **options)
    dq, rows_gradient, d_sink = oracle.backward(
        numbers(q), rows, both, numbers(out), numbers(lse), numbers(d_out), attn_sink=sink
    )
    expected = dq, rows_gradient[: len(kv)], d_sink, rows_gradient[len(kv) :]
    for got, wanted, quantity in zip(
        gradients, expected, ("dq", "dkv", "d_sink", "dkv"), strict=True
    ):
        assert_same_kind(got, q)
        assert_close(numbers(got), wanted, quantity, dtype)


def test_results_of_a_second_source_go_where_they_are_asked_to():
    q, kv, indices, _ = problems.sparse_mla()
    extra = {"extra_kv": kv[:5], "extra_indices": indices[:, :, :4]}
    out, _, lse = sparse_mla.forward(q, kv, indices, **extra)
    sums = np.full((3, 4), np.nan, np.float32)
    _, second = sparse_mla.distribution(q, kv, indices, lse, out=(None, sums), **extra)
    assert second is sums and not np.isnan(sums).any()
    gradients = sparse_mla.backward(q, kv, indices, out, lse, out, **extra)
    assert len(gradients) == 3
    dextra_kv = np.full((5, *kv.shape[1:]), np.nan, np.float32)
    got = sparse_mla.backward(q, kv, indices, out, lse, out, dextra_kv=dextra_kv, **extra)
    assert got[2] is dextra_kv
    np.testing.assert_array_equal(dextra_kv, gradients[2])
    with pytest.raises(ValueError, match="dextra_kv: want extra_kv to be given as well"):
        sparse_mla.backward(q, kv, indices, out, lse, out, dextra_kv=dextra_kv)
    with pytest.raises(ValueError, match="extra_attn_sum: want extra_kv to be given as well"):
        sparse_mla.distribution(q, kv, indices, lse, out=(None, sums))


@pytest.mark.parametrize("kind", [*CPU, CUDA_BFLOAT16])
def test_lse_of_flash_mla_is_infinite_where_nothing_is_visible(kind):
    convert, dtype = kind
    exact = {"dtype": dtype} if dtype == "float64" else {}
    q, kv, indices, more = problems.sparse_mla(sink=True, **exact)
    indices[1] = -1
    arguments = [convert(a) for a in (q, kv, indices)]
    given = {name: like(value, arguments[0]) for name, value in more.items()}
    out, max_logits, lse = sparse_mla.forward(*arguments, **given)
    results = sparse_mla.forward(*arguments, flash_mla_lse=True, **given)
    want = numbers(lse)
    assert np.isneginf(want[1]).all()
    want[1] = np.inf
    for got, expected in zip(map(numbers, results), (out, max_logits, want), strict=True):
        np.testing.assert_array_equal(got, numbers(expected))
    with pytest.raises(TypeError, match="flash_mla_lse: want True or False, got int"):
        sparse_mla.forward(*arguments, flash_mla_lse=1, **given)


@pytest.mark.parametrize("op", ["forward", "distribution", "backward"])
def test_supports_is_asked_for_a_second_source_by_its_sizes(op):
    def answer(**shape):
        return winnow.supports(f"sparse_mla.{op}", s_q=2, d_qk=512, **shape)

    assert answer(s_extra=9, extra_topk=3).backend == "cpu"
    assert "extra_kv: want at most 2^31 - 1 rows" in answer(s_extra=2**31).reason
    with pytest.raises(TypeError, match="extra_topk"):
        answer(extra_topk=3)


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


def test_the_backend_can_be_forced():
    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)[0]
    np.testing.assert_array_equal(sparse_mla.forward(q, kv, indices, backend="cpu")[0], want)
    with pytest.raises(
        ValueError, match="backend: want one that supports tensors on cpu, got sm90"
    ):
        sparse_mla.forward(q, kv, indices, backend="sm90")


def test_set_num_threads():
    before = winnow.num_threads()
    try:
        winnow.set_num_threads(1)
        assert winnow.num_threads() == 1
        with pytest.raises(ValueError, match="set_num_threads"):
            winnow.set_num_threads(0)
    finally:
        winnow.set_num_threads(before)
