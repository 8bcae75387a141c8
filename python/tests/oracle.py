"""The formulas in numpy float64, as plain as a textbook. Shares nothing with the library."""

import numpy as np


def visible(indices, s_kv, topk_length=None, q_start=None, k_stride=1):
    """[s_q, topk] of bool: the entries that a query sees."""
    index = indices[:, 0, :].astype(np.int64)
    s_q, topk = index.shape
    mask = (index >= 0) & (index < s_kv)
    if topk_length is not None:
        mask &= np.arange(topk)[None, :] < topk_length.astype(np.int64)[:, None]
    if q_start is not None:
        tokens = q_start + np.arange(s_q) + 1
        mask &= (index + 1) * k_stride <= tokens[:, None]
    return mask


def _logits(q, kv, indices, scale, topk_length, q_start, k_stride):
    q, kv = q.astype(np.float64), kv[:, 0, :].astype(np.float64)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    mask = visible(indices, len(kv), topk_length, q_start, k_stride)
    index = np.where(mask, indices[:, 0, :], 0)
    rows = np.zeros((*index.shape, q.shape[2]))
    rows[mask] = kv[index[mask]]
    logits = np.where(mask[:, None, :], scale * np.einsum("ihd,ijd->ihj", q, rows), -np.inf)
    return logits, rows, mask, index, scale


def _lse(logits):
    if logits.shape[-1] == 0:
        return np.full(logits.shape[:-1], -np.inf)
    highest = logits.max(-1)
    shift = np.where(np.isneginf(highest), 0.0, highest)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(logits - shift[..., None]).sum(-1)) + shift


def _weights(logits, lse):
    """exp(logits - lse), 0 where nothing is visible."""
    shift = np.where(np.isfinite(lse), lse, np.inf)
    return np.exp(logits - shift[..., None])


def _with_sink(lse, sink):
    return lse if sink is None else np.logaddexp(lse, sink.astype(np.float64)[None, :])


def forward(q, kv, indices, scale=None, topk_length=None, attn_sink=None, q_start=None, k_stride=1):
    logits, rows, *_ = _logits(q, kv, indices, scale, topk_length, q_start, k_stride)
    lse = _lse(logits)
    weights = _weights(logits, _with_sink(lse, attn_sink))
    out = np.einsum("ihj,ijd->ihd", weights, rows[:, :, :512])
    highest = logits.max(-1) if logits.shape[-1] else np.full(lse.shape, -np.inf)
    return out, highest, lse


def distribution(q, kv, indices, lse, scale=None, topk_length=None, q_start=None, k_stride=1):
    logits, *_ = _logits(q, kv, indices, scale, topk_length, q_start, k_stride)
    return _weights(logits, lse.astype(np.float64)).sum(1)


def backward(
    q,
    kv,
    indices,
    out,
    lse,
    d_out,
    scale=None,
    topk_length=None,
    attn_sink=None,
    q_start=None,
    k_stride=1,
):
    logits, rows, mask, index, scale = _logits(
        q, kv, indices, scale, topk_length, q_start, k_stride
    )
    total = _with_sink(lse.astype(np.float64), attn_sink)
    d_out = d_out.astype(np.float64)
    delta = (out.astype(np.float64) * d_out).sum(-1)
    p = _weights(logits, total)
    dp = np.einsum("ihd,ijd->ihj", d_out, rows[:, :, :512])
    ds = p * (dp - delta[..., None]) * scale
    dq = np.einsum("ihj,ijd->ihd", ds, rows)
    contribution = np.einsum("ihj,ihd->ijd", ds, q.astype(np.float64))
    contribution[:, :, :512] += np.einsum("ihj,ihd->ijd", p, d_out)
    dkv = np.zeros(kv.shape)
    np.add.at(dkv[:, 0, :], index[mask], contribution[mask])
    d_sink = None
    if attn_sink is not None:
        shift = np.where(np.isneginf(total), 0.0, total)
        share = np.exp(attn_sink.astype(np.float64)[None, :] - shift)
        d_sink = -(share * delta).sum(0)
    return dq, dkv, d_sink


def position_term(query, pos_bias_v, r, context_lens, columns):
    v = np.broadcast_to(pos_bias_v.astype(np.float64), query.shape)
    term = np.zeros((*query.shape[:2], columns))
    for s, length in enumerate(context_lens):
        for j in range(length):
            distance = length - 1 - j
            position = r[:, distance, :].astype(np.float64)
            term[s, :, j] = ((query[s].astype(np.float64) + v[s]) * position).sum(-1)
    return term


def attention(
    query, key_cache, value_cache, pos_bias_u, matrix_bd, scale, block_tables, context_lens
):
    num_seqs, num_heads, head_size = query.shape
    block_size, kv_heads = value_cache.shape[3], value_cache.shape[1]
    u = np.broadcast_to(pos_bias_u.astype(np.float64), query.shape)
    scale = head_size**-0.5 if scale is None else scale
    out = np.zeros(query.shape)
    lse = np.full((num_seqs, num_heads), -np.inf)
    for s, length in enumerate(context_lens):
        if length == 0:
            continue
        for h in range(num_heads):
            g = h // (num_heads // kv_heads)
            keys = np.empty((length, head_size))
            values = np.empty((length, head_size))
            for j in range(length):
                block, offset = block_tables[s, j // block_size], j % block_size
                keys[j] = key_cache[block, g, :, offset, :].reshape(-1)
                values[j] = value_cache[block, g, :, offset]
            logits = scale * (
                keys @ (query[s, h].astype(np.float64) + u[s, h])
                + matrix_bd[s, h, :length].astype(np.float64)
            )
            lse[s, h] = _lse(logits[None])[0]
            out[s, h] = np.exp(logits - lse[s, h]) @ values
    return out, lse
