"""Paged decode against the oracle, on every kind of tensor."""

import functools

import numpy as np
import oracle
import problems
import pytest
from compare import assert_close
from kinds import CPU, CUDA, assert_same_kind, like, numbers

from winnow import paged_xl

STEP = ("query", "key_cache", "value_cache", "pos_bias_u")
TABLES = ("block_tables", "context_lens")


def _filled(p):
    paged_xl.append(p["key"], p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"])
    return p


@pytest.mark.parametrize("kind", [*CPU, *CUDA])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_step_agrees_with_the_oracle(kind, kv_heads):
    convert, dtype = kind
    arrays = problems.paged_xl(num_kv_heads=kv_heads, dtype=dtype)
    p = _filled({name: convert(a) for name, a in arrays.items()})
    term = paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    step, tables = [p[n] for n in STEP], [p[n] for n in TABLES]
    out, lse = paged_xl.attention(*step, term, None, *tables, return_lse=True)
    fused = paged_xl.attention_fused(*step, p["pos_bias_v"], p["r"], None, *tables)
    for result in (term, out, lse, fused):
        assert_same_kind(result, p["query"])
    assert out.dtype == p["query"].dtype

    v = {name: numbers(a) for name, a in p.items()}
    want_term = oracle.position_term(
        v["query"], v["pos_bias_v"], v["r"], v["context_lens"], v["r"].shape[1]
    )
    assert_close(numbers(term), want_term, "paged", dtype)
    args = [v[n] for n in STEP]
    want, want_lse = oracle.attention(*args, numbers(term), None, *(v[n] for n in TABLES))
    assert_close(numbers(out), want, "paged", dtype)
    assert_close(numbers(lse), want_lse, "lse", dtype)
    want, _ = oracle.attention(*args, want_term, None, *(v[n] for n in TABLES))
    assert_close(numbers(fused), want, "paged", dtype)


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


def _bad_contents(p):
    """Calls whose index tensors hold what the others do not, with what is said; the tests in C++
    have the whole texts."""
    args = [p[n] for n in STEP] + [p["pos_bias_v"], p["r"], None]
    term = paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    tables = numbers(p["block_tables"]).copy()
    tables[2, 1] = 1000
    tables = like(tables, p["query"])
    long, twice, far = (
        like(np.array(a, np.int32), p["query"]) for a in ([5, 0, 99], [1, 1], [1, 99])
    )
    block, lens = "block_tables: want .*, got 1000 at position 1", p["context_lens"]
    of_append = p["key"][:2], p["value"][:2], p["key_cache"], p["value_cache"]
    return [
        (block, functools.partial(paged_xl.attention_fused, *args, tables, lens)),
        (
            r"context_lens: want 0 to 24 \(block_tables .*, got 99 for sequence 2",
            functools.partial(paged_xl.attention_fused, *args, p["block_tables"], long),
        ),
        (block, functools.partial(paged_xl.attention, *args[:4], term, None, tables, lens)),
        (
            r"context_lens: want 0 to 19 \(matrix_bd .*, got 99 for sequence 2",
            functools.partial(paged_xl.position_term, p["query"], p["pos_bias_v"], p["r"], long),
        ),
        (
            "slot_mapping: want each slot .* once",
            functools.partial(paged_xl.append, *of_append, twice),
        ),
        ("slot_mapping: want slots below 10", functools.partial(paged_xl.append, *of_append, far)),
    ]


@pytest.mark.parametrize("check", [False, True])
def test_bad_contents_are_named(check):
    for message, call in _bad_contents(_filled(problems.paged_xl())):
        with pytest.raises(ValueError, match=message):
            call(check=check)


@pytest.mark.parametrize("kind", CUDA[:1])
def test_bad_contents_are_named_on_a_gpu_if_asked(kind):
    p = _filled({name: kind[0](a) for name, a in problems.paged_xl().items()})
    for message, call in _bad_contents(p):
        call()
        with pytest.raises(ValueError, match=message):
            call(check=True)


def test_the_cpu_uses_no_workspace():
    p = _filled(problems.paged_xl())
    term = paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    step, tables = [p[n] for n in STEP], [p[n] for n in TABLES]
    workspace = np.full(1, 255, np.uint8)
    out = paged_xl.attention(*step, term, None, *tables, workspace=workspace)
    np.testing.assert_array_equal(out, paged_xl.attention(*step, term, None, *tables))
    assert workspace[0] == 255
    fused = [*step, p["pos_bias_v"], p["r"], None, *tables]
    out = paged_xl.attention_fused(*fused, workspace=workspace)
    np.testing.assert_array_equal(out, paged_xl.attention_fused(*fused))
    with pytest.raises(ValueError, match="attention: workspace: "):
        paged_xl.attention(*step, term, None, *tables, workspace="none")
