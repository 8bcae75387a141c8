"""winnow.megatron beside Megatron-core's own functions for sparse attention, on CPU tensors."""

import re
from types import SimpleNamespace

import beside
import megatron_dsa as layers
import megatron_hooks as hooks
import pytest
import torch
from deep_ep_ranks import Pool

from winnow import megatron

_OLDER, _NEWER = beside.versions("megatron-core")


@pytest.fixture(scope="module")
def run():
    """run(ranks, body, ...), in processes that have Megatron-core."""
    pool = Pool(2, beside=[beside.folder("megatron-core", _NEWER)], load=layers.modules)
    try:
        yield pool.run
    finally:
        pool.close()


_SPARSE = {"dsa_indexer_use_sparse_loss": True}
_PER_TOKEN = {"calculate_per_token_loss": True, "padding": True}
_LAYERS = {
    "dense_loss": (1, {}),
    "sparse_loss": (1, _SPARSE),
    "bfloat16": (1, {"dtype": "bfloat16", **_SPARSE}),
    "packed": (1, {"lengths": [5, 0, 4, 3]}),
    "packed_with_padding": (1, {"lengths": [5, 4, 3], **_SPARSE, **_PER_TOKEN}),
    "shared_indices": (1, {"sharing": True, **_SPARSE}),
    "shared_indices_packed": (1, {"sharing": True, "lengths": [7, 5], **_SPARSE}),
    "no_relu": (1, {"dsa_indexer_scoring_relu": False, **_SPARSE}),
    "no_loss": (1, {"loss": False}),
    "frozen_indexer": (1, {"frozen": True}),
    "one_token": (1, {"rows": 1}),
    "one_packed_token": (1, {"lengths": [0, 1, 0], **_SPARSE}),
    "more_than_there_are": (1, {"dsa_indexer_topk": 64, **_SPARSE}),
    "mask": (1, {"dense_mask": True}),
    "expanded": (1, {"expanded": True, "loss": False}),
    "expanded_with_loss": (1, {"expanded": True, **_SPARSE}),
    "tp": (2, {"parallel": "tp"}),
    "tp_sparse_loss": (2, {"parallel": "tp", "lengths": [8, 16], **_SPARSE, **_PER_TOKEN}),
    "tp_sequence": (2, {"parallel": "tp", "sequence": "full"}),
    "tp_local_queries": (2, {"parallel": "tp", "sequence": "local", "loss": False}),
    "cp": (2, {"parallel": "cp"}),
    "cp_packed": (2, {"parallel": "cp", "lengths": [8, 0, 12, 4]}),
    "cp_one_packed": (2, {"parallel": "cp", "lengths": [24], **_SPARSE, **_PER_TOKEN}),
    "cp_shared_indices": (
        2,
        {"parallel": "cp", "sharing": True, "lengths": [8, 16], "dtype": "bfloat16", **_SPARSE},
    ),
}


@pytest.mark.parametrize("case", _LAYERS)
def test_output_loss_and_every_gradient_of_a_layer(run, case):
    ranks, options = _LAYERS[case]
    run(ranks, layers.layer, options)


# Some of the shapes that hooks() draws have one query, queries that see no row, or fewer rows than
# are to be chosen; some cut the loss into pieces.
@pytest.mark.parametrize("seed", range(40))
def test_each_hook(run, seed):
    run(1, hooks.hooks, seed, {})


@pytest.mark.parametrize("seed", range(100, 112))
def test_each_hook_with_heads_on_two_ranks(run, seed):
    run(2, hooks.hooks, seed, {"parallel": "tp", "loss_coeff": 0.7, "frozen": ""})


def test_a_declined_call_says_why(run):
    (said,) = run(1, hooks.declines)
    mask = "attn_mask_type is None: the causal mask is the only one it is told of"
    values = "each head has values: Winnow attends to latent rows alone (absorbed MLA)"
    channels = "kv_lora_rank is 256: Winnow has 512 value channels"
    dtypes = "f32 or f16 or bf16 or f8_e4m3"
    expected = [
        ("qk_topk", f"indexer::topk: q: want dtype {dtypes}, got f64"),
        ("qk_topk", "queries are torch.bfloat16 and keys torch.float32"),
        ("qk_topk", "supports: device: want cpu, cuda or cuda:INDEX, got meta"),
        ("qk_topk", "indexer::topk: q: want d = 128 or 64, got d = 96"),
        ("qk_topk", "without ReLU Winnow takes 64 indexer heads, not 65"),
        ("qk_topk_with_loss",
         "keys have 2 heads: Winnow attends to latent rows alone (absorbed MLA)"),
        ("qk_topk_with_loss",
         "sparse_mla::forward: q: want dtype f32 or f16 or bf16 or f64, got i32"),
        ("absorbed_sparse_attention", channels),
        ("absorbed_sparse_attention",
         "sparse_mla::forward: q: want d_qk = 576 or 512, got d_qk = 544"),
        ("absorbed_sparse_attention", "queries are torch.float16 and keys torch.float32"),
        ("dsa_attention", mask),
        ("dsa_attention", values),
        ("dsa_attention", values),
        ("dsa_attention", channels),
        ("dsa_attention", channels),
    ]  # fmt: skip
    text = "run_fused_{}: megatron-core's own code runs, since {}"
    levels = ["WARNING"] * len(expected)
    levels[12] = levels[14] = "DEBUG"  # said before
    assert said == list(zip(levels, (text.format(*one) for one in expected), strict=True))


OF_THE_WHOLE = {"q": "q_indexer", "k": "k_indexer", "weights": "indexer_weights"}


def given(batch, counts=(), **other):
    """Arguments of the hooks: 4 queries of so many sequences; some have another batch or count."""
    made = {"q": (4, 8, 64), "k": (9, 64), "weights": (4, 8), "query": (4, 2, 576)}
    made |= {"key": (9, 1, 576)}
    counts = dict(counts)
    return {
        name: torch.randn(
            counts.get(name, rows), other.get(name, batch), *sizes, requires_grad=True
        )
        for name, (rows, *sizes) in made.items()
    } | {"starts": torch.zeros(4), "ends": torch.full((4,), 9)}


def call(name, batch, valid=None, limits=(None, None, None), counts=(), **other):
    """A hook on such tensors: (tensors, its result)."""
    t = given(batch, counts, **other)
    starts, ends, positions = limits
    named = {OF_THE_WHOLE.get(n, n): t[n] for n in ("q", "k", "weights", "query", "key")}
    indexer = t["q"], t["k"], t["weights"], 3, t["starts"], t["ends"], 8192
    indices = torch.zeros(other.get("topk_indices", batch), 4, 2)
    lengths = torch.ones(other.get("topk_length", batch), 4)
    whole = {
        "config": SimpleNamespace(kv_lora_rank=512), "value": None, "indexer_topk": 3,
        "up_v_weight": torch.randn(2, 16, 512), "softmax_scale": 0.1, "loss_coeff": 1.0,
        "sparse_loss": True, "absorbed_mla": True, "calculate_per_token_loss": False,
        "attn_mask_type": SimpleNamespace(name="causal"), "varlen_starts": starts,
        "varlen_ends": ends, "key_positions": positions, "query_valid_rows": valid,
        "use_relu": True,
    }  # fmt: skip
    return t, {
        "topk": lambda: megatron.run_fused_qk_topk(*indexer)[0],
        "loss": lambda: megatron.run_fused_qk_topk_with_loss(
            *indexer, t["query"], t["key"], 0.1, 1.0, None, valid
        ),
        "attention": lambda: megatron.run_fused_absorbed_sparse_attention(
            t["query"], t["key"], indices, 0.1, 512, lengths
        ),
        "whole": lambda: megatron.run_fused_dsa_attention(**whole, **named),
    }[name]()


@pytest.mark.parametrize("valid", [None, torch.ones(4), torch.ones(0, 4)])
def test_hooks_of_no_sequences(valid):
    """Results without elements, a loss of 0, and gradients."""
    _, indices = call("topk", 0)
    assert indices.shape == (0, 4, 3) and indices.dtype == torch.int32
    tensors, (indices, _, loss) = call("loss", 0, valid)
    assert indices.shape == (0, 4, 3) and loss == 0
    loss.backward()
    assert tensors["weights"].grad.shape == (4, 0, 8)
    tensors, out = call("attention", 0)
    assert out.shape == (4, 0, 2, 512)
    out.sum().backward()
    assert tensors["query"].grad.shape == (4, 0, 2, 576)
    _, (out, loss) = call("whole", 0, valid)
    assert out.shape == (4, 0, 32) and loss == 0


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("topk", "k"), ("topk", "weights"), ("loss", "query"), ("loss", "key"),
        ("attention", "key"), ("attention", "topk_indices"), ("attention", "topk_length"),
        ("whole", "k"), ("whole", "weights"), ("whole", "query"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("other", [0, 1, 3])
def test_hooks_refuse_another_batch(name, argument, other):
    names = OF_THE_WHOLE if name == "whole" else {}
    text = f"megatron: {names.get(argument, argument)}: want a batch of 2, as .*, got {other}$"
    with pytest.raises(ValueError, match=text):
        call(name, 2, **{argument: other})


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("topk", "weights"), ("loss", "query"), ("loss", "key"), ("attention", "query"),
        ("whole", "k"), ("whole", "key"), ("whole", "query"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("change", [-2, 2])
@pytest.mark.parametrize("permuted", [False, True])
def test_hooks_refuse_other_queries_or_keys(name, argument, change, permuted):
    """Fewer keys than the indexer's would be rows that it chooses and nobody attends to."""
    count = (9 if argument[0] == "k" else 4) + change
    limits = (torch.zeros(4), torch.full((4,), 9), torch.arange(9).flip(0))
    limits = limits if permuted else (None, None, None)
    with pytest.raises(ValueError, match=r"want \d+ (queries|keys)|want shape \["):
        call(name, 2, counts={argument: count}, limits=limits)


@pytest.mark.parametrize("shape", [(8,), (10,), (0,), (1, 9), (9, 1), ()])
def test_key_positions_are_those_of_all_keys(shape):
    limits = torch.zeros(4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    text = re.escape(f"megatron: key_positions: want shape [9], got {list(shape)}")
    with pytest.raises(ValueError, match=text):
        call("whole", 2, limits=(*limits, torch.zeros(shape, dtype=torch.int64)))
    call("whole", 2, limits=(*limits, torch.zeros(9, dtype=torch.int64)))


def test_ranges_have_both_limits():
    text = "megatron: varlen_ends: want where the rows end, as with varlen_starts, got None"
    with pytest.raises(ValueError, match=text):
        call("whole", 2, limits=(torch.zeros(4), None, None))


@pytest.mark.parametrize("beyond", [2**31 + 4, 2**32 + 4, 2**63 - 1])
def test_numbers_of_64_bits_are_not_truncated(beyond):
    t, starts, ends = given(1), torch.tensor([0, -beyond, 0, 5]), torch.full((4,), 9)
    within, without = starts.clamp(0, 9), torch.tensor([9, beyond, 9, 9])
    indexer = t["q"], t["k"], t["weights"], 3
    attending = t["query"], t["key"]
    want = megatron.run_fused_qk_topk(*indexer, within, ends, 8192)[0]
    assert torch.equal(megatron.run_fused_qk_topk(*indexer, starts, without, 8192)[0], want)
    loss = megatron.run_fused_qk_topk_with_loss
    lost = loss(*indexer, starts, without, 8192, *attending, 0.1, 1.0, None)
    assert torch.equal(lost[0], want)
    assert torch.equal(lost[2], loss(*indexer, within, ends, 8192, *attending, 0.1, 1.0, None)[2])
    attend = megatron.run_fused_absorbed_sparse_attention
    indices, length = torch.tensor([[[1, 2, 3]] * 4]), torch.tensor([[3, 3, 2, 0]])
    want = attend(*attending, indices.where(indices != 2, -1), 0.1, 512, length)
    far = indices.where(indices != 2, beyond), length.where(length != 3, beyond)
    assert torch.equal(attend(*attending, far[0], 0.1, 512, far[1]), want)


@pytest.mark.parametrize("name", ["loss", "whole"])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (3, 4), (4, 2), (1, 2, 4), ()])
def test_valid_queries_are_those_that_there_are(name, shape):
    shapes = r"\[4\] or \[1, 4\] or \[2, 4\]"
    text = f"megatron: query_valid_rows: want shape {shapes}, got {re.escape(str(list(shape)))}"
    with pytest.raises(ValueError, match=text):
        call(name, 2, torch.ones(shape))
    for valid in (torch.ones(4), torch.ones(1, 4), torch.ones(2, 4)):
        call(name, 2, valid)


def test_what_is_registered_and_refused(run):
    another, *versions = run(1, hooks.registered)[0]
    assert another == "winnow.megatron: the backend winnow: want winnow.megatron, got another"
    text = "winnow.megatron: megatron.core.__version__: want 0.19.2, got {}"
    assert versions == [text.format(v) for v in ("0.19.1", "0.19.2rc0", "0.20.0")]


def test_an_older_version_is_refused():
    pool = Pool(1, beside=[beside.folder("megatron-core", _OLDER)])
    try:
        (said,) = pool.run(1, hooks.refused_by_version)
    finally:
        pool.close()
    assert said == f"winnow.megatron: megatron.core.__version__: want {_NEWER}, got {_OLDER}"


def test_the_hooks_have_the_arguments_of_megatron(run):
    (found,) = run(1, hooks.arguments)
    local = {f"local_packed_cp_{of}" for of in ("rank", "query_start", "query_len")}
    layout = {"use_local_indexer_varlen", "single_packed_thd_sequence", *local}
    layout |= {"packed_seq_params", "cp_size"}
    assert found == {
        "run_fused_qk_topk": {"config", *layout},
        "run_fused_qk_topk_with_loss": layout,
        "run_fused_absorbed_sparse_attention": {"config"},
        "run_fused_dsa_attention": {"varlen_is_plain_causal", *layout},
    }
