"""Megatron-core's own functions over deep_ep, unchanged, on CPU tensors: run by the ranks."""

import contextlib
import warnings

import deep_ep_clients as clients
import torch
from deep_ep_clients import E, H
from deep_ep_ranks import alone


def load(group=None):
    """Imports what the others use, and returns the version."""
    _functions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import package_info
        from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
    return package_info.__shortversion__


def _functions():
    from winnow import compat

    compat.install("deep_ep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import fused_a2a
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    # It keeps the buffer of the last group, and some ranks have been in another since.
    fused_a2a._buffer = None
    return fused_a2a


def _start(group):
    """(the module, experts of a rank, the first number of this rank's, inputs, what they give)"""
    fused, per = _functions(), E // group.size()
    x, idx, probs = clients.inputs(group.rank())
    want = clients.wanted(x, idx, probs)
    return fused, per, 1 + group.rank() * per, x.requires_grad_(), idx, probs.requires_grad_(), want


def deepep(group):
    """The flex dispatcher's fused_dispatch and fused_combine."""
    fused, _, first, x, idx, probs, want = _start(group)
    for overlap in (False, True):
        x.grad = probs.grad = None
        rows, local, sent, counts, handle = fused.fused_dispatch(
            x, idx, probs, E, group, async_finish=overlap, allocate_on_comm_stream=overlap
        )
        assert counts.sum() == (local >= 0).sum()
        factors = torch.where(local >= 0, local + first, 0) * sent
        out, _ = fused.fused_combine(
            rows * factors.sum(1, keepdim=True), group, handle, overlap, overlap
        )
        out.square().sum().backward()
        clients.compare((out, x.grad, probs.grad), want)


def hybridep(group):
    """The same with hybrid_ep_dispatch and hybrid_ep_combine, which permute."""
    fused, per, first, x, idx, probs, want = _start(group)
    chosen = torch.zeros(len(x), E, dtype=torch.bool).scatter(1, idx, True)
    dense = torch.zeros(len(x), E).scatter(1, idx, probs)
    rows, sent, _, counts, handle = fused.hybrid_ep_dispatch(
        x, chosen, dense, group, per, pad_multiple=4
    )
    experts = torch.arange(per).repeat_interleave(counts) + first
    out = fused.hybrid_ep_combine(rows * (experts * sent)[:, None], handle, None, 4)
    out.square().sum().backward()
    clients.compare((out, x.grad, probs.grad), want)
    fused.reset_hybrid_ep_buffer()


class _Stream:
    """What Megatron-core's alltoall dispatcher asks of a stream, where there is none."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


class _MadeOnTheCpu(torch.overrides.TorchFunctionMode):
    """For tensors that a layer makes on "cuda" when it is made itself."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _on_the_cpu():
    """Megatron-core asks for a GPU, and for TransformerEngine, around its dispatchers: there it
    gets the CPU, and none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
    torch.compiler.set_stance("force_eager")  # every process would compile for seconds
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()

    def on_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _groups(ep):
    """All kinds of groups that a layer asks for: experts are on the ranks of `ep`, and each has the
    rest for itself."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = groups.tp_dp_cp = ep
    groups.tp = groups.cp = groups.tp_cp = groups.expt_tp = groups.expt_dp = alone()
    return groups


def moe_layer(group, backend, dtype):
    """Megatron's own MoE layer with the flex dispatcher against its alltoall dispatcher."""
    fused = _functions()
    _on_the_cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.transformer_config import TransformerConfig
    rank, experts, groups = group.rank(), 2 * group.size(), _groups(group)
    dtype = getattr(torch, dtype)

    def run(**dispatcher):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = TransformerConfig(
                num_layers=1,
                hidden_size=H,
                num_attention_heads=4,
                num_moe_experts=experts,
                moe_router_topk=2,
                moe_router_load_balancing_type="none",
                moe_aux_loss_coeff=0.0,
                moe_router_dtype="fp32",
                expert_model_parallel_size=group.size(),
                use_cpu_initialization=True,
                add_bias_linear=False,
                params_dtype=dtype,
                **dispatcher,
            )
        spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
        with _MadeOnTheCpu():
            layer = spec.submodules.mlp(config=config, pg_collection=groups)
        assert type(layer) is MoELayer
        # The router's weights are those of all ranks, each expert's are its own.
        torch.manual_seed(0)
        for name, weights in layer.named_parameters():
            if name.startswith("experts."):
                torch.manual_seed(1 + rank)
            torch.nn.init.normal_(weights, std=0.1)
        x = torch.randn(5, 2 + rank, H, dtype=torch.float32).to(dtype).requires_grad_()
        out, _ = layer(x)
        out.float().square().sum().backward()
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        assert len(gradients) > 2
        return [out.detach(), x.grad, *gradients]

    got = run(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    clients.compare(got, run(moe_token_dispatcher_type="alltoall"), dtype)
    fused.reset_hybrid_ep_buffer()
