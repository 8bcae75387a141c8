"""One sequence on all GPUs of this machine, a process for each, over NCCL; on one GPU the ranks are
one. As in test_context_parallel.py, in bfloat16."""

import context_parallel_checks as checks
import pytest
import torch
from kinds import gpu

pytestmark = gpu


def test_operations_of_gpus_are_those_of_one(tmp_path):
    ranks = min(4, torch.cuda.device_count())
    torch.multiprocessing.spawn(checks.on_gpus, (ranks, tmp_path), nprocs=ranks)


@pytest.mark.parametrize("placement, keys", [("balanced", "gathered"), ("contiguous", "sharded")])
def test_a_step_of_a_model(placement, keys, tmp_path):
    models = pytest.importorskip("context_parallel_models")
    ranks = min(4, torch.cuda.device_count())
    how = ranks, placement, keys, tmp_path
    torch.multiprocessing.spawn(models.on_gpus, how, nprocs=ranks)


def test_bench():
    """Its figures are not judged."""
    for row in checks.check_bench(min(4, torch.cuda.device_count()), 8192):
        assert "reached" in row
