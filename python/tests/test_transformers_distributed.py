"""A model of transformers with experts on two ranks, FSDP and tensor parallelism beside them, as
from_pretrained(distributed_config=) distributes it, which itself wants accelerate."""

import pytest
import torch
import winnow.transformers
from ranks import meet, spawn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

assert winnow.transformers
WORLD, WORDS = 2, 64
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}


def make():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=WORDS, **SIZES))


def distributed(implementation, sizes):
    config = DistributedConfig(**sizes, ep_size=WORLD, ep_implementation=implementation)
    model = make()
    config, _, mesh = model.prepare_distribute_model(config)
    model = model.maybe_distribute_model(model, config, mesh)
    assert model.model.layers[0].mlp.experts.num_experts == SIZES["num_experts"] // WORLD
    return model


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def results(model, ids):
    """(logits without and with gradients, loss, gradients by name)"""
    with torch.no_grad():
        inference = whole(model.eval()(input_ids=ids).logits)
    out = model.train()(input_ids=ids, labels=ids)
    out.loss.backward()
    named = model.named_parameters()
    gradients = {name: whole(one.grad) for name, one in named if one.grad is not None}
    return inference, whole(out.logits), whole(out.loss), gradients


def rank_of_world(rank, sizes, folder):
    meet(rank, WORLD, folder)
    # The ranks of tensor parallelism share a batch, those of FSDP have one each.
    batches = [
        torch.randint(0, WORDS, (2, 7 + at), generator=torch.Generator().manual_seed(at))
        for at in range(sizes.get("fsdp_size", 1))
    ]
    ids = batches[rank % len(batches)]
    ours, theirs = (results(distributed(name, sizes), ids) for name in ("winnow", "all_to_all"))
    alone = [results(make(), batch) for batch in batches]
    # FSDP's gradients are the mean over its ranks.
    means = {name: sum(one[3][name] for one in alone) / len(alone) for name in alone[0][3]}
    for want in (theirs, (*alone[rank % len(batches)][:3], means)):
        for one, other in zip(ours[:3], want[:3], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert ours[3].keys() == want[3].keys() and len(ours[3]) == 25
        for name, gradient in ours[3].items():
            torch.testing.assert_close(gradient, want[3][name], rtol=1e-4, atol=1e-6)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"tp_size": 2}], ids=["fsdp", "tp"])
def test_a_model_computes_what_it_does_alone(tmp_path, sizes):
    spawn(rank_of_world, (sizes, tmp_path), WORLD)
