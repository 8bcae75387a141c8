"""DeepSeek-V4 of transformers with "winnow" against the same models with "eager"; and sequences
beside padding or others against the same sequences alone."""

import pytest
import torch
from test_transformers import (  # noqa: F401
    LEFT,
    LOGITS,
    RIGHT,
    both,
    one_thread,
    padding,
    same,
    step,
)
from transformers import DynamicCache
from v4_models import PATTERNS, make, tokens

PADDING = 37  # no multiple of a ratio


@pytest.fixture(scope="module", params=PATTERNS)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def flash():
    return make("flash", "winnow")


def test_loss_logits_and_every_gradient(model):
    ids = tokens()
    got, want = both(model, lambda: step(model, ids))
    same(got, want)


def test_greedy_tokens(model):
    ids = tokens(length=250)

    def generate():
        return model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)

    got, want = both(model, generate)
    assert want.shape == (2, 262)
    assert torch.equal(got, want)


# Windows of 4 are completed by parts of 1, 2, 3 and more tokens, those of 128 at the end of a part,
# within one, and not at all.
CUTS = (0, 127, 128, 131, 132, 133, 200, 258, 300)


@torch.no_grad()
def steps(model, ids, implementations, mask=None, cuts=CUTS):
    """Logits of parts of the sequences, which take turns with the implementations."""
    cache, found = DynamicCache(config=model.config), []
    for i, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        model.set_attn_implementation(implementations[i % len(implementations)])
        given = None if mask is None else mask[:, :end]
        found.append(model(ids[:, begin:end], attention_mask=given, cache=cache).logits)
    return torch.cat(found, 1)


def test_steps_with_a_cache(model):
    """Either implementation continues what the other one has left in it."""
    ids = tokens()
    want = steps(model, ids, ["eager"])
    for implementations in (["winnow"], ["eager", "winnow"], ["winnow", "eager"]):
        got = steps(model, ids, implementations)
        torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def test_gradients_with_a_cache(flash):
    """Those of a forward pass that fills one, as transformers does unless told otherwise."""
    ids = tokens()
    want = step(flash, ids)
    flash.train().zero_grad()
    out = flash(input_ids=ids, labels=ids)
    assert out.cache.get_seq_length() == 300
    out.loss.backward()
    flash.eval()
    gradients = {name: p.grad for name, p in flash.named_parameters()}
    same((out.loss.detach(), out.logits.detach().flatten(0, 1), gradients), want)


def test_beams(flash):
    ids = tokens(length=140)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    got, want = both(flash, lambda: flash.generate(input_ids=ids, **options))
    assert torch.equal(got, want)


def results(model, call):
    """What same() compares, of a function that returns logits; every one takes part in the loss."""
    model.zero_grad()
    logits = call().flatten(0, -2)
    targets = torch.arange(len(logits)) % logits.shape[-1]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), logits.detach(), gradients


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_a_padded_sequence_is_what_it_is_alone(model, side, cached):
    """With gradients. That is not so under "eager", whose windows begin at the padding."""
    model.set_attn_implementation("winnow")
    ids = tokens()
    mask = padding(side, ids, PADDING)
    real = ids[0, PADDING:] if side == LEFT else ids[0, :-PADDING]

    def padded():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=cached).logits
        return logits[mask.bool()]

    def alone():
        rows = [model(input_ids=row[None], use_cache=False).logits[0] for row in (real, ids[1])]
        return torch.cat(rows)

    want = results(model, alone)
    same(results(model, padded), want)
    if side == LEFT and not cached:
        model.set_attn_implementation("eager")
        assert (padded() - want[1]).abs().max() > 0.1 * want[1].abs().max()


def test_steps_with_a_cache_and_padding(model):
    """One sequence begins only in the second part, one in the middle of the first."""
    ids = tokens(batch=3)
    mask = torch.ones_like(ids)
    mask[0, :129] = 0
    mask[1, :PADDING] = 0
    got = steps(model, ids, ["winnow"], mask)
    with torch.no_grad():
        for row, begin in ((0, 129), (1, PADDING), (2, 0)):
            want = model(input_ids=ids[row : row + 1, begin:], use_cache=False).logits[0]
            torch.testing.assert_close(got[row, begin:], want, rtol=0, atol=LOGITS)


def test_greedy_tokens_of_padded_sequences(model):
    model.set_attn_implementation("winnow")
    ids = tokens(length=250)
    options = {"max_new_tokens": 12, "do_sample": False}
    mask = padding(LEFT, ids, PADDING)
    got = model.generate(input_ids=ids, attention_mask=mask, **options)
    first = model.generate(input_ids=ids[:1, PADDING:], **options)
    assert torch.equal(got[:1, PADDING:], first)
    assert torch.equal(got[1:], model.generate(input_ids=ids[1:], **options))
    beams = model.generate(input_ids=ids, attention_mask=mask, num_beams=2, **options)
    want = model.generate(input_ids=ids[:1, PADDING:], num_beams=2, **options)
    assert torch.equal(beams[:1, PADDING:], want)


LENGTHS = (140, 3, 157)


@pytest.mark.parametrize("told_by", ["positions", "cu_seq_lens", "both, with a mask"])
def test_packed_sequences_are_what_they_are_alone(model, told_by):
    model.set_attn_implementation("winnow")
    ids = tokens(batch=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    options = {}
    if told_by != "cu_seq_lens":
        options["position_ids"] = positions
    if told_by != "positions":
        options.update(cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    if told_by == "both, with a mask":
        options["attention_mask"] = torch.ones_like(ids)

    def alone():
        parts = ids.split(LENGTHS, 1)
        return torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)

    want = results(model, alone)
    same(results(model, lambda: model(input_ids=ids, use_cache=False, **options).logits), want)


def test_gradient_checkpointing(flash):
    flash.set_attn_implementation("winnow")
    ids = tokens()
    mask = padding(LEFT, ids, PADDING)
    want = step(flash, ids, mask)
    flash.activation_checkpointing_enable()
    got = step(flash, ids, mask)
    flash.activation_checkpointing_disable()
    same(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    """Against "eager" in float32 where the choice of rows takes no part: every row is chosen."""
    ids = tokens()
    model = make("pro", index_topk=75)
    with torch.no_grad():
        want = model(input_ids=ids).logits
        model.to(dtype).set_attn_implementation("winnow")
        got = model(input_ids=ids).logits
    assert got.dtype == dtype
    distance = 1 - torch.cosine_similarity(got.float().flatten(), want.flatten(), 0)
    assert float(distance) < (5e-3 if dtype == torch.bfloat16 else 1e-4)


def test_autocast(flash):
    flash.set_attn_implementation("winnow")
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, gradients = step(flash, ids)
    want, _, _ = step(flash, ids)
    assert abs(float(loss - want)) < 0.1
    for name, parameter in flash.named_parameters():
        if gradients[name] is not None:
            assert gradients[name].dtype == parameter.dtype
            assert gradients[name].isfinite().all()


def test_going_back_restores_every_bit(model):
    ids = tokens()
    model.set_attn_implementation("eager")
    before = step(model, ids)
    model.set_attn_implementation("winnow")
    step(model, ids)
    model.set_attn_implementation("eager")
    after = step(model, ids)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    for name, gradient in before[2].items():
        assert gradient is None or torch.equal(after[2][name], gradient), name


def refused(text, call, *arguments, **options):
    with pytest.raises(ValueError, match="transformers: " + text) as caught:
        call(*arguments, **options)
    assert caught.value.operation == "transformers" and caught.value.argument


def test_shapes_that_no_operation_has():
    for name, value, wanted in (
        ("head_dim", 256, "512"),
        ("index_head_dim", 96, "128 or 64"),
        ("index_n_heads", 129, "1 to 128"),
        ("index_topk", 0, "1 or more"),
    ):
        refused(f"{name}: want {wanted}, got {value}", make, "flash", "winnow", **{name: value})
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 256}
    text = r"compress_rates\['heavily_compressed_attention'\]: want 1 to 128, got 256"
    refused(text, make, "flash", "winnow", compress_rates=rates)


@torch.no_grad()
def test_caches_that_have_no_windows_or_others(flash):
    flash.set_attn_implementation("winnow")
    ids = tokens(length=20)
    text = "cache: want a DynamicCache of the model's configuration"
    refused(text + ", got DynamicCache", flash, ids, cache=DynamicCache())
    cache = flash(ids).cache
    cache.crop(-2)
    text = "cache: want one that was not cropped: .* got 18 tokens, and windows of 20"
    refused(text, flash, ids[:, :1], cache=cache)
    mask = padding(LEFT, ids, 5)
    cache = flash(ids, attention_mask=mask).cache
    more = torch.cat((mask, mask[:, -1:]), 1)
    flash.set_attn_implementation("eager")
    text = 'attn_implementation: want "winnow", with which the padded cache was filled, got eager'
    refused(text, flash, ids[:, :1], attention_mask=more, cache=cache)
    cache = flash(ids, attention_mask=mask).cache
    flash.set_attn_implementation("winnow")
    text = "attention_mask: want no padding where the first tokens of the cache had none"
    refused(text, flash, ids[:, :1], attention_mask=more, cache=cache)


def test_masks_and_positions_that_are_no_sequences(flash):
    flash.set_attn_implementation("winnow")
    ids = tokens(length=20)
    causal = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    refused(r"attention_mask: want shape \[batch, rows\]", flash, ids, attention_mask=causal)
    gaps = torch.ones_like(ids)
    gaps[1, 7] = 0
    refused("attention_mask: want for every query one range", flash, ids, attention_mask=gaps)
    positions = torch.arange(20)[None] * 2
    ones = torch.ones_like(ids)
    text = "position_ids: want numbers that ascend by one within a sequence"
    refused(text, flash, ids, attention_mask=ones, position_ids=positions)
    restarting = torch.arange(20)[None] % 10
    refused("use_cache: want False for packed", flash, ids, position_ids=restarting)
    refused("output_attentions: want False", flash, ids, output_attentions=True)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    refused("cu_seq_lens_q: want a batch of 1", flash, ids, cu_seq_lens_q=starts)
