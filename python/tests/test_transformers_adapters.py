"""Adapters and hooks on the projection whose weights the attention absorbs."""

import pytest
import torch
from dsa_models import FAMILIES, gradients_of, make, near, tokens
from test_transformers import GRADIENTS, LOGITS, both, one_thread  # noqa: F401


class LowRank(torch.nn.Module):
    """An adapter beside a projection, as LoRA has it."""

    def __init__(self, base, rank=4, p=0.0):
        super().__init__()
        self.base_layer = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        self.dropout = torch.nn.Dropout(p)
        torch.nn.init.normal_(self.down.weight, std=0.1)
        torch.nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.up(self.down(self.dropout(x)))


def adapted(model, **options):
    """Puts adapters on kv_b_proj and freezes everything else."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = LowRank(module.kv_b_proj, **options)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_hooks_on_kv_b_proj(family):
    model = adapted(make(family))
    ids = tokens()
    calls = []
    for module in model.modules():
        if isinstance(module, LowRank):
            module.register_forward_hook(
                lambda module, inputs, output: calls.append(1) or 1.5 * output
            )

    def gradients():
        model.zero_grad()
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        return out.logits.detach(), gradients_of(model)

    (logits, got), (want_logits, want) = both(model, gradients)
    layers = sum(isinstance(module, LowRank) for module in model.modules())
    assert len(calls) == 2 * layers
    assert len(want) == 2 * layers
    # The hooks make the activations, and so the rounding, larger.
    torch.testing.assert_close(logits, want_logits, rtol=0, atol=2 * LOGITS)
    near(got, want, GRADIENTS)


# peft 0.21 asks transformers by a name that was replaced.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_of_peft():
    """peft's own, on every projection of the attention; merged, the model gives the same."""
    import peft

    ids = tokens()
    results = []
    for implementation in ("eager", "winnow"):
        torch.manual_seed(1)
        model = peft.get_peft_model(
            make("deepseek_v32", implementation),
            peft.LoraConfig(
                r=4,
                target_modules=["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
                init_lora_weights=False,
            ),
        )
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found = gradients_of(model)
        merged = model.merge_and_unload()(input_ids=ids, use_cache=False).logits
        results.append((out.logits.detach(), merged.detach(), found))
    (want, want_merged, gradients), (got, got_merged, found) = results
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)
    torch.testing.assert_close(got_merged, want_merged, rtol=0, atol=LOGITS)
    assert len(gradients) == 24
    near(found, gradients, GRADIENTS)
