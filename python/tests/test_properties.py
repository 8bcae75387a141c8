"""Property tests: shapes, strides and indices that hypothesis thinks of, against the oracle."""

import numpy as np
import oracle
import problems
import pytest
import torch
from compare import assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinds import numbers
from layouts import layouts

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

# numpy arrays, and torch tensors, which have no negative strides.
BACKWARDS = {np.asarray: True, torch.from_numpy: False}
KIND = st.sampled_from(list(BACKWARDS))


class SparseProblem:
    """What hypothesis prints of a failing example must be readable."""

    def __init__(self, kind, arguments, options):
        self.kind, self.arguments, self.options = kind, arguments, options

    def tensors(self):
        options = {
            name: self.kind(value) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        return [self.kind(a) for a in self.arguments], options

    def __repr__(self):
        memory = [(a.shape, a.strides) for a in self.arguments]
        return f"{self.kind}, {memory}, indices {self.arguments[2].tolist()}, {self.options}"


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
    kind = draw(KIND)
    arguments = [draw(layouts(a, BACKWARDS[kind])) for a in (q, kv, indices)]
    return SparseProblem(kind, arguments, options)


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
    tensors, given = problem.tensors()
    out, max_logits, lse = sparse_mla.forward(*tensors, **given)
    for got, expected, name in zip(
        (out, max_logits, lse), want, ("out", "lse", "lse"), strict=True
    ):
        assert_close(got, expected, name)
    given.pop("attn_sink", None)
    attn_sum = numbers(sparse_mla.distribution(*tensors, lse, **given))
    seen = np.isfinite(numbers(lse)).any(1)
    np.testing.assert_allclose(attn_sum.sum(1)[seen], out.shape[1], rtol=1e-3)
    assert (attn_sum[~seen] == 0).all()
    for array, copy in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(array, copy)


@SETTINGS
@given(sparse_problems())
def test_sparse_mla_gradients_agree_with_the_oracle(problem):
    arguments, options = problem.arguments, problem.options
    tensors, given = problem.tensors()
    out, _, lse = sparse_mla.forward(*tensors, **given)
    d_out = np.random.default_rng(5).standard_normal(out.shape).astype(np.float32)
    got = sparse_mla.backward(*tensors, out, lse, problem.kind(d_out), **given)
    computed = numbers(out), numbers(lse), d_out
    want = oracle.backward(*arguments, *computed, **_want_lengths(options))
    # Sums of parts that cancel are as exact as their parts are large.
    size = max([1.0] + [float(np.abs(a).max(initial=0)) for a in (*arguments[:2], d_out)])
    for g, w in zip(got, want, strict=False):
        g = numbers(g)
        assert g.shape == w.shape
        limit = 1e-4 * max(np.abs(w).max(initial=0), size**2 * 1e-2)
        assert np.abs(g - w).max(initial=0) <= limit


class PagedProblem:
    def __init__(self, kind, arrays):
        self.kind, self.arrays = kind, arrays

    def __repr__(self):
        memory = {name: (a.shape, a.strides) for name, a in self.arrays.items()}
        return f"{self.kind}, {memory}, lengths {self.arrays['context_lens'].tolist()}"


@st.composite
def paged_problems(draw):
    """The arguments of problems.paged_xl, each in a layout of its own."""
    kv_heads = draw(st.integers(1, 3))
    arrays = problems.paged_xl(
        seed=draw(st.integers(0, 2**32 - 1)),
        context_lens=draw(st.lists(st.integers(0, 40), max_size=4)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from([32, 64, 80])),
        block_size=draw(st.sampled_from([8, 16, 32])),
    )
    # Room for what the operations write.
    arrays["term"] = np.zeros((*arrays["query"].shape[:2], arrays["r"].shape[1]), np.float32)
    arrays["out"] = np.zeros_like(arrays["query"])
    kind = draw(KIND)
    dense = {"key_cache": 3, "value_cache": 2}
    # What is written, and the tables: who shares blocks may read slots that nobody has written.
    once = {*dense, "term", "out", "block_tables"}
    for name, array in arrays.items():
        repeats = name not in once
        arrays[name] = draw(layouts(array, BACKWARDS[kind], repeats, dense.get(name, 1)))
    return PagedProblem(kind, arrays)


@SETTINGS
@given(paged_problems())
def test_paged_decode_agrees_with_the_oracle(problem):
    def arrays(*names):
        return [problem.arrays[name] for name in names]

    def tensors(*names):
        return [problem.kind(array) for array in arrays(*names)]

    step = ("query", "key_cache", "value_cache", "pos_bias_u")
    tables = ("block_tables", "context_lens")
    paged_xl.append(*tensors("key", "value", "key_cache", "value_cache", "slot_mapping"))
    (term,), (out,) = arrays("term"), arrays("out")
    for_term = ("query", "pos_bias_v", "r", "context_lens")
    paged_xl.position_term(*tensors(*for_term), out=problem.kind(term))
    assert_close(term, oracle.position_term(*arrays(*for_term), term.shape[2]), "paged")
    given = (*tensors(*step, "term"), None, *tensors(*tables))
    lse = paged_xl.attention(*given, return_lse=True, out=(problem.kind(out), None))[1]
    want, want_lse = oracle.attention(*arrays(*step, "term"), None, *arrays(*tables))
    assert_close(out, want, "paged")
    assert_close(numbers(lse), want_lse, "lse")
    given = (*tensors(*step, "pos_bias_v", "r"), None, *tensors(*tables))
    assert_close(numbers(paged_xl.attention_fused(*given)), want, "paged")


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
