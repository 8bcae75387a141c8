"""The indexers' loss where a process has its parameters only within forward passes: FSDP, tensor
parallelism beside it, offloading. Losses and gradients are those of one process."""

import contextlib
import functools

import pytest
import torch
import v4_models
from dsa_models import make, tokens
from ranks import meet, spawn
from winnow.transformers import (
    attend_densely,
    attention_share,
    enable_context_parallel,
    indexer_loss,
)

FAMILY = "hy_v4"  # its sinks are parameters of the attention itself
TOLERANCE = 2e-4  # of the largest value of a tensor, in f32
FLOOR = 1e-7  # what rounding leaves of a sum over all tokens whose terms cancel


def batches(count):
    return [tokens(batch=2, length=20, seed=1 + rank) for rank in range(count)]


def losses_of(model, ids):
    language = model(input_ids=ids, labels=ids, use_cache=False).loss
    share = attention_share(model)
    return {"language": language, "indexers": indexer_loss(model), "share": share}


def detached(losses):
    return {name: value.detach() for name, value in losses.items()}


def gradients_of(model):
    """By the names of one process. FSDP1 has them whole only within summon_full_params()."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            if hasattr(gradient, "full_tensor"):
                if gradient.device_mesh.ndim > 1 and "self_attn" not in name:
                    continue  # DTensor does not gather what tensor parallelism has packed
                gradient = gradient.full_tensor()
            found[name] = gradient.clone()
    return found


def check(found, expected):
    for name in found.keys() | expected.keys():
        # FSDP1 gives zeros to what its flat parameters have beside.
        want = expected.get(name, torch.zeros(()))
        error = (found.get(name, torch.zeros(())) - want).abs().max()
        assert error <= TOLERANCE * want.abs().max() + FLOOR, f"{name}: {error}"


def prepared(dense, trained="", checkpointing=False):
    """A model in training mode; the parameters whose names have `trained` in them are trained."""
    model = make(FAMILY, "winnow").train()
    attend_densely(model, dense)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@functools.cache
def alone(dense, count):
    """(the losses of each batch, the mean of the gradients) of one process."""
    model = prepared(dense)
    losses = []
    for ids in batches(count):
        losses.append(losses_of(model, ids))
        together(losses[-1], 1 / count)
    return [detached(one) for one in losses], gradients_of(model)


def together(losses, factor=1):
    (factor * (losses["language"] + losses["indexers"])).backward()


def in_order(*names):
    """One backward pass after the other."""

    def backward(losses):
        for name in names:
            losses[name].backward()

    return backward


# ---- the ways to shard


def fully_shard(model, modules=(), **options):
    from torch.distributed.fsdp import fully_shard

    for module in (*modules, model):
        fully_shard(module, **options)
    return model


def by_layers(model, **options):
    return fully_shard(model, model.model.layers, **options)


def by_small_parts(model):
    """Of each attention layer, the indexer and the projection that is absorbed are units."""
    attentions = [layer.self_attn for layer in model.model.layers]
    parts = [part for one in attentions for part in (one.indexer, one.kv_b_proj, one)]
    return fully_shard(model, [part for part in parts if part is not None])


def fsdp1(model, parts=False, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layer = model.model.layers[0]
    kinds = {type(layer.self_attn), type(layer.self_attn.indexer)} if parts else {type(layer)}
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(kinds), **options)


def ddp(model, **options):
    return torch.nn.parallel.DistributedDataParallel(model, **options)


KINDS = {
    "fsdp2": by_layers,
    "fsdp2-kept": lambda model: by_layers(model, reshard_after_forward=False),
    "fsdp2-whole": lambda model: fully_shard(model, reshard_after_forward=True),
    "fsdp2-parts": by_small_parts,
    "fsdp1": fsdp1,
    "fsdp1-parts": lambda model: fsdp1(model, parts=True),
    "ddp": ddp,
}


@contextlib.contextmanager
def without_sync(model):
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def step(model, ids, expected, backward, only=""):
    """One step is that of one process; with `only`, of gradients that have it in their names."""
    losses, gradients = expected
    found = losses_of(model, ids)
    backward(found)
    check(detached(found), losses)
    check(gradients_of(model), {name: g for name, g in gradients.items() if only in name})


def kind_of_sharding(kind, ids, expected, dense):
    """What is checked of one kind of sharding: all of it for the first of each library."""

    def made(**options):
        return KINDS[kind](prepared(dense, **options))

    step(made(), ids, expected, together)
    if dense:
        return
    if kind in ("fsdp2", "fsdp1", "ddp"):
        # Gradients of two steps add up, of which the first reduces nothing.
        model = made()
        with without_sync(model):
            together(losses_of(model, ids))
        together(losses_of(model, ids))
        check(gradients_of(model), {name: 2 * gradient for name, gradient in expected[1].items()})
        step(made(checkpointing=True), ids, expected, together)
    if kind != "fsdp1-parts":
        step(made(trained="indexer"), ids, expected, in_order("indexers"), only="indexer")
    if kind in ("fsdp2", "fsdp2-kept", "ddp"):  # FSDP1 takes one backward pass for all before
        step(made(), ids, expected, in_order("language", "indexers"))
        step(made(), ids, expected, in_order("indexers", "language"))


def refusals(ids):
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    def refused(text, model, called=None):
        (called or model)(input_ids=ids, use_cache=False)
        attention_share(model if called is None else called)
        with pytest.raises(ValueError, match=f"transformers: model: want {text}"):
            indexer_loss(model)

    def model(**options):
        return prepared(False, **options)

    inner = model()
    refused("the outermost FullyShardedDataParallel, got HYV4", inner, called=fsdp1(inner))
    whole = fsdp1(model(), sharding_strategy=ShardingStrategy.NO_SHARD)
    refused("DistributedDataParallel, or", whole)
    half = fsdp1(model(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    refused("torch.autocast, fully_shard, or", half)
    refused("find_unused_parameters=False", ddp(model(), find_unused_parameters=True))
    refused("static_graph=False", ddp(model(), static_graph=True))
    parts = by_small_parts(model(checkpointing=True))
    refused("no sharding of modules inside of one that is checkpointed", parts)


def rank_of_two(rank, folder):
    meet(rank, 2, folder)
    ids = batches(2)[rank]
    for dense in (False, True):
        losses, gradients = torch.load(folder / f"expected-{dense}")
        for kind in ("fsdp2", "fsdp1") if dense else KINDS:
            try:
                kind_of_sharding(kind, ids, (losses[rank], gradients), dense)
            except Exception as error:
                raise AssertionError(f"{kind}, {dense=}") from error
    refusals(ids)
    shared_sequences(folder, torch.distributed.init_device_mesh("cpu", (2,)))
    torch.distributed.destroy_process_group()


def shared_sequences(folder, mesh, prepare=lambda model: model, only=""):
    """The ranks of FSDP share sequences: losses and gradients are the mean of theirs."""
    losses, gradients = torch.load(folder / "expected-one")
    for keys in ("gathered", "sharded"):
        model = prepare(prepared(False))
        enable_context_parallel(model, mesh, keys=keys)
        found = losses_of(fully_shard(model, model.model.layers, mesh=mesh), batches(1)[0])
        together(found)
        found = detached(found)
        for value in found.values():
            torch.distributed.all_reduce(value, group=mesh.get_group())
        check({name: value / mesh.size() for name, value in found.items()}, losses[0])
        of_both = (gradients_of(model), gradients)
        check(*({name: g for name, g in one.items() if only in name} for one in of_both))


def rank_of_four(rank, folder):
    """Two groups with a batch each; in a group, two processes with half of the heads each."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    meet(rank, 4, folder)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for dense, parts in ((False, True), (True, False)):
        losses, gradients = torch.load(folder / f"expected-{dense}")
        model = prepared(dense)
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=2, fsdp_size=2))
        apply_tensor_parallelism(model, mesh["tp"], plan)
        projections = [layer.self_attn.kv_b_proj for layer in model.model.layers if parts]
        fully_shard(model, (*projections, *model.model.layers), mesh=mesh["fsdp"])
        found = losses_of(model, batches(2)[rank // 2])
        together(found)
        check(detached(found), losses[rank // 2])
        # DTensor does not gather the packed weights of some feed-forward layers.
        of_attention = [
            {name: g for name, g in one.items() if "self_attn" in name}
            for one in (gradients_of(model), gradients)
        ]
        check(*of_attention)

    def divided(model):
        apply_tensor_parallelism(model, mesh["tp"], plan)
        return model

    shared_sequences(folder, mesh["fsdp"], divided, only="self_attn")
    torch.distributed.destroy_process_group()


def of_both_worlds(rank, folder):
    """A process, which takes seconds to start, is a rank of one world after the other."""
    if rank < 2:
        rank_of_two(rank, folder)
    rank_of_four(rank, folder)


def test_processes_train_as_one_does(tmp_path):
    for dense in (False, True):
        torch.save(alone(dense, 2), tmp_path / f"expected-{dense}")
    torch.save(alone(False, 1), tmp_path / "expected-one")
    spawn(of_both_worlds, (tmp_path,), 4)


# ---- offloading


def by_hooks(module, bring, take):
    """In the hooks of torch, around forward passes and before backward passes."""

    def after(module, arguments, output):
        take()
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: bring())

    module.register_forward_pre_hook(lambda *_: bring())
    module.register_forward_hook(after)


def in_the_place_of_forward(module, bring, take):
    """As accelerate does it, which does not bring parameters back in the backward pass."""
    module._old_forward = module.forward

    def forward(*arguments, **options):
        bring()
        try:
            return module._old_forward(*arguments, **options)
        finally:
            take()

    module.forward = forward


def take_away(modules, offload):
    """The parameters of each module are there while its forward pass runs."""
    for module in modules:
        kept = [(parameter, parameter.data) for parameter in module.parameters()]

        def bring(kept=kept):
            for parameter, data in kept:
                parameter.data = data

        def take(kept=kept):
            for parameter, data in kept:
                parameter.data = data.new_empty(0)

        take()
        offload(module, bring, take)


@pytest.mark.parametrize(
    "part, offload",
    [
        ("layer", by_hooks),
        ("attention", by_hooks),
        ("indexer", by_hooks),
        ("model", by_hooks),
        ("layer", in_the_place_of_forward),
        ("indexer", in_the_place_of_forward),
    ],
)
def test_parameters_that_are_away_between_forward_passes(part, offload):
    expected = alone(False, 1)
    model = prepared(False)
    modules = {
        "layer": list(model.model.layers),
        "attention": [layer.self_attn for layer in model.model.layers],
        "indexer": [layer.self_attn.indexer for layer in model.model.layers],
        "model": [model],
    }[part]
    take_away(filter(None, modules), offload)
    ids = batches(1)[0]
    if offload is by_hooks:
        step(model, ids, (expected[0][0], expected[1]), together)
    else:
        check(detached(losses_of(model, ids)), expected[0][0])


@pytest.mark.parametrize("offload", [by_hooks, in_the_place_of_forward])
def test_each_module_of_deepseek_v4_may_bring_its_own_parameters(offload):
    ids, found = v4_models.tokens(length=64), []
    for away in (False, True):
        model = v4_models.make("short", "winnow").train()
        if away:
            modules = [part for part in model.model.layers.modules() if not list(part.children())]
            take_away(modules, offload)
        losses = losses_of(model, ids)
        if offload is by_hooks:
            together(losses)
        found.append({**detached(losses), **gradients_of(model)})
    check(found[1], found[0])
