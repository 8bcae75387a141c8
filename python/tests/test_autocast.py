"""torch.autocast, sinks of a module in bfloat16, and torch's count of operations."""

import problems
import pytest
import torch
import winnow.torch as wt
from problems import of_torch as _sparse
from torch.utils.flop_counter import FlopCounterMode


def _paged():
    return {name: torch.from_numpy(value) for name, value in problems.paged_xl().items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_autocast_casts_queries_and_keys_and_keeps_the_sink(dtype, compiled):
    (q, kv, indices), options = _sparse(sink=True)
    sink = options["attn_sink"].requires_grad_()
    q.requires_grad_(), kv.requires_grad_()

    def attend(q, kv, sink):
        with torch.autocast("cpu", dtype=dtype):
            return wt.sparse_mla_attention(q, kv, indices, attn_sink=sink)

    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got = attend(q, kv, sink)
    want = wt.sparse_mla_attention(q.to(dtype), kv.to(dtype), indices, attn_sink=sink)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((got * weights).sum(), (q, kv, sink))
    wanted = torch.autograd.grad((want * weights).sum(), (q, kv, sink))
    for gradient, expected, leaf in zip(gradients, wanted, (q, kv, sink), strict=True):
        assert gradient.dtype == leaf.dtype == torch.float32
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_autocast_leaves_what_it_leaves_of_torchs_own():
    (q, kv, indices), _ = _sparse()
    want = wt.sparse_mla_attention(q, kv, indices)
    with torch.autocast("cpu", enabled=False):
        assert wt.sparse_mla_attention(q, kv, indices).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = wt.sparse_mla_attention(q, kv, indices, return_lse=True)
        teacher = wt.sparse_mla_distribution(q, kv, indices, lse)
        assert torch.is_autocast_enabled("cpu")
    assert out.dtype == torch.bfloat16 and lse.dtype == teacher.dtype == torch.float32
    torch.testing.assert_close(wt.sparse_mla_attention(q, kv, indices), want, rtol=0, atol=0)


def test_autocast_casts_the_second_source_like_the_first():
    (q, kv, indices), _ = _sparse()
    extra = {"extra_indices": indices, "extra_kv": kv.flip(0)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = wt.sparse_mla_attention(q, kv, indices, return_lse=True, **extra)
        teacher = wt.sparse_mla_distribution(q, kv, indices, lse, **extra)
    extra["extra_kv"] = extra["extra_kv"].bfloat16()
    want = wt.sparse_mla_attention(q.bfloat16(), kv.bfloat16(), indices, **extra)
    assert torch.equal(out, want)
    assert [sums.dtype for sums in teacher] == [torch.float32] * 2


def test_autocast_follows_the_cache():
    a = _paged()
    want_term = wt.paged_xl_position_term(a["query"], a["pos_bias_v"], a["r"], a["context_lens"])
    rest = (a["block_tables"], a["context_lens"])
    caches = (a["key_cache"], a["value_cache"])
    wt.paged_xl_append(a["key"], a["value"], *caches, a["slot_mapping"])
    want = wt.paged_xl_attention(a["query"], *caches, a["pos_bias_u"], want_term, None, *rest)
    half = {name: value.half() for name, value in a.items() if value.is_floating_point()}
    again = [torch.full_like(cache, float("nan")) for cache in caches]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        term = wt.paged_xl_position_term(a["query"], a["pos_bias_v"], a["r"], a["context_lens"])
        wt.paged_xl_append(half["key"], half["value"], *again, a["slot_mapping"])
        out = wt.paged_xl_attention(half["query"], *again, half["pos_bias_u"], term, None, *rest)
        fused = wt.paged_xl_attention_fused(
            half["query"], *again, half["pos_bias_u"], half["pos_bias_v"], half["r"], None, *rest
        )
    assert term.dtype == torch.bfloat16 and out.dtype == fused.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)
    torch.testing.assert_close(fused, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_the_sink_of_a_module_cast_whole(dtype, compiled):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sink = torch.nn.Parameter(torch.linspace(-1, 1, 4))

        def forward(self, q, kv, indices):
            return wt.sparse_mla_attention(q, kv, indices, attn_sink=self.sink)

    (q, kv, indices), _ = _sparse()
    q, kv = q.to(dtype), kv.to(dtype)
    module = Attention().to(dtype)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    out = call(q, kv, indices)
    sink = module.sink.detach().float().requires_grad_()
    want = wt.sparse_mla_attention(q, kv, indices, attn_sink=sink)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    (expected,) = torch.autograd.grad(want.float().square().sum(), sink)
    out.float().square().sum().backward()
    assert module.sink.grad.dtype == dtype
    torch.testing.assert_close(module.sink.grad, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("source", ["a list", "a range", "a range and a list"])
def test_flops_are_those_of_all_rows_that_may_be_seen(source):
    (q, kv, indices), _ = _sparse(s_q=3, h_q=4, topk=7)
    q.requires_grad_(), kv.requires_grad_()
    rows = {"a list": 7, "a range": len(kv), "a range and a list": len(kv) + 7}[source]
    options = {"indices": indices}
    if source != "a list":
        first, last = torch.zeros(3, dtype=torch.int32), torch.full((3,), 5, dtype=torch.int32)
        options = {"indices": None, "key_start": first, "key_end": last}
    if source == "a range and a list":
        options.update(extra_kv=kv.detach()[:9], extra_indices=indices)
    pairs = 3 * 4 * rows
    with FlopCounterMode(display=False) as counter:
        out, lse = wt.sparse_mla_attention(q, kv, return_lse=True, **options)
        assert counter.get_total_flops() == 2 * pairs * (576 + 512)
        out.sum().backward()
        assert counter.get_total_flops() == 2 * pairs * (4 * 576 + 3 * 512)
        wt.sparse_mla_distribution(q.detach(), kv.detach(), lse=lse.detach(), **options)
    assert counter.get_total_flops() == 2 * pairs * (5 * 576 + 3 * 512)


@pytest.mark.parametrize("dense", [False, True])
def test_flops_of_the_indexer_are_counted(dense):
    s_q, heads, s_k, d, topk = 5, 3, 40, 64, 9
    q, k, weights = torch.randn(s_q, heads, d), torch.randn(s_k, d), torch.randn(s_q, heads)
    product = 2 * s_q * heads * d
    leaves = [t.requires_grad_() for t in (q, k, weights)]
    with FlopCounterMode(display=False) as counter:
        indices, _ = wt.indexer_topk(q, k, weights, topk)
    assert counter.get_total_flops() == product * s_k
    indices, columns = (None, s_k) if dense else (indices, topk)
    with FlopCounterMode(display=False) as counter:
        wt.indexer_scores(*leaves, indices).sum().backward()
    assert counter.get_total_flops() == product * columns * 4
    with FlopCounterMode(display=False) as counter:
        wt.indexer_loss(*leaves, torch.ones(s_q, columns), indices).backward()
    assert counter.get_total_flops() == product * columns * 5


def test_flops_of_paged_decode_are_counted():
    a = _paged()
    seqs, heads, size = a["query"].shape
    tokens = a["block_tables"].shape[1] * 8
    rest = (a["block_tables"], a["context_lens"])
    caches = (a["key_cache"], a["value_cache"])
    with FlopCounterMode(display=False) as counter:
        term = wt.paged_xl_position_term(a["query"], a["pos_bias_v"], a["r"], a["context_lens"])
        assert counter.get_total_flops() == 2 * seqs * heads * a["r"].shape[1] * size
    with FlopCounterMode(display=False) as counter:
        wt.paged_xl_attention(a["query"], *caches, a["pos_bias_u"], term, None, *rest)
        assert counter.get_total_flops() == 2 * seqs * heads * tokens * 2 * size
    with FlopCounterMode(display=False) as counter:
        wt.paged_xl_attention_fused(
            a["query"], *caches, a["pos_bias_u"], a["pos_bias_v"], a["r"], None, *rest
        )
    assert counter.get_total_flops() == 2 * seqs * heads * tokens * 3 * size
