"""The indexer's choice from a paged cache: the binding and the torch operator."""

import pytest
import torch
import winnow.torch as ops
from kinds import gpu

import winnow
from winnow import indexer

DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


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
                    torch.testing.assert_close(got[:count], wanted, rtol=1e-4, atol=1e-4)
                else:  # sums of fewer bits may choose others among nearly equal rows
                    chosen = torch.zeros(13 * 64, dtype=torch.bool)
                    chosen[indices[i, j, :count].cpu().long()] = True
                    assert chosen[want.long()].sum() >= count - 1
                    best_first = [t.sort(descending=True).values for t in (got[:count], wanted)]
                    torch.testing.assert_close(*best_first, rtol=1e-2, atol=5e-2)
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
def test_queries_have_lengths_of_their_own(device):
    (q, pages, weights, order, lens), _ = problem(s_q=3, device=device)
    own = torch.tensor([[150, 7, 149], [0, 3, 2], [-5, 2**31 - 1, 64]], dtype=torch.int32)
    got = indexer.topk_paged(
        q, pages, weights, order, own.to(device), 300, positions=True, return_scores=True
    )
    assert got[1].tolist() == [[150, 7, 149], [0, 3, 2], [0, 256, 64]]
    for i in range(3):
        for j in range(3):
            alone = (t[i : i + 1, j : j + 1] for t in (q, weights))
            one = [next(alone), pages, next(alone), order[i : i + 1], own[i, j : j + 1].to(device)]
            want = indexer.topk_paged(*one, 300, positions=True, return_scores=True)
            for part, whole in zip(want, got, strict=True):
                assert torch.equal(part[0, 0], whole[i, j])
    # Lengths that grow by a row are those of the sequence.
    growing = lens[:, None] + torch.arange(-2, 1, device=device, dtype=torch.int32)
    want = indexer.topk_paged(q, pages, weights, order, lens, 20)
    got = indexer.topk_paged(q, pages, weights, order, growing, 20)
    assert all(map(torch.equal, want, got))
    with pytest.raises(ValueError, match=r"context_lens: want shape \[b=3, s_q=3\], got \[3, 2\]"):
        indexer.topk_paged(q, pages, weights, order, growing[:, :2].contiguous(), 20)


def test_results_go_where_they_are_wanted():
    tensors, _ = problem()
    want = indexer.topk_paged(*tensors, 9)
    out = torch.zeros(3, 2, 9, dtype=torch.int32)
    got = indexer.topk_paged(*tensors, 9, out=(out, None, None))
    assert got[0] is out and torch.equal(out, want[0]) and torch.equal(got[1], want[1])


def test_refusals_and_support():
    tensors, _ = problem()
    for topk in (0, 2**31, 2**40):
        want = rf"topk_paged: topk: want 1 to 2\^31 - 1, got {topk}$"
        with pytest.raises(ValueError, match=want):
            indexer.topk_paged(*tensors, topk)
    with pytest.raises(ValueError, match="topk_paged: ties: want smaller or larger, got x"):
        indexer.topk_paged(*tensors, 1, ties="x")
    tensors[0] = tensors[0].float()
    with pytest.raises(ValueError, match="topk_paged: q: want dtype f8_e4m3, got f32"):
        indexer.topk_paged(*tensors, 1)
    assert winnow.supports("indexer.topk_paged", dtype="float8_e4m3fn", b=3, num_pages=9)
    assert not winnow.supports("indexer.topk_paged", dtype="float8_e4m3fn", d=32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    tensors, _ = problem(device=device)
    operator = torch.ops.winnow.indexer_topk_paged.default
    # opcheck adds tensors up, and torch has no such sum of float8.
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (*tensors, 7), test_utils=utils)
    torch.library.opcheck(operator, (*tensors, 7, True, "larger", True), test_utils=utils)
    tensors[4] = tensors[4][:, None].repeat(1, 2)
    torch.library.opcheck(operator, (*tensors, 7), test_utils=utils)
    compiled = torch.compile(lambda *a: ops.indexer_topk_paged(*a, 7), fullgraph=True)
    for got, want in zip(compiled(*tensors), indexer.topk_paged(*tensors, 7), strict=True):
        assert torch.equal(got, want)
    assert len(ops.indexer_topk_paged(*tensors, 7, return_scores=True)) == 3
