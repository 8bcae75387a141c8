"""The rows and sums of the all-to-all as its contract defines them, in numpy, pair by pair."""

import numpy as np


def bfloat16(values):
    """float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


ROUND = {
    "float32": lambda values: np.asarray(values, np.float32),
    "float16": lambda values: np.asarray(values, np.float32).astype(np.float16).astype(np.float32),
    "bfloat16": bfloat16,
}


def kept(indices, experts):
    """[(rank, token, k, expert)] of all pairs that are not dropped; `indices` of every rank."""
    return [
        (rank, token, k, int(expert))
        for rank, table in enumerate(indices)
        for (token, k), expert in np.ndenumerate(table)
        if 0 <= expert < experts
    ]


def expert_rows(indices, experts, world_size, alignment=1):
    """For each rank the (rank, token, k) of its rows, None for padding; counts and offsets."""
    per_rank = experts // world_size
    pairs = kept(indices, experts)
    rows, counts, offsets = [], [], []
    for rank in range(world_size):
        mine, starts = [], [0]
        for expert in range(rank * per_rank, (rank + 1) * per_rank):
            mine += [pair[:3] for pair in pairs if pair[3] == expert]
            mine += [None] * (-len(mine) % alignment)
            starts.append(len(mine))
        rows.append(mine)
        counts.append([sum(pair[3] == rank * per_rank + i for pair in pairs)
                       for i in range(per_rank)])  # fmt: skip
        offsets.append(starts)
    return rows, counts, offsets


def token_rows(indices, experts, world_size):
    """For each rank the (rank, token) of its rows and the local expert of each pair, or -1."""
    per_rank = experts // world_size
    rows = []
    for rank in range(world_size):
        mine = []
        for source, table in enumerate(indices):
            for token, choice in enumerate(table):
                here = [
                    int(x) - rank * per_rank if 0 <= x < experts and x // per_rank == rank else -1
                    for x in choice
                ]
                if max(here) >= 0:
                    mine.append((source, token, here))
        rows.append(mine)
    return rows


def combine(
    indices, experts, world_size, local_world_size, row_of, dtype="float32", *,
    hidden, weights=None, bias=None, local_combine=False,
):  # fmt: skip
    """[n, H] of every rank as float32. row_of(rank, token, k): the expert's row for a pair.

    Sums are in float32, over k, then the ranks of a node, then nodes. A partial sum is rounded to
    the dtype when it is sent: that of another node, and with local_combine that of a rank without
    the source's local index.
    """
    per_rank, cross = experts // world_size, ROUND[dtype]
    nodes = world_size // local_world_size
    results = []
    for source, table in enumerate(indices):
        out = np.zeros((len(table), hidden), np.float32)
        for token, choice in enumerate(table):
            total = np.zeros(hidden, np.float32)
            for node in range(nodes):
                node_sum = np.zeros(hidden, np.float32)
                for local in range(local_world_size):
                    rank = node * local_world_size + local
                    here = [k for k, x in enumerate(choice)
                            if 0 <= x < experts and x // per_rank == rank]  # fmt: skip
                    rank_sum = np.zeros(hidden, np.float32)
                    for k in here:
                        row = row_of(source, token, k).astype(np.float32)
                        if weights is not None:
                            row = np.float32(weights[source][token, k]) * row
                        rank_sum = rank_sum + row
                    if local_combine and local != source % local_world_size:
                        rank_sum = cross(rank_sum)
                    node_sum = node_sum + rank_sum
                if node != source // local_world_size:
                    node_sum = cross(node_sum)
                total = total + node_sum
            if bias is not None:
                total = total + bias[source][token].astype(np.float32)
            out[token] = cross(total)
        results.append(out)
    return results


def scatter_table(indices, experts, world_size, order):
    """Scatter indices [sum of n, K], and the (rank, token, k) of each rank's rows.

    The rows of a rank are in the order that order(pairs) gives; dropped pairs come after all rows.
    """
    per_rank = experts // world_size
    pairs = kept(indices, experts)
    ends = np.cumsum([0] + [len(table) for table in indices])
    table = np.full((ends[-1], indices[0].shape[1]), -1, np.int64)
    position = 0
    placed = []
    for rank in range(world_size):
        mine = order([pair for pair in pairs if pair[3] // per_rank == rank])
        placed.append([pair[:3] for pair in mine])
        for source, token, k, _ in mine:
            table[ends[source] + token, k] = position
            position += 1
    dropped = table < 0
    table[dropped] = np.arange(position, position + dropped.sum())
    return table.astype(np.int32), placed


def layout(indices, experts, world_size, local_world_size):
    """(tokens_per_rank, tokens_per_node, tokens_per_expert, is_token_in_rank) of one rank."""
    per_rank = experts // world_size
    in_rank = np.zeros((len(indices), world_size), bool)
    per_expert = np.zeros(experts, np.int32)
    for token, choice in enumerate(indices):
        for expert in choice:
            if 0 <= expert < experts:
                per_expert[expert] += 1
                in_rank[token, expert // per_rank] = True
    nodes = in_rank.reshape(len(indices), world_size // local_world_size, local_world_size).any(2)
    return in_rank.sum(0), nodes.sum(0), per_expert, in_rank
