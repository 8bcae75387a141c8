"""Attention layers in bfloat16, on the CPU and on a GPU: each alone, with the inputs that it has in
a model on "eager"; and whole models on a GPU."""

import pytest
import torch
import v4_models
from dsa_models import FAMILIES, make, tokens
from kinds import DEVICES, gpu
from test_transformers import LEFT, one_thread, padding  # noqa: F401
from winnow.transformers import absorbed, attend_densely, attention_share, indexer_loss

# Of outputs and gradients in bfloat16: cosine distance, and relative to the largest.
COSINE, LARGEST = 1e-3, 4e-2


def close(got, want, what=""):
    assert got.dtype == want.dtype
    got, want = got.double().flatten(), want.double().flatten()
    assert 1 - torch.cosine_similarity(got, want, 0) < COSINE, what
    assert (got - want).abs().max() <= LARGEST * want.abs().max(), what


class Inputs:
    """What each attention layer and each indexer was called with, and what it gave."""

    def __init__(self, model):
        self.layers, self.chosen = [], {}
        for module in model.modules():
            if hasattr(module, "kv_b_proj") and not self._slides(module):
                module.register_forward_hook(self._layer, with_kwargs=True)
                if module.indexer is not None:
                    module.indexer.register_forward_hook(self._indexer)

    @staticmethod
    def _slides(module):
        return getattr(module, "sliding_window", None) is not None

    def _layer(self, module, arguments, options, output):
        self.layers.append((module, options, output[0]))

    def _indexer(self, indexer, arguments, output):
        self.chosen[indexer.layer_idx] = output


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_in_bfloat16(family, device):
    model = make(family, dtype=torch.bfloat16).to(device)
    ids = tokens().to(device)
    mask = padding(LEFT, ids)
    seen = Inputs(model)
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    layers, chosen = list(seen.layers), dict(seen.chosen)
    model.set_attn_implementation("winnow")
    real = mask.bool()
    assert len(layers) >= 2
    ours = same = None
    for module, options, want in layers:
        options = {**options, "hidden_states": options["hidden_states"].detach()}
        if module.indexer is None:  # what was chosen for the layer before
            options["prev_topk_indices"] = ours
        seen.chosen.clear()
        got = module(**options)[0]
        if module.indexer is not None:
            ours, theirs = seen.chosen[module.layer_idx], chosen[module.layer_idx]
            same = real.clone()
            for b in range(len(ids)):
                for i in range(ids.shape[1]):
                    visible = {r for r in theirs[b, i].tolist() if r <= i and mask[b, r]}
                    same[b, i] &= visible == set(ours[b, i].tolist()) - {-1}
            # All but queries whose last row ties with another, nearly.
            assert same[real].float().mean() > 0.97
        close(got[same], want[same], f"layer {module.layer_idx}")


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_in_bfloat16(device, monkeypatch):
    """Of a model whose queries choose all rows, whole and in pieces."""
    ids = tokens(length=80).to(device)
    model = make("hy_v4", index_topk=128).to(device)
    model.train()

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}

    want = gradients()
    model.to(torch.bfloat16).set_attn_implementation("winnow")
    for whole in (1 << 40, 0):
        monkeypatch.setattr(absorbed, "WHOLE_BYTES", whole)
        monkeypatch.setattr(absorbed, "PIECE_BYTES", 0)
        got = gradients()
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            if "self_attn" in name and gradient.numel() > 100:
                distance = 1 - torch.cosine_similarity(got[name].flatten(), gradient.flatten(), 0)
                assert distance < 2e-2, name


@pytest.mark.parametrize("family", [pytest.param(f, marks=gpu) for f in FAMILIES])
def test_models_on_a_gpu(family):
    """Generation with both caches, training, both stages of the indexers, in bfloat16."""
    model = make(family, "winnow", dtype=torch.bfloat16).cuda()
    ids = tokens().cuda()
    mask = padding(LEFT, ids)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    dynamic = model.generate(input_ids=ids, **options)
    static = model.generate(
        input_ids=ids, cache_implementation="static", disable_compile=True, **options
    )
    assert torch.equal(dynamic[:, :41], static[:, :41])  # later ones may tie, nearly
    model.train()
    for dense in (True, False):
        attend_densely(model, dense)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        (loss + indexer_loss(model)).backward()
        assert 0 < attention_share(model) <= 1.01
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_takes_bfloat16_alone(dtype):
    model = make("deepseek_v32", "winnow", dtype=dtype).cuda()
    with pytest.raises(ValueError, match="transformers: dtype: want bfloat16 on cuda, got"):
        model(tokens().cuda())
    with torch.autocast("cuda", torch.bfloat16):
        assert model(tokens().cuda()).logits.isfinite().all()


@pytest.mark.parametrize("pattern", [pytest.param(p, marks=gpu) for p in v4_models.PATTERNS])
def test_deepseek_v4_on_a_gpu(pattern):
    """Training and generation in bfloat16, beside the same model on the CPU: what the indexers
    choose may differ in a few places."""
    model = v4_models.make(pattern, "winnow").to(torch.bfloat16)
    ids = v4_models.tokens()
    mask = padding(LEFT, ids)
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        given, where = ids.to(device), mask.to(device)
        output = model(input_ids=given, attention_mask=where, labels=given, use_cache=False)
        output.loss.backward()
        # As one: those of the few numbers that mix hyper-connections are sums that nearly cancel.
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found = output.loss, output.logits[where.bool()], torch.cat(gradients)
        results.append([t.detach().double().flatten().cpu() for t in found])
    for got, want in zip(results[1], results[0], strict=True):
        assert 1 - torch.cosine_similarity(got, want, 0) < 5e-2
    model.train()
    loss = model(input_ids=given, attention_mask=where, labels=given, use_cache=False).loss
    (loss + indexer_loss(model)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    made = model.eval().generate(
        input_ids=given, attention_mask=where, max_new_tokens=8, do_sample=False
    )
    assert made.shape == (2, 308)
