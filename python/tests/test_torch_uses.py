"""The attention operator inside what torch has around modules: export, checkpoints, DDP, copies."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from winnow.torch import sparse_mla_attention


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(512, 512)
        self.sink = torch.nn.Parameter(torch.zeros(2))

    def forward(self, q, kv, indices):
        return sparse_mla_attention(self.project(q), kv, indices, attn_sink=self.sink).tanh()


def _problem(queries=3):
    torch.manual_seed(queries)
    indices = torch.randint(-1, 9, (queries, 1, 4), dtype=torch.int32)
    return torch.randn(queries, 2, 512), torch.randn(9, 1, 512), indices


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return _Layer()


def _gradients(layer, call):
    layer.zero_grad()
    call(*_problem()).square().sum().backward()
    return [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch.export.load
def test_an_exported_program_takes_other_sizes(layer):
    queries = torch.export.Dim("queries", min=2, max=100)
    sizes = {"q": {0: queries}, "kv": None, "indices": {0: queries}}
    program = torch.export.export(layer, _problem(), dynamic_shapes=sizes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (3, 5):
        assert torch.equal(loaded(*_problem(count)), layer(*_problem(count)))


def test_a_checkpoint_computes_the_same_again(layer):
    def call(*tensors):
        return checkpoint(layer, *tensors, use_reentrant=False)

    assert all(map(torch.equal, _gradients(layer, call), _gradients(layer, layer)))


def test_distributed_data_parallel_has_the_gradients_of_the_module(layer, tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(layer)
        wanted = _gradients(layer, layer)
        assert all(map(torch.equal, _gradients(layer, parallel), wanted))
    finally:
        torch.distributed.destroy_process_group()


def test_copies_and_saved_modules_compute_the_same(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    wanted = layer(*_problem())
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(*_problem()), wanted)
