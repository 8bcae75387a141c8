"""winnow.transformers.record() and replay(): forward passes over rows that others chose."""

import copy

import pytest
import torch
import v4_models
import winnow.transformers as dsa
from dsa_models import CACHE, FAMILIES, TOPK, gradients_of, make, refused, tokens
from test_transformers import LEFT, LOGITS, one_thread, padding, same, step  # noqa: F401
from transformers import StaticCache

V4 = ["v4-flash", "v4-short"]
NEW = 5  # tokens that are generated


def model_of(name):
    return v4_models.make(name[3:], "winnow") if name in V4 else make(name, "winnow")


def text_of(name, length=40):
    return v4_models.tokens(length=length) if name in V4 else tokens(length=length)


def with_other_indexers(model):
    """The same model, which chooses other rows."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".indexer." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return other


@pytest.fixture(scope="module", params=[*FAMILIES, *V4])
def pair(request):
    """A model, one that chooses other rows, and texts for them."""
    model = model_of(request.param)
    return model, with_other_indexers(model), text_of(request.param)


def generated(model, ids, mask):
    """Generated tokens but the last, their mask, and the rows that they chose."""
    with dsa.record(model) as choices:
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False
        )
    mask = torch.nn.functional.pad(mask, (0, NEW), value=1)
    return out[:, :-1], mask[:, :-1], choices


def steps_of(model, other, ids, mask, choices):
    """A training step of the model over given choices, and one of the model that made them."""
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}  # as generate() has them
    with dsa.replay(model, choices):
        got = step(model, ids, mask, **positions)
    want = step(other, ids, mask, **positions)
    for of in (got, want):  # what indexers learn comes from no language loss
        assert not any(".indexer." in name for name in of[2])
    return got, want


def test_what_another_model_chose_in_generate(pair):
    """Padding on the left in the engine, none, then on the right in the trainer."""
    model, other, ids = pair
    ids, mask, choices = generated(other, ids, padding(LEFT, ids))
    assert choices.lengths == [ids.shape[1] - 9, ids.shape[1]]
    assert all(rows.dtype == torch.int16 for rows in choices.rows.values())
    plain = step(model, ids, mask)
    got, want = steps_of(model, other, ids, mask, choices)
    assert not torch.allclose(plain[1], want[1], atol=100 * LOGITS), "all choose the same rows"
    same(got, want)
    moved = torch.stack((ids[0].roll(-9), ids[1])), torch.stack((mask[0].roll(-9), mask[1]))
    same(*steps_of(model, other, *moved, choices))


def test_a_trainer_without_a_cache_and_a_minibatch(pair, tmp_path):
    """From a file: the first tokens of the second sequence, and as much of the first behind it."""
    model, other, ids = pair
    ids, mask, choices = generated(other, ids, torch.ones_like(ids))
    choices.save(tmp_path / "choices.safetensors")
    part = dsa.Choices.load(tmp_path / "choices.safetensors").select([1, 0], [30, 30])
    turned = ids[[1, 0], :30]
    with dsa.replay(model, part), torch.no_grad():
        got = model(input_ids=turned).logits  # fills a cache
    want = other(input_ids=turned, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def test_recorded_in_pieces_as_at_once(pair):
    model, _, ids = pair
    with dsa.record(model) as pieces, torch.no_grad():
        cache = None
        for part in ids.split(13, 1):
            out = model(input_ids=part, **({} if cache is None else {CACHE: cache}))
            cache = out[CACHE]
    with dsa.record(model) as whole, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert pieces.lengths == whole.lengths == [40, 40]
    assert pieces.rows.keys() == whole.rows.keys()
    for layer, rows in whole.rows.items():
        assert torch.equal(pieces.rows[layer], rows)
        assert rows.shape[1] <= TOPK


def test_packed_sequences(pair):
    """Generated beside each other, trained behind each other."""
    model, other, ids = pair
    ids, mask, choices = generated(other, ids, padding(LEFT, ids))
    packed = ids[mask.bool()][None]
    positions = torch.cat([torch.arange(n) for n in choices.lengths])[None]
    if model.config.model_type == "hy_v4_vl":  # those of the text, and three of pictures
        positions = positions.expand(4, 1, -1)
    options = {"position_ids": positions, "use_cache": False}
    with dsa.replay(model, choices), torch.no_grad():
        got = model(input_ids=packed, **options).logits[0]
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        want = other(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits[mask.bool()]
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def test_a_backward_pass_behind_the_block_with_checkpointing(pair):
    model, other, ids = pair
    with dsa.record(other) as choices, torch.no_grad():
        other(input_ids=ids)
    want = step(other, ids)
    model.activation_checkpointing_enable()
    try:
        model.zero_grad()
        model.train()
        with dsa.replay(model, choices):
            out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
    finally:
        model.eval()
        model.activation_checkpointing_disable()
    same((out.loss.detach(), out.logits.detach().flatten(0, 1), gradients_of(model)),
         (want[0], want[1].view(-1, want[1].shape[-1]), want[2]))  # fmt: skip


def test_the_indexers_loss_is_over_the_rows_given():
    """A loss that the model cannot have of its own choice: rows that hardly get any attention."""
    model = make("glm_moe_dsa", "winnow")
    ids = tokens()
    other = with_other_indexers(model)
    with dsa.record(other) as choices, torch.no_grad():
        other(input_ids=ids)
    model.train()
    with dsa.replay(model, choices):
        model(input_ids=ids, use_cache=False)
    for layer, rows in choices.rows.items():
        kept = model.model.layers[layer].self_attn._winnow_record.indices
        assert torch.equal(kept.flatten(0, 1), rows.int())
    loss = dsa.indexer_loss(model)
    loss.backward()
    learned = [n for n, p in model.named_parameters() if p.grad is not None]
    assert learned and all(".indexer." in name for name in learned)
    with dsa.replay(model, choices):
        share = dsa.attention_share(model)
    assert 0 < share < 1


def test_long_sequences_have_rows_of_32_bits():
    length = (1 << 15) + 1
    rows = torch.full((length, 1), length - 1)
    choices = dsa.Choices({0: rows}, [length])
    assert choices.rows[0].dtype == torch.int32
    assert dsa.Choices({0: rows[:-1] - 1}, [length - 1]).rows[0].dtype == torch.int16
    assert repr(choices) == f"Choices(1 sequences, {length} tokens, 1 layers, {4 * length} bytes)"


@pytest.fixture(scope="module")
def glm():
    return make("glm_moe_dsa", "winnow")


def within(block, call=lambda: None, *arguments, **options):
    with block:
        call(*arguments, **options)


def some(**options):
    """Of the layers of `glm`, for one sequence of three tokens."""
    given = {"lengths": [3], "rows": {n: torch.tensor([[0, -1], [0, 1], [0, 2]]) for n in (0, 2)}}
    return {**given, **options}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lengths": [3.0]}, "lengths: want a whole number for each sequence"),
        ({"lengths": [True, 2]}, "lengths: want a whole number for each sequence"),
        ({"lengths": torch.tensor(3)}, "lengths: want a whole number for each sequence"),
        ({"lengths": [4, -1]}, "lengths: want numbers of tokens, 0 or more, got -1"),
        ({"lengths": [2]}, "rows[0]: want shape [tokens, topk] with 2 tokens, the sum of lengths,"),
        ({"rows": {0: torch.zeros(3, 1)}}, "rows[0]: want int16, int32 or int64, got float32"),
        ({"rows": {1: [[0], [1]]}}, "rows[1]: want a tensor on the CPU, got list"),
        ({"rows": {"1": torch.zeros(3, 1).int()}}, "rows: want the numbers of layers as keys, got"),
        ({"rows": {1: torch.tensor([[0], [3], [0]])}}, "rows[1]: want rows below 3,"),
        ({"rows": {1: torch.tensor([[0], [-2], [0]])}}, "rows[1]: want rows below 3,"),
    ],
)
def test_choices_that_are_refused(options, text):
    with pytest.raises(ValueError) as error:
        dsa.Choices(**some(**options))
    assert f"transformers: {text}" in str(error.value)


def test_a_mask_of_sequences_is_not_taken_for_their_numbers():
    choices = dsa.Choices({0: torch.zeros(6, 1).int()}, torch.tensor([2, 2, 2]))
    mask = torch.tensor([True, False, True])
    for wrong in (mask, mask.tolist(), list(mask), mask.numpy(), mask.float(), torch.tensor(1)):
        refused("sequences: want the numbers of sequences", choices.select, wrong)
    for given in (mask.nonzero()[:, 0], mask.nonzero()[:, 0].numpy(), (0, 2)):
        assert choices.select(given, torch.tensor([1, 2])).lengths == [1, 2]
    refused("lengths: want a whole number for each sequence", choices.select, [0, 1, 2], mask)


def test_a_file_that_holds_something_else(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    refused("path: want a file of safetensors", dsa.Choices.load, tmp_path / "text")


@pytest.mark.parametrize("name", ["glm_moe_dsa", "v4-flash"])
def test_sequences_that_change_places_while_choices_are_recorded(name):
    """What a token chose stands in another row of the batch then."""
    model, ids = model_of(name), text_of(name)
    text = "model: want sequences that keep their row of the batch"
    beams = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False}
    refused(text, within, dsa.record(model), model.generate, input_ids=ids, **beams)
    with torch.no_grad(), dsa.record(model):
        cache = model(input_ids=ids[:, :20])[CACHE]
        cache.reorder_cache(torch.tensor([0, 1]))
        model(input_ids=ids[:, 20:30], **{CACHE: cache})
        cache.reorder_cache(torch.tensor([1, 0]))
        refused(text, model, input_ids=ids[:, 30:], **{CACHE: cache})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rows": {0: torch.zeros(3, 1).int()}}, "want rows of the layers [0, 2], which have"),
        (
            {"rows": {n: torch.tensor([[0], [0], [1], [1]]) for n in (0, 2)}, "lengths": [2, 2]},
            "want rows below 1, which it sees, for token 0 of sequence 1 in layer 0, got 1",
        ),
        (
            {"rows": {n: torch.tensor([[0, -1, -1], [1, 0, -1], [1, 0, 1]]) for n in (0, 2)}},
            "want each row once for token 2 of sequence 0 in layer 0, got 1 twice or more",
        ),
        (
            {"rows": {n: torch.tensor([[0, -1, 0], [0, 1, -1], [0, 1, 2]]) for n in (0, 2)}},
            "want each row once for token 0 of sequence 0 in layer 0, got 0 twice or more",
        ),
    ],
)
def test_choices_that_do_not_fit_a_model(glm, options, text):
    with pytest.raises(ValueError, match="transformers: ") as error:
        with dsa.replay(glm, dsa.Choices(**some(**options))):
            pass
    assert text in str(error.value)


def test_forward_passes_that_choices_do_not_fit(glm):
    ids = tokens(length=12)
    choices = dsa.Choices(**some())
    with dsa.replay(glm, choices):
        refused(r"choices: want those of sequences of \[12, 12\] to", glm, input_ids=ids)
        refused(".*one use of record.. or replay.. at a time", within, dsa.record(glm), glm, ids)
    with dsa.record(glm) as recorded, torch.no_grad():
        cache = glm(input_ids=ids)[CACHE]
    with dsa.replay(glm, recorded):
        text = "past_key_values: want a forward pass over whole"
        refused(text, glm, input_ids=ids[:, :1], **{CACHE: cache})
        glm(input_ids=ids)
    refused("choices: want Choices, got dict", within, dsa.replay(glm, {}))
    for number, lengths, text in ((2, None, "sequences: want"), (0, [13], "lengths: want at most")):
        refused(text, recorded.select, [number], lengths)


def test_models_whose_choices_cannot_be_recorded(glm):
    ids = tokens(length=12)
    refused("model: want one that has run", within, dsa.record(glm))
    other = dsa.record(torch.nn.Linear(1, 1))
    refused("model: want one with DeepSeek Sparse Attention", within, other)
    with dsa.record(glm) as choices:
        cache = glm(input_ids=ids)[CACHE]
    text = "model: want forward passes over all tokens"
    refused(text, within, dsa.record(glm), glm, ids[:, :1], **{CACHE: cache})
    text, cache = "cache: want one that grows with the tokens", StaticCache(glm.config, 20)
    refused(text, within, dsa.record(glm), glm, ids, **{CACHE: cache})
    dsa.attend_densely(glm)
    try:
        text = "model: want one that attends to chosen rows"
        refused(text, within, dsa.record(glm), glm, ids)
        refused(text, within, dsa.replay(glm, choices))
    finally:
        dsa.attend_densely(glm, False)
