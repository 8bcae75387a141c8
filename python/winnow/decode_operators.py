"""Sparse MLA decode over a paged cache as torch operators; public as winnow.torch.sparse_mla_*."""

import torch

from winnow import _operators
from winnow._winnow import sparse_mla as _sparse_mla

_VALUE_DIM = 512


def _decode_flops(q, cache, indices=None, extra_indices=None, block_tables=None, **options):
    b, s_q, h_q, d_qk = q
    if indices is None:
        chosen = 0 if block_tables is None else block_tables[-1] * cache[1]
    else:
        chosen = indices[-1] + (0 if extra_indices is None else extra_indices[-1])
    return 2 * b * s_q * h_q * chosen * (d_qk + _VALUE_DIM)


@_operators.operator(_sparse_mla.decode, results=2, flops=_decode_flops)
def sparse_mla_decode(q, *others, **options):
    """winnow.sparse_mla.decode() as an operator: (out, lse). It has no gradient."""
    b, s_q, h_q = q.shape[:3]
    return (q.new_empty((b, s_q, h_q, _VALUE_DIM)), q.new_empty((b, s_q, h_q), dtype=torch.float32))


@_operators.operator(_sparse_mla.store, results=0, changes=("cache",))
def sparse_mla_store(*tensors, **options):
    """winnow.sparse_mla.store() as an operator that changes the cache."""
