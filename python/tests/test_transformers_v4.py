"""DeepSeek-V4 of transformers with "winnow" against the same models with "eager"; and sequences
beside padding or others against the same sequences alone."""

import pytest
import torch
import winnow.transformers as dsa
from dsa_models import TOPK, divergence, gradients_of, near, refused, set_topk
from test_transformers import (  # noqa: F401
    GRADIENTS,
    LEFT,
    LOGITS,
    RIGHT,
    both,
    check_autocast,
    check_checkpointing,
    check_going_back,
    check_other_dtypes,
    one_thread,
    padding,
    same,
    step,
)
from test_transformers_loss import (
    check_copies,
    check_learning,
    check_loss_under_autocast,
)
from transformers import DynamicCache
from v4_models import PATTERNS, make, tokens

PADDING = 37  # no multiple of a ratio


@pytest.fixture(scope="module", params=PATTERNS)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module", params=["pro", "short"])
def ours(request):
    return make(request.param, "winnow")


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
        return model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)

    got, want = both(model, generate)
    assert want.shape == (2, 258)
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


@torch.no_grad()
def test_positions_that_do_not_begin_at_0():
    """Only their differences count, also those of compressed rows."""
    model, ids = make("short", "winnow"), tokens(length=100)
    want = model(ids, use_cache=False).logits
    for cuts, cached in (((0, 100), False), ((0, 100), True), ((0, 40, 41, 100), True)):
        cache, found = DynamicCache(config=model.config) if cached else None, []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            positions = torch.arange(begin, end)[None] + 64
            options = {"position_ids": positions, "cache": cache, "use_cache": cached}
            found.append(model(ids[:, begin:end], **options).logits)
        torch.testing.assert_close(torch.cat(found, 1), want, rtol=0, atol=LOGITS)


def test_gradients_with_a_cache(flash):
    """Those of a forward pass that fills one, as transformers does unless told otherwise."""
    ids = tokens()
    want = step(flash, ids)
    flash.train().zero_grad()
    out = flash(input_ids=ids, labels=ids)
    assert out.cache.get_seq_length() == 300
    rows = out.cache.layers[2].compressed_kv  # which keep alive what they were made of
    assert rows["compressor"].requires_grad and not rows["indexer"].requires_grad
    out.loss.backward()
    flash.eval()
    same((out.loss.detach(), out.logits.detach().flatten(0, 1), gradients_of(flash)), want)


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
    return loss.detach(), logits.detach(), gradients_of(model)


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_a_padded_sequence_is_what_it_is_alone(ours, side):
    """With gradients. That is not so under "eager", whose windows begin at the padding."""
    ours.set_attn_implementation("winnow")
    ids = tokens()
    mask = padding(side, ids, PADDING)
    real = ids[0, PADDING:] if side == LEFT else ids[0, :-PADDING]

    def padded(cached):
        logits = ours(input_ids=ids, attention_mask=mask, use_cache=cached).logits
        return logits[mask.bool()]

    def alone():
        rows = [ours(input_ids=row[None], use_cache=False).logits[0] for row in (real, ids[1])]
        return torch.cat(rows)

    want = results(ours, alone)
    for cached in (False, True):
        same(results(ours, lambda cached=cached: padded(cached)), want)
    if side == LEFT:
        ours.set_attn_implementation("eager")
        assert (padded(False) - want[1]).abs().max() > 0.1 * want[1].abs().max()


def test_steps_with_a_cache_and_padding(ours):
    """One sequence begins only in the second part, one in the middle of the first."""
    ids = tokens(batch=3)
    mask = torch.ones_like(ids)
    mask[0, :129] = 0
    mask[1, :PADDING] = 0
    got = steps(ours, ids, ["winnow"], mask)
    with torch.no_grad():
        for row, begin in ((0, 129), (1, PADDING), (2, 0)):
            want = ours(input_ids=ids[row : row + 1, begin:], use_cache=False).logits[0]
            torch.testing.assert_close(got[row, begin:], want, rtol=0, atol=LOGITS)


def test_greedy_tokens_of_padded_sequences(ours):
    ours.set_attn_implementation("winnow")
    ids = tokens(length=250)
    options = {"max_new_tokens": 8, "do_sample": False}
    mask = padding(LEFT, ids, PADDING)
    got = ours.generate(input_ids=ids, attention_mask=mask, **options)
    first = ours.generate(input_ids=ids[:1, PADDING:], **options)
    assert torch.equal(got[:1, PADDING:], first)
    assert torch.equal(got[1:], ours.generate(input_ids=ids[1:], **options))
    beams = ours.generate(input_ids=ids, attention_mask=mask, num_beams=2, **options)
    want = ours.generate(input_ids=ids[:1, PADDING:], num_beams=2, **options)
    assert torch.equal(beams[:1, PADDING:], want)


LENGTHS = (140, 3, 157)


def test_packed_sequences_are_what_they_are_alone(ours):
    """Told by positions, by cu_seq_lens, and by both, with a mask."""
    ours.set_attn_implementation("winnow")
    ids = tokens(batch=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    by_positions = {"position_ids": positions}
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    by_starts = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}

    def alone():
        parts = ids.split(LENGTHS, 1)
        return torch.cat([ours(input_ids=part, use_cache=False).logits for part in parts], 1)

    want = results(ours, alone)
    by_both = {**by_positions, **by_starts, "attention_mask": torch.ones_like(ids)}
    for told in (by_positions, by_starts, by_both):
        given = {"input_ids": ids, "use_cache": False, **told}
        same(results(ours, lambda given=given: ours(**given).logits), want)


def test_gradient_checkpointing(flash):
    ids = tokens()
    check_checkpointing(flash, ids, padding(LEFT, ids, PADDING))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    check_other_dtypes(make("pro", index_topk=75), tokens(), dtype)


def test_autocast():
    check_autocast(make("short", "winnow"), tokens())


def test_going_back_restores_every_bit(flash):
    check_going_back(flash, tokens(), None, ["eager"])


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
    three = torch.cat((ids, ids[:1]))
    text = r"cache: want windows of {} sequences, .* got windows of 2"
    for length in (20, 19):  # the end of a window, where torch has no error of its own, and within
        cache = flash(ids[:, :length]).cache
        cache.batch_repeat_interleave(2)
        refused(text.format(4), flash, ids.repeat(2, 1)[:, -1:], cache=cache)
        cache = flash(ids[:, :length]).cache
        cache.batch_select_indices(torch.tensor([1]))
        refused(text.format(1), flash, ids[1:, -1:], cache=cache)
    cache = flash(ids).cache
    cache.reorder_cache(torch.tensor([0, 1, 0]))
    flash(three[:, -1:], cache=cache)
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
    one = torch.arange(20)[None]
    for positions in (one * 2, one.flip(1), torch.where(one > 2, one + 1, one), one % 10 + 4):
        text = "position_ids: want numbers that ascend by one within a sequence, the next one from"
        refused(text, flash, ids, position_ids=positions, use_cache=False)
    refused("position_ids: want 0 or more, got -1", flash, ids, position_ids=one - 1)
    refused("position_ids: want whole numbers, got float32", flash, ids, position_ids=one.float())
    restarting = torch.arange(20)[None] % 10
    refused("use_cache: want False for packed", flash, ids, position_ids=restarting)
    refused("output_attentions: want False", flash, ids, output_attentions=True)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    refused("cu_seq_lens_q: want a batch of 1", flash, ids, cu_seq_lens_q=starts)


def of_formula(model, ids, dense):
    """The mean, over tokens that see compressed rows and over layers, of KL(what falls on these of
    the attention weights || softmax of scores); from "eager", where the window and the sink have
    their part of the weights. Attends densely if it chooses all rows."""
    found, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith("self_attn") and hasattr(module.compressor, "indexer"):
            parts = {"attention": module, "scores": module.compressor.indexer.scorer}
            for part, of in parts.items():
                keep = lambda m, _, out, key=(name, part): found.update({key: out})  # noqa: E731
                handles.append(of.register_forward_hook(keep))
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    losses = []
    for layer in sorted({name for name, _ in found}):
        scores = found[layer, "scores"].double()
        rows = scores.shape[-1]
        ratio = ids.shape[1] // rows
        target = found[layer, "attention"][1][..., -rows:].detach().double().sum(1)
        visible = torch.arange(rows) < (torch.arange(ids.shape[1])[:, None] + 1) // ratio
        scores = scores.masked_fill(~visible, -torch.inf)
        if not dense:
            chosen = torch.zeros_like(scores, dtype=torch.bool)
            visible = visible & chosen.scatter_(-1, scores.topk(TOPK, -1).indices, True)
        sees = visible.any(-1)
        visible = visible.expand_as(scores)[sees.expand(scores.shape[:2])]
        scores, target = (t[sees.expand(scores.shape[:2])] for t in (scores, target))
        losses.append(divergence(scores, target, visible))
    return torch.stack(losses).mean()


def loss_of(model, ids, mask=None):
    model.train().zero_grad()
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    loss = dsa.indexer_loss(model)
    loss.backward()
    model.eval()
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize("dense", [False, True], ids=["chosen", "dense"])
@pytest.mark.parametrize("pattern", ["flash", "short"])
def test_the_loss_of_indexers_is_that_of_the_original_modules(pattern, dense):
    # With these tokens no product of a query and a key is so near zero that its rounding decides
    # whether a gradient passes the ReLU.
    model, ids = make(pattern), tokens(length=200, seed=19)
    set_topk(model, 100 if dense else TOPK)
    want = of_formula(model, ids, dense)
    want.backward()
    gradients = {n: g for n, g in gradients_of(model).items() if "indexer" in n}
    set_topk(model, TOPK)
    model.set_attn_implementation("winnow")
    dsa.attend_densely(model, dense)
    got = loss_of(model, ids)
    torch.testing.assert_close(got[0].double(), want.detach(), rtol=1e-4, atol=1e-6)
    assert len(gradients) > 5
    near(got[1], gradients, 5e-4)


def test_the_loss_of_indexers_of_padded_sequences(flash):
    """The mean over the tokens of all sequences that see compressed rows."""
    flash.set_attn_implementation("winnow")
    ids = tokens()
    mask = padding(LEFT, ids, PADDING)
    got, gradients = loss_of(flash, ids, mask)
    parts = [loss_of(flash, row[None]) for row in (ids[0, PADDING:], ids[1])]
    shares = [300 - PADDING - 3, 300 - 3]
    shares = [share / sum(shares) for share in shares]
    want = sum(share * loss for share, (loss, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    both = list(zip(shares, parts, strict=True))
    want = {name: sum(share * part[name] for share, (_, part) in both) for name in gradients}
    near(gradients, want, GRADIENTS)


def test_dense_attention_is_that_of_all_rows(flash):
    flash.set_attn_implementation("winnow")
    ids = tokens()
    found = []
    for dense, topk in ((True, TOPK), (False, 100)):
        dsa.attend_densely(flash, dense)
        set_topk(flash, topk)
        with torch.no_grad():
            alone = flash(input_ids=ids, use_cache=False).logits
            found.append((alone, steps(flash, ids, ["winnow"], cuts=(0, 131, 250, 251, 300))))
    set_topk(flash, TOPK)
    for logits in (found[0][1], *found[1]):
        torch.testing.assert_close(logits, found[0][0], rtol=0, atol=LOGITS)


def test_the_loss_of_indexers_under_autocast():
    check_loss_under_autocast(make("short", "winnow").train(), tokens(1, 40))


def test_copies_hold_nothing_of_the_last_forward_pass():
    check_copies(make("short", "winnow").train(), tokens(1, 40))


@pytest.mark.filterwarnings("ignore")  # torch's compiler has its own
@pytest.mark.parametrize("compiled", ["model", "layers", "step"])
def test_the_loss_of_indexers_where_torch_compiles(compiled):
    ids = tokens(1, 40)
    model = make("short", "winnow", compress_ratios=[4, 128]).train()

    def step():
        model(input_ids=ids, use_cache=False)
        return dsa.indexer_loss(model)

    want = step()
    if compiled == "model":
        model = torch.compile(model, backend="eager")
    elif compiled == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    else:
        step = torch.compile(step, backend="eager")
    assert torch.equal(step(), want)


def test_indexers_learn_where_the_attention_looks():
    model = make("short", "winnow", compress_ratios=[4], initializer_range=0.2).train()
    check_learning(model, tokens(length=120), 20)


def test_the_share_is_that_of_the_choice_of_all_compressed_rows(flash):
    """Whether the model attends densely or not, up to what that changes in the layers behind."""
    flash.set_attn_implementation("winnow")
    ids = tokens(length=16)  # 4 rows: all are chosen
    flash.train()
    for dense in (False, True):
        dsa.attend_densely(flash, dense)
        flash(input_ids=ids, use_cache=False)
        assert dsa.attention_share(flash).item() == pytest.approx(1, abs=1e-6)
    dsa.attend_densely(flash, False)
    flash(input_ids=ids[:, :3], use_cache=False)  # no row
    assert dsa.attention_share(flash).item() == dsa.indexer_loss(flash).item() == 0
    cache = flash(input_ids=ids).cache
    flash(input_ids=ids[:, :2], cache=cache)
    flash.eval()
    refused("past_key_values: want a forward pass whose 2 queries", dsa.indexer_loss, flash)


def test_a_choice_in_f8():
    """Nearly the rows that are chosen without it, with a cache as well."""
    model, ids, chosen, found = make("flash", "winnow"), tokens(), [], []
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.register_forward_hook(lambda module, inputs, output: chosen.append(output))
    for f8 in (False, True):
        dsa.choose_in_f8(model, f8)
        chosen.clear()
        with torch.no_grad():
            cache = model(ids[:, :299]).cache
            model(ids[:, 299:], cache=cache)
        marks = torch.cat((chosen[0], chosen[2].view(2, -1)))
        found.append(torch.zeros(600, 151, dtype=torch.bool))
        found[-1].scatter_(-1, torch.where(marks < 0, 150, marks).long(), True)
    plain, quantized = (marks[:, :150] for marks in found)
    assert 0.8 < float((plain & quantized).sum() / plain.sum()) < 1
