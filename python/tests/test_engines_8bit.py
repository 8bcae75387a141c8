"""Dense decode over a cache of plain float8_e4m3 with one scale for all rows, as vLLM 0.33.0 and
SGLang 0.5.23 call it, against a formula in double precision."""

import pytest
import torch
import winnow.torch as ops
from kinds import DEVICES, gpu
from test_decode import attention, close
from winnow.compat import flash_mla

import winnow
from winnow import sparse_mla

SCALE = 0.05
BLOCK = 16
TABLE = torch.tensor([[3, 0, 5], [6, 6, 6], [1, 4, 2]], dtype=torch.int32)
LENGTHS = torch.tensor([40, 0, 17], dtype=torch.int32)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def problem(device, s_q=1, h_q=8):
    """(q, cache, table, lengths), q and the cache in float8_e4m3fn."""
    made = torch.Generator().manual_seed(3)
    q = torch.randn(3, s_q, h_q, 576, generator=made).to(torch.float8_e4m3fn)
    cache = torch.randn(7, BLOCK, 1, 576, generator=made).to(torch.float8_e4m3fn)
    return [t.to(device) for t in (q, cache, TABLE, LENGTHS)]


def wanted(q, cache, descale_q=1.0, descale_k=1.0, causal=True):
    """(out, lse) by the formula: of rows and queries that are multiplied by their scales."""
    position = torch.arange(3 * BLOCK)
    s_q = q.shape[1]
    slots = (TABLE[:, position // BLOCK] * BLOCK + position % BLOCK)[:, None]
    later = torch.arange(s_q - 1, -1, -1) if causal else torch.zeros(s_q, dtype=torch.int)
    seen = (LENGTHS[:, None] - later).clamp(min=0)
    rows = cache.cpu().double().flatten(0, 2) * descale_k
    slots = slots.expand(3, s_q, -1)
    return attention(q.cpu().double() * descale_q, [(rows, slots, seen)], SCALE)


def checked(out, lse, want):
    """lse as FlashMLA has it: [b, h_q, s_q], +inf where nothing is visible."""
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    lse = lse.transpose(1, 2)
    assert torch.isposinf(lse).any() and not torch.isneginf(lse).any()
    atol = 1e-2 * want[0].abs().max().item()
    torch.testing.assert_close(out.cpu().double(), want[0], rtol=0, atol=atol)
    close(out * 0, lse.masked_fill(torch.isposinf(lse), -torch.inf), (want[0] * 0, want[1]))


def flash_call(q, cache, table, lengths, **options):
    metadata, splits = flash_mla.get_mla_metadata()
    given = {
        "q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths, "head_dim_v": 512,
        "tile_scheduler_metadata": metadata, "num_splits": splits, "softmax_scale": SCALE,
        "causal": True,
    }  # fmt: skip
    return flash_mla.flash_mla_with_kvcache(**{**given, **options})


@pytest.mark.parametrize("s_q", [1, 2])
def test_as_sglang_calls_it(device, s_q):
    """Queries in 8 bits, and scales of one element."""
    q, cache, table, lengths = problem(device, s_q)
    one = torch.ones(1, dtype=torch.float32, device=device)
    out, lse = flash_call(q, cache, table, lengths, descale_q=one, descale_k=one)
    checked(out, lse, wanted(q, cache))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_the_queries_and_of_the_rows(device, shape, causal):
    q, cache, table, lengths = problem(device, 2)
    scales = [torch.full(shape, x, device=device) for x in (0.7, 2.5)]
    given = {"descale_q": scales[0], "descale_k": scales[1], "is_fp8_kvcache": True}
    out, lse = flash_call(q, cache, table, lengths, causal=causal, **given)
    checked(out, lse, wanted(q, cache, 0.7, 2.5, causal))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_queries_in_bfloat16_and_one_scale(device, dtype):
    q, cache, table, lengths = problem(device)
    scale = torch.tensor([0.3], device=device)
    out, lse = flash_call(q.bfloat16(), cache.view(dtype), table, lengths, descale_k=scale)
    checked(out, lse, wanted(q, cache, 1, 0.3))
    out, lse = flash_call(q.bfloat16(), cache.view(dtype), table, lengths, descale_q=scale)
    checked(out, lse, wanted(q, cache, 0.3, 1))
    out, lse = flash_call(q.bfloat16(), cache.view(dtype), table, lengths)
    checked(out, lse, wanted(q, cache))


def test_the_scales_are_read_when_the_call_runs(device):
    """By decode() itself and by the operator; with the bits of the same values in bfloat16, where
    the scales are powers of two."""
    q, cache, table, lengths = problem(device, 2, 16)
    given = {"scale": SCALE, "block_tables": table, "context_lens": lengths}
    scale = torch.tensor([0.5], device=device)
    got = sparse_mla.decode(q.bfloat16(), cache, format="fp8_576", kv_scale=scale, **given)
    plain = sparse_mla.decode(q.bfloat16(), cache.bfloat16() / 2, format="bf16", **given)
    assert torch.equal(got[0], plain[0])
    torch.testing.assert_close(got[1], plain[1])
    same = ops.sparse_mla_decode(
        q.bfloat16(), cache.view(torch.uint8), format="fp8_576", kv_scale=scale, **given
    )
    assert torch.equal(same[0], got[0]) and torch.equal(same[1], got[1])
    scale.fill_(1)
    whole = sparse_mla.decode(q.bfloat16(), cache, format="fp8_576", kv_scale=scale, **given)
    plain = sparse_mla.decode(q.bfloat16(), cache.bfloat16(), format="bf16", **given)
    assert torch.equal(whole[0], plain[0]) and torch.equal(whole[1], plain[1])


REFUSALS = [
    ("descale_q", torch.ones(2), r"shape \[1\], got \[2\]"),
    ("descale_k", torch.ones(1, 1), r"shape \[1\], got \[1, 1\]"),
    ("descale_k", torch.ones(1, dtype=torch.float64), "dtype f32, got f64"),
    ("descale_q", 1.0, "a tensor, got float"),
    (
        "k_cache",
        torch.zeros(7, BLOCK, 1, 528, dtype=torch.uint8),
        r"\[blocks, .* got a last dimension of 528",
    ),
    ("q", torch.zeros(3, 1, 8, 576), "dtype bf16, got f32"),
]


@pytest.mark.parametrize(("argument", "wrong", "text"), REFUSALS)
def test_refusals_by_the_engines_names(argument, wrong, text):
    q, cache, table, lengths = problem("cpu")
    out = torch.full((3, 1, 8, 512), 7.0).bfloat16()
    given = {"q": q, "cache": cache, "out": out} | {argument: wrong}
    given["cache"] = given.pop("k_cache", given["cache"])
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: {argument}: want {text}") as e:
        flash_call(given.pop("q"), given.pop("cache"), table, lengths, **given)
    assert e.value.argument == argument
    assert (out == 7).all()


def test_scales_are_refused_where_rows_have_their_own():
    q, cache, table, lengths = problem("cpu")
    one = torch.ones(1)
    for other in (cache.bfloat16(), torch.zeros(7, BLOCK, 1, 656, dtype=torch.uint8)):
        for argument in ("descale_q", "descale_k"):
            text = f"^flash_mla_with_kvcache: {argument}: want None: caches have scales of their"
            with pytest.raises(ValueError, match=text):
                flash_call(q.bfloat16(), other, table, lengths, **{argument: one})
    with pytest.raises(ValueError, match="decode: kv_scale: want none, but for the format fp8_576"):
        sparse_mla.decode(
            q.bfloat16(), cache.bfloat16(), format="bf16", block_tables=table,
            context_lens=lengths, kv_scale=one,
        )  # fmt: skip
    with pytest.raises(ValueError, match="store: format: want fp8_656, fp8_584 or bf16, got fp8_5"):
        rows = torch.zeros(1, 576).bfloat16()
        sparse_mla.store(rows, cache, torch.zeros(1, dtype=torch.long), format="fp8_576")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_gpu_takes_it_with_block_tables_on_sm90_alone(device):
    q, cache, table, lengths = problem(device)
    tables = {"block_tables": table, "context_lens": lengths}
    indices = {"indices": torch.zeros(3, 1, 4, dtype=torch.int32, device=device)}
    for backend, chosen in (("cuda", tables), ("sm90", indices), ("cuda", indices)):
        with pytest.raises(winnow.Error, match=f"{backend}: the format fp8_576 is for sm90 with"):
            sparse_mla.decode(q.bfloat16(), cache, format="fp8_576", backend=backend, **chosen)
