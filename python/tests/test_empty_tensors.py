"""Tensors without elements, whose memory torch gives as a null pointer, are not absent ones."""

import every_operation
import numpy as np
import pytest
import torch
import winnow.torch as ops

import winnow
from winnow import expert_parallel, indexer, paged_xl, sparse_mla

INF = float("inf")


# Rows that queries may choose from: there may be none.
_CACHES = ("kv", "extra_kv", "k", "cache", "extra_cache", "pages")


@pytest.mark.parametrize(("name", "argument"), every_operation.EVERY_TENSOR)
def test_none_of_the_tensors_may_be_empty_beside_the_others(name, argument):
    """An optional one, too: the call is refused, and not made without it."""
    operation = every_operation.ALL[name]
    tensors = {n: torch.from_numpy(np.array(t)) for n, t in operation.tensors.items()}
    empty = torch.empty_like(tensors[argument][:0])
    assert empty.data_ptr() == 0
    cache = argument in _CACHES and not name.startswith("compressor")  # whose kv are the tokens
    if cache and argument not in operation.outputs and "backward" not in name:
        operation.call(**{**tensors, argument: empty})
        return
    # Outputs keep what they hold, as in every refusal.
    outputs = {n: tensors[n].clone() for n in operation.outputs if n != argument}
    with pytest.raises(winnow.Error) as refused:
        operation.call(**{**tensors, argument: empty})
    assert isinstance(refused.value, ValueError), refused.value
    for output, was in outputs.items():
        assert torch.equal(tensors[output], was)


def _problem(s_q, s_k, dtype, h=3, d=64):
    generator = torch.Generator().manual_seed(s_q + s_k)
    q = torch.randn(s_q, h, d, generator=generator)
    k = torch.randn(s_k, d, generator=generator)
    weights = torch.randn(s_q, h, generator=generator)
    scale = torch.ones(s_k) if dtype == torch.float8_e4m3fn else None
    return q.to(dtype), k.to(dtype), weights, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("s_k", [1, 2, 100, 300])
def test_the_indexers_gradients_of_no_rows_are_0(s_q, s_k, dtype):
    q, k, weights, k_scale = _problem(s_q, s_k, dtype)
    indices = torch.empty(s_q, 0, dtype=torch.int32)
    # One that has an address: what lies there is nobody's gradient.
    foreign = torch.full((s_q, s_k + 1), 7.0)
    for d_scores in (torch.empty(s_q, 0), foreign[:, :0]):
        for deterministic in (False, True):
            gradients = indexer.backward(
                q, k, weights, indices, d_scores, k_scale=k_scale, deterministic=deterministic
            )
            assert all(torch.count_nonzero(g.float()) == 0 for g in gradients)
            assert [tuple(g.shape) for g in gradients] == [q.shape, k.shape, weights.shape]
    assert indexer.scores(q, k, weights, indices, k_scale=k_scale).shape == (s_q, 0)


def test_the_operators_gradients_of_no_rows_are_0():
    q, k, weights, _ = _problem(3, 50, torch.float32)
    for tensor in (q, k, weights):
        tensor.requires_grad_()
    scores = ops.indexer_scores(q, k, weights, torch.empty(3, 0, dtype=torch.int32))
    scores.sum().backward()
    for tensor in (q, k, weights):
        assert torch.count_nonzero(tensor.grad) == 0


def test_operations_without_queries():
    """Every tensor of the queries is empty, those that may be absent included."""
    kv, no = torch.randn(9, 1, 576), torch.empty
    q, indices, length = no(0, 4, 576), no(0, 1, 5, dtype=torch.int32), no(0, dtype=torch.int32)
    out, _, lse = sparse_mla.forward(q, kv, indices, topk_length=length)
    assert out.shape == (0, 4, 512) and lse.shape == (0, 4)
    dense, _, _ = sparse_mla.forward(q, kv, None, key_start=length, key_end=length)
    assert dense.shape == (0, 4, 512)
    dq, dkv = sparse_mla.backward(q, kv, indices, out, lse, no(0, 4, 512), topk_length=length)
    assert dq.shape == q.shape and torch.count_nonzero(dkv) == 0
    k, q, weights = torch.randn(20, 64), no(0, 3, 64), no(0, 3)
    ranges = {"key_start": length, "key_end": length}
    assert indexer.scores(q, k, weights, **ranges).shape == (0, 20)
    assert indexer.scores(q, k, weights, **ranges, width=7).shape == (0, 7)
    assert [t.shape[0] for t in indexer.topk(q, k, weights, 4, **ranges)] == [0, 0]
    for indices in (None, no(0, 7, dtype=torch.int32)):
        columns = 20 if indices is None else 7
        dq, dk, dw = indexer.backward(q, k, weights, indices, no(0, columns), **ranges)
        assert dq.shape == q.shape and dw.shape == weights.shape and torch.count_nonzero(dk) == 0


def test_an_indexer_without_keys():
    q, k, weights, k_scale = _problem(2, 0, torch.float8_e4m3fn)
    assert k_scale.data_ptr() == 0
    assert indexer.scores(q, k, weights, k_scale=k_scale).shape == (2, 0)
    indices, length = indexer.topk(q, k, weights, 3, k_scale=k_scale)
    assert indices.tolist() == [[-1] * 3] * 2 and length.tolist() == [0, 0]
    with pytest.raises(ValueError, match="k_scale: want a tensor"):
        indexer.scores(q, k, weights)
    some = torch.tensor([[0, 3]] * 2, dtype=torch.int32)
    assert torch.all(indexer.scores(q, k, weights, some, k_scale=k_scale) == -INF)
    wide = {"key_start": torch.tensor([0, -3], dtype=torch.int32), "width": 5}
    assert torch.all(indexer.scores(q, k, weights, k_scale=k_scale, **wide) == -INF)
    dq, dk, dw = indexer.backward(q, k, weights, some, torch.ones(2, 2), k_scale=k_scale)
    assert dk.shape == (0, 64) and not dq.any() and not dw.any()


def test_decode_of_no_rows_and_of_an_empty_second_cache():
    q = torch.randn(2, 1, 4, 576).bfloat16()
    cache = torch.zeros(3, 4, 1, 576, dtype=torch.bfloat16)
    indices = torch.zeros(2, 1, 3, dtype=torch.int32)
    none = torch.empty(2, 1, 0, dtype=torch.int32)
    out, lse = sparse_mla.decode(q, cache, none, format="bf16")
    assert torch.count_nonzero(out) == 0 and torch.all(lse == -INF)
    plain, _ = sparse_mla.decode(q, cache, indices, format="bf16")
    for extra, chosen in ((cache[:0], indices), (torch.empty(0, 4, 1, 576).bfloat16(), none)):
        both, _ = sparse_mla.decode(
            q, cache, indices, format="bf16", extra_cache=extra, extra_indices=chosen
        )
        assert torch.equal(both, plain)
    with pytest.raises(ValueError, match="extra_indices: want a tensor"):
        sparse_mla.decode(q, cache, indices, format="bf16", extra_cache=cache[:0])


def test_quantize_no_rows():
    rows, scale = indexer.quantize(torch.empty(0, 64))
    assert rows.shape == (0, 64) and scale.shape == (0,)
    pages, slots = torch.full((1, 64 * 68), 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    indexer.quantize(torch.empty(0, 64), pages=pages, slots=slots)
    assert torch.all(pages == 3)
    with pytest.raises(ValueError, match="out: want None, with pages to write to"):
        indexer.quantize(
            torch.empty(0, 64), pages=pages, slots=slots,
            out=(torch.empty(0, 64, dtype=torch.uint8), torch.empty(0)),
        )  # fmt: skip


def test_a_position_term_of_no_columns_is_one():
    query, cache = torch.randn(2, 4, 32), torch.zeros(1, 4, 8, 8, 4)
    arguments = [query, cache, torch.zeros(1, 4, 32, 8), torch.zeros(4, 32)]
    tables, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    out = paged_xl.attention(*arguments, torch.empty(2, 4, 0), None, tables, lengths)
    assert torch.count_nonzero(out) == 0
    fused = paged_xl.attention_fused(
        *arguments, torch.zeros(4, 32), torch.empty(4, 0, 32), None, tables, lengths
    )
    assert torch.count_nonzero(fused) == 0


def test_a_rank_without_tokens_gives_weights_and_gets_bias():
    world = expert_parallel.InProcessWorld(1)
    layer = expert_parallel.AllToAll(
        world.transport(0), world.store(), max_tokens=3, hidden=16, topk=2, experts=4,
        dtype="float32", timeout=20,
    )  # fmt: skip
    none = torch.empty(0, 16)
    for order in ("expert_major", "token_major"):
        arrived = layer.dispatch(
            none, torch.empty(0, 2, dtype=torch.int32), weights=torch.empty(0, 2), order=order
        )
        assert arrived.output.shape == (0, 16)
        assert arrived.weights.shape == ((0,) if order == "expert_major" else (0, 2))
        sums = layer.combine(arrived.output, arrived.descriptor, bias=none)
        assert sums.shape == (0, 16)
        out, values = layer.combine(
            arrived.output, arrived.descriptor, pair_values=torch.empty(arrived.weights.shape)
        )
        assert out.shape == (0, 16) and values.shape == (0, 2)
