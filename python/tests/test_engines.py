"""The calls that vLLM 0.33.0, SGLang 0.5.23 and Megatron-core 0.19.2 make of flash_mla and
deep_gemm, against formulas in double precision."""

import math

import numpy as np
import pytest
import torch
from kinds import DEVICES
from test_decode import attention, close, problem
from test_topk_paged import problem as paged_problem
from torch.utils._python_dispatch import TorchDispatchMode
from winnow.compat import _original, deep_gemm, flash_mla

import winnow
from winnow import sparse_mla

SCALE = 0.05


def on(device, given):
    """Arguments, of which the tensors are on that device."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


# ---- flash_mla: decode


def lse_of_flash_mla(lse):
    """[b, s_q, h_q] with +inf where nothing is visible."""
    assert not torch.isneginf(lse).any()
    return lse.transpose(1, 2).masked_fill(torch.isposinf(lse.transpose(1, 2)), -torch.inf)


def test_decode_of_v32_as_vllm_calls_it(device):
    q, cache, indices, rows = problem("fp8_656", device=device)
    indices[1, 0] = -1
    metadata, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=q,
        k_cache=cache.squeeze(2).view(torch.uint8).unsqueeze(-2),
        block_table=torch.zeros(3, 1, dtype=torch.int32, device=device),
        head_dim_v=512,
        cache_seqlens=torch.full((3,), 80, dtype=torch.int32, device=device),
        tile_scheduler_metadata=metadata,
        is_fp8_kvcache=True,
        indices=indices,
        softmax_scale=SCALE,
    )
    close(out, lse_of_flash_mla(lse), attention(q.cpu(), [(rows, indices.cpu(), None)], SCALE))


def test_decode_of_v4_as_vllm_calls_it(device):
    """A window and chosen rows, into memory that the engine has."""
    q, cache, indices, rows = problem("fp8_584", s_q=1, device=device)
    _, extra, chosen, extra_rows = problem("fp8_584", s_q=1, topk=9, block_size=4, seed=1,
                                           device=device)  # fmt: skip
    lengths = torch.tensor([20, 3, 0], dtype=torch.int32)
    sink, output = torch.randn(8), torch.full((3, 8, 512), torch.nan).bfloat16().to(device)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=q, k_cache=cache, block_table=None, head_dim_v=512, cache_seqlens=None,
        tile_scheduler_metadata=flash_mla.FlashMLASchedMeta(), is_fp8_kvcache=True,
        indices=indices, topk_length=lengths.to(device), softmax_scale=SCALE,
        attn_sink=sink.to(device), extra_k_cache=extra, extra_indices_in_kvcache=chosen,
        extra_topk_length=lengths.to(device), out=output.unsqueeze(1),
    )  # fmt: skip
    assert out.data_ptr() == output.data_ptr()
    length = lengths[:, None]
    parts = [(rows, indices.cpu(), length), (extra_rows, chosen.cpu(), length)]
    close(output[:, None], lse_of_flash_mla(lse), attention(q.cpu(), parts, SCALE, sink))


def test_decode_as_sglang_calls_it(device):
    """With a plan as tensors, which the engine copies into its own."""
    q, cache, indices, rows = problem("fp8_656", s_q=1, device=device)
    lengths = torch.full((3,), 80, dtype=torch.int32, device=device)
    plan, splits = flash_mla.get_mla_decoding_metadata(lengths, 8, 1, 8, True, 20, use_legacy=True)
    kept = torch.empty(132, 8, dtype=torch.int32, device=device)
    kept[: len(plan)].copy_(plan)
    assert splits.shape == (4,) and splits.dtype == torch.int32 and splits.device == q.device
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=q, k_cache=cache, block_table=indices.new_empty(3, 0), cache_seqlens=lengths,
        head_dim_v=512, softmax_scale=SCALE, causal=False, is_fp8_kvcache=True, indices=indices,
        tile_scheduler_metadata=flash_mla.FlashMLASchedMeta(
            tile_scheduler_metadata=kept, num_splits=splits
        ),
        attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
        extra_topk_length=None, use_legacy=True, kv_format="V32", descale_q=None, descale_k=None,
    )  # fmt: skip
    close(out, lse_of_flash_mla(lse), attention(q.cpu(), [(rows, indices.cpu(), None)], SCALE))


def test_batch_invariant_decode_has_the_bits_of_each_sequence_alone(device):
    q, cache, indices, _ = problem("fp8_656", b=5, device=device)

    def decode(rows):
        return flash_mla.flash_mla_with_kvcache(
            q[rows], cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices[rows],
            enable_batch_invariant=True,
        )  # fmt: skip

    together = decode(slice(None))
    for i in range(5):
        alone = decode(slice(i, i + 1))
        assert torch.equal(alone[0], together[0][i : i + 1])
        assert torch.equal(alone[1], together[1][i : i + 1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("format", ["bf16", "fp8_656"])
def test_dense_decode_as_vllm_and_megatron_call_it(device, format, causal):
    """Over all cached rows of each sequence, found by its table."""
    q, cache, _, rows = problem(format, blocks=7, block_size=16, device=device)
    table = torch.tensor([[3, 0, 5], [6, 6, 6], [1, 4, 2]], dtype=torch.int32)
    lengths = torch.tensor([40, 0, 17], dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, table.to(device), lengths.to(device), 512, flash_mla.FlashMLASchedMeta(), None,
        softmax_scale=SCALE, causal=causal, is_fp8_kvcache=format != "bf16",
    )  # fmt: skip
    position = torch.arange(48)
    slots = (table[:, position // 16] * 16 + position % 16)[:, None].expand(3, 2, 48)
    seen = lengths[:, None] - (torch.tensor([1, 0]) if causal else torch.zeros(2, dtype=torch.int))
    want = attention(q.cpu(), [(rows, slots, seen.clamp(min=0))], SCALE)
    close(out, lse_of_flash_mla(lse), want)


class Called(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, given=(), named=None):
        self.names.add(function.name())
        return function(*given, **(named or {}))


def test_functions_run_no_kernel_but_those_of_winnow(device):
    """Results are new memory, of which decode returns a view."""
    q, cache, indices, _ = problem("fp8_656", device=device)
    plain = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16, device=device)
    table, lengths = indices[:, 0, :3].clamp(0, 3).contiguous(), indices[:, 0, 0].contiguous()
    prefill = prefill_problem(device)
    with Called() as called:
        flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices
        )
        flash_mla.flash_mla_with_kvcache(q, plain, table, lengths, 512, None)
        flash_mla.flash_mla_sparse_fwd(*prefill, SCALE)
    assert called.names <= {"aten::empty.memory_format", "aten::transpose.int"}


@pytest.mark.parametrize("causal", [True, False])
def test_dense_decode_costs_no_view_of_the_lengths(device, causal, monkeypatch):
    """A view made here costs 2 us a call; decode() has an argument instead."""
    given, decode = [], sparse_mla.decode

    def spy(*arguments, **named):
        given.append(named)
        return decode(*arguments, **named)

    monkeypatch.setattr(sparse_mla, "decode", spy)
    q, cache, _, _ = problem("bf16", device=device)
    lengths = torch.tensor([40, 16, 17], dtype=torch.int32, device=device)
    table = torch.zeros(3, 3, dtype=torch.int32, device=device)
    flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, None, causal=causal)
    (call,) = given
    assert call["context_lens"] is lengths and call["block_tables"] is table
    assert call["causal"] is causal


@pytest.mark.parametrize(
    ("argument", "wrong", "text"),
    [
        ("block_table", None, "a tensor without indices, got None"),
        ("cache_seqlens", None, "a tensor without indices, got None"),
        ("cache_seqlens", torch.ones(3, dtype=torch.int64), "dtype i32"),
        ("topk_length", torch.ones(3, dtype=torch.int32), "None without indices"),
        ("descale_k", torch.ones(1), "None: caches have scales"),
        ("causal", 3, "True or False, got 3"),
        ("causal", None, "True or False, got None"),
        ("is_fp8_kvcache", "fp8", "True or False, got 'fp8'"),
        ("q", torch.zeros(3), "4 dimensions"),
        ("kv_format", "x", "None or V32 without indices, got x"),
        ("kv_format", "V4", "None or V32 without indices, got V4"),
        # Shapes that do not count sequences.
        *(
            (argument, torch.zeros(shape, dtype=dtype), "")
            for argument, dtype in (
                ("q", torch.bfloat16),
                ("cache_seqlens", torch.int32),
                ("block_table", torch.int32),
            )
            for shape in ((), (7,), (1,) * 5)
        ),
    ],
)
def test_dense_decode_refuses_by_the_engines_names(device, argument, wrong, text):
    q, cache, _, _ = problem("bf16", device=device)
    table, lengths = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    given = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths}
    given |= {"head_dim_v": 512, "tile_scheduler_metadata": None, "causal": True, argument: wrong}
    given = on(device, given)
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: {argument}: want {text}") as e:
        flash_mla.flash_mla_with_kvcache(**given)
    assert e.value.argument == argument


# What an engine may pass that is not here: refused by its name.
DECODE_REFUSALS = [
    ("kv_format", "V32_NO_ROPE", "V32 for rows of 656 bytes, got V32_NO_ROPE"),
    ("kv_format", "V4", "V32 for rows of 656 bytes, got V4"),
    ("descale_q", torch.ones(1), "None: caches have scales of their own, got Tensor"),
    ("descale_k", torch.ones(1), "None: caches have scales of their own, got Tensor"),
    ("enable_batch_invariant", torch.ones(2), "True or False, got Tensor"),
    ("enable_batch_invariant", 2, "True or False, got 2"),
    ("causal", 3, "True or False, got 3"),
    ("causal", 1, "False beside indices, got True"),
    ("is_fp8_kvcache", 0, "True beside indices, got False"),
    ("out", torch.zeros(3, 2, 8, 512), "dtype bf16, got f32"),
    ("k_cache", torch.zeros(5, 16, 1, 528, dtype=torch.uint8), "rows .* got 528 .V4.1, or V3.2"),
    ("k_cache", torch.zeros(5, 16, 1, 352, dtype=torch.uint8), "rows .* got 352 .NVFP4"),
    ("extra_k_cache", torch.zeros(5, 4, 1, 288, dtype=torch.uint8), "rows .* got 288 .V4.1 in 4"),
    ("extra_k_cache", torch.zeros(3), ""),
    ("k_cache", torch.zeros(5, 16, 1, 576).bfloat16(), "rows of 656 bytes .* got 576 elements"),
    ("k_cache", torch.zeros(()), "rows of 656 bytes .* got one number"),
    ("k_cache", None, "a tensor, got NoneType"),
    ("k_cache", "text", "a tensor, got str"),
    ("k_cache", np, "a tensor, got module"),
    ("head_dim_v", 256, "512, got "),
    ("head_dim_v", torch.tensor([512, 512]), "512, got "),
    ("causal", torch.tensor([1, 1]), ""),
    ("is_fp8_kvcache", torch.tensor([1, 1]), ""),
    ("softmax_scale", float("inf"), ""),
]


@pytest.mark.parametrize(("argument", "wrong", "text"), DECODE_REFUSALS)
def test_decode_refuses_by_the_engines_names(device, argument, wrong, text):
    q, cache, indices, _ = problem("fp8_656", device=device)
    given = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None}
    given |= {"head_dim_v": 512, "tile_scheduler_metadata": None, "is_fp8_kvcache": True}
    given = on(device, given | {"indices": indices, argument: wrong})
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: {argument}: want {text}") as e:
        flash_mla.flash_mla_with_kvcache(**given)
    assert (e.value.operation, e.value.argument) == ("flash_mla_with_kvcache", argument)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"extra_indices_in_kvcache": "indices"}, "extra_k_cache: want "),
        ({"extra_topk_length": "lengths"}, "extra_topk_length: want none, without extra_k_cache, "),
        ({"q": "array"}, "q: numpy has no bfloat16, which the result has: pass tensors of torch"),
    ],
)
def test_refusals_of_several_arguments_have_the_engines_names(given, text):
    q, cache, indices, _ = problem("fp8_656")
    tensors = {"indices": indices, "lengths": indices[:, 0, 0].contiguous()}
    tensors["array"] = q.float().numpy()
    call = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None}
    call |= {"head_dim_v": 512, "tile_scheduler_metadata": None, "is_fp8_kvcache": True}
    call |= {"indices": indices} | {name: tensors[of] for name, of in given.items()}
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: {text}") as e:
        flash_mla.flash_mla_with_kvcache(**call)
    assert (e.value.operation, e.value.argument) == ("flash_mla_with_kvcache", text.split(":")[0])


# ---- flash_mla: prefill


def prefill_problem(device, s_q=5, h_q=4, s_kv=40, topk=16, d=576):
    made = torch.Generator().manual_seed(1)
    q = torch.randn(s_q, h_q, d, generator=made).bfloat16()
    kv = torch.randn(s_kv, 1, d, generator=made).bfloat16()
    indices = torch.randint(-2, s_kv + 2, (s_q, 1, topk), generator=made, dtype=torch.int32)
    return q.to(device), kv.to(device), indices.to(device)


def prefilled(q, kv, indices, length=None, sink=None):
    """(out, lse) by the formula of decode, of one batch of queries."""
    length = None if length is None else length[None]
    part = (kv[:, 0].cpu(), indices.cpu().transpose(0, 1), length)
    out, lse = attention(q.cpu()[None], [part], SCALE, sink)
    return out[0], lse[0]


@pytest.mark.parametrize("by_place", [False, True])
def test_prefill_as_vllm_calls_it(device, by_place):
    """Into some heads of the model's output, which vLLM has as the eighth argument."""
    q, kv, indices = prefill_problem(device)
    length = torch.tensor([16, 4, 1, 0, 9], dtype=torch.int32)
    output = torch.full((5, 8, 512), 7.0, device=device).bfloat16()
    given = (q, kv, indices, SCALE, 512, None, length.to(device))
    out, _, lse = (
        flash_mla.flash_mla_sparse_fwd(*given, output[:, :4])
        if by_place
        else flash_mla.flash_mla_sparse_fwd(*given, out=output[:, :4])
    )
    assert out.data_ptr() == output.data_ptr() and (output[:, 4:] == 7).all()
    assert torch.isposinf(lse[3]).all()
    close(out, lse.masked_fill(torch.isposinf(lse), -torch.inf), prefilled(q, kv, indices, length))


@pytest.mark.parametrize("legacy", [True, False])
def test_prefill_as_sglang_calls_it(device, legacy):
    """Its older kernels have logarithms of base 2."""
    q, kv, indices = prefill_problem(device, d=512)
    sink, length = torch.randn(4), torch.tensor([16, 4, 1, 7, 9], dtype=torch.int32)
    out, most, lse = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, SCALE, 512, sink.to(device), length.to(device), use_legacy=legacy,
        return_log2_lse=True if legacy else None,
    )  # fmt: skip
    base = math.log(2) if legacy else 1
    close(out, lse * base, prefilled(q, kv, indices, length, sink))
    natural = sparse_mla.forward(q, kv, indices, scale=SCALE, topk_length=length.to(device))[1]
    torch.testing.assert_close(most * base, natural)


@pytest.mark.parametrize("kind", ["bfloat16", "float64", "numpy"])
def test_logarithms_of_base_2(kind):
    """Both are scaled, in their own dtype; what a query without rows has stays infinite."""
    q, kv, indices = prefill_problem("cpu")
    indices[2] = -1
    q, kv = (t.to(getattr(torch, kind, torch.float32)) for t in (q, kv))
    given = [t.numpy() if kind == "numpy" else t for t in (q, kv, indices)]
    with torch.inference_mode():  # whatever is kept serves other calls, too
        flash_mla.flash_mla_sparse_fwd(*given, SCALE, return_log2_lse=True)
    got = flash_mla.flash_mla_sparse_fwd(*given, SCALE, return_log2_lse=True)
    _, most, lse = (torch.as_tensor(t).double() for t in got)
    want = [torch.as_tensor(t).double() for t in sparse_mla.forward(*given, scale=SCALE)]
    assert torch.isposinf(lse[2]).all() and torch.isneginf(most[2]).all()
    want[2][2] = torch.inf
    exact = kind == "float64"
    assert got[2].dtype == (torch.float64 if exact else given[0].dtype if kind == "numpy" else
                            torch.float32)  # fmt: skip
    for mine, own in ((most, want[1]), (lse, want[2])):
        torch.testing.assert_close(mine * math.log(2), own, rtol=1e-15 if exact else 2e-7, atol=0)


def test_prefill_of_base_2_in_compiled_code():
    q, kv, indices = prefill_problem("cpu")

    def lse(q):
        return (
            flash_mla.flash_mla_sparse_fwd(q + q, kv, indices, SCALE, return_log2_lse=True)[2] * 2
        )

    torch._dynamo.reset()
    flash_mla._log2_e_of.clear()
    torch.testing.assert_close(torch.compile(lse, backend="eager")(q), lse(q))
    torch.testing.assert_close(lse(q), lse(q.clone()))


@pytest.mark.parametrize("first", [0, 6, 16])
def test_prefill_as_megatron_calls_it(device, first):
    """With the lse over the entries that the indexer chose, which stand first."""
    q, kv, indices = prefill_problem(device)
    sink = torch.randn(4)
    out, most, lse, *of_indexer = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, SCALE, d_v=512, attn_sink=sink.to(device), topk_length=None,
        indexer_topk=first,
    )  # fmt: skip
    close(out, lse, prefilled(q, kv, indices, sink=sink))
    assert len(of_indexer) == (first > 0) and most.shape == lse.shape
    if first:
        want = prefilled(q, kv, indices[..., :first])[1]
        torch.testing.assert_close(of_indexer[0].cpu().double(), want, rtol=0, atol=1e-4)


def test_what_is_fused_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(_original, "_load", lambda name: None)
    from winnow.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused

    for name, instead in (("prefill", "flash_mla_sparse_fwd"), ("decode", "with_kvcache")):
        text = f"^fused_norm_rope_attn_rope_cast.{name}: .* not fused here; .*{instead}"
        with pytest.raises(winnow.Error, match=text) as e:
            getattr(fused, name)(q=None, sm_scale=1.0, use_legacy=True)
        assert e.value.code == "unsupported"
    with pytest.raises(winnow.Error, match="permute_wv_proj: .* weights keep their order"):
        fused.permute_wv_proj((None, None), 8, 512)


# ---- deep_gemm


def logits_problem(device, s_q=7, h=8, s_k=300, d=128):
    made = torch.Generator().manual_seed(2)
    q = torch.randn(s_q, h, d, generator=made).to(torch.float8_e4m3fn)
    k = torch.randn(s_k, d, generator=made).to(torch.float8_e4m3fn)
    scale = torch.rand(s_k, generator=made) + 0.5
    weights = torch.randn(s_q, h, generator=made)
    start = torch.tensor([0, 0, 100, 100, 150, 299, 300][:s_q], dtype=torch.int32)
    end = torch.tensor([1, 90, 200, 101, 150, 300, 300][:s_q], dtype=torch.int32)
    dots = torch.einsum("ihd,td->iht", q.double(), k.double()).relu()
    want = torch.einsum("ih,iht->it", weights.double(), dots) * scale.double()
    columns = torch.arange(s_k)
    want[(columns < start[:, None]) | (columns >= end[:, None])] = -torch.inf
    return [t.to(device) for t in (q, k, scale, weights, start, end)], want


def near(got, want):
    """Products of f8 on GPUs are added with fewer bits: by scores.md up to 1 is right here."""
    assert got.dtype == torch.float32
    atol = 0.2 if got.is_cuda else 1e-2
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=atol)


def near_where(clean, got, want):
    """Without `clean` only what a query sees is defined."""
    unseen = torch.isneginf(want)
    near(got if clean else got.masked_fill(unseen.to(got.device), -torch.inf), want)


def from_start(want, start, width):
    """The columns from `start` on of each row."""
    columns = start.cpu().long()[:, None] + torch.arange(width)
    padded = torch.nn.functional.pad(want, (0, width), value=-torch.inf)
    return padded.gather(1, columns)


@pytest.mark.parametrize("clean", [True, False])
def test_logits_as_sglang_calls_them(device, clean):
    (q, k, scale, weights, start, end), want = logits_problem(device)
    logits = deep_gemm.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=clean)
    near_where(clean, logits, want)
    assert logits.shape == (7, 300) and logits.stride(0) % 4 == 0  # read in vectors of 4
    for width in (100, 128):
        compressed = deep_gemm.fp8_mqa_logits(
            q, (k, scale), weights, start, end, clean_logits=clean, max_seqlen_k=width
        )
        near_where(clean, compressed, from_start(want, start, width))


def test_logits_under_the_newer_name_as_both_call_them(device):
    (q, k, scale, weights, start, end), want = logits_problem(device)
    want = from_start(want, start, 100)
    common = ((q, None), (k, scale), weights, start, end)
    near_where(False, deep_gemm.fp8_fp4_mqa_logits(*common, 100), want)  # vLLM
    near_where(False, deep_gemm.fp8_fp4_mqa_logits(*common, 100, None), want)
    near(deep_gemm.fp8_fp4_mqa_logits(*common, True, 100), want)
    logits = deep_gemm.fp8_fp4_mqa_logits(*common, False, 100, logits_dtype=torch.float32)
    near_where(False, logits, want)


@pytest.mark.parametrize("name", ["fp8_mqa_logits", "fp8_fp4_mqa_logits"])
def test_columns_in_front_of_the_first_key_are_empty(device, name):
    (q, k, scale, weights, start, end), _ = logits_problem(device)
    function = getattr(deep_gemm, name)
    dense = function(q, (k, scale), weights, torch.full_like(start, -3), end)
    shifted = function(q, (k, scale), weights, torch.full_like(start, -3), end, max_seqlen_k=20)
    assert torch.isneginf(shifted[:, :3]).all()
    assert torch.equal(shifted[:, 3:], dense[:, :17])


STARTS = torch.tensor([-400, -100, -3, 0, 150, 299, 1000], dtype=torch.int32)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("width", [1, 64, 100, 300, 500])
def test_logits_of_any_start(device, width, clean):
    """With the bits of those of all keys; nothing outside of the keys is read, and what a query
    does not see is -inf, or undefined without `clean`."""
    (q, k, scale, weights, _, end), _ = logits_problem(device)
    given = (q, (k, scale), weights, STARTS.to(device), end)
    whole = deep_gemm.fp8_mqa_logits(*given)
    columns = STARTS.long()[:, None] + torch.arange(width)
    padded = torch.nn.functional.pad(whole.cpu(), (0, 1), value=-torch.inf)
    columns[(columns < 0) | (columns > 300)] = 300
    want = padded.gather(1, columns)
    result = deep_gemm.fp8_mqa_logits(*given, clean, width)
    assert result.shape == want.shape and result.stride(0) % 64 == 0
    got = result.cpu()
    seen = ~torch.isneginf(want)
    assert torch.equal(got[seen], want[seen])
    assert not clean or torch.isneginf(got[~seen]).all()


class Allocated(TorchDispatchMode):
    """Bytes of new tensors."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __torch_dispatch__(self, function, types, given=(), named=None):
        made = function(*given, **(named or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            self.kept[storage.data_ptr()] = storage
        return made

    def bytes(self):
        return sum(storage.nbytes() for storage in self.kept.values())


def test_logits_of_some_columns_need_no_memory_but_the_result():
    """As vLLM calls it."""
    q, k = (torch.zeros(n, dtype=torch.float8_e4m3fn) for n in ((64, 1, 64), (4096, 64)))
    start, weights, kv = (
        torch.zeros(64, dtype=torch.int32),
        torch.ones(64, 1),
        (k, torch.ones(4096)),
    )
    end = start + 4096
    with Allocated() as allocated:
        logits = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, start, end, 4096)
    assert allocated.bytes() == logits.nbytes


def test_logits_of_one_query_and_of_none(device):
    (q, k, scale, weights, start, end), want = logits_problem(device)
    for rows in (slice(1, 2), slice(0, 0)):
        given = (q[rows], (k, scale), weights[rows], start[rows], end[rows])
        near(deep_gemm.fp8_mqa_logits(*given), want[rows])
        near(deep_gemm.fp8_fp4_mqa_logits(*given, 5), want[rows, :5])


def paged(device, s_q, per_query, **options):
    """Tensors in DeepGEMM's shapes, and the wanted logits of 200 columns."""
    tensors, keys = paged_problem(s_q=s_q, device=device, **options)
    q, pages, weights, order, lens = tensors
    seen = lens[:, None] - s_q + 1 + torch.arange(s_q, device=device)
    want = torch.full((len(keys), s_q, 200), -torch.inf, dtype=torch.double)
    for i, rows in enumerate(keys):
        for j in range(s_q):
            n = max(int(seen[i, j]), 0)
            dots = (q[i, j].double().cpu() @ rows[:n].T).relu()
            want[i, j, :n] = weights[i, j].double().cpu() @ dots
    cache = pages.view(len(pages), 64, 1, -1)
    given = (q, cache, weights.flatten(0, 1), seen.int() if per_query else lens, order)
    return given, want.flatten(0, 1)


@pytest.mark.parametrize("per_query", [False, True], ids=["b", "b-next_n"])
@pytest.mark.parametrize("s_q", [1, 2, 4])
def test_paged_logits(device, s_q, per_query):
    (q, *given), want = paged(device, s_q, per_query)
    plan = deep_gemm.get_paged_mqa_logits_metadata(given[2], 64, deep_gemm.get_num_sms())
    assert plan.shape == (deep_gemm.get_num_sms() + 1, 2) and plan.dtype == torch.int32
    for name, queries in (("fp8_paged_mqa_logits", q), ("fp8_fp4_paged_mqa_logits", (q, None))):
        function = getattr(deep_gemm, name)
        near(function(queries, *given, plan, 200, clean_logits=True), want)
        logits = function(queries, *given, plan, 200)
        assert logits.shape == want.shape and logits.stride(0) % 4 == 0
        near_where(False, logits, want)


def test_paged_logits_as_engines_call_them(device):
    (q, cache, weights, lens, order), want = paged(device, 2, True)
    # SGLang: tables that are repeated for each query, of which it takes every second.
    tables = order.repeat_interleave(2, 0)
    visible = ~torch.isneginf(want)
    logits = deep_gemm.fp8_paged_mqa_logits(
        q, cache, weights, lens, tables[::2], None, 200, clean_logits=False
    )
    near(logits[visible.to(device)], want[visible])
    # Its queries one by one, with a length each.
    one_by_one = deep_gemm.fp8_paged_mqa_logits(
        q.flatten(0, 1).unsqueeze(1), cache, weights, lens.view(-1, 1), tables, None, 200,
        clean_logits=False,
    )  # fmt: skip
    assert torch.equal(one_by_one.cpu()[visible], logits.cpu()[visible])
    # vLLM: pages that are apart in memory, and the place of indices given.
    apart = torch.zeros(len(cache), 3, 64, 1, cache.shape[-1], dtype=torch.uint8, device=device)
    apart[:, 1] = cache
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), apart[:, 1], weights, lens, order, None, 200, None
    )
    near(logits[visible.to(device)], want[visible])


def quantized(arguments):
    cache = arguments["kv_cache"]
    return torch._empty_affine_quantized(cache.shape, scale=1.0, zero_point=0, dtype=torch.quint8)


LOGITS_REFUSALS = [
    ("fp8_mqa_logits", "q", lambda a: (a["q"], a["weights"]), "values, or a pair .* got scales"),
    ("fp8_mqa_logits", "q", lambda a: None, "a tensor, got NoneType"),
    ("fp8_mqa_logits", "q", lambda a: a["q"].view(torch.int8), "dtype .*float8_e4m3fn, got .*int8"),
    ("fp8_mqa_logits", "q", lambda a: a["q"].bfloat16(), "dtype .*float8_e4m3fn, got .*bfloat16"),
    ("fp8_fp4_mqa_logits", "q", lambda a: (a["q"].half(), None), "dtype .*, got .*float16"),
    ("fp8_paged_mqa_logits", "q", lambda a: a["q"].bfloat16(), "dtype .*, got .*bfloat16"),
    ("fp8_paged_mqa_logits", "clean_logits", lambda a: 7, "True or False, got 7"),
    ("fp8_mqa_logits", "kv", lambda a: a["kv"][0], "a pair .keys, scales., got Tensor"),
    ("fp8_mqa_logits", "kv", lambda a: (a["kv"][0], a["kv"][1].int()), "dtype f32, got i32"),
    ("fp8_mqa_logits", "weights", lambda a: a["weights"][1:], "shape"),
    ("fp8_mqa_logits", "cu_seq_len_k_start", lambda a: a["cu_seq_len_k_start"].long(), "dtype i32"),
    ("fp8_mqa_logits", "cu_seq_len_k_end", lambda a: a["cu_seq_len_k_end"][1:], "shape"),
    ("fp8_mqa_logits", "max_seqlen_k", lambda a: -1, "0 or a number of columns, got -1"),
    ("fp8_mqa_logits", "logits_dtype", lambda a: torch.bfloat16, "torch.float32, got torch.bf"),
    ("fp8_fp4_mqa_logits", "max_seqlen_k", lambda a: 2.5, "0 or a number of columns, got 2.5"),
    ("fp8_paged_mqa_logits", "q", lambda a: a["q"][0], r"shape \[b, next_n, h, d\], got \[2, 4"),
    ("fp8_paged_mqa_logits", "kv_cache", lambda a: a["kv_cache"][:, :32], r"shape \[blocks, 64, 1"),
    (
        "fp8_paged_mqa_logits", "kv_cache", lambda a: a["kv_cache"].transpose(1, 3).contiguous()
        .transpose(1, 3), "blocks that are contiguous, got strides",
    ),
    ("fp8_paged_mqa_logits", "weights", lambda a: a["weights"][1:], r"shape \[b \* next_n = 6, h"),
    ("fp8_paged_mqa_logits", "context_lens", lambda a: a["context_lens"].long(), "dtype i32"),
    ("fp8_paged_mqa_logits", "block_table", lambda a: a["block_table"][1:], "shape"),
    ("fp8_paged_mqa_logits", "max_context_len", lambda a: -1, "0 or a number of columns, got -1"),
    ("fp8_paged_mqa_logits", "max_context_len", lambda a: 2**62, "0 or a number of columns, got 4"),
    ("fp8_paged_mqa_logits", "kv_cache", lambda a: a["kv_cache"].cpu().numpy(), "a tensor of to"),
    ("fp8_paged_mqa_logits", "weights", lambda a: a["weights"].cpu().numpy(), "a tensor of torch"),
    ("fp8_paged_mqa_logits", "kv_cache", lambda a: a["kv_cache"].float(), "dtype torch.uint8, got"),
    # Torch ends the process where a quantized tensor is viewed as bytes.
    ("fp8_paged_mqa_logits", "kv_cache", quantized, "dtype torch.uint8, got torch.quint8"),
    ("fp8_paged_mqa_logits", "weights", lambda a: a["weights"].to_sparse(), "a dense tensor"),
    ("fp8_paged_mqa_logits", "q", lambda a: memoryview(bytes(4)), "dtype .*, got memoryview"),
    ("fp8_mqa_logits", "max_seqlen_k", lambda a: 2**62, "0 or a number of columns, got 46"),
    ("fp8_fp4_mqa_logits", "max_seqlen_k", lambda a: (), r"0 or a number of columns, got \(\)"),
    ("fp8_fp4_mqa_logits", "max_seqlen_k", lambda a: {}, "0 or a number of columns, got {}"),
    ("fp8_mqa_logits", "logits_dtype", lambda a: np.zeros((2, 2)), "torch.float32, got"),
    ("fp8_paged_mqa_logits", "logits_dtype", lambda a: np.zeros((2, 2)), "torch.float32, got"),
    ("fp8_paged_mqa_logits", "indices", lambda a: a["context_lens"], "None, got Tensor"),
    ("fp8_fp4_paged_mqa_logits", "logits_dtype", lambda a: torch.bfloat16, "torch.float32"),
]  # fmt: skip


OF_SOME_COLUMNS = [
    ("weights", lambda t: t[1:], r"shape \[s_q=7, h=8\], got \[6, 8\]"),
    ("weights", lambda t: None, "a tensor"),
    ("weights", lambda t: t.to_sparse(), "a dense tensor in memory"),
    ("cu_seq_len_k_start", lambda t: torch.cat((t, t)), r"shape \[s_q=7\], got \[14\]"),
    ("cu_seq_len_k_start", lambda t: t.long(), "dtype i32"),
    ("cu_seq_len_k_end", lambda t: t[:, None], r"shape \[s_q=7\], got \[7, 1\]"),
    ("cu_seq_len_k_end", lambda t: 3, "a tensor"),
]


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("missing", ["cu_seq_len_k_start", "cu_seq_len_k_end"])
def test_logits_want_where_the_keys_of_a_query_are(missing, width):
    (q, k, scale, weights, start, end), _ = logits_problem("cpu")
    given = {"cu_seq_len_k_start": start, "cu_seq_len_k_end": end, missing: None}
    text = f"^fp8_mqa_logits: {missing}: want a tensor of torch, got NoneType"
    with pytest.raises(ValueError, match=text):
        deep_gemm.fp8_mqa_logits(q, (k, scale), weights, **given, max_seqlen_k=width)


@pytest.mark.parametrize("name", ["fp8_mqa_logits", "fp8_fp4_mqa_logits"])
@pytest.mark.parametrize(("argument", "wrong", "text"), OF_SOME_COLUMNS)
def test_logits_of_some_columns_refuse_what_others_do(device, name, argument, wrong, text):
    (q, k, scale, weights, start, end), _ = logits_problem(device)
    given = {"weights": weights, "cu_seq_len_k_start": start, "cu_seq_len_k_end": end}
    given[argument] = wrong(given[argument])
    with pytest.raises(ValueError, match=f"^{name}: {argument}: want {text}"):
        getattr(deep_gemm, name)(q, (k, scale), **given, max_seqlen_k=5)


@pytest.mark.parametrize("wrong", [None, 2.5, "a", math.nan, True, -5, 0, 2**50])
def test_numbers_of_multiprocessors_are_refused(monkeypatch, wrong):
    monkeypatch.setattr(_original, "_load", lambda name: None)
    lens = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="^set_num_sms: new_num_sms: want 1 to 65536 multip"):
        deep_gemm.set_num_sms(wrong)
    text = "^get_paged_mqa_logits_metadata: num_sms: want 1 to 65536 multiprocessors, got "
    with pytest.raises(ValueError, match=text):
        deep_gemm.get_paged_mqa_logits_metadata(lens, 64, wrong)


def test_flags_are_no_widths():
    """A flag in a tensor or of numpy is one, and a number at its place is given once."""
    (q, k, scale, weights, start, end), want = logits_problem("cpu")
    given = (q, (k, scale), weights, start, end)
    for flag in (torch.tensor(True), np.bool_(True), torch.tensor([True])):
        near(deep_gemm.fp8_fp4_mqa_logits(*given, clean_logits=flag), want)
    text = "max_seqlen_k: want None beside a number at the position of clean_logits, got 3"
    with pytest.raises(ValueError, match=text):
        deep_gemm.fp8_fp4_mqa_logits(*given, 5, 3)
    for width in (True, np.bool_(True), torch.tensor(True)):
        with pytest.raises(ValueError, match="max_seqlen_k: want 0 or a number of columns, got "):
            deep_gemm.fp8_mqa_logits(*given, max_seqlen_k=width)


def test_logits_with_a_width_name_what_is_wrong():
    (q, k, scale, weights, start, end), _ = logits_problem("cpu")
    with pytest.raises(ValueError, match="q: want 3 dimensions .s_q, h, d., got shape .7, 128."):
        deep_gemm.fp8_mqa_logits(q[:, 0], (k, scale), weights, start, end, max_seqlen_k=3)
    nothing = (q[:0], (k.float(), scale), weights[:0], start[:0], end[:0])
    with pytest.raises(ValueError, match="kv: want dtype f8_e4m3, got f32"):
        deep_gemm.fp8_mqa_logits(*nothing, max_seqlen_k=3)


@pytest.mark.parametrize("wrong", [None, 3, [1, 2]])
def test_lengths_of_a_plan_are_a_tensor(wrong):
    text = "^get_paged_mqa_logits_metadata: context_lens: want a tensor of torch, got "
    with pytest.raises(ValueError, match=text):
        deep_gemm.get_paged_mqa_logits_metadata(wrong, 64, 4)
    lens = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="_metadata: indices: want None, got Tensor"):
        deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 4, lens)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_lengths_of_a_plan_of_decode_have_one_dimension(shape):
    text = r"^get_mla_decoding_metadata: cache_seqlens: want a tensor \[b\] of torch, got Tensor of"
    with pytest.raises(ValueError, match=text):
        flash_mla.get_mla_decoding_metadata(torch.zeros(shape, dtype=torch.int32), 1, 1)


@pytest.mark.parametrize(("name", "argument", "wrong", "text"), LOGITS_REFUSALS)
def test_logits_refuse_by_the_engines_names(device, name, argument, wrong, text):
    if "paged" in name:
        values, _ = paged(device, 2, False)
        names = ("q", "kv_cache", "weights", "context_lens", "block_table")
        given = dict(zip(names, values, strict=True)) | {"schedule_meta": None}
        given |= {"max_context_len": 200}
    else:
        (q, k, scale, weights, start, end), _ = logits_problem(device)
        given = {"q": q, "kv": (k, scale), "weights": weights, "cu_seq_len_k_start": start}
        given |= {"cu_seq_len_k_end": end}
    with pytest.raises(ValueError, match=f"^{name}: {argument}: want {text}") as e:
        getattr(deep_gemm, name)(**{**given, argument: wrong(given)})
    assert (e.value.operation, e.value.argument) == (name, argument)


def test_the_rest_of_deep_gemm_is_absent_and_says_so(monkeypatch):
    monkeypatch.setattr(_original, "_load", lambda name: None)  # whatever is installed here
    text = "^deep_gemm.fp8_gemm_nt: .* does not stand in for it, .*install DeepGEMM"
    with pytest.raises(winnow.Error, match=text) as e:
        deep_gemm.fp8_gemm_nt(None, None)
    assert e.value.code == "unsupported"
    assert not hasattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked")  # as engines ask
    assert getattr(deep_gemm, "fp8_einsum", None) is None
    with pytest.raises(ImportError, match="cannot import name 'transform_sf_into_required_layout'"):
        from winnow.compat.deep_gemm import transform_sf_into_required_layout  # noqa: F401


def test_the_number_of_multiprocessors(monkeypatch):
    monkeypatch.setattr(_original, "_load", lambda name: None)
    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    before = deep_gemm.get_num_sms()
    assert before == 1 if not torch.cuda.is_available() else before > 1
    deep_gemm.set_num_sms(20)  # engines do so around a call, and put the former back
    assert deep_gemm.get_num_sms() == 20
