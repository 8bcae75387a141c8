"""Padding, which is what it is under "sdpa"; masks, positions and lengths of sequences whose shapes
fit, and those that do not."""

import pytest
import torch
from dsa_models import CACHE, FAMILIES, make, no_ties, refused, tokens
from test_transformers import LOGITS, one_thread, same, usual_step  # noqa: F401
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask


@pytest.fixture(scope="module")
def model():
    return make("glm_moe_dsa", "winnow")


def ones(batch, rows):
    return torch.ones(batch, rows, dtype=torch.long)


def cached(model, kind):
    config = model.config
    return {CACHE: DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, 48)}


def padded(sides):
    """Sequences of 40 tokens with padding on these sides."""
    mask = ones(len(sides), 40)
    for row, (left, right) in enumerate(sides):
        mask[row, :left] = mask[row, 40 - right :] = 0
    return mask


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_with_the_usual_labels(family):
    """The last token of padding on the left predicts the first word, whose label counts: all
    logits, those of padding too, the loss and every gradient are those of "sdpa". A model without
    it has a sink for each head, with which they are those of "eager"."""
    model = make(family)
    other = "sdpa" if model._supports_sdpa else "eager"
    ids = tokens(4)
    for sides in (((9, 0), (0, 0), (3, 0), (17, 0)), ((0, 9), (0, 0), (4, 5), (0, 12))):
        mask = padded(sides)
        labels = ids.masked_fill(mask == 0, -100)
        model.set_attn_implementation(other)
        with no_ties():
            want = usual_step(model, ids, mask, labels)
        model.set_attn_implementation("winnow")
        same(usual_step(model, ids, mask, labels), want)


def additive(mask, dtype=torch.float32, lowest=None):
    """The additive mask of four dimensions, causal, of a mask with padding on the left."""
    seen = torch.ones(40, 40, dtype=torch.bool).tril() & mask[:, None, None].bool()
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4"])
def test_queries_that_see_nothing_of_an_additive_mask(family):
    """They read the mean of all rows as under "sdpa", or with sinks nothing as under "eager"."""
    model, ids = make(family), tokens()
    mask = padded(((9, 0), (0, 0)))
    labels = ids.masked_fill(mask == 0, -100)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    want = usual_step(model, ids, additive(mask), labels)
    model.set_attn_implementation("winnow")
    same(usual_step(model, ids, additive(mask), labels), want)


def test_queries_that_see_nothing_of_a_mask_that_does_not_say_what_they_read(model):
    ids = tokens()
    text = "attention_mask: want bool, or the smallest number of float32, for queries that see "
    for wrong, got in (
        (additive(padded(((9, 0), (0, 0))), lowest=-torch.inf), "-inf"),
        (additive(padded(((9, 0), (0, 0))), torch.bfloat16), "bfloat16"),
    ):
        refused(text + f"nothing, got {got}", model, ids, attention_mask=wrong, use_cache=False)
        model(ids, attention_mask=wrong[1:], use_cache=False)


@pytest.mark.parametrize("columns", [1, 39, 41, 48])
def test_a_mask_of_more_or_fewer_rows_than_there_are(model, columns):
    ids = tokens()
    text = rf"attention_mask: want shape \[batch, rows\] = \[2, 40\], got \[2, {columns}\]"
    for options in ({}, {"use_cache": False}, cached(model, "dynamic")):
        refused(text, model, ids, attention_mask=ones(2, columns), **options)


def test_a_mask_of_more_rows_beside_blocks(model):
    arguments = (model.config, torch.zeros(2, 10, 64), ones(2, 12), None)
    text = r"attention_mask: want shape \[batch, rows\] = \[2, 10\], got \[2, 12\]"
    blocks = torch.full((2, 10), -1)
    refused(text, create_causal_mask, *arguments, block_sequence_ids=blocks)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_step_with_a_mask_of_more_or_fewer_rows(model, kind):
    ids = tokens()
    options = cached(model, kind)
    text = r"attention_mask: want shape \[batch, rows\] = \[2, {}\]{}, got \[2, {}\]"
    room, most = (r" to \[2, 48\]", 48) if kind == "static" else ("", 30)
    for wrong in (29, most + 1):
        mask = ones(2, wrong)
        refused(text.format(30, room, wrong), model, ids[:, :30], attention_mask=mask, **options)
    model(ids[:, :30], attention_mask=ones(2, 30), **options)
    for wrong in (30, max(31, most) + 1):
        mask = ones(2, wrong)
        refused(text.format(31, room, wrong), model, ids[:, 30:31], attention_mask=mask, **options)
    model(ids[:, 30:31], attention_mask=ones(2, 31), **options)  # nothing was written before


@pytest.mark.parametrize("columns", [30, 31, 47, 48])
def test_a_mask_that_knows_more_of_a_static_cache(model, columns):
    """As under "sdpa": of rows that are empty it says nothing."""
    ids = tokens()
    mask = ones(2, columns)
    mask[0, :9] = 0

    @torch.no_grad()
    def steps():
        options = cached(model, "static")
        first = model(ids[:, :30], attention_mask=mask, **options).logits
        longer = mask if columns > 30 else torch.cat((mask, ones(2, 1)), 1)
        second = model(ids[:, 30:31], attention_mask=longer, **options).logits
        return torch.cat((first, second), 1)

    got = steps()
    model.set_attn_implementation("sdpa")
    want = steps()
    model.set_attn_implementation("winnow")
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def test_one_mask_for_all_sequences(model):
    ids = tokens()
    causal = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with torch.no_grad():
        got = model(ids, attention_mask=causal, use_cache=False).logits
        want = model(ids, attention_mask=causal.expand(2, -1, -1, -1), use_cache=False).logits
    assert torch.equal(got, want)


def test_positions_of_other_shapes(model):
    ids = tokens()
    text = r"position_ids: want shape \[batch, queries\] = \[2, 40\], got "
    for shape in ((1, 39), (2, 41), (40,)):
        positions = torch.arange(shape[-1]).expand(shape)
        given = ", ".join(map(str, shape))
        refused(text + rf"\[{given}\]", model, ids, position_ids=positions)
    positions = torch.arange(40).expand(3, 40)
    given = {"position_ids": positions, "attention_mask": ones(2, 40)}
    refused(text + r"\[3, 40\]", model, ids, **given)
    # The mask of packed sequences looks positions up before the layers see them.
    restarting = torch.arange(39)[None] % 13
    refused(text + "fewer", model, ids, position_ids=restarting, use_cache=False)


def test_lengths_of_sequences_that_do_not_fit(model):
    ids = tokens(1)
    good = torch.tensor([0, 15, 40], dtype=torch.int32)
    for wrong in ([0, 15, 41], [0, 30, 20], [1, 15, 40], [50, 60, 70], [-3, 15, 40]):
        starts = torch.tensor(wrong, dtype=torch.int32)
        text = "cu_seq_lens_{}: want numbers that ascend from 0 to at most 40"
        refused(text.format("q"), model, ids, cu_seq_lens_q=starts)
        refused(text.format("k"), model, ids, cu_seq_lens_q=good, cu_seq_lens_k=starts)
    model(ids, cu_seq_lens_q=torch.tensor([0, 15, 15, 30]))  # the rest is in no sequence
