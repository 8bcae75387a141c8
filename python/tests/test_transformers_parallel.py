"""Models whose attention heads transformers' tensor parallelism divides over two processes."""

import pytest
import torch
from dsa_models import make, tokens
from ranks import meet, spawn
from winnow.transformers import attend_densely, attention_share, indexer_loss

WORLD = 2
TOLERANCE = 2e-4  # of the largest value of a tensor, in f32


def results(model, dense):
    """What one step gives: logits, both losses, the share of the attention, and gradients."""
    from torch.distributed.tensor import DTensor

    ids = tokens()
    attend_densely(model, dense)
    model.train()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    chosen = indexer_loss(model)
    share = attention_share(model)
    (out.loss + chosen).backward()
    found = {"logits": out.logits, "loss": out.loss, "indexer_loss": chosen, "share": share}
    for name, parameter in model.named_parameters():
        # DTensor does not gather the packed weights of some feed-forward layers.
        if parameter.grad is not None and "mlp" not in name:
            found[name] = parameter.grad
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in found.items()
    }


def rank_of_world(rank, family, folder):
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    meet(rank, WORLD, folder)
    model = make(family, "winnow")
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=WORLD))
    mesh = torch.distributed.init_device_mesh("cpu", (WORLD,))
    apply_tensor_parallelism(model, mesh, plan)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    assert 2 * weight.to_local().shape[0] == weight.shape[0]
    for dense in (False, True):
        expected = torch.load(folder / f"expected-{dense}")
        found = results(model, dense)
        assert found.keys() == expected.keys()
        for name, want in expected.items():
            error = (found[name] - want).abs().max() / want.abs().max()
            assert error <= TOLERANCE, f"{name}: {error}"
        model.zero_grad()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_two_processes_compute_what_one_does(family, tmp_path):
    model = make(family, "winnow")
    for dense in (False, True):
        torch.save(results(model, dense), tmp_path / f"expected-{dense}")
        model.zero_grad()
    spawn(rank_of_world, (family, tmp_path), WORLD)
