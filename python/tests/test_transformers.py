"""Models of transformers with "winnow" against the same models with "eager"."""

import hashlib
import importlib
import inspect

import pytest
import torch
import winnow.transformers
from dsa_models import CACHE, FAMILIES, gradients_of, make, near, no_ties, tokens
from transformers import DynamicCache, StaticCache
from winnow.transformers import absorbed
from winnow.transformers.registry import VERSIONS, version

import winnow

# Of logits (absolute; they are of order 1), and of gradients relative to the largest of a tensor.
LOGITS, GRADIENTS = 5e-5, 2e-4
LEFT, RIGHT, NONE = "left", "right", "none"


def padding(side, ids, count=9):
    mask = torch.ones_like(ids)
    if side == LEFT:
        mask[0, :count] = 0
    elif side == RIGHT:
        mask[0, -count:] = 0
    return mask


def labels_of(ids, mask):
    """No label follows a token of padding."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100
    return labels


def step(model, ids, mask=None, **options):
    """Loss, logits and all gradients of a training step."""
    real = torch.ones_like(ids) if mask is None else mask
    loss, logits, gradients = usual_step(model, ids, mask, labels_of(ids, real), **options)
    return loss, logits[real.bool()], gradients


def usual_step(model, ids, mask, labels, **options):
    """The same, with the logits of padding and its labels, too."""
    model.zero_grad()
    model.train()
    out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **options)
    out.loss.backward()
    model.eval()
    return out.loss.detach(), out.logits.detach(), gradients_of(model)


def same(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=LOGITS)
    assert len(want[2]) > 20
    near(got[2], want[2], GRADIENTS, 1e-3)


def both(model, run):
    """What `run` gives with "eager" and with "winnow"."""
    model.set_attn_implementation("eager")
    with no_ties():
        want = run()
    model.set_attn_implementation("winnow")
    return run(), want


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Problems this small are slower on several."""
    threads = torch.get_num_threads(), winnow.num_threads()
    torch.set_num_threads(1)
    winnow.set_num_threads(1)
    yield
    torch.set_num_threads(threads[0])
    winnow.set_num_threads(threads[1])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make(request.param)


@pytest.mark.parametrize("side", [LEFT, RIGHT, NONE])
def test_loss_logits_and_every_gradient(model, side):
    ids = tokens()
    mask = None if side == NONE else padding(side, ids)
    got, want = both(model, lambda: step(model, ids, mask))
    same(got, want)


def test_greedy_tokens(model):
    ids = tokens()

    def generate():
        options = {"max_new_tokens": 8, "do_sample": False}
        return model.generate(input_ids=ids, attention_mask=padding(LEFT, ids), **options)

    got, want = both(model, generate)
    assert want.shape == (2, 48)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_steps_with_a_cache(model, kind):
    """30 tokens, then 9 more and 1 more, with padding on the left."""
    ids = tokens()
    mask = padding(LEFT, ids)
    config = model.config.get_text_config()

    @torch.no_grad()
    def steps():
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, 48)
        results = []
        for begin, end in ((0, 30), (30, 39), (39, 40)):
            out = model(
                input_ids=ids[:, begin:end], attention_mask=mask[:, :end], **{CACHE: cache},
                position_ids=torch.arange(begin, end)[None],
            )  # fmt: skip
            results.append(out.logits[mask[:, begin:end].bool()])
        return torch.cat(results)

    got, want = both(model, steps)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def test_generation_with_a_static_cache_and_beams(model):
    ids = tokens()
    for options in ({"cache_implementation": "static"}, {"num_beams": 3}):
        got, want = both(
            model,
            lambda options=options: model.generate(
                input_ids=ids, attention_mask=padding(LEFT, ids), max_new_tokens=4,
                do_sample=False, disable_compile=True, **options,
            ),
        )  # fmt: skip
        assert torch.equal(got, want)


LENGTHS = (17, 3, 20)


def _packed(model):
    ids = tokens(batch=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if model.config.model_type == "hy_v4_vl":  # of the text, then of pictures on three axes
        positions = positions.expand(4, 1, -1)
    return ids, positions


def test_packed_sequences_by_their_positions(model):
    ids, positions = _packed(model)
    got, want = both(model, lambda: step(model, ids, position_ids=positions))
    same(got, want)


def test_packed_sequences_by_cu_seq_lens(model):
    """They count where the positions do not say it: here a mask is given, for which transformers
    does not look at the positions, neither for layers with a sliding window."""
    ids, positions = _packed(model)
    model.set_attn_implementation("eager")
    want = step(model, ids, position_ids=positions)
    model.set_attn_implementation("winnow")
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    ones = None if model.config.model_type == "dots3_note_text" else torch.ones_like(ids)
    same(step(model, ids, ones, position_ids=positions, **options), want)
    # Each sequence alone is what the packed one is, too.
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **options).logits
        alone = model(input_ids=ids[:, 20:], use_cache=False).logits
    torch.testing.assert_close(logits[:, 20:], alone, rtol=0, atol=LOGITS)


def test_a_mask_that_the_caller_made(model):
    ids = tokens()
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)[None, None].repeat(2, 1, 1, 1)
    hidden[0, :, :, :9] = True
    additive = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    given = additive
    if model.config.model_type == "dots3_note_text":  # one for each kind of layers
        sliding = hidden | ~torch.ones(40, 40, dtype=torch.bool).triu(-5)
        sliding = torch.zeros(hidden.shape).masked_fill(sliding, torch.finfo(torch.float32).min)
        given = {"indexed_attention": additive, "sliding_attention": sliding}

    @torch.no_grad()
    def logits():
        out = model(input_ids=ids, attention_mask=given, use_cache=False).logits
        return out[padding(LEFT, ids).bool()]

    got, want = both(model, logits)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def check_checkpointing(model, ids, mask):
    model.set_attn_implementation("winnow")
    want = step(model, ids, mask)
    model.activation_checkpointing_enable()
    got = step(model, ids, mask)
    model.activation_checkpointing_disable()
    same(got, want)


def test_gradient_checkpointing(model):
    ids = tokens()
    check_checkpointing(model, ids, padding(LEFT, ids))


def test_queries_in_pieces(model, monkeypatch):
    """Pieces are of 64 queries or more: 80 tokens of two sequences make three."""
    ids = tokens(length=80)
    mask = padding(LEFT, ids)
    model.set_attn_implementation("winnow")
    want = step(model, ids, mask)
    monkeypatch.setattr(absorbed, "WHOLE_BYTES", 0)
    monkeypatch.setattr(absorbed, "PIECE_BYTES", 0)
    formed = []
    original = absorbed.absorbed_queries

    def watched(q_pass, *others):
        formed.append(q_pass.shape[0])
        return original(q_pass, *others)

    monkeypatch.setattr(absorbed, "absorbed_queries", watched)
    got = step(model, ids, mask)
    assert set(formed) == {64, 32}
    same(got, want)


def check_other_dtypes(model, ids, dtype):
    """Against "eager" in float32 where the choice of rows takes no part: every row is chosen."""
    with torch.no_grad():
        want = model(input_ids=ids).logits
        model.to(dtype).set_attn_implementation("winnow")
        got = model(input_ids=ids).logits
    assert got.dtype == dtype
    distance = 1 - torch.cosine_similarity(got.float().flatten(), want.flatten(), 0)
    assert float(distance) < (5e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(family, dtype):
    check_other_dtypes(make(family, index_topk=64), tokens(), dtype)


def check_autocast(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, gradients = step(model, ids)
    want, _, _ = step(model, ids)
    assert abs(float(loss - want)) < 0.1
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        assert gradient.dtype == parameters[name].dtype and gradient.isfinite().all()


def test_autocast(model):
    model.set_attn_implementation("winnow")
    check_autocast(model, tokens())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_choice_in_f8(family):
    """Nearly the rows that are chosen without it, with a cache as well."""
    model = make(family, "winnow")
    chosen = []
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.register_forward_hook(lambda module, inputs, output: chosen.append(output))
    ids = tokens()
    options = {"attention_mask": padding(LEFT, ids), "max_new_tokens": 3, "do_sample": False}
    results = []
    for f8 in (False, True):
        winnow.transformers.choose_in_f8(model, f8)
        chosen.clear()
        model.generate(input_ids=ids, **options)
        results.append(list(chosen))
    plain, quantized = (
        torch.zeros(2, 40, 40, dtype=torch.bool).scatter_(
            -1, found[0].clamp(min=0).long(), found[0] >= 0
        )
        for found in results
    )
    assert len(results[0]) == len(results[1]) > 3
    assert 0.8 < float((plain & quantized).sum() / plain.sum()) < 1


TWO_LAYERS = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}


def test_compiled_for_another_batch_before_there_is_a_mask():
    """The batch is a symbol then, and the mask's a number."""
    torch._dynamo.reset()
    model, ids = make("glm_moe_dsa", "winnow", **TWO_LAYERS), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(input_ids=ids[:1, :12], use_cache=False)
    length = ids.shape[1]
    whole = torch.ones(1, 1, length, length).tril().bool()
    own = {"attention_mask": whole, "position_ids": torch.arange(length)[None]}
    for more in ({"attention_mask": padding(LEFT, ids)}, own):
        given = {"input_ids": ids, "use_cache": False, **more}
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits)


def test_compiled():
    """In one graph, with gradients; what a mask must be is seen to when it runs."""
    torch._dynamo.reset()
    model = make("glm_moe_dsa", "winnow", **TWO_LAYERS)
    ids = tokens()
    mask = padding(LEFT, ids)
    want = step(model, ids, mask)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    out = compiled(input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False)
    out.loss.backward()
    same((out.loss.detach(), out.logits.detach()[mask.bool()], gradients_of(model)), want)
    mask[1, 7] = 0
    with pytest.raises(RuntimeError, match="attention_mask: want for every query one range"):
        compiled(input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False)


def check_going_back(model, ids, mask, others):
    for other in others:
        model.set_attn_implementation(other)
        before = step(model, ids, mask)
        model.set_attn_implementation("winnow")
        step(model, ids, mask)
        model.set_attn_implementation(other)
        after = step(model, ids, mask)
        assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1]), other
        near(after[2], before[2], 0)


def test_going_back_restores_every_bit(model):
    ids = tokens()
    others = ("eager", "sdpa") if model._supports_sdpa else ("eager",)
    check_going_back(model, ids, padding(LEFT, ids), others)


# sha256 of the classes in transformers that "winnow" stands in for, with what they compute; for
# each version.
ORIGINALS = {
    "5.23": {
        "DeepseekV32Attention": "b6baa01641fb5e3a",
        "DeepseekV32Indexer": "d9ab3cddb0751e8a",
        "GlmMoeDsaAttention": "7b9a0cbbc88fc81b",
        "GlmMoeDsaIndexer": "a7cc356e219a5fc2",
        "HYV4Attention": "4d1ed289d919fb4b",
        "HYV4Indexer": "420046c0f907e660",
        "Dots3NoteTextAttention": "547434e8c7e925db",
        "Dots3NoteTextIndexer": "40acc382d9bf187f",
        "MistralLarge4TextAttention": "fd3d9ddaaf8067f8",
        "MistralLarge4TextIndexer": "ad0db7d9e43ac597",
    },
    "5.24": {
        "DeepseekV32Attention": "e23ebb00c5c9df92",
        "DeepseekV32Indexer": "de03001a752dc281",
        "GlmMoeDsaAttention": "fab579bb2f873d72",
        "GlmMoeDsaIndexer": "d7312bad3ce855bb",
        "HYV4Attention": "22d49863640df011",
        "HYV4Indexer": "9aac134e84ee6644",
        "HYV4VLAttention": "8f401679e75c68ab",
        "HYV4VLIndexer": "9e9ab4f33c069021",
        "Dots3NoteTextAttention": "febda14a126d7f96",
        "Dots3NoteTextIndexer": "e12e82a96e6301be",
        "MistralLarge4TextAttention": "a62a27e486a5850a",
        "MistralLarge4TextIndexer": "6d4f1c7021fe6032",
        "DeepseekV4Attention": "8e9accbd58681721",
        "DeepseekV4CSACompressor": "4ba9004cdcc683da",
        "DeepseekV4HCACompressor": "30cb0cf1552e9dcc",
        "DeepseekV4Indexer": "0689f4ec79696fdf",
    },
}


@pytest.mark.parametrize("name", VERSIONS[version()])
def test_the_original_is_what_is_compared_with(name):
    """The forward passes that run under "eager" are those of transformers, as released."""
    family = VERSIONS[version()][name]
    module = importlib.import_module(family.module)
    for kind in (getattr(module, replaced) for replaced in family.replaced):
        original = inspect.unwrap(kind.forward)
        assert kind.__module__ == original.__module__ == family.module
        assert original.__qualname__ == f"{kind.__name__}.forward"
        with open(module.__file__) as file:
            assert inspect.getsource(original) in file.read()
        digest = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()
        assert digest[:16] == ORIGINALS[version()][kind.__name__]


def test_what_is_supported():
    assert list(VERSIONS) == list(ORIGINALS) == ["5.23", "5.24"]
    assert winnow.transformers.FAMILIES == tuple(VERSIONS[version()])
    assert set(VERSIONS["5.24"]) - set(VERSIONS["5.23"]) == {"hy_v4_vl_text", "deepseek_v4"}
