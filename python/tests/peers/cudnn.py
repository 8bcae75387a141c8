"""Stands in for cudnn-frontend in test_peers.py: its functions, computed by torch."""

import torch

__version__ = "stand-in"


def _scores(q, keys, weights):
    """Scores [q, k]; keys: [k, d] for all queries, or [q, k, d]."""
    equation = "qhd,kd->qhk" if keys.dim() == 2 else "qhd,qkd->qhk"
    return (torch.einsum(equation, q, keys).relu() * weights[..., None]).sum(1)


class DSA:
    @staticmethod
    def indexer_forward_wrapper(q, k, w, ratio, q_causal_offsets):
        scores = _scores(q[0].float(), k[0, :, 0].float(), w[0].float())
        last = q_causal_offsets + torch.arange(q.shape[1])[:, None]
        unseen = torch.arange(k.shape[1]) > last
        return {"scores": scores.masked_fill(unseen, -torch.inf)[None]}

    @staticmethod
    def indexer_top_k_wrapper(scores, lengths, top_k, next_n, return_val):
        unseen = torch.arange(scores.shape[1]) >= lengths[:, None]
        return {"indices": scores.masked_fill(unseen, -torch.inf).topk(top_k).indices.int()}

    @staticmethod
    def sparse_attn_score_recompute_wrapper(q, k, lse, rows, scale, qhead_per_kv_head):
        logits = torch.einsum("shd,skd->shk", q[0].float(), k[0].float()[rows[0].long()])
        sums = (logits * scale - lse[0][..., None]).exp().sum(1)
        return {"target": sums[None] / qhead_per_kv_head}

    @staticmethod
    def sparse_attention_backward_wrapper(q, kv, out, dout, lse, sink, rows, softmax_scale):
        q, kv = q.float().requires_grad_(), kv.float().requires_grad_()
        values = kv[rows.long()]
        weights = (torch.einsum("shd,skd->shk", q, values) * softmax_scale).softmax(-1)
        torch.einsum("shk,skd->shd", weights, values[..., :512]).backward(dout.float())
        return {"dq": q.grad, "dkv": kv.grad[:, None]}

    @staticmethod
    def indexer_backward_wrapper(q, w, k, target, predicted, rows):
        target.copy_(predicted - target)  # as in cudnn: the gradients of the scores
        q, w, k = (tensor[0].float().requires_grad_() for tensor in (q, w, k))
        _scores(q, k[rows[0].long()], w).backward(target[0])
        return {"d_index_q": q.grad[None], "d_index_k": k.grad[None], "d_weights": w.grad[None]}
