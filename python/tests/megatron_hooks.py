"""The hooks of winnow.megatron, each alone, and how it is registered: run by the ranks, which have
Megatron-core."""

import inspect
import logging
import warnings
from random import Random
from unittest import mock

import torch
import winnow.megatron
from megatron_dsa import V_HEAD, compare, config_of, groups_of, modules


def hooks(group, seed, fixed):
    """Each hook alone on a problem of random shapes, beside the unfused functions."""
    dsa, kernels = modules()
    from megatron.core.transformer.enums import AttnMaskType

    random = Random(seed)

    def pick(name, *values):
        value = random.choice(values)
        return fixed.get(name, value)

    dtype = getattr(torch, pick("dtype", "float32", "float32", "bfloat16", "float16"))
    batch, queries = pick("batch", 1, 1, 2, 3), pick("queries", 1, 2, 7, 20)
    rows, topk = pick("rows", 1, 3, 8, 21), pick("topk", 1, 2, 5, 8, 40)
    heads, own = pick("heads", 1, 2, 5), pick("indexer_heads", 8, 9, 16)
    width, d = pick("width", 576, 576, 512), pick("d", 64, 128)
    use_relu, sparse = pick("use_relu", True, True, False), pick("sparse", True, False)
    per_token = pick("per_token", False, True)
    loss_coeff = pick("loss_coeff", 0.0, 0.7, 3.0)
    ranges = pick("ranges", "causal", "random", "random", "packed")
    positions = pick("positions", None, None, "permuted", "apart")
    valid = pick("valid", None, None, "1", "1b", "b")
    frozen = pick("frozen", "", "", "indexer", "attention")
    parallel = pick("parallel", None)
    pieces = pick("pieces", None, None, 30)

    # What the ranks share, and what each has.
    same, mine = (torch.Generator().manual_seed(n) for n in (seed, seed * 31 + 7 + group.rank()))

    def normal(*shape, by=same):
        return torch.randn(shape, generator=by).to(dtype)

    # A mean that is not 0 keeps most products from all being cut off by the ReLU, which makes ties.
    q = normal(queries, batch, own, d) + 0.1
    k, weights = normal(rows, batch, d) + 0.1, normal(queries, batch, own)
    query, key = normal(queries, batch, heads, width, by=mine), normal(rows, batch, 1, width)
    up = normal(heads, V_HEAD, 512, by=mine)
    names = ("q", "k", "weights", "query", "key", "up")
    leaves = dict(zip(names, (q, k, weights, query, key, up), strict=True))
    still = {"indexer": names[:3], "attention": names[3:], "": ()}[frozen]

    integers = torch.Generator().manual_seed(seed + 1)
    starts = ends = key_positions = None
    if ranges == "random":
        starts = torch.randint(-2, rows + 2, (queries,), generator=integers)
        ends = starts + torch.randint(-2, rows + 2, (queries,), generator=integers)
    elif ranges == "packed":
        at = torch.arange(queries)
        starts, ends = at // 3 * 3, at + 1
    if starts is not None and positions is not None:
        key_positions = torch.randperm(rows, generator=integers)
        if positions == "apart":
            key_positions = key_positions * 2 // 3 + 1
    shape = {"1": (queries,), "1b": (1, queries), "b": (batch, queries), None: ()}[valid]
    valid = torch.rand(shape, generator=integers) > 0.4 if shape else None

    config = config_of("winnow", dsa_indexer_use_sparse_loss=sparse)
    groups, scale = groups_of(group, parallel), width**-0.5

    def results(compute):
        made = {n: v.clone().requires_grad_(n not in still) for n, v in leaves.items()}
        out = compute(**made)
        if out["out"].requires_grad or out["loss"].requires_grad:
            (out["out"].float().square().sum() + 2 * out["loss"]).backward()
        gradients = {n: v.grad for n, v in made.items() if v.grad is not None}
        return {**{n: v.detach() for n, v in out.items()}, **gradients}

    def unfused(q, k, weights, query, key, up):
        ranges = starts, ends
        if starts is None:
            ranges = torch.zeros(queries), torch.arange(1, queries + 1)
        limits = {
            "varlen_starts": ranges[0].long(),
            "varlen_ends": ranges[1],
            "key_positions": key_positions,
        }
        with torch.no_grad():
            _, indices = dsa.fused_qk_topk_naive(q, k, weights, topk, use_relu=use_relu, **limits)
        loss = torch.zeros(())
        if loss_coeff > 0:
            wide = key.detach().expand(-1, -1, heads, -1)
            indices, loss = dsa.FusedDSAIndexerLoss.apply(
                q, weights, k, query.detach(), wide, scale, topk, loss_coeff, None, sparse, groups,
                *limits.values(), valid, per_token, use_relu,
            )  # fmt: skip
        out = dsa._unfused_absorbed_dsa_fn(query, key, indices, scale, 512, **limits)
        return {"indices": indices.sort(-1)[0], "out": out, "loss": loss}

    def wanted(up, **tensors):
        values = unfused(up=up, **tensors)
        out = torch.einsum("sbhc,hdc->sbhd", values["out"], up).flatten(2)
        return {"out": out, "loss": values["loss"]}

    def whole(q, k, weights, query, key, up):
        out, loss = kernels.run_fused_dsa_attention(
            config=config, query=query, key=key, value=None, up_v_weight=up, q_indexer=q,
            k_indexer=k, indexer_weights=weights, indexer_topk=topk, softmax_scale=scale,
            loss_coeff=loss_coeff, sparse_loss=sparse, calculate_per_token_loss=per_token,
            absorbed_mla=True, cp_size=1, attn_mask_type=AttnMaskType.causal,
            packed_seq_params=None, varlen_starts=starts, varlen_ends=ends,
            key_positions=key_positions, query_valid_rows=valid, use_relu=use_relu,
            pg_collection=groups,
        )  # fmt: skip
        return {"out": out, "loss": loss}

    few = mock.patch("winnow.megatron._PIECE_SCORES", pieces or 1 << 24)
    with few:
        compare(results(whole), results(wanted))
    if key_positions is not None or not sparse:
        return  # Megatron-core does not call the other hooks

    def parts(q, k, weights, query, key, up):
        limits = dsa.dsa_masking.build_fused_indexer_varlen_bounds(
            sq=queries, skv=rows, device="cpu", mask=None, varlen_starts=starts, varlen_ends=ends,
            key_positions=None,
        )  # fmt: skip
        tensors, loss = (config, q, k, weights, topk, *limits, 8192), torch.zeros(())
        if loss_coeff > 0:
            indices, length, loss = kernels.run_fused_qk_topk_with_loss(
                *tensors, query.detach(), key.detach(), scale, loss_coeff, groups, valid, per_token,
                use_relu,
            )  # fmt: skip
        else:
            indices, length = kernels.run_fused_qk_topk(*tensors, use_relu)
        assert length is None
        # A backend may give a length, beyond which nothing counts.
        count = (indices >= 0).sum(-1)
        noisy = torch.where(indices < 0, 0, indices).long()
        attend = kernels.run_fused_absorbed_sparse_attention
        out = attend(config, query, key, indices, scale, 512)
        assert out.equal(attend(config, query, key, noisy, scale, 512, count))
        return {"indices": indices.long().sort(-1)[0], "out": out, "loss": loss}

    with few:
        compare(results(parts), results(unfused))


def registered(group):
    """What register() has changed, and what it refuses."""
    _, kernels = modules()
    from megatron.core import utils

    names = kernels._BACKEND_MODULE_NAME_BY_BACKEND
    assert names["winnow"] == "winnow.megatron" and len(names) == 3
    assert utils._VALID_DSA_KERNEL_BACKENDS == ("none", "tilelang", "cudnn", "winnow")
    assert kernels._load_backend(config_of("winnow")) is winnow.megatron
    refused = [refusal({"winnow": "another"}, "0.19.2")]
    for version in ("0.19.1", "0.19.2rc0", "0.20.0"):
        refused.append(refusal(names, version))
    assert refusal(names, "0.19.2+8d3a1f0") is None
    return refused


def refusal(names, version):
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    changed = mock.patch.object(dsa_kernels, "_BACKEND_MODULE_NAME_BY_BACKEND", names)
    with mock.patch("megatron.core.__version__", version), changed:
        return refused_by_version(None)


def refused_by_version(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            winnow.megatron.register()
        except ValueError as error:
            return str(error)


def arguments(group):
    """Of each hook those that Megatron-core passes and that this hook names, and the others."""
    _, kernels = modules()
    found = {}
    for name in kernels.__all__:
        if name != "use_fused_dsa_kernels":
            passed = inspect.signature(getattr(kernels, name)).parameters
            ours = inspect.signature(getattr(winnow.megatron, name)).parameters
            missing = [n for n, p in ours.items() if p.kind != p.VAR_KEYWORD and n not in passed]
            assert not missing, (name, missing)
            found[name] = set(passed) - set(ours)
    return found


def declines(group):
    """What each declined call logs: (level, text)."""
    _, kernels = modules()
    from megatron.core.transformer.enums import AttnMaskType

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    log = logging.getLogger("winnow.megatron")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    winnow.megatron._logged.clear()

    def zeros(*shape, **options):
        return torch.zeros(shape, **options)

    q, k, weights = zeros(4, 1, 8, 64), zeros(4, 1, 64), zeros(4, 1, 8)
    query, key, up = zeros(4, 1, 2, 576), zeros(4, 1, 1, 576), zeros(2, 16, 512)
    limits = zeros(4, dtype=torch.int32), torch.full((4,), 4, dtype=torch.int32)
    config, groups = config_of("winnow"), groups_of(group, None)
    chosen = zeros(1, 4, 2, dtype=torch.int32)
    whole = {
        "config": config, "query": query, "key": key, "value": None, "up_v_weight": up,
        "q_indexer": q, "k_indexer": k, "indexer_weights": weights, "indexer_topk": 2,
        "softmax_scale": 1.0, "loss_coeff": 0.0, "sparse_loss": True, "absorbed_mla": True,
        "calculate_per_token_loss": False, "cp_size": 1, "attn_mask_type": AttnMaskType.causal,
        "packed_seq_params": None, "varlen_starts": None, "varlen_ends": None,
        "key_positions": None, "query_valid_rows": None, "use_relu": True, "pg_collection": groups,
    }  # fmt: skip

    def choose(q=q, k=k, weights=weights, **options):
        return kernels.run_fused_qk_topk(config, q, k, weights, 2, *limits, 8192, **options)

    def choose_with_loss(q=q, k=k, query=query, key=key):
        return kernels.run_fused_qk_topk_with_loss(
            config, q, k, weights, 2, *limits, 8192, query, key, 1.0, 1.0, groups
        )

    def attend(query=query, key=key, channels=512):
        return kernels.run_fused_absorbed_sparse_attention(
            config, query, key, chosen, 1.0, channels
        )

    def attend_whole(**changed):
        return kernels.run_fused_dsa_attention(**{**whole, **changed})

    for works in (choose, choose_with_loss, attend, attend_whole):
        assert works() is not None
    assert not said
    for declined in (
        lambda: choose(q.double(), k.double()),
        lambda: choose(q.bfloat16()),
        lambda: choose(q.to("meta"), k.to("meta"), weights.to("meta")),
        lambda: choose(zeros(4, 1, 8, 96), zeros(4, 1, 96)),
        lambda: choose(zeros(4, 1, 65, 64), k, zeros(4, 1, 65), use_relu=False),
        lambda: choose_with_loss(query=query[..., :192], key=key[..., :192].expand(4, 1, 2, 192)),
        lambda: choose_with_loss(query=query.int(), key=key.int()),
        lambda: attend(channels=256),
        lambda: attend(query[..., :544], key[..., :544]),
        lambda: attend(query.half()),
        lambda: attend_whole(attn_mask_type=None),
        lambda: attend_whole(absorbed_mla=False),
        lambda: attend_whole(up_v_weight=None),
        lambda: attend_whole(config=config_of("winnow", kv_lora_rank=256)),
        lambda: attend_whole(config=config_of("winnow", kv_lora_rank=256)),
    ):
        assert declined() is None
    log.removeHandler(handler)
    return said
