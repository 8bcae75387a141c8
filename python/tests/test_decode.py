"""Sparse MLA decode over a paged cache: the bindings, torch operators and FlashMLA's functions."""

import sys

import numpy as np
import pytest
import torch
import winnow.torch as ops
from kinds import DEVICES
from winnow.compat import flash_mla

import winnow
from winnow import compat, sparse_mla

FORMATS = ["fp8_656", "fp8_584", "bf16"]
COLUMNS = {"fp8_656": 576, "fp8_584": 512, "bf16": 576}


def new_cache(format, blocks, block_size, device="cpu"):
    """A cache of zeros in its format's own layout."""
    if format == "bf16":
        return torch.zeros(blocks, block_size, 1, 576, dtype=torch.bfloat16, device=device)
    if format == "fp8_656":
        return torch.zeros(blocks, block_size, 1, 656, dtype=torch.float8_e4m3fn, device=device)
    padded = -(-block_size * 584 // 576) * 576
    blocks = torch.zeros(blocks, padded, dtype=torch.uint8, device=device)
    return blocks[:, : block_size * 584].unflatten(1, (block_size, 1, 584))


def rounded(rows, format):
    """What the cache holds of bfloat16 rows: a formula in torch."""
    if format == "bf16":
        return rows
    group, quantised = (128, 512) if format == "fp8_656" else (64, 448)
    groups = rows[:, :quantised].double().unflatten(1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    f8 = (groups / scale).float().to(torch.float8_e4m3fn)
    nope = (f8.double() * scale).bfloat16().flatten(1)
    return torch.cat([nope, rows[:, quantised:]], 1)


def attention(q, parts, scale, sink=None):
    """(out, lse) in double precision. parts: (rows by slot, indices, topk_length [b, s_q]) each."""
    logits, values = [], []
    for rows, indices, length in parts:
        chosen = indices.long().clamp(0, len(rows) - 1)
        keys = rows[chosen].double()  # [b, s_q, topk, d]
        x = torch.einsum("bshd,bskd->bshk", q.double(), keys) * scale
        absent = (indices < 0) | (indices >= len(rows))
        if length is not None:
            absent = absent | (torch.arange(indices.shape[-1]) >= length[..., None])
        logits.append(x.masked_fill(absent[:, :, None], -torch.inf))
        values.append(keys[..., :512])
    x = torch.cat(logits, -1)
    lse = x.logsumexp(-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.double())
    p = torch.exp(x - whole.masked_fill(whole == -torch.inf, 0)[..., None])
    return torch.einsum("bshk,bskd->bshd", p, torch.cat(values, 2)), lse


def problem(format, b=3, s_q=2, h_q=8, topk=20, blocks=5, block_size=16, seed=0, device="cpu"):
    made = torch.Generator().manual_seed(seed)
    slots = blocks * block_size
    rows = torch.randn(slots, COLUMNS[format], generator=made).bfloat16()
    cache = new_cache(format, blocks, block_size, device)
    sparse_mla.store(rows.to(device), cache, torch.arange(slots, device=device), format=format)
    q = torch.randn(b, s_q, h_q, COLUMNS[format], generator=made).bfloat16()
    indices = torch.randint(-3, slots + 3, (b, s_q, topk), generator=made, dtype=torch.int32)
    return q.to(device), cache, indices.to(device), rounded(rows, format)


def close(out, lse, want):
    # bf16 has a step of 2^-7 from 1 on.
    torch.testing.assert_close(out.cpu().double(), want[0], rtol=2**-8, atol=1e-2)
    torch.testing.assert_close(lse.cpu().double(), want[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8_656", "bf16"])
@pytest.mark.parametrize("of_queries", [False, True])
def test_all_rows_of_a_sequence(of_queries, format, device):
    """block_tables in place of indices: the formula, and the bits of a call with all slots."""
    q, cache, _, rows = problem(format, device=device)
    tables = torch.tensor([[4, 0, 2], [1, 1, -1], [3, 5, 0]], dtype=torch.int32)
    context = torch.tensor([[40, 41], [48, 3], [0, 33]], dtype=torch.int32)
    if not of_queries:
        context[:, 0] = context[:, 1] - 1
    t = torch.arange(48)
    block = tables[:, t // 16]
    slots = torch.where((block < 0) | (block > 4), -1, block * 16 + t % 16).int()
    slots = slots[:, None].expand(3, 2, 48).contiguous()
    lens = context if of_queries else context[:, 1].contiguous()
    given = {"format": format, "scale": 0.05}
    got = sparse_mla.decode(
        q, cache, block_tables=tables.to(device), context_lens=lens.to(device), **given
    )
    close(*got, attention(q.cpu(), [(rows, slots, context)], 0.05))
    same = sparse_mla.decode(q, cache, slots.to(device), topk_length=context.to(device), **given)
    assert torch.equal(got[0], same[0]) and torch.equal(got[1], same[1])
    operator = ops.sparse_mla_decode(
        q, cache, block_tables=tables.to(device), context_lens=lens.to(device), **given
    )
    assert torch.equal(operator[0], got[0])
    with pytest.raises(ValueError, match="indices: want none, with block_tables and context_lens"):
        sparse_mla.decode(q, cache, slots.to(device), block_tables=tables.to(device), **given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8_656", "bf16"])
def test_queries_that_are_not_causal_see_all_rows(format, device):
    """The formula, and the bits of one length for all queries by a stride of 0."""
    q, cache, indices, rows = problem(format, device=device)
    tables = torch.tensor([[4, 0, 2], [1, 1, 3], [3, 2, 0]], dtype=torch.int32)
    lens = torch.tensor([40, 0, 17], dtype=torch.int32)
    t = torch.arange(48)
    slots = (tables[:, t // 16] * 16 + t % 16)[:, None].expand(3, 2, 48)
    want = attention(q.cpu(), [(rows, slots, lens[:, None].expand(3, 2))], 0.05)
    given = {"format": format, "scale": 0.05, "block_tables": tables.to(device)}
    lens = lens.to(device)
    for call in (sparse_mla.decode, ops.sparse_mla_decode):
        got = call(q, cache, context_lens=lens, causal=False, **given)
        close(*got, want)
        for causal in (False, True):  # which says nothing of lengths of queries
            of_queries = lens[:, None].expand(3, 2)
            same = call(q, cache, context_lens=of_queries, causal=causal, **given)
            assert torch.equal(got[0], same[0]) and torch.equal(got[1], same[1])
        one = call(q[:, :1], cache, context_lens=lens, causal=False, **given)
        same = call(q[:, :1], cache, context_lens=lens, **given)
        assert torch.equal(one[0], same[0]) and torch.equal(one[1], same[1])
        text = "causal: want true, without context_lens, got false"
        with pytest.raises(ValueError, match=text):
            call(q, cache, indices, format=format, causal=False)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8_584", "bf16"])
def test_lse_of_flash_mla_is_infinite_where_nothing_is_visible(format, device, batch_invariant):
    q, cache, indices, _ = problem(format, device=device)
    indices[1, 0] = -1
    given = {"format": format, "scale": 0.05, "batch_invariant": batch_invariant}
    out, want = sparse_mla.decode(q, cache, indices, **given)
    assert torch.isneginf(want[1, 0]).all()
    want[1, 0] = torch.inf
    for call in (sparse_mla.decode, ops.sparse_mla_decode):
        got, lse = call(q, cache, indices, flash_mla_lse=True, **given)
        assert torch.equal(got, out) and torch.equal(lse, want)
    with pytest.raises(TypeError, match="flash_mla_lse: want True or False, got int"):
        sparse_mla.decode(q, cache, indices, flash_mla_lse=1, **given)


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_have_any_strides(device):
    """One for all queries of a sequence by a stride of 0, and with gaps: as dense copies."""
    q, cache, indices, _ = problem("bf16", device=device)
    lens = torch.tensor([17, 3, 40], dtype=torch.int32, device=device)
    tables = torch.tensor([[4, 0, 2], [1, 1, -1], [3, 5, 0]], dtype=torch.int32, device=device)
    apart = torch.stack((lens, lens + 9), 1)
    layouts = {
        "for all queries": lens[:, None].expand(3, 2),
        "of sequences, apart": apart[:, 0],
        "of queries, apart": torch.stack((apart, apart), 2)[..., 0],
        "by query": apart.T.contiguous().T,
    }
    for kind, lengths in layouts.items():
        assert lengths.stride(-1) != 1
        for given, name in (
            ({"block_tables": tables}, "context_lens"),
            ({"indices": indices}, "topk_length"),
        ):
            for call in (sparse_mla.decode, ops.sparse_mla_decode):
                got = call(q, cache, format="bf16", **given, **{name: lengths})
                want = call(q, cache, format="bf16", **given, **{name: lengths.contiguous()})
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), (kind, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_decode_against_a_formula(format, device):
    q, cache, indices, rows = problem(format, device=device)
    indices[1, 0] = -1
    out, lse = sparse_mla.decode(q, cache, indices, format=format, scale=0.05)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    close(out, lse, attention(q.cpu(), [(rows, indices.cpu(), None)], 0.05))
    assert (out[1, 0] == 0).all() and torch.isneginf(lse[1, 0]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_decode_with_everything(format, device):
    q, cache, indices, rows = problem(format, device=device)
    _, extra, extra_indices, extra_rows = problem(format, topk=9, blocks=3, block_size=4, seed=1,
                                                  device=device)  # fmt: skip
    length = torch.tensor([[3, 20], [0, 99], [-1, 7]], dtype=torch.int32)
    extra_length = torch.tensor([9, 0, 4], dtype=torch.int32)
    sink = torch.randn(8)
    out, lse = sparse_mla.decode(
        q, cache, indices, format=format, topk_length=length.to(device), attn_sink=sink.to(device),
        extra_cache=extra, extra_indices=extra_indices, extra_topk_length=extra_length.to(device),
        batch_invariant=False,
    )  # fmt: skip
    parts = [
        (rows, indices.cpu(), length),
        (extra_rows, extra_indices.cpu(), extra_length[:, None].expand(3, 2)),
    ]
    close(out, lse, attention(q.cpu(), parts, COLUMNS[format] ** -0.5, sink))


@pytest.mark.parametrize("format", FORMATS)
def test_store_writes_only_its_slots(format):
    cache, want = new_cache(format, 2, 4), new_cache(format, 2, 4)
    rows = torch.randn(3, COLUMNS[format]).bfloat16()
    sparse_mla.store(rows, cache, torch.tensor([5, -1, 2], dtype=torch.int32), format=format)
    sparse_mla.store(rows[::2], want, torch.tensor([5, 2]), format=format)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
    assert cache.view(torch.uint8).bool().any()


def test_refusals():
    q, cache, indices, _ = problem("fp8_656")
    with pytest.raises(
        ValueError, match="decode: format: want fp8_656, fp8_584, fp8_576 or bf16, got x"
    ):
        sparse_mla.decode(q, cache, indices, format="x")
    with pytest.raises(ValueError, match="store: format: want fp8_656, .* or bf16, got x"):
        sparse_mla.store(q[0, 0], cache, torch.arange(8), format="x")
    with pytest.raises(ValueError, match=r"cache: want .* for the format fp8_584 \(fp8_656 has"):
        sparse_mla.decode(q, cache, indices, format="fp8_584")


def test_supports():
    for dtype, d_qk in (("float8_e4m3fn", 576), ("float8_e4m3fn", 512), ("bfloat16", 576)):
        assert winnow.supports("sparse_mla.decode", dtype=dtype, d_qk=d_qk, b=64, h_q=16)
        assert winnow.supports("sparse_mla.store", dtype=dtype, d_qk=d_qk, n=7)
    assert "cache: want dtype bf16, got f32" in winnow.supports("sparse_mla.decode").reason


# ---- torch operators


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_compiled(format, device):
    q, cache, indices, _ = problem(format, device=device)
    rows, slots = q[0, 0].contiguous(), torch.arange(8, device=device)

    def step(q, cache, rows, slots):
        ops.sparse_mla_store(rows, cache, slots, format=format)
        return ops.sparse_mla_decode(q, cache, indices, format=format, scale=0.1)

    changed = cache.clone(memory_format=torch.preserve_format)
    if format == "fp8_584":
        changed = new_cache(format, 5, 16, device)
        changed.copy_(cache)
    got = torch.compile(step, fullgraph=True)(q, changed, rows, slots)
    for result, wanted in zip(got, step(q, cache, rows, slots), strict=True):
        assert torch.equal(result, wanted)
    assert torch.equal(changed.view(torch.uint8), cache.view(torch.uint8))


def test_a_gradient_is_refused():
    q, cache, indices, _ = problem("fp8_656")
    out, _ = ops.sparse_mla_decode(q.requires_grad_(), cache, indices)
    with pytest.raises(RuntimeError, match="sparse_mla_decode has no gradient"):
        out.sum().backward()


# ---- FlashMLA's functions


@pytest.mark.parametrize("format", ["fp8_656", "fp8_584"])
def test_flash_mla_with_kvcache(format):
    q, cache, indices, _ = problem(format)
    _, extra, extra_indices, _ = problem(format, topk=9, blocks=3, block_size=4, seed=1)
    indices[1, 0] = -1
    extra_indices[1, 0] = -1
    length, sink = torch.tensor([3, 20, 0], dtype=torch.int32), torch.randn(8)
    metadata, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache.view(torch.int8), None, None, 512, metadata, None, 0.1, False, True, indices, sink,
        extra.view(torch.int8), extra_indices, length, length,
    )  # fmt: skip
    want = sparse_mla.decode(
        q, cache, indices, format=format, scale=0.1, topk_length=length, attn_sink=sink,
        extra_cache=extra, extra_indices=extra_indices, extra_topk_length=length,
    )  # fmt: skip
    assert torch.equal(out, want[0])
    assert lse.shape == (3, 8, 2)
    nothing = torch.isneginf(want[1])
    assert nothing[1, 0].all() and nothing[2].all() and not nothing[0].any()
    assert torch.equal(lse.transpose(1, 2), want[1].masked_fill(nothing, torch.inf))


def test_flash_mla_takes_its_defaults():
    q, cache, indices, _ = problem("fp8_656")
    plan, nothing = flash_mla.get_mla_metadata(torch.ones(3), 16, 1, is_fp8_kvcache=True)
    assert nothing is None
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, plan, is_fp8_kvcache=True, indices=indices
    )
    want = sparse_mla.decode(q, cache, indices)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1].transpose(1, 2))


@pytest.mark.parametrize("name", ["func", "qkvpacked_func", "kvpacked_func"])
def test_dense_attention_is_refused_by_name(name):
    q = torch.zeros(3, 4, 576)
    with pytest.raises(winnow.Error, match=f"flash_attn_varlen_{name}: dense") as caught:
        getattr(flash_mla, f"flash_attn_varlen_{name}")(q, q, q)
    assert caught.value.code == "unsupported"


def test_install_lets_imports_find_it(monkeypatch):
    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert compat.install("flash_mla") is flash_mla
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    from flash_mla.flash_mla_interface import flash_mla_sparse_fwd

    assert flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert flash_mla_sparse_fwd is compat.flash_mla_sparse_fwd
    assert get_mla_metadata()[1] is None
    assert compat.install("flash_mla") is flash_mla
    monkeypatch.setitem(sys.modules, "flash_mla", np)
    with pytest.raises(ValueError, match="want no flash_mla imported before"):
        compat.install("flash_mla")
    assert sys.modules["flash_mla"] is np
    with pytest.raises(
        ValueError, match="compat.install: name: want deep_ep or deep_gemm or flash_mla, got torch"
    ):
        compat.install("torch")
    with pytest.raises(ValueError, match="install: name: want deep_ep or .*, got \\[\\]"):
        compat.install([])
