"""An oracle of deep_ep's results, from all ranks' inputs: that of the all-to-all, for torch."""

import contextlib

import expert_oracle
import torch

# Set where the calls run on GPUs. There the low-latency calls return the rows of a source rank in
# any order, and a call that does not wait for counts leaves errors of other ranks to a later call.
on_gpu = False


@contextlib.contextmanager
def strange_defaults():
    """Of torch's dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def inputs(world, experts, topk, hidden, seed=0, dtype=torch.bfloat16):
    """[(x, topk_idx, topk_weights)], one entry per rank; ranks have 7, 12, 0 or 5 tokens."""
    made = []
    for rank in range(world):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        tokens = [7, 12, 0, 5][(rank + seed) % 4]
        x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float32).to(dtype)
        scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float32)
        idx = scores.topk(topk, dim=1).indices if tokens else torch.zeros(0, topk).long()
        none = torch.rand(tokens, topk, generator=generator, dtype=torch.float32) < 0.2
        weights = torch.rand(tokens, topk, generator=generator, dtype=torch.float32)
        made.append((x, idx.masked_fill(none, -1), weights))
    return made


def layout(idx, experts, world):
    """(tokens per rank, pairs per expert, is_token_in_rank)"""
    ranks, _, pairs, in_rank = expert_oracle.layout(idx.numpy(), experts, world, world)
    return torch.from_numpy(ranks).int(), torch.from_numpy(pairs), torch.from_numpy(in_rank)


def arrivals(all_idx, experts, rank):
    """[(source, token)] of the rows of `rank`, and each pair's local expert [R, K], else -1."""
    rows = expert_oracle.token_rows([t.numpy() for t in all_idx], experts, len(all_idx))[rank]
    local = torch.tensor([here for _, _, here in rows], dtype=torch.int64)
    return [row[:2] for row in rows], local.reshape(-1, all_idx[0].shape[1])


def permuted(all_idx, experts, rank, alignment):
    """[(source, token, k) or None for padding] of a rank's rows by expert, and rows per expert."""
    tables = [t.numpy() for t in all_idx]
    rows, counts, _ = expert_oracle.expert_rows(tables, experts, len(tables), alignment)
    return rows[rank], counts[rank]


def ranks_of(choice, experts, world):
    """The ranks of a token's experts."""
    return sorted({int(e) // (experts // world) for e in choice if e >= 0})
