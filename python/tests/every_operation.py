"""A call of every operation, with all its tensors and their dtypes as its contract lists them."""

from dataclasses import dataclass
from typing import Any, Callable, Dict

import numpy as np
import problems
import torch

from winnow import compressor, expert_parallel, indexer, paged_xl, sparse_mla

_FLOATS = "f32 or f16 or bf16 or f64"


def _normal(*shape):
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


@dataclass
class Operation:
    call: Callable[..., Any]
    """Takes all tensors by name."""
    tensors: Dict[str, np.ndarray]
    dtypes: Dict[str, str]
    """What each tensor may be if the others stay as they are."""
    outputs: tuple


def _operation(name, call, inputs, outputs):
    both = {**inputs, **outputs}
    tensors = {name: np.nan_to_num(value) for name, (value, _) in both.items()}
    dtypes = {name: dtypes for name, (_, dtypes) in both.items()}
    return name, Operation(call, tensors, dtypes, tuple(outputs))


def _into(function, *results, **options):
    """The function, whose `out` are the tensors of these names."""

    def call(**tensors):
        out = tuple(tensors.pop(name) for name in results)
        return function(**tensors, **options, out=out if len(out) > 1 else out[0])

    return call


def _as_torch(call, **dtypes):
    """numpy has neither bfloat16 nor float8, so these arguments are integers with their bits, which
    become torch tensors in the same memory."""

    def convert(name, value):
        wanted, bits = dtypes.get(name, (None, None))
        if wanted is None or value is None or str(value.dtype).removeprefix("torch.") != bits:
            return value
        return (torch.from_numpy(value) if isinstance(value, np.ndarray) else value).view(wanted)

    return lambda **tensors: call(**{name: convert(name, v) for name, v in tensors.items()})


_BFLOAT16 = (torch.bfloat16, "uint16")


def _sparse_mla():
    q, kv, indices, _ = problems.sparse_mla(invalid=0)
    heads, length = _normal(3, 4), np.full(3, 7, np.int32)
    sink, values = _normal(4), _normal(3, 4, 512)
    rows = {"q": (q, _FLOATS), "kv": (kv, "f32"), "indices": (indices, "i32")}
    rows["topk_length"] = (length, "i32")
    extra_kv, chosen = _normal(5, 1, kv.shape[2]), (indices % 5)[:, :, :4]
    rows.update(extra_kv=(extra_kv, "f32"), extra_indices=(chosen, "i32"))
    rows["extra_topk_length"] = (length, "i32")
    yield _operation(
        "sparse_mla::forward",
        _into(sparse_mla.forward, "out", "max_logits", "lse"),
        {**rows, "attn_sink": (sink, "f32")},
        {"out": (values, "f32"), "max_logits": (heads, "f32"), "lse": (heads, "f32")},
    )
    yield _operation(
        "sparse_mla::distribution",
        _into(sparse_mla.distribution, "attn_sum", "extra_attn_sum"),
        {**rows, "lse": (heads, "f32")},
        {
            "attn_sum": (np.zeros((3, 7), np.float32), "f32"),
            "extra_attn_sum": (np.zeros((3, 4), np.float32), "f32"),
        },
    )
    yield _operation(
        "sparse_mla::backward",
        sparse_mla.backward,
        {
            **rows,
            "attn_sink": (sink, "f32"),
            "out": (values, "f32"),
            "lse": (heads, "f32"),
            "d_out": (values, "f32"),
        },
        {
            "dq": (q, "f32"),
            "dkv": (kv, "f32"),
            "dextra_kv": (extra_kv, "f32"),
            "d_sink": (sink, "f32"),
        },
    )


def _decode():
    rng = np.random.default_rng(2)

    def bfloat16(*shape):
        rows = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16()
        return rows.view(torch.uint16).numpy()

    cache = rng.integers(0, 100, (3, 4, 1, 656)).astype(np.uint8)
    extra = rng.integers(0, 100, (2, 2, 1, 656)).astype(np.uint8)
    chosen = rng.integers(0, 12, (2, 1, 7)).astype(np.int32)
    length = np.full(2, 3, np.int32)
    yield _operation(
        "sparse_mla::decode",
        _as_torch(_into(sparse_mla.decode, "out", "lse"), q=_BFLOAT16, out=_BFLOAT16),
        {
            "q": (bfloat16(2, 1, 4, 576), "bf16"),
            "cache": (cache, "u8 or f8_e4m3"),
            "indices": (chosen, "i32"),
            "topk_length": (length, "i32"),
            "extra_cache": (extra, "u8 or f8_e4m3"),
            "extra_indices": (chosen % 4, "i32"),
            "extra_topk_length": (length, "i32"),
            "attn_sink": (np.zeros(4, np.float32), "f32"),
        },
        {"out": (bfloat16(2, 1, 4, 512), "bf16"), "lse": (np.zeros((2, 1, 4), np.float32), "f32")},
    )
    yield _operation(
        "sparse_mla::store",
        _as_torch(sparse_mla.store, rows=_BFLOAT16),
        {"rows": (bfloat16(5, 576), "bf16"), "slots": (np.arange(5), "i64 or i32")},
        {"cache": (cache, "u8 or f8_e4m3")},
    )


def _compressor():
    """Sequences of 5 and 4 tokens, compressed with ratio 2."""
    tokens, turns = np.ones((9, 16), np.float32), np.ones((8, 2), np.float32)
    inputs = {
        "kv": (tokens, _FLOATS),
        "gate": (tokens.copy(), "f32"),
        "position_bias": (np.ones((2, 16), np.float32), "f32"),
        "cu_seqlens": (np.array([0, 5, 9], np.int32), "i32"),
        "cu_rows": (np.array([0, 2, 4], np.int32), "i32"),
        "norm_weight": (np.ones(16, np.float32), "f32"),
        "cos": (turns, "f32"),
        "sin": (turns.copy(), "f32"),
        "first_position": (np.array([1, 0], np.int32), "i32"),
    }
    rows, rstd = np.ones((4, 16), np.float32), np.ones(4, np.float32)
    yield _operation(
        "compressor::forward",
        _into(compressor.forward, "rows", "rstd"),
        inputs,
        {"rows": (rows, "f32"), "rstd": (rstd, "f32")},
    )
    yield _operation(
        "compressor::backward",
        compressor.backward,
        {
            **inputs,
            "rows": (rows, "f32"),
            "rstd": (rstd, "f32"),
            "d_rows": (rows.copy(), "f32"),
        },
        {
            "d_kv": (tokens.copy(), "f32"),
            "d_gate": (tokens.copy(), "f32"),
            "d_position_bias": (np.ones((2, 16), np.float32), "f32"),
            "d_norm_weight": (np.ones(16, np.float32), "f32"),
        },
    )
    del inputs["cu_rows"]
    yield _operation(
        "compressor::step",
        _into(compressor.step, "rows"),
        {**inputs, "state_slots": (np.array([1, 0], np.int32), "i32")},
        {"state": (np.ones((3, 2, 32), np.float32), "f32"), "rows": (tokens.copy(), "f32")},
    )
    tokens = np.ones((9, 64), np.float32)
    yield _operation(
        "compressor::step, pages",
        compressor.step,
        {
            **inputs,
            "kv": (tokens, _FLOATS),
            "gate": (tokens.copy(), "f32"),
            "position_bias": (np.ones((2, 64), np.float32), "f32"),
            "norm_weight": (np.ones(64, np.float32), "f32"),
            "state_slots": (np.array([1, 0], np.int32), "i32"),
            "slots": (np.arange(9), "i64 or i32"),
        },
        {
            "state": (np.ones((3, 2, 128), np.float32), "f32"),
            "pages": (np.zeros((1, 64 * 68), np.uint8), "u8"),
        },
    )


def _paged_xl():
    step = problems.paged_xl()
    for name in ("key_cache", "value_cache"):
        step[name] = _normal(*step[name].shape)
    tables = {name: (step[name], "i32") for name in ("block_tables", "context_lens")}
    common = {
        "query": (step["query"], _FLOATS),
        **{name: (step[name], "f32") for name in ("key_cache", "value_cache", "pos_bias_u")},
        **tables,
    }
    heads = np.zeros(step["query"].shape[:2], np.float32)
    outputs = {"out": (step["query"], "f32"), "lse": (heads, "f32")}
    term = _normal(*heads.shape, step["r"].shape[1])

    yield _operation(
        "paged_xl::attention",
        _into(paged_xl.attention, "out", "lse", scale=None),
        {**common, "matrix_bd": (term, "f32")},
        outputs,
    )
    position = {name: (step[name], "f32") for name in ("pos_bias_v", "r")}
    yield _operation(
        "paged_xl::attention, fused",
        _into(paged_xl.attention_fused, "out", "lse", scale=None),
        {**common, **position},
        outputs,
    )
    yield _operation(
        "paged_xl::position_term",
        _into(paged_xl.position_term, "matrix_bd"),
        {"query": common["query"], **position, "context_lens": tables["context_lens"]},
        {"matrix_bd": (term, "f32")},
    )
    yield _operation(
        "paged_xl::append",
        paged_xl.append,
        {
            "key": (step["key"], _FLOATS),
            "value": (step["value"], "f32"),
            "slot_mapping": (step["slot_mapping"], "i64 or i32"),
        },
        {name: (step[name], "f32") for name in ("key_cache", "value_cache")},
    )


def _indexer():
    rng = np.random.default_rng(1)
    first, last = np.zeros(3, np.int32), np.full(3, 20, np.int32)
    inputs = {
        "q": (rng.standard_normal((3, 2, 64)).astype(np.float32), "f32 or f16 or bf16 or f8_e4m3"),
        "k": (rng.standard_normal((20, 64)).astype(np.float32), "f32"),
        "weights": (rng.standard_normal((3, 2)).astype(np.float32), "f32 or bf16"),
        "key_start": (first, "i32"),
        "key_end": (last, "i32"),
    }
    chosen = rng.integers(0, 20, (3, 5)).astype(np.int32)
    yield _operation(
        "indexer::topk",
        _into(indexer.topk, "indices", "length", "scores", topk=5),
        inputs,
        {
            "indices": (chosen, "i32"),
            "length": (first, "i32"),
            "scores": (chosen.astype(np.float32), "f32"),
        },
    )
    paged = {
        "q": (rng.integers(0, 100, (2, 1, 3, 64)).astype(np.uint8), "f8_e4m3"),
        "pages": (rng.integers(0, 100, (3, 64 * 68)).astype(np.uint8), "u8"),
        "weights": (_normal(2, 1, 3), "f32 or bf16"),
        "block_tables": (np.array([[0, 1], [2, 0]], np.int32), "i32"),
        "context_lens": (np.array([70, 3], np.int32), "i32"),
    }
    yield _operation(
        "indexer::topk_paged",
        _as_torch(
            _into(indexer.topk_paged, "indices", "length", "scores", topk=5),
            q=(torch.float8_e4m3fn, "uint8"),
        ),
        paged,
        {
            "indices": (np.zeros((2, 1, 5), np.int32), "i32"),
            "length": (np.zeros((2, 1), np.int32), "i32"),
            "scores": (np.zeros((2, 1, 5), np.float32), "f32"),
        },
    )
    yield _operation(
        "indexer::scores_paged",
        _as_torch(
            _into(indexer.scores_paged, "scores", max_context=100), q=(torch.float8_e4m3fn, "uint8")
        ),
        paged,
        {"scores": (np.zeros((2, 1, 100), np.float32), "f32")},
    )
    yield _operation(
        "indexer::scores",
        _into(indexer.scores, "scores"),
        {**inputs, "indices": (chosen, "i32")},
        {"scores": (chosen.astype(np.float32), "f32")},
    )
    yield _operation(
        "indexer::backward",
        indexer.backward,
        {**inputs, "indices": (chosen, "i32"), "d_scores": (chosen.astype(np.float32), "f32")},
        {
            "dq": (inputs["q"][0], "f32"),
            "dk": (inputs["k"][0], "f32"),
            "d_weights": (inputs["weights"][0], "f32"),
        },
    )
    x = (rng.standard_normal((5, 64)).astype(np.float32), "f32 or f16 or bf16")
    yield _operation(
        "indexer::quantize",
        _into(indexer.quantize, "rows", "scale"),
        {"x": x},
        {
            "rows": (np.zeros((5, 64), np.uint8), "f8_e4m3 or u8"),
            "scale": (np.zeros(5, np.float32), "f32"),
        },
    )
    yield _operation(
        "indexer::quantize, pages",
        indexer.quantize,
        {"x": x, "slots": (np.arange(5), "i64 or i32")},
        {"pages": (np.zeros((1, 64 * 68), np.uint8), "u8")},
    )


def _layout():
    counts = np.zeros(4, np.int32)
    names = ("tokens_per_rank", "tokens_per_node", "tokens_per_expert")
    sizes = (2, 1, 4)
    yield _operation(
        "expert_parallel::layout",
        lambda expert_indices, **outputs: expert_parallel.layout(
            expert_indices, 4, 2, 2, out=tuple(outputs.values())
        ),
        {"expert_indices": (np.arange(6, dtype=np.int32).reshape(3, 2) % 4, "i32")},
        {
            **{name: (counts[:size], "i32") for name, size in zip(names, sizes, strict=True)},
            "is_token_in_rank": (np.zeros((3, 2), np.uint8), "u8"),
        },
    )


def _all_to_all():
    """Calls of a layer of one rank, which they keep alive."""
    world = expert_parallel.InProcessWorld(1)
    layer = expert_parallel.AllToAll(
        world.transport(0), world.store(), max_tokens=3, hidden=16, topk=2, experts=4,
        dtype="float32", timeout=20,
    )  # fmt: skip
    tokens, experts = _normal(3, 16), np.arange(6, dtype=np.int32).reshape(3, 2) % 4
    yield _operation(
        "expert_parallel::dispatch",
        layer.dispatch,
        {
            "input": (tokens, "f32 or f8_e4m3"),
            "expert_indices": (experts, "i32 or i64"),
            "weights": (_normal(3, 2), "f32"),
            "scatter_indices": (np.arange(6, dtype=np.int32).reshape(3, 2), "i32"),
        },
        {"out": (np.zeros((6, 16), np.float32), "f32")},
    )
    descriptor = layer.dispatch(tokens, experts).descriptor
    yield _operation(
        "expert_parallel::combine",
        lambda **tensors: layer.combine(descriptor=descriptor, **tensors),
        {"expert_output": (_normal(6, 16), "f32"), "bias": (tokens, "f32")},
        {"out": (tokens, "f32")},
    )


ALL = {
    name: operation
    for family in (_sparse_mla, _decode, _compressor, _paged_xl, _indexer, _layout, _all_to_all)
    for name, operation in family()
}
EVERY_TENSOR = [(name, tensor) for name, operation in ALL.items() for tensor in operation.tensors]
