"""The indexer's choice from a paged cache, and its scores: the bindings and the torch operators."""

import pytest
import torch
import winnow.torch as ops
from kinds import DEVICES

import winnow
from winnow import indexer

_BOUNDS = {"cpu": {"rtol": 1e-4, "atol": 1e-4}, "cuda": {"rtol": 1e-2, "atol": 5e-2}}


def problem(s_q=2, h=4, d=128, device="cpu", lengths=(150, 3, 64), seed=0):
    """A cache whose pages are in no order, and every sequence's keys as they are rounded."""
    made = torch.Generator().manual_seed(seed)
    b, width, num_pages = len(lengths), 4, 13
    q = torch.randn(b, s_q, h, d, generator=made).to(torch.float8_e4m3fn)
    weights = torch.randn(b, s_q, h, generator=made)
    order = torch.randperm(num_pages, generator=made)[: b * width].view(b, width).int()
    pages = torch.zeros(num_pages, 64 * (d + 4), dtype=torch.uint8)
    keys = []
    for i, length in enumerate(lengths):
        at = torch.arange(length)
        x = torch.randn(length, d, generator=made)
        indexer.quantize(x, pages=pages, slots=order[i, at // 64].long() * 64 + at % 64)
        rows, scale = indexer.quantize(x)
        keys.append(rows.double() * scale.double()[:, None])
    lens = torch.tensor(lengths, dtype=torch.int32)
    return [t.to(device) for t in (q, pages, weights, order, lens)], keys


def formula(q, keys, weights, topk):
    """The best positions of one query, ascending, and their scores."""
    scores = torch.relu(keys @ q.double().T) @ weights.double()
    best = scores.topk(min(topk, len(scores))).indices.sort().values
    return best, scores[best]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128])
def test_against_a_formula(d, device):
    tensors, keys = problem(d=d, device=device)
    q, _, weights, order, lens = (t.cpu() for t in tensors)
    for positions in (False, True):
        indices, length, scores = indexer.topk_paged(
            *tensors, 20, positions=positions, return_scores=True
        )
        for i in range(3):
            for j in range(2):
                seen = keys[i][: int(lens[i]) - 1 + j]
                best, wanted = formula(q[i, j], seen, weights[i, j], 20)
                want = best if positions else order[i, best // 64] * 64 + best % 64
                count = int(length[i, j])
                assert count == len(best)
                assert (indices[i, j, count:] == -1).all()
                got = scores[i, j].cpu().double()
                if device == "cpu":
                    assert indices[i, j, :count].tolist() == want.tolist()
                    torch.testing.assert_close(got[:count], wanted, **_BOUNDS[device])
                else:  # sums of fewer bits may choose others among nearly equal rows
                    chosen = torch.zeros(13 * 64, dtype=torch.bool)
                    chosen[indices[i, j, :count].cpu().long()] = True
                    assert chosen[want.long()].sum() >= count - 1
                    best_first = [t.sort(descending=True).values for t in (got[:count], wanted)]
                    torch.testing.assert_close(*best_first, **_BOUNDS[device])
                assert torch.isneginf(got[count:]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_tables_and_lengths_are_not_trusted(device):
    tensors, _ = problem(device=device)
    q, pages, weights, order, _ = tensors
    lens = torch.tensor([2**31 - 1, -(2**31), 70], dtype=torch.int32, device=device)
    order[2, 0] = 13
    order[0, 3] = -1
    indices, length = indexer.topk_paged(q, pages, weights, order, lens, 300, positions=True)
    assert length.tolist() == [[192, 192], [0, 0], [5, 6]]
    assert indices[2, 1, :6].tolist() == [64, 65, 66, 67, 68, 69]
    assert (indices[1] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_queries", [False, True])
@pytest.mark.parametrize("columns", [64, 150, 300])  # 256 rows have a place in a table
def test_scores_against_a_formula(columns, of_queries, device):
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
            torch.testing.assert_close(got[:seen], want[:seen], **_BOUNDS[device])
            assert torch.isneginf(got[seen:]).all()
            assert torch.equal(left[i, j, :seen], scores[i, j, :seen])
            assert (left[i, j, seen:] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_choice_is_that_of_the_scores(device):
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
    for topk in (0, 2**31, 2**40):
        want = rf"topk_paged: topk: want 1 to 2\^31 - 1, got {topk}$"
        with pytest.raises(ValueError, match=want):
            indexer.topk_paged(*tensors, topk)
    for columns in (-1, 2**31, 2**40):
        want = rf"scores_paged: max_context: want 0 to 2\^31 - 128, got {columns}$"
        with pytest.raises(ValueError, match=want):
            indexer.scores_paged(*tensors, columns)
    with pytest.raises(ValueError, match="topk_paged: ties: want smaller or larger, got x"):
        indexer.topk_paged(*tensors, 1, ties="x")
    with pytest.raises(ValueError, match=r"scores: want shape \[b=3, s_q=2, max_context=9\]"):
        indexer.scores_paged(*tensors, 9, out=torch.empty(3, 1, 9))
    tensors[0] = tensors[0].float()
    for name in ("topk_paged", "scores_paged"):
        with pytest.raises(ValueError, match=f"{name}: q: want dtype f8_e4m3, got f32"):
            getattr(indexer, name)(*tensors, 1)
        f8 = {"dtype": "float8_e4m3fn", "b": 3, "num_pages": 9}
        assert winnow.supports(f"indexer.{name}", **f8)
        assert not winnow.supports(f"indexer.{name}", dtype="float8_e4m3fn", d=32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "size"), [("topk_paged", 7), ("scores_paged", 70)])
def test_operators(name, size, device):
    tensors, _ = problem(device=device)
    call = getattr(ops, f"indexer_{name}")
    compiled = torch.compile(lambda *given: call(*given, size), fullgraph=True)
    want = getattr(indexer, name)(*tensors, size)
    torch.testing.assert_close(compiled(*tensors), want, rtol=0, atol=0)
    if name == "topk_paged":
        assert len(call(*tensors, size, return_scores=True)) == 3
