"""Models of transformers whose sequences several ranks share, beside one rank: run by the ranks of
test_context_parallel.py."""

import copy
import functools

import dsa_models
import pytest
import torch
import torch.distributed as dist
import v4_models
from ranks import meet
from transformers import DynamicCache
from winnow.torch import context_parallel
from winnow.transformers import (
    absorbed,
    attend_densely,
    attention_share,
    choose_in_f8,
    compressed,
    enable_context_parallel,
    indexer_loss,
    layer,
)

LENGTH = 48
TOLERANCE = 2e-4  # of the largest value of a tensor, in f32
ROUNDING = 1e-7  # of terms that cancel: some gradients of one number are below 1e-4
FAMILIES = [family for family in (*dsa_models.FAMILIES, "deepseek_v4") if family != "dots3_note"]
# How the model runs, and what it gets.
VARIANTS = {
    "plain": {},
    "padding": {"padding": True},
    "packed": {"packed": True},
    "dense": {"dense": True, "packed": True},
    "f8": {"f8": True},
    "checkpointing": {"checkpointing": True},
    "pieces": {"pieces": True, "padding": True},
}


def made(family, **options):
    if family == "deepseek_v4":
        return v4_models.make("short", "winnow", **{"index_topk": 4, **options}).train()
    return dsa_models.make(family, "winnow", **options).train()


def model_of(family, dense=False, f8=False, checkpointing=False, **_):
    model = made(family)
    attend_densely(model, dense)
    choose_in_f8(model, f8)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def inputs_of(padding=False, packed=False, **_):
    ids = dsa_models.tokens(batch=2, length=LENGTH)
    given = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    given["labels"][0, 3:9] = -100
    if padding:  # on the left of one row, on the right of the other
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        mask[1, -5:] = 0
        given["attention_mask"] = mask
    if packed:  # a sequence that lies on several ranks, and one of a token
        lengths = [19, 1, LENGTH - 20]
        positions = torch.cat([torch.arange(length) for length in lengths])
        given["position_ids"] = positions[None].expand(2, LENGTH)
    return given


def choices_of(model):
    """Of the indexers, [batch, tokens, topk]: rows of the sequence, or its compressed rows."""
    found = []
    for module in model.modules():
        record = getattr(module, "_winnow_record", None)
        if isinstance(record, compressed.Record) and record.chosen is not None:
            rows = module.compressor, record.sequences, record.rows, torch.device("cpu")
            start = compressed.seen_rows(*rows)["key_start"][:, None]
            choice = torch.where(record.chosen < 0, -1, record.chosen - start)
            found.append(choice.unflatten(0, (2, -1)))
        elif isinstance(record, layer.Record) and record.indices is not None:
            found.append(record.indices)
    return found


def results(model, given, pieces=False, **_):
    """What one step gives, and gradients by name."""
    whole = absorbed.WHOLE_BYTES, absorbed.PIECE_BYTES
    if pieces:
        absorbed.WHOLE_BYTES = absorbed.PIECE_BYTES = 1
    try:
        out = model(**given)
        share = attention_share(model)
        chosen = indexer_loss(model)
        (out.loss + chosen).backward()
    finally:
        absorbed.WHOLE_BYTES, absorbed.PIECE_BYTES = whole
    named = model.named_parameters()
    gradients = {name: one.grad for name, one in named if one.grad is not None}
    losses = {"loss": out.loss.detach(), "indexer_loss": chosen.detach()}
    return out.logits.detach(), share, losses, gradients


@functools.cache
def of_one_rank(family, variant):
    options = VARIANTS[variant]
    model = model_of(family, **options)
    found = results(model, inputs_of(**options), **options)
    return *found, choices_of(model)


def near(got, want, name):
    error = (got - want).abs().max()
    limit = TOLERANCE * want.abs().max() + ROUNDING
    assert error <= limit, f"{name}: {error} of {want.abs().max()}"


def step(group, family, variant, placement, keys, by_caller, path):
    """A step of the ranks is that of one rank."""
    options = VARIANTS[variant]
    logits, share, losses, gradients, choices = torch.load(path)
    model = model_of(family, **options)
    enable_context_parallel(
        model, group, placement=placement, keys=keys, shard_inputs=not by_caller
    )
    given = inputs_of(**options)
    tokens = context_parallel(group, placement=placement).tokens(LENGTH, batch=2)
    if by_caller:
        given = {n: tokens.shard(v, 1) if n != "use_cache" else v for n, v in given.items()}
    got = results(model, given, **options)
    columns = tokens.columns()
    for one, want in zip(choices_of(model), choices, strict=True):
        assert torch.equal(one, want[:, columns]), "choices"
    assert bool(choices) != bool(options.get("dense"))
    near(got[0], logits[:, columns], "logits")
    near(got[1], share, "share")
    for mine, of_one in ((got[2], losses), (got[3], gradients)):
        assert mine.keys() == of_one.keys()
        for name, want in of_one.items():
            dist.all_reduce(mine[name], group=group)
            near(mine[name] / group.size(), want, name)


def on_gpus(rank, ranks, placement, keys, folder):
    """A process of test_context_parallel_gpu.py: a step in bfloat16 of models whose indexers choose
    all rows, beside that of one rank."""
    torch.cuda.set_device(rank)
    meet(rank, ranks, folder, "nccl")
    for family in ("deepseek_v32", "deepseek_v4"):
        found = []
        for shared in (False, True):
            model = made(family, index_topk=128).to("cuda", torch.bfloat16)
            if shared:
                enable_context_parallel(model, dist.group.WORLD, placement=placement, keys=keys)
            given = {n: v.cuda() for n, v in inputs_of(padding=True).items() if torch.is_tensor(v)}
            found.append(results(model, {**given, "use_cache": False}))
        (_, _, want, of_one), (_, _, got, gradients) = found
        assert got.keys() == want.keys() and gradients.keys() == of_one.keys()
        for name, loss in want.items():
            dist.all_reduce(got[name])
            assert abs(got[name] / ranks - loss) <= 2e-2 * abs(loss), (family, name)
        for name, gradient in of_one.items():
            dist.all_reduce(gradients[name])
            if gradient.numel() > 100:
                two = [g.float().flatten() for g in (gradients[name], gradient)]
                distance = 1 - torch.cosine_similarity(*two, 0)
                assert distance < 2e-2, f"{family}, {name}: {distance}"
    dist.destroy_process_group()


def refusals(group):
    def refused(text, function, *arguments, **options):
        with pytest.raises(ValueError) as error:
            function(*arguments, **options)
        assert str(error.value) == f"transformers: {text}"

    another = dsa_models.make("dots3_note", "winnow")
    refused("model: want one all of whose layers run on Winnow, got dots3_note_text, whose layers "
            "with a sliding window do not", enable_context_parallel, another, group)  # fmt: skip
    refused("model: want a model of transformers, got Linear", enable_context_parallel,
            torch.nn.Linear(1, 1), group)  # fmt: skip
    model = model_of("deepseek_v32")
    handle = enable_context_parallel(model, group)
    ids = dsa_models.tokens(batch=2, length=4)
    none = "with context parallelism, got"
    for name, value, wanted, got in (
        ("use_cache", True, "False", "True"),
        ("past_key_values", DynamicCache(), "None", "DynamicCache"),
        ("pixel_values", ids, "None", "Tensor"),
        ("logits_to_keep", 1, "0", "1"),
        ("output_router_logits", True, "False", "True"),
        ("attention_mask", torch.ones(2, 1, 4, 4), "shape [batch, rows]", "[2, 1, 4, 4]"),
    ):
        text = f"{name}: want {wanted} {none} {got}"
        refused(text, model, input_ids=ids, **{name: value})
    refused("input_ids: want a tensor, or inputs_embeds, got NoneType", model)
    refused("position_ids: want shape [batch, 4], got [2, 3]", model, input_ids=ids,
            position_ids=ids[:, :3])  # fmt: skip
    handle.remove()
    assert model(ids).logits.shape[:2] == ids.shape
    handle = enable_context_parallel(model, group, shard_inputs=False)
    refused("attention_mask: want shape [batch, 4], got [2, 3]", model, input_ids=ids,
            attention_mask=torch.ones(2, 3))  # fmt: skip
    refused("labels: want shape [batch, 4], got [2, 2]", model, input_ids=ids, labels=ids[:, :2])


def refusals_of_one(group):
    """What one rank's model refuses is an error on all of them, behind which they go on."""
    rank = dist.get_rank(group)
    model = model_of("deepseek_v32")

    def refused(text, function, *arguments, **options):
        with pytest.raises(ValueError) as error:
            function(*arguments, **options)
        begin = "transformers: " if rank else "context_parallel: "
        assert str(error.value).startswith(begin) and text in str(error.value)

    given = torch.nn.Linear(1, 1) if rank else model
    text = "model: want a model of transformers, got Linear"
    refused(text, enable_context_parallel, given, group)
    enable_context_parallel(model, group)
    model = copy.deepcopy(model)  # which is of the same ranks
    ids = dsa_models.tokens(batch=2, length=4 * dist.get_world_size(group))
    want = model(ids).logits
    # The last one is refused by the layers, of which the first is where the other ranks wait.
    refused_options = {"use_cache": True}, {"position_ids": ids[:, :3]}, {"output_attentions": True}
    for options in refused_options:
        refused(next(iter(options)), model, input_ids=ids, **(options if rank else {}))
        assert torch.equal(model(ids).logits, want)
    # A rank whose indexers are frozen has nothing to learn from; of one, another number of layers.
    indexers = [part.indexer for part in model.modules() if getattr(part, "indexer", None)]
    for frozen, text in ((indexers, "model: want one whose last"), (indexers[:1], "layers: want")):
        for indexer in frozen:
            indexer.requires_grad_(not rank)
        model(ids)
        for call in (indexer_loss, attention_share):
            with pytest.raises(ValueError, match=text):
                call(model)
        for indexer in frozen:
            indexer.requires_grad_(True)
    model(ids)
    (indexer_loss(model) + attention_share(model)).backward()
