"""winnow.transformers.indexer_loss: both stages, against its formula with the original modules."""

import copy
import inspect
import io

import pytest
import torch
from dsa_models import (
    CACHE,
    FAMILIES,
    TOPK,
    divergence,
    gradients_of,
    make,
    near,
    refused,
    set_topk,
    tokens,
)
from test_transformers import LEFT, RIGHT, TWO_LAYERS, one_thread, padding  # noqa: F401
from winnow.transformers import absorbed, attend_densely, attention_share, indexer_loss

# Of the loss (relative), and of gradients relative to the largest of a tensor.
LOSS, GRADIENTS = 1e-4, 5e-4


class Watch:
    """The attention weights and the indexers' scores of one forward pass on "eager", by layer."""

    def __init__(self, model):
        self.weights, self.scores = {}, {}
        self.handles = []
        for module in model.modules():
            if hasattr(module, "kv_b_proj") and getattr(module, "indexer", None) is not None:
                self.handles.append(module.register_forward_hook(self._attention))
                self.handles.append(
                    module.indexer.register_forward_pre_hook(self._indexer, with_kwargs=True)
                )

    def _attention(self, module, inputs, output):
        self.weights[module.layer_idx] = output[1]

    def _indexer(self, indexer, arguments, options):
        """The scores of the original module, with gradients in its weights: its forward pass
        without no_grad, up to the point where it chooses."""

        class Found(Exception):
            pass

        def topk(scores, *_, **__):
            raise Found(scores)

        def detached(value):
            if isinstance(value, tuple):
                return tuple(detached(part) for part in value)
            return value.detach() if isinstance(value, torch.Tensor) else value

        arguments = [detached(value) for value in arguments]
        options = {name: detached(value) for name, value in options.items()}
        original = inspect.unwrap(type(indexer).forward)
        with torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", topk)
            with pytest.raises(Found) as found:
                original(indexer, *arguments, **options)
        self.scores[indexer.layer_idx] = found.value.args[0]

    def stop(self):
        for handle in self.handles:
            handle.remove()


def formula(model, ids, mask, dense):
    """The mean of KL(weights summed over heads || softmax of scores) over real queries and layers;
    and the share of the attention that the chosen rows have. From "eager", where the model attends
    densely if it chooses all rows."""
    watch = Watch(model)
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    watch.stop()
    losses = []
    for layer, weights in watch.weights.items():
        scores = watch.scores[layer]
        target = weights.detach().double().sum(1)
        visible = scores > torch.finfo(torch.float32).min / 2
        if not dense:
            chosen = torch.zeros_like(visible)
            chosen.scatter_(-1, scores.detach().topk(TOPK, -1).indices, True)
            visible = visible & chosen
        losses.append(divergence(*(t[mask.bool()] for t in (scores.double(), target, visible))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("dense", [False, True], ids=["chosen", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_the_original_modules(family, dense, side):
    # With these tokens no product of a query and a key is so near zero that its rounding decides
    # whether a gradient passes the ReLU.
    ids = tokens(seed=5)
    mask = padding(side, ids)
    model = make(family, index_topk=len(ids[0]) if dense else TOPK)
    want = formula(model, ids, mask, dense)
    want.backward()
    want_gradients = gradients_of(model)
    assert want_gradients and all("indexer" in name for name in want_gradients)

    model.zero_grad()
    set_topk(model, TOPK)  # what it would choose takes no part in dense attention
    model.set_attn_implementation("winnow")
    attend_densely(model, dense)
    model.train()
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    got = indexer_loss(model)
    torch.testing.assert_close(got.double(), want.detach(), rtol=LOSS, atol=1e-6)
    got.backward()
    near(gradients_of(model), want_gradients, GRADIENTS)


@pytest.fixture(scope="module")
def model():
    return make("glm_moe_dsa", "winnow").train()


def test_dense_attention_is_that_of_all_rows(model):
    """With gradients: as a model that chooses all rows."""
    ids = tokens()
    mask = padding(LEFT, ids)
    results = []
    for attends, topk in ((True, TOPK), (False, 40)):
        attend_densely(model, attends)
        set_topk(model, topk)
        model.zero_grad()
        labels = ids.masked_fill(mask == 0, -100)
        out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        out.loss.backward()
        results.append((out.logits.detach()[mask.bool()], gradients_of(model)))
    set_topk(model, TOPK)
    (got, gradients), (want, want_gradients) = results
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert len(gradients) > 20
    near(gradients, want_gradients, 1e-4)


def test_the_loss_beside_that_of_the_language_model(model):
    """Both in one backward pass, and with activation checkpointing: each has its own gradients."""
    ids = tokens()

    def gradients(*parts):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        losses = {"language": loss, "indexer": indexer_loss(model)}
        sum(losses[part] for part in parts).backward()
        return gradients_of(model)

    language, indexer = gradients("language"), gradients("indexer")
    assert not language.keys() & indexer.keys()
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        near(gradients("language", "indexer"), language | indexer, 1e-5)
    model.activation_checkpointing_disable()


def check_learning(model, ids, dense_steps):
    """The indexers of a frozen model, in both stages: the loss falls, and the chosen rows have more
    of the attention."""
    model.requires_grad_(False)
    trained = [p for name, p in model.named_parameters() if "indexer" in name]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses, shares = {}, {}
    for dense in (True, False):
        attend_densely(model, dense)
        for _ in range(dense_steps if dense else 8):
            model(input_ids=ids, use_cache=False)
            loss = indexer_loss(model)
            losses.setdefault(dense, []).append(loss.item())
            shares.setdefault(dense, []).append(attention_share(model).item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[True][-1] < 0.8 * losses[True][0]
    assert losses[False][-1] < losses[False][0]
    assert shares[True][-1] > shares[True][0]
    assert shares[False][-1] > shares[True][0]
    assert all(0 < share < 1 for found in shares.values() for share in found)


def test_a_frozen_model_learns_where_to_look():
    check_learning(make("glm_moe_dsa", "winnow").train(), tokens(), 25)


@pytest.mark.parametrize("dense", [False, True], ids=["chosen", "dense"])
def test_the_loss_in_pieces(model, dense, monkeypatch):
    ids = tokens(length=80)

    def loss_and_gradients():
        model.zero_grad()
        model(input_ids=ids, use_cache=False)
        loss = indexer_loss(model)
        loss.backward()
        return loss.item(), attention_share(model).item(), gradients_of(model)

    attend_densely(model, dense)
    want = loss_and_gradients()
    monkeypatch.setattr(absorbed, "WHOLE_BYTES", 0)
    monkeypatch.setattr(absorbed, "PIECE_BYTES", 0)
    got = loss_and_gradients()
    attend_densely(model, False)
    assert got[:2] == pytest.approx(want[:2], rel=1e-5)
    near(got[2], want[2], 1e-5)


def test_layers_that_are_frozen_later_leave_the_loss():
    """What they kept of an earlier forward pass goes with the next one."""
    first, second = tokens(1, 12), tokens(1, 12).flip(1)

    def loss_of_second(before):
        model = make("deepseek_v32", "winnow").train()
        if before is not None:
            model(input_ids=before, use_cache=False)
        model.model.layers[0].self_attn.indexer.requires_grad_(False)
        model(input_ids=second, use_cache=False)
        return indexer_loss(model)

    assert torch.equal(loss_of_second(first), loss_of_second(None))


@pytest.mark.parametrize("way", ["compiled", "sdpa"])
def test_a_pass_that_keeps_nothing_forgets_the_one_before(way):
    model = make("glm_moe_dsa", "winnow", **TWO_LAYERS).train()
    first, second = tokens(1, 12), tokens(1, 12).flip(1)
    model(input_ids=first, use_cache=False)
    indexer_loss(model)
    called = model
    if way == "compiled":
        called = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.set_attn_implementation(way)
    called(input_ids=second, use_cache=False)
    with pytest.raises(ValueError, match="transformers: model: want one whose last forward"):
        indexer_loss(model)


def check_loss_under_autocast(model, ids):
    """It is under autocast as the forward pass was, wherever it is called."""
    found = []
    for within in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, use_cache=False)
            loss = indexer_loss(model) if within else None
        loss = indexer_loss(model) if loss is None else loss
        loss.backward()
        found.append((loss.detach(), gradients_of(model)))
    (inside, gradients), (outside, others) = found
    assert torch.equal(inside, outside)
    assert gradients.keys() == others.keys()
    trained = [name for name, _ in model.named_parameters() if ".indexer." in name]
    assert trained and set(trained) <= gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def test_the_loss_under_autocast():
    check_loss_under_autocast(make("glm_moe_dsa", "winnow").train(), tokens(1, 12))


def size_of(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.tell()


def check_copies(model, ids):
    """Of a model in training: they hold nothing of its last forward pass, and train as it does."""
    before = size_of(model)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert size_of(model) < before + 1024  # names of attributes; a record has 3 KB and more
    copied = copy.deepcopy(model)
    want = indexer_loss(model)
    with pytest.raises(ValueError, match="transformers: model: want one whose last forward"):
        indexer_loss(copied)
    again = copied(input_ids=ids, labels=ids, use_cache=False).loss
    assert torch.equal(again, loss)
    assert torch.equal(indexer_loss(copied), want)


def test_copies_hold_nothing_of_the_last_forward_pass():
    check_copies(make("glm_moe_dsa", "winnow").train(), tokens(1, 12))


def test_nothing_is_kept_where_nothing_is_to_be_learned():
    ids = tokens(1, 12)
    for prepare in (
        lambda model: model.eval(),
        lambda model: model.train().requires_grad_(False),
        lambda model: model.train().set_attn_implementation("eager"),
    ):
        model = make("deepseek_v32", "winnow")
        prepare(model)
        model(input_ids=ids, use_cache=False)
        refused("model: want one whose last forward", indexer_loss, model)
    refused("model: want one with DeepSeek", attend_densely, torch.nn.Linear(2, 2))


def test_rows_in_a_cache_are_refused(model):
    ids = tokens(1, 12)
    out = model(input_ids=ids[:, :8])
    indexer_loss(model)
    model(input_ids=ids[:, 8:], **{CACHE: out[CACHE]})
    refused("past_key_values: want a forward pass whose 4 queries", indexer_loss, model)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["a layer", "the head"])
def test_a_forward_pass_that_raises_leaves_nothing(family, where):
    """Neither beside what the pass before has left nor for a pass that keeps nothing itself."""
    model = make(family, "winnow").train()
    layers = [m for m in model.modules() if getattr(m, "indexer", None) is not None]
    part = layers[-1] if where == "a layer" else model.get_output_embeddings()
    first, second = tokens(1, 12), tokens(1, 12, seed=3)

    def stop(*_):
        raise Stopped

    model(input_ids=first, use_cache=False)
    assert indexer_loss(model) > 0
    handle = part.register_forward_pre_hook(stop)
    with pytest.raises(Stopped):
        model(input_ids=second, use_cache=False)
    handle.remove()
    for _ in range(2):
        with pytest.raises(ValueError, match="transformers: model: want one whose last forward"):
            indexer_loss(model)
        model.eval()(input_ids=second, use_cache=False)
    model.train()(input_ids=second, use_cache=False)
    got = indexer_loss(model)
    model(input_ids=second, use_cache=False)
    assert torch.equal(got, indexer_loss(model))
