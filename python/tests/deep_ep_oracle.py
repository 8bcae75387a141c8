"""An oracle of deep_ep's results: computes them from all ranks' inputs, token by token in torch."""

import contextlib

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
    per = experts // world
    in_rank = torch.zeros(len(idx), world, dtype=torch.bool)
    pairs = torch.zeros(experts, dtype=torch.int32)
    for token, choice in enumerate(idx.tolist()):
        for expert in choice:
            if expert >= 0:
                in_rank[token, expert // per] = True
                pairs[expert] += 1
    return in_rank.sum(0).int(), pairs, in_rank


def arrivals(all_idx, experts, rank):
    """[(source, token)] of the rows of `rank`, and each pair's local expert [R, K], else -1."""
    world, per = len(all_idx), experts // len(all_idx)
    rows, local = [], []
    for source in range(world):
        for token, choice in enumerate(all_idx[source].tolist()):
            here = [e - rank * per if e >= 0 and e // per == rank else -1 for e in choice]
            if max(here) >= 0:
                rows.append((source, token))
                local.append(here)
    topk = all_idx[0].shape[1]
    return rows, torch.tensor(local, dtype=torch.int64).reshape(-1, topk)


def permuted(all_idx, experts, rank, alignment):
    """[(source, token, k) or None for padding] of a rank's rows by expert, and rows per expert."""
    world, per = len(all_idx), experts // len(all_idx)
    rows, counts = [], []
    for expert in range(rank * per, (rank + 1) * per):
        mine = [
            (source, token, choice.index(expert))
            for source in range(world)
            for token, choice in enumerate(all_idx[source].tolist())
            if expert in choice
        ]
        counts.append(len(mine))
        rows += mine + [None] * (-len(mine) % alignment)
    return rows, counts


def ranks_of(choice, experts, world):
    """The ranks of a token's experts."""
    return sorted({int(e) // (experts // world) for e in choice if e >= 0})
