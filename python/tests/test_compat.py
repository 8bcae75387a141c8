"""The signatures and conventions of other libraries."""

import inspect

import numpy as np
import problems
import pytest
import torch

import winnow
from winnow import compat, paged_xl, sparse_mla


def test_flash_mla_signature():
    parameters = inspect.signature(compat.flash_mla_sparse_fwd).parameters
    assert list(parameters) == [
        "q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "out", "indexer_topk",
        "use_legacy", "return_log2_lse",
    ]  # fmt: skip
    assert [p.default for p in parameters.values()][4:] == [512, None, None, None, 0, None, None]


@pytest.mark.parametrize("convert", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_flash_mla_conventions(convert):
    q, kv, indices, _ = problems.sparse_mla()
    indices[1] = -1
    out, max_logits, lse = compat.flash_mla_sparse_fwd(
        convert(q), convert(kv), convert(indices), 0.1
    )
    want = sparse_mla.forward(q, kv, indices, scale=0.1)
    np.testing.assert_array_equal(np.asarray(out), want[0])
    np.testing.assert_array_equal(np.asarray(max_logits), want[1])
    assert np.isneginf(np.asarray(max_logits)[1]).all()
    assert np.isposinf(np.asarray(lse)[1]).all()
    np.testing.assert_array_equal(np.asarray(lse)[[0, 2]], want[2][[0, 2]])


@pytest.mark.parametrize("convert", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_xl_attention_by_block_and_by_token(convert):
    p = problems.paged_xl(context_lens=(5, 8, 19), block_size=8)
    paged_xl.append(p["key"], p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"])
    term = paged_xl.position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
    names = ("query", "key_cache", "value_cache", "pos_bias_u")
    step = [p[n] for n in names]
    want = paged_xl.attention(*step, term, 0.3, p["block_tables"], p["context_lens"])
    per_token = np.repeat(p["block_tables"], 8, axis=1)[:, :19]
    for table, by_token in ((p["block_tables"], False), (per_token, True)):
        out = convert(np.full_like(want, np.nan))
        result = compat.xl_single_query_cached_kv_attention(
            out, *(convert(a) for a in step), convert(term), 0.3, convert(table.copy()),
            convert(p["context_lens"]), 8, 19, table_per_token=by_token,
        )  # fmt: skip
        assert result is None
        np.testing.assert_array_equal(np.asarray(out), want)


def test_xl_attention_refuses_another_block_size():
    p = problems.paged_xl()
    out, term = np.zeros_like(p["query"]), np.zeros((3, 4, 19), np.float32)
    step = [p[n] for n in ("query", "key_cache", "value_cache", "pos_bias_u")]
    with pytest.raises(winnow.Error, match="block_size: want 8 as in value_cache, got 16"):
        compat.xl_single_query_cached_kv_attention(
            out, *step, term, 1.0, p["block_tables"], p["context_lens"], 16, 19
        )


# Each of them is another kind of mistake: a tensor of several numbers has no truth value.
NO_NUMBERS = [torch.tensor([1.0, 2.0]), np.array([1, 2]), None, "512", [512]]
FLASH_MISTAKES = [
    ("indexer_topk", -1, "0 or .*, got -1"),
    ("d_v", 256, "512, got 256"),
    ("sm_scale", float("nan"), "a finite"),
    ("sm_scale", None, "a number, got None"),
    ("indices", np.zeros((3, 2), np.int32), r"3 dimensions .*, got shape \[3, 2\]"),
    ("indices", torch.Tensor, "a tensor, got _TensorMeta"),
    ("kv", np.zeros((1, 576), np.float32), "3 dimensions"),
    *((argument, wrong, "") for argument in ("d_v", "indexer_topk") for wrong in NO_NUMBERS),
]


@pytest.mark.parametrize(("argument", "wrong", "text"), FLASH_MISTAKES)
def test_flash_mla_names_odd_arguments(argument, wrong, text):
    q, kv, indices, _ = problems.sparse_mla()
    given = {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.1, argument: wrong}
    with pytest.raises(ValueError, match=f"^flash_mla_sparse_fwd: {argument}: want {text}") as e:
        compat.flash_mla_sparse_fwd(**given)
    assert isinstance(e.value, winnow.Error) and e.value.code == "invalid_argument"
    assert (e.value.operation, e.value.argument) == ("flash_mla_sparse_fwd", argument)


def test_flash_mla_takes_no_text_for_a_number():
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(TypeError, match=r"^flash_mla_sparse_fwd\(\): sm_scale: want a number"):
        compat.flash_mla_sparse_fwd(q, kv, indices, "x")


XL_MISTAKES = [
    ("out", None, "out: want a tensor, got NoneType"),
    ("value_cache", None, "value_cache: want a tensor, got NoneType"),
    ("value_cache", 3, "value_cache: want a tensor, got int"),
    ("value_cache", np.float32(1), r"value_cache: want 4 dimensions .*, got shape \[\]"),
    ("block_tables", np.zeros(3, np.int32), "block_tables: want 2 dimensions"),
    ("block_tables", None, "block_tables: want a tensor, got NoneType"),
    ("block_size", torch.tensor([8, 8]), "block_size: want 8 as in value_cache"),
    ("table_per_token", torch.tensor([1, 1]), "table_per_token: want True or False"),
    ("query", None, "query: want "),
]


@pytest.mark.parametrize(("argument", "wrong", "text"), XL_MISTAKES)
def test_xl_attention_names_odd_arguments(argument, wrong, text):
    p = problems.paged_xl(context_lens=(5, 8, 19), block_size=8)
    given = {n: p[n] for n in ("query", "key_cache", "value_cache", "pos_bias_u", "context_lens")}
    given |= {
        "out": np.zeros_like(p["query"]), "matrix_bd": np.zeros((3, 4, 19), np.float32),
        "scale": 1.0, "block_tables": np.repeat(p["block_tables"], 8, axis=1)[:, :19],
        "block_size": 8, "max_context_len": 19, "table_per_token": True,
    }  # fmt: skip
    compat.xl_single_query_cached_kv_attention(**given)
    with pytest.raises(ValueError, match="xl_single_query_cached_kv_attention: " + text) as e:
        compat.xl_single_query_cached_kv_attention(**{**given, argument: wrong})
    assert e.value.argument == argument
