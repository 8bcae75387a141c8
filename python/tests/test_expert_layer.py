"""EPAll2AllLayer under torchrun: expert_program.py does the checks, these look at what it left."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from expert_launch import HERE, alone, documented_program  # noqa: F401
from winnow.distributed import initialize_distributed

from winnow.expert_parallel import EPAll2AllLayer

RANKS = 4


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The reports of four ranks, the last of which ended in the middle, and torchrun's output."""
    folder = tmp_path_factory.mktemp("torchrun")
    example = folder / "example.py"
    example.write_text(documented_program())
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(RANKS), HERE / "expert_program.py", example, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "WINNOW_TIMEOUT_SECONDS": "20"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    output = result.stdout + result.stderr
    reports = []
    for rank in range(RANKS):
        report = folder / f"{rank}.json"
        assert report.exists(), output
        reports.append(json.loads(report.read_text()))
    return reports, output


def test_the_documented_program_runs(launched):
    _, output = launched
    assert output.count("combined: torch.Size([128, 7168]) on cpu") == RANKS, output


def test_four_ranks_as_one_node_and_as_two(launched):
    reports, output = launched
    assert [report["rank"] for report in reports] == list(range(RANKS))
    assert all(report["checked"] for report in reports), output


def test_the_death_of_a_rank_is_an_error_on_the_others(launched):
    reports, _ = launched
    assert "death" not in reports[3]
    for report in reports[:3]:
        assert report["death"]["code"] == "timeout"
        assert re.search(
            r"expert_parallel::combine: rank \d waited .* of rank 3 .*: process \d+, gone",
            report["death"]["text"],
        )
        assert report["death"]["seconds"] < 20


def test_one_process_is_a_world(alone):  # noqa: F811
    assert initialize_distributed(seed=4) == (0, 1)
    drawn = torch.rand(3)
    assert initialize_distributed(4) == (0, 1)  # the group is there; seeded again
    assert torch.equal(torch.rand(3), drawn)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.are_deterministic_algorithms_enabled()
    layer = EPAll2AllLayer(dist.group.WORLD, 4, 8, 2, 0, 4, 1, 1, torch.float32)
    tokens = torch.arange(24.0).view(3, 8)
    output, weights, desc = layer.dispatch(tokens, torch.tensor([[3, 0], [4, 1], [-1, 4]]).int())
    assert weights is None and torch.equal(output, tokens[[0, 1, 0]])
    combined = layer.combine(output, desc)
    assert torch.equal(combined, torch.stack([2 * tokens[0], tokens[1], torch.zeros(8)]))
    settled = layer._all_to_all.arena_bytes
    kept = [layer.dispatch(tokens, torch.zeros(3, 2).int())[0] for _ in range(20)]
    assert len(kept) == 20 and layer._all_to_all.arena_bytes == settled  # outputs are copies
    layer.finalize()
    with pytest.raises(ValueError, match="the layer is closed"):
        layer.dispatch(tokens, torch.zeros(3, 2).int())
    assert torch.equal(output, tokens[[0, 1, 0]])  # the caller's


def test_without_a_process_group_the_error_says_what_to_do(alone):  # noqa: F811
    with pytest.raises(ValueError, match="initialize_distributed"):
        EPAll2AllLayer(None, 4, 8, 2, 0, 4, 2, 2)


def test_reading_a_name_imports_torch_only_then():
    program = (
        "import sys, winnow.expert_parallel as ep\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'EPConfig', 'AllToAll'} <= set(ep.__all__)\n"
        "try:\n"
        "    ep.EPAll3AllLayer\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.startswith("module 'winnow.expert_parallel' has no attribute"), result
