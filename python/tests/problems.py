"""Random problems, small enough for the oracle."""

import numpy as np
import torch


def sparse_mla(
    seed=0, s_q=3, h_q=4, s_kv=20, topk=7, d_qk=576, dtype="float32", invalid=0.2, sink=False
):
    """Returns q, kv, indices and a dict of options. `invalid` is the share of invalid indices."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((s_q, h_q, d_qk)).astype(dtype)
    kv = rng.standard_normal((s_kv, 1, d_qk)).astype(dtype)
    indices = rng.integers(0, max(s_kv, 1), (s_q, 1, topk), dtype=np.int32)
    outside = rng.choice(np.array([-(2**31), -1, s_kv, 2**31 - 1], np.int32), indices.shape)
    indices = np.where(rng.random(indices.shape) < invalid, outside, indices)
    sink_dtype = np.float64 if dtype == "float64" else np.float32
    options = {"attn_sink": rng.standard_normal(h_q).astype(sink_dtype)} if sink else {}
    return q, kv, indices, options


def of_torch(**shape):
    """The same in torch: [q, kv, indices] and the options."""
    *arrays, options = sparse_mla(**shape)
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors, {name: torch.from_numpy(array) for name, array in options.items()}


def paged_xl(
    seed=0,
    context_lens=(5, 0, 19),
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    block_size=8,
    dtype="float32",
):
    """Returns the arguments of attention, position_term and append; the caches hold NaN.

    For bfloat16 the arrays are float32, and the caches have the shape for elements of 2 bytes.
    """
    x = {"float64": 2, "float32": 4}.get(dtype, 8)
    dtype = "float32" if dtype == "bfloat16" else dtype
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    lengths = np.array(context_lens, np.int32)
    num_seqs, longest = len(lengths), int(lengths.max(initial=0))
    per_seq = -(-longest // block_size)
    num_blocks = num_seqs * per_seq + 1
    key_cache = np.full((num_blocks, num_kv_heads, head_size // x, block_size, x), np.nan, dtype)
    value_cache = np.full((num_blocks, num_kv_heads, head_size, block_size), np.nan, dtype)
    tables = rng.permutation(num_blocks)[: num_seqs * per_seq].reshape(num_seqs, per_seq)
    slots = [
        int(tables[s, j // block_size]) * block_size + j % block_size
        for s in range(num_seqs)
        for j in range(lengths[s])
    ]
    return {
        "query": normal(num_seqs, num_heads, head_size),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "pos_bias_u": normal(num_heads, head_size),
        "pos_bias_v": normal(num_heads, head_size),
        "r": normal(num_heads, longest, head_size),
        "block_tables": tables.astype(np.int32),
        "context_lens": lengths,
        "key": normal(len(slots), num_kv_heads, head_size),
        "value": normal(len(slots), num_kv_heads, head_size),
        "slot_mapping": np.array(slots, np.int64),
    }
