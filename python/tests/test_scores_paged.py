"""The indexer's scores over a paged cache: the binding and the torch operator."""

import pytest
import torch
import winnow.torch as ops
from kinds import gpu
from test_topk_paged import problem

import winnow
from winnow import indexer

DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_queries", [False, True])
@pytest.mark.parametrize("columns", [64, 150, 300])  # 256 rows have a place in a table
def test_against_a_formula(columns, of_queries, device):
    tensors, keys = problem(device=device)
    lens = [[149, 150], [3, 2], [0, 64]] if of_queries else [[149, 150], [2, 3], [63, 64]]
    if of_queries:
        tensors[4] = torch.tensor(lens, dtype=torch.int32, device=device)
    q, _, weights, _, _ = (t.cpu() for t in tensors)
    scores = indexer.scores_paged(*tensors, columns)
    assert scores.shape == (3, 2, columns) and scores.dtype == torch.float32
    left = torch.full_like(scores, 7)
    assert indexer.scores_paged(*tensors, columns, clean=False, out=left) is left
    for i in range(3):
        for j in range(2):
            seen = min(lens[i][j], columns)
            want = torch.relu(keys[i] @ q[i, j].double().T) @ weights[i, j].double()
            got = scores[i, j].cpu().double()
            bound = (
                {"rtol": 1e-4, "atol": 1e-4} if device == "cpu" else {"rtol": 1e-2, "atol": 5e-2}
            )
            torch.testing.assert_close(got[:seen], want[:seen], **bound)
            assert torch.isneginf(got[seen:]).all()
            assert torch.equal(left[i, j, :seen], scores[i, j, :seen])
            assert (left[i, j, seen:] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_choice_is_that_of_topk_paged(device):
    tensors, _ = problem(device=device, s_q=3, h=64)
    tensors[3][0, 1] = 13  # no page
    tensors[4][2] = 2**31 - 1
    scores = indexer.scores_paged(*tensors, 256)
    chosen, length, best = indexer.topk_paged(*tensors, 256, positions=True, return_scores=True)
    for i in range(3):
        for j in range(3):
            at = chosen[i, j, : int(length[i, j])].long()
            assert torch.equal(scores[i, j, at], best[i, j, : len(at)])
            assert int(torch.isneginf(scores[i, j]).sum()) == 256 - len(at)


def test_refusals_and_support():
    tensors, _ = problem()
    for columns in (-1, 2**31, 2**40):
        want = rf"scores_paged: max_context: want 0 to 2\^31 - 128, got {columns}$"
        with pytest.raises(ValueError, match=want):
            indexer.scores_paged(*tensors, columns)
    with pytest.raises(ValueError, match=r"scores: want shape \[b=3, s_q=2, max_context=9\]"):
        indexer.scores_paged(*tensors, 9, out=torch.empty(3, 1, 9))
    tensors[0] = tensors[0].float()
    with pytest.raises(ValueError, match="scores_paged: q: want dtype f8_e4m3, got f32"):
        indexer.scores_paged(*tensors, 1)
    assert winnow.supports("indexer.scores_paged", dtype="float8_e4m3fn", b=3, num_pages=9)
    assert not winnow.supports("indexer.scores_paged", dtype="float8_e4m3fn", d=32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    tensors, _ = problem(device=device)
    operator = torch.ops.winnow.indexer_scores_paged.default
    # opcheck adds tensors up, and torch has no such sum of float8.
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (*tensors, 70), test_utils=utils)
    torch.library.opcheck(operator, (*tensors, 70, False), test_utils=utils)
    compiled = torch.compile(lambda *a: ops.indexer_scores_paged(*a, 70), fullgraph=True)
    assert torch.equal(compiled(*tensors), indexer.scores_paged(*tensors, 70))
