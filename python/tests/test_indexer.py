"""winnow.indexer against the formula in numpy float64."""

import numpy as np
import pytest
import torch

import winnow


def problem(s_q=6, h=8, s_k=500, d=128, seed=0):
    random = np.random.default_rng(seed)
    q = random.standard_normal((s_q, h, d)).astype(np.float32)
    k = random.standard_normal((s_k, d)).astype(np.float32)
    return q, k, random.standard_normal((s_q, h)).astype(np.float32)


def formula(q, k, weights):
    dots = np.einsum("ihd,td->iht", q.astype(np.float64), k.astype(np.float64))
    return np.einsum("ih,iht->it", weights.astype(np.float64), np.maximum(dots, 0))


def test_scores():
    q, k, weights = problem()
    want = formula(q, k, weights)
    np.testing.assert_allclose(winnow.indexer.scores(q, k, weights), want, atol=2e-3)
    indices = np.array([[3, -1, 499, 500]] * 6, np.int32)
    got = winnow.indexer.scores(q, k, weights, indices)
    np.testing.assert_allclose(got[:, [0, 2]], want[:, [3, 499]], atol=2e-3)
    assert np.all(got[:, [1, 3]] == -np.inf)


@pytest.mark.parametrize("topk", [1, 64, 500, 600])
def test_the_choice_is_that_of_a_sort(topk):
    q, k, weights = problem()
    dense = winnow.indexer.scores(q, k, weights, q_start=450)
    indices, length, scores = winnow.indexer.topk(
        q, k, weights, topk, q_start=450, return_scores=True
    )
    for i in range(len(q)):
        visible = 451 + i
        order = np.sort(np.argsort(-dense[i, :visible], kind="stable")[:topk])
        assert length[i] == len(order) == min(topk, visible)
        np.testing.assert_array_equal(indices[i, : len(order)], order)
        assert np.all(indices[i, len(order) :] == -1)
        np.testing.assert_array_equal(scores[i, : len(order)], dense[i, order])


def test_scores_from_each_querys_first_row_on():
    q, k, weights = problem(s_k=300)
    end = np.array([300, 7, 250, 300, 300, 300], np.int32)
    dense = winnow.indexer.scores(q, k, weights, key_end=end)
    starts = np.array([-5, 3, 200, 290, 300, 2**31 - 1], np.int32)
    for width in (0, 1, 100, 400):
        got = winnow.indexer.scores(q, k, weights, key_start=starts, key_end=end, width=width)
        want = np.full((6, width), -np.inf, np.float32)
        for i, start in enumerate(starts.tolist()):
            first, behind = max(start, 0), min(start + width, 300)
            if first < behind:
                want[i, first - start : behind - start] = dense[i, first:behind]
        np.testing.assert_array_equal(got, want)
    given = torch.from_numpy(np.zeros((6, 100), np.float32))
    out = winnow.indexer.scores(
        *map(torch.from_numpy, (q, k, weights)), key_start=torch.from_numpy(starts), width=100,
        out=given,
    )  # fmt: skip
    assert out is given and out[2, 0] == dense[2, 200]


def test_a_width_that_is_refused():
    q, k, weights = problem(s_k=40)
    starts = np.zeros(6, np.int32)
    for width in (-1, 2**31, 2**40):
        want = rf"indexer::scores: width: want 0 to 2\^31 - 1, got {width}$"
        with pytest.raises(ValueError, match=want):
            winnow.indexer.scores(q, k, weights, key_start=starts, width=width)
    with pytest.raises(ValueError, match=r"key_start: want a tensor \[s_q\], which width needs"):
        winnow.indexer.scores(q, k, weights, width=4)
    with pytest.raises(ValueError, match="width: want none beside indices, got 4"):
        indices = np.zeros((6, 4), np.int32)
        winnow.indexer.scores(q, k, weights, indices, key_start=starts, width=4)


def test_torch_and_ties():
    q, k, weights = (torch.from_numpy(array).to(torch.bfloat16) for array in problem(s_k=40))
    k[:] = k[0]
    for ties, want in (("smaller", range(8)), ("larger", range(32, 40))):
        indices, length = winnow.indexer.topk(q, k, weights, 8, ties=ties)
        assert indices.dtype == torch.int32 and length.tolist() == [8] * 6
        assert indices.tolist() == [list(want)] * 6


def test_refusals():
    q, k, weights = problem()
    for topk in (0, -1, 2**31, 2**40):  # with numpy and torch alike before anything is allocated
        want = rf"indexer::topk: topk: want 1 to 2\^31 - 1, got {topk}$"
        with pytest.raises(ValueError, match=want):
            winnow.indexer.topk(q, k, weights, topk)
        with pytest.raises(ValueError, match=want):
            winnow.indexer.topk(*map(torch.from_numpy, (q, k, weights)), topk)
    with pytest.raises(ValueError, match="indexer::topk: ties: want smaller or larger, got first"):
        winnow.indexer.topk(q, k, weights, 4, ties="first")


def test_supports():
    assert winnow.supports("indexer.topk", dtype="bfloat16", h=64, s_k=1000, topk=2048)
    assert not winnow.supports("indexer.scores", d=32)
    assert winnow.supports("indexer.backward", dtype="bfloat16", h=64, s_k=1000, topk=2048)


def test_dtypes_of_gradients():
    q, k, weights = (torch.from_numpy(array).to(torch.bfloat16) for array in problem(s_k=40))
    indices = torch.arange(8, dtype=torch.int32).expand(6, 8).contiguous()
    d_scores = torch.ones(6, 8)
    dq, dk, d_weights = winnow.indexer.backward(q, k, weights, indices, d_scores)
    assert (dq.dtype, dk.dtype, d_weights.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.all(dk[8:] == 0)
    into = torch.empty_like(k)
    assert winnow.indexer.backward(q, k, weights, indices, d_scores, dk=into)[1] is into
    torch.testing.assert_close(into, dk.to(torch.bfloat16), rtol=0, atol=0)
    f8 = [tensor.to(torch.float8_e4m3fn) for tensor in (q, k)]
    scale = torch.ones(40)
    dq = winnow.indexer.backward(*f8, weights, indices, d_scores, k_scale=scale)[0]
    assert dq.dtype == torch.float32
    with pytest.raises(ValueError, match="dq: want dtype f32 or bf16, got f8_e4m3"):
        winnow.indexer.backward(*f8, weights, indices, d_scores, k_scale=scale, dq=f8[0].clone())
    with pytest.raises(ValueError, match=r"d_scores: want shape \[s_q=6, topk=8\], got \[6, 40\]"):
        winnow.indexer.backward(q, k, weights, indices, torch.ones(6, 40))
