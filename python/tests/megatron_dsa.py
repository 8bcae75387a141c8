"""Megatron-core's DSA on "winnow" beside its own unfused functions, on CPU tensors: run by the
ranks."""

import contextlib
import warnings
from unittest import mock

import torch
import winnow.megatron
from deep_ep_ranks import alone
from torch import nn

HEADS, V_HEAD, HIDDEN, Q_LORA = 3, 16, 32, 24


def modules():
    """(dsa, dsa_kernels), registered. Megatron-core asks torch for a GPU: it gets the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels
    winnow.megatron.register()
    return dsa, dsa_kernels


class _OnTheCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


class Linear(nn.Linear):
    """In the place of TransformerEngine's."""

    def __init__(self, inputs, outputs, *, config, **options):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


class Norm(nn.LayerNorm):
    def __init__(self, *, config, hidden_size, eps):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


def config_of(backend, **options):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    options = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "q_lora_rank": Q_LORA,
        "rope_type": "rope",
        "add_bias_linear": False,
        "experimental_attention_variant": "dsa",
        "dsa_kernel_backend": backend,
        "dsa_indexer_n_heads": 8,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 6,
        "dsa_indexer_loss_coeff": 0.5,
        "dsa_indexer_rotate_activation": False,
        **options,
    }
    with warnings.catch_warnings(), mock.patch("torch.cuda.is_available", lambda: True):
        warnings.simplefilter("ignore")
        return MLATransformerConfig(**options)


def groups_of(group, kind):
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp = groups.cp = alone()
    if kind is not None:
        setattr(groups, kind, group)
    return groups


def _packed(lengths, real):
    """Sequences of these lengths. With `real` (which rows are tokens) each ends with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    def ends(lengths):
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    whole, longest = ends(lengths), max(lengths)
    if real is None:
        return PackedSeqParams("thd", whole, whole, max_seqlen_q=longest, max_seqlen_kv=longest)
    short = ends([max(0, length - 1) for length in lengths])
    packed = PackedSeqParams("thd", short, short, whole, whole, longest, longest)
    packed.real_token_mask_q = real
    return packed


@contextlib.contextmanager
def no_unfused(dsa):
    """Nothing of Megatron-core's own runs in the place of a hook."""
    names = ("FusedDSAIndexerLoss", "_unfused_absorbed_dsa_fn", "unfused_dsa_fn")
    with mock.patch.multiple(dsa, fused_qk_topk_naive=None, **dict.fromkeys(names)):
        yield


def _layer(
    group,
    *,
    parallel=None,  # "tp" or "cp": what the ranks of the group share
    dtype="float32",
    batch=2,
    rows=12,  # of this rank; packed sequences say it
    lengths=None,  # of packed sequences, of all ranks
    padding=False,  # some rows are none of a query's
    loss=True,
    frozen=False,
    sharing=False,  # a second layer takes the choice of the first
    dense_mask=False,
    expanded=False,  # keys and values of each head, which Winnow declines
    sequence=None,  # parallelism, after which a rank has the "full" queries or its "local" ones
    **options,
):
    """Output, loss and every gradient of DSAttention, on "winnow" and on "none"."""
    dsa, _ = modules()
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    dtype, rank = getattr(torch, dtype), group.rank()
    groups = groups_of(group, parallel)
    if lengths is not None:
        divided = parallel == "cp" or sequence is not None
        batch, rows = 1, sum(lengths) // (group.size() if divided else 1)
    options = {"dsa_indexer_topk_freq": 2 if sharing else 1, "params_dtype": dtype, **options}
    if parallel == "cp":
        options.update(context_parallel_size=group.size(), cp_comm_type="allgather")
    if sequence is not None:
        options.update(sequence_parallel=True, tensor_model_parallel_size=group.size())
    queries = rows * (group.size() if sequence == "full" else 1)
    indexer = ModuleSpec(
        dsa.DSAIndexer,
        submodules=dsa.DSAIndexerSubmodules(
            *(ModuleSpec(kind) for kind in (Linear, Linear, Norm, Linear))
        ),
    )

    def run(backend):
        config = config_of(backend, **options)
        made = [
            dsa.DSAttention(
                config,
                dsa.DSAttentionSubmodules(indexer),
                layer_number=number,
                attn_mask_type=AttnMaskType.causal,
                attention_type="self",
                softmax_scale=0.1,
                cp_comm_type="allgather",
                pg_collection=groups,
            )
            for number in range(1, 2 + sharing)
        ]
        model = nn.ModuleList(made).train(loss)
        torch.manual_seed(0)  # the indexer is that of all ranks
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.3)
            weight.requires_grad_(not frozen)
        rows_differ = parallel == "cp" or sequence == "local"
        own = torch.Generator().manual_seed(1 + (rank if rows_differ else 0))
        heads = torch.Generator().manual_seed(11 + rank)

        def normal(*shape, by=own):
            return torch.randn(shape, generator=by).to(dtype)

        x, qr = normal(rows, batch, HIDDEN), normal(rows, batch, Q_LORA)
        key = normal(queries, batch, 1, 576).requires_grad_()
        query = normal(queries, batch, HEADS, 576, by=heads).requires_grad_()
        up, value = normal(HEADS, V_HEAD, 512, by=heads).requires_grad_(), None
        if expanded:
            query, key, value = (
                normal(queries, batch, HEADS, d, by=heads).requires_grad_()
                for d in (48, 48, V_HEAD)
            )
        real = torch.arange(queries) % 3 != 1 if padding else None
        packed = None if lengths is None else _packed(lengths, real)
        mask, kind = None, AttnMaskType.causal
        if dense_mask:
            mask, kind = torch.ones(rows, rows).triu(1).bool(), None
            mask = mask.expand(batch, 1, rows, rows).clone()
            mask[..., 0] |= torch.arange(rows) > 3
        out = torch.zeros(())
        for layer in model:
            with _OnTheCpu():
                out = out + layer(
                    query, key, value, mask, x, qr, attn_mask_type=kind, packed_seq_params=packed,
                    up_v_weight=None if expanded else up,
                )  # fmt: skip
        (out.float() * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        tracker = dsa.DSAIndexerLossLoggingHelper.tracker
        losses = tracker.pop("values", torch.zeros(2))
        leaves = {"query": query, "key": key, "value": value, "up": up}
        leaves.update(model.named_parameters())
        gradients = {n: v.grad for n, v in leaves.items() if v is not None and v.grad is not None}
        return {"out": out.detach(), "losses": losses, **gradients}

    want = run("none")
    assert ("0.indexer.k_norm.bias" in want) == (loss and not frozen)
    assert bool(want["losses"][0] > 0) == (loss and rows > 1)
    declines = dense_mask or expanded
    with contextlib.nullcontext() if declines else no_unfused(dsa):
        got = run("winnow")
    compare(got, want)


def compare(got, want):
    """Tensors by name; what is in bfloat16 or float16 has been rounded once or more."""
    assert got.keys() == want.keys()

    def largest(name):
        # Where a query sees one row its own gradient is 0 but for rounding: that of the row is not.
        of = ("query", "key") if name in ("query", "key") else (name,)
        return max(want[n].abs().max().item() if want[n].numel() else 0 for n in of if n in want)

    for name, wanted in want.items():
        near = 2e-5 if wanted.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            got[name], wanted, rtol=near, atol=near * largest(name),
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def layer(group, options):
    _layer(group, **options)
