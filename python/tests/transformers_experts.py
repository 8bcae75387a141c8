"""What the ranks of test_transformers_experts.py run, beside transformers' own all-to-all."""

import torch
import winnow.transformers
from deep_ep_ranks import alone
from torch.distributed.device_mesh import DeviceMesh
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

assert winnow.transformers
H, E, K = 32, 12, 3

MODELS = {
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig, {"num_experts": E, "moe_intermediate_size": 16}),
    "mixtral": (MixtralExperts, MixtralConfig, {"num_local_experts": E, "intermediate_size": 16}),
    "deepseek_v3": (
        DeepseekV3Experts,
        DeepseekV3Config,
        {"n_routed_experts": E, "moe_intermediate_size": 16},
    ),
}


def experts_of(model, rank, world, dtype):
    """This rank's part of the experts."""
    make, config, sizes = MODELS[model]
    made = make(config(hidden_size=H, **sizes))
    generator = torch.Generator().manual_seed(7)
    per_rank = E // world
    for name, whole in list(made.named_parameters()):
        values = torch.randn(whole.shape, generator=generator, dtype=torch.float32) / 8
        part = values[rank * per_rank : (rank + 1) * per_rank].to(dtype)
        setattr(made, name, torch.nn.Parameter(part))
    made.num_experts = per_rank
    made._is_expert_parallel = True
    return made


def results_of(implementation, experts, ep_mesh, tp_mesh, given):
    x, index, weights = (given[0].clone().requires_grad_(), given[1], given[2].clone())
    weights.requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = None
    out = implementation(experts, ep_mesh, tp_mesh)(x, index, weights)
    out.float().square().sum().backward()
    return out.detach(), x.grad, weights.grad, [p.grad.clone() for p in experts.parameters()]


def same_as_theirs(group, model, dtype):
    rank, world = group.rank(), group.size()
    dtype = getattr(torch, dtype)
    ep_mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(world)), mesh_dim_names=("ep",))
    tp_mesh = DeviceMesh.from_group(alone(), "cpu", mesh=[rank], mesh_dim_names=("tp",))
    experts = experts_of(model, rank, world, dtype)
    for tokens in (5, [7, 0, 40, 3][rank]):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, H, generator=generator, dtype=torch.float32).to(dtype)
        scores = torch.rand(tokens, E, generator=generator, dtype=torch.float32)
        weights, index = scores.topk(K, dim=1) if tokens else (scores[:, :K], scores[:, :K].long())
        given = (x, index, weights.to(dtype))
        ours = EPImplementationInterface()["winnow"]
        got = results_of(ours, experts, ep_mesh, tp_mesh, given)
        want = results_of(AllToAllEP, experts, ep_mesh, tp_mesh, given)
        near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(got, want, **near)
