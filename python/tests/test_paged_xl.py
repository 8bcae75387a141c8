"""Paged decode against the oracle, on numpy and torch tensors."""

import numpy as np
import oracle
import problems
import pytest
import torch
from compare import assert_close

from winnow import paged_xl

STEP = ("query", "key_cache", "value_cache", "pos_bias_u")
TABLES = ("block_tables", "context_lens")


def _filled(p):
    paged_xl.append(p["key"], p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"])
    return p


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_step_agrees_with_the_oracle(dtype, kv_heads):
    p = problems.paged_xl(
        num_kv_heads=kv_heads, dtype="float16" if dtype == "float16" else "float32"
    )
    if dtype == "bfloat16":
        x = 8
        p = {
            name: torch.from_numpy(a).bfloat16() if a.dtype == np.float32 else torch.from_numpy(a)
            for name, a in p.items()
        }
        blocks, heads, _, block_size, _ = p["key_cache"].shape
        shape = (blocks, heads, p["query"].shape[2] // x, block_size, x)
        p["key_cache"] = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    _filled(p)
    term = paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    step, tables = [p[n] for n in STEP], [p[n] for n in TABLES]
    out, lse = paged_xl.attention(*step, term, None, *tables, return_lse=True)
    fused = paged_xl.attention_fused(*step, p["pos_bias_v"], p["r"], None, *tables)
    assert type(out) is type(term) is type(fused) is type(p["query"])
    assert out.dtype == p["query"].dtype

    def values(t):
        return (
            t.float().numpy()
            if isinstance(t, torch.Tensor) and t.is_floating_point()
            else np.asarray(t)
        )

    v = {name: values(a) for name, a in p.items()}
    want_term = oracle.position_term(
        v["query"], v["pos_bias_v"], v["r"], v["context_lens"], v["r"].shape[1]
    )
    assert_close(values(term), want_term, "paged", dtype)
    args = [v[n] for n in STEP]
    want, want_lse = oracle.attention(*args, values(term), None, *(v[n] for n in TABLES))
    assert_close(values(out), want, "paged", dtype)
    assert_close(values(lse), want_lse, "lse", dtype)
    want, _ = oracle.attention(*args, want_term, None, *(v[n] for n in TABLES))
    assert_close(values(fused), want, "paged", dtype)


def test_append_writes_where_the_slots_say_and_nowhere_else():
    p = problems.paged_xl(block_size=8)
    p["slot_mapping"][3] = -1
    _filled(p)
    for t, slot in enumerate(p["slot_mapping"]):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), 8)
        key = p["key_cache"][block, :, :, offset, :].reshape(2, 32)
        np.testing.assert_array_equal(key, p["key"][t])
        np.testing.assert_array_equal(p["value_cache"][block, :, :, offset], p["value"][t])
    written = int((~np.isnan(p["key_cache"])).sum())
    assert written == (len(p["slot_mapping"]) - 1) * 2 * 32


def test_out_and_lse_are_written_and_returned():
    p = _filled(problems.paged_xl())
    term = paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    args = [p[n] for n in STEP] + [term, 0.25] + [p[n] for n in TABLES]
    want, want_lse = paged_xl.attention(*args, return_lse=True)
    out, lse = np.full_like(want, np.nan), np.full_like(want_lse, np.nan)
    assert paged_xl.attention(*args, out=out) is out
    np.testing.assert_array_equal(out, want)
    got = paged_xl.attention(*args, out=(None, lse))
    assert got[1] is lse
    np.testing.assert_array_equal(lse, want_lse)
    wide = np.full((3, 4, 40), 7, np.float32)
    assert (
        paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"], out=wide)
        is wide
    )
    np.testing.assert_array_equal(wide[:, :, 19:], 7)
    np.testing.assert_array_equal(wide[2, :, :19], term[2])


def test_bad_contents_are_named():
    p = _filled(problems.paged_xl())
    args = [p[n] for n in STEP] + [p["pos_bias_v"], p["r"], None]
    tables = p["block_tables"].copy()
    tables[2, 1] = 1000
    with pytest.raises(ValueError, match="block_tables: .* got 1000 at position 1"):
        paged_xl.attention_fused(*args, tables, p["context_lens"])
    with pytest.raises(ValueError, match="context_lens"):
        paged_xl.attention_fused(*args, p["block_tables"], np.array([5, 0, 99], np.int32))
    with pytest.raises(ValueError, match="slot_mapping: want each slot at most once"):
        paged_xl.append(
            p["key"][:2], p["value"][:2], p["key_cache"], p["value_cache"], np.array([1, 1])
        )
