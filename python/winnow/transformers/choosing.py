"""What the indexers of a model have chosen: recorded, and given to another forward pass."""

import contextlib
from typing import Iterator, Optional

from torch import nn

from winnow.transformers.choices import OPTION, Choices, Recording, Replaying
from winnow.transformers.families import DeepseekV4
from winnow.transformers.loss import all_attentions
from winnow.transformers.refusal import refuse


@contextlib.contextmanager
def _with_option(model: nn.Module, make, recording: Optional[Recording] = None) -> Iterator[None]:
    """Within, every forward pass of the model's layers has make() under OPTION, and `recording` is
    told of its cache."""
    first = next(all_attentions(model))[1]
    path = next(name for name, module in model.named_modules() if module is first)
    around = path.rpartition("layers.")[0].rstrip(".")  # the module that calls the layers

    def add(module, arguments, options):
        if OPTION in options:
            refuse("model", "one use of record() or replay() at a time", "a second one within it")
        if recording is not None:
            recording.enter(options.get("cache", options.get("past_key_values")))
        return arguments, {**options, OPTION: make()}

    def leave(module, arguments, output):
        if recording is not None:
            recording.leave(getattr(output, "cache", getattr(output, "past_key_values", None)))

    caller = model.get_submodule(around)
    hooks = [
        caller.register_forward_pre_hook(add, with_kwargs=True),
        caller.register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Choices]:
    """Records the rows that the indexers of a model on "winnow" choose, in all forward passes
    within, as those of generate():

        with record(model) as choices:
            tokens = model.generate(**prompt, max_new_tokens=100)
        choices.save("choices.safetensors")

    The choices are filled when the block ends. They are of each token that was read: generate()
    does not read the last token that it returns. The sequences are the rows of the batch in their
    order, without padding; several packed ones of a row follow each other. So they are not those of
    beam search, which moves them. If a token was read more than once, its last choice counts. On a
    GPU rows are copied to the host beside the computation.

    Raises:
        ValueError: model is not one with DeepSeek Sparse Attention, is compiled, attends densely,
            has a static cache, or chose nothing; tokens of a sequence were left out, or the rows of
            a cache were moved from one sequence to another.
    """
    recording = Recording()
    choices = Choices({}, [])
    with _with_option(model, lambda: recording, recording):
        yield choices
    vars(choices).update(vars(recording.choices()))


@contextlib.contextmanager
def replay(model: nn.Module, choices: Choices) -> Iterator[None]:
    """Has the layers of a model on "winnow" attend to the rows that were chosen before, in all
    forward passes within, for example a trainer's to those of the engine that generated:

        with replay(model, choices):
            logits = model(input_ids=tokens[:, :-1], attention_mask=mask[:, :-1]).logits
        loss_of(logits).backward()

    The sequences of the batch are those of the choices, in their order, and have as many tokens.
    Padding may be elsewhere, or sequences be packed. Gradients are the usual ones, also with
    activation checkpointing and where backward() is called behind the block. indexer_loss() and
    attention_share() are over these rows. Indexers do not run, unless they fill a cache.

    Raises:
        ValueError: model is not one with DeepSeek Sparse Attention, or attends densely; choices
            are of other layers, or name a row that its token does not see. A forward pass raises it
            where sequences are of other lengths, and where it continues a cache.
    """
    if not isinstance(choices, Choices):
        refuse("choices", "Choices", type(choices).__name__)
    strides = {}  # how many tokens a row stands for, by layer
    for family, attention in all_attentions(model):
        if family.indexer_of(attention) is not None:
            v4 = isinstance(family, DeepseekV4)
            strides[attention.layer_idx] = attention.compressor.compress_rate if v4 else 1
        if getattr(attention, "_winnow_dense", False):
            refuse("model", "one that attends to chosen rows", "one that attends densely")
    choices.check(strides)
    with _with_option(model, lambda: Replaying(choices)):
        yield
