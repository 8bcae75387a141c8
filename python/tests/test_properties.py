"""Property tests: shapes, strides and indices that hypothesis thinks of, against the oracle."""

import numpy as np
import oracle
import pytest
from compare import assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from winnow import paged_xl, sparse_mla

# The same examples in every run, so that a red run can be repeated.
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)

INDEX = st.one_of(st.integers(-2, 12), st.sampled_from([-(2**31), 2**31 - 1]))


def _laid_out(draw, array):
    """The same values in memory that hypothesis orders: padding, steps, negative strides."""
    steps = [draw(st.sampled_from([-2, -1, 1, 2])) for _ in array.shape[:-1]] + [1]
    pad = draw(st.integers(0, 3))
    shape = [n * abs(s) for n, s in zip(array.shape, steps, strict=True)]
    shape[-1] += pad
    room = np.full(shape, 99, array.dtype)
    view = room[..., : array.shape[-1]][tuple(slice(None, None, s) for s in steps)]
    view[...] = array
    return view


class SparseProblem:
    """What hypothesis prints of a failing example must be readable."""

    def __init__(self, arguments, options):
        self.arguments, self.options = arguments, options

    def __repr__(self):
        layouts = [(a.shape, a.strides) for a in self.arguments]
        return f"{layouts}, indices {self.arguments[2].tolist()}, {self.options}"


@st.composite
def sparse_problems(draw):
    s_q, h_q, s_kv = draw(st.integers(0, 3)), draw(st.integers(0, 4)), draw(st.integers(0, 10))
    topk, d_qk = draw(st.integers(0, 9)), draw(st.sampled_from([512, 576]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1.0, 1e-3, 30.0]))
    q = (size * rng.standard_normal((s_q, h_q, d_qk))).astype(np.float32)
    kv = rng.standard_normal((s_kv, 1, d_qk)).astype(np.float32)
    flat = draw(st.lists(INDEX, min_size=s_q * topk, max_size=s_q * topk))
    indices = np.array(flat, np.int32).reshape(s_q, 1, topk)
    options = {}
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(-3, 12), min_size=s_q, max_size=s_q))
        options["topk_length"] = np.array(lengths, np.int32)
    if draw(st.booleans()):
        options["q_start"] = draw(st.integers(-3, 40))
        options["k_stride"] = draw(st.integers(1, 5))
    if draw(st.booleans()):
        sinks = st.sampled_from([-np.inf, -3.0, 0.0, 5.0])
        options["attn_sink"] = np.array(
            draw(st.lists(sinks, min_size=h_q, max_size=h_q)), np.float32
        )
    return SparseProblem([_laid_out(draw, a) for a in (q, kv, indices)], options)


def _want_lengths(options):
    if "topk_length" not in options:
        return options
    return {**options, "topk_length": np.maximum(options["topk_length"], 0)}


@SETTINGS
@given(sparse_problems())
def test_sparse_mla_agrees_with_the_oracle(problem):
    arguments, options = problem.arguments, problem.options
    before = [a.copy() for a in arguments]
    want = oracle.forward(*arguments, **_want_lengths(options))
    out, max_logits, lse = sparse_mla.forward(*arguments, **options)
    for got, expected, name in zip(
        (out, max_logits, lse), want, ("out", "lse", "lse"), strict=True
    ):
        assert_close(got, expected, name)
    plain = {k: v for k, v in options.items() if k != "attn_sink"}
    attn_sum = sparse_mla.distribution(*arguments, lse, **plain)
    seen = np.isfinite(lse).any(1)
    np.testing.assert_allclose(attn_sum.sum(1)[seen], out.shape[1], rtol=1e-3)
    assert (attn_sum[~seen] == 0).all()
    for array, copy in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(array, copy)


@SETTINGS
@given(sparse_problems())
def test_sparse_mla_gradients_agree_with_the_oracle(problem):
    arguments, options = problem.arguments, problem.options
    out, _, lse = sparse_mla.forward(*arguments, **options)
    d_out = np.random.default_rng(5).standard_normal(out.shape).astype(np.float32)
    got = sparse_mla.backward(*arguments, out, lse, d_out, **options)
    want = oracle.backward(*arguments, out, lse, d_out, **_want_lengths(options))
    # Sums of parts that cancel are as exact as their parts are large.
    size = max([1.0] + [float(np.abs(a).max(initial=0)) for a in (*arguments[:2], d_out)])
    for g, w in zip(got, want, strict=False):
        assert g.shape == w.shape
        limit = 1e-4 * max(np.abs(w).max(initial=0), size**2 * 1e-2)
        assert np.abs(g - w).max(initial=0) <= limit


@st.composite
def paged_problems(draw):
    head_size = draw(st.sampled_from([32, 64, 80]))
    block_size = draw(st.sampled_from([8, 16, 32]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 40), min_size=0, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return head_size, block_size, kv_heads, group * kv_heads, lengths, rng


@SETTINGS
@given(paged_problems())
def test_paged_decode_agrees_with_the_oracle(problem):
    head_size, block_size, kv_heads, heads, lengths, rng = problem
    longest = max(lengths, default=0)
    per_seq = -(-longest // block_size)
    blocks = len(lengths) * per_seq + 1
    lengths = np.array(lengths, np.int32)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    key_cache = np.full((blocks, kv_heads, head_size // 4, block_size, 4), np.nan, np.float32)
    value_cache = np.full((blocks, kv_heads, head_size, block_size), np.nan, np.float32)
    tables = rng.permutation(blocks)[: len(lengths) * per_seq].astype(np.int32)
    tables = tables.reshape(len(lengths), per_seq)
    slots = np.array(
        [
            tables[s, j // block_size] * block_size + j % block_size
            for s in range(len(lengths))
            for j in range(lengths[s])
        ],
        np.int64,
    )
    keys, values = (normal(len(slots), kv_heads, head_size) for _ in range(2))
    paged_xl.append(keys, values, key_cache, value_cache, slots)
    query = normal(len(lengths), heads, head_size)
    u, v, r = normal(heads, head_size), normal(heads, head_size), normal(heads, longest, head_size)
    step = (query, key_cache, value_cache, u)
    term = paged_xl.position_term(query, v, r, lengths)
    assert_close(term, oracle.position_term(query, v, r, lengths, longest), "paged")
    out, lse = paged_xl.attention(*step, term, None, tables, lengths, return_lse=True)
    want, want_lse = oracle.attention(*step, term, None, tables, lengths)
    assert_close(out, want, "paged")
    assert_close(lse, want_lse, "lse")
    fused = paged_xl.attention_fused(*step, v, r, None, tables, lengths)
    assert_close(fused, want, "paged")


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_is_right_about_its_own_gradient(seed):
    """The float64 oracle's backward against differences of its forward."""
    rng = np.random.default_rng(seed)
    q, kv = rng.standard_normal((2, 2, 512)), rng.standard_normal((6, 1, 512))
    indices = rng.integers(-1, 7, (2, 1, 5), dtype=np.int32)
    sink, weights = rng.standard_normal(2), rng.standard_normal((2, 2, 512))
    out, _, lse = oracle.forward(q, kv, indices, attn_sink=sink)
    gradients = oracle.backward(q, kv, indices, out, lse, weights, attn_sink=sink)
    for which, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [q, kv, sink]
            moved[which] = moved[which] + step * direction
            result = oracle.forward(moved[0], moved[1], indices, attn_sink=moved[2])[0]
            ends.append((result * weights).sum())
        slope = (ends[0] - ends[1]) / 2e-6
        assert abs(slope - (gradient * direction).sum()) <= 1e-5 * np.linalg.norm(gradient) * 20
