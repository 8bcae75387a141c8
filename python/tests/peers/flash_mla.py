"""Stands in for FlashMLA in test_peers.py: its functions, computed by torch."""

import torch
from winnow.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
__version__ = "stand-in"


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, use_legacy=False):
    assert use_legacy, "as in sgl-flash-mla, only the legacy kernels run on Hopper"
    there = indices[:, 0] >= 0
    rows = kv[:, 0].float()[indices[:, 0].clamp(min=0).long()]
    logits = torch.einsum("shd,skd->shk", q.float(), rows) * sm_scale
    logits = logits.masked_fill(~there[:, None], -torch.inf)
    out = torch.einsum("shk,skd->shd", logits.softmax(-1), rows[..., :512])
    return out.bfloat16(), logits.amax(-1), logits.logsumexp(-1)
