"""One sequence on all GPUs of this machine, a process for each, over NCCL; on one GPU the ranks are
one. As in test_context_parallel.py, in bfloat16."""

import json
import sys

import context_parallel_checks as checks
import pytest
import torch
from kinds import gpu
from processes import run

pytestmark = gpu


@pytest.mark.parametrize("name", checks.CHECKS)
def test_operations_of_gpus_are_those_of_one(name, tmp_path):
    ranks = min(4, torch.cuda.device_count())
    torch.multiprocessing.spawn(checks.on_gpus, (ranks, [name], tmp_path), nprocs=ranks)


@pytest.mark.parametrize("placement, keys", [("balanced", "gathered"), ("contiguous", "sharded")])
def test_a_step_of_a_model(placement, keys, tmp_path):
    models = pytest.importorskip("context_parallel_models")
    ranks = min(4, torch.cuda.device_count())
    how = ranks, placement, keys, tmp_path
    torch.multiprocessing.spawn(models.on_gpus, how, nprocs=ranks)


@pytest.mark.parametrize("keys", checks.KEYS)
def test_bench(keys):
    """Its figures are not judged."""
    ranks = min(4, torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(ranks), "-m", "winnow", "bench", "context_parallel", "--tokens", "8192",
               "--keys", keys, "--json"]  # fmt: skip
    result = run(*command)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["seconds"] > 0 and row["ratio"] > 0 and row["peak_bytes"] > 0
