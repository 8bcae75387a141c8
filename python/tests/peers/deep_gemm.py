"""Stands in for DeepGEMM in test_peers.py: its functions, computed by torch."""

import torch

__version__ = "stand-in"


def get_num_sms():
    return 1


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
    return None


def fp8_mqa_logits(q, kv, weights, starts, ends, clean_logits, max_seqlen_k=0):
    keys, scales = kv
    dots = torch.einsum("qhd,kd->qhk", q.float(), keys.float()).relu()
    scores = (dots * weights[..., None]).sum(1) * scales
    at = torch.arange(len(keys))
    scores.masked_fill_((at < starts[:, None]) | (at >= ends[:, None]), -torch.inf)
    if max_seqlen_k == 0:
        return scores
    behind = torch.nn.functional.pad(scores, (0, max_seqlen_k), value=-torch.inf)
    return behind.gather(1, starts.long()[:, None] + torch.arange(max_seqlen_k))


def fp8_paged_mqa_logits(q, pages, weights, lengths, tables, plan, most, clean_logits):
    b, s_q, heads, d = q.shape
    raw = pages.reshape(len(pages), -1)
    keys = raw[:, : 64 * d].contiguous().view(torch.float8_e4m3fn).view(-1, 64, d)
    scales = raw[:, 64 * d :].contiguous().view(torch.float32)
    scores = []
    for i, pages_of_one in enumerate(tables.long()):
        kv = keys[pages_of_one].reshape(-1, d), scales[pages_of_one].reshape(-1)
        ends = lengths[i] - s_q + 1 + torch.arange(s_q)
        of_one = weights.view(b, s_q, heads)[i]
        scores.append(fp8_mqa_logits(q[i], kv, of_one, torch.zeros(s_q), ends, clean_logits))
    return torch.cat(scores)
