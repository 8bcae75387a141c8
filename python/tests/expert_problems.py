"""Small problems for the all-to-all."""

import numpy as np

SMALL = {"max_tokens": 8, "hidden": 16, "topk": 3, "experts": 8, "dtype": "float32"}


def payload(rank, tokens, hidden=16):
    """Rows that identify their rank, token and column."""
    row = 1000 * rank + np.arange(tokens)[:, None]
    return (row + np.arange(hidden)[None, :] / 64).astype(np.float32)


def routing(rng, tokens, topk=3, experts=8, dropped=0.2):
    indices = rng.integers(0, experts, (tokens, topk), dtype=np.int32)
    nothing = rng.choice(np.array([-1, experts], np.int32), indices.shape)
    return np.where(rng.random(indices.shape) < dropped, nothing, indices).astype(np.int32)


def problem(seed=0, tokens=(5, 0, 8, 3)):
    rng = np.random.default_rng(seed)
    return (
        [payload(rank, n) for rank, n in enumerate(tokens)],
        [routing(rng, n) for n in tokens],
        [rng.random((n, 3)).astype(np.float32) for n in tokens],
    )
