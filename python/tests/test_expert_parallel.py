"""The rows and tables of the all-to-all between threads, bit for bit. Random worlds, routings and
options, all_to_all_soak.cc has; layouts in memory, test_layouts.py; sums, expert_program.py."""

import expert_oracle as oracle
import numpy as np
import pytest
import torch
from expert_checks import check_rows, check_tables
from expert_gpu import CONFIG, cuda, loaded, on_host  # noqa: F401
from expert_problems import SMALL, problem
from kinds import DEVICES
from ranks import Ranks


@pytest.mark.parametrize("local", [4, 2, 1])
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_expert_major_rows_come_in_the_documented_order(local, alignment, device, request):
    array, config, there = np.array, SMALL, torch.device("cpu")
    if device == "cuda":
        request.getfixturevalue("loaded")
        array, config, there = cuda, CONFIG, torch.device("cuda", 0)
    inputs, indices, weights = problem()
    rows, counts, offsets = oracle.expert_rows(indices, 8, 4, alignment)

    def body(layer, rank):
        assert torch.device(layer.device) == there
        got = layer.dispatch(
            array(inputs[rank]), array(indices[rank]), weights=array(weights[rank]),
            expert_alignment=alignment,
        )  # fmt: skip
        for made in (got.output, got.weights, got.descriptor.expert_offsets):
            assert type(made) is np.ndarray or made.device == there
        described = on_host(got.descriptor)
        check_rows(on_host(got), rows[rank], inputs, weights)
        assert described.rows == described.wanted_rows == len(rows[rank])
        assert described.expert_counts.tolist() == counts[rank]
        assert described.expert_offsets.tolist() == offsets[rank]
        assert (described.host_expert_counts, described.host_expert_offsets) == (
            counts[rank], offsets[rank],
        )  # fmt: skip
        assert described.num_dispatch_token_cur_rank == len(inputs[rank])
        assert described.num_input_tokens_per_rank.tolist() == [5, 0, 8, 3]
        assert described.order == "expert_major" and described.has_weights
        assert described.expert_alignment == alignment and described.worst_case_rows == 0
        assert got.expert_ids is None and got.scales is None and described.source_begins is None
        check_tables(described, rows, indices, rank, local)

    with Ranks(4, **config, local_world_size=local) as ranks:
        ranks.run(body)
