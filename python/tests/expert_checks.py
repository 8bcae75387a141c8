"""Checks of what dispatch returns, in numpy, against the oracle's rows."""

import numpy as np


def check_rows(got, rows, inputs, weights=None):
    assert got.output.shape == (len(rows), inputs[0].shape[1])
    for row, pair in enumerate(rows):
        want = 0 if pair is None else inputs[pair[0]][pair[1]]
        np.testing.assert_array_equal(got.output[row], np.broadcast_to(want, got.output[row].shape))
        if weights is not None:
            assert got.weights[row] == (0 if pair is None else weights[pair[0]][pair[1], pair[2]])


def check_tables(described, rows, indices, rank, local):
    nodes = 4 // local
    row_of = {pair: row for mine in rows for row, pair in enumerate(mine) if pair is not None}
    for node in range(nodes):
        source = node * local + rank % local
        n = len(indices[source])
        np.testing.assert_array_equal(described.topk_indices[node, :n], indices[source])
        assert (described.topk_indices[node, n:] == -1).all()
        for (token, k), row in np.ndenumerate(described.token_dst_scatter_idx[node]):
            expert = indices[source][token, k] if token < n else -1
            here = 0 <= expert < 8 and expert // 2 // local == rank // local
            assert row == (row_of[source, token, k] if here else -1)
        if nodes == 1:
            continue
        lives_here = (0 <= indices[source]) & (indices[source] // 2 // local == rank // local)
        wanted = np.flatnonzero(lives_here.any(1)).tolist()
        first, last = described.send_reqs_recv[node]
        assert ((first < 0) == (last < 0)).all()
        sent = [token for a, b in zip(first, last, strict=True) for token in range(a, b)]
        assert wanted == sent
    assert (described.send_reqs_recv is None) == (nodes == 1)
    mine = rows[rank]
    firsts = {}
    for row, pair in enumerate(mine):
        if pair is not None:
            here = [r for r, other in enumerate(mine) if other and other[:2] == pair[:2]]
            firsts[row] = min(here, key=lambda r: mine[r][2])
    for row, first in enumerate(described.skipped_token_mapping_indices):
        assert first == firsts.get(row, -1)
    for row, copies in enumerate(described.skipped_token_topk_mapping_indices):
        want = [-1, -1, -1]
        if firsts.get(row) == row:
            for other, pair in enumerate(mine):
                if pair is not None and pair[:2] == mine[row][:2]:
                    want[pair[2]] = other
        assert copies.tolist() == want
