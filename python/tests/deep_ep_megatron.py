"""Megatron-core's own functions over deep_ep, unchanged, on CPU tensors: run by the ranks."""

import warnings

import torch

H, K, E = 64, 2, 12


def _inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6 + rank, H, generator=generator, dtype=torch.float32)
    scores = torch.rand(len(x), E, generator=generator, dtype=torch.float32)
    probs, idx = scores.topk(K, dim=1)
    return x, idx, probs


def _wanted(x, idx, probs):
    """Each expert e multiplies by e + 1: (outputs, their gradients) where the loss is a sum of
    squares."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out = x * ((idx + 1) * probs).sum(1, keepdim=True)
    out.square().sum().backward()
    return out.detach(), x.grad, probs.grad


def _functions():
    from winnow import compat

    compat.install("deep_ep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import fused_a2a
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    return fused_a2a


def deepep(group):
    """The flex dispatcher's fused_dispatch and fused_combine."""
    fused = _functions()
    rank, per = group.rank(), E // group.size()
    x, idx, probs = _inputs(rank)
    want = _wanted(x, idx, probs)
    x.requires_grad_()
    probs.requires_grad_()
    for overlap in (False, True):
        x.grad = probs.grad = None
        rows, local, sent, counts, handle = fused.fused_dispatch(
            x, idx, probs, E, group, async_finish=overlap, allocate_on_comm_stream=overlap
        )
        assert counts.sum() == (local >= 0).sum()
        factors = torch.where(local >= 0, local + 1 + rank * per, 0) * sent
        out, _ = fused.fused_combine(
            rows * factors.sum(1, keepdim=True), group, handle, overlap, overlap
        )
        out.square().sum().backward()
        for got, expected in zip((out, x.grad, probs.grad), want, strict=True):
            torch.testing.assert_close(got, expected)


def hybridep(group):
    """The same with hybrid_ep_dispatch and hybrid_ep_combine, which permute."""
    fused = _functions()
    rank, per = group.rank(), E // group.size()
    x, idx, probs = _inputs(rank)
    want = _wanted(x, idx, probs)
    x.requires_grad_()
    probs.requires_grad_()
    chosen = torch.zeros(len(x), E, dtype=torch.bool).scatter(1, idx, True)
    dense = torch.zeros(len(x), E).scatter(1, idx, probs)
    rows, sent, _, counts, handle = fused.hybrid_ep_dispatch(
        x, chosen, dense, group, per, pad_multiple=4
    )
    experts = torch.arange(per).repeat_interleave(counts) + 1 + rank * per
    out = fused.hybrid_ep_combine(rows * (experts * sent)[:, None], handle, None, 4)
    out.square().sum().backward()
    for got, expected in zip((out, x.grad, probs.grad), want, strict=True):
        torch.testing.assert_close(got, expected)
    fused.reset_hybrid_ep_buffer()


def moe_layer(group, backend):
    """Megatron's own MoE layer with the flex dispatcher against the one that gathers all tokens.

    Megatron-core asks for a GPU, and for TransformerEngine, in the router only: they get the CPU
    and none here.
    """
    _functions()
    torch.cuda.current_device = lambda: torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.transformer_config import TransformerConfig
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    world = group.size()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=world)

    def run(**dispatcher):
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=H,
            num_attention_heads=4,
            num_moe_experts=2 * world,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_dtype="fp32",
            expert_model_parallel_size=world,
            use_cpu_initialization=True,
            add_bias_linear=False,
            params_dtype=torch.float32,
            **dispatcher,
        )
        spec = get_gpt_layer_local_spec(num_experts=2 * world, moe_grouped_gemm=False)
        layer = MoELayer(config, spec.submodules.mlp.submodules)
        torch.manual_seed(1 + group.rank())
        x = torch.randn(5, 2, H, dtype=torch.float32).requires_grad_()
        out, _ = layer(x)
        out.square().sum().backward()
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        assert len(gradients) > 2
        return [out.detach(), x.grad, *gradients]

    want = run(moe_token_dispatcher_type="allgather")
    got = run(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
